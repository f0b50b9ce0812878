"""What is saved where layers with a window have no more than they show: by loads, on the device, and on the host.

    python benchmark/bench_windows.py [--rounds N] [--parts full-disk]

In process, a small model with random weights of which 5 of 6 layers have a window, real copies. In each round the
engines take turns, so that the ratios hold on a noisy machine.

Loads: bytes, seconds, first tokens. The prefix is on the host and not on the device. A branch asks behind half of a
prefix that has just been loaded without what its windows do not show.

Pools: the device has the same memory, as one pool, or with a pool of its own for layers with a window. Documents are
asked in turn, which the one has room for and the other has not; then requests come together, longer than a window.

Host pools: the host has the same memory, as one pool, as two, or as two with a border that moves, and the device has
room for less than two documents. Conversations go on in a random order, some more often; then documents are asked in
turn.

Stores: a prefix comes from the file store, which is in the system's cache, or from a remote store behind a proxy of
2 Gbit/s: one store, or one for each kind of layers.

A disk that is full: documents are asked in a random order, some of them behind a random part, with memory emptied
before each. The disk has room for half of them, in one store; in two, all blocks of which have windows, each with its
part of the limit; or in two with one limit, and windows where prompts are likely to leave (`WindowBlocks`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
from common import print_table, write_json

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.base_attn_backend import WINDOW_TILE
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.managers.startup.device import page_layout
from sglang.srt.managers.startup.sizes import with_windowed_host_pool, with_windowed_pool, with_windows
from sglang.srt.managers.storage_setup import PrefetchConfig, StorageLimits, StorageSetup
from sglang.srt.mem_cache.block_store import BlockStore, OverlappingStore
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.file.file_store import FileStoreOptions, HiCacheFile
from sglang.srt.mem_cache.storage.host_pages import HostPages
from sglang.srt.mem_cache.storage.registry import StoreParams, storage_backend
from sglang.srt.mem_cache.storage.windowed_store import OverlappingWindowedStore, WindowedStore
from sglang.srt.mem_cache.transfer import FETCH, H2D, Tier
from sglang.srt.sampling.sampling_params import SamplingParams
from support.local_engine import LocalEngine
from support.proxy_rig import ProxyRig

PREFIXES = (2048, 8192)
NEW_TOKENS, WINDOW, NUM_LAYERS, LAYERS_PER_FULL = 64, 512, 12, 6
# Tokens of the device where it has one pool, of a document, of a prompt of those that come together; how many.
MEMORY, DOCUMENT, LONG, NUM_DOCUMENTS, NUM_TOGETHER = 8192, 3000, 2000, 6, 8
# Of the device where pools of the host are compared.
DEVICE_MEMORY = 2560
HOSTS = "one", "two", "moving"
# Tokens that a conversation begins with and about ends at, and of a turn; how many there are, and turns per round.
CHAT, TURN, NUM_CHATS, CHAT_TURNS = (300, 800), 50, 24, 60
# Before documents are measured each is asked so many times.
DOCUMENT_ROUNDS = 4
# Tokens of a block of storage; what a proxy reads of a remote one.
BLOCK, REMOTE_GBPS = 64, 2.0
# Where a disk is full: the window, documents, how many of them one store has room for, one in how many prompts leaves
# its document before the end, prompts per round, and segments of the limit.
DISKS = "one", "all", "ends"
SHORT_WINDOW, NUM_ON_DISK, ROOM_FOR, ONE_LEAVES, DISK_ASKED, SEGMENTS = 64, 8, 4, 4, 10, 64
RATES = {"memory": None, "0.5 GB/s": 0.5e9}
RATIO = 0.25
CHUNKS = {"chunked_prefill_size": 512}
ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True, sampling_seed=0)
SOME_TOKENS = SamplingParams(max_new_tokens=64, temperature=0.0, ignore_eos=True, sampling_seed=0)
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 16384,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "layer_types": [
        "sliding_attention" if (layer + 1) % LAYERS_PER_FULL else "full_attention" for layer in range(NUM_LAYERS)
    ],
    "torch_dtype": "float32",
    "eos_token_id": 0,
}


class Rig:
    """window_tile: see `LocalEngine`; None: loads are whole."""

    def __init__(self, model: ModelConfig, window_tile: int | None, bytes_per_s: float | None) -> None:
        self.engine = LocalEngine(
            model,
            num_device_pages=2 * PREFIXES[-1],
            num_host_pages=4 * PREFIXES[-1],
            debug=False,
            load_format="dummy",
            load_bytes_per_s=bytes_per_s,
            window_tile=window_tile,
            write_policy="write_through",
        )

    def ask(self, prompt: np.ndarray) -> dict[str, float]:
        """Ask once. Returns seconds to the first token, and of its loads bytes and seconds."""
        cache = self.engine.scheduler.cache
        num_before = cache.num_done(H2D)
        loads: list[tuple[float, float]] = []
        costs = self.engine.scheduler.planner.expected.costs
        add = costs.add_copy

        def add_copy(num_bytes: int, seconds: float, link: str) -> bool:
            if link == H2D:
                loads.append((num_bytes, seconds))
            return add(num_bytes, seconds, link)

        costs.add_copy = add_copy  # type: ignore[method-assign]
        (answer,) = self.engine.generate([prompt], ONE_TOKEN)
        self.engine.settle()
        costs.add_copy = add  # type: ignore[method-assign]
        assert cache.num_done(H2D) - num_before == len(loads) > 0, "it was to load"
        num_bytes, seconds = (sum(each) for each in zip(*loads))
        return {"bytes": num_bytes, "load s": seconds, "first token s": answer.first_token_s}

    def evict(self) -> None:
        cache = self.engine.scheduler.cache
        cache.controller.evict(Tier.DEVICE, cache.device.num_pages)


def question(document: np.ndarray, seed: int) -> np.ndarray:
    return np.concatenate((document, np.random.default_rng(seed).integers(1, 512, NEW_TOKENS, dtype=np.int32)))


def measure(model: ModelConfig, rate: str, rounds: int) -> list[dict[str, object]]:
    rigs = {"whole": Rig(model, None, RATES[rate]), "seen": Rig(model, WINDOW_TILE, RATES[rate])}
    samples: dict[tuple[int, str, str], list[dict[str, float]]] = {}
    for place, length in enumerate(PREFIXES):
        document = np.random.default_rng(place).integers(1, 512, length, dtype=np.int32)
        for rig in rigs.values():
            rig.engine.generate([question(document, 0)], ONE_TOKEN)
            rig.engine.settle()
        for number in range(1, rounds + 1):
            for name, rig in rigs.items():
                rig.evict()
                samples.setdefault((length, "end", name), []).append(rig.ask(question(document, 2 * number)))
                if name == "whole":
                    rig.evict()
                branch = question(document[: length // 2], 2 * number + 1)
                samples.setdefault((length, "middle", name), []).append(rig.ask(branch))
    rows: list[dict[str, object]] = []
    for length in PREFIXES:
        for place in ("end", "middle"):
            whole, seen = (samples[length, place, name] for name in rigs)
            row: dict[str, object] = {"link": rate, "prefix": length, "asked behind its": place}
            for what in whole[0]:
                ratios = [a[what] / b[what] for a, b in zip(seen, whole)]
                row[f"{what}, whole"] = float(np.median([each[what] for each in whole]))
                row[f"{what}, ratio"] = float(np.median(ratios))
            rows.append({**row, "rounds": rounds})
    return rows


class PoolRig:
    """The same memory as one pool, or as two."""

    def __init__(self, model: ModelConfig, ratio: float | None, num_host_pages: int) -> None:
        sizes = {"num_device_pages": MEMORY, "num_windowed_pages": 0}
        if ratio is not None:
            config = SchedulerConfig(1, MEMORY, 0, 1, model.context_length, num_layers=NUM_LAYERS, **CHUNKS)
            config = with_windowed_pool(config, model.windows, ratio, None)
            sizes = {name: getattr(config, name) for name in sizes}
        self.engine = LocalEngine(
            model,
            num_host_pages=num_host_pages,
            debug=False,
            load_format="dummy",
            write_policy="write_through",
            **sizes,
            **CHUNKS,
        )

    def ask_in_turn(self, round_number: int) -> dict[str, float]:
        """A question behind each document. Returns tokens found per token of the prompts, and the median first
        token."""
        answers = []
        for place in range(NUM_DOCUMENTS):
            document = np.random.default_rng(place).integers(1, 512, DOCUMENT, dtype=np.int32)
            prompt = question(document, 1000 * round_number + place)
            answers += self.engine.generate([prompt], ONE_TOKEN)
            self.engine.settle()
        found = sum(sum(each.cached_tokens_details.values()) for each in answers)
        return {
            "found": found / (NUM_DOCUMENTS * (DOCUMENT + NEW_TOKENS)),
            "first token s": float(np.median([each.first_token_s for each in answers])),
        }

    def ask_together(self, round_number: int) -> dict[str, float]:
        """New prompts at once. Returns how many run at most, and the seconds of all."""
        rng = np.random.default_rng(10_000 + round_number)
        prompts = [rng.integers(1, 512, LONG, dtype=np.int32) for _ in range(NUM_TOGETHER)]
        queues, most = self.engine.scheduler.queues, 0

        def watch(decision: object) -> None:
            nonlocal most
            most = max(most, len(queues.running))

        started = time.perf_counter()
        self.engine.generate(prompts, SOME_TOKENS, after_step=watch)
        seconds = time.perf_counter() - started
        self.engine.settle()
        return {"most at a time": most, "all s": seconds}


def measure_pools(model: ModelConfig, rounds: int, num_host_pages: int) -> dict[str, object]:
    rigs = {"one": PoolRig(model, None, num_host_pages), "two": PoolRig(model, RATIO, num_host_pages)}
    for rig in rigs.values():
        rig.ask_in_turn(0)
    in_turn = [{name: rig.ask_in_turn(number) for name, rig in rigs.items()} for number in range(1, rounds + 1)]
    together = [{name: rig.ask_together(number) for name, rig in rigs.items()} for number in range(1, rounds + 1)]
    samples = {name: [a[name] | b[name] for a, b in zip(in_turn, together)] for name in rigs}
    row: dict[str, object] = {"host": f"{num_host_pages} tokens" if num_host_pages else "none"}
    for name, rig in rigs.items():
        row[f"device tokens, {name}"] = rig.engine.scheduler.config.num_device_pages
    for what in samples["one"][0]:
        for name in rigs:
            row[f"{what}, {name}"] = float(np.median([each[what] for each in samples[name]]))
        if what.endswith(" s"):
            row[f"{what}, ratio"] = float(np.median([b[what] / a[what] for a, b in zip(*samples.values())]))
    return {**row, "rounds": rounds}


class HostRig(PoolRig):
    """The device has two pools. The host's memory is one of `HOSTS`."""

    def __init__(self, model: ModelConfig, host: str) -> None:
        config = SchedulerConfig(1, DEVICE_MEMORY, MEMORY, 1, model.context_length, num_layers=NUM_LAYERS, **CHUNKS)
        config = with_windowed_pool(config, model.windows, RATIO, None)
        if host != "one":
            layout = page_layout(model, 1, 1) if host == "moving" else None
            config = with_windowed_host_pool(config, model.windows, RATIO, layout)
        sizes = ("num_device_pages", "num_windowed_pages", "num_host_pages", "num_windowed_host_pages", "host_border")
        self.engine = LocalEngine(
            model,
            debug=False,
            load_format="dummy",
            write_policy="write_through",
            **{name: getattr(config, name) for name in sizes},
            **CHUNKS,
        )

    def chat(self, num_turns: int) -> dict[str, float]:
        """Turns of conversations of which some are asked more often. Returns as `ask_in_turn`, of the second half."""
        rng = np.random.default_rng(7)
        shares = 1 / np.arange(1, NUM_CHATS + 1) ** 0.5
        chats = [np.empty(0, np.int32)] * NUM_CHATS
        found = asked = 0
        for turn in range(num_turns):
            place = rng.choice(NUM_CHATS, p=shares / shares.sum())
            before = chats[place] if len(chats[place]) < CHAT[1] else chats[place][:0]
            num_new = TURN if len(before) else CHAT[0]
            chats[place] = prompt = np.concatenate((before, rng.integers(1, 512, num_new, dtype=np.int32)))
            (answer,) = self.engine.generate([prompt], ONE_TOKEN)
            self.engine.settle()
            if turn >= num_turns // 2:
                asked += len(prompt)
                found += sum(answer.cached_tokens_details.values())
        return {"of conversations found": found / asked}


def measure_host_pools(model: ModelConfig, rounds: int) -> dict[str, object]:
    rigs = {name: HostRig(model, name) for name in HOSTS}
    row: dict[str, object] = {}
    chats = {name: rig.chat(CHAT_TURNS * rounds) for name, rig in rigs.items()}
    for rig in rigs.values():
        for number in range(DOCUMENT_ROUNDS):
            rig.ask_in_turn(number)
    samples = [
        {name: rig.ask_in_turn(number) for name, rig in rigs.items()}
        for number in range(DOCUMENT_ROUNDS, DOCUMENT_ROUNDS + rounds)
    ]
    for name, rig in rigs.items():
        for what, value in chats[name].items():
            row[f"{what}, {name}"] = value
        config = rig.engine.scheduler.config
        row[f"device tokens, {name}"], row[f"host tokens, {name}"] = config.num_device_pages, config.num_host_pages
        row[f"slabs moved, {name}"] = rig.engine.scheduler.cache.controller.counters["moved_slabs_host"]
    for what in samples[0]["one"]:
        for name in rigs:
            row[f"{what}, {name}"] = float(np.median([each[name][what] for each in samples]))
    for name in HOSTS[1:]:
        row[f"first token s, ratio, {name}"] = float(
            np.median([each[name]["first token s"] / each["one"]["first token s"] for each in samples])
        )
    return {**row, "rounds": rounds}


class StoreRig(PoolRig):
    """The device has one pool; the host, and the store, are one or two. open_one: opens a store of pages of the host,
    which are a part of it, or all of it, by name."""

    def __init__(self, model: ModelConfig, has_two: bool, open_one: Callable[[HostPages, str], BlockStore]) -> None:
        size = 2 * PREFIXES[-1]
        config = SchedulerConfig(1, size, size, 1, model.context_length, num_layers=NUM_LAYERS)
        if has_two:
            config = with_windowed_host_pool(config, model.windows, RATIO)
        limits = StorageLimits.of_host(config.num_host_pages, BLOCK, 8)
        prefetch = PrefetchConfig("wait_complete", 1)
        setup = StorageSetup("file", "", b"benchmark", BLOCK, limits, prefetch, "write_through")

        def open_store(pool: MHATokenToKVPoolHost) -> BlockStore:
            stores = [
                open_one(region, f"benchmark {i} of {len(pool.regions)}") for i, region in enumerate(pool.regions)
            ]
            self.stores = stores
            if not has_two:
                return stores[0]
            num_seen = -(-with_windows(config, model.windows).window_reach // BLOCK)
            kind = OverlappingWindowedStore if isinstance(stores[0], OverlappingStore) else WindowedStore
            full, of_windows = stores
            return kind(full, of_windows, pool.windowed_of, num_seen)

        self.engine = LocalEngine(
            model,
            debug=False,
            load_format="dummy",
            write_policy="write_through",
            num_device_pages=config.num_device_pages,
            num_host_pages=config.num_host_pages,
            num_windowed_host_pages=config.num_windowed_host_pages,
            open_store=open_store,
            storage=replace(setup, has_windowed_store=has_two),
            load_or_recompute=False,
        )

    def ask(self, prompt: np.ndarray) -> dict[str, float]:
        """Ask when memory has nothing. Returns bytes and seconds of its fetches, and seconds to the first token."""
        cache = self.engine.scheduler.cache
        cache.flush()
        fetched = cache.links_state(has_storage=True)[FETCH]["bytes_done"]
        times: list[float] = []
        costs = self.engine.scheduler.planner.expected.costs.stores[0]
        add = costs.add_fetch
        costs.add_fetch = lambda num_bytes, seconds: (times.append(seconds), add(num_bytes, seconds))  # type: ignore[method-assign,assign]
        (answer,) = self.engine.generate([prompt], ONE_TOKEN)
        self.engine.settle()
        costs.add_fetch = add  # type: ignore[method-assign]
        fetched = cache.links_state(has_storage=True)[FETCH]["bytes_done"] - fetched
        assert fetched, "it was to come from storage"
        return {"bytes": fetched, "fetch s": sum(times), "first token s": answer.first_token_s}

    def close(self) -> None:
        self.engine.close()
        for store in self.stores:
            store.close()


def measure_stores(
    model: ModelConfig, rounds: int, name: str, open_one: Callable[[HostPages, str], BlockStore]
) -> dict[str, object]:
    document = np.random.default_rng(0).integers(1, 512, PREFIXES[-1], dtype=np.int32)
    rigs = {"one": StoreRig(model, False, open_one), "two": StoreRig(model, True, open_one)}
    for rig in rigs.values():
        rig.engine.generate([question(document, 0)], ONE_TOKEN)
        rig.engine.settle()
    samples = [{name: rig.ask(question(document, number)) for name, rig in rigs.items()} for number in range(rounds)]
    row: dict[str, object] = {"store": name, "prefix": PREFIXES[-1]}
    for what in samples[0]["one"]:
        row[f"{what}, one"] = float(np.median([each["one"][what] for each in samples]))
        row[f"{what}, ratio"] = float(np.median([each["two"][what] / each["one"][what] for each in samples]))
    for rig in rigs.values():
        rig.close()
    return {**row, "rounds": rounds}


def measure_disk(model: ModelConfig, rounds: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        options = FileStoreOptions(8 << 30)
        return measure_stores(
            model, rounds, "disk", lambda pages, name: HiCacheFile(Path(folder), name, pages, BLOCK, options)
        )


class DiskRig(StoreRig):
    """A disk of `limit_bytes`, one of `DISKS`."""

    def __init__(self, model: ModelConfig, disk: str, folder: Path, limit_bytes: int) -> None:
        opened: list[HiCacheFile] = []

        def open_one(pages: HostPages, name: str) -> BlockStore:
            part = pages.page_bytes / self.page_bytes if disk == "all" else 1.0
            beside = opened[0] if opened and disk == "ends" else None
            options = FileStoreOptions(int(part * limit_bytes), limit_bytes // SEGMENTS)
            opened.append(HiCacheFile(folder, f"{disk} {name}", pages, BLOCK, options, beside=beside))
            return opened[-1]

        self.page_bytes = page_layout(model, 1, 1).page_bytes
        super().__init__(model, disk != "one", open_one)
        if disk == "all":
            self.engine.scheduler.cache.storage.stores.near.writer._window_blocks = None

    def ask_some(self, rng: np.random.Generator) -> dict[str, float]:
        """Tokens found per token of the documents, of prompts that leave theirs at its end and before, bytes written
        per byte of the documents, and the median first token."""
        cache, tokens, found = self.engine.scheduler.cache, [0, 0], [0, 0]
        shares = 1 / np.arange(1, NUM_ON_DISK + 1) ** 0.5
        before, firsts = self._written_bytes(), []
        for _ in range(DISK_ASKED):
            place = int(rng.choice(NUM_ON_DISK, p=shares / shares.sum()))
            document = np.random.default_rng(place).integers(1, 512, DOCUMENT, dtype=np.int32)
            leaves = int(rng.integers(ONE_LEAVES) == 0)
            document = document[: rng.integers(DOCUMENT // 8, DOCUMENT)] if leaves else document
            cache.flush()
            (answer,) = self.engine.generate([question(document, int(rng.integers(1 << 30)))], ONE_TOKEN)
            self.engine.settle()
            tokens[leaves] += len(document)
            found[leaves] += sum(answer.cached_tokens_details.values())
            firsts.append(answer.first_token_s)
        return {
            "found behind the end": found[0] / max(1, tokens[0]),
            "found before": found[1] / max(1, tokens[1]),
            "written": (self._written_bytes() - before) / (sum(tokens) * self.page_bytes),
            "first token s": float(np.median(firsts)),
        }

    def _written_bytes(self) -> int:
        return sum(store.stats()["written_bytes"] for store in self.stores)


def measure_full_disk(model: ModelConfig, rounds: int) -> dict[str, object]:
    limit_bytes = ROOM_FOR * (DOCUMENT + NEW_TOKENS) * page_layout(model, 1, 1).page_bytes
    row: dict[str, object] = {"documents": NUM_ON_DISK, "room for": ROOM_FOR}
    with tempfile.TemporaryDirectory() as folder:
        rigs = {disk: DiskRig(model, disk, Path(folder) / disk, limit_bytes) for disk in DISKS}
        samples = []
        for number in range(2 * rounds):
            asked = {disk: rig.ask_some(np.random.default_rng(number)) for disk, rig in rigs.items()}
            # The first half fills the disks.
            samples += [asked] if number >= rounds else []
        for rig in rigs.values():
            rig.close()
    for what in samples[0]["one"]:
        for disk in DISKS:
            row[f"{what}, {disk}"] = float(np.mean([each[disk][what] for each in samples]))
    return {**row, "rounds": rounds}


def measure_remote(model: ModelConfig, rounds: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ends:
        rig = ProxyRig(Path(folder), "shared memory", None, limit_bytes=2 << 30, max_read_gbps=REMOTE_GBPS)
        ends.callback(rig.close)
        config = {"proxy": rig.address, "token_file": str(rig.token), "codec": "raw"}

        def open_one(pages: HostPages, name: str) -> BlockStore:
            return storage_backend("bluefield").open(StoreParams(config, name, pages, BLOCK, model_name=""))

        return measure_stores(model, rounds, f"remote, {REMOTE_GBPS:g} Gbit/s", open_one)


# By name: a heading, what it measures, and of how long a window.
PARTS: dict[str, tuple[str, Callable[[ModelConfig, int], list[dict[str, object]]], int]] = {
    "loads": (
        "Loads that leave out what windows hide; a whole load is 1",
        lambda model, rounds: [row for rate in RATES for row in measure(model, rate, rounds)],
        WINDOW,
    ),
    "pools": (
        "The same memory of the device as one pool, or as two",
        lambda model, rounds: [measure_pools(model, rounds, num_host_pages) for num_host_pages in (0, 4 * MEMORY)],
        WINDOW,
    ),
    "host": (
        "The same memory of the host as one pool, or as two",
        lambda model, rounds: [measure_host_pools(model, rounds)],
        WINDOW,
    ),
    "stores": (
        "A prefix from one store, or from one for each kind of layers",
        lambda model, rounds: [measure_disk(model, rounds), measure_remote(model, rounds)],
        WINDOW,
    ),
    "full-disk": (
        "A disk with room for half of the documents",
        lambda model, rounds: [measure_full_disk(model, rounds)],
        SHORT_WINDOW,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--parts", default=",".join(PARTS), help="separated by commas (default: all)")
    args = parser.parse_args()
    names = args.parts.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"no part is named {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            title, part, window = PARTS[name]
            (Path(folder) / "config.json").write_text(json.dumps(CONFIG | {"sliding_window": window}))
            rows = part(ModelConfig.from_pretrained(folder), args.rounds)
            print_table(title, rows)
            found += rows
    write_json("windows", {**vars(args), "model": "random, float32"}, found)


if __name__ == "__main__":
    main()
