"""What every radix tree over pages of tokens does: the key of a page, the common prefix, the split of an edge. Pure;
shared by the resident nodes (hiradix_tree.py) and the claims (transient_nodes.py).

    split   parent --- node(abcdef)   becomes   parent --- upper(abc) --- node(def)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

PageKey = int | bytes

# Tokens. Above, copies cost more than numpy's overhead.
_COMPARE_AS_BYTES = 4096
# Bytes of a base that a slice of it may keep alive beyond its own size, whatever that is.
_KEPT_FOR_NOTHING = 4096


def page_key_of(page_size: int) -> Callable[[np.ndarray, int], PageKey]:
    """The function (tokens, place of a page's first token) -> the key of the page among its siblings."""
    if page_size < 1:
        raise ValueError(f"page size must be at least 1, got {page_size}")
    if page_size == 1:
        return lambda tokens, pos: tokens.item(pos)
    return lambda tokens, pos: tokens[pos : pos + page_size].tobytes()


def common_len(key: np.ndarray, tokens: np.ndarray, pos: int, end: int, page_size: int) -> int:
    """Length of the prefix that key and tokens[pos:end] share, in whole pages; at least one page, as the caller found
    `key` by its first."""
    n = len(key)
    if n > end - pos:
        n = end - pos
        key = key[:n]
    part = tokens[pos : pos + n]
    # All but the last node of a path match as a whole: for short ones bytes tell that three times as fast.
    if n <= _COMPARE_AS_BYTES and key.tobytes() == part.tobytes():
        return n
    differs = key != part
    first = int(differs.argmax())
    return first - first % page_size if differs[first] else n


def put_above(node: Any, upper: Any, first_page: PageKey, second_page: PageKey) -> None:
    """Link a new upper half between a node and its parent. first_page, second_page: the keys of the first pages of
    upper and node."""
    node.parent.children[first_page] = upper
    upper.parent = node.parent
    upper.children[second_page] = node
    node.parent = upper


def trimmed(array: np.ndarray) -> np.ndarray:
    """A copy if the array is a small part of one that it would keep alive."""
    base = array.base
    if isinstance(base, np.ndarray) and base.nbytes > _KEPT_FOR_NOTHING + 4 * array.nbytes:
        return array.copy()
    return array


def join_keys(keys: list[np.ndarray]) -> np.ndarray:
    """Concatenate; without a copy where the keys are neighbours in one array, as chunks of one request are."""
    base = keys[0].base
    if isinstance(base, np.ndarray) and base.ndim == 1 and all(k.base is base for k in keys):
        size = keys[0].itemsize
        starts = [(k.ctypes.data - base.ctypes.data) // size for k in keys]
        if all(s + len(k) == t for s, k, t in zip(starts, keys, starts[1:])):
            return base[starts[0] : starts[-1] + len(keys[-1])]
    return np.concatenate(keys)
