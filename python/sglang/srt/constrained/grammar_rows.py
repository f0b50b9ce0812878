"""`GrammarRows`: how far each running request has come in its grammar, and what that lets it draw next.

Owned by the executor, on its stream, as `PenaltyTable` is. With several ranks, rank 0 alone follows the grammars and
broadcasts what they allow, so that ranks cannot disagree. Nothing here raises: a launch has other requests too, and
other ranks wait for this one in collectives. A request whose grammar cannot be followed any further goes on without,
and is reported, so that the scheduler ends it.

    start -> [mask -> draw -> drawn] -> [mask (takes in what was drawn) -> draw -> drawn] -> ...

The tokens of a launch are taken in only by the next mask. On a GPU the host then waits for them while the device
computes that launch's logits.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang.srt.constrained.grammar_cache import GrammarCache
from sglang.srt.sampling.sample_spec import SampleSpec
from sglang.srt.utils.device import CPU

# What one request may take of the stream's thread, in processor seconds: at once, and for each token. Most grammars
# take some 20 us for each token, nested repetitions several ms. An ambiguous one takes longer with each token, and
# all of its batch waits.
ALLOWANCE_S = 2.0
ALLOWANCE_PER_TOKEN_S = 0.02

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
        with _Measured(self, "asked"):
            self._matcher.fill_next_token_bitmask(mask, at)
            if not mask[at].any():
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
    device from rank 0 to all ranks."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        cache: GrammarCache | None,
        device: torch.device = CPU,
        broadcast: Callable[[torch.Tensor], torch.Tensor] = lambda mask: mask,
    ) -> None:
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // _WORD_BITS)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._cache = cache
        self._device = device
        self._broadcast = broadcast
        self._rows: dict[int, _Row] = {}
        self._drawn: deque[_Drawn] = deque()

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
            for at, slot in enumerate(slots):
                self._rows[slot].fill(mask, at)
        return self._broadcast(torch.from_numpy(mask).to(self._device))

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
