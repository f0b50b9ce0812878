"""`GuardedStore`: a far store that hangs or fails is left alone, so that a near store before it goes on by itself.

Owns the far store, the decision whether it is used, and one thread that asks `exists`. `exists` touches no memory of
the host pool, so no caller waits for it beyond a limit. Reads and writes use frames of the host pool. They are
answered when the far store has ended them, however long that takes.

    used ──no answer in time, an error, or reads in a row that bring nothing──► left alone: each call counts 0 blocks,
      ▲                                                                        │ at once
      └── a trial finds a block, or some in a row are answered in time ────────┘ a trial after 1, 2, 4, 8, 8, … s
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from sglang.srt.mem_cache.block_store import (
    BlockStore,
    ExistsFailed,
    OverlappingStore,
    TenantStore,
    TouchedStore,
    has_room,
)
from sglang.srt.mem_cache.storage.windowed_store import find
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.utils.clock import monotonic

logger = logging.getLogger(__name__)

# How long a caller waits for `exists`: so long, or some times as long as usual, but never longer than the second.
LIMIT_S = 0.5
LONGEST_LIMIT_S = 1.0
_USUAL_TIMES = 10.0
# A read begins without a question if the store has answered so recently. A write never does: no request waits for it,
# and one that hangs holds up all writes to the near store.
_FRESH_S = 1.0
# So many reads in a row that bring nothing.
EMPTY_READS = 2
# Before the first trial; each further pause is twice as long, up to the second.
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 8.0
# So many trials in a row that are answered in time and find nothing. The store may have lost what it had; one that
# cannot be reached may answer the same.
EMPTY_TRIALS = 3
_CLOSE_LIMIT_S = 5.0
# Blocks that are remembered as not written.
_MAX_MISSED = 1 << 14


@dataclass(eq=False)
class _Question:
    """One call of `exists`. Two links may ask for the same keys."""

    keys: Sequence[bytes]
    is_trial: bool = False
    is_over: bool = False
    # None: it failed.
    count: int | None = None
    # See `WindowedStore.find`.
    part_count: int = 0


class GuardedStore:
    """limit_s: see LIMIT_S. clock: in seconds."""

    def __init__(self, store: BlockStore, limit_s: float = LIMIT_S, clock: Callable[[], float] = monotonic) -> None:
        self.name = store.name
        self.block_tokens = store.block_tokens
        self.store = store
        # Why it is left alone; empty while it is used.
        self.reason = ""
        self._least_limit_s = self._limit_s = limit_s
        self._clock = clock
        # Guards all that follows. Notified when a question or a trial is due, and when a question is over.
        self._changed = threading.Condition()
        self._is_closed = False
        self._questions: deque[_Question] = deque()
        # What the thread asks now.
        self._asking: _Question | None = None
        self._usual_s = 0.0
        self._answered_at = float("-inf")
        self._trial_at = float("inf")
        self._pause_s = FIRST_PAUSE_S
        self._empty_reads = self._empty_trials = 0
        # What a trial asks for: a block that was there, or else the one that was asked for last.
        self._known_key: bytes | None = None
        self._last_key: bytes | None = None
        # Blocks that were not written while it was left alone, oldest first.
        self._missed: dict[bytes, None] = {}
        threading.Thread(target=self._work, name="far-store", daemon=True).start()

    # -- the protocol BlockStore ----------------------------------------------------------------------------------

    def exists(self, keys: Sequence[bytes]) -> int:
        return self.find(keys)[0]

    def find(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """See `WindowedStore.find`."""
        answer = self._ask(keys)
        return (answer.count or 0, answer.part_count) if answer is not None else (0, 0)

    def get(self, keys: Sequence[bytes], frames: np.ndarray) -> int:
        if not self._may_read(keys):
            return 0
        return self._call(keys, partial(self.store.get, keys, frames), is_read=True)

    def start_get(
        self, keys: Sequence[bytes], frames: np.ndarray, on_end: Callable[[int], None]
    ) -> Callable[[], None]:
        """See OverlappingStore. A store of another kind is read before this returns."""
        if not isinstance(self.store, OverlappingStore) or not self._may_read(keys):
            on_end(self.get(keys, frames))
            return lambda: None
        began, is_unwanted = self._clock(), threading.Event()

        def ended(count: int) -> None:
            # One that was given up may bring less.
            if not is_unwanted.is_set():
                self._note_call(keys, count, began, is_read=True)
            on_end(count)

        try:
            hint = self.store.start_get(keys, frames, ended)
        except Exception as raised:
            self._leave_alone(f"a read failed: {raised!r}")
            on_end(0)
            return lambda: None

        def give_up() -> None:
            is_unwanted.set()
            hint()

        return give_up

    def set(self, keys: Sequence[bytes], frames: np.ndarray, tenant: bytes = b"") -> int:
        if self._ask(keys[:1]) is None:
            self._note_missed(keys)
            return 0
        with self._changed:
            for key in keys:
                self._missed.pop(key, None)
        count = self._call(keys, partial(self.store.set, keys, frames, tenant), is_read=False)
        if self.reason:
            self._note_missed(keys[count:])
        return count

    def touch(self, keys: Sequence[bytes]) -> int:
        """See TouchedStore. Blocks that were not written while the store was left alone count as lost, so that they
        are written when they are used again. All others count as there if the store is not told, or left alone."""
        count = len(keys)
        if isinstance(self.store, TouchedStore) and self._ask(keys[:1]) is not None:
            try:
                count = self.store.touch(keys)
            except Exception as raised:
                self._leave_alone(_reason(raised))
        if self.reason:
            return len(keys)
        with self._changed:
            return next((i for i, key in enumerate(keys[:count]) if key in self._missed), count)

    def erase(self, tenant: bytes, tier: Tier) -> bool:
        """See TenantStore."""
        if not isinstance(self.store, TenantStore):
            logger.warning("nothing was erased from the %s store: it has no tenants", self.name)
            return False
        # Also where requests leave it alone: a store that is full can drop blocks.
        return self.store.erase(tenant, tier)

    def limit(self, tenant: bytes, num_blocks: int, tier: Tier) -> bool:
        """See TenantStore."""
        return isinstance(self.store, TenantStore) and self.store.limit(tenant, num_blocks, tier)

    def has_missed(self, key: bytes) -> bool:
        """Whether the block was not written, as the store failed or was left alone. From any thread."""
        return key in self._missed

    @property
    def has_room(self) -> bool:
        return has_room(self.store)

    @property
    def is_synchronous(self) -> bool:
        return getattr(self.store, "is_synchronous", False)

    def clear(self) -> bool:
        with self._changed:
            self._known_key, is_used = None, not self.reason
            self._missed.clear()
        if is_used:
            return self.store.clear()
        logger.warning("the %s store was not emptied: it is left alone, as %s", self.name, self.reason)
        return False

    def close(self) -> None:
        """Waits for a limited time where the store hangs."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            is_idle = self._changed.wait_for(lambda: self._asking is None, self._limit_s)
        if is_idle:
            self.store.close()
            return
        # `close` ends the call that hangs, or hangs too.
        closing = threading.Thread(target=self.store.close, name="far-store-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_LIMIT_S)

    def stats(self) -> dict[str, int]:
        """left_alone: 1 while it is."""
        return {**self.store.stats(), "left_alone": int(bool(self.reason))}

    # -- whether it is used ---------------------------------------------------------------------------------------

    def _may_read(self, keys: Sequence[bytes]) -> bool:
        with self._changed:
            if self.reason or self._is_closed:
                return False
            is_fresh = self._clock() - self._answered_at < _FRESH_S
        return is_fresh or self._ask(keys[:1]) is not None

    def _call(self, keys: Sequence[bytes], call: Callable[[], int], is_read: bool) -> int:
        began = self._clock()
        try:
            count = call()
        except Exception as raised:
            self._leave_alone(_reason(raised))
            return 0
        self._note_call(keys, count, began, is_read)
        return count

    def _note_call(self, keys: Sequence[bytes], count: int, began: float, is_read: bool) -> None:
        """A read or a write is over. Writes that are refused at once cost nothing, and a store that is full can be
        read."""
        with self._changed:
            now = self._clock()
            if count >= len(keys):
                self._answered_at, self._known_key = now, keys[0]
                self._empty_reads, self._pause_s = 0, FIRST_PAUSE_S
            elif now - began > LONGEST_LIMIT_S:
                self._leave_alone(f"an operation has taken {now - began:.1f} s and failed")
            elif is_read and not count:
                self._empty_reads += 1
                if self._empty_reads >= EMPTY_READS:
                    self._leave_alone(f"{self._empty_reads} reads in a row have brought nothing")

    def _note_missed(self, keys: Sequence[bytes]) -> None:
        with self._changed:
            self._missed.update(dict.fromkeys(keys))
            while len(self._missed) > _MAX_MISSED:
                del self._missed[next(iter(self._missed))]

    def _leave_alone(self, reason: str) -> None:
        with self._changed:
            if self.reason or self._is_closed:
                return
            self.reason = reason
            self._trial_at = self._clock() + self._pause_s
            self._empty_trials = 0
            logger.warning(
                "the %s store is left alone: %s; storage goes on without it, and trials show when it works again",
                self.name,
                reason,
            )
            self._changed.notify_all()

    def _use_again(self) -> None:
        self.reason = ""
        self._empty_reads = 0
        logger.warning("the %s store is used again", self.name)

    # -- questions and trials -------------------------------------------------------------------------------------

    def _ask(self, keys: Sequence[bytes]) -> _Question | None:
        """The question, answered; None if the store is left alone, also from now on."""
        question = _Question(keys)
        with self._changed:
            if self.reason or self._is_closed or not keys:
                return None
            self._last_key, limit_s = keys[0], self._limit_s
            self._questions.append(question)
            self._changed.notify_all()
            self._changed.wait_for(lambda: question.is_over or bool(self.reason) or self._is_closed, limit_s)
            if question in self._questions:
                self._questions.remove(question)
            if not question.is_over:
                self._leave_alone(f"it has not answered within {limit_s:.1f} s")
            return question if question.count is not None else None

    def _work(self) -> None:
        while (question := self._next_question()) is not None:
            began, error = self._clock(), ""
            try:
                found = find(self.store, question.keys)
            except Exception as raised:
                found, error = None, _reason(raised)
            with self._changed:
                question.is_over = True
                question.count, question.part_count = found or (None, 0)
                self._note_answer(question, self._clock() - began, error)

    def _next_question(self) -> _Question | None:
        """Waits until one is due; None when the store is closed."""
        with self._changed:
            self._asking = None
            self._changed.notify_all()
            while not self._is_closed:
                if self._questions:
                    self._asking = self._questions.popleft()
                    return self._asking
                key = self._known_key or self._last_key
                left_s = self._trial_at - self._clock() if self.reason and key is not None else None
                if left_s is not None and left_s <= 0 and key is not None:
                    self._asking = _Question([key], is_trial=True)
                    return self._asking
                self._changed.wait(left_s)
            return None

    def _note_answer(self, question: _Question, seconds: float, error: str) -> None:
        count = question.count
        if self.reason and question.is_trial:
            self._note_trial(count, seconds)
        elif count is None:
            self._leave_alone(error)
        elif not self.reason:
            self._answered_at = self._clock()
            self._usual_s += 0.1 * (seconds - self._usual_s)
            self._limit_s = max(self._least_limit_s, min(LONGEST_LIMIT_S, _USUAL_TIMES * self._usual_s))
            if count:
                self._known_key = question.keys[0]

    def _note_trial(self, count: int | None, seconds: float) -> None:
        is_in_time = count is not None and seconds <= self._limit_s
        self._empty_trials = self._empty_trials + 1 if is_in_time and not count else 0
        if is_in_time and (count or self._empty_trials >= EMPTY_TRIALS):
            self._answered_at = self._clock()
            if count:
                self._pause_s = FIRST_PAUSE_S
            self._use_again()
            return
        # One that finds its block late was begun before the store worked again.
        self._pause_s = FIRST_PAUSE_S if count else min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._trial_at = self._clock() + self._pause_s


def _reason(raised: Exception) -> str:
    """Of a call that failed."""
    is_told = isinstance(raised, ExistsFailed) and str(raised)
    return str(raised) if is_told else f"a call failed: {raised!r}"
