"""`GrammarCache`: compiled grammars, of which the least recently used are given up. Knows no request."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

from sglang.srt.constrained.xgrammar_backend import GrammarCompiler
from sglang.srt.sampling.sampling_params import GrammarSpec

if TYPE_CHECKING:
    import xgrammar

# Of compiled grammars that are kept. Those in use live as long as their requests.
CACHE_BYTES = 256 << 20


class GrammarCache:
    """Used by several threads; two that miss one grammar at the same time both compile it."""

    def __init__(self, vocabulary_file: Path, max_whitespace: int | None, max_bytes: int = CACHE_BYTES) -> None:
        """vocabulary_file: there when the first grammar comes."""
        self._vocabulary_file = vocabulary_file
        self._max_whitespace = max_whitespace
        self._max_bytes = max_bytes
        self._compiled: OrderedDict[GrammarSpec, xgrammar.CompiledGrammar] = OrderedDict()
        self._num_bytes = 0
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()

    def __contains__(self, spec: GrammarSpec) -> bool:
        return spec in self._compiled

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
            while self._num_bytes > self._max_bytes and len(self._compiled) > 1:
                _, oldest = self._compiled.popitem(last=False)
                self._num_bytes -= oldest.memory_size_bytes
        return compiled
