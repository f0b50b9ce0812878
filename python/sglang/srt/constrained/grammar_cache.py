"""`GrammarCache`: compiled grammars. Of those that are not held, the least recently used are given up. Knows no
request."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

from sglang.srt.constrained.xgrammar_backend import GrammarCompiler
from sglang.srt.sampling.sampling_params import GrammarSpec

if TYPE_CHECKING:
    import xgrammar

# Of compiled grammars that are kept.
CACHE_BYTES = 256 << 20
# Of those that are held: further requests wait until others have ended.
MAX_HELD_BYTES = 1 << 30


class GrammarCache:
    """Used by several threads; two that miss one grammar at the same time both compile it."""

    def __init__(self, vocabulary_file: Path, max_whitespace: int | None, max_bytes: int = CACHE_BYTES) -> None:
        """vocabulary_file: there when the first grammar comes."""
        self._vocabulary_file = vocabulary_file
        self._max_whitespace = max_whitespace
        self._max_bytes = max_bytes
        self._compiled: OrderedDict[GrammarSpec, xgrammar.CompiledGrammar] = OrderedDict()
        self._num_bytes = 0
        # Grammars that requests use -> how many do.
        self._holders: Counter[GrammarSpec] = Counter()
        self._num_held_bytes = 0
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()

    def __contains__(self, spec: GrammarSpec) -> bool:
        return spec in self._compiled

    def hold(self, spec: GrammarSpec) -> bool:
        """Keep a grammar until `release`. False: it is not there, or too much is held."""
        with self._lock:
            compiled = self._compiled.get(spec)
            if compiled is None:
                return False
            if not self._holders[spec]:
                size = compiled.memory_size_bytes
                if self._num_held_bytes and self._num_held_bytes + size > MAX_HELD_BYTES:
                    return False
                self._num_held_bytes += size
            self._holders[spec] += 1
            return True

    def release(self, spec: GrammarSpec) -> None:
        with self._lock:
            self._holders[spec] -= 1
            if not self._holders[spec]:
                del self._holders[spec]
                self._num_held_bytes -= self._compiled[spec].memory_size_bytes
                self._give_up()

    def get(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        """Compile it if it is not there. Raises GrammarError."""
        with self._lock:
            if (found := self._compiled.get(spec)) is not None:
                self._compiled.move_to_end(spec)
                return found
            if self._compiler is None:
                self._compiler = GrammarCompiler(self._vocabulary_file.read_text(), self._max_whitespace)
        compiled = self._compiler.compile(spec)
        with self._lock:
            if spec not in self._compiled:
                self._compiled[spec] = compiled
                self._num_bytes += compiled.memory_size_bytes
                self._give_up()
        return compiled

    def _give_up(self) -> None:
        """Those that are used last stay, and those that are held."""
        *others, _ = self._compiled
        for spec in others:
            if self._num_bytes <= self._max_bytes:
                return
            if spec not in self._holders:
                self._num_bytes -= self._compiled.pop(spec).memory_size_bytes
