"""Datasets: equal seeds give equal requests, what should share a prefix does, and lengths are as asked for."""

from __future__ import annotations

import gzip
import itertools
import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers

from sglang.serving_benchmark.arguments import parse
from sglang.serving_benchmark.datasets.errors import DatasetError
from sglang.serving_benchmark.datasets.registry import DATASETS
from sglang.serving_benchmark.datasets.traces import fitting_scale
from sglang.serving_benchmark.vocabulary import Vocabulary, VocabularyError
from sglang.serving_benchmark.workload import Limits, Message, Session, Turn, Workload, first_requests, fit, made_up

SALT = 5


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.load("embedded")


@pytest.fixture(scope="module")
def sharegpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "sharegpt.json"
    talks = [[f"Which is question number {i} of all?", f"It is answer {i}, I think."] for i in range(20)]
    talks += [["alone"], ["", "empty"]]
    path.write_text(json.dumps([{"conversations": [{"value": text} for text in talk]} for talk in talks]))
    return path


def flags(name: str, sharegpt: Path, *more: str) -> Namespace:
    path = ["--dataset-path", str(sharegpt)] if name == "sharegpt" else []
    groups = ["--gsp-num-groups", "4", "--gsp-prompts-per-group", "5"]
    return parse(["--dataset-name", name, "--num-prompts", "40", *path, *groups, *more])


def ids_of(workload: Workload, vocabulary: Vocabulary, salt: int = SALT) -> list[list[list[int]]]:
    """Per session, per turn."""
    return [
        [
            [
                *(session.context.ids_in(vocabulary, salt) if session.context and not t else []),
                *turn.message.ids_in(vocabulary, salt),
            ]
            for t, turn in enumerate(session.turns)
        ]
        for session in workload.sessions
    ]


def shared(a: list[int], b: list[int]) -> int:
    """Leading ids in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("name", DATASETS)
def test_a_seed_gives_the_same_requests_again(name: str, sharegpt: Path, vocabulary: Vocabulary) -> None:
    small = ("--scale-lengths", "0.01") if DATASETS[name].is_trace else ()
    build = DATASETS[name].build
    first = build(flags(name, sharegpt, "--seed", "3", *small), vocabulary)
    print("seed 3:", first.num_requests, "requests")
    again = build(flags(name, sharegpt, "--seed", "3", *small), vocabulary)
    other = build(flags(name, sharegpt, "--seed", "4", *small), vocabulary)
    assert first == again and ids_of(first, vocabulary) == ids_of(again, vocabulary)
    if not DATASETS[name].is_trace:
        assert first != other
    if DATASETS[name].is_made_up:
        assert ids_of(first, vocabulary) != ids_of(first, vocabulary, SALT + 1)


@pytest.mark.parametrize("name", [name for name in DATASETS if name != "sharegpt"])
def test_a_made_up_text_has_as_many_tokens_as_it_tells(name: str, sharegpt: Path, vocabulary: Vocabulary) -> None:
    small = ("--scale-lengths", "0.01") if DATASETS[name].is_trace else ()
    workload = DATASETS[name].build(flags(name, sharegpt, *small), vocabulary)
    for session in workload.sessions[:5]:
        for turn in session.turns[:3]:
            ids = turn.message.ids_in(vocabulary, SALT)
            assert len(ids) == turn.message.num_tokens >= 1 and turn.output_len >= 1
            assert vocabulary.encode(turn.message.text_in(vocabulary, SALT)) == ids


def test_random_prompts_share_nothing(sharegpt: Path, vocabulary: Vocabulary) -> None:
    args = flags("random", sharegpt, "--random-input-len", "90", "--random-range-ratio", "0.5")
    prompts = [turns[0] for turns in ids_of(DATASETS["random"].build(args, vocabulary), vocabulary)]
    assert all(44 <= len(prompt) <= 89 for prompt in prompts)  # a token less: the server puts one before
    assert len({tuple(prompt[:4]) for prompt in prompts}) == len(prompts) == 40


@pytest.mark.parametrize("distribution", [(), ("--gsp-group-distribution", "zipf", "--gsp-zipf-alpha", "3")])
def test_a_group_shares_its_system_prompt_and_no_more(
    distribution: tuple[str, ...], sharegpt: Path, vocabulary: Vocabulary
) -> None:
    lengths = ("--gsp-system-prompt-len", "50", "--gsp-question-len", "10")
    groups = ("--gsp-num-groups", "3", "--gsp-prompts-per-group", "8")
    args = flags("generated-shared-prefix", sharegpt, *groups, *lengths, *distribution)
    workload = DATASETS["generated-shared-prefix"].build(args, vocabulary)
    prompts = [turns[0] for turns in ids_of(workload, vocabulary)]
    counts: dict[tuple[int, ...], int] = {}
    for prompt in prompts:
        counts[tuple(prompt[:50])] = counts.get(tuple(prompt[:50]), 0) + 1
    assert len(prompts) == 24 and all(len(prompt) == 60 for prompt in prompts)
    assert len({tuple(prompt) for prompt in prompts}) == 24
    if distribution:
        assert max(counts.values()) > 12
    else:
        assert sorted(counts.values()) == [8, 8, 8]


def test_conversations_begin_alike_and_go_on_apart(sharegpt: Path, vocabulary: Vocabulary) -> None:
    args = flags("multi-turn", sharegpt, "--multi-turn-num-turns", "7", "--multi-turn-system-len", "30")
    workload = DATASETS["multi-turn"].build(args, vocabulary)
    talks = ids_of(workload, vocabulary)
    assert len(talks) == 6 and all(len(talk) == 7 for talk in talks)
    assert {shared(talks[0][0], talk[0]) for talk in talks[1:]} == {30}
    assert all(session.turns[0].delay_s == 0 for session in workload.sessions)
    delays = [turn.delay_s for session in workload.sessions for turn in session.turns[1:]]
    assert min(delays) > 0 and 0.5 < np.mean(delays) < 2
    assert first_requests(workload, 40).num_requests == 40


def test_turns_beyond_the_requests_are_not_made(sharegpt: Path, tmp_path: Path, vocabulary: Vocabulary) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}) + "\n")
    for name, flag in (("multi-turn", "--multi-turn-num-turns"), ("mooncake", "--mooncake-num-rounds")):
        args = flags(name, sharegpt, "--num-prompts", "3", flag, "1000000", "--dataset-path", str(path))
        assert DATASETS[name].build(args, vocabulary).num_requests == 3


@pytest.mark.parametrize("order", ["shuffle", "zipf"])
def test_questions_are_about_few_documents(order: str, sharegpt: Path, vocabulary: Vocabulary) -> None:
    sizes = ("--loogle-num-documents", "4", "--loogle-document-len", "200", "--loogle-order", order)
    args = flags("loogle", sharegpt, *sizes)
    workload = DATASETS["loogle"].build(args, vocabulary)
    counts = sorted(
        [session.context for session in workload.sessions].count(document)
        for document in {session.context for session in workload.sessions}
    )
    assert counts == [10] * 4 if order == "shuffle" else counts[-1] > 13
    documents = {session.context.keys: session.context.num_tokens for session in workload.sessions if session.context}
    assert 150 < np.mean(list(documents.values())) < 250


def test_another_number_of_questions_is_about_other_documents(sharegpt: Path, vocabulary: Vocabulary) -> None:
    """Of the same documents; not in the same order a little later."""
    sizes = ("--loogle-num-documents", "24", "--loogle-document-len", "200", "--loogle-order", "zipf")
    orders = []
    for count in ("30", "31"):
        workload = DATASETS["loogle"].build(
            flags("loogle", sharegpt, *sizes, "--loogle-zipf-alpha", "0.01", "--num-prompts", count), vocabulary
        )
        orders.append([session.context.keys for session in workload.sessions if session.context])
    assert len(set(orders[0]) & set(orders[1])) > 8
    for shift in range(8):
        same = sum(a == b for a, b in zip(orders[0][shift:], orders[1]))
        assert same < 12, f"shifted by {shift}"


def test_a_trace_shares_blocks_as_its_hashes_do(tmp_path: Path, vocabulary: Vocabulary) -> None:
    rows = [
        {"timestamp": 2000, "input_length": 1100, "output_length": 100, "hash_ids": [7, 8, 9]},
        {"timestamp": 1000, "input_length": 1536, "output_length": 10, "hash_ids": [7, 8, 10]},
        {"timestamp": 3000, "input_length": 512, "output_length": 1, "hash_ids": [8]},
        {"timestamp": 4000, "input_length": 3, "output_length": 1, "hash_ids": [8]},
    ]
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)

    def build(*more: str) -> Workload:
        return DATASETS["mooncake"].build(
            parse(["--dataset-name=mooncake", f"--dataset-path={path}", *more]), vocabulary
        )

    workload = build()
    b, a, c, d = (turns[0] for turns in ids_of(workload, vocabulary))
    assert [session.start_s for session in workload.sessions] == [1.0, 2.0, 3.0, 4.0]
    assert [len(a), len(b), len(c), len(d)] == [1100, 1536, 512, 3] and shared(a, b) == 1024
    assert c == b[512:1024]
    assert workload.length_scale is None and workload.notes == ()
    scaled = build("--scale-lengths", "0.1")
    b, a, c, d = (turns[0] for turns in ids_of(scaled, vocabulary))
    assert [len(a), len(b), len(c), len(d)] == [110, 153, 51, 1] and shared(a, b) == 102  # 76 become 8
    assert scaled.length_scale == 51 / 512 and "51" in scaled.notes[0]
    assert [session.turns[0].output_len for session in scaled.sessions] == [1, 10, 1, 1]
    assert [len(session.turns) for session in build("--mooncake-num-rounds", "3").sessions] == [3, 3, 3, 3]


@pytest.mark.parametrize(("most", "block_len"), [(10_000, 512), (700, 200), (699, 199), (8, 2), (1, 1)])
def test_the_factor_that_fits_is_the_largest(most: int, block_len: int) -> None:
    """Three blocks and 256 tokens of answer: 3.5 times the block's length."""
    whole = Workload((Session((Turn(Message(1024, keys=(1, 2), block_len=512), 200), Turn(made_up(3, 512), 56))),))
    assert fitting_scale(whole, Limits(most)) == block_len / 512
    extra = Limits(most + 30, first_extra=20, turn_extra=10)
    assert fitting_scale(whole, extra) == block_len / 512


def test_a_session_of_an_agent_has_its_turns_and_delays(tmp_path: Path, vocabulary: Vocabulary) -> None:
    rows = [
        {"session_id": "a", "input_length": 600, "output_length": 5, "hash_ids": [0, 1], "timestamp": 500},
        {"session_id": "a", "input_length": 100, "output_length": 6, "hash_ids": [2], "delay": 3000},
        {"session_id": "b", "input_length": 520, "output_length": 7, "hash_ids": [0, 3], "timestamp": 0},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = parse(["--dataset-name=agentic-trace", f"--dataset-path={path}", "--mooncake-slowdown-factor=0.5"])
    workload = DATASETS["agentic-trace"].build(args, vocabulary)
    a, b = workload.sessions
    assert [turn.delay_s for turn in a.turns] == [0, 1.5] and [a.start_s, b.start_s] == [0.5, 0]
    (first, second), (other,) = ids_of(workload, vocabulary)
    assert [len(first), len(second), len(other)] == [600, 100, 520] and shared(first, other) == 512
    assert args.request_rate == ["trace"]


def test_samples_are_whole_traces(vocabulary: Vocabulary, sharegpt: Path) -> None:
    for more, sessions in (((), 40), (("--mooncake-workload", "synthetic"), 40)):
        workload = DATASETS["mooncake"].build(flags("mooncake", sharegpt, *more), vocabulary)
        assert len(workload.sessions) == sessions and "sample" in workload.notes[0]
    args = parse(["--dataset-name", "agentic-trace"])
    workload = DATASETS["agentic-trace"].build(args, vocabulary)
    assert (len(workload.sessions), workload.num_requests) == (12, 181)
    keys = [set(session.turns[0].message.keys) for session in workload.sessions]
    assert any(a & b for i, a in enumerate(keys) for b in keys[:i])


def test_chats_of_sharegpt_come_with_the_lengths_of_their_answers(sharegpt: Path, vocabulary: Vocabulary) -> None:
    workload = DATASETS["sharegpt"].build(flags("sharegpt", sharegpt), vocabulary)
    assert len(workload.sessions) == 20
    for session in workload.sessions:
        (turn,) = session.turns
        text = turn.message.text
        assert text is not None and turn.message.num_tokens == vocabulary.count(text)
        number = text.split()[4]
        assert turn.output_len == vocabulary.count(f"It is answer {number}, I think.")
    cut = DATASETS["sharegpt"].build(
        flags("sharegpt", sharegpt, "--sharegpt-output-len", "9", "--sharegpt-context-len", "9"), vocabulary
    )
    assert cut.sessions == () and cut.notes[0].startswith("20 chats")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("sharegpt", "{", "not in ShareGPT's format"),
        ("sharegpt", '[{"conversations": [{"value": 1}, {}]}]', "not in ShareGPT's format"),
        ("sharegpt", '[{"conversations": [{"value": "a"}, {"value": null}]}]', "not in ShareGPT's format"),
        ("sharegpt", '[{"conversations": [{"value": "a"}, {"value": "\\ud800"}]}]', "not in ShareGPT's format"),
        ("sharegpt", "[" * 100_000, "not in ShareGPT's format"),
        ("mooncake", "{", "not a trace"),
        ("mooncake", "\n{", "line 2"),
        (
            "mooncake",
            '{"timestamp": Infinity, "input_length": 5, "output_length": 1, "hash_ids": [1]}',
            "timestamp is inf",
        ),
        (
            "mooncake",
            '{"timestamp": 1, "input_length": Infinity, "output_length": 1, "hash_ids": [1]}',
            "no row of this kind",
        ),
        (
            "mooncake",
            '{"timestamp": 1, "input_length": 5, "output_length": -7, "hash_ids": [1]}',
            "output_length is -7",
        ),
        ("mooncake", '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": "1"}', "is no list"),
        (
            "agentic-trace",
            '{"session_id": "a", "timestamp": NaN, "input_length": 5, "output_length": 1, "hash_ids": [1]}',
            "timestamp is nan",
        ),
        ("mooncake", "[1]", "trace.json:1 is no JSON object"),
        ("mooncake", '{"timestamp": 1}', "trace.json:1 .* no field 'hash_ids'"),
        (
            "mooncake",
            '{"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
            "513 tokens do not",
        ),
        (
            "agentic-trace",
            '{"session_id": "a", "input_length": 5, "output_length": 1, "hash_ids": [1]}',
            "'timestamp'",
        ),
    ],
)
def test_a_file_of_another_kind_is_refused(
    name: str, content: str, message: str, tmp_path: Path, vocabulary: Vocabulary
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(DatasetError, match=message):
        DATASETS[name].build(parse(["--dataset-name", name, "--dataset-path", str(path)]), vocabulary)


@pytest.mark.parametrize("name", ["sharegpt", "mooncake", "agentic-trace"])
def test_a_file_that_does_not_exist_is_refused(name: str, vocabulary: Vocabulary) -> None:
    with pytest.raises(DatasetError, match="no file '/nowhere'"):
        DATASETS[name].build(parse(["--dataset-name", name, "--dataset-path", "/nowhere"]), vocabulary)


def test_what_is_longer_than_the_server_takes_is_left_out() -> None:
    def session(context: int, *turns: tuple[int, int]) -> Session:
        return Session(tuple(Turn(made_up(1, n), out) for n, out in turns), made_up(0, context) if context else None)

    workload = Workload((session(0, (80, 10), (1, 1)), session(70, (20, 10)), session(50, (20, 10), (9, 2))))
    cut = fit(workload, Limits(92, first_extra=2, turn_extra=1))
    # 2 + 80 + 10 = 92 fits, and + 1 + 1 + 1 does not; 2 + 70 + 30 does not; 2 + 80 fits, and + 1 + 11 does not.
    assert [len(each.turns) for each in cut.sessions] == [1, 1] and cut.num_dropped == 3
    assert [fit(workload, Limits(94, 2, extra)).num_dropped for extra in (0, 1)] == [1, 2]
    assert fit(workload, Limits(None)) is workload


def test_a_vocabulary_without_words_gives_texts_of_other_tokens() -> None:
    letters = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "c": 2}, merges=[]))
    vocabulary = Vocabulary(letters)
    assert not vocabulary.is_exact
    message = made_up(1, 50)
    assert set(message.text_in(vocabulary, 0)) == set("abc") and len(message.ids_in(vocabulary, 0)) == 50


@pytest.mark.parametrize("own_space", [True, False])
def test_words_are_found_where_a_tokenizer_writes_spaces_otherwise(own_space: bool) -> None:
    """As SentencePiece vocabularies do, the older ones with a space of their own before a text."""
    words = ["".join(letters) for letters in itertools.product("abc", repeat=3)]
    pieces = [("<unk>", 0.0), ("▁", -2.0), *((f"▁{word}", -3.0) for word in words), *((c, -9.0) for c in "abc")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    space = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if own_space else space
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.is_exact
    message = made_up(1, 50)
    ids = vocabulary.encode(message.text_in(vocabulary, 0))
    assert ids == [1] * own_space + message.ids_in(vocabulary, 0)


def test_a_tokenizer_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match=r"no directory '/no/where'.*--tokenizer"):
        Vocabulary.load("/no/where")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(VocabularyError, match="no usable tokenizer"):
        Vocabulary.load(str(tmp_path))
