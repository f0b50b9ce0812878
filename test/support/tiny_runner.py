"""Running a model in tests without scheduler, tree or real pools: one frame of a poisoned pool per token or page."""

from __future__ import annotations

import random

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import SINGLE_RANK, TensorParallelGroup
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionMetadata
from sglang.srt.layers.attention.cpu_backend import CpuAttnBackend
from sglang.srt.managers.startup.device import page_layout
from sglang.srt.mem_cache.kv_view import KVSegment
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_loader.loader import load_model
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams


class TinySequence:
    def __init__(self, tokens: list[int], pages: torch.Tensor) -> None:
        self.tokens = list(tokens)
        self.pages = pages
        self.num_cached = 0


class TinyRunner:
    """Feeds sequences to a model in chunks of any size. group: runs one rank of several. backend: None for the CPU's
    own."""

    def __init__(
        self,
        config: ModelConfig,
        load_format: str = "auto",
        seed: int = 0,
        group: TensorParallelGroup = SINGLE_RANK,
        backend: AttentionBackend | None = None,
    ) -> None:
        self.config = config
        self.num_ranks = group.size
        self.model = load_model(config, load_format, backend or CpuAttnBackend(), seed, group=group)
        self.model.finish_loading()

    def start(
        self, prompts: list[list[int]], room: int = 64, page_size: int = 1, seed: int = 0
    ) -> list[TinySequence]:
        """Sequences in a new pool, with room for so many tokens beyond the prompt each, in pages all over it."""
        needed = [-(-(len(prompt) + room) // page_size) for prompt in prompts]
        order = list(range(sum(needed) + 3))
        random.Random(seed).shuffle(order)
        self.page_size = page_size
        self.pool = MHATokenToKVPool(len(order), page_layout(self.config, page_size, self.num_ranks))
        # What nobody has written is NaN.
        self.pool.kv.fill_(torch.nan)
        sequences = []
        for prompt, n in zip(prompts, needed):
            sequences.append(TinySequence(prompt, torch.tensor(order[:n])))
            order = order[n:]
        return sequences

    def batch(self, chunks: list[tuple[TinySequence, int]], all_rows: bool = False) -> ForwardBatch:
        """chunks: sequence and number of its tokens to compute next."""
        input_ids, positions, out_loc, segments, q_lens, sample_rows = [], [], [], [], [], []
        for seq, n in chunks:
            start, end = seq.num_cached, seq.num_cached + n
            assert end <= len(seq.tokens) and n > 0
            at = torch.arange(start, end)
            input_ids += seq.tokens[start:end]
            positions.append(at)
            out_loc.append(seq.pages[at // self.page_size] * self.page_size + at % self.page_size)
            segments.append(
                [self.segment(seq, 0, end, False)]
                if n == 1
                else [self.segment(seq, 0, start, False), self.segment(seq, start, end, True)]
            )
            q_lens.append(n)
            if all_rows:
                sample_rows += range(len(input_ids) - n, len(input_ids))
            elif end == len(seq.tokens):
                sample_rows.append(len(input_ids) - 1)
        num = len(sample_rows)
        return ForwardBatch(
            seq=0,
            mode=ForwardMode.DECODE if max(q_lens) == 1 else ForwardMode.EXTEND,
            input_ids=torch.tensor(input_ids),
            positions=torch.cat(positions),
            out_loc=torch.cat(out_loc).expand(2, -1),
            segments=segments,
            windowed_segments=segments,
            attn=AttentionMetadata(tuple(q_lens), self.config.attn_scale),
            sample_rows=torch.tensor(sample_rows, dtype=torch.int64),
            sample_slots=torch.zeros(num, dtype=torch.int64),
            sampling=SamplingBatchInfo.from_params(
                [SamplingParams(temperature=0)] * num, self.config.vocab_size, torch.zeros(num, dtype=torch.int64)
            ),
        )

    def segment(self, seq: TinySequence, start: int, end: int, causal: bool) -> KVSegment:
        if start == end:
            return KVSegment(seq.pages[:0], 0, causal)
        first, last = start // self.page_size, (end - 1) // self.page_size
        return KVSegment(seq.pages[first : last + 1], end - start, causal, start % self.page_size)

    def forward(self, chunks: list[tuple[TinySequence, int]], all_rows: bool = False) -> torch.Tensor:
        """Returns logits: of each chunk's last row where it ends its sequence, or of all rows."""
        batch = self.batch(chunks, all_rows)
        state = self.model.embed(batch)
        for layer_id in range(self.model.num_layers):
            state = self.model.forward_layer(layer_id, state, batch, self.pool)
        for seq, n in chunks:
            seq.num_cached += n
        return self.model.logits(state, batch)

    def generate(self, prompts: list[list[int]], num_tokens: int, page_size: int = 1) -> list[list[int]]:
        """Greedy: all prompts in one batch, then decoded together."""
        seqs = self.start(prompts, room=num_tokens, page_size=page_size)
        for _ in range(num_tokens):
            logits = self.forward([(seq, len(seq.tokens) - seq.num_cached) for seq in seqs])
            for seq, token in zip(seqs, logits.argmax(-1).tolist()):
                seq.tokens.append(token)
        return [seq.tokens[len(prompt) :] for seq, prompt in zip(seqs, prompts)]
