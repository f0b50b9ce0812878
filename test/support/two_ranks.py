"""Two ranks in this process that step together, each a `LocalEngine` with its part of a real model."""

from __future__ import annotations

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.engine_core import digest_of
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import BatchDecision
from sglang.srt.utils.clock import monotonic
from support.local_engine import LocalEngine
from support.reduction import reduce_progress
from support.thread_group import thread_groups


class TwoRanks(LocalEngine):
    """Rank 0, which steps rank 1 with it. They share a host pool where they cache the same. fail_rates: of loads from
    the host, for each rank."""

    def __init__(self, config: ModelConfig, fail_rates: tuple[float, float], **options: object) -> None:
        groups = thread_groups(2)
        # Without poison and without a look at the logits: what a failed launch computes is anything.
        options |= {"debug": False}
        super().__init__(config, group=groups[0], load_fail_rate=fail_rates[0], **options)  # type: ignore[arg-type]
        self.other = LocalEngine(
            config,
            group=groups[1],
            load_fail_rate=fail_rates[1],
            shared_host=self.host_pool if config.latent is not None else None,
            **options | {"seed": 91},  # type: ignore[arg-type]
        )

    def _step(self, requests: list[TokenizedGenerateReqInput], aborts: list[str]) -> BatchDecision | None:
        cores = (self.core, self.other.core)
        ranks = [core.progress() for core in cores]
        if not (requests or aborts or any(core.has_work(monotonic()) for core in cores)):
            return None
        progress, now = reduce_progress(ranks), monotonic()
        mine, theirs = (core.step(now, progress, requests, aborts) for core in cores)
        assert digest_of(mine) == digest_of(theirs)
        for core in cores:
            core.scheduler.check_invariants()
        return mine

    def close(self) -> None:
        super().close()
        self.other.close()
