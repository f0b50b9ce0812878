"""A real server that borrows memory from workers: what it finds there, and what becomes of it when they want it back,
stand still or die."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.configs.embedded_model import ensure_embedded_model
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.peer.memory.cuda_slabs import SlabsConfig
from sglang.srt.peer.memory.lent_memory import LentMemory, LentOptions, allocate_pool
from sglang.srt.utils.peer_endpoint import of_rank
from sglang.srt.utils.peer_timing import PeerTiming
from support.all_tiers import Lender
from support.server_fixture import Server, wait_until
from support.windowed_model import write_windowed_model

pytestmark = pytest.mark.e2e

# Two prompts fit neither the device nor the host.
FLAGS = "--hicache --max-total-tokens 600 --hicache-ratio 0.1 --peer-role master --peer-slab-size 1 --peer-size 0.05"
NUM_SLABS = 8
LENDER = """
import sys, time, torch
from pathlib import Path
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.peer.memory.cuda_slabs import SlabsConfig
from sglang.srt.peer.memory.lent_memory import LentMemory, LentOptions, allocate_pool
from sglang.srt.utils.peer_timing import PeerTiming
layout = PageLayout.kv(1, 8, 4, 32, torch.bfloat16)
options = LentOptions(timing=PeerTiming(offer=1e6))
pool = allocate_pool(SlabsConfig(8, 1 << 20), layout)
memory = LentMemory(sys.argv[1], Path(sys.argv[2]), pool, options=options)
memory.lend(range(8))
while True:
    memory.poll_mapped()
    time.sleep(0.05)
"""


# Lends all but room for one request, a second after it needed more.
WORKER = "--max-total-tokens 4096 --context-length 512 --peer-role worker --peer-slab-size 1 --peer-window 1"
# Of its requests, which need nearly all that it has.
NUM_AT_ONCE = 10
# Of a worker whose master is given little time.
HASTE = ("--peer-timing", "silence=2,recall=0.5,grace=0.5")
BOTH_KINDS = pytest.mark.parametrize("strict", [(), ("--peer-strict",)], ids=["mapped", "strict"])


def prompt(seed: int) -> list[int]:
    return [300 + seed] + [300 + (seed * 1000 + i * 7) % 1500 for i in range(399)]


def ask(server: Server, seed: int) -> tuple[list[int], int]:
    body = {
        "input_ids": prompt(seed),
        "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
        "return_cached_tokens_details": True,
    }
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    reply = response.json()
    return reply["output_ids"], reply["meta_info"]["cached_tokens_details"].get("peer", 0)


def come_from_peers(server: Server, wanted: list[list[int]]) -> bool:
    """Whether most of these prompts does now; the answers are right in any case. On a busy machine a load may give up
    waiting for the worker that copies for it."""
    again = [ask(server, seed) for seed in range(len(wanted))]
    assert [tokens for tokens, _ in again] == wanted
    return all(found > 200 for _, found in again)


def borrowed_tokens(server: Server) -> int:
    return server.state()["tiers"]["peer"]["total_tokens"]


def borrows(server: Server) -> bool:
    """Whether a master has room for a part of its prompts at peers, after it was asked for them: it borrows what it
    lacks."""
    for seed in range(3):
        ask(server, seed)
    return borrowed_tokens(server) >= 700


def metrics(server: Server) -> str:
    return server.get("/metrics").text


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True], ids=["mapped", "strict"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_what_is_lent_is_used_and_given_back(tp_size: int, strict: bool, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    endpoint = f"ipc://{tmp_path}/peers"
    layout = PageLayout.kv(1, 8, 4, 32, torch.bfloat16)
    workers = [
        LentMemory(
            of_rank(endpoint, rank),
            tmp_path,
            allocate_pool(SlabsConfig(NUM_SLABS, 1 << 20), layout),
            options=LentOptions(strict, PeerTiming(offer=1e6)),
        )
        for rank in range(tp_size)
    ]
    with Server(*FLAGS.split(), "--peer-endpoint", endpoint, "--tp-size", str(tp_size)) as server:
        wanted = [ask(server, seed) for seed in range(3)]
        assert [found for _, found in wanted] == [0, 0, 0] and borrowed_tokens(server) == 0
        for worker in workers:
            worker.lend(range(NUM_SLABS))
        wait_until(lambda: [w.poll_mapped() for w in workers] and borrowed_tokens(server) > 0)
        wait_until(lambda: [w.poll_mapped() for w in workers] and borrows(server))
        wait_until(lambda: come_from_peers(server, [tokens for tokens, _ in wanted]))
        for worker in workers:
            worker.recall(NUM_SLABS)
        wait_until(lambda: all(worker.poll_mapped().mapped == b"\1" * NUM_SLABS for worker in workers))
        assert borrowed_tokens(server) == 0
        assert [ask(server, seed)[0] for seed in range(3)] == [tokens for tokens, _ in wanted]
        counters = server.state()["counters"]
        assert 0 < counters["slabs_withdrawn"] <= NUM_SLABS and counters["load_peer_tokens"] > 600
    for worker in workers:
        worker.close()


@pytest.mark.slow
@pytest.mark.parametrize(("num_masters", "sizes"), [(2, [2 * NUM_SLABS]), (1, [3, 2 * NUM_SLABS])])
def test_ranks_of_several_masters_or_workers_have_the_same_slabs(
    num_masters: int, sizes: list[int], tmp_path: Path
) -> None:
    """Two ranks everywhere. sizes: of the workers, in slabs."""
    tmp_path.chmod(0o700)
    endpoints = [f"ipc://{tmp_path}/peers{i}" for i in range(len(sizes))]
    options = LentOptions(timing=PeerTiming(offer=1e6))
    workers = [
        LentMemory(
            of_rank(endpoint, rank),
            tmp_path,
            allocate_pool(SlabsConfig(size, 1 << 20), PageLayout.kv(1, 8, 4, 32, torch.bfloat16)),
            options=options,
        )
        for endpoint, size in zip(endpoints, sizes)
        for rank in range(2)
    ]
    flags = (*FLAGS.split(), "--peer-endpoint", ",".join(endpoints), "--tp-size", "2")
    with contextlib.ExitStack() as stack:
        masters = [stack.enter_context(Server(*flags)) for _ in range(num_masters)]
        wanted = [[ask(master, seed)[0] for seed in range(3)] for master in masters]
        # Not in the same order.
        for worker in workers[::-1] if num_masters == 1 else workers:
            worker.lend(range(worker.slabs.num_slabs))
        for master, tokens in zip(masters, wanted):
            wait_until(lambda master=master: [w.poll_mapped() for w in workers] and borrows(master))
            wait_until(lambda m=master, t=tokens: [w.poll_mapped() for w in workers] and come_from_peers(m, t))
    for worker in workers:
        worker.close()


@pytest.mark.slow
def test_a_worker_that_is_killed_takes_nothing_but_its_memory_along(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    endpoint = f"ipc://{tmp_path}/peers"
    worker = subprocess.Popen([sys.executable, "-c", LENDER, endpoint, str(tmp_path)])
    try:
        with Server(*FLAGS.split(), "--peer-endpoint", endpoint) as server:
            wait_until(lambda: borrows(server))
            wanted = [ask(server, seed)[0] for seed in range(3)]
            wait_until(lambda: come_from_peers(server, wanted))
            worker.kill()
            wait_until(lambda: borrowed_tokens(server) == 0)
            assert [ask(server, seed) for seed in range(3)] == [(tokens, 0) for tokens in wanted]
            assert re.search(r"is gone, and \d+ slabs? of its memory with it", server.output())
            server.stop()
    finally:
        worker.kill()
        worker.wait()


@pytest.mark.slow
@BOTH_KINDS
@pytest.mark.parametrize("num_tokens", [4096, 16384], ids=["all layers", "windows apart"])
def test_a_worker_lends_when_it_is_idle_and_takes_back_what_its_requests_need(
    num_tokens: int, strict: tuple[str, ...], tmp_path: Path
) -> None:
    """strict: then it copies for the master, which maps nothing. Windows apart: three of four layers have one, and a
    pool that is not lent."""
    tmp_path.chmod(0o700)
    endpoint = f"ipc://{tmp_path}/peers"
    flags = [*WORKER.split(), "--max-total-tokens", str(num_tokens), "--page-size", "4", "--peer-endpoint", endpoint]
    model = "embedded"
    if num_tokens == 16384:
        flags += ["--swa-full-tokens-ratio", "0.2"]
        model = str(write_windowed_model(tmp_path / "model", 24))
    worker = Server(*flags, *strict, model=model)
    with worker, Server(*FLAGS.split(), "--peer-endpoint", endpoint, model=model) as master:
        wait_until(lambda: borrows(master))
        lent = worker.state()["tiers"]["device"]
        assert lent["pages"]["lent"] > 0 and 512 <= lent["total_tokens"] < num_tokens
        assert lent.get("windowed", {}).get("total_tokens", 0) >= (num_tokens // 5 if num_tokens == 16384 else 0)
        assert worker.state()["peers"]["slabs"]["lent"] > 0
        assert f'sglang:hicache_peer_connected{{lender="{endpoint}",model_name="{model}"}} 1.0' in metrics(master)
        wanted = [ask(master, seed)[0] for seed in range(3)]
        wait_until(lambda: come_from_peers(master, wanted))
        copies = worker.state()["peers"]["copies"]
        assert (copies["bytes"] > 0) == bool(strict) and copies["refused"] == 0
        # They need nearly all that it has.
        num_at_once = num_tokens // 400
        alone = [ask(worker, seed)[0] for seed in range(num_at_once)]
        body = {
            "input_ids": [prompt(seed) for seed in range(num_at_once)],
            "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
        }
        together = worker.post("/generate", body)
        assert together.status_code == 200 and [each["output_ids"] for each in together.json()] == alone
        counters = worker.state()["counters"]
        assert counters["slabs_lent"] > 0 and counters["slabs_asked_back"] > 0
        assert master.state()["counters"]["slabs_withdrawn"] > 0
        assert [ask(master, seed)[0] for seed in range(3)] == wanted
        # Idle again, it lends again.
        wait_until(lambda: borrows(master))
        if strict:
            master.stop()
        else:
            master.process.kill()
        wait_until(lambda: worker.state()["counters"]["slabs_lent"] > 0)
        assert [ask(worker, seed)[0] for seed in range(num_at_once)] == alone
        worker.stop()
        assert not (tmp_path / "peers").exists(), "ZeroMQ leaves it"


def test_an_endpoint_that_others_could_reach_is_refused(tmp_path: Path) -> None:
    server = Server(*FLAGS.split(), "--peer-endpoint", "tcp://0.0.0.0:5600", wait=False)
    assert server.wait() == 2
    assert "only loopback" in server.output() and "Traceback" not in server.output()


@pytest.mark.slow
@pytest.mark.parametrize(("worker_ranks", "master_ranks"), [(2, 1), (1, 2)])
def test_a_worker_with_other_ranks_is_refused(worker_ranks: int, master_ranks: int, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    endpoint = ("--peer-endpoint", f"ipc://{tmp_path}/peers")
    with (
        Server(*WORKER.split(), *endpoint, "--tp-size", str(worker_ranks)) as worker,
        Server(*FLAGS.split(), *endpoint, "--tp-size", str(master_ranks)) as master,
    ):
        for seed in range(3):
            ask(master, seed)
        wait_until(lambda: bool(master.state()["peers"]["problems"]))
        (problem,) = master.state()["peers"]["problems"]
        assert f"its worker has --tp-size {worker_ranks}, where this master has --tp-size {master_ranks}" in problem
        assert master.output().count(problem) == 1
        for seed in range(3):
            ask(master, seed)
        assert borrowed_tokens(master) == 0
        assert master.state()["peers"]["lenders"][0]["slabs"] == {"held": 0, "asked_back": 0}
        peers = worker.state()["peers"]
        assert peers["borrowers"] == 0 and peers["slabs"]["lent"] == 0


# -- models of several shapes ------------------------------------------------------------------------------------

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def write_model(path: Path, family: dict[str, Any], layers: int, heads: int, kv_heads: int, head_dim: int) -> str:
    """The embedded model's tokenizer, and the config of a model without weights."""
    embedded = ensure_embedded_model()
    path.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(embedded / name, path / name)
    shape = {
        "hidden_size": 16 * heads,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    config = json.loads((embedded / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | family | shape))
    return str(path)


# Family, layers, heads, KV heads, head size; then the page size. No page of one is a multiple of the other's.
SHAPES: dict[str, tuple[tuple[dict[str, Any], int, int, int, int], int]] = {
    "llama": ((LLAMA, 6, 6, 2, 16), 1),
    "llama wide": ((LLAMA, 7, 4, 4, 32), 8),
    "qwen3": ((QWEN3, 5, 6, 3, 24), 4),
    "qwen3 flat": ((QWEN3, 2, 8, 1, 40), 16),
}


@pytest.mark.slow
@BOTH_KINDS
@pytest.mark.parametrize(
    ("master_shape", "worker_shapes"),
    [("llama", ("qwen3", "llama wide")), ("qwen3", ("llama",)), ("qwen3 flat", ("llama wide", "qwen3"))],
)
def test_models_of_other_shapes_lend_and_take_back(
    master_shape: str, worker_shapes: tuple[str, ...], strict: tuple[str, ...], tmp_path: Path
) -> None:
    """Of two workers, one lends strictly where any does: the master has slabs of both kinds."""
    tmp_path.chmod(0o700)
    models = {name: write_model(tmp_path / name.replace(" ", "-"), *SHAPES[name][0]) for name in SHAPES}
    with contextlib.ExitStack() as stack:
        workers, endpoints = [], []
        for i, name in enumerate(worker_shapes):
            endpoints.append(f"ipc://{tmp_path}/peers{i}")
            flags = [*WORKER.split(), "--load-format", "dummy", "--page-size", str(SHAPES[name][1])]
            flags += ["--max-total-tokens", "16384"]  # some slabs of the smallest pages, too
            flags += ["--peer-endpoint", endpoints[-1], *(strict if i == 0 else ())]
            workers.append(stack.enter_context(Server(*flags, model=models[name])))
        alone = [[ask(worker, seed)[0] for seed in range(8)] for worker in workers]
        flags = [*FLAGS.split(), "--load-format", "dummy", "--page-size", str(SHAPES[master_shape][1])]
        # Room for all that they can spare: what a worker keeps it need not ask back.
        flags += ["--peer-endpoint", ",".join(endpoints), "--peer-size", "1"]
        flags += ["--peer-timing", "idle=3"]
        master = stack.enter_context(Server(*flags, model=models[master_shape]))
        wanted = [ask(master, seed)[0] for seed in range(3)]
        assert len({tuple(each) for each in wanted}) == 3, "the model says the same to everything"

        def are_lent() -> bool:
            return all(worker.state()["peers"]["slabs"]["lent"] > 0 for worker in workers)

        wait_until(lambda: borrows(master) and are_lent())
        wait_until(lambda: come_from_peers(master, wanted))
        for worker, answers in zip(workers, alone):
            body = {
                "input_ids": [prompt(seed) for seed in range(8)],
                "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
            }
            together = worker.post("/generate", body)
            assert together.status_code == 200 and [each["output_ids"] for each in together.json()] == answers
        assert [ask(master, seed)[0] for seed in range(3)] == wanted
        # What a master does not use it gives back.
        wait_until(lambda: all(worker.state()["peers"]["slabs"]["lent"] == 0 for worker in workers))
        assert [ask(master, seed)[0] for seed in range(3)] == wanted


# -- processes that stand still ----------------------------------------------------------------------------------


def signal_all(server: Server, number: signal.Signals) -> None:
    for pid in (server.process.pid, *(child.pid for child in server.children)):
        os.kill(pid, number)


@contextlib.contextmanager
def standing_still(server: Server) -> Iterator[None]:
    signal_all(server, signal.SIGSTOP)
    try:
        yield
    finally:
        signal_all(server, signal.SIGCONT)


@pytest.mark.slow
@BOTH_KINDS
def test_a_master_that_stands_still_costs_memory_until_it_goes_on_and_nothing_else(
    strict: tuple[str, ...], tmp_path: Path
) -> None:
    """Strictly lent, it does not even cost that."""
    tmp_path.chmod(0o700)
    endpoint = f"ipc://{tmp_path}/peers"
    worker = Server(*WORKER.split(), "--page-size", "4", "--peer-endpoint", endpoint, *HASTE, *strict)
    with worker, Server(*FLAGS.split(), "--peer-endpoint", endpoint) as master:

        def slabs() -> dict[str, int]:
            return worker.state()["peers"]["slabs"]

        wait_until(lambda: borrows(master))
        wanted = [ask(master, seed)[0] for seed in range(3)]
        wait_until(lambda: come_from_peers(master, wanted))
        alone = [ask(worker, seed)[0] for seed in range(NUM_AT_ONCE)]
        wait_until(lambda: slabs()["asked_back"] == 0 and borrows(master) and slabs()["lent"] > 0)
        with standing_still(master), ThreadPoolExecutor(1) as pool:
            body = {
                "input_ids": [prompt(seed) for seed in range(NUM_AT_ONCE)],
                "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
            }
            assert ask(worker, 1)[0] == alone[1], "what it has kept is enough for one"
            if strict:
                together = worker.post("/generate", body)
            else:
                waiting = pool.submit(worker.post, "/generate", body)
                wait_until(lambda: slabs()["quarantined"] > 0)
                signal_all(master, signal.SIGCONT)
                together = waiting.result()
        assert together.status_code == 200 and [each["output_ids"] for each in together.json()] == alone
        assert ("is quarantined" in worker.output()) == (not strict)
        assert [ask(master, seed)[0] for seed in range(3)] == wanted
        # It is as if nothing had been.
        wait_until(lambda: slabs()["quarantined"] == 0 and borrows(master))
        wait_until(lambda: come_from_peers(master, wanted))


@pytest.mark.slow
@BOTH_KINDS
def test_a_worker_that_stands_still_takes_no_answer_along(strict: tuple[str, ...], tmp_path: Path) -> None:
    """What it has lent is read all the same where it is mapped. Where it is not, loads fail, and are computed."""
    tmp_path.chmod(0o700)
    endpoint = f"ipc://{tmp_path}/peers"
    worker = Server(*WORKER.split(), "--page-size", "4", "--peer-endpoint", endpoint, *strict)
    with worker, Server(*FLAGS.split(), "--peer-endpoint", endpoint) as master:
        wait_until(lambda: borrows(master))
        wanted = [ask(master, seed)[0] for seed in range(3)]
        wait_until(lambda: come_from_peers(master, wanted))
        alone = ask(worker, 0)[0]
        with standing_still(worker):
            again = [ask(master, seed) for seed in range(3)]
        assert [tokens for tokens, _ in again] == wanted
        if not strict:
            assert all(found > 200 for _, found in again), "nobody needs the worker's processor"
        assert ("is left alone until it answers" in master.output()) == bool(strict)
        assert ask(worker, 0)[0] == alone
        wait_until(lambda: borrows(master) and worker.state()["peers"]["slabs"]["lent"] > 0)
        wait_until(lambda: come_from_peers(master, wanted))


STREAMING = (
    "--hicache --max-total-tokens 800 --hicache-ratio 3 --hicache-load-or-recompute off --chunked-prefill-size 64 "
    "--layer-stream 2 --layer-stream-tokens 128 --peer-role master --peer-slab-size 1 --peer-size 0.05"
)


@pytest.mark.slow
def test_a_master_streams_what_a_strict_worker_has(tmp_path: Path, small_server: Server) -> None:
    """The worker stops before the second time: the answer stays, and the worker is used again when it goes on."""
    lender = Lender(tmp_path / "lender", NUM_SLABS, strict=True)
    long = prompt(0) + prompt(1)[:300] + prompt(2)[:300]
    body = {
        "input_ids": long,
        "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
        "return_cached_tokens_details": True,
    }
    wanted = small_server.post("/generate", body).json()["output_ids"]
    try:
        with Server(*STREAMING.split(), "--peer-endpoint", lender.endpoint) as master:
            wait_until(lambda: borrows(master))
            shorter = [ask(master, seed)[0] for seed in range(3)]

            def comes_from_the_worker() -> bool:
                assert [ask(master, seed)[0] for seed in range(3)] == shorter
                reply = master.post("/generate", body).json()
                assert reply["output_ids"] == wanted
                return reply["meta_info"]["cached_tokens_details"]["peer"] > 200

            wait_until(comes_from_the_worker)
            assert master.state()["counters"]["streamed_reqs"] > 0
            lender.pause()
            for _ in range(2):
                assert master.post("/generate", body).json()["output_ids"] == wanted
            assert borrowed_tokens(master) == 0 and master.state()["peers"]["lenders"][0]["left_alone"]
            lender.resume()
            wait_until(lambda: borrows(master))
            assert [ask(master, seed)[0] for seed in range(3)] == shorter
    finally:
        lender.kill()
