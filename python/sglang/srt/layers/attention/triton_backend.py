"""`TritonAttnBackend`: attention on a GPU, straight from the pages, by the kernels in triton_kernels.py.

Owns the plan of the forward batch it is working on, on the queries' device, and the plans of the last few partials.
Writes no KV and reads only the slots that the segments name.

The kernels look pages up in the table of a `PagedSegments` themselves. A decode's plan copies nothing to the device.
An extend's plan is one copy from pinned memory, without a wait. Lists of `KVSegment`s become a table of slots.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton

from sgl_kernel.triton_launch import ALIGNMENT, Recording, launch
from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata, BatchKey, PartialMask, RecentPlans
from sglang.srt.layers.attention.latent_expansion import LatentExpansion, RequestsOfPiece
from sglang.srt.layers.attention.triton_kernels import decode_kernel, extend_kernel
from sglang.srt.layers.attention.triton_merge_kernels import merge_decodes_kernel, merge_extends_kernel
from sglang.srt.layers.attention.triton_tiles import HOPPER_SHARED_BYTES, ExtendTile, Heads, Tiles
from sglang.srt.mem_cache.kv_view import ExpandedView, KVSegment, KVView, PagedSegments, segment_slots
from sglang.srt.utils.device import CPU, to_device_together

_LOG2_E = math.log2(math.e)
# Decodes whose lengths a program reads at once.
_LENS_AT_ONCE = 128
# The plans of partials that are kept. A request that streams has one for its pieces, one for its last piece, and a
# few for the tokens on the device.
_KEPT_PARTIALS = 16
# Major compute capabilities of GPUs that keep the sums of products in a memory of their own: B200, B300 and Thor.
_WITH_TENSOR_MEMORY = (10, 11)


@dataclass(frozen=True)
class _Extends:
    """The requests with more than one query; int32 on the queries' device, as triton_kernels.py names them. Per
    request: rows, q_lens, before. blocks, per program: block_reqs, block_firsts, block_keys, block_ends, block_slots.
    merges, per block with more than one split: merge_reqs, merge_firsts, merge_slots, merge_counts. decodes: requests
    of one query. num_slots: of parts."""

    rows: torch.Tensor
    q_lens: torch.Tensor
    before: torch.Tensor
    blocks: list[torch.Tensor]
    merges: list[torch.Tensor]
    decodes: torch.Tensor
    num_slots: int
    tile: ExtendTile

    @classmethod
    def of(cls, columns: list[torch.Tensor], num_slots: int, tile: ExtendTile) -> _Extends:
        """columns: blocks, merges, rows, q_lens, before, decodes."""
        rows, q_lens, before, decodes = columns[9:]
        return cls(rows, q_lens, before, columns[:5], columns[5:9], decodes, num_slots, tile)


@dataclass(frozen=True)
class _Plan:
    """The part of a batch's work that is the same in every layer, without the table.

    starts, kv_lens: (num_reqs,), of the table's part per request, on the queries' device. longest_decode: tokens, as
    the host knew them. extends: None where all requests have one query.
    """

    starts: torch.Tensor
    kv_lens: torch.Tensor
    num_decodes: int
    longest_decode: int
    extends: _Extends | None


@dataclass(frozen=True)
class _CapturedExtends:
    """Of a CUDA graph: room for the plans of all batches with so many rows at most. What a batch does not fill
    belongs to the last request, which has neither queries nor keys."""

    heads: Heads
    tile: ExtendTile
    room: ExtendRoom
    # int32 on the queries' device: blocks, merges, rows, q_lens and before, one after the other.
    memory: torch.Tensor


@dataclass(frozen=True)
class _Mask:
    """What becomes of scores, as triton_kernels.py names it. factor: its scale."""

    factor: float
    window: int | None = None
    cap: float | None = None
    sinks: torch.Tensor | None = None

    @classmethod
    def of(cls, meta: AttentionMetadata) -> _Mask:
        return cls(meta.scale * _LOG2_E, meta.window, _cap_of(meta.softcap), meta.sinks)


@dataclass(frozen=True)
class _Table:
    """The places of a batch's keys, as triton_kernels.py reads them. pages: slots if by_slot, on the queries'
    device. skip: 0 in a batch's table; other kernels are compiled for tables that may have one."""

    pages: torch.Tensor
    by_slot: bool = False
    may_skip: bool = False
    skip: int = 0


@dataclass(frozen=True)
class _Batch:
    """The batch that forward works on. source: the segments, kept so that no others can come to lie at their
    address."""

    source: PagedSegments | BatchKey
    q_lens: tuple[int, ...]
    table: _Table
    plan: _Plan
    # The launches of a layer, for others; by what they depend on.
    recorded: dict[tuple[object, ...], Recording] = field(default_factory=dict)

    def matches(self, segments: Sequence[list[KVSegment]], page_size: int, q_lens: tuple[int, ...]) -> bool:
        if isinstance(segments, PagedSegments):
            return self.source is segments and self.q_lens == q_lens
        return isinstance(self.source, BatchKey) and self.source.matches(segments, page_size, q_lens)


class TritonAttnBackend:
    """See `AttentionBackend`. One instance serves one model; calls do not overlap.

    The plan of a batch is made in its first layer and kept until two others have come. Segments are immutable, but
    for the arrays of a `PagedSegments` of one query each, from which a plan takes only whether any is long.

    CUDA graphs: with `capturing` the grid depends on the batch's size only. A program of a decode finds its
    request and its keys from kv_lens, starts and table on the device. Where kv_len is 0 it finds none, and the row is
    zero. A replay therefore needs nothing from the host. Without `capturing`, short batches have no splits. Of
    prefills the host divides rows and keys again before a replay, for as many programs as there may be.

    tiles, num_sms (the number of programs that run at once): None to derive them from the first queries of each page
    size and their GPU.
    """

    captures_extends = True
    computes_masked = True

    def __init__(self, tiles: Tiles | None = None, num_sms: int | None = None) -> None:
        self.capturing = False
        self._given_tiles = tiles
        # By page size, and whether keys were made of latents.
        self._tiles: dict[tuple[int, bool], Tiles] = {}
        self._num_sms = num_sms
        # Of the last plan with extends.
        self._last_extends: tuple[Tiles, Heads] | None = None
        self._recent: RecentPlans[_Batch] = RecentPlans()
        # By q_len, length and the keys before the first query. A plan does not depend on the pages.
        self._partials: OrderedDict[tuple[int, int, int], _Plan] = OrderedDict()
        self._captured: WeakKeyDictionary[PagedSegments, _CapturedExtends] = WeakKeyDictionary()
        self.expansion: LatentExpansion | None = LatentExpansion(self, self._has_tiles_for_heads)

    @property
    def long_extend_len(self) -> int | None:
        if self._last_extends is None or self._num_sms is None:
            return None
        tiles, heads = self._last_extends
        return tiles.fewest_queries(heads, self._num_sms)

    def forward(
        self, q: torch.Tensor, view: KVView, segments: Sequence[list[KVSegment]], meta: AttentionMetadata
    ) -> torch.Tensor:
        """q: (num_tokens, num_q_heads, head_dim). Returns (num_tokens, num_q_heads, value_dim), the same dtype,
        contiguous."""
        batch = self._recent.find(segments, view.page_size, meta.q_lens)
        if batch is None:
            batch = self._recent.keep(self._make_batch(segments, view, meta.q_lens, q))
        assert sum(meta.q_lens) == q.shape[0], f"{q.shape[0]} rows of q for q_lens {meta.q_lens}"
        value_dim = view.v.shape[3]
        out = q.new_empty((*q.shape[:2], value_dim))
        mask = _Mask.of(meta)
        if self.capturing:
            # A graph uses memory of its own.
            self._attend(q, view, batch.table, batch.plan, mask, out, None, launch)
            return out
        v = (view.v,) if value_dim == q.shape[2] else ()
        tensors = (q, view.k, *v, *(() if mask.sinks is None else (mask.sinks,)))
        given = (*tensors, out, mask.factor)
        of_tensors = (x for each in tensors for x in (each.dtype, each.stride(), each.data_ptr() % ALIGNMENT))
        key = (q.shape, value_dim, mask.window, mask.cap, *of_tensors)
        recorded = batch.recorded.get(key)
        if recorded is None:
            recorded = Recording(*given)
            self._attend(q, view, batch.table, batch.plan, mask, out, None, recorded.launch)
            recorded.end()
            batch.recorded[key] = recorded
        else:
            recorded.repeat(*given)
        return out

    def before_replay(self, segments: PagedSegments) -> None:
        captured = self._captured.get(segments)
        if captured is None:
            return  # a decode needs no plan from the host
        q_lens, kv_lens = segments.q_lens, segments.kv_lens
        before = np.maximum(kv_lens - q_lens, 0)
        sms = self._sms_of(captured.memory.device)
        splits = split_extends(q_lens, kv_lens, before, captured.heads, captured.tile, sms, 1)
        found = captured.room.filled(splits, (np.cumsum(q_lens) - q_lens, q_lens, before))
        (there,) = to_device_together([found], captured.memory.device)
        captured.memory.copy_(there)

    def partial(
        self, q: torch.Tensor, view: KVView, segment: KVSegment, scale: float, mask: PartialMask | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q: (q_len, num_q_heads, head_dim). Returns out (q_len, num_q_heads, value_dim), float32, and lse (q_len,
        num_q_heads)."""
        assert not segment.causal or segment.length == q.shape[0], "a causal segment's tokens are the queries"
        assert segment.pages.shape[0] * view.page_size >= segment.skip + segment.length, (
            "a segment with too few pages"
        )
        mask = mask or PartialMask(None, None, 0)
        # Without a window queries see all of a segment before theirs, however far it is.
        before = segment.length - q.shape[0] * segment.causal if mask.window is None else mask.distance
        assert mask.window is None or q.shape[0] > 1, "a window of a single query"
        key = (q.shape[0], segment.length, before)
        plan = self._partials.get(key)
        if plan is None:
            q_lens, kv_lens, num_before = (np.array([each]) for each in key)
            plan = self._partials[key] = self._make_plan(q_lens, kv_lens, num_before, q, view)
            if len(self._partials) > _KEPT_PARTIALS:
                self._partials.popitem(last=False)
        self._partials.move_to_end(key)
        out = q.new_empty((*q.shape[:2], view.v.shape[3]), dtype=torch.float32)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        table = _Table(segment.pages, may_skip=True, skip=segment.skip)
        of_scores = _Mask(scale * _LOG2_E, mask.window, _cap_of(mask.softcap))
        self._attend(q, view, table, plan, of_scores, out, lse, launch)
        return out, lse

    def plan_heads(self, q: torch.Tensor, view: ExpandedView, reqs: RequestsOfPiece) -> _Plan:
        """See `HeadsBackend`."""
        assert (reqs.q_lens > 1).all(), "a long extend has several queries"
        return self._make_plan(reqs.q_lens, reqs.kv_lens, reqs.before, q, view, places=(reqs.rows, reqs.starts))

    def attend_heads(
        self,
        q: torch.Tensor,
        view: ExpandedView,
        table: torch.Tensor,
        plan: _Plan,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """See `HeadsBackend`."""
        self._attend(q, view, _Table(table), plan, _Mask(scale * _LOG2_E), out, lse, launch)

    # -- inside -------------------------------------------------------------------------------------------------

    def _make_batch(
        self, segments: Sequence[list[KVSegment]], view: KVView, q_lens: tuple[int, ...], q: torch.Tensor
    ) -> _Batch:
        queries, page_size = np.array(q_lens, np.int64), view.page_size
        if isinstance(segments, PagedSegments):
            assert segments.page_size == page_size, f"pages of {segments.page_size} tokens in a pool of {page_size}"
            assert np.array_equal(segments.q_lens, queries), "queries that the segments were not made for"
            if self.capturing and not (queries == 1).all():
                plan = self._make_captured_plan(segments, q, view)
                return _Batch(segments, q_lens, _Table(segments.table), plan)
            kv_lens = segments.kv_lens
            on_device = segments.device_starts, segments.device_kv_lens
            plan = self._make_plan(queries, kv_lens, kv_lens - queries, q, view, on_device)
            return _Batch(segments, q_lens, _Table(segments.table), plan)
        key = BatchKey.of(segments, page_size, q_lens)
        flat = [segment for of_req in segments for segment in of_req if segment.length > 0]
        slots = torch.cat(segment_slots(flat, page_size)) if flat else torch.zeros(0, dtype=torch.int64)
        kv_lens = np.array([sum(segment.length for segment in of_req) for of_req in segments], np.int64)
        is_causal = np.array([bool(of_req) and of_req[-1].causal for of_req in segments], np.bool_)
        plan = self._make_plan(queries, kv_lens, kv_lens - queries * is_causal, q, view)
        return _Batch(key, q_lens, _Table(slots.to(q.device), by_slot=True), plan)

    def _make_plan(
        self,
        q_lens: np.ndarray,
        kv_lens: np.ndarray,
        before: np.ndarray,
        q: torch.Tensor,
        view: KVView,
        on_device: tuple[torch.Tensor, torch.Tensor] | None = None,
        places: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> _Plan:
        """q_lens, kv_lens, before: (num_reqs,) int64. on_device: starts and kv_lens, where they are on the device.
        places: the first row in q and the first entry in the table of each; None where the rows lie side by side, and
        the parts of the table, too, unless they are on the device."""
        is_decode = q_lens == 1
        num_decodes, longest = int(is_decode.sum()), int(kv_lens[is_decode].max(initial=0))
        if num_decodes == len(q_lens):
            starts, lens = on_device or to_device_together([np.cumsum(kv_lens) - kv_lens, kv_lens], q.device)
            return _Plan(starts, lens, num_decodes, longest, None)
        heads, sms = _heads_of(q, view), self._sms_of(q.device)
        tiles = self._tiles_for(q, view)
        if view.rotary is None:
            self._last_extends = tiles, heads
        tile = tiles.pick(q_lens[~is_decode], heads, sms)
        splits = split_extends(q_lens, kv_lens, before, heads, tile, sms)
        rows, starts_there = places or (np.cumsum(q_lens) - q_lens, np.cumsum(kv_lens) - kv_lens)
        columns = [
            *splits.blocks,
            *splits.merges,
            *(rows, q_lens, before, np.flatnonzero(is_decode)),
            *(() if on_device else (starts_there, kv_lens)),
        ]
        tensors = to_device_together([column.astype(np.int32) for column in columns], q.device)
        starts, lens = on_device or tensors[-2:]
        return _Plan(starts, lens, num_decodes, longest, _Extends.of(tensors[:13], splits.num_slots, tile))

    def _make_captured_plan(self, segments: PagedSegments, q: torch.Tensor, view: KVView) -> _Plan:
        heads, sms = _heads_of(q, view), self._sms_of(q.device)
        # As of one request, whose blocks are the fewest.
        tile = self._tiles_for(q, view).pick(np.array([q.shape[0]]), heads, sms)
        room = ExtendRoom.of(q.shape[0], len(segments), heads, tile, sms)
        memory = torch.zeros(sum(room.sizes), dtype=torch.int32, device=q.device)
        self._captured[segments] = _CapturedExtends(heads, tile, room, memory)
        self.before_replay(segments)
        extends = _Extends.of([*memory.split(room.sizes), memory[:0]], room.num_slots, tile)
        return _Plan(segments.device_starts, segments.device_kv_lens, 0, 0, extends)

    def _attend(
        self,
        q: torch.Tensor,
        view: KVView,
        table: _Table,
        plan: _Plan,
        mask: _Mask,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        launch: Callable[..., object],
    ) -> None:
        """Fills out, and lse unless it is None. launch: see `triton_launch`."""
        num_heads, value_dim, rotary_dim = q.shape[1], *_dims_of(q, view)
        heads, extends = _heads_of(q, view), plan.extends
        assert mask.factor > 0, f"a scale of {mask.factor}"
        assert q.stride(2) == 1, "the values of a head lie side by side"
        assert table.pages.is_contiguous(), "pages lie side by side in their table"
        assert mask.sinks is None or mask.sinks.is_contiguous(), "sinks lie side by side"
        tiles = self._tiles_for(q, view)
        block_d = max(16, triton.next_power_of_2(value_dim))
        page_tokens = _page_tokens(view)
        paged = {"HEAD_DIM": value_dim, "ROTARY_DIM": rotary_dim, "BLOCK_D": block_d, "GROUP": heads.group}
        paged |= {"PAGE_SIZE": view.page_size, "BY_SLOT": table.by_slot, "IN_TOKENS": page_tokens is not None}
        rotary = view.rotary
        from_page_start = tiles.uses_whole_pages and not (table.by_slot or table.may_skip)
        merged = {"HEAD_DIM": value_dim, **tiles.merge.options(value_dim)}
        value_chunks = -(-value_dim // merged["BLOCK_D"])
        # Latents are keys and values.
        kv = (q, view.k, None if rotary_dim and rotary is None else view.v)
        results = (out, lse, mask.sinks)
        keys = (table.pages, plan.starts, plan.kv_lens)
        strides = (*q.stride()[:2], *view.k.stride()[:3], *view.v.stride()[:3])
        numbers = (page_tokens or 0, mask.factor, table.skip, mask.window, mask.cap)
        if extends is not None and (num_blocks := len(extends.blocks[0])):
            in_pages = lse is None and not table.by_slot
            tile = extends.tile
            tile_keys = tile.keys_of_pages if in_pages else tile.keys
            parts, part_lses = _parts(out, extends.num_slots, heads.num_kv_heads, tile.queries)
            launch(
                extend_kernel,
                (num_blocks, heads.num_kv_heads),
                *kv,
                rotary,
                *results,
                parts,
                part_lses,
                *keys,
                *extends.blocks,
                extends.rows,
                extends.q_lens,
                extends.before,
                *strides,
                *((None, None) if rotary is None else rotary.stride()[:2]),
                *numbers,
                **paged,
                BLOCK_M=tile.queries,
                BLOCK_N=tile_keys,
                TILE_IN_PAGE=rotary is not None or (from_page_start and view.page_size % tile_keys == 0),
                num_warps=tile.warps,
                num_stages=tiles.num_stages,
            )
            if num_merges := len(extends.merges[0]):
                row_chunks = tile.queries // tiles.merge.rows
                launch(
                    merge_extends_kernel,
                    (num_merges, heads.num_kv_heads, row_chunks * value_chunks),
                    parts,
                    part_lses,
                    out,
                    lse,
                    mask.sinks,
                    *extends.merges,
                    extends.rows,
                    extends.q_lens,
                    **merged,
                    GROUP=heads.group,
                    BLOCK_M=tile.queries,
                )
        if num_decodes := plan.num_decodes:
            rows = min(tiles.decode_rows, max(16, triton.next_power_of_2(heads.group)))
            head_blocks = -(-heads.group // rows)
            num_more = 0
            if self.capturing or plan.longest_decode > tiles.least_decode_split:
                programs = tiles.more_decodes_per_sm * self._sms_of(q.device)
                num_more = -(-programs // (heads.num_kv_heads * head_blocks))
            parts, part_lses = _parts(out, num_decodes + num_more if num_more else 0, num_heads, 1)
            of_decodes = (None, None) if extends is None else (extends.decodes, extends.rows)
            launch(
                decode_kernel,
                (num_decodes + num_more, heads.num_kv_heads * head_blocks),
                *kv,
                *results,
                parts,
                part_lses,
                *keys,
                *of_decodes,
                *strides,
                *numbers,
                num_decodes,
                num_more,
                head_blocks,
                **paged,
                BLOCK_H=rows,
                BLOCK_N=tiles.decode_keys,
                TILE_IN_PAGE=from_page_start and view.page_size % tiles.decode_keys == 0,
                LEAST=tiles.least_decode_split,
                AT_ONCE=_LENS_AT_ONCE,
                num_warps=tiles.decode_warps(rows, block_d, q.dtype),
                num_stages=tiles.decode_stages,
            )
            if num_more:
                launch(
                    merge_decodes_kernel,
                    (num_decodes, -(-num_heads // tiles.merge.rows), value_chunks),
                    parts,
                    part_lses,
                    out,
                    lse,
                    mask.sinks,
                    plan.kv_lens,
                    *of_decodes,
                    num_decodes,
                    num_more,
                    num_heads,
                    **merged,
                    LEAST=tiles.least_decode_split,
                    AT_ONCE=_LENS_AT_ONCE,
                )

    def _tiles_for(self, q: torch.Tensor, view: KVView) -> Tiles:
        kind = view.page_size, view.rotary is not None
        found = self._given_tiles or self._tiles.get(kind)
        if found is None:
            shared_bytes, has_tensor_memory = _shared_bytes(q.device), _has_tensor_memory(q.device)
            if view.rotary is not None:
                found = Tiles.of_expanded(shared_bytes)
                assert found is not None, "_has_tiles_for_heads tells before"
            elif view.v.shape[3] == q.shape[2]:
                found = Tiles.of(q.shape[2], q.dtype, view.page_size, shared_bytes, view.k.dtype, has_tensor_memory)
            else:
                group = _heads_of(q, view).group
                found = Tiles.of_latents(q.dtype, view.k.dtype, group, shared_bytes, has_tensor_memory)
            self._tiles[kind] = found
        return found

    def _has_tiles_for_heads(self, dtype: torch.dtype, head_dim: int, rotary_dim: int) -> bool:
        """See `LatentExpansion`."""
        if not all(size >= 16 and size & (size - 1) == 0 for size in (head_dim, rotary_dim)):
            return False
        if self._given_tiles is not None:
            return True
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU
        is_small = dtype.itemsize == 2 and head_dim <= 128 and rotary_dim <= 64
        return is_small and Tiles.of_expanded(_shared_bytes(device)) is not None

    def _sms_of(self, device: torch.device) -> int:
        if self._num_sms is None:
            self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        return self._num_sms


@dataclass(frozen=True)
class ExtendSplits:
    """blocks, merges: int64 arrays, see `_Extends`."""

    blocks: tuple[np.ndarray, ...]
    merges: tuple[np.ndarray, ...]
    num_slots: int


@dataclass(frozen=True)
class ExtendRoom:
    """The most that `split_extends` finds for a number of rows and requests."""

    num_reqs: int
    num_blocks: int
    num_merges: int
    num_slots: int

    @classmethod
    def of(cls, num_rows: int, num_reqs: int, heads: Heads, tile: ExtendTile, num_sms: int) -> ExtendRoom:
        """num_reqs: the last one has no rows."""
        num_blocks = num_rows * heads.group // tile.queries + min(num_rows, num_reqs - 1)
        at_once = tile.at_once(heads, num_sms)
        num_merges = min(num_blocks, at_once)
        return cls(num_reqs, num_blocks + at_once, num_merges, num_merges + at_once)

    @property
    def sizes(self) -> list[int]:
        """Of the columns of `_CapturedExtends`."""
        return [self.num_blocks] * 5 + [self.num_merges] * 4 + [self.num_reqs] * 3

    def filled(self, splits: ExtendSplits, of_reqs: Sequence[np.ndarray]) -> np.ndarray:
        """(sum(sizes),) int32. of_reqs: rows, q_lens and before."""
        assert splits.num_slots <= self.num_slots, f"{splits} in {self}"
        # Programs without work: no keys of the last request.
        idle = (self.num_reqs - 1, 0, 0, 0, -1, self.num_reqs - 1, 0, 0, 0)
        columns = [
            np.pad(column, (0, size - len(column)), constant_values=value)
            for column, size, value in zip((*splits.blocks, *splits.merges), self.sizes, idle)
        ]
        return np.concatenate((*columns, *of_reqs)).astype(np.int32)


def split_extends(
    q_lens: np.ndarray,
    kv_lens: np.ndarray,
    before: np.ndarray,
    heads: Heads,
    tile: ExtendTile,
    num_sms: int,
    fewest: int = 2,
) -> ExtendSplits:
    """How the requests of `fewest` queries or more are cut into blocks of rows, and the keys that a block sees into
    splits, of equally many keys or fewer. SMs hold so many programs at once that the last round is full if no split
    begins one more: 48 tokens behind 12 K keys fill a GPU once, and a long prompt is split little or not."""
    extends = np.flatnonzero(q_lens >= fewest)
    rows = tile.queries
    num_blocks = -(-q_lens[extends] * heads.group // rows)
    reqs = np.repeat(extends, num_blocks)
    firsts = rows * (np.arange(num_blocks.sum()) - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks))
    last_token = np.minimum((firsts + rows - 1) // heads.group, q_lens[reqs] - 1)
    ends = np.minimum(kv_lens[reqs], before[reqs] + last_token + 1)
    # The longest first, so that the last programs to begin are short.
    order = np.argsort(-ends, kind="stable")
    reqs, firsts, ends = reqs[order], firsts[order], ends[order]
    at_once = tile.at_once(heads, num_sms)
    most = -(-len(ends) // at_once) * at_once
    keys_at_once = max(tile.keys, tile.keys_of_pages)
    num_tiles = np.maximum(-(-ends // keys_at_once), 1)
    least = tile.least_split // keys_at_once
    size = _tiles_of_split(num_tiles, most, least)
    if 2 * at_once * size > 3 * int(num_tiles.sum()):
        # One request is so long that the others end much sooner: another round costs less than to wait for it.
        size = _tiles_of_split(num_tiles, len(ends) + at_once, least)
    counts, tokens = -(-num_tiles // size), size * keys_at_once
    is_split = counts > 1
    # Blocks that are split have all the slots, and they come first.
    num_slots = int(counts[is_split].sum())
    of_block = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    slots = np.arange(counts.sum())
    slots[num_slots:] = -1
    merges = (reqs[is_split], firsts[is_split], (np.cumsum(counts) - counts)[is_split], counts[is_split])
    keys = of_block * tokens
    blocks = (np.repeat(reqs, counts), np.repeat(firsts, counts), keys, keys + tokens, slots)
    return ExtendSplits(blocks, merges, num_slots)


def _tiles_of_split(num_tiles: np.ndarray, most: int, least: int) -> int:
    """The fewest tiles of a split, `least` or more, with which there are `most` splits, or fewer, but one for each of
    num_tiles at least."""
    low = max(least, -(-int(num_tiles.sum()) // max(most, 1)))
    high = max(low, int(num_tiles.max(initial=1)))
    while low < high:
        middle = (low + high) // 2
        if int((-(-num_tiles // middle)).sum()) <= most:
            high = middle
        else:
            low = middle + 1
    return low


def _shared_bytes(device: torch.device) -> int:
    """That a program may have; of an H100 where the device is none."""
    if device.type != "cuda":
        return HOPPER_SHARED_BYTES
    found: int = triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
    return found


def _has_tensor_memory(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in _WITH_TENSOR_MEMORY


def _cap_of(softcap: float | None) -> float | None:
    """For scores that are powers of two."""
    return None if softcap is None else softcap * _LOG2_E


def _heads_of(q: torch.Tensor, view: KVView) -> Heads:
    return Heads(view.k.shape[2], q.shape[1] // view.k.shape[2])


def _dims_of(q: torch.Tensor, view: KVView) -> tuple[int, int]:
    """Values of V, and how many more a key has: where latents are cached. 0 of other keys."""
    k, v, head_dim, value_dim = view.k, view.v, q.shape[2], view.v.shape[3]
    if view.rotary is not None:
        assert head_dim == k.shape[3] + view.rotary.shape[3], f"queries of {head_dim}"
        return value_dim, view.rotary.shape[3]
    if value_dim == head_dim:
        return value_dim, 0
    sizes = (value_dim, head_dim - value_dim)
    if not all(size >= 16 and size & (size - 1) == 0 for size in sizes):
        raise ValueError(
            f"The attention backend triton computes values of {value_dim} with keys of {head_dim} only if they are "
            "latents, whose values and the rest of whose keys are powers of two, 16 at least, as 512 and 64."
        )
    if v.data_ptr() != k.data_ptr() or v.stride() != k.stride():
        raise ValueError(
            f"The attention backend triton computes values of {value_dim} with keys of {head_dim} only if they are "
            "latents: V has to be the first values of K, in the same memory."
        )
    return value_dim, head_dim - value_dim


def _page_tokens(view: KVView) -> int | None:
    """Tokens from the start of a page to that of the next, where K and V lie alike and a token's place counts whole
    ones; else None."""
    (num_pages, *_), (page_stride, token_stride, _, _) = view.k.shape, view.k.stride()
    if view.v.stride()[:2] != (page_stride, token_stride) or token_stride <= 0 or page_stride % token_stride:
        return None
    page_tokens = page_stride // token_stride
    return page_tokens if num_pages * page_tokens < 1 << 31 else None


def _parts(out: torch.Tensor, num_slots: int, num_heads: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What splits leave: (num_slots, num_heads, rows, value_dim) and (num_slots, num_heads, rows), float32."""
    parts = out.new_empty((num_slots, num_heads, rows, out.shape[2]), dtype=torch.float32)
    return parts, parts.new_empty(parts.shape[:3])
