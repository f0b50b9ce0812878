"""Which device a rank takes, what its memory has room for, what is refused; and a rank that is built on a GPU."""

from __future__ import annotations

import json
import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang.srt.configs.latent import LatentConfig
from sglang.srt.distributed.parallel_state import SINGLE_RANK, TensorParallelGroup
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.managers.engine_core import EngineCore
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, bytes_to_ids, ids_to_bytes
from sglang.srt.managers.startup import device as device_setup
from sglang.srt.managers.startup import engine as startup_engine
from sglang.srt.managers.startup.device import (
    check_device,
    free_memory,
    has_memory_of_its_own,
    kv_cache_bytes,
    pick_device,
    pick_dtype,
    with_kv_cache,
)
from sglang.srt.managers.startup.rank_setup import RankSetup
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import device as device_module
from sglang.srt.utils.child_process import StartupError
from sglang.srt.utils.device import CPU, cpu_has_instructions_for
from support.device_emulator import emulated_device

CUDA = torch.device("cuda", 0)


def args(**options: object) -> ServerArgs:
    return ServerArgs(model_path="embedded", **options)  # type: ignore[arg-type]


def gpu(name: str, processors: int = 132) -> SimpleNamespace:
    return SimpleNamespace(name=name, major=9, minor=0, multi_processor_count=processors)


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs of 100 GB, of which 60 are free."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * 10**9, 100 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu("H100"))
    # Whatever is installed here.
    monkeypatch.setattr(device_setup, "why_not", lambda backend, device: None)


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device(args(), 0) == pick_device(args(device="cpu"), 3) == CPU
    with pytest.raises(StartupError, match=r"no GPU here.*use --device cpu"):
        pick_device(args(device="cuda"), 0)


def test_ranks_take_a_gpu_each(gpus):
    assert [pick_device(args(tp_size=2), rank) for rank in (0, 1)] == [CUDA, torch.device("cuda", 1)]
    assert pick_device(args(device="cpu"), 1) == CPU
    for rank in (0, 3):
        with pytest.raises(StartupError, match="--tp-size 4 needs as many GPUs, and there are 2"):
            pick_device(args(tp_size=4), rank)


def test_ranks_need_gpus_of_one_kind(gpus, monkeypatch):
    """The batches that warm up kernels, whose collectives must be the same, depend on it."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", [gpu("H100"), gpu("H100 PCIe", 114)].__getitem__)
    with pytest.raises(StartupError, match="needs GPUs of one kind, and there are 0: H100, 1: H100 PCIe; name equal"):
        pick_device(args(tp_size=2), 1)
    assert pick_device(args(), 0) == CUDA


def test_gpus_that_cannot_be_connected(monkeypatch, tmp_path):
    def fail(x, group):
        raise RuntimeError("NCCL error: unhandled system error\nLast error: no space left on device")

    monkeypatch.setattr(torch.distributed, "all_reduce", fail)
    group = TensorParallelGroup(0, 2)
    with (
        emulated_device(),
        pytest.raises(StartupError, match=r"\(NCCL error: unhandled system error\): NCCL_DEBUG=INFO"),
    ):
        startup_engine.build_core(args(tp_size=2), RankSetup(group, lambda: None, tmp_path, ExitStack(), device=CUDA))
    group.connect(CPU)


def test_auto_takes_float32_on_a_cpu_without_the_models_instructions(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    for stored in (torch.float32, torch.bfloat16, torch.float16):
        monkeypatch.setattr(device_setup, "cpu_has_instructions_for", lambda dtype: True)
        assert pick_dtype(args(), stored, CPU) == stored
        monkeypatch.setattr(device_setup, "cpu_has_instructions_for", lambda dtype: dtype == torch.float32)
        assert pick_dtype(args(dtype="half"), stored, CPU) == pick_dtype(args(), stored, CUDA) == stored
        assert not caplog.records
        assert pick_dtype(args(), stored, CPU) == torch.float32
        assert len(caplog.records) == (stored != torch.float32)
        assert not caplog.records or "float32, as this CPU has no instructions for the model's" in caplog.text
        caplog.clear()


@pytest.mark.parametrize(
    ("capabilities", "fast"),
    [
        ({"avx2": True, "avx512_bf16": False, "avx512_f": True}, set()),
        ({"avx512_bf16": True, "avx512_fp16": False}, {torch.bfloat16}),
        ({"amx_bf16": True, "avx512_fp16": True}, {torch.bfloat16, torch.float16}),
        ({"neon": True, "fp16_arith": True, "bf16": False}, {torch.float16}),
        (None, {torch.bfloat16}),
    ],
)
def test_instructions_of_a_cpu(capabilities, fast, monkeypatch, tmp_path):
    """None: a torch that does not tell, where the system does."""
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name : avx512_fp16\nflags\t\t: fpu avx2 avx512_bf16\n")
    monkeypatch.setattr(device_module, "_CPUINFO", tmp_path / "cpuinfo")
    if capabilities is None:
        monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    else:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert {dtype for dtype in (torch.bfloat16, torch.float16) if cpu_has_instructions_for(dtype)} == fast
    assert cpu_has_instructions_for(torch.float32)


def test_weights_kv_and_storage_follow_the_type_that_is_picked(monkeypatch, tmp_path):
    monkeypatch.setattr(device_setup, "cpu_has_instructions_for", lambda dtype: False)
    options = {"enable_hierarchical_cache": True, "max_total_tokens": 300, "hicache_storage_backend": "file"}
    seen = []
    for dtype in ("auto", "float32", "bfloat16"):
        extra = json.dumps({"path": str(tmp_path / "kv")})
        server_args = args(**options, dtype=dtype, hicache_storage_backend_extra_config=extra)
        with ExitStack() as on_exit:
            core, storage = startup_engine.build_core(
                server_args, RankSetup(SINGLE_RANK, lambda: None, tmp_path, on_exit)
            )
            weights = {parameter.dtype for parameter in core.executor.model.parameters()}
            pool = storage.opener.pool
            seen.append((weights, pool.kv.dtype, pool.page_layout.dtype, core.scheduler.config.storage.secret))
    assert seen[0] == seen[1] and seen[0][:2] == ({torch.float32}, torch.float32)
    assert seen[2][:2] == ({torch.bfloat16}, torch.bfloat16), "an explicit type is kept"
    assert seen[2][2] != seen[1][2] and seen[2][3] != seen[1][3]


def test_an_integrated_gpu_has_the_hosts_memory(gpus, monkeypatch):
    assert has_memory_of_its_own(CUDA) and not has_memory_of_its_own(CPU)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(is_integrated=1))
    assert not has_memory_of_its_own(CUDA)
    monkeypatch.setattr(device_setup, "available_memory", lambda: 90 * 10**9)
    assert free_memory(CUDA, 1) == 90 * 10**9
    # Of 100 GB 12 are left free.
    assert kv_cache_bytes(args(), CUDA, 1) == pytest.approx(78 * 10**9, abs=10)


def test_memory(gpus, monkeypatch):
    monkeypatch.setattr(device_setup, "available_memory", lambda: 20 * 10**9)
    assert free_memory(CPU, 2) == 10 * 10**9 and free_memory(CUDA, 2) == 60 * 10**9
    assert kv_cache_bytes(args(), CPU, 1) == 12 * 10**9
    assert kv_cache_bytes(args(mem_fraction_static=0.5), CPU, 2) == 5 * 10**9
    # What is not static is left free, whatever the weights have taken.
    assert kv_cache_bytes(args(), CUDA, 2) == pytest.approx(48 * 10**9, abs=10)
    assert kv_cache_bytes(args(mem_fraction_static=0.7), CUDA, 1) == pytest.approx(30 * 10**9, abs=10)
    assert kv_cache_bytes(args(mem_fraction_static=0.3), CUDA, 1) == 0


@pytest.mark.parametrize(
    "options, device, words",
    [
        (
            {"peer_strict": True, "peer_role": "worker", "peer_endpoint": "tcp://127.0.0.1:5600"},
            CUDA,
            "--peer-strict is not served on a GPU yet",
        ),
        ({"attention_backend": "torch_native"}, CUDA, "torch_native computes on the CPU only"),
        ({"attention_backend": "triton"}, CPU, "triton computes on an NVIDIA GPU only"),
    ],
)
def test_what_a_device_does_not_serve_is_refused(gpus, options, device, words):
    with pytest.raises(StartupError, match=words):
        check_device(args(**options), device)


def test_what_copies_is_refused_where_it_cannot():
    with pytest.raises(StartupError, match="--hicache-io-backend kernel cannot run here"):
        check_device(args(hicache_io_backend="kernel"), CPU)


def ask(core: EngineCore, prompts: list[list[int]]) -> list[list[int]]:
    sampling = SamplingParams(max_new_tokens=5, temperature=0.0, ignore_eos=True, sampling_seed=1)
    new = [
        TokenizedGenerateReqInput(rid=str(i), input_ids=ids_to_bytes(prompt), sampling_params=sampling, stream=True)
        for i, prompt in enumerate(prompts)
    ]
    found: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    ended = 0
    while ended < len(prompts):
        progress = core.progress()
        if not (new or core.has_work(0.0)):
            time.sleep(0.001)  # copies are other threads' work
            continue
        for output in core.step(0.0, progress, new).outputs:
            found[output.rid] += bytes_to_ids(output.output_ids).tolist()
            ended += output.finish_reason is not None
        new = []
    return list(found.values())


def test_a_rank_on_a_gpu(gpus, monkeypatch, tmp_path):
    """As the server builds it; the device is emulated, and computes attention as the CPU does."""
    prompts = [[11, 12, 13] * 9, [11, 12, 13] * 8 + [40], [55] * 30]
    options = {
        "enable_hierarchical_cache": True,
        "hicache_size": 0.05,
        "max_total_tokens": 300,
        "disable_cuda_graph": True,
        "layer_stream": 2,
        "layer_stream_tokens": 32,
        "chunked_prefill_size": 64,
    }

    def run(device: torch.device, folder: Path) -> list[list[int]]:
        folder.mkdir()
        core, storage = startup_engine.build_core(
            args(**options), RankSetup(SINGLE_RANK, lambda: None, folder, ExitStack(), device)
        )
        found = ask(core, prompts) + ask(core, prompts)
        storage.slot.detach()
        return found

    wanted = run(CPU, tmp_path / "cpu")
    monkeypatch.setattr(device_setup, "pick_attention_backend", lambda name, device: "emulated")
    monkeypatch.setattr(startup_engine, "make_attention_backend", lambda name, device: TorchNativeAttnBackend())
    with emulated_device(1) as device:
        assert run(CUDA, tmp_path / "cuda") == wanted
        assert device.streams, "nothing was done on the device"


@pytest.mark.parametrize(
    ("backend", "rank", "sentence"),
    [
        ("flashinfer", 512, "does not read latents yet: use --attention-backend triton"),
        ("triton", 24, "powers of two, 16 at least, and the model's are 24 and 64: use --device cpu"),
    ],
)
def test_latents_that_no_kernel_reads_are_refused(backend: str, rank: int, sentence: str) -> None:
    model = SimpleNamespace(latent=LatentConfig(rank, 64, 128, 128))
    with pytest.raises(StartupError, match=sentence):
        with_kv_cache(args(), model, backend, CUDA)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Latents:
    """What of a model with latents `with_kv_cache` looks at."""

    dtype: torch.dtype
    latent: LatentConfig
    kv_cache_dtype: torch.dtype | None = None
    kv_scales: None = None


@pytest.mark.parametrize(
    ("shared_kib", "dtype", "fits"),
    [(99, torch.float32, False), (163, torch.float32, True), (99, torch.bfloat16, True)],
)
def test_latents_of_8_bits_in_float32_need_the_shared_memory_of_an_a100(
    shared_kib: int, dtype: torch.dtype, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(shared_memory_per_block_optin=shared_kib << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(device_setup, "checkpoint_kv_scales", lambda *_: None)
    flags, model = args(kv_cache_dtype="fp8_e5m2"), Latents(dtype, LatentConfig(512, 64, 128, 128))
    if fits:
        assert with_kv_cache(flags, model, "triton", CUDA).kv_cache_dtype is torch.float8_e5m2  # type: ignore[arg-type]
    else:
        with pytest.raises(StartupError, match=r"latents in float32 does not fit .*: use --dtype bfloat16"):
            with_kv_cache(flags, model, "triton", CUDA)  # type: ignore[arg-type]
