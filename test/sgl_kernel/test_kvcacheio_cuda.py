"""The CUDA kernels without a GPU: compiled for sm_90, their arguments checked, their text run on the CPU."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sgl_kernel import kvcacheio
from sgl_kernel.kvcacheio import KVLayoutError, KVPages, LayerFlags, cuda_kernels
from sgl_kernel.kvcacheio.cuda_kernels import (
    BULK_KERNEL,
    BULK_RING_BYTES,
    BULK_SLOTS,
    KERNEL,
    LOAD_KERNEL,
    MOST_BULK_BYTES,
    SEGMENT_BYTES,
    SEGMENTS_AT_ONCE,
    SOURCE,
    THREADS,
    Launch,
    bulk_segment_bytes,
)
from support.cuda_on_cpu import CudaOnCPU, needs_compiler
from support.kv_model import ROUTES, Pool, expected, index_patterns, random_bytes

TRITON = importlib.util.find_spec("triton")
NVCC = shutil.which("nvcc")
# Triton brings NVIDIA's disassembler.
TRITON_TOOLS = next(iter(Path(TRITON.origin).parent.glob("backends/nvidia/bin")), None) if TRITON else None
NVRTC = importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None


def check_ptx(ptx: str) -> None:
    assert all(f".entry {kernel}" in ptx for kernel in (KERNEL, BULK_KERNEL, LOAD_KERNEL))
    # Of a block, before it tells that a group of layers is there.
    assert re.search(r"bar\.sync.*fence\.sc\.sys|bar\.sync.*membar\.sys", ptx, re.DOTALL)
    assert "cp.async.bulk.shared::cluster.global.mbarrier" in ptx and "cp.async.bulk.global.shared::cta" in ptx
    assert ptx.count("ld.global.nc.L1::no_allocate.v4.u32") > SEGMENTS_AT_ONCE
    assert ptx.count("st.global.cs.v4.u32") > SEGMENTS_AT_ONCE


def check_sass(cubin: bytes, folder: Path) -> None:
    """What the GPU executes: of a warp's segments all are loaded before the first is stored, and a block leaves
    room to others on its multiprocessor."""
    (folder / "kernel.cubin").write_bytes(cubin)
    sass, usage = (
        subprocess.run(
            [str(tool), option, str(folder / "kernel.cubin")], capture_output=True, text=True, check=True
        ).stdout
        for tool, option in ((TRITON_TOOLS / "nvdisasm", "-c"), (TRITON_TOOLS / "cuobjdump", "-res-usage"))
    )
    # Each function is followed by what it uses.
    for kernel in (KERNEL, LOAD_KERNEL):
        of_function = re.search(rf"\.section\s+\.text\.{kernel},(.*?)(\.section|\Z)", sass, re.DOTALL)
        assert of_function
        accesses = re.findall(r"(LDG\S*\.128)|(STG\S*\.128)", of_function[1])
        wide = "".join("l" if load else "s" for load, _ in accesses)
        assert "l" * SEGMENTS_AT_ONCE + "s" * SEGMENTS_AT_ONCE in wide, wide
        of_kernel = re.search(rf"Function {kernel}:\s+REG:(\d+) STACK:0 ", usage)
        assert of_kernel and int(of_kernel[1]) * THREADS <= 65536 // 4, usage
    of_bulk = re.search(rf"Function {BULK_KERNEL}:\s+REG:(\d+) STACK:0 SHARED:(\d+) ", usage)
    assert of_bulk and int(of_bulk[2]) + BULK_RING_BYTES <= 227 << 10, usage
    assert "UBLKCP" in sass


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
def test_nvcc_compiles_it_for_sm_90(tmp_path: Path):
    assert NVCC is not None
    command = [NVCC, "-arch=sm_90", "-std=c++17", "-Werror", "all-warnings", "--ptxas-options=-v"]
    cubin = subprocess.run(
        [*command, "-cubin", "-o", str(tmp_path / "k.cubin"), str(SOURCE)], capture_output=True, text=True
    )
    assert cubin.returncode == 0, cubin.stderr
    registers = re.search(r"Used (\d+) registers", cubin.stderr)
    assert registers and int(registers[1]) * THREADS <= 65536 // 4, "a block leaves others room in its multiprocessor"
    assert "0 bytes spill stores, 0 bytes spill loads" in cubin.stderr
    ptx = subprocess.run([*command[:3], "-ptx", "-o", "-", str(SOURCE)], capture_output=True, text=True)
    assert ptx.returncode == 0, ptx.stderr
    check_ptx(ptx.stdout)


@pytest.mark.skipif(not NVRTC, reason="cuda.bindings is not installed")
def test_nvrtc_compiles_it_for_sm_90(tmp_path: Path):
    """As CuPy does at run time: no headers, the same options."""
    from cuda.bindings import nvrtc

    try:
        error, program = nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), b"kvcacheio.cu", 0, [], [])
    except Exception as missing:
        pytest.skip(f"the NVRTC library is not installed: {missing}")
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS
    options = [b"--std=c++17", b"--gpu-architecture=sm_90"]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    # Memory of its own: `b" " * 1` is an object that the whole process shares, and the library writes into it.
    log = bytes(bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1] + 1))
    nvrtc.nvrtcGetProgramLog(program, log)
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
    ptx = bytes(bytearray(nvrtc.nvrtcGetPTXSize(program)[1] + 1))
    nvrtc.nvrtcGetPTX(program, ptx)
    check_ptx(ptx.decode())
    if TRITON_TOOLS is not None:
        cubin = bytes(bytearray(nvrtc.nvrtcGetCUBINSize(program)[1] + 1))
        nvrtc.nvrtcGetCUBIN(program, cubin)
        check_sass(cubin[:-1], tmp_path)


def arguments_of(
    src: KVPages, dst: KVPages, indices: list[torch.Tensor], address: Callable[[torch.Tensor], int]
) -> tuple[Any, ...]:
    return Launch.of(src, dst, address).arguments(indices, address)


def test_the_arguments_are_the_kernels_in_its_order():
    signature = SOURCE.read_text().partition("#define COPY_PARAMETERS")[2].partition("#define")[0]
    parameters = [p.replace("*", "* ").split() for p in " ".join(signature.replace("\\", "").split()).split(", ")]
    src, dst = Pool("page_first", 5, 3, 2, torch.float16, 1), Pool("layer_first", 6, 3, 2, torch.float16, 2)
    indices = [torch.tensor([1, 2]), torch.tensor([3, 4])]
    arguments = arguments_of(src.pages, dst.pages, indices, lambda t: t.data_ptr())
    assert len(arguments) == len(parameters)
    for value, parameter in zip(arguments, parameters):
        kind = np.uint64 if "*" in "".join(parameter) else {"long": np.int64, "int": np.int32}[parameter[0]]
        assert isinstance(value, kind), parameter
    named = {parameter[-1].lstrip("*"): int(value) for value, parameter in zip(arguments, parameters)}
    assert named["src_v"] == src.pages.v.data_ptr() and named["dst_pages"] == indices[1].data_ptr()
    assert (named["src_layer_stride_v"], named["src_page_stride_v"]) == (32, 2 * 3 * 32)
    assert (named["dst_layer_stride_k"], named["dst_page_stride_k"]) == (6 * 32, 32)
    assert (named["k_bytes"], named["num_layers"], named["num_segments"]) == (32, 3, 2 * 3 * 2)


def test_a_load_by_one_kernel_has_further_arguments():
    signature = re.search(rf"{LOAD_KERNEL}\(COPY_PARAMETERS, (.*?)\)", SOURCE.read_text())
    assert signature and signature[1] == "const int* ends, unsigned int* done, int num_groups"


class Launched(Exception):
    """By a kernel that fails."""


@pytest.mark.parametrize("num_components", [1, 2, 3])
def test_a_load_by_one_kernel_tells_what_to_wait_for(monkeypatch: pytest.MonkeyPatch, num_components: int):
    """Of all blocks that have been launched, also if the next launch fails."""
    src, dst = (
        KVPages(*(random_bytes((7, 90, 2, 700), torch.uint8, seed + i) for i in range(num_components)))
        for seed in (1, 100)
    )
    flags = LayerFlags([1, 2, 4, 7], torch.device("cpu"), SimpleNamespace())
    launches: list[tuple[int, tuple[Any, ...]]] = []
    fails_at: list[int] = []

    def kernel(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
        if len(launches) in fails_at:
            raise Launched
        assert block == (THREADS,)
        launches.append((grid[0], arguments))

    monkeypatch.setattr(cuda_kernels, "_current", lambda *_: nullcontext(torch.device("cpu")))
    monkeypatch.setattr(cuda_kernels, "_kernel", lambda index, name: {LOAD_KERNEL: kernel}[name])
    monkeypatch.setattr(cuda_kernels, "device_address", lambda t: t.data_ptr())
    few, many = torch.tensor([3]), torch.arange(90)
    # A run is three segments. 64 warps are 8 blocks, each of which takes 64 segments at a time.
    values = [kvcacheio.load_layers(src, dst, pages, pages, flags) for pages in (few, many)]
    blocks = [grid for grid, _ in launches]
    # Of the last component alone 810 segments of three layers are 13 blocks, and one page's are one.
    assert blocks == [1] * -(-num_components // 2) + [8] * -(-num_components // 2)
    assert values == [sum(blocks[: len(blocks) // 2]), sum(blocks)]
    for _, arguments in launches:
        ends, words, num_groups = arguments[-3:]
        assert (ends, words, num_groups) == (flags.ends.data_ptr(), flags.words.data_ptr(), 4)
        assert [type(each) for each in arguments[-3:]] == [np.uint64, np.uint64, np.int32]
    fails_at.append(len(launches) + (num_components + 1) // 2 - 1)
    with pytest.raises(Launched):
        kvcacheio.load_layers(src, dst, many, many, flags)
    fails_at.clear()
    assert kvcacheio.load_layers(src, dst, few, few, flags) == sum(grid for grid, _ in launches)


def test_more_segments_than_the_kernel_counts_are_refused():
    src = Pool("page_first", 2, 3, 2, torch.float16, 1)
    many = torch.zeros(1, dtype=torch.int64).expand(1 << 30)
    with pytest.raises(KVLayoutError, match="in parts"):
        arguments_of(src.pages, src.pages, [many, many], lambda t: t.data_ptr())


def test_a_segment_is_an_access_of_each_lane():
    assert SEGMENT_BYTES == 32 * 16
    assert f"SEGMENTS_AT_ONCE = {SEGMENTS_AT_ONCE};" in SOURCE.read_text()
    assert f"BULK_RING_BYTES = {BULK_RING_BYTES >> 10} << 10;" in SOURCE.read_text()
    assert f"BULK_SLOTS = {BULK_SLOTS};" in SOURCE.read_text()


def test_a_lane_of_bulk_copies_takes_a_run_at_a_time():
    assert [bulk_segment_bytes(run) for run in ((30,), (2048, 2048), (2049, 16), (131072,))] == [
        1024,
        2048,
        4096,
        8192,
    ]
    # The least that a ring can hold is a lane's.
    assert BULK_RING_BYTES >= BULK_SLOTS * MOST_BULK_BYTES


# -- run on the CPU ------------------------------------------------------------------------------------------------

# Of a token, so that runs have three segments of sixteen bytes a lane, of words, and of single bytes.
HEADS = {torch.float32: (2, 64), torch.bfloat16: (6, 38), torch.uint8: (5, 77)}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> CudaOnCPU:
    return CudaOnCPU(SOURCE.read_text(), tmp_path_factory.mktemp("cuda"), BULK_RING_BYTES)


class OnCPU:
    """In the place of what launches kernels on a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, compiled: CudaOnCPU) -> None:
        self.seed = 0
        self.on_add: Callable[[int], None] = lambda address: None
        self._compiled = compiled
        monkeypatch.setattr(cuda_kernels, "_current", lambda *_: nullcontext(torch.device("cpu")))
        monkeypatch.setattr(cuda_kernels, "_kernel", lambda index, name: partial(self._launch, name))
        monkeypatch.setattr(cuda_kernels, "device_address", lambda t: t.data_ptr())

    def _launch(self, name: str, grid: tuple[int], block: tuple[int], arguments: Any, shared_mem: int = 0) -> None:
        assert shared_mem == (BULK_RING_BYTES if name == BULK_KERNEL else 0)
        self._compiled.launch(name, grid[0], block[0], arguments, self.seed, self.on_add)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, compiled: CudaOnCPU) -> OnCPU:
    return OnCPU(monkeypatch, compiled)


def check_copies(on_cpu: OnCPU, seed: int, is_bulk: bool) -> None:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    for number, (from_layout, to_layout) in enumerate(ROUTES[:5]):
        dtype = list(HEADS)[(seed + number) % len(HEADS)]
        heads = HEADS[dtype]
        uneven = {"v_shape": (1, heads[1])} if "block_major" not in (from_layout, to_layout) else {}
        src = Pool(from_layout, 17, 2, 3, dtype, seed, heads, **uneven)
        dst = Pool(to_layout, 19, 2, 3, dtype, seed + 1, heads, **uneven)
        for what, src_pages, dst_pages in index_patterns(rng, 17, 19, 12):
            result = expected(src, dst, src_pages, dst_pages)
            indices = [torch.tensor(pages) for pages in (src_pages, dst_pages)]
            on_cpu.seed += 1
            cuda_kernels.copy_pages(src.pages, dst.pages, *indices, num_warps=16, is_bulk=is_bulk)
            assert np.array_equal(dst.raw(), result), what


@needs_compiler
@pytest.mark.parametrize("seed", range(2), ids="seed{}".format)
@pytest.mark.parametrize("is_bulk", [False, True], ids=["kernel", "bulk"])
def test_every_byte_is_copied_to_its_place(on_cpu: OnCPU, seed: int, is_bulk: bool) -> None:
    check_copies(on_cpu, seed, is_bulk)


@needs_compiler
@pytest.mark.parametrize("num_pages", [1, 3, 9, 40])
def test_bulk_copies_of_large_runs_use_their_places_again(on_cpu: OnCPU, num_pages: int) -> None:
    """Four lanes of one block; the last segment of a run is shorter, and no bulk copy where it is odd."""
    for tokens in (1125, 1126):
        src, dst = (Pool("page_first", 40, 2, tokens, torch.uint8, seed, (2, 4)) for seed in (1, 2))
        pages = torch.randperm(40, generator=torch.Generator().manual_seed(num_pages))[:num_pages]
        result = expected(src, dst, pages.tolist(), pages.flip(0).tolist())
        cuda_kernels.copy_pages(src.pages, dst.pages, pages, pages.flip(0), num_warps=32, is_bulk=True)
        assert np.array_equal(dst.raw(), result)


@needs_compiler
@pytest.mark.parametrize("num_components", [1, 2, 3, 4])
def test_every_component_is_copied(on_cpu: OnCPU, num_components: int) -> None:
    """Two in each launch, and the last one alone: then there is no V."""
    src, dst = (
        KVPages(*(random_bytes((3, 5, 2, 700 + i), torch.uint8, seed + i) for i in range(num_components)))
        for seed in (1, 100)
    )
    wanted = [each.clone() for each in dst.components]
    for mine, other in zip(wanted, src.components):
        mine[:, [0, 3]] = other[:, [4, 1]]
    for is_bulk in (False, True):
        cuda_kernels.copy_pages(src, dst, torch.tensor([4, 1]), torch.tensor([0, 3]), num_warps=16, is_bulk=is_bulk)
        assert all(torch.equal(a, b) for a, b in zip(dst.components, wanted))
        for each in dst.components:
            each[:, [0, 3]] = 0
    assert len(cuda_kernels.pairs(src, dst)) == -(-num_components // 2)


@needs_compiler
@pytest.mark.parametrize("ends", [(5,), (1, 2, 3, 4, 5), (1, 4, 5)], ids=str)
def test_a_load_by_one_kernel_tells_when_layers_are_there(on_cpu: OnCPU, ends: tuple[int, ...]) -> None:
    """Whoever has waited for a group's word finds its layers."""
    src, dst = (
        KVPages(*(random_bytes((5, 30, 2, 700), torch.uint8, seed + i) for i in range(2))) for seed in (1, 100)
    )
    flags = LayerFlags(ends, torch.device("cpu"), SimpleNamespace())
    src_pages, dst_pages = torch.randperm(30)[:20], torch.randperm(30)[:20]
    wanted: int | None = None
    # Groups, and whether their layers were there.
    seen: list[tuple[int, bool]] = []

    def look(address: int) -> None:
        group = (address - flags.words.data_ptr()) // flags.words.itemsize
        if flags.words[group] == wanted:
            both = zip(dst.components, src.components)
            equal = (torch.equal(a[: ends[group], dst_pages], b[: ends[group], src_pages]) for a, b in both)
            seen.append((group, all(equal)))

    # Once to learn how many blocks there are; then from a word that is not 0.
    on_cpu.on_add = look
    first = kvcacheio.load_layers(src, dst, src_pages, dst_pages, flags)
    assert first > 1 and flags.words.tolist() == [first] * len(ends)
    wanted = 2 * first
    for each in dst.components:
        each.zero_()
    assert kvcacheio.load_layers(src, dst, src_pages, dst_pages, flags) == wanted
    assert seen == [(group, True) for group in range(len(ends))]
    assert all(not each[:, [i for i in range(30) if i not in dst_pages.tolist()]].any() for each in dst.components)


# What is changed in the text, and what is found then.
BUGS = {
    "a place too few": ("BULK_AHEAD = BULK_SLOTS - 2", "BULK_AHEAD = BULK_SLOTS - 1", "array_equal"),
    "stores are not waited for": ("wait_group.read 1", "wait_group.read 2", "array_equal"),
    "the other phase": ("done / BULK_SLOTS & 1)", "done / BULK_SLOTS + 1 & 1)", "in the wrong phase"),
    "ends too early": ('asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");', "", "ended before its stores"),
    "a lane stays away": ("if (lane < SEGMENTS_AT_ONCE && item", "if (lane == 31) return;\nif (item", "do not come"),
    "layers are told of too early": ("__syncthreads();", "", "False"),
    "other bytes are expected": (
        ', %1;" ::"r"(barrier), "r"(s.size)',
        ', %1;" ::"r"(barrier), "r"(16)',
        "other bytes",
    ),
    "words of odd bytes": ("(both & 3) == 0", "(both & 1) == 0", "4 bytes is not aligned"),
}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bug: str) -> None:
    old, new, message = BUGS[bug]
    text = SOURCE.read_text()
    assert text.count(old) == 1
    on_cpu = OnCPU(monkeypatch, CudaOnCPU(text.replace(old, new), tmp_path, BULK_RING_BYTES))
    with pytest.raises(AssertionError, match=message):
        for is_bulk in (False, True):
            check_copies(on_cpu, 0, is_bulk)
        test_bulk_copies_of_large_runs_use_their_places_again(on_cpu, 40)
        test_a_load_by_one_kernel_tells_when_layers_are_there(on_cpu, (1, 4, 5))
