"""`GrammarRows`: how far each running request has come in its grammar, and what that lets it draw next.

Owned by the executor, on its stream, as `PenaltyTable` is. With several ranks, rank 0 alone follows the grammars and
broadcasts what they allow, so that ranks cannot disagree. Nothing here raises: a launch has other requests too, and
other ranks wait for this one in collectives. A request whose grammar cannot be followed any further goes on without,
and is reported, so that the scheduler ends it.

    start -> [mask -> draw -> drawn] -> [mask (takes in what was drawn) -> draw -> drawn] -> ...

The tokens of a launch are taken in only by the next mask. On a GPU the host then waits for them while the device
computes that launch's logits.

Each row's time is counted, since a grammar may be made to take long. xgrammar holds Python's lock meanwhile. Rows
that take long, but not too long, are therefore filled together by its own threads, which tell only the time of all.
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
from sglang.srt.utils.device import CPU

if TYPE_CHECKING:
    import xgrammar

# What one request may take of the stream's thread, in processor seconds: at once, and for each token. Most grammars
# take some 20 us for each token, nested repetitions several ms. An ambiguous one takes longer with each token, and
# all of its batch waits.
ALLOWANCE_S = 2.0
ALLOWANCE_PER_TOKEN_S = 0.02
# Rows whose last mask took so long share threads and time. At the most, that is what a token is allowed, so that none
# fails for another's. Masks that took `EXCESS` times as long as their rows' last hide a row that got slow: the next
# `NUM_ALONE` masks of each of them are counted alone.
SHARED_MASK_S = (0.0002, ALLOWANCE_PER_TOKEN_S)
EXCESS = 4
NUM_ALONE = 16
MAX_THREADS = 8

_WORD_BITS = 32

logger = logging.getLogger(__name__)


class _Row:
    """A request's place in its grammar."""

    def __init__(
        self,
        cache: GrammarCache,
        spec: SampleSpec,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        generated: Sequence[int],
    ) -> None:
        import xgrammar

        grammar = spec.params.grammar
        assert grammar is not None
        # Nothing more is drawn by its grammar: an end was drawn, or it failed.
        self.is_over = False
        self.failed = False
        self._num_tokens = 0
        self._seconds = 0.0
        # Processor seconds of the last mask.
        self.mask_s = 0.0
        self._num_alone = 0
        self._matcher: xgrammar.GrammarMatcher | None = None
        # A client's other stop tokens end the request where the grammar allows them as text.
        ends = [token for token in spec.stop_ids if token in eos_token_ids] or list(spec.stop_ids)
        # The server holds it; where it does not, compiling it is not the request's time.
        with _Measured(self, "started", counts=False):
            compiled = cache.get(grammar)
            assert compiled.tokenizer_info.vocab_size == vocab_size, "compiled for another vocabulary"
            self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=ends)
        for token in generated:
            self.accept(token)

    def accept(self, token: int) -> None:
        if self.is_over or self._matcher is None:
            return
        self._num_tokens += 1
        with _Measured(self, "continued"):
            if not self._matcher.accept_token(token):
                self.fail(f"token {token} does not continue it")
            elif self._matcher.is_terminated():
                self._end()

    def fill(self, mask: np.ndarray, at: int) -> None:
        """mask: (n, words) int32, of which row `at` holds ones."""
        if self.is_over or self._matcher is None:
            return
        before = self._seconds
        with _Measured(self, "asked"):
            self._matcher.fill_next_token_bitmask(mask, at)
        self.mask_s = self._seconds - before
        self._num_alone = max(0, self._num_alone - 1)
        self._check_filled(mask, at)

    @property
    def sharing(self) -> xgrammar.GrammarMatcher | None:
        """Its matcher, if its mask should be filled together with others'."""
        shares = not self._num_alone and SHARED_MASK_S[0] <= self.mask_s <= SHARED_MASK_S[1]
        return self._matcher if shares else None

    def shared(self, mask: np.ndarray, at: int, excess: float) -> None:
        """Its mask was filled together with others, in `excess` times the time of their last ones."""
        if excess > EXCESS:
            self._num_alone = NUM_ALONE
        self.mask_s *= excess
        self.spend(self.mask_s)
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
        self._end()

    def _end(self) -> None:
        self.is_over = True
        self._matcher = None  # the grammar may be large, and the slot unused for long

    def spend(self, seconds: float) -> None:
        self._seconds += seconds
        if not self.is_over and self._seconds > ALLOWANCE_S + ALLOWANCE_PER_TOKEN_S * self._num_tokens:
            self.fail(f"its {self._num_tokens} tokens took {self._seconds:.1f} s of the processor")


class _Measured:
    """Counts a row's time, and turns errors of the library into the row's failure."""

    def __init__(self, row: _Row, what: str, counts: bool = True) -> None:
        self._row = row
        self._what = what
        self._counts = counts

    def __enter__(self) -> None:
        self._began = time.thread_time()

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> bool:
        if self._counts:
            self._row.spend(time.thread_time() - self._began)
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
    device from rank 0 to all ranks. num_threads: that fill masks; as many as torch's where it is None."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        cache: GrammarCache | None,
        device: torch.device = CPU,
        broadcast: Callable[[torch.Tensor], torch.Tensor] = lambda mask: mask,
        num_threads: int | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // _WORD_BITS)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._cache = cache
        self._device = device
        self._broadcast = broadcast
        self._rows: dict[int, _Row] = {}
        self._drawn: deque[_Drawn] = deque()
        self._num_threads = num_threads
        self._together: xgrammar.BatchGrammarMatcher | None = None

    def start(self, slot: int, spec: SampleSpec, generated: np.ndarray) -> None:
        """A request takes the slot. generated: (n,) int32, what it has generated so far."""
        if self._cache is not None:
            self._rows[slot] = _Row(self._cache, spec, self._vocab_size, self._eos_token_ids, generated.tolist())

    def mask(self, slots: Sequence[int]) -> torch.Tensor:
        """What the requests in these slots may draw: (n, words) int32 on the device, a bit for each token. Takes part
        in a collective where there are several ranks."""
        mask = np.full((len(slots), self._num_words), -1, np.int32)
        if self._cache is not None:
            self._take_in_drawn()
            self._fill([self._rows[slot] for slot in slots], mask)
        return self._broadcast(torch.from_numpy(mask).to(self._device))

    def _fill(self, rows: Sequence[_Row], mask: np.ndarray) -> None:
        matchers = {at: row.sharing for at, row in enumerate(rows)}
        shared = {at: matcher for at, matcher in matchers.items() if matcher is not None}
        if len(shared) < 2 or not self._fill_together(shared, rows, mask):
            shared = {}
        for at, row in enumerate(rows):
            if at not in shared:
                row.fill(mask, at)

    def _fill_together(
        self, matchers: dict[int, xgrammar.GrammarMatcher], rows: Sequence[_Row], mask: np.ndarray
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
            rows[at].shared(mask, at, excess)
        return True

    @staticmethod
    def apply(logits: torch.Tensor, rows: Sequence[int], mask: torch.Tensor) -> None:
        """Set the logits of tokens that are not allowed to -inf, in place. logits: (n, vocab_size) float32. rows: the
        rows of it that the rows of the mask are for."""
        import xgrammar

        full = mask
        if len(rows) != len(logits):
            full = mask.new_full((len(logits), mask.shape[1]), -1)
            full[list(rows)] = mask
        xgrammar.apply_token_bitmask_inplace(logits, full, indices=list(rows))

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
            for row, place in zip(drawn.rows, drawn.places):
                row.accept(tokens[place])
