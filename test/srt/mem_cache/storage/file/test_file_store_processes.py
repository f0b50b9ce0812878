"""Processes that share a folder of the disk tier, killed and stopped at any moment, beside what must always hold: a
block has the bytes of its key, only what is being copied is stored twice, the limit holds, and what is left can be
opened."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sglang.srt.mem_cache.storage.file.recovery import UsableHead, read_heads
from sglang.srt.mem_cache.storage.file.segment import KEY_BYTES, SegmentLayout, namespace_digest
from support.children import child_environment
from support.disk_worker import LONGEST, WorkerConfig, open_store, pool_of
from support.fake_pages import BLOCK_TOKENS, keys_of

SLOT_BYTES = BLOCK_TOKENS * 256
PAGE_SIZES = (8, 16, 64)
# A file takes more than its blocks where the file system needs a block for the places of others.
SLACK_BYTES = 8192
SEGMENT_SLOTS = 6
# Of each byte stored: half of a segment's blocks may be copied forward before it goes.
REWRITE_SHARE = 1.0
MAX_COPIES = SEGMENT_SLOTS // 2


class Workers:
    """Processes with the same folder; the oldest is the first."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.rng = random.Random(config.seed)
        self.results: list[dict[str, int]] = []
        self.num_started = 0
        self.running: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        self.num_started += 1
        config = replace(
            self.config,
            seed=1000 * self.config.seed + self.num_started,
            page_size=self.rng.choice(PAGE_SIZES),
            is_exclusive=self.rng.random() < 0.3,
            write_share=self.rng.choice((0.2, 0.5, 0.8)),
            rewrite_share=self.rng.choice((0.0, REWRITE_SHARE, REWRITE_SHARE)),
        )
        command = [sys.executable, "-m", "support.disk_worker", config.as_json()]
        worker = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=child_environment()
        )
        self.running.append(worker)
        assert worker.stdout is not None and worker.stdout.readline() == "ready\n"

    def reap(self) -> None:
        for each in list(self.running):
            if each.poll() is not None:
                self.running.remove(each)
                out, error = each.communicate()
                if each.returncode == -signal.SIGKILL:
                    continue
                assert each.returncode == 0, error
                self.results.append(json.loads(out.splitlines()[-1]))

    def stop_all(self) -> None:
        """Until `go_on` none of them runs."""
        for each in self.running:
            each.send_signal(signal.SIGSTOP)
        for each in self.running:
            with contextlib.suppress(ChildProcessError):  # it had ended
                os.waitid(os.P_PID, each.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def go_on(self) -> None:
        for each in self.running:
            each.send_signal(signal.SIGCONT)

    def end(self) -> None:
        for each in self.running:
            each.kill()
            each.communicate()


def check_folder(config: WorkerConfig, num_started: int) -> int:
    """With no process running. Returns how many blocks there are. num_started: processes, each of which may have been
    stopped between copying blocks and deleting their old segment."""
    pages = pool_of(16).page_layout
    layout = SegmentLayout(namespace_digest(b"model", BLOCK_TOKENS, pages), BLOCK_TOKENS, pages, 1)
    folder = Path(config.root) / layout.namespace.hex()[:32]
    if not folder.exists():
        return 0
    keys: Counter[bytes] = Counter()
    size_bytes = 0
    for _, head in read_heads(folder, layout):
        if isinstance(head, UsableHead):
            table = head.layout.read_table(head.table)
            assert not table.num_bad
            keys.update(table.keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES] for slot in table.slots)
            size_bytes += head.stat.st_blocks * 512 - SLACK_BYTES
    assert size_bytes <= config.limit_bytes
    assert sum(keys.values()) - len(keys) <= MAX_COPIES * num_started, "blocks are stored twice"
    return len(keys)


def run(tmp_path: Path, seed: int, num_workers: int, num_calls: int, num_faults: int) -> None:
    print(f"seed {seed}")
    config = WorkerConfig(
        str(tmp_path), seed, 16, 60 * SLOT_BYTES, (SEGMENT_SLOTS + 1) * SLOT_BYTES, 90, num_calls, False, 0.5, 0.0
    )
    workers = Workers(config)
    rng = random.Random(seed + 1)
    try:
        for _ in range(num_workers):
            workers.start()
        for _ in range(num_faults):
            # When it strikes is a matter of chance, and nothing depends on it.
            time.sleep(rng.uniform(0.0, 0.04))
            workers.reap()
            while len(workers.running) < num_workers:
                workers.start()
            what = rng.random()
            if what < 0.3:
                rng.choice(workers.running).kill()
            elif what < 0.6:
                victim = rng.choice(workers.running)
                victim.send_signal(signal.SIGSTOP)
                time.sleep(rng.uniform(0.0, 0.04))
                victim.send_signal(signal.SIGCONT)
            else:
                workers.stop_all()
                check_folder(config, workers.num_started)
                workers.go_on()
        workers.reap()
        workers.start()
        while workers.running:
            workers.running[0].wait(600)
            workers.reap()
    finally:
        workers.end()
    blocks = check_folder(config, workers.num_started)
    assert sum(each["found"] for each in workers.results) > 0
    assert sum(each["copied_blocks"] for each in workers.results) > 0
    for each in workers.results:
        assert each["read_errors"] == each["write_errors"] == 0
    calls = [0]
    for page_size in PAGE_SIZES:
        pool = pool_of(page_size)
        store = open_store(config, pool, calls)
        store.check_invariants()
        assert store.stats()["blocks"] == blocks > 0
        frames = np.arange(pool.pages_per_block, dtype=np.int32)
        for key in keys_of(*range(config.num_keys)):
            if store.exists([key]):
                pool.kv[:] = 0xAA
                assert store.get([key], frames) == 1 and pool.holds(key, frames)
        assert store.stats()["read_errors"] == 0
        store.close()
    # What a dead process had claimed can be stored again.
    pool = pool_of(16)
    store = open_store(config, pool, calls)
    for start in range(0, config.num_keys - LONGEST, LONGEST):
        keys = keys_of(*range(start, start + LONGEST))
        frames = np.arange(LONGEST * pool.pages_per_block, dtype=np.int32)
        pool.put(keys, frames)
        assert store.set(keys, frames) == LONGEST
    store.check_invariants()
    store.close()
    check_folder(config, workers.num_started)


@pytest.mark.parametrize(("num_calls", "num_faults"), [(60, 2), pytest.param(600, 12, marks=pytest.mark.slow)])
def test_processes_share_a_folder(num_calls: int, num_faults: int, tmp_path: Path) -> None:
    run(tmp_path, seed=1, num_workers=3, num_calls=num_calls, num_faults=num_faults)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 108))
def test_many_processes_share_a_folder_for_long(tmp_path: Path, seed: int) -> None:
    run(tmp_path, seed, num_workers=2 + seed % 3, num_calls=3000, num_faults=150)
