"""The real engine behind the real server: what the fake scheduler cannot show."""

from __future__ import annotations

import concurrent.futures
import random
from collections import Counter
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest

import sglang
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.sampling.sampling_params import SamplingParams
from support.local_engine import LocalEngine
from support.server_fixture import NO_TLS, PATIENCE_S, Server, wait_until

pytestmark = pytest.mark.e2e

# Lines of the log while it starts.
STAGES = (
    "starting 2 processes",
    "reading the model's config",
    "loading weights from 1 file\n",
    "allocating the pools",
    "The server is up after",
)
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def plain() -> Iterator[Callable[..., list[int]]]:
    """The answer to a prompt, by an engine without a cache in this process."""
    engine = LocalEngine(ModelConfig.from_pretrained("embedded"), num_device_pages=4000, debug=False)

    def answer(ids: list[int], tokens: int = 12) -> list[int]:
        engine.forget()
        params = SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
        (answer,) = engine.generate([ids], params)
        assert not sum(answer.cached_tokens_details.values())
        return answer.tokens

    yield answer
    engine.close()


@pytest.fixture
def server(small_server):
    return small_server


def prompt(seed: int, size: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300, 1900) for _ in range(size)]


def generate(server: Server, ids: list[int], tokens: int = 12, **params) -> dict:
    body = {"input_ids": ids, "sampling_params": {**GREEDY, "max_new_tokens": tokens, **params}}
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_log_names_what_a_start_waits_for(server):
    # The last line comes when requests are served already.
    wait_until(lambda: STAGES[-1] in server.output())
    assert [stage for stage in STAGES if f"INFO: {stage}" not in server.output()] == []


def test_greedy_with_device_and_host_hits_equals_greedy_without_a_cache(server, plain):
    prompts = [prompt(0, 200) + prompt(i, 200) for i in range(1, 6)]
    expected = [plain(ids) for ids in prompts]
    tiers: Counter[str] = Counter()
    for _ in range(3):
        for ids, want in zip(prompts, expected):
            reply = generate(server, ids)
            assert reply["output_ids"] == want
            tiers.update(reply["meta_info"]["cached_tokens_details"])
    assert tiers["device"] > 0 and tiers["host"] > 0, tiers


def test_concurrent_requests(server, plain):
    prompts = [prompt(i % 3, 60) + prompt(100 + i, 20 + i) for i in range(12)]
    expected = [plain(ids) for ids in prompts]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda ids: generate(server, ids)["output_ids"], prompts))
    assert replies == expected


def test_streams_and_whole_answers_agree(server):
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    ask = {"model": "embedded", "messages": [{"role": "user", "content": "Grüße! 你好?"}], "max_tokens": 40}
    whole = client.chat.completions.create(**ask, temperature=0)
    chunks = list(client.chat.completions.create(**ask, temperature=0, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.usage.prompt_tokens_details.cached_tokens >= 0


def test_seeds_decide_what_is_sampled(server):
    ids = prompt(7, 30)

    def sample(seed):
        return generate(server, ids, temperature=1.0, top_p=0.9, top_k=50, sampling_seed=seed)["output_ids"]

    assert sample(1) == sample(1)
    assert len({tuple(sample(seed)) for seed in range(5)}) > 1


def test_stops(server):
    ids = prompt(8, 30)
    answer = generate(server, ids, tokens=20)
    stop_at = answer["output_ids"][10]
    first = answer["output_ids"].index(stop_at)
    stopped = generate(server, ids, tokens=20, stop_token_ids=[stop_at])
    assert stopped["output_ids"] == answer["output_ids"][: first + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop_at}
    word = answer["text"][len(answer["text"]) // 2 :][:3]
    stopped = generate(server, ids, tokens=20, stop=[word])
    assert stopped["text"] == answer["text"][: answer["text"].index(word)]
    assert stopped["meta_info"]["completion_tokens"] <= 20


def running(server: Server) -> int:
    queues = server.state()["queues"]
    return queues["running"] + queues["waiting"]


def test_a_client_that_leaves_frees_its_memory(server):
    body = {"input_ids": prompt(9, 50), "sampling_params": {**GREEDY, "max_new_tokens": 900}, "stream": True}
    with httpx.stream("POST", server.url + "/generate", json=body, timeout=PATIENCE_S, verify=NO_TLS) as response:
        pieces = response.iter_raw()
        next(pieces)
    wait_until(lambda: running(server) == 0)
    assert server.state()["tiers"]["device"]["pages"]["held"] == 0
    assert server.post("/flush_cache").status_code == 200
    generate(server, prompt(9, 20))
    wait_until(lambda: server.state()["tiers"]["device"]["free_pages"] >= 1024 - 40)


def test_prompts_that_fit_nowhere(server):
    response = server.post("/generate", {"input_ids": prompt(1, 1200), "sampling_params": {"max_new_tokens": 4}})
    assert response.status_code == 400 and "1200" in response.json()["message"]
    longest = server.get("/get_server_info").json()["max_req_input_len"]
    assert generate(server, prompt(2, longest), tokens=1)["meta_info"]["prompt_tokens"] == longest
    assert len(generate(server, prompt(2, longest + 1 - 100), tokens=100)["output_ids"]) == 100


def test_metrics_move(server):
    def metrics():
        lines = server.get("/metrics").text.splitlines()
        return {k: float(v) for k, v in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}

    label = '{model_name="embedded"}'
    before = metrics()
    generate(server, prompt(10, 40), tokens=5)
    after = metrics()
    assert after[f"sglang:prompt_tokens_total{label}"] == before[f"sglang:prompt_tokens_total{label}"] + 40
    assert after[f"sglang:generation_tokens_total{label}"] == before[f"sglang:generation_tokens_total{label}"] + 5
    assert after[f"sglang:max_total_num_tokens{label}"] == 1024
    assert after[f"sglang:num_pages{label}"] == 1024

    def moved(name: str, mode: str = "") -> float:
        key = f"sglang:{name}" + (label.replace("{", f'{{mode="{mode}",') if mode else label)
        return after[key] - before.get(key, 0)

    assert moved("prompt_tokens_histogram_sum") == 40 and moved("generation_tokens_histogram_sum") == 5
    assert moved("realtime_tokens_total", "prefill_compute") + moved("realtime_tokens_total", "prefill_cache") == 40
    assert moved("realtime_tokens_total", "decode") == 4
    assert after[f"sglang:hicache_host_total_tokens{label}"] == 8 * 1024


@pytest.mark.slow
def test_pages_of_16_in_odd_chunks_until_the_scheduler_is_killed(plain):
    flags = "--hicache --page-size 16 --max-total-tokens 1024 --chunked-prefill-size 37"
    with Server(*flags.split()) as server:
        ids = prompt(11, 300)
        want = plain(ids)
        assert generate(server, ids)["output_ids"] == want
        again = generate(server, ids)
        assert again["output_ids"] == want and again["meta_info"]["cached_tokens"] >= 256

        server.child("scheduler_process").kill()
        assert server.wait() == 1
        assert "the scheduler process was killed by SIGKILL" in server.output()
        server.assert_nothing_left()


@pytest.mark.slow
def test_the_offline_engine_agrees_with_the_server(plain):
    ids = prompt(13, 40)
    with sglang.Engine(model_path="embedded", enable_hierarchical_cache=True, max_total_tokens=1024) as engine:
        reply = engine.generate(input_ids=ids, sampling_params={**GREEDY, "max_new_tokens": 12})
        assert reply["output_ids"] == plain(ids)


@pytest.mark.slow
def test_a_prompt_that_is_longer_than_device_and_host(plain, tmp_path):
    flags = "--hicache --hicache-ratio 2 --max-total-tokens 512 --chunked-prefill-size 128 --page-size 4"
    streams = "--layer-stream 2 --layer-stream-tokens 256 --layer-stream-disk-size 0.003"
    disk = ("--layer-stream-disk-path", str(tmp_path))
    long, longer = prompt(50, 2000), prompt(51, 3500)
    with Server(*flags.split(), *streams.split(), *disk) as server:
        limit = server.get("/get_server_info").json()["max_req_input_len"]
        assert 2500 < limit < 3300, "what device, host and disk hold together"
        want = plain(long)
        found = []
        for _ in range(2):
            reply = generate(server, long)
            assert reply["output_ids"] == want
            found.append(reply["meta_info"]["cached_tokens_details"])
        assert sum(found[0].values()) == 0 and found[1]["host"] > 700
        refused = server.post("/generate", {"input_ids": longer, "sampling_params": GREEDY})
        assert refused.status_code == 400 and str(limit + 1) in refused.text
        state = server.get("/hicache/state").json()
        assert state["counters"]["streamed_reqs"] == 2 and state["counters"]["swapped_tokens"] > 400
        assert state["layer_stream"]["streamed_tokens"] == 0 and not list(tmp_path.iterdir())
        metrics = server.get("/metrics").text
        assert "sglang:layer_stream_requests_total" in metrics
        server.stop()
