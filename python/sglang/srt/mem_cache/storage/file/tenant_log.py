"""`TenantLog`: whose blocks are whose, in the file `tenants` of a namespace's folder.

Owns that file. A record is written before its block is: so a tenant's blocks all have one, however a process ends.
Records of blocks that are gone stay until the file is rewritten. Every call needs the folder's lock; the file is
opened by its path each time, since another process may have rewritten it.

    header  magic, version, and 1; or 0: blocks were stored before there was a log
    record  tenant (8 bytes), key (16)
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from sglang.srt.mem_cache.block_keys import KEY_BYTES, TENANT_BYTES
from sglang.srt.mem_cache.storage.file.folder import SEGMENT_SUFFIX, namespace_folders, try_lock

_HEADER = struct.Struct("<8sII")
_MAGIC, _VERSION = b"HiCacheT", 1
_RECORD = np.dtype([("tenant", f"V{TENANT_BYTES}"), ("key", f"V{KEY_BYTES}")])
# It is rewritten when it has become twice as large as what was left of it then, and this much more.
_SLACK_BYTES = 1 << 20


def erase_leftovers(root: Path, own: Path, tenant: bytes) -> bool:
    """Delete the segments of other namespaces that no process uses, where any of their blocks is a tenant's. Returns
    whether there are some of which it is not known whose blocks they have. Raises OSError."""
    is_unknown = False
    for folder in namespace_folders(root):
        if folder == own or (lock_fd := try_lock(folder)) is None:
            continue
        try:
            segments = list(folder.glob("*" + SEGMENT_SUFFIX))
            log = TenantLog(folder, lambda num_bytes: None)
            if not segments:
                continue
            if not log.exists or not log.is_complete:
                is_unknown = True
            elif log.keys_of(tenant):
                for segment in segments:
                    segment.unlink()
                log.rewrite(lambda whose, key: False)
        finally:
            os.close(lock_fd)
    return is_unknown


class TenantLog:
    """folder: of the namespace. count_written: is told how many bytes are written. All calls raise OSError."""

    def __init__(self, folder: Path, count_written: Callable[[int], None]) -> None:
        self._path = folder / "tenants"
        self._count_written = count_written
        # The size from which on it is worth while to rewrite it.
        self._rewrite_at = _SLACK_BYTES

    def create(self, is_complete: bool) -> None:
        """If it is not there, or was cut short by a full disk. is_complete: whether no tenant has blocks in the
        folder."""
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_size >= _HEADER.size:
                return
        self._write(is_complete, b"")

    def append(self, tenant: bytes, keys: Sequence[bytes]) -> bool:
        """Before the blocks are written. Whether the file has become so large that it should be rewritten."""
        data = b"".join([tenant + key for key in keys])
        fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            # What a process that was killed has left of a record.
            size = os.fstat(fd).st_size
            if torn := (size - _HEADER.size) % _RECORD.itemsize:
                size -= torn
                os.ftruncate(fd, size)
            num_written = os.write(fd, data)
            if num_written < len(data):
                os.ftruncate(fd, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            self._count_written(num_written)
            return size + num_written >= self._rewrite_at
        finally:
            os.close(fd)

    def keys_of(self, tenant: bytes) -> list[bytes]:
        """Of all blocks that were ever stored for a tenant and may still be there, each once, in the order of their
        first record."""
        rows = self._read()[1]
        return list(dict.fromkeys(row.tobytes() for row in rows["key"][rows["tenant"] == np.void(tenant)]))

    @property
    def exists(self) -> bool:
        return self._path.is_file()

    @property
    def is_complete(self) -> bool:
        """Whether every block of a tenant in the folder has a record."""
        return self._read()[0]

    def rewrite(self, is_kept: Callable[[bytes, bytes], bool]) -> None:
        """Leave out records. is_kept: of a tenant and a key."""
        is_complete, rows = self._read()
        kept = dict.fromkeys(row.tobytes() for row in rows)
        data = b"".join([row for row in kept if is_kept(row[:TENANT_BYTES], row[TENANT_BYTES:])])
        self._write(is_complete, data)
        self._rewrite_at = 2 * len(data) + _SLACK_BYTES

    def _write(self, is_complete: bool, records: bytes) -> None:
        """The whole file, or nothing of it."""
        draft = self._path.with_name("tenants.new")
        with open(draft, "wb") as file:
            file.write(_HEADER.pack(_MAGIC, _VERSION, is_complete) + records)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self._path)
        self._count_written(_HEADER.size + len(records))

    def _read(self) -> tuple[bool, np.ndarray]:
        """Whether it is complete, and the records. A file that is none has no records, and is not complete."""
        data = self._path.read_bytes()
        if len(data) < _HEADER.size:
            return False, np.empty(0, _RECORD)
        magic, version, is_complete = _HEADER.unpack_from(data)
        rows = np.frombuffer(data, _RECORD, (len(data) - _HEADER.size) // _RECORD.itemsize, _HEADER.size)
        return bool(is_complete) and (magic, version) == (_MAGIC, _VERSION), rows
