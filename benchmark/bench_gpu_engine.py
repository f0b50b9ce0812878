"""The engine on a GPU, in process, with Llama-3.1-8B's shape and random weights: the benefit of a hierarchy.

    python benchmark/bench_gpu_engine.py [--device cpu] [--parts prefill,decode,stream,documents] [--budget-s N]
                                         [--variant-s N] [--documents N] [--document-tokens N]
                                         [--piece-tokens N] [--fp8-weights] [--fp8-kv] [--io-backend NAME]
                                         [--model-impl transformers] [--experts | --latents | --gpt-oss]

*Documents*: questions about documents that are on the host and not on the device, in rounds, as in LooGLE. A round's
questions come at once and in random order, several to a document. Variants: no hierarchy; copies of pages of 32
tokens; the kernel alone; scheduling alone; everything, with pages of 1 and of 64 tokens. Before the first round every
variant has computed all documents once and loaded one. *Prefill*: one prompt, beside a product of matrices. *Decode*:
a full batch, beside the time to read the weights and the KV once. *Stream*: a request that fits the device, and one
twice as long, layer by layer through a stream cache. On the CPU the embedded model's shape, everything tiny: that
shows that the script runs.

--fp8-weights and --fp8-kv are e4m3, --io-backend is that of *everything*, --model-impl is whose code computes,
--experts takes the shape of Qwen3-30B-A3B, a mixture of experts, --latents that of DeepSeek-V2-Lite, --gpt-oss that
of gpt-oss-20b with experts of mxfp4; each has a report of its own.

A variant that takes longer than --variant-s for its rounds is cut off. Its whole rounds until then count, and the row
is marked. A part that fails is a row with its error, and an exit code of 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import percentiles, print_table, write_json
from model_shapes import SHAPES
from yardsticks import free_memory, matrix_flops, memory_bytes_per_s

from sgl_kernel.quantized import E2M1, MatrixFormat
from sglang.srt.configs.experts import experts_of
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_families import NATIVE, TRANSFORMERS
from sglang.srt.configs.quantization import MXFP4_GROUP
from sglang.srt.distributed.parallel_state import SINGLE_RANK
from sglang.srt.layers.weights import QuantizedTarget
from sglang.srt.managers.schedule_batch import BatchDecision
from sglang.srt.managers.scheduler_config import LayerStreamConfig
from sglang.srt.managers.startup.device import page_layout
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.model_executor.executor import StepResult
from sglang.srt.model_executor.launch import LaunchMode
from sglang.srt.models.registry import get_model_class
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from support.local_engine import Generation, LocalEngine

# As upstream's cache: first come, first served, shared once complete.
UNSCHEDULED: dict[str, Any] = {
    "insert_at": "completion",
    "deferral_threshold": 0,
    "load_ratio": 0.0,
    "bubble_filling": False,
    "load_or_recompute": False,
}
SCHEDULED: dict[str, Any] = {"load_or_recompute": True}


# How decodes sample.
SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0},
    "drawn, top-p": {"temperature": 1.0, "top_p": 0.9},
    "drawn, penalised": {"temperature": 1.0, "frequency_penalty": 0.5},
}


class OutOfTime(BaseException):
    """No `Exception`, so that handlers of failures do not catch it."""


@dataclass(frozen=True)
class Sizes:
    """Tokens, and numbers of requests. device_documents: the number of documents that fit the device together with
    the questions and the spare pages."""

    documents: int = 8
    document: int = 12288
    device_documents: int = 3
    question: int = 48
    answer: int = 16
    rounds: int = 3
    questions_per_document: int = 3
    spare: int = 512
    chunk: int = 8192
    prompt: int = 8192
    prompt_repeats: int = 3
    decodes: tuple[tuple[int, int], ...] = ((32, 2048), (128, 1024))
    decode_output: int = 64
    streaming_device: int = 16384
    streaming_chunk: int = 2048
    streaming_piece: int = 16384
    streaming_output: int = 12


TINY = Sizes(
    documents=4,
    document=128,
    device_documents=2,
    question=16,
    answer=4,
    rounds=2,
    questions_per_document=2,
    spare=32,
    chunk=64,
    prompt=128,
    prompt_repeats=2,
    decodes=((4, 32),),
    decode_output=8,
    streaming_device=512,
    streaming_chunk=64,
    streaming_piece=128,
    streaming_output=4,
)


@dataclass(frozen=True)
class Variant:
    name: str
    page_size: int
    io_backend: str
    overrides: dict[str, Any]
    has_host: bool = True


# The most important first, in case the time runs out.
VARIANTS = (
    Variant("everything", 1, "auto", SCHEDULED),
    Variant("direct, page 32", 32, "direct", UNSCHEDULED),
    Variant("everything, page 64", 64, "auto", SCHEDULED),
    Variant("no hierarchy", 1, "auto", UNSCHEDULED, has_host=False),
    Variant("kernel only", 1, "kernel", UNSCHEDULED),
    Variant("scheduling only", 32, "direct", SCHEDULED),
)


class Model:
    """Random weights, drawn on the device."""

    def __init__(
        self,
        device: str,
        fp8_weights: bool = False,
        fp8_kv: bool = False,
        model_impl: str = NATIVE,
        has: str = "",
    ) -> None:
        """has: a key of SHAPES."""
        self.device = device
        with tempfile.TemporaryDirectory() as folder:
            path = "embedded"
            shape, tiny = SHAPES[has]
            if device != "cpu" or tiny is not None:
                on_cpu = tiny if device == "cpu" and tiny is not None else {}
                Path(folder, "config.json").write_text(json.dumps(shape | on_cpu))
                path = folder
            self.config = ModelConfig.from_pretrained(path, model_impl=model_impl)
        self._weight_itemsize = self._expert_itemsize = 1.0 if fp8_weights else self.config.dtype.itemsize
        if has == "gpt-oss":
            self.config = replace(self.config, expert_format=MatrixFormat(E2M1, MXFP4_GROUP))
            # A scale of 8 bits for each group.
            self._expert_itemsize = 0.5 + 1 / MXFP4_GROUP
        if fp8_weights:
            fp8 = MatrixFormat(torch.float8_e4m3fn)
            self.config = replace(self.config, weight_format=fp8, expert_format=fp8)
        if fp8_kv:
            self.config = replace(self.config, kv_cache_dtype=torch.float8_e4m3fn)
        self.model = self._build()
        self.dtype = self.config.dtype
        c = self.config
        self.token_bytes = page_layout(c, page_size=1, num_ranks=1).page_bytes
        self._table = c.vocab_size * c.hf_config.hidden_size
        self._experts = experts_of(c.architecture, c.hf_config)
        num_parameters = self._num_parameters
        tables = 1 if c.hf_config.tie_word_embeddings else 2
        self._body = num_parameters - tables * self._table

    def _of_experts(self, share: float) -> float:
        """Parameters of the body if so large a share of the experts counts."""
        if self._experts is None:
            return self._body
        each = 3 * self._experts.intermediate_size * self.config.hf_config.hidden_size
        return self._body - (1 - share) * sum(self._experts.layers) * self._experts.num_experts * each

    def weight_bytes(self, num_reqs: int) -> float:
        """That a decode reads: all but the table of embeddings, of which it reads a row per request, and of experts
        those that a request has, if each has any with the same probability."""
        share = 1.0
        if self._experts is not None:
            share = 1 - (1 - self._experts.top_k / self._experts.num_experts) ** num_reqs
        others = self._of_experts(0.0)
        of_experts = (self._of_experts(share) - others) * self._expert_itemsize
        return others * self._weight_itemsize + of_experts + self._table * self.config.dtype.itemsize

    def prefill_flops(self, num_tokens: int) -> float:
        """Multiplications and additions, causal attention and one row of logits."""
        c, experts = self.config, self._experts
        pairs = num_tokens * (num_tokens + 1) / 2
        value_dim = c.head_dim if c.latent is None else c.latent.rank
        attention = 2.0 * c.num_layers * c.num_heads * (c.head_dim + value_dim) * pairs
        share = 1.0 if experts is None else experts.top_k / experts.num_experts
        return 2.0 * self._of_experts(share) * num_tokens + attention + 2.0 * self._table

    def _build(self) -> Any:
        if self.device == "cpu":
            from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend
        else:
            from sglang.srt.layers.attention.triton_backend import TritonAttnBackend as Backend  # type: ignore[assignment]
        self.attention = Backend()
        with torch.device(self.device):
            model = get_model_class(self.config)(self.config, self.attention, SINGLE_RANK)
        if self.config.model_impl != NATIVE:
            # It has drawn its weights.
            self._num_parameters = sum(parameter.numel() for parameter in model.parameters())
            model.inspect_layers(torch.device(self.device))
            return model.eval()
        self._num_parameters = sum(math.prod(target.shape) for target in model.weight_targets().values())
        torch.manual_seed(0)
        with torch.inference_mode():
            for name, target in sorted(model.weight_targets().items()):
                # The loader's scales, which neither vanish nor blow up; it draws on the CPU, a minute for this model.
                if name.endswith("norm.weight"):
                    target.tensor.fill_(1.0)
                    continue
                is_input = "embed_tokens" in name or len(target.shape) < 2
                scale = 1.0 if is_input else target.shape[-1] ** -0.5
                if isinstance(target, QuantizedTarget) and target.matrix.format.dtype == E2M1:
                    target.matrix.values.random_()
                    target.matrix.scales.fill_(120)
                elif isinstance(target, QuantizedTarget):
                    target.matrix.quantize(torch.randn(target.matrix.shape, device=self.device) * scale)
                else:
                    target.tensor.normal_(0.0, scale)
            if self.config.latent is not None:
                model.finish_loading()
        return model.eval()


@dataclass
class Served:
    """first_token_s, cached: of the requests that got so far. answers: None if the time ran out. decodes: number and
    requests of those launches."""

    num_requests: int = 0
    num_tokens: int = 0
    num_finished: int = 0
    first_token_s: dict[str, float] = field(default_factory=dict)
    cached: dict[str, dict[str, int]] = field(default_factory=dict)
    answers: list[Generation] | None = None
    elapsed_s: float = 0.0
    decodes: list[tuple[int, int]] = field(default_factory=list)


class Rig:
    """An engine with this model, and the times of its launches. io_backend, graph_batch_size: without effect on the
    CPU."""

    def __init__(
        self,
        model: Model,
        page_size: int,
        device_tokens: int,
        host_tokens: int = 0,
        io_backend: str = "auto",
        graph_batch_size: int = 32,
        **overrides: Any,
    ) -> None:
        self.model, self.page_size = model, page_size
        options: dict[str, Any] = {}
        if model.device != "cpu":
            options = {
                "device": model.device,
                "attention_backend": model.attention,
                "io_backend": io_backend,
                "graph_batch_size": graph_batch_size,
                "graph_prefill_tokens": ServerArgs.cuda_graph_max_bs_prefill if graph_batch_size else 0,
            }
            if model.config.model_impl != NATIVE:
                options["graph_prefill_tokens"] = 0
        options |= overrides
        self.engine = LocalEngine(
            model.config,
            num_device_pages=device_tokens // page_size,
            num_host_pages=host_tokens // page_size,
            page_size=page_size,
            debug=False,
            model=model.model,
            **options,
        )
        # By launch: its seconds, and when it ended.
        self.results: dict[int, StepResult] = {}
        self.over_at: dict[int, float] = {}
        executor: Any = self.engine.core.executor
        poll = executor.poll

        def remember() -> list[StepResult]:
            found: list[StepResult] = poll()
            for result in found:
                self.results[result.seq], self.over_at[result.seq] = result, time.perf_counter()
            return found

        executor.poll = remember

    def prompts(self, rng: np.random.Generator, *lengths: int) -> list[np.ndarray]:
        # Below the special tokens of both models.
        return [rng.integers(10, min(self.model.config.vocab_size, 100_000) - 100, n) for n in lengths]

    def serve(
        self,
        prompts: list[np.ndarray],
        output: int,
        until: float = float("inf"),
        **sampling: float,
    ) -> Served:
        """until: of time.monotonic(). After that time the engine cannot be used any more. sampling: of
        `SamplingParams`; greedy by default."""
        served = Served(num_requests=len(prompts))
        params = SamplingParams(
            max_new_tokens=output, ignore_eos=True, sampling_seed=0, **{"temperature": 0.0, **sampling}
        )
        start = time.perf_counter()

        def look(decision: BatchDecision) -> None:
            now = time.perf_counter() - start
            served.elapsed_s = now
            for each in decision.outputs:
                if each.output_ids:
                    served.first_token_s.setdefault(each.rid, now)
                served.num_tokens += len(each.output_ids) // 4
                served.cached[each.rid] = each.cached_tokens_details
                served.num_finished += each.finish_reason is not None
            launch = decision.launch
            if launch is not None and launch.mode == LaunchMode.DECODE:
                served.decodes.append((launch.seq, len(launch.slots)))
            if time.monotonic() > until:
                raise OutOfTime

        # The caller has no deadline, and gets the error.
        with contextlib.suppress(OutOfTime) if until < float("inf") else contextlib.nullcontext():
            served.answers = self.engine.generate(prompts, params, after_step=look)
        if served.answers is not None and any(len(a.tokens) != output for a in served.answers):
            raise AssertionError(
                f"answers have {sorted({len(a.tokens) for a in served.answers})} tokens, not {output}"
            )
        return served

    def warm_up(self) -> None:
        """Run once what is compiled or allocated at first use."""
        rng = np.random.default_rng(99)
        self.serve(self.prompts(rng, 40, 24), 3)
        self.engine.settle()

    def forget_device(self) -> None:
        scheduler = self.engine.scheduler
        scheduler.cache.controller.evict(Tier.DEVICE, scheduler.cache.device.num_pages)

    def counters(self) -> dict[str, float]:
        scheduler = self.engine.scheduler
        streamed = scheduler.streaming.counters if scheduler.streaming is not None else Counter()
        return {**(scheduler.counters + streamed), "stall_s": scheduler.planner.stall_s}

    def close(self) -> None:
        """Free the engine's memory, even while the rig itself is still referenced."""
        self.engine.close()
        del self.engine


@contextlib.contextmanager
def rig_of(*args: Any, **options: Any) -> Iterator[Rig]:
    """Close it and free its memory at the end."""
    rig = Rig(*args, **options)
    try:
        yield rig
    finally:
        device = rig.model.device
        with at_most(30):
            rig.close()
        free_memory(device)


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises OutOfTime, even where a call waits for ever."""

    def raise_it(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, raise_it)
    left, since = signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))[0], time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - since), 0.01) if left else 0.0)
        signal.signal(signal.SIGALRM, before)


# -- parts ----------------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """flops, bytes_per_s: measured rates of a product of matrices and of a copy in the device's memory. deadline: of
    time.monotonic(). io_backend: of variants that name none."""

    model: Model
    sizes: Sizes
    variant_s: float
    deadline: float
    io_backend: str = "auto"
    flops: float = 0.0
    bytes_per_s: float = 0.0

    def measure_device(self) -> None:
        self.flops = matrix_flops(self.model.device, self.model.dtype)
        self.bytes_per_s = memory_bytes_per_s(self.model.device)
        free_memory(self.model.device)

    def prefill(self) -> Iterator[dict[str, Any]]:
        n, rng = self.sizes.prompt, np.random.default_rng(1)
        options = {"chunked_prefill_size": n, "max_prefill_tokens": n}
        with rig_of(self.model, 1, 2 * n + 512, **options) as rig:
            seconds: list[float] = []
            busy: list[float] = []
            for i in range(self.sizes.prompt_repeats + 1):
                rig.results.clear()
                served = rig.serve(rig.prompts(rng, n), 1)
                rig.engine.settle()
                if i:  # the first warms up
                    seconds.append(*served.first_token_s.values())
                    busy.append(sum(result.seconds for result in rig.results.values()))
        ttft, launch = percentiles(seconds, 50)[0], percentiles(busy, 50)[0]
        rate = self.model.prefill_flops(n) / ttft
        yield {
            "prompt": n,
            "TTFT ms": 1e3 * ttft,
            "launch ms": 1e3 * launch,
            "TFLOP/s": rate / 1e12,
            "of a matrix product": rate / self.flops,
        }

    def decode(self) -> Iterator[dict[str, Any]]:
        output = self.sizes.decode_output
        has_graphs = (True, False) if self.model.device != "cpu" else (False,)
        for (batch, context), graphs in product(self.sizes.decodes, has_graphs):
            if not graphs and has_graphs[0] and (batch, context) != self.sizes.decodes[0]:
                continue  # once will do: it is the host's time
            room = batch * (context + output) * 5 // 4 + 64
            options = {"graph_batch_size": batch if graphs else 0, "chunked_prefill_size": self.sizes.chunk}
            # What drawing costs shows at one size.
            is_first = (batch, context, graphs) == (*self.sizes.decodes[0], has_graphs[0])
            kv_bytes = batch * (context + output / 2) * self.model.token_bytes
            floor = (self.model.weight_bytes(batch) + kv_bytes) / self.bytes_per_s
            with rig_of(self.model, 1, room, **options) as rig:
                rig.warm_up()
                prompts = rig.prompts(np.random.default_rng(2), *[context] * batch)
                for how, sampling in SAMPLING.items() if is_first else (("greedy", {}),):
                    rig.results.clear()
                    served = rig.serve(prompts, output, **sampling)
                    rig.engine.settle()
                    full = [seq for seq, size in served.decodes if size == batch]
                    wall = (rig.over_at[full[-1]] - rig.over_at[full[0]]) / (len(full) - 1)
                    busy = [rig.results[seq].seconds for seq in full[1:]]
                    yield {
                        "batch": batch,
                        "context": context,
                        "sampling": how,
                        "graphs": "yes" if graphs else "no",
                        "step ms": 1e3 * wall,
                        "launch ms": 1e3 * percentiles(busy, 50)[0],
                        "not launching, %": 100 * (1 - sum(busy) / len(busy) / wall),
                        "floor ms": 1e3 * floor,
                        "floor / step": floor / wall,
                        "tokens/s": batch / wall,
                    }

    def documents(self) -> Iterator[dict[str, Any]]:
        first: list[int] = []
        for variant in VARIANTS:
            if time.monotonic() > self.deadline - 10:
                yield {"variant": variant.name, "cut off": "not begun"}
                continue
            try:
                row, tokens = self._documents(variant)
            except (Exception, OutOfTime) as error:
                traceback.print_exc()
                yield {"variant": variant.name, "error": repr(error)}
                continue
            row["answers that differ"] = sum(a != b for a, b in zip(tokens, first))
            first = first or tokens
            yield row

    def _documents(self, variant: Variant) -> tuple[dict[str, Any], list[int]]:
        """The row, and the first token of every question of whole rounds."""
        s, rng = self.sizes, np.random.default_rng(3)
        at_once = s.documents * s.questions_per_document
        questions = at_once * (s.question + s.answer)
        backend = self.io_backend if variant.io_backend == "auto" else variant.io_backend
        options: dict[str, Any] = {"chunked_prefill_size": s.chunk, "io_backend": backend}
        room = s.device_documents * s.document + questions + s.spare
        host = s.documents * s.document + 2 * s.rounds * questions + 1024 if variant.has_host else 0
        done: list[Served] = []
        tokens: list[int] = []
        with rig_of(self.model, variant.page_size, room, host, **options, **variant.overrides) as rig:
            documents = rig.prompts(rng, *[s.document] * s.documents)
            rig.warm_up()
            began = time.monotonic()
            with at_most(min(COLD_S, self.deadline - time.monotonic())):
                for document in documents:
                    rig.serve([document], 1)
                    rig.engine.settle()
                cold_s = time.monotonic() - began
                question = rig.prompts(rng, s.question)
                if variant.has_host:  # compiles what loads
                    rig.forget_device()
                    rig.serve([np.concatenate((documents[0], *question))], 1)
                    rig.engine.settle()
            before = rig.counters()
            rig.results.clear()
            until = min(self.deadline, time.monotonic() + self.variant_s)
            with at_most(until + 5 - time.monotonic()):
                for _ in range(s.rounds):
                    about = rng.permutation(np.repeat(np.arange(s.documents), s.questions_per_document))
                    asked = [np.concatenate((documents[d], *rig.prompts(rng, s.question))) for d in about]
                    done.append(rig.serve(asked, s.answer, until))
                    if (answers := done[-1].answers) is None:
                        break
                    tokens += [answer.tokens[0] for answer in answers]
            after = rig.counters()
            busy = sum(result.seconds for result in rig.results.values())
        return self._row(variant, done, cold_s, before, after, busy), tokens

    def _row(
        self,
        variant: Variant,
        done: list[Served],
        cold_s: float,
        before: dict[str, float],
        after: dict[str, float],
        busy_s: float,
    ) -> dict[str, Any]:
        elapsed = sum(served.elapsed_s for served in done)
        ttft = [seconds for served in done for seconds in served.first_token_s.values()]
        details = [found for served in done for found in served.cached.values()]
        total = self.sizes.rounds * self.sizes.documents * self.sizes.questions_per_document
        p50, p99 = percentiles(ttft, 50, 99) if ttft else (None, None)

        def more(name: str) -> float:
            return after.get(name, 0) - before.get(name, 0)

        is_whole = len(done) == self.sizes.rounds and done[-1].answers is not None
        return {
            "variant": variant.name,
            "page size": variant.page_size,
            "TTFT p50 s": p50,
            "TTFT p99 s": p99,
            "requests/s": sum(served.num_finished for served in done) / elapsed,
            "tokens/s": sum(served.num_tokens for served in done) / elapsed,
            "from device": sum(found.get("device", 0) for found in details),
            "from host": sum(found.get("host", 0) for found in details),
            "loaded": int(more("load_back_tokens")),
            "computed": int(more("prefill_tokens")),
            "stall s": more("stall_s"),
            "not launching, %": 100 * (1 - (busy_s + more("stall_s")) / elapsed),
            "cold s": cold_s,
            "cut off": "" if is_whole else f"{sum(s.num_finished for s in done)} of {total} in {elapsed:.1f} s",
        }

    def stream(self) -> Iterator[dict[str, Any]]:
        s, page = self.sizes, 16
        n, rng = s.streaming_device, np.random.default_rng(4)
        stream = LayerStreamConfig(2, s.streaming_piece // page)
        options = {"chunked_prefill_size": s.streaming_chunk, "layer_stream": stream}
        with rig_of(self.model, page, n, 4 * n, **options) as rig:
            rig.warm_up()
            # Twice, because the first run compiles.
            for repeat in range(2):
                for times in (1, 2):
                    length = n - s.streaming_output - 2 * page if times == 1 else 2 * n - s.streaming_output
                    before = rig.counters()
                    rig.results.clear()
                    served = rig.serve(rig.prompts(rng, length), s.streaming_output, self.deadline)
                    if served.answers is None:
                        raise OutOfTime
                    rig.engine.settle()
                    if not repeat:
                        continue
                    (answer,) = served.answers
                    yield {
                        "context / device": times,
                        "context": length,
                        "piece": s.streaming_piece,
                        "TTFT s": answer.first_token_s,
                        "TPOT ms": 1e3 * (answer.end_s - answer.first_token_s) / (s.streaming_output - 1),
                        "streamed": int(rig.counters().get("streamed_tokens", 0) - before.get("streamed_tokens", 0)),
                        "copying s": sum(result.stream_s for result in rig.results.values()),
                        "stall s": sum(result.stall_s for result in rig.results.values()),
                    }


PARTS: dict[str, Callable[[Bench], Iterator[dict[str, Any]]]] = {
    "prefill": Bench.prefill,
    "decode": Bench.decode,
    "stream": Bench.stream,
    # Last, because it takes the rest of the time.
    "documents": Bench.documents,
}

# A part that hangs leaves the other parts their time.
PART_S = {"prefill": 45.0, "decode": 60.0, "stream": 45.0}
COLD_S = 45.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--budget-s", type=float, default=1e4, help="for everything: what is left then is not begun")
    parser.add_argument("--variant-s", type=float, default=15.0, help="for the rounds of a variant")
    parser.add_argument("--documents", type=int, help="how many")
    parser.add_argument("--document-tokens", type=int)
    parser.add_argument("--piece-tokens", type=int, help="of one layer, which a buffer of the stream cache holds")
    parser.add_argument("--fp8-weights", action="store_true")
    parser.add_argument("--fp8-kv", action="store_true")
    parser.add_argument("--io-backend", default="auto")
    parser.add_argument("--model-impl", choices=(NATIVE, TRANSFORMERS), default=NATIVE)
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--experts", action="store_true", help="the shape of Qwen3-30B-A3B, not of Llama-3.1-8B")
    shape.add_argument("--latents", action="store_true", help="the shape of DeepSeek-V2-Lite")
    shape.add_argument("--gpt-oss", action="store_true", help="the shape of gpt-oss-20b")
    args = parser.parse_args()
    has = "experts" if args.experts else "latents" if args.latents else "gpt-oss" if args.gpt_oss else ""
    if args.gpt_oss and args.fp8_weights:
        parser.error("the weights of gpt-oss are as its checkpoints have them: leave --fp8-weights out")
    deadline = time.monotonic() + args.budget_s
    sizes = Sizes() if args.device == "cuda" else TINY
    sizes = replace(
        sizes,
        documents=args.documents or sizes.documents,
        document=args.document_tokens or sizes.document,
        streaming_piece=args.piece_tokens or sizes.streaming_piece,
    )
    rows: list[dict[str, Any]] = []
    settings = {**vars(args), "sizes": vars(sizes)}
    backend = "" if args.io_backend == "auto" else f"_{args.io_backend}"
    kind = f"{'_fp8' * args.fp8_weights}{'_fp8kv' * args.fp8_kv}{'_transformers' * (args.model_impl != NATIVE)}"
    name = f"gpu_engine{f'_{has}'.replace('-', '_') if has else ''}{kind}{backend}_{args.device}"

    def save(complete: bool = False) -> None:
        device = {"matrix_flops": bench.flops, "copy_bytes_per_s": bench.bytes_per_s}
        write_json(name, settings, rows, complete, device=device)

    began = time.monotonic()
    model = Model(args.device, args.fp8_weights, args.fp8_kv, args.model_impl, has)
    bench = Bench(model, sizes, args.variant_s, deadline, args.io_backend)
    bench.measure_device()
    print(f"model and yardsticks after {time.monotonic() - began:.1f} s", flush=True)
    for part in args.parts.split(","):
        if time.monotonic() > deadline - 5:
            rows.append({"part": part, "cut off": "not begun"})
            continue
        began, num_before = time.monotonic(), len(rows)
        try:
            with at_most(min(PART_S.get(part, args.budget_s), deadline + 5 - time.monotonic())):
                for row in PARTS[part](bench):
                    rows.append({"part": part, **row})
                    save()
        except (Exception, OutOfTime) as error:
            traceback.print_exc()
            rows.append({"part": part, "error": repr(error)})
        free_memory(args.device)
        print_table(f"{part}, {time.monotonic() - began:.0f} s", _same_columns(rows[num_before:]))
        save()
        sys.stdout.flush()
    is_whole = not any(row.get("cut off") == "not begun" for row in rows)
    save(complete=is_whole)
    if failed := [row for row in rows if "error" in row]:
        sys.exit("; ".join(f"{row['part']} {row.get('variant', '')}: {row['error']}" for row in failed))


def _same_columns(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    columns = list(dict.fromkeys(column for row in rows for column in row if column != "part"))
    return [{column: row.get(column) for column in columns} for row in rows]


if __name__ == "__main__":
    main()
