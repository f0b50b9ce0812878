"""How busy the engine is, as routers ask: `/get_load` and `/v1/loads` in upstream's shape. Pure functions over the
scheduler's state."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import sglang
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.errors import RequestError


def get_load(state: Mapping[str, Any]) -> list[dict[str, int]]:
    """One entry: this engine is one data-parallel rank."""
    queues, used = state["queues"], state["tiers"]["device"]["used_tokens"]
    return [
        {
            "dp_rank": 0,
            "num_reqs": queues["running"] + queues["waiting"],
            "num_waiting_reqs": queues["waiting"],
            "num_tokens": used + queues["waiting_tokens"],
        }
    ]


def check_loads_query(query: Mapping[str, str]) -> None:
    """Raises RequestError for what /v1/loads does not do."""
    if query.get("dp_rank", "0") != "0":
        raise RequestError("dp_rank must be 0: this engine is one data-parallel rank", param="dp_rank")
    if query.get("format", "json") != "json":
        raise RequestError("format must be json: GET /metrics answers in Prometheus's format", param="format")


def loads(
    state: Mapping[str, Any], args: ServerArgs, ready_info: Mapping[str, Any], cache_hit_rate: float
) -> dict[str, Any]:
    queues, device = state["queues"], state["tiers"]["device"]
    used, total = device["used_tokens"], device["total_tokens"]
    most = ready_info["max_running_requests"]
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": sglang.__version__,
        "accelerator": ready_info.get("accelerator"),
        "num_accelerators": args.tp_size,
        "loads": [
            {
                "dp_rank": 0,
                "num_running_reqs": queues["running"],
                "num_waiting_reqs": queues["waiting"],
                "num_waiting_uncached_tokens": state["transient"]["in_queue_tokens"],
                "num_used_tokens": used,
                "num_total_tokens": used + queues["waiting_tokens"],
                "max_total_num_tokens": total,
                "max_running_requests": most,
                "token_usage": round(used / total, 4) if total else 0.0,
                "gen_throughput": state.get("gen_throughput", 0.0),
                "cache_hit_rate": round(cache_hit_rate, 4),
                # The fuller of the two: of memory, and of the places in the batch.
                "utilization": round(max(used / total if total else 0.0, queues["running"] / most), 4),
            }
        ],
    }
