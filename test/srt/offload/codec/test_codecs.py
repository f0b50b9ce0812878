"""Round trips of every codec."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sgl_kernel.kvcodec import reference
from sglang.srt.offload.codec import HEADER_BYTES, BlockLayout, make_codec
from support.codec_cases import CONFIGS, CUT, KEY, SMALL, decode, encode, kv_block, normal_kv, round_trip

EXACT = [name for name in CONFIGS if not name.startswith("binned")]
BINNED = [name for name in CONFIGS if name.startswith("binned")]
LAYOUTS = {
    "page 1": kv_block(64, 3, 1, 2, 32, "bfloat16", 16 << 10),
    "page 16": kv_block(4, 3, 16, 2, 32, "bfloat16", 64 << 10),
    "page 64": kv_block(1, 3, 64, 2, 32, "bfloat16", 128 << 10),
    "pieces smaller than a page": CUT,
    "one vector": kv_block(1, 1, 1, 1, 128, "bfloat16"),
}


def with_dtype(layout: BlockLayout, dtype: str) -> BlockLayout:
    page = layout.page
    return kv_block(
        layout.num_pages, page.num_layers, page.page_size, *page.components[0].shape, dtype, layout.max_piece_bytes
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", EXACT)
def test_lossless_gives_back_every_bit(name: str, layout: BlockLayout, dtype: str):
    layout = with_dtype(layout, dtype)
    for raw in (
        normal_kv(layout),
        np.zeros(layout.block_bytes, np.uint8),
        np.full(layout.block_bytes, 0xFF, np.uint8),  # NaNs
        np.random.default_rng(0).integers(0, 256, layout.block_bytes, dtype=np.uint8),
    ):
        assert np.array_equal(round_trip(layout, CONFIGS[name], raw), raw)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_payloads_of_nans_come_back(dtype: str):
    layout = with_dtype(LAYOUTS["page 16"], dtype)
    raw = normal_kv(layout)
    odd = {"bfloat16": b"\x81\x7f\x01\xff", "float16": b"\x01\x7c\x55\xfe", "float32": b"\x01\x00\x80\x7f"}[dtype]
    raw.reshape(-1, 64)[::3, :4] = np.frombuffer(odd, np.uint8)
    codec = make_codec({}, layout)
    assert not codec.parse(encode(codec, raw), 0, KEY).stored
    assert np.array_equal(round_trip(layout, {}, raw), raw)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", BINNED)
def test_binned_is_off_by_half_a_bin_at_most(name: str, layout: BlockLayout, dtype: str):
    layout = with_dtype(layout, dtype)
    raw = normal_kv(layout)
    codec = make_codec(CONFIGS[name], layout)
    exact, decoded = (
        reference.to_float32(data, dtype).astype(np.float64).reshape(-1, layout.page.components[0].shape[-1])
        for data in (raw, round_trip(layout, CONFIGS[name], raw))
    )
    is_value, layer = layout.vectors(0, layout.block_bytes)
    half = codec._half[is_value.astype(int), layer][:, None]
    scale = np.abs(exact).max(axis=1, keepdims=True) / half
    rounding = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-23}[dtype]
    assert (np.abs(exact - decoded) <= scale * (0.5 + 1e-5) + np.abs(exact) * rounding * 1.01).all()
    assert (np.abs(exact - decoded) > 0).any(), "nothing was lost: was anything binned?"


@pytest.mark.parametrize("name", BINNED)
def test_zeros_stay_zeros_and_what_is_not_finite_is_stored(name: str):
    codec = make_codec(CONFIGS[name], SMALL)
    zeros = np.zeros(SMALL.block_bytes, np.uint8)
    assert len(encode(codec, zeros)) < SMALL.block_bytes / 4
    assert np.array_equal(round_trip(SMALL, CONFIGS[name], zeros), zeros)
    for odd in (b"\x80\x7f", b"\x80\xff", b"\x81\x7f", b"\x7f\x7f"):  # inf, -inf, a NaN, the largest finite value
        raw = normal_kv(SMALL)
        raw[-2:] = np.frombuffer(odd, np.uint8)
        stored = encode(codec, raw)
        assert codec.parse(stored, 0, KEY).stored
        assert np.array_equal(decode(codec, stored), raw)


@pytest.mark.parametrize("name", BINNED)
def test_coding_again_what_was_decoded_hardly_changes_it(name: str):
    """In float32, where the rounding of the largest value hardly moves the scale; in bfloat16 it does, by 2**-9."""
    layout = with_dtype(LAYOUTS["page 16"], "float32")
    once = round_trip(layout, CONFIGS[name], normal_kv(layout))
    twice = round_trip(layout, CONFIGS[name], once)
    a, b = once.view(np.float32), twice.view(np.float32)
    assert (np.abs(a - b) <= np.abs(a) * 2.0**-21).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_what_does_not_compress_is_stored_and_costs_a_header(name: str):
    codec = make_codec(CONFIGS[name], SMALL)
    raw = np.random.default_rng(0).integers(0, 256, SMALL.block_bytes, dtype=np.uint8)
    stored = encode(codec, raw)
    assert len(stored) <= codec.max_stored_bytes(SMALL.block_bytes) == SMALL.block_bytes + HEADER_BYTES
    assert codec.parse(stored, 0, KEY).stored
    assert np.array_equal(decode(codec, stored), raw)


@pytest.mark.parametrize(
    ("name", "at_most"), [("lossless", 0.72), ("lossless-deflate", 0.72), ("binned", 0.47), ("binned-cachegen", 0.27)]
)
def test_kv_becomes_smaller(name: str, at_most: float):
    layout = LAYOUTS["page 16"]
    codec = make_codec(CONFIGS[name], layout)
    assert len(encode(codec, normal_kv(layout))) < at_most * layout.raw_bytes(0)


@pytest.mark.parametrize("name", CONFIGS)
def test_encoding_is_deterministic_and_reads_only(name: str):
    raw = normal_kv(SMALL)
    raw.flags.writeable = False
    one, two = (encode(make_codec(CONFIGS[name], SMALL), raw) for _ in range(2))
    assert np.array_equal(one, two)


@pytest.mark.parametrize("name", CONFIGS)
def test_stages_run_on_any_thread(name: str):
    """One codec object, all pieces at once, stages on different threads."""
    layout = kv_block(16, 3, 4, 2, 64, "bfloat16", max_piece_bytes=8 << 10)
    raw, codec = normal_kv(layout), make_codec(CONFIGS[name], layout)
    expected = round_trip(layout, CONFIGS[name], raw)
    out = np.zeros_like(raw)
    pieces = list(range(layout.num_pieces)) * 4
    mids = [np.empty(codec.mid_bytes(layout.raw_bytes(p)), np.uint8) for p in pieces]
    with ThreadPoolExecutor(4) as pool:
        stored = list(pool.map(lambda p: encode(codec, raw, p), pieces))
        headers = list(pool.map(lambda s, p: codec.parse(s, p, KEY), stored, pieces))
        list(pool.map(codec.decompress, stored, headers, mids))
        outs = [out[slice(*layout.piece(p))] for p in pieces]
        list(pool.map(codec.dequantize, stored, headers, mids, outs))
    assert np.array_equal(out, expected)


def test_bins_go_by_layer_and_by_k_and_v():
    layout = kv_block(2, 4, 3, 2, 32, "float32")
    config = {"codec": "binned", "k_bins": [[1, 255], [None, 3]], "v_bins": [[3, 5], [1, 255]]}
    raw = normal_kv(layout)
    exact, decoded = (
        data.view(np.float32).reshape(2, 2, 4, -1, 32) for data in (raw, round_trip(layout, config, raw))
    )
    for kv, halves in ((0, [127, 1, 1, 1]), (1, [2, 2, 2, 127])):
        for layer, half in enumerate(halves):
            x = exact[:, kv, layer]
            scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(half)
            assert np.array_equal(decoded[:, kv, layer], np.rint(x / scale) * scale)
