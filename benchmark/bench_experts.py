"""A layer of experts, by weights and by kernel, beside the time of reading the experts that are chosen.

    python benchmark/bench_experts.py [--shape NAME] [--tokens 1,8,32,256,2048,8192] [--rounds N] [--ranks N]

NAME is qwen3 (128 experts of 768, 8 for a token; the default), deepseek (256 of 2,048, 8 for a token) or gpt-oss
(128 of 2,880, 4 for a token). --ranks takes one rank's part of each. Tokens choose at random. On a GPU launches are
CUDA graphs, over so many layers that no cache still holds one. *Of a copy* is what is read of weights, over what a
copy in memory moves in that time: 1 is a decode step's bound. *Of a product* is the multiplications and additions,
over those of a large product of matrices in that time. *Library* is torch's kernel for groups. Then what choosing
experts takes, in one launch and by torch. The CPU, with a tiny layer, dequantises experts: that shows that the script
runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from bench_attention import Bench, Shape
from bench_quantized import COLD_BYTES, captured
from common import print_table, write_json
from yardsticks import matrix_flops

from sgl_kernel import experts as kernels
from sgl_kernel.quantized import E2M1, FOUR_BITS, MatrixFormat
from sglang.srt.distributed.parallel_state import Shard
from sglang.srt.layers.mixture import Experts


class Layer(NamedTuple):
    num_experts: int
    top_k: int
    hidden_size: int
    width: int
    choice: kernels.Choice
    has_correction: bool = False


SHAPES = {
    "qwen3": Layer(128, 8, 2048, 768, kernels.Choice(8, "softmax", is_normalized=True)),
    "deepseek": Layer(256, 8, 7168, 2048, kernels.Choice(8, "sigmoid", True, 2.5, 8, 4), has_correction=True),
    "gpt-oss": Layer(128, 4, 2880, 2880, kernels.Choice(4, "softmax_of_chosen")),
}
TINY = Layer(8, 2, 64, 64, kernels.Choice(2, "softmax"))
# Launches in one graph, each shorter than the start of a graph.
CHOICES = 64
FORMATS = {
    "fp8, blocks of 128": MatrixFormat(torch.float8_e4m3fn, 128),
    "4 bits, groups of 128": MatrixFormat(FOUR_BITS, 128),
    "mxfp4": MatrixFormat(E2M1, 32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3")
    parser.add_argument("--tokens", default="1,8,32,256,2048,8192")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=1)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    bench = Bench(Shape(8, 8, 64), device, args.rounds)
    bandwidth, flops = bench.memory_bytes_per_s(), matrix_flops(device, bench.dtype)
    layer = SHAPES[args.shape] if device == "cuda" else TINY
    shard = Shard(layer.width, 0, layer.width // args.ranks)
    per_expert = 3 * layer.hidden_size * shard.size
    rows: list[dict[str, object]] = []
    for num_tokens in (int(each) for each in args.tokens.split(",")):
        x = torch.randn(num_tokens, layer.hidden_size, dtype=bench.dtype, device=device)
        scores = torch.rand(num_tokens, layer.num_experts, device=device)
        weights, chosen = scores.topk(layer.top_k)
        num_chosen = len(chosen.unique())
        first = None
        for name, format in {"": None, **FORMATS}.items():
            # Of one set of weights at a time: a layer may take gigabytes.
            layers = _layers(layer, shard, format, bench.dtype, device)
            size = sum(each.nbytes for each in layers[0].parameters()) * num_chosen / layer.num_experts
            for way in ("_in_tiles", *(("_in_groups",) if format is None else ())):
                work = partial(_each, way, layers, x, chosen, weights)
                seconds = bench.seconds(captured(work) if device == "cuda" else work)[0] / len(layers)
                first = first or seconds
                rows.append(
                    {
                        "tokens": num_tokens,
                        "experts": num_chosen,
                        "weights": name or str(bench.dtype)[6:] + (" by library" if way == "_in_groups" else ""),
                        "us": seconds * 1e6,
                        "of a copy": size / seconds / bandwidth,
                        "of a product": 2.0 * per_expert * layer.top_k * num_tokens / seconds / flops,
                        "times as fast": first / seconds,
                    }
                )
            del layers
        write_json(f"experts_{args.shape}_{device}", vars(args), rows, complete=False)
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU, one thread"
    print_table(f"Layers of experts, {where}", rows)
    choices = [choosing(bench, layer, int(each), device) for each in args.tokens.split(",")]
    print_table("Choosing experts", choices)
    rows += choices
    write_json(f"experts_{args.shape}_{device}", vars(args), rows)


def choosing(bench: Bench, layer: Layer, num_tokens: int, device: str) -> dict[str, object]:
    logits = torch.randn(num_tokens, layer.num_experts, dtype=bench.dtype, device=device)
    correction = torch.rand(layer.num_experts, device=device) if layer.has_correction else None

    def repeated(choose: Callable[..., object]) -> Callable[[], object]:
        def work() -> None:
            for _ in range(CHOICES):
                choose(logits, layer.choice, correction)

        return captured(work) if device == "cuda" else work

    mine, of_torch = bench.seconds(repeated(kernels.choose), repeated(kernels.reference.choose))
    us = {"choosing us": mine / CHOICES * 1e6, "choosing by torch us": of_torch / CHOICES * 1e6}
    return {"tokens": num_tokens, **us, "times as fast": of_torch / mine}


def _layers(
    layer: Layer, shard: Shard, format: MatrixFormat | None, dtype: torch.dtype, device: str
) -> list[Experts]:
    """As many as no cache of a GPU holds, with random weights."""
    if format is not None and shard.size % format.group:
        format = MatrixFormat(format.dtype, 32)
    made: list[Experts] = []
    while not made or (
        device == "cuda" and sum(each.nbytes for each in made[0].parameters()) * len(made) < COLD_BYTES
    ):
        with torch.device(device):
            experts = Experts(layer.num_experts, layer.hidden_size, shard, dtype, stored_as=format)
        for parameter in () if format is not None else experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, device=device) * layer.hidden_size**-0.5)
        for matrix in experts.quantized.values():
            if format.is_packed:
                matrix.values.random_()
            else:
                matrix.values.copy_(torch.randn(matrix.values.shape, device=device))
            matrix.scales.fill_(122 if format.dtype == E2M1 else 2.0**-5)
            if matrix.zeros is not None:
                matrix.zeros.fill_(8)
        made.append(experts)
    return made


def _each(way: str, layers: list[Experts], x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> None:
    for experts in layers:
        groups = kernels.group_by_expert(chosen, experts.num_experts)
        kernels.weighted_sum(getattr(experts, way)(x, groups), weights)


if __name__ == "__main__":
    main()
