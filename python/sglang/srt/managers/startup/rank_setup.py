"""`RankSetup`: what the rank that is being built has of its process. Owns nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang.srt.constrained.grammar_cache import GrammarCache
from sglang.srt.distributed.parallel_state import TensorParallelGroup
from sglang.srt.utils.device import CPU
from sglang.srt.utils.startup_progress import SILENT, StartupProgress


@dataclass(frozen=True)
class RankSetup:
    """Where an engine's rank is built."""

    group: TensorParallelGroup
    # Called from other threads when something completed.
    notify: Callable[[], None]
    # The server's private one.
    directory: Path
    # Gets what has to be closed before the process ends.
    on_exit: ExitStack
    # Compiled grammars, at the rank that follows them.
    grammars: GrammarCache | None = None
    device: torch.device = CPU
    progress: StartupProgress = SILENT
