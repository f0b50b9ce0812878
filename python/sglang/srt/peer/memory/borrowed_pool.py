"""`BorrowedPool`: the pages of borrowed slabs. Pages of mapped slabs are copied like a host's. Pages of slabs that
must not be mapped (strict mode) are copied by their lender, to and from staging memory of this process.

Owns the sessions with lenders, one per lender's life and mover, each used by that stream's thread only. Owns, too,
what is known of lenders that do not answer (`LenderBreakers`). Decides nothing: `BorrowedMemory` tells which lender
lent which slab.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from sgl_kernel.kvcacheio import (
    KVPages,
    copy_pages,
    transfer_kv_all_layer_lf_pf,
    transfer_kv_per_layer_pf_lf,
)
from sglang.srt.mem_cache.link import HasPages
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.page_memory import PageMemory
from sglang.srt.mem_cache.transfer import LoadFailedError
from sglang.srt.peer.memory.copy_session import CopySession, LeaseEndedError, StrictSlab
from sglang.srt.peer.memory.elastic_pool import ElasticPool
from sglang.srt.peer.memory.lender_breakers import LenderBreakers
from sglang.srt.peer.memory.slab_channel import ChannelError
from sglang.srt.peer.memory.slabs import GRANULARITY, SlabError, Slabs
from sglang.srt.peer.protocol.messages import MAX_COPY_PAGES, Copy

# Of a session; a page's size where that is more. A larger operation goes through the memory in rounds.
STAGING_BYTES = 8 << 20


@dataclass
class _Round:
    """The pages that go through the staging memory of one lender at a time."""

    slab_socket: str
    # Each slab with the numbers of the pages in it, one slab after the other.
    slabs: list[tuple[StrictSlab, np.ndarray]] = field(default_factory=list)
    # Where these pages stand in the operation: (n,) int64 per slab.
    positions: list[np.ndarray] = field(default_factory=list)
    num_pages: int = 0


@dataclass(frozen=True)
class _Plan:
    """How one operation is carried out."""

    # The operation's page numbers.
    frames: torch.Tensor
    # Where mapped pages stand in it; None: all are mapped.
    mapped: torch.Tensor | None
    # The other pages, each round with where its pages stand.
    rounds: list[tuple[_Round, torch.Tensor]]


class BorrowedPool(ElasticPool):
    """As `ElasticPool`, but kv must not be touched where a slab is strict: each stream copies by a mover of its own.
    On a GPU no slab is strict. notify: see `LenderBreakers`."""

    def __init__(self, slabs: Slabs, layout: PageLayout, notify: Callable[[], None] = lambda: None) -> None:
        super().__init__(slabs, layout)
        assert isinstance(self.kv_pages, KVPages), "pages of peers have all layers"
        self._pages = self.kv_pages
        self._one_layer = replace(layout, num_layers=1)
        self._strict: list[StrictSlab | None] = [None] * slabs.num_slabs
        self._is_strict = np.zeros(slabs.num_slabs, np.bool_)
        self._staging_bytes = -(-max(STAGING_BYTES, self.page_bytes) // GRANULARITY) * GRANULARITY
        self.breakers = LenderBreakers(self._strict, notify)
        self._states: list[_MoverState] = []

    # -- from `BorrowedMemory` ----------------------------------------------------------------------------------

    def is_strict(self, place: int) -> bool:
        return self._strict[place] is not None

    def reach_by_copies(self, place: int, slab: StrictSlab) -> None:
        """From now on, a place stands for a slab that its lender copies."""
        self._strict[place] = slab
        self._is_strict[place] = True

    def forget(self, place: int) -> None:
        """No operation uses the pages of this place any more."""
        slab, self._strict[place] = self._strict[place], None
        self._is_strict[place] = False
        if slab is not None:
            self.breakers.forget(slab)

    def left_alone(self, place: int) -> str:
        """Why the lender of a slab is not asked for copies; empty if it is, or if the slab is mapped."""
        slab = self._strict[place]
        return self.breakers.reason(slab.slab_socket) if slab is not None else ""

    def unusable(self) -> list[int]:
        """The slabs that are strict and cannot be copied now: their lenders are left alone, or have refused."""
        if self.breakers.all_are_usable:
            return []
        return [i for i, slab in enumerate(self._strict) if slab is not None and not self.breakers.is_usable(slab)]

    def leave_alone(self, place: int, reason: str) -> None:
        """The lender of a strict slab does not answer."""
        slab = self._strict[place]
        if slab is not None:
            self.breakers.open(slab.slab_socket, reason)

    def close(self) -> None:
        """End all sessions. No operation may be under way."""
        self.breakers.close()
        for state in self._states:
            state.close()

    def seen_by_stream(self, is_within: bool = False) -> HasPages:
        """What one stream copies to or from: a mover of its own, but on a GPU the pool itself."""
        return self.mover(is_within) if self.kv_pages.device.type == "cpu" else self

    def mover(self, is_within: bool = False) -> PoolMover:
        """What copies to or from the pool at the same time as others do. is_within: to pages of this pool, which must
        be mapped."""
        self._states.append(_MoverState(self._strict, self._staging_bytes, self.breakers))
        return PoolMover(self, self._states[-1], is_within)

    def has_strict(self, frames: torch.Tensor) -> bool:
        """Whether any of the pages is not mapped."""
        strict = torch.from_numpy(self._is_strict)
        return bool(strict.any()) and bool(strict[frames // self._stride_pages].any())

    # -- from movers, on their streams --------------------------------------------------------------------------

    def read_layer(
        self,
        state: _MoverState,
        layer: int,
        pages: KVPages,
        frames: tuple[torch.Tensor, torch.Tensor],
        backend: str,
    ) -> None:
        """Copy one layer of borrowed pages to other memory. frames: source and destination."""
        src, dst = frames
        plan = self._plan(state, src, self._staging_bytes // self._one_layer.page_bytes)
        if plan.mapped is None:
            transfer_kv_per_layer_pf_lf(self._pages, pages, src, dst, layer, backend=backend)
            return
        near = plan.mapped
        transfer_kv_per_layer_pf_lf(self._pages, pages, src[near], dst[near], layer, backend=backend)
        layers = range(layer, layer + 1)
        for part, positions in plan.rounds:
            session = state.copy(part, self._requests(part, layers, to_slab=False))
            staged = self._staged(session, part.num_pages, layers)
            copy_pages(staged, pages, torch.arange(part.num_pages), dst[positions], backend=backend)

    def write(
        self,
        state: _MoverState,
        pages: KVPages,
        frames: tuple[torch.Tensor, torch.Tensor],
        backend: str,
        layers: range,
    ) -> None:
        """Copy layers of other memory, which are all that pages have, to borrowed pages."""
        src, dst = frames
        plan, below = self._plan(state, dst, self._staging_bytes // self.page_bytes), self.kv_pages.part(layers)
        if plan.mapped is None:
            transfer_kv_all_layer_lf_pf(pages, below, src, dst, backend=backend)
            return
        near = plan.mapped
        transfer_kv_all_layer_lf_pf(pages, below, src[near], dst[near], backend=backend)
        for part, positions in plan.rounds:
            staged = self._staged(state.session(part), part.num_pages, layers)
            copy_pages(pages, staged, src[positions], torch.arange(part.num_pages), backend=backend)
            state.copy(part, self._requests(part, layers, to_slab=True))

    def _plan(self, state: _MoverState, frames: torch.Tensor, round_pages: int) -> _Plan:
        """Made once per operation: all its layers have the same page numbers."""
        if state.plan is None or state.plan.frames is not frames:
            state.plan = self._new_plan(frames, round_pages)
        return state.plan

    def _new_plan(self, frames: torch.Tensor, round_pages: int) -> _Plan:
        if not self._is_strict.any():
            return _Plan(frames, None, [])
        places = (frames // self._stride_pages).numpy()
        strict = self._is_strict[places]
        if not strict.any():
            return _Plan(frames, None, [])
        far = np.flatnonzero(strict)
        far = far[np.argsort(places[far], kind="stable")]
        in_slab = (frames % self._stride_pages).numpy().astype(np.int32)
        rounds: list[_Round] = []
        most = min(round_pages, MAX_COPY_PAGES)
        for rest in np.split(far, np.flatnonzero(np.diff(places[far])) + 1):
            slab = self._strict[int(places[rest[0]])]
            assert slab is not None
            while len(rest):
                if not rounds or rounds[-1].slab_socket != slab.slab_socket or rounds[-1].num_pages == most:
                    rounds.append(_Round(slab.slab_socket))
                now, rest = np.split(rest, [most - rounds[-1].num_pages])
                rounds[-1].slabs.append((slab, in_slab[now]))
                rounds[-1].positions.append(now)
                rounds[-1].num_pages += len(now)
        with_positions = [(part, torch.from_numpy(np.concatenate(part.positions))) for part in rounds]
        return _Plan(frames, torch.from_numpy(np.flatnonzero(~strict)), with_positions)

    def _requests(self, part: _Round, layers: range, to_slab: bool) -> list[Callable[[int], Copy]]:
        """Copies of layers, one per slab and span, to or from the staging memory."""
        requests: list[Callable[[int], Copy]] = []
        starts = replace(self.page_layout, num_layers=len(layers)).offsets(part.num_pages)
        for span, start in zip(layer_spans(self.page_layout, layers), starts):
            for slab, pages in part.slabs:
                requests.append(partial(_request, slab, to_slab, self.page_bytes, span, start, pages.tobytes()))
                start += span.parts * span.run_bytes * len(pages)
        return requests

    def _staged(self, session: CopySession, num_pages: int, layers: range) -> KVPages:
        """The staging memory as so many pages with these layers alone."""
        layout = replace(self.page_layout, num_layers=len(layers))
        memory = torch.from_numpy(session.staging[: num_pages * layout.page_bytes])
        # One span is whole pages, several are one component each.
        order = "page_first" if len(layer_spans(self.page_layout, layers)) == 1 else "layer_first"
        return PageMemory(layout, num_pages, memory, order).kv_pages


@dataclass(frozen=True)
class Span:
    """The bytes of each page that one `Copy` moves, in bytes."""

    # A page is cut into so many equal parts.
    parts: int
    # Of each part.
    first_byte: int
    run_bytes: int


def layer_spans(layout: PageLayout, layers: range) -> list[Span]:
    """Where layers lie in a page-first page: one span where all are meant or the components are alike, else one per
    component."""
    if len(layers) == layout.num_layers:
        return [Span(1, 0, layout.page_bytes)]
    spans = [
        Span(1, start + layers.start * run, len(layers) * run)
        for start, run in zip(layout.offsets(), layout.run_bytes)
    ]
    return [replace(spans[0], parts=len(spans))] if layout.is_uniform else spans


class PoolMover:
    """See `BorrowedPool.mover` and `CopiesPages`."""

    # All are there: a GPU has no movers.
    page_numbers_on_host = False

    def __init__(self, pool: BorrowedPool, state: _MoverState, is_within: bool) -> None:
        self.kv_pages = pool.kv_pages
        self._pool = pool
        self._state = state
        self._is_within = is_within

    def load_layer(self, layer: int, pages: KVPages, src: torch.Tensor, dst: torch.Tensor, backend: str) -> None:
        if self._is_within and self._pool.has_strict(dst):
            raise LoadFailedError("a slab that its worker copies takes pages of the device alone")
        self._pool.read_layer(self._state, layer, pages, (src, dst), backend)

    def back_up(
        self, pages: KVPages, src: torch.Tensor, dst: torch.Tensor, backend: str, layers: range | None = None
    ) -> None:
        self._pool.write(self._state, pages, (src, dst), backend, layers or range(self.kv_pages.num_layers))


class _MoverState:
    """What a mover needs to itself. plan: of the present operation. strict: the pool's slabs, by place."""

    def __init__(self, strict: list[StrictSlab | None], staging_bytes: int, breakers: LenderBreakers) -> None:
        self.plan: _Plan | None = None
        self._strict = strict
        self._staging_bytes = staging_bytes
        self._breakers = breakers
        # By slab socket, that is, by lender's life.
        self._sessions: dict[str, CopySession] = {}

    def session(self, part: _Round) -> CopySession:
        """The session with the lender of a round. Raises LoadFailedError, at once where it is left alone."""
        where = part.slab_socket
        if reason := self._breakers.reason(where):
            raise LoadFailedError(f"the worker that has it is left alone: {reason}")
        if where in self._sessions:
            return self._sessions[where]
        self._forget_old()
        try:
            self._sessions[where] = CopySession(part.slabs[0][0], self._staging_bytes)
        except (ChannelError, SlabError) as error:
            raise self._failed(part, error) from error
        return self._sessions[where]

    def copy(self, part: _Round, requests: list[Callable[[int], Copy]]) -> CopySession:
        """Have the lender of a round carry out requests, as `_requests` makes them. Raises LoadFailedError."""
        session = self.session(part)
        try:
            failure = session.copy(requests)
        except ChannelError as error:
            raise self._failed(part, error) from error
        if failure is not None:
            self._breakers.refuse(part.slabs[failure.number % len(part.slabs)][0])
            raise LoadFailedError(f"the worker that has it refuses a copy: {failure.reason}")
        return session

    def close(self) -> None:
        self.plan = None
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()

    def _failed(self, part: _Round, error: Exception) -> LoadFailedError:
        """End a session: its requests may still be under way, so its memory must not be used again."""
        where = part.slab_socket
        if where in self._sessions:
            self._sessions.pop(where).close()
        if isinstance(error, LeaseEndedError):
            self._breakers.refuse(part.slabs[0][0])
        else:
            self._breakers.open(where, str(error))
        return LoadFailedError(f"the worker that has it cannot be asked for copies: {error}")

    def _forget_old(self) -> None:
        """Forget lenders' lives of which nothing is borrowed any more."""
        used = {slab.slab_socket for slab in self._strict if slab is not None}
        for where in self._sessions.keys() - used:
            self._sessions.pop(where).close()


def _request(
    slab: StrictSlab,
    to_slab: bool,
    page_bytes: int,
    span: Span,
    staging_byte: int,
    pages: bytes,
    sequence: int,
) -> Copy:
    return Copy(
        sequence=sequence,
        to_slab=to_slab,
        number=slab.lease.number,
        token=slab.token,
        page_bytes=page_bytes,
        parts=span.parts,
        first_byte=span.first_byte,
        run_bytes=span.run_bytes,
        staging_byte=staging_byte,
        pages=pages,
    )
