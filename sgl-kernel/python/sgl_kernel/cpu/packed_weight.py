"""`PackedWeight`, `PackedGate` and `PackedHeads`: matrices as `csrc/cpu_linear.c` reads them, in panels.

Each owns its memory, of the weight's size, or half of it where bfloat16 holds the same numbers. panels: (num_panels,
in_features, outputs of a panel) float32; outputs beyond the last one are 0. Halved, (..., half of that) with two
numbers in the bits of each: output i's in the lower and output i + half's in the upper ones.
"""

from __future__ import annotations

import torch

from sgl_kernel.cpu.huge_pages import HugePageBlocks
from sgl_kernel.cpu.library import function

_BLOCKS = HugePageBlocks()
# Of a float32, the bits that a bfloat16 has.
_UPPER, _LOWER = -0x10000, 0xFFFF
# A multiple of each panel's outputs. Packing takes memory for so many more.
_ROWS_AT_ONCE = 1024


class PackedWeight:
    def __init__(self, weight: torch.Tensor) -> None:
        """weight: (out_features, in_features), of a type that `takes`. It is copied."""
        self.out_features, self.in_features = weight.shape
        self.is_halved = _is_bfloat16(weight)
        width = int(function("cpu_panel")())
        panels = -(-self.out_features // width), self.in_features
        self.panels = _BLOCKS.zeros(*panels, width // 2 if self.is_halved else width)
        _pack(weight, self.panels, self.is_halved)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x: (num_rows, in_features) float32. Returns x @ weight.T + bias, (num_rows, out_features)."""
        return _multiply(x, self.panels, self.is_halved, self.out_features, bias, False)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """index: (n,) int64. Returns weight[index], (n, in_features)."""
        index, n = index.contiguous(), len(index)
        assert n == 0 or 0 <= int(index.min()) <= int(index.max()) < self.out_features, "there is no such row"
        out = torch.empty(n, self.in_features)
        function("cpu_rows")(
            self.panels.data_ptr(),
            index.data_ptr(),
            out.data_ptr(),
            n,
            self.in_features,
            self.is_halved,
            torch.get_num_threads(),
        )
        return out

    def unpack(self) -> torch.Tensor:
        """A copy of the weight."""
        panels = self.panels
        if self.is_halved:
            both = panels.view(torch.int32)
            panels = torch.cat((both << 16, both & _UPPER), dim=2).view(torch.float32)
        return panels.transpose(1, 2).flatten(0, 1)[: self.out_features]


class PackedGate:
    """panels: (num_panels, 2, in_features, outputs of a panel), each of the gate's with the same one of up's."""

    def __init__(self, weight: torch.Tensor, clamp: tuple[float, float] | None = None) -> None:
        """weight: (2 * out_features, in_features), the gate's rows above up's, of a type that `takes`. Copied. clamp:
        alpha and limit of `elementwise.clamped_swish_and_mul`; None for `silu_and_mul`."""
        gate, up = weight.chunk(2)
        self._clamp = None if clamp is None else torch.tensor(clamp)
        self._clamp_address = None if self._clamp is None else self._clamp.data_ptr()
        self.out_features = len(gate)
        self.is_halved = _is_bfloat16(weight)
        width = int(function("cpu_panel")())
        panels = -(-len(gate) // width), 2, weight.shape[1]
        self.panels = _BLOCKS.zeros(*panels, width // 2 if self.is_halved else width)
        _pack(gate, self.panels[:, 0], self.is_halved)
        _pack(up, self.panels[:, 1], self.is_halved)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x: (num_rows, in_features) float32. bias: (2 * out_features,). Returns silu(gate) * up, (num_rows,
        out_features), of gate = x @ gate.T + bias and up = x @ up.T + bias, each with its half; or what it is with
        a clamp."""
        return _multiply(x, self.panels, self.is_halved, self.out_features, bias, True, self._clamp_address)


class PackedHeads:
    """A matrix for each head, all of one shape. panels: (num_heads, num_panels, in_features, outputs of a panel)."""

    def __init__(self, weights: torch.Tensor) -> None:
        """weights: (num_heads, out_features, in_features) float32 or bfloat16, on a device that `takes`. Copied."""
        self.num_heads, self.out_features, self.in_features = weights.shape
        self.is_halved = all(_is_bfloat16(weight.float()) for weight in weights)
        width = int(function("cpu_panel")())
        panels = self.num_heads, -(-self.out_features // width), self.in_features
        self.panels = _BLOCKS.zeros(*panels, width // 2 if self.is_halved else width)
        for weight, of_head in zip(weights, self.panels):
            _pack(weight.float(), of_head, self.is_halved)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x: (num_rows, num_heads, in_features), float32 or bfloat16. Returns (num_rows, num_heads, out_features) in
        its dtype, contiguous: x[:, h] @ weights[h].T for each head h, summed in float32."""
        inputs = x.float()
        if inputs.stride(2) != 1:
            inputs = inputs.contiguous()
        num_rows, num_heads, in_features = inputs.shape
        assert (num_heads, in_features) == (self.num_heads, self.in_features), f"x of shape {tuple(x.shape)}"
        out = inputs.new_empty(num_rows, num_heads, self.out_features)
        function("cpu_linear_heads")(
            inputs.data_ptr(),
            num_rows,
            num_heads,
            in_features,
            inputs.stride(0),
            inputs.stride(1),
            self.panels.data_ptr(),
            self.out_features,
            out.data_ptr(),
            self.is_halved,
            torch.get_num_threads(),
        )
        return out.to(x.dtype)


def _is_bfloat16(weight: torch.Tensor) -> bool:
    """Whether a weight in float32 is the same in bfloat16."""
    return not any(bool((part.view(torch.int32) & _LOWER).any()) for part in weight.split(_ROWS_AT_ONCE))


def _pack(weight: torch.Tensor, panels: torch.Tensor, is_halved: bool) -> None:
    """panels: of any stride."""
    in_features, width = weight.shape[1], panels.shape[2] * (2 if is_halved else 1)
    for first, rows in enumerate(weight.split(_ROWS_AT_ONCE)):
        to = panels[first * (_ROWS_AT_ONCE // width) :][: -(-len(rows) // width)]
        if len(rows) % width:
            rows = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % width))
        values = rows.view(len(to), width, in_features).transpose(1, 2)
        if is_halved:
            low, high = values.view(torch.int32).chunk(2, dim=2)
            to.view(torch.int32).copy_(((low >> 16) & _LOWER) | (high & _UPPER))
        else:
            to.copy_(values)


def _multiply(
    x: torch.Tensor,
    panels: torch.Tensor,
    is_halved: bool,
    out_features: int,
    bias: torch.Tensor | None,
    gated: bool,
    clamp: int | None = None,
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
        is_halved,
        gated,
        clamp,
        torch.get_num_threads(),
    )
    return out
