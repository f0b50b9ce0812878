"""The codecs' loops: numpy against plain arithmetic, compiled C against numpy, byte for byte."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch
from isal import igzip_lib

from sgl_kernel import kvcodec
from sgl_kernel.kvcodec import native, reference

needs_compiler = pytest.mark.skipif(not native.is_available(), reason="no C compiler")
BOTH = [reference, pytest.param(native, marks=needs_compiler)]
TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Lengths around what a vector register holds, and odd ones.
LENGTHS = [0, 1, 3, 15, 16, 17, 31, 64, 100, 1023, 4097]


def random_bytes(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8)


def special_values(dtype: str, n: int, seed: int) -> np.ndarray:
    """Bytes of finite values of all magnitudes that can be binned, subnormal ones and zeros among them."""
    rng = np.random.default_rng(seed)
    exponents = {"float16": (-24, 15), "bfloat16": (-133, 126), "float32": (-149, 126)}[dtype]
    values = rng.uniform(-1, 1, n) * 2.0 ** rng.uniform(*exponents, n)
    values[rng.random(n) < 0.1] = 0.0
    values[rng.random(n) < 0.1] = -0.0
    return torch.from_numpy(values).to(TORCH[dtype]).view(torch.uint8).numpy()


def unaligned(n: int, dtype: type = np.uint8) -> np.ndarray:
    return np.empty(n + 1, np.uint8)[1:].view(dtype)


@pytest.mark.parametrize("loops", BOTH)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("n", LENGTHS)
def test_planes_come_apart_and_together(loops, itemsize: int, n: int):
    raw = random_bytes(n * itemsize, n)
    first, rest, out = unaligned(n), unaligned(n * (itemsize - 1)), unaligned(n * itemsize)
    loops.split_planes(raw, itemsize, first, rest)
    bits = 8 * itemsize
    for i, value in enumerate(raw.view(f"<u{itemsize}").tolist()):
        rotated = (value << 1 | value >> bits - 1) & (1 << bits) - 1
        planes = [first[i], *(rest[p * n + i] for p in range(itemsize - 1))]
        assert bytes(planes) == rotated.to_bytes(itemsize, "big")
    loops.merge_planes(first, rest, itemsize, out)
    assert np.array_equal(out, raw)


def test_the_first_plane_of_bfloat16_and_float32_is_the_exponent():
    for dtype, itemsize in (("bfloat16", 2), ("float32", 4)):
        raw = torch.tensor([1.0, -1.0, 2.5, -0.0], dtype=TORCH[dtype]).view(torch.uint8).numpy()
        first, rest = np.empty(4, np.uint8), np.empty(4 * (itemsize - 1), np.uint8)
        kvcodec.split_planes(raw, itemsize, first, rest)
        assert first.tolist() == [127, 127, 128, 0]
        assert rest[-4:].tolist() == ([0, 1, 64, 1] if itemsize == 2 else [0, 1, 0, 1])


@pytest.mark.parametrize("loops", BOTH)
@pytest.mark.parametrize("dtype", TORCH)
def test_bins_by_hand(loops, dtype: str):
    raw = torch.tensor([[4.0, -2.0, 1.0, 0.0], [0, 0, -0.0, 0], [-7, 3.5, 0.5, -0.5]], dtype=TORCH[dtype])
    half = np.array([2, 127, 7], np.uint8)
    scales, codes = np.empty(12, np.uint8), np.empty(12, np.int8)
    assert loops.bin_vectors(raw.view(torch.uint8).numpy().reshape(-1), dtype, 4, half, scales, codes)
    assert scales.view(np.float32).tolist() == [2.0, 0.0, 1.0]
    # Ties go to even: 1 / 2 -> 0, 3.5 -> 4, 0.5 -> 0.
    assert codes.reshape(3, 4).tolist() == [[2, -1, 0, 0], [0, 0, 0, 0], [-7, 4, 0, 0]]
    out = np.empty(12 * kvcodec.ITEM_BYTES[dtype], np.uint8)
    loops.unbin_vectors(scales, codes, dtype, 4, out)
    decoded = torch.from_numpy(out).view(TORCH[dtype]).reshape(3, 4).float()
    assert decoded.tolist() == [[4, -2, 0, 0], [0, 0, 0, 0], [-7, 4, 0, 0]]


@pytest.mark.parametrize("loops", BOTH)
@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), 2.0**127])
def test_what_is_not_finite_or_too_large_is_refused(loops, dtype: str, bad: float):
    values = torch.ones(3, 8)
    values[1, 5] = bad
    raw = values.to(TORCH[dtype]).view(torch.uint8).numpy().reshape(-1)
    half = np.full(3, 127, np.uint8)
    assert not loops.bin_vectors(raw, dtype, 8, half, np.empty(12, np.uint8), np.empty(24, np.int8))


@needs_compiler
@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("dim", [1, 7, 16, 64, 100, 128])
def test_compiled_bins_equal_the_reference(dtype: str, dim: int):
    item_bytes, n = kvcodec.ITEM_BYTES[dtype], 50
    rng = np.random.default_rng(dim)
    for raw in (special_values(dtype, n * dim, dim), random_bytes(n * dim * item_bytes, dim)):
        half = rng.integers(1, 128, n, dtype=np.uint8)
        expected_scales, expected_codes = np.zeros(4 * n, np.uint8), np.zeros(n * dim, np.int8)
        scales, codes = unaligned(4 * n), unaligned(n * dim, np.int8)
        fits = reference.bin_vectors(raw, dtype, dim, half, expected_scales, expected_codes)
        assert native.bin_vectors(raw, dtype, dim, half, scales, codes) == fits
        if fits:
            assert np.array_equal(scales, expected_scales) and np.array_equal(codes, expected_codes)


@pytest.mark.parametrize("loops", BOTH)
@pytest.mark.parametrize("dtype", TORCH)
def test_unbinning_rounds_as_torch_does(loops, dtype: str):
    n, dim = 300, 33
    rng = np.random.default_rng(3)
    codes = rng.integers(-128, 128, n * dim, dtype=np.int8)
    scales = (2.0 ** rng.uniform(-126, 118, n)).astype(np.float32)
    scales[:10] = [0, 2.0**-126, 2.0**-24, 2.0**-25, 65504 / 127, 65520 / 127, 2.0**119, 1, 1.5, 1 / 3]
    # Between two values of bfloat16, and of float16: ties, to the even one below and above.
    scales[10:14] = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11]
    codes[: 14 * dim : dim] = 1
    out = unaligned(n * dim * kvcodec.ITEM_BYTES[dtype])
    loops.unbin_vectors(scales.view(np.uint8), codes, dtype, dim, out)
    exact = torch.from_numpy(codes.reshape(n, dim)).float() * torch.from_numpy(scales)[:, None]
    assert np.array_equal(out, exact.to(TORCH[dtype]).view(torch.uint8).numpy().reshape(-1))


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("half", [1, 7, 15, 127])
def test_a_bin_is_off_by_half_a_scale_at_most(dtype: str, half: int):
    dim, n = 64, 200
    raw = special_values(dtype, n * dim, half)
    scales, codes = np.empty(4 * n, np.uint8), np.empty(n * dim, np.int8)
    assert kvcodec.bin_vectors(raw, dtype, dim, np.full(n, half, np.uint8), scales, codes)
    assert np.abs(codes.astype(int)).max() <= half
    exact = reference.to_float32(raw, dtype).astype(np.float64).reshape(n, dim)
    scale = scales.view(np.float32).astype(np.float64)[:, None]
    assert (np.abs(exact - codes.reshape(n, dim) * scale) <= scale * (0.5 + half * 2.0**-23)).all()


def test_arguments_that_do_not_fit_are_refused_before_a_byte_moves():
    raw, first, rest = np.zeros(8, np.uint8), np.zeros(4, np.uint8), np.zeros(4, np.uint8)
    read_only = first.copy()
    read_only.flags.writeable = False
    for arguments in (
        (raw, 3, first, rest),
        (raw[:6], 2, first, rest),
        (raw, 2, first, rest[:3]),
        (raw, 4, first, rest),
        (raw, 2, np.zeros(8, np.uint8)[::2], rest),
        (raw, 2, first.view(np.int8), rest),
        (raw, 2, read_only, rest),
    ):
        with pytest.raises(kvcodec.KVCodecError):
            kvcodec.split_planes(*arguments)
    with pytest.raises(kvcodec.KVCodecError):
        kvcodec.merge_planes(first, rest, 2, raw[:7])
    scales, codes, half = np.zeros(8, np.uint8), np.zeros(8, np.int8), np.full(2, 127, np.uint8)
    values = np.zeros(16, np.uint8)
    assert kvcodec.bin_vectors(values, "bfloat16", 4, half, scales, codes)
    for arguments in (
        (values, "int8", 4, half, scales, codes),
        (values, "float32", 4, half, scales, codes),
        (values, "bfloat16", 3, half, scales, codes),
        (values, "bfloat16", 4, half[:1], scales, codes),
        (values, "bfloat16", 4, half * 0, scales, codes),
        (values, "bfloat16", 4, half + 1, scales, codes),
        (values, "bfloat16", 4, half, scales[:4], codes),
    ):
        with pytest.raises(kvcodec.KVCodecError):
            kvcodec.bin_vectors(*arguments)
    with pytest.raises(kvcodec.KVCodecError):
        kvcodec.unbin_vectors(scales, codes, "bfloat16", 4, values[:15])


def bytes_of_all_shapes() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    # Frequencies that double make a code as long as there are symbols: 30 bits, were it not limited.
    doubling = np.repeat(np.arange(17, dtype=np.uint8), 2 ** np.arange(17))
    fibonacci = [1, 1]
    while sum(fibonacci) < 60000:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    return {
        "nothing": np.zeros(0, np.uint8),
        "one byte": np.full(1, 7, np.uint8),
        "one symbol": np.full(200_000, 255, np.uint8),
        "two symbols": rng.integers(0, 2, 4097, dtype=np.uint8),
        "all alike": np.arange(256, dtype=np.uint8).repeat(3),
        "noise": rng.integers(0, 256, 70_000, dtype=np.uint8),
        "doubling": rng.permutation(doubling),
        "Fibonacci": np.repeat(np.arange(len(fibonacci), dtype=np.uint8), fibonacci),
        "Gaussian": np.rint(rng.normal(0, 8, 300_001)).astype(np.int8).view(np.uint8),
        "exactly two blocks": np.rint(rng.normal(0, 3, 64 << 10)).astype(np.int8).view(np.uint8),
    }


@pytest.mark.parametrize("loops", BOTH)
@pytest.mark.parametrize("what", bytes_of_all_shapes())
def test_literals_are_deflate_to_any_decoder(loops, what: str):
    data = bytes_of_all_shapes()[what]
    out = np.full(len(data) * 2 + 400, 0xA5, np.uint8)
    size = loops.deflate_literals(data, out[100:-100])
    stream = bytes(out[100 : 100 + size])
    assert (out[:100] == 0xA5).all() and (out[-100:] == 0xA5).all()
    decompressor = zlib.decompressobj(-15)
    assert decompressor.decompress(stream) == bytes(data)
    assert decompressor.eof and not decompressor.unused_data
    assert igzip_lib.decompress(stream, igzip_lib.DECOMP_DEFLATE) == bytes(data)


@needs_compiler
def test_compiled_literals_take_no_more_room_than_those_of_zlib():
    for what, data in bytes_of_all_shapes().items():
        out = np.empty(len(data) * 2 + 400, np.uint8)
        expected = reference.deflate_literals(data, out)
        size = native.deflate_literals(data, out)
        assert size <= 1.01 * expected + 200, what


@pytest.mark.parametrize("loops", BOTH)
def test_literals_that_do_not_fit_write_nothing_beside_out(loops):
    data = bytes_of_all_shapes()["Gaussian"]
    whole = loops.deflate_literals(data, np.empty(2 * len(data), np.uint8))
    for room in (0, 1, 8, 100, 50_000, whole - 1, whole, whole + 8):
        out = np.full(room + 200, 0xA5, np.uint8)
        size = loops.deflate_literals(data, out[100 : 100 + room])
        assert size is None or (size == whole and room >= whole)
        assert (out[:100] == 0xA5).all() and (out[100 + room :] == 0xA5).all()
    assert size == whole


def deflated(rng: random.Random, data: bytes) -> bytearray:
    level, memory, strategy = rng.choice([0, 1, 6, 9]), rng.choice([1, 9]), rng.choice([0, 2, 3, 4])
    compressor = zlib.compressobj(level, zlib.DEFLATED, -15, memory, strategy)
    return bytearray(compressor.compress(data) + compressor.flush())


@pytest.mark.parametrize("what", bytes_of_all_shapes())
def test_any_deflate_stream_is_decoded_and_nothing_beside_out_is_written(what: str):
    data, rng = bytes_of_all_shapes()[what], random.Random(1)
    own = np.empty(len(data) * 2 + 400, np.uint8)
    streams = [deflated(rng, data.tobytes()) for _ in range(12)]
    streams.append(bytearray(own[: kvcodec.deflate_literals(data, own)].tobytes()))
    for stream in streams:
        out = np.full(len(data) + 200, 0xA5, np.uint8)
        assert kvcodec.inflate(np.frombuffer(stream, np.uint8), out[100:-100])
        assert (out[100:-100] == data).all() and (out[:100] == 0xA5).all() and (out[-100:] == 0xA5).all()


@pytest.mark.sampled(1)
@needs_compiler
@pytest.mark.parametrize("seed", range(int(os.environ.get("SEED", 0)), int(os.environ.get("SEED", 0)) + 4))
def test_streams_that_are_damaged_are_refused_as_zlib_does(seed: int):
    print(f"seed {seed}")
    rng, refused = random.Random(seed), 0
    for _ in range(300):
        size = rng.choice([0, 1, 5, 40, 300, 5000])
        data = bytes(rng.choice(b"aab" if size % 2 else bytes(range(256))) for _ in range(size))
        stream = deflated(rng, data)
        for _ in range(rng.choice([0, 1, 2, 6])):
            how = rng.randrange(4)
            if how == 0 and stream:
                stream[rng.randrange(min(len(stream), 12))] ^= 1 << rng.randrange(8)
            elif how == 1:
                stream = stream[: rng.randrange(len(stream) + 1)]
            elif how == 2:
                stream.append(rng.randrange(256))
            elif stream:
                stream[rng.randrange(len(stream))] = rng.randrange(256)
        size = max(0, size + rng.choice([0, 0, 0, -1, 1]))
        given = np.frombuffer(stream, np.uint8)
        out, expected = np.full(size + 64, 0xA5, np.uint8), np.empty(size, np.uint8)
        is_good = native.inflate(given, out[32 : 32 + size])
        assert is_good == reference.inflate(given, expected)
        assert not is_good or (out[32 : 32 + size] == expected).all()
        assert (out[:32] == 0xA5).all() and (out[32 + size :] == 0xA5).all()
        refused += not is_good
    assert 30 < refused < 270


@pytest.mark.slow
@needs_compiler
def test_two_processes_may_compile_at_once(tmp_path):
    code = "import sys, pathlib; from sgl_kernel.kvcodec import native\n"
    code += "print(native.LIBRARY.compile(pathlib.Path(sys.argv[1])))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate(timeout=120)[0] for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert len(paths) == 1
    assert [p.name for p in tmp_path.iterdir()] == [paths.pop().strip().rpartition("/")[2]], (
        "something was left behind"
    )


def test_without_a_compiler_numpy_does_it_and_the_log_says_so(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("CC", str(tmp_path / "no-such-compiler"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.LIBRARY.forget()
    try:
        with caplog.at_level(logging.WARNING):
            assert kvcodec._loops() is reference and kvcodec._loops() is reference
        assert [r.message for r in caplog.records if "kvcodec" in r.message] == [caplog.records[0].message]
    finally:
        native.LIBRARY.forget()
