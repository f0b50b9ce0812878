"""Two ranks as real processes: the same greedy tokens as transformers' and one rank's, quiet when idle, and gone
together. A token counts as equal if its logit is within MARGIN of the best: sums over ranks round differently."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import signal
import time
from collections import Counter

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

import sglang
from sglang.srt.configs.embedded_model import ensure_embedded_model
from sglang.srt.entrypoints.engine import EngineDeadError
from sglang.srt.mem_cache.memory_pool_host import HOST_POOL
from support.server_fixture import Server, wait_until

pytestmark = pytest.mark.e2e

MARGIN = 1e-4
VOCAB = 211  # odd: the second rank's rows end in padding
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 60,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPTIONS = {
    "dtype": "float32",
    "enable_hierarchical_cache": True,
    "hicache_ratio": 8.0,
    # Else measured times decide what is copied and loaded, and a busy machine computes so small a model instead.
    "hicache_write_policy": "write_through",
    "hicache_load_or_recompute": "off",
    "max_total_tokens": 240,
    "chunked_prefill_size": 33,
}
STORED = (
    "--tp-size 2 --hicache --hicache-ratio 8 --max-total-tokens 240 --chunked-prefill-size 33 --page-size 4 "
    "--hicache-write-policy write_through --hicache-load-or-recompute off --dtype float32 "
    "--hicache-storage-backend file --hicache-storage-prefetch-policy wait_complete"
)
MODELS = {
    "llama": LlamaConfig(
        **SHAPE, num_attention_heads=6, num_key_value_heads=2, head_dim=14, attention_bias=True, mlp_bias=True
    ),
    # One KV head, which both ranks keep.
    "qwen2": Qwen2Config(
        **SHAPE, num_attention_heads=4, num_key_value_heads=1, head_dim=10, tie_word_embeddings=True
    ),
}


class Reference:
    """One random model, as transformers has it, in a directory with the embedded model's tokenizer."""

    def __init__(self, name: str, path: str) -> None:
        torch.manual_seed(11)
        self.path = path
        self.hf = AutoModelForCausalLM.from_config(MODELS[name]).eval()
        with torch.no_grad():
            for parameter_name, parameter in self.hf.named_parameters():
                if parameter_name.endswith("bias"):
                    parameter.normal_(0, 0.3)
        self.hf.save_pretrained(path)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ensure_embedded_model() / file, path)

    def check(self, prompt: list[int], output_ids: list[int]) -> None:
        with torch.inference_mode():
            logits = self.hf(torch.tensor([prompt + output_ids])).logits[0, len(prompt) - 1 : -1]
        chosen = logits[torch.arange(len(output_ids)), torch.tensor(output_ids)]
        gap = logits.max(-1).values - chosen
        assert gap.max() < MARGIN, f"token {int(gap.argmax())} is {float(gap.max())} below the best"


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    return {name: Reference(name, str(tmp_path_factory.mktemp(name))) for name in MODELS}


@pytest.fixture(scope="module")
def reference(references: dict[str, Reference]) -> Reference:
    return references["llama"]


@pytest.fixture(scope="module")
def engine(reference: Reference):
    left = Leftovers()
    with sglang.Engine(model_path=reference.path, tp_size=2, **OPTIONS) as engine:
        left.watch(engine)
        yield engine
    left.check()


class Leftovers:
    """What an engine could leave behind."""

    def __init__(self) -> None:
        self.shared_memory = set(os.listdir("/dev/shm"))

    def watch(self, engine: sglang.Engine) -> None:
        self.directory = engine._processes._directory
        assert os.path.isdir(self.directory)
        self.processes = [psutil.Process(child.process.pid) for child in engine._processes._children]
        assert len(self.processes) == 3

    def check(self) -> None:
        assert not [p for p in self.processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert not os.path.exists(self.directory)
        # Others on this machine may have some for a moment.
        wait_until(lambda: set(os.listdir("/dev/shm")) <= self.shared_memory)


def prompts(seed: int, lengths: list[int], shared: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    prefix = rng.integers(3, VOCAB, shared)
    return [np.concatenate([prefix, rng.integers(3, VOCAB, n)]).tolist() for n in lengths]


def greedy(num_tokens: int) -> dict:
    return {"temperature": 0, "ignore_eos": True, "max_new_tokens": num_tokens}


def ranks(engine: sglang.Engine) -> dict[str, psutil.Process]:
    children = engine._processes._children
    return {child.name: psutil.Process(child.process.pid) for child in children if "rank" in child.name}


def test_greedy_with_hits_on_both_tiers_chunked_and_batched(engine, reference):
    batch = prompts(1, [80, 90, 100, 7], shared=16)
    tiers = {"device": 0, "host": 0}
    for _ in range(3):
        for prompt in batch:
            reply = engine.generate(input_ids=prompt, sampling_params=greedy(8))
            reference.check(prompt, reply["output_ids"])
            for tier, tokens in reply["meta_info"]["cached_tokens_details"].items():
                tiers[tier] += tokens
    assert tiers["device"] > 0 and tiers["host"] > 100, tiers
    together = engine.generate(input_ids=batch, sampling_params=greedy(8))
    for prompt, reply in zip(batch, together):
        reference.check(prompt, reply["output_ids"])


@pytest.mark.slow
def test_one_rank_and_two_agree(engine, reference):
    batch = prompts(1, [80, 90, 100, 7], shared=16)
    first = [
        engine.generate(input_ids=prompt, sampling_params=greedy(8))["output_ids"]
        for _ in range(3)
        for prompt in batch
    ]
    with sglang.Engine(model_path=reference.path, **OPTIONS) as single:
        for prompt, reply in zip(batch, single.generate(input_ids=batch, sampling_params=greedy(8))):
            reference.check(prompt, reply["output_ids"])
            alike = sum(reply["output_ids"] == output_ids for output_ids in first)
            assert alike >= 1, "one rank and two agree on no token sequence"


def test_concurrent_requests_and_aborts(engine, reference):
    batch = prompts(2, [20, 40, 60, 33, 5], shared=8)

    def run(i: int) -> tuple[list[int], int]:
        wanted = 12
        if i % 3 == 0:
            stream = engine.generate(input_ids=batch[i], sampling_params=greedy(150), stream=True)
            for event in stream:
                if len(event["output_ids"]) >= 5:
                    break
            stream.close()
            return event["output_ids"], 5
        return engine.generate(input_ids=batch[i], sampling_params=greedy(wanted))["output_ids"], wanted

    with concurrent.futures.ThreadPoolExecutor(len(batch)) as pool:
        for prompt, (output_ids, wanted) in zip(batch, pool.map(run, range(len(batch)))):
            assert len(output_ids) >= wanted
            reference.check(prompt, output_ids)
    state = engine.get_server_info()["internal_states"][0]
    assert state["counters"]["aborted_reqs"] >= 1, state["counters"]
    assert engine.flush_cache()


def test_sampled_tokens_do_not_depend_on_who_samples(engine, reference):
    """Every rank draws for itself: were the draws not alike, the next steps would continue different sequences."""
    (prompt,) = prompts(3, [30])
    params = {"temperature": 0.8, "top_p": 0.9, "max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 5}
    one, two = (engine.generate(input_ids=prompt, sampling_params=params)["output_ids"] for _ in range(2))
    assert one == two
    whole = torch.tensor([prompt + one])
    with torch.inference_mode():
        probs = reference.hf(whole).logits[0, len(prompt) - 1 : -1].div(0.8).softmax(-1)
    # Each token lies among the most probable that make up 0.9 by transformers' account.
    chosen = probs[torch.arange(12), torch.tensor(one)]
    above = torch.where(probs > chosen[:, None] + 1e-5, probs, 0).sum(-1)
    assert bool((above < 0.9).all())


def test_idle_ranks_sleep(engine):
    engine.generate(input_ids=[5, 6, 7], sampling_params=greedy(2))
    processes = ranks(engine)
    assert len(processes) == 2

    def sleep() -> bool:
        """For a second. One that polls uses all the time that it gets."""
        before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
        switches = {name: process.num_ctx_switches().voluntary for name, process in processes.items()}
        time.sleep(1)
        return all(
            sum(process.cpu_times()[:2]) - before[name] < 0.05
            and process.num_ctx_switches().voluntary - switches[name] < 20
            for name, process in processes.items()
        )

    wait_until(sleep)


@pytest.mark.slow
def test_a_kv_head_on_both_ranks_until_rank_1_is_killed(references):
    reference = references["qwen2"]
    left = Leftovers()
    engine = sglang.Engine(model_path=reference.path, tp_size=2, log_level="critical", **OPTIONS)
    try:
        left.watch(engine)
        batch = prompts(4, [90, 60, 80], shared=10)
        hits = 0
        for _ in range(2):
            for prompt in batch:
                reply = engine.generate(input_ids=prompt, sampling_params=greedy(8))
                reference.check(prompt, reply["output_ids"])
                hits += reply["meta_info"]["cached_tokens"]
        assert hits > 100
        processes = ranks(engine)
        stream = engine.generate(input_ids=batch[0], sampling_params=greedy(130), stream=True)
        next(stream)
        processes["scheduler rank 1"].send_signal(signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="scheduler rank 1 process was killed by SIGKILL"):
            list(stream)
    finally:
        engine.shutdown()
    left.check()


@pytest.mark.slow
@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_ranks_with_the_same_head_have_one_host_pool_and_one_disk(references, tmp_path, model_impl):
    """Started twice: the second one finds the prompts on the disk, which both ranks read from the same memory."""
    reference = references["qwen2"]
    extra = json.dumps({"path": str(tmp_path), "prefetch_threshold": 16, "block_tokens": 16})
    flags = [*STORED.split(), "--hicache-storage-backend-extra-config", extra, "--model-impl", model_impl]
    for start in (1, 2):
        with Server(*flags, model=reference.path) as server:
            hits = Counter[str]()
            for _ in range(2):
                for prompt in prompts(4, [90, 60, 80, 100]):
                    body = {"input_ids": prompt, "sampling_params": greedy(8)}
                    reply = server.post("/generate", body).json()
                    reference.check(prompt, reply["output_ids"])
                    details = reply["meta_info"]["cached_tokens_details"]
                    hits.update({tier: details[tier] for tier in ("host", "disk")})
            assert hits["host"] > 100 and (hits["disk"] > 200) == (start == 2), (start, hits)
            maps = [m for child in server.children for m in child.memory_maps(grouped=False)]
            pools = [m for m in maps if HOST_POOL in m.path]
            # Each rank's view of it counts in proportion.
            assert len(pools) == 2 and len({m.size for m in pools}) == 1
            assert sum(m.pss for m in pools) <= max(m.rss for m in pools) <= pools[0].size
            server.stop()
        folders = [path for path in tmp_path.iterdir() if path.is_dir()]
        assert len(folders) == 1, folders


@pytest.mark.slow
def test_a_killed_rank_ends_the_server(reference):
    """Rank 1; of an engine, rank 0 at the end of this file."""
    shared_memory = set(os.listdir("/dev/shm"))
    with Server("--tp-size", "2", "--hicache", "--max-total-tokens", "240", model=reference.path) as server:
        body = {"input_ids": prompts(5, [50])[0], "sampling_params": greedy(8)}
        reply = server.post("/generate", body).json()
        reference.check(body["input_ids"], reply["output_ids"])
        schedulers = [c for c in server.children if any("scheduler_process" in word for word in c.cmdline())]
        schedulers.sort(key=lambda c: c.create_time())
        assert len(schedulers) == 2
        schedulers[1].send_signal(signal.SIGKILL)
        assert server.wait() == 1
        assert "the scheduler rank 1 process was killed by SIGKILL" in server.output()
        server.assert_nothing_left()
    wait_until(lambda: set(os.listdir("/dev/shm")) <= shared_memory)


def test_a_model_that_does_not_divide_ends_start_up_with_a_sentence(reference, tmp_path):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{reference.path}/{file}", tmp_path)
    config = LlamaConfig(**SHAPE | {"intermediate_size": 101}, num_attention_heads=6, num_key_value_heads=2)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(Exception, match=r"^The model's 101 intermediate rows cannot be divided over 2 ranks; choose"):
        sglang.Engine(model_path=str(tmp_path), tp_size=2, load_format="dummy", log_level="critical")


def test_the_death_of_rank_0_ends_the_engine(engine):
    """The last test of the module's engine, whose fixture looks at what is left."""
    stream = engine.generate(input_ids=prompts(6, [40])[0], sampling_params=greedy(130), stream=True)
    next(stream)
    ranks(engine)["scheduler rank 0"].send_signal(signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="scheduler rank 0 process was killed by SIGKILL"):
        list(stream)
