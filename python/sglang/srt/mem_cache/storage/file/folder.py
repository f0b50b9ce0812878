"""How models, ranks and processes share one folder on disk: its secret, a locked subfolder per namespace, leftovers.

Owns the root folder's layout and the locks. Knows no blocks: segments are files with a size and an age.

    root/secret            32 random bytes, the key of the hash chain that names blocks
    root/<namespace>/      one per model, dtype, layout, page size and rank; in use while its `lock` is held
        lock               flock, so it ends with its process however that dies; holds the process's id
        namespace          what the folder is for, to be read by people
        00000007.kv        segments (`segment`)
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from sglang.srt.mem_cache.block_store import StoreError
from sglang.srt.mem_cache.storage.registry import BACKEND_FLAG, CONFIG_FLAG

SEGMENT_SUFFIX = ".kv"
SECRET_BYTES = 32

_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)


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
            _create_secret(path)
            secret = path.read_bytes()
    except OSError as error:
        raise StoreError(cannot_use(root, error)) from error
    if len(secret) != SECRET_BYTES:
        raise StoreError(
            f"{path} holds {len(secret)} bytes instead of {SECRET_BYTES}: delete it, and with it what is stored in "
            f"{root}, or name another folder with path in {CONFIG_FLAG}"
        )
    return secret


def _create_secret(path: Path) -> None:
    """Written under another name and then linked: the first to link wins, and no process reads half of it."""
    draft = path.with_name(f"secret.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.write(fd, secrets.token_bytes(SECRET_BYTES))
            os.fsync(fd)
        finally:
            os.close(fd)
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()


@dataclass
class NamespaceFolder:
    """A namespace's folder, locked by this process until `close`. writable: else it is shared with other readers."""

    path: Path
    writable: bool
    lock_fd: int | None

    def close(self) -> None:
        if self.lock_fd is not None:
            os.close(self.lock_fd)
            self.lock_fd = None


def open_namespace(root: Path, digest: bytes, description: str) -> NamespaceFolder:
    """Make and lock the folder of a namespace. Where it exists and cannot be written, it is opened for reading.

    Raises StoreError: no such folder can be made or read, or another process uses it.
    """
    path = root / digest.hex()[:32]
    try:
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            if error.errno not in _NOT_WRITABLE or not path.is_dir():
                raise
        os.listdir(path)
        try:
            if not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            lock_fd: int | None = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            writable = True
        except OSError as error:
            if error.errno not in _NOT_WRITABLE:
                raise
            lock_fd, writable = _open_if_there(path / "lock"), False
    except OSError as error:
        raise StoreError(cannot_use(root, error)) from error
    folder = NamespaceFolder(path, writable, lock_fd)
    if lock_fd is not None and _lock(lock_fd, shared=not writable) is False:
        owner = os.pread(lock_fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
        folder.close()
        raise StoreError(
            f"process {owner} already stores the KV of this model and rank in {path}: stop it, or name another "
            f"folder with path in {CONFIG_FLAG}"
        )
    if writable:
        assert lock_fd is not None
        try:
            os.ftruncate(lock_fd, 0)
            os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
            (path / "namespace").write_text(description + "\n")
        except OSError:
            pass  # For people only; a full disk must not keep the store from reading.
    return folder


class Leftovers:
    """Segments of namespaces under the same root that no process has open: earlier weights, other models.

    They count against this store's limit and go first, the oldest first, else every change of a model would leave its
    predecessor's blocks on disk for ever. Looked up once, when the store opens.
    """

    def __init__(self, root: Path, own: Path) -> None:
        self.size_bytes = 0
        self._segments: list[tuple[float, int, Path]] = []  # The oldest last.
        for folder in _folders(root):
            if folder == own:
                continue
            lock_fd = _try_lock(folder)
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
            lock_fd = _try_lock(path.parent)
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


def _folders(root: Path) -> list[Path]:
    try:
        return sorted(p for p in root.iterdir() if len(p.name) == 32 and p.is_dir() and not p.is_symlink())
    except OSError:
        return []


def _try_lock(folder: Path) -> int | None:
    """The lock of a folder that no process uses; None: in use, or not ours to touch."""
    try:
        lock_fd = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if _lock(lock_fd, shared=False):
        return lock_fd
    os.close(lock_fd)
    return None


def _lock(lock_fd: int, shared: bool) -> bool | None:
    """False: another process holds it; None: the file system has no locks, as some network mounts."""
    try:
        fcntl.flock(lock_fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def _open_if_there(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def cannot_use(root: Path, error: OSError) -> str:
    return (
        f"{BACKEND_FLAG} file cannot use the folder {root} ({error.strerror}): name one that this user "
        f"can read and write with path in {CONFIG_FLAG}"
    )
