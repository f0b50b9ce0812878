"""Memory of peers from the words of a user: which kind, how much, and what is refused with a sentence."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang.srt.distributed.parallel_state import SINGLE_RANK
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.managers.engine_core import EngineCore
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, bytes_to_ids, ids_to_bytes
from sglang.srt.managers.startup import device as device_setup
from sglang.srt.managers.startup import engine as startup_engine
from sglang.srt.managers.startup.device import check_device
from sglang.srt.managers.startup.engine import RankSetup
from sglang.srt.managers.startup.peers import borrow_memory, lend_memory
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.peer.memory import cuda_slabs
from sglang.srt.peer.memory.slabs import SlabError
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.child_process import StartupError
from sglang.srt.utils.device import CPU
from support.device_emulator import emulated_device
from support.fake_cuda_driver import FakeCudaDriver

GPU = torch.device("cuda", 0)
LAYOUT = PageLayout.kv(2, 3, 2, 8, torch.float32)
CONFIG: Any = SimpleNamespace(num_device_pages=2000, context_len=500, page_size=2)


def arguments(more: str, tmp_path: Path) -> ServerArgs:
    tmp_path.chmod(0o700)
    return ServerArgs.from_cli(f"--model m --peer-endpoint ipc://{tmp_path}/peers {more}".split())


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCudaDriver]:
    driver = FakeCudaDriver(2 << 20)
    monkeypatch.setattr(cuda_slabs, "cuda_driver", lambda: driver)
    with emulated_device(1):
        yield driver
    assert not driver.fake.broken


def lend(args: ServerArgs, tmp_path: Path) -> Any:
    return lend_memory(args, CONFIG, LAYOUT, 0, tmp_path, lambda: None, GPU)


def test_a_worker_lends_and_a_master_borrows_the_devices_memory(driver: FakeCudaDriver, tmp_path: Path):
    lent = lend(arguments("--peer-role worker --peer-slab-size 2", tmp_path), tmp_path)
    args = arguments("--peer-role master --hicache --peer-slab-size 2 --peer-size 0.01", tmp_path)
    borrowed = borrow_memory(args, LAYOUT, 0, 1, lambda: None, GPU)
    try:
        assert lent.pool.kv.is_cuda and lent.slabs.num_slabs * lent.pool.slab_pages >= 2000
        assert borrowed.pool.kv.is_cuda and borrowed.slabs.num_slabs == 4
    finally:
        lent.close()
        borrowed.close()


def test_slabs_that_cannot_be_mapped_are_refused(driver: FakeCudaDriver, tmp_path: Path):
    with pytest.raises(StartupError, match=r"mapped in pieces of 2,097,152 bytes.*--peer-slab-size"):
        lend(arguments("--peer-role worker --peer-slab-size 3", tmp_path), tmp_path)


def test_a_gpu_without_room_says_so(driver: FakeCudaDriver, tmp_path: Path):
    driver.fake.fail = "cuMemCreate"
    with pytest.raises(StartupError, match="cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"):
        lend(arguments("--peer-role worker --peer-slab-size 2", tmp_path), tmp_path)


def test_without_a_driver_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def no_driver() -> None:
        raise SlabError("slabs of GPU memory need the CUDA driver's virtual memory: libcuda.so.1")

    monkeypatch.setattr(cuda_slabs, "cuda_driver", no_driver)
    with pytest.raises(StartupError, match="need the CUDA driver's virtual memory"):
        lend(arguments("--peer-role worker", tmp_path), tmp_path)


def test_on_a_gpu_nothing_is_lent_strictly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(device_setup, "why_not", lambda backend, device: None)
    monkeypatch.setattr(device_setup, "pick_attention_backend", lambda asked, device: "triton")
    for role in ("--peer-role worker", "--peer-role master --hicache"):
        assert check_device(arguments(role, tmp_path), GPU) == "triton"
    with pytest.raises(StartupError, match="--peer-strict is not served on a GPU yet"):
        check_device(arguments("--peer-role worker --peer-strict", tmp_path), GPU)


class Rank:
    """A server's only one, as it builds it; no memory of a GPU is measured."""

    def __init__(self, args: ServerArgs, tmp_path: Path, device: torch.device) -> None:
        self.core: EngineCore
        self.resources = ExitStack()
        self.core, _ = startup_engine.build_core(
            args, RankSetup(SINGLE_RANK, lambda: None, tmp_path, self.resources, device)
        )

    def turn(self, new: list[TokenizedGenerateReqInput]) -> tuple[list[int], int | None]:
        """Tokens, and once it has ended how many of its prompt's came from a peer."""
        progress, now = self.core.progress(), time.monotonic()
        tokens: list[int] = []
        from_peer = None
        if not (new or self.core.has_work(now)):
            time.sleep(0.001)
        else:
            for output in self.core.step(now, progress, new).outputs:
                tokens += bytes_to_ids(output.output_ids).tolist()
                if output.finish_reason is not None:
                    from_peer = output.cached_tokens_details.get("peer", 0)
        return tokens, from_peer

    def ask(self, prompt: np.ndarray, meanwhile: Callable[[], object]) -> tuple[list[int], int]:
        sampling = SamplingParams(max_new_tokens=5, temperature=0.0, ignore_eos=True, sampling_seed=1)
        request = TokenizedGenerateReqInput(
            rid="0", input_ids=ids_to_bytes(prompt), sampling_params=sampling, stream=True
        )
        tokens, from_peer = self.turn([request])
        while from_peer is None:
            more, from_peer = self.turn([])
            tokens += more
            meanwhile()
        return tokens, from_peer


def test_ranks_on_a_gpu_lend_and_borrow(
    driver: FakeCudaDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device_setup, "why_not", lambda backend, device: None)
    monkeypatch.setattr(device_setup, "pick_attention_backend", lambda name, device: "emulated")
    monkeypatch.setattr(startup_engine, "make_attention_backend", lambda name, device: TorchNativeAttnBackend())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 2 * 10**9))
    prompts = [np.random.default_rng(i).integers(3, 300, 100).astype(np.int32) for i in range(3)]
    small = "--model embedded --disable-cuda-graph --context-length 120 --peer-slab-size 2"
    # What a tier is used for must not depend on how fast this machine is.
    cached = "--hicache --hicache-ratio 0.1 --max-total-tokens 150 --hicache-load-or-recompute off"

    def arguments_of(role: str, more: str) -> ServerArgs:
        return ServerArgs.from_cli(
            f"{small} {more} --peer-role {role} --peer-endpoint ipc://{tmp_path}/peers".split()
        )

    tmp_path.chmod(0o700)
    worker = Rank(arguments_of("worker", "--max-total-tokens 6000 --peer-window 0.1"), tmp_path, GPU)
    master = Rank(arguments_of("master", f"{cached} --peer-size 0.01"), tmp_path, GPU)
    assert worker.core.slabs is not None and master.core.slabs is not None
    deadline = time.monotonic() + 60
    # It asks for slabs as it lacks room.
    while master.core.slabs.state()["lenders"][0]["slabs"]["held"] < 1:  # type: ignore[attr-defined]
        assert time.monotonic() < deadline, worker.core.slabs.state()  # type: ignore[attr-defined]
        for prompt in prompts:
            master.ask(prompt, lambda: worker.turn([]))
    found = [master.ask(prompt, lambda: worker.turn([])) for prompt in prompts * 2]
    own = worker.ask(prompts[0], lambda: None)
    for rank in (worker, master):
        rank.resources.close()
    alone = Rank(ServerArgs.from_cli(f"{small} {cached}".split()), tmp_path, CPU)
    wanted = [alone.ask(prompt, lambda: None)[0] for prompt in prompts]
    assert [tokens for tokens, _ in found] == wanted * 2 and own[0] == wanted[0]
    assert sum(from_peer for _, from_peer in found[3:]) > 150, found
