"""`CrashRecord`: what a scheduler has done of late, on disk, so that its crash can be replayed.

Owns one file, which is compressed, and its length. A step's inputs are in the file before the step is taken. So a
step that ends the process, by whatever means, is the last in it.

    start: the configuration ──► steps ──► too long, or long and the engine is idle: a new file
                                               │          that begins with a snapshot takes its place
                                               ├──► a clean end: the file is removed
                                               └──► a crash, or SIGKILL: it stays

`python -m sglang.srt.managers.replay FILE` replays it. The server keeps the last records of ended processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from pathlib import Path

import msgspec
import zstandard

from sglang.srt.managers.crash_folder import new_record_path, remove_old_records
from sglang.srt.managers.schedule_batch import BatchDecision, StepInputs
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.snapshot import snapshot
from sglang.srt.managers.step_record import RECORD_FORMAT, SNAPSHOT_FORMAT, digest_of, frame

# Bytes from which on a file is begun anew when the engine is idle, and in any case.
IDLE_BYTES = 4 << 20
MAX_BYTES = 256 << 20
# A snapshot takes some 50 us per node of the tree, in which no request is heard. Of a tree with more nodes it waits
# longer.
_IDLE_NODES = 5000
# Steps.
_DIGEST_EVERY = 16

logger = logging.getLogger(__name__)


class CrashRecord:
    """In the place of a `StepRecorder`. A disk that is full ends the record and nothing else."""

    def __init__(self, folder: Path, scheduler: Scheduler, max_bytes: int = MAX_BYTES) -> None:
        remove_old_records(folder)
        self.path = new_record_path(folder, os.getpid())
        self._scheduler = scheduler
        self._max_bytes = max_bytes
        self._encode = msgspec.msgpack.Encoder().encode
        self._fd = -1
        self.num_bytes = 0
        self._begin(RECORD_FORMAT, self._encode(scheduler.config))

    @property
    def is_open(self) -> bool:
        return self._fd >= 0

    def inputs(self, inputs: StepInputs) -> None:
        if self.num_bytes > self._max_bytes:
            self._begin_anew()
        self._write(frame(self._encode(inputs)), flush=True)

    def decision(self, decision: BatchDecision) -> None:
        # It reaches the file with the next step: of the last one only the inputs matter. A digest takes longer than
        # all the rest, and a difference shows in those of later steps too.
        self._write(frame(digest_of(decision) if decision.step % _DIGEST_EVERY == 0 else b""), flush=False)

    def tidy_up(self) -> None:
        """In an idle moment, between two steps."""
        is_small = self._scheduler.cache.tree.num_nodes <= _IDLE_NODES
        if self.num_bytes > (IDLE_BYTES if is_small else self._max_bytes // 2):
            self._begin_anew()

    def keep(self) -> None:
        """The process ends by an error: the file stays."""
        self._write(b"", flush=True)
        self._close()

    def remove(self) -> None:
        """The process ends as it should. Without effect after `keep`."""
        if self.is_open:
            self._close()
            self._unlink(self.path)

    def _begin_anew(self) -> None:
        if not self.is_open:
            return
        self._close()  # its name stays until the new one is there
        self._begin(SNAPSHOT_FORMAT, snapshot(self._scheduler))

    def _begin(self, kind: bytes, head: bytes) -> None:
        """A new file, which takes the place of the one before when its head is whole."""
        new = self.path.with_suffix(".new")
        try:
            self._fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            self._compressor = zstandard.ZstdCompressor(level=1).compressobj()
            self.num_bytes = 0
            self._write(frame(kind) + frame(head), flush=True)
            if self.is_open:
                os.replace(new, self.path)
        except OSError as error:
            self._give_up(error)

    def _write(self, data: bytes, flush: bool) -> None:
        if not self.is_open:
            return
        data = self._compressor.compress(data)
        if flush:
            data += self._compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        self.num_bytes += len(data)
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        logger.warning("--crash-dump-folder: no more is recorded (%s)", error.strerror)
        self._close()
        self._unlink(self.path)
        self._unlink(self.path.with_suffix(".new"))

    @staticmethod
    def _unlink(path: Path) -> None:
        """A folder that cannot be written any more keeps it until a later start."""
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self.is_open:
            os.close(self._fd)
            self._fd = -1
