"""Tiers, tickets and transfer operations: what the scheduler says and what links do.

Plain data and the `Link` protocol; no torch, no thread, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np


class Tier(IntEnum):
    """Where a node's KV can be. Each is prefix-closed: a node is resident only if its parent is."""

    DEVICE = 0
    HOST = 1


TIER_NAMES = ("device", "host")

# Operations that a launch waits for (loads) and operations that wait for a launch (backups) never share a link.
H2D = "h2d"
D2H = "d2h"
LINKS = (H2D, D2H)
# The executor's launches count like a link's operations, under this name.
EXEC = "exec"


class Ticket(NamedTuple):
    """Names one operation: the seq-th of its link. The scheduler numbers, links assert the order."""

    link: str
    seq: int


@dataclass(frozen=True)
class TransferOp:
    """Copy pages src_frames of tier src to dst_frames of tier dst, layers [0, num_layers).

    src_frames, dst_frames: (n,) int32. size_bytes: all layers, K and V. after: a fence, the launch that writes the
    source (backups); None when the source is ready.
    """

    ticket: Ticket
    src: Tier
    dst: Tier
    src_frames: np.ndarray
    dst_frames: np.ndarray
    size_bytes: int
    after: int | None = None


@dataclass(frozen=True)
class OpResult:
    seq: int
    ok: bool
    error: str = ""


class LayerGate(Protocol):
    """Lets a forward pass wait for one operation, layer by layer."""

    def wait(self, layer: int, stream: Any) -> None:
        """Make `stream` wait for the layer. Raises GateError if its copy was never enqueued."""
        ...

    def check(self) -> None:
        """Raise LoadFailedError if the operation failed; called on the stream, after the wait."""
        ...


class Link(Protocol):
    """Executes operations in order. A cancelled operation keeps its number and completes as failed, or completes
    as if nothing had happened: cancel is a hint."""

    name: str

    def submit(self, op: TransferOp) -> None: ...

    def cancel(self, ticket: Ticket) -> None: ...

    def gate(self, ticket: Ticket) -> LayerGate: ...

    def poll(self) -> list[OpResult]:
        """Operations completed since the last poll, in order. Raises if the worker died."""
        ...


class LoadFailedError(RuntimeError):
    """A launch met a load that did not bring its bytes."""


class GateError(RuntimeError):
    """A forward pass would wait for a layer whose copy was never enqueued: use before load."""
