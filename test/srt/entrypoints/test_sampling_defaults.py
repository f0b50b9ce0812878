"""What a model's generation_config.json recommends: what is read of it, and which requests get it."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.configs.embedded_model import ensure_embedded_model
from sglang.srt.entrypoints.sampling_defaults import NAMES, read_sampling_defaults
from support.server_fixture import Server

RECOMMENDED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}
OPENAI = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
CHAT: Any = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
RESPONSE: Any = {"input": "a", "max_output_tokens": 1}


def read(folder: Path, content: Any, source: str = "model") -> dict[str, float]:
    (folder / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return read_sampling_defaults(folder, source)


def test_what_is_read(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path, "model") == {}, "there is no file"
    # Upstream does not look at do_sample either.
    other = {"eos_token_id": [1, 2], "do_sample": False, "max_new_tokens": 2048, "presence_penalty": 1.5}
    assert read(tmp_path, other | RECOMMENDED) == RECOMMENDED
    assert read(tmp_path, RECOMMENDED, "openai") == {}
    assert read(tmp_path, {"temperature": 0, "top_k": 0, "top_p": None}) == {"temperature": 0, "top_k": -1}
    for no_object in ("{", "[1]", "7", "", "[" * 100_000):
        assert read(tmp_path, no_object) == {}
    assert read_sampling_defaults(ensure_embedded_model(), "model") == {}


def test_values_that_no_request_could_send_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad = {"temperature": "0.6", "top_p": 1.5, "top_k": -5, "min_p": [0.1], "repetition_penalty": float("nan")}
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path, bad | {"top_k": 40}) == {"top_k": 40}
        (record,) = caplog.records
        assert all(name in record.message for name in set(NAMES) - {"top_k"})
        assert read(tmp_path, dict.fromkeys(NAMES, True)) == read(tmp_path, {"top_k": 1 << 70}) == {}
        assert read(tmp_path, bad) == read(tmp_path, {"temperature": 1e999, "top_k": 0.5}) == {}
        assert len(caplog.records) == 5


@pytest.mark.e2e
@pytest.mark.parametrize("flags", [(), ("--sampling-defaults", "openai")], ids=["model", "openai"])
def test_chats_get_them(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """And completions and /generate do not, as upstream."""
    model = Path(shutil.copytree(ensure_embedded_model(), tmp_path / "model"))
    generation = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps(generation | RECOMMENDED))
    defaults = OPENAI if flags else RECOMMENDED
    with Server(*flags, model=str(model), fake=[]) as server:

        def ask(path: str, body: dict[str, Any], **given: Any) -> dict[str, float]:
            response = server.post(path, body | given)
            assert response.status_code == 200, response.text
            if path == "/v1/responses":
                shown = {name: response.json()[name] for name in ("temperature", "top_p")}
                assert shown.items() <= server.state()["params"][-1].items()
            return {name: server.state()["params"][-1][name] for name in NAMES}

        assert ask("/v1/chat/completions", CHAT) == ask("/v1/responses", RESPONSE) == defaults
        assert ask("/v1/messages", CHAT) == defaults
        assert ask("/v1/messages", CHAT, top_k=3) == defaults | {"top_k": 3}
        own = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        assert ask("/v1/chat/completions", CHAT, **own) == ask("/v1/responses", RESPONSE, **own) == own
        assert ask("/v1/chat/completions", CHAT, temperature=None, top_p=0.5) == defaults | {"top_p": 0.5}
        assert ask("/v1/completions", {"prompt": "a", "max_tokens": 1}) == OPENAI
        assert ask("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1}}) == OPENAI
        assert ("temperature 0.6, top_p 0.95, top_k 20" in server.output()) == (not flags)
