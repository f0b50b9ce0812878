"""`LatentExpansion`: attention of long extends to latents, by keys and values of each head that are made of them.

Owns the plans of the last two batches, and no memory beyond a layer. In the absorbed form a query attends to latents,
which takes 2 * rank + rotary_dim products for each key and head. With the head's own keys and values it takes
key_dim + rotary_dim + value_dim (DeepSeek-V2 (2024), section 2.1), but these have to be made first, of all tokens
that a request sees. They are made and read piece by piece:

    pages of the pool  ->  latents side by side  ->  keys and values of each head  ->  attention  ->  merged by lse

A piece has several whole requests, or a part of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from sglang.srt.configs.latent import LatentConfig
from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata, RecentPlans
from sglang.srt.layers.attention.merge_state import merge_state
from sglang.srt.mem_cache.kv_view import ExpandedView, KVSegment, KVView, PagedSegments
from sglang.srt.mem_cache.page_memory import indexable
from sglang.srt.utils.device import to_device_together

# New tokens of a request from which on its keys and values are made. N of them behind P others take, for each head,
#   2 * (P * rank * (key_dim + value_dim) - (N * P + N * N / 2) * (2 * rank - key_dim - value_dim))
# more products than in the absorbed form: keys and values of its own tokens cost what queries of latents and values
# of sums do there. With DeepSeek's sizes, 512 and 128, that is negative from N = 171 on, for any P. Making them also
# writes and reads memory, and takes launches of its own.
LONG_EXTEND = 256
# Of a piece: its latents, keys and values.
PIECE_BYTES = 128 << 20
# Tokens of a page of a piece: whole tiles of any size.
PIECE_PAGE = 128
# Keys of a warm-up that are divided among programs.
_MANY_KEYS = 8192

# (num_tokens, rank + rotary_dim) latents in the queries' dtype -> keys without their rotated part (num_tokens,
# num_heads, key_dim), values (num_tokens, num_heads, value_dim), and rotated parts (num_tokens, 1, rotary_dim).
Expand = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class HeadsBackend(Protocol):
    """The part of an attention backend that computes a piece. A plan is the same for all layers."""

    def plan_heads(self, q: torch.Tensor, view: ExpandedView, reqs: RequestsOfPiece) -> Any: ...

    def attend_heads(
        self,
        q: torch.Tensor,
        view: ExpandedView,
        table: torch.Tensor,
        plan: Any,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """q: (num_tokens, num_heads, key_dim + rotary_dim). table: pages, int32. Fills the plan's rows of out,
        (num_tokens, num_heads, value_dim), and of lse, (num_tokens, num_heads) float32, natural logarithm."""
        ...


@dataclass(frozen=True)
class RequestsOfPiece:
    """(num_reqs,) int64 each: the first row in q, queries, keys in the piece, keys in front of the first query's own,
    negative where the piece begins behind that, and the first entry in the table."""

    rows: np.ndarray
    q_lens: np.ndarray
    kv_lens: np.ndarray
    before: np.ndarray
    starts: np.ndarray


@dataclass(frozen=True)
class KeyRange:
    """Keys first to end of request `index` of a batch."""

    index: int
    first: int
    end: int


@dataclass
class _Piece:
    """Where its latents lie in the pool, (num_tokens,) int64 each: whole pages of a piece for each request."""

    pages: torch.Tensor
    offsets: torch.Tensor
    reqs: RequestsOfPiece
    # Made by the backend when the first layer attends.
    plan: Any = None


class _Group(NamedTuple):
    """Pieces of the same requests; if they are several, of one request. rows: of q, that `RequestsOfPiece` counts."""

    rows: slice
    pieces: list[_Piece]


@dataclass(frozen=True)
class ShortRequests:
    """Those with few new tokens, as an `AttentionBatch`. rows: (num_rows,) int64, theirs in the whole batch."""

    rows: torch.Tensor
    segments: PagedSegments
    attn: AttentionMetadata

    @property
    def windowed_segments(self) -> PagedSegments:
        return self.segments


@dataclass(frozen=True)
class _Plan:
    source: PagedSegments
    q_lens: tuple[int, ...]
    groups: list[_Group]
    # Pages of any piece, in order.
    table: torch.Tensor
    short: ShortRequests | None

    def matches(self, segments: Sequence[list[KVSegment]], page_size: int, q_lens: tuple[int, ...]) -> bool:
        return self.source is segments and self.q_lens == q_lens


class LatentExpansion:
    """fewest_queries: of a request that is long. piece_bytes: see `PIECE_BYTES`. has_tiles: whether the backend has
    tiles for this data type and head."""

    def __init__(self, backend: HeadsBackend, has_tiles: Callable[[torch.dtype, int, int], bool]) -> None:
        self.fewest_queries = LONG_EXTEND
        self.piece_bytes = PIECE_BYTES
        self._backend, self._has_tiles = backend, has_tiles
        self._recent: RecentPlans[_Plan] = RecentPlans()

    def takes(self, latent: LatentConfig, dtype: torch.dtype) -> bool:
        """Whether a head's keys and values can be read, and take fewer products than latents. dtype: of queries;
        stored latents may have any."""
        is_less = latent.key_dim == latent.value_dim < latent.rank
        return is_less and self._has_tiles(dtype, latent.value_dim, latent.rotary_dim)

    def has_long(self, segments: Sequence[list[KVSegment]], meta: AttentionMetadata) -> bool:
        """Whether a request of the batch is computed so."""
        is_paged = isinstance(segments, PagedSegments) and meta.is_ordinary
        return is_paged and max(meta.q_lens, default=0) >= self.fewest_queries

    def forward(
        self,
        q: torch.Tensor,
        view: KVView,
        segments: PagedSegments,
        meta: AttentionMetadata,
        latent: LatentConfig,
        expand: Expand,
    ) -> tuple[torch.Tensor, ShortRequests | None]:
        """q: (num_tokens, num_heads, key_dim + rotary_dim), rotated. view: of latents. Returns (num_tokens,
        num_heads, value_dim), in which rows of short requests are not filled, and these requests."""
        assert meta.is_ordinary, f"a window, capped scores or sinks: {meta}"
        plan = self._recent.find(segments, view.page_size, meta.q_lens)
        if plan is None:
            piece_tokens = self.piece_tokens(latent, q.shape[1], q.dtype)
            plan = self._recent.keep(self._make_plan(segments, meta, piece_tokens))
        out = q.new_empty((*q.shape[:2], latent.value_dim))

        def attend(rows: slice, piece: _Piece, out: torch.Tensor, lse: torch.Tensor | None) -> None:
            """Its keys and values live as long as the call."""
            latents = in_words(view.k)[:, :, 0][piece.pages, piece.offsets].view(view.k.dtype)
            parts = expand(latents.to(q.dtype))
            expanded = ExpandedView(*(each.unflatten(0, (-1, PIECE_PAGE)) for each in parts))
            if piece.plan is None:
                piece.plan = self._backend.plan_heads(q[rows], expanded, piece.reqs)
            self._backend.attend_heads(q[rows], expanded, plan.table, piece.plan, meta.scale, out, lse)

        for rows, pieces in plan.groups:
            if len(pieces) == 1:
                attend(rows, pieces[0], out[rows], None)
                continue
            found: tuple[torch.Tensor, torch.Tensor] | None = None
            for piece in pieces:
                part = torch.empty_like(out[rows], dtype=torch.float32)
                lse = part.new_empty(part.shape[:2])
                attend(rows, piece, part, lse)
                found = (part, lse) if found is None else merge_state(*found, part, lse)
            assert found is not None, "several pieces"
            out[rows] = found[0]
        return out, plan.short

    def piece_tokens(self, latent: LatentConfig, num_heads: int, dtype: torch.dtype) -> int:
        """The most of a piece: whole pages."""
        # Latents as they are stored, in the queries' dtype, and scaled.
        per_token = 3 * latent.cached_dim + num_heads * (latent.key_dim + latent.value_dim)
        return max(1, self.piece_bytes // (per_token * dtype.itemsize * PIECE_PAGE)) * PIECE_PAGE

    def batches_of_kernels(self, piece_tokens: int) -> list[tuple[tuple[int, int], ...]]:
        """Of each request the tokens after its last one, and those that are computed: batches that compile all
        kernels, for whole requests and for parts of one. Keys are divided among programs where blocks of queries do
        not fill a GPU's last round, so that for some numbers of heads it takes one more block."""
        least, more = self.fewest_queries, self.fewest_queries + PIECE_PAGE
        whole = (max(least, min(_MANY_KEYS, piece_tokens - more)), least)
        parts = 2 * piece_tokens
        return [(whole,), (whole, (more, more)), ((parts, least),), ((parts, more),)]

    # -- inside -------------------------------------------------------------------------------------------------

    def _make_plan(self, segments: PagedSegments, meta: AttentionMetadata, piece_tokens: int) -> _Plan:
        q_lens = segments.q_lens
        assert tuple(q_lens.tolist()) == meta.q_lens, "queries that the segments were not made for"
        is_long = q_lens >= self.fewest_queries
        rows, num_rows = np.cumsum(q_lens) - q_lens, int(q_lens.sum())
        groups: list[_Group] = []
        for ranges in divided(np.flatnonzero(is_long).tolist(), segments.kv_lens, piece_tokens):
            first = ranges[0][0].index
            begin = int(rows[first])
            of_group = slice(begin, begin + int(q_lens[first])) if len(ranges) > 1 else slice(0, num_rows)
            groups.append(_Group(of_group, [self._piece(segments, rows - of_group.start, each) for each in ranges]))
        device = segments.table.device
        table = torch.arange(piece_tokens // PIECE_PAGE, dtype=torch.int32, device=device)
        short = None if is_long.all() else _short_requests(segments, meta, rows, np.flatnonzero(~is_long))
        return _Plan(segments, meta.q_lens, groups, table, short)

    def _piece(self, segments: PagedSegments, rows: np.ndarray, ranges: Sequence[KeyRange]) -> _Piece:
        table, page_size, device = segments.table, segments.page_size, segments.table.device
        entries, offsets, num_pages = [], [], []
        for each in ranges:
            num_pages.append(-(-(each.end - each.first) // PIECE_PAGE))
            # Behind its last token the request has none: that one again.
            tokens = torch.arange(each.first, each.first + num_pages[-1] * PIECE_PAGE, device=device)
            tokens.clamp_(max=each.end - 1)
            entries.append(int(segments.starts[each.index]) + tokens // page_size)
            offsets.append(tokens % page_size)
        index, first, end = (
            np.array(column, np.int64) for column in zip(*((r.index, r.first, r.end) for r in ranges))
        )
        before = segments.kv_lens[index] - segments.q_lens[index] - first
        starts = np.cumsum(num_pages) - num_pages
        reqs = RequestsOfPiece(rows[index], segments.q_lens[index], end - first, before, starts)
        return _Piece(table[torch.cat(entries)].long(), torch.cat(offsets), reqs)


def in_words(x: torch.Tensor) -> torch.Tensor:
    """The same bytes, 8 in an element, or fewer where strides do not allow that: torch copies element by element."""
    per_word = 8 // x.itemsize
    is_whole = not any(each % per_word for each in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
    return x.view(torch.int64) if is_whole else indexable(x)


def divided(long: Sequence[int], kv_lens: np.ndarray, piece_tokens: int) -> list[list[list[KeyRange]]]:
    """The pieces of the requests `long`, by groups: several requests in one piece, or one request in several. A
    request begins at a page of its piece."""
    groups: list[list[list[KeyRange]]] = []
    room = 0
    for index in long:
        kv_len = int(kv_lens[index])
        size = -(-kv_len // PIECE_PAGE) * PIECE_PAGE
        if size > piece_tokens:
            groups.append(
                [[KeyRange(index, n, min(n + piece_tokens, kv_len))] for n in range(0, kv_len, piece_tokens)]
            )
            room = 0
            continue
        if size > room:
            groups.append([[]])
            room = piece_tokens
        groups[-1][0].append(KeyRange(index, 0, kv_len))
        room -= size
    return groups


def _short_requests(
    segments: PagedSegments, meta: AttentionMetadata, rows: np.ndarray, index: np.ndarray
) -> ShortRequests:
    of_reqs = [np.arange(rows[i], rows[i] + segments.q_lens[i]) for i in index]
    on_rows, on_index = to_device_together([np.concatenate(of_reqs), index], segments.table.device)
    theirs = replace(
        segments,
        starts=segments.starts[index],
        kv_lens=segments.kv_lens[index],
        q_lens=segments.q_lens[index],
        device_starts=segments.device_starts[on_index],
        device_kv_lens=segments.device_kv_lens[on_index],
    )
    return ShortRequests(on_rows, theirs, replace(meta, q_lens=tuple(theirs.q_lens.tolist())))
