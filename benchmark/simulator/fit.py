"""Fits constants that are not published to the papers' printed microbenchmarks, and shows model and print side by
side.

    python -m benchmark.simulator.fit

Uses no end-to-end number. The figures themselves cannot be read here, only the numbers in the papers' text.
profiles.py holds the results, rounded; a test keeps the two together. All numbers of the model are simulated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from benchmark.common import print_table
from benchmark.simulator.cost_models import (
    DIRECT,
    DMA,
    KERNEL_BACKUP,
    KERNEL_LOAD,
    Method,
    ModelShape,
    attention_flops,
    link_rate,
    load_seconds,
    matmul_flops,
    prefill_seconds,
    stall_share,
)

from benchmark.simulator import profiles

PCIE5 = 64e9  # bytes/s one way, as Strata 5.1 has it
C2C = 384e9  # Strata 5.1
PAGE32 = 32 * 8 * 128 * 2  # K of 32 tokens of Llama-3.1-8B in one layer

# Copies on PCIe 5.0: bytes per copy, share of the peak. Strata 3.1: "approximately 22%" for 8,192 tokens at page size
# 32 (Fig. 3), and 75-80 % with 1-2 MB. We take 75 % at 1 MB and 80 % at 2 MB.
COPIES = ((PAGE32, 0.22), (1e6, 0.75), (2e6, 0.80))
GH200_COPIES = 0.05  # Strata 3.1, same copies on Grace-Hopper: "as low as 5%"
# Two CTAs on PCIe 5.0: "nearly 50 GB/s" (Fig. 5) and "75% of theoretical PCIe bandwidth" (3.2, on Fig. 1).
TWO_CTAS = (50e9, 0.75 * PCIE5)
# Slow-down by two CTAs, Strata 4.2 on Fig. 5: "less than 5%" and "10%". Bounds; we take them as values.
SLOWDOWN_PREFILL, SLOWDOWN_DECODE = 0.05, 0.10
# SwiftCache, Table 1: LWM on one H20 without cache, average input and seconds to the first token.
H20_PREFILL = ((7124, 0.86), (6231, 0.72), (43958, 7.95))
# SwiftCache 1, on Fig. 1, LWM: loading over PCIe takes "around 75ms at 5k historical tokens".
H20_LOAD = (5000, 0.075)
# The same: of loading and then computing 256 new tokens, loading takes so many % at so many historical tokens.
H20_LOAD_SHARES = ((5000, 73.2), (50000, 86.2))


@dataclass(frozen=True)
class Fitted:
    copy_s: float
    usable: float
    kernel_latency_s: float
    gh200_copy_s: float
    h20_efficiency: float
    h20_usable: float


def fit() -> Fitted:
    """Copies: 1 / X = copy_s / S + 1 / (peak usable), least squares of relative errors; two constants, three numbers.
    The CTAs: 1 / X = latency / (2 cta_bytes) + 1 / (peak usable), one constant, two numbers (cta_bytes is assumed:
    only the quotient shows). Grace-Hopper: one constant, one number, the usable share being PCIe's. The H20's PCIe:
    one constant, one number, and no share is above 1."""
    sizes = np.array([s for s, _ in COPIES])
    rates = np.array([share * PCIE5 for _, share in COPIES])
    rows = np.stack((rates / sizes, rates), axis=1)
    (copy_s, inverse), *_ = np.linalg.lstsq(rows * [1e-6, 1e-11], np.ones(len(rates)), rcond=None)
    copy_s, inverse = copy_s * 1e-6, inverse * 1e-11
    usable = 1 / (inverse * PCIE5)
    x = np.array(TWO_CTAS)
    # Minimise sum((x * (a + inverse) - 1) ** 2) over a = latency / (2 cta_bytes).
    a = float(((1 - x * inverse) * x).sum() / (x * x).sum())
    gh200_copy_s = PAGE32 * (1 / (GH200_COPIES * C2C) - 1 / (usable * C2C))
    lwm, h20 = profiles.MODELS["LWM-7B"], profiles.HARDWARE["h20x4"].gpu
    ideal = np.array([prefill_flops(lwm, n) / h20.matrix_flops / s for n, s in H20_PREFILL])
    # Minimise sum((ideal / e - 1) ** 2) over 1 / e.
    efficiency = float((ideal * ideal).sum() / ideal.sum())
    tokens, seconds = H20_LOAD
    h20_usable = min(1.0, tokens * lwm.kv_bytes_per_token / seconds / profiles.HARDWARE["h20x4"].link.peak)
    return Fitted(float(copy_s), float(usable), a * 2 * profiles.CTA_BYTES, gh200_copy_s, efficiency, h20_usable)


def prefill_flops(model: ModelShape, num_tokens: int) -> float:
    """Of one prompt, nothing cached."""
    return matmul_flops(model, num_tokens, 1) + attention_flops(model, np.array([0]), np.array([num_tokens]))


def comparison() -> list[dict[str, object]]:
    """Every printed microbenchmark number that we could use, beside the model's. role: whether it was fitted, only
    looked at afterwards, or contradicts others."""
    llama, qwen, lwm = (profiles.MODELS[n] for n in ("Llama-3.1-8B", "Qwen2.5-14B", "LWM-7B"))
    h200, gh200, h20 = (profiles.HARDWARE[n] for n in ("h200", "gh200", "h20x4"))
    rows: list[dict[str, object]] = []

    def add(what: str, source: str, printed: float | None, model: float, unit: str, role: str) -> None:
        rows.append({"what": what, "source": source, "printed": printed, "model": model, "unit": unit, "role": role})

    def share(hardware: profiles.Hardware, method: Method) -> float:
        seconds = load_seconds(llama, hardware.link, method, 8192, 32)
        return 100 * 8192 * llama.kv_bytes_per_token / seconds / hardware.link.peak

    add("8,192 tokens, page 32, PCIe 5, direct", "Strata 3.1, Fig. 3", 22, share(h200, DIRECT), "% of peak", "fitted")
    for size, printed in ((1e6, 75), (2e6, 80)):
        rate = 100 * link_rate(h200.link, DIRECT, size) / h200.link.peak
        add(f"copies of {size / 1e6:.0f} MB, PCIe 5", "Strata 3.1", printed, rate, "% of peak", "fitted")
    add("8,192 tokens, page 32, GH200, direct", "Strata 3.1, Fig. 3", 5, share(gh200, DIRECT), "% of peak", "fitted")
    two = link_rate(h200.link, KERNEL_LOAD, 2048) / 1e9
    add("two CTAs, PCIe 5", "Strata 4.2, Fig. 5", 50, two, "GB/s", "fitted")
    add("I/O mechanism, PCIe 5", "Strata 3.2, Fig. 1", 75, 100e9 * two / PCIE5, "% of peak", "fitted")
    add("one CTA, PCIe 5", "not printed", None, link_rate(h200.link, KERNEL_BACKUP, 2048) / 1e9, "GB/s", "prediction")
    # Both systems of Fig. 1 on the same batch: if the kernel stalls for 24 %, how long do copies of pages stall?
    load = load_seconds(qwen, h200.link, KERNEL_LOAD, 100_000, 1)
    slow = load_seconds(qwen, h200.link, DIRECT, 100_000, 32)
    compute = (1 - 0.24) * load
    add(
        "stall with direct where the kernel's is 24 %",
        "Strata 1, Fig. 1",
        74,
        100 * (1 - compute / slow),
        "%",
        "looked at",
    )
    for new in (20, 64, 512):
        at_100 = onset_ratio(qwen, h200, new, KERNEL_LOAD)
        add(f"loaded / new tokens where stalls begin, {new} new", "Strata 4.3.2", 100, at_100, "", "looked at")
    full = prefill_seconds(qwen, h200.gpu, 21500, 64)
    stall = stall_share(load_seconds(qwen, h200.link, KERNEL_LOAD, 21500, 1), full, qwen.num_layers)
    add("stall of one request, 21,500 loaded, 64 new", "Strata 1: up to", 24, 100 * stall, "%", "contradicts")
    for tokens, seconds in H20_PREFILL:
        add(
            f"LWM on H20, prefill of {tokens:,}",
            "SwiftCache Table 1",
            seconds,
            prefill_seconds(lwm, h20.gpu, 0, tokens),
            "s",
            "fitted",
        )
    compute = 1e3 * prefill_seconds(lwm, h20.gpu, 5000, 256)
    add("LWM on H20, 256 new behind 5,000", "SwiftCache Fig. 1", 27, compute, "ms", "looked at")
    tokens, seconds = H20_LOAD
    load = load_seconds(lwm, h20.link, DMA, tokens, 1, num_runs=1)
    add(
        "LWM, 5,000 tokens over 32 GB/s at its peak",
        "SwiftCache Fig. 1",
        1e3 * seconds,
        1e3 * load,
        "ms",
        "contradicts",
    )
    for tokens, printed in H20_LOAD_SHARES:
        load = load_seconds(lwm, h20.link, DMA, tokens, 1, num_runs=1)
        compute = prefill_seconds(lwm, h20.gpu, tokens, 256)
        what, role = f"LWM, {tokens:,} loaded, 256 new", "looked at" if tokens == 5000 else "contradicts"
        add(what, "SwiftCache Fig. 1", printed, 100 * load / (load + compute), "% loading", role)
    return rows


def onset_ratio(model: ModelShape, hardware: profiles.Hardware, new: int, method: Method) -> float:
    """Loaded over new tokens at which one request's load takes as long as its computation: bisection."""
    low, high = 0.0, 1e5
    for _ in range(50):
        ratio = (low + high) / 2
        load = load_seconds(model, hardware.link, method, int(ratio * new), 1)
        low, high = (
            (low, ratio) if load > prefill_seconds(model, hardware.gpu, int(ratio * new), new) else (ratio, high)
        )
    return low


def main() -> None:
    fitted = fit()
    print_table("Fitted", [{"constant": k, "value": f"{v:.4g}"} for k, v in vars(fitted).items()])
    print_table("Printed in the papers beside the model (simulated)", comparison())


if __name__ == "__main__":
    main()
