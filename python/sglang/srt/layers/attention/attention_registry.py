"""Which attention backends there are, which of them a machine can use, and which it does use if nobody says.

Owns nothing, and imports a backend only to make it.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

ATTENTION_BACKENDS = ("torch_native", "triton", "flashinfer")

# Triton first: it comes with CUDA builds of torch, compiles in seconds, and a decode's plan costs the host nothing.
# FlashInfer compiles with nvcc, minutes for each kind of kernel, and plans on the host before each replay of a graph.
_ON_GPUS = ("triton", "flashinfer")
_PACKAGES = {"triton": ("Triton", "triton"), "flashinfer": ("FlashInfer", "flashinfer-python")}


def why_not(name: str, device: torch.device | str) -> str | None:
    """Why a backend cannot be used on a device, a sentence; None where it can."""
    if name not in ATTENTION_BACKENDS:
        return f"There is no attention backend {name!r}; there are {', '.join(ATTENTION_BACKENDS)}."
    kind = _kind(device)
    if name == "torch_native":
        if kind == "cpu":
            return None
        return f"The attention backend torch_native computes on the CPU only; on {kind}, use {' or '.join(_ON_GPUS)}."
    title, package = _PACKAGES[name]
    if kind != "cuda":
        return f"The attention backend {name} needs an NVIDIA GPU; on {kind}, use torch_native."
    if importlib.util.find_spec(name) is None:
        return f"{title} is not installed; pip install {package}."
    return None


def pick_attention_backend(requested: str | None, device: torch.device | str) -> str:
    """The backend that was asked for, or the device's best: torch_native on the CPU, triton on a GPU, flashinfer
    where there is no Triton. Raises ValueError where it cannot be used."""
    if requested is not None:
        reason = why_not(requested, device)
        if reason is not None:
            raise ValueError(reason)
        return requested
    candidates = _ON_GPUS if _kind(device) == "cuda" else ("torch_native",)
    reasons = [why_not(name, device) for name in candidates]
    for name, reason in zip(candidates, reasons):
        if reason is None:
            return name
    raise ValueError(f"No attention backend for {device}: " + " ".join(reason for reason in reasons if reason))


def make_attention_backend(name: str, device: torch.device | str) -> AttentionBackend:
    """Raises ValueError where the backend cannot be used on the device."""
    reason = why_not(name, device)
    if reason is not None:
        raise ValueError(reason)
    if name == "triton":
        from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

        return TritonAttnBackend()
    if name == "flashinfer":
        from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

        return FlashInferAttnBackend()
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    return TorchNativeAttnBackend()


def _kind(device: torch.device | str) -> str:
    """Of device "cuda:0": "cuda"."""
    return str(device).partition(":")[0]
