"""A real server that borrows memory from workers: what it finds there, and what becomes of it when they want it back
or die."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from server_fixture import Server, wait_until

from sglang.srt.peer.endpoint import of_rank
from sglang.srt.peer.lent_memory import LentMemory

pytestmark = pytest.mark.e2e

# Two prompts fit neither the device nor the host.
FLAGS = "--hicache --max-total-tokens 600 --hicache-ratio 0.1 --peer-role master --peer-slab-size 1 --peer-size 0.05"
NUM_SLABS = 8
LENDER = """
import sys, time, torch
from pathlib import Path
from sglang.srt.peer.lent_memory import LentMemory
memory = LentMemory(sys.argv[1], Path(sys.argv[2]), 8, 1 << 20, 4096, (1, 8, 4, 32), torch.bfloat16)
memory.left(range(8))
while True:
    memory.here()
    time.sleep(0.05)
"""


def prompt(seed: int) -> list[int]:
    return [300 + (seed * 1000 + i * 7) % 1500 for i in range(400)]


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


def borrowed_tokens(server: Server) -> int:
    return server.state()["tiers"]["peer"]["total_tokens"]


def metrics(server: Server) -> str:
    return server.get("/metrics").text


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [1, 2])
def test_what_is_lent_is_used_and_given_back(tp_size: int, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    endpoint = f"ipc://{tmp_path}/peers"
    workers = [
        LentMemory(of_rank(endpoint, rank), tmp_path, NUM_SLABS, 1 << 20, 4096, (1, 8, 4, 32), torch.bfloat16)
        for rank in range(tp_size)
    ]
    with Server(*FLAGS.split(), "--peer-endpoint", endpoint, "--tp-size", str(tp_size)) as server:
        wanted = [ask(server, seed) for seed in range(3)]
        assert [found for _, found in wanted] == [0, 0, 0] and borrowed_tokens(server) == 0
        for worker in workers:
            worker.left(range(NUM_SLABS))
        wait_until(lambda: [w.here() for w in workers] and borrowed_tokens(server) > 0)
        wait_until(lambda: [w.here() for w in workers] and borrowed_tokens(server) >= 1200)
        for seed in range(3):
            ask(server, seed)
        again = [ask(server, seed) for seed in range(3)]
        assert [tokens for tokens, _ in again] == [tokens for tokens, _ in wanted]
        assert all(found > 200 for _, found in again), again
        for worker in workers:
            worker.wanted(NUM_SLABS)
        wait_until(lambda: all(worker.here() == b"\1" * NUM_SLABS for worker in workers))
        assert borrowed_tokens(server) == 0
        assert [ask(server, seed)[0] for seed in range(3)] == [tokens for tokens, _ in wanted]
        counters = server.state()["counters"]
        assert counters["slabs_withdrawn"] == NUM_SLABS and counters["load_peer_tokens"] > 600
    for worker in workers:
        worker.close()


def test_a_worker_that_is_killed_takes_nothing_but_its_memory_along(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    endpoint = f"ipc://{tmp_path}/peers"
    worker = subprocess.Popen([sys.executable, "-c", LENDER, endpoint, str(tmp_path)])
    try:
        with Server(*FLAGS.split(), "--peer-endpoint", endpoint) as server:
            wait_until(lambda: borrowed_tokens(server) >= 1200)
            wanted = [ask(server, seed)[0] for seed in range(3)]
            assert ask(server, 0)[1] > 200
            worker.kill()
            wait_until(lambda: borrowed_tokens(server) == 0)
            assert [ask(server, seed) for seed in range(3)] == [(tokens, 0) for tokens in wanted]
            assert "is gone, and a slab of its memory with it" in server.output()
    finally:
        worker.kill()
        worker.wait()


@pytest.mark.parametrize("strict", [(), pytest.param(("--peer-strict",), marks=pytest.mark.slow)])
def test_a_worker_lends_when_it_is_idle_and_takes_back_what_its_requests_need(
    strict: tuple[str, ...], tmp_path: Path
) -> None:
    """strict: then it copies for the master, which maps nothing."""
    tmp_path.chmod(0o700)
    endpoint = f"ipc://{tmp_path}/peers"
    lending = "--max-total-tokens 4096 --context-length 512 --page-size 4 --peer-role worker --peer-slab-size 1"
    worker = Server(*lending.split(), "--peer-window", "1", "--peer-endpoint", endpoint, *strict)
    with worker, Server(*FLAGS.split(), "--peer-endpoint", endpoint) as master:
        wait_until(lambda: borrowed_tokens(master) >= 1200)
        lent = worker.state()["tiers"]["device"]
        assert lent["pages"]["lent"] > 0 and 512 <= lent["total_tokens"] < 4096
        assert worker.state()["peers"]["slabs"]["lent"] > 0
        assert f'sglang:hicache_peer_connected{{lender="{endpoint}",model_name="embedded"}} 1.0' in metrics(master)
        wanted = [ask(master, seed)[0] for seed in range(3)]
        assert all(found > 200 for _, found in [ask(master, seed) for seed in range(3)])
        copies = worker.state()["peers"]["copies"]
        assert (copies["bytes"] > 0) == bool(strict) and copies["refused"] == 0
        alone = [ask(worker, seed)[0] for seed in range(8)]
        body = {
            "input_ids": [prompt(seed) for seed in range(8)],
            "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
        }
        together = worker.post("/generate", body)
        assert together.status_code == 200 and [each["output_ids"] for each in together.json()] == alone
        counters = worker.state()["counters"]
        assert counters["slabs_lent"] > 0 and counters["slabs_asked_back"] > 0
        assert master.state()["counters"]["slabs_withdrawn"] > 0
        assert [ask(master, seed)[0] for seed in range(3)] == wanted
        # Idle again, it lends again.
        wait_until(lambda: borrowed_tokens(master) >= 1200)
        master.process.kill()
        wait_until(lambda: worker.state()["counters"]["slabs_lent"] > 0)
        assert [ask(worker, seed)[0] for seed in range(8)] == alone


def test_an_endpoint_that_others_could_reach_is_refused(tmp_path: Path) -> None:
    server = Server(*FLAGS.split(), "--peer-endpoint", "tcp://0.0.0.0:5600", wait=False)
    assert server.wait() == 2
    assert "only loopback" in server.output() and "Traceback" not in server.output()
