"""The engine as on a GPU, on the device emulator: the same tokens as on the CPU, whatever the device does late, with
loads and backups under way, retractions, failures and streamed prefixes; and the host waits for nothing but results.
"""

from __future__ import annotations

import gc
import threading
import weakref
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from sgl_kernel.cpu.library import LIBRARY
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.scheduler_config import LayerStreamConfig
from sglang.srt.model_executor import executor as executor_module
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner, batch_sizes
from sglang.srt.model_executor.page_table import PageTable
from sglang.srt.model_executor.prefill_graphs import PrefillGraphs, token_counts
from sglang.srt.sampling.logprob_types import LogprobSpec
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.cuda_stream import CudaStream, capturing
from support.device_emulator import emulated_device
from support.local_engine import LocalEngine
from support.paged_attention import PagedAttention

VOCAB = 211


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("model"))
    torch.manual_seed(7)
    shape = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=60,
        intermediate_size=100,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=14,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    AutoModelForCausalLM.from_config(shape).save_pretrained(path)
    return ModelConfig.from_pretrained(path, dtype="float32")


@pytest.fixture(scope="module")
def with_two_rotations(tmp_path_factory):
    """Gemma 3, with windows as long as the context, which graphs of this emulation do without."""
    path = tmp_path_factory.mktemp("gemma")
    torch.manual_seed(1)
    shape = Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=60,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        sliding_window=512,
        layer_types=["sliding_attention", "full_attention"],
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    AutoModelForCausalLM.from_config(shape).save_pretrained(path)
    return ModelConfig.from_pretrained(str(path), dtype="float32")


def prompts(seed: int, num: int = 4, shared: int = 40) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    first = rng.integers(3, VOCAB, shared)
    return [np.concatenate((first, rng.integers(3, VOCAB, rng.integers(1, 60)))) for _ in range(num)]


def params(n: int, **options: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=n, ignore_eos=True, **{"temperature": 0.0, "sampling_seed": 3, **options})


def rounds(engine: LocalEngine, seed: int, num: int = 4) -> list[list[int]]:
    """Two rounds of the same prompts with others in between, so that what the device drops comes from the host."""
    answers = []
    for prompt_seed in (seed, seed + 100, seed):
        answers += [answer.tokens for answer in engine.generate(prompts(prompt_seed, num), params(6))]
    engine.settle()
    engine.scheduler.check_invariants()
    engine.close()
    return answers


OPTIONS = {
    "pages": {"num_device_pages": 700, "num_host_pages": 3000},
    "few pages": {"num_device_pages": 260, "num_host_pages": 3000},
    "pages of 16": {"num_device_pages": 24, "num_host_pages": 200, "page_size": 16},
    "failing loads": {"num_device_pages": 260, "num_host_pages": 3000, "load_fail_rate": 0.2},
    "loads by one kernel": {
        **{"num_device_pages": 260, "num_host_pages": 3000, "load_fail_rate": 0.2},
        "io_backend": "persistent",
    },
    "write back": {"num_device_pages": 260, "num_host_pages": 3000, "write_policy": "write_back"},
    "no host": {"num_device_pages": 300},
}


# `make test-all` runs these as well. Failing loads have as few pages.
SLOW_OPTIONS = ("pages", "few pages", "write back", "no host")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW_OPTIONS else ()) for n in OPTIONS]
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_tokens_are_those_of_the_cpu(config, name, seed):
    print("seed", seed)
    options = {**OPTIONS[name], "chunked_prefill_size": 64, "seed": seed}
    with emulated_device(seed):
        found = rounds(LocalEngine(config, device="cuda", **options), seed)
    assert found == rounds(LocalEngine(config, **options), seed)


@pytest.mark.slow
def test_what_is_streamed_is_what_the_device_would_have(config):
    prompt = [np.random.default_rng(1).integers(3, VOCAB, 300)]
    options = {
        "num_device_pages": 160,
        "num_host_pages": 1000,
        "chunked_prefill_size": 64,
        "layer_stream": LayerStreamConfig(2, 48),
    }
    with emulated_device(2):
        engine = LocalEngine(config, device="cuda", **options)
        found = engine.generate(prompt, params(8))[0].tokens
        assert engine.scheduler.state()["counters"]["streamed_tokens"] > 0
        engine.close()
    engine = LocalEngine(config, 600)
    assert found == engine.generate(prompt, params(8))[0].tokens
    engine.close()


@pytest.mark.slow
def test_a_drawn_token_is_the_cpus(config, monkeypatch):
    # The emulated device computes with torch, and log-probabilities are compared bit by bit.
    monkeypatch.setattr(LIBRARY, "_is_available", False)
    each = [
        params(10, temperature=0.9, top_p=0.8),
        params(10, temperature=1.3, top_k=7),
        params(10, temperature=0.7, min_p=0.05),
        params(10, frequency_penalty=0.7, presence_penalty=0.2, repetition_penalty=1.3),
        params(10, temperature=0.8, logit_bias={5: 20.0, 7: -3.0}),
        params(10, min_new_tokens=4, stop_token_ids=(11, 12)),
    ]

    def run(device: str) -> list[object]:
        engine = LocalEngine(config, 900, device=device)
        found = engine.generate(
            prompts(5, len(each)), each, logprobs=LogprobSpec(top=3, token_ids=(4, 5), prompt_from=2)
        )
        engine.close()
        return [(answer.tokens, answer.logprobs, answer.prompt_logprobs) for answer in found]

    with emulated_device(4):
        found = run("cuda")
    assert found == run("cpu")


def test_the_host_waits_for_nothing(config):
    """Once the weights are there. What is read is read when it has come."""
    with emulated_device(6) as device:
        engine = LocalEngine(config, 260, num_host_pages=3000, chunked_prefill_size=64, device="cuda", debug=False)
        device.syncs.clear()
        rounds(engine, 8)
        assert not device.syncs


@pytest.mark.parametrize("page_size", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_decodes_as_graphs(config, page_size):
    """Batches between the sizes that are captured, tokens that the host does not know yet, loads before a decode."""
    options = {"num_device_pages": 320 // page_size, "num_host_pages": 3000, "page_size": page_size}
    attention = PagedAttention()
    with emulated_device(11):
        engine = LocalEngine(
            config, device="cuda", attention_backend=attention, graph_batch_size=6, chunked_prefill_size=64, **options
        )
        found = rounds(engine, 3, 5)
    assert attention.replayed > 10 and not attention.capturing
    assert found == rounds(LocalEngine(config, chunked_prefill_size=64, **options), 3, 5)


@pytest.mark.parametrize(
    ("model", "page_size", "captures_extends"),
    [
        *(pytest.param("config", size, False, marks=pytest.mark.slow) for size in (1, 4)),
        ("config", 4, True),
        ("with_two_rotations", 4, True),
    ],
)
def test_short_prefills_as_graphs(model, page_size, captures_extends, monkeypatch, request):
    """Beside longer ones, which have none, with loads of some layers on their way, and beside graphs of decodes.
    captures_extends: where nothing is on its way, they are one graph."""
    config = request.getfixturevalue(model)
    options = {"num_device_pages": 320 // page_size, "num_host_pages": 3000, "page_size": page_size}
    sizes: list[tuple[int, int]] = []
    ways: set[tuple[str, bool]] = set()
    replay = PrefillGraphs.forward_layer

    def watched(self, layer_id, state, batch, pool):
        if layer_id == 0 and hasattr(state, "captured"):
            sizes.append((state.num_tokens, state.captured.num_tokens))
            ways.add((type(state.captured).__name__, bool(batch.gates)))
        return replay(self, layer_id, state, batch, pool)

    monkeypatch.setattr(PrefillGraphs, "forward_layer", watched)
    with emulated_device(13):
        engine = LocalEngine(
            config,
            device="cuda",
            attention_backend=PagedAttention(captures_extends),
            graph_batch_size=6,
            graph_prefill_tokens=40,
            chunked_prefill_size=64,
            **options,
        )
        found = rounds(engine, 3, 5)
    assert ways == {("_Captured", True), ("_Whole" if captures_extends else "_Captured", False)}
    assert len({counts for _, counts in sizes}) > 1 and any(n < count for n, count in sizes), sizes
    assert found == rounds(LocalEngine(config, chunked_prefill_size=64, **options), 3, 5)


@pytest.mark.parametrize(
    ("most", "counts"),
    [(1, [1]), (16, [16]), (17, [16, 17]), (256, [16, 32, 64, 128, 256]), (400, [16, 32, 64, 128, 256, 384, 400])],
)
def test_captured_token_counts(most, counts):
    assert token_counts(most) == counts


def test_a_table_that_has_grown_is_captured_anew(config, monkeypatch):
    monkeypatch.setattr(
        executor_module, "PageTable", lambda slots, device, places, *more: PageTable(slots, device, 64, *more)
    )
    attention = PagedAttention(captures_extends=True)
    captured: list[int] = []
    capture = PrefillGraphs._capture_whole
    monkeypatch.setattr(PrefillGraphs, "_capture_whole", lambda *args: captured.append(args[1]) or capture(*args))
    graphs = {"graph_batch_size": 8, "graph_prefill_tokens": 40}
    with emulated_device(12):
        engine = LocalEngine(config, 700, device="cuda", attention_backend=attention, **graphs)
        counts = set(captured)
        captured.clear()
        # The second time they are short.
        found = [engine.generate(prompts(9), params(8)) for _ in range(2)]
        assert captured and counts.issuperset(captured)
        engine.close()
    engine = LocalEngine(config, 700)
    for answers in found:
        assert [each.tokens for each in answers] == [each.tokens for each in engine.generate(prompts(9), params(8))]
    engine.close()


def test_decodes_whose_capture_fails_go_on_without_a_graph(config, monkeypatch, caplog):
    monkeypatch.setattr(
        executor_module, "PageTable", lambda slots, device, places, *more: PageTable(slots, device, 64, *more)
    )
    with emulated_device(13):
        engine = LocalEngine(
            config, 700, device="cuda", attention_backend=PagedAttention(captures_extends=True), graph_batch_size=8
        )

        def fails(self, size):
            raise torch.OutOfMemoryError("no memory for a graph")

        monkeypatch.setattr(CudaGraphRunner, "_capture", fails)
        found = [engine.generate(prompts(9), params(8)) for _ in range(2)]
        engine.close()
    assert "no CUDA graph of" in caplog.text
    engine = LocalEngine(config, 700)
    for answers in found:
        assert [each.tokens for each in answers] == [each.tokens for each in engine.generate(prompts(9), params(8))]
    engine.close()


def test_a_failed_launch_keeps_none_of_its_tensors(config, monkeypatch):
    """A launch that runs out of memory is tried again, which must not find that the first try still has it."""
    monkeypatch.setattr(executor_module.logger, "exception", lambda *args: None)  # pytest keeps what is logged
    engine = LocalEngine(config, 700)
    made: list[weakref.ref] = []
    forward_layer = engine.core.executor.model.forward_layer

    def runs_out(layer, state, batch, pool):
        activation = forward_layer(layer, state, batch, pool)
        if layer == 1 and len(made) < 2:
            made.append(weakref.ref(activation))
            raise torch.OutOfMemoryError("no memory")
        return activation

    monkeypatch.setattr(engine.core.executor.model, "forward_layer", runs_out)
    gc.disable()
    try:
        assert len(engine.generate(prompts(1), params(4))[0].tokens) == 4
        assert len(made) == 2 and [ref() for ref in made] == [None, None]
    finally:
        gc.enable()
    engine.close()


def test_prefills_whose_capture_fails_go_on_with_a_graph_a_layer(config, monkeypatch):
    monkeypatch.setattr(
        executor_module, "PageTable", lambda slots, device, places, *more: PageTable(slots, device, 64, *more)
    )
    failed: list[int] = []

    def fails(self, count, attention):
        failed.append(count)
        raise torch.OutOfMemoryError("no memory for a graph")

    with emulated_device(15):
        attention, graphs = PagedAttention(captures_extends=True), {"graph_batch_size": 8, "graph_prefill_tokens": 40}
        engine = LocalEngine(config, 700, device="cuda", attention_backend=attention, **graphs)
        monkeypatch.setattr(PrefillGraphs, "_capture_whole", fails)
        # From the second time on they are short.
        found = [engine.generate(prompts(9), params(8)) for _ in range(3)]
        engine.close()
    assert failed and len(set(failed)) == len(failed)
    engine = LocalEngine(config, 700)
    for answers in found:
        assert [each.tokens for each in answers] == [each.tokens for each in engine.generate(prompts(9), params(8))]
    engine.close()


def test_what_is_over_waits_while_a_graph_is_captured():
    """It frees pinned memory, see `capturing`."""
    was_over, over = [], threading.Event()
    with emulated_device(14):
        stream, other = (CudaStream(name, torch.device("cuda")) for name in ("captures", "other"))

        def capture() -> None:
            with capturing(torch.cuda.CUDAGraph(), None):
                other.when_done(over.set)
                was_over.append(over.wait(0.1))

        stream.enqueue(capture)
        for each in (stream, other):
            each.close()
    assert was_over == [False] and over.is_set()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("page_size", [1, 16])
def test_graphs_on_a_gpu(config, page_size):
    """With the attention of a GPU."""
    options = {"num_device_pages": 320 // page_size, "num_host_pages": 3000, "page_size": page_size}
    options |= {"device": "cuda", "chunked_prefill_size": 64}
    plain = rounds(LocalEngine(config, **options), 3, 5)
    assert rounds(LocalEngine(config, graph_batch_size=6, graph_prefill_tokens=40, **options), 3, 5) == plain


@pytest.mark.parametrize("largest", [1, 3, 8, 100, 256, 300, 1000])
def test_captured_batch_sizes(largest):
    sizes = batch_sizes(largest)
    assert sizes[0] == 1 and sizes[-1] == largest and sizes == sorted(set(sizes))
    assert all(b <= 2 * a or b - a <= 32 for a, b in pairwise(sizes))
