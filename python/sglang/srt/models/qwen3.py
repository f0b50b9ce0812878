"""Qwen3, dense or of experts: Llama with normalised queries and keys."""

from __future__ import annotations

from sglang.srt.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    qk_norm = True
