"""Storage is told what memory serves: fronts stay, and what is lost is stored again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.block_touches import MAX_BACK
from sglang.srt.managers.storage_setup import PrefetchConfig, StorageLimits, StorageSetup
from sglang.srt.mem_cache.block_keys import to_bytes
from sglang.srt.mem_cache.storage.file.file_store import FileStoreOptions, HiCacheFile
from sglang.srt.mem_cache.transfer import D2H, STORE, StorageAction, StorageOp, Ticket, Tier
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.time_units import LaunchSeq, Seconds
from support.local_engine import Generation, LocalEngine
from support.storage_rig import StorageRig as Rig
from support.storage_rig import tokens
from support.tiny_model import tiny_llama

PARAMS = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True, sampling_seed=0)
PAGE, BLOCK = 4, 16
LONG, OTHER = "aaaabbbbccccdddd", "ppppqqqqrrrrssss"


# -- without an engine ------------------------------------------------------------------------------------------


def stored_rig(*texts: str) -> Rig:
    rig = Rig(*texts)
    for text in texts:
        rig.controller.begin_backup(rig.insert(text))
        for ticket in rig.collect():
            if ticket.link == D2H:
                rig.finish(ticket)
    rig.finish_all()
    tell(rig)
    rig.finish_all()
    return rig


def tell(rig: Rig) -> list[bytes]:
    """The keys of the operation that tells storage; none if nothing is to be told."""
    rig.storage.stores.near.writer.begin_step(0)
    for ticket in rig.collect():
        op = rig.ops[ticket]
        assert ticket.link == STORE and isinstance(op, StorageOp)
        if op.action == StorageAction.TOUCH:
            return to_bytes(op.keys)
    return []


def use(rig: Rig, text: str) -> None:
    path = rig.tree.match("", tokens(text)).path
    rig.storage.stores.near.writer.touches.note_request(path[-1] if path else rig.tree.roots[""])


def names(rig: Rig, text: str) -> list[bytes]:
    assert rig.tree.names.keys is not None
    return to_bytes(rig.tree.names.keys.of_prompt("", tokens(text)))


def test_each_path_in_use_is_told_once_and_one_operation_at_a_time():
    rig = stored_rig(LONG, OTHER)
    assert tell(rig) == []
    for text in (LONG, OTHER, LONG):
        use(rig, text)
    assert tell(rig) == names(rig, OTHER) + names(rig, LONG), "what was used last is told last"
    use(rig, OTHER)
    assert tell(rig) == []
    rig.finish_all()
    assert tell(rig) == names(rig, OTHER)
    rig.finish_all()
    assert tell(rig) == []
    rig.assert_nothing_left()


def test_what_memory_had_before_is_stored_when_it_is_used():
    rig = Rig()
    setup = rig.storage.setup
    assert setup is not None
    rig.storage.close()
    rig.storage.detach_storage()
    rig.controller.begin_backup(rig.insert(LONG))
    rig.finish(*rig.collect())
    rig.storage.attach_storage(setup)
    assert rig.collect() == []
    use(rig, LONG)
    tell(rig)
    written = [op for op in rig.ops.values() if isinstance(op, StorageOp) and op.action == StorageAction.SET]
    assert [key for op in written for key in to_bytes(op.keys)] == names(rig, LONG)


def test_a_store_that_gets_nothing_is_told_nothing():
    rig = stored_rig(LONG)
    rig.storage.stores.near.writer.obey_switch(is_off=True)
    use(rig, LONG)
    assert tell(rig) == []
    rig.assert_nothing_left()


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_what_storage_has_lost_is_stored_again(lost: int):
    rig = stored_rig(LONG, OTHER)
    use(rig, LONG)
    use(rig, OTHER)
    told = tell(rig)
    begun = rig.finish(next(iter(rig.ops)), 1 + lost)
    written = [key for ticket in begun for key in to_bytes(rig.ops[ticket].keys)]
    assert written == told[lost : len(names(rig, LONG))], "from the first that is lost on"
    assert rig.storage.counters["storage_losses"] == 1
    rig.finish_all()
    # The other path's blocks were behind it: it is not known whether they are there.
    assert tell(rig) == names(rig, LONG) + names(rig, OTHER)
    rig.finish_all()
    assert rig.storage.counters["storage_losses"] == 1 and tell(rig) == []
    rig.assert_nothing_left()


def test_what_is_lost_of_a_later_path_is_stored_again():
    rig = stored_rig(LONG, OTHER)
    use(rig, LONG)
    use(rig, OTHER)
    told = tell(rig)
    begun = rig.finish(next(iter(rig.ops)), 1 + 4 + 1)
    assert written(rig, begun) == told[4 + 1 :] == names(rig, OTHER)[1:]
    rig.finish_all()
    rig.assert_nothing_left()


def lose(rig: Rig, num_left: int) -> list[bytes]:
    """Tell storage, which has so many of the leading blocks left. The keys that are stored again, which it ends."""
    if not tell(rig):
        return []
    begun = rig.finish(next(iter(rig.ops)), 1 + num_left)
    keys = written(rig, begun)
    for ticket in begun:
        rig.finish(ticket)
    return keys


def written(rig: Rig, tickets: Iterable[Ticket]) -> list[bytes]:
    ops = [rig.ops[ticket] for ticket in tickets]
    return [key for op in ops if op.action == StorageAction.SET for key in to_bytes(op.keys)]


def test_full_storage_gets_back_the_front_as_far_as_it_has_saved_up():
    rig = stored_rig(LONG)
    rig.storage.note_room((False, True))
    touches, keys = rig.storage.stores.near.writer.touches, names(rig, LONG)
    touches.num_back = MAX_BACK / 2 + 1
    use(rig, LONG)
    assert lose(rig, 2) == keys[2:3], "half is for what many share"
    use(rig, LONG)
    assert lose(rig, 1) == []
    # It is told of what is before the hole alone, whatever comes.
    for _ in range(3):
        use(rig, LONG)
        assert tell(rig) == keys[:1]
        rig.finish_all()
    touches.num_back = MAX_BACK / 2 + 2
    use(rig, LONG)
    rig.storage.stores.near.writer.begin_step(0)
    assert written(rig, rig.collect()) == keys[1:3]
    rig.finish_all()
    use(rig, LONG)
    assert tell(rig) == keys
    rig.finish_all()
    rig.assert_nothing_left()


def test_full_storage_gets_back_what_many_share_first():
    rig = stored_rig(LONG, OTHER)
    rig.storage.note_room((False, True))
    rig.storage.stores.near.writer.touches.num_back = MAX_BACK / 2
    for _ in range(8):
        use(rig, LONG)
    use(rig, OTHER)
    assert lose(rig, len(names(rig, LONG))) == [], "the loss is of what one request uses"
    use(rig, LONG)
    assert lose(rig, 0) == names(rig, LONG)
    rig.assert_nothing_left()


def test_full_storage_that_cannot_hold_what_many_share_is_not_written_without_end():
    rig = stored_rig(LONG)
    rig.storage.note_room((False, True))
    for _ in range(8):
        use(rig, LONG)
    rig.storage.stores.near.writer.touches.num_back = 5.0
    num_written = 0
    for _ in range(20):
        use(rig, LONG)
        # All of it is gone again.
        keys = lose(rig, 0)
        assert keys == names(rig, LONG)[: len(keys)], "the front first"
        num_written += len(keys)
    # Those five, then a quarter of what was written.
    assert 5 <= num_written <= 5 / 0.75


def test_storage_that_gives_up_what_it_just_got_is_not_written_without_end():
    """As a store that is smaller than one prompt, and that tells of no limit. No request is there."""
    rig = stored_rig(LONG)
    rig.storage.stores.near.writer.touches.num_back = MAX_BACK / 2 + 5
    use(rig, LONG)
    # What is stored again is told of by itself, and all of it is gone again.
    num_written = sum(len(lose(rig, 0)) for _ in range(50))
    assert 4 < num_written <= 4 + (5 + 1) / 0.75
    assert tell(rig) == []
    rig.assert_nothing_left()


def test_storage_that_is_emptied_now_and_then_gets_all_back_each_time():
    rig = stored_rig(LONG)
    rig.storage.stores.near.writer.touches.num_back = 0.0
    for _ in range(3):
        use(rig, LONG)
        assert lose(rig, 0) == names(rig, LONG)
        assert tell(rig) == names(rig, LONG)
        rig.finish_all()
    rig.assert_nothing_left()


def test_holes_are_filled_when_there_is_room_again():
    rig = stored_rig(LONG)
    rig.storage.note_room((False, True))
    rig.storage.stores.near.writer.touches.num_back = 0.0
    use(rig, LONG)
    assert lose(rig, 3) == []
    rig.storage.note_room((True, True))
    use(rig, LONG)
    rig.storage.stores.near.writer.begin_step(0)
    assert written(rig, rig.collect()) == names(rig, LONG)[3:]
    rig.finish_all()
    rig.assert_nothing_left()


def test_an_operation_that_fails_tells_nothing():
    rig = stored_rig(LONG)
    use(rig, LONG)
    tell(rig)
    assert rig.finish(next(iter(rig.ops)), 0) == []
    assert rig.storage.counters["storage_losses"] == 0
    rig.assert_nothing_left()


def test_what_leaves_the_tree_meanwhile_is_no_loss():
    rig = stored_rig(LONG)
    use(rig, LONG)
    tell(rig)
    for tier in (Tier.DEVICE, Tier.HOST):
        rig.controller.evict(tier, 16)
    assert rig.finish(next(iter(rig.ops)), 1) == []
    rig.assert_nothing_left()


@pytest.mark.parametrize("merged", ["before it is told", "while it is told"])
def test_what_was_merged_meanwhile_still_counts(merged: str):
    """As with each prompt that comes a second time: its last token is cut off, and joined again."""
    rig = stored_rig(LONG)
    (node,) = rig.tree.match("", tokens(LONG)).path
    upper = rig.tree.split(node, 8)
    rig.storage.stores.near.writer.touches.note_request(upper)
    told = names(rig, LONG[:8]) if merged == "while it is told" else names(rig, LONG)
    if merged == "while it is told":
        assert tell(rig) == told
    rig.tree.compact(node, LaunchSeq(99))
    assert upper.parent is None
    if merged == "before it is told":
        assert tell(rig) == told
    begun = rig.finish(next(iter(rig.ops)), 1 + 1)
    assert [key for ticket in begun for key in to_bytes(rig.ops[ticket].keys)] == told[1:]
    rig.finish_all()
    rig.assert_nothing_left()


def test_a_full_exclusive_disk_is_told_of_what_many_use_alone():
    rig = stored_rig(LONG, OTHER)
    rig.storage.stores.near.writer.setup = replace(rig.storage.setup, write_policy="auto")
    rig.storage.note_room((False, True))
    for i in range(63):
        use(rig, LONG if i % 8 == 0 else OTHER if i % 30 == 1 else "")
    assert tell(rig) == names(rig, LONG)
    rig.finish_all()
    assert tell(rig) == []


def test_what_many_use_is_known_however_it_is_cut():
    """As where one prompt comes again and again: its last token is cut off, and joined again."""
    rig = stored_rig(LONG)
    rig.storage.stores.near.writer.setup = replace(rig.storage.setup, write_policy="auto")
    rig.storage.note_room((False, True))
    for i in range(8):
        assert tell(rig) == [], i
        (node,) = rig.tree.match("", tokens(LONG)).path
        rig.storage.stores.near.writer.touches.note_request(rig.tree.split(node, 8))
        rig.tree.compact(node, LaunchSeq(99))
    assert tell(rig) == names(rig, LONG[:8])
    rig.finish_all()


def test_nothing_is_told_to_what_hangs_or_is_detached():
    rig = stored_rig(LONG)
    use(rig, LONG)
    rig.storage.stores.near.writes.reason, rig.storage.stores.near.writes._trial_at = "hangs", 1.0
    assert tell(rig) == []
    # Where a trial is due, what is lost has to become known, or nothing would ever be written again.
    rig.storage.set_now(Seconds(1.0))
    assert tell(rig)
    rig.storage.stores.near.writes.reset()
    use(rig, LONG)
    rig.storage.stores.near.writer.close()
    assert tell(rig) == []


# -- with a disk ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return tiny_llama(tmp_path_factory.mktemp("model"), eos_token_id=2)


def prompt(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 97, n).astype(np.int32)


class Engine(LocalEngine):
    """With a disk of some 110 blocks, and memory for 90."""

    def __init__(self, model_config: ModelConfig, root: Path, write_policy: str, daily_blocks: int = 0) -> None:
        limits = StorageLimits.of_host(240, BLOCK // PAGE, 4)
        prefetch = PrefetchConfig("wait_complete", 1)
        setup = StorageSetup("file", "", b"test", BLOCK, limits, prefetch, write_policy)

        def open_store(pool) -> HiCacheFile:
            block_bytes = BLOCK // PAGE * pool.page_bytes
            options = FileStoreOptions(
                120 * block_bytes + 16 * 4096,
                is_exclusive=setup.is_exclusive(0),
                daily_write_bytes=daily_blocks * block_bytes,
            )
            return HiCacheFile(root, "model", pool, BLOCK, options)

        super().__init__(
            model_config,
            120,
            240,
            page_size=PAGE,
            open_store=open_store,
            storage=setup,
            write_policy=write_policy,
            chunked_prefill_size=32,
        )

    def on_disk(self, text: np.ndarray) -> int:
        """Leading blocks."""
        keys = to_bytes(self.scheduler.cache.tree.names.keys.of_prompt("", text))
        return next((i for i, key in enumerate(keys) if key not in self.store._index), len(keys))

    def ask(self, text: np.ndarray) -> Generation:
        """What is written does not lag behind, however slow the machine."""
        (answer,) = self.generate([text], PARAMS)
        self.settle()
        return answer

    def stop(self) -> None:
        self.settle()
        self.scheduler.check_invariants()
        self.store.check_invariants()
        self.store.close()
        self.close()


def talk(engine: Engine) -> np.ndarray:
    """Eight turns of a conversation, with others in between. Returns the prompt of the ninth."""
    text = prompt(1, 64)
    for turn in range(8):
        answer = engine.ask(text)
        text = np.concatenate([text, np.array(answer.tokens, np.int32), prompt(100 + turn, 28)])
        for i in range(3):
            engine.ask(prompt(1000 + turn * 10 + i, 96))
    return text


def test_the_front_of_a_conversation_stays_on_disk(model_config: ModelConfig, tmp_path: Path):
    """Memory has served it from its second turn on, and the disk cannot take all that was computed."""
    engine = Engine(model_config, tmp_path, "write_through")
    text = talk(engine)
    engine.stop()
    assert engine.store.stats()["evicted_blocks"] > 0
    engine = Engine(model_config, tmp_path, "write_through")
    kept = engine.on_disk(text)
    answer = engine.ask(text)
    assert answer.cached_tokens_details == {"device": 0, "host": 0, "disk": kept * BLOCK} and kept >= 10
    engine.stop()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("write_policy", ["write_through", "auto"])
def test_what_all_requests_share_is_there_after_a_restart(
    model_config: ModelConfig, tmp_path: Path, write_policy: str
):
    engine = Engine(model_config, tmp_path, write_policy)
    shared = prompt(1, 128)
    for i in range(60):
        engine.ask(np.concatenate([shared, prompt(1000 + i, 64)]))
    engine.stop()
    engine = Engine(model_config, tmp_path, write_policy)
    answer = engine.ask(np.concatenate([shared, prompt(3, 64)]))
    assert answer.cached_tokens_details == {"device": 0, "host": 0, "disk": 128}
    engine.stop()


def test_a_disk_whose_daily_limit_is_used_up_is_read_and_left_alone(model_config: ModelConfig, tmp_path: Path):
    engine = Engine(model_config, tmp_path, "write_through", daily_blocks=40)
    first = prompt(1, 96)
    for i in range(1, 41):
        engine.ask(prompt(i, 96))
    stats = engine.store.stats()
    assert stats["last_day_written_bytes"] >= stats["daily_limit_bytes"] and stats["write_errors"] == 0
    # Three operations fail, then one block is tried per second.
    assert 0 < stats["refused_blocks"] < 40 and engine.scheduler.storage.stores.near.writes.is_open
    assert engine.ask(first).cached_tokens_details == {"device": 0, "host": 0, "disk": 80}
    engine.stop()
