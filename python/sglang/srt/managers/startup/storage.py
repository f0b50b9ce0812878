"""`StorageOpener`: from the words of a user to the storage tier of one rank.

Owns what all backends have in common: what a block is, what its name depends on, how much may be in flight. The
backends themselves are opened by `storage/backend_factory.py`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.cache_controller import WRITE_POLICIES
from sglang.srt.managers.schedule_policy import FETCH_ORDERS
from sglang.srt.managers.storage_controller import PREFETCH_POLICIES, PrefetchConfig, StorageLimits, StorageSetup
from sglang.srt.mem_cache.block_store import BlockStore, StoreError
from sglang.srt.mem_cache.storage.registry import BACKENDS, create_store
from sglang.srt.mem_cache.storage.tiered_store import TieredStore
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.offload.remote_store import REMOTE_BACKENDS, is_lossy, open_remote_store

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost

EXTRA_CONFIG_FLAG = "--hicache-storage-backend-extra-config"
BLOCK_TOKENS = 64
# ShadowServe 5, as CacheGen: a block is a piece of work for the network, too.
REMOTE_BLOCK_TOKENS = 256
# What is in a block, and in which order; another number makes all that was stored before unknown.
_LAYOUT_VERSION = 1
# An operation moves about so much: long enough to be efficient, short enough to be cut off in time.
_BYTES_PER_OP = 32 << 20
_MAX_BLOCKS_PER_OP = 256
_MAX_TOKENS = 1 << 30
_MAX_SECONDS = 86400
# Keys of the extra config that are ours, under upstream's names where it has them; the others are the backend's.
_OWN_KEYS = (
    "block_tokens",
    "fetch_order",
    "fetch_window_ops",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "secret",
)


@dataclass(frozen=True)
class StorageOpener:
    """model: the fingerprint of config and weights. pool: this rank's host pool; all ranks' are alike. Both, with the
    tokens, determine the bytes of a block. directory: the server's private one, which is removed when it ends."""

    model: str
    model_name: str
    pool: MHATokenToKVPoolHost
    tp_rank: int
    tp_size: int
    directory: Path = Path()

    def setup(self, backend: str, extra_config: str, prefetch_policy: str, write_policy: str) -> StorageSetup:
        """What the scheduler has to know of a backend. extra_config: JSON, or @ and a file with it. Raises
        StoreError."""
        names = _names(backend)
        is_remote = names[-1] in REMOTE_BACKENDS
        if prefetch_policy not in PREFETCH_POLICIES:
            raise StoreError(f"the prefetch policy {prefetch_policy!r} is none of {', '.join(PREFETCH_POLICIES)}")
        if write_policy not in WRITE_POLICIES:
            raise StoreError(f"the write policy {write_policy!r} is none of {', '.join(WRITE_POLICIES)}")
        config = parse_extra_config(extra_config)
        if len(names) > 1:
            _check_two(config, names)
        own = {key: config.pop(key) for key in _OWN_KEYS if key in config}
        page_size = self.pool.page_size
        # The smallest whole number of pages that is at least a block.
        usual = REMOTE_BLOCK_TOKENS if is_remote else BLOCK_TOKENS
        block_tokens = _whole(own, "block_tokens", -(-usual // page_size) * page_size, 1)
        if block_tokens % page_size:
            raise StoreError(
                f"{EXTRA_CONFIG_FLAG}: block_tokens is {block_tokens}, no multiple of the page size {page_size}"
            )
        block_pages = block_tokens // page_size
        if block_pages > self.pool.num_pages // 4:
            raise StoreError(
                f"a block of {block_tokens} tokens is more than a quarter of the host tier: raise --hicache-size, or "
                f"lower block_tokens in {EXTRA_CONFIG_FLAG}"
            )
        secret = own.get("secret", "")
        if not isinstance(secret, str):
            raise StoreError(f"{EXTRA_CONFIG_FLAG}: secret has to be a string")
        fetch_order = own.get("fetch_order", PrefetchConfig.fetch_order)
        if fetch_order not in FETCH_ORDERS:
            raise StoreError(
                f"{EXTRA_CONFIG_FLAG}: fetch_order is {_short(fetch_order)}, but it has to be one of "
                f"{', '.join(FETCH_ORDERS)}"
            )
        return StorageSetup(
            backend=backend,
            setup=json.dumps({"backend": backend, "config": config, "block_tokens": block_tokens}),
            secret=self._chain_secret(backend, config, secret, block_tokens),
            block_tokens=block_tokens,
            limits=StorageLimits(
                blocks_per_op=max(1, min(_MAX_BLOCKS_PER_OP, _BYTES_PER_OP // (block_pages * self.pool.page_bytes))),
                max_fetch_pages=self.pool.num_pages // 2,
                max_store_pages=self.pool.num_pages // 4,
                fetch_window_ops=_whole(own, "fetch_window_ops", StorageLimits.fetch_window_ops, 1),
            ),
            prefetch=PrefetchConfig(
                policy=prefetch_policy,
                threshold=_whole(own, "prefetch_threshold", PrefetchConfig.threshold, 0),
                timeout_base_s=_seconds(own, "prefetch_timeout_base", PrefetchConfig.timeout_base_s),
                timeout_per_ki_token_s=_seconds(
                    own, "prefetch_timeout_per_ki_token", PrefetchConfig.timeout_per_ki_token_s
                ),
                fetch_order=fetch_order,
            ),
            write_policy=write_policy,
            is_lossy=is_remote and len(names) == 1 and is_lossy(config.get("codec", "lossless")),
            tiers=tuple(Tier.REMOTE if name in REMOTE_BACKENDS else Tier.DISK for name in names),
        )

    def open(self, setup: str) -> BlockStore:
        """This rank's store. setup: of a `StorageSetup`. Raises StoreError."""
        words = json.loads(setup)
        namespace = f"{self._namespace(words['block_tokens'])} rank {self.tp_rank} of {self.tp_size}"
        names = _names(words["backend"])
        if len(names) == 1:
            return self._open_one(words["backend"], words["config"], namespace, words["block_tokens"])
        near, far = names
        store = self._open_one(near, words["config"].get(near, {}), namespace, words["block_tokens"])
        try:
            return TieredStore(
                store, self._open_one(far, words["config"].get(far, {}), namespace, words["block_tokens"])
            )
        except StoreError:
            store.close()
            raise

    def _open_one(self, backend: str, config: dict[str, Any], namespace: str, block_tokens: int) -> BlockStore:
        if backend in REMOTE_BACKENDS:
            directory = self.directory / f"rank{self.tp_rank}"
            return open_remote_store(backend, config, namespace, self.pool, block_tokens, directory, self.tp_size)
        return create_store(
            backend, config, namespace, self.pool, block_tokens, self.model_name, self.tp_rank, self.tp_size
        )

    def _namespace(self, block_tokens: int) -> str:
        """What the bytes of a block depend on beside its tokens: equal on all ranks."""
        return f"v{_LAYOUT_VERSION} {self.model} {self.pool.page_layout.fingerprint} block {block_tokens}"

    def _chain_secret(self, backend: str, config: dict[str, Any], secret: str, block_tokens: int) -> bytes:
        key = hashlib.blake2b(secret.encode(errors="surrogatepass")).digest()
        if backend == "file" and not secret:
            from sglang.srt.mem_cache.storage.file.file_store import config_root
            from sglang.srt.mem_cache.storage.file.folder import storage_secret

            key = storage_secret(config_root(config))
        return hashlib.blake2b(self._namespace(block_tokens).encode(), key=key[:64], digest_size=32).digest()


def _names(backend: str) -> list[str]:
    """Of one backend, or of two: a local one and a remote one. Raises StoreError."""
    names = backend.split(",")
    for name in names:
        if name not in (*BACKENDS, *REMOTE_BACKENDS):
            raise StoreError(
                f"--hicache-storage-backend {name} is not built in: it is one of "
                f"{', '.join((*BACKENDS, *REMOTE_BACKENDS))}, and 'dynamic' loads plugins"
            )
    if len(names) > 2 or (len(names) == 2 and [name in REMOTE_BACKENDS for name in names] != [False, True]):
        raise StoreError(
            f"--hicache-storage-backend {backend}: two backends are a local and a remote one, in this order, like "
            "file,remote"
        )
    return names


def _check_two(config: dict[str, Any], names: list[str]) -> None:
    """Each backend's settings stand under its name. Raises StoreError."""
    if unknown := set(config) - {*_OWN_KEYS, *names}:
        raise StoreError(
            f"{EXTRA_CONFIG_FLAG}: {', '.join(sorted(unknown))} belongs to one of {' and '.join(names)}: write "
            f'{{"{names[0]}": {{…}}, "{names[1]}": {{…}}}}'
        )
    for name in names:
        if not isinstance(config.get(name, {}), dict):
            raise StoreError(f"{EXTRA_CONFIG_FLAG}: {name} has to be a JSON object with that backend's settings")
    codec = config.get(names[1], {}).get("codec", "lossless")
    if is_lossy(codec):
        raise StoreError(
            f"{EXTRA_CONFIG_FLAG}: codec {_short(codec)} is lossy, and what came back from it must not be stored as "
            f"exact by {names[0]}: use a lossless codec, or --hicache-storage-backend {names[1]} alone"
        )


def parse_extra_config(text: str) -> dict[str, Any]:
    """JSON, or @ and the name of a file with it. Raises StoreError."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text()
        except (OSError, ValueError) as error:
            raise StoreError(f"{EXTRA_CONFIG_FLAG}: cannot read {text[1:]}: {error}") from None
    try:
        config = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{EXTRA_CONFIG_FLAG} has to be JSON, or @ and a file with it: {error}") from None
    if not isinstance(config, dict):
        raise StoreError(f'{EXTRA_CONFIG_FLAG} has to be a JSON object, like {{"path": "/var/cache/kv"}}')
    return config


def _whole(config: dict[str, Any], key: str, default: int, least: int) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MAX_TOKENS:
        raise StoreError(
            f"{EXTRA_CONFIG_FLAG}: {key} is {_short(value)}, but it has to be a whole number from {least} to "
            f"{_MAX_TOKENS}"
        )
    return value


def _seconds(config: dict[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _MAX_SECONDS:
        raise StoreError(
            f"{EXTRA_CONFIG_FLAG}: {key} is {_short(value)}, but it has to be a number of seconds, {_MAX_SECONDS} at "
            "most"
        )
    return float(value)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:80] + "…"
