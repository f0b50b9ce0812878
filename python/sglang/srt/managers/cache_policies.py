"""`CachePolicies`: the scheduler's policies that an administrator may change while the server runs. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.managers.scheduler_config import SchedulerConfig


@dataclass
class CachePolicies:
    """The fields have the meaning of those of `SchedulerConfig`, with whose values they begin."""

    schedule_policy: str
    load_ratio: float | str
    bubble_filling: bool
    load_or_recompute: bool
    deferral_threshold: int

    @classmethod
    def of(cls, config: SchedulerConfig) -> CachePolicies:
        return cls(
            config.schedule_policy,
            config.load_ratio,
            config.bubble_filling,
            config.load_or_recompute,
            config.deferral_threshold,
        )
