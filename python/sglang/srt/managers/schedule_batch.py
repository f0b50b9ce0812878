"""The scheduler's data: requests, their holds and plans, what goes into a step and what comes out.

Plain data over numpy and msgspec; no torch, thread, socket or clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

import msgspec
import numpy as np

from sglang.srt.managers.io_struct import AdminReqInput, TokenizedGenerateReqInput, TokenOutput
from sglang.srt.managers.storage_setup import StorageSetup
from sglang.srt.mem_cache.node import Receipt
from sglang.srt.mem_cache.slab_ledger import SlabReport
from sglang.srt.mem_cache.transfer import StorageAction, StorageOp, Ticket, TransferOp
from sglang.srt.model_executor.launch import Launch
from sglang.srt.sampling.logprob_types import LaunchFindings, TokenLogprob
from sglang.srt.sampling.sample_spec import SampleSpec
from sglang.srt.utils.time_units import NO_LAUNCH, Seconds

# A request ends with an error when launches with it failed, or lacked memory that should be there, too often:
# `Req.num_failures`.
FAILURE_LIMIT = 30


class SpanSource(IntEnum):
    """Where the KV of a run of prompt tokens comes from."""

    DEVICE = 0
    LOAD = 1
    COMPUTE = 2
    STREAM = 3


@dataclass(frozen=True)
class Span:
    """Tokens [start, end) of a prompt. ticket: the operation that loads them."""

    start: int
    end: int
    source: SpanSource
    ticket: Ticket | None = None


class EndReason(Enum):
    """Why a hold ends."""

    FINISH = "finish"
    ABORT = "abort"
    # Others need the memory; the request starts again.
    RETRACT = "retract"
    # A part of its KV is lost; the request starts again.
    LOST = "lost"


class ReqHold:
    """All device memory that one running request has to itself, and its lock on the tree.

    The pages from `inserted_len` tokens on are HELD frames of this request; everything before is the tree's, locked
    by `receipt`. Only `Scheduler.end_hold` ends one.
    """

    __slots__ = ("_first", "_frames", "_last", "id", "inserted_len", "is_partial", "num_swapped", "receipt")

    def __init__(self, hold_id: int, receipt: Receipt, inserted_len: int) -> None:
        self.id = hold_id
        self.receipt = receipt
        self.inserted_len = inserted_len
        # Pages behind those that were inserted that are in the swap file, or on their way there.
        self.num_swapped = 0
        # Whether the first of its frames lack what layers with a window have of them. They stay the request's own.
        self.is_partial = False
        self._frames = np.empty(16, np.int32)
        self._first = 0
        self._last = 0

    @property
    def frames(self) -> np.ndarray:
        """HELD frames in page order, a view that later calls may change."""
        return self._frames[self._first : self._last]

    def note_partial(self) -> None:
        """The first frames have lost what layers with a window have of them."""
        self.is_partial = True

    def extend(self, frames: np.ndarray) -> None:
        n = self._last + len(frames)
        if n > len(self._frames):
            self._grow(len(frames))
            n = self._last + len(frames)
        self._frames[self._last : n] = frames
        self._last = n

    def append(self, frame: int) -> None:
        if self._last == len(self._frames):
            self._grow(1)
        self._frames[self._last] = frame
        self._last += 1

    def replace_receipt(self, receipt: Receipt) -> Receipt:
        """Another lock of its path. Returns the one before, which is to be released."""
        before, self.receipt = self.receipt, receipt
        return before

    def pass_on(self, num_pages: int, num_tokens: int) -> None:
        """The first pages belong to the tree, or are given up, from now on."""
        self._first += num_pages
        self.inserted_len += num_tokens

    def swap_out(self, num_pages: int) -> None:
        """The first pages go to the swap file."""
        self._first += num_pages
        self.num_swapped += num_pages

    def take_back(self, frames: np.ndarray, num_tokens: int) -> None:
        """What was passed on last is the request's own again."""
        mine = np.concatenate((frames, self.frames))
        self._frames, self._first, self._last = mine, 0, len(mine)
        self.inserted_len -= num_tokens

    def _grow(self, n: int) -> None:
        # Always a new array: the tree keeps slices of the old one.
        live = self.frames
        grown = np.empty(2 * (len(live) + n) + 16, np.int32)
        grown[: len(live)] = live
        self._frames, self._first, self._last = grown, 0, len(live)


@dataclass(frozen=True)
class Preload:
    """A load that goes on while its request waits, of tokens [start, end)."""

    # Keeps what it loads and all before it on the device.
    receipt: Receipt
    start: int
    end: int
    # Runs [start, end) of them that come from peers.
    from_peers: tuple[tuple[int, int], ...]


class Req:
    """A request inside the scheduler."""

    __slots__ = (
        "cached_tokens_details",
        "came_at",
        "chunk_limit",
        "computed",
        "computed_tokens_details",
        "delay_end",
        "embedding",
        "emit_every",
        "epoch",
        "fetched",
        "fills_cache",
        "hold",
        "insert_at",
        "is_check",
        "last_launch",
        "leaves_at",
        "length",
        "loaded",
        "loaded_from_peers",
        "logprobs",
        "max_len",
        "most_room",
        "namespace",
        "num_emitted",
        "num_failures",
        "num_known",
        "num_passed",
        "num_prompt",
        "num_recalls",
        "num_retractions",
        "order",
        "plan",
        "preload",
        "preload_cancelled",
        "priority",
        "prompt_keys",
        "prompt_logprobs",
        "prompt_logprobs_asked",
        "reads_cache",
        "rid",
        "session",
        "slot",
        "spec",
        "stop_ids",
        "tokens",
    )

    def __init__(
        self, msg: TokenizedGenerateReqInput, order: int, prompt: np.ndarray, max_len: int, stop_ids: frozenset[int]
    ) -> None:
        self.rid = msg.rid
        # Requests share tokens within a namespace only.
        self.namespace = msg.extra_key
        # The session that it names; None if it names none, or shares no cache. See `SessionKeeper`.
        self.session = (msg.extra_key, msg.session_id) if msg.session_id else None
        self.set_cache_mode(msg.cache)
        # Whether it is the canary's own: no client hears of it, and it counts nowhere.
        self.is_check = False
        # The most tokens of its prompt that one launch computes, where that is less than for others.
        self.chunk_limit = 1 << 62
        # Of its blocks, if they came with it.
        self.prompt_keys = msg.prompt_keys
        self.priority = msg.priority
        self.spec = SampleSpec(
            msg.sampling_params, tuple(sorted(stop_ids)), len(prompt), msg.logprobs, msg.is_embedding
        )
        # Place in the order of arrival.
        self.order = order
        # See `Prefetch`.
        self.leaves_at = 0
        # The next launch when it came; of a session's requests.
        self.came_at = NO_LAUNCH
        # (max_len,) int32, prompt and output; the first num_known are there.
        self.tokens = np.empty(max_len, np.int32)
        self.tokens[: len(prompt)] = prompt
        self.num_prompt = self.num_known = len(prompt)
        self.max_len = max_len
        # Tokens that exist or are being sampled, at most max_len.
        self.length = len(prompt)
        self.stop_ids = stop_ids
        # Tokens that were passed on, and how many are passed on at a time.
        self.num_emitted = len(prompt)
        self.emit_every = 1
        # Tokens whose KV is there, or will be after the launches that are issued.
        self.computed = 0
        # When `computed` gets there, decoded tokens enter the tree.
        self.insert_at = 0
        # The last launch that computes tokens of it.
        self.last_launch = NO_LAUNCH
        # Counts holds; results of an older epoch are not this request's any more.
        self.epoch = 0
        self.num_retractions = 0
        # Of launches, weighted; see scheduler.py.
        self.num_failures = 0
        # Younger requests that started while it could have.
        self.num_passed = 0
        # How often lenders took back memory with KV that it read.
        self.num_recalls = 0
        # The most tokens that there was room for while it streamed.
        self.most_room = 0
        # Of the page table; -1 while it waits.
        self.slot = -1
        self.hold: ReqHold | None = None
        # Where each token comes from, without gaps.
        self.plan: tuple[Span, ...] = ()
        # Runs [start, end) of prompt tokens that storage brought to the host for it, for each storage tier.
        self.fetched: tuple[tuple[tuple[int, int], ...], ...] = ()
        # Its load, if that began before its launch, and whether it lost one as others needed the memory.
        self.preload: Preload | None = None
        self.preload_cancelled = False
        # Runs [start, end) that such loads brought, and those of them that came from peers.
        self.loaded: tuple[tuple[int, int], ...] = ()
        self.loaded_from_peers: tuple[tuple[int, int], ...] = ()
        # Up to there it shared its tokens with what an older request was about to compute when it came; 0 for none.
        self.delay_end = 0
        self.cached_tokens_details: dict[str, int] = {}
        # Why it computes the others: reason -> tokens, see `LostHits`.
        self.computed_tokens_details: dict[str, int] = {}
        # One per generated token, if asked for.
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        # float32 bytes, if asked for.
        self.embedding = b""
        if self.spec.logprobs is not None and self.spec.logprobs.prompt_from == 0:
            self.prompt_logprobs.append(TokenLogprob(int(prompt[0]), None))
        # Prompt tokens below it have theirs, or a launch is finding it.
        self.prompt_logprobs_asked = self.next_prompt_logprob

    def set_cache_mode(self, mode: str) -> None:
        """mode: see `TokenizedGenerateReqInput.cache`."""
        # Whether the cache serves it, and keeps what it computes.
        self.reads_cache = mode != "bypass"
        self.fills_cache = not mode
        if mode:
            self.session = None

    @property
    def next_prompt_logprob(self) -> int:
        """The first prompt token whose log-probability is wanted and not there; num_prompt if there is none."""
        spec = self.spec.logprobs
        if spec is None or spec.prompt_from is None:
            return self.num_prompt
        return min(self.num_prompt, max(1, spec.prompt_from + len(self.prompt_logprobs)))

    @property
    def least_len(self) -> int:
        """The tokens that it needs room for to go on: one more than are known, unless it is a prompt without an
        answer that takes all the room there is."""
        return min(self.num_known + 1, self.max_len)

    def reset(self) -> None:
        """Its hold has ended: it starts again, or has ended itself."""
        self.hold = None
        self.epoch += 1
        self.length = self.num_known
        self.prompt_logprobs_asked = self.next_prompt_logprob
        self.computed = 0

    def check_invariants(self) -> None:
        """Of a request that has a hold."""
        assert self.num_known <= self.length <= self.max_len
        pos = 0
        for span in self.plan:
            assert span.start == pos and span.end >= pos, f"{self}: a gap in its plan"
            pos = span.end
        assert pos >= self.num_prompt

    def __repr__(self) -> str:
        return f"Req({self.rid}, {self.num_known} tokens known, {self.computed} computed, epoch {self.epoch})"


class StorageRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Attach storage, detach or clear it. what: for ATTACH."""

    id: str
    action: StorageAction
    what: StorageSetup | None = None


class StepInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a step may know. Equal on all ranks."""

    # Its number.
    step: int
    # Of rank 0.
    now: Seconds
    new: tuple[TokenizedGenerateReqInput, ...] = ()
    # Ids of requests.
    aborts: tuple[str, ...] = ()
    # Completed operations per link, and launches under EXEC.
    done: dict[str, int]
    # Per link the earliest failed number that no step has seen.
    failed: dict[str, int] = {}
    # Per storage link, the results of the operations that are new in `done`.
    counts: dict[str, tuple[int, ...]] = {}
    # For each result of a probe, how many of its blocks, the last ones, lie on the second storage tier.
    far_counts: tuple[int, ...] = ()
    # For each result of a probe, see `OpResult`.
    part_counts: tuple[int, ...] = ()
    # Launch -> its sampled tokens, int32 bytes.
    results: dict[int, bytes] = {}
    # Launch -> what it found beside tokens, if asked to.
    findings: dict[int, LaunchFindings] = {}
    # Seconds that rank 0 measured, by number: of launches (EXEC; STALL for what they waited, STREAM for what they
    # streamed), of copies (MEASURED_LINKS), and of reads and writes of storage (FETCH, STORE).
    cost: dict[str, dict[int, float]] = {}
    # Ids of flush requests.
    flush: tuple[str, ...] = ()
    # What an administrator asks of the storage tier.
    storage: tuple[StorageRequest, ...] = ()
    # What else an administrator asks for.
    admin: tuple[AdminReqInput, ...] = ()
    # What all ranks may use of borrowed or lent memory.
    slab_report: SlabReport = SlabReport()
    # Whether storage can take more blocks without giving up others.
    storage_has_room: tuple[bool, ...] = (True, True)


class ControlReply(msgspec.Struct, frozen=True):
    """The answer to a request of an administrator, see `ControlReqOutput`."""

    id: str
    success: bool
    message: str = ""
    result: dict[str, Any] = {}


@dataclass(frozen=True)
class BatchDecision:
    """What to do after a step, in this order: poison freed frames (tests), tell lenders the demand, lend or give back
    slabs, recall slabs, reset, cancel, submit operations without a fence, launch, submit the others."""

    step: int
    # Launches below it that have not completed are void.
    reset: int | None = None
    cancels: tuple[Ticket, ...] = ()
    ops: tuple[TransferOp | StorageOp, ...] = ()
    launch: Launch | None = None
    # Tier -> frames that became FREE.
    freed: dict[int, np.ndarray] = field(default_factory=dict)
    # The same of the pool for layers with a window.
    freed_windowed: dict[int, np.ndarray] = field(default_factory=dict)
    outputs: tuple[TokenOutput, ...] = ()
    replies: tuple[ControlReply, ...] = ()
    # Slabs of which no page is in use any more: a lender lends them, a borrower gives them back.
    slabs_drained: tuple[int, ...] = ()
    # Those of `slabs_drained` that the borrower chose itself.
    slabs_given_up: tuple[int, ...] = ()
    # How many slabs a lender recalls, see `LentSlabs`.
    num_slabs_recalled: int = 0
    # If it has changed, how many slabs a borrower would like to have in all, and what one is worth, in microseconds.
    peer_demand: tuple[int, int] | None = None

    def encode(self) -> bytes:
        """Canonical bytes: equal decisions, equal bytes."""
        return _encode_decision(self)


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.tobytes()]
    raise TypeError(f"cannot encode {type(value)}")


_encode_decision = msgspec.msgpack.Encoder(enc_hook=_encode_array).encode
