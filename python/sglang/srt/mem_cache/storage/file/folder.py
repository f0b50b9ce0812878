"""How models, ranks and processes share one folder on disk: its secret, a subfolder per namespace, leftovers.

Owns the root folder's layout and the locks that show which folders are in use. Knows no blocks: segments are files
with a size and an age.

    root/secret            32 random bytes, the key of the hash chain that names blocks
    root/<namespace>/      one per model, dtype, layout and rank
        lock               flock, shared: each process that uses the folder holds it, until it ends however it dies
        changes            what the processes tell each other (`shared_changes`)
        namespace          what the folder is for, to be read by people
        tenants            whose blocks are whose (`tenant_log`)
        00000007.kv        segments (`segment`)
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from sglang.srt.mem_cache.block_store import StoreError
from sglang.srt.mem_cache.storage.file.segment import VERSION, format_version
from sglang.srt.mem_cache.storage.file.shared_changes import try_flock
from sglang.srt.mem_cache.storage.registry import BACKEND_FLAG, CONFIG_FLAG

SEGMENT_SUFFIX = ".kv"
SECRET_BYTES = 32

_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
# Waits for a process that looks whether the folder is in use.
_LOCK_WAITS_S = (0.001,) * 10 + (0.05,) * 20


def storage_secret(root: Path) -> bytes:
    """The 32 random bytes that all ranks and models with this root share; the first to come makes them.

    Raises StoreError.
    """
    path = root / "secret"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            secret = path.read_bytes()
        except FileNotFoundError:
            _create_secret(path, secrets.token_bytes(SECRET_BYTES))
            secret = path.read_bytes()
    except OSError as error:
        raise StoreError(cannot_use(root, error)) from error
    if len(secret) != SECRET_BYTES:
        raise StoreError(
            f"{path} holds {len(secret)} bytes instead of {SECRET_BYTES}: delete it, and with it what is stored in "
            f"{root}, or name another folder with path in {CONFIG_FLAG}"
        )
    return secret


def _create_secret(path: Path, secret: bytes) -> None:
    """Written under another name and then linked: the first to link wins, and no process reads half of it."""
    draft = path.with_name(f"secret.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.write(fd, secret)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()


class NamespaceFolder:
    """A namespace's folder, marked as in use by this process until `close`. writable: else it is only read. Raises
    StoreError: no such folder can be made or read."""

    def __init__(self, root: Path, digest: bytes, description: str) -> None:
        self.path = root / digest.hex()[:32]
        self.writable = True
        # False: the file system has none, so that no process sees whether another one uses the folder.
        self.has_locks = True
        self._root = root
        self._description = description
        # Of `lock`, and of the folders: cleaners of temporary folders leave alone what is locked.
        self._lock_fds: list[int] = []
        self._is_locked = False
        try:
            try:
                self._make()
            except OSError as error:
                if error.errno not in _NOT_WRITABLE or not self.path.is_dir():
                    raise
            os.listdir(self.path)
            try:
                if not os.access(self.path, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                self._hold()
            except OSError as error:
                if error.errno not in _NOT_WRITABLE:
                    raise
                self.writable = False
                self._hold()
        except OSError as error:
            self.close()
            raise StoreError(cannot_use(root, error)) from error
        # Given back its value where the root is deleted at run time.
        self._secret = _read_if_there(root / "secret")

    def close(self) -> None:
        for fd in self._lock_fds:
            os.close(fd)
        self._lock_fds.clear()
        self._is_locked = False

    def is_held(self) -> bool:
        """Whether others see that the folder is in use, as far as its file was not moved away."""
        return self._is_locked and os.fstat(self._lock_fds[0]).st_nlink > 0

    def make_anew(self) -> None:
        """Make what is missing of the folder, and mark it as in use. Raises OSError."""
        self._make()
        if self._secret is not None and not (self._root / "secret").exists():
            _create_secret(self._root / "secret", self._secret)
        self._hold(waits_s=())

    def _make(self) -> None:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)

    def _hold(self, waits_s: tuple[float, ...] = _LOCK_WAITS_S) -> None:
        """Raises OSError. Where a process that deletes leftovers keeps the lock for a second, the folder is used
        without: that process can delete blocks, and no more."""
        self.close()
        flags = os.O_RDWR | os.O_CREAT if self.writable else os.O_RDONLY
        try:
            fd = os.open(self.path / "lock", flags | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            return
        self._lock_fds.append(fd)
        for wait_s in (*waits_s, 0.0):
            locked = try_flock(fd, shared=True)
            if locked is not False:
                self.has_locks = locked is not None
                self._is_locked = True
                break
            time.sleep(wait_s)
        if self.writable:
            try:
                if _read_if_there(self.path / "namespace") != f"{self._description}\n".encode():
                    (self.path / "namespace").write_text(self._description + "\n")
            except OSError:
                pass  # For people only; a full disk must not keep the store from reading.
        for folder in (self._root, self.path):
            try:
                fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError:
                continue
            self._lock_fds.append(fd)
            try_flock(fd, shared=True)


@dataclass(frozen=True)
class EarlierFormat:
    """Segments of this namespace that an earlier version of the format wrote, which is not read."""

    folders: list[Path]
    num_segments: int
    size_bytes: int


def find_earlier_format(root: Path, own: Path, description: str) -> EarlierFormat:
    """Until version 1 the page size was part of a namespace and of its description."""
    found = EarlierFormat([], 0, 0)
    for folder in namespace_folders(root):
        described = (_read_if_there(folder / "namespace") or b"").decode("utf-8", "replace").rstrip("\n")
        if folder == own or re.sub(r" page \d+(?= block )", "", described) != description:
            continue
        try:
            segments = sorted(folder.glob("*" + SEGMENT_SUFFIX))
            sizes = [allocated_bytes(path.stat(follow_symlinks=False)) for path in segments]
            with open(segments[0], "rb") if segments else open(os.devnull, "rb") as file:
                version = format_version(file.read(64))
        except OSError:
            continue
        if version is not None and version < VERSION:
            found = EarlierFormat(
                [*found.folders, folder], found.num_segments + len(sizes), found.size_bytes + sum(sizes)
            )
    return found


class Leftovers:
    """Segments of namespaces under the same root that no process has open: earlier weights, other models.

    They count against this process's limit and go first, the oldest first, else every change of a model would leave
    its predecessor's blocks on disk for ever. Looked up once, at the first write. own: folders of this process.
    """

    def __init__(self, root: Path, own: Collection[Path]) -> None:
        self.size_bytes = 0
        self._segments: list[tuple[float, int, Path]] = []  # The oldest last.
        for folder in namespace_folders(root):
            if folder in own:
                continue
            lock_fd = try_lock(folder)
            if lock_fd is None:
                continue
            try:
                for path in folder.glob("*" + SEGMENT_SUFFIX):
                    stat = path.stat(follow_symlinks=False)
                    self._segments.append((stat.st_mtime, allocated_bytes(stat), path))
            except OSError:
                pass
            finally:
                os.close(lock_fd)
        self._segments.sort(key=lambda item: -item[0])
        self.size_bytes = sum(size for _, size, _ in self._segments)

    def evict_oldest(self) -> int:
        """Delete one segment and return the bytes that this frees; 0: there is none left."""
        while self._segments:
            _, size, path = self._segments.pop()
            self.size_bytes -= size
            # Its model may have been started since.
            lock_fd = try_lock(path.parent)
            if lock_fd is None:
                continue
            try:
                path.unlink()
            except OSError:
                continue
            finally:
                os.close(lock_fd)
            return size
        return 0


def allocated_bytes(stat: os.stat_result) -> int:
    """What a file takes on the disk; its length may be more (holes) or less."""
    return stat.st_blocks * 512


def namespace_folders(root: Path) -> list[Path]:
    try:
        return sorted(p for p in root.iterdir() if len(p.name) == 32 and p.is_dir() and not p.is_symlink())
    except OSError:
        return []


def try_lock(folder: Path) -> int | None:
    """The lock of a folder that no process uses; None: in use, or not ours to touch."""
    try:
        lock_fd = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if try_flock(lock_fd):
        return lock_fd
    os.close(lock_fd)
    return None


def _read_if_there(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


# Characters of a folder's name in a message.
_MOST_SHOWN = 200


def cannot_use(root: Path, error: OSError) -> str:
    # Those of a path raise where its name is too long.
    is_dangling = os.path.islink(root) and not os.path.exists(root)
    reason = "a link to what is not there" if is_dangling else error.strerror
    return (
        f"{BACKEND_FLAG} file cannot use the folder {str(root)[:_MOST_SHOWN]} ({reason}): name one that this user "
        f"can read and write with path in {CONFIG_FLAG}"
    )
