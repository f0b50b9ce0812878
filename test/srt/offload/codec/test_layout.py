"""Blocks cut into pieces, and what their vectors are."""

from __future__ import annotations

import numpy as np
import pytest

from support.codec_cases import kv_block


def test_a_block_of_llama_8b():
    block = kv_block(256, num_layers=32, page_size=1, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    assert block.vector_bytes == 256 and block.page.page_bytes == 128 << 10 and block.block_bytes == 32 << 20
    assert block.piece_bytes == 2 << 20 and block.num_pieces == 16
    assert block.piece(0) == (0, 2 << 20) and block.piece(15) == (30 << 20, 32 << 20)


def test_pieces_are_about_as_large_as_each_other():
    # 10 pages, 4 fit: 4 + 4 + 2, in three pieces.
    assert kv_block(10, 1, 1, 1, 1, "float32", max_piece_bytes=32).piece_bytes == 32
    # 9 pages, 4 fit: three pieces of 3, not 4 + 4 + 1.
    block = kv_block(9, 1, 1, 1, 1, "float32", max_piece_bytes=32)
    assert [block.piece(i) for i in range(block.num_pieces)] == [(0, 24), (24, 48), (48, 72)]


def test_a_page_larger_than_a_piece_is_cut_between_vectors():
    block = kv_block(1, num_layers=3, page_size=2, num_kv_heads=1, head_dim=4, dtype="bfloat16", max_piece_bytes=41)
    assert block.page.page_bytes == 96 and block.vector_bytes == 8
    assert [block.piece(i) for i in range(block.num_pieces)] == [(0, 32), (32, 64), (64, 96)]


@pytest.mark.parametrize("seed", range(30))
def test_pieces_cover_a_block_without_gaps(seed: int):
    rng = np.random.default_rng(seed)
    shape = [int(n) for n in rng.integers(1, 7, 5)]
    block = kv_block(*shape, dtype="bfloat16", max_piece_bytes=int(rng.integers(12, 400)))
    pieces = [block.piece(i) for i in range(block.num_pieces)]
    assert pieces[0][0] == 0 and pieces[-1][1] == block.block_bytes
    assert [end for _, end in pieces[:-1]] == [start for start, _ in pieces[1:]]
    unit = block.page.page_bytes if block.page.page_bytes <= block.max_piece_bytes else block.vector_bytes
    for index, (start, end) in enumerate(pieces):
        assert 0 < end - start <= block.max_piece_bytes and start % unit == 0
        assert block.raw_bytes(index) == end - start


def test_vectors_know_their_layer_and_whether_they_are_values():
    block = kv_block(2, num_layers=3, page_size=2, num_kv_heads=5, head_dim=4, dtype="float16")
    shape = (2, 2, 3, 2, 5)
    _, kv, layer, _, _ = (a.reshape(-1) for a in np.indices(shape))
    is_value, layers = block.vectors(0, block.block_bytes)
    assert np.array_equal(is_value, kv == 1) and np.array_equal(layers, layer)
    is_value, layers = block.vectors(7 * 8, 41 * 8)
    assert np.array_equal(is_value, kv[7:41] == 1) and np.array_equal(layers, layer[7:41])


def test_what_cannot_be_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match="bfloat16"):
        kv_block(1, 1, 1, 1, 8, "float4")
    with pytest.raises(ValueError, match="max_piece_bytes"):
        kv_block(1, 1, 1, 1, 8, "float32", max_piece_bytes=31)
    with pytest.raises(ValueError, match="empty"):
        kv_block(0, 1, 1, 1, 8, "float32")


def test_two_layouts_never_share_a_spec():
    base = (4, 3, 2, 5, 8, "bfloat16", 1 << 20)
    others = [(*base[:i], base[i] * 2, *base[i + 1 :]) for i in (0, 1, 2, 3, 4, 6)] + [
        (*base[:5], "float16", base[6])
    ]
    specs = {kv_block(*fields).spec for fields in [base, *others]}
    assert len(specs) == 8
