"""The size of a chunk as CacheGen's coder leaves it, over its size as ShadowServe's leaves it: the same KV and bins.

    python benchmark/bench_chunk_size.py

A chunk is 256 tokens. *Deflate*: `binned`, `cachegen` of this project, which is ShadowServe 5: a scale per token and
head, the codes under Huffman codes. *Arithmetic*: the chunk of CacheGen as LMCache stores it (`cachegen_encoder.py`).
No coder of that kind runs here, so its parts are counted:

    streams   of each channel the entropy of its codes in the chunk, which is what its table lets the coder reach
    scales    a float32 per token, layer and K or V, over all heads
    starts    an int32 per token, layer and K or V: where the token's stream begins
    tables    33 int16 per channel, layer and K or V

The last byte of each token's stream is not counted.

KV: *synthetic* of a Llama-8B's shape (`bench_codecs.py`) and of the trained SmolLM2-135M, pages of English text.
All sizes are measured, none of them on KV of the paper's models.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from bench_codecs import Rig, block_of, synthetic
from common import print_table, write_json

from sglang.srt.configs.smollm2_model import FetchError, ensure_smollm2
from sglang.srt.offload.codec.binned import bins_per_layer, cachegen_bins

CHUNK_TOKENS = 256
PAGE_SIZE = 16
SCALE_BYTES = START_BYTES = 4
TABLE_BYTES = 33 * 2


def entropy_bytes(codes: np.ndarray) -> float:
    """codes: (tokens, channels) of small integers. Each channel's entropy in these tokens."""
    bits = 0.0
    for code in np.unique(codes):
        count = (codes == code).sum(0)
        share = count[count > 0] / len(codes)
        bits -= float((count[count > 0] * np.log2(share)).sum())
    return bits / 8


def arithmetic_parts(kv: np.ndarray) -> dict[str, float]:
    """kv: (2, layers, tokens, heads, dim) float32. Bytes of the parts of CacheGen's chunk."""
    _, layers, tokens, heads, dim = kv.shape
    streams = 0.0
    for values, bins in zip(kv, cachegen_bins(layers)):
        for layer, count in zip(values.reshape(layers, tokens, heads * dim), bins_per_layer(bins, layers)):
            largest = np.abs(layer).max(-1, keepdims=True)
            streams += entropy_bytes(np.rint(layer / largest * ((count - 1) // 2)).astype(np.int8))
    return {
        "streams": streams,
        "scales": 2.0 * layers * tokens * SCALE_BYTES,
        "starts": 2.0 * layers * tokens * START_BYTES,
        "tables": 2.0 * layers * heads * dim * TABLE_BYTES,
    }


def row(name: str, kv: torch.Tensor) -> dict[str, Any]:
    """kv: of one chunk, (2, layers, 256, heads, dim) float32."""
    layout, raw = block_of(kv, PAGE_SIZE, "bfloat16")
    deflate = sum(map(len, Rig({"codec": "binned", "bins": "cachegen"}, layout, raw).stored))
    parts = arithmetic_parts(kv.to(torch.bfloat16).float().numpy())
    whole = sum(parts.values())
    return {
        "KV (measured)": name,
        "Deflate, ratio": raw.nbytes / deflate,
        **{f"{part}, % of Deflate": 100 * size / deflate for part, size in parts.items()},
        "size without tables": (whole - parts["tables"]) / deflate,
        "size": whole / deflate,
    }


def trained_chunks() -> Iterator[torch.Tensor]:
    """The first chunk of each page of text."""
    from sglang.srt.mem_cache.transfer import Tier
    from support.real_engine import RealEngine, real_model

    real = real_model()
    engine = RealEngine(real, 512, 480 * len(real.golden.pages), page_size=PAGE_SIZE)
    assert engine.host_pool is not None
    for page in real.golden.pages:
        engine.score(page.ids, 1)
        path = engine.scheduler.cache.tree.match("", page.ids[:CHUNK_TOKENS]).path
        frames = np.concatenate([node.frames[Tier.HOST] for node in path])[: CHUNK_TOKENS // PAGE_SIZE]
        # (pages, 2, layers, page size, heads, dim)
        yield engine.host_pool.kv[torch.from_numpy(frames.astype(np.int64))].movedim(0, 2).flatten(2, 3).clone()
    engine.close()


def main() -> None:
    rows = [row("synthetic, Llama-8B's shape", synthetic(CHUNK_TOKENS))]
    try:
        ensure_smollm2()
    except FetchError as error:
        print(f"SmolLM2 cannot be fetched, so there is synthetic KV alone: {error}")
    else:
        rows += [row(f"SmolLM2, page {i}", chunk) for i, chunk in enumerate(trained_chunks(), 1)]
    print_table("Chunks of CacheGen over chunks of ShadowServe", rows)
    write_json("chunk_size", {"chunk_tokens": CHUNK_TOKENS}, rows)


if __name__ == "__main__":
    main()
