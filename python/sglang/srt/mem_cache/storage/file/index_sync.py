"""`IndexSync`: keeps the `SegmentIndex` of this process what the folder holds, which other processes change too.

Owns what was last seen of the folder's `SharedChanges`. Reads tables of segments, never payloads; of the folder's
files it makes `changes` alone. A query of the index that needs to know of others calls `refresh` before; while
nothing has changed, that costs a stat and a read of 8 KiB in the page cache, and takes no lock.

Locks, outer ones first: the folder's (`SharedChanges.lock`), `table_lock` (tables of segments and what this process
takes them for change together), `lock` (the index; never held during a call of the system).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

from sglang.srt.mem_cache.storage.file.folder import NamespaceFolder, allocated_bytes
from sglang.srt.mem_cache.storage.file.recovery import (
    UnusableHead,
    UsableHead,
    read_head,
    read_heads,
    segment_numbers,
    segment_path,
)
from sglang.srt.mem_cache.storage.file.segment_files import SegmentFiles
from sglang.srt.mem_cache.storage.file.segment_index import Segment, SegmentIndex
from sglang.srt.mem_cache.storage.file.shared_changes import Seen, SharedChanges
from sglang.srt.mem_cache.storage.file.store_log import StoreLog

# Other processes see the last use of a segment so much later, and evict in that order.
SHARE_INTERVAL_S = 10.0


class IndexSync:
    def __init__(
        self,
        folder: NamespaceFolder,
        files: SegmentFiles,
        log: StoreLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.files = files
        self.log = log
        self.index = SegmentIndex()
        self.changes = SharedChanges(folder.path, folder.writable, files.budget.count_written)
        # Guards the index.
        self.lock = threading.Lock()
        self.table_lock = threading.Lock()
        # Files whose head cannot be used, by their numbers: nothing counts them, so they are to be deleted.
        self.unusable: set[int] = set()
        self._seen = Seen()
        self._is_gone = False
        self._clock = clock
        self._share_at = clock() + SHARE_INTERVAL_S

    # -- the start and the end ----------------------------------------------------------------------------------

    def open(self) -> None:
        """Build the index from the segments' tables. Raises OSError."""
        self.changes.open()
        page = self.changes.read()
        for number, head in read_heads(self.folder.path, self.files.layout):
            path = segment_path(self.folder.path, number)
            self.index.next_number = number + 1
            if isinstance(head, UnusableHead):
                if head.reason:
                    self.log.read_failed(1, head.reason, path)
                # At the start also those that are empty.
                self.unusable.add(number)
            else:
                self._recover(number, head)
        self._seen.take(page)

    def close(self) -> None:
        """Leaves the order of use behind, as times of the files."""
        self._share_uses()
        with self.lock:
            fds = self.index.clear()
        for fd in fds:
            os.close(fd)
        self.changes.close()

    def share_uses(self) -> None:
        """Let other processes see the order of use, now and then."""
        if self._clock() >= self._share_at:
            self._share_at = self._clock() + SHARE_INTERVAL_S
            self._share_uses()

    def _share_uses(self) -> None:
        if not self.folder.writable:
            return
        with self.lock:
            segments = [(segment, segment.used_ns) for segment in self.index.unshared()]
        for segment, used_ns in segments:
            segment.shared_ns = used_ns
            with contextlib.suppress(OSError):
                os.utime(segment.path, ns=(used_ns, used_ns), follow_symlinks=False)

    # -- what others have changed -------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Take in what other processes have changed."""
        page = self.changes.read()
        if page and self._seen.equals(page):
            return
        with self.table_lock:
            self._refresh()

    def refresh_locked(self) -> None:
        """As `refresh`, with the folder's lock: then nothing is missed. Raises OSError."""
        with self.table_lock:
            if self.changes.is_holder_set():
                self.changes.ring_all()
            page = self.changes.read()
            if not page or not self._seen.equals(page):
                self._refresh()

    def make_anew(self) -> None:
        """What is missing of the folder. Raises OSError."""
        if not self.folder.path.is_dir():
            self.log.folder_is_gone()
        self.folder.make_anew()
        with self.table_lock:
            if not self.changes.is_there():
                self._reopen()
            self._refresh()

    def reread(self, segment: Segment) -> None:
        """Take in what others have changed in a segment."""
        with self.table_lock:
            self._reread(segment)

    def ring_folder(self) -> None:
        """With the folder's lock, after `refresh_locked`: files came or went. Raises OSError, as the others do."""
        with self.table_lock:
            self._seen.take_own(self.changes.ring_folder())

    def ring_erased(self, number: int) -> None:
        """With the folder's lock, after `refresh_locked`: this process has changed entries of the segment."""
        with self.table_lock:
            self._seen.take_own(self.changes.ring_erased([number]))

    def ring_stored(self, number: int) -> None:
        """With `table_lock`: this process has completed blocks of a segment to which it alone writes."""
        self._seen.take_own(self.changes.ring_stored(number))

    def take_in(self, number: int) -> None:
        """A segment that could not be read before."""
        with self.table_lock:
            if number not in self.index.segments:
                self._take_in(number)

    def drop(self, segment: Segment) -> None:
        """Forget a segment whose file is gone."""
        with self.lock:
            if self.index.segments.get(segment.number) is not segment:
                return
            fd = self.index.drop(segment)
        if fd is not None:
            os.close(fd)

    def _refresh(self) -> None:
        page = self.changes.read() or self._reopen()
        if not page:
            return
        changes = self._seen.changes(page)
        if changes.folder:
            self._list()
        for segment in list(self.index.segments.values()):
            if changes.of(segment.number):
                self._reread(segment)
        self._seen.take(page)

    def _reopen(self) -> bytes:
        """The file `changes` is another one, or gone; with the folder or alone."""
        self._seen.forget()
        if self.folder.path.is_dir():
            try:
                self.changes.open()
            except OSError:
                return b""
            self._is_gone = False
            return self.changes.read()
        if not self._is_gone:
            self._is_gone = True
            self.log.folder_is_gone()
            for segment in list(self.index.segments.values()):
                self.drop(segment)
        return b""

    def _list(self) -> None:
        try:
            numbers = set(segment_numbers(self.folder.path))
        except OSError:
            return
        for segment in list(self.index.segments.values()):
            if segment.number not in numbers:
                self.drop(segment)
        for number in sorted(numbers - self.index.segments.keys()):
            self._take_in(number)

    def _take_in(self, number: int) -> None:
        """A segment that another process has begun, unless it is still empty."""
        path = segment_path(self.folder.path, number)
        head = read_head(path, self.files.layout)
        if isinstance(head, UsableHead):
            self._recover(number, head)
        elif head.reason and number not in self.unusable:
            self.log.read_failed(1, head.reason, path)
            self.unusable.add(number)

    def _recover(self, number: int, head: UsableHead) -> None:
        path = segment_path(self.folder.path, number)
        table = head.layout.read_table(head.table)
        if table.num_bad:
            with contextlib.suppress(OSError), open(path, "rb") as file:
                table = self.files.read_table(file.fileno(), head.layout)
        if table.num_bad:
            self.log.read_failed(table.num_bad, "entries of its table do not verify", path)
        segment = Segment(number, path, head.layout, head.stat.st_ino)
        with self.lock:
            self.index.recover(segment, table, allocated_bytes(head.stat), head.stat.st_mtime_ns)

    def _reread(self, segment: Segment) -> None:
        try:
            fd = self.files.open_to_read(segment.path)
        except FileNotFoundError:
            self.drop(segment)
            return
        except OSError:
            return  # A read counts and logs it.
        try:
            stat = os.fstat(fd)
            if not self.files.is_segment(fd, segment.layout, segment.inode):
                self.drop(segment)
                self._take_in(segment.number)
                return
            table = self.files.read_table_if_changed(fd, segment.layout, segment.keys, segment.checksums)
        except OSError:
            return
        finally:
            os.close(fd)
        if table is not None:
            with self.lock:
                if self.index.segments.get(segment.number) is segment:
                    is_own = segment is self.index.active
                    file_bytes = segment.file_bytes if is_own else allocated_bytes(stat)
                    self.index.sync(segment, table, file_bytes)
