"""Small tokenizers of the usual kinds, built from their parts, and odd texts for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from sglang.srt.configs.embedded_model import ensure_embedded_model
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

SPECIAL = ["<|begin_of_text|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

ODD_TEXTS = [
    "",
    " ",
    "   \t\n\r\n \u00a0\u2003\u200b  ",
    "a",
    "plain words, and  two spaces",
    " leading",
    "trailing ",
    "e\u0301a\u0308\u0323o\u0323\u0308 \u1100\u1161\u11a8 \u0958",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫",
    "你好，世界。これはテスト 한국어",
    "مرحبا بالعالم \u202eabc\u202c",
    "\ufffd\ufffe\ue000\U0010ffff \ud7ff\uf8ff",
    "\\ud800 \\udfff",
    "a\0b\0\0",
    "<|im_start|>user\nhi<|im_end|>",
    "<|im_start|><|im_start|><|im_end|><|im_end|>",
    "<|im_start|> <|im_start|>  <|im_end|>\n<|im_end|>",
    "<|im_start<|im_start|>|><|im_end|",
    "<<|im_end|>>",
    "<|im_start|>" * 50,
    "x" * 5000,
    "one\r\ntwo\r\r\n\nthree\n",
    "１２３ ﬁ Ⅷ ㎏ ½ ǅ İ ß ẞ",
    "def f(x):\n\treturn x**2  # ✓\n",
    "<unk> <s> </s> [CLS] [UNK]",
    "\u2581 \u2581\u2581 a\u2581b",
]


def fast(backend: Tokenizer, template: str | None = TEMPLATE, special: list[AddedToken] | None = None) -> Any:
    backend.add_special_tokens(
        [AddedToken(text, normalized=False) for text in SPECIAL] if special is None else special
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = template
    return tokenizer


def _bos(backend: Tokenizer) -> processors.TemplateProcessing:
    backend.add_special_tokens([AddedToken(SPECIAL[0], normalized=False)])
    return processors.TemplateProcessing(
        single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], backend.token_to_id(SPECIAL[0]))]
    )


def embedded() -> Any:
    return get_tokenizer(str(ensure_embedded_model()))


def byte_level_bpe() -> Any:
    """As GPT-2, Llama 3 and Qwen: bytes as characters, a regular expression, NFC."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("Ġ", "a"), ("i", "n"), ("t", "h"), ("th", "e"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("x", "x"), ("xx", "xx")]
    vocab |= {a + b: len(vocab) + i for i, (a, b) in enumerate(merges)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\p{L}+|\s+|[^\s\p{L}\p{N}]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False),
        ]
    )
    backend.post_processor = processors.Sequence([processors.ByteLevel(), _bos(backend)])
    tokenizer = fast(backend)
    tokenizer.add_tokens(
        [AddedToken("normal İ", normalized=True, lstrip=True), AddedToken("plain", normalized=False)]
    )
    return tokenizer


def _sentencepiece_vocab() -> dict[str, int]:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for char in "\u2581abcdefghijklmnopqrstuvwxyzé你":
        vocab[char] = len(vocab)
    for piece in ("th", "the", "\u2581a", "\u2581\u2581"):
        vocab[piece] = len(vocab)
    return vocab


def llama_bpe() -> Any:
    """As Llama 2: a mark is put before every piece of text, spaces become marks, unknown characters bytes."""
    merges = [("t", "h"), ("th", "e"), ("\u2581", "a"), ("\u2581", "\u2581")]
    model = models.BPE(
        vocab=_sentencepiece_vocab(), merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.post_processor = _bos(backend)
    return fast(backend)


def metaspace_bpe() -> Any:
    """As Mistral and newer Llama 2: the mark stands before the text's first piece alone."""
    merges = [("t", "h"), ("th", "e"), ("\u2581", "a"), ("\u2581", "\u2581")]
    model = models.BPE(
        vocab=_sentencepiece_vocab(), merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.post_processor = _bos(backend)
    return fast(backend)


def unigram() -> Any:
    pieces = [("<unk>", 0.0), ("\u2581", -2.0), ("\u2581the", -3.0), ("a", -4.0), ("an", -4.5), ("n", -5.0)]
    backend = Tokenizer(models.Unigram(pieces + [(char, -6.0) for char in "bcdeimostu<|>_"], unk_id=0))
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return fast(backend)


def word_piece() -> Any:
    vocab = {
        word: i for i, word in enumerate(["[UNK]", "[CLS]", "[SEP]", "plain", "##s", "word", "a", ",", "<", "|"])
    }
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return fast(backend)


TOKENIZERS: dict[str, Callable[[], Any]] = {
    f.__name__: f for f in (embedded, byte_level_bpe, llama_bpe, metaspace_bpe, unigram, word_piece)
}


def odd_conversation(rng: random.Random) -> list[dict[str, str]]:
    """Messages of odd texts, joined, cut in two, and now and then long."""

    def content() -> str:
        text = "".join(rng.choice(ODD_TEXTS)[: rng.randint(1, 400)] for _ in range(rng.randint(1, 6)))
        return text[rng.randint(0, 3) :]

    return [
        {"role": rng.choice(["user", "assistant", "plain"]), "content": content()} for _ in range(rng.randint(1, 8))
    ]
