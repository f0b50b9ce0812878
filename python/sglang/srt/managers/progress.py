"""`Progress`: the launches and operations that have completed on a rank, and how ranks agree on them.

Owns the columns that ranks reduce, and nothing else. Ranks take the minimum of every column. Each column therefore
holds a number whose minimum holds for all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sglang.srt.mem_cache.slab_ledger import SlabReport
from sglang.srt.mem_cache.transfer import EXEC, LINKS, PROBE, STALL, STORAGE_LINKS, STORE_LINKS, STREAM
from sglang.srt.sampling.logprob_types import LaunchFindings

# The names of all counts: launches, and the operations of each link.
COUNTED = (EXEC, *LINKS)
# Costs of parts of launches, under the launches' numbers.
PARTS_OF_LAUNCHES = (STALL, STREAM)
# Results of storage operations that one step takes, per link.
COUNTS_PER_STEP = 16
_NO_FAILURE = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Progress:
    """What has completed on a rank, or on all ranks."""

    # Launches (EXEC) and operations per link.
    done: dict[str, int]
    # Per link, and EXEC: the earliest number that failed and is not consumed.
    failed: dict[str, int]
    # Launch -> its sampled tokens; rank 0's.
    results: dict[int, bytes]
    # Launch -> what it found beside tokens; rank 0's.
    findings: dict[int, LaunchFindings] = field(default_factory=dict)
    # Per storage link: the results of the operations that are new in `done`, in leading blocks.
    counts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # For each result of the probe link: how many of its blocks, the last ones, lie on the second storage tier.
    far_counts: tuple[int, ...] = ()
    # For each of them, see `OpResult.part_count`.
    part_counts: tuple[int, ...] = ()
    # Per storage link: operations whose results earlier steps have taken; alike on all ranks.
    consumed: dict[str, int] = field(default_factory=dict)
    # Per link, EXEC and parts of launches: number -> seconds; rank 0's.
    cost: dict[str, dict[int, float]] = field(default_factory=dict)
    # Of borrowed or lent memory.
    slab_report: SlabReport = field(default_factory=SlabReport)
    # Of each store, by its place: whether it can take more blocks without giving up others.
    storage_has_room: tuple[bool, ...] = (True, True)


class _Columns:
    """Names, offsets and widths of what ranks reduce: int64, by minimum, of the same shape in every step.

    done: completed launches and operations, in the order of COUNTED.
    first_failed: the earliest failure of each, or the largest int64.
    counts: COUNTS_PER_STEP results per storage link; unused ones are 0.
    near_counts, part_counts: COUNTS_PER_STEP results of the probe link each; unused ones are 0. near_counts: without
    the far counts, so that the first store has on all ranks what is read there.
    mapped_slabs: 1 for each slab that the rank may use, else 0.
    readable_slabs: 1 for each slab from which the rank can copy, else 0.
    num_borrowable_slabs, num_lendable_slabs, value_us, lent_value_us: one number each, of `SlabReport`.
    storage_has_room: of each store, 1 if so, else 0.
    sources: of `SlabReport`, by slab. negated_sources: the same, negated: where the least and the largest differ,
    ranks have mapped different memory.
    negated_num_late_slabs: one number. Ranks agree on the largest number of late slabs, so it is stored negated.
    negated_num_wanted: by lender, for the same reason.
    """

    def __init__(self, report: SlabReport) -> None:
        """report: any rank's."""
        widths = {
            "done": len(COUNTED),
            "first_failed": len(COUNTED),
            "counts": len(STORAGE_LINKS) * COUNTS_PER_STEP,
            "near_counts": COUNTS_PER_STEP,
            "part_counts": COUNTS_PER_STEP,
            "mapped_slabs": len(report.mapped),
            "readable_slabs": len(report.mapped),
            "num_borrowable_slabs": 1,
            "num_lendable_slabs": 1,
            "negated_num_late_slabs": 1,
            "value_us": 1,
            "lent_value_us": 1,
            "sources": len(report.sources) // 8,
            "negated_sources": len(report.sources) // 8,
            "negated_num_wanted": len(report.num_wanted),
            "storage_has_room": len(STORE_LINKS),
        }
        self.width = 0
        self._slices: dict[str, slice] = {}
        for name, width in widths.items():
            self._slices[name] = slice(self.width, self.width + width)
            self.width += width

    def of(self, values: np.ndarray, name: str) -> np.ndarray:
        """The part of values, (width,) int64, that a name stands for; a view."""
        return values[self._slices[name]]

    def counts(self, values: np.ndarray) -> np.ndarray:
        """(links, COUNTS_PER_STEP), in the order of STORAGE_LINKS; a view."""
        return self.of(values, "counts").reshape(len(STORAGE_LINKS), COUNTS_PER_STEP)


def pack_progress(progress: Progress) -> np.ndarray:
    """(n,) int64: a rank's part of the reduction. n depends on the numbers of slabs and lenders alone."""
    report = progress.slab_report
    columns = _Columns(report)
    values = np.zeros(columns.width, np.int64)
    columns.of(values, "done")[:] = [progress.done[name] for name in COUNTED]
    columns.of(values, "first_failed")[:] = [progress.failed.get(name, _NO_FAILURE) for name in COUNTED]
    for row, name in zip(columns.counts(values), STORAGE_LINKS):
        of_link = progress.counts.get(name, ())
        row[: len(of_link)] = of_link
    near_counts = [count - far for count, far in zip(progress.counts.get(PROBE, ()), progress.far_counts)]
    columns.of(values, "near_counts")[: len(near_counts)] = near_counts
    columns.of(values, "part_counts")[: len(progress.part_counts)] = progress.part_counts
    columns.of(values, "mapped_slabs")[:] = np.frombuffer(report.mapped, np.uint8)
    columns.of(values, "readable_slabs")[:] = np.frombuffer(report.readable, np.uint8) if report.readable else 1
    columns.of(values, "num_borrowable_slabs")[:] = report.num_borrowable
    columns.of(values, "num_lendable_slabs")[:] = report.num_lendable
    columns.of(values, "negated_num_late_slabs")[:] = -report.num_late
    columns.of(values, "value_us")[:] = report.value_us
    columns.of(values, "lent_value_us")[:] = report.lent_value_us
    columns.of(values, "sources")[:] = np.frombuffer(report.sources, np.int64)
    columns.of(values, "negated_sources")[:] = -columns.of(values, "sources")
    columns.of(values, "negated_num_wanted")[:] = report.num_wanted
    columns.of(values, "negated_num_wanted")[:] *= -1
    columns.of(values, "storage_has_room")[:] = progress.storage_has_room
    return values


def unpack_progress(least: np.ndarray, rank_0: Progress) -> Progress:
    """least: the minimum over ranks of their packed progress. rank_0: its results, findings and costs are
    taken, as far as all ranks have completed them, and `consumed` and the number of slabs, which are alike on all
    ranks."""
    columns = _Columns(rank_0.slab_report)
    done = dict(zip(COUNTED, columns.of(least, "done").tolist()))
    first_failed = zip(COUNTED, columns.of(least, "first_failed").tolist())
    num_new = {name: done[name] - rank_0.consumed.get(name, 0) for name in STORAGE_LINKS}
    end = done[EXEC]
    counts = {name: tuple(row[: num_new[name]].tolist()) for name, row in zip(STORAGE_LINKS, columns.counts(least))}
    near_counts = columns.of(least, "near_counts")[: num_new[PROBE]].tolist()
    return Progress(
        done=done,
        # A failure that some rank has not reached yet is reported once all ranks have.
        failed={name: first for name, first in first_failed if first < done[name]},
        results={seq: tokens for seq, tokens in rank_0.results.items() if seq < end},
        findings={seq: found for seq, found in rank_0.findings.items() if seq < end},
        counts=counts,
        far_counts=tuple(count - near for count, near in zip(counts[PROBE], near_counts)),
        part_counts=tuple(columns.of(least, "part_counts")[: num_new[PROBE]].tolist()),
        consumed=rank_0.consumed,
        cost={
            name: {seq: c for seq, c in costs.items() if seq < (end if name in PARTS_OF_LAUNCHES else done[name])}
            for name, costs in rank_0.cost.items()
        },
        slab_report=_agreed_report(columns, least),
        storage_has_room=tuple(map(bool, columns.of(least, "storage_has_room").tolist())),
    )


def _agreed_report(columns: _Columns, least: np.ndarray) -> SlabReport:
    sources = columns.of(least, "sources").copy()
    sources[sources != -columns.of(least, "negated_sources")] = 0
    mapped, readable = (columns.of(least, f"{name}_slabs").astype(np.uint8) for name in ("mapped", "readable"))
    if len(sources):
        mapped[sources == 0] = 0
    return SlabReport(
        mapped=mapped.tobytes(),
        num_borrowable=int(columns.of(least, "num_borrowable_slabs")[0]),
        num_lendable=int(columns.of(least, "num_lendable_slabs")[0]),
        num_late=-int(columns.of(least, "negated_num_late_slabs")[0]),
        readable=b"" if readable.all() else readable.tobytes(),
        value_us=int(columns.of(least, "value_us")[0]),
        lent_value_us=int(columns.of(least, "lent_value_us")[0]),
        sources=sources.tobytes(),
        num_wanted=tuple((-columns.of(least, "negated_num_wanted")).tolist()),
    )
