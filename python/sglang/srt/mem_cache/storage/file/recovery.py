"""What is found in a namespace's folder: the heads of its segments, header and table of each.

Owns nothing and changes nothing. The blocks themselves are not read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sglang.srt.mem_cache.storage.file.folder import SEGMENT_SUFFIX
from sglang.srt.mem_cache.storage.file.segment import ALIGNMENT, ENTRY_BYTES, SegmentError, SegmentLayout

# Cold disks answer many small reads at once faster than one by one.
_THREADS = 8
_FILES_PER_TASK = 256


@dataclass(frozen=True)
class UsableHead:
    """Of a segment that this store can read."""

    stat: os.stat_result
    layout: SegmentLayout
    # The raw bytes of the table.
    table: bytes


@dataclass(frozen=True)
class UnusableHead:
    # Empty: nothing was written to the file yet.
    reason: str
    # False: it could not be read, so that it may be a segment all the same.
    is_certain: bool = True


def segment_path(folder: Path, number: int) -> str:
    return f"{folder}/{number:08d}{SEGMENT_SUFFIX}"


def segment_numbers(folder: Path) -> list[int]:
    """In order. Raises OSError."""
    return sorted(n for name in os.listdir(folder) if (n := _number_of(name)) is not None)


def read_heads(folder: Path, layout: SegmentLayout) -> Iterator[tuple[int, UsableHead | UnusableHead]]:
    """Of every segment, in the order of their numbers. layout: of the segments that this store would write."""
    numbers = segment_numbers(folder)
    parts = [numbers[i : i + _FILES_PER_TASK] for i in range(0, len(numbers), _FILES_PER_TASK)]

    def read_part(part: list[int]) -> list[UsableHead | UnusableHead]:
        return [read_head(segment_path(folder, number), layout) for number in part]

    with ThreadPoolExecutor(_THREADS, "hicache-open") as threads:
        heads = [head for part in threads.map(read_part, parts) for head in part]
    return zip(numbers, heads)


def read_head(path: str, layout: SegmentLayout) -> UsableHead | UnusableHead:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            # One read for header and table of the segments that this store would write.
            head = os.pread(fd, layout.data_offset, 0)
            if not head:
                return UnusableHead("")
            layout = layout.read_header(head)
            if layout.data_offset > len(head):
                head += os.pread(fd, layout.data_offset - len(head), len(head))
            table = head[ALIGNMENT : ALIGNMENT + layout.num_slots * ENTRY_BYTES]
            return UsableHead(os.fstat(fd), layout, table)
        finally:
            os.close(fd)
    except FileNotFoundError:
        return UnusableHead("")  # Another process has deleted it.
    except SegmentError as error:
        return UnusableHead(str(error))
    except OSError as error:
        return UnusableHead(error.strerror or str(error), is_certain=False)


def _number_of(name: str) -> int | None:
    stem, suffix = os.path.splitext(name)
    return int(stem) if suffix == SEGMENT_SUFFIX and len(stem) == 8 and stem.isdecimal() else None
