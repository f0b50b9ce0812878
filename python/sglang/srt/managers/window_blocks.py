"""`WindowBlocks`: for which blocks storage also gets the KV of layers with a window.

A prompt needs that for the last blocks before it leaves what is stored, as far as windows reach. Most prompts leave
where a path ended, or where two part. For the others there are checkpoints:

    a path; windows reach two blocks      0 1 2 3 4 5 6 7 8 9 . . . . . 27 28 29 30
    checkpoints                               # #|    # #|  . . .
    its end, and one block more                                            # # #|

The distance between checkpoints grows with the path: a prompt that leaves between two computes at most two windows
anew, or a fifth of what it shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from sglang.srt.mem_cache.node import Node

# From one checkpoint to the next: so many windows, or such a part of what is before.
_WINDOWS_APART, _PART_APART = 2, 4


class WindowBlocks:
    """block_tokens: of a block. num_seen: blocks that windows reach from the end of one."""

    def __init__(self, block_tokens: int, num_seen: int) -> None:
        self._block_tokens = block_tokens
        self._num_seen = num_seen
        # Whether a checkpoint's windows reach a block, by its place.
        self._is_seen = np.zeros(0, np.bool_)

    def of(self, path: Sequence[Node]) -> np.ndarray:
        """(num_blocks,) bool: which blocks of a path that begins with the first token."""
        num_blocks = path[-1].end // self._block_tokens
        if num_blocks > len(self._is_seen):
            self._place_checkpoints(2 * num_blocks)
        wanted = self._is_seen[:num_blocks].copy()
        for end in self._ends(path):
            last = end // self._block_tokens
            # The next prompt may part from the last tokens, as of a template.
            wanted[max(0, last - self._num_seen - 1) : last] = True
        return wanted

    @staticmethod
    def _ends(path: Sequence[Node]) -> Iterator[int]:
        """Where other paths part from this one, and where it ends, if it was answered: the next prompt repeats the
        answer, or not."""
        for node in path:
            if len(node.children) > 1:
                yield node.end
        last = path[-1]
        if last.asked_end and not last.children:
            yield from (last.parts_at, last.asked_end, last.end)

    def _place_checkpoints(self, num_blocks: int) -> None:
        self._is_seen = np.zeros(num_blocks, np.bool_)
        end = apart = _WINDOWS_APART * self._num_seen
        while end < num_blocks:
            self._is_seen[end - self._num_seen : end] = True
            end += max(apart, end // _PART_APART)
