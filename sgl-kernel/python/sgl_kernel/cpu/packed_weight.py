"""`PackedWeight` and `PackedGate`: linear layers' weights as `csrc/cpu_linear.c` reads them, in panels.

Each owns its memory, of the weight's size. panels: (num_panels, in_features, outputs of a panel) float32; outputs
beyond the last one are 0.
"""

from __future__ import annotations

import torch

from sgl_kernel.cpu.huge_pages import HugePageBlocks
from sgl_kernel.cpu.library import function

_BLOCKS = HugePageBlocks()


class PackedWeight:
    def __init__(self, weight: torch.Tensor) -> None:
        """weight: (out_features, in_features), of a type that `takes`. It is copied."""
        self.out_features, self.in_features = weight.shape
        width = int(function("cpu_panel")())
        self.panels = _BLOCKS.zeros(-(-self.out_features // width), self.in_features, width)
        _pack(weight, self.panels)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x: (num_rows, in_features) float32. Returns x @ weight.T + bias, (num_rows, out_features)."""
        return _multiply(x, self.panels, self.out_features, bias, False)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """index: (n,) int64. Returns weight[index], (n, in_features)."""
        index, n = index.contiguous(), len(index)
        assert n == 0 or 0 <= int(index.min()) <= int(index.max()) < self.out_features, "there is no such row"
        out = torch.empty(n, self.in_features)
        threads = torch.get_num_threads()
        function("cpu_rows")(self.panels.data_ptr(), index.data_ptr(), out.data_ptr(), n, self.in_features, threads)
        return out

    def unpack(self) -> torch.Tensor:
        """A copy of the weight."""
        return self.panels.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features]


class PackedGate:
    """panels: (num_panels, 2, in_features, outputs of a panel), each of the gate's with the same one of up's."""

    def __init__(self, weight: torch.Tensor) -> None:
        """weight: (2 * out_features, in_features), the gate's rows above up's, of a type that `takes`. Copied."""
        gate, up = weight.chunk(2)
        self.out_features = len(gate)
        width = int(function("cpu_panel")())
        self.panels = _BLOCKS.zeros(-(-len(gate) // width), 2, weight.shape[1], width)
        _pack(gate, self.panels[:, 0])
        _pack(up, self.panels[:, 1])

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x: (num_rows, in_features) float32. bias: (2 * out_features,). Returns silu(x @ gate.T + bias) *
        (x @ up.T + bias), each with its half, (num_rows, out_features)."""
        return _multiply(x, self.panels, self.out_features, bias, True)


def _pack(weight: torch.Tensor, panels: torch.Tensor) -> None:
    """panels: zeros, of any stride."""
    (out_features, in_features), width = weight.shape, panels.shape[2]
    whole = out_features // width
    panels[:whole] = weight[: whole * width].view(whole, width, in_features).transpose(1, 2)
    rest = out_features - whole * width
    if rest:
        panels[whole, :, :rest] = weight[whole * width :].t()


def _multiply(
    x: torch.Tensor, panels: torch.Tensor, out_features: int, bias: torch.Tensor | None, gated: bool
) -> torch.Tensor:
    if x.stride(1) != 1:
        x = x.contiguous()
    out = x.new_empty((x.shape[0], out_features))
    function("cpu_linear")(
        x.data_ptr(),
        x.shape[0],
        panels.shape[-2],
        x.stride(0),
        panels.data_ptr(),
        out_features,
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        gated,
        torch.get_num_threads(),
    )
    return out
