"""`HiCacheStorage`: the class that a storage plugin derives from, under upstream's names and signatures.

Owns only names. A plugin written for SGLang imports them from here and runs unchanged behind
`storage/dynamic/dynamic_store.py`, which lists the methods that this engine calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from sglang.srt.mem_cache.pool_host import HostKVCache

# The most blocks in one call to a plugin.
STORAGE_BATCH_SIZE = 128


@dataclass
class HiCacheStorageConfig:
    """The facts about the engine that a plugin gets. extra_config: --hicache-storage-backend-extra-config as it was
    given."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: str | None
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict | None = None
    # Ranks that share a sequence's pages; this engine has none.
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None

    @property
    def is_storage_writer(self) -> bool:
        """Whether this rank stores pages. Ranks of an MLA model hold equal ones, which one of them stores."""
        return not self.is_mla_model or self.tp_rank == self.dcp_rank


@dataclass
class HiCacheStorageExtraInfo:
    """prefix_keys: the keys before those of the call, from the start of the prompt; None where they are not known."""

    prefix_keys: list[str] | None = None
    extra_info: dict | None = None


class PoolName(StrEnum):
    """Pools of KV. Upstream names many for hybrid models; this engine has one."""

    KV = "kv"


class PoolHitPolicy(StrEnum):
    """How much of another pool has to be stored beside the KV. For the signatures of the v2 methods only."""

    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    """One pool's part of a v2 call. For the signatures only: this engine makes no v2 call."""

    name: PoolName
    host_indices: torch.Tensor | None = None
    device_indices: torch.Tensor | None = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    nodes_to_load: list[Any] | None = None
    indices_from_pool: PoolName | None = None
    # Of upstream 0.5.21; later versions lack it.
    anchor_index_parts: list[torch.Tensor | slice] | None = None
    # For BLOCK_GROUPS: pages per block, and keys per group.
    block_pages: int = 0
    group_pages: int = 0


@dataclass
class PoolTransferResult:
    """A v2 answer. For the signatures only."""

    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None

    @classmethod
    def empty(cls) -> PoolTransferResult:
        return cls(0, {})


class HiCacheStorage(ABC):
    """A key-value store of pages. Keys are strings; a page is a page of `mem_pool_host`.

    Called from several threads: one `batch_exists`, one get and one set may run at the same time.
    """

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: str) -> None:
        """Never called here."""
        if not hasattr(self, "registered_pools"):
            self.registered_pools: dict[str, HostKVCache] = {}
        self.registered_pools[host_pool_name] = host_pool

    def on_host_pools_registered(self) -> None:
        """Called once, when all pools are registered. An error of it refuses the plugin."""
        return None

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Never called here, nor are the other v2 methods."""
        raise NotImplementedError

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        raise NotImplementedError

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        raise NotImplementedError

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Read each key into the page of `mem_pool_host` that begins at its index. Returns which keys were read.

        host_indices: (len(keys) * page_size,) int64, token indices, page after page.
        """
        raise NotImplementedError

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages of `mem_pool_host`. Returns which pages are stored now. Indices as for `batch_get_v1`."""
        raise NotImplementedError

    @abstractmethod
    def get(
        self, key: str, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> torch.Tensor | None: ...

    @abstractmethod
    def batch_get(
        self, keys: list[str], target_locations: Any | None = None, target_sizes: Any | None = None
    ) -> list[torch.Tensor | None] | int:
        """The values; None for a key that is not stored. target_locations: one tensor per key, of the size of a page,
        that may be filled and returned."""
        ...

    @abstractmethod
    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool: ...

    @abstractmethod
    def batch_set(
        self,
        keys: list[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Store values: one flat tensor per key, which the plugin may keep. Returns whether all are stored."""
        ...

    @abstractmethod
    def exists(self, key: str) -> bool: ...

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many of the leading keys are stored."""
        for i, key in enumerate(keys):
            if not self.exists(key):
                return i
        return len(keys)

    def clear(self) -> None:
        """Forget everything. The default forgets nothing."""
        return None

    def get_stats(self) -> Any:
        """Never called here."""
        return None
