"""`WindowBlocks`: for which blocks storage also gets the KV of layers with a window.

A prompt needs that for the last blocks before it leaves what is stored, as far as windows reach. Most prompts leave
where a path ended, or where two part. For the others there are checkpoints:

    a path; windows reach two blocks      0 1 2 3 4 5 6 7 8 9 . . . 14 15 16 . . . 27 28 29 30
    checkpoints                                       # #|           # #|
    its end, and one block more                                                       # # #|

The distance between checkpoints grows with the path: a prompt that leaves between two computes at most four windows
anew, in whole blocks, or a fifth of what it shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from sglang.srt.mem_cache.node import Node

# See `checkpoints`.
_WINDOWS_APART, _PART_APART = 4, 4


class WindowBlocks:
    """block_tokens: of a block. num_seen: blocks that windows reach from the end of one."""

    def __init__(self, block_tokens: int, num_seen: int) -> None:
        self._block_tokens = block_tokens
        self._num_seen = num_seen
        # Whether a checkpoint's windows reach a block, by its place.
        self._is_seen = np.zeros(0, np.bool_)

    def of(self, path: Sequence[Node]) -> np.ndarray:
        """(num_blocks,) bool: which blocks of a path that begins with the first token and has names."""
        num_blocks = path[-1].end // self._block_tokens
        if num_blocks > len(self._is_seen):
            self._place_checkpoints(2 * num_blocks)
        wanted = np.concatenate([node.seen for node in path])  # type: ignore[misc]
        wanted |= self._is_seen[:num_blocks]
        for node in ends_within(path):
            wanted[slice(*self.seen_from(node.end))] = True
        return wanted

    def seen_from(self, end: int) -> tuple[int, int]:
        """The blocks [first, last) before a place where prompts end, or leave; end: in tokens. One more than windows
        reach, as the next prompt may part from the last tokens, as of a template."""
        last = end // self._block_tokens
        return max(0, last - self._num_seen - 1), last

    def _place_checkpoints(self, num_blocks: int) -> None:
        self._is_seen = np.zeros(num_blocks, np.bool_)
        for end in checkpoints(num_blocks, self._num_seen):
            self._is_seen[end - self._num_seen : end] = True


def checkpoints(
    length: int, reach: int, windows_apart: int = _WINDOWS_APART, part_apart: int = _PART_APART
) -> Iterator[int]:
    """Where checkpoints end on a path, from the first. length: of the path, and reach: of windows, both in tokens or
    both in blocks. From one to the next are so many windows, or such a part of what is before."""
    end = apart = windows_apart * reach
    while end < length:
        yield end
        end += max(apart, end // part_apart)


def ends_within(path: Sequence[Node]) -> list[Node]:
    """The nodes behind which other paths part from this one."""
    return [node for node in path if len(node.children) > 1]
