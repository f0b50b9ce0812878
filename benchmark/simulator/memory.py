"""What a GPU's memory holds during a prefill: weights, activations and KV; and how long a context it leaves room for.

Pure functions over plain data. Knows no machine and no system (papers/swiftcache.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from benchmark.simulator.cost_models import ModelShape

# Rows of logits that vLLM makes room for: its --max-num-seqs, from memory.
SAMPLED_ROWS = 256


def activation_bytes(model: ModelShape, num_tokens: int, num_sampled: int = SAMPLED_ROWS) -> float:
    """The most that is alive at once while num_tokens tokens go through the model eagerly, in buffers of their own:

        attention = tokens * (2 hidden + 2 q + 2 kv)    residual and normalized input; Q, K, V; attention's output
        MLP       = tokens * (3 hidden + 3 intermediate)    the same and the output; gate and up, their product
        head      = tokens * 2 hidden + sampled * vocabulary * (1 + 4 / dtype)    logits, and again in float32
        activations = max(attention, MLP, head) * dtype

    q, kv: width of all heads. Attention is fused: no scores. It grows with the tokens of one pass: the whole prompt,
    or a chunk of it.
    """
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = num_tokens * (2 * model.hidden + 2 * q + 2 * kv)
    mlp = num_tokens * 3 * (model.hidden + model.intermediate)
    head = num_tokens * 2 * model.hidden + num_sampled * model.vocab * (1 + 4 / model.dtype_bytes)
    return max(attention, mlp, head) * model.dtype_bytes


def kv_room(model: ModelShape, memory_bytes: float, activations: float) -> float:
    """Bytes for KV = memory - weights - activations; 0 where they leave nothing. memory_bytes: what is usable."""
    return max(0.0, memory_bytes - model.resident_weight_bytes - activations)


def longest_context(capacity: Callable[[int], int]) -> int:
    """The largest n with n <= capacity(n). capacity: tokens whose KV fits while a prompt of n tokens is computed; it
    never grows with n."""
    return bisect_left(range(capacity(0) + 2), True, key=lambda n: capacity(n) < n) - 1
