"""What a fast tokenizer's parts prove about its texts. Pure: reads the parts, tokenises nothing.

A part that is not known here proves nothing, so that an unknown tokenizer is always used whole.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from typing import Any

from tokenizers import models

# Each works on one piece of the text, without regard to the pieces around it. Metaspace asks whether its piece begins
# the text: a piece that follows an added token never does, in the whole text and in its end alone.
_LOCAL_NORMALIZERS = frozenset(
    {
        *("BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend"),
        *("Replace", "Strip", "StripAccents"),
    }
)
_LOCAL_PRE_TOKENIZERS = frozenset(
    {
        *("BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "Metaspace", "Punctuation", "Split"),
        *("UnicodeScripts", "Whitespace", "WhitespaceSplit"),
    }
)
_DETERMINISTIC_MODELS = (models.BPE, models.Unigram, models.WordLevel, models.WordPiece)
# No tokens of normal text touch a cut that begins with such a character: it is neither of a word nor whitespace.
_FIRST_OF_CUT = frozenset(string.punctuation) - {"_"}


def longest_token(backend: Any) -> int | None:
    """The most characters of a text that one token can stand for. None where no such number can be proven: a
    normalizer shortens the text, a pre-tokenizer or an added token swallows some of it, or unknown characters vanish
    or become one token."""
    model = backend.model
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    splits = list(_steps(backend.pre_tokenizer))
    if not all(map(_lengthens, _steps(backend.normalizer))) or not all(map(_keeps_all, splits)):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if any(step["type"] == "ByteLevel" for step in splits):
        covered = all(model.token_to_id(char) is not None for char in _byte_level_alphabet())
    elif model.byte_fallback:
        covered = all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    else:
        covered = model.unk_token is not None and not model.fuse_unk
    added = list(backend.get_added_tokens_decoder().values())
    if not covered or any(token.lstrip or token.rstrip for token in added):
        return None
    pieces = [*vocabulary]
    if backend.normalizer is not None:
        pieces += [backend.normalizer.normalize_str(token.content) for token in added if token.normalized]
    return max(map(len, pieces), default=None)


def cut_tokens(backend: Any, candidates: str) -> tuple[str, ...]:
    """Added tokens at which a text may be cut: the ids of a text are those of its part before such a token, followed
    by those of its part from this token on, both without the post-processor's ids. Only tokens whose text occurs in
    candidates. None of them where the tokenizer is not known to be so."""
    model = backend.model
    if (
        not isinstance(model, _DETERMINISTIC_MODELS)
        or any(getattr(model, name, None) for name in ("dropout", "alpha", "nbest_size"))
        or backend.encode_special_tokens
        or not all(step["type"] in _LOCAL_NORMALIZERS for step in _steps(backend.normalizer))
        or not all(step["type"] in _LOCAL_PRE_TOKENIZERS for step in _steps(backend.pre_tokenizer))
    ):
        return ()
    # Tokens that are not normalized are found first, in the raw text, from left to right, the longest at each place.
    added = [token for token in backend.get_added_tokens_decoder().values() if not token.normalized]
    return tuple(
        token.content
        for token in added
        if not (token.lstrip or token.rstrip or token.single_word)
        and token.content in candidates
        and token.content[:1] in _FIRST_OF_CUT
        and not any(_may_cover(other.content, token.content) for other in added)
    )


def _may_cover(other: str, cut: str) -> bool:
    """Whether the tokenizer may find other where cut's text begins, or reaching into it."""
    return (other != cut and cut in other) or any(other.endswith(cut[:size]) for size in range(1, len(cut)))


def ids_around(backend: Any) -> tuple[list[int], list[int]] | None:
    """What the post-processor puts before and behind any text's ids. None where this is not known."""
    before: list[int] = []
    behind: list[int] = []
    for step in _steps(backend.post_processor):
        if step["type"] == "ByteLevel":  # changes offsets alone
            continue
        if step["type"] != "TemplateProcessing":
            return None
        parts = [next(iter(part.items())) for part in step["single"]]
        texts = [at for at, (kind, _) in enumerate(parts) if kind == "Sequence"]
        if len(texts) != 1:
            return None

        def ids(
            parts: list[tuple[str, dict[str, Any]]], special: dict[str, Any] = step["special_tokens"]
        ) -> list[int]:
            return [token for _, part in parts for token in special[part["id"]]["ids"]]

        before = ids(parts[: texts[0]]) + before
        behind = behind + ids(parts[texts[0] + 1 :])
    return before, behind


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """A normalizer, pre-tokenizer or post-processor as its steps in order. One written in Python is unknown."""
    if part is None:
        return
    try:
        content = json.loads(part.__getstate__())
    except Exception:  # the library raises plain Exceptions
        yield {"type": "unknown"}
        return
    yield from _flat(content)


def _flat(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if step["type"] != "Sequence":
        yield step
        return
    for name in ("normalizers", "pretokenizers", "processors"):
        for inner in step.get(name, ()):
            yield from _flat(inner)


def _lengthens(normalizer: dict[str, Any]) -> bool:
    """Whether a text has never fewer characters behind this normalizer."""
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return pattern is not None and len(normalizer["content"]) >= len(pattern)
    return normalizer["type"] == "Prepend"


def _keeps_all(pre_tokenizer: dict[str, Any]) -> bool:
    """Whether every character of a text is still in one of the pieces."""
    if pre_tokenizer["type"] in ("Split", "Punctuation"):
        return pre_tokenizer["behavior"] != "Removed"
    return pre_tokenizer["type"] in ("ByteLevel", "Digits", "Metaspace")


def _byte_level_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel.alphabet()
