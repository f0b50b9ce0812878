"""Long extends that make keys and values of latents: right under Triton's interpreter, where this file runs as a
script, and compiled for GPUs; and what stays in the absorbed form."""

from __future__ import annotations

import math
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config

from sglang.srt.configs.latent import LatentConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.base_attn_backend import AttentionMetadata
from sglang.srt.layers.attention.latent_expansion import (
    LONG_EXTEND,
    PIECE_BYTES,
    PIECE_PAGE,
    KeyRange,
    LatentExpansion,
    divided,
    in_words,
)
from sglang.srt.layers.kv_scale import KVScale
from sglang.srt.layers.latent_attention import LatentAttention
from sglang.srt.layers.latent_projections import LatentProjections
from sglang.srt.mem_cache.kv_view import KVView, PagedSegments
from sglang.srt.model_executor.forward_batch_info import StreamedRows
from support.no_waiting import DEVICE, NoWaiting
from support.thread_group import thread_groups
from support.tiny_runner import TinyRunner
from support.triton_runs import (
    PRODUCT_INSTRUCTIONS,
    SHARED_BYTES,
    compile_kernel,
    needs_triton,
    run_interpreted,
    spilled_bytes,
)

SHAPE: dict[str, Any] = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=512,
    initializer_range=0.2,
    q_lora_rank=28,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    n_routed_experts=4,
    n_group=2,
    topk_group=1,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    first_k_dense_replace=1,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEEPSEEK = LatentConfig(rank=512, rotary_dim=64, key_dim=128, value_dim=128)


def write(path: Any, config: Any = None) -> str:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config or DeepseekV3Config(**SHAPE)).save_pretrained(path)
    return str(path)


class PagedRunner(TinyRunner):
    """Its batches have their pages in one table."""

    def batch(self, chunks, all_rows=False):
        batch = super().batch(chunks, all_rows)
        pages, kv_lens = [seq.pages for seq, _ in chunks], [seq.num_cached + n for seq, n in chunks]
        batch.segments = batch.windowed_segments = paged(pages, kv_lens, batch.attn.q_lens, self.page_size)
        return batch


def paged(pages: list[torch.Tensor], kv_lens: Any, q_lens: Any, page_size: int) -> PagedSegments:
    lens = np.array([len(each) + 1 for each in pages])
    starts = np.cumsum(lens) - lens + 1
    table = torch.cat([torch.cat((torch.tensor([1 << 20]), each)) for each in pages]).to(torch.int32)
    columns = starts, np.array(kv_lens, np.int64), np.array(q_lens, np.int64)
    return PagedSegments(table, page_size, *columns, *(torch.from_numpy(each.copy()) for each in columns[:2]))


# -- without Triton ------------------------------------------------------------------------------------------------


def test_pieces_have_whole_requests_or_parts_of_one():
    kv_lens = np.array([100, 5, 129, 700, 128, 256, 1])

    def runs(*indices: int) -> list[KeyRange]:
        return [KeyRange(i, 0, int(kv_lens[i])) for i in indices]

    assert divided([0, 2, 3, 4, 5, 6], kv_lens, 384) == [
        [runs(0, 2)],
        [[KeyRange(3, 0, 384)], [KeyRange(3, 384, 700)]],
        [runs(4, 5)],
        [runs(6)],
    ]
    assert divided([], kv_lens, 384) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_bytes_in_words_are_the_same(dtype: torch.dtype):
    memory = torch.randn(5 * 4 * 48 + 8).to(dtype)
    for first, stride, is_whole in ((0, 192, True), (8, 192, True), (1, 192, False), (0, 161, False)):
        k = memory[first:].as_strided((5, 3, 1, 48), (stride, 48, 48, 1), first)
        words = in_words(k)
        assert (words.dtype == torch.int64) == is_whole
        assert torch.equal(words[[3, 1], [2, 0]].view(dtype).float(), k.float()[[3, 1], [2, 0]])


def test_a_piece_is_bounded():
    def takes(*given: object) -> bool:
        return True

    expansion = LatentExpansion(None, takes)  # type: ignore[arg-type]
    for heads in (1, 16, 128):
        num_tokens = expansion.piece_tokens(DEEPSEEK, heads, torch.bfloat16)
        per_token = 2 * (heads * (128 + 128) + 3 * 576)
        assert num_tokens % PIECE_PAGE == 0 and num_tokens >= 1024
        assert PIECE_BYTES - per_token * PIECE_PAGE < num_tokens * per_token <= PIECE_BYTES
    # What it saves: products of a head in the absorbed form, and by its own keys and values.
    for before in (0, 1000, 65536):
        pairs = LONG_EXTEND * before + LONG_EXTEND**2 / 2
        absorbed = pairs * (576 + 512) + LONG_EXTEND * 512 * (128 + 128)
        assert pairs * (192 + 128) + (before + LONG_EXTEND) * 512 * (128 + 128) < absorbed


def test_a_cpu_never_expands(tmp_path):
    from sglang.srt.layers.attention.cpu_backend import CpuAttnBackend
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    assert all(each.expansion is None for each in (CpuAttnBackend, TorchNativeAttnBackend, FlashInferAttnBackend))
    runner = PagedRunner(ModelConfig.from_pretrained(write(tmp_path)))
    (seq,) = runner.start([list(range(90)) * 4])
    batch = runner.batch([(seq, 2 * LONG_EXTEND - 200)])
    state = runner.model.embed(batch)
    assert not state.expands and runner.model.project(0, state, runner.pool).shape[2] == 32 + 16


def test_nothing_waits_for_a_device():
    """Long requests, whole and in parts, beside short ones."""

    class Heads:
        def plan_heads(self, q, view, reqs):
            planned.append((q.shape[0], view.k.shape[0], reqs))
            return reqs

        def attend_heads(self, q, view, table, plan, scale, out, lse):
            assert view.k.shape[:2] == view.v.shape[:2] == view.rotary.shape[:2] and view.rotary.shape[2] == 1
            assert out.shape[:2] == q.shape[:2] and len(table) >= len(view.k)
            assert any(plan is each for *_, each in planned)
            attended.append((out.dtype, lse is not None))

    planned: list[Any] = []
    attended: list[Any] = []
    short: list[Any] = []
    expansion = LatentExpansion(Heads(), lambda *given: True)
    latent = LatentConfig(rank=32, rotary_dim=16, key_dim=16, value_dim=16)

    def forward(q, view, segments, meta):
        short.append((q.shape, meta.q_lens))
        return q.new_empty(*q.shape[:2], latent.rank)

    backend: Any = SimpleNamespace(expansion=expansion, capturing=False, computes_masked=True, forward=forward)
    attention = LatentAttention(0, backend, KVScale(sums=0.5), None, latent)
    with DEVICE:
        attention.projections = LatentProjections(latent, torch.empty(3, 32, 32, dtype=torch.bfloat16))
        view = KVView(torch.empty(9, 16, 1, 48, dtype=torch.float8_e4m3fn))
        q_lens, kv_lens = (256, 3, 300, 1, 270), (256, 9, 1000, 70, 270)
        columns = np.zeros(5, np.int64), np.array(kv_lens), np.array(q_lens)
        of_device = torch.empty(5, dtype=torch.int64), torch.empty(5, dtype=torch.int64)
        segments = PagedSegments(torch.empty(200, dtype=torch.int32), 16, *columns, *of_device)
        q = torch.empty(sum(q_lens), 3, 32, dtype=torch.bfloat16)
    pool: Any = SimpleNamespace(view=lambda layer: view)
    batch: Any = SimpleNamespace(segments=segments, attn=AttentionMetadata(q_lens, 0.2))
    expansion.piece_bytes = 4 * PIECE_PAGE * 2 * (3 * 48 + 3 * 32)
    assert attention.expands(batch)
    with NoWaiting():
        for _ in range(2):
            out = attention(q, batch, pool)
            assert out.shape == (sum(q_lens), 3, 16) and out.device == DEVICE
    # Their plans are made once: of the first request, of two parts of the third one, and of the last one.
    assert [each[:2] for each in planned] == [(830, 2), (300, 4), (300, 4), (830, 3)]
    assert [each[2].rows.tolist() for each in planned] == [[0], [0], [0], [560]]
    assert [each[2].before.tolist() for each in planned] == [[0], [700], [700 - 512], [0]]
    whole, part = (torch.bfloat16, False), (torch.float32, True)
    assert attended == [whole, part, part, whole] * 2
    assert short == [((4, 3, 48), (3, 1))] * 2


# -- with Triton ---------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("what", ["heads", "model"])
def test_under_the_interpreter(what: str, tmp_path):
    assert run_interpreted(__file__, what, str(tmp_path)).count("are right") == 1


@needs_triton
def test_what_stays_absorbed(tmp_path):
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    backend = TritonAttnBackend(num_sms=132)
    assert backend.expansion is not None
    for dtype, changes, is_taken in (
        (torch.bfloat16, {}, True),
        (torch.float16, {"value_dim": 64, "key_dim": 64}, True),
        (torch.float32, {}, False),
        # GLM-4.7-Flash.
        (torch.bfloat16, {"key_dim": 192, "value_dim": 256}, False),
        (torch.bfloat16, {"key_dim": 256, "value_dim": 256}, False),
        (torch.bfloat16, {"key_dim": 96, "value_dim": 96}, False),
        (torch.bfloat16, {"rotary_dim": 128}, False),
        # Latents that are no longer than values take fewer products.
        (torch.bfloat16, {"rank": 128}, False),
    ):
        assert backend.expansion.takes(replace(DEEPSEEK, **changes), dtype) == is_taken, (dtype, changes)

    config = replace(ModelConfig.from_pretrained(write(tmp_path)), dtype=torch.bfloat16)
    runner = PagedRunner(config, backend=backend)
    seqs = runner.start([[1] * 300, [1] * 9])
    batch = runner.batch([(seqs[0], LONG_EXTEND), (seqs[1], 9)])

    def expands(given: Any = batch) -> bool:
        return runner.model.embed(given).expands

    assert expands()
    assert not expands(runner.batch([(seqs[0], LONG_EXTEND - 1), (seqs[1], 9)]))
    assert not expands(TinyRunner.batch(runner, [(seqs[0], LONG_EXTEND)])), "segments one by one"
    assert not expands(replace(batch, streamed=[StreamedRows(slice(0, 1), 0, 0, [])]))
    for masked in ({"softcap": 3.0}, {"window": 7}, {"sinks": torch.zeros(4)}):
        assert not expands(replace(batch, attn=replace(batch.attn, **masked)))
    backend.capturing = True
    assert not expands()
    backend.capturing = False
    attn = runner.model.layers[1].self_attn.attn
    attn.window = 300
    assert not attn.can_expand
    attn.window = None
    backend.expansion = None
    assert not expands() and attn.batches_of_kernels() == []


@needs_triton
@pytest.mark.parametrize(
    ("capability", "dtype", "is_part"),
    [
        (90, "bf16", False),
        pytest.param(90, "bf16", True, marks=pytest.mark.slow),
        pytest.param(90, "fp16", False, marks=pytest.mark.slow),
        (80, "bf16", False),
        pytest.param(80, "bf16", True, marks=pytest.mark.slow),
        pytest.param(89, "bf16", False, marks=pytest.mark.slow),
        pytest.param(89, "bf16", True, marks=pytest.mark.slow),
        pytest.param(100, "bf16", False, marks=pytest.mark.slow),
        pytest.param(100, "bf16", True, marks=pytest.mark.slow),
        pytest.param(120, "bf16", False, marks=pytest.mark.slow),
        pytest.param(120, "bf16", True, marks=pytest.mark.slow),
    ],
)
def test_compiles_without_spills(capability: int, dtype: str, is_part: bool):
    """is_part: float32 and lse, to be merged."""
    from sglang.srt.layers.attention.triton_kernels import extend_kernel
    from sglang.srt.layers.attention.triton_tiles import Tiles

    tiles = Tiles.of_expanded(SHARED_BYTES[capability])
    assert tiles is not None
    tile = tiles.extend
    names = extend_kernel.arg_names
    constants: dict[str, Any] = {"HEAD_DIM": 128, "ROTARY_DIM": 64, "BLOCK_D": 128, "GROUP": 1}
    constants |= {"PAGE_SIZE": PIECE_PAGE, "BY_SLOT": False, "IN_TOKENS": True, "TILE_IN_PAGE": True}
    constants |= {"BLOCK_M": tile.queries, "BLOCK_N": tile.keys} | dict.fromkeys(("window", "cap", "sinks_ptr"))
    of_name = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "rotary_ptr", "out_ptr"), dtype)
    of_name |= dict.fromkeys(("parts_ptr", "part_lses_ptr", "lse_ptr"), "fp32")
    if is_part:
        of_name["out_ptr"] = "fp32"
    else:
        constants["lse_ptr"] = None

    def type_of(name: str) -> str:
        if name.endswith("_ptr"):
            return f"*{of_name.get(name, 'i32')}"
        return "fp32" if name == "scale" else "i64" if name.endswith("stride") else "i32"

    aligned = {*of_name, *(name for name in names if name.endswith("stride"))}
    types = {name: type_of(name) for name in names}
    result = compile_kernel(extend_kernel, types, constants, aligned, tile.warps, tiles.num_stages, capability)
    assert PRODUCT_INSTRUCTIONS[capability] in result.asm["ptx"]
    # The next keys come while others are multiplied.
    assert "cp.async.cg.shared.global" in result.asm["ptx"]
    assert spilled_bytes(result) == 0


@needs_triton
@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("num_heads", [16, 128])
def test_on_a_gpu(num_heads: int, page_size: int, kv_dtype: torch.dtype):
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    reqs = ((3000, 300), (5000, 1), (9000, 2048), (257, 257), (40, 7))
    beside_absorbed(TritonAttnBackend(), reqs, num_heads, page_size, torch.bfloat16, kv_dtype, "cuda")


def beside_absorbed(
    backend: Any,
    reqs: tuple[tuple[int, int], ...],
    num_heads: int,
    page_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: str,
) -> None:
    """Of DeepSeek's sizes, in several pieces: what the absorbed form computes, with a scale of what is stored."""
    torch.manual_seed(3)
    attention = LatentAttention(0, backend, KVScale(scores=0.5, sums=0.5), None, DEEPSEEK)
    weight = torch.randn(num_heads, 256, 512) * 512**-0.5
    attention.projections = LatentProjections(DEEPSEEK, weight.to(dtype).to(device))
    counts = [-(-kv_len // page_size) for kv_len, _ in reqs]
    pages = list((torch.randperm(sum(counts)) + 1).split(counts))
    k = torch.randn(sum(counts) + 1, 2, page_size, 1, 576).to(kv_dtype).to(device)[:, 1]
    pool: Any = SimpleNamespace(view=lambda layer: KVView(k))
    q_lens = tuple(q_len for _, q_len in reqs)
    segments = paged(pages, [kv_len for kv_len, _ in reqs], q_lens, page_size)
    on_device = {name: getattr(segments, name).to(device) for name in ("table", "device_starts", "device_kv_lens")}
    batch: Any = SimpleNamespace(segments=replace(segments, **on_device), attn=AttentionMetadata(q_lens, 192**-0.5))
    q = torch.randn(sum(q_lens), num_heads, 192).to(dtype).to(device)
    of_latents = torch.cat((attention.projections.queries(q[..., :128]), q[..., 128:]), dim=2)
    want = attention.projections.values(attention(of_latents, batch, pool)).float()
    backend.expansion.piece_bytes = 4096 * 2 * (num_heads * 256 + 3 * 576)
    assert attention.expands(batch)
    for _ in range(2):
        got = attention(q, batch, pool).float()
        assert (got - want).abs().max() < (2e-2 if dtype == torch.bfloat16 else 1e-5) * want.abs().max()


# -- under the interpreter -----------------------------------------------------------------------------------------


def heads(path: str) -> None:
    """Long and short extends, beside each other, of whole requests in one piece, and of parts."""
    backend = small_backend()
    latent = LatentConfig(rank=32, rotary_dim=16, key_dim=16, value_dim=16)
    num_heads, expansion = 3, backend.expansion
    expansion.fewest_queries = 5
    for seed, (page_size, dtype, kv_dtype, reqs, piece_pages) in enumerate(
        (
            # Of each request the tokens, and the new ones. Whole requests, in two pieces.
            (1, torch.float32, None, ((70, 9), (200, 70), (5, 5), (131, 40)), 3),
            # Parts: queries before a piece begins, inside of it, and behind it; some of them divided among programs.
            (16, torch.float32, None, ((40, 1), (300, 20), (17, 2), (290, 270)), 1),
            (4, torch.float16, torch.float8_e4m3fn, ((150, 150), (33, 1)), 1),
        )
    ):
        torch.manual_seed(seed)
        weight = torch.randn(num_heads, 32, latent.rank) * latent.rank**-0.5
        pages, latents, count = [], [], sum(-(-kv_len // page_size) for kv_len, _ in reqs) + 3
        order = random.Random(seed).sample(range(1, count), count - 1)
        k = torch.full((count, 2, page_size, 1, latent.cached_dim), math.nan, dtype=kv_dtype or dtype)[:, 1]
        for kv_len, _ in reqs:
            mine = torch.tensor([order.pop() for _ in range(-(-kv_len // page_size))])
            pages.append(mine)
            of_req = torch.randn(kv_len, latent.cached_dim).to(k.dtype)
            for t in range(kv_len):
                k[mine[t // page_size], t % page_size, 0] = of_req[t]
            latents.append(of_req)
        q_lens = tuple(q_len for _, q_len in reqs)
        segments = paged(pages, [kv_len for kv_len, _ in reqs], q_lens, page_size)
        q = torch.randn(sum(q_lens), num_heads, 32).to(dtype)
        meta = AttentionMetadata(q_lens, 0.2)

        def expand(given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            both = torch.einsum("nr,hdr->nhd", given[:, :32].float(), weight).to(given.dtype)  # noqa: B023
            return both[..., :16], both[..., 16:], given[:, None, 32:]

        per_page = PIECE_PAGE * dtype.itemsize * (3 * latent.cached_dim + num_heads * 32)
        expansion.piece_bytes = per_page * piece_pages
        assert expansion.piece_tokens(latent, num_heads, dtype) == piece_pages * PIECE_PAGE
        for _ in range(2):  # the second call finds the first one's plan
            out, short = expansion.forward(q, KVView(k), segments, meta, latent, expand)
        row, short_rows = 0, []
        for of_req, q_len in zip(latents, q_lens):
            rows = slice(row, row + q_len)
            row += q_len
            if q_len < 5:
                short_rows += range(rows.start, rows.stop)
                continue
            keys, values, rotated = (each.double() for each in expand(of_req.to(dtype)))
            keys = torch.cat((keys, rotated.expand(-1, num_heads, -1)), dim=2)
            scores = torch.einsum("qhd,khd->qhk", q[rows].double(), keys) * meta.scale
            ahead = torch.arange(len(of_req)) - (len(of_req) - q_len + torch.arange(q_len))[:, None]
            scores = scores.masked_fill((ahead > 0)[:, None], -math.inf)
            want = torch.einsum("qhk,khd->qhd", scores.softmax(-1), values)
            error = (out[rows].double() - want).abs().max().item()
            assert error < (3e-6 if dtype == torch.float32 else 5e-3), f"{reqs}: off by {error}"
        assert (short is None and not short_rows) or short.rows.tolist() == short_rows
        if short is not None:
            assert short.attn.q_lens == tuple(n for n in q_lens if n < 5)
            assert short.segments.device_kv_lens.tolist() == short.segments.kv_lens.tolist()


def model(path: str) -> None:
    """Beside transformers, and beside the absorbed form: chunks behind prefixes, of requests that are long or short,
    with decodes, on one rank and on two; and with latents of 8 bits that have a scale."""
    from sglang.srt.layers import latent_projections

    latent_projections.takes = lambda weight: False
    write(path)
    config = ModelConfig.from_pretrained(path)
    theirs = AutoModelForCausalLM.from_pretrained(path)
    rng = random.Random(5)
    prompts = [[rng.randrange(97) for _ in range(n)] for n in (61, 150, 21, 40)]
    with torch.no_grad():
        want = [theirs(torch.tensor([tokens])).logits[0].float() for tokens in prompts]
    spread = want[0].std()

    def run(config: ModelConfig, group: Any = None, fewest: int = 7) -> tuple[list[Any], list[bool]]:
        """Logits of all rows by prompt, and whether a batch was computed by keys and values."""
        backend = small_backend()
        backend.expansion.fewest_queries = fewest
        num_heads = 4 if group is None else 4 // group.size
        backend.expansion.piece_bytes = PIECE_PAGE * 4 * (3 * 48 + num_heads * 32)
        runner = PagedRunner(config, backend=backend, **({} if group is None else {"group": group}))
        seqs = runner.start(prompts, page_size=3)
        found: list[list[torch.Tensor]] = [[] for _ in prompts]
        expanded = []
        for chunks in ((20, 5, 0, 39), (41, 140, 2, 1), (0, 0, 19, 0), (0, 5, 0, 0)):
            given = [(seq, n) for seq, n in zip(seqs, chunks) if n]
            expanded.append(runner.model.embed(runner.batch(given)).expands)
            logits = runner.forward(given, all_rows=True)
            for i, part in zip([i for i, n in enumerate(chunks) if n], logits.split([n for n in chunks if n])):
                found[i].append(part)
        return [torch.cat(each) for each in found], expanded

    def off(got: list[Any], right: list[Any]) -> float:
        return max(((a - b).abs().max() / spread).item() for a, b in zip(got, right, strict=True))

    got, expanded = run(config)
    assert expanded == [True, True, True, False]
    assert off(got, want) < 5e-5, off(got, want)
    absorbed, expanded = run(config, fewest=1000)
    assert not any(expanded) and 0 < off(got, absorbed) < 5e-5
    # Sampled rows alone.
    backend = small_backend()
    backend.expansion.fewest_queries = 7
    runner = PagedRunner(config, backend=backend)
    seqs = runner.start(prompts, page_size=16)
    runner.forward([(seqs[1], 100)])
    logits = runner.forward([(seq, len(seq.tokens) - seq.num_cached) for seq in seqs])
    assert off([logits], [torch.stack([each[-1] for each in want])]) < 5e-5
    take_turns()
    with ThreadPoolExecutor(2) as pool:
        for got, expanded in pool.map(lambda group: run(config, group), thread_groups(2, 30.0)):
            assert any(expanded) and off(got, want) < 5e-5
    scaled = replace(config, kv_cache_dtype=torch.float8_e4m3fn, kv_scales=((((0.25, 7.0),) * 2),))
    got, _ = run(scaled)
    absorbed, _ = run(scaled, fewest=1000)
    # A number that lies between two of 8 bits may be rounded the other way.
    assert 100 * off(got, absorbed) < off(got, want), (off(got, want), off(got, absorbed))


def take_turns() -> None:
    """The interpreter has one kernel at a time."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    lock = threading.Lock()

    def locked(work: Any) -> Any:
        def call(*args: Any) -> Any:
            with lock:
                return work(*args)

        return call

    for name in ("forward", "attend_heads"):
        setattr(TritonAttnBackend, name, locked(getattr(TritonAttnBackend, name)))


def small_backend() -> Any:
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.layers.attention.triton_tiles import ExtendTile, MergeTile, Tiles

    tiles = Tiles(ExtendTile(64, 32, 32, least_split=64), decode_keys=32, decode_rows=64, least_decode_split=64)
    tiles = replace(tiles, more_decodes_per_sm=1, uses_whole_pages=False, merge=MergeTile(16, splits=4, values=16))
    return TritonAttnBackend(tiles, num_sms=12)


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](sys.argv[2])
    print(f"{sys.argv[1]} are right")
