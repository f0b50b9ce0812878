"""The datasets by their names. A new one is a function of the flags and the vocabulary, and a line here."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from sglang.serving_benchmark.datasets import sharegpt, synthetic, traces
from sglang.serving_benchmark.vocabulary import Vocabulary
from sglang.serving_benchmark.workload import Workload


@dataclass(frozen=True)
class Dataset:
    build: Callable[[Namespace, Vocabulary], Workload]
    # For --help.
    summary: str
    # Whether sessions have times, and lengths can be scaled.
    is_trace: bool = False
    # Whether its texts are made anew for every rate. Texts of a file are the same ones.
    is_made_up: bool = True


DATASETS = {
    "sharegpt": Dataset(sharegpt.chats, "first questions of real chats, from a file", is_made_up=False),
    "random": Dataset(synthetic.random_prompts, "words of the tokenizer, nothing shared"),
    "random-ids": Dataset(synthetic.random_prompts, "the same as random"),
    "generated-shared-prefix": Dataset(synthetic.shared_prefixes, "groups with a common system prompt"),
    "multi-turn": Dataset(synthetic.multi_turn, "conversations with time to think"),
    "loogle": Dataset(synthetic.documents, "LooGLE-like: questions about few long documents"),
    "mooncake": Dataset(traces.mooncake, "Mooncake's traces of chats", is_trace=True),
    "agentic-trace": Dataset(traces.agentic, "sessions of coding agents", is_trace=True),
}
