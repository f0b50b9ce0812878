"""The canary computes hits again: damage on any tier is found, told, and read no more; sound tiers are left alone."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from test_storage import BLOCK, PAGE, PARAMS, SETUP, Clock, Engine, computed, prompt, stored

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers import canary
from sglang.srt.mem_cache.check_link import _MAX_FILES, _differs, tolerance
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.tiered_store import TieredStore
from sglang.srt.mem_cache.transfer import TIER_NAMES, StorageAction, Tier
from sglang.srt.model_executor.launch import Launch
from support.local_engine import LocalEngine
from support.memory_store import MemoryStore
from support.storage_rig import StorageRig, tokens
from support.tiny_model import tiny_llama

TEXT = prompt(1, 100)
# Of it whole pages, but for the last token.
CACHED = 96


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return tiny_llama(tmp_path_factory.mktemp("model"), eos_token_id=2)


class Checked(Engine):
    """Every hit is computed again; time passes when the test says so."""

    def __init__(self, model_config: ModelConfig, evidence: Path, **options: object) -> None:
        self.clock_of_test = Clock()
        given = {"canary_rate": 1.0, "evidence": evidence, "clock": self.clock_of_test, "num_device_pages": 160}
        if "open_store" in options:
            given |= {"num_host_pages": 80, "page_size": PAGE}
            LocalEngine.__init__(self, model_config, **given | options)  # type: ignore[arg-type]
        else:
            super().__init__(model_config, **given | options)  # type: ignore[arg-type]

    @property
    def canary(self) -> dict[str, object]:
        return self.scheduler.state()["canary"]

    def ask(self, text: np.ndarray = TEXT) -> list[int]:
        (answer,) = self.generate([text], PARAMS)
        self.settle()
        return answer.tokens

    def idle(self) -> None:
        """Long enough for all samples."""
        while self.canary["waiting"]:
            self.clock_of_test.now += self.scheduler.config.canary_idle_s
            num_before = self.canary["waiting"]
            self.step_until(lambda num=num_before: self.canary["waiting"] < num)
            self.settle()

    def frames(self, tier: Tier, text: np.ndarray = TEXT) -> np.ndarray:
        """Those of a text that a tier has."""
        path = self.scheduler.cache.tree.match("", text[:CACHED]).path
        return np.concatenate([node.frames[tier] for node in path if node.frames[tier] is not None])

    def leave_only(self, tier: Tier) -> None:
        """Of the memory tiers."""
        for each in self.scheduler.cache.tables:
            if each != tier:
                self.scheduler.cache.controller.evict(each, self.scheduler.cache.tables[each].num_pages)
                self.core.step(self.clock(), self.core.progress())
                self.settle()


def damage(pool: object, frames: np.ndarray) -> None:
    """The values of one page become another token's."""
    for component in pool.kv_pages.components:  # type: ignore[attr-defined]
        component[:, int(frames[3])] = component[:, int(frames[3])].flip(-1) + 1


def assert_found(engine: Checked, tier: str, evidence: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine.idle()
    storage = {TIER_NAMES[each] for each in engine.scheduler.storage.tiers}
    assert engine.canary["differences"] == dict.fromkeys(("device", "peer", "host", "disk", "remote"), 0) | {tier: 1}
    switches = engine.scheduler.state()["switches"]
    # Storage may have copies.
    assert {name for name, on in switches.items() if not on["reads"]} == {tier} | storage
    (message,) = [record.message for record in caplog.records if record.message.startswith("CANARY")]
    assert f"from {tier}. " in message and caplog.records[-1].levelno == logging.ERROR
    (file,) = evidence.iterdir()
    assert file.stat().st_mode & 0o077 == 0 and str(file) in message
    kept = np.load(file)
    assert np.array_equal(kept["tokens"], TEXT[: len(kept["tokens"])]) and str(kept["came_from"]) == tier
    assert not np.allclose(kept["cached_0"], kept["computed_0"], atol=1e-3)
    # All that this tier brought is gone, and no more comes.
    assert engine.ask() == computed(engine.model_config, TEXT)
    assert engine.generate([prompt(9, 50)], PARAMS)[0].tokens == computed(engine.model_config, prompt(9, 50))
    engine.idle()
    assert sum(engine.canary["differences"].values()) == 1  # type: ignore[attr-defined]
    engine.assert_nothing_left()
    engine.close()


def test_sound_hits_are_equal(model_config: ModelConfig, tmp_path: Path) -> None:
    engine = Checked(model_config, tmp_path, num_peer_pages=60)
    for _ in range(3):
        assert engine.ask() == computed(model_config, TEXT)
        engine.idle()
    assert engine.canary == {
        "rate": 1.0,
        "waiting": 0,
        "checks": 2,
        "equal_tokens": 2 * CACHED,
        "different_tokens": 0,
        "lost_samples": 0,
        "differences": dict.fromkeys(("device", "peer", "host", "disk", "remote"), 0),
    }
    counters = engine.scheduler.state()["counters"]
    # Those of the canary count nowhere.
    assert counters["requests"] == 3 and counters["prompt_tokens"] == 300 and not counters.get("aborted_reqs")
    assert sum(engine.scheduler.state()["lost_hits"].values()) + counters["hit_tokens_device"] == 300
    assert not list(tmp_path.iterdir())
    engine.assert_nothing_left()
    engine.close()


def test_damage_on_the_device(model_config: ModelConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = Checked(model_config, tmp_path)
    engine.ask()
    damage(engine.device_pool, engine.frames(Tier.DEVICE))
    engine.ask()
    assert_found(engine, "device", tmp_path, caplog)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.PEER])
def test_damage_on_the_host_and_on_peers(
    model_config: ModelConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture, tier: Tier
) -> None:
    peers = {"num_peer_pages": 80, "num_host_pages": 1} if tier == Tier.PEER else {}
    engine = Checked(model_config, tmp_path, write_policy="write_through", storage=None, **peers)
    engine.ask()
    engine.leave_only(tier)
    pool = engine.peer_pool if tier == Tier.PEER else engine.host_pool
    damage(pool, engine.frames(tier))
    engine.ask()
    assert_found(engine, tier.name.lower(), tmp_path, caplog)


def damage_block(store: MemoryStore) -> None:
    key = list(store.blocks)[2]
    store.blocks[key] = np.random.default_rng(0).normal(size=store.blocks[key].nbytes // 4).astype(np.float32)
    store.blocks[key] = store.blocks[key].view(np.uint8)


@pytest.mark.parametrize("tier", [Tier.DISK, Tier.REMOTE])
def test_damage_in_storage(
    model_config: ModelConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture, tier: Tier
) -> None:
    store = stored(model_config, TEXT)
    damage_block(store)
    engine = Checked(model_config, tmp_path, store=store, storage=dataclasses.replace(SETUP, tiers=(tier,)))
    engine.ask()
    assert_found(engine, tier.name.lower(), tmp_path, caplog)


@pytest.mark.parametrize("tier", [Tier.DISK, Tier.REMOTE])
def test_damage_in_one_of_two_stores(model_config: ModelConfig, tmp_path: Path, tier: Tier) -> None:
    full = stored(model_config, TEXT)
    damage_block(full)

    def open_store(pool: MHATokenToKVPoolHost) -> TieredStore:
        near, far = MemoryStore(pool, BLOCK), MemoryStore(pool, BLOCK)
        near.blocks = {} if tier == Tier.REMOTE else dict(full.blocks)
        far.blocks = dict(full.blocks)
        return TieredStore(near, far)

    setup = dataclasses.replace(SETUP, tiers=(Tier.DISK, Tier.REMOTE))
    engine = Checked(model_config, tmp_path, open_store=open_store, storage=setup)
    engine.ask()
    engine.idle()
    assert engine.canary["differences"][tier.name.lower()] == 1  # type: ignore[index]
    assert not engine.scheduler.state()["switches"][tier.name.lower()]["reads"]
    engine.close()


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.PEER])
def test_what_was_computed_from_damage_is_not_to_blame(model_config: ModelConfig, tmp_path: Path, tier: Tier) -> None:
    longer = np.concatenate([TEXT[:CACHED], prompt(4, 60)])
    peers = {"num_peer_pages": 80, "num_host_pages": 1} if tier == Tier.PEER else {}
    engine = Checked(model_config, tmp_path, write_policy="write_through", storage=None, **peers)
    engine.ask()
    engine.leave_only(tier)
    damage(engine.peer_pool if tier == Tier.PEER else engine.host_pool, engine.frames(tier))
    engine.ask(longer)
    engine.ask(longer)
    engine.idle()
    assert {name for name, n in engine.canary["differences"].items() if n} == {tier.name.lower()}  # type: ignore[attr-defined]
    assert engine.ask(longer) == computed(model_config, longer)
    engine.close()


def test_damage_behind_what_storage_brought_is_the_devices(model_config: ModelConfig, tmp_path: Path) -> None:
    longer = np.concatenate([TEXT[:CACHED], prompt(5, 60)])
    engine = Checked(model_config, tmp_path, store=stored(model_config, TEXT))
    engine.ask(longer)
    engine.idle()
    path = engine.scheduler.cache.tree.match("", longer[:-1]).path
    damage(engine.device_pool, path[-1].frames[Tier.DEVICE])
    engine.ask(longer)
    engine.idle()
    assert {name for name, n in engine.canary["differences"].items() if n} == {"device"}  # type: ignore[attr-defined]
    engine.close()


def test_copies_of_damage_in_storage_are_not_read(model_config: ModelConfig, tmp_path: Path) -> None:
    near_blocks: dict[bytes, np.ndarray] = {}
    full = stored(model_config, TEXT)
    damage_block(full)

    def open_store(pool: MHATokenToKVPoolHost) -> TieredStore:
        near, far = MemoryStore(pool, BLOCK), MemoryStore(pool, BLOCK)
        near.blocks, far.blocks = near_blocks, dict(full.blocks)
        return TieredStore(near, far)

    setup = dataclasses.replace(SETUP, tiers=(Tier.DISK, Tier.REMOTE))
    engine = Checked(model_config, tmp_path, open_store=open_store, storage=setup)
    engine.ask()
    engine.idle()
    assert near_blocks, "what comes from the remote store is kept on the disk"
    assert engine.ask() == computed(model_config, TEXT)
    engine.close()


def test_damage_in_storage_that_was_detached_is_not_read_when_it_is_attached_again(
    model_config: ModelConfig, tmp_path: Path
) -> None:
    store = stored(model_config, TEXT)
    damage_block(store)
    engine = Checked(model_config, tmp_path, store=store)
    engine.ask()
    assert engine.administer(StorageAction.DETACH) == (True, "")
    engine.idle()
    assert engine.canary["differences"]["disk"] == 1  # type: ignore[index]
    num_brought = engine.counter("prefetched_tokens")
    assert engine.administer(StorageAction.ATTACH, SETUP) == (True, "")
    assert engine.ask() == computed(engine.model_config, TEXT)
    assert engine.counter("prefetched_tokens") == num_brought > 0
    assert not engine.scheduler.state()["switches"]["disk"]["reads"]
    engine.close()


def test_a_check_computes_little_at_a_time(model_config: ModelConfig, tmp_path: Path) -> None:
    text = prompt(6, 400)
    engine = Checked(model_config, tmp_path, num_device_pages=800)
    engine.ask(text)
    engine.ask(text)
    sizes = []
    launch = engine.core.executor.launch

    def look(order: Launch) -> None:
        sizes.append(int(order.lens.sum()))
        launch(order)

    engine.core.executor.launch = look  # type: ignore[method-assign]
    engine.idle()
    assert engine.canary["equal_tokens"] == 396 and 0 < max(sizes) <= canary.CHUNK
    engine.close()


def test_other_requests_end_a_check_and_it_is_made_later(model_config: ModelConfig, tmp_path: Path) -> None:
    engine = Checked(model_config, tmp_path, chunked_prefill_size=16)
    engine.ask()
    engine.ask()
    engine.clock_of_test.now += engine.scheduler.config.canary_idle_s
    engine.step_until(lambda: engine.scheduler.canary.req is not None)
    assert engine.ask(prompt(2, 40)) == computed(model_config, prompt(2, 40))
    assert engine.canary["waiting"] == 1 and engine.canary["checks"] == 0
    engine.idle()
    assert engine.canary["checks"] == 1 and engine.canary["equal_tokens"] == CACHED
    engine.assert_nothing_left()
    engine.close()


def test_a_check_that_is_ended_again_and_again_is_given_up(model_config: ModelConfig, tmp_path: Path) -> None:
    engine = Checked(model_config, tmp_path, chunked_prefill_size=16)
    engine.ask()
    engine.ask()
    for i in range(canary.MAX_TRIES):
        engine.clock_of_test.now += engine.scheduler.config.canary_idle_s
        engine.step_until(lambda: engine.scheduler.canary.req is not None)
        engine.ask(prompt(2 + i, 40))
    assert engine.canary["waiting"] == 0 and engine.canary["lost_samples"] == 1
    engine.assert_nothing_left()
    engine.close()


def test_what_the_device_has_given_up_is_no_difference(model_config: ModelConfig, tmp_path: Path) -> None:
    engine = Checked(model_config, tmp_path)
    engine.ask()
    engine.ask()
    engine.forget()
    engine.idle()
    assert engine.canary["lost_samples"] == 1 and engine.canary["checks"] == 0
    engine.close()


def test_a_difference_that_is_found_beside_requests_starts_them_again(
    model_config: ModelConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Checked(model_config, tmp_path)
    engine.ask()
    damage(engine.device_pool, engine.frames(Tier.DEVICE))
    engine.ask()
    engine.clock_of_test.now += engine.scheduler.config.canary_idle_s
    link = engine.core.links["check"]
    results, poll = [], link.poll

    def held() -> list:
        results.extend(poll())
        return []

    link.poll = held  # type: ignore[method-assign]
    engine.step_until(lambda: bool(results))
    # They hit what is damaged, and have begun when the difference becomes known.
    num_steps = 0

    def let_go(decision: object) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 2:
            link.poll = lambda: [results.pop()] if results else poll()  # type: ignore[method-assign]

    answers = engine.generate([TEXT, prompt(3, 30)], PARAMS, after_step=let_go)
    assert answers[1].tokens == computed(model_config, prompt(3, 30))
    assert engine.canary["differences"]["device"] == 1  # type: ignore[index]
    assert engine.ask() == computed(model_config, TEXT)
    engine.assert_nothing_left()
    engine.close()


def test_a_flush_forgets_the_samples(model_config: ModelConfig, tmp_path: Path) -> None:
    engine = Checked(model_config, tmp_path)
    engine.ask()
    engine.ask()
    decision = engine.core.step(engine.clock(), engine.core.progress(), flush=["flush"])
    assert decision.replies[0].success and engine.canary["waiting"] == 0
    engine.close()


def test_a_share_of_hits_is_drawn(model_config: ModelConfig, tmp_path: Path) -> None:
    engine = Checked(model_config, tmp_path, canary_rate=0.3)
    engine.ask()
    for _ in range(20):
        engine.ask()
        engine.idle()
    assert 1 <= engine.canary["checks"] <= 13  # type: ignore[operator]
    engine.close()


def test_the_files_of_evidence_are_bounded(model_config: ModelConfig, tmp_path: Path) -> None:
    for i in range(_MAX_FILES):
        (tmp_path / f"difference-{i}-rank-0.npz").touch()
    engine = Checked(model_config, tmp_path)
    engine.ask()
    damage(engine.device_pool, engine.frames(Tier.DEVICE))
    engine.ask()
    engine.idle()
    assert engine.canary["differences"]["device"] == 1 and len(list(tmp_path.iterdir())) == _MAX_FILES  # type: ignore[index]
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_pages_of_eight_bits_may_round_to_neighbours(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    computed = torch.randn(3, 4, 16, 2, 64, generator=generator)
    noise = torch.randn(computed.shape, generator=generator)
    same, other = computed + 0.05 * noise, noise
    for page, differs in ((same, False), (other, True), (torch.zeros_like(same), True)):
        assert _differs(page.to(dtype), computed.to(dtype)).tolist() == [differs] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_tolerance_is_far_above_rounding(dtype: torch.dtype) -> None:
    assert 100 * torch.finfo(dtype).eps <= tolerance(dtype) <= 1.0


def test_nothing_is_sampled_where_a_request_may_have_less_than_a_page() -> None:
    """What follows the prompt's tokens in their array is no token."""
    config: Any = SimpleNamespace(
        canary_rate=1.0, page_size=16, num_usable_pages=40, num_windowed_pages=0, max_resident_len=8
    )
    sampling = canary.Canary(config, cast(Any, None))
    req: Any = SimpleNamespace(plan=[SimpleNamespace(start=32)], namespace="", tokens=np.arange(64, dtype=np.int32))
    sampling.note_hit(req)
    assert not sampling._samples
    config.max_resident_len = 40
    sampling.note_hit(req)
    (sample,) = sampling._samples
    assert sample.tokens.tolist() == list(range(16))


def test_what_is_on_its_way_to_the_device_is_not_compared() -> None:
    """A request that was aborted may have begun to load it."""
    rig, text = StorageRig(), tokens("aaaabbbb")
    low = rig.insert("bbbb", rig.insert("aaaa"))
    rig.controller.begin_backup(low)
    rig.collect()
    rig.finish_all()
    rig.controller.evict(Tier.DEVICE, 4)
    rig.controller.begin_load([low])
    compared: list[tuple[np.ndarray, ...]] = []
    ledger = SimpleNamespace(begin_check=lambda *check: compared.append(check))
    checking = canary.Canary(cast(Any, SimpleNamespace(page_size=1)), cast(Any, SimpleNamespace(tree=rig.tree)))
    checking._cache.ledger = cast(Any, ledger)
    checking.req = cast(Any, SimpleNamespace(hold=SimpleNamespace(frames=np.arange(20, 28))))
    checking._sample = canary._Sample("", text)
    checking.compare()
    ((cached, computed, checked, tier),) = compared
    assert cached.tolist() == [0, 1, 2, 3] and computed.tolist() == [20, 21, 22, 23]
    assert checked.tolist() == text[:4].tolist() and tier == Tier.DEVICE
