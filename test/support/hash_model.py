"""A model whose arithmetic is exact, so that KV can be compared byte for byte whatever the batch was.

Every value is an integer below a prime, held in float64: sums and products stay exact in any order. A token's KV
depends on all earlier tokens through the KV of all earlier positions *as read from the pool*: one wrong page, one
page in the wrong place, one read before its load, and every later value differs. NaN (poison) spreads to the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from sglang.srt.mem_cache.kv_view import KVPool, KVSegment, KVView
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

PRIME = 1_000_003
HEADS, DIM = 2, 2
_LONGEST = 4096
_REMEMBERED = 2000


def _key(tokens: np.ndarray) -> bytes:
    return np.ascontiguousarray(tokens, np.int64).tobytes()


@dataclass
class _Attending:
    """In the middle of a layer. sums: (num_tokens,), what was read so far. positions: of the next streamed tokens."""

    hidden: torch.Tensor
    sums: torch.Tensor
    positions: list[int]


class HashModel:
    """`CausalLM` over a float64 pool with 2 KV heads of dimension 2."""

    NUM_LAYERS = 3

    def __init__(
        self,
        num_layers: int = NUM_LAYERS,
        vocab_size: int = 7,
        seed: int = 0,
        windows: Sequence[int | None] = (),
    ) -> None:
        self.num_layers, self.windows = num_layers, tuple(windows) or (None,) * num_layers
        self.vocab_size = vocab_size
        rng = np.random.default_rng(seed)

        def weights(*shape: int) -> torch.Tensor:
            return torch.from_numpy(rng.integers(1, 1000, shape).astype(np.float64))

        self._embed = weights(vocab_size)
        # Taken apart here: where everything is tiny, naming a part of a tensor takes as long as a sum.
        self._kv = [part.unbind() for part in weights(num_layers, 3, 2, HEADS, DIM)]
        self._read = weights(num_layers, 2, HEADS, DIM).unbind()
        self._mix = weights(num_layers, 3).tolist()
        self._weights = torch.arange(_LONGEST) * 37 % 61 + 1
        self._run = lru_cache(_REMEMBERED)(self._run_anew)

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        return self._embed[batch.input_ids]

    def forward_layer(self, layer_id: int, state: Any, batch: ForwardBatch, pool: KVPool) -> torch.Tensor:
        return self.end_layer(layer_id, self.begin_layer(layer_id, state, batch, pool), batch)

    def begin_layer(self, layer_id: int, state: Any, batch: ForwardBatch, pool: KVPool) -> _Attending:
        kv = self._keys_values(layer_id, state, batch.positions)
        window = self.windows[layer_id]
        kind, of_kind = (0, batch.segments) if window is None else (1, batch.windowed_segments)
        pool.store(layer_id, batch.out_loc[kind], kv[:, 0], kv[:, 1])
        view = pool.view(layer_id)
        sums = []
        for q_len, segments in zip(batch.attn.q_lens, of_kind):
            if not segments:
                sums.append(torch.zeros(q_len, dtype=torch.float64))
                continue
            read = torch.cat([self._gather(view, segment) for segment in segments])
            # What is hidden from all may be anything.
            first = 0 if window is None else max(0, len(read) - q_len + 1 - window)
            total = self._sums(layer_id, self._contributions(layer_id, read[first:], first))
            sums.append(total[len(total) - q_len :])
        attending = _Attending(state, torch.cat(sums), [req.start for req in batch.streamed])
        for req in batch.streamed:
            pos, total = 0, torch.zeros(1, dtype=torch.float64)
            for segment in req.segments:
                if pos == req.start:
                    pos = req.end
                total = total[-1] + self._contributions(layer_id, self._gather(view, segment), pos).cumsum(0)
                pos += segment.length
            attending.sums[req.rows] = total[len(total) - (req.rows.stop - req.rows.start) :]
        return attending

    def attend(
        self,
        layer_id: int,
        state: _Attending,
        batch: ForwardBatch,
        place: int,
        view: KVView,
        segment: KVSegment,
        position: int,
    ) -> _Attending:
        assert position == state.positions[place], "pieces come in order"
        read, pos = self._gather(view, segment), state.positions[place]
        state.sums[batch.streamed[place].rows] += self._contributions(layer_id, read, pos).sum()
        state.positions[place] += segment.length
        return state

    def end_layer(self, layer_id: int, state: _Attending, batch: ForwardBatch) -> torch.Tensor:
        assert state.positions == [req.end for req in batch.streamed], "not all that is streamed was attended to"
        return self._next(layer_id, state.hidden, state.sums)

    def logits(self, state: Any, batch: ForwardBatch) -> torch.Tensor:
        if batch.wants_hidden:
            batch.hidden = self._hidden(state[batch.sample_rows])
        return self._logits(state[batch.sample_rows])

    def reference(self, tokens: np.ndarray) -> np.ndarray:
        """KV of a sequence, from its tokens alone: (len(tokens), 2, num_layers, HEADS, DIM) float64, not to be
        written to."""
        return self._run(_key(tokens))[0]

    def next_token(self, tokens: np.ndarray) -> int:
        """The greedy continuation of a sequence."""
        return int(self._run(_key(tokens))[1][-1].argmax())

    def all_logits(self, tokens: np.ndarray) -> torch.Tensor:
        """(len(tokens), vocab_size) float32, behind each token; not to be written to."""
        return self._run(_key(tokens))[1]

    def generate(self, prompt: np.ndarray, num_tokens: int, stop: frozenset[int] = frozenset()) -> list[int]:
        tokens = list(prompt)
        while len(tokens) < len(prompt) + num_tokens:
            tokens.append(self.next_token(np.array(tokens)))
            if tokens[-1] in stop:
                break
        return tokens[len(prompt) :]

    def embedding(self, tokens: np.ndarray) -> torch.Tensor:
        """(3,) float32 of length 1, behind the last token."""
        return torch.nn.functional.normalize(self._run(_key(tokens))[2][-1], dim=-1)

    def _run_anew(self, key: bytes) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
        """KV, logits and hidden states. The oracle asks for the same sequences again and again: `_run` remembers
        them."""
        tokens = torch.from_numpy(np.frombuffer(key, np.int64).copy())
        positions = torch.arange(len(tokens))
        state = self._embed[tokens]
        layers = []
        for layer in range(self.num_layers):
            kv = self._keys_values(layer, state, positions)
            layers.append(kv)
            state = self._next(layer, state, self._sums(layer, self._contributions(layer, kv)))
        found: np.ndarray = torch.stack(layers, 2).numpy()
        found.flags.writeable = False
        return found, self._logits(state), self._hidden(state)

    def _keys_values(self, layer: int, state: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        a, b, c = self._kv[layer]
        return (state[:, None, None, None] * a + positions[:, None, None, None] * b + c) % PRIME

    def _contributions(self, layer: int, kv: torch.Tensor, first: int = 0) -> torch.Tensor:
        return ((kv * self._read[layer]).sum((1, 2, 3)) % PRIME) * self._weights[first : first + len(kv)]

    def _sums(self, layer: int, contributions: torch.Tensor) -> torch.Tensor:
        """Of each token, over the tokens that it sees."""
        total, window = contributions.cumsum(0), self.windows[layer]
        if window is None or window >= len(total):
            return total
        return torch.cat((total[:window], total[window:] - total[:-window]))

    def _next(self, layer: int, state: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        a, b, c = self._mix[layer]
        return (state * a + (sums % PRIME) * b + c) % PRIME

    def _logits(self, state: torch.Tensor) -> torch.Tensor:
        wanted = state % self.vocab_size
        return -((torch.arange(self.vocab_size) - wanted[:, None]) ** 2).to(torch.float32)

    @staticmethod
    def _hidden(state: torch.Tensor) -> torch.Tensor:
        """state: (n,). (n, 3) float32, of which hardly two are in the same direction."""
        return torch.stack([state % divisor + 1 for divisor in (61, 67, 71)], -1).to(torch.float32)

    @staticmethod
    def _gather(view: KVView, segment: KVSegment) -> torch.Tensor:
        """(length, 2, HEADS, DIM) of a segment."""
        k, v = view.k[segment.pages].flatten(0, 1), view.v[segment.pages].flatten(0, 1)
        return torch.stack((k, v), 1)[segment.skip : segment.skip + segment.length]
