"""`RealEngine`: an engine in this process with a trained model, a disk, the remote tier and lent memory.

`real_model` loads the weights once per process.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.smollm2_model import SMOLLM2, FetchError, ensure_smollm2
from sglang.srt.layers.attention.attention_registry import make_attention_backend, pick_attention_backend
from sglang.srt.managers.schedule_batch import BatchDecision
from sglang.srt.managers.startup.storage import StorageOpener
from sglang.srt.mem_cache.storage.tiered_store import AnyStore
from sglang.srt.mem_cache.transfer import StorageAction, Tier
from sglang.srt.model_loader.loader import load_model
from sglang.srt.peer.memory.borrowed_memory import BorrowedMemory
from sglang.srt.peer.memory.cuda_slabs import SlabsConfig
from sglang.srt.sampling.logprob_types import LogprobSpec
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.device import CPU
from support.all_tiers import SLAB_MIB, Lender
from support.children import wait_until
from support.golden import NUM_TOKENS, GoldenAnswer, check_answer, read_golden
from support.local_engine import LocalEngine

BLOCK = 32
GREEDY = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, sampling_seed=0)
ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True, sampling_seed=0)


@dataclass(frozen=True)
class Storage:
    """As --hicache-storage-backend and its extra config have it. folder: of a disk and of private files."""

    backend: str
    folder: Path
    config: dict[str, Any]


@dataclass(frozen=True)
class Scored:
    """What an engine gives for the tokens of a prompt, from one of them on."""

    logprobs: list[float]
    # The greedy token in place of each.
    likeliest: list[int]
    cached: dict[str, int]


class RealEngine(LocalEngine):
    """device_tokens, host_tokens: sizes of the pools. storage: what is attached. lender: whose slabs it borrows, that
    many of them. options: of `LocalEngine`; the write policy is write_through by default."""

    def __init__(
        self,
        real: RealModel,
        device_tokens: int,
        host_tokens: int = 0,
        storage: Storage | None = None,
        lender: Lender | None = None,
        num_slabs: int = 0,
        **options: Any,
    ) -> None:
        page_size = options.setdefault("page_size", 16)
        write_policy = options.setdefault("write_policy", "write_through")
        if lender is not None:
            slabs = SlabsConfig(num_slabs, SLAB_MIB << 20)
            options["borrow"] = partial(BorrowedMemory, [lender.endpoint], "gate", slabs)
        super().__init__(
            real.config,
            device_tokens // page_size,
            host_tokens // page_size,
            model=real.model,
            attention_backend=real.attention,
            device="cpu",
            open_store=self._open_store if storage else None,
            **options,
        )
        if storage is not None:
            self._opener = StorageOpener(lambda: "golden", SMOLLM2, self.host_pool, 0, 1, storage.folder)  # type: ignore[arg-type]
            config = json.dumps({"block_tokens": BLOCK, "prefetch_threshold": 1, **storage.config})
            setup = self._opener.setup(storage.backend, config, "wait_complete", write_policy)
            self._setup = setup.setup
            done, message = self.administer(StorageAction.ATTACH, setup)
            assert done, message
        assert self.scheduler.cache.controller.write_policy == write_policy
        if num_slabs:
            self._wait_for_slabs(num_slabs)

    def _open_store(self, _pool: object) -> AnyStore:
        return self._opener.open(self._setup)

    def _wait_for_slabs(self, count: int) -> None:
        borrowed = self.scheduler.cache.borrowed
        assert borrowed is not None

        def are_mapped() -> bool:
            self._turn(0.0, [], [], lambda decision: None)
            return sum(state.name == "MAPPED" for state in borrowed.slabs.states) == count

        wait_until(are_mapped, "lent slabs are not mapped")

    @property
    def counters(self) -> dict[str, int]:
        found: dict[str, int] = self.scheduler.state()["counters"]
        return found

    def check(
        self,
        golden: Sequence[GoldenAnswer],
        where: str,
        after_step: Callable[[BatchDecision], None] = lambda decision: None,
    ) -> Counter[str]:
        """Answer all prompts at once, and compare. Returns where the tokens of the prompts came from, by tier."""
        prompts = [each.ids for each in golden]
        answers = self.generate(prompts, GREEDY, logprobs=LogprobSpec(), after_step=after_step)
        self.settle()
        found: Counter[str] = Counter()
        for wanted, answer in zip(golden, answers, strict=True):
            check_answer(wanted, answer, where)
            found.update(answer.cached_tokens_details)
        return found

    def score(self, ids: np.ndarray, start: int) -> Scored:
        """ids: a prompt, whose tokens from start on, 1 at least, get a log-probability."""
        (answer,) = self.generate([ids], ONE_TOKEN, logprobs=LogprobSpec(top=1, prompt_from=start))
        self.settle()
        found = answer.prompt_logprobs
        return Scored(
            logprobs=[each.logprob for each in found if each.logprob is not None],
            likeliest=[each.top[0][1] for each in found],
            cached=answer.cached_tokens_details,
        )

    def evict(self, *tiers: Tier) -> None:
        """Empty those of the tiers that there are, in this order."""
        self.settle()
        tables = self.scheduler.cache.tables
        for tier in tiers:
            if tier not in tables:
                continue
            self.scheduler.cache.controller.evict(tier, tables[tier].num_pages)
            self.core.step(self.clock(), self.core.progress())
            self.settle()

    def close(self) -> None:
        self.settle()
        if self.store is not None:
            done, message = self.administer(StorageAction.DETACH)
            assert done, message
        super().close()
        if self.borrowed is not None:
            self.borrowed.close()


def skip_unless_fetched() -> None:
    try:
        ensure_smollm2()
    except FetchError as error:
        pytest.skip(f"the model smollm2 cannot be fetched: {error}")


class RealModel:
    """Its weights are 0.5 GB. Skips the test where it cannot be fetched."""

    def __init__(self) -> None:
        skip_unless_fetched()
        self.config = ModelConfig.from_pretrained(SMOLLM2, dtype="float32")
        # As a server on this CPU picks it.
        self.attention = make_attention_backend(pick_attention_backend(None, CPU), CPU)
        self.model = load_model(self.config, "auto", self.attention, device=CPU)
        self.golden = read_golden()

    def named(self, *names: str) -> list[GoldenAnswer]:
        by_name = {each.name: each for each in self.golden.answers}
        return [by_name[name] for name in names]


@cache
def real_model() -> RealModel:
    return RealModel()
