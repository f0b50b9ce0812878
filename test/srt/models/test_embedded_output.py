"""What the embedded model says: the same as in transformers, and fit to be compared."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang.srt.configs.embedded_model import ensure_embedded_model
from sglang.srt.configs.model_config import ModelConfig
from support.tiny_runner import TinyRunner

TEXTS = ("Hello world", "The old man went to the sea", "The old man went to the lake", "def main():\n", "1 2 3")


def test_output_equals_transformers_and_is_worth_comparing(tmp_path):
    path = ensure_embedded_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    theirs = AutoModelForCausalLM.from_pretrained(path)
    assert theirs.dtype == torch.float32
    runner = TinyRunner(ModelConfig.from_pretrained(str(path)))
    num_tokens = 96
    prompts = [tokenizer.encode(text) for text in TEXTS]
    # A prompt as chat and tests with long prefixes send it.
    prompts.append((prompts[1] + prompts[2] + prompts[3]) * 12)
    got = runner.generate(prompts, num_tokens)
    for prompt, mine in zip(prompts, got):
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + mine])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2).values
        assert mine == logits.argmax(-1).tolist(), f"prompt {tokenizer.decode(prompt)[:40]!r}"
        gaps = (best[:, 0] - best[:, 1]).sort().values
        # Float32 noise is near 1e-5: a different batch shape must not flip a token.
        assert gaps[0] > 1e-4 and gaps[len(gaps) // 2] > 0.2
        assert len(set(mine)) > num_tokens * 0.6, "the output repeats itself"
        assert tokenizer.eos_token_id not in mine[:32]
        assert "\ufffd" not in tokenizer.decode(mine)
    assert len({tuple(tokens[4:]) for tokens in got}) == len(got), "the output does not depend on the prompt"
    assert sum(a != b for a, b in zip(got[1], got[2])) > num_tokens * 0.9
