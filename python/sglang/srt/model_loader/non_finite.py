"""Refuses checkpoints with NaN or infinite numbers, from which a model would answer with status 200. Owns nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from sglang.srt.configs.model_files import ModelConfigError, some


def refuse_non_finite(numbers: Mapping[str, Sequence[torch.Tensor]], path: Path, dtype: torch.dtype) -> None:
    """numbers: the name of a tensor in path -> its `extremes`, read as dtype. Waits for the device once. Raises
    ModelConfigError."""
    found = [each.float() for of_one in numbers.values() for each in of_one]
    ok = iter(torch.stack(found).isfinite().tolist() if found else ())
    # A list, because all() would leave some of a tensor's to the next one.
    if names := [name for name, of_one in numbers.items() if not all([next(ok) for _ in of_one])]:
        kind = str(dtype).removeprefix("torch.")
        wider = "" if dtype == torch.float32 else ", or choose another --dtype"
        raise ModelConfigError(
            f"{path.name} holds NaN or infinite numbers, read as {kind}: {some(names)}; fetch it again{wider}."
        )


def check_scales(name: str, file: Path, scales: torch.Tensor, may_be_any: bool) -> None:
    """scales: of quantised weights. may_be_any: also negative, or all 0. Raises ModelConfigError."""
    wanted = "finite floats" if may_be_any else "finite floats from 0, not all of them 0"
    if not scales.is_floating_point():
        found = str(scales.dtype).removeprefix("torch.")
    elif not scales.numel():
        return
    else:
        # A NaN is both.
        least, most = (float(each) for each in torch.aminmax(scales.float()))
        if math.isfinite(least) and math.isfinite(most) and (may_be_any or least >= 0 < most):
            return
        found = f"{least if not math.isfinite(least) or (least < 0 and not may_be_any) else most:g}"
    raise ModelConfigError(
        f"{name!r} in {file.name} holds {found}, and scales of weights are {wanted}; fetch the file again."
    )
