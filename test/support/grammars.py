"""A vocabulary of 97 tokens for tiny models, and the plain way to follow a grammar: a list of all its texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang.srt.sampling.sampling_params import GrammarSpec

VOCAB_SIZE = 97
EOS = 2
# Token id -> its text; ids without a text are special.
TEXTS = ["", "", "", *map(chr, range(ord(" "), ord("z") + 1)), "ab", "abc"]
assert len(TEXTS) < VOCAB_SIZE


def write_vocabulary(path: Path) -> Path:
    import xgrammar

    padded = TEXTS + [""] * (VOCAB_SIZE - len(TEXTS))
    info = xgrammar.TokenizerInfo(padded, xgrammar.VocabType.RAW, vocab_size=VOCAB_SIZE, stop_token_ids=[EOS])
    path.write_text(info.serialize_json())
    return path


def text_of(tokens: Sequence[int]) -> str:
    return "".join(TEXTS[token] for token in tokens)


@dataclass(frozen=True)
class Language:
    """A grammar with few texts."""

    grammar: GrammarSpec
    texts: frozenset[str]

    @classmethod
    def of(cls, *texts: str) -> Language:
        rules = " | ".join(f'"{text}"' for text in texts)
        return cls(GrammarSpec("ebnf", f"root ::= {rules}"), frozenset(texts))

    def allowed(self, generated: Sequence[int]) -> set[int]:
        text = text_of(generated)
        tokens = {
            token
            for token, more in enumerate(TEXTS)
            if more and any(each.startswith(text + more) for each in self.texts)
        }
        return tokens | ({EOS} if text in self.texts else set())

    def shape(self, logits: torch.Tensor, generated: Sequence[int]) -> torch.Tensor:
        """logits: (VOCAB_SIZE,), of the token behind those that were generated."""
        masked = torch.full_like(logits, -torch.inf)
        allowed = sorted(self.allowed(generated))
        masked[allowed] = logits[allowed]
        return masked
