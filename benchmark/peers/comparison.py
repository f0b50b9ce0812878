"""`Comparison`: the scenarios, the turns of the servers, and the rows that come of them.

Owns the rows, and which servers take part. Starts a server, and stops one that fails; who made the servers stops the
others.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmark.peers.deadline import Deadline
from benchmark.peers.scenarios import (
    Asking,
    Prompts,
    RequestError,
    ask_all,
    cached_share,
    decode_step_s,
    first_token_s,
)
from benchmark.peers.servers import RunningServer, ServerError, forget_pages

from sglang.serving_benchmark.records import RequestRecord

# 0.5 GiB of this model's KV.
MEMORY_TOKENS = 11648
DOCUMENT, QUESTION, ANSWER = 1152, 24, 16
SHORT, LONG = 32, 4000
# More documents than all memory holds.
NUM_DOCUMENTS = 14
# Of the documents that are asked about after a restart.
NUM_RESTARTED = 6
# Of one request, to the end of its answer. llama.cpp took 7 s for a prompt of 2,048 tokens; the longest has 4,000.
REQUEST_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Scenario:
    name: str
    # (server, number of the round) -> seconds, and the share of prompt tokens that were cached, if that matters and
    # the server reports it.
    measure: Callable[[RunningServer, int], tuple[float, float | None]]
    rounds: int
    # Requests under way at a time.
    at_once: int = 1


@dataclass(frozen=True)
class Turn:
    """What one server did in one round."""

    seconds: float
    cached: float | None


class Comparison:
    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline
        # Those that take part. The first is ours.
        self.servers: list[RunningServer] = []
        self.rows: list[dict[str, object]] = []
        # Name of a server that failed -> why.
        self.dropped: dict[str, str] = {}

    def start(self, server: RunningServer) -> None:
        """It takes part from now on, unless it fails. Raises `ServerError` if it is ours, or `OutOfTime`."""
        self.servers.append(server)
        try:
            server.start()
            self.warm_up(server)
        except ServerError as error:
            self._drop(error)

    def ask(
        self, server: RunningServer, prompts: Sequence[Sequence[int]], tokens: int, at_once: int
    ) -> list[RequestRecord]:
        """Raises `ServerError`, or `OutOfTime`."""
        asking = Asking(
            server.url,
            str(server.setting.model),
            tokens,
            at_once,
            lambda: self.deadline.within(REQUEST_TIMEOUT_S),
        )
        try:
            return ask_all(asking, prompts)
        except RequestError as error:
            self.deadline.check()
            raise server.failure(str(error)) from None

    def warm_up(self, server: RunningServer) -> None:
        """What is set up lazily."""
        self.ask(server, [Prompts(i).text(64 * (i + 1)) for i in range(4)], 8, 4)

    def run(self, scenario: Scenario) -> None:
        """Every server that computes so many requests together takes part. Rows come of the rounds that a peer and
        ours have both been through, however this ends. Raises `ServerError` if ours fails, or `OutOfTime`."""
        servers = [server for server in self.servers if server.kind.most_at_once >= scenario.at_once]
        if len(servers) == 1:
            return
        turns: dict[str, dict[int, Turn]] = {server.kind.name: {} for server in servers}
        try:
            for number in range(scenario.rounds):
                for server in servers if number % 2 == 0 else servers[::-1]:
                    turn = self._take_turn(scenario, server, number)
                    if turn is not None:
                        turns[server.kind.name][number] = turn
        finally:
            ours = servers[0].kind.name
            for peer in list(turns)[1:]:
                rounds = sorted(turns[ours].keys() & turns[peer].keys())
                if rounds:
                    self._add_row(scenario.name, (ours, peer), turns, rounds)

    def _take_turn(self, scenario: Scenario, server: RunningServer, number: int) -> Turn | None:
        """None: the server has dropped out."""
        while server in self.servers:
            try:
                for each in self.servers:
                    each.wait_until_idle()
                return Turn(*scenario.measure(server, number))
            except ServerError as error:
                # If another one failed while this one waited for it, this one goes on.
                self._drop(error)
        return None

    def _drop(self, error: ServerError) -> None:
        """Go on without a server. Raises the error if it is ours."""
        print(f"\n{error}. The end of its log:\n{error.log}\n", file=sys.stderr, flush=True)
        is_ours = error.server is self.servers[0]
        self.servers.remove(error.server)
        self.dropped[error.server.kind.name] = str(error)
        error.server.stop()
        if is_ours:
            raise error

    def _add_row(
        self,
        what: str,
        names: tuple[str, str],
        turns: Mapping[str, Mapping[int, Turn]],
        rounds: Sequence[int],
    ) -> None:
        """names: ours, the peer."""
        ours, peer = ([turns[name][number] for number in rounds] for name in names)
        ratios = [b.seconds / a.seconds for a, b in zip(ours, peer)]
        ours_ms, peer_ms = (statistics.median(turn.seconds for turn in each) * 1e3 for each in (ours, peer))
        row: dict[str, object] = {
            "what": what,
            "peer": names[1],
            "ours ms": ours_ms,
            "peer ms": peer_ms,
            "ratio": statistics.median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
            "rounds": len(rounds),
        }
        for column, each in (("ours cached", ours), ("peer cached", peer)):
            shares = [turn.cached for turn in each if turn.cached is not None]
            row[column] = f"{100 * statistics.mean(shares):.0f} %" if shares else ""
        self.rows.append(row)
        print(f"{what}: ours {ours_ms:.0f} ms, {names[1]} {peer_ms:.0f} ms, ratio {spread(row)}", flush=True)

    # -- what is measured ---------------------------------------------------------------------------------------

    def prefill(self, length: int, rounds: int) -> Scenario:
        def measure(server: RunningServer, number: int) -> tuple[float, None]:
            (record,) = self.ask(server, [Prompts(1000 + number).text(length)], 1, 1)
            return first_token_s(record), None

        return Scenario(f"prefill of {length} tokens, alone", measure, rounds)

    def decode(self, num: int, length: int, steps: int, rounds: int) -> Scenario:
        """Long contexts are one document that all requests share, each with a question of its own: a step reads as
        many tokens per request, without a prefill of each."""
        document = Prompts(7).text(length - SHORT) if length > SHORT else []

        def measure(server: RunningServer, number: int) -> tuple[float, None]:
            prompts = Prompts(2000 + 100 * number + num)
            if document:
                self.ask(server, [document + prompts.text(SHORT)], 1, 1)
            found = self.ask(server, [document + prompts.text(SHORT) for _ in range(num)], steps, num)
            return decode_step_s(found), None

        context = f"contexts of {length} tokens"
        return Scenario(f"decode step of {num}, {context}", measure, rounds, num)

    def cached_documents(self, at_once: int, rounds: int) -> Scenario:
        documents = [Prompts(300 + i).text(DOCUMENT) for i in range(8)]

        def measure(server: RunningServer, number: int) -> tuple[float, float | None]:
            if number == 0:
                self.ask(server, [each + Prompts(9).text(QUESTION) for each in documents], 1, 1)
            ask = Prompts(3000 + 10 * number + at_once)
            found = self.ask(server, [each + ask.text(QUESTION) for each in documents], ANSWER, at_once)
            return statistics.median(map(first_token_s, found)), cached_share(found)

        return Scenario(f"first token, cached documents, {at_once} at a time", measure, rounds, at_once)

    def documents_beyond_memory(self, rounds: int) -> tuple[Scenario, Scenario, Scenario]:
        """Each document once, then those of the last round again in the same order: least recently used is the worst
        order. Then after a restart. The disk tier's files are not in the kernel's memory when a turn begins."""

        def documents(number: int) -> list[list[int]]:
            return [Prompts(500 + 100 * number + i).text(DOCUMENT) for i in range(NUM_DOCUMENTS)]

        known = documents(rounds - 1)
        # The servers that were asked about them: --only may leave out the scenario that does so.
        asked: set[str] = set()

        def median_first_token(
            server: RunningServer, which: Sequence[list[int]], salt: int
        ) -> tuple[float, float | None]:
            ask = Prompts(salt)
            found = self.ask(server, [each + ask.text(QUESTION) for each in which], ANSWER, 1)
            return statistics.median(map(first_token_s, found)), cached_share(found)

        def new(server: RunningServer, number: int) -> tuple[float, float | None]:
            if number == rounds - 1:
                asked.add(server.kind.name)
            return median_first_token(server, documents(number), 4001)

        def learn(server: RunningServer) -> None:
            if server.kind.name not in asked:
                new(server, rounds - 1)

        def again(server: RunningServer, number: int) -> tuple[float, float | None]:
            learn(server)
            forget_pages(server.setting.disk)
            return median_first_token(server, known, 4010 + number)

        def restarted(server: RunningServer, number: int) -> tuple[float, float | None]:
            learn(server)
            server.stop()
            forget_pages(server.setting.disk)
            server.start()
            self.warm_up(server)
            return median_first_token(server, known[:NUM_RESTARTED], 4030 + number)

        what = f"first token, {NUM_DOCUMENTS} documents, memory for {MEMORY_TOKENS // DOCUMENT}"
        return (
            Scenario(f"{what}: new", new, rounds),
            Scenario(f"{what}: again", again, rounds),
            Scenario("first token, known documents after a restart", restarted, rounds),
        )


def spread(row: Mapping[str, object]) -> str:
    """A row's ratio, from the lowest to the highest of its rounds."""
    return "{ratio:.2f} ({lowest:.2f} to {highest:.2f})".format_map(row)


def scenarios_of(compare: Comparison, rounds: int) -> list[Scenario]:
    return [
        compare.prefill(512, rounds),
        compare.prefill(2048, rounds),
        *(compare.decode(num, SHORT, 24, rounds) for num in (1, 4, 16, 64)),
        *(compare.decode(num, LONG, 16, rounds) for num in (1, 4, 16)),
        compare.cached_documents(1, rounds),
        compare.cached_documents(8, rounds),
        *compare.documents_beyond_memory(rounds),
    ]
