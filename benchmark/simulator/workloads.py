"""Workloads: who asks what, and when. Generators with the statistics of Strata's Table 1, and what drives them.

Owns token ids, arrival times and the order of requests. Knows nothing of caches, machines or the scheduler but the
message that a request is. Readers for published files are in traces.py.

    Spec --generate--> Workload (conversations) --source()--> WorkloadSource --take / finished--> Simulation

A conversation is a context and turns; a single question about a document is one of one turn, and conversations about
the same document share its tokens. The next turn is sent when the answer to the last is there, plus time to think.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import NormalDist

import numpy as np

from sglang.serving_benchmark.draws import bursty_times, lengths_with_mean, poisson_times, scale_to_mean, splitmix64
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, ids_to_bytes
from sglang.srt.sampling.sampling_params import SamplingParams

# Strata 5.1: at most so many requests in flight.
MAX_IN_FLIGHT = 128
# What `SimulatedExecutor` samples, so that the next turn's prompt has the answer that was given.
ANSWER_TOKEN = 1
# Generated ids lie between: below are special tokens and ANSWER_TOKEN, above what small vocabularies lack.
FIRST_TOKEN, LAST_TOKEN = 10, 32000


class Order(StrEnum):
    """The order of questions about several documents (Strata 5.3.3). SHUFFLE: at random. MINIMUM cache distance: all
    of one document in a row. MAXIMUM: those of one document spread evenly over the queue."""

    SHUFFLE = "shuffle"
    MINIMUM = "minimum"
    MAXIMUM = "maximum"


@dataclass(frozen=True)
class Turn:
    """message: int32, what is new in this prompt. output_len: tokens of the answer, at least 1. earliest: seconds,
    of all but the first turn: not sent before, even if the last answer is there. delay: seconds from the last answer,
    beside the conversation's think_s."""

    message: np.ndarray
    output_len: int
    earliest: float = 0.0
    delay: float = 0.0


@dataclass(frozen=True)
class Conversation:
    """start: seconds, when the first turn is sent. context: int32, before the first message; shared arrays are not
    copied. think_s: from an answer's last token to the next message."""

    start: float
    context: np.ndarray
    turns: tuple[Turn, ...]
    think_s: float = 0.0


@dataclass(frozen=True)
class Stats:
    """Means over all queries; a prompt counts whole, with context and history."""

    mean_in: float
    mean_out: float
    num_contexts: int
    num_queries: int
    max_total: int


@dataclass(frozen=True)
class Workload:
    name: str
    conversations: tuple[Conversation, ...]
    max_in_flight: int | None = MAX_IN_FLIGHT
    # Conversations at a time: the next one begins when one has ended.
    max_open: int | None = None

    def source(self, names_sessions: bool = False) -> WorkloadSource:
        """A fresh run of it. names_sessions: whether each conversation's requests have a session_id."""
        return WorkloadSource(self, names_sessions)

    def stats(self) -> Stats:
        ins, outs, longest = [], [], 0
        for conversation in self.conversations:
            length = len(conversation.context)
            for turn in conversation.turns:
                length += len(turn.message)
                ins.append(length)
                outs.append(turn.output_len)
                length += turn.output_len
            longest = max(longest, length)
        contexts = {id(c.context) for c in self.conversations}
        return Stats(float(np.mean(ins)), float(np.mean(outs)), len(contexts), len(ins), longest)

    def first(self, num_conversations: int) -> Workload:
        """The beginning of it."""
        return replace(self, conversations=self.conversations[:num_conversations])


class WorkloadSource:
    """A `RequestSource`. Requests that fall due while max_in_flight are out wait here, first come first served, and
    arrive when they are sent; `due` tells when they would have come otherwise. Request ids: conversation-turn.

          (start) -> waiting for its time -> sent -> answered -+-> done
                          ^                                    |
                          +------------- think_s --------------+
    """

    def __init__(self, workload: Workload, names_sessions: bool = False) -> None:
        self.due: dict[str, float] = {}
        self.num_in_flight = 0
        self._limit = workload.max_in_flight
        self._conversations = workload.conversations
        # (when, conversation, turn): conversations come in this order where times are equal.
        self._names_sessions = names_sessions
        self._num_begun = min(len(workload.conversations), workload.max_open or len(workload.conversations))
        self._waiting = [(c.start, i, 0) for i, c in enumerate(workload.conversations[: self._num_begun])]
        heapq.heapify(self._waiting)
        # Prompt and answer of the last turn, of conversations that go on.
        self._history: dict[int, np.ndarray] = {}

    @property
    def is_full(self) -> bool:
        return self._limit is not None and self.num_in_flight >= self._limit

    @property
    def num_waiting(self) -> int:
        """Turns whose time is known and that are not sent."""
        return len(self._waiting)

    def next_at(self) -> float | None:
        return None if self.is_full or not self._waiting else self._waiting[0][0]

    def take(self, now: float) -> list[TokenizedGenerateReqInput]:
        sent = []
        while self._waiting and self._waiting[0][0] <= now and not self.is_full:
            at, i, t = heapq.heappop(self._waiting)
            request = self._request(i, t)
            self.due[request.rid] = at
            self.num_in_flight += 1
            sent.append(request)
        return sent

    def finished(self, rid: str, now: float) -> None:
        self.num_in_flight -= 1
        i, t = (int(part) for part in rid.split("-"))
        conversation = self._conversations[i]
        if t + 1 < len(conversation.turns):
            turn = conversation.turns[t + 1]
            at = max(now + conversation.think_s + turn.delay, turn.earliest)
            heapq.heappush(self._waiting, (at, i, t + 1))
        elif self._num_begun < len(self._conversations):
            following = self._conversations[self._num_begun]
            heapq.heappush(self._waiting, (max(now, following.start), self._num_begun, 0))
            self._num_begun += 1

    def _request(self, i: int, t: int) -> TokenizedGenerateReqInput:
        conversation = self._conversations[i]
        turn = conversation.turns[t]
        before = self._history.pop(i) if t else conversation.context
        prompt = np.concatenate((before, turn.message))
        if t + 1 < len(conversation.turns):
            answer = np.full(turn.output_len, ANSWER_TOKEN, np.int32)
            self._history[i] = np.concatenate((prompt, answer))
        params = SamplingParams(max_new_tokens=turn.output_len, temperature=0.0, ignore_eos=True)
        return TokenizedGenerateReqInput(
            rid=f"{i}-{t}",
            input_ids=ids_to_bytes(prompt),
            sampling_params=params,
            session_id=str(i) if self._names_sessions else "",
            stream=True,
        )


# -- questions about documents --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuestionSpec:
    """Questions about documents. mean_in, mean_out, num_contexts, num_queries: Strata, Table 1.

    Assumed, because no paper prints them: lengths of documents and answers are log-normal with the coefficients of
    variation context_cv and output_cv, documents at most max_context long; a question with its template has
    mean_question tokens, log-normal too; each question is about a document drawn uniformly.
    """

    name: str
    mean_in: float
    mean_out: float
    num_contexts: int
    num_queries: int
    mean_question: float
    context_cv: float
    output_cv: float = 0.8
    max_context: int = 128_000

    def scaled(self, lengths: float = 1.0, counts: float = 1.0) -> QuestionSpec:
        """Prompts shorter by `lengths`, fewer contexts and queries by `counts`; answers stay, they are short."""
        return replace(
            self,
            mean_in=self.mean_in * lengths,
            mean_question=max(1.0, self.mean_question * lengths),
            max_context=max(1, int(self.max_context * lengths)),
            num_contexts=max(1, round(self.num_contexts * counts)),
            num_queries=max(1, round(self.num_queries * counts)),
        )

    def generate(self, seed: int, rate: float, order: Order = Order.SHUFFLE) -> Workload:
        """rate: queries per second, Poisson."""
        rng = np.random.default_rng(seed)
        about = np.concatenate(
            (
                np.arange(min(self.num_contexts, self.num_queries)),
                rng.integers(0, self.num_contexts, max(0, self.num_queries - self.num_contexts)),
            )
        )
        questions = lengths_with_mean(rng, self.num_queries, self.mean_question, 0.4)
        weights = np.bincount(about, minlength=self.num_contexts)
        mean_context = self.mean_in - float(questions.mean())
        contexts = lengths_with_mean(rng, self.num_contexts, mean_context, self.context_cv, self.max_context, weights)
        outputs = lengths_with_mean(rng, self.num_queries, self.mean_out, self.output_cv)
        documents = [random_tokens(rng, n) for n in contexts.tolist()]
        turns = [
            Turn(random_tokens(rng, n), out) for n, out in zip(questions.tolist(), outputs.tolist(), strict=True)
        ]
        return questions_workload(self.name, documents, about, turns, rng, rate, order)


LOOGLE = QuestionSpec("LooGLE", 21613, 15.60, 105, 2410, mean_question=30, context_cv=0.35)
# Its cloze questions have 637 characters on average: some 150 tokens at 4.2 characters each (assumed).
LOOGLE_CLOZE = replace(LOOGLE, name="LooGLE cloze", mean_in=21613 + 120, mean_question=150)
NARRATIVEQA = QuestionSpec("NarrativeQA", 54797, 13.00, 50, 1461, mean_question=30, context_cv=0.5)


@dataclass(frozen=True)
class LongBenchSpec:
    """Single questions about documents of their own. median: tokens of a prompt (ShadowServe 6.1); longest: where
    prompts are cut, so that the 95th percentile is there (6.1: "P95 lengths of 15K").

    Assumed: log-normal before the cut, with the coefficient of variation cv.
    """

    name: str
    median: float
    num_queries: int = 200
    longest: int = 15_000
    cv: float = 0.5

    def generate(self, seed: int, rate: float, output_len: int, num_queries: int | None = None) -> Workload:
        """rate: requests per second, Poisson. output_len: of all answers."""
        rng = np.random.default_rng(seed)
        n = num_queries or self.num_queries
        sigma = np.sqrt(np.log(1 + self.cv * self.cv))
        # Even quantiles, shuffled: few requests have the lengths of many.
        ranks = rng.permutation((np.arange(n) + 0.5) / n)
        normal = np.array([NormalDist().inv_cdf(rank) for rank in ranks.tolist()])
        lengths = np.minimum(self.longest, np.round(self.median * np.exp(sigma * normal))).astype(np.int64)
        starts = poisson_times(rng, n, rate)
        asked = [
            Conversation(start, random_tokens(rng, length - 1), (Turn(random_tokens(rng, 1), output_len),))
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        ]
        return Workload(self.name, tuple(asked), max_in_flight=None)


TRIVIAQA = LongBenchSpec("TriviaQA", 9_300)
LONGBENCH_NARRATIVEQA = LongBenchSpec("NarrativeQA (LongBench)", 14_000)


def questions_workload(
    name: str,
    documents: Sequence[np.ndarray],
    about: np.ndarray,
    turns: Sequence[Turn],
    rng: np.random.Generator,
    rate: float,
    order: Order = Order.SHUFFLE,
) -> Workload:
    """turns[i] asks about documents[about[i]]; sent in the given order at Poisson times."""
    sequence = arrange(np.asarray(about), order, rng)
    starts = poisson_times(rng, len(sequence), rate)
    conversations = [
        Conversation(start, documents[int(about[i])], (turns[i],))
        for start, i in zip(starts.tolist(), sequence.tolist(), strict=True)
    ]
    return Workload(name, tuple(conversations))


def arrange(about: np.ndarray, order: Order, rng: np.random.Generator) -> np.ndarray:
    """A permutation of the queries; about: the document of each."""
    shuffled = rng.permutation(len(about))
    if order == Order.SHUFFLE:
        return shuffled
    grouped = shuffled[np.argsort(about[shuffled], kind="stable")]
    if order == Order.MINIMUM:
        return grouped
    # The j-th of the n questions about a document stands at (j + 1/2) / n of the queue.
    counts = np.bincount(about)
    firsts = np.cumsum(counts) - counts
    documents = about[grouped]
    place = (np.arange(len(about)) - firsts[documents] + 0.5) / counts[documents]
    return grouped[np.lexsort((documents, place))]


# -- conversations --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConversationSpec:
    """Conversations of several turns. mean_in (with history), mean_out, num_queries: Strata, Table 1; think_s: 5.1.

    has_context: each conversation is about a document of its own; its length is what makes mean_in come true, and
    messages have mean_message tokens. Without, messages are scaled to make mean_in come true. Assumed: lengths are
    log-normal with coefficients of variation 0.3 (documents) and cv; turns per conversation are even (has_context) or
    geometric.
    """

    name: str
    mean_in: float
    mean_out: float
    num_conversations: int
    num_queries: int
    mean_message: float
    think_s: float
    has_context: bool
    cv: float
    max_context: int = 128_000

    def scaled(self, lengths: float = 1.0, counts: float = 1.0) -> ConversationSpec:
        """Everything shorter by `lengths`; fewer conversations, of as many turns, by `counts`."""
        return replace(
            self,
            mean_in=self.mean_in * lengths,
            mean_out=max(1.0, self.mean_out * lengths),
            mean_message=max(1.0, self.mean_message * lengths),
            max_context=max(1, int(self.max_context * lengths)),
            num_conversations=max(1, round(self.num_conversations * counts)),
            num_queries=max(1, round(self.num_queries * counts)),
        )

    def generate(self, seed: int, rate: float) -> Workload:
        """rate: queries per second in the long run; conversations start as a Poisson process, so many times rarer as
        they have turns."""
        rng = np.random.default_rng(seed)
        turns = self._turns(rng)
        first = np.repeat(np.cumsum(turns) - turns, turns)
        place = np.arange(self.num_queries) - first
        outputs = lengths_with_mean(rng, self.num_queries, self.mean_out, self.cv)
        history_out = _before(outputs, first)
        messages = lengths_with_mean(rng, self.num_queries, self.mean_message, self.cv)
        contexts = np.zeros(self.num_conversations, np.int64)
        if self.has_context:
            mean = self.mean_in - float((history_out + _before(messages, first) + messages).mean())
            contexts = lengths_with_mean(rng, self.num_conversations, mean, 0.3, self.max_context, turns)
        else:
            wanted = self.mean_in - float(history_out.mean())
            if wanted < 1:
                raise ValueError(f"{self.name}: the answers alone make prompts longer than {self.mean_in:.0f} tokens")
            # A message counts in its own prompt and in all that follow.
            messages = scale_to_mean(messages, wanted, weights=np.repeat(turns, turns) - place, of=self.num_queries)
        pool = random_tokens(rng, int(messages.sum()))
        cuts = np.cumsum(messages)[:-1]
        parts = np.split(pool, cuts)
        starts = poisson_times(rng, self.num_conversations, rate * self.num_conversations / self.num_queries)
        conversations = []
        begin = 0
        for i, n in enumerate(turns.tolist()):
            said = tuple(Turn(parts[q], int(outputs[q])) for q in range(begin, begin + n))
            begin += n
            context = random_tokens(rng, int(contexts[i]))
            conversations.append(Conversation(float(starts[i]), context, said, self.think_s))
        return Workload(self.name, tuple(conversations))

    def _turns(self, rng: np.random.Generator) -> np.ndarray:
        """Turns of each conversation, at least one, num_queries in all."""
        n, total = self.num_conversations, self.num_queries
        if self.has_context:
            return rng.permutation(np.full(n, total // n) + (np.arange(n) < total % n))
        turns = rng.geometric(n / total, n)
        while (missing := total - int(turns.sum())) != 0:
            some = rng.integers(0, n, abs(missing))
            turns = np.maximum(1, turns + np.sign(missing) * np.bincount(some, minlength=n))
        return turns


REVIEWMT = ConversationSpec(
    "ReviewMT", 17708, 208.3, 100, 1092, mean_message=80, think_s=0.0, has_context=True, cv=0.8
)
# 90,000 conversations: SwiftCache, of the same collection. Messages come out at about 161 tokens.
SHAREGPT = ConversationSpec(
    "ShareGPT", 680.9, 260.9, 90_000, 200_869, mean_message=161, think_s=60.0, has_context=False, cv=1.0
)


def _before(lengths: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Sum of the lengths of earlier queries of the same conversation; first: its first query."""
    total = np.cumsum(lengths) - lengths
    return total - total[first]


@dataclass(frozen=True)
class SessionSpec:
    """Long conversations that have begun: their earlier turns are the context. Requests come at Poisson times, each
    of a conversation drawn at random, or when its last answer has ended, if that is later.

    shortest, longest, num_sessions: of the whole collection, as printed. Assumed: lengths are log-normal, and the two
    are the extremes to expect of as many draws. mean_message, mean_out: log-normal, with cv.
    """

    name: str
    shortest: int
    longest: int
    num_sessions: int
    mean_message: float
    mean_out: float
    cv: float = 1.0

    def generate(
        self, seed: int, rate: float, num_requests: int, between: tuple[int, int], num_tokens: float, answers: float
    ) -> Workload:
        """Conversations whose contexts have lengths of [between), about num_tokens in all; every conversation has
        nearly as many turns. rate: requests per second. answers: factor of their lengths."""
        rng = np.random.default_rng(seed)
        n = max(1, min(num_requests, round(num_tokens / self.mean_context(between))))
        # Even quantiles, shuffled: few conversations have the lengths of many.
        lengths = rng.permutation(self.contexts((np.arange(n) + 0.5) / n, between))
        messages = lengths_with_mean(rng, num_requests, self.mean_message, self.cv)
        outputs = lengths_with_mean(rng, num_requests, max(1.0, self.mean_out * answers), self.cv)
        turns: list[list[Turn]] = [[] for _ in range(n)]
        times = poisson_times(rng, num_requests, rate)
        whose = rng.permutation(np.arange(num_requests) % n)
        for q, i in enumerate(whose.tolist()):
            turns[i].append(Turn(random_tokens(rng, int(messages[q])), int(outputs[q]), float(times[q])))
        talks = [
            Conversation(said[0].earliest, random_tokens(rng, int(length)), tuple(said))
            for length, said in zip(lengths.tolist(), turns, strict=True)
        ]
        return Workload(self.name, tuple(talks), max_in_flight=None)

    def mean_context(self, between: tuple[int, int]) -> float:
        """Tokens of a context whose length lies between."""
        return float(self.contexts(np.linspace(0.0005, 0.9995, 1000), between).mean())

    def contexts(self, ranks: np.ndarray, between: tuple[int, int]) -> np.ndarray:
        """Lengths at quantiles, in (0, 1), of what lies between."""
        low, high = np.log(self.shortest), np.log(self.longest)
        # The largest of n normal draws lies at about the quantile 1 - 1 / (n + 1).
        sigma = (high - low) / 2 / NormalDist().inv_cdf(1 - 1 / (self.num_sessions + 1))
        normal = NormalDist(float(low + high) / 2, float(sigma))
        first, last = (normal.cdf(float(np.log(n))) for n in between)
        logs = [normal.inv_cdf(first + (last - first) * rank) for rank in ranks.tolist()]
        return np.round(np.exp(logs)).astype(np.int64)


# SwiftCache 5: shortest and longest; "approximately 90K" conversations, "more than 500 tasks". ShareGPT's messages:
# "90% of user prompts are shorter than 132 tokens" (2.2), which is 64.2 on average with a coefficient of variation
# of 1; its answers as above. L-Eval's, questions and short answers beside summaries, are assumed.
SHAREGPT_LONG = SessionSpec("ShareGPT", 12, 602_000, 90_000, mean_message=64.2, mean_out=260.9)
L_EVAL = SessionSpec("L-Eval", 2_600, 195_000, 500, mean_message=60, mean_out=60)


# -- prompts as production has them ---------------------------------------------------------------------------------

# Tokens of a block, as in Mooncake's traces.
BLOCK = 512


@dataclass(frozen=True)
class Prompt:
    # Seconds from the beginning.
    start: float
    # Of each BLOCK tokens, what they are known by together with everything before; the last block may be cut.
    blocks: np.ndarray
    input_len: int
    output_len: int


@dataclass(frozen=True)
class Lengths:
    # Tokens, log-normal, and their coefficient of variation.
    mean: float
    cv: float

    def draw(self, rng: np.random.Generator, n: int, longest: int | None = None) -> np.ndarray:
        return lengths_with_mean(rng, n, max(1.0, self.mean), self.cv, longest)


@dataclass(frozen=True)
class ReuseSpec:
    """Requests with bursts, lengths that vary, and families of prompts that go on from each other, beside single ones
    that nothing goes on from. `trace_statistics.py` fits it to a trace.

    A request goes on from the family whose last request came about `lag` requests before, log-normal. It keeps the
    last one's blocks, all or the first of them, and adds some. What was asked lately is asked again more probably, so
    that few families have many of the requests, and most blocks are used once.

        request 7    s a b            s: common to all; begins a family
        request 8    s c d e          single
        request 9    s a b f          goes on from 7, keeps everything
        request 12   s a g h          goes on from 9, lag 3, keeps half of it
    """

    name: str
    num_requests: int
    # Requests per second.
    rate: float
    # Variance over mean of the requests in a minute; 1: Poisson.
    dispersion: float
    # Of the requests, those that nothing goes on from, and those that go on; the others begin families.
    single: float
    continued: float
    single_input: Lengths
    first_input: Lengths
    # What a request that goes on adds to what it keeps.
    added: Lengths
    longest: int
    # Of the requests that go on, those that keep everything; and the share of it that others keep.
    whole: float
    kept_mean: float
    kept_sd: float
    # Requests back to the family's last one: the median, and the standard deviation of the logarithm.
    lag_median: float
    lag_sigma: float
    output: Lengths
    # Blocks that begin every prompt.
    num_common: int = 0

    def prompts(self, seed: int) -> list[Prompt]:
        rng = np.random.default_rng(seed)
        n = self.num_requests
        kind = rng.random(n)
        lengths = self.first_input.draw(rng, n, self.longest)
        singles = self.single_input.draw(rng, n, self.longest)
        added = self.added.draw(rng, n, self.longest)
        outputs = self.output.draw(rng, n)
        starts = bursty_times(rng, n, self.rate, self.dispersion)
        lags = np.maximum(1, np.round(self.lag_median * np.exp(self.lag_sigma * rng.standard_normal(n))))
        kept = np.where(rng.random(n) < self.whole, 1.0, rng.beta(*_beta(self.kept_mean, self.kept_sd), n))
        found: list[Prompt] = []
        # Where the last request of each family stands, ascending.
        last: list[int] = []
        next_block = self.num_common
        for i in range(n):
            length, before = int(lengths[i]), np.arange(self.num_common)
            if kind[i] < self.single:
                length = int(singles[i])
            elif kind[i] < self.single + self.continued and last:
                source = found[last.pop(_nearest(last, i - int(lags[i])))]
                # A last block that is cut short is not kept.
                num_kept = max(self.num_common, round(float(kept[i]) * (source.input_len // BLOCK)))
                before = source.blocks[:num_kept]
                length = min(self.longest, BLOCK * len(before) + int(added[i]))
            if kind[i] >= self.single:
                last.append(i)
            num_blocks = -(-length // BLOCK)
            before = before[:num_blocks]
            fresh = np.arange(next_block, next_block + num_blocks - len(before))
            next_block += len(fresh)
            blocks = np.concatenate((before, fresh))
            found.append(Prompt(float(starts[i]), blocks, length, int(outputs[i])))
        return found

    def generate(self, seed: int) -> Workload:
        none = np.empty(0, np.int32)
        talks = [
            Conversation(p.start, none, (Turn(tokens_of_hashes(p.blocks)[: p.input_len], p.output_len),))
            for p in self.prompts(seed)
        ]
        return Workload(self.name, tuple(talks), max_in_flight=None)


def _nearest(places: list[int], wanted: int) -> int:
    """The index of the place that is nearest. places: ascending."""
    after = bisect_left(places, wanted)
    if after == len(places) or (after and wanted - places[after - 1] <= places[after] - wanted):
        return after - 1
    return after


def _beta(mean: float, sd: float) -> tuple[float, float]:
    """Parameters of the distribution on (0, 1) with this mean and standard deviation."""
    both = mean * (1 - mean) / (sd * sd) - 1
    if both <= 0:
        raise ValueError(f"no share has the mean {mean:g} and the standard deviation {sd:g}")
    return mean * both, (1 - mean) * both


def tokens_of_hashes(hashes: np.ndarray) -> np.ndarray:
    """(n * BLOCK,) int32: BLOCK ids per hash, the same for the same hash."""
    x: np.ndarray = (hashes.astype(np.uint64)[:, None] << np.uint64(9)) + np.arange(BLOCK, dtype=np.uint64)
    x = splitmix64(x)
    return (FIRST_TOKEN + x % np.uint64(LAST_TOKEN - FIRST_TOKEN)).astype(np.int32).ravel()


# -- parts ----------------------------------------------------------------------------------------------------------


def random_tokens(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.integers(FIRST_TOKEN, LAST_TOKEN, n, dtype=np.int32)
