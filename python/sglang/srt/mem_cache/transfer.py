"""Tiers, tickets and transfer operations: the orders that the scheduler gives and links carry out.

Plain data and the `Link` protocol; no torch, no thread, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np


class Tier(IntEnum):
    """Where KV can be. The device, memory borrowed from peers and the host have frames. Disk and remote store are
    asked by name (see block_keys.py). Their content is certain only once it has been read."""

    DEVICE = 0
    PEER = 1
    HOST = 2
    DISK = 3
    REMOTE = 4


TIER_NAMES = ("device", "peer", "host", "disk", "remote")
FRAME_TIERS = (Tier.DEVICE, Tier.PEER, Tier.HOST)

# Loads, which a launch waits for, and backups, which wait for a launch, never share a link.
H2D = "h2d"
D2H = "d2h"
P2D = "p2d"
D2P = "d2p"
LOAD_LINKS = {Tier.PEER: P2D, Tier.HOST: H2D}
BACKUP_LINKS = {Tier.PEER: D2P, Tier.HOST: D2H}
# From peers to the host, when the peer gives pages up.
P2H = "p2h"
# Between slabs of peers, when one is given back while a request reads it.
P2P = "p2p"
# To the swap file of a request that streams. Nothing is loaded from the file by this link, see LayerStreamCache.
D2S = "d2s"
COPY_LINKS = (H2D, D2H, P2D, D2P, P2H, P2P, D2S)
# Links of storage. A long read must not hold up a probe, nor a write a read, nor one of two stores the other. A probe
# asks both: what the second one may take for it is limited (`GuardedStore`).
PROBE = "probe"
FETCH = "fetch"
FETCH_FAR = "fetch_far"
STORE = "store"
STORE_FAR = "store_far"
# By the place of the store.
FETCH_LINKS = (FETCH, FETCH_FAR)
STORE_LINKS = (STORE, STORE_FAR)
STORAGE_LINKS = (PROBE, *FETCH_LINKS, *STORE_LINKS)
# A fetch may have to wait for their operations before it can begin.
STALLING_LINKS = (*FETCH_LINKS, *STORE_LINKS, H2D, D2H, D2P, P2H)
# Compares pages of the device, see CheckLink.
CHECK = "check"
LINKS = (*COPY_LINKS, CHECK, *STORAGE_LINKS)
# Launches of the executor count like a link's operations, under this name.
EXEC = "exec"
# The part of a launch in which it waits for loads; a name among measured costs.
STALL = "stall"
# The copies of what a launch streams; a name among measured costs.
STREAM = "stream"


class Ticket(NamedTuple):
    """Names one operation: the seq-th of its link. The scheduler numbers operations, and links assert the order."""

    link: str
    seq: int


@dataclass(frozen=True)
class TransferOp:
    """Copy pages from one tier to another."""

    ticket: Ticket
    src: Tier
    dst: Tier
    # (n,) int32 each.
    src_frames: np.ndarray
    dst_frames: np.ndarray
    # All components of the layers.
    size_bytes: int
    # Of a backup: the fence, which is the launch that writes the source, or -1 if storage wrote it. None: the source
    # is ready.
    after: int | None = None
    # Of the first so many pages only layers with full attention are copied.
    num_full_only_pages: int = 0
    # Of the first so many pages only layers with a window are copied.
    num_windowed_only_pages: int = 0
    # Those behind num_full_only_pages in the pool that a tier has for layers with a window, if it has one; int32.
    src_windowed: np.ndarray | None = None
    dst_windowed: np.ndarray | None = None


@dataclass(frozen=True)
class CheckOp(TransferOp):
    """Compare cached pages of the device, src_frames, with those that were computed from the same tokens, dst_frames.
    Fails if they differ. Changes neither."""

    # Of the prompt up to the last of the pages, (n,) int32.
    tokens: np.ndarray = field(kw_only=True)
    # The farthest tier that the cached pages passed through.
    came_from: Tier = field(kw_only=True)


class StorageAction(IntEnum):
    """What a storage operation does. ATTACH, DETACH and CLEAR run on the probe link while the others are empty."""

    EXISTS = 0
    GET = 1
    SET = 2
    ATTACH = 3
    DETACH = 4
    CLEAR = 5
    TOUCH = 6
    # Of one tenant: drop all its blocks, and keep at most so many of them.
    ERASE = 7
    LIMIT = 8


# The count of an EXISTS that failed. Ranks agree on the least of their counts.
PROBE_FAILED = -1
# What may be under way together, and what goes with them in the order of the link for writes. The others run alone.
OPS_OF_TENANTS = (StorageAction.ERASE, StorageAction.LIMIT)
OPS_OF_BLOCKS = (StorageAction.EXISTS, StorageAction.GET, StorageAction.SET, StorageAction.TOUCH)


@dataclass(frozen=True)
class StorageOp:
    """An operation on the storage tier. It never fails; its result has a count instead. EXISTS, GET and SET count the
    leading blocks that are stored, that were read, and that are stored now; TOUCH one more than EXISTS. The others
    count 1 for success. All count 0 if they fail, but EXISTS counts PROBE_FAILED."""

    ticket: Ticket
    action: StorageAction
    # (n, 16) uint8, see block_keys.py.
    keys: np.ndarray
    # (m,) int32 host frames, all pages of block after block; none for EXISTS and TOUCH.
    frames: np.ndarray
    size_bytes: int
    # For ATTACH: the store to open, as JSON.
    setup: str = ""
    # Of two stores, the places of those that are left out.
    skips: tuple[int, ...] = ()
    # For GET from the second of two stores: what it lacks is read from the first one. Ranks agree on what all have in
    # the first one, of which some may have more there.
    falls_back: bool = False
    # Whose blocks these are, see `BlockKeys.tenant`; for SET, ERASE and LIMIT.
    tenant: bytes = b""
    # For LIMIT: the most blocks, below 0 for no limit, and where: DISK or REMOTE.
    limit: int = -1
    tier: Tier = Tier.DISK
    # What frames are in the host's pool for layers with a window, if it has one; -1: nothing of such layers is read,
    # or written.
    windowed: np.ndarray | None = None

    @property
    def after(self) -> None:
        """None: source and destination are ready, and no launch is waited for."""
        return None


@dataclass(frozen=True)
class OpResult:
    """The end of one operation."""

    seq: int
    ok: bool
    error: str = ""
    # Of a storage operation: see StorageOp.
    count: int = 0
    # Of a probe: how many of the last counted blocks lie on the second storage tier.
    far_count: int = 0
    # Of a probe: how many leading blocks are stored in layers with full attention; no fewer than `count`.
    part_count: int = 0
    # Measured seconds from its first byte to its end. A link that works on several operations at once counts from the
    # end of the operation before.
    seconds: float = field(default=0.0, compare=False)


class LayerGate(Protocol):
    """Lets a forward pass wait for one operation, layer by layer."""

    def wait(self, layer: int, stream: Any) -> None:
        """Make `stream` wait for the layer. Raises GateError if its copy was never enqueued."""
        ...

    def check(self) -> None:
        """Raise LoadFailedError if the operation failed; called on the stream, after the wait."""
        ...


class Link(Protocol):
    """Executes operations in order; each link takes either `TransferOp` or `StorageOp`. Cancel is a hint: a cancelled
    operation keeps its number, and completes as failed or as if it had not been cancelled."""

    name: str

    def submit(self, op: Any) -> None: ...

    def cancel(self, ticket: Ticket) -> None: ...

    def gate(self, ticket: Ticket) -> LayerGate: ...

    def poll(self) -> list[OpResult]:
        """Operations completed since the last poll, in order. Raises if the worker died."""
        ...


class LoadFailedError(RuntimeError):
    """A launch waited for a load that failed."""


class GateError(RuntimeError):
    """A forward pass would wait for a layer whose copy was never enqueued: use before load."""
