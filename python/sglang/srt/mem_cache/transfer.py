"""Tiers, tickets and transfer operations: what the scheduler says and what links do.

Plain data and the `Link` protocol; no torch, no thread, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np


class Tier(IntEnum):
    """Where KV can be. The device, memory borrowed from peers and the host have frames, and are prefix-closed: a node
    is resident only if its parent is. What disk and remote store have is known by name (see block_keys.py), and only
    for sure once it has been read."""

    DEVICE = 0
    PEER = 1
    HOST = 2
    DISK = 3
    REMOTE = 4


TIER_NAMES = ("device", "peer", "host", "disk", "remote")
FRAME_TIERS = (Tier.DEVICE, Tier.PEER, Tier.HOST)

# Operations that a launch waits for (loads) and operations that wait for a launch (backups) never share a link.
H2D = "h2d"
D2H = "d2h"
P2D = "p2d"
D2P = "d2p"
LOAD_LINKS = {Tier.PEER: P2D, Tier.HOST: H2D}
BACKUP_LINKS = {Tier.PEER: D2P, Tier.HOST: D2H}
# To the swap file of a request that streams; nothing is loaded from there, see LayerStreamCache.
D2S = "d2s"
COPY_LINKS = (H2D, D2H, P2D, D2P, D2S)
# Storage: a long read must not hold up the question what is there, nor a write a read.
PROBE = "probe"
FETCH = "fetch"
STORE = "store"
STORAGE_LINKS = (PROBE, FETCH, STORE)
LINKS = COPY_LINKS + STORAGE_LINKS
# The executor's launches count like a link's operations, under this name.
EXEC = "exec"
# The part of a launch in which it waits for loads, among measured costs.
STALL = "stall"
# The copies of what a launch streams, likewise.
STREAM = "stream"


class Ticket(NamedTuple):
    """Names one operation: the seq-th of its link. The scheduler numbers, links assert the order."""

    link: str
    seq: int


@dataclass(frozen=True)
class TransferOp:
    """Copy pages src_frames of tier src to dst_frames of tier dst, layers [0, num_layers).

    src_frames, dst_frames: (n,) int32. size_bytes: all layers, K and V. after: a fence, the launch that writes the
    source (backups), -1 if storage brought it; None when the source is ready.
    """

    ticket: Ticket
    src: Tier
    dst: Tier
    src_frames: np.ndarray
    dst_frames: np.ndarray
    size_bytes: int
    after: int | None = None


class StorageAction(IntEnum):
    """What a storage operation does. ATTACH, DETACH and CLEAR run on the probe link while the others are empty."""

    EXISTS = 0
    GET = 1
    SET = 2
    ATTACH = 3
    DETACH = 4
    CLEAR = 5


@dataclass(frozen=True)
class StorageOp:
    """An operation on the storage tier. It never fails: the count in its result says how many leading blocks are
    there (EXISTS), came (GET) or are stored (SET), and 1 or 0 whether the others succeeded.

    keys: (n, 16) uint8, see block_keys.py. frames: host frames (int32), all pages of block after block; none for
    EXISTS. setup: for ATTACH, what to open, as JSON.
    """

    ticket: Ticket
    action: StorageAction
    keys: np.ndarray
    frames: np.ndarray
    size_bytes: int
    setup: str = ""

    @property
    def after(self) -> None:
        """Source and destination are ready: it waits for no launch."""
        return None


@dataclass(frozen=True)
class OpResult:
    """What became of one operation."""

    seq: int
    ok: bool
    error: str = ""
    # Of a storage operation, see StorageOp.
    count: int = 0
    # Of a probe: how many of the blocks that it counts, the last ones, lie on the second storage tier.
    far_count: int = 0
    # From its first byte to its end, as far as measured. For links that work on several operations at once, from the
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
    """Executes operations (`TransferOp`, `StorageOp`; each link takes one kind) in order. A cancelled operation keeps
    its number and completes as failed, or completes as if nothing had happened: cancel is a hint."""

    name: str

    def submit(self, op: Any) -> None: ...

    def cancel(self, ticket: Ticket) -> None: ...

    def gate(self, ticket: Ticket) -> LayerGate: ...

    def poll(self) -> list[OpResult]:
        """Operations completed since the last poll, in order. Raises if the worker died."""
        ...


class LoadFailedError(RuntimeError):
    """A launch met a load that did not bring its bytes."""


class GateError(RuntimeError):
    """A forward pass would wait for a layer whose copy was never enqueued: use before load."""
