"""`PrefixSampler`: a bounded sample of which blocks of prompts are used again, to size the cache by.

Owns a list of events with the digests of some blocks. A digest stands for the prompt up to a block's end, and for the
namespace. It is keyed with a secret that each start draws anew: it tells nothing of a text, and no two servers
have the same. Blocks are chosen by their digest, so that of a block all uses are seen or none (spatial sampling as in
SHARDS, Waldspurger et al., FAST'15). When the list is full, the rate is halved, and what it no longer chooses is
dropped.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

SAMPLED_TOKENS = 64
# Digests that are kept: a reply of about 1 MB.
MAX_DIGESTS = 1 << 15
MAX_EVENTS = 1 << 14
# The rate is halved so often; after that the oldest events go.
MAX_HALVINGS = 10


@dataclass(frozen=True)
class SampledUse:
    """blocks: digests of the chosen ones, from the beginning of the prompt. is_answer: blocks of a prompt and its
    answer, once that is complete."""

    at: float
    is_answer: bool
    prompt_tokens: int
    blocks: tuple[int, ...]


class PrefixSampler:
    def __init__(self, max_digests: int = MAX_DIGESTS, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_digests = max_digests
        self._clock = clock
        self._events: deque[SampledUse] = deque()
        self._num_digests = 0
        self._halvings = 0
        self._secret = secrets.token_bytes(32)
        draws = np.random.Generator(np.random.PCG64(int.from_bytes(self._secret, "little")))
        self._factors = draws.integers(1, 1 << 63, SAMPLED_TOKENS, np.uint64) * np.uint64(2) + np.uint64(1)
        self._place = int(draws.integers(1, 1 << 63))
        self._since = clock()

    @property
    def rate(self) -> float:
        return 2.0**-self._halvings

    def note_prompt(self, namespace: str, ids: np.ndarray) -> None:
        """ids: int32."""
        self._note(namespace, ids, len(ids), is_answer=False)

    def note_answer(self, namespace: str, ids: np.ndarray, prompt_tokens: int) -> None:
        """ids: int32, of a prompt and of what of its answer is in the cache."""
        if len(ids) // SAMPLED_TOKENS > prompt_tokens // SAMPLED_TOKENS:
            self._note(namespace, ids, prompt_tokens, is_answer=True)

    def _note(self, namespace: str, ids: np.ndarray, prompt_tokens: int, is_answer: bool) -> None:
        blocks = self._digests(namespace, ids)
        self._events.append(SampledUse(self._clock(), is_answer, prompt_tokens, blocks))
        self._num_digests += len(blocks)
        while self._num_digests > self._max_digests or len(self._events) > MAX_EVENTS:
            if self._halvings < MAX_HALVINGS and self._num_digests > self._max_digests:
                self._halve()
            else:
                self._num_digests -= len(self._events.popleft().blocks)
                self._since = self._events[0].at if self._events else self._clock()

    def _halve(self) -> None:
        self._halvings += 1
        self._events = deque(
            SampledUse(each.at, each.is_answer, each.prompt_tokens, tuple(filter(self._is_chosen, each.blocks)))
            for each in self._events
        )
        self._num_digests = sum(len(each.blocks) for each in self._events)

    def _is_chosen(self, digest: int) -> bool:
        return digest & ((1 << self._halvings) - 1) == 0

    def _digests(self, namespace: str, ids: np.ndarray) -> tuple[int, ...]:
        num_blocks = len(ids) // SAMPLED_TOKENS
        tokens = ids[: num_blocks * SAMPLED_TOKENS].reshape(num_blocks, SAMPLED_TOKENS)
        # A sum over all blocks so far, each by its place: one product for a whole prompt.
        hashed = tokens.astype(np.uint64) @ self._factors + self._factors[0]
        hashed = (hashed ^ (hashed >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
        places = np.arange(1, num_blocks + 1, dtype=np.uint64) * np.uint64(self._place) | np.uint64(1)
        head = hashlib.blake2b(namespace.encode(), key=self._secret, digest_size=8)
        sums = np.cumsum((hashed ^ (hashed >> np.uint64(29))) * places) ^ np.frombuffer(head.digest(), "<u8")
        # The last bits choose, so that only chosen blocks get a digest.
        draws = (sums * self._factors[1]) >> np.uint64(64 - MAX_HALVINGS)
        chosen = np.flatnonzero(draws & np.uint64((1 << self._halvings) - 1) == 0)
        return tuple(map(self._digest, sums[chosen].tolist(), draws[chosen].tolist()))

    def _digest(self, prefix: int, draw: int) -> int:
        hashed = hashlib.blake2b(prefix.to_bytes(8, "little"), key=self._secret, digest_size=8)
        return int.from_bytes(hashed.digest(), "little") >> MAX_HALVINGS << MAX_HALVINGS | draw

    def state(self) -> dict[str, Any]:
        """What GET /hicache/sample answers. Digests are hexadecimal."""
        return {
            "block_tokens": SAMPLED_TOKENS,
            "rate": self.rate,
            "seconds": round(self._clock() - self._since, 3),
            "events": [
                {
                    "at": round(each.at - self._since, 3),
                    "is_answer": each.is_answer,
                    "prompt_tokens": each.prompt_tokens,
                    "blocks": [f"{digest:016x}" for digest in each.blocks],
                }
                for each in self._events
            ],
        }
