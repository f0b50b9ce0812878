"""What a rank refuses before it reads a model."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from sglang.srt.distributed.parallel_state import SINGLE_RANK
from sglang.srt.managers.scheduler_process import build_core
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.child_process import StartupError


def test_an_io_backend_that_needs_a_gpu_is_refused_on_the_cpu():
    """Upstream's default: who asks for it gets told, not something else."""
    args = ServerArgs(model_path="/no/model", enable_hierarchical_cache=True, hicache_io_backend="kernel")
    with pytest.raises(StartupError, match="--hicache-io-backend kernel cannot run here: it needs a GPU; on the CPU"):
        build_core(args, SINGLE_RANK, lambda: None, Path(), ExitStack())
