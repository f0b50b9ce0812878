"""Text in pieces equals text in one piece: characters, stop strings and counts across chunk borders."""

from __future__ import annotations

import random

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sglang.srt.managers.detokenizer_manager import DetokenizerManager, IncrementalDecoder, StopMatcher
from sglang.srt.managers.io_struct import (
    BatchStrOutput,
    BatchTokenIDOutput,
    DetokenizeReq,
    FinishReason,
    SchedulerReady,
    StrOutput,
    TokenOutput,
    bytes_to_ids,
    ids_to_bytes,
)
from sglang.srt.sampling.logprob_types import TokenLogprob

TEXT = "Grüße aus Köln, 你好世界! 🎉👩‍👩‍👧 наука wörter stop here END of it. "


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Like sentencepiece: words begin with a mark that is a space, bytes are tokens of their own."""
    vocab = {"<s>": 0, "</s>": 1} | {f"<0x{i:02X}>": i + 2 for i in range(256)}
    for word in ("▁the", "▁cat", "s", "▁", "."):
        vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()


def decode_with(tokenizer):
    return lambda ids, skip: tokenizer.decode(list(ids), skip_special_tokens=skip)


def random_pieces(rng: random.Random, ids: list[int], longest: int) -> list[list[int]]:
    pieces = []
    while ids:
        size = rng.randint(0, longest)
        pieces.append(ids[:size])
        ids = ids[size:]
    return pieces


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_pieces_of_random_ids_concatenate_to_the_whole_decode(seed, skip):
    rng = random.Random(seed)
    size = BYTE_LEVEL.get_vocab_size()
    ids = [rng.randrange(size) for _ in range(rng.choice([1, 5, 80, 400]))]
    decode = decode_with(BYTE_LEVEL)
    decoder = IncrementalDecoder(decode, skip)
    text = "".join(decoder.push(piece) for piece in random_pieces(rng, ids, rng.choice([1, 2, 7, 60])))
    text += decoder.push([], final=True)
    assert text == decode(ids, skip), f"seed {seed}"


@pytest.mark.parametrize("seed", range(6))
def test_only_bytes_that_are_no_text(seed):
    """Continuation bytes alone, the longest possible run of replacement marks."""
    rng = random.Random(seed)
    bytes_ids = [BYTE_LEVEL.token_to_id(c) for c in "ĢģĤàð"]
    ids = [rng.choice([i for i in bytes_ids if i is not None]) for _ in range(300)]
    decode = decode_with(BYTE_LEVEL)
    decoder = IncrementalDecoder(decode)
    text = "".join(decoder.push([i]) for i in ids) + decoder.push([], final=True)
    assert text == decode(ids, True)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
def test_characters_never_break(tokenizer, size):
    data = ("the 你好 🎉é" * 30).encode()
    if tokenizer is BYTE_FALLBACK:
        ids = [tokenizer.token_to_id(f"<0x{b:02X}>") for b in data]
    else:
        ids = tokenizer.encode(data.decode()).ids
    decoder = IncrementalDecoder(decode_with(tokenizer))
    pieces = [decoder.push(ids[i : i + size]) for i in range(0, len(ids), size)] + [decoder.push([], final=True)]
    assert "".join(pieces) == data.decode()
    assert not any("\ufffd" in piece for piece in pieces)


def test_the_space_of_the_first_word_depends_on_the_prompt():
    word = BYTE_FALLBACK.token_to_id("▁cat")
    the = BYTE_FALLBACK.token_to_id("▁the")
    decode = decode_with(BYTE_FALLBACK)
    assert IncrementalDecoder(decode).push([word]) == "cat"
    assert IncrementalDecoder(decode, prompt_tail=[the]).push([word]) == " cat"
    long = IncrementalDecoder(decode, prompt_tail=[the])
    assert "".join(long.push([word]) for _ in range(100)) == " cat" * 100


def test_a_prompt_that_ends_within_a_character():
    half, rest = BYTE_FALLBACK.token_to_id("<0xC3>"), BYTE_FALLBACK.token_to_id("<0xA9>")
    decoder = IncrementalDecoder(decode_with(BYTE_FALLBACK), prompt_tail=[half])
    assert decoder.push([rest], final=True) == "\ufffd"


def test_cost_is_linear():
    calls = []

    def decode(ids, skip):
        calls.append(len(ids))
        return BYTE_LEVEL.decode(list(ids), skip_special_tokens=skip)

    rng = random.Random(0)
    decoder = IncrementalDecoder(decode)
    for _ in range(5000):
        decoder.push([rng.randrange(2, 320)])
    assert sum(calls) < 5000 * 80
    assert max(calls) <= 2 * IncrementalDecoder.MAX_WINDOW + IncrementalDecoder.PIECE


def reference_stop(text: str, stop: tuple[str, ...], keep: bool) -> tuple[str, str | None]:
    """Character by character: what a reader with infinite patience does."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stop if text[:end].endswith(s)]
        if hits:
            longest = max(hits, key=len)
            return (text[:end] if keep else text[: end - len(longest)]), longest
    return text, None


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_stop_strings_do_not_depend_on_the_pieces(seed, keep):
    rng = random.Random(seed)
    text = "".join(rng.choice("ab") for _ in range(60))
    stop = tuple("".join(rng.choice("ab") for _ in range(rng.randint(3, 9))) for _ in range(rng.randint(1, 3)))
    matcher, got, at = StopMatcher(stop, keep), "", 0
    while at < len(text) and matcher.matched is None:
        size = rng.randint(0, 7)
        got += matcher.push(text[at : at + size])
        at += size
    if matcher.matched is None:
        got += matcher.push("", final=True)
    assert (got, matcher.matched) == reference_stop(text, stop, keep), f"seed {seed}"


def test_what_may_become_a_stop_string_is_held_back():
    matcher = StopMatcher(("STOP",))
    assert matcher.push("say ST") == "say "
    assert matcher.push("ART") == "START"
    assert matcher.push(" S") == " "
    assert matcher.push("", final=True) == "S"


def output(ids, reason=None, total=None, rid="r"):
    return TokenOutput(
        rid=rid,
        output_ids=ids_to_bytes(ids),
        finish_reason=reason,
        prompt_tokens=3,
        completion_tokens=len(ids) if total is None else total,
        cached_tokens=1,
        cached_tokens_details={"device": 1},
    )


def run(manager: DetokenizerManager, *outputs: TokenOutput) -> list[StrOutput]:
    result = []
    for each in outputs:
        answer = manager.handle(BatchTokenIDOutput(outputs=[each]))
        if isinstance(answer, BatchStrOutput):
            result += answer.outputs
    return result


def test_usage_counts_to_the_token_that_completes_the_stop_string():
    ids = BYTE_LEVEL.encode("abcdefgh").ids
    assert len(ids) == 8
    manager = DetokenizerManager(decode_with(BYTE_LEVEL))
    manager.handle(DetokenizeReq(rid="r", stop=("de",)))
    first, second = run(manager, output(ids[:2]), output(ids[2:], total=8), output([5], total=9))
    assert first.text + second.text == "abc"
    assert second.finish_reason == FinishReason(type="stop", matched="de")
    assert second.completion_tokens == 5
    assert bytes_to_ids(second.output_ids).tolist() == ids[2:5]
    assert (second.prompt_tokens, second.cached_tokens, second.cached_tokens_details) == (3, 1, {"device": 1})


def test_logprobs_stand_beside_their_tokens_and_end_with_the_stop_string():
    ids = BYTE_LEVEL.encode("abcdefgh").ids
    entries = [TokenLogprob(token, -0.1 * i) for i, token in enumerate(ids)]
    prompt = [TokenLogprob(3, None)]
    manager = DetokenizerManager(decode_with(BYTE_LEVEL))
    manager.handle(DetokenizeReq(rid="r", stop=("de",)))
    pieces = (
        msgspec.structs.replace(output(ids[:4]), logprobs=entries[:4], prompt_logprobs=prompt),
        msgspec.structs.replace(output(ids[4:], total=8), logprobs=entries[4:]),
    )
    first, second = run(manager, *pieces)
    assert first.logprobs == entries[:4] and first.prompt_logprobs == prompt
    assert second.logprobs == entries[4:5] and second.prompt_logprobs == []


def test_no_stop_trim_keeps_the_stop_string():
    ids = BYTE_LEVEL.encode("abcdefgh").ids
    manager = DetokenizerManager(decode_with(BYTE_LEVEL))
    manager.handle(DetokenizeReq(rid="r", stop=("de",), no_stop_trim=True))
    assert "".join(o.text for o in run(manager, output(ids))) == "abcde"


@pytest.mark.parametrize("keep, text", [(False, "ab"), (True, "abc")])
def test_the_stop_token_is_counted_but_is_not_text(keep, text):
    ids = BYTE_LEVEL.encode("abc").ids
    manager = DetokenizerManager(decode_with(BYTE_LEVEL))
    manager.handle(DetokenizeReq(rid="r", no_stop_trim=keep))
    (result,) = run(manager, output(ids, FinishReason(type="stop", matched=ids[-1])))
    assert result.text == text
    assert result.completion_tokens == 3
    assert bytes_to_ids(result.output_ids).tolist() == ids


def test_held_back_text_comes_with_the_end():
    ids = BYTE_LEVEL.encode("ends with ST").ids
    manager = DetokenizerManager(decode_with(BYTE_LEVEL))
    manager.handle(DetokenizeReq(rid="r", stop=("STOP",)))
    results = run(manager, *(output([i]) for i in ids), output([], FinishReason(type="length", length=len(ids))))
    assert "".join(r.text for r in results) == "ends with ST"
    assert "".join(r.text for r in results[:-1]) == "ends with "


def test_a_last_output_of_many_tokens_breaks_no_character_where_stop_strings_are_searched_for():
    ids = [BYTE_FALLBACK.token_to_id(f"<0x{b:02X}>") for b in "é🎉ST".encode()]
    manager = DetokenizerManager(decode_with(BYTE_FALLBACK))
    manager.handle(DetokenizeReq(rid="r", stop=("STOP",)))
    (result,) = run(manager, output(ids, FinishReason(type="length", length=len(ids))))
    assert result.text == "é🎉ST"


def test_aborts_of_unknown_requests_pass_and_their_tokens_do_not():
    manager = DetokenizerManager(decode_with(BYTE_LEVEL))
    assert run(manager, output([5])) == []
    (result,) = run(manager, output([], FinishReason(type="abort", message="gone")))
    assert result.finish_reason is not None and result.finish_reason.message == "gone"


def test_other_messages_pass_through():
    ready = SchedulerReady(max_total_num_tokens=1, max_req_input_len=1)
    assert DetokenizerManager(decode_with(BYTE_LEVEL)).handle(ready) is ready


@pytest.mark.parametrize("seed", range(4))
def test_many_requests_at_once(seed):
    rng = random.Random(seed)
    manager = DetokenizerManager(decode_with(BYTE_LEVEL))
    ids = {f"r{i}": [rng.randrange(2, 320) for _ in range(rng.randint(1, 90))] for i in range(12)}
    left = {rid: list(all_ids) for rid, all_ids in ids.items()}
    text = dict.fromkeys(ids, "")
    for rid in ids:
        manager.handle(DetokenizeReq(rid=rid))
    while left:
        outputs = []
        for rid in rng.sample(sorted(left), rng.randint(1, len(left))):
            size = rng.randint(1, 5)
            piece, left[rid] = left[rid][:size], left[rid][size:]
            outputs.append(output(piece, None if left[rid] else FinishReason(type="length"), rid=rid))
            if not left[rid]:
                del left[rid]
        answer = manager.handle(BatchTokenIDOutput(outputs=outputs))
        assert isinstance(answer, BatchStrOutput)
        for each in answer.outputs:
            text[each.rid] += each.text
    assert text == {rid: BYTE_LEVEL.decode(all_ids) for rid, all_ids in ids.items()}
    assert not manager._requests
