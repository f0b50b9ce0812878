"""Products with matrices of 8 and 4 bits, beside the model's own data type and the time of reading them.

    python benchmark/bench_quantized.py [--rows 1,16,64,256,1024] [--rounds N]

The matrices of a decoder layer: Llama-3.1-8B's on a GPU, small ones on the CPU, which dequantises them for each
product. On a GPU each is repeated over so many copies that no cache still holds it, as one CUDA graph, because a
product of few rows is shorter than its launch. *Of a copy* is what is read, over what a copy in memory moves in that
time: 1 is a decode step's bound.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from bench_attention import Bench, Shape
from common import print_table, write_json

from sgl_kernel import quantized
from sgl_kernel.quantized import FOUR_BITS, MatrixFormat, QuantizedMatrix

# Outputs and inputs: queries, keys and values; attention's output; gate and up; down.
GPU_SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
CPU_SHAPES = ((384, 256), (256, 1024))
FORMATS = {
    "fp8, a scale per output": MatrixFormat(torch.float8_e4m3fn),
    "fp8, blocks of 128": MatrixFormat(torch.float8_e4m3fn, 128),
    "4 bits, groups of 128": MatrixFormat(FOUR_BITS, 128),
    "4 bits, groups of 32": MatrixFormat(FOUR_BITS, 32),
}
# Larger than a GPU's caches.
COLD_BYTES = 256 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,64,256,1024")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    bench = Bench(Shape(8, 8, 64), device, args.rounds)
    bandwidth = bench.memory_bytes_per_s()
    rows: list[dict[str, object]] = []
    for outputs, inputs in GPU_SHAPES if device == "cuda" else CPU_SHAPES:
        weight = torch.randn(outputs, inputs, dtype=bench.dtype, device=device) * inputs**-0.5
        # Of 4 bits, a quarter of the weight's own.
        num_copies = -(-COLD_BYTES // (weight.nbytes // 4)) if device == "cuda" else 1
        plain = [weight.clone() for _ in range(num_copies)]
        matrices = {name: [_quantized(weight, format) for _ in range(num_copies)] for name, format in FORMATS.items()}
        sizes = [weight.nbytes, *(sum(t.nbytes for t in of[0].tensors.values()) for of in matrices.values())]
        for num_rows in (int(each) for each in args.rows.split(",")):
            x = torch.randn(num_rows, inputs, dtype=bench.dtype, device=device)
            works: list[Callable[[], object]] = [partial(_each, partial(F.linear, x), plain)]
            works += [partial(_each, partial(quantized.linear, x), of) for of in matrices.values()]
            graphs: list[Callable[[], object]] = [captured(work) for work in works] if device == "cuda" else works
            seconds = [each / num_copies for each in bench.seconds(*graphs)]
            del graphs
            for name, of_one, size in zip((str(bench.dtype)[6:], *FORMATS), seconds, sizes, strict=True):
                rows.append(
                    {
                        "outputs x inputs": f"{outputs} x {inputs}",
                        "rows": num_rows,
                        "weights": name,
                        "us": of_one * 1e6,
                        "of a copy": size / of_one / bandwidth,
                        "times as fast": seconds[0] / of_one,
                    }
                )
        write_json(f"quantized_{device}", vars(args), rows, complete=False)
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU, one thread"
    print_table(f"Products with quantised matrices, {where}", rows)
    write_json(f"quantized_{device}", vars(args), rows)


def _quantized(weight: torch.Tensor, format: MatrixFormat) -> QuantizedMatrix:
    with torch.device(weight.device):
        matrix = QuantizedMatrix.empty(format, *weight.shape)
    matrix.quantize(weight)
    return matrix


def captured(work: Callable[[], object]) -> Callable[[], object]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _each(product: Callable[[object], object], matrices: list[object]) -> None:
    for matrix in matrices:
        product(matrix)


if __name__ == "__main__":
    main()
