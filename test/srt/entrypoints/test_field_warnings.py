"""Unknown fields over HTTP: named in the reply's head, or refused. The application alone, without a server."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from sglang.srt.entrypoints import request_bodies
from sglang.srt.entrypoints.http_routes import make_app, warning_header
from sglang.srt.entrypoints.request_fields import MAX_ANSWERS, convert
from sglang.srt.server_args import ServerArgs
from support.one_word import OneWord


def post(path: str, body: dict[str, Any], **flags: Any) -> httpx.Response:
    app = make_app(ServerArgs(model_path="m", **flags), OneWord(), {})

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post(path, json=body)

    return asyncio.run(main())


BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/generate": {"text": "a"},
    "/tokenize": {"prompt": "a"},
}
TYPOS = {
    "/v1/chat/completions": ("temperatur", "temperature"),
    "/v1/completions": ("max_token", "max_tokens"),
    "/generate": ("return_logprobs", "return_logprob"),
    "/tokenize": ("add_special_token", "add_special_tokens"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_typo_is_named_in_the_head(path, stream):
    typo, likely = TYPOS[path]
    body = {**BODIES[path], **({"stream": stream} if path != "/tokenize" else {})}
    response = post(path, {**body, typo: 1, "metadata": {}})
    assert response.status_code == 200 and ("data:" in response.text) == (stream and path != "/tokenize")
    text = f"the field '{typo}' is not known and was ignored: did you mean '{likely}'?"
    assert response.headers.get_list("warning") == [f'299 - "{text}"']
    assert "warning" not in post(path, {**body, "metadata": {}}).headers


@pytest.mark.parametrize("path", BODIES)
def test_strict_fields(path):
    typo, likely = TYPOS[path]
    for name, words in ((typo, f"did you mean '{likely}'"), ("metadata", "no field 'metadata'")):
        response = post(path, {**BODIES[path], name: 1}, strict_fields=True)
        error = response.json()
        assert response.status_code == 400 and error["param"] == name and words in error["message"]
    assert post(path, BODIES[path], strict_fields=True).status_code == 200


def test_sampling_parameters_beside_sampling_params():
    fields = {"temperature": 0, "max_new_tokens": 4}
    found = post("/generate", {"text": "a", **fields}).headers.get_list("warning")
    assert found == [
        f"299 - \"the field '{name}' is not known and was ignored: it belongs in sampling_params\"" for name in fields
    ]
    error = post("/generate", {"text": "a", **fields}, strict_fields=True).json()
    assert "no field 'temperature': it belongs in sampling_params" in error["message"]
    assert error["param"] == "temperature"
    assert "warning" not in post("/generate", {"text": "a", "sampling_params": fields}).headers
    elsewhere = post("/v1/completions", {"prompt": "a", "max_new_tokens": 4}).headers["warning"]
    assert "did you mean 'max_tokens'?" in elsewhere


def test_an_error_names_the_typo_too():
    response = post("/v1/chat/completions", {"mesages": []})
    assert response.status_code == 400 and "'messages'" in response.headers["warning"]


def test_nothing_gets_out_of_the_header():
    names = ["temper\r\nx-evil: 1", "top_p\"', 299", "temperatur\\", "temperatur\0", "\u2028temperature"]
    response = post("/v1/completions", {"prompt": "a", **dict.fromkeys(names, 1)})
    assert response.status_code == 200 and "x-evil" not in response.headers
    found = response.headers.get_list("warning")
    assert len(found) == 3
    for value in found:
        assert value.isascii() and value.isprintable() and value.startswith('299 - "') and value.endswith('"')
        inside = value[len('299 - "') : -1].replace("\\\\", "").replace('\\"', "")
        assert '"' not in inside and "\\" not in inside
    assert warning_header('a"b\\c') == '299 - "a\\"b\\\\c"'


def parsed_by(path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The status, and how many bodies were taken for requests."""
    parsed = []
    monkeypatch.setattr(request_bodies, "convert", lambda *args: parsed.append(args) or convert(*args))
    return post(path, body).status_code, len(parsed)


@pytest.mark.parametrize("path, field", [("/v1/completions", "prompt"), ("/generate", "input_ids")])
def test_prompts_are_counted_before_they_are_looked_at(path, field, monkeypatch):
    for prompts in ([[5]] * (MAX_ANSWERS + 1), [5] * OneWord.context_length, [[5] * OneWord.context_length]):
        assert parsed_by(path, {field: prompts}, monkeypatch) == (400, 0)
    assert parsed_by(path, {field: [[5], [6]]}, monkeypatch) == (200, 1)
    assert parsed_by("/generate", {"text": ["a"] * (MAX_ANSWERS + 1)}, monkeypatch) == (400, 0)
