"""What a short request waits for beside a prompt that is longer than the device, and what it costs that prompt.

    python benchmark/bench_beside_streaming.py [--rounds N] [--quick]

A real server on the CPU, the embedded model, layer streaming with the device for a sixth of the long prompt. In each
round the long prompt comes alone, then with short requests of each length. A short request is sent right after a
chunk of the long prompt was launched, so that it waits for nearly all of the chunk. One short request is there at a
time. The cache is flushed before each.

*chunk*: the median of the two chunks before the short request came, in the same run; a later one takes little longer.
In decode it is a decode step of the long request. *alone*: the same lengths on the idle server, in the same round.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import numpy as np
from common import print_table, write_json

from support.server_fixture import PATIENCE_S, Server, wait_until

# The server, in tokens.
CHUNK, DEVICE = 512, 4096
FLAGS = (
    f"--hicache --max-total-tokens {DEVICE} --hicache-ratio 7 --chunked-prefill-size {CHUNK} --page-size 16 "
    "--layer-stream 2 --layer-stream-tokens 1024"
)
# Prompt and output of the long request, and the output of a short one.
LONG, LONG_OUTPUT, SHORT_OUTPUT = 24_000, 64, 32
# The first fits into one launch, the second takes three.
SHORT = (200, 1200)
# When short requests come: shares of the long prompt, and then tokens of its answer.
PREFILL_AT, DECODE_AT = (0.1, 0.3, 0.5, 0.7, 0.85), (6, 24, 42)
POLL_S = 0.02


def body(ids: list[int], max_new_tokens: int) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": params, "stream": True}


@dataclass
class Answer:
    """A request in a thread of its own."""

    sent_s: float = 0.0
    # When each piece of the answer came.
    pieces_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.pieces_s[0] - self.sent_s

    @property
    def total_s(self) -> float:
        return self.pieces_s[-1] - self.sent_s

    def begin(self, server: Server, ids: list[int], max_new_tokens: int) -> threading.Thread:
        thread = threading.Thread(target=self._read, args=(server, body(ids, max_new_tokens)))
        thread.start()
        return thread

    def _read(self, server: Server, wanted: dict[str, Any]) -> None:
        self.sent_s = time.perf_counter()
        with httpx.stream("POST", server.url + "/generate", json=wanted, timeout=PATIENCE_S) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    reply = msgspec.json.decode(line.removeprefix("data: "))
                    assert "error" not in reply, reply
                    self.pieces_s.append(time.perf_counter())


@dataclass(frozen=True)
class Sample:
    """A short request beside the long one."""

    # Its prompt's tokens.
    num_tokens: int
    # Where the long request was: a share of its prompt, or a token of its answer.
    moment: str
    # Of the long request: a chunk, or a decode step.
    chunk_s: float
    ttft_s: float
    total_s: float


class Progress:
    """How much of the long prompt has been launched, and when: polled."""

    def __init__(self, server: Server) -> None:
        self._client = httpx.Client(base_url=server.url, timeout=PATIENCE_S)
        self.computed = 0
        # When each chunk was launched, the first one's left out.
        self.launched_s: list[float] = []

    def poll(self) -> int:
        state = self._client.get("/hicache/state").json()["layer_stream"]
        computed = state["resident_tokens"] + state["streamed_tokens"]
        if computed > self.computed:
            self.launched_s.append(time.perf_counter())
            self.computed = computed
        return self.computed

    def wait_for(self, computed: float) -> float:
        """Until a chunk is launched that comes to this token. Returns the seconds of a chunk before it."""
        before = self.computed
        while self.poll() < computed or self.computed == before:
            time.sleep(POLL_S)
        return statistics.median(b - a for a, b in itertools.pairwise(self.launched_s[-3:]))


def ask(server: Server, ids: list[int]) -> Answer:
    answer = Answer()
    answer.begin(server, ids, SHORT_OUTPUT).join()
    assert len(answer.pieces_s) >= 1, "the request failed"
    return answer


def run_long(server: Server, rng: np.random.Generator, num_tokens: int) -> tuple[Answer, list[Sample]]:
    """The long request, with short ones of so many tokens; 0 for none."""
    flush(server)
    long, samples = Answer(), []
    thread = long.begin(server, prompt(rng, LONG), LONG_OUTPUT)
    if num_tokens:
        progress = Progress(server)
        for share in PREFILL_AT:
            chunk_s = progress.wait_for(share * LONG)
            answer = ask(server, prompt(rng, num_tokens))
            assert not long.pieces_s, "the long prompt ended before the short request: take a longer one"
            samples.append(Sample(num_tokens, f"{share:.0%} of the prompt", chunk_s, answer.ttft_s, answer.total_s))
            # The chunks that follow are the measure for the next one.
            progress.poll()
        for number in DECODE_AT:
            wait_until(lambda number=number: len(long.pieces_s) >= number)
            steps = [b - a for a, b in itertools.pairwise(long.pieces_s[-5:])]
            answer = ask(server, prompt(rng, num_tokens))
            samples.append(
                Sample(num_tokens, f"token {number}", statistics.median(steps), answer.ttft_s, answer.total_s)
            )
    thread.join()
    assert len(long.pieces_s) > LONG_OUTPUT // 2, "the long request failed"
    return long, samples


def flush(server: Server) -> None:
    wait_until(lambda: server.post("/flush_cache").status_code == 200)


def prompt(rng: np.random.Generator, num_tokens: int) -> list[int]:
    return rng.integers(300, 1900, num_tokens).tolist()


@dataclass
class Found:
    """alone: by the short prompt's tokens. long: by the tokens of the short ones beside it."""

    alone: dict[int, list[Answer]] = field(default_factory=lambda: {n: [] for n in SHORT})
    samples: list[Sample] = field(default_factory=list)
    long: dict[int, list[Answer]] = field(default_factory=lambda: {n: [] for n in (0, *SHORT)})


def measure(server: Server, rounds: int) -> Found:
    found = Found()
    rng = np.random.default_rng(1)
    for num_tokens in SHORT:
        ask(server, prompt(rng, num_tokens))
    for _ in range(rounds):
        for num_tokens in found.long:
            for each in SHORT:
                flush(server)
                found.alone[each].append(ask(server, prompt(rng, each)))
            long, samples = run_long(server, rng, num_tokens)
            found.long[num_tokens].append(long)
            found.samples += samples
    return found


def rows_of(found: Found) -> list[dict[str, Any]]:
    rows = []
    for num_tokens in SHORT:
        alone = [answer.ttft_s for answer in found.alone[num_tokens]]
        whole = [answer.total_s for answer in found.alone[num_tokens]]
        own = statistics.median(alone)
        for moment in dict.fromkeys(s.moment for s in found.samples):
            samples = [s for s in found.samples if s.num_tokens == num_tokens and s.moment == moment]
            ratios = [s.ttft_s / (s.chunk_s + own) for s in samples]
            total = statistics.median(whole)
            shares = [s.total_s / (s.chunk_s + 2 * total) for s in samples]
            rows.append(
                {
                    "short, tokens": num_tokens,
                    "sent at": moment,
                    "chunk or step, s": statistics.median(s.chunk_s for s in samples),
                    "alone: TTFT, s": own,
                    "TTFT, s": statistics.median(s.ttft_s for s in samples),
                    "TTFT / (chunk + alone)": statistics.median(ratios),
                    "worst": max(ratios),
                    "alone: total, s": total,
                    "total, s": statistics.median(s.total_s for s in samples),
                    "total / (chunk + 2 alone)": statistics.median(shares),
                    "worst total": max(shares),
                }
            )
    return rows


def long_rows(found: Found) -> list[dict[str, Any]]:
    """Ratios within a round."""
    rows = []
    for num_tokens, answers in found.long.items():
        ratios = [answer.ttft_s / alone.ttft_s for answer, alone in zip(answers, found.long[0])]
        rows.append(
            {
                "short ones, tokens": num_tokens or "none",
                "long prompt: TTFT, s": statistics.median(answer.ttft_s for answer in answers),
                "times alone": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="one round")
    args = parser.parse_args()
    with Server(*FLAGS.split()) as server:
        found = measure(server, 1 if args.quick else args.rounds)
        counters = server.state()["counters"]
        assert counters["streamed_reqs"] == sum(len(answers) for answers in found.long.values())
    rows, long = rows_of(found), long_rows(found)
    print_table("Short requests beside a long one", rows)
    print_table("The long prompt", long)
    retracted = {name: counters.get(name, 0) for name in ("retracted_reqs", "streamed_reqs", "spilled_tokens")}
    write_json("bench_beside_streaming", vars(args), [*rows, *long], counters=retracted)


if __name__ == "__main__":
    main()
