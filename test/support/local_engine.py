"""A rank in this process: a real model, real threads, real copies, no sockets. For tests and benchmarks.

Drives `EngineCore` as the scheduler process does, with faults if asked for, and can call the KV oracle on a real
model, whose recomputation differs in the last bits.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.constrained.grammar_cache import GrammarCache
from sglang.srt.constrained.grammar_rows import GrammarRows
from sglang.srt.distributed.parallel_state import SINGLE_RANK, TensorParallelGroup
from sglang.srt.layers.attention.attention_registry import make_attention_backend, pick_attention_backend
from sglang.srt.layers.attention.base_attn_backend import WINDOW_TILE, AttentionBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.engine_core import EngineCore
from sglang.srt.managers.io_struct import (
    AdminReqInput,
    PromptKeys,
    SwitchTierReqInput,
    TokenizedGenerateReqInput,
    bytes_to_ids,
    ids_to_bytes,
)
from sglang.srt.managers.schedule_batch import BatchDecision, ControlReply, StorageRequest
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.managers.startup.device import page_layout
from sglang.srt.managers.startup.sizes import with_windows
from sglang.srt.managers.step_record import StepRecorder
from sglang.srt.managers.storage_setup import StorageSetup
from sglang.srt.mem_cache.check_link import CheckLink
from sglang.srt.mem_cache.hybrid_pages import HybridPages
from sglang.srt.mem_cache.layer_stream_cache import LayerStreamCache
from sglang.srt.mem_cache.link import CopyOptions, HasPages, kernel_links_of
from sglang.srt.mem_cache.memory_pool import DevicePool, MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.rate_limit import RateLimit
from sglang.srt.mem_cache.shared_host import LEADERS_LINKS, LeftToLeader
from sglang.srt.mem_cache.staged_pages import StagedPages
from sglang.srt.mem_cache.storage.tiered_store import AnyStore
from sglang.srt.mem_cache.storage_link import StorageLink, StoreSlot
from sglang.srt.mem_cache.swap_file import SwapFile
from sglang.srt.mem_cache.transfer import (
    BACKUP_LINKS,
    CHECK,
    D2S,
    H2D,
    LOAD_LINKS,
    P2H,
    P2P,
    STORAGE_LINKS,
    Link,
    StorageAction,
    Tier,
)
from sglang.srt.model_executor.executor import ExecutorOptions
from sglang.srt.model_loader.loader import load_model
from sglang.srt.peer.memory.borrowed_memory import BorrowedMemory
from sglang.srt.peer.memory.borrowed_pool import BorrowedPool
from sglang.srt.peer.memory.elastic_pool import ElasticPool
from sglang.srt.sampling.logprob_types import LogprobSpec, TokenLogprob
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.clock import monotonic
from sglang.srt.utils.cuda_stream import make_stream
from sglang.srt.utils.device import CPU, settle_memory
from sglang.srt.utils.stream import ThreadStream
from sglang.srt.utils.time_units import Seconds
from support.faults import FaultyExecutor, FaultyLink
from support.pool_pages import Pool, fill_all, poison, poison_windowed

GREEDY = SamplingParams(max_new_tokens=16, temperature=0.0, ignore_eos=True, sampling_seed=0)


@dataclass
class Generation:
    """One request's answer. first_token_s, end_s: seconds since it was submitted."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    embedding: bytes = b""
    cached_tokens_details: dict[str, int] = field(default_factory=dict)
    computed_tokens_details: dict[str, int] = field(default_factory=dict)
    first_token_s: float = 0.0
    end_s: float = 0.0


def _poison(pool: DevicePool | MHATokenToKVPoolHost | ElasticPool, frames: np.ndarray) -> None:
    poison(pool, frames)
    if pool.kv.is_cuda:
        # Not before the device has done so may anybody write there, on whatever stream.
        torch.cuda.synchronize(pool.kv.device)


def _poison_windowed(pool: Pool, frames: np.ndarray) -> None:
    poison_windowed(pool, frames)
    if pool.kv.is_cuda:
        torch.cuda.synchronize(pool.kv.device)


def device_under_test() -> str:
    """What tests compute on if they do not say: SGLANG_TEST_DEVICE is cpu, cuda, or emulated, for a `cuda` that each
    test emulates (see `device_emulator`)."""
    return "cpu" if os.environ.get("SGLANG_TEST_DEVICE", "cpu") == "cpu" else "cuda"


def _attention_for(device: torch.device) -> AttentionBackend:
    # An emulated device runs the CPU's.
    real = device.type == "cpu" or torch.cuda.is_available()
    return make_attention_backend(pick_attention_backend(None, device), device) if real else TorchNativeAttnBackend()


class LocalEngine:
    """num_device_pages, num_host_pages, num_peer_pages: sizes of the pools. debug: poison freed memory, fail on
    non-finite logits and check all invariants after every step. group: several ranks, in which every launch runs to
    its end. open_store: the storage of the host pool; attached from the start if overrides have `storage`.
    load_bytes_per_s: loads from the host are no faster, nor is what is streamed from there. make_pool: the device
    pool, called like `MHATokenToKVPool`. borrow: memory of peers that comes and goes, given what `BorrowedMemory` has
    to know of the engine. device: "cuda" for a GPU's; None for `device_under_test`. attention_backend: the device's
    own by default. io_backend: as the server's flag; by default SGLANG_TEST_IO_BACKEND, or auto. graph_batch_size,
    graph_prefill_tokens: of the largest decode that is a CUDA graph, and of the largest prefill.
    clock: seconds, of what the scheduler is told; when_idle is called whenever there is nothing to do but to wait,
    so that a test with a clock of its own knows when to turn it. evidence: the canary's folder. vocabulary_file: for
    requests with grammars, see `GrammarCache`. shared_host: its leader's, see `shared_host.py`. window_tile: as in
    `with_windows`; None: all is loaded whole. overrides: other fields of SchedulerConfig; nothing is computed
    instead of loaded unless they say so, as that depends on the clock."""

    def __init__(
        self,
        model_config: ModelConfig,
        num_device_pages: int,
        num_host_pages: int = 0,
        page_size: int = 1,
        debug: bool = True,
        load_fail_rate: float = 0.0,
        late_rate: float = 0.0,
        seed: int = 0,
        model: Any = None,
        record: Any = None,
        group: TensorParallelGroup = SINGLE_RANK,
        open_store: Callable[[MHATokenToKVPoolHost], AnyStore] | None = None,
        host_layout: str = "page_first",
        shared_host: MHATokenToKVPoolHost | None = None,
        load_bytes_per_s: float | None = None,
        make_pool: Callable[..., DevicePool] = MHATokenToKVPool,
        num_peer_pages: int = 0,
        borrow: Callable[..., BorrowedMemory] | None = None,
        device: str | None = None,
        attention_backend: AttentionBackend | None = None,
        io_backend: str | None = None,
        load_format: str = "auto",
        graph_batch_size: int = 0,
        graph_prefill_tokens: int = 0,
        clock: Callable[[], Seconds] = monotonic,
        evidence: Path | None = None,
        vocabulary_file: Path | None = None,
        window_tile: int | None = WINDOW_TILE,
        **overrides: Any,
    ) -> None:
        self.model_config = model_config
        io_backend = io_backend or os.environ.get("SGLANG_TEST_IO_BACKEND", "auto")
        # With its index, which tensors have, too.
        where = torch.device("cuda", 0) if (device or device_under_test()) == "cuda" else CPU
        backend = attention_backend or _attention_for(where)
        self.model = model or load_model(model_config, load_format, backend, device=where, group=group)
        if model is None:
            self.model.finish_loading()
        c = model_config
        self.debug = debug
        self.clock = clock
        self.when_idle: Callable[[], None] = lambda: None
        layout = page_layout(c, page_size, group.size)
        self._woken = threading.Event()
        self.borrowed = None
        if borrow is not None:
            self.borrowed = borrow(layout=layout, notify=self._woken.set)
            num_peer_pages = self.borrowed.pool.num_pages
            overrides["slabs"] = self.borrowed.pool.slab_frames
        config = SchedulerConfig(
            page_size=page_size,
            num_device_pages=num_device_pages,
            num_host_pages=num_host_pages,
            num_peer_pages=num_peer_pages,
            page_bytes=layout.page_bytes,
            context_len=c.context_length,
            eos_token_ids=c.eos_token_ids,
            **{
                "num_layers": c.num_layers,
                "load_or_recompute": False,
                "kernel_links": kernel_links_of(io_backend, max(layout.run_bytes), where)
                if where.type == "cuda"
                else (),
                **overrides,
            },
        )
        if window_tile is not None:
            config = with_windows(config, self.model.windows, window_tile)
        windowed, num_windowed = [window is not None for window in self.model.windows], config.num_windowed_pages
        self.device_pool = pool = make_pool(
            num_device_pages,
            layout,
            where,
            **({"has_scratch": True} if graph_batch_size else {}),
            **({"windowed": windowed, "num_windowed_pages": num_windowed} if num_windowed else {}),
        )
        links: dict[str, Link] = {}
        self._streams = [make_stream("compute", where)]
        sources: dict[Tier, HasPages] = {}
        limits = {H2D: RateLimit(load_bytes_per_s)} if load_bytes_per_s else {}
        self.layer_stream = None
        if (streamed := config.layer_stream) is not None:
            self._streams.append(make_stream("layer-stream", where, urgent=True))
            self.layer_stream = LayerStreamCache(
                streamed.num_buffers,
                streamed.buffer_pages,
                pool,
                sources,
                self._streams[-1],
                io_backend,
                rate_limits=limits,
            )
        grammars = GrammarRows(
            c.vocab_size,
            c.eos_token_ids,
            GrammarCache(vocabulary_file, None) if vocabulary_file is not None and group.rank == 0 else None,
            where,
            group.broadcast,
        )
        executor = FaultyExecutor(
            self.model,
            pool,
            self._streams[0],
            links,
            ExecutorOptions(
                page_size,
                c.attn_scale,
                c.vocab_size,
                config.max_running_requests,
                Sampler(),
                self._woken.set,
                check_finite=debug,
                lockstep=group.size > 1,
                device=where,
                attention=backend,
                graph_batch_size=graph_batch_size,
                graph_prefill_tokens=graph_prefill_tokens,
                grammars=grammars,
            ),
            self.layer_stream,
            seed=seed,
            fail_rate=0.0,
            late_rate=late_rate,
        )
        self.host_pool: MHATokenToKVPoolHost | None = None
        self.peer_pool: MHATokenToKVPoolHost | ElasticPool | None = self.borrowed.pool if self.borrowed else None
        if num_host_pages:
            num_windowed_host = config.num_windowed_host_pages
            self.host_pool = host = shared_host or MHATokenToKVPoolHost(
                pool,
                num_host_pages,
                host_layout,
                num_windowed_pages=num_windowed_host,
                windowed=windowed,
                border=config.host_border,
            )
        if num_peer_pages and self.peer_pool is None:
            self.peer_pool = MHATokenToKVPoolHost(pool, num_peer_pages)
        below = {Tier.PEER: self.peer_pool, Tier.HOST: self.host_pool}
        sources |= {tier: each for tier, each in below.items() if each is not None}
        if isinstance(self.peer_pool, BorrowedPool):
            sources[Tier.PEER] = self.peer_pool.seen_by_stream()
        poisons: dict[Tier, Callable[[np.ndarray], None]] = {Tier.DEVICE: partial(_poison, pool)}
        # Each with what is added to the seed.
        linked: list[tuple[str, HasPages, int]] = []
        for tier, each in below.items():
            if each is None:
                continue
            poisons[tier] = partial(_poison, each)
            linked += [(LOAD_LINKS[tier], each, 0), (BACKUP_LINKS[tier], each, 1)]
        if self.peer_pool is not None and self.host_pool is not None:
            linked += [(P2H, self.peer_pool, 2), (P2P, self.peer_pool, 3)]
        linked = [
            (name, each.seen_by_stream(is_within=name == P2P) if isinstance(each, BorrowedPool) else each, more)
            for name, each, more in linked
        ]
        if config.num_swap_pages:
            swap = SwapFile(tempfile.gettempdir(), config.num_swap_pages, layout)
            sources[Tier.DISK] = swap
            if where.type == "cuda":
                sources[Tier.DISK] = StagedPages(swap.kv_pages, layout, where, half_bytes=3 * layout.page_bytes)
            linked.append((D2S, sources[Tier.DISK], 9))
        for name, other, more in linked:
            if shared_host is not None and name in LEADERS_LINKS:
                links[name] = LeftToLeader(name)
                continue
            self._streams.append(make_stream(name, where, urgent=name in LOAD_LINKS.values()))
            links[name] = FaultyLink(
                name,
                {P2H: self.host_pool, P2P: self.peer_pool}.get(name) or pool,
                other,
                self._streams[-1],
                executor.fence,
                self._woken.set,
                seed=seed + more,
                fail_rate=load_fail_rate if name in (*LOAD_LINKS.values(), D2S) else 0.0,
                late_rate=late_rate,
                options=CopyOptions(io_backend, limits.get(name), windowed=windowed),
            )
        storage_links: dict[str, Link] = {}
        if shared_host is not None:
            storage_links = {name: LeftToLeader(name) for name in STORAGE_LINKS}
            open_store = None
        self._slot = StoreSlot(lambda setup: open_store(host)) if open_store is not None else None
        if self.host_pool is not None and self._slot is not None:
            if config.storage is not None:
                self._slot.attach("")
            for name in STORAGE_LINKS:
                self._streams.append(ThreadStream(name))
                storage_links[name] = StorageLink(
                    name, self._slot, self._streams[-1], self._woken.set, host_pool=self.host_pool
                )
        if debug:
            for filled in (pool, self.host_pool, self.peer_pool):
                # What is borrowed is not there yet, and poisoned as it comes.
                if filled is not None and not isinstance(filled, ElasticPool):
                    fill_all(filled, float("nan"))
            if self.layer_stream is not None:
                self.layer_stream.kv.view(torch.uint8).fill_(255)
        poisons_windowed = {
            tier: partial(_poison_windowed, each)
            for tier, each in ((Tier.DEVICE, pool), (Tier.HOST, self.host_pool))
            if debug and each is not None and isinstance(each.kv_pages, HybridPages)
        }
        self.core = EngineCore(
            Scheduler(config),
            executor,
            {**links, **storage_links},
            poisons if debug else None,
            StepRecorder(record, config) if record is not None else None,
            self.borrowed,
            poison_windowed=poisons_windowed,
        )
        if evidence is not None:
            self._streams.append(ThreadStream(CHECK))
            self.core.links[CHECK] = CheckLink(pool, evidence, group.rank, self._streams[-1], self._woken.set)
        settle_memory(where)
        executor.capture_graphs()
        self._next_rid = 0
        self._answers: dict[str, Generation] = {}
        self._submitted: dict[str, float] = {}

    @property
    def store(self) -> Any:
        """What is attached: what `open_store` returned, or None."""
        return self._slot.store if self._slot is not None else None

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler

    def generate(
        self,
        prompts: Sequence[Sequence[int] | np.ndarray],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        abort_after: dict[int, int] | None = None,
        after_step: Callable[[BatchDecision], None] = lambda decision: None,
        extra_key: str = "",
        logprobs: LogprobSpec | Sequence[LogprobSpec | None] | None = None,
        cache: str = "",
        is_embedding: bool = False,
    ) -> list[Generation]:
        """Submit all prompts at once and run until all have ended. params, logprobs: of all, or one per prompt.
        abort_after: prompt -> abort it once it has given this many tokens."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        specs = [logprobs] * len(prompts) if logprobs is None or isinstance(logprobs, LogprobSpec) else logprobs
        rids = []
        requests = []
        names = self.scheduler.cache.tree.names.keys
        for prompt, sampling, spec in zip(prompts, each, specs, strict=True):
            rid = f"local-{self._next_rid}"
            self._next_rid += 1
            rids.append(rid)
            self._answers[rid] = Generation()
            requests.append(
                TokenizedGenerateReqInput(
                    rid=rid,
                    input_ids=ids_to_bytes(prompt),
                    sampling_params=sampling,
                    extra_key=extra_key,
                    cache=cache,
                    stream=True,
                    logprobs=spec,
                    is_embedding=is_embedding,
                    prompt_keys=PromptKeys.make(names, extra_key, np.asarray(prompt)) if names is not None else None,
                )
            )
        pending = {rids[i]: n for i, n in (abort_after or {}).items()}
        start = time.perf_counter()
        while requests or any(not self._answers[rid].finish_reason for rid in rids):
            aborts = [rid for rid, n in pending.items() if len(self._answers[rid].tokens) >= n]
            for rid in aborts:
                del pending[rid]
            self._turn(start, requests, aborts, after_step)
            requests = []
        return [self._answers.pop(rid) for rid in rids]

    def administer(self, action: StorageAction, what: StorageSetup | None = None) -> tuple[bool, str]:
        """Attach storage, detach or clear it; attaching calls `open_store`. Whether it succeeded, and why not."""
        decision = self.begin_to_administer(action, what)
        while not decision.replies:
            decision = self._next_decision()
        return decision.replies[0].success, decision.replies[0].message

    def begin_to_administer(self, action: StorageAction, what: StorageSetup | None = None) -> BatchDecision:
        """The first step of `administer`, beside requests that are under way."""
        request = StorageRequest(id="admin", action=action, what=what)
        decision = self.core.step(self.clock(), self.core.progress(), storage=[request])
        self._take_outputs(decision, 0.0)
        return decision

    def switch(self, tier: str, reads: bool | None = None, writes: bool | None = None) -> str:
        """Turn a tier on or off. Returns why that cannot be."""
        switch = SwitchTierReqInput(id="admin", tier=tier, reads=reads, writes=writes)
        decision = self.core.step(self.clock(), self.core.progress(), admin=[switch])
        self._take_outputs(decision, 0.0)
        (reply,) = decision.replies
        assert reply.success == (not reply.message)
        return reply.message

    def ask_admin(self, request: AdminReqInput) -> ControlReply:
        """What an administrator asks for; the answer may wait for storage."""
        decision = self.core.step(self.clock(), self.core.progress(), admin=[request])
        while True:
            self._take_outputs(decision, 0.0)
            if decision.replies:
                return decision.replies[0]
            decision = self._next_decision()

    def _next_decision(self) -> BatchDecision:
        while True:
            progress = self.core.progress()
            if self.core.has_work(self.clock()):
                return self.core.step(self.clock(), progress)
            time.sleep(0.001)

    def forget(self) -> None:
        """Empty device and host, once all is over; storage keeps what it has."""
        self.settle()
        for tier, table in self.scheduler.cache.tables.items():
            self.scheduler.cache.controller.evict(tier, table.num_pages)
            # With write_back, what leaves the device goes to the host first: carry that out.
            self.core.step(self.clock(), self.core.progress())
            self.settle()

    def settle(self) -> None:
        """Wait until every launch and transfer is over and consumed."""
        while self.core.has_outstanding:
            self._turn(0.0, [], [], lambda decision: None)

    def step_until(self, true: Callable[[], bool]) -> None:
        """Take the steps that operations under way cause, until something is true."""
        while not true():
            self._turn(0.0, [], [], lambda decision: None)

    def close(self) -> None:
        for stream in self._streams:
            stream.close()

    def _step(self, requests: list[TokenizedGenerateReqInput], aborts: list[str]) -> BatchDecision | None:
        """One step; None where there is nothing to do."""
        progress = self.core.progress()
        if not (requests or aborts or self.core.has_work(self.clock())):
            return None
        return self.core.step(self.clock(), progress, requests, aborts)

    def _turn(
        self,
        start: float,
        requests: list[TokenizedGenerateReqInput],
        aborts: list[str],
        after_step: Callable[[BatchDecision], None],
    ) -> None:
        self._woken.clear()
        decision = self._step(requests, aborts)
        if decision is None:
            self.when_idle()
            # Late completions are held back by the faulty link and reported at a later poll: look again soon.
            self._woken.wait(0.001)
            return
        if self.debug:
            self.scheduler.check_invariants()
        self._take_outputs(decision, time.perf_counter() - start)
        after_step(decision)

    def _take_outputs(self, decision: BatchDecision, now: float) -> None:
        """now: seconds since the requests came."""
        for output in decision.outputs:
            answer = self._answers[output.rid]
            if output.output_ids and not answer.tokens:
                answer.first_token_s = now
            answer.tokens += bytes_to_ids(output.output_ids).tolist()
            answer.logprobs += output.logprobs
            answer.prompt_logprobs += output.prompt_logprobs
            answer.embedding = output.embedding
            answer.cached_tokens_details = output.cached_tokens_details
            answer.computed_tokens_details = output.computed_tokens_details
            if output.finish_reason is not None:
                answer.finish_reason = output.finish_reason.type
                answer.end_s = now
