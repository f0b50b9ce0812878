"""The registry of attention backends: which exist, which of them a machine can use, and which is the default.

A new backend is a file with a class like `AttentionBackend`, and one line in `ATTENTION_BACKENDS`. Owns the list, and
imports a backend only to make it.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.utils.registry import load_object

if TYPE_CHECKING:
    import torch

    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend


@dataclass(frozen=True)
class Package:
    """A package that a backend needs."""

    title: str
    # As Python imports it.
    module: str
    # As pip installs it.
    distribution: str


@dataclass(frozen=True)
class AttentionEntry:
    """The facts about a backend that are known before it is imported."""

    # "module:class", made without arguments.
    backend: str
    # The kind of device that it computes on: "cpu" or "cuda".
    device: str
    # None: only torch is needed.
    package: Package | None = None


_ATTENTION = "sglang.srt.layers.attention"
# The name that --attention-backend takes -> the backend. The first that a device can use is its default.
# Triton comes before FlashInfer: CUDA builds of torch have it, it compiles in seconds, and a decode's plan costs the
# host nothing. FlashInfer compiles with nvcc, minutes for each kind of kernel, and plans on the host before each
# replay of a graph. On the CPU `cpu` does with torch_native what its kernel does
# not take, and everything where there is no C compiler.
ATTENTION_BACKENDS: dict[str, AttentionEntry] = {
    "cpu": AttentionEntry(f"{_ATTENTION}.cpu_backend:CpuAttnBackend", "cpu"),
    "torch_native": AttentionEntry(f"{_ATTENTION}.torch_native_backend:TorchNativeAttnBackend", "cpu"),
    "triton": AttentionEntry(
        f"{_ATTENTION}.triton_backend:TritonAttnBackend", "cuda", Package("Triton", "triton", "triton")
    ),
    "flashinfer": AttentionEntry(
        f"{_ATTENTION}.flashinfer_backend:FlashInferAttnBackend",
        "cuda",
        Package("FlashInfer", "flashinfer", "flashinfer-python"),
    ),
}
_DEVICE_NAMES = {"cpu": "the CPU", "cuda": "an NVIDIA GPU"}


def why_not(name: str, device: torch.device | str) -> str | None:
    """The reason why a backend cannot be used on a device, in a sentence; None where it can be used."""
    entry = ATTENTION_BACKENDS.get(name)
    if entry is None:
        return f"There is no attention backend {name!r}; there are {', '.join(ATTENTION_BACKENDS)}."
    kind = _kind(device)
    if kind != entry.device:
        usable = " or ".join(other for other, its in ATTENTION_BACKENDS.items() if its.device == kind)
        advice = f"use {usable}" if usable else "there is none"
        return (
            f"The attention backend {name} computes on {_DEVICE_NAMES.get(entry.device, entry.device)} only; on "
            f"{kind}, {advice}."
        )
    if entry.package is not None and importlib.util.find_spec(entry.package.module) is None:
        return f"{entry.package.title} is not installed; pip install {entry.package.distribution}."
    return None


def pick_attention_backend(requested: str | None, device: torch.device | str) -> str:
    """The requested backend, or the first that the device can use. Raises ValueError where it cannot be used."""
    if requested is not None:
        reason = why_not(requested, device)
        if reason is not None:
            raise ValueError(reason)
        return requested
    kind = _kind(device)
    # On a device that no backend knows, the reason is that of the CPU's.
    candidates = [name for name, entry in ATTENTION_BACKENDS.items() if entry.device == kind] or ["torch_native"]
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
    backend: AttentionBackend = load_object(ATTENTION_BACKENDS[name].backend)()
    return backend


def _kind(device: torch.device | str) -> str:
    """Of device "cuda:0": "cuda"."""
    return str(device).partition(":")[0]
