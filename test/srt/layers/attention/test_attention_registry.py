"""Which backend is used where, and what a user reads who asked for another."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

from sglang.srt.layers.attention.attention_registry import (
    ATTENTION_BACKENDS,
    make_attention_backend,
    pick_attention_backend,
    why_not,
)


@pytest.fixture
def install(monkeypatch):
    """Pretend that just these packages are installed."""

    found = importlib.util.find_spec("json")

    def only(*names):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: found if name in names else None)

    return only


def test_the_best_of_a_device(install):
    install("triton", "flashinfer")
    assert pick_attention_backend(None, "cpu") == "cpu"
    assert pick_attention_backend(None, torch.device("cuda", 1)) == "triton"
    install("flashinfer")
    assert pick_attention_backend(None, "cuda") == "flashinfer"
    install()
    with pytest.raises(ValueError, match=r"Triton is not installed.*FlashInfer is not installed"):
        pick_attention_backend(None, "cuda")


def test_what_was_asked_for_or_why_not(install):
    install("flashinfer")
    assert pick_attention_backend("torch_native", "cpu") == "torch_native"
    assert pick_attention_backend("flashinfer", "cuda:0") == "flashinfer"
    for name, device, reason in (
        ("fa4", "cuda", "There is no attention backend 'fa4'; there are cpu, torch_native, triton, flashinfer."),
        ("torch_native", "cuda:0", "computes on the CPU only; on cuda, use triton or flashinfer"),
        ("flashinfer", "cpu", "flashinfer computes on an NVIDIA GPU only; on cpu, use cpu or torch_native"),
        ("triton", "cuda", "Triton is not installed; pip install triton."),
    ):
        assert reason in (why_not(name, device) or "")
        for ask in (pick_attention_backend, make_attention_backend):
            with pytest.raises(ValueError, match=reason):
                ask(name, device)


def test_each_is_made_where_it_can_be():
    assert type(make_attention_backend("torch_native", "cpu")).__name__ == "TorchNativeAttnBackend"
    for name in list(ATTENTION_BACKENDS)[2:]:
        if why_not(name, "cuda") is None and torch.cuda.is_available():
            assert make_attention_backend(name, "cuda").capturing is False


def test_asking_imports_no_backend():
    script = (
        "import sys; from sglang.srt.layers.attention.attention_registry import pick_attention_backend, why_not\n"
        "pick_attention_backend(None, 'cpu'); why_not('triton', 'cuda'); why_not('flashinfer', 'cuda')\n"
        "print([name for name in ('torch', 'triton', 'flashinfer') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
