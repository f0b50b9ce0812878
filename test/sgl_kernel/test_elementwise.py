"""`sgl_kernel.elementwise`: torch on the CPU, flashinfer with the right arguments on a GPU, the same results."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from sgl_kernel import elementwise, flashinfer_kernels
from sgl_kernel.elementwise import reference
from support import fake_flashinfer

DTYPES = [torch.bfloat16, torch.float16]
NUM_Q_HEADS, NUM_KV_HEADS = 6, 2
FUNCTIONS = ["rmsnorm", "fused_add_rmsnorm", "silu_and_mul", "qk_rmsnorm", "rope"]


def run(name: str, num_tokens: int, size: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """The function on numbers of a seed. size: of a row, or of a head."""
    g = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(dtype).to(device)

    x, residual, weight = numbers(num_tokens, size), numbers(num_tokens, size), numbers(size)
    if name == "rmsnorm":
        before = x.clone()
        results = [elementwise.rmsnorm(x, weight, 1e-5)]
        assert torch.equal(x, before)
        return results
    if name == "fused_add_rmsnorm":
        return list(elementwise.fused_add_rmsnorm(x, residual, weight, 1e-5))
    if name == "silu_and_mul":
        return [elementwise.silu_and_mul(numbers(num_tokens, 2 * size))]
    # Queries and keys of a fused projection, whose values must stay as they are.
    heads = NUM_Q_HEADS + NUM_KV_HEADS
    qkv = numbers(num_tokens, heads + NUM_KV_HEADS, size)
    qk, before = qkv[:, :heads], qkv.clone()
    if name == "qk_rmsnorm":
        both = torch.cat((weight.expand(NUM_Q_HEADS, -1), numbers(size).expand(NUM_KV_HEADS, -1)))
        results = [elementwise.qk_rmsnorm(qk, both, NUM_Q_HEADS, 1e-5)]
        assert torch.equal(qkv, before)
        return results
    assert name == "rope"
    angles = torch.rand(50, size // 2, generator=g) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1).to(dtype).float().to(device)
    positions = torch.randint(50, (num_tokens,), generator=g).to(device)
    if elementwise.has_rope_kernel(qk):
        elementwise.apply_rope_with_cos_sin_cache_inplace(positions, qk, table)
    else:
        cos, sin = table[positions].to(dtype)[:, None].chunk(2, dim=-1)
        qk = reference.apply_rope(qk, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    assert torch.equal(qkv[:, heads:], before[:, heads:])
    return [qk]


def assert_near(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    """Torch rounds in between, the kernels once at the end."""
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert a.dtype == b.dtype and a.shape == b.shape
        step = torch.finfo(b.dtype).eps
        error = (a.cpu().float() - b.float()).abs()
        assert bool((error <= 3 * step * b.float().abs().clamp(min=0.5)).all()), f"off by {error.max()}"


@contextmanager
def without_flashinfer() -> Iterator[None]:
    """Nothing is on a GPU, as far as anybody asks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elementwise, "is_on_gpu", lambda tensor: False)
        yield


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wider_weight_is_multiplied_on_before_rounding(dtype: torch.dtype) -> None:
    """As Gemma's norms, whose weights are near 1. FlashInfer's kernel would read them as x's dtype."""
    x, weight = torch.randn(7, 64).to(dtype), 1 + torch.randn(64) / 1000
    exact = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    for found in (elementwise.rmsnorm(x, weight, 1e-5), elementwise.qk_rmsnorm(x[:, None], weight[None], 1, 1e-5)):
        assert found.dtype == dtype and torch.equal(found.reshape(7, 64), exact.to(dtype))
    total = x.clone()
    normed, total = elementwise.fused_add_rmsnorm(torch.zeros_like(x), total, weight, 1e-5)
    assert torch.equal(normed, exact.to(dtype)) and torch.equal(total, x)
    assert elementwise._norm_kernel("rmsnorm", x, weight) is None


def test_gelu_is_the_one_with_tanh() -> None:
    gate, up = torch.randn(2, 5, 9).double()
    cubic = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    found = elementwise.gelu_tanh_and_mul(torch.cat((gate, up), 1))
    assert torch.allclose(found, 0.5 * gate * (1 + cubic.tanh()) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_our_arguments_are_what_the_kernels_take(name: str, dtype: torch.dtype):
    want = run(name, 5, 64, dtype, "cpu")
    with fake_flashinfer.installed() as calls:
        got = run(name, 5, 64, dtype, "cpu")
    made = {function for function, mock in calls.items() if mock.called}
    assert made == {{"qk_rmsnorm": "rmsnorm", "rope": "apply_rope_with_cos_sin_cache_inplace"}.get(name, name)}
    assert_near(got, want)


@pytest.mark.parametrize(
    "num_tokens,size,dtype", [(5, 64, torch.float32), (0, 64, torch.bfloat16), (5, 20, torch.bfloat16)]
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_the_kernels_do_not_take_is_torch_s(name: str, num_tokens: int, size: int, dtype: torch.dtype):
    want = run(name, num_tokens, size, dtype, "cpu")
    with fake_flashinfer.installed() as calls:
        got = run(name, num_tokens, size, dtype, "cpu")
    assert not any(mock.called for mock in calls.values())
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_kernels_that_do_not_build_are_torch_s(caplog: pytest.LogCaptureFixture):
    def no_compiler(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("nvcc is not there")

    with fake_flashinfer.installed() as calls:
        flashinfer_kernels.flashinfer_function.cache_clear()
        calls["rmsnorm"].side_effect = no_compiler
        for _ in range(2):
            assert torch.equal(run("rmsnorm", 5, 64, DTYPES[0], "cpu")[0], run_reference("rmsnorm"))
    assert calls["rmsnorm"].call_count == 1
    assert caplog.text.count("torch instead of flashinfer's rmsnorm") == 1


def run_reference(name: str) -> torch.Tensor:
    with without_flashinfer():
        return run(name, 5, 64, DTYPES[0], "cpu")[0]


def test_without_the_package_it_is_torch_s():
    with fake_flashinfer.installed(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", None)
        flashinfer_kernels.flashinfer_function.cache_clear()
        assert torch.equal(run("rmsnorm", 5, 64, DTYPES[0], "cpu")[0], run_reference("rmsnorm"))


@pytest.mark.parametrize("function", fake_flashinfer.FUNCTIONS, ids=lambda function: function.__name__)
def test_the_stand_in_has_the_package_s_signatures(function: Callable[..., Any]):
    real = getattr(pytest.importorskip("flashinfer", exc_type=ImportError), function.__name__)

    def parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    assert parameters(real) == parameters(function)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_latents_are_normalised_rotated_and_stored(stored: torch.dtype, interleaved: bool):
    g = torch.Generator().manual_seed(2)
    q, latent = torch.randn(3, 5, 8, generator=g), torch.randn(3, 24, generator=g)
    latent[2, 3] = 1e4
    weight = torch.rand(16, generator=g) * 600
    angles = torch.rand(50, 4, generator=g) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions, loc = torch.tensor([49, 0, 7]), torch.tensor([6, 0, 3])
    pages, q_out = torch.zeros(4, 2, 1, 24, dtype=stored), torch.full((3, 5, 24), 7.0)
    assert not elementwise.has_store_latent_kernel(q, latent, pages)
    elementwise.store_latent(positions, q, q_out, latent, weight, 1e-6, table, pages, loc, interleaved)
    # Pairs are complex numbers, their rotation a product.
    turns = torch.polar(torch.ones(3, 4), angles[positions])

    def rotated(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.complex(x[..., 0::2], x[..., 1::2]) if interleaved else torch.complex(x[..., :4], x[..., 4:])
        product = pairs * turns
        return torch.cat((product.real, product.imag), dim=-1)

    want_q = torch.stack([rotated(q[:, head]) for head in range(5)], dim=1)
    assert (q_out[..., :16] == 7).all() and torch.allclose(q_out[..., 16:], want_q, atol=1e-5)
    x = latent[:, :16]
    want = torch.cat(
        (x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight, rotated(latent[:, 16:])), dim=-1
    )
    got = pages[loc // 2, loc % 2, 0].float()
    want = elementwise.saturating_cast(want, stored).float()
    assert torch.allclose(got, want, rtol=max(torch.finfo(stored).eps, 1e-5), atol=1e-5)
    assert got.abs().max() == 448 or stored != torch.float8_e4m3fn
    unwritten = [slot for slot in range(8) if slot not in loc.tolist()]
    assert not pages.float().flatten(0, 1)[unwritten].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name,num_tokens,size",
    [
        (name, num_tokens, size)
        for name in FUNCTIONS
        for num_tokens, size in [(1, 64), (7, 128), (300, 128), (3, 4096), (40, 24)]
        if size <= 512 or name not in ("qk_rmsnorm", "rope")  # no head is so large
    ],
)
def test_on_a_gpu(name: str, num_tokens: int, size: int, dtype: torch.dtype):
    got = run(name, num_tokens, size, dtype, "cuda")
    assert_near(got, run(name, num_tokens, size, dtype, "cpu"))
    with without_flashinfer():
        assert_near(run(name, num_tokens, size, dtype, "cuda"), run(name, num_tokens, size, dtype, "cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("function", fake_flashinfer.FUNCTIONS, ids=lambda function: function.__name__)
def test_a_gpu_runs_the_kernels_if_they_are_installed(function: Callable[..., Any]):
    pytest.importorskip("flashinfer", exc_type=ImportError)
    device = torch.device("cuda", torch.cuda.current_device())
    assert flashinfer_kernels.flashinfer_function(function.__name__, device) is not None
