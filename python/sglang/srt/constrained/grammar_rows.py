"""`GrammarRows`: how far each running request has come in its grammar, and what that lets it draw next.

Owned by the executor, on its stream, as `PenaltyTable` is. With several ranks, rank 0 alone follows the grammars and
broadcasts what they allow, so that ranks cannot disagree. Nothing here raises: a launch has other requests too, and
other ranks wait for this one in collectives. A request whose grammar cannot be followed any further goes on without,
and is reported, so that the scheduler ends it.

    start -> [mask -> draw -> drawn] -> [mask (takes in what was drawn) -> draw -> drawn] -> ...

The tokens of a launch are taken in only by the next mask. On a GPU the host then waits for them while the device
computes that launch's logits.

A grammar may be made to take long, and all of its batch waits. The processor's time of a row is therefore counted:

    the row's credit:    grows with each token, and pays first
    what all rows share: grows with the clock, and pays what the credit does not; the row fails where it cannot

xgrammar holds Python's lock meanwhile. Rows that take long, but no longer than a token is allowed, are therefore
filled together by its own threads, which tell only the time of all.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang.srt.constrained.grammar_cache import GrammarCache
from sglang.srt.sampling.sample_spec import SampleSpec
from sglang.srt.utils.device import CPU, to_device

if TYPE_CHECKING:
    import xgrammar

# All in seconds of the processor. Most grammars take some 20 us for each token, nested repetitions several ms. An
# ambiguous one takes longer with each token. What a row is credited at its start, and at most:
START_S = 0.02
CREDIT_S = 0.2
# The rows of a launch are credited so much together, each with its token, within bounds. The lower one is above what
# useful grammars take: many of them in one launch do not fail, however long that takes.
LAUNCH_S = 0.1
TOKEN_S = (0.005, 0.02)
# What all rows share beyond that, and what is added to it in a second of the clock.
SHARED_S = 2.0
SHARED_PER_SECOND_S = 0.1
# Rows whose last mask took so long, and not over what a token is allowed, share threads and time. A row pays for a
# mask of several no more than that, so that none fails for another's. Masks that took `EXCESS` times as long as their
# rows' last hide a row that got slow: the next `NUM_ALONE` masks of each of them are counted alone, and twice as many
# each further time.
THREADS_S = 0.0002
EXCESS = 4
NUM_ALONE = 16
MAX_THREADS = 8

_WORD_BITS = 32

logger = logging.getLogger(__name__)


def token_allowance_s(num_rows: int) -> float:
    """Of each row in a launch of so many."""
    least, most = TOKEN_S
    return min(most, max(least, LAUNCH_S / max(1, num_rows)))


class _SharedTime:
    """What all rows may take beyond their credits."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = SHARED_S
        self._counted_at = clock()

    def take(self, seconds: float) -> bool:
        """False: there is not so much, and nothing is left. The time has been taken anyway."""
        now = self._clock()
        grown = self._seconds + SHARED_PER_SECOND_S * (now - self._counted_at)
        left = min(SHARED_S, grown) - seconds
        self._seconds, self._counted_at = max(0.0, left), now
        return left >= 0


class _Row:
    """A request's place in its grammar."""

    def __init__(
        self,
        cache: GrammarCache,
        shared_time: _SharedTime,
        spec: SampleSpec,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        generated: Sequence[int],
    ) -> None:
        import xgrammar

        grammar = spec.params.grammar
        assert grammar is not None
        self.failed = False
        self._shared_time = shared_time
        self._credit_s = START_S
        # Processor seconds of the last mask.
        self.mask_s = 0.0
        # Masks that are to be counted alone, and how many the next time.
        self._num_alone = 0
        self._next_num_alone = NUM_ALONE
        # None once nothing more is drawn by its grammar: an end was drawn, or it failed. The grammar may be large,
        # and the slot unused for long.
        self._matcher: xgrammar.GrammarMatcher | None = None
        # A client's other stop tokens end the request where the grammar allows them as text.
        ends = [token for token in spec.stop_ids if token in eos_token_ids] or list(spec.stop_ids)
        # The server holds it; where it does not, compiling it is not the request's time.
        with _Measured(self, "started", counts=False):
            compiled = cache.get(grammar)
            assert compiled.tokenizer_info.vocab_size == vocab_size, "compiled for another vocabulary"
            self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=ends)
        for token in generated:
            self.accept(token, TOKEN_S[0])

    def accept(self, token: int, allowance_s: float) -> None:
        """allowance_s: see `token_allowance_s`."""
        if self._matcher is None:
            return
        self._credit_s = min(CREDIT_S, self._credit_s + allowance_s)
        with _Measured(self, "continued"):
            if not self._matcher.accept_token(token):
                self.fail(f"token {token} does not continue it")
            elif self._matcher.is_terminated():
                self._matcher = None

    def fill(self, mask: np.ndarray, at: int) -> None:
        """mask: (n, words) int32, of which row `at` holds ones."""
        if self._matcher is None:
            return
        with _Measured(self, "asked") as measured:
            self._matcher.fill_next_token_bitmask(mask, at)
        self.mask_s = measured.seconds
        self._num_alone = max(0, self._num_alone - 1)
        self._check_filled(mask, at)

    def sharing(self, allowance_s: float) -> xgrammar.GrammarMatcher | None:
        """Its matcher, if its mask should be filled together with others'."""
        shares = not self._num_alone and THREADS_S <= self.mask_s <= allowance_s
        return self._matcher if shares else None

    def shared(self, mask: np.ndarray, at: int, excess: float, allowance_s: float) -> None:
        """Its mask was filled together with others, in `excess` times the time of their last ones."""
        if excess > EXCESS:
            self._num_alone = self._next_num_alone
            self._next_num_alone *= 2
        self.mask_s *= excess
        self.spend(min(self.mask_s, allowance_s))
        self._shared_time.take(max(0.0, self.mask_s - allowance_s))
        self._check_filled(mask, at)

    def _check_filled(self, mask: np.ndarray, at: int) -> None:
        if not self.failed and not mask[at].any():
            self.fail("no token of the vocabulary continues it")
        if self.failed:
            mask[at] = -1

    def fail(self, why: str) -> None:
        # The client is told, and the line of its request has its id.
        logger.debug("a request's grammar cannot be followed: %s", why)
        self.failed = True
        self._matcher = None

    def spend(self, seconds: float) -> None:
        self._credit_s -= seconds
        if self._credit_s >= 0:
            return
        missing, self._credit_s = -self._credit_s, 0.0
        if not self._shared_time.take(missing) and self._matcher is not None:
            self.fail(f"it took {missing:.3f} s of the processor beyond its credit, and so much is not left")


class _Measured:
    """Counts a row's time, and turns errors of the library into the row's failure."""

    def __init__(self, row: _Row, what: str, counts: bool = True) -> None:
        self._row = row
        self._what = what
        self._counts = counts
        self.seconds = 0.0

    def __enter__(self) -> _Measured:
        self._began = time.thread_time()
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> bool:
        self.seconds = time.thread_time() - self._began
        if self._counts:
            self._row.spend(self.seconds)
        if isinstance(error, Exception):
            self._row.fail(f"it could not be {self._what}: {error}")
            return True
        return False


@dataclass(frozen=True)
class _Drawn:
    """Tokens of a launch that no row has taken in."""

    rows: list[_Row]
    # (m,) int32, on the host once `wait` returns, and where each row's token is in them.
    tokens: torch.Tensor
    places: Sequence[int]
    wait: Callable[[], None]


class GrammarRows:
    """cache: None on ranks that get their masks from rank 0. broadcast: passes a tensor (n, words) int32 on the
    device from rank 0 to all ranks. num_threads: that fill masks; as many as torch's where it is None. clock: in
    seconds."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        cache: GrammarCache | None,
        device: torch.device = CPU,
        broadcast: Callable[[torch.Tensor], torch.Tensor] = lambda mask: mask,
        num_threads: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // _WORD_BITS)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._cache = cache
        self._device = device
        self._broadcast = broadcast
        self._shared_time = _SharedTime(clock)
        self._rows: dict[int, _Row] = {}
        self._drawn: deque[_Drawn] = deque()
        self._num_threads = num_threads
        self._together: xgrammar.BatchGrammarMatcher | None = None

    def start(self, slot: int, spec: SampleSpec, generated: np.ndarray) -> None:
        """A request takes the slot. generated: (n,) int32, what it has generated so far."""
        if self._cache is not None:
            self._rows[slot] = _Row(
                self._cache, self._shared_time, spec, self._vocab_size, self._eos_token_ids, generated.tolist()
            )

    def mask(self, slots: Sequence[int]) -> torch.Tensor:
        """What the requests in these slots may draw: (n, words) int32 on the device, a bit for each token. Takes part
        in a collective where there are several ranks."""
        mask = np.full((len(slots), self._num_words), -1, np.int32)
        if self._cache is not None:
            self._take_in_drawn()
            self._fill([self._rows[slot] for slot in slots], mask)
        return self._broadcast(to_device(mask, self._device))

    def _fill(self, rows: Sequence[_Row], mask: np.ndarray) -> None:
        allowance_s = token_allowance_s(len(rows))
        matchers = {at: row.sharing(allowance_s) for at, row in enumerate(rows)}
        shared = {at: matcher for at, matcher in matchers.items() if matcher is not None}
        if len(shared) < 2 or not self._fill_together(shared, rows, mask, allowance_s):
            shared = {}
        for at, row in enumerate(rows):
            if at not in shared:
                row.fill(mask, at)

    def _fill_together(
        self,
        matchers: dict[int, xgrammar.GrammarMatcher],
        rows: Sequence[_Row],
        mask: np.ndarray,
        allowance_s: float,
    ) -> bool:
        """False: it was not done, or one of them, which is not known, failed."""
        import xgrammar

        if self._num_threads is None:
            self._num_threads = min(MAX_THREADS, torch.get_num_threads())
        if self._num_threads < 2:
            return False
        if self._together is None:
            self._together = xgrammar.BatchGrammarMatcher(max_threads=self._num_threads)
        began = time.process_time()  # of all threads
        try:
            self._together.batch_fill_next_token_bitmask(list(matchers.values()), mask, list(matchers))
        except Exception as error:
            logger.debug("masks could not be filled together: %s", error)
            return False
        excess = (time.process_time() - began) / sum(rows[at].mask_s for at in matchers)
        for at in matchers:
            rows[at].shared(mask, at, excess, allowance_s)
        return True

    @staticmethod
    def apply(logits: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor) -> None:
        """Set the logits of tokens that are not allowed to -inf, in place. logits: (n, vocab_size) float32. rows:
        (m,) int64 on the same device, the rows of it that the rows of the mask are for."""
        import xgrammar

        full = mask
        if len(rows) != len(logits):
            full = mask.new_full((len(logits), mask.shape[1]), -1)
            full.index_copy_(0, rows, mask)
        # A list of rows would be copied to a GPU, for which the host would wait.
        xgrammar.apply_token_bitmask_inplace(logits, full, indices=rows)  # type: ignore[arg-type]

    def warm_up(self) -> None:
        """Compile xgrammar's kernel on a GPU: for one row, for multiples of 16 and for other numbers of rows."""
        for num_rows in (1, 2, 16):
            logits = torch.zeros(num_rows, self._vocab_size, device=self._device)
            mask = torch.full((num_rows, self._num_words), -1, dtype=torch.int32, device=self._device)
            self.apply(logits, torch.arange(num_rows, device=self._device), mask)

    def drawn(
        self, slots: Sequence[int], tokens: torch.Tensor, places: Sequence[int], wait: Callable[[], None]
    ) -> tuple[int, ...]:
        """The requests in these slots have drawn the tokens at these places of a launch's, (m,) int32 in host memory
        once `wait` returns. Returns the places of requests whose grammar could not be followed."""
        if self._cache is None:
            return ()
        rows = [self._rows[slot] for slot in slots]
        self._drawn.append(_Drawn(rows, tokens, places, wait))
        return tuple(place for place, row in zip(places, rows) if row.failed)

    def _take_in_drawn(self) -> None:
        while self._drawn:
            drawn = self._drawn.popleft()
            drawn.wait()
            tokens = drawn.tokens.tolist()
            allowance_s = token_allowance_s(len(drawn.rows))
            for row, place in zip(drawn.rows, drawn.places):
                row.accept(tokens[place], allowance_s)
