"""`PackedWeight`: a linear layer's weight as `csrc/cpu_linear.c` reads it. Owns its memory, of the weight's size."""

from __future__ import annotations

import torch

from sgl_kernel.cpu.library import function


class PackedWeight:
    """panels: (num_panels, in_features, outputs of a panel) float32; outputs beyond the last one are 0."""

    def __init__(self, weight: torch.Tensor) -> None:
        """weight: (out_features, in_features), of a type that `takes`. It is copied."""
        self.out_features, self.in_features = weight.shape
        width = int(function("cpu_panel")())
        num_panels = -(-self.out_features // width)
        self.panels = torch.zeros(num_panels, self.in_features, width)
        whole = self.out_features // width
        self.panels[:whole] = weight[: whole * width].view(whole, width, self.in_features).transpose(1, 2)
        rest = self.out_features - whole * width
        if rest:
            self.panels[whole, :, :rest] = weight[whole * width :].t()
        self._linear = function("cpu_linear")

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x: (num_rows, in_features) float32. Returns x @ weight.T + bias, (num_rows, out_features)."""
        if x.stride(1) != 1:
            x = x.contiguous()
        out = x.new_empty((x.shape[0], self.out_features))
        self._linear(
            x.data_ptr(),
            x.shape[0],
            self.in_features,
            x.stride(0),
            self.panels.data_ptr(),
            self.out_features,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """index: (n,) int64. Returns weight[index], (n, in_features)."""
        width = self.panels.shape[2]
        return self.panels[index // width, :, index % width]

    def unpack(self) -> torch.Tensor:
        """A copy of the weight."""
        return self.panels.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features]
