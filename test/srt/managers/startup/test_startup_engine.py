"""What a rank reads before it loads the weights."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from sglang.srt.distributed.parallel_state import SINGLE_RANK
from sglang.srt.managers.startup.engine import EngineBuilder
from sglang.srt.server_args import ServerArgs
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
