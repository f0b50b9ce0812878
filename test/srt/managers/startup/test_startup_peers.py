"""Memory of peers from the words of a user: which kind, how much, and what is refused with a sentence."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
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
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.managers.startup import device as device_setup
from sglang.srt.managers.startup import engine as startup_engine
from sglang.srt.managers.startup import sizes
from sglang.srt.managers.startup.device import check_device, page_layout
from sglang.srt.managers.startup.peers import borrow_memory, in_whole_slabs, lend_memory
from sglang.srt.managers.startup.rank_setup import RankSetup
from sglang.srt.managers.startup.sizes import device_pages
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.peer.memory import cuda_slabs
from sglang.srt.peer.memory.slabs import SlabError
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.child_process import StartupError
from sglang.srt.utils.device import CPU
from sglang.srt.utils.startup_progress import StartupProgress
from support.device_emulator import emulated_device
from support.fake_cuda_driver import FakeCudaDriver
from support.paged_attention import PagedAttention
from support.server_fixture import wait_until
from support.tiny_model import tiny_llama
from support.windowed_model import write_windowed_model

GPU = torch.device("cuda", 0)
LAYOUT = PageLayout.kv(2, 3, 2, 8, torch.float32)
CONFIG: Any = SimpleNamespace(num_device_pages=2000, num_windowed_pages=0, context_len=500, page_size=2)


def arguments(more: str, tmp_path: Path) -> ServerArgs:
    tmp_path.chmod(0o700)
    return ServerArgs.from_cli(f"--model m --peer-endpoint ipc://{tmp_path}/peers {more}".split())


@pytest.fixture
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, and 2 KiB of KV a token. The emulator's time goes with a model's operations."""
    path = tmp_path_factory.mktemp("model")
    tiny_llama(path, num_hidden_layers=2, num_attention_heads=2, head_dim=64, vocab_size=300)
    return path


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCudaDriver]:
    driver = FakeCudaDriver(2 << 20)
    monkeypatch.setattr(cuda_slabs, "cuda_driver", lambda: driver)
    with emulated_device(1):
        yield driver
    assert not driver.fake.broken


def lend(args: ServerArgs, tmp_path: Path) -> Any:
    return lend_memory(args, CONFIG, LAYOUT, (), rank_of(tmp_path))


def rank_of(tmp_path: Path) -> RankSetup:
    return RankSetup(SINGLE_RANK, lambda: None, tmp_path, ExitStack(), device=GPU)


def arguments_of_a_master(tmp_path: Path) -> ServerArgs:
    return arguments("--peer-role master --hicache --peer-slab-size 2 --peer-size 0.01", tmp_path)


def test_a_worker_lends_and_a_master_borrows_the_devices_memory(driver: FakeCudaDriver, tmp_path: Path):
    lent = lend(arguments("--peer-role worker --peer-slab-size 2", tmp_path), tmp_path)
    borrowed = borrow_memory(arguments_of_a_master(tmp_path), LAYOUT, rank_of(tmp_path))
    try:
        assert lent.pool.kv.is_cuda and lent.slabs.num_slabs * lent.pool.slab_pages >= 2000
        assert borrowed.pool.kv.is_cuda and borrowed.slabs.num_slabs == 4
        assert lent.pool.scratch_slot == lent.pool.num_pages * 2 and borrowed.pool.scratch_slot is None
        assert borrowed.pool.seen_by_stream() is borrowed.pool, "its layers are loaded by groups, as the host's are"
    finally:
        lent.close()
        borrowed.close()


def test_beside_a_pool_for_windows_are_whole_slabs(driver: FakeCudaDriver, tmp_path: Path):
    """Pages of one of three layers, 256 bytes."""
    args = arguments("--peer-role worker --peer-slab-size 2", tmp_path)
    config = SchedulerConfig(2, 50_000, 0, LAYOUT.page_bytes, context_len=500, num_windowed_pages=7)
    found = in_whole_slabs(args, config, LAYOUT, (True, False, True), GPU)
    assert found == replace(config, num_device_pages=5 * 8192), "beside the scratch page's piece of memory"


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
        # What it did before it was ready.
        self.stages: list[str] = []
        progress = StartupProgress()
        progress.stage = self.stages.append  # type: ignore[method-assign]
        self.core, _ = startup_engine.build_core(
            args, RankSetup(SINGLE_RANK, lambda: None, tmp_path, self.resources, device=device, progress=progress)
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

    def ask_all(self, prompts: Sequence[np.ndarray], meanwhile: Callable[[], object]) -> list[list[int]]:
        """The answers to prompts that come at the same time."""
        sampling = SamplingParams(max_new_tokens=5, temperature=0.0, ignore_eos=True, sampling_seed=1)
        new = [
            TokenizedGenerateReqInput(
                rid=str(i), input_ids=ids_to_bytes(prompt), sampling_params=sampling, stream=True
            )
            for i, prompt in enumerate(prompts)
        ]
        answers: dict[str, list[int]] = {each.rid: [] for each in new}
        num_left = len(new)
        while num_left:
            progress, now = self.core.progress(), time.monotonic()
            if new or self.core.has_work(now):
                for output in self.core.step(now, progress, new).outputs:
                    answers[output.rid] += bytes_to_ids(output.output_ids).tolist()
                    num_left -= output.finish_reason is not None
                new = []
            else:
                time.sleep(0.001)
            meanwhile()
        return list(answers.values())

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


@pytest.mark.slow
def test_a_worker_on_a_gpu_lends_nothing_of_its_pool_for_windows(
    driver: FakeCudaDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of four layers three have a window, and 1.5 of 2 KiB of a token."""
    monkeypatch.setattr(device_setup, "why_not", lambda backend, device: None)
    monkeypatch.setattr(device_setup, "pick_attention_backend", lambda name, device: "emulated")
    attention = TorchNativeAttnBackend()
    attention.computes_masked = True
    monkeypatch.setattr(startup_engine, "make_attention_backend", lambda name, device: attention)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 2 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    model = write_windowed_model(tmp_path / "model", 8)
    prompts = [np.random.default_rng(i).integers(3, 300, 250).astype(np.int32) for i in range(3)]
    small = f"--model {model} --dtype float32 --disable-cuda-graph --context-length 320 --chunked-prefill-size 64"
    tmp_path.chmod(0o700)
    more = "--max-total-tokens 12288 --swa-full-tokens-ratio 0.1 --peer-role worker --peer-slab-size 2"
    args = f"{small} {more} --peer-window 0.1 --peer-endpoint ipc://{tmp_path}/peers".split()
    worker = Rank(ServerArgs.from_cli(args), tmp_path, GPU)
    # What computes windows for it looks at any pages.
    attention.computes_masked = False
    pool: Any = worker.core.executor.pool
    # Slabs of 4,096 tokens.
    assert pool.slabs.num_slabs == 3 and pool.page_bytes == 512 and pool.num_windowed_pages == 1229
    assert pool.scratch_slot == pool.num_pages and pool.windowed_scratch_slot == 1229
    own = [worker.ask(prompt, lambda: None)[0] for prompt in prompts]
    slabs: Any = worker.core.slabs
    borrowed = borrow_memory(arguments_of_a_master(tmp_path), LAYOUT, rank_of(tmp_path))
    borrowed.set_demand(3, 10**9)
    wait_until(lambda: [worker.turn([]), borrowed.poll_mapped()] and slabs.state()["slabs"]["lent"] == 2)
    assert [worker.ask(prompt, lambda: None)[0] for prompt in prompts] == own
    borrowed.disconnect()
    worker.resources.close()
    alone = Rank(ServerArgs.from_cli(small.split()), tmp_path, CPU)
    assert [alone.ask(prompt, lambda: None)[0] for prompt in prompts] == own


@pytest.mark.slow
def test_ranks_on_a_gpu_lend_and_borrow(
    driver: FakeCudaDriver, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device_setup, "why_not", lambda backend, device: None)
    monkeypatch.setattr(device_setup, "pick_attention_backend", lambda name, device: "emulated")
    monkeypatch.setattr(startup_engine, "make_attention_backend", lambda name, device: TorchNativeAttnBackend())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 2 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    prompts = [np.random.default_rng(i).integers(3, 300, 100).astype(np.int32) for i in range(3)]
    small = (
        f"--model {model} --dtype float32 --page-size 1 --disable-cuda-graph --context-length 120 --peer-slab-size 2"
    )
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


def test_a_worker_on_a_gpu_decodes_as_graphs_while_slabs_come_and_go(
    driver: FakeCudaDriver, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It has compiled, copied and captured before it is ready. Rows of padding write to no slab of the master."""
    attention = PagedAttention(captures_extends=True)
    monkeypatch.setattr(device_setup, "why_not", lambda backend, device: None)
    monkeypatch.setattr(device_setup, "pick_attention_backend", lambda name, device: "emulated")
    backends = {"cuda": attention, "cpu": TorchNativeAttnBackend()}
    monkeypatch.setattr(startup_engine, "make_attention_backend", lambda name, device: backends[device.type])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 2 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    warm_up_transfers, copied = startup_engine.warm_up_transfers, []

    def warm_up(pool: Any, host_pages: Any, io_backend: str, windowed: list[bool]) -> None:
        copied.append((pool.scratch_slot is not None, io_backend))
        warm_up_transfers(pool, host_pages, io_backend, windowed)

    monkeypatch.setattr(startup_engine, "warm_up_transfers", warm_up)
    # Here copies with the host are other ones.
    monkeypatch.setattr(startup_engine, "pick_backend", lambda io_backend, device: "kernel")
    driver.fake.granularity = 1 << 20
    small = f"--model {model} --dtype float32 --context-length 120 --page-size 1 --hicache-load-or-recompute off"
    tmp_path.chmod(0o700)

    def rank(role: str, more: str) -> Rank:
        peers = f"--hicache --hicache-ratio 0.1 --peer-role {role} --peer-slab-size 1"
        where = f"--peer-endpoint ipc://{tmp_path}/peers"
        return Rank(ServerArgs.from_cli(f"{small} {peers} {where} {more}".split()), tmp_path, GPU)

    # Two slabs of 512 tokens.
    graphs = "--cuda-graph-max-bs-decode 8 --cuda-graph-max-bs-prefill 16"
    worker = rank("worker", f"{graphs} --max-total-tokens 1000 --peer-window 0.1")
    stages = worker.stages
    assert stages.index("compiling kernels") < stages.index("capturing CUDA graphs of up to 8 requests")
    assert worker.core.executor.pool.scratch_slot == 1024 and copied == [(True, "auto")]
    assert not attention.capturing and attention.replayed == 0
    master = rank("master", "--disable-cuda-graph --max-total-tokens 150 --peer-size 0.001")
    assert copied[1:] == [(True, "auto"), (True, "kernel")], "also what copies with peers"
    rng = np.random.default_rng(3)
    asked, many = ([rng.integers(3, 300, 100).astype(np.int32) for _ in range(n)] for n in (3, 7))
    few = many[:2]
    slabs: Any = master.core.slabs
    found: list[tuple[np.ndarray, list[int]]] = []

    def held() -> int:
        return slabs.state()["lenders"][0]["slabs"]["held"]

    def ask(prompts: Sequence[np.ndarray], meanwhile: Callable[[], object] = lambda: master.turn([])) -> None:
        """The worker, by graphs."""
        before = attention.replayed
        found.extend(zip(prompts, worker.ask_all(prompts, meanwhile)))
        assert attention.replayed > before

    deadline = time.monotonic() + 120
    while not held():
        assert time.monotonic() < deadline, slabs.state()
        for prompt in asked:
            master.ask(prompt, lambda: worker.turn([]))
    ask(few)
    from_peer = 0
    # Once to fill the slab.
    for prompt in asked * 2:
        tokens, num = master.ask(prompt, lambda: worker.turn([]))
        found.append((prompt, tokens))
        from_peer += num
    assert from_peer > 90
    # It recalls the slab, for whose pages requests wait.
    fewest = held()

    def give_back() -> None:
        nonlocal fewest
        master.turn([])
        fewest = min(fewest, held())

    ask(many, give_back)
    while fewest:
        assert time.monotonic() < deadline, slabs.state()
        worker.turn([])
        give_back()
    ask(few)
    for each in (worker, master):
        each.resources.close()
    alone = Rank(ServerArgs.from_cli(f"{small} --max-total-tokens 1000".split()), tmp_path, CPU)
    wanted = {prompt.tobytes(): alone.ask(prompt, lambda: None)[0] for prompt in (*asked, *many)}
    assert all(tokens == wanted[prompt.tobytes()] for prompt, tokens in found)


def test_a_worker_on_a_gpu_takes_no_more_than_is_free(
    driver: FakeCudaDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whole slabs and a scratch page fit into what the flags leave, the padding of slabs included."""
    model = tiny_llama(tmp_path)
    piece = 2 << 20
    for page_size in (1, 16, 64):
        flags = f"--peer-role worker --peer-slab-size 2 --page-size {page_size}"
        args = arguments(flags, tmp_path)
        page_bytes = page_layout(model, page_size, 1).page_bytes
        for free, num_slabs in ((4 * piece, 3), (4 * piece - 1, 2), (5 * piece - 1, 3)):
            monkeypatch.setattr(sizes, "kv_cache_bytes", lambda args, device, num_ranks, free=free: free)
            found = device_pages(args, model, SINGLE_RANK, GPU)
            assert found == (num_slabs * (piece // page_bytes), page_bytes)
        most = found[0] * page_size
        args = arguments(f"{flags} --max-total-tokens {most}", tmp_path)
        assert device_pages(args, model, SINGLE_RANK, GPU)[0] == found[0]
        args = arguments(f"{flags} --max-total-tokens {most + page_size}", tmp_path)
        with pytest.raises(StartupError, match=f"but {most} tokens fit"):
            device_pages(args, model, SINGLE_RANK, GPU)
    args = arguments("--peer-role worker --peer-slab-size 2 --page-size 8192", tmp_path)
    with pytest.raises(StartupError, match="--peer-slab-size 2 has no room for a page"):
        device_pages(args, model, SINGLE_RANK, GPU)
