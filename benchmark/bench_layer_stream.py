"""Requests that are longer than the device: their largest length, and the cost of streaming them.

    python benchmark/bench_layer_stream.py [--rounds N] [--quick]

In process, the embedded model, real copies between real pools. *Longest*: the server's own sizes for the same memory
of the device, each served at its full length. *Cost*: one context, of which the device holds less and less. In each
round the variants take turns. All ratios compare with a device that holds the whole context.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from common import print_table, write_json

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.schedule_batch import BatchDecision
from sglang.srt.managers.scheduler_config import LayerStreamConfig
from sglang.srt.managers.startup.sizes import layer_stream_sizes_for
from sglang.srt.model_executor.launch import LaunchMode
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from support.local_engine import Generation, LocalEngine

PAGE = 16
OUTPUT = 12
SAMPLING = SamplingParams(max_new_tokens=OUTPUT, temperature=0.0, ignore_eos=True, sampling_seed=0)
MODEL = ModelConfig.from_pretrained("embedded")
# Bytes of a token, float32.
TOKEN_BYTES = 2 * MODEL.num_layers * MODEL.num_kv_heads * MODEL.head_dim * 4


def engine(device: int, host: int, chunk: int, stream: LayerStreamConfig | None, **more: Any) -> LocalEngine:
    """device, host: tokens."""
    return LocalEngine(
        MODEL,
        num_device_pages=device // PAGE,
        num_host_pages=host // PAGE,
        page_size=PAGE,
        debug=False,
        chunked_prefill_size=chunk,
        layer_stream=stream,
        **more,
    )


def serve(on: LocalEngine, length: int, rng: np.random.Generator, **more: Any) -> Generation:
    (answer,) = on.generate([rng.integers(3, 2000, length)], SAMPLING, **more)
    assert answer.finish_reason == "length" and len(answer.tokens) == OUTPUT, answer.finish_reason
    on.settle()
    return answer


# -- the longest context --------------------------------------------------------------------------------------------

BUDGET, CHUNK = 1024, 64
LONGEST = (
    ("not streamed", 0, 0),
    ("whole layers, 1 buffer", 1, 0),
    ("whole layers, 2 buffers", 2, 0),
    ("pieces of 128 tokens, 2 buffers", 2, 128),
)


def longest(host: int) -> list[dict[str, Any]]:
    """Pool and buffers of the device have room for BUDGET tokens together."""
    rows = []
    for name, buffers, tokens in LONGEST:
        device, stream = BUDGET // PAGE, None
        if buffers:
            args = ServerArgs(
                model_path="embedded",
                enable_hierarchical_cache=True,
                layer_stream=buffers,
                layer_stream_tokens=tokens,
                page_size=PAGE,
            )
            stream, device = layer_stream_sizes_for(args, device, host // PAGE, MODEL.num_layers)
        row: dict[str, Any] = {"host, tokens": host, "": name}
        row |= {"buffer, tokens": stream.buffer_pages * PAGE if stream else 0, "device, tokens": device * PAGE}
        if stream is not None and device < 2 * CHUNK // PAGE + 2:
            rows.append(row | {"longest, served": "does not start"})
            continue
        on = engine(device * PAGE, host, CHUNK, stream)
        length = on.scheduler.max_total_len
        answer = serve(on, length - OUTPUT, np.random.default_rng(0))
        on.close()
        times = length / rows[0]["longest, served"] if rows else 1.0
        rows.append(row | {"longest, served": length, "times": times, "TTFT, s": answer.first_token_s})
    return rows


# -- what it costs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """share: of the context that does not fit the device. piece: tokens; None: the whole layer. bytes_per_s: of the
    host's link; None: not limited."""

    share: float
    buffers: int = 2
    piece: int | None = 256
    bytes_per_s: float | None = None


@dataclass
class Samples:
    ttft_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    streamed: list[int] = field(default_factory=list)


SHARES = (0.25, 0.5, 0.75, 0.9)
SLOW = 50e6
WHOLE = Variant(0.0)
VARIANTS = (
    WHOLE,
    *(Variant(share) for share in SHARES),
    *(
        Variant(0.75, buffers, piece)
        for buffers in (1, 2, 3)
        for piece in (64, 256, None)
        if (buffers, piece) != (2, 256)
    ),
    *(Variant(share, bytes_per_s=SLOW) for share in SHARES),
    *(Variant(0.75, buffers, piece, SLOW) for buffers, piece in ((1, 256), (3, 256), (2, 64), (1, None), (2, None))),
)


def measure(context: int, chunk: int, variants: tuple[Variant, ...], rounds: int) -> dict[Variant, Samples]:
    """The first round warms up. TTFT of a new prompt; seconds of each later token."""
    host = 2 * context
    engines = {}
    for variant in variants:
        stream, device = None, 2 * context
        if variant.share:
            stream = LayerStreamConfig(variant.buffers, (variant.piece or context) // PAGE)
            device = int(context * (1 - variant.share)) // PAGE * PAGE
        engines[variant] = engine(device, host, chunk, stream, load_bytes_per_s=variant.bytes_per_s)
    samples = {variant: Samples() for variant in variants}
    rng = np.random.default_rng(1)
    for i in range(rounds + 1):
        for variant, on in engines.items():
            of = samples[variant] if i else Samples()

            def look(decision: BatchDecision, of: Samples = of) -> None:
                if decision.launch is not None and decision.launch.mode == LaunchMode.DECODE:
                    of.streamed.append(sum(each.end - each.start for each in decision.launch.streams))

            answer = serve(on, context - OUTPUT, rng, after_step=look)
            of.ttft_s.append(answer.first_token_s)
            of.token_s.append((answer.end_s - answer.first_token_s) / (OUTPUT - 1))
    for on in engines.values():
        on.close()
    return samples


def cost_rows(context: int, samples: dict[Variant, Samples]) -> list[dict[str, Any]]:
    whole = samples[WHOLE]
    rows = []
    for variant, of in samples.items():
        streamed = float(np.median(of.streamed))
        ttft, token = (
            np.median(np.array(a) / np.array(b)) for a, b in ((of.ttft_s, whole.ttft_s), (of.token_s, whole.token_s))
        )
        more_s = np.median(np.array(of.token_s) - np.array(whole.token_s))
        link_s = streamed * TOKEN_BYTES / variant.bytes_per_s if variant.bytes_per_s else None
        rows.append(
            {
                "MB/s": variant.bytes_per_s / 1e6 if variant.bytes_per_s else "-",
                "buffers": variant.buffers,
                "piece": variant.piece or "layer",
                "streamed, %": 100 * streamed / context,
                "TTFT, times": float(ttft),
                "s/token, times": float(token),
                "ms/token": 1e3 * float(np.median(of.token_s)),
                "more per layer, us": 1e6 * float(more_s) / MODEL.num_layers,
                "per streamed token, ns": 1e9 * float(more_s) / MODEL.num_layers / streamed if streamed else None,
                "times the link": float(np.median(of.token_s)) / link_s if link_s else None,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="shorter contexts, fewer variants: shows that it runs")
    args = parser.parse_args()
    lengths = [row for host in ((1024,) if args.quick else (1024, 3072, 8192)) for row in longest(host)]
    print_table(f"Longest context, {BUDGET} tokens' worth of device memory", lengths)
    context, chunk = (1024, 16) if args.quick else (2048, 64)
    variants = VARIANTS[:5] if args.quick else VARIANTS
    samples = measure(context, chunk, variants, 2 if args.quick else args.rounds)
    rows = cost_rows(context, samples)
    print_table(f"Cost, {context} tokens in chunks of {chunk}, to a device that holds them", rows)
    write_json("bench_layer_stream", vars(args), [{"longest": lengths, "cost": rows}])


if __name__ == "__main__":
    main()
