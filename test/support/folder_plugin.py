"""A storage plugin for chaos: a file for each page in a folder, the oldest of which go. `disk_hook` slows it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo


class FolderStorage(HiCacheStorage):
    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        config = storage_config.extra_config or {}
        self._folder = Path(config["folder"])
        self._limit_bytes = int(config["folder_limit_bytes"])

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        data = target_location.view(torch.uint8).numpy()
        with contextlib.suppress(OSError), open(self._path(key), "rb") as file:
            if os.preadv(file.fileno(), [data], 0) == len(data):
                return target_location  # type: ignore[no-any-return]
        return None

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        return [self.get(key, target) for key, target in zip(keys, target_locations)]

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        found = []
        for key, index in zip(keys, host_indices[:: self.mem_pool_host.page_size]):
            page = self.get(key, self.mem_pool_host.get_dummy_flat_data_page())
            found.append(page is not None)
            if page is not None:
                self.mem_pool_host.set_from_flat_data_page(index, page)
        return found

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        if self.exists(key):
            return True
        data = value.contiguous().view(torch.uint8).numpy()
        path = self._path(key)
        draft = path.with_name(f"{key}.{os.getpid()}")
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._make_room(len(data))
            with open(draft, "wb") as file:
                if os.pwritev(file.fileno(), [data], 0) == len(data):
                    draft.rename(path)
                    return True
        except OSError:
            pass
        with contextlib.suppress(OSError):
            draft.unlink()
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return all([self.set(key, value) for key, value in zip(keys, values)])

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        indices = host_indices[:: self.mem_pool_host.page_size]
        return [self.set(key, self.mem_pool_host.get_data_page(index)) for key, index in zip(keys, indices)]

    def exists(self, key: str) -> bool:
        return self._path(key).exists()

    def clear(self) -> None:
        for path in self._folder.glob("*.kv"):
            path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.kv"

    def _make_room(self, num_bytes: int) -> None:
        """Another process may do the same, or take the folder away."""
        files = []
        for path in self._folder.glob("*.kv"):
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                files.append((stat.st_mtime_ns, stat.st_size, path))
        used = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if used + num_bytes <= self._limit_bytes:
                return
            path.unlink(missing_ok=True)
            used -= size
