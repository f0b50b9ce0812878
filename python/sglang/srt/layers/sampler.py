"""`Sampler`: from logits to token ids. Stateless: a row's token depends on its logits, its parameters, its seed and
its position, and on nothing else in the batch or before it.
"""

from __future__ import annotations

import torch

from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

# Constants of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators), as signed integers:
# torch's int64 arithmetic wraps around as the original's unsigned does.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)

# So many of the most probable tokens are looked at before all are sorted.
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
    # Mixed twice: seeds such as 1, 2, 3 and neighbouring positions must not give related numbers.
    bits = _mix(_mix((seeds + 1) * _GOLDEN) + (positions + 1) * _GOLDEN)
    return _shift_right(bits, 11).double() * 2.0**-53


class Sampler:
    """Top-k, top-p and min-p all look at the probabilities after temperature and before any cut, as SGLang does. A
    token that ties with the last one kept is kept too, so that ties do not depend on a sort's whims."""

    @torch.inference_mode()
    def __call__(self, logits: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
        """logits: (n, vocab_size) float32. Returns (n,) int64."""
        greedy_tokens = logits.argmax(dim=-1)
        if info.is_all_greedy or logits.shape[0] == 0:
            return greedy_tokens

        is_greedy = info.temperatures <= 0
        temperatures = info.temperatures.masked_fill(is_greedy, 1.0).unsqueeze(1)
        # Shifted before the division: a tiny temperature must not overflow.
        probs = ((logits - logits.amax(dim=-1, keepdim=True)) / temperatures).softmax(dim=-1)
        limited = (~is_greedy & ((info.top_ks < logits.shape[1]) | (info.top_ps < 1.0))).nonzero().squeeze(1)
        if limited.shape[0] == probs.shape[0]:
            _keep_top(probs, info.top_ks, info.top_ps)
        elif limited.shape[0] > 0:
            # Sorting is most of the work, so only the rows that need it.
            some = probs.index_select(0, limited)
            _keep_top(some, info.top_ks.index_select(0, limited), info.top_ps.index_select(0, limited))
            probs.index_copy_(0, limited, some)
        if bool((info.min_ps > 0).any()):
            # The likeliest token is never cut, so its probability is still there to compare with.
            probs.masked_fill_(probs < probs.amax(-1, keepdim=True) * info.min_ps.unsqueeze(1), 0.0)

        # Inverse of the distribution function, in the order of the vocabulary in every row: whether a row was cut
        # or not, it reads its random number alike. float64, because 150,000 float32 additions are off by 1e-4.
        cdf = probs.cumsum(dim=-1, dtype=torch.float64)
        drawn = random_uniform(info.seeds, info.positions).unsqueeze(1) * cdf[:, -1:]
        # The first token whose sum exceeds the number drawn; it has a probability above zero. There is one, because
        # (1 - 2**-53) * total is below total in float64 too. The clamp is for rows of NaN, which others report.
        tokens = torch.searchsorted(cdf, drawn, right=True).squeeze(1)
        return torch.where(is_greedy, greedy_tokens, tokens.clamp_(max=logits.shape[1] - 1))


def _keep_top(probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor) -> None:
    """Zero what top-k and top-p cut off, in place. probs: (n, vocab_size). top_ks: (n,) int64, top_ps: (n,)."""
    vocab_size = probs.shape[1]
    # With a top-k in every row nothing beyond the largest matters.
    deepest = int(top_ks.max().clamp(1, vocab_size))
    # top_p seldom reaches far, and sorting 150,000 tokens takes ten times as long as finding the best.
    depth = min(deepest, _FIRST_DEPTH)
    while True:
        ordered = (
            probs.topk(depth, dim=-1).values if depth < vocab_size else probs.sort(dim=-1, descending=True).values
        )
        sums = ordered.cumsum(dim=-1, dtype=torch.float64)
        if depth == deepest or bool(((sums[:, -1] >= top_ps) | (top_ks <= depth)).all()):
            break
        depth = deepest
    # A token stays while those before it do not reach top_p: the first one always does.
    num_kept = (sums - ordered < top_ps.unsqueeze(1)).sum(dim=-1)
    num_kept = torch.minimum(num_kept, top_ks).clamp_(1, depth)
    threshold = ordered.gather(1, (num_kept - 1).unsqueeze(1))
    probs.masked_fill_(probs < threshold, 0.0)
