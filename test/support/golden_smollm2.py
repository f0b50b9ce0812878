"""The prompts of the gate on the trained model, and the golden file with what transformers answers to them.

    python -m support.golden_smollm2 --record

Thirty prompts of the demo's pages: with the chat template and without, of 5 to 512 tokens, several questions
about one page, and conversations of two turns. The file keeps their tokens, so that a page may change without it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sglang.demo import page_text
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.smollm2_model import SMOLLM2
from support.golden import (
    Golden,
    GoldenAnswer,
    GoldenPage,
    greedy_answer,
    page_logprobs,
    reference_model,
    write_golden,
)

# Page -> questions about its beginning.
QUESTIONS = {
    "lighthouses": (
        "Where was the Pharos built?",
        "Who finished the first tower on the Eddystone rocks in 1698?",
        "Who built the third tower on the Eddystone rocks?",
        "In which city does the Tower of Hercules stand near?",
    ),
    "honeybees": (
        "What are the males in a colony called?",
        "How many eggs can the queen lay in one day?",
        "What food makes a larva become a queen?",
        "How many days does a queen need from egg to adult bee?",
    ),
    "tea": (
        "What is the name of the plant that all real tea comes from?",
        "Who wrote the first book about tea?",
        "What is the fine green powder called?",
        "Which princess from Portugal loved tea?",
    ),
}
CONVERSATIONS = {
    "panama_canal": ("How long is the Panama Canal?", "Who led the French attempt to build it?"),
    "bicycle": ("Who built the first machine with two wheels in a line?", "In which city?"),
    "concrete": ("Which Roman building has the largest dome?", "Who got a patent for Portland cement?"),
    "tea": ("Where does tea come from?", "And who brought it to Europe?"),
}
# Words of the page before a question: of several questions, of a conversation.
PAGE_WORDS, CONVERSATION_WORDS = 330, 170
# Page -> tokens of its beginning, which the model goes on with.
CONTINUED = {"bicycle": 512, "concrete": 321, "honeybees": 200, "lighthouses": 129, "panama_canal": 97, "tea": 48}
SHORT = ("The capital of France is", "Once upon a time", "1, 2, 3, 4, 5,")
CHAT = "Give me three names for a cat."
PAGE_TOKENS = 449
TURN_END = "<|im_end|>"


@dataclass
class Recorder:
    tokenizer: Any
    model: Any
    answers: list[GoldenAnswer] = field(default_factory=list)

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return found

    def chat(self, text: str) -> list[int]:
        turn = [{"role": "user", "content": text}]
        return self.ids(self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))

    def ask(self, name: str, prompt: list[int]) -> GoldenAnswer:
        answer = msgspec.structs.replace(greedy_answer(self.model, prompt), name=name)
        self.answers.append(answer)
        text = self.tokenizer.decode(answer.tokens)
        print(f"{name}: {len(prompt)} tokens, least gap {min(answer.gaps):.4f}, {text!r}", flush=True)
        return answer

    def next_turn(self, former: GoldenAnswer, text: str) -> list[int]:
        """former and its answer, with another question."""
        (end,) = self.ids(TURN_END)
        answer = former.tokens[: former.tokens.index(end)] if end in former.tokens else former.tokens
        turn = f"{TURN_END}\n<|im_start|>user\n{text}{TURN_END}\n<|im_start|>assistant\n"
        return [*former.prompt, *answer, *self.ids(turn)]

    def record(self) -> Golden:
        for page, questions in QUESTIONS.items():
            for i, question in enumerate(questions):
                self.ask(f"{page}-{i}", self.chat(f"{words(page, PAGE_WORDS)}\nQuestion: {question}"))
        for page, (first, second) in CONVERSATIONS.items():
            answer = self.ask(f"{page}-turn-1", self.chat(f"{words(page, CONVERSATION_WORDS)}\n{first}"))
            self.ask(f"{page}-turn-2", self.next_turn(answer, second))
        for page, num_tokens in CONTINUED.items():
            self.ask(f"{page}-on", self.ids(page_text(page))[:num_tokens])
        for i, text in enumerate(SHORT):
            self.ask(f"short-{i}", self.ids(text))
        self.ask("chat", self.chat(CHAT))
        return Golden(self.answers, list(self.pages()))

    def pages(self) -> Iterator[GoldenPage]:
        for name in CONTINUED:
            tokens = self.ids(page_text(name))[:PAGE_TOKENS]
            yield GoldenPage(name, tokens, page_logprobs(self.model, tokens))


def words(page: str, count: int) -> str:
    """The first words of a page, to the end of a sentence."""
    text = " ".join(page_text(page).split()[:count])
    return text[: text.rindex(".") + 1]


def main() -> None:
    parser = argparse.ArgumentParser(description="write the golden file of the gate on the trained model")
    parser.add_argument("--record", action="store_true", required=True, help="ask transformers and write the file")
    parser.parse_args()
    from transformers import AutoTokenizer

    config = ModelConfig.from_pretrained(SMOLLM2, dtype="float32")
    recorder = Recorder(AutoTokenizer.from_pretrained(config.local_path), reference_model(config))
    golden = recorder.record()
    write_golden(golden)
    print(f"{len(golden.answers)} answers, {sum(len(each.prompt) for each in golden.answers)} tokens of prompts")


if __name__ == "__main__":
    main()
