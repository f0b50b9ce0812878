"""Ranks in this process that step together, each a `LocalEngine` with its part of a real model."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import BatchDecision
from sglang.srt.managers.startup.sizes import replicas_of
from sglang.srt.managers.step_record import digest_of
from sglang.srt.utils.clock import monotonic
from support.local_engine import LocalEngine
from support.reduction import reduce_progress
from support.thread_group import thread_groups


class Ranks(LocalEngine):
    """Rank 0, which steps the others with it. They share host pools where they cache the same. fail_rates: of loads
    from the host, for each rank."""

    def __init__(self, config: ModelConfig, fail_rates: Sequence[float], **options: object) -> None:
        groups = thread_groups(len(fail_rates))
        self.replicas = replicas_of(config, groups[0])
        # Without poison and without a look at the logits: what a failed launch computes is anything.
        options |= {"debug": False}
        super().__init__(config, group=groups[0], load_fail_rate=fail_rates[0], **options)  # type: ignore[arg-type]
        self.ranks: list[LocalEngine] = [self]
        for group, leader in zip(groups[1:], self.replicas.leaders[1:]):
            rank = LocalEngine(
                config,
                group=group,
                load_fail_rate=fail_rates[group.rank],
                shared_host=self.ranks[leader].host_pool if leader < group.rank else None,
                **options | {"seed": 90 + group.rank},  # type: ignore[arg-type]
            )
            self.ranks.append(rank)

    def _step(self, requests: list[TokenizedGenerateReqInput], aborts: list[str]) -> BatchDecision | None:
        cores = [rank.core for rank in self.ranks]
        ranks = [core.progress() for core in cores]
        if not (requests or aborts or any(core.has_work(monotonic()) for core in cores)):
            return None
        progress, now = reduce_progress(ranks), monotonic()
        mine, *theirs = (core.step(now, progress, requests, aborts) for core in cores)
        assert all(digest_of(mine) == digest_of(other) for other in theirs)
        for core in cores:
            core.scheduler.check_invariants()
        return mine

    def close(self) -> None:
        super().close()
        for rank in self.ranks[1:]:
            rank.close()


class TwoRanks(Ranks):
    def __init__(self, config: ModelConfig, fail_rates: tuple[float, float], **options: object) -> None:
        super().__init__(config, fail_rates, **options)
        self.other = self.ranks[1]
