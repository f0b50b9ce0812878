"""Folders in the user's cache that are written once, whole, by whichever process comes first.

Owns a shared lock on every folder that `hold_folder` was called for, until the process ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

_WRITING = ".writing-"
# A process that still writes after so long was killed.
_ABANDONED_S = 24 * 3600.0
# Folder -> the descriptor that has the lock.
_held: dict[Path, int] = {}


def user_cache(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """cache_dir: None takes $XDG_CACHE_HOME or ~/.cache. Raises OSError where the user has no home."""
    if given := cache_dir or os.environ.get("XDG_CACHE_HOME"):
        return Path(given)
    try:
        return Path.home() / ".cache"
    except RuntimeError as error:  # neither HOME nor an entry in passwd
        raise OSError("this user has no home directory: set XDG_CACHE_HOME to a writable directory") from error


def own_temporary_folder() -> Path | None:
    """A folder that all processes of this user share until it is cleaned up, for when the cache cannot be written.
    None: there is none that only this user can write."""
    folder = Path(tempfile.gettempdir()) / f"sglang-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return folder if is_own else None


def ensure_folder(final: Path, files: Sequence[str], write: Callable[[Path], None], what: str) -> Path:
    """`final`, filled first by `write` unless all `files` are in it. Any number of processes may call this at once:
    each writes to a folder of its own, and the first to rename it wins. what: stands in the error. Raises OSError if
    nothing can be written there, and what `write` raises; then nothing is left."""

    def is_complete() -> bool:
        return all((final / name).is_file() for name in files)

    if is_complete():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(final.parent)
        ours = Path(tempfile.mkdtemp(prefix=_WRITING, dir=final.parent))
    except OSError as e:
        raise OSError(
            f"{what} cannot be written to {str(final.parent)!r} ({e}); set XDG_CACHE_HOME to a writable directory"
        ) from e
    try:
        # mkdtemp's directory is the owner's alone; a cache shared by a group follows the umask instead.
        content = ours / "content"
        content.mkdir()
        write(content)
        while not is_complete():
            try:
                content.rename(final)
            except OSError:
                # Another process was faster, or a cleaner of caches removed some files. Then the incomplete folder
                # moves out.
                if not is_complete():
                    final.rename(ours / "broken")
    finally:
        shutil.rmtree(ours, ignore_errors=True)
    return final


def hold_folder(folder: Path) -> bool:
    """Keep `trim_folders` from removing the folder until this process ends, and note that it is used now. False: it
    was removed before."""
    try:
        os.utime(folder)
    except FileNotFoundError:
        return False
    except OSError:
        pass  # another user's cache
    held = _held.get(folder)
    if held is None:
        try:
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return False
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(held, fcntl.LOCK_SH)
        _held[folder] = held
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(held), folder.stat()):
            return True
    os.close(_held.pop(folder))
    return False


def trim_folders(parent: Path, max_folders: int) -> None:
    """Remove the least recently used folders beyond so many. Those that a process holds stay."""
    used = []
    for folder in parent.iterdir():
        with suppress(OSError):
            if folder.is_dir() and not folder.name.startswith(_WRITING):
                used.append((folder.stat().st_mtime_ns, folder))
    for _, folder in sorted(used, reverse=True)[max_folders:]:
        with suppress(OSError):
            _remove_unless_held(folder)


def _remove_unless_held(folder: Path) -> None:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:
            pass  # not every file system has locks
        # It disappears at once. What a killed process leaves is abandoned.
        removed = Path(tempfile.mkdtemp(prefix=_WRITING, dir=folder.parent))
        try:
            folder.rename(removed / "content")
        finally:
            shutil.rmtree(removed, ignore_errors=True)
    finally:
        os.close(lock)


def _remove_abandoned(parent: Path) -> None:
    """What killed processes left behind."""
    for folder in parent.glob(f"{_WRITING}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(folder, ignore_errors=True)
