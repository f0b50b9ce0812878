"""A host pool, a store and the remote tier between them, with real processes; and what is stored, by key."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.offload.remote_store import RemoteStore, open_remote_store
from sglang.srt.offload.store.address import StoreAddress
from sglang.srt.offload.store.embedded import EmbeddedStore
from sglang.srt.offload.store.resp import RespConnection

BLOCK = 32


class Remote:
    """A pool of 64 blocks, 32 pages of 64 KiB each, so that a block is one piece of 2 MiB; blocks 0 to 31 hold what
    is stored, 32 to 63 are where it is fetched to."""

    def __init__(
        self, folder: Path, backend: str = "remote", dtype: torch.dtype = torch.bfloat16, **config: Any
    ) -> None:
        device = MHATokenToKVPool(1, 1, 8, 16, 128, dtype)
        self.pool = MHATokenToKVPoolHost(device, 64 * BLOCK)
        values = torch.randn((32 * BLOCK, *self.pool.kv.shape[1:]), generator=torch.Generator().manual_seed(1))
        self.pool.kv[: 32 * BLOCK] = values
        self.wipe()
        self.folder = folder
        self.store: RemoteStore = open_remote_store(backend, config, "test", self.pool, BLOCK, folder / "own")

    def key(self, block: int) -> bytes:
        return block.to_bytes(16, "big")

    def keys(self, blocks: range) -> list[bytes]:
        return [self.key(b) for b in blocks]

    def frames(self, blocks: range) -> np.ndarray:
        return np.concatenate([np.arange(b * BLOCK, (b + 1) * BLOCK, dtype=np.int32) for b in blocks])

    def wipe(self) -> None:
        self.pool.kv[32 * BLOCK :] = float("nan")

    def put(self, blocks: range) -> int:
        return self.store.set(self.keys(blocks), self.frames(blocks))

    def get(self, blocks: range) -> int:
        """Into the other half, scattered: the order of pages there is not that of the blocks."""
        return self.store.get(self.keys(blocks), self.target(blocks))

    def target(self, blocks: range) -> np.ndarray:
        rng = np.random.default_rng(blocks.start)
        return np.concatenate([rng.permutation(self.frames(range(b + 32, b + 33))) for b in blocks])

    def came(self, blocks: range) -> bool:
        """Whether the other half holds these blocks, byte for byte."""
        have, want = (
            self.pool.kv[torch.from_numpy(frames).long()].view(torch.uint8)
            for frames in (self.target(blocks), self.frames(blocks))
        )
        return torch.equal(have, want)

    @property
    def embedded(self) -> EmbeddedStore:
        return self.store._place._embedded.store  # type: ignore[attr-defined]

    def names(self) -> list[bytes]:
        found = connection(self.embedded.address).call("KEYS", "*")
        assert isinstance(found, list)
        return found  # type: ignore[return-value]

    def close(self) -> None:
        self.store.close()


def connection(address: StoreAddress) -> RespConnection:
    return RespConnection(address, 5.0)


def until(true: Callable[[], Any], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.02)
