"""`StepRecorder` and `replay`: a scheduler's run as a file, and the same run again from it.

    the format ──► the configuration, or a snapshot ──► for each step: its inputs, its decision's digest

Every part is a frame: its length in four bytes, and its bytes. Frames of a run may be compressed as one stream.
"""

from __future__ import annotations

import hashlib
import io
import logging
from typing import BinaryIO, Protocol

import msgspec
import zstandard

from sglang.srt.managers.schedule_batch import BatchDecision, StepInputs
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.managers.snapshot import restored

# The first bytes of every record. A record of another version has other inputs, which this scheduler would misread.
RECORD_FORMAT = b"sglang-steps-6"
# Of a record that begins with a snapshot of the scheduler in the place of its configuration.
SNAPSHOT_FORMAT = b"sglang-steps-snapshot-6"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

logger = logging.getLogger(__name__)


class Recorder(Protocol):
    """Takes every step's inputs before it is taken, and its decision after it."""

    def inputs(self, inputs: StepInputs) -> None: ...

    def decision(self, decision: BatchDecision) -> None: ...


class StepRecorder:
    """Writes a run to a file: the format, the scheduler's configuration, then every step. The inputs of a step are
    written before it is taken, its decision's digest after it. A step that ends the process is therefore the last one
    in the file. A disk that is full ends the record and nothing else."""

    def __init__(self, file: BinaryIO, config: SchedulerConfig) -> None:
        self._file: BinaryIO | None = file
        self._encode = msgspec.msgpack.Encoder().encode
        self._frame(RECORD_FORMAT)
        self._frame(self._encode(config))

    def inputs(self, inputs: StepInputs) -> None:
        self._frame(self._encode(inputs))

    def decision(self, decision: BatchDecision) -> None:
        self._frame(digest_of(decision))

    def _frame(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.write(frame(data))
            self._file.flush()
        except OSError as error:
            logger.warning("--record-steps: no more is recorded (%s)", error.strerror)
            self._file = None


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


def digest_of(decision: BatchDecision) -> bytes:
    return hashlib.blake2b(decision.encode(), digest_size=16).digest()


class ReplayMismatchError(RuntimeError):
    pass


def replay(file: BinaryIO) -> int:
    """Run a recorded run's inputs through a fresh scheduler, or one from the record's snapshot. Returns the number of
    steps that agree. Raises ReplayMismatchError at the first decision that differs, ValueError if the file is no
    record of this version, and any error that a step raises. A record may be compressed, lack digests, and be cut off
    anywhere after its configuration."""
    source = _uncompressed(file)

    def next_frame() -> bytes | None:
        head = source.read(4)
        size = int.from_bytes(head, "little")
        data = source.read(size)
        return data if len(head) == 4 and len(data) == size else None

    head = next_frame()
    if head is None:
        raise ValueError("this is no record of a run, or an empty one")
    if head not in (RECORD_FORMAT, SNAPSHOT_FORMAT):
        raise ValueError("this is no record of a run, or one of another version: record it anew with --record-steps")
    start = next_frame()
    if start is None:
        raise ValueError("this record was cut off before its first step")
    if head == SNAPSHOT_FORMAT:
        scheduler: Scheduler = restored(start)
    else:
        scheduler = Scheduler(msgspec.msgpack.decode(start, type=SchedulerConfig))
    decoder = msgspec.msgpack.Decoder(StepInputs)
    num_steps = 0
    while (data := next_frame()) is not None:
        decision = scheduler.step(decoder.decode(data))
        digest = next_frame()
        if digest is None:
            break
        if digest and digest_of(decision) != digest:
            raise ReplayMismatchError(f"step {decision.step} decides differently than it was recorded")
        num_steps += 1
    return num_steps


def _uncompressed(file: BinaryIO) -> BinaryIO:
    begins = file.read(len(_ZSTD_MAGIC))
    file.seek(-len(begins), io.SEEK_CUR)
    if begins != _ZSTD_MAGIC:
        return file
    return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file), 1 << 16)
