"""Codecs of the remote tier: their size, their speed on one core, and the effect of lossy ones on a model's answers.

    python benchmark/bench_codecs.py [--rounds N] [--tokens N] [--prompts N]

KV: *synthetic*, of a Llama-8B's shape (32 layers, 8 KV heads of 128, bfloat16), K with a scale per channel, a few
outlier channels and neighbouring tokens alike, V near Gaussian; and the *embedded* model's, with this documentation
as its prompt, in bfloat16 and float32. Its weights are random. Its KV has no outlier channels.

Rates are raw bytes (before encoding, after decoding) per second of CPU time of the one thread, so that other work on
the machine matters less. They are medians over rounds in which the codecs take turns. *Library*: the decoder alone,
called on the same coded bytes, into memory of its own. *Copy*: `np.copyto` of as many raw bytes. Both are measured
right before the stage that they are compared with.

Quality, of the embedded model and of the trained SmolLM2: the KV of a prompt is replaced by the codec's decoded KV,
then the model goes on. Its logits at each of 32 forced tokens (the greedy answer from the exact KV in bfloat16) are
compared with those from the exact KV: mean absolute error over the standard deviation of the logits, and how often
the greedy token is the same.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import zstandard
from common import percentiles, print_table, write_json
from isal import igzip_lib

from sglang.srt.configs.embedded_model import ensure_embedded_model
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.smollm2_model import SMOLLM2, FetchError, ensure_smollm2
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.offload.codec import HEADER_BYTES, BlockLayout, Codec, make_codec

CODECS: dict[str, dict[str, Any]] = {
    "raw": {"codec": "raw"},
    "lossless": {},
    "lossless, zstd 1": {"level": 1},
    "lossless, deflate": {"coder": "deflate"},
    "lossless, deflate 1": {"coder": "deflate", "level": 1},
    "binned 255": {"codec": "binned"},
    "binned 255, zstd": {"codec": "binned", "coder": "zstd"},
    "binned 32": {"codec": "binned", "bins": 32},
    "binned 16": {"codec": "binned", "bins": 16},
    "binned CacheGen": {"codec": "binned", "bins": "cachegen"},
    "binned CacheGen, deflate 1": {"codec": "binned", "bins": "cachegen", "level": 1},
    "binned CacheGen, zstd": {"codec": "binned", "bins": "cachegen", "coder": "zstd"},
}
KEY = bytes(16)
TORCH = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ANSWER_TOKENS = 32
# Coded tokens of a page of text, as in test_real_kv.py.
TRAINED_TOKENS = 320


def synthetic(num_tokens: int, seed: int = 0) -> torch.Tensor:
    """(2, layers, tokens, heads, dim) float32. K: channel scales lognormal, 3 % of the channels ten times as large, a
    mean for a third of them, correlation 0.8 between neighbouring tokens; V: a scale per head, correlation 0.3."""
    rng = np.random.default_rng(seed)
    layers, heads, dim = 32, 8, 128
    kv = rng.standard_normal((2, layers, num_tokens, heads, dim), np.float32)
    for x, rho in zip(kv, (0.8, 0.3)):
        for t in range(1, num_tokens):
            x[:, t] = rho * x[:, t - 1] + np.sqrt(1 - rho * rho) * x[:, t]
    channel = (layers, 1, heads, dim)
    scale = np.exp(rng.normal(0, 0.7, channel)) * np.where(rng.random(channel) < 0.03, 10, 1)
    mean = rng.normal(0, 1.5, channel) * (rng.random(channel) < 0.3)
    kv[0] = (kv[0] + mean) * scale
    kv[1] *= 0.3 * np.exp(rng.normal(0, 0.3, (layers, 1, heads, 1)))
    return torch.from_numpy(kv)


def block_of(kv: torch.Tensor, page_size: int, dtype: str) -> tuple[BlockLayout, np.ndarray]:
    """kv: (2, layers, tokens, heads, dim) as the canonical bytes of one block."""
    _, layers, tokens, heads, dim = kv.shape
    pages = kv.to(TORCH[dtype]).reshape(2, layers, tokens // page_size, page_size, heads, dim)
    raw = pages.movedim(2, 0).contiguous().view(torch.uint8).numpy().reshape(-1)
    return BlockLayout(tokens // page_size, PageLayout.kv(page_size, layers, heads, dim, dtype)), raw


def kv_of(layout: BlockLayout, raw: np.ndarray) -> torch.Tensor:
    """The inverse of `block_of`, in float32."""
    page = layout.page
    shape = (layout.num_pages, 2, page.num_layers, page.page_size, *page.components[0].shape)
    pages = torch.from_numpy(raw).view(TORCH[page.dtype]).reshape(shape).float()
    return pages.movedim(0, 2).flatten(2, 3)


def cpu_seconds(work: Callable[[], Any]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


class Rig:
    """A codec and the buffers of one block."""

    def __init__(self, config: dict[str, Any], layout: BlockLayout, raw: np.ndarray) -> None:
        self.codec: Codec = make_codec(config, layout)
        self.layout, self.raw = layout, raw
        self.pieces = range(layout.num_pieces)
        sizes = [layout.raw_bytes(p) for p in self.pieces]
        self.room = [np.zeros(self.codec.max_stored_bytes(n), np.uint8) for n in sizes]
        self.mids = [np.zeros(self.codec.mid_bytes(n), np.uint8) for n in sizes]
        self.out = np.zeros_like(raw)
        self.outs = [self.out[slice(*layout.piece(p))] for p in self.pieces]
        self.encode()

    def encode(self) -> None:
        sizes = [self.codec.encode(self.raw[slice(*self.layout.piece(p))], p, KEY, self.room[p]) for p in self.pieces]
        self.stored = [room[:size] for room, size in zip(self.room, sizes)]

    def parse(self) -> None:
        self.headers = [self.codec.parse(stored, p, KEY) for p, stored in enumerate(self.stored)]

    def decompress(self) -> None:
        for p in self.pieces:
            self.codec.decompress(self.stored[p], self.headers[p], self.mids[p])

    def dequantize(self) -> None:
        for p in self.pieces:
            self.codec.dequantize(self.stored[p], self.headers[p], self.mids[p], self.outs[p])

    def library(self) -> None:
        """Decode what `decompress` decodes, by the library's usual call."""
        for stored, header in zip(self.stored, self.headers):
            if header.stored:
                continue
            at = header.raw_bytes - header.mid_bytes if not self.codec.lossy else 0
            coded = stored[HEADER_BYTES + at :].data
            if "coder=zstd" in self.codec.spec:
                zstandard.ZstdDecompressor().decompress(coded)
            else:
                igzip_lib.decompress(coded, igzip_lib.DECOMP_DEFLATE, bufsize=header.mid_bytes)

    def copy(self) -> None:
        np.copyto(self.out, self.raw)

    def round(self) -> dict[str, float]:
        """CPU seconds."""
        steps = (self.encode, self.parse, self.library, self.decompress, self.copy, self.dequantize)
        return {step.__name__: cpu_seconds(step) for step in steps}

    def decoded(self) -> np.ndarray:
        self.parse()
        self.decompress()
        self.dequantize()
        return self.out


def speed(name: str, layout: BlockLayout, raw: np.ndarray, rounds: int) -> list[dict[str, Any]]:
    rigs = {codec: Rig(config, layout, raw) for codec, config in CODECS.items()}
    samples: dict[str, list[dict[str, float]]] = {codec: [] for codec in CODECS}
    for _ in range(rounds):
        for codec, rig in rigs.items():
            samples[codec].append(rig.round())
    rows = []
    for codec, rig in rigs.items():
        if not rig.codec.lossy:
            assert np.array_equal(rig.out, raw), f"{codec} is not lossless"
        taken = samples[codec]
        row: dict[str, Any] = {"KV": name, "codec": codec, "ratio": raw.nbytes / sum(len(s) for s in rig.stored)}
        for what in ("encode", "parse", "decompress", "dequantize"):
            row[f"{what} GB/s"] = raw.nbytes / percentiles([s[what] for s in taken], 50)[0] / 1e9
        coded = codec != "raw"
        row["to library"] = percentiles([s["library"] / s["decompress"] for s in taken], 50)[0] if coded else None
        row["to copy"] = percentiles([s["copy"] / s["dequantize"] for s in taken], 50)[0]
        if not coded:
            row["decompress GB/s"] = None
        rows.append(row)
    return rows


def embedded_prompts(num_prompts: int, num_tokens: int) -> tuple[Any, list[torch.Tensor]]:
    """The embedded model, whose weights are random, and parts of this documentation with one token more each."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = ensure_embedded_model()
    text = "\n".join(p.read_text() for p in sorted((Path(__file__).parents[1] / "docs").glob("*.md")))
    ids = AutoTokenizer.from_pretrained(path)(text)["input_ids"]
    parts = [ids[i * num_tokens : (i + 1) * num_tokens + 1] for i in range(num_prompts)]
    return AutoModelForCausalLM.from_pretrained(path).eval(), [torch.tensor([part]) for part in parts]


def trained_prompts() -> tuple[Any, list[torch.Tensor]]:
    """SmolLM2 in float32, and pages of English text. Raises FetchError where the model cannot be fetched."""
    from support.golden import read_golden, reference_model

    ensure_smollm2()
    pages = [torch.tensor([page.tokens[: TRAINED_TOKENS + 1]]) for page in read_golden().pages]
    return reference_model(ModelConfig.from_pretrained(SMOLLM2, dtype="float32")), pages


class Quality:
    """A model of transformers in this process, and prompts, (1, tokens) each, whose KV it has computed."""

    def __init__(self, model: Any, prompts: list[torch.Tensor]) -> None:
        self.model, self.prompts = model, prompts
        with torch.no_grad():
            self.kv = [self._prefill(prompt[:, :-1]) for prompt in self.prompts]
            bfloat16 = [kv.to(torch.bfloat16).float() for kv in self.kv]
            self.answers = [self._answer(kv, prompt) for kv, prompt in zip(bfloat16, self.prompts)]

    def _prefill(self, ids: torch.Tensor) -> torch.Tensor:
        cache = self.model(ids, use_cache=True).past_key_values
        k, v = (torch.stack([getattr(layer, kind)[0] for layer in cache.layers]) for kind in ("keys", "values"))
        return torch.stack([k, v]).transpose(2, 3)

    def _cache(self, kv: torch.Tensor) -> Any:
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer, (k, v) in enumerate(zip(*kv.transpose(2, 3))):
            cache.update(k[None].clone(), v[None].clone(), layer)
        return cache

    def _answer(self, kv: torch.Tensor, prompt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Greedy tokens (1, n), and logits (n, vocabulary) at each of them."""
        cache, token, tokens, logits = self._cache(kv), prompt[:, -1:], [], []
        for _ in range(ANSWER_TOKENS):
            logits.append(self.model(token, past_key_values=cache, use_cache=True).logits[0, -1])
            token = logits[-1].argmax()[None, None]
            tokens.append(token)
        return torch.cat(tokens, 1), torch.stack(logits)

    def of(self, config: dict[str, Any] | None) -> dict[str, float]:
        """config: None for float32 KV as it was computed, without rounding to bfloat16."""
        errors, same = [], []
        for prompt, kv, (tokens, exact) in zip(self.prompts, self.kv, self.answers):
            if config is not None:
                layout, raw = block_of(kv, 16, "bfloat16")
                kv = kv_of(layout, Rig(config, layout, raw).decoded())
            forced = torch.cat([prompt[:, -1:], tokens[:, :-1]], 1)
            with torch.no_grad():
                logits = self.model(forced, past_key_values=self._cache(kv), use_cache=True).logits[0]
            errors.append(((logits - exact).abs().mean() / exact.std()).item())
            same.append((logits.argmax(-1) == tokens[0]).float().mean().item())
        return {"logit error %": 100 * float(np.mean(errors)), "greedy agreement %": 100 * float(np.mean(same))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=64, help="of the synthetic KV, 128 KiB each")
    parser.add_argument("--prompts", type=int, default=8, help="of 1,024 tokens, of the embedded model")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    kv = synthetic(args.tokens)
    quality = Quality(*embedded_prompts(args.prompts, 1024))
    own = torch.cat(quality.kv[:2], 2)
    blocks = {
        "synthetic, page 1": block_of(kv, 1, "bfloat16"),
        "synthetic, page 64": block_of(kv, 64, "bfloat16"),
        "embedded, bfloat16": block_of(own, 16, "bfloat16"),
        "embedded, float32": block_of(own, 16, "float32"),
    }
    rows = [row for name, (layout, raw) in blocks.items() for row in speed(name, layout, raw, args.rounds)]
    print_table("Codecs: size, and GB/s of one core", rows)

    answers = answers_of("embedded, random weights", quality)
    try:
        answers += answers_of("SmolLM2", Quality(*trained_prompts()))
    except FetchError as error:
        print(f"SmolLM2 cannot be fetched, so the quality is that of random weights alone: {error}")
    print_table("Codecs: answers", answers)
    write_json("codecs", vars(args), [*rows, *answers])


def answers_of(model: str, quality: Quality) -> list[dict[str, Any]]:
    configs = {"float32 KV, no codec": None} | {name: config for name, config in CODECS.items() if "," not in name}
    return [{"model": model, "codec": name, **quality.of(config)} for name, config in configs.items()]


if __name__ == "__main__":
    main()
