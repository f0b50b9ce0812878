"""`make demo`: questions about pages of text, to a small trained model behind the hierarchical cache.

It starts a server as a user would, asks ten questions with the `openai` client, and shows where the tokens of each
prompt came from. A question whose page was cached is asked again without the cache: the seconds that the cache saved
are measured, and the answers compared. The device pool holds about three of the four pages. In the middle the server
is stopped and started anew: then the pages come from disk. On a terminal the last server stays up.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from sglang.demo_common import Answer, ask, connect, run, server, wait_ready
from sglang.srt.configs.smollm2_model import SMOLLM2, fetched_or_embedded

if TYPE_CHECKING:
    from openai import OpenAI

ANSWER_TOKENS = 40
# Of the device pool and the host pool. The embedded model cuts a page into more tokens.
POOLS = {SMOLLM2: ("4096", "4"), "embedded": ("7168", "4")}
# Questions before the server stops: each of the four pages once, then three of them again.
NUM_BEFORE_RESTART = 7
# Of those that a trained model has to answer right.
NUM_RIGHT = 8
BAR_WIDTH = 48
# What a part of the bar stands for: its sign, which needs no colours, and the number of its colour on terminals.
PARTS = {"device": ("█", 34), "host": ("▓", 32), "disk": ("▒", 33), "computed": ("·", 90)}


@dataclass(frozen=True)
class Question:
    """answer: the word that a right answer holds."""

    page: str
    question: str
    answer: str

    @property
    def prompt(self) -> str:
        return f"{page_text(self.page)}\nQuestion: {self.question}\nAnswer in one short sentence."


@dataclass(frozen=True)
class Asked:
    """uncached: the same question without the cache; None where the page had to be computed anyway."""

    question: Question
    answer: Answer
    uncached: Answer | None

    @property
    def is_right(self) -> bool:
        return self.question.answer.lower() in self.answer.text.lower()

    @property
    def saved_s(self) -> float:
        return self.uncached.ttft_s - self.answer.ttft_s if self.uncached else 0.0

    @property
    def is_same(self) -> bool:
        return self.uncached is None or self.uncached.text == self.answer.text


def page_text(name: str) -> str:
    return (resources.files("sglang") / "demo_documents" / f"{name}.txt").read_text()


def questions() -> list[Question]:
    listed = json.loads((resources.files("sglang") / "demo_documents" / "questions.json").read_text())
    return [Question(**each) for each in listed]


def shares(answer: Answer) -> dict[str, int]:
    """Where the tokens of a prompt came from, in the order of the bar."""
    found = {part: answer.tiers.get(part, 0) for part in PARTS if part != "computed"}
    return found | {"computed": answer.prompt_tokens - sum(found.values())}


def bar(answer: Answer, colours: bool) -> str:
    """BAR_WIDTH characters, as many per part as its share of the prompt's tokens."""
    cells, end = "", 0
    done = 0
    for part, tokens in shares(answer).items():
        end += tokens
        width = round(BAR_WIDTH * end / answer.prompt_tokens) - done
        done += width
        sign, colour = PARTS[part]
        cells += f"\x1b[{colour}m{sign * width}\x1b[0m" if colours and width else sign * width
    return cells


class Interview:
    """Asks the questions one after another and prints what there is to see."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.asked: list[Asked] = []
        self._colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def ask(self, client: OpenAI, question: Question) -> None:
        print(f"Page  {question.page}.txt\nQ     {question.question}\nA     ", end="", flush=True)
        answer = self._answer(client, question, {}, show=True)
        found = ", ".join(f"{tokens} {part}" for part, tokens in shares(answer).items() if tokens)
        print(f"\n      {bar(answer, self._colours)}  {answer.prompt_tokens} tokens: {found}")
        uncached = None
        if 2 * sum(answer.tiers.values()) > answer.prompt_tokens:
            uncached = self._answer(client, question, {"cache": "bypass"})
        asked = Asked(question, answer, uncached)
        self.asked.append(asked)
        if uncached is None:
            print(f"      first word after {answer.ttft_s:.2f} s\n", flush=True)
            return
        same = "the same answer" if asked.is_same else f"ANOTHER ANSWER: {uncached.text!r}"
        print(
            f"      first word after {answer.ttft_s:.2f} s; asked again without the cache {uncached.ttft_s:.2f} s "
            f"and {same}: {asked.saved_s:.1f} s saved\n",
            flush=True,
        )

    def _answer(self, client: OpenAI, question: Question, fields: dict[str, object], show: bool = False) -> Answer:
        messages = [{"role": "user", "content": question.prompt}]
        on_text = (lambda text: print(text, end="", flush=True)) if show else None
        return ask(client, messages, self.model, ANSWER_TOKENS, fields=fields, on_text=on_text)

    def summarise(self) -> bool:
        """Print the sums. Returns whether all is as it should be."""
        total = sum(each.answer.prompt_tokens for each in self.asked)
        parts = {part: sum(shares(each.answer)[part] for each in self.asked) for part in PARTS}
        again = [each for each in self.asked if each.uncached is not None]
        same = sum(each.is_same for each in again)
        right = sum(each.is_right for each in self.asked)
        reused = ", ".join(f"{tokens} from {part}" for part, tokens in parts.items() if part != "computed")
        print(f"prompt tokens   {total}: {parts['computed']} computed, {reused}")
        print(f"saved           {sum(each.saved_s for each in again):.1f} s of waiting in {len(again)} questions")
        print(f"same answers    {same} of {len(again)} with and without the cache")
        if self.model == SMOLLM2:
            print(f"right answers   {right} of {len(self.asked)}; the model has 135 million parameters")
        missing = [part for part in parts if part != "computed" and not parts[part]]
        for part in missing:
            print(f"no tokens came from the {part}: the demo expects some")
        is_good = self.model != SMOLLM2 or right >= NUM_RIGHT
        return is_good and same == len(again) and not missing


def flags(model: str, folder: str) -> list[str]:
    device_tokens, host_ratio = POOLS[model]
    return [
        *("--model-path", model, "--hicache", "--max-total-tokens", device_tokens, "--hicache-ratio", host_ratio),
        *("--hicache-storage-backend", "file"),
        *("--hicache-storage-backend-extra-config", json.dumps({"path": folder})),
    ]


def interview(questions: Sequence[Question], model: str, folder: str) -> bool:
    """Ask all, with a restart in between. The last server is stopped by Ctrl-C on a terminal, else at once."""
    began = time.perf_counter()
    talk = Interview(model)
    legend = ", ".join(f"{sign} {part}" for part, (sign, _) in PARTS.items())
    with server(*flags(model, folder)) as (part, url):
        wait_ready(part, url)
        print(f"ready after {time.perf_counter() - began:.0f} s; where the tokens of a prompt come from: {legend}")
        print("Every prompt begins with the same words of the chat template; the device has them after the first.\n")
        client = connect(url, model)
        for question in questions[:NUM_BEFORE_RESTART]:
            talk.ask(client, question)
    print("The server stops and starts anew: device and host are empty, the disk is not.\n", flush=True)
    with server(*flags(model, folder)) as (part, url):
        wait_ready(part, url)
        client = connect(url, model)
        for question in questions[NUM_BEFORE_RESTART:]:
            talk.ask(client, question)
        good = talk.summarise()
        print(f"done in {time.perf_counter() - began:.0f} s")
        if sys.stdout.isatty():
            print(
                f"\nThe live page of the cache: {url}/hicache   (API: {url}/v1). Ctrl-C ends the server.", flush=True
            )
            with contextlib.suppress(KeyboardInterrupt):
                threading.Event().wait()
    return good


def main() -> int:
    model = fetched_or_embedded(SMOLLM2)
    name = "SmolLM2-135M-Instruct" if model == SMOLLM2 else "the embedded model, whose answers mean nothing,"
    print(
        f"Starting a server of {name} with a device pool of {POOLS[model][0]} tokens, on {os.cpu_count()} cores ...",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="hicache-demo-") as folder:
        return 0 if interview(questions(), model, folder) else 1


if __name__ == "__main__":
    run(main)
