"""A host pool, a store and the remote tier between them, with real processes; and what is stored, by key."""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang.srt.mem_cache.block_store import BlockStore, ExistsFailed
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.storage.registry import StoreParams, storage_backend
from sglang.srt.offload.remote_store import RemoteStore
from sglang.srt.offload.store.address import StoreAddress
from sglang.srt.offload.store.embedded import EmbeddedStore
from sglang.srt.offload.store.resp import RespConnection
from support.children import wait_until

BLOCK = 32
# Blocks that hold what is stored; as many behind them are where it is fetched to.
NUM = 12
# Of what answers only when the machine lets it: where a test is not about a timeout, none is met.
PATIENCE_S = 60.0
# Of a proxy, which writes to its buffers once when it starts: the least that two receiving threads can do with.
BUFFERS = {f"{name}_buffer_bytes": 12 << 20 for name in ("compressed", "decompressed", "dequantized")}
PROXY: dict[str, Any] = {**BUFFERS, "store_timeout_s": PATIENCE_S}


@cache
def random_blocks(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


class Remote:
    """A pool of 2 * NUM blocks, 32 pages of 64 KiB each, so that a block is one piece of 2 MiB. The proxy is in this
    process, unless config wants another."""

    def __init__(
        self,
        folder: Path,
        backend: str = "remote",
        dtype: torch.dtype = torch.bfloat16,
        mac_key: bytes = b"",
        namespace: str = "test",
        **config: Any,
    ) -> None:
        device = MHATokenToKVPool(1, PageLayout.kv(1, 8, 16, 128, dtype))
        self.pool = MHATokenToKVPoolHost(device, 2 * NUM * BLOCK)
        self.pool.kv[: NUM * BLOCK] = random_blocks((NUM * BLOCK, *self.pool.kv.shape[1:]))
        self.wipe()
        if backend == "remote":
            config = {"in_process": True, "hang_timeout_s": PATIENCE_S, **config}
            if isinstance(proxy := config.get("proxy", {}), dict):
                config["proxy"] = PROXY | proxy
        self.folder = folder
        params = StoreParams(
            config, namespace, self.pool, BLOCK, model_name="", directory=folder / "own", mac_key=mac_key
        )
        store = storage_backend(backend).open(params)
        assert isinstance(store, RemoteStore)
        self.store = store

    def key(self, block: int) -> bytes:
        return block.to_bytes(16, "big")

    def keys(self, blocks: range) -> list[bytes]:
        return [self.key(b) for b in blocks]

    def frames(self, blocks: range) -> np.ndarray:
        return np.concatenate([np.arange(b * BLOCK, (b + 1) * BLOCK, dtype=np.int32) for b in blocks])

    def wipe(self) -> None:
        self.pool.kv[NUM * BLOCK :] = float("nan")

    def exists(self, blocks: range) -> int | None:
        """None: the store did not tell."""
        try:
            return self.store.exists(self.keys(blocks))
        except ExistsFailed:
            return None

    def put(self, blocks: range) -> int:
        return self.store.set(self.keys(blocks), self.frames(blocks))

    def get(self, blocks: range) -> int:
        """Into the other half, scattered: the order of pages there is not that of the blocks."""
        return self.store.get(self.keys(blocks), self.target(blocks))

    def target(self, blocks: range) -> np.ndarray:
        rng = np.random.default_rng(blocks.start)
        return np.concatenate([rng.permutation(self.frames(range(b + NUM, b + NUM + 1))) for b in blocks])

    def came(self, blocks: range) -> bool:
        """Whether the other half holds these blocks, byte for byte."""
        have, want = (
            self.pool.kv[torch.from_numpy(frames).long()].view(torch.uint8)
            for frames in (self.target(blocks), self.frames(blocks))
        )
        return torch.equal(have, want)

    @property
    def embedded(self) -> EmbeddedStore:
        return self.store._place.kept.store  # type: ignore[attr-defined]

    def names(self) -> list[bytes]:
        found = connection(self.embedded.address).call("KEYS", "*")
        assert isinstance(found, list)
        return found  # type: ignore[return-value]

    def close(self) -> None:
        self.store.close()


def close_to_the_end(store: BlockStore) -> None:
    """And wait for the threads of proxies in this process."""
    store.close()
    wait_until(lambda: all(thread.name != "proxy-close" for thread in threading.enumerate()), "proxies to end")


def connection(address: StoreAddress) -> RespConnection:
    return RespConnection(address, PATIENCE_S)
