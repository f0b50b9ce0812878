"""What grammars let requests draw, against a list of all texts of each grammar."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang.srt.constrained import grammar_cache, grammar_rows
from sglang.srt.constrained.grammar_cache import GrammarCache
from sglang.srt.constrained.grammar_rows import GrammarRows
from sglang.srt.sampling.sample_spec import SampleSpec
from sglang.srt.sampling.sampling_params import GrammarSpec, SamplingParams
from support.grammars import EOS, TEXTS, VOCAB_SIZE, Language, write_vocabulary

pytest.importorskip("xgrammar")

LANGUAGES = [
    Language.of("a", "ab", "abc", "abcabc"),
    Language.of("cab", "cat"),
    Language.of(*(f"{a}{b}{c}" for a in "xy" for b in ("", "ab", "abb") for c in "12")),
]
# Its parse of n letters has as many trees as there are ways to nest n brackets.
AMBIGUOUS = GrammarSpec("ebnf", 'root ::= root root | "a" | ""')


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> GrammarCache:
    return GrammarCache(write_vocabulary(tmp_path_factory.mktemp("grammar") / "vocabulary.json"), None)


def spec_of(grammar: GrammarSpec, *more_stop_ids: int) -> SampleSpec:
    params = SamplingParams(grammar=grammar, stop_token_ids=more_stop_ids)
    return SampleSpec(params, tuple(sorted({EOS, *more_stop_ids})), num_prompt=3)


def rows_of(cache: GrammarCache | None, num_threads: int = 1) -> GrammarRows:
    return GrammarRows(VOCAB_SIZE, [EOS], cache, num_threads=num_threads)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """All masks behind a request's first are filled by threads."""
    monkeypatch.setattr(grammar_rows, "SHARED_MASK_S", (1e-9, 10.0))
    monkeypatch.setattr(grammar_rows, "EXCESS", 1e9)


def allowed(mask: torch.Tensor, row: int) -> set[int]:
    bits = np.unpackbits(mask[row].numpy().view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    return set(np.flatnonzero(bits).tolist())


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def draw(rows: GrammarRows, slots: list[int], tokens: list[int]) -> tuple[int, ...]:
    return rows.drawn(slots, torch.tensor(tokens, dtype=torch.int32), range(len(slots)), lambda: None)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.usefixtures("shared")
def test_random_answers_of_several_requests_at_once(cache: GrammarCache, num_threads: int):
    """Requests come and go and are retracted; each always may draw what some text of its grammar has next."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    rows = rows_of(cache, num_threads)
    running: dict[int, tuple[Language, list[int]]] = {}
    num_texts = 0
    for _ in range(300):
        if len(running) < 4 and rng.random() < 0.5:
            slot = min({0, 1, 2, 3} - set(running))
            running[slot] = rng.choice(LANGUAGES), []
            rows.start(slot, spec_of(running[slot][0].grammar), ids())
        elif running and rng.random() < 0.2:
            # It was retracted, and comes back in another slot, maybe.
            language, generated = running.pop(slot := rng.choice(sorted(running)))
            slot = min({0, 1, 2, 3} - set(running))
            running[slot] = language, generated
            rows.start(slot, spec_of(language.grammar), ids(*generated))
        slots = sorted(running)
        if not slots:
            continue
        mask = rows.mask(slots)
        tokens = []
        for at, slot in enumerate(slots):
            language, generated = running[slot]
            assert allowed(mask, at) == language.allowed(generated), f"seed {seed}: behind {generated}"
            tokens.append(rng.choice(sorted(allowed(mask, at))))
            generated.append(tokens[-1])
        assert draw(rows, slots, tokens) == ()
        for slot in [slot for slot in slots if running[slot][1][-1] == EOS]:
            del running[slot]
            num_texts += 1
    assert num_texts > 20


def test_a_step_that_was_issued_before_the_end_was_known(cache: GrammarCache):
    """Decoding goes on for a step or two behind the end; what is drawn there is read by no request."""
    rows = rows_of(cache)
    rows.start(0, spec_of(LANGUAGES[1].grammar), ids(*map(TEXTS.index, "cat")))
    assert allowed(rows.mask([0]), 0) == {EOS}
    assert draw(rows, [0], [EOS]) == ()
    for _ in range(2):
        assert len(allowed(rows.mask([0]), 0)) == VOCAB_SIZE
        assert draw(rows, [0], [40]) == ()


def test_an_answer_ends_by_the_models_tokens_and_by_the_clients_where_they_are_text(cache: GrammarCache):
    rows = rows_of(cache)
    letter = TEXTS.index("a")
    rows.start(0, spec_of(LANGUAGES[1].grammar, letter), ids(TEXTS.index("c")))
    assert allowed(rows.mask([0]), 0) == {letter, TEXTS.index("ab")}


def test_a_request_without_grammar_in_a_slot_that_had_one(cache: GrammarCache):
    """Its row is not asked for at all; another's is not mixed up with it."""
    rows = rows_of(cache)
    rows.start(0, spec_of(LANGUAGES[0].grammar), ids())
    rows.start(1, spec_of(LANGUAGES[1].grammar), ids())
    assert allowed(rows.mask([1]), 0) == LANGUAGES[1].allowed([])
    assert rows.drawn([1], torch.tensor([9, TEXTS.index("c")]), [1], lambda: None) == ()
    assert allowed(rows.mask([1]), 0) == LANGUAGES[1].allowed([TEXTS.index("c")])


def test_an_ambiguous_grammar_ends_its_request_alone(cache: GrammarCache, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_rows, "ALLOWANCE_S", 0.02)
    monkeypatch.setattr(grammar_rows, "ALLOWANCE_PER_TOKEN_S", 0.0)
    rows = rows_of(cache)
    rows.start(0, spec_of(AMBIGUOUS), ids())
    num_tokens = 0
    failed: tuple[int, ...] = ()
    while not failed:
        num_tokens += 1
        mask = rows.mask([0])
        assert TEXTS.index("a") in allowed(mask, 0)
        failed = rows.drawn([0], torch.tensor([5, TEXTS.index("a")]), [1], lambda: None)
    assert failed == (1,) and num_tokens > 10
    # In the steps that were issued meanwhile.
    assert len(allowed(rows.mask([0]), 0)) == VOCAB_SIZE


@pytest.mark.usefixtures("shared")
def test_an_ambiguous_grammar_that_hides_among_rows_that_share_threads(
    cache: GrammarCache, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(grammar_rows, "ALLOWANCE_S", 0.05)
    monkeypatch.setattr(grammar_rows, "ALLOWANCE_PER_TOKEN_S", 0.0)
    rows = rows_of(cache, 2)
    endless = GrammarSpec("ebnf", 'root ::= "a" root | "b"')
    for slot, grammar in enumerate([endless, AMBIGUOUS]):
        rows.start(slot, spec_of(grammar), ids())
    failed: tuple[int, ...] = ()
    while not failed:
        mask = rows.mask([0, 1])
        assert all(TEXTS.index("a") in allowed(mask, at) for at in (0, 1))
        failed = draw(rows, [0, 1], [TEXTS.index("a")] * 2)
    assert 1 in failed


@pytest.mark.usefixtures("shared")
def test_rows_are_counted_alone_after_masks_that_took_much_longer(
    cache: GrammarCache, monkeypatch: pytest.MonkeyPatch
):
    import xgrammar

    batches: list[int] = []
    fill = xgrammar.BatchGrammarMatcher.batch_fill_next_token_bitmask

    def counted(batch: xgrammar.BatchGrammarMatcher, matchers: list[xgrammar.GrammarMatcher], *more: object) -> None:
        batches.append(len(matchers))
        fill(batch, matchers, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(xgrammar.BatchGrammarMatcher, "batch_fill_next_token_bitmask", counted)
    monkeypatch.setattr(grammar_rows, "EXCESS", 0.0)
    rows = rows_of(cache, 2)
    for slot in range(3):
        rows.start(slot, spec_of(LANGUAGES[0].grammar), ids())
    for _ in range(2 + grammar_rows.NUM_ALONE):
        assert batches in ([], [3])
        rows.mask([0, 1, 2])
    assert batches == [3]
    rows.mask([0, 1, 2])
    assert batches == [3, 3]


@pytest.mark.usefixtures("shared")
def test_an_error_among_rows_that_share_threads(cache: GrammarCache, monkeypatch: pytest.MonkeyPatch):
    import xgrammar

    def fails(*_: object) -> None:
        raise RuntimeError("injected")

    rows = rows_of(cache, 2)
    for slot, language in enumerate(LANGUAGES[:2]):
        rows.start(slot, spec_of(language.grammar), ids())
    monkeypatch.setattr(xgrammar.BatchGrammarMatcher, "batch_fill_next_token_bitmask", fails)
    for _ in range(2):
        mask = rows.mask([0, 1])
        assert [allowed(mask, at) for at in (0, 1)] == [language.allowed([]) for language in LANGUAGES[:2]]


def test_a_grammar_for_which_the_vocabulary_has_no_token(cache: GrammarCache):
    rows = rows_of(cache)
    rows.start(0, spec_of(GrammarSpec("ebnf", 'root ::= "ü"')), ids())
    rows.start(1, spec_of(LANGUAGES[0].grammar), ids())
    mask = rows.mask([0, 1])
    assert len(allowed(mask, 0)) == VOCAB_SIZE, "an empty row would draw from nothing"
    assert allowed(mask, 1) == LANGUAGES[0].allowed([])
    assert draw(rows, [0, 1], [3, TEXTS.index("a")]) == (0,)


def test_errors_of_the_library_are_the_requests_own(cache: GrammarCache):
    rows = rows_of(cache)
    rows.start(0, spec_of(GrammarSpec("ebnf", "root ::= nothing")), ids())  # the check would have refused it
    rows.start(1, spec_of(LANGUAGES[1].grammar), ids(5, 6))  # generated something else
    rows.mask([0, 1])
    assert draw(rows, [0, 1], [3, 3]) == (0, 1)


def test_a_rank_that_follows_gets_rank_0s_mask(cache: GrammarCache):
    sent: list[torch.Tensor] = []

    def send(mask: torch.Tensor) -> torch.Tensor:
        sent.append(mask)
        return mask

    rank_0 = GrammarRows(VOCAB_SIZE, [EOS], cache, broadcast=send)
    rank_1 = GrammarRows(VOCAB_SIZE, [EOS], None, broadcast=lambda mask: mask.copy_(sent.pop()))
    for rank in (rank_0, rank_1):
        rank.start(3, spec_of(LANGUAGES[1].grammar), ids())
    for token in (TEXTS.index("c"), TEXTS.index("a")):
        mine, theirs = rank_0.mask([3]), rank_1.mask([3])
        assert torch.equal(mine, theirs)
        for rank in (rank_0, rank_1):
            assert draw(rank, [3], [token]) == ()


def test_masks_are_applied_to_their_rows():
    logits = torch.arange(4 * VOCAB_SIZE, dtype=torch.float32).reshape(4, -1)
    before = logits.clone()
    mask = torch.zeros(2, -(-VOCAB_SIZE // 32), dtype=torch.int32)
    mask[0, 0], mask[1, 3] = 1 << 5, 1
    GrammarRows.apply(logits, [1, 3], mask)
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    for row, token in ((1, 5), (3, 96)):
        assert torch.isfinite(logits[row]).nonzero().flatten().tolist() == [token]
        assert logits[row, token] == before[row, token]


def test_a_full_cache_gives_up_the_least_recently_used(tmp_path: Path):
    small = GrammarCache(write_vocabulary(tmp_path / "vocabulary.json"), None, max_bytes=1)
    first, second = (language.grammar for language in LANGUAGES[:2])
    small.get(first)
    assert first in small
    small.get(second)
    assert first not in small and second in small
    small.get(first)
    assert first in small


def test_a_grammar_that_is_held_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    small = GrammarCache(write_vocabulary(tmp_path / "vocabulary.json"), None, max_bytes=1)
    first, second, third = (language.grammar for language in LANGUAGES)
    assert not small.hold(first)
    compiled = small.get(first)
    assert small.hold(first) and small.hold(first)
    small.get(second)
    small.get(third)
    assert first in small and second not in small
    monkeypatch.setattr(grammar_cache, "MAX_HELD_BYTES", 1)
    assert small.hold(first) and not small.hold(third), "too much is held"
    for _ in range(3):
        assert small.get(first) is compiled
        small.release(first)
    small.get(second)
    small.get(third)
    assert first not in small
