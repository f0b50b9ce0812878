"""What the flags leave of memory, and what is refused with the flag to change."""

from __future__ import annotations

import pytest

from sglang.srt.managers.startup.sizes import layer_stream_sizes_for
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.child_process import StartupError


def test_buffers_that_leave_the_device_nothing_are_refused() -> None:
    args = ServerArgs(model_path="m", enable_hierarchical_cache=True, layer_stream=2, layer_stream_tokens=2048)
    config, left = layer_stream_sizes_for(args, num_pages=2048, num_host_pages=8192, num_layers=4)
    assert (config.buffer_pages, left) == (2048, 1024)
    with pytest.raises(StartupError, match="take all 1024 tokens of the device: lower --layer-stream"):
        layer_stream_sizes_for(args, num_pages=1024, num_host_pages=8192, num_layers=4)
