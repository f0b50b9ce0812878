"""`StorageOpener`: from the settings of a user to the storage tier of one rank, or of ranks that cache the same.

Owns what all backends have in common: what a block is, what its name depends on, how much may be in flight. The
backends are those of `mem_cache/storage/registry.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.configs.model_files import ModelConfigError
from sglang.srt.managers.schedule_policy import FETCH_ORDERS
from sglang.srt.managers.storage_setup import PREFETCH_POLICIES, PrefetchConfig, StorageLimits, StorageSetup
from sglang.srt.mem_cache.block_store import BlockStore, OverlappingStore, StoreError, WindowStore
from sglang.srt.mem_cache.placement import WRITE_POLICIES
from sglang.srt.mem_cache.storage.guarded_store import GuardedStore
from sglang.srt.mem_cache.storage.registry import (
    BACKEND_FLAG,
    CONFIG_FLAG,
    STORAGE_BACKENDS,
    StoreParams,
    parse_backends,
    storage_backend,
)
from sglang.srt.mem_cache.storage.tiered_store import AnyStore, TieredStore
from sglang.srt.mem_cache.storage.windowed_store import OverlappingWindowedStore, WindowedStore
from sglang.srt.utils.registry import (
    STRING,
    Kind,
    Option,
    OptionError,
    is_number,
    one_of,
    read_option,
    shown,
    whole_number,
)
from sglang.srt.utils.unicode import is_unicode

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import Replicas
    from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost

# What follows a prompt's last whole block is computed. ShadowServe's and CacheGen's chunks have 256, which a network
# needs to be large; here a store keeps a block in pieces of up to 2 MiB.
DEFAULT_BLOCK_TOKENS = 64
# What is in a block, and in which order; another number makes all that was stored before unknown.
_LAYOUT_VERSION = 1
# An operation moves about so much: long enough to be efficient, short enough to be cut off in time.
_BYTES_PER_OP = 32 << 20
_MAX_BLOCKS_PER_OP = 256
_MAX_TOKENS = 1 << 30
_MAX_SECONDS = 86400
_SECONDS = Kind(
    f"a number of seconds, {_MAX_SECONDS} at most", lambda value: is_number(value) and 0 <= value <= _MAX_SECONDS
)
# Keys of the extra config that every backend has, under upstream's names where it has them.
COMMON_OPTIONS = (
    Option(
        "block_tokens",
        whole_number(1, _MAX_TOKENS),
        None,
        "tokens per block; a quarter of the host pool must hold one block",
        f"{DEFAULT_BLOCK_TOKENS}, rounded up to whole pages",
    ),
    Option(
        "prefetch_threshold",
        whole_number(0, _MAX_TOKENS),
        PrefetchConfig.threshold,
        "fewer tokens than this are not asked for",
    ),
    Option(
        "prefetch_timeout_base",
        _SECONDS,
        PrefetchConfig.timeout_base_s,
        "seconds that a request waits in any case, with the policy timeout",
    ),
    Option(
        "prefetch_timeout_per_ki_token",
        _SECONDS,
        PrefetchConfig.timeout_per_ki_token_s,
        "more seconds per 1,024 tokens, with the policy timeout",
    ),
    Option(
        "fetch_order",
        one_of(FETCH_ORDERS),
        PrefetchConfig.fetch_order,
        "which request the link serves next: the first one, or the one with the fewest blocks left",
    ),
    Option(
        "fetch_window_ops",
        whole_number(1, _MAX_TOKENS),
        StorageLimits.fetch_window_ops,
        "fetch operations under way at once, about 32 MB each",
    ),
    Option(
        "secret",
        STRING,
        "",
        "the key of the hash chain that names blocks, which servers that share storage share",
        "with file alone drawn once and kept in its folder, else none",
    ),
)


@dataclass(frozen=True)
class StorageOpener:
    """Opens the storage tier of a rank, or of the group that it leads. Model, pool and tokens determine the bytes of
    a block."""

    # Tells the fingerprint of config and weights.
    model: Callable[[], str]
    # The name that clients ask for.
    model_name: str
    # The host pool of this rank's group; the pools of all groups are alike.
    pool: MHATokenToKVPoolHost
    tp_rank: int
    tp_size: int
    # The server's private one, which is removed when it ends.
    directory: Path = Path()
    # Which ranks share a store; None: none do.
    replicas: Replicas | None = None
    # See `SchedulerConfig`.
    window_reach: int = 0

    def setup(self, backend: str, extra_config: str, prefetch_policy: str, write_policy: str) -> StorageSetup:
        """What the scheduler has to know of a backend. extra_config: JSON, or @ and a file with it. Raises
        StoreError."""
        names = parse_backends(backend)
        if prefetch_policy not in PREFETCH_POLICIES:
            raise StoreError(f"the prefetch policy {prefetch_policy!r} is none of {', '.join(PREFETCH_POLICIES)}")
        if write_policy not in WRITE_POLICIES:
            raise StoreError(f"the write policy {write_policy!r} is none of {', '.join(WRITE_POLICIES)}")
        config = parse_extra_config(extra_config)
        if len(names) > 1:
            _check_two(config, names)
        own, config = _split(config)
        page_size = self.pool.page_size
        # The smallest whole number of pages that is at least a block.
        block_tokens = own["block_tokens"] or -(-DEFAULT_BLOCK_TOKENS // page_size) * page_size
        if block_tokens % page_size:
            raise StoreError(
                f"{CONFIG_FLAG}: block_tokens is {block_tokens}, no multiple of the page size {page_size}: "
                "give another, or --page-size"
            )
        block_pages, num_pages = block_tokens // page_size, self.pool.num_pages
        if block_pages > num_pages // 4:
            raise StoreError(
                f"a block of {block_tokens} tokens is more than a quarter of the host tier: raise --hicache-size, or "
                f"lower block_tokens in {CONFIG_FLAG}, and --page-size, of which it is a multiple"
            )
        blocks_per_op = min(_MAX_BLOCKS_PER_OP, _BYTES_PER_OP // (block_pages * self.pool.page_bytes))
        setup = StorageSetup(
            backend=backend,
            setup="",
            secret=self._chain_secret(names, config, own["secret"], block_tokens),
            block_tokens=block_tokens,
            limits=StorageLimits.of_host(num_pages, block_pages, blocks_per_op, own["fetch_window_ops"], len(names)),
            prefetch=PrefetchConfig(
                policy=prefetch_policy,
                threshold=own["prefetch_threshold"],
                timeout_base_s=float(own["prefetch_timeout_base"]),
                timeout_per_ki_token_s=float(own["prefetch_timeout_per_ki_token"]),
                fetch_order=own["fetch_order"],
            ),
            write_policy=write_policy,
            # Of two, both are exact: see `_check_two`.
            is_lossy=len(names) == 1 and storage_backend(names[0]).is_lossy(config),
            tiers=tuple(STORAGE_BACKENDS[name].tier for name in names),
            tenant_key=hashlib.blake2b(own["secret"].encode()).digest(),
            has_windowed_store=self._has_regions and all(storage_backend(name).takes_regions for name in names),
        )
        opened = {
            "backend": backend,
            "config": config,
            "block_tokens": block_tokens,
            "is_exclusive": {name: setup.is_exclusive(place) for place, name in enumerate(names)},
            "mac_key": _mac_key(own["secret"]),
        }
        return replace(setup, setup=json.dumps(opened))

    def open(self, setup: str) -> AnyStore:
        """The store of this rank's group, which this rank leads. setup: of a `StorageSetup`. Raises StoreError."""
        found = json.loads(setup)
        stores: list[BlockStore] = []
        try:
            for name, config in split_config(found["backend"], found["config"]).items():
                stores.append(self._open_one(name, config, found))
        except StoreError:
            for store in stores:
                store.close()
            raise
        return stores[0] if len(stores) == 1 else TieredStore(stores[0], GuardedStore(stores[1]))

    @property
    def _has_regions(self) -> bool:
        """Whether layers with a window have pages of their own."""
        return self.window_reach > 0 and self.pool.num_windowed_pages > 0

    def _open_one(self, name: str, config: dict[str, Any], setup: dict[str, Any]) -> BlockStore:
        block_tokens = setup["block_tokens"]
        shared = self.replicas
        assert shared is None or not shared.is_follower, f"rank {shared.leader} opens the store of rank {shared.rank}"
        params = StoreParams(
            config=config,
            # Of a group the leader's: which heads a rank has depends on both numbers.
            namespace=f"{self._namespace(block_tokens, (name,))} rank {self.tp_rank} of {self.tp_size}",
            pool=self.pool,
            block_tokens=block_tokens,
            model_name=self.model_name,
            tp_rank=self.tp_rank if shared is None else shared.index,
            tp_size=self.tp_size if shared is None else shared.num_groups,
            is_exclusive=setup["is_exclusive"][name],
            directory=self.directory / f"rank{self.tp_rank}",
            mac_key=bytes.fromhex(setup["mac_key"]),
        )
        pool, backend = self.pool, storage_backend(name)
        if not self._has_regions or not backend.takes_regions:
            return backend.open(params)
        kinds, stores = pool.windowed, list[BlockStore]()
        try:
            for i, (region, layers) in enumerate(zip(pool.regions, ("full attention", "a window"), strict=True)):
                of_region = replace(
                    params,
                    layers=tuple(layer for layer, is_windowed in enumerate(kinds) if is_windowed == bool(i)),
                    num_layers=len(kinds),
                    namespace=f"{params.namespace}, layers with {layers}",
                    pool=region,
                    beside=stores[0] if stores else None,
                    # Short, as a socket's path is.
                    directory=params.directory / str(i),
                )
                stores.append(backend.open(of_region))
        except StoreError:
            for store in stores:
                store.close()
            raise
        full, of_windows = stores
        assert isinstance(of_windows, WindowStore), f"{name} takes regions"
        kind = OverlappingWindowedStore if isinstance(full, OverlappingStore) else WindowedStore
        return kind(full, of_windows, pool.windowed_of, -(-self.window_reach // block_tokens))

    def _namespace(self, block_tokens: int, names: tuple[str, ...]) -> str:
        """What the bytes of a block depend on beside its tokens: equal on all ranks. names: of the backends that take
        part; the page size is left out where all of them take any."""
        layout = self.pool.page_layout
        takes_any = all(storage_backend(name).takes_any_page_size for name in names)
        pages = layout.contents if takes_any else layout.fingerprint
        try:
            model = self.model()
        except ModelConfigError as error:
            raise StoreError(str(error)) from None
        return f"v{_LAYOUT_VERSION} {model} {pages} block {block_tokens}"

    def _chain_secret(self, names: tuple[str, ...], config: dict[str, Any], secret: str, block_tokens: int) -> bytes:
        key = hashlib.blake2b(secret.encode()).digest()
        if not secret and len(names) == 1:
            key = storage_backend(names[0]).shared_secret(config) or key
        namespace = self._namespace(block_tokens, names)
        return hashlib.blake2b(namespace.encode(), key=key[:64], digest_size=32).digest()


def _mac_key(secret: str) -> str:
    """In hex; empty without a secret."""
    if not secret:
        return ""
    key = hashlib.blake2b(secret.encode()).digest()
    return hashlib.blake2b(b"authenticates blocks", key=key, digest_size=32).hexdigest()


def split_config(backend: str, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Name -> its own settings, nearest first. backend: one name, or two, which have their settings under their
    names."""
    names = parse_backends(backend)
    return {names[0]: config} if len(names) == 1 else {name: config.get(name, {}) for name in names}


def _split(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of `COMMON_OPTIONS`, and what belongs to the backend. Raises StoreError."""
    try:
        common = {option.name: read_option(option, config, CONFIG_FLAG) for option in COMMON_OPTIONS}
    except OptionError as error:
        raise StoreError(str(error)) from None
    return common, {key: value for key, value in config.items() if key not in common}


def _check_two(config: dict[str, Any], names: tuple[str, ...]) -> None:
    """Each backend's settings stand under its name. Raises StoreError."""
    if unknown := set(config) - {*(option.name for option in COMMON_OPTIONS), *names}:
        raise StoreError(
            f"{CONFIG_FLAG}: {', '.join(sorted(unknown))} belongs to one of {' and '.join(names)}: write "
            f'{{"{names[0]}": {{…}}, "{names[1]}": {{…}}}}'
        )
    for name in names:
        if not isinstance(config.get(name, {}), dict):
            raise StoreError(f"{CONFIG_FLAG}: {name} has to be a JSON object with that backend's settings")
    for name, other in (names, names[::-1]):
        own = config.get(name, {})
        if storage_backend(name).is_lossy(own):
            what = f"codec {shown(own['codec'])}" if "codec" in own else name
            raise StoreError(
                f"{CONFIG_FLAG}: {what} is lossy, and what came back from it must not be stored as exact by {other}: "
                f"use a lossless codec, or {BACKEND_FLAG} {name} alone"
            )


def parse_extra_config(text: str) -> dict[str, Any]:
    """JSON, or @ and the name of a file with it. Raises StoreError."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text()
        except (OSError, ValueError) as error:
            raise StoreError(f"{CONFIG_FLAG}: cannot read {text[1:]}: {error}") from None
    try:
        config = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{CONFIG_FLAG} has to be JSON, or @ and a file with it: {error}") from None
    if not isinstance(config, dict):
        raise StoreError(f'{CONFIG_FLAG} has to be a JSON object, like {{"path": "/var/cache/kv"}}')
    if not is_unicode(json.dumps(config, ensure_ascii=False)):
        raise StoreError(f"{CONFIG_FLAG} has half of a surrogate pair, or a byte that is no UTF-8")
    return config
