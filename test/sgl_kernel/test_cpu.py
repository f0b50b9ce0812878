"""`sgl_kernel.cpu` against torch: packed weights, element-wise work, rows into slots."""

from __future__ import annotations

import logging
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

from sgl_kernel import elementwise
from sgl_kernel.cpu import elementwise as cpu
from sgl_kernel.cpu import few_rows, packed_weight
from sgl_kernel.cpu.library import LIBRARY, takes
from sgl_kernel.cpu.packed_weight import PackedGate, PackedHeads, PackedWeight
from sgl_kernel.elementwise import reference

needs_compiler = pytest.mark.skipif(not LIBRARY.is_available(), reason="no C compiler")
# Outputs and inputs: whole panels and parts of one, chains shorter and longer than a block.
SHAPES = [(1, 1), (16, 8), (17, 3), (31, 256), (33, 257), (200, 700), (15, 1030)]


def near(got: torch.Tensor, want: torch.Tensor, size: float) -> bool:
    """Off by at most a few roundings of numbers of that size."""
    return bool((got.double() - want.double()).abs().max() <= 4e-7 * size)


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_weights_multiply_as_torch(shape):
    torch.manual_seed(1)
    weight, bias = torch.randn(shape), torch.randn(shape[0])
    packed = PackedWeight(weight)
    assert torch.equal(packed.unpack(), weight)
    for rows in (0, 1, 2, 5, 6, 7, 13, 64, 500):
        # Rows of a wider tensor, with memory behind it that must not be read.
        x = torch.full((rows, shape[1] + 3), torch.nan)[:, : shape[1]].normal_()
        for b in (None, bias):
            want = F.linear(x.double(), weight.double(), None if b is None else b.double())
            got = packed.linear(x, b)
            assert got.shape == want.shape and got.is_contiguous()
            assert rows == 0 or near(got, want, 12 * shape[1] ** 0.5 + 4), f"{rows} rows"


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_packed_gate_multiplies_as_torch(shape):
    torch.manual_seed(6)
    d, k = shape
    weight, bias = torch.randn(2 * d, k), torch.randn(2 * d)
    packed = PackedGate(weight)
    for rows in (0, 1, 5, 13, 500):
        x = torch.full((rows, k + 3), torch.nan)[:, :k].normal_()
        for b in (None, bias):
            want = reference.silu_and_mul(F.linear(x.double(), weight.double(), None if b is None else b.double()))
            got = packed.linear(x, b)
            assert got.shape == (rows, d) and got.is_contiguous()
            # Gate and up are off as in the test above; each is multiplied with the other.
            size = (12 * k**0.5 + 4) * (4 * k**0.5 + 4)
            assert rows == 0 or near(got, want, size), f"{rows} rows"


@needs_compiler
def test_a_packed_gate_computes_clamped_swish():
    """Of numbers on both sides of the limits and at the ends of the range. A row has the same bits in any batch."""
    torch.manual_seed(8)
    gate, up = torch.randn(2, 211, 37) * 8
    gate[:, :4], up[:, 2:6] = torch.tensor([-1e30, 1e30, -88, 88]), torch.tensor([-1e30, 1e30, -1.0, 0])
    bias, alpha, limit = torch.randn(74), 1.702, 7.0
    packed = PackedGate(torch.eye(74), (alpha, limit))
    x = torch.cat((gate, up), 1) - bias
    got = packed.linear(x, bias)
    want = reference.clamped_swish_and_mul((x + bias).double(), alpha, limit)
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(packed.linear(x[5:8], bias), got[5:8])
    limited = torch.tensor([[9.0, -9.0, 9.0, 7.0]]), torch.tensor([[9.0, 9.0, -9.0, -7.0]])
    sizes = PackedGate(torch.eye(8), (1e3, 7.0)).linear(torch.cat(limited, 1))
    assert sizes.tolist() == [[56.0, 0.0, -42.0, -42.0]]
    x[3, 5] = torch.nan
    assert packed.linear(x, bias).isnan().any(1).nonzero().flatten().tolist() == [3]


@needs_compiler
def test_silu_at_the_ends_of_the_range():
    gate = torch.tensor([-1e30, -200.0, -89, -88, -87, -1e-30, 0, 1e-30, 87, 88, 89, 200, 1e30])
    packed = PackedGate(torch.eye(2))
    got = packed.linear(torch.stack((gate, torch.ones(13)), dim=1))[:, 0]
    assert bool(((got - F.silu(gate)).abs() <= 1e-35 + 1e-6 * F.silu(gate).abs()).all()), got
    got = packed.linear(torch.tensor([[torch.nan, 1.0], [1.0, 2.0]]))[:, 0]
    assert got.isnan().tolist() == [True, False]


@needs_compiler
@pytest.mark.parametrize("kind", [PackedWeight, PackedGate])
def test_a_rows_product_has_the_same_bits_in_every_batch(kind):
    torch.manual_seed(2)
    packed, x = kind(torch.randn(154, 600)), torch.randn(500, 600)
    whole = packed.linear(x)
    for first, end in ((0, 1), (3, 5), (100, 113), (499, 500), (7, 400)):
        assert torch.equal(packed.linear(x[first:end]), whole[first:end])
    assert torch.equal(packed.linear(x.t().contiguous().t()), whole)
    threads = torch.get_num_threads()
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            assert torch.equal(packed.linear(x), whole)
    finally:
        torch.set_num_threads(threads)


@needs_compiler
@pytest.mark.parametrize("kind", [PackedWeight, PackedGate])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_bfloat16_holds_takes_half_the_memory(monkeypatch, kind, shape):
    """And gives the same bits."""
    torch.manual_seed(7)
    weight, bias = torch.randn(2 * shape[0], shape[1]).bfloat16().float(), torch.randn(2 * shape[0])
    weight[0, 0], weight[-1, -1] = -0.0, 2.0**60
    halved = kind(weight)
    monkeypatch.setattr(packed_weight, "_is_bfloat16", lambda weight: False)
    whole = kind(weight)
    assert halved.is_halved and 2 * halved.panels.nbytes == whole.panels.nbytes
    for rows in (0, 1, 2, 5, 7, 13, 64, 500):
        x = torch.randn(rows, shape[1])
        for b in (None, bias):
            assert torch.equal(halved.linear(x, b), whole.linear(x, b)), f"{rows} rows"
    if kind is PackedWeight:
        assert torch.equal(halved.unpack(), weight)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 1), (17, 3), (33, 257), (64, 128), (128, 512)], ids=str)
def test_a_matrix_for_each_head(shape, dtype):
    """In every batch a row has the bits that it has alone, with any number of threads and any strides."""
    torch.manual_seed(10)
    heads, size = 5, shape[1]
    weights = torch.randn(heads, *shape).to(dtype)
    packed = PackedHeads(weights)
    assert packed.is_halved == (dtype == torch.bfloat16)
    memory = torch.full((300, heads + 1, size + 3), torch.nan)
    x = memory[:, :heads, :size].normal_()
    whole = packed.product(x)
    assert whole.shape == (300, heads, shape[0]) and whole.is_contiguous()
    assert near(whole, torch.einsum("nhi,hoi->nho", x.double(), weights.double()), 12 * size**0.5 + 4)
    for head in range(heads):
        assert torch.equal(PackedWeight(weights[head].float()).linear(x[:, head]), whole[:, head])
    threads = torch.get_num_threads()
    try:
        for count, rows in ((1, 0), (1, 1), (3, 2), (2, 7), (3, 64), (2, 300)):
            torch.set_num_threads(count)
            assert torch.equal(packed.product(x[300 - rows :]), whole[300 - rows :]), f"{rows} rows"
    finally:
        torch.set_num_threads(threads)
    by_head = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(packed.product(by_head), whole)
    assert torch.equal(packed.product(x.transpose(1, 2).contiguous().transpose(1, 2)), whole)
    narrow = x.bfloat16()
    assert torch.equal(packed.product(narrow), packed.product(narrow.float()).bfloat16())


@needs_compiler
def test_one_number_more_exact_than_bfloat16_keeps_all_whole():
    weight = torch.randn(3000, 8, generator=torch.Generator().manual_seed(8)).bfloat16().float()
    assert PackedWeight(weight).is_halved
    weight[2900, 3] = 1.001
    packed = PackedWeight(weight)
    assert not packed.is_halved and torch.equal(packed.unpack(), weight)


@needs_compiler
@pytest.mark.parametrize("shape", [(1, 32), (5, 64), (17, 96), (64, 256), (66, 1056)], ids=str)
def test_a_few_rows_in_bfloat16(shape):
    torch.manual_seed(9)
    weight, bias = torch.randn(shape).bfloat16(), torch.randn(shape[0]).bfloat16()
    for rows in range(few_rows.MOST_ROWS + 1):
        # Rows of a wider tensor, with memory behind it that must not be read.
        x = torch.full((rows, shape[1] + 3), torch.nan, dtype=torch.bfloat16)[:, : shape[1]].normal_()
        assert few_rows.takes_few_rows(x, weight)
        for b in (None, bias):
            want = F.linear(x.double(), weight.double(), None if b is None else b.double())
            got = few_rows.linear(x, weight, b)
            # The sum is rounded once.
            error = (got.double() - want).abs() - 2**-8 * want.abs()
            assert got.dtype == torch.bfloat16 and bool((error <= 1e-5 * shape[1] ** 0.5 + 1e-6).all()), (
                f"{rows} rows"
            )
            alone = [few_rows.linear(row[None], weight, b) for row in x]
            assert torch.equal(got, torch.cat(alone)) if rows else got.shape == want.shape
    assert not few_rows.takes_few_rows(torch.zeros(few_rows.MOST_ROWS + 1, shape[1], dtype=torch.bfloat16), weight)
    assert not few_rows.takes_few_rows(x[:, :-1], weight[:, :-1].contiguous())


@needs_compiler
def test_a_few_rows_round_as_torch_does():
    """Sums that lie in the middle of two numbers, are too large, or no numbers."""
    ends = torch.tensor([1.00390625, 1.01171875, 3.39e38, 3.4e38, -3.4e38, torch.inf, torch.nan, 1e-40, -0.0])
    x = torch.ones(1, 32, dtype=torch.bfloat16)
    weight = torch.zeros(len(ends), 32, dtype=torch.bfloat16)
    weight[:, 0], weight[:, 1] = ends.bfloat16(), (ends - ends.bfloat16().float()).nan_to_num().bfloat16()
    got = few_rows.linear(x, weight)[0]
    want = (weight[:, 0].float() + weight[:, 1].float()).bfloat16()
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0)) and got.isnan().tolist() == want.isnan().tolist()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_packed_weight(dtype):
    torch.manual_seed(3)
    weight = torch.randn(50, 24).to(dtype).float()
    index = torch.tensor([49, 0, 15, 16, 16, 31, 48])
    assert torch.equal(PackedWeight(weight).rows(index), weight[index])
    assert PackedWeight(weight).rows(index[:0]).shape == (0, 24)


@needs_compiler
@pytest.mark.parametrize("d", [1, 7, 8, 64, 576, 2050])
@pytest.mark.parametrize("rows", [0, 1, 5, 200])
def test_elementwise_as_the_reference(d, rows):
    torch.manual_seed(4)
    x, residual, weight = torch.randn(rows, d), torch.randn(rows, d) * 3, torch.randn(d)
    got = elementwise.rmsnorm(x, weight, 1e-5)
    assert rows == 0 or near(got, reference.rmsnorm(x, weight, 1e-5), 12 + d**0.5)
    want = reference.fused_add_rmsnorm(x.clone(), residual.clone(), weight, 1e-5)
    got, total = elementwise.fused_add_rmsnorm(x.clone(), residual.clone(), weight, 1e-5)
    assert torch.equal(total, want[1]) and (rows == 0 or near(got, want[0], 12 + d**0.5))


@needs_compiler
@pytest.mark.parametrize("d", [2, 8, 30, 64])
def test_rotation_as_the_reference(d):
    torch.manual_seed(5)
    for rows in (1, 9, 200):
        fused = torch.randn(rows, 7, d)
        before, angles = fused.clone(), torch.rand(50, d // 2) * 6
        table = torch.cat((angles.cos(), angles.sin()), dim=1)
        positions = torch.randint(50, (rows,))
        cos, sin = table[positions][:, None].chunk(2, dim=-1)
        want = reference.apply_rope(before[:, :5], torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
        assert elementwise.has_rope_kernel(fused[:, :5])
        elementwise.apply_rope_with_cos_sin_cache_inplace(positions, fused[:, :5], table)
        assert near(fused[:, :5], want, 8) and torch.equal(fused[:, 5:], before[:, 5:])


@needs_compiler
def test_rows_go_to_their_slots():
    torch.manual_seed(6)
    fused, loc = torch.randn(9, 6, 8), torch.randperm(30)[:9]
    # Slots of a page-first pool: other tokens' memory lies between.
    memory = torch.zeros(30, 3, 2, 8)
    slots, want = memory[:, 1], memory.clone()
    want[loc, 1] = fused[:, 4:]
    assert cpu.takes_rows(fused[:, 4:]) and not cpu.takes_rows(fused[:, :, ::2])
    cpu.store_rows(slots, loc, fused[:, 4:])
    assert torch.equal(memory, want)


@needs_compiler
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_rows_go_to_their_slots_in_pages(page_size):
    torch.manual_seed(7)
    fused, loc = torch.randn(9, 6, 8), torch.randperm(8 * page_size)[: min(9, 8 * page_size)]
    # Pages of a lender's pool: two components of three layers, and padding behind each page.
    memory = torch.zeros(8, 7, page_size, 2, 8)
    want, values = memory.clone(), fused[: len(loc), 4:]
    for slot, value in zip(loc.tolist(), values):
        want[slot // page_size, 5, slot % page_size] = value
    cpu.store_in_pages(memory[:, 5], loc, values)
    assert torch.equal(memory, want)


def test_without_a_compiler_torch_does_it_and_the_log_has_one_line(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("CC", str(tmp_path / "no-such-compiler"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    x, weight = torch.randn(3, 8), torch.randn(8)
    LIBRARY.forget()
    try:
        with caplog.at_level(logging.WARNING):
            assert not takes(x) and not elementwise.has_rope_kernel(x[None])
            assert torch.equal(elementwise.rmsnorm(x, weight, 1e-5), reference.rmsnorm(x, weight, 1e-5))
        assert len(caplog.records) == 1 and caplog.records[0].message.startswith("cpu: no compiled loops, ")
    finally:
        LIBRARY.forget()


def test_a_user_without_a_home_gets_no_loops_and_no_error(monkeypatch, caplog):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    monkeypatch.setattr(LIBRARY, "_loaded", None)
    monkeypatch.setattr(LIBRARY, "_is_available", None)
    assert not LIBRARY.is_available()
    assert caplog.records[0].message.endswith("set XDG_CACHE_HOME to a writable directory")
