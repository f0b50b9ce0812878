"""Single tokens: their bytes are exact and join to the text, whatever the tokenizer's kind."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sglang.srt.utils.token_texts import TokenTexts

TEXT = "Grüße aus Köln, 你好世界! 🎉 наука\n\tend  ."


def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def byte_fallback() -> PreTrainedTokenizerFast:
    vocab = {"<s>": 0, "<unk>": 1} | {f"<0x{i:02X}>": i + 2 for i in range(256)} | {"▁cat": 258, "▁": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


def test_bytes_of_a_byte_level_tokenizers_tokens_join_to_the_text():
    tokenizer = byte_level()
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(TEXT)
    assert b"".join(texts.data(token) for token in ids).decode() == TEXT
    part = next(token for token in ids if texts.text(token) == "\ufffd")
    assert len(texts.data(part)) >= 1 and texts.data(part) in TEXT.encode()


def test_bytes_and_spaces_of_sentencepieces_tokens():
    texts = TokenTexts(byte_fallback())
    assert [texts.data(token) for token in (0xC3 + 2, 0xA9 + 2, 258, 259)] == [b"\xc3", b"\xa9", b" cat", b" "]
    assert texts.text(258) == " cat" and texts.text(0xC3 + 2) == "\ufffd"


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_special_tokens_and_ids_that_no_word_has(make):
    texts = TokenTexts(make())
    assert texts.text(0) == "<s>" and texts.is_special(0) and not texts.is_special(5)
    assert texts.text(100_000) == "" and texts.data(100_000) == b""


def test_a_tokenizer_of_another_kind_is_asked_itself():
    words = Tokenizer(models.WordPiece({"un": 0, "##do": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    texts = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=words))
    assert texts.text(0) == "un" and texts.data(1)
