"""Machines and models in numbers, each with its source.

Sources: *sheet* is the vendor's data sheet, *config* the model's published config.json, *paper* the paper's text,
*fitted* a result of fit.py, *assumed* our guess with a range that a sensitivity table should cover. No number here
was chosen for an end-to-end result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmark.simulator.cost_models import Gpu, HostLink, Interference, ModelShape, SmartNic

# -- models: config.json of the named checkpoint; bfloat16 ----------------------------------------------------------

_MODELS = (
    # name, layers, hidden, intermediate, heads, KV heads, head dim, vocabulary
    ModelShape("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, 128256),  # meta-llama/Llama-3.1-8B-Instruct
    ModelShape("Llama-3.1-70B", 80, 8192, 28672, 64, 8, 128, 128256, tp=4),  # Llama-3.1-70B-Instruct; tp: Strata 5.1
    ModelShape("Qwen2.5-14B", 48, 5120, 13824, 40, 8, 128, 152064),  # Qwen/Qwen2.5-14B-Instruct-1M
    ModelShape("Mistral-7B", 32, 4096, 14336, 32, 8, 128, 32000),  # mistralai/Mistral-7B-Instruct-v0.2
    ModelShape("Mistral-24B", 40, 5120, 32768, 32, 8, 128, 131072),  # mistralai/Mistral-Small-24B-Instruct-2501
    ModelShape("LWM-7B", 32, 4096, 11008, 32, 32, 128, 32000),  # LargeWorldModel/LWM-Text-1M, a Llama 2 7B
    ModelShape("Qwen3-8B", 36, 4096, 12288, 32, 8, 128, 151936),
    ModelShape("Qwen3-14B", 40, 5120, 17408, 40, 8, 128, 151936),
    ModelShape("Qwen3-32B", 64, 5120, 25600, 64, 8, 128, 151936),
)
MODELS = {model.name: model for model in _MODELS}

# -- what GPUs have in common ---------------------------------------------------------------------------------------

# Assumed, 0.5 to 0.8: what bfloat16 matrix products of a prefill reach on Hopper, whose clock falls under such load.
MATMUL_EFFICIENCY = 0.65
# Assumed, 0.4 to 0.75: FlashAttention-3 reports 75 % of an H100 at its best; paged and ragged prefixes reach less.
ATTENTION_EFFICIENCY = 0.55
# Assumed, 0.75 to 0.92.
HBM_EFFICIENCY = 0.85
# Assumed, 60 to 250 us: about a dozen kernels per layer at 5 to 10 us of host time each.
LAYER_LAUNCH_S = 100e-6
# Assumed: launching a CUDA graph, 0.1 to 0.5 ms.
GRAPH_LAUNCH_S = 200e-6
# Assumed, 0 to 3 ms: sampling, metadata and copies of a pass that an overlapped scheduler does not hide.
STEP_S = 500e-6
# Assumed: one small all-reduce over NVLink.
ALLREDUCE_LATENCY_S = 15e-6

# -- what links have in common --------------------------------------------------------------------------------------

# Fitted: share of the peak that endless transfers reach, and what each asynchronous copy costs besides.
USABLE = 0.889
COPY_S = 3.5e-6
# Reported of cuMemcpyBatchAsync in pull requests 42212 and 48434 of vllm-project/vllm: about 0.5 us per piece.
BATCHED_COPY_S = 0.5e-6
# Assumed: 1,024 threads with 8 accesses of 16 bytes each. Only its quotient with the latency shows in a rate.
CTA_BYTES = 1024 * 8 * 16
# Fitted with CTA_BYTES.
KERNEL_LATENCY_S = 0.74e-6
# Assumed, 5 to 50 us: from the scheduler's decision to the first byte.
SUBMIT_S = 20e-6

# Strata 4.2 on Fig. 5 gives bounds for two CTAs, below 5 % and 10 %; taken as values, and as linear in CTAs.
INTERFERENCE = Interference(prefill_per_cta=0.05 / 2, decode_per_cta=0.10 / 2)


def _gpu(name: str, matrix_flops: float, hbm_bytes_per_s: float, hbm_bytes: float, peer: float) -> Gpu:
    return Gpu(
        name,
        matrix_flops,
        hbm_bytes_per_s,
        hbm_bytes,
        MATMUL_EFFICIENCY,
        ATTENTION_EFFICIENCY,
        HBM_EFFICIENCY,
        LAYER_LAUNCH_S,
        GRAPH_LAUNCH_S,
        STEP_S,
        peer,
        ALLREDUCE_LATENCY_S,
    )


def _link(name: str, peak: float, copy_s: float = COPY_S, usable: float = USABLE) -> HostLink:
    return HostLink(name, peak, usable, copy_s, BATCHED_COPY_S, CTA_BYTES, KERNEL_LATENCY_S, SUBMIT_S)


@dataclass(frozen=True)
class Hardware:
    """One machine. host_bytes: pinned memory for the cache, of all its GPUs together. peer_bytes_per_s: NVLink
    between two of its GPUs, one way; 0: none."""

    name: str
    gpu: Gpu
    link: HostLink
    num_gpus: int
    host_bytes: float
    interference: Interference = INTERFERENCE
    nic: SmartNic | None = None

    @property
    def peer_bytes_per_s(self) -> float:
        return self.gpu.peer_bytes_per_s

    @property
    def peer_link(self) -> HostLink:
        """From another of its GPUs. What copies reach there is not printed: as on PCIe 5 (assumed, 0.75 to 0.95)."""
        assert self.peer_bytes_per_s, f"{self.name} has no link between GPUs"
        return _link("NVLink", self.peer_bytes_per_s)


# Sheet "NVIDIA H200 Tensor Core GPU", SXM: bfloat16 1,979 TFLOP/s with sparsity, half of it dense; 141 GB, 4.8 TB/s;
# NVLink 900 GB/s both ways together. Paper (Strata 5.1): eight per node, each with PCIe 5.0 x16, up to 64 GB/s one
# way (63.0 after 128b/130b coding); 1 TB of pinned memory.
H200 = Hardware("h200", _gpu("H200", 989.5e12, 4.8e12, 141e9, 450e9), _link("PCIe 5.0 x16", 64e9), 8, 1e12)

# Paper (Strata 5.1): one H100, 384 GB/s one way to the CPU's memory, 400 GB of pinned memory. Sheet "GH200 Grace
# Hopper Superchip": bfloat16 1,979 TFLOP/s with sparsity, 96 GB HBM3 with 4 TB/s (the paper does not say whether its
# GPU has 96 or 144 GB: assumed 96), NVLink-C2C 450 GB/s one way, so the host's memory is the limit. Fitted: copy_s.
GH200 = Hardware(
    "gh200",
    _gpu("GH200", 989.5e12, 4.0e12, 96e9, 0.0),
    _link("NVLink-C2C, LPDDR5X", 384e9, copy_s=3.22e-6),
    1,
    400e9,
)

# H20: 148 TFLOP/s in bfloat16, 96 GB, 4.0 TB/s, as resellers and the press print it (NVIDIA publishes no sheet).
# Paper (SwiftCache, testbed): four GPUs; NVLink with a *bidirectional* bandwidth of 400 GB/s, so 200 one way (the
# part's own 900 GB/s is not what they had); PCIe 4.0 with "a total bandwidth of 32 GB/s that is shared among the four
# GPUs"; 128 GB of host memory (all of it for the cache: assumed). Fitted: the efficiency, on uncached prefills; its
# matrix peak is so low that the clock stays up; the usable share of PCIe, on Fig. 1, where it ends at its bound,
# which favours systems that load from the host. What a copy costs: as on PCIe 5 (assumed).
_H20_EFFICIENCY = 0.867
_H20_USABLE = 1.0
H20X4 = Hardware(
    "h20x4",
    replace(
        _gpu("H20", 148e12, 4.0e12, 96e9, 200e9),
        matmul_efficiency=_H20_EFFICIENCY,
        attention_efficiency=_H20_EFFICIENCY,
    ),
    _link("PCIe 4.0, shared by four", 32e9, usable=_H20_USABLE),
    4,
    128e9,
)

# Sheet "NVIDIA L40S": bfloat16 362.05 TFLOP/s dense, 48 GB GDDR6, 864 GB/s, no NVLink, PCIe 4.0 x16 with 64 GB/s both
# ways. Paper (ShadowServe, testbed): 504 GB of memory (half of it for the cache: assumed). Stages of the BlueField-3
# from ShadowServe 6.3: alone, network 37.3 Gbit/s, Deflate 280 (output), dequantizing 167 (output), DMA 230; all at
# once, Deflate loses 27 % and DMA 24 %, the network falls to 20.6 Gbit/s, dequantizing stays.
_GBIT = 1e9 / 8
L40S_BLUEFIELD3 = Hardware(
    "l40s-bluefield3",
    _gpu("L40S", 362.05e12, 864e9, 48e9, 0.0),
    _link("PCIe 4.0 x16", 32e9),
    1,
    252e9,
    nic=SmartNic(
        alone={
            "network": 37.3 * _GBIT,
            "decompress": 280 * _GBIT,
            "dequantize": 167 * _GBIT,
            "dma": 230 * _GBIT,
        },
        together={
            "network": 20.6 * _GBIT,
            "decompress": 280 * (1 - 0.27) * _GBIT,
            "dequantize": 167 * _GBIT,
            "dma": 230 * (1 - 0.24) * _GBIT,
        },
    ),
)

# ShadowServe 6.3 on Fig. 13: a chunk of 256 tokens is 6 MB for the network. Of Llama-3.1-8B these tokens have 33.6
# MB; 4.3: quantizing "exactly halves the original data size". The text does not say which model's chunk, nor that the
# 6 MB are compressed; quantized it would be 16.8 MB.
CHUNK_TOKENS = 256
CHUNK_COMPRESSED_SHARE = 6e6 / (CHUNK_TOKENS * MODELS["Llama-3.1-8B"].kv_bytes_per_token)
CHUNK_QUANTIZED_SHARE = 0.5
# ShadowServe 6.2.2: decompressing on the GPU has "a maximum throughput of ~32 Gbps under interference", of what comes
# from the network; 2.2 on Fig. 3a: neither it nor decoding can lose less than 30 % while both run.
GPU_DECOMPRESS_BUSY = 32 * _GBIT
GPU_DECOMPRESS_LOSS = 0.30
# Assumed: CacheGen's chunk over ShadowServe's, of which 6.2.1 prints that Deflate's ratio is "better", and no number.
# Sources give 0.57 to 1.38. At 1.1 the two have the same time to first token (papers/shadowserve_size.py, simulated).
CACHEGEN_SIZE = 1.25
# ShadowServe 4.3: registering memory at run time costs "up to 3x fetching latency".
REGISTERING_SLOWER = 3.0

HARDWARE = {h.name: h for h in (H200, GH200, H20X4, L40S_BLUEFIELD3)}


def loading_at_once(hardware: Hardware, num_gpus: int) -> Hardware:
    """The machine while num_gpus of its GPUs load at the same time over a link that they share, as on the H20s."""
    return replace(hardware, link=replace(hardware.link, sharers=num_gpus))


# SGLang 0.4.5's --mem-fraction-static by tensor parallelism, from memory of its server_args: uncertain by 0.03.
_MEM_FRACTION = {1: 0.88, 2: 0.87, 4: 0.85, 8: 0.81}


def device_tokens(model: ModelShape, gpu: Gpu, mem_fraction: float | None = None) -> int:
    """Tokens whose KV fits beside the weights."""
    fraction = _MEM_FRACTION[model.tp] if mem_fraction is None else mem_fraction
    room = gpu.hbm_bytes * fraction - model.resident_weight_bytes
    if room <= 0:
        raise ValueError(f"{model.name} at tp {model.tp} does not fit {gpu.name}")
    return int(room // model.kv_bytes_per_token)


def host_tokens(model: ModelShape, host_bytes: float) -> int:
    """Tokens whose KV fits into so much host memory, all ranks together."""
    return int(host_bytes // (model.kv_bytes_per_token * model.tp))
