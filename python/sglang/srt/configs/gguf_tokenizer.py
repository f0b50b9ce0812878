"""The tokenizer in a GGUF file's metadata as Hugging Face's `tokenizer.json` and `tokenizer_config.json`.

Owns the table of pre-tokenizers. A pre-tokenizer that is not in it is refused: a wrong one would give other tokens
than the model was trained with, and worse answers without an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
# Control tokens that end an answer, of which a file names one or two. Configs of Llama 3 and Qwen have all of theirs.
_ENDS = frozenset(("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|endoftext|>", "<|im_end|>"))
_REMEDY = "give its tokenizer as a directory with --tokenizer-path"


def _words(digits: str) -> str:
    """The pattern that Llama 3, Qwen 2 and others share: contractions, words, digits, punctuation, space."""
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# Upper and lower case apart, contractions not.
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _PreTokenizer:
    """pattern: cuts the text, before bytes are mapped to characters. Without one GPT-2's pattern cuts it."""

    pattern: str | None = None
    # Each digit alone, before anything else is cut.
    single_digits: bool = False
    # A whole piece that is a token is taken as it is.
    ignore_merges: bool = False
    # Unless the file states it.
    adds_bos: bool = False
    normalizes: bool = False

    def build(self) -> Any:
        if self.pattern is not None:
            split = pre_tokenizers.Split(Regex(self.pattern), "isolated")
            return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if not self.single_digits:
            return bytes_of_words
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_of_words])


_GPT2 = _PreTokenizer()
_DIGITS = _PreTokenizer(single_digits=True)
_LLAMA3 = _PreTokenizer(_words("{1,3}"), ignore_merges=True, adds_bos=True)
_QWEN2 = _PreTokenizer(_words(""), normalizes=True)
# Values of tokenizer.ggml.pre, as llama.cpp's converter writes them.
_PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _PreTokenizer(_TEKKEN, ignore_merges=True, adds_bos=True),
}


class UnknownTokenizerError(ValueError):
    """The file's tokenizer cannot be rebuilt; the message has the reason and the remedy."""


class Metadata(Protocol):
    def get(self, key: str, default: Any = None) -> Any: ...


@dataclass(frozen=True)
class SpecialIds:
    """of_config: bos_token_id and eos_token_id, for config.json. eos_ids: every token that ends an answer."""

    of_config: dict[str, int]
    eos_ids: list[int]

    @classmethod
    def of(cls, metadata: Metadata) -> SpecialIds:
        """Raises ValueError if one is no number."""
        ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot")}
        for name, at in ids.items():
            if at is not None and not isinstance(at, int):
                raise ValueError(f"{name}_token_id is {at!r}")
        of_config = {f"{name}_token_id": ids[name] for name in ("bos", "eos") if ids[name] is not None}
        tokens, kinds = (metadata.get(f"tokenizer.ggml.{key}") or [] for key in ("tokens", "token_type"))
        known = {at for at, (token, kind) in enumerate(zip(tokens, kinds)) if kind == _CONTROL and token in _ENDS}
        return cls(of_config, sorted(known.union(at for at in (ids["eos"], ids["eot"]) if at is not None)))


@dataclass(frozen=True)
class GGUFTokenizer:
    """config: of tokenizer_config.json."""

    config: dict[str, Any]
    _tokenizer: Tokenizer

    def save(self, file: Path) -> None:
        self._tokenizer.save(str(file))

    @classmethod
    def of(cls, metadata: Metadata) -> GGUFTokenizer:
        """Raises UnknownTokenizerError."""

        def get(key: str, default: Any = None) -> Any:
            return metadata.get(f"tokenizer.ggml.{key}", default)

        model, tokens = get("model"), get("tokens")
        if not tokens:
            raise UnknownTokenizerError(f"it holds no tokenizer; {_REMEDY}.")
        kinds = get("token_type") or [1] * len(tokens)
        ids = {name: get(f"{name}_token_id") for name in ("bos", "eos", "eot", "unknown", "padding")}
        named = {name: tokens[at] for name, at in ids.items() if at is not None and at < len(tokens)}
        try:
            if model == "gpt2":
                tokenizer, adds_bos = _byte_level(tokens, get("merges") or [], get("pre"))
            elif model == "llama":
                scores = dict(zip(tokens, get("scores") or []))
                if len(scores) < len(set(tokens)):
                    raise UnknownTokenizerError(f"its tokenizer lacks the scores of tokens; {_REMEDY}.")
                tokenizer, adds_bos = (
                    _sentence_piece(tokens, kinds, scores, bool(get("add_space_prefix", True))),
                    True,
                )
            else:
                raise UnknownTokenizerError(f"its tokenizer is of the kind {model!r}, which is not known; {_REMEDY}.")
        except UnknownTokenizerError:
            raise
        except Exception as e:  # the library raises plain Exceptions
            raise UnknownTokenizerError(f"its tokenizer does not fit together ({e}); {_REMEDY}.") from e
        added = [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, kinds)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
        tokenizer.add_tokens(added)
        _add_ends(tokenizer, named, bool(get("add_bos_token", adds_bos)), bool(get("add_eos_token", False)))
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        for name, field in (
            ("bos", "bos_token"),
            ("eos", "eos_token"),
            ("unknown", "unk_token"),
            ("padding", "pad_token"),
        ):
            if name in named:
                config[field] = named[name]
        template = metadata.get("tokenizer.chat_template")
        if template and not isinstance(template, str):
            raise UnknownTokenizerError(f"its chat template is no text; {_REMEDY}.")
        if template:
            config["chat_template"] = template
        return cls(config, tokenizer)


def _byte_level(tokens: Sequence[str], merges: Sequence[str], pre: str | None) -> tuple[Tokenizer, bool]:
    kind = _PRE_TOKENIZERS.get(pre or "")
    if kind is None:
        raise UnknownTokenizerError(
            f"its tokenizer cuts words by the rules of {pre!r}, which are unknown; {_REMEDY}."
        )
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    vocabulary = {token: at for at, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=kind.ignore_merges))  # type: ignore[arg-type]
    if kind.normalizes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = kind.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, kind.adds_bos


def _sentence_piece(
    tokens: Sequence[str], kinds: Sequence[int], scores: dict[str, float], adds_space: bool
) -> Tokenizer:
    """Sentencepiece's BPE. Its order of merges follows from the scores. adds_space: in front of a text."""
    from transformers.tokenization_utils_base import generate_merges

    vocabulary = {token: at for at, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, kinds) if kind == _UNKNOWN), None)
    whole = [token for token, kind in zip(tokens, kinds) if kind in (_UNKNOWN, _CONTROL, _BYTE)]
    merges = generate_merges(vocabulary, scores, skip_tokens=whole)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    space = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if adds_space else space
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)
    return tokenizer


def _add_ends(tokenizer: Tokenizer, named: Mapping[str, str], adds_bos: bool, adds_eos: bool) -> None:
    before = [named["bos"]] if adds_bos and "bos" in named else []
    behind = [named["eos"]] if adds_eos and "eos" in named else []
    if before or behind:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *behind],
            pair=[*before, "$A", *behind, *(f"{token}:1" for token in before), "$B:1", *(f"{t}:1" for t in behind)],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in {*before, *behind}],
        )
