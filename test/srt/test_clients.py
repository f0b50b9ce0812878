"""Other people's SDKs, as they are installed for `make test-clients`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang.srt.configs.embedded_model import ensure_embedded_model
from support.scripted_server import CALLS, FIRST, SECOND, Scripted, scripted_server
from support.server_fixture import Server
from support.tool_texts import WEATHER_SCHEMA

pytestmark = pytest.mark.clients

TASK = Path(__file__).resolve().parents[2] / "benchmark" / "lm_eval"
ANSWER = "<think>Hm, hm.</think>\n\nLet me look." + CALLS


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    yield from scripted_server(tmp_path_factory.mktemp("scripted"))


def test_anthropics_messages_whole_and_streamed(scripted: Scripted) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=scripted.server.url, api_key="none", max_retries=0)
    tools: Any = [
        {"name": "get_weather", "input_schema": WEATHER_SCHEMA},
        {"name": "f", "input_schema": {"type": "object"}},
    ]
    asked = {
        "model": "default",
        "max_tokens": 400,
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": tools,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    scripted.answer(ANSWER)
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        thinking, text, *calls = message.content
        assert (thinking.thinking, text.text) == ("Hm, hm.", "Let me look.")
        assert [(call.name, call.input) for call in calls] == [
            ("get_weather", json.loads(FIRST)),
            ("f", json.loads(SECOND)),
        ]
        assert message.stop_reason == "tool_use" and message.usage.output_tokens > 0
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "wet"} for call in calls]
    scripted.answer("It rains.")
    conversation = [*asked["messages"], {"role": "assistant", "content": whole.content}]  # type: ignore[misc]
    conversation.append({"role": "user", "content": results})
    last = client.messages.create(**{**asked, "messages": conversation})
    assert last.content[0].text == "It rains." and last.stop_reason == "end_turn"
    with pytest.raises(anthropic.NotFoundError, match="other"):
        client.messages.create(**{**asked, "model": "other"})


@pytest.mark.parametrize("api", ["responses", "chat_completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_calls_its_tool_and_goes_on(scripted: Scripted, api: str, stream: bool) -> None:
    agents = pytest.importorskip("agents")
    import asyncio

    import openai

    agents.set_tracing_disabled(True)
    agents.set_default_openai_api(api)
    agents.set_default_openai_client(openai.AsyncOpenAI(base_url=scripted.server.url + "/v1", api_key="none"))
    called: list[tuple[str, int]] = []

    @agents.function_tool
    def get_weather(city: str, days: int) -> str:
        called.append((city, days))
        scripted.answer("<think>Now I know.</think>It rains.")
        return "wet"

    agent = agents.Agent(name="Weather", instructions="Be brief.", tools=[get_weather], model="default")
    scripted.answer(f'\n<tool_call>\n{{"name": "get_weather", "arguments": {FIRST}}}\n</tool_call>')

    async def run() -> Any:
        if not stream:
            return await agents.Runner.run(agent, "Weather?")
        result = agents.Runner.run_streamed(agent, "Weather?")
        async for _ in result.stream_events():
            pass
        return result

    result = asyncio.run(run())
    assert called == [("Zürich 🎉", 2)] and result.final_output.strip() == "It rains."
    prompt = scripted.prompt()
    assert prompt.index("Be brief.") < prompt.index("Zürich") < prompt.index("wet")


def test_likelihoods_of_lm_eval_are_transformers(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    folder = ensure_embedded_model()
    with Server("--served-model-name", "embedded", "--dtype", "float32") as server:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "lm_eval", "--model", "local-completions", "--include_path", str(TASK)),
                *("--tasks", "capitals", "--log_samples", "--output_path", str(tmp_path), "--model_args"),
                f"model=embedded,base_url={server.url}/v1/completions,tokenizer={folder},num_concurrent=4",
            ],
            capture_output=True,
            text=True,
            timeout=600,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")},
        )
        assert done.returncode == 0, done.stderr
    (samples,) = tmp_path.glob("**/samples_capitals*.jsonl")
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    questions = [json.loads(line) for line in (TASK / "capitals.jsonl").read_text().splitlines()]
    assert len(found) == len(questions)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def likelihood(context: str, answer: str) -> float:
        start = len(tokenizer.encode(context, add_special_tokens=False))
        ids = tokenizer.encode(context + answer, add_special_tokens=False)
        with torch.inference_mode():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(float(logprobs[at - 1, ids[at]]) for at in range(start, len(ids)))

    for sample in found:
        context = f"The capital of {sample['doc']['country']} is"
        wanted = [likelihood(context, f" {city}") for city in sample["doc"]["cities"]]
        assert [float(answer[0][0]) for answer in sample["resps"]] == pytest.approx(wanted, abs=1e-3)
