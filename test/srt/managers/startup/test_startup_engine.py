"""What a rank reads before it loads the weights."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from sglang.srt.distributed.parallel_state import SINGLE_RANK
from sglang.srt.managers.startup import engine, sizes
from sglang.srt.managers.startup.engine import EngineBuilder
from sglang.srt.managers.startup.page_checks import check_page_size
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.child_process import StartupError
from sglang.srt.utils.device import CPU


def test_the_end_of_the_tokenizer_that_is_named_ends_an_answer(tmp_path: Path) -> None:
    end = {"content": "<end>"}
    config = {"eos_token": end, "added_tokens_decoder": {"300": end}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = []
    for path in (None, str(tmp_path)):
        args = ServerArgs(model_path="embedded", device="cpu", tokenizer_path=path)
        builder = EngineBuilder(args, cast(Any, SimpleNamespace(group=SINGLE_RANK, device=CPU)))
        builder._read_model_config()
        found.append(builder.model.eos_token_ids)
    assert found[1] == (*found[0], 300)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"hicache_storage_backend": "file"}, None),
        (
            {
                "hicache_storage_backend": "file",
                "hicache_storage_backend_extra_config": '{"block_tokens": 32}',
            },
            "no multiple of the page size 256",
        ),
        ({"layer_stream": 2, "max_total_tokens": 800, "chunked_prefill_size": 390}, "--chunked-prefill-size"),
        ({"max_total_tokens": 500}, "--max-total-tokens 500 are less than two pages, which have 256 tokens"),
        (
            {
                "peer_role": "master",
                "peer_endpoint": "tcp://127.0.0.1:5999",
                "peer_slab_size": 1,
                "page_size": 1024,
            },
            "--peer-slab-size 1 has no room for a page",
        ),
        ({"mem_fraction_static": 0.1}, "raise --mem-fraction-static.*--quantization fp8 or a larger --tp-size"),
    ],
)
def test_what_does_not_go_with_a_gpu_s_pages_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], sentence: str | None
) -> None:
    """Without --page-size, which the parent takes for 1. The embedded model has small pages: they get 256 tokens."""
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    weight_bytes = 1 << 30
    monkeypatch.setattr(engine, "check_weights_fit", lambda *args: weight_bytes)
    beside = 1 << 19 if "mem_fraction_static" in flags else 1 << 30
    monkeypatch.setattr(sizes, "kv_cache_bytes", lambda *args: weight_bytes + beside)
    monkeypatch.setattr(engine, "check_device", lambda *args: "triton")
    monkeypatch.setattr(engine, "make_attention_backend", lambda *args: None)
    args = ServerArgs(model_path="embedded", enable_hierarchical_cache=True, dtype="float32", **flags)
    check_page_size(args, args.page_size or 1, None)
    rank = SimpleNamespace(group=SINGLE_RANK, device=torch.device("cuda"))
    builder = EngineBuilder(args, cast(Any, rank))
    if sentence is None:
        builder._read_model_config()
        assert builder.args.page_size == 256
        return
    with pytest.raises(StartupError, match=sentence):
        builder._read_model_config()
