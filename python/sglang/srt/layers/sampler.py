"""`Sampler`: from logits to token ids. Stateless: a row's token depends on its logits, its parameters, its seed and
its position, and on no other row or earlier batch."""

from __future__ import annotations

from functools import partial

import torch

from sgl_kernel import sampling as kernels
from sgl_kernel.cpu import sampling as cpu_sampling
from sgl_kernel.cpu.library import takes
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo, SamplingCuts

# Constants of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators), as signed integers.
# Torch's int64 arithmetic wraps around as the original's unsigned arithmetic does.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)

# This many of the most probable tokens are looked at before all are sorted.
_FIRST_DEPTH = 1024


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical, where torch's >> keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def random_uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """seeds, positions: (n,) int64. Returns (n,) float64 in [0, 1), a function of (seed, position) alone."""
    # Mixed twice, so that seeds such as 1, 2, 3 and neighbouring positions do not give related numbers.
    bits = _mix(_mix((seeds + 1) * _GOLDEN) + (positions + 1) * _GOLDEN)
    return _shift_right(bits, 11).double() * 2.0**-53


class Sampler:
    """Top-k, top-p and min-p all use the probabilities after temperature and before any cut, as SGLang does. A token
    that ties with the last kept one is kept too, so that ties do not depend on the order of a sort.

    It waits for no device. On a GPU the last bits of a row's probabilities may depend on the shape of the batch, as
    those of its logits do: a token at the border of a cut may be kept or not.
    """

    @torch.inference_mode()
    def __call__(self, logits: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
        """logits: (n, vocab_size) float32. Returns (n,) int64."""
        if takes(logits):
            uniforms = None if info.is_all_greedy else random_uniform(info.seeds, info.positions)
            return cpu_sampling.draw(logits, info.temperatures, info.top_ks, info.top_ps, info.min_ps, uniforms)
        if info.is_all_greedy or logits.shape[0] == 0:
            return logits.argmax(dim=-1)

        cuts = info.cuts
        if kernels.has_triton(logits) and logits.stride(1) == 1:
            cut = partial(_cut, info=info) if cuts.num_limited else None
            return kernels.draw(logits, info.temperatures, info.min_ps, info.seeds, info.positions, cut)
        is_greedy = info.temperatures <= 0
        temperatures = info.temperatures.masked_fill(is_greedy, 1.0).unsqueeze(1)
        # Shifted before the division, so that a tiny temperature does not overflow.
        probs = ((logits - logits.amax(dim=-1, keepdim=True)) / temperatures).softmax(dim=-1)
        if cuts.num_limited:
            _cut(probs, info)
        if cuts.has_min_p:
            # The likeliest token is never cut, so that its probability is still the largest.
            probs.masked_fill_(probs < probs.amax(-1, keepdim=True) * info.min_ps.unsqueeze(1), 0.0)

        # The inverse of the distribution function, in the order of the vocabulary. A row reads its random number
        # alike whether it was cut or not. float64, because 150,000 float32 additions are off by 1e-4.
        cdf = probs.cumsum(dim=-1, dtype=torch.float64)
        drawn = random_uniform(info.seeds, info.positions).unsqueeze(1) * cdf[:, -1:]
        # The first token whose sum exceeds the random number; its probability is above zero. It exists, because (1 -
        # 2**-53) * total is below total in float64 too. The clamp is for rows of NaN, whose sums exceed nothing. The
        # executor reports them if `check_finite` is set.
        tokens = torch.searchsorted(cdf, drawn, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)
        return torch.where(is_greedy, logits.argmax(dim=-1), tokens) if cuts.has_greedy else tokens


def _cut(probs: torch.Tensor, info: SamplingBatchInfo) -> None:
    """Zero what top-k and top-p cut off in the rows that draw, in place."""
    rows = info.cuts.limited
    if rows is None:
        _keep_top(probs, info.top_ks, info.top_ps, info.cuts)
        return
    # Sorting is most of the work, so that only rows with a cut are sorted.
    some = probs.index_select(0, rows)
    _keep_top(some, info.top_ks.index_select(0, rows), info.top_ps.index_select(0, rows), info.cuts)
    probs.index_copy_(0, rows, some)


def _keep_top(probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, cuts: SamplingCuts) -> None:
    """Zero what top-k and top-p cut off, in place. probs: (n, vocab_size). top_ks: (n,) int64, top_ps: (n,)."""
    if kernels.has_renorm_kernels(probs):
        kept = torch.ones_like(probs, dtype=torch.bool)
        # Each kernel looks at all probabilities, and keeps tokens that tie with the last one. The kernels need a
        # top-k and a top-p that cut something; a row without one keeps the result of the other.
        if cuts.has_top_k:
            kept &= kernels.top_k_renorm_probs(probs, top_ks) > 0
        if cuts.has_top_p:
            kept &= (kernels.top_p_renorm_probs(probs, top_ps) > 0) | (top_ps >= 1).unsqueeze(1)
        probs.masked_fill_(~kept, 0.0)
        return
    if kernels.has_triton(probs):
        kernels.keep_top(probs, top_ks, top_ps)
        return
    vocab_size = probs.shape[1]
    # With a top-k in every row, only the largest top-k matters.
    deepest = cuts.deepest_top_k
    # top_p seldom reaches far, and sorting 150,000 tokens takes ten times as long as finding the best. Whether it
    # reached further is checked only where the answer is in host memory; a device is not waited for.
    depth = min(deepest, _FIRST_DEPTH) if _is_on_host(probs) else deepest
    while True:
        ordered = (
            probs.topk(depth, dim=-1).values if depth < vocab_size else probs.sort(dim=-1, descending=True).values
        )
        sums = ordered.cumsum(dim=-1, dtype=torch.float64)
        if depth == deepest or bool(((sums[:, -1] >= top_ps) | (top_ks <= depth)).all()):
            break
        depth = deepest
    # A token is kept while the sum before it does not reach top_p. The first one is always kept.
    num_kept = (sums - ordered < top_ps.unsqueeze(1)).sum(dim=-1)
    num_kept = torch.minimum(num_kept, top_ks).clamp_(1, depth)
    threshold = ordered.gather(1, (num_kept - 1).unsqueeze(1))
    probs.masked_fill_(probs < threshold, 0.0)


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"
