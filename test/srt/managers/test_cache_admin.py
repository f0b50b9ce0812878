"""What an administrator changes of the cache, on a real engine whose answers stay right."""

from __future__ import annotations

import dataclasses
import threading

import msgspec
import numpy as np
import pytest
from managers.test_scheduler import config
from test_storage import BLOCK, PARAMS, SETUP, Engine, computed, prompt

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.io_struct import (
    EraseSaltReqInput,
    LabelPrefixReqInput,
    RetainPrefixReqInput,
    SetPoliciesReqInput,
    SetQuotaReqInput,
    ids_to_bytes,
)
from sglang.srt.managers.prefix_retention import MAX_PREFIXES, MAX_SECONDS, PrefixRetention
from sglang.srt.managers.schedule_batch import ControlReply, StepInputs
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.storage_setup import StorageLimits
from sglang.srt.managers.tenant_quotas import MAX_QUOTAS, TenantQuotas
from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.namespaces import namespace_of
from sglang.srt.mem_cache.transfer import D2H, EXEC, FETCH, H2D, PROBE, STORE, StorageAction, Tier
from sglang.srt.utils.time_units import LaunchClock, LaunchSeq, Seconds
from support.faults import Gate
from support.tiny_model import tiny_llama

ALICE, BOB = namespace_of("alice", ""), namespace_of("bob", "")


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return tiny_llama(tmp_path_factory.mktemp("model"), eos_token_id=2)


def ask(engine: Engine, text: np.ndarray, where: str = "") -> int:
    """Cached tokens of an answer that is right."""
    (answer,) = engine.generate([text], PARAMS, extra_key=where)
    assert answer.tokens == computed(engine.model_config, text)
    engine.assert_nothing_left()
    return sum(answer.cached_tokens_details.values())


def set_policies(engine: Engine, **policies: object) -> ControlReply:
    return engine.ask_admin(SetPoliciesReqInput(id="1", policies=policies))


def retain(engine: Engine, name: str, text: np.ndarray, seconds: float, where: str = "") -> ControlReply:
    request = RetainPrefixReqInput(id="1", name=name, seconds=seconds, extra_key=where, input_ids=ids_to_bytes(text))
    return engine.ask_admin(request)


def erase(engine: Engine, salt: str, aborts_requests: bool = False) -> ControlReply:
    return engine.ask_admin(EraseSaltReqInput(id="1", cache_salt=salt, aborts_requests=aborts_requests))


def set_quota(engine: Engine, salt: str, tokens: dict[str, int] | None) -> ControlReply:
    return engine.ask_admin(SetQuotaReqInput(id="1", cache_salt=salt, tokens=tokens))


# -- policies -------------------------------------------------------------------------------------------------------


def test_policies_are_changed_together_or_not_at_all(model_config: ModelConfig) -> None:
    engine = Engine(model_config, storage=None)
    before = engine.scheduler.state()["admin"]["policies"]
    refused = set_policies(engine, schedule_policy="lpm", radix_eviction_policy="newest")
    assert not refused.success and "lru, lfu, priority" in refused.message
    assert engine.scheduler.state()["admin"]["policies"] == before
    changes = {
        "schedule_policy": "lpm",
        "radix_eviction_policy": "lfu",
        "hicache_write_policy": "write_through",
        "hicache_load_ratio": "auto",
        "hicache_deferral_threshold": 0,
        "hicache_bubble_filling": False,
        "hicache_load_or_recompute": False,
    }
    assert set_policies(engine, **changes).success
    assert engine.scheduler.state()["admin"]["policies"] == before | changes
    assert "no storage" in set_policies(engine, hicache_storage_prefetch_policy="timeout").message
    for seed in range(8):
        ask(engine, prompt(seed, 100))
    engine.close()


def test_the_eviction_policy_counts_at_once(model_config: ModelConfig) -> None:
    """What many requests used stays with lfu, and goes first with lru."""
    hot, cold = prompt(1, 60), prompt(2, 60)
    for policy, kept in (("lfu", hot), ("lru", cold)):
        engine = Engine(model_config, storage=None, num_host_pages=0, eviction_policy="lru")
        for text in (hot, hot, hot, cold):
            ask(engine, text)
        assert set_policies(engine, radix_eviction_policy=policy).success
        engine.scheduler.cache.controller.evict(Tier.DEVICE, 16)
        engine.settle()
        found = {id(text): engine.scheduler.cache.tree.match("", text).total_len for text in (hot, cold)}
        assert max(found, key=found.__getitem__) == id(kept), policy
        engine.close()


def test_policies_of_storage(model_config: ModelConfig) -> None:
    engine = Engine(model_config)
    assert "attach it again" in set_policies(engine, hicache_write_policy="write_back").message
    assert set_policies(engine, hicache_storage_prefetch_policy="best_effort").success
    assert engine.scheduler.state()["storage"]["prefetch_policy"] == "best_effort"
    ask(engine, prompt(3, 100))
    engine.close()


# -- retention ------------------------------------------------------------------------------------------------------


def test_a_prefix_stays_until_its_time_is_over(model_config: ModelConfig) -> None:
    kept, other = prompt(10, 48), prompt(11, 48)
    engine = Engine(model_config, storage=None, num_device_pages=40, num_host_pages=0)
    for text in (kept, other):
        ask(engine, text)
    assert retain(engine, "system", kept, 1e5).success
    for seed in range(20, 30):
        ask(engine, prompt(seed, 40))
    tree = engine.scheduler.cache.tree
    assert tree.match("", kept).device_len == 48 and tree.match("", other).device_len == 0
    (shown,) = engine.scheduler.state()["admin"]["retention"]
    assert (shown["name"], shown["tokens"], shown["device_tokens"]) == ("system", 48, 48)
    assert 0 < shown["seconds_left"] <= 1e5
    # In place of the first: its time is over at once.
    assert retain(engine, "system", kept, 1e-9).success
    for seed in range(40, 50):
        ask(engine, prompt(seed, 40))
    assert tree.match("", kept).device_len == 0
    assert not engine.scheduler.state()["admin"]["retention"]
    engine.close()


def test_names_of_kept_prefixes_and_labels_are_found(model_config: ModelConfig) -> None:
    engine = Engine(model_config, storage=None)
    text = prompt(10, 48)
    admin = engine.scheduler.cache_admin
    label = LabelPrefixReqInput(id="1", name="bot", extra_key=ALICE, input_ids=ids_to_bytes(text))
    assert engine.ask_admin(label).success and engine.scheduler.state()["admin"]["labels"] == [
        {"name": "bot", "tokens": 48}
    ]
    assert admin.labels.find(ALICE, [text]) == (48, "bot") and admin.labels.find("", [text]) is None
    drop = LabelPrefixReqInput(id="1", name="bot")
    assert engine.ask_admin(drop).success and "no prefix has the label" in engine.ask_admin(drop).message
    assert admin.labels.find(ALICE, [text]) is None
    # What is kept has its name as long as it is kept.
    names = admin.retention.labels
    assert retain(engine, "system", text, 100).success and names.find("", [text]) == (48, "system")
    assert retain(engine, "system", text, 0).success and names.find("", [text]) is None
    assert retain(engine, "system", text, 1e-9).success
    ask(engine, prompt(11, 40))
    assert names.state() == []
    engine.close()


def test_what_is_kept_is_no_pin(model_config: ModelConfig) -> None:
    """A request that needs all the memory gets it."""
    engine = Engine(model_config, storage=None, num_device_pages=40, num_host_pages=0)
    kept = prompt(10, 48)
    ask(engine, kept)
    assert retain(engine, "system", kept, 100).success
    ask(engine, prompt(12, 140))
    assert engine.scheduler.cache.tree.match("", kept).device_len < 48
    engine.close()


def test_what_cannot_be_kept_is_refused_with_the_reason(model_config: ModelConfig) -> None:
    engine = Engine(model_config, storage=None)
    assert "shorter than a page" in retain(engine, "a", prompt(1, 3), 10).message
    for seconds in (-1, MAX_SECONDS + 1, float("nan"), float("inf")):
        assert "up to" in retain(engine, "a", prompt(1, 8), seconds).message
    assert "more than half of the largest tier" in retain(engine, "a", prompt(1, 200), 10).message
    assert retain(engine, "a", prompt(1, 160), 10).success, "80 pages of 4 tokens are on the host, half of them 160"
    assert retain(engine, "a", prompt(2, 160), 10).success, "in its own place"
    assert not retain(engine, "b", prompt(2, 160), 10).success
    assert retain(engine, "a", prompt(2, 160), 0).success
    assert "no prefix is kept" in retain(engine, "a", prompt(2, 160), 0).message
    for i in range(40):
        assert retain(engine, f"n{i}", prompt(i, 4), 10).success
    assert MAX_PREFIXES > 40
    engine.assert_nothing_left()
    engine.close()


# -- erasing --------------------------------------------------------------------------------------------------------


def test_a_salt_is_erased_on_every_tier_and_no_other(model_config: ModelConfig) -> None:
    text = prompt(20, 100)
    engine = Engine(model_config, num_device_pages=400, num_host_pages=400)
    for where in (ALICE, BOB, namespace_of("alice", "other key"), ""):
        ask(engine, text, where)
        ask(engine, prompt(21, 60), where)
    num_blocks = len(engine.store.blocks)
    reply = erase(engine, "alice")
    assert reply.success and reply.result["erased_tokens"]["host"] > 0
    assert reply.result["tiers"] == ["device", "host", "disk"]
    engine.assert_nothing_left()
    tree = engine.scheduler.cache.tree
    assert {BOB, ""} == set(tree.roots)
    tenant = tree.names.keys.tenant("alice")
    assert len(engine.store.blocks) == num_blocks // 2
    assert all(engine.store.tenants[key] != tenant for key in engine.store.blocks)
    engine.forget()
    assert ask(engine, text, ALICE) == 0 and ask(engine, text, BOB) == 96
    lost = engine.scheduler.state()["lost_hits"]
    assert lost["erased"] == 96 and not lost["forgotten"], "also behind the last whole block of the history"
    engine.close()


def test_all_that_was_erased_is_counted(model_config: ModelConfig) -> None:
    """Of prompts that share a beginning, too."""
    engine = Engine(model_config, storage=None, num_device_pages=200, num_host_pages=200)
    text = prompt(24, 100)
    for end in (prompt(1, 0), prompt(2, 40), prompt(3, 40)):
        ask(engine, np.concatenate([text[:60], end]), ALICE)
    used = set_quota(engine, "alice", None).result["used_tokens"]
    assert used["device"] > 120 and used["host"] > 60
    assert erase(engine, "alice").result["erased_tokens"] == used
    engine.close()


@pytest.mark.parametrize("failed", [(), (Tier.REMOTE,), (Tier.DISK, Tier.REMOTE)])
def test_the_answer_names_the_tiers_that_were_not_erased(
    model_config: ModelConfig, failed: tuple[Tier, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(model_config, storage=dataclasses.replace(SETUP, tiers=(Tier.DISK, Tier.REMOTE)))
    text = prompt(23, 100)
    ask(engine, text, ALICE)
    asked: list[Tier] = []

    def erase_from(tenant: bytes, tier: Tier) -> bool:
        asked.append(tier)
        return tier not in failed

    monkeypatch.setattr(engine.store, "erase", erase_from)
    reply = erase(engine, "alice")
    names = [tier.name.lower() for tier in failed]
    assert sorted(asked) == [Tier.DISK, Tier.REMOTE] and reply.success == (not failed)
    assert reply.result["tiers"] == [name for name in ("device", "host", "disk", "remote") if name not in names]
    assert (f"but {' and '.join(names)} did not do its part" in reply.message) == bool(failed), reply.message
    assert reply.result["erased_tokens"]["host"] > 0
    engine.assert_nothing_left()
    engine.close()


def test_what_was_never_cached_is_kept_no_longer(model_config: ModelConfig) -> None:
    engine = Engine(model_config, storage=None)
    assert retain(engine, "ghost", prompt(1, 60), 100, ALICE).success
    assert erase(engine, "alice").result["tiers"] == ["device", "host"], "no storage was asked"
    assert not engine.scheduler.state()["admin"]["retention"]
    engine.close()


def test_requests_of_the_salt_end_or_stand_in_the_way(model_config: ModelConfig) -> None:
    text = prompt(22, 100)
    engine = Engine(model_config)
    refusals, ends = [], []

    def meanwhile(decision: object) -> None:
        if engine.scheduler.queues.running and not refusals:
            refusals.append(erase(engine, "alice"))
            assert erase(engine, "bob").success, "another's requests are none of its business"
            ends.append(erase(engine, "alice", aborts_requests=True))

    (answer,) = engine.generate([text], PARAMS, extra_key=ALICE, after_step=meanwhile)
    assert "1 requests" in refusals[0].message
    assert ends[0].success and ends[0].result["requests"] == 1
    assert answer.finish_reason == "abort"
    engine.assert_nothing_left()
    assert not engine.store.blocks and not engine.scheduler.cache.tree.roots
    assert ask(engine, text, ALICE) == 0
    engine.close()


def test_writes_under_way_are_erased_too(model_config: ModelConfig) -> None:
    engine = Engine(model_config)
    text = prompt(23, 100)
    gate = Gate(engine.store, "set")
    engine.generate([text], PARAMS, extra_key=ALICE)
    engine.step_until(lambda: engine.scheduler.cache.ledger.oldest(STORE) is not None)
    assert gate.entered.wait(60)
    threading.Timer(0.2, gate.open.set).start()
    assert erase(engine, "alice").success, "it is behind the writes"
    engine.assert_nothing_left()
    assert engine.store.tenants and not engine.store.blocks
    engine.close()


def test_a_store_that_takes_no_more_can_be_erased_and_limited(model_config: ModelConfig) -> None:
    """As one that is full: what is erased makes room. One that hangs could not be told."""
    engine = Engine(model_config)
    ask(engine, prompt(25, 100), ALICE)
    takes = engine.store.set
    engine.store.set = lambda keys, frames, tenant=b"": 0  # type: ignore[method-assign]
    for seed in range(26, 32):
        ask(engine, prompt(seed, 100), BOB)
    writes = engine.scheduler.cache.storage.stores.near.writes
    assert writes.is_open and not writes.hangs
    assert set_quota(engine, "alice", {"device": 0}).success and set_quota(engine, "bob", {"disk": BLOCK}).success
    assert erase(engine, "alice").success and not engine.store.blocks
    engine.store.set = takes  # type: ignore[method-assign]
    writes._hung = STORE
    assert "try again when it works" in erase(engine, "bob").message
    assert set_quota(engine, "alice", {"device": 10}).success, "no storage has a part in it"
    assert not set_quota(engine, "bob", {"disk": 10}).success
    writes._hung = ""
    engine.close()


# -- quotas ---------------------------------------------------------------------------------------------------------


def test_a_tenant_over_its_quota_gives_up_its_own_pages(model_config: ModelConfig) -> None:
    engine = Engine(model_config, storage=None, num_device_pages=200, num_host_pages=200)
    first = prompt(30, 60)
    ask(engine, first, BOB)
    assert set_quota(engine, "alice", {"device": 160, "host": 80}).result["quotas"] == {"device": 160, "host": 80}
    for seed in range(31, 37):
        ask(engine, prompt(seed, 60), ALICE)
    engine.settle()
    used = set_quota(engine, "alice", None).result["used_tokens"]
    assert 100 <= used["device"] <= 160 and 40 <= used["host"] <= 80
    # The last one is there, the first is not; and the other tenant has lost nothing.
    tree = engine.scheduler.cache.tree
    assert tree.match(ALICE, prompt(36, 60)).total_len == 60
    assert tree.match(ALICE, prompt(31, 60)).total_len == 0
    assert tree.match(BOB, first).device_len == 60
    assert set_quota(engine, "alice", {}).success
    for seed in range(41, 47):
        ask(engine, prompt(seed, 60), ALICE)
    assert set_quota(engine, "alice", None).result["used_tokens"]["device"] > 300
    engine.close()


def test_a_quota_of_nothing_and_what_is_in_use(model_config: ModelConfig) -> None:
    engine = Engine(model_config, storage=None)
    assert set_quota(engine, "alice", {"device": 0, "host": 0}).success
    for seed in range(50, 54):
        ask(engine, prompt(seed, 60), ALICE)
    engine.settle()
    assert set_quota(engine, "alice", None).result["used_tokens"] == {"device": 0, "host": 0}
    engine.close()


@pytest.mark.parametrize("quota", [{"host": BLOCK}, {"host": 0}, {"device": BLOCK, "host": BLOCK}])
def test_a_prompt_over_the_quota_is_fetched_once(model_config: ModelConfig, quota: dict[str, int]) -> None:
    """What was fetched for the request stays until it starts, and the quota takes it back then."""
    limits = StorageLimits(blocks_per_op=1, max_fetch_pages=1000, max_store_pages=1000, fetch_window_ops=1)
    engine = Engine(model_config, storage=dataclasses.replace(SETUP, limits=limits))
    text = prompt(56, 100)
    ask(engine, text, ALICE)
    assert set_quota(engine, "alice", quota).success
    for times in range(1, 3):
        engine.forget()
        (answer,) = engine.generate([text], PARAMS, extra_key=ALICE)
        assert answer.cached_tokens_details == {"device": 0, "host": 0, "disk": 96}
        assert answer.tokens == computed(model_config, text)
        engine.assert_nothing_left()
        assert engine.counter("prefetched_tokens") == 96 * times
        used = set_quota(engine, "alice", None).result["used_tokens"]
        assert all(used[tier] <= tokens for tier, tokens in quota.items()), used
    engine.close()


def test_what_a_request_has_used_goes_once_it_has_ended(model_config: ModelConfig) -> None:
    """Though the tenant asks for nothing more."""
    engine = Engine(model_config, storage=None, num_host_pages=0)
    replies: list[ControlReply] = []

    def meanwhile(decision: object) -> None:
        if engine.scheduler.queues.running and not replies:
            replies.append(set_quota(engine, "alice", {"device": 0}))

    # No page of the answer becomes full.
    engine.generate(
        [prompt(55, 100)], msgspec.structs.replace(PARAMS, max_new_tokens=3), extra_key=ALICE, after_step=meanwhile
    )
    assert replies[0].result["used_tokens"]["device"] > 0
    for seed in range(56, 60):
        ask(engine, prompt(seed, 40))
    assert set_quota(engine, "alice", None).result["used_tokens"]["device"] == 0
    engine.close()


def test_quotas_of_storage_are_its_own(model_config: ModelConfig) -> None:
    engine = Engine(model_config)
    assert set_quota(engine, "alice", {"disk": 10 * BLOCK + 1}).success
    tenant = engine.scheduler.cache.tree.names.keys.tenant("alice")
    assert engine.store.limits == {(tenant, Tier.DISK): 10}
    assert set_quota(engine, "alice", {"host": 100}).success
    assert engine.store.limits == {(tenant, Tier.DISK): -1}
    # A store that knows no tenants has no part in quotas of memory.
    engine.store.limit = lambda tenant, num_blocks, tier: False  # type: ignore[method-assign]
    assert set_quota(engine, "alice", {"host": 50}).success
    refused = set_quota(engine, "alice", {"host": 70, "disk": 50})
    assert not refused.success and "disk did not take the quota" in refused.message
    assert refused.result["quotas"] == set_quota(engine, "alice", None).result["quotas"] == {"host": 70}
    assert not set_quota(engine, "alice", {"disk": 50}).success
    assert set_quota(engine, "alice", None).result["quotas"] == {}
    # What was set before holds on, as it does in the store.
    del engine.store.limit
    assert set_quota(engine, "alice", {"disk": 2 * BLOCK}).success
    engine.store.limit = lambda tenant, num_blocks, tier: False  # type: ignore[method-assign]
    refused = set_quota(engine, "alice", {"disk": BLOCK, "host": 30})
    assert refused.result["quotas"] == {"disk": 2 * BLOCK, "host": 30}
    del engine.store.limit
    # What is attached anew is told of them.
    assert set_quota(engine, "alice", {"disk": 2 * BLOCK}).success
    assert engine.administer(StorageAction.DETACH) == (True, "")
    assert engine.administer(StorageAction.ATTACH, SETUP) == (True, "")
    ask(engine, prompt(60, 40), ALICE)
    assert engine.store.limits == {(tenant, Tier.DISK): 2}
    assert "no tier 'remote'" in set_quota(engine, "alice", {"remote": 1}).message
    engine.close()
    both = Engine(model_config, storage=dataclasses.replace(SETUP, tiers=(Tier.DISK, Tier.REMOTE)))
    assert set_quota(both, "alice", {"disk": 2 * BLOCK, "remote": BLOCK}).success
    assert both.store.limits == {(tenant, Tier.DISK): 2, (tenant, Tier.REMOTE): 1}
    assert set_quota(both, "alice", {"disk": 2 * BLOCK}).success
    assert both.store.limits == {(tenant, Tier.DISK): 2, (tenant, Tier.REMOTE): -1}
    both.close()


def test_what_is_over_makes_room_on_an_idle_server() -> None:
    """Which has no launches that count."""
    kept = PrefixRetention(HiRadixTree(1, "lru"), LaunchClock(), 10**6)
    prefix = np.arange(4, dtype=np.int32)
    assert not kept.keep("long", "", prefix, 1e5, Seconds(0))
    for i in range(MAX_PREFIXES - 1):
        assert not kept.keep(f"n{i}", "", prefix, 1.0, Seconds(0))
    assert "the most" in kept.keep("new", "", prefix, 60.0, Seconds(0.5))
    assert not kept.keep("new", "", prefix, 60.0, Seconds(3600))
    assert [each["name"] for each in kept.state(Seconds(3600))] == ["long", "new"]


def test_a_prefix_that_is_replaced_takes_its_label_along() -> None:
    kept = PrefixRetention(HiRadixTree(16, "lru"), LaunchClock(), 10**6)
    old, new = np.arange(64, dtype=np.int32), np.arange(1000, 1016, dtype=np.int32)
    for prefix in (old, new):  # a page is too short for a label
        assert not kept.keep("x", "", prefix, 60.0, Seconds(0))
    assert kept.labels.find("", [old]) is None


@pytest.mark.parametrize("second_succeeds", [True, False])
def test_a_quota_that_failed_undoes_no_later_one(second_succeeds: bool) -> None:
    setup = dataclasses.replace(SETUP, block_tokens=4)
    scheduler = Scheduler(config(num_host_pages=64, storage=setup))
    done = dict.fromkeys((EXEC, H2D, D2H, STORE, FETCH, PROBE), 0)
    wanted = tuple(SetQuotaReqInput(id=str(n), cache_salt="t", tokens={"disk": n}) for n in (100, 200))
    scheduler.step(StepInputs(step=0, now=0.0, done=dict(done)))
    decision = scheduler.step(StepInputs(step=1, now=0.0, done=dict(done), admin=wanted))
    told = [op for op in decision.ops if op.ticket.link == STORE]
    assert [op.limit for op in told] == [100 // 4, 200 // 4], "in blocks"
    done[STORE] = 2
    counts = {STORE: (0, int(second_succeeds))}
    scheduler.step(StepInputs(step=2, now=0.0, done=dict(done), counts=counts))
    assert scheduler.cache.quotas.of(Tier.DISK) == ({"t": 200} if second_succeeds else {})


def test_a_tenant_at_its_quota_gives_up_nothing_and_one_without_is_not_looked_at() -> None:
    tree, clock, given_up = HiRadixTree(1, "lru"), LaunchClock(), []
    tree.insert_prefix(ALICE, None, prompt(1, 64), np.arange(64, dtype=np.int32), LaunchSeq(0), LaunchSeq(0))
    quotas = TenantQuotas(tree, (Tier.DEVICE,), clock, lambda _, num, __: given_up.append(num), frozenset)
    for tokens in (64, 63):
        assert not quotas.set("alice", {Tier.DEVICE: tokens})
        quotas.enforce(is_idle=True)
    assert given_up == [1 + 1], "with a 32nd of the quota"
    assert not quotas.set("alice", {})
    quotas.enforce(is_idle=True)
    quotas.check_invariants()


def test_a_quota_that_is_not_there_can_be_removed_from_a_full_table() -> None:
    quotas = TenantQuotas(HiRadixTree(1, "lru"), (Tier.DEVICE,), LaunchClock(), lambda *_: None, frozenset)
    for i in range(MAX_QUOTAS):
        assert not quotas.set(f"t{i}", {Tier.DEVICE: 1})
    assert "the most" in quotas.set("more", {Tier.DEVICE: 1}) and not quotas.set("more", {})
