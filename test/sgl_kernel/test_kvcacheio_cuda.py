"""The CUDA kernel without a GPU: compiled for sm_90, its arguments checked, its index arithmetic run in Python."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
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
from support.kv_model import DTYPES, ROUTES, Pool, expected, index_patterns, random_bytes

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


@pytest.mark.parametrize("ends", [(3,), (1, 2, 3), (1, 3)], ids=str)
def test_a_load_by_one_kernel_brings_its_layers_in_order(ends: tuple[int, ...]):
    """Its loop over groups, in Python: what a group does not have is not touched before the group's turn."""
    src, dst = Pool("page_first", 7, 3, 2, torch.int32, 1), Pool("layer_first", 9, 3, 2, torch.int32, 2)
    src_pages, dst_pages = [5, 0, 3], [8, 1, 4]
    indices = [torch.tensor(pages) for pages in (src_pages, dst_pages)]
    base = {id(t): t.storage_offset() * t.dtype.itemsize for p in (src.pages, dst.pages) for t in (p.k, p.v)}
    args = [int(a) for a in arguments_of(src.pages, dst.pages, indices, lambda t: base.get(id(t), 0))]
    num_layers, (k_segments, v_segments), num_segments = args[16], args[17:19], args[20]
    num_pages = num_segments // (num_layers * (k_segments + v_segments))
    assert num_pages == 3
    source, target = src.raw(), dst.buffer.view(torch.uint8).numpy()
    first = 0
    for end in ends:
        args[16], args[20] = end - first, num_pages * (end - first) * (k_segments + v_segments)
        before = dst.pages.k.clone(), dst.pages.v.clone()
        run_kernel_model(source, target, src_pages, dst_pages, *args, first_layer=first)
        for old, new, loaded in zip(before, dst.pages.components, src.pages.components):
            assert torch.equal(new[:first], old[:first]) and torch.equal(new[end:], old[end:])
            assert torch.equal(new[first:end, dst_pages], loaded[first:end, src_pages])
        first = end


def test_more_segments_than_the_kernel_counts_are_refused():
    src = Pool("page_first", 2, 3, 2, torch.float16, 1)
    many = torch.zeros(1, dtype=torch.int64).expand(1 << 30)
    with pytest.raises(KVLayoutError, match="in parts"):
        arguments_of(src.pages, src.pages, [many, many], lambda t: t.data_ptr())


@pytest.mark.parametrize("seed", range(4), ids="seed{}".format)
def test_its_index_arithmetic_reaches_every_byte_once(monkeypatch: pytest.MonkeyPatch, seed: int):
    """The kernel's loop, line by line, in Python. That the CUDA text computes the same is for a GPU to show."""
    monkeypatch.setattr(cuda_kernels, "SEGMENT_BYTES", 24)
    rng = np.random.default_rng(seed)
    for from_layout, to_layout in ROUTES[:5]:
        uneven = {"v_shape": (2, 3)} if "block_major" not in (from_layout, to_layout) else {}
        for what, src_pages, dst_pages in index_patterns(rng, 7, 9, 5):
            dtype = DTYPES[seed]
            src = Pool(from_layout, 7, 3, 3, dtype, seed, **uneven)
            dst = Pool(to_layout, 9, 3, 3, dtype, seed + 1, **uneven)
            result = expected(src, dst, src_pages, dst_pages)
            indices = [torch.tensor(p, dtype=torch.int64) for p in (src_pages, dst_pages)]
            base = {id(t): t.storage_offset() * t.dtype.itemsize for p in (src.pages, dst.pages) for t in (p.k, p.v)}
            args = arguments_of(src.pages, dst.pages, indices, lambda t, b=base: b.get(id(t), 0))
            source, target = src.raw(), dst.buffer.view(torch.uint8).numpy()
            run_kernel_model(source, target, src_pages, dst_pages, *(int(a) for a in args))
            assert np.array_equal(dst.raw(), result), what


@pytest.mark.parametrize("num_components", [1, 2, 3, 4])
def test_every_component_is_in_one_launch(num_components: int):
    """Two in each, and the last one alone: then there is no V to copy."""
    src, dst = (
        KVPages(*(random_bytes((3, 5, 2, 7 + i), torch.uint8, seed + i) for i in range(num_components)))
        for seed in (1, 100)
    )
    indices = [torch.tensor([4, 1]), torch.tensor([0, 3])]
    for one, other in cuda_kernels.pairs(src, dst):
        args = [int(a) for a in arguments_of(one, other, indices, lambda t: 0)]
        sides = [[each.numpy().reshape(-1) for each in side.components] for side in (one, other)]
        source, target = (np.concatenate(side) for side in sides)
        if len(sides[0]) == 2:
            # Where V begins in each.
            args[1], args[3] = len(sides[0][0]), len(sides[1][0])
        run_kernel_model(source, target, [4, 1], [0, 3], *args)
        found = np.split(target, [len(sides[1][0])])
        for a, b, result in zip(one.components, other.components, found):
            wanted = b.numpy().copy()
            wanted[:, [0, 3]] = a.numpy()[:, [4, 1]]
            assert np.array_equal(result.reshape(b.shape), wanted)
    assert len(cuda_kernels.pairs(src, dst)) == -(-num_components // 2)


def run_kernel_model(
    source, target, src_pages, dst_pages, src_k, src_v, dst_k, dst_v, _s, _d,
    src_layer_k, src_page_k, src_layer_v, src_page_v, dst_layer_k, dst_page_k, dst_layer_v, dst_page_v,
    k_bytes, v_bytes, num_layers, k_segments, v_segments, segment_bytes, num_segments, first_layer=0,
) -> None:  # fmt: skip
    per_layer = k_segments + v_segments
    for item in range(num_segments):
        index, in_page = divmod(item, per_layer * num_layers)
        in_group, in_layer = divmod(in_page, per_layer)
        layer = first_layer + in_group
        is_v = in_layer >= k_segments
        start = (in_layer - k_segments if is_v else in_layer) * segment_bytes
        size = min((v_bytes if is_v else k_bytes) - start, segment_bytes)
        s, d = src_pages[index], dst_pages[index]
        src = src_v + layer * src_layer_v + s * src_page_v if is_v else src_k + layer * src_layer_k + s * src_page_k
        dst = dst_v + layer * dst_layer_v + d * dst_page_v if is_v else dst_k + layer * dst_layer_k + d * dst_page_k
        target[dst + start : dst + start + size] = source[src + start : src + start + size]


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


@pytest.mark.parametrize("count", range(1, 12))
def test_a_lane_of_bulk_copies_loads_to_places_that_are_free(count: int):
    """The loop of the bulk kernel, of one lane: each segment is loaded and stored once, from its own place, and the
    barrier of a place is awaited in the phase that its load ends."""
    held: dict[int, int] = {}
    loads, stored = [0] * BULK_SLOTS, []
    ahead = BULK_SLOTS - 2
    for n in range(count + ahead):
        if n < count:
            # The last store may still be read from its place.
            assert n % BULK_SLOTS not in held, "loaded over what is not stored yet"
            assert not stored or n % BULK_SLOTS != stored[-1] % BULK_SLOTS
            held[n % BULK_SLOTS] = n
            loads[n % BULK_SLOTS] += 1
        if n < ahead:
            continue
        done = n - ahead
        assert done // BULK_SLOTS & 1 == (loads[done % BULK_SLOTS] - 1) & 1
        stored.append(held.pop(done % BULK_SLOTS))
        assert stored[-1] == done
    assert stored == list(range(count)) and not held
