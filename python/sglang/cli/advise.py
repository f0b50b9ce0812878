"""`hicache advise`: how large each tier should be, from a trace or from a live server's sample of prompts.

Owns the command's arguments and its text. What a cache of any size hits is in reuse.py. Tiers add up: each keeps what
the ones above it have evicted, so that a tier gets the hits between two sizes of one cache.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang.cli.reference_sources import load_json, read_sample, read_trace
from sglang.cli.reuse import HitCurve
from sglang.cli.server import CommandError, Server, check_number, number_in
from sglang.cli.token_costs import MOST, Costs, Given, find_costs

TIERS = ("device", "host", "disk", "remote")
GB = 1e9
# A tier whose size is not given grows by this factor, while it brings enough.
_GROWTH = 2**0.125
_SMALLEST_GB = 0.001


@dataclass(frozen=True)
class TierPlan:
    """Of one tier. size_gb: 0 if it is left out."""

    name: str
    size_gb: float
    # Prompt tokens that it finds.
    hits: float
    # More hits per gigabyte, as a share of all prompt tokens, if the tiers up to it were a tenth larger.
    next_gb: float


@dataclass(frozen=True)
class Wishes:
    """sizes_gb: tier -> its size, None: to be found. least_gain: the least share of the prompt tokens that a gigabyte
    has to bring, by tier, for a size that is to be found."""

    sizes_gb: Mapping[str, float | None]
    least_gain: Mapping[str, float]


def plan(curve: HitCurve, costs: Costs, wishes: Wishes) -> list[TierPlan]:
    """The tiers from the nearest, each with what the ones above it leave over."""
    plans = []
    above = 0.0
    for name in TIERS:
        tokens_per_gb = GB / costs.bytes_held(name)
        size_gb = wishes.sizes_gb.get(name, 0.0)
        if size_gb is None:
            size_gb = _worthwhile_gb(curve, tokens_per_gb, above, wishes.least_gain[name])
        end = above + size_gb * tokens_per_gb
        hits = curve.hits(end) - curve.hits(above)
        tenth = max(_SMALLEST_GB * tokens_per_gb, end / 10)
        more = (curve.hits(end + tenth) - curve.hits(end)) / tenth * tokens_per_gb
        plans.append(TierPlan(name, size_gb, hits, more / max(1.0, curve.prompt_tokens)))
        above = end
    return plans


def _worthwhile_gb(curve: HitCurve, tokens_per_gb: float, above: float, least_gain: float) -> float:
    """The largest size behind which gigabytes bring less. A plateau before a steep part is passed, if what is behind
    makes up for it: of all sizes the one whose hits, less least_gain for each gigabyte, are the most. above: tokens
    of the tiers above."""
    total = max(1.0, curve.prompt_tokens)
    start = curve.hits(above)
    best_gb, best, size_gb = 0.0, 0.0, _SMALLEST_GB
    most_gb = curve.distinct_tokens / tokens_per_gb
    while size_gb < most_gb * _GROWTH:
        value = (curve.hits(above + size_gb * tokens_per_gb) - start) / total - least_gain * size_gb
        if value > best:
            best_gb, best = size_gb, value
        size_gb *= _GROWTH
    return best_gb


def as_text(curve: HitCurve, costs: Costs, plans: Sequence[TierPlan], seconds: float | None) -> str:
    """seconds: None if nothing tells how long the prompts came; there are no reads per second then."""
    total = max(1.0, curve.prompt_tokens)
    during = "" if seconds is None else f" in {seconds:,.0f} s"
    lines = [
        f"{curve.prompt_tokens:,.0f} prompt tokens{during}, {costs.bytes_per_token:,.0f} bytes each",
        *_windowed_lines(costs),
        f"a cache without end: {100 * curve.most / total:.1f} % of them found, {endless_gb(curve, costs):,.4g} GB",
        "",
        "tier      size GB   found %   per GB %   next GB %" + "   reads GB/s on average" * (seconds is not None),
    ]
    for each in plans:
        share = 100 * each.hits / total
        per_gb = f"{share / each.size_gb:10,.3g}" if each.size_gb else "         -"
        line = f"{each.name:8}{each.size_gb:9,.4g} {share:9.1f} {per_gb} {100 * each.next_gb:11,.3g}"
        if seconds is not None:
            reads = each.hits * costs.bytes_loaded / GB / seconds if seconds and each.name != "device" else None
            line += f"   {'-' if reads is None else f'{reads:.3g}':>21}"
        lines.append(line)
    saved = sum(each.hits for each in plans)
    if seconds is None:
        lines += [
            "",
            "no reads per second: turns wait for the answers before, so that the server decides how long this takes",
        ]
    lines += [
        "",
        f"computing saved: {saved / costs.prefill_tokens_per_s:,.0f} s at {costs.prefill_tokens_per_s:,.0f} tokens/s",
        f"a link pays above {costs.pays_above / GB:.3g} GB/s: below, computing a token is faster than bringing it",
        "",
        "flags: "
        + (
            shlex.join(flags(plans, least_host_gb(curve, costs)))
            or "none: no tier below the device brings enough, leave --hicache out"
        ),
    ]
    return "\n".join(lines)


def as_json(curve: HitCurve, costs: Costs, plans: Sequence[TierPlan], seconds: float | None) -> dict[str, Any]:
    total = max(1.0, curve.prompt_tokens)
    return {
        "prompt_tokens": curve.prompt_tokens,
        "seconds": seconds,
        "bytes_per_token": costs.bytes_per_token,
        "windowed": None if costs.windowed is None else asdict(costs.windowed),
        "endless": {"found_share": curve.most / total, "size_gb": endless_gb(curve, costs)},
        "tiers": [
            {
                "name": each.name,
                "size_gb": each.size_gb,
                "found_share": each.hits / total,
                "next_gb_share": each.next_gb,
            }
            for each in plans
        ],
        "pays_above_gb_per_s": costs.pays_above / GB,
        "flags": flags(plans, least_host_gb(curve, costs)),
    }


def endless_gb(curve: HitCurve, costs: Costs) -> float:
    """Of a tier below the device that keeps everything."""
    return curve.distinct_tokens * costs.bytes_held(TIERS[-1]) / GB


def _windowed_lines(costs: Costs) -> list[str]:
    windowed = costs.windowed
    if windowed is None:
        return []
    return [
        f"{windowed.bytes_per_token:,.0f} bytes are of layers with a sliding window, which are kept for "
        f"{100 * windowed.device_share:.0f} % of the tokens on the device, and about "
        f"{100 * windowed.share:.0f} % below"
    ]


def least_host_gb(curve: HitCurve, costs: Costs) -> float:
    """What storage brings passes through the host: room for two of the longest prompts."""
    return 2 * curve.longest_prompt * costs.bytes_held("host") / GB


def flags(plans: Sequence[TierPlan], host_gb: float) -> list[str]:
    """Of the server, for the tiers below the device. host_gb: the least of the host."""
    sizes = {each.name: each.size_gb for each in plans}
    if not any(sizes[name] for name in TIERS[1:]):
        return []
    found = ["--hicache", "--hicache-size", f"{max(sizes['host'], host_gb):.4g}"]
    limits = {
        backend: {"limit_gb": round(sizes[tier], 3)}
        for tier, backend in (("disk", "file"), ("remote", "remote"))
        if sizes[tier]
    }
    if limits:
        settings = next(iter(limits.values())) if len(limits) == 1 else limits
        found += ["--hicache-storage-backend", ",".join(limits)]
        found += ["--hicache-storage-backend-extra-config", json.dumps(settings)]
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--trace", type=Path, metavar="FILE", help="Mooncake's kind, or agents' sessions; no server")
    source.add_argument("--sample", type=Path, metavar="FILE", help="a saved reply of GET /hicache/sample; no server")
    parser.add_argument("--num-rows", type=int, default=1_000_000, help="the most rows of a trace that are read")
    parser.add_argument("--bytes-per-token", type=float, help="of KV, over all layers (default: the server's)")
    parser.add_argument("--model-path", help="a model, whose checkpoint gives --bytes-per-token")
    parser.add_argument("--kv-cache-dtype", default="auto", help="with --model-path, as the server has it")
    parser.add_argument(
        "--prefill-tokens-per-s", type=float, help="how fast prompts are computed (default: measured)"
    )
    parser.add_argument("--device-gb", type=float, help="KV cache on the device (default: the server's)")
    for tier, least in (("host", 0.1), ("disk", 0.01)):
        parser.add_argument(f"--{tier}-gb", type=float, help="size of the tier (default: as large as it is worth)")
        parser.add_argument(
            f"--{tier}-gain",
            type=float,
            default=least,
            help="what a gigabyte of it has to bring, in %% of the prompt tokens (default: %(default)s)",
        )
    parser.add_argument("--remote-gb", type=float, default=0.0, help="size of the tier (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the advice as JSON")


def run(args: argparse.Namespace) -> str:
    """advise how large the tiers should be, and which links pay, from a trace or from what a server is asked"""
    _check(args)
    state: Mapping[str, Any] = {}
    seconds: float | None
    if args.trace is not None:
        log, seconds = read_trace(args.trace, args.num_rows)
    elif args.sample is not None:
        log, seconds = read_sample(load_json(args.sample))
    else:
        server = Server(args)
        state = server.ask_object("GET", "/hicache/state")
        log, seconds = read_sample(server.ask_object("GET", "/hicache/sample"))
    given = Given(args.bytes_per_token, args.prefill_tokens_per_s, args.model_path, args.kv_cache_dtype)
    costs = find_costs(given, state, log)
    device_gb = args.device_gb
    if device_gb is None:
        if not state:
            raise CommandError("how large is the KV cache on the device? Give --device-gb")
        device_gb = number_in(state, "tiers", "device", "total_tokens") * costs.bytes_held("device") / GB
    curve = log.curve()
    wishes = Wishes(
        {"device": device_gb, "host": args.host_gb, "disk": args.disk_gb, "remote": args.remote_gb},
        {"host": args.host_gain / 100, "disk": args.disk_gain / 100},
    )
    plans = plan(curve, costs, wishes)
    if args.json:
        return json.dumps(as_json(curve, costs, plans, seconds), indent=1)
    text = as_text(curve, costs, plans, seconds)
    if log.rate < 1:
        return f"a sample of 1 block in {1 / log.rate:.0f}; {log.num_requests} requests\n{text}"
    return text


def _check(args: argparse.Namespace) -> None:
    """Raises CommandError."""
    for name in ("device_gb", "host_gb", "disk_gb", "remote_gb", "host_gain", "disk_gain"):
        if (value := getattr(args, name)) is not None:
            check_number(f"--{name.replace('_', '-')}", value, 0, MOST)
    check_number("--num-rows", args.num_rows, 1, MOST)
