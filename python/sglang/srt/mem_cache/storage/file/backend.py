"""The storage backend "file": its settings, the folder that they name, and how the disk tier is opened.

Owns the sentences for what cannot be used. The blocks are `HiCacheFile`'s.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.block_store import BlockStore, StoreError
from sglang.srt.mem_cache.storage.file.file_store import DEFAULT_SEGMENT_BYTES, FileStoreOptions, HiCacheFile
from sglang.srt.mem_cache.storage.file.folder import SEGMENT_SUFFIX, cannot_use, storage_secret
from sglang.srt.mem_cache.storage.file.write_budget import DEFAULT_REWRITE_SHARE
from sglang.srt.mem_cache.storage.registry import CONFIG_FLAG, StorageBackend, StoreParams
from sglang.srt.utils.byte_sizes import shown_size
from sglang.srt.utils.registry import NAME, POSITIVE_NUMBER, Kind, Option, is_number

logger = logging.getLogger(__name__)

ROOT_ENV = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
# Upstream's default, where there is no home directory. Cleaners of temporary folders delete what was not used for a
# while, and /tmp may lie in memory.
TEMPORARY_ROOT = "/tmp/hicache"


class FileBackend(StorageBackend):
    takes_any_page_size = True
    takes_regions = True
    options = (
        Option(
            "path",
            Kind(NAME.words, lambda value: value is None or NAME.accepts(value)),
            None,
            "a folder on a local disk, which several models and ranks may share",
            f"${ROOT_ENV}, else sglang/hicache in $XDG_CACHE_HOME or ~/.cache, else {TEMPORARY_ROOT}",
        ),
        Option(
            "limit_gb",
            POSITIVE_NUMBER,
            0,
            "the most GB (1e9 bytes) that all ranks of the server take together",
            "90 % of the file system",
        ),
        Option(
            "segment_mb",
            POSITIVE_NUMBER,
            DEFAULT_SEGMENT_BYTES / 1e6,
            "size of a file in MB (1e6 bytes): smaller files evict in finer steps, larger ones start faster",
        ),
        Option(
            "rewrite_share",
            Kind("a number from 0 to 1", lambda value: is_number(value) and 0 <= value <= 1),
            DEFAULT_REWRITE_SHARE,
            "bytes that may be written again per byte stored, to keep hot blocks of a file that goes; 0: none",
        ),
        Option(
            "daily_write_gb",
            POSITIVE_NUMBER,
            # 0 would be taken for none at all.
            None,
            "the most GB (1e9 bytes) that all ranks of the server write in 24 hours; after that nothing is stored",
            "no limit",
        ),
    )

    def check(self, config: Mapping[str, Any]) -> None:
        """Makes the folder."""
        values = self.values(config)
        root = find_root(values["path"])
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.listdir(root)
        except OSError as error:
            raise StoreError(cannot_use(root, error)) from error
        _warn_of_little_space(root, int(values["limit_gb"] * 1e9))

    def open(self, params: StoreParams) -> BlockStore:
        values = self.values(params.config)
        assert params.beside is None or isinstance(params.beside, HiCacheFile)
        return HiCacheFile(
            find_root(values["path"]),
            params.namespace,
            params.pool,
            params.block_tokens,
            FileStoreOptions(
                limit_bytes=_bytes_per_rank(values["limit_gb"], params.tp_size),
                segment_bytes=int(values["segment_mb"] * 1e6),
                is_exclusive=params.is_exclusive,
                rewrite_share=values["rewrite_share"],
                daily_write_bytes=_bytes_per_rank(values["daily_write_gb"], params.tp_size),
            ),
            beside=params.beside,
        )

    def shared_secret(self, config: Mapping[str, Any]) -> bytes:
        return storage_secret(find_root(self.values(config)["path"]))


def _bytes_per_rank(size_gb: float | None, num_ranks: int) -> int:
    """0 where there is no limit, else at least 1."""
    return max(1, int(size_gb * 1e9) // num_ranks) if size_gb else 0


def find_root(path: str | None) -> Path:
    """The folder: the option `path`, else upstream's environment variable, else the user's cache, else upstream's
    default. Raises StoreError."""
    if path is not None:
        if "\0" in path:
            raise StoreError(f"{CONFIG_FLAG}: path has a NUL character, which no folder's name may have")
        return Path(path).expanduser().absolute()
    if path := os.environ.get(ROOT_ENV):
        return Path(path).absolute()
    root = _user_cache()
    if root is None:
        root = Path(TEMPORARY_ROOT)
        # Another user may make a folder there before the server starts, and would then own the KV that the server
        # trusts.
        if root.exists() and root.stat().st_uid != os.geteuid():
            raise StoreError(f"{root} belongs to another user: name a folder of your own with path in {CONFIG_FLAG}")
    return root


def _user_cache() -> Path | None:
    """Where SGLang keeps its other caches; None: the user has no home directory that can be written."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "")
    if not base.is_absolute():  # As the specification of XDG has it.
        home = Path(os.path.expanduser("~"))
        if not home.is_absolute() or not home.is_dir():
            return None
        base = home / ".cache"
    root = base / "sglang" / "hicache"
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    return root if there.is_dir() and os.access(there, os.W_OK | os.X_OK) else None


def _warn_of_little_space(root: Path, limit_bytes: int) -> None:
    free = shutil.disk_usage(root).free
    if limit_bytes <= free:
        return
    # What is stored already counts towards the limit, and need not be free.
    stored = sum(file.stat().st_size for file in root.glob(f"*/*{SEGMENT_SUFFIX}") if file.exists())
    if limit_bytes > free + stored:
        logger.warning(
            "limit_gb is %g, but the file system of %s has %s left beside %s of stored KV: less than the "
            "limit will be kept",
            limit_bytes / 1e9,
            root,
            shown_size(free),
            shown_size(stored),
        )
