"""What grammars let requests draw, against a list of all texts of each grammar."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

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
ENDLESS = GrammarSpec("ebnf", 'root ::= "a" root | "b"')
AMBIGUOUS = GrammarSpec("ebnf", 'root ::= root root | "a" | ""')


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> GrammarCache:
    return GrammarCache(write_vocabulary(tmp_path_factory.mktemp("grammar") / "vocabulary.json"), None)


def spec_of(grammar: GrammarSpec, *more_stop_ids: int) -> SampleSpec:
    params = SamplingParams(grammar=grammar, stop_token_ids=more_stop_ids)
    return SampleSpec(params, tuple(sorted({EOS, *more_stop_ids})), num_prompt=3)


def rows_of(
    cache: GrammarCache | None, num_threads: int = 1, clock: Callable[[], float] = lambda: 0.0
) -> GrammarRows:
    return GrammarRows(VOCAB_SIZE, [EOS], cache, num_threads=num_threads, clock=clock)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """All masks behind a request's first are filled by threads."""
    monkeypatch.setattr(grammar_rows, "THREADS_S", 1e-9)
    monkeypatch.setattr(grammar_rows, "TOKEN_S", (10.0, 10.0))
    monkeypatch.setattr(grammar_rows, "EXCESS", 1e9)


class Processor:
    """Masks take the time that a test gives them, for each row of the mask. `launch` draws an "a" for all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: GrammarCache, num_threads: int = 1) -> None:
        import xgrammar

        self.now = 0.0
        self.seconds = 0.0
        self.costs: list[float] = []
        self.rows = rows_of(cache, num_threads, lambda: self.now)
        fill = xgrammar.GrammarMatcher.fill_next_token_bitmask
        fill_all = xgrammar.BatchGrammarMatcher.batch_fill_next_token_bitmask

        def counted(matcher: xgrammar.GrammarMatcher, mask: np.ndarray, at: int) -> bool:
            self.seconds += self.costs[at]
            return fill(matcher, mask, at)

        def all_counted(
            batch: xgrammar.BatchGrammarMatcher,
            matchers: list[xgrammar.GrammarMatcher],
            mask: np.ndarray,
            places: list[int],
        ) -> None:
            self.seconds += sum(self.costs[at] for at in places)
            fill_all(batch, matchers, mask, places)

        monkeypatch.setattr(xgrammar.GrammarMatcher, "fill_next_token_bitmask", counted)
        monkeypatch.setattr(xgrammar.BatchGrammarMatcher, "batch_fill_next_token_bitmask", all_counted)
        read = lambda: self.seconds  # noqa: E731
        monkeypatch.setattr(grammar_rows, "time", SimpleNamespace(thread_time=read, process_time=read))

    def start(self, *costs: float) -> None:
        """Requests with masks that take so long, in the slots from 0 on."""
        self.costs = list(costs)
        for slot in range(len(costs)):
            self.restart(slot)

    def restart(self, slot: int) -> None:
        self.rows.start(slot, spec_of(ENDLESS), ids())

    def launch(self) -> tuple[int, ...]:
        slots = list(range(len(self.costs)))
        mask = self.rows.mask(slots)
        assert all(TEXTS.index("a") in allowed(mask, at) for at in slots)
        return draw(self.rows, slots, [TEXTS.index("a")] * len(slots))

    def launches_until(self, *slots: int) -> int:
        """Until these fail, at once."""
        for num in range(1, 1000):
            if failed := self.launch():
                assert failed == slots
                return num
        raise AssertionError("none failed")


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


def test_a_model_without_ends_takes_the_clients(cache: GrammarCache):
    rows = GrammarRows(VOCAB_SIZE, (), cache)
    rows.start(0, spec_of(LANGUAGES[1].grammar), ids(*map(TEXTS.index, "cab")))
    assert allowed(rows.mask([0]), 0) == {EOS}


def test_a_request_without_grammar_in_a_slot_that_had_one(cache: GrammarCache):
    """Its row is not asked for at all; another's is not mixed up with it."""
    rows = rows_of(cache)
    rows.start(0, spec_of(LANGUAGES[0].grammar), ids())
    rows.start(1, spec_of(LANGUAGES[1].grammar), ids())
    assert allowed(rows.mask([1]), 0) == LANGUAGES[1].allowed([])
    assert rows.drawn([1], torch.tensor([9, TEXTS.index("c")]), [1], lambda: None) == ()
    assert allowed(rows.mask([1]), 0) == LANGUAGES[1].allowed([TEXTS.index("c")])


def test_an_ambiguous_grammar_ends_its_request_alone(cache: GrammarCache, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_rows, "SHARED_S", 0.02)
    monkeypatch.setattr(grammar_rows, "TOKEN_S", (0.0, 0.0))
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


@pytest.mark.parametrize("num_rows, num_launches", [(1, 9), (2, 5), (4, 3)])
def test_slow_rows_share_what_goes_beyond_their_credits(
    cache: GrammarCache, monkeypatch: pytest.MonkeyPatch, num_rows: int, num_launches: int
):
    """A mask that takes 0.26 s lacks 0.24 s, of 2 s that all share."""
    processor = Processor(monkeypatch, cache)
    processor.start(*[0.26] * num_rows)
    assert processor.launches_until(*range(num_rows)) == num_launches


def test_what_rows_share_comes_back_with_time(cache: GrammarCache, monkeypatch: pytest.MonkeyPatch):
    processor = Processor(monkeypatch, cache)
    processor.start(0.26)
    for idle_s, num in ((0.0, 9), (0.0, 1), (2.0, 1), (3.0, 2), (1e9, 9)):
        processor.now += idle_s
        processor.restart(0)
        assert processor.launches_until(0) == num


def test_a_long_cheap_answer_saves_little_up(cache: GrammarCache, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_rows, "SHARED_S", 0.5)
    processor = Processor(monkeypatch, cache)
    processor.start(0.001)
    for _ in range(100):
        assert processor.launch() == ()
    processor.costs = [grammar_rows.CREDIT_S + 0.51]
    assert processor.launch() == (0,)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_useful_rows_go_on_beside_slow_ones(cache: GrammarCache, monkeypatch: pytest.MonkeyPatch, num_threads: int):
    """Slow ones come again as often as they fail. A launch takes what rows are credited, not what they would take."""
    processor = Processor(monkeypatch, cache, num_threads)
    processor.start(*[0.0022] * 16, *[0.3] * 16)
    launches, restarts = 200, 0
    for _ in range(launches):
        failed = processor.launch()
        assert all(slot >= 16 for slot in failed)
        for slot in failed:
            processor.restart(slot)
        restarts += len(failed)
    # A row that fails has taken a mask, which nothing interrupts.
    credited = launches * 32 * grammar_rows.token_allowance_s(32)
    assert restarts > 0
    assert processor.seconds <= credited + grammar_rows.SHARED_S + (restarts + 16) * (0.3 + grammar_rows.START_S)


def test_what_a_token_is_allowed():
    allowances = [grammar_rows.token_allowance_s(num) for num in (0, 1, 5, 10, 20, 1000)]
    assert allowances == [0.02, 0.02, 0.02, 0.01, 0.005, 0.005]


def test_a_row_that_gets_slow_among_rows_that_share_threads(cache: GrammarCache, monkeypatch: pytest.MonkeyPatch):
    """The others are not charged for it, though only the time of all is known, and nothing is left to share."""
    processor = Processor(monkeypatch, cache, 2)
    processor.start(0.001, 0.001, 0.001)
    for _ in range(10):
        assert processor.launch() == ()
    processor.costs[2] = 5.0
    assert processor.launch() == (), "who took it is not known"
    processor.costs[2] = 0.5
    assert processor.launches_until(2) == 1
    processor.costs[2] = 0.0
    for _ in range(100):
        assert processor.launch() == (2,)


def test_rows_are_counted_alone_for_longer_each_time(cache: GrammarCache, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_rows, "EXCESS", 0.0)
    processor = Processor(monkeypatch, cache, 2)
    processor.start(0.001, 0.001)
    together = 0
    fill_together = processor.rows._fill_together

    def counted(*all_of_them):
        nonlocal together
        together += 1
        return fill_together(*all_of_them)

    monkeypatch.setattr(processor.rows, "_fill_together", counted)
    found = []
    for _ in range(1 + 1 + grammar_rows.NUM_ALONE + 1 + 2 * grammar_rows.NUM_ALONE + 1):
        processor.launch()
        found.append(together)
    assert found == [0, *[1] * (1 + grammar_rows.NUM_ALONE), *[2] * (1 + 2 * grammar_rows.NUM_ALONE), 3]


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
    GrammarRows.apply(logits, torch.tensor([1, 3]), mask)
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
