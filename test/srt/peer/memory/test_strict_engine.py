"""An engine whose lender copies for it, and stops: answers stay, one wait is all that it costs, and the lender is
used again when it goes on. The lender is a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.scheduler_config import LayerStreamConfig
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.peer.memory import copy_session
from sglang.srt.peer.memory.borrowed_memory import BorrowedMemory
from sglang.srt.peer.memory.cuda_slabs import SlabsConfig
from sglang.srt.peer.memory.lender_breakers import LenderBreakers
from sglang.srt.sampling.sampling_params import SamplingParams
from support.all_tiers import SLAB_MIB, Lender
from support.children import wait_until
from support.local_engine import LocalEngine
from support.tiny_model import tiny_llama

PARAMS = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True, sampling_seed=0)
PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 16])
# Of the whole prompts, less than the device has room for.
NUM_TOKENS = 128


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def lender(tmp_path: Path) -> Iterator[Lender]:
    made = Lender(tmp_path / "lender", 1, strict=True)
    yield made
    made.kill()


@pytest.fixture(autouse=True)
def usual_timeout(monkeypatch: pytest.MonkeyPatch, patience: None) -> None:
    """A lender that is slow for once is no failure: these tests ask again."""
    monkeypatch.setattr(copy_session, "COPY_TIMEOUT_S", 1.0)


def prompts(seed: int, length: int) -> list[np.ndarray]:
    return [np.random.default_rng([seed, i]).integers(3, 97, length).astype(np.int32) for i in range(3)]


def computed(model_config: ModelConfig, texts: list[np.ndarray]) -> list[list[int]]:
    engine = LocalEngine(model_config, 1000, page_size=4, enable_radix_cache=False)
    answers = [answer.tokens for answer in engine.generate(texts, PARAMS)]
    engine.close()
    return answers


class StrictEngine:
    """Its device has room for one prompt and a half, its host for less."""

    def __init__(self, model_config: ModelConfig, lender: Lender, page_size: int, **options: Any) -> None:
        borrow = partial(BorrowedMemory, [lender.endpoint], "borrower", SlabsConfig(1, SLAB_MIB << 20))
        options = {"num_host_pages": 80 // page_size, **options}
        self.engine = LocalEngine(
            model_config, 3 * NUM_TOKENS // 2 // page_size, page_size=page_size, borrow=borrow, **options
        )
        assert self.engine.borrowed is not None
        self.memory = self.engine.borrowed
        self.until_mapped(1)

    @property
    def num_mapped(self) -> int:
        borrowed = self.engine.scheduler.cache.borrowed
        assert borrowed is not None
        return sum(state.name == "MAPPED" for state in borrowed.slabs.states)

    @property
    def lender_state(self) -> dict[str, Any]:
        (lender,) = self.memory.state()["lenders"]
        return lender

    def until_mapped(self, count: int) -> None:
        def holds() -> bool:
            self.engine._turn(0.0, [], [], lambda decision: None)
            return self.num_mapped == count

        wait_until(holds, f"{count} slabs to be mapped")

    def ask(self, text: np.ndarray, after_step: Callable[[Any], None] = lambda decision: None) -> tuple[Any, int]:
        (answer,) = self.engine.generate([text], PARAMS, after_step=after_step)
        self.engine.settle()
        self.engine.scheduler.check_invariants()
        return answer.tokens, answer.cached_tokens_details["peer"]

    def until_loaded(self, texts: list[np.ndarray], wanted: list[list[int]]) -> None:
        """Ask until the prompts come from the lender."""

        def holds() -> bool:
            again = [self.ask(text) for text in texts]
            assert [tokens for tokens, _ in again] == wanted
            return all(found >= NUM_TOKENS // 4 for _, found in again)

        wait_until(holds, "the prompts to come from the lender")

    def close(self) -> None:
        self.engine.close()
        self.memory.close()


@pytest.mark.sampled(1)
@PAGE_SIZES
def test_a_lender_that_stops_is_waited_for_once_and_used_again(
    model_config: ModelConfig, lender: Lender, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = prompts(1, NUM_TOKENS)
    wanted = computed(model_config, texts)
    engine = StrictEngine(model_config, lender, page_size)
    engine.until_loaded(texts, wanted)
    opened = LenderBreakers.open
    waits: list[str] = []

    def note(self: LenderBreakers, slab_socket: str, reason: str) -> None:
        waits.append(reason)
        opened(self, slab_socket, reason)

    monkeypatch.setattr(LenderBreakers, "open", note)
    times = engine.lender_state["times_left_alone"]
    lender.pause()
    again = [engine.ask(text) for text in texts * 3]
    assert again == [(tokens, 0) for tokens in wanted] * 3
    # Loads, backups and moves may have been under way together.
    assert 1 <= len(waits) <= 3, waits
    assert engine.num_mapped == 0 and engine.engine.scheduler.cache.tree.resident_pages(Tier.PEER) == 0
    assert engine.lender_state["left_alone"] and engine.lender_state["times_left_alone"] == times + 1
    lender.resume()
    engine.until_mapped(1)
    assert not engine.lender_state["left_alone"]
    engine.until_loaded(texts, wanted)
    engine.close()


def long_prompts() -> tuple[list[np.ndarray], np.ndarray]:
    """Prompts that go to the lender, and one that begins with the first and is longer than the device."""
    short = prompts(2, NUM_TOKENS)
    return short, np.concatenate([short[0], prompts(3, 2 * NUM_TOKENS)[0]])


def streaming(model_config: ModelConfig, lender: Lender, page_size: int) -> StrictEngine:
    return StrictEngine(
        model_config,
        lender,
        page_size,
        num_host_pages=4 * NUM_TOKENS // page_size,
        layer_stream=LayerStreamConfig(2, max(1, 48 // page_size)),
        chunked_prefill_size=16,
        new_token_ratio=0.0,
    )


class StreamedTiers:
    """What launches stream from. then: called once after a launch that streams from a peer was issued."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.found: set[Tier] = set()
        self._then = then

    def __call__(self, decision: Any) -> None:
        if decision.launch is None:
            return
        self.found.update(tier for each in decision.launch.streams for tier, _ in each.parts)
        if Tier.PEER in self.found:
            then, self._then = self._then, lambda: None
            then()


@pytest.mark.sampled(1)
@PAGE_SIZES
def test_strict_slabs_are_streamed(model_config: ModelConfig, lender: Lender, page_size: int) -> None:
    short, long = long_prompts()
    wanted = computed(model_config, [*short, long])
    engine = streaming(model_config, lender, page_size)

    def is_streamed() -> bool:
        for text in short:
            engine.ask(text)
        tiers = StreamedTiers()
        assert engine.ask(long, tiers)[0] == wanted[-1]
        return Tier.PEER in tiers.found

    wait_until(is_streamed, "a launch that streams from the lender")
    assert engine.engine.scheduler.state()["counters"]["streamed_reqs"] > 0
    engine.close()


@pytest.mark.sampled(1)
@PAGE_SIZES
@pytest.mark.parametrize("ends", ["stops", "dies", "reclaims"])
def test_a_lender_that_ends_in_the_middle_of_a_streamed_request(
    model_config: ModelConfig, lender: Lender, page_size: int, ends: str
) -> None:
    """The request ends with the right tokens, and the lender is used again."""
    short, long = long_prompts()
    wanted = computed(model_config, [*short, long])
    engine = streaming(model_config, lender, page_size)
    # Launches that failed before: a lender that gets no processor for a second is one that has stopped.
    failed_before: list[int] = []

    def num_failed() -> int:
        found: int = engine.engine.scheduler.state()["counters"].get("failed_launches", 0)
        return found

    def end() -> None:
        failed_before.append(num_failed())
        if ends == "stops":
            lender.pause()
        elif ends == "dies":
            lender.kill()
        else:
            # As if the lease had ended without a word.
            for slab in engine.memory.pool._strict:
                assert slab is not None
            engine.memory.pool._strict[:] = [slab._replace(token=b"?") for slab in engine.memory.pool._strict if slab]
            for state in engine.memory.pool._states:
                state.plan = None

    def is_streamed() -> bool:
        for text in short:
            engine.ask(text)
        assert engine.ask(long, StreamedTiers(end))[0] == wanted[-1]
        return bool(failed_before)

    wait_until(is_streamed, "a launch that streams from the lender")
    assert num_failed() - failed_before[0] <= 2, "it was waited for again"
    assert [engine.ask(text)[0] for text in (*short, long)] == wanted
    assert engine.num_mapped == 0
    if ends == "stops":
        lender.resume()
    elif ends == "dies":
        lender.start()
    if ends != "reclaims":
        engine.until_mapped(1)
        engine.until_loaded(short, wanted[:-1])
    engine.close()
