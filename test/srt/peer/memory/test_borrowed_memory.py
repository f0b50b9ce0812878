"""A borrower with a real model borrows real slabs from lenders over real sockets; and what becomes of them. Slabs of
GPU memory are those of an emulated device, under a driver that is not there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.io_struct import EraseSaltReqInput, SetQuotaReqInput
from sglang.srt.mem_cache.namespaces import namespace_of
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.peer.borrowed_places import BorrowedOptions
from sglang.srt.peer.borrowing import BorrowingConfig
from sglang.srt.peer.lent_places import LentOptions
from sglang.srt.peer.memory.borrowed_memory import BorrowedMemory
from sglang.srt.peer.memory.cuda_slabs import CudaSlabRange, SlabsConfig
from sglang.srt.peer.memory.lent_memory import LentMemory, allocate_pool
from sglang.srt.peer.protocol.borrower import SlabLost
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.peer_timing import PeerTiming
from sglang.srt.utils.time_units import Seconds
from support.children import wait_until
from support.device_emulator import emulated_device
from support.fake_cuda_driver import FakeCudaDriver
from support.local_engine import LocalEngine
from support.tiny_model import tiny_llama

PAGE, SLAB_BYTES, NUM_SLABS = 4, 1 << 16, 6
# Of the lender's borrowers.
RECALL_S = 0.05
PARAMS = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True, sampling_seed=0)


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def lender(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LentMemory]:
    """Of another shape than the borrower: its pages and the borrower's do not divide each other, nor the slab. The
    parameter is the kind of its slabs."""
    tmp_path.chmod(0o700)
    layout = PageLayout.kv(2, 5, 1, 24, torch.bfloat16)
    kind = getattr(request, "param", "mapped")
    endpoint = f"ipc://{tmp_path}/peers"
    slab_bytes = 2 << 20 if kind == "gpu" else SLAB_BYTES
    with contextlib.ExitStack() as device:
        if kind == "emulated":
            device.enter_context(emulated_device(5))
        with memory_options(kind) as options:
            memory = LentMemory(
                endpoint,
                tmp_path,
                allocate_pool(SlabsConfig(NUM_SLABS, slab_bytes, **options), layout),
                # Slabs wait for a borrower, and a borrower that is to choose has no time to, in some tests.
                options=LentOptions(kind == "strict", PeerTiming(recall=RECALL_S, grace=RECALL_S, offer=1e6)),
            )
            yield memory
            memory.close()


@contextlib.contextmanager
def memory_options(kind: str) -> Iterator[dict[str, Any]]:
    """What memory of one engine is on: the CPU, a GPU, or the emulated one, with a driver that finds no fault."""
    if kind == "emulated":
        driver = FakeCudaDriver(SLAB_BYTES)
        yield {"device": torch.device("cuda", 0), "driver": driver}
        assert not driver.fake.broken
    else:
        yield {"device": torch.device("cuda", 0)} if kind == "gpu" else {}


def kind_of(lender: LentMemory) -> str:
    """Of what others map."""
    if isinstance(lender.slabs, CudaSlabRange):
        return "emulated" if isinstance(lender.slabs._driver, FakeCudaDriver) else "gpu"
    return "mapped"


class BorrowingEngine:
    def __init__(self, model_config: ModelConfig, lender: LentMemory, tmp_path: Path) -> None:
        self._checked = contextlib.ExitStack()
        options = self._checked.enter_context(memory_options(kind_of(lender)))
        slab_bytes, device = lender.slabs.slab_bytes, lender.pool.kv.device.type
        borrow = partial(
            BorrowedMemory, [f"ipc://{tmp_path}/peers"], "borrower", SlabsConfig(NUM_SLABS, slab_bytes, **options)
        )
        # Less than two prompts on the device, less than one on the host.
        self.engine = LocalEngine(
            model_config, num_device_pages=50, num_host_pages=20, page_size=PAGE, borrow=borrow, device=device
        )
        self.lender = lender

    def until(self, condition: Callable[[], object], what: str) -> None:
        def holds() -> object:
            self.lender.poll_mapped()
            self.engine._turn(0.01, [], [], lambda decision: None)
            return condition()

        wait_until(holds, what)
        self.engine.settle()
        self.engine.scheduler.check_invariants()

    def lend(self, *slabs: int) -> None:
        before = self.num_mapped
        self.lender.lend(slabs)
        self.until(lambda: self.num_mapped == before + len(slabs), "lent slabs are not mapped")

    @property
    def num_mapped(self) -> int:
        borrowed = self.engine.scheduler.cache.borrowed
        assert borrowed is not None
        return sum(state.name == "MAPPED" for state in borrowed.slabs.states)

    def ask(self, prompt: np.ndarray, where: str = "") -> tuple[list[int], int]:
        (answer,) = self.engine.generate([prompt], PARAMS, extra_key=where)
        self.engine.settle()
        return answer.tokens, answer.cached_tokens_details["peer"]

    def lender_state(self) -> dict[str, Any]:
        """The borrower's view of the lender."""
        assert self.engine.borrowed is not None
        (lender,) = self.engine.borrowed.state()["lenders"]
        return lender

    def close(self) -> None:
        self.engine.close()
        assert self.engine.borrowed is not None
        self.engine.borrowed.close()
        self._checked.close()


def slabs_of_lender(**counts: int) -> dict[str, int]:
    return {"home": 0, "offered": 0, "lent": 0, "asked_back": 0, "quarantined": 0} | counts


def prompts(seed: int) -> list[np.ndarray]:
    return [np.random.default_rng([seed, i]).integers(3, 97, 120).astype(np.int32) for i in range(3)]


def computed(model_config: ModelConfig, texts: list[np.ndarray], kind: str = "mapped") -> list[list[int]]:
    device = "cuda" if kind == "gpu" else "cpu"
    engine = LocalEngine(model_config, 200, page_size=PAGE, enable_radix_cache=False, device=device)
    answers = [answer.tokens for answer in engine.generate(texts, PARAMS)]
    engine.close()
    return answers


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ALL_KINDS = pytest.mark.parametrize(
    "lender", ["mapped", "strict", "emulated", pytest.param("gpu", marks=ON_GPU)], indirect=True
)


# Of the emulated device, what the next test does is enough, unless all tests run.
@pytest.mark.parametrize(
    "lender",
    [
        "mapped",
        "strict",
        pytest.param("emulated", marks=pytest.mark.slow),
        pytest.param("gpu", marks=ON_GPU),
    ],
    indirect=True,
)
def test_pages_that_the_device_evicts_are_loaded_from_the_lender(
    model_config: ModelConfig, lender: LentMemory, tmp_path: Path
) -> None:
    texts = prompts(1)[:2]
    wanted = computed(model_config, texts, kind_of(lender))
    borrower = BorrowingEngine(model_config, lender, tmp_path)
    assert [borrower.ask(text) for text in texts] == [(tokens, 0) for tokens in wanted], "nothing is lent yet"
    assert lender.state()["slabs"] == slabs_of_lender(home=6)
    borrower.lend(5, 4, 3, 2)
    lent = slabs_of_lender(home=2, lent=4)
    borrower.until(lambda: lender.state()["slabs"] == lent, "the lender does not hear that they are mapped")
    assert lender.state()["borrowers"] == 1
    assert borrower.lender_state() == {
        "endpoint": f"ipc://{tmp_path}/peers",
        "connected": True,
        "left_alone": False,
        "times_left_alone": 0,
        "slabs": {"held": 4, "asked_back": 0},
    }
    for text in texts:
        borrower.ask(text)
    again = [borrower.ask(text) for text in texts]
    assert [tokens for tokens, _ in again] == wanted
    assert all(found >= 10 * PAGE for _, found in again), again
    assert (lender.state()["copies"]["bytes"] > 0) == lender.coordinator._lender.strict
    borrower.close()


@pytest.mark.slow
@ALL_KINDS
def test_recalled_slabs_are_given_back_empty_and_answers_stay(
    model_config: ModelConfig, lender: LentMemory, tmp_path: Path
) -> None:
    texts = prompts(2)[:2]
    wanted = computed(model_config, texts, kind_of(lender))
    borrower = BorrowingEngine(model_config, lender, tmp_path)
    borrower.lend(5, 4)
    for text in texts * 2:
        borrower.ask(text)
    assert borrower.engine.scheduler.cache.tree.resident_pages(Tier.PEER) > 0
    # The lender's own memory, seen from the lender: what the borrower has written there.
    assert any(lender.slabs.slab(slab).any() for slab in (4, 5))
    lender.recall(2)

    def are_back() -> bool:
        # A strict slab comes home at its deadline, even if the borrower is late.
        return lender.poll_mapped().mapped == b"\1" * NUM_SLABS and borrower.num_mapped == 0

    borrower.until(are_back, "recalled slabs are not given back")
    assert borrower.engine.scheduler.cache.tree.resident_pages(Tier.PEER) == 0
    assert not any(lender.slabs.slab(slab).any() for slab in range(NUM_SLABS)), "it is not scrubbed"
    assert [borrower.ask(text)[0] for text in texts] == wanted
    borrower.lend(1)
    assert [borrower.ask(text)[0] for text in texts * 2] == wanted * 2
    borrower.close()


MOST_ON_MAPPED = pytest.mark.parametrize(
    "lender", ["mapped", pytest.param("strict", marks=pytest.mark.slow)], indirect=True
)
ALICE, BOB = namespace_of("alice", ""), namespace_of("bob", "")


def peer_tokens(borrower: BorrowingEngine, where: str) -> int:
    """That a tenant has in borrowed slabs."""
    cache = borrower.engine.scheduler.cache
    nodes = cache.tree.walk_below(cache.tree.roots[where]) if where in cache.tree.roots else []
    return sum(len(node.key) for node in nodes if node.frames[Tier.PEER] is not None)


@MOST_ON_MAPPED
def test_a_salt_is_erased_from_borrowed_slabs_and_no_other(
    model_config: ModelConfig, lender: LentMemory, tmp_path: Path
) -> None:
    texts = prompts(21)[:2]
    wanted = computed(model_config, texts)
    borrower = BorrowingEngine(model_config, lender, tmp_path)
    borrower.lend(5, 4, 3, 2)
    for text in texts:
        for where in (ALICE, BOB):
            borrower.ask(text, where)
    of_alice, of_bob = (peer_tokens(borrower, where) for where in (ALICE, BOB))
    assert of_alice >= 10 * PAGE and of_bob >= 10 * PAGE
    erase = EraseSaltReqInput(id="1", cache_salt="alice", aborts_requests=False)
    reply = borrower.engine.ask_admin(erase)
    assert reply.success and reply.result["erased_tokens"]["peer"] == of_alice
    assert "peer" in reply.result["tiers"]
    tree = borrower.engine.scheduler.cache.tree
    assert ALICE not in tree.roots and peer_tokens(borrower, BOB) == of_bob
    assert borrower.ask(texts[0], ALICE) == (wanted[0], 0)
    assert borrower.ask(texts[0], BOB)[1] > 0
    # While the lender takes its slabs back, and what is in them is on its way to the host.
    for text in texts:
        borrower.ask(text, ALICE)
    assert peer_tokens(borrower, ALICE) > 0
    lender.recall(4)
    while not borrower.engine.scheduler.cache.is_withdrawing and borrower.num_mapped == 4:
        lender.poll_mapped()
        borrower.engine._turn(0.01, [], [], lambda decision: None)
    assert borrower.engine.ask_admin(erase).success and ALICE not in tree.roots
    borrower.until(lambda: borrower.num_mapped == 0, "recalled slabs are not given back")
    assert ALICE not in tree.roots and tree.match(ALICE, texts[0]).total_len == 0
    assert [borrower.ask(text, ALICE)[0] for text in texts] == wanted
    borrower.close()


@MOST_ON_MAPPED
def test_a_quota_holds_in_borrowed_slabs(model_config: ModelConfig, lender: LentMemory, tmp_path: Path) -> None:
    texts = prompts(22)
    borrower = BorrowingEngine(model_config, lender, tmp_path)
    borrower.lend(5, 4, 3, 2, 1)
    for text in texts:
        borrower.ask(text, ALICE)
    borrower.ask(texts[0], BOB)
    borrower.ask(texts[1], BOB)
    of_bob, quota = peer_tokens(borrower, BOB), 12 * PAGE
    assert peer_tokens(borrower, ALICE) > quota and of_bob > quota
    limit = SetQuotaReqInput(id="1", cache_salt="alice", tokens={"peer": quota})
    assert borrower.engine.ask_admin(limit).success
    borrower.engine.settle()
    used = borrower.engine.ask_admin(msgspec.structs.replace(limit, tokens=None)).result["used_tokens"]
    assert 0 < used["peer"] == peer_tokens(borrower, ALICE) <= quota and peer_tokens(borrower, BOB) == of_bob
    for text in texts * 2:
        borrower.ask(text, ALICE)
    assert 0 < peer_tokens(borrower, ALICE) <= quota
    borrower.close()


def test_a_slab_of_another_size_is_given_back(
    model_config: ModelConfig, lender: LentMemory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    borrow = partial(BorrowedMemory, [f"ipc://{tmp_path}/peers"], "borrower", SlabsConfig(NUM_SLABS, 2 * SLAB_BYTES))
    engine = LocalEngine(model_config, 50, 20, page_size=PAGE, borrow=borrow)
    lender.lend([5])

    def is_said() -> bool:
        lender.poll_mapped()
        engine._turn(0.01, [], [], lambda decision: None)
        return "--peer-slab-size" in caplog.text

    wait_until(is_said, "the error")
    assert engine.generate([prompts(3)[0]], PARAMS)[0].cached_tokens_details["peer"] == 0
    engine.close()
    assert engine.borrowed is not None
    engine.borrowed.close()


@pytest.mark.parametrize("lender", ["strict"], indirect=True)
def test_answers_stay_when_strict_slabs_go_home_without_a_word_from_the_borrower(
    model_config: ModelConfig, lender: LentMemory, tmp_path: Path
) -> None:
    """The borrower's loads fail in the middle of its requests, and what it thought it had is gone."""
    texts = prompts(7)
    wanted = computed(model_config, texts)
    borrower = BorrowingEngine(model_config, lender, tmp_path)
    for _ in range(3):
        borrower.lend(5, 4, 3)
        for text in texts:
            borrower.ask(text)
        assert borrower.engine.scheduler.cache.tree.resident_pages(Tier.PEER) > 0
        lender.recall(3)
        wait_until(lambda: lender.poll_mapped().mapped == b"\1" * NUM_SLABS, "all slabs to be given back")
        for slab in (3, 4, 5):
            lender.slabs.slab(slab)[:] = 0x7F  # NaN to its reader
        assert [borrower.ask(text)[0] for text in texts] == wanted
        borrower.until(lambda: borrower.num_mapped == 0, "the borrower does not hear of it")
        assert all((lender.slabs.slab(slab) == 0x7F).all() for slab in (3, 4, 5)), "the borrower still wrote"
    assert lender.state()["slabs"] == slabs_of_lender(home=6)
    borrower.close()


def test_slabs_that_no_borrower_takes_wait_and_are_mapped_again_when_recalled(
    model_config: ModelConfig, lender: LentMemory, tmp_path: Path
) -> None:
    lender.lend([5, 4, 3])
    lender.slabs.slab(0)[:] = 7
    wait_until(lambda: [lender.poll_mapped(), not lender._scrubbed][1], "slabs to be overwritten")
    assert lender.poll_mapped().mapped == b"\1\1\1\0\0\0"
    assert lender.state()["slabs"] == slabs_of_lender(home=3, offered=3)
    lender.recall(1)
    wait_until(lambda: lender.poll_mapped().mapped == b"\1\1\1\1\1\1", "all that no borrower has")
    lender.lend([5, 4])
    borrower = BorrowingEngine(model_config, lender, tmp_path)
    borrower.until(lambda: borrower.num_mapped == 2, "they are not offered to who comes later")
    lender.recall(1)
    borrower.until(lambda: sum(lender.poll_mapped().mapped) == 5, "one is recalled")
    assert borrower.num_mapped == 1 and (lender.slabs.slab(0) == 7).all()
    borrower.close()


def test_what_a_borrower_keeps_too_long_shows_as_quarantined_until_it_comes_back(
    model_config: ModelConfig, lender: LentMemory, tmp_path: Path
) -> None:
    borrower = BorrowingEngine(model_config, lender, tmp_path)
    borrower.lend(5, 4)
    lender.recall(1)
    late = slabs_of_lender(home=4, lent=1, quarantined=1)
    wait_until(lambda: [lender.poll_mapped(), lender.state()["slabs"] == late][1], "the alarm")
    assert lender.poll_mapped().num_late == 1
    borrowed = borrower.engine.borrowed
    assert borrowed is not None
    asked = {"held": 1, "asked_back": 1}
    wait_until(lambda: [borrowed.poll_mapped(), borrower.lender_state()["slabs"] == asked][1], "the recall to come")
    borrower.until(lambda: lender.poll_mapped().mapped == b"\1\1\1\1\1\0", "the borrower does not give it back")
    assert lender.state()["slabs"] == slabs_of_lender(home=5, lent=1)
    assert borrower.lender_state()["slabs"] == {"held": 1, "asked_back": 0}
    borrower.close()


@ALL_KINDS
def test_a_slab_that_other_ranks_lack_is_given_back_when_it_is_recalled(lender: LentMemory, tmp_path: Path) -> None:
    """A slab is drained when one rank may not use it any more. On other ranks it may be recalled later, or may never
    have been in use at all."""
    checked = contextlib.ExitStack()
    options = checked.enter_context(memory_options(kind_of(lender)))
    slab_bytes, layout = lender.slabs.slab_bytes, PageLayout.kv(3, PAGE, 2, 8, torch.float32)
    memory = BorrowedMemory(
        [f"ipc://{tmp_path}/peers"],
        "rank",
        SlabsConfig(NUM_SLABS, slab_bytes, **options),
        layout,
        options=BorrowedOptions(timing=PeerTiming(offer=1000)),
    )

    def until(slabs_mapped: int, others_have: bytes, home: bytes) -> None:
        """Steps, as a rank's engine takes them."""

        def is_so() -> bool:
            mine, at_home = memory.poll_mapped().mapped, lender.poll_mapped().mapped
            memory.mark_in_use(bytes(a & b for a, b in zip(mine, others_have, strict=True)))
            # A strict slab comes home at its deadline, even if this process was late to give it back.
            is_late = not slabs_mapped and lender.coordinator._lender.strict and at_home == b"\1" * NUM_SLABS
            return sum(mine) == slabs_mapped and (at_home == home or is_late)

        wait_until(is_so, f"{slabs_mapped} slabs mapped here, {home!r} at the lender")

    # Each into the place of its number.
    for i, slab in enumerate((5, 4, 3)):
        lender.lend([slab])
        until(1 + i, b"\0\0\0\0\0\0", b"\1" * slab + b"\0" * (6 - slab))
    memory.mark_in_use(b"\0\0\0\0\1\1")
    lender.recall(1)
    # What other ranks lack goes first.
    until(2, b"\0\0\0\0\1\1", b"\1\1\1\1\0\0")
    memory.mark_in_use(b"\0\0\0\0\1\1")
    memory.give_back([5])
    memory.mark_in_use(b"\0\0\0\0\1\0")
    assert sum(memory.poll_mapped().mapped) == 2, "what another rank has lost stays here"
    lender.recall(2)
    until(0, b"\0\0\0\0\1\0", b"\1\1\1\1\0\1")
    memory.give_back([4])
    until(0, b"\0\0\0\0\0\0", b"\1\1\1\1\1\1")
    memory.close()
    checked.close()


def test_a_lender_that_is_gone_is_one_line_with_the_number_of_its_slabs(
    lender: LentMemory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint, slab_bytes = f"ipc://{tmp_path}/peers", lender.slabs.slab_bytes
    memory = BorrowedMemory(
        [endpoint],
        "borrower",
        SlabsConfig(NUM_SLABS, slab_bytes),
        PageLayout.kv(3, PAGE, 2, 8, torch.float32),
    )
    lender.lend([0, 2, 3])

    def all_came() -> bool:
        lender.poll_mapped()
        return sum(memory.poll_mapped().mapped) == 3

    wait_until(all_came, "lent slabs are not mapped")
    lost = [SlabLost(*lease) for lease in memory._leases if lease is not None]
    with mock.patch.object(memory.coordinator, "poll", return_value=lost):
        assert sum(memory.poll_mapped().mapped) == 0
    lines = [record.getMessage() for record in caplog.records if "is gone" in record.getMessage()]
    assert lines == [f"the worker at {endpoint} is gone, and 3 slabs of its memory with it"]
    memory.close()


def test_a_borrower_asks_for_what_it_lacks_and_gives_back_what_it_does_not_use(
    model_config: ModelConfig, lender: LentMemory, tmp_path: Path
) -> None:
    """On a clock of its own."""
    texts = prompts(9)
    wanted = computed(model_config, texts)
    now, lends = [100.0], [True]
    # No slab is to be named while the borrower chooses.
    lender._options = replace(lender._options, timing=PeerTiming(offer=1e6))
    borrow = partial(
        BorrowedMemory,
        [f"ipc://{tmp_path}/peers"],
        "borrower",
        SlabsConfig(NUM_SLABS, SLAB_BYTES),
        options=BorrowedOptions(num_wanted=0),
    )
    engine = LocalEngine(
        model_config,
        num_device_pages=50,
        num_host_pages=20,
        page_size=PAGE,
        borrow=borrow,
        borrowing=BorrowingConfig(demand_s=10.0, idle_s=60.0),
        clock=lambda: Seconds(now[0]),
    )

    def turn() -> bytes:
        """The lender lends what is asked for, as an engine of its own would."""
        report = lender.poll_mapped()
        lender.mark_in_use(report.mapped)
        home = [slab for slab in range(NUM_SLABS) if report.mapped[slab]]
        if report.num_borrowable and lends[0]:
            lender.lend(home[-report.num_borrowable :])
        engine._turn(0.01, [], [], lambda decision: None)
        return report.mapped

    def num_mapped() -> int:
        borrowed = engine.scheduler.cache.borrowed
        assert borrowed is not None
        return sum(state.name == "MAPPED" for state in borrowed.slabs.states)

    def ask(text: np.ndarray) -> tuple[list[int], int]:
        (answer,) = engine.generate([text], PARAMS)
        engine.settle()
        turn()
        return answer.tokens, answer.cached_tokens_details["peer"]

    assert engine.borrowed is not None
    offers = engine.borrowed.coordinator.offers
    wait_until(lambda: turn() and any(offers().values()), "the lender")
    assert turn() == b"\1" * NUM_SLABS and num_mapped() == 0, "an idle borrower has nothing"

    def come_from_peers() -> bool:
        answers = [ask(text) for text in texts]
        assert [tokens for tokens, _ in answers] == wanted
        return all(found for _, found in answers)

    for _ in range(2):
        wait_until(come_from_peers, "prompts to come from peers")
        assert 0 < num_mapped() <= NUM_SLABS
        # What the lender wants goes, as many slabs as it wants and no more.
        lends[0] = False
        wait_until(lambda: turn() and lender.state()["slabs"]["lent"] == num_mapped(), "slabs that are on their way")
        num_left = num_mapped() - 1
        # Those that are offered come first.
        lender.recall(lender.state()["slabs"]["offered"] + 1)
        wait_until(lambda n=num_left: sum(turn()) == NUM_SLABS - n and num_mapped() == n, "the coldest slab")
        engine.settle()
        now[0] += 61.0
        wait_until(lambda: turn() == b"\1" * NUM_SLABS and num_mapped() == 0, "slabs that are not used")
        engine.settle()
        engine.scheduler.check_invariants()
        lends[0] = True
    engine.close()
    engine.borrowed.close()
