"""Texts to ids: always those of the tokenizer's own encode, however they were found."""

from __future__ import annotations

import random
import sys
import threading

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from sglang.srt.managers.text_encoder import TextEncoder
from sglang.srt.utils.errors import RequestError
from sglang.srt.utils.tokenizer_parts import cut_tokens, longest_token
from support.tokenizers_by_hand import (
    ODD_TEXTS,
    SPECIAL,
    TEMPLATE,
    TOKENIZERS,
    byte_level_bpe,
    fast,
    odd_conversation,
)


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


def encode(encoder: TextEncoder, text: str, special: bool = True, namespace: str | None = "") -> list[int]:
    encoded = encoder.encode(text, add_special_tokens=special, namespace=namespace)
    assert encoded.ids.dtype == np.int32 and encoded.num_tokens == len(encoded.ids)
    return encoded.ids.tolist()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("special", [True, False])
def test_ids_of_odd_texts(tokenizer, special):
    encoder = TextEncoder(tokenizer)
    pairs = [a + b for a in ODD_TEXTS for b in ODD_TEXTS[:20]]
    for text in [*ODD_TEXTS, *pairs, " ".join(ODD_TEXTS)]:
        assert encode(encoder, text, special) == tokenizer.encode(text, add_special_tokens=special), repr(text)


def test_texts_of_ids(tokenizer):
    encoder = TextEncoder(tokenizer)
    for text in ODD_TEXTS:
        ids = tokenizer.encode(text)
        for skip in (True, False):
            expected = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert encoder.decode(ids, skip) == expected


@pytest.mark.parametrize("special", [True, False])
def test_spans_of_odd_texts(tokenizer, special):
    """They follow each other without a gap."""
    encoder = TextEncoder(tokenizer)
    for text in [*ODD_TEXTS, "plain" + SPECIAL[2] + " plain word", " ".join(ODD_TEXTS)]:
        ids = tokenizer.encode(text, add_special_tokens=special)
        spans = encoder.token_spans(text, special)
        assert len(spans) == len(ids)
        covered = 0
        for start, end in spans:
            assert 0 <= start <= covered <= end <= len(text)
            covered = end


def test_a_span_has_the_space_of_its_token_and_an_added_token_has_none(tokenizer):
    text = "plain word" + SPECIAL[2] + " a"
    ids = tokenizer.encode(text)
    spans = TextEncoder(tokenizer).token_spans(text, True)
    names = tokenizer.convert_ids_to_tokens(ids)
    assert names[0] not in (SPECIAL[0], "[CLS]") or spans[0] == (0, 0)
    at = names.index(SPECIAL[2])
    assert spans[at] == (10, 10 + len(SPECIAL[2]))
    assert spans[at + 1][0] == 10 + len(SPECIAL[2]) and spans[-1][1] == len(text)
    assert names[-1] != "[SEP]" or spans[-1] == (len(text), len(text))


def test_more_ids_than_wanted_are_only_counted(tokenizer):
    encoder = TextEncoder(tokenizer)
    for text in ("plain words", "<|im_start|>plain words<|im_end|>" * 60):
        count = len(tokenizer.encode(text))
        for limit, wanted in ((count, True), (count - 1, False)):
            encoded = encoder.encode(text, namespace="", max_tokens=limit)
            assert encoded.num_tokens == count and (encoded.ids is not None) == wanted


def test_a_file_that_truncates_and_pads_does_neither():
    tokenizer = byte_level_bpe()
    text = "the " * 40
    ids = tokenizer.encode(text)
    tokenizer.backend_tokenizer.enable_truncation(8)
    tokenizer.backend_tokenizer.enable_padding(length=500)
    assert encode(TextEncoder(tokenizer), text) == ids


def test_half_a_surrogate_pair_is_refused(tokenizer):
    with pytest.raises(RequestError, match="surrogate"):
        TextEncoder(tokenizer).encode("a\ud800b")


def test_a_slow_tokenizer_is_used_as_it_is():
    class Slow:
        chat_template = TEMPLATE

        def encode(self, text, add_special_tokens):
            return [1] * add_special_tokens + [ord(char) for char in text]

        def decode(self, ids, **_):
            return "".join(map(chr, ids))

    encoder = TextEncoder(Slow())
    assert encode(encoder, "ab") == [1, 97, 98] and encode(encoder, "ab", special=False) == [97, 98]
    assert encoder.encode("ab", max_tokens=2).ids is None
    assert encoder.min_tokens("a" * 10**6) == 0 and encoder.decode([97, 98], True) == "ab"


# Beside other threads


def test_other_threads_run_while_a_long_text_is_tokenised():
    """A thread that counts gets on between the start and the end of a call: the lock is not held throughout."""
    encoder = TextEncoder(byte_level_bpe())
    text = "one two " * 60_000
    stop = threading.Event()
    waiting = threading.Event()
    counts = [0]

    def count() -> None:
        waiting.set()
        while not stop.wait(0.0001):
            counts[0] += 1

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=count)
    thread.start()
    waiting.wait()
    sys.setswitchinterval(3600)  # only what lets go of the lock lets the other run
    counts[0] = 0
    try:
        # Again and again, as the other thread may get no core in between; it gets no lock unless a call lets go.
        assert any(encoder.encode(text).num_tokens > 0 and counts[0] > 0 for _ in range(60))
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()


# Reuse


def conversation(tokenizer, messages, final=True) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=final)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", range(6))
def test_conversations_of_odd_texts(tokenizer, seed):
    """Turn by turn and in two namespaces, over a table that is too small for them all."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    encoder = TextEncoder(tokenizer, reuse_bytes=rng.choice([0, 20_000, 1 << 20]))
    talks = [odd_conversation(rng) for _ in range(3)]
    for _ in range(30):
        messages = rng.choice(talks)
        size = rng.randint(1, len(messages))
        text = conversation(tokenizer, messages[:size], rng.random() < 0.8) + rng.choice(["", "", *ODD_TEXTS])
        special = rng.random() < 0.5
        encoded = encoder.encode(text, add_special_tokens=special, namespace=rng.choice(["", "b"]))
        assert encoded.ids.tolist() == tokenizer.encode(text, add_special_tokens=special)
        encoder._reuse.check_invariants()
        if rng.random() < 0.2:
            messages += odd_conversation(rng)[:2]


@pytest.fixture
def talk():
    return [{"role": "user", "content": f"turn {i} " + "the library opens at nine " * 20} for i in range(9)]


def test_the_tokens_of_earlier_turns_are_reused(tokenizer, talk):
    encoder = TextEncoder(tokenizer)
    first = encoder.encode(conversation(tokenizer, talk[:8]), namespace="")
    second = encoder.encode(conversation(tokenizer, talk), namespace="")
    assert first.reused == 0 and 0.7 * first.num_tokens < second.reused < first.num_tokens
    assert second.ids.tolist() == tokenizer.encode(conversation(tokenizer, talk))
    encoder.forget()
    assert encoder.encode(conversation(tokenizer, talk), namespace="").reused == 0


def test_namespaces_share_nothing(tokenizer, talk):
    encoder = TextEncoder(tokenizer)
    text = conversation(tokenizer, talk)
    assert encoder.encode(text, namespace="a").reused == 0
    assert encoder.encode(text, namespace="b").reused == 0
    assert encoder.encode(text, namespace=None).reused == 0
    assert encoder.encode(text, namespace="a").reused > 0


def test_a_text_of_nothing_but_cuts_has_few_segments():
    encoder = TextEncoder(byte_level_bpe())
    text = "<|im_start|>" * 100_000
    assert len(encoder._segments(text)) <= 2048 and "".join(encoder._segments(text)) == text
    assert encode(encoder, text, special=False) == [encoder._backend.token_to_id("<|im_start|>")] * 100_000


def bpe(**changes) -> Tokenizer:
    """A tokenizer that may be cut, but for what is changed."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], dropout=changes.pop("dropout", None)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    for name, value in changes.items():
        setattr(backend, name, value)
    return backend


def added(*names: str, **flags: bool) -> list[AddedToken]:
    return [AddedToken(name, **{"normalized": False, **flags}) for name in names]


INEXACT = {
    "random merges": (bpe(dropout=0.5), added(*SPECIAL)),
    "special tokens are text": (bpe(encode_special_tokens=True), added(*SPECIAL)),
    "a pre-tokenizer that is not known": (bpe(pre_tokenizer=pre_tokenizers.FixedLength(5)), added(*SPECIAL)),
    "a post-processor that is not known": (
        bpe(post_processor=processors.RobertaProcessing(("a", 1), ("b", 2))),
        added(*SPECIAL),
    ),
    "tokens that are normalized": (bpe(normalizer=normalizers.Lowercase()), added(*SPECIAL, normalized=True)),
    "tokens that swallow spaces before": (bpe(), added(*SPECIAL, lstrip=True)),
    "tokens that swallow spaces behind": (bpe(), added(*SPECIAL, rstrip=True)),
    "tokens that are words": (bpe(), added(*SPECIAL, single_word=True)),
    "tokens within longer ones": (bpe(), added(*SPECIAL, "x<|im_start|>", "<|im_end|>\n")),
    "tokens that others reach into": (bpe(), added(*SPECIAL, "x<|im_")),
}


@pytest.mark.parametrize("name", INEXACT)
def test_an_inexact_tokenizer_reuses_nothing(name, talk):
    backend, tokens = INEXACT[name]
    backend.add_special_tokens(tokens)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, split_special_tokens=backend.encode_special_tokens)
    tokenizer.chat_template = TEMPLATE
    encoder = TextEncoder(tokenizer)
    text = conversation(tokenizer, talk)
    assert encoder._segments(text) == [text]
    for _ in range(2):
        assert encoder.encode(text, namespace="").reused == 0
    assert not encoder._reuse.size_bytes


def test_a_part_in_python_proves_nothing():
    class Custom:
        def pre_tokenize(self, pretokenized) -> None: ...

    backend = bpe(pre_tokenizer=pre_tokenizers.PreTokenizer.custom(Custom()))
    backend.add_special_tokens(added(*SPECIAL))
    assert cut_tokens(backend, TEMPLATE) == () and longest_token(backend) is None


def test_only_the_templates_tokens_cut():
    backend = bpe()
    backend.add_special_tokens(added(*SPECIAL, "<|other|>", "word", "_x", " y"))
    assert cut_tokens(backend, TEMPLATE + " word _x y") == ("<|im_start|>", "<|im_end|>")
    assert TextEncoder(fast(bpe(), template=None))._cuts == ()
    assert set(TextEncoder(fast(bpe(), template={"default": "a", "other": TEMPLATE}))._cuts) == set(SPECIAL[1:])


# Bounds


def test_the_bound_holds(tokenizer):
    encoder = TextEncoder(tokenizer)
    vocabulary = list(tokenizer.get_vocab())
    rng = random.Random(3)
    texts = [*ODD_TEXTS, *("".join(rng.choices(vocabulary, k=50)) for _ in range(50))]
    texts += [piece * 40 for piece in rng.choices(vocabulary, k=20)]
    for text in texts:
        assert encoder.min_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False)), repr(text)


@pytest.mark.parametrize(
    "make, longest",
    [
        (TOKENIZERS["embedded"], len("<|begin_of_text|>")),
        (TOKENIZERS["llama_bpe"], len("<|begin_of_text|>")),
        (TOKENIZERS["metaspace_bpe"], len("<|begin_of_text|>")),
        (TOKENIZERS["byte_level_bpe"], None),  # NFC composes, and an added token swallows spaces
        (TOKENIZERS["unigram"], None),  # unknown characters become one token
        (TOKENIZERS["word_piece"], None),  # and unknown words
        (lambda: fast(bpe()), len("<|begin_of_text|>")),
        (lambda: fast(bpe(normalizer=normalizers.Strip())), None),
        (lambda: fast(bpe(normalizer=normalizers.Replace("  ", " "))), None),
        (lambda: fast(bpe(normalizer=normalizers.Replace("a", "bc"))), len("<|begin_of_text|>")),
        (lambda: fast(bpe(pre_tokenizer=pre_tokenizers.WhitespaceSplit())), None),
        (lambda: fast(bpe(pre_tokenizer=pre_tokenizers.Metaspace())), None),  # no bytes, no unknown token
        (lambda: fast(bpe(pre_tokenizer=pre_tokenizers.Split(" ", "removed"))), None),
        (lambda: fast(bpe(), special=added(*SPECIAL, rstrip=True)), None),
        (lambda: fast(bpe(), special=added("<" + "x" * 98 + ">")), 100),
    ],
)
def test_where_a_bound_is_proven(make, longest):
    encoder = TextEncoder(make())
    assert encoder._longest == longest
    assert encoder.min_tokens("a" * 1000) == (0 if longest is None else -(-1000 // longest))


def test_unknown_characters_bound_unless_they_fuse():
    def make(**settings):
        return fast(Tokenizer(models.BPE(vocab={"<unk>": 0, "a": 1}, merges=[], unk_token="<unk>", **settings)))

    assert TextEncoder(make())._longest == len("<|begin_of_text|>")
    assert TextEncoder(make(fuse_unk=True))._longest is None
    assert len(make(fuse_unk=True).encode("你" * 100)) == 1, "why there is no bound"
    assert TextEncoder(make(byte_fallback=True))._longest is None, "some bytes are not in the vocabulary"
