"""Token ids of texts that were tokenised before. Owns a bounded table, text -> ids; knows no tokenizer.

The table is divided by the requests' namespaces (`cache_salt`, `extra_key`): the time that a request takes must not
tell one tenant about the texts of another. Texts are compared whole. Any thread may call.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

# Bytes of an entry beside its text and ids: the key, the array's head, the table's slot.
_ENTRY_BYTES = 400


class TokenReuse:
    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._ids: OrderedDict[tuple[str, str], np.ndarray] = OrderedDict()  # the least recently used first
        self.size_bytes = 0

    def find(self, namespace: str, texts: Sequence[str]) -> list[np.ndarray | None]:
        """The ids of each text, int32, not to be written; None for a text that is not in the table."""
        keys = [(namespace, text) for text in texts]
        with self._lock:
            found = [self._ids.get(key) for key in keys]
            for key, ids in zip(keys, found):
                if ids is not None:
                    self._ids.move_to_end(key)
        return found

    def keep(self, namespace: str, entries: Iterable[tuple[str, np.ndarray]]) -> None:
        """Keep these, and drop the entries that were not used for the longest time. One entry may take an eighth of
        the limit."""
        with self._lock:
            for text, ids in entries:
                size = _size_bytes(namespace, text, ids)
                if size > self._limit_bytes // 8 or (namespace, text) in self._ids:
                    continue
                self._ids[namespace, text] = ids
                self.size_bytes += size
            while self.size_bytes > self._limit_bytes:
                (oldest, text), ids = self._ids.popitem(last=False)
                self.size_bytes -= _size_bytes(oldest, text, ids)

    def clear(self) -> None:
        with self._lock:
            self._ids.clear()
            self.size_bytes = 0

    def check_invariants(self) -> None:
        with self._lock:
            sizes = [_size_bytes(namespace, text, ids) for (namespace, text), ids in self._ids.items()]
            assert sum(sizes) == self.size_bytes <= self._limit_bytes


def _size_bytes(namespace: str, text: str, ids: np.ndarray) -> int:
    return sys.getsizeof(namespace) + sys.getsizeof(text) + ids.nbytes + _ENTRY_BYTES
