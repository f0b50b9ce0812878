"""Of which blocks storage gets what layers with a window have of them, and what prompts find that part there."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_equality import SHAPE, Model, greedy
from transformers import Qwen2Config

from sglang.srt.managers.startup.storage import StorageOpener
from sglang.srt.managers.storage_setup import PrefetchConfig, StorageLimits, StorageSetup
from sglang.srt.managers.window_blocks import WindowBlocks
from sglang.srt.mem_cache.block_names import NOT_STORED, STORED, WITHOUT_WINDOWS
from sglang.srt.mem_cache.block_store import BlockStore, longest_seen
from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.node import Node
from sglang.srt.mem_cache.transfer import StorageAction, StorageOp, Tier
from sglang.srt.utils.time_units import LaunchSeq
from support.remote_fixture import PATIENCE_S, PROXY, close_to_the_end
from support.storage_rig import NAMES, StorageRig, tokens

BLOCK, REACH = 4, 4
# 16 blocks. Windows reach one of them; what a checkpoint's windows reach ends with blocks 4, 8, 12 and 16.
LONG = "".join(chr(ord("a") + i // 4) for i in range(64))
CHECKPOINTS = [3, 7, 11, 15]
# With those of its end, and one block more.
WITH_END = [3, 7, 11, 14, 15]


# -- which blocks -------------------------------------------------------------------------------------------------


def path_of(num_tokens: int) -> list[Node]:
    tree = HiRadixTree(1)
    tree.names.keys = NAMES
    frames = np.arange(num_tokens, dtype=np.int32)
    end = tree.insert_prefix("", None, np.arange(num_tokens, dtype=np.int32), frames, LaunchSeq(0), LaunchSeq(0)).node
    tree.names.name_path(end)
    return tree.path_of(end)


@pytest.mark.parametrize("num_seen", [1, 2, 3, 17, 64])
def test_a_prompt_that_parts_anywhere_loses_four_windows_or_a_fifth(num_seen: int):
    wanted = WindowBlocks(BLOCK, num_seen).of(path_of(2000 * BLOCK))
    assert len(wanted) == 2000
    for count in range(len(wanted)):
        found = longest_seen(wanted[:count].tolist(), num_seen)
        assert count - found < max(4 * num_seen, count / 5), count
    # A quarter of the blocks that are near, and the fewer the longer the path is.
    assert wanted[: 16 * num_seen].mean() <= 0.25
    if num_seen <= 17:
        assert wanted.mean() < 0.1 + 5 * num_seen / 2000 * np.log2(2000 / num_seen)


def test_the_checkpoints_of_a_path_are_those_of_its_front():
    blocks = WindowBlocks(BLOCK, 3)
    short, long = blocks.of(path_of(50 * BLOCK)), blocks.of(path_of(1000 * BLOCK + 3))
    assert len(long) == 1000 and (short == long[:50]).all() and (blocks.of(path_of(50 * BLOCK)) == short).all()
    assert blocks.of(path_of(BLOCK - 1)).tolist() == []


def test_before_an_end_is_one_block_more():
    assert WindowBlocks(BLOCK, 2).seen_from(301) == (72, 75) and WindowBlocks(BLOCK, 2).seen_from(7) == (0, 1)


# -- what is written ----------------------------------------------------------------------------------------------


def make_rig() -> StorageRig:
    rig = StorageRig(device=256, host=256, window_reach=REACH, windowed_host=256, blocks_per_op=64)
    assert rig.storage.setup is not None
    rig.storage.setup = replace(
        rig.storage.setup, has_windowed_store=True, limits=StorageLimits(64, 256, 256, fetch_window_ops=8)
    )
    rig.storage.stores.near.writer.open(rig.storage.setup)
    return rig


def answer(rig: StorageRig, end: Node) -> None:
    """The request whose path ends there is answered."""
    rig.tree.note_answer(end, end.end + 1)
    rig.storage.stores.near.writer.note_answer(end, leaves_at=0)


def written(rig: StorageRig) -> tuple[list[int], list[int]]:
    """Copies end, and what they lead to. Returns which blocks of the letters were written, and which with windows."""
    rig.collect()
    blocks, with_windows = [], []
    names = [key.tobytes() for key in rig.tree.names.keys.of_prompt("", tokens(LONG))]
    while rig.ops:
        ticket = min(rig.ops, key=lambda t: (t.link, t.seq))
        op = rig.ops[ticket]
        if isinstance(op, StorageOp) and op.action == StorageAction.SET:
            keys = [key.tobytes() for key in op.keys]
            is_whole = (op.windowed.reshape(len(keys), -1) >= 0).all(axis=1)
            here = [i for i, key in enumerate(keys) if key in names]
            blocks += [names.index(keys[i]) for i in here]
            with_windows += [names.index(keys[i]) for i in here if is_whole[i]]
            rig.finish(ticket, count=len(keys))
        else:
            rig.finish(ticket, count=1 if isinstance(op, StorageOp) else None)
    return sorted(blocks), sorted(with_windows)


def back_up(rig: StorageRig, end: Node) -> None:
    assert rig.controller.begin_backup(end) is not None


def test_windows_are_stored_of_checkpoints_and_of_an_answers_end():
    rig = make_rig()
    end = rig.insert(LONG)
    back_up(rig, end)
    assert written(rig) == (list(range(16)), CHECKPOINTS)
    assert end.stored.tolist() == [STORED if i in CHECKPOINTS else WITHOUT_WINDOWS for i in range(16)]
    # The request goes on, and what it adds is not an end, either.
    longer = rig.insert("xx", below=end)
    back_up(rig, longer)
    assert written(rig) == ([], [])
    answer(rig, longer)
    assert written(rig) == ([14], [14])
    answer(rig, longer)
    assert written(rig) == ([], []), "nothing is written twice"


def test_an_end_is_stored_as_soon_as_the_host_has_it():
    rig = make_rig()
    end = rig.insert(LONG)
    back_up(rig, end)
    answer(rig, end)
    assert written(rig) == (list(range(16)), WITH_END)


def test_where_paths_part_windows_are_added_that_the_host_still_has():
    rig = make_rig()
    end = rig.insert(LONG)
    back_up(rig, end)
    answer(rig, end)
    written(rig)
    # 13 whole blocks and a part of another are the same.
    other = rig.insert(LONG[:54] + "zzzzzz")
    back_up(rig, other)
    assert written(rig) == ([12], [12])
    assert [node.end for node in rig.tree.path_of(other)] == [54, 60]
    assert rig.tree.path_of(other)[0].stored.tolist()[11:] == [STORED, STORED]


def test_what_the_host_has_no_more_is_not_added():
    rig = make_rig()
    end = rig.insert(LONG)
    back_up(rig, end)
    answer(rig, end)
    written(rig)
    upper = rig.tree.split(end, 54)
    rig.controller.windowed_host._make_partial([upper])
    back_up(rig, rig.insert("zzzzzz", below=upper))
    assert written(rig) == ([], [])
    assert upper.stored.tolist()[12] == WITHOUT_WINDOWS


def test_what_storage_has_lost_is_stored_again_as_it_was():
    rig = make_rig()
    end = rig.insert(LONG)
    back_up(rig, end)
    answer(rig, end)
    written(rig)
    rig.tree.names.forget_stored(end)
    assert not end.stored.any() and NOT_STORED == 0
    rig.storage.stores.near.writer.store_path(end)
    assert written(rig) == (list(range(16)), WITH_END)


def test_one_store_gets_all_layers():
    rig = make_rig()
    setup = replace(rig.storage.setup, has_windowed_store=False)
    rig.storage.setup = setup
    rig.storage.stores.near.writer.open(setup)
    end = rig.insert(LONG)
    back_up(rig, end)
    assert written(rig) == (list(range(16)), list(range(16)))
    answer(rig, end)
    assert written(rig) == ([], []) and (end.stored == STORED).all()


@pytest.mark.parametrize(("count", "part_count"), [(0, 3), (2, 5), (5, 5)])
def test_where_a_prompt_leaves_what_storage_has_others_may(count: int, part_count: int):
    rig = make_rig()
    (probe,) = rig.begin("r", LONG)
    rig.finish(probe, count, part_count=part_count)
    assert rig.storage.leaves_at("r") == part_count * BLOCK and rig.storage.leaves_at("s") == 0
    rig.detach("r")
    rig.finish_all()
    end = rig.insert(LONG)
    rig.storage.stores.near.writer.note_answer(end, part_count * BLOCK)
    wanted = WindowBlocks(BLOCK, 1).of(rig.tree.path_of(end))
    assert wanted[part_count - 2 : part_count].all()


def test_an_end_stays_one_when_its_path_goes_on_before_it_is_written():
    rig = make_rig()
    end = rig.insert(LONG)
    answer(rig, end)
    longer = rig.insert("xxxxxxxx", below=end)
    rig.tree.split(end, 22)
    back_up(rig, longer)
    assert written(rig)[1] == WITH_END


def test_what_came_without_windows_and_was_computed_is_copied_anew():
    """A fetch for another request brings it while this one computes it."""
    rig = make_rig()
    rig.tree.order.cut_tokens = BLOCK
    end = rig.insert(LONG)
    back_up(rig, end)
    answer(rig, end)
    written(rig)
    upper = rig.tree.split(end, 54)
    host = rig.controller.windowed_host
    host._make_partial([upper])
    assert not host.drop_partial_ends(end), "from the end windows do not reach it"
    assert host.drop_partial_ends(end, 54) and not host.drop_partial_ends(end, 54)
    back_up(rig, end)
    assert written(rig) == ([], [])
    rig.storage.stores.near.writer.note_answer(end, leaves_at=54)
    assert written(rig)[1] == [12]


# -- what is found ------------------------------------------------------------------------------------------------


class Storage:
    """An engine whose first layer alone has no window, on storage with blocks of `BLOCK` tokens."""

    WINDOW, BLOCK = 24, 8

    def __init__(self, folder: Path, stores: str) -> None:
        self.model = Model(
            Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=self.WINDOW, max_window_layers=1),
            str(folder / "model"),
        )
        settings = {
            "file": {"path": str(folder / "store"), "limit_gb": 0.1},
            "remote": {"in_process": True, "limit_gb": 0.1, "proxy": PROXY, "hang_timeout_s": PATIENCE_S},
        }
        self.opened: list[Any] = []

        def open_store(pool: MHATokenToKVPoolHost) -> BlockStore:
            opener = StorageOpener(
                lambda: "model", "name", pool, 0, 1, directory=folder, window_reach=self.WINDOW - 1
            )
            config = json.dumps({"block_tokens": self.BLOCK, **settings[stores]})
            self.opened.append(opener.open(opener.setup(stores, config, "wait_complete", "write_through").setup))
            return self.opened[0]

        num_host_pages = 1200
        limits = StorageLimits.of_host(num_host_pages, self.BLOCK, 4)
        tier = Tier.DISK if stores == "file" else Tier.REMOTE
        prefetch = PrefetchConfig("wait_complete", 1)
        setup = StorageSetup("test", "", b"test", self.BLOCK, limits, prefetch, "write_through", (tier,))
        self.engine = self.model.engine(
            # So many that nodes are cut between blocks.
            num_device_pages=2100,
            chunked_prefill_size=64,
            window_tile=0,
            open_store=open_store,
            storage=replace(setup, has_windowed_store=True),
            write_policy="write_through",
            load_or_recompute=False,
            num_host_pages=num_host_pages,
            num_windowed_host_pages=num_host_pages // 2,
        )

    def ask(self, prompt: np.ndarray) -> int:
        """Returns the tokens that are found. The answer is that of transformers."""
        (found,) = self.engine.generate([prompt], greedy(3))
        self.model.check(prompt, found, 3)
        self.engine.settle()
        return sum(found.cached_tokens_details.values())

    def close(self) -> None:
        self.engine.close()
        close_to_the_end(self.opened[0])


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4))])
@pytest.mark.parametrize("memory", ["empty", "without windows"])
@pytest.mark.parametrize("stores", ["file", pytest.param("remote", marks=pytest.mark.slow)])
def test_a_prompt_that_parts_anywhere_is_found_in_storage(tmp_path: Path, stores: str, memory: str, seed: int):
    """Whenever a prompt comes, which shares any part of one before, memory has nothing, or nothing of layers with a
    window. Its answer is that of transformers, and it finds what the distance of checkpoints promises."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    storage = Storage(tmp_path, stores)
    engine, opened, block = storage.engine, storage.opened, storage.BLOCK

    def ask(prompt: np.ndarray) -> int:
        if memory == "empty":
            engine.forget()
            return storage.ask(prompt)
        controller = engine.scheduler.cache.controller
        controller.evict(Tier.DEVICE, controller.tables[Tier.DEVICE].num_pages)
        host = controller.windowed_host
        assert host.pool is not None
        if num_held := int((host.pool.frame_of >= 0).sum()):
            host.make_room(host.pool.table.num_free + num_held)
        engine.settle()
        assert not (host.pool.frame_of >= 0).any()
        return storage.ask(prompt)

    def new(num_tokens: int) -> np.ndarray:
        return np.array([rng.randrange(3, 97) for _ in range(num_tokens)], np.int32)

    document = new(400)
    assert ask(document) == 0
    full, of_windows = (store.stats() for store in (opened[0].full, opened[0].of_windows))
    assert stores == "remote" or (full["written_blocks"], of_windows["written_blocks"]) == (50, 14), (
        "see WindowBlocks"
    )
    assert ask(np.concatenate((document, new(9)))) == 400, "the end of a prompt"
    reach = -(-(storage.WINDOW - 1) // block) * block
    for _ in range(6):
        shared = rng.randrange(60, 400)
        first, second = (np.concatenate((document[:shared], new(20))) for _ in range(2))
        assert shared - ask(first) < max(4 * reach, shared / 5) + block, shared
        # Now it is known that prompts part there.
        assert shared - ask(second) < block, shared
    storage.close()
