"""`BlockTroubles`: which blocks of a plugin fail, and when each of them is read again.

Owns the failures of each block since it last came right. Calls no plugin, and is not safe for threads.

A failure is *alone* if other blocks have come right since the failure of the same block before it. Then the block is
bad, and the plugin works. Failures that are not alone may be those of a plugin that fails as a whole.

    failures in a row   | 1 2 3      | 4 and more, alone              | 4 and more, not alone
    another name        | every time | every time                     | at the 4th, 8th, 16th ...
    no reads            | -          | 1 s, 2 s, 4 s ... MAX_REST_S   | SICK_REST_S, or until any block comes right
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

# So many failures in a row are answered at once.
MAX_REWRITES = 3
FIRST_REST_S = 1.0
MAX_REST_S = 600.0
SICK_REST_S = 4.0
# Blocks that are remembered.
MAX_BLOCKS = 65536


@dataclass
class Trouble:
    # Blocks that had come right when this one last failed.
    num_right: int
    # Failures while other blocks came right.
    alone: int = 0
    # Failures since any block came right.
    together: int = 0
    # Whether the last failure is a reason for another name.
    may_rename: bool = False
    # After the last failure the block is not read for that long.
    rest_s: float = 0.0
    rests_until: float = -math.inf


class BlockTroubles:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._troubles: OrderedDict[bytes, Trouble] = OrderedDict()
        # Blocks that have come right.
        self._num_right = 0

    def clear(self) -> None:
        self._troubles.clear()

    def rests(self, key: bytes) -> bool:
        """Whether the block is not to be read now."""
        trouble = self._troubles.get(key)
        if trouble is None or self._clock() >= trouble.rests_until:
            return False
        return trouble.alone > MAX_REWRITES or trouble.num_right == self._num_right

    def is_alone(self, key: bytes) -> bool:
        """Whether the block has failed, and others have come right since."""
        trouble = self._troubles.get(key)
        return trouble is not None and trouble.num_right != self._num_right

    def note_right(self, key: bytes) -> None:
        self._num_right += 1
        self._troubles.pop(key, None)

    def note_absent(self, key: bytes) -> None:
        """A read did not bring the block, for a reason that is not known. This is no failure of the block yet."""
        self._remember(key, self._troubles.pop(key, Trouble(self._num_right)))

    def note_bad(self, key: bytes) -> Trouble:
        """The block has failed: it came wrong, or it alone did not come."""
        trouble = self._troubles.pop(key, None) or Trouble(self._num_right)
        if trouble.num_right != self._num_right:
            trouble.num_right = self._num_right
            trouble.alone, trouble.together = trouble.alone + 1, 0
        else:
            trouble.together += 1
        alone, together = trouble.alone - MAX_REWRITES, trouble.together - MAX_REWRITES
        trouble.may_rename = together <= 0 or trouble.together.bit_count() == 1
        trouble.rest_s = SICK_REST_S if together > 0 else 0.0
        if alone > 0:
            trouble.rest_s = max(trouble.rest_s, min(FIRST_REST_S * 2.0 ** (alone - 1), MAX_REST_S))
        trouble.rests_until = self._clock() + trouble.rest_s
        self._remember(key, trouble)
        return trouble

    def _remember(self, key: bytes, trouble: Trouble) -> None:
        self._troubles[key] = trouble
        if len(self._troubles) > MAX_BLOCKS:
            self._troubles.popitem(last=False)
