"""`SharedMemory` above the limit of a file's size."""

from __future__ import annotations

import os
import resource

import pytest

from sglang.srt.utils.shared_memory import SharedMemory


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the system has no such memory")
def test_a_limit_of_file_sizes_is_named() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match=r"2097152 bytes of shared memory \(pool\) .* raise it with `ulimit -f`"):
            SharedMemory.allocate(2 << 20, "pool")
        assert SharedMemory.allocate(1 << 20, "pool").size_bytes == 1 << 20
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
