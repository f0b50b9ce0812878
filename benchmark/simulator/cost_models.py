"""Cost models: what a forward pass and a transfer take, worked out from a model's shape and a machine's numbers.

Pure functions over plain data; numpy only. Knows no particular model or machine (profiles.py) and no engine
(hardware.py). Seconds, bytes, and bytes per second everywhere. All results are simulated.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

# GPU threads reach the host's memory in pieces of this many bytes; less is fetched as much (Strata 4.2).
ACCESS_BYTES = 128


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder as in its config.json. tp: ranks that share every layer; properties are of one rank."""

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    dtype_bytes: int = 2
    tp: int = 1

    def __post_init__(self) -> None:
        if self.num_kv_heads % self.tp:
            raise ValueError(f"{self.name}: {self.num_kv_heads} KV heads are not divisible by tp {self.tp}")

    @property
    def row_bytes(self) -> int:
        """K, or V, of one token in one layer."""
        return self.num_kv_heads // self.tp * self.head_dim * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token in all layers."""
        return 2 * self.num_layers * self.row_bytes

    @property
    def layer_params(self) -> float:
        """Elements of one layer's matrices: Q and O, K and V, and the three of a gated MLP."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return self.hidden * (2 * q + 2 * kv + 3 * self.intermediate) / self.tp

    @property
    def head_params(self) -> float:
        return self.hidden * self.vocab / self.tp

    @property
    def pass_weight_bytes(self) -> float:
        """Weights that one forward pass reads: all layers and the head; of the embedding only some rows."""
        return (self.num_layers * self.layer_params + self.head_params) * self.dtype_bytes

    @property
    def resident_weight_bytes(self) -> float:
        return self.pass_weight_bytes + self.head_params * self.dtype_bytes


@dataclass(frozen=True)
class Gpu:
    """matrix_flops: dense peak of the tensor cores in the model's dtype. The efficiencies are shares of the peaks
    that large kernels reach. layer_launch_s: what the host takes to launch one layer of an eager pass.
    graph_launch_s: fixed cost of a pass that is one CUDA graph. step_s: fixed cost of any pass. peer_bytes_per_s: to
    other GPUs, one way, for all-reduces and for peer copies; 0: none."""

    name: str
    matrix_flops: float
    hbm_bytes_per_s: float
    hbm_bytes: float
    matmul_efficiency: float
    attention_efficiency: float
    hbm_efficiency: float
    layer_launch_s: float
    graph_launch_s: float
    step_s: float
    peer_bytes_per_s: float = 0.0
    allreduce_latency_s: float = 0.0


@dataclass(frozen=True)
class HostLink:
    """Between host memory (or another GPU) and one GPU, one way. peak: the paper's or the data sheet's. usable: the
    share of it that endless transfers reach. sharers: GPUs that divide it when all load at once.

    copy_s: of one asynchronous copy that moves nothing, one after another. batched_copy_s: the same within a batch
    that is handed over at once. cta_bytes: what one CTA of a transfer kernel keeps under way; kernel_latency_s: how
    long each such access takes on an idle link. submit_s: from the decision to the first byte.
    """

    name: str
    peak: float
    usable: float
    copy_s: float
    batched_copy_s: float
    cta_bytes: float
    kernel_latency_s: float
    submit_s: float = 0.0
    sharers: int = 1

    @property
    def wire(self) -> float:
        return self.peak * self.usable / self.sharers


@dataclass(frozen=True)
class Method:
    """How KV moves over a host link. kind: `kernel` (GPU-assisted, `ctas` CTAs of 1,024 threads), `direct` (one
    asynchronous copy per page, layer, K and V), `dma` (one copy per run of neighbouring pages, layer, K and V, in a
    batch), or `infinite` (no time: an oracle). run_tokens: length of such runs where no frames are known."""

    kind: str
    ctas: int = 2
    run_tokens: int = 64

    def __post_init__(self) -> None:
        if self.kind not in ("kernel", "direct", "dma", "infinite"):
            raise ValueError(f"unknown method {self.kind!r}: kernel, direct, dma or infinite")


KERNEL_LOAD = Method("kernel", ctas=2)
KERNEL_BACKUP = Method("kernel", ctas=1)
DIRECT = Method("direct")
DMA = Method("dma")
INFINITE = Method("infinite")


# -- links ----------------------------------------------------------------------------------------------------------


def throughput(size_bytes: float, concurrency: float, latency_s: float, wire: float) -> float:
    """X = C S / L in bytes per second: C operations of S bytes under way, each taking L (Little's law; Strata 3.1).

    L is not constant: L = latency_s + C S / wire, as the bytes of the operations under way share the wire. Small
    operations give C S / latency_s, large ones the wire.
    """
    under_way = concurrency * size_bytes
    return under_way / (latency_s + under_way / wire)


def link_rate(link: HostLink, method: Method, piece_bytes: float) -> float:
    """Bytes per second of transfers cut into pieces of so many bytes.

    kernel: C S is what its CTAs keep under way, whatever the pieces; pieces below ACCESS_BYTES, or that end within
    an access, waste the rest of it. direct and dma: the pieces are the operations, issued one after another (C = 1).
    """
    if method.kind == "infinite":
        return float("inf")
    if method.kind == "kernel":
        used = piece_bytes / (np.ceil(piece_bytes / ACCESS_BYTES) * ACCESS_BYTES)
        return float(used * throughput(method.ctas * link.cta_bytes, 1, link.kernel_latency_s, link.wire))
    cost = link.copy_s if method.kind == "direct" else link.batched_copy_s
    return throughput(piece_bytes, 1, cost, link.wire)


def load_seconds(
    model: ModelShape, link: HostLink, method: Method, num_tokens: int, page_size: int, num_runs: int | None = None
) -> float:
    """Seconds for all layers of num_tokens tokens, in whole pages, between host and one rank's GPU. num_runs: the
    number of runs of neighbouring pages, for `dma`; None: the method's own."""
    if num_tokens == 0 or method.kind == "infinite":
        return 0.0
    pages = -(-num_tokens // page_size)
    piece: float = page_size * model.row_bytes
    if method.kind == "dma":
        run_pages = pages / num_runs if num_runs is not None else max(1.0, method.run_tokens / page_size)
        piece = min(run_pages, pages) * page_size * model.row_bytes
    return link.submit_s + pages * page_size * model.kv_bytes_per_token / link_rate(link, method, piece)


# -- forward passes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PassCost:
    """Parts of a forward pass, in seconds. launch: the host's part, hidden where the GPU takes longer."""

    matmul: float
    attention: float
    allreduce: float
    launch: float
    fixed: float

    @property
    def seconds(self) -> float:
        return max(self.matmul + self.attention + self.allreduce, self.launch) + self.fixed


def matmul_flops(model: ModelShape, num_tokens: int, num_sampled: int) -> float:
    """2 per element of every matrix and token; the head for sampled rows only."""
    return 2.0 * (num_tokens * model.num_layers * model.layer_params + num_sampled * model.head_params)


def attention_flops(model: ModelShape, starts: np.ndarray, lens: np.ndarray) -> float:
    """Q K^T and P V, 2 flops per element each: 4 * head_dim per head, layer and pair of query and key. Token j of the
    n new ones of a request with p before it sees p + j + 1 keys: n p + n (n + 1) / 2 pairs."""
    return 4.0 * model.head_dim * (model.num_heads / model.tp) * model.num_layers * attention_pairs(starts, lens)


def attention_pairs(starts: np.ndarray, lens: np.ndarray) -> float:
    """Of query and key, in one head and layer."""
    n, p = lens.astype(np.float64), starts.astype(np.float64)
    return float((n * p + n * (n + 1) / 2).sum())


def pass_cost(
    model: ModelShape,
    gpu: Gpu,
    starts: np.ndarray,
    lens: np.ndarray,
    num_sampled: int | None = None,
    decode: bool = False,
) -> PassCost:
    """A forward pass on one rank: roofline (Williams et al., 2009) of the matrices, which read the weights once, and
    of attention, which reads the KV of prefix and new tokens once per request.

        matmul    = max(flops / (peak * efficiency), weights / (HBM * efficiency))
        attention = max(flops / (peak * efficiency), KV / (HBM * efficiency))
        allreduce = 2 per layer: latency + 2 (tp - 1) / tp * tokens * hidden * dtype / peer       (ring)
        launch    = layers * layer_launch_s, or graph_launch_s for a decode

    starts, lens: (num_reqs,), as in `Launch`: tokens before the new ones, and new ones. decode: one token each, in a
    graph. Activations are not counted: they stay in the L2 cache or hide behind the matrices.
    """
    num_tokens = int(lens.sum())
    num_sampled = len(lens) if num_sampled is None else num_sampled
    hbm = gpu.hbm_bytes_per_s * gpu.hbm_efficiency
    matmul = max(
        matmul_flops(model, num_tokens, num_sampled) / (gpu.matrix_flops * gpu.matmul_efficiency),
        model.pass_weight_bytes / hbm,
    )
    kv_bytes = float(starts.sum(dtype=np.int64) + num_tokens) * model.kv_bytes_per_token
    attention = max(
        attention_flops(model, starts, lens) / (gpu.matrix_flops * gpu.attention_efficiency), kv_bytes / hbm
    )
    allreduce = 0.0
    if model.tp > 1:
        assert gpu.peer_bytes_per_s, f"{gpu.name} has no link to other GPUs, and {model.name} runs on {model.tp}"
        message = num_tokens * model.hidden * model.dtype_bytes * 2 * (model.tp - 1) / model.tp
        allreduce = 2 * model.num_layers * (gpu.allreduce_latency_s + message / gpu.peer_bytes_per_s)
    launch = gpu.graph_launch_s if decode else model.num_layers * gpu.layer_launch_s
    return PassCost(matmul, attention, allreduce, launch, gpu.step_s)


def prefill_seconds(model: ModelShape, gpu: Gpu, prefix: int, new: int, num_reqs: int = 1) -> float:
    """num_reqs requests of `new` tokens each behind `prefix` cached ones."""
    return pass_cost(model, gpu, np.full(num_reqs, prefix), np.full(num_reqs, new)).seconds


def decode_seconds(model: ModelShape, gpu: Gpu, context: int, num_reqs: int) -> float:
    """One token for each of num_reqs requests of `context` tokens."""
    return pass_cost(model, gpu, np.full(num_reqs, context), np.ones(num_reqs, np.int64), decode=True).seconds


# -- both at once ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interference:
    """By what share one CTA of a transfer kernel slows what runs beside it (Strata Fig. 5). Copy engines: nothing."""

    prefill_per_cta: float
    decode_per_cta: float

    def slowdown(self, method: Method, decode: bool) -> float:
        if method.kind != "kernel":
            return 0.0
        return method.ctas * (self.decode_per_cta if decode else self.prefill_per_cta)


def overlapped_seconds(load_s: float, compute_s: float, num_layers: int) -> float:
    """A pass whose layers wait for their loads, both evenly spread: the slower one whole, and one layer of the other
    (what `SimulatedExecutor` does)."""
    return max(load_s + compute_s / num_layers, compute_s + load_s / num_layers)


def stall_share(load_s: float, compute_s: float, num_layers: int) -> float:
    """The share of such a pass in which nothing is computed."""
    return 1.0 - compute_s / overlapped_seconds(load_s, compute_s, num_layers)


# -- remote ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SmartNic:
    """Stages of a fetch that run at once, in bytes per second: network (of compressed bytes), decompress (of its
    output), dequantize (of its output), dma. alone and together: each stage by itself, and all at the same time."""

    alone: dict[str, float] = field(default_factory=dict)
    together: dict[str, float] = field(default_factory=dict)


def fetch_seconds(
    nic: SmartNic, raw_bytes: float, quantized: float, compressed: float, network_limit: float = float("inf")
) -> float:
    """A long fetch: the slowest stage. raw_bytes: of KV as the GPU wants it; quantized, compressed: its size after
    quantizing, and after compressing that, as shares of raw_bytes."""
    rates = nic.together
    return max(
        raw_bytes * compressed / min(rates["network"], network_limit),
        raw_bytes * quantized / rates["decompress"],
        raw_bytes / rates["dequantize"],
        raw_bytes / rates["dma"],
    )
