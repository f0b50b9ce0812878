"""Of how many tokens a cache keeps layers with a sliding window, by what prompts ask for. Pure; numpy only.

The host gives them up, and storage never gets them, but for what windows reach from places where prompts are likely
to leave a path: see `sglang.srt.managers.window_blocks`.
"""

from __future__ import annotations

import numpy as np

from sglang.cli.reuse import ReferenceLog
from sglang.srt.managers.window_blocks import checkpoints


def kept_share(log: ReferenceLog, reach: int) -> float:
    """Of the tokens of all blocks. reach: of windows, in tokens. Where the log has a sample of the blocks these stand
    for their neighbours, and the share is an estimate."""
    uses = list(log.uses())
    num_blocks = max((int(ids.max()) + 1 for ids, _, _ in uses if len(ids)), default=0)
    sizes, kept = np.zeros(num_blocks), np.zeros(num_blocks)
    parts = _where_paths_part([ids for ids, _, _ in uses], num_blocks)
    for ids, tokens, num_looked_up in uses:
        if not len(ids):
            continue
        lengths = tokens / log.rate
        ends = np.cumsum(lengths)
        leaves = ends[parts[ids]].tolist()
        leaves += [float(ends[-1]), *([float(ends[num_looked_up - 1])] if num_looked_up else [])]
        leaves += checkpoints(int(ends[-1]), reach)
        sizes[ids] = tokens
        seen = _seen_tokens(np.unique(leaves), reach, np.concatenate(([0.0], ends)))
        kept[ids] = np.maximum(kept[ids], np.diff(seen) / lengths)
    total = float(sizes.sum())
    return float(kept @ sizes) / total if total else 0.0


def _where_paths_part(paths: list[np.ndarray], num_blocks: int) -> np.ndarray:
    """(num_blocks,) bool: blocks that are followed by different ones."""
    pairs = [np.stack((ids[:-1], ids[1:])) for ids in paths if len(ids) > 1]
    followed = np.zeros(num_blocks, np.int64)
    if pairs:
        distinct = np.unique(np.concatenate(pairs, axis=1), axis=1)
        followed += np.bincount(distinct[0], minlength=num_blocks)
    return followed > 1


def _seen_tokens(leaves: np.ndarray, reach: int, upto: np.ndarray) -> np.ndarray:
    """Tokens before each place of `upto` that are within reach before any of the places `leaves`, ascending."""
    before = np.concatenate(([0.0], leaves[:-1]))
    seen = np.minimum(leaves - before, reach)
    counted = np.cumsum(seen)
    knots = np.stack((leaves - seen, leaves), axis=1).ravel()
    return np.interp(upto, knots, np.stack((counted - seen, counted), axis=1).ravel(), left=0.0)
