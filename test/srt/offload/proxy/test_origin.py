"""Where the bytes of a block lie in an engine's pages."""

from __future__ import annotations

import numpy as np
import pytest

from sglang.srt.offload.proxy.origin import PoolPages


@pytest.mark.parametrize(
    ("pages", "start", "end", "lengths"),
    [
        ([0, 1, 2, 3], 0, 40, [40]),
        ([3, 2, 1, 0], 0, 40, [10, 10, 10, 10]),
        ([5, 6, 1, 2], 0, 40, [20, 20]),
        ([5, 6, 1, 2], 3, 38, [17, 18]),
        ([5, 6, 1, 2], 12, 17, [5]),
        ([5, 7, 1, 2], 9, 11, [1, 1]),
    ],
)
def test_where_the_bytes_of_a_block_lie(pages, start, end, lengths):
    memory = np.arange(80, dtype=np.uint8)
    origin = PoolPages(memory, 10, np.array([pages], np.int32))
    assert [len(run) for run in origin.runs(0, start, end)] == lengths
    block = np.concatenate([memory[p * 10 : p * 10 + 10] for p in pages])
    assert (origin.read(0, start, end, np.empty(40, np.uint8)) == block[start:end]).all()
