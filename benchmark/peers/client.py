"""The client of measured servers: `sglang.bench_serving`, on the same cores."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.peers.servers import VLLM, RunningServer

from sglang.bench_serving import INTERRUPTED
from sglang.bench_serving import main as bench_serving


def ask(server: RunningServer, flags: Sequence[str], context_len: int, seed: int) -> dict[str, Any]:
    """bench_serving's result, of an idle server. Raises ServerError. Its Ctrl-C ends the process."""
    server.wait_until_idle()
    model = str(server.setting.model)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.jsonl"
        ended = bench_serving(
            [
                *("--backend", "vllm" if server.kind is VLLM else "sglang-oai", "--base-url", server.url),
                *("--model", model, "--tokenizer", model, "--tokenize-prompt", "--context-len", str(context_len)),
                *("--seed", str(seed), "--output-file", str(file), "--output-details", "--disable-tqdm"),
                *flags,
            ]
        )
        if ended == INTERRUPTED:
            sys.exit(ended)
        if not file.exists():
            raise server.failure(f"bench_serving could not measure with {' '.join(flags)}")
        result: dict[str, Any] = json.loads(file.read_text())
        return result


def quantile(times: Sequence[float | None], count: int, share: float) -> float | None:
    """Of count requests. Those without a time are later than all others. None: the one at this share has none."""
    known = sorted(time for time in times if time is not None)
    at = math.ceil(share * count) - 1
    return known[at] if at < len(known) else None
