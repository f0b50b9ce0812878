"""A forward pass on the CPU: the kernels in C beside torch, through the real model and the attention backends.

    python benchmark/bench_cpu_layers.py [MODEL] [--batches 1x128,16x128,1x4096,2048p] [--rounds N] [--page-size N]
                                         [--threads N] [--in-order] [--beside transformers]

MODEL is a folder with weights, "embedded", "experts" (random: 6 layers of 32 experts, 4 for a token), or by default
"smollm2". A batch `16x128` is a decode of 16 requests of 128 tokens each; `16x4096s` is one whose requests share all
but their last 32 tokens; `2048p` is a prompt of 2,048 tokens. float32. *torch*: plain weights and the backend
torch_native. *C*: packed weights and the backend cpu. *transformers*, with --beside in torch's place: its modelling
code and the backend cpu. The two take turns; a ratio is the other's time over C's of one turn. Where other programs
use the cores, --threads 1 and the processor's time tell more than the clock. Pages are a random permutation of the
pool's, unless --in-order.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any
from unittest import mock

import numpy as np
import torch
from common import print_table, write_json

from sgl_kernel.cpu.library import LIBRARY
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_families import TRANSFORMERS
from sglang.srt.layers.attention.attention_registry import make_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata
from sglang.srt.managers.startup.device import page_layout
from sglang.srt.mem_cache.kv_view import PagedSegments
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_loader.loader import load_model
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

# Of requests that share the rest.
OWN_TOKENS = 32


class Bench:
    def __init__(self, path: str, other: str, num_tokens: int, page_size: int, in_order: bool) -> None:
        """other: "torch" or "transformers"."""
        self.config = ModelConfig.from_pretrained(path, dtype="float32")
        load_format = "dummy" if path == "embedded" else "auto"
        self.models = {"C": load_model(self.config, load_format, make_attention_backend("cpu", "cpu"))}
        self.models["C"].finish_loading()
        if other == "torch":
            self.models[other] = load_model(self.config, load_format, make_attention_backend("torch_native", "cpu"))
        else:
            theirs = ModelConfig.from_pretrained(path, dtype="float32", model_impl=TRANSFORMERS)
            self.models[other] = load_model(theirs, "auto", make_attention_backend("cpu", "cpu"))
        self.page_size, self.in_order = page_size, in_order
        self.num_pages = num_tokens // page_size
        self.pool = MHATokenToKVPool(self.num_pages, page_layout(self.config, page_size, 1))
        self.pool.kv.normal_()

    def batch(self, num_reqs: int, kv_len: int, q_len: int, num_shared: int) -> ForwardBatch:
        """The same numbers each time, in new objects, as each launch has."""
        g, page = torch.Generator().manual_seed(1), self.page_size
        pages_each = -(-kv_len // page)
        order = torch.arange(self.num_pages) if self.in_order else torch.randperm(self.num_pages, generator=g)
        starts = np.arange(num_reqs) * pages_each
        table = order[: num_reqs * pages_each].view(num_reqs, pages_each).clone()
        table[:, : num_shared // page] = table[0, : num_shared // page]
        table = table.flatten()
        kv_lens, q_lens = np.full(num_reqs, kv_len), np.full(num_reqs, q_len)
        positions = torch.arange(kv_len - q_len, kv_len).repeat(num_reqs)
        places = torch.from_numpy(np.repeat(starts, q_len)) + positions // page
        rows = torch.arange(num_reqs) * q_len + q_len - 1
        whole = torch.zeros(num_reqs, dtype=torch.int64)
        segments = PagedSegments(
            table, page, starts, kv_lens, q_lens, torch.from_numpy(starts), torch.from_numpy(kv_lens)
        )
        return ForwardBatch(
            seq=0,
            mode=ForwardMode.DECODE if q_len == 1 else ForwardMode.EXTEND,
            input_ids=torch.randint(self.config.vocab_size, (num_reqs * q_len,), generator=g),
            positions=positions,
            out_loc=(table[places] * page + positions % page).expand(2, -1),
            segments=segments,
            windowed_segments=segments,
            attn=AttentionMetadata((q_len,) * num_reqs, self.config.attn_scale),
            sample_rows=rows,
            sample_slots=whole,
            sampling=SamplingBatchInfo.from_params(
                [SamplingParams(temperature=0)] * num_reqs, self.config.vocab_size, whole
            ),
        )

    @torch.inference_mode()
    def forward(self, name: str, batch: ForwardBatch) -> torch.Tensor:
        model: Any = self.models[name]
        state = model.embed(batch)
        for layer_id in range(model.num_layers):
            state = model.forward_layer(layer_id, state, batch, self.pool)
        return model.logits(state, batch)

    def seconds(self, name: str, shape: tuple[int, int, int, int]) -> tuple[float, float, torch.Tensor]:
        """On the clock, of the processor, and the logits."""
        # Element-wise work asks the library by itself.
        with mock.patch.object(LIBRARY, "_is_available", name != "torch"):
            batch = self.batch(*shape)
            start, cpu = time.perf_counter(), time.process_time()
            logits = self.forward(name, batch)
            return time.perf_counter() - start, time.process_time() - cpu, logits


def write_experts(folder: str) -> None:
    """A mixture of experts with weights at random, 84 million of them in experts."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=2048,
        hidden_size=512,
        moe_intermediate_size=288,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,  # type: ignore[call-arg]  # an attribute that its class does not declare
        max_position_embeddings=8192,
        initializer_range=0.05,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--batches", default="1x128,4x128,16x128,64x128,1x4096,4x4096,16x4096,2048p")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--in-order", action="store_true", help="pages lie one behind the other")
    parser.add_argument("--beside", choices=("torch", "transformers"), default="torch")
    args = parser.parse_args()
    if args.beside == "transformers" and args.model == "embedded":
        parser.error("the embedded model's weights are made up here: give a folder, or experts")
    if not LIBRARY.is_available():
        parser.error("there is no C compiler")
    torch.set_num_threads(args.threads)
    shapes = {}
    for name in args.batches.split(","):
        reqs, _, length = name.removesuffix("s").partition("x")
        num_shared = max(0, int(length) - OWN_TOKENS) if name.endswith("s") else 0
        shapes[name] = (int(reqs), int(length), 1, num_shared) if length else (1, int(name[:-1]), int(name[:-1]), 0)
    page = args.page_size
    room = max(reqs * -(-length // page) * page for reqs, length, *_ in shapes.values())
    with tempfile.TemporaryDirectory() as folder:
        if args.model == "experts":
            write_experts(folder)
        path = folder if args.model == "experts" else args.model
        bench = Bench(path, args.beside, room + 64 * page, page, args.in_order)
    rows: list[dict[str, object]] = []
    for name, shape in shapes.items():
        found: dict[str, list[float]] = {args.beside: [], "C": []}
        cpu_seconds: dict[str, list[float]] = {args.beside: [], "C": []}
        logits = {}
        for round_ in range(args.rounds + 1):
            for variant, samples in found.items():
                seconds, cpu, logits[variant] = bench.seconds(variant, shape)
                if round_:
                    samples.append(seconds)
                    cpu_seconds[variant].append(cpu)
        ratios = sorted(a / b for a, b in zip(found[args.beside], found["C"]))
        same = int((logits[args.beside].argmax(-1) == logits["C"].argmax(-1)).sum())
        rows.append(
            {
                "batch": name,
                **{f"{variant}, ms": statistics.median(s) * 1e3 for variant, s in found.items()},
                **{f"{variant}, least CPU ms": min(s) * 1e3 for variant, s in cpu_seconds.items()},
                "CPU ratio": statistics.median(a / b for a, b in zip(cpu_seconds[args.beside], cpu_seconds["C"])),
                "ratio": statistics.median(ratios),
                "least": ratios[0],
                "most": ratios[-1],
                "logits off by": float((logits[args.beside] - logits["C"]).abs().max()),
                "same greedy token": f"{same}/{shape[0]}",
            }
        )
        print_table("so far", rows[-1:])
        write_json("cpu_layers", vars(args), rows, complete=False)
    print_table(f"A forward pass, {torch.get_num_threads()} threads", rows)
    write_json("cpu_layers", vars(args), rows)


if __name__ == "__main__":
    main()
