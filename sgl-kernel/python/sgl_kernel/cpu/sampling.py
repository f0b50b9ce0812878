"""`csrc/cpu_sample.c`, on logits that `takes`: penalties, and tokens drawn without sorting."""

from __future__ import annotations

import torch

from sgl_kernel.cpu.library import function


def draw(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    uniforms: torch.Tensor | None,
) -> torch.Tensor:
    """logits: (n, vocab_size). temperatures, top_ps, min_ps: (n,) float32; top_ks: (n,) int64, from
    1, the vocabulary's size or more cuts nothing off; uniforms: (n,) float64 in [0, 1); None where all
    temperatures are 0. Returns (n,) int64: the likeliest where the temperature is 0, and else the last token of a row
    with NaN. Raises MemoryError."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    n, vocab_size = logits.shape
    tokens = torch.empty(n, dtype=torch.int64)
    function("cpu_draw")(
        logits.data_ptr(),
        n,
        vocab_size,
        logits.stride(0),
        temperatures.data_ptr(),
        top_ks.data_ptr(),
        top_ps.data_ptr(),
        min_ps.data_ptr(),
        None if uniforms is None else uniforms.data_ptr(),
        tokens.data_ptr(),
        torch.get_num_threads(),
    )
    if uniforms is not None and bool((tokens < 0).any()):
        raise MemoryError("no memory to draw tokens")
    return tokens


def penalize(
    logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor, penalties: torch.Tensor
) -> None:
    """In place. logits: (num_rows, vocab_size), contiguous. rows: (n,) int64, all different. counts: (num_slots,
    vocab_size) int16, how often each was generated. slots: (n,) int64; penalties: (3, n) float32, frequency,
    presence and repetition, of the rows."""
    assert logits.is_contiguous() and counts.is_contiguous() and penalties.is_contiguous()
    function("cpu_penalize")(
        logits.data_ptr(),
        len(rows),
        logits.shape[1],
        logits.stride(0),
        rows.data_ptr(),
        slots.data_ptr(),
        counts.data_ptr(),
        penalties.data_ptr(),
        torch.get_num_threads(),
    )
