"""Endpoints of upstream and of OpenAI that this engine does not have, each with its sentence. Stateless."""

from __future__ import annotations

from sglang.srt.missing_flags import DISAGGREGATION, LORA

_WEIGHTS = "it serves the weights that it was started with: start it again with another --model-path"
_EXPERTS = "each rank has a part of every expert: there is nothing to record or to move"
_SESSIONS = "sessions are not opened or closed: name one with the field session_id, and send the whole conversation"
_RESPONSES = "responses are not kept: send the whole conversation to /v1/responses; close the connection to cancel"
_FILES = "it keeps no files: send the texts themselves in requests"
_BATCHES = "it keeps no batches: send the requests at once, and they are batched"
_CORPORA = "it decodes without drafts, and needs no corpus"
_POOLING = "it scores no texts: use /generate with return_logprob for log-probabilities"
_MEMORY = "its memory is fixed at its start: stop the server to free it"
_MULTIMODAL = "it takes text alone"

# Path -> what to do instead. A path that ends with "/" stands for everything below it.
MISSING_ENDPOINTS = {
    "/ready": "use /health",
    "/set_internal_state": "settings are flags: start it again; tiers are switched with PUT /hicache/tiers/{tier}",
    "/encode": "use /v1/embeddings",
    "/classify": _POOLING,
    "/v1/classify": _POOLING,
    "/v1/score": _POOLING,
    "/v1/rerank": _POOLING,
    "/v1/decisions": _POOLING,
    "/v1/systemone": _POOLING,
    "/add_external_corpus": _CORPORA,
    "/remove_external_corpus": _CORPORA,
    "/list_external_corpora": _CORPORA,
    "/start_profile": "use py-spy or perf on its processes; /metrics and /hicache/state have its numbers",
    "/stop_profile": "use py-spy or perf on its processes; /metrics and /hicache/state have its numbers",
    "/set_trace_level": "start it with --enable-trace",
    "/freeze_gc": "it does that by itself when it is idle",
    "/configure_logging": "start it with --log-level",
    "/slow_down": "limit links with --hicache-rate-limit",
    "/start_expert_distribution_record": _EXPERTS,
    "/stop_expert_distribution_record": _EXPERTS,
    "/dump_expert_distribution_record": _EXPERTS,
    "/scale_elastic_ep": _EXPERTS,
    "/is_scaling_elastic_ep": _EXPERTS,
    "/update_weights_from_disk": _WEIGHTS,
    "/update_weights_from_tensor": _WEIGHTS,
    "/update_weights_from_distributed": _WEIGHTS,
    "/update_weights_from_ipc": _WEIGHTS,
    "/update_weight_version": _WEIGHTS,
    "/begin_weight_update": _WEIGHTS,
    "/end_weight_update": _WEIGHTS,
    "/init_weights_update_group": _WEIGHTS,
    "/destroy_weights_update_group": _WEIGHTS,
    "/init_weights_send_group_for_remote_instance": _WEIGHTS,
    "/send_weights_to_remote_instance": _WEIGHTS,
    "/get_remote_instance_transfer_engine_info": _WEIGHTS,
    "/remote_instance_transfer_engine_info": _WEIGHTS,
    "/get_transfer_engine_info": _WEIGHTS,
    "/register_transfer_engine_info": _WEIGHTS,
    "/get_weights_by_name": _WEIGHTS,
    "/weights_checker": _WEIGHTS,
    "/release_memory_occupation": _MEMORY,
    "/resume_memory_occupation": _MEMORY,
    "/pd_role_switch": DISAGGREGATION,
    "/load_lora_adapter": LORA,
    "/load_lora_adapter_from_tensors": LORA,
    "/unload_lora_adapter": LORA,
    "/open_session": _SESSIONS,
    "/close_session": _SESSIONS,
    "/pause_generation": "end requests with /abort_request",
    "/continue_generation": "send the request again; its prompt is found in the cache",
    "/v1/responses/input_tokens": "it is not served: count tokens with /tokenize, which takes messages",
    "/v1/responses/compact": "it is not served: shorten the conversation before it is sent to /v1/responses",
    "/v1/responses/": _RESPONSES,
    "/v1/files": _FILES,
    "/v1/files/": _FILES,
    "/v1/batches": _BATCHES,
    "/v1/batches/": _BATCHES,
    "/v1/audio/transcriptions": _MULTIMODAL,
    "/v1/realtime": _MULTIMODAL,
    "/scheduler_receive_meta_data": _MULTIMODAL,
    "/scheduler_receive_url": _MULTIMODAL,
    "/send": _MULTIMODAL,
    "/api/": "it does not speak Ollama's protocol: use /v1/chat/completions",
    "/invocations": "it does not speak SageMaker's protocol: use /v1/chat/completions",
    "/vertex_generate": "it does not speak Vertex AI's protocol: use /generate",
    "/gate/activate": "it serves as soon as /health answers 200",
    "/dumper/": "record its steps with --record-steps",
}


def missing_endpoint(path: str) -> str | None:
    """The sentence for a path of theirs that is not here; None for any other path."""
    if (hint := MISSING_ENDPOINTS.get(path)) is None:
        below = [prefix for prefix in MISSING_ENDPOINTS if prefix.endswith("/") and path.startswith(prefix)]
        if not below:
            return None
        hint = MISSING_ENDPOINTS[below[0]]
    return f"this engine does not have the endpoint {path}: {hint}"
