"""Endpoints of upstream and of OpenAI are either here, or refused with a sentence that names them."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import httpx
import pytest
from fastapi.routing import APIRoute

from sglang.srt.entrypoints.http_routes import make_app
from sglang.srt.entrypoints.missing_endpoints import MISSING_ENDPOINTS, missing_endpoint
from sglang.srt.server_args import ServerArgs


def _names(text: str) -> list[str]:
    return text.split()


# Endpoints of upstream 0.5.21 and 0.5.23 and of OpenAI, but for those that this engine has or is to have.
ELSEWHERE = _names("""
    /ready /set_internal_state /encode /classify /add_external_corpus /remove_external_corpus
    /list_external_corpora /start_profile /stop_profile /set_trace_level /freeze_gc
    /start_expert_distribution_record /stop_expert_distribution_record /dump_expert_distribution_record
    /update_weights_from_disk /init_weights_send_group_for_remote_instance /send_weights_to_remote_instance
    /get_remote_instance_transfer_engine_info /remote_instance_transfer_engine_info /init_weights_update_group
    /destroy_weights_update_group /update_weights_from_tensor /begin_weight_update /end_weight_update
    /update_weights_from_distributed /update_weights_from_ipc /update_weight_version /get_weights_by_name
    /release_memory_occupation /resume_memory_occupation /weights_checker /slow_down /pd_role_switch
    /load_lora_adapter /load_lora_adapter_from_tensors /unload_lora_adapter /open_session /close_session
    /configure_logging /pause_generation /continue_generation
    /v1/classify /v1/realtime /v1/audio/transcriptions /v1/score /v1/decisions /v1/rerank /api/chat
    /api/generate /api/tags /api/show /v1/systemone /invocations
    /vertex_generate /dumper/stop /gate/activate /get_transfer_engine_info
    /is_scaling_elastic_ep /register_transfer_engine_info /scale_elastic_ep /scheduler_receive_meta_data
    /scheduler_receive_url /send
    /v1/responses/input_tokens /v1/responses/compact
    /v1/responses/resp_1 /v1/responses/resp_1/cancel /v1/responses/resp_1/input_items /v1/files
    /v1/files/file_1/content /v1/batches /v1/batches/batch_1""")


@pytest.fixture(scope="module")
def app():
    return make_app(ServerArgs(model_path="m"), Mock(), {})


def test_what_is_not_there_is_refused_by_name(app):
    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            for path in ELSEWHERE:
                reply = await client.post(path)
                assert reply.status_code == 404
                assert reply.json()["message"].startswith(f"this engine does not have the endpoint {path}: ")
            reply = await client.get("/nowhere")
            assert (reply.status_code, reply.json()["message"]) == (404, "Not Found")

    asyncio.run(main())


def test_a_hint_names_what_is_there():
    assert "session_id" in (missing_endpoint("/open_session") or "")
    assert "responses are not kept: send the whole conversation" in (missing_endpoint("/v1/responses/resp_1") or "")
    for path, hint in (("input_tokens", "/tokenize"), ("compact", "shorten the conversation")):
        sentence = missing_endpoint(f"/v1/responses/{path}") or ""
        assert "it is not served" in sentence and hint in sentence and "not kept" not in sentence
    assert missing_endpoint("/v1/responses") is None


def test_no_endpoint_that_is_there_is_called_missing(app):
    paths = {route.path for route in app.routes if isinstance(route, APIRoute)}
    assert [path for path in paths if missing_endpoint(path)] == []
    assert all(any(path.startswith(each) for path in ELSEWHERE) for each in MISSING_ENDPOINTS), "a stale entry"
