"""What grammars cost a decode step, and how long one takes to compile.

    python benchmark/bench_grammar.py [--requests 32] [--tokens 64] [--rounds 3]

The engine is real, with SmolLM2. In each round the same prompts are answered freely and with each grammar, so that
what else the machine does meets all alike. A step's time is the slope between short and long answers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

from common import print_table, write_json

from sglang.srt.constrained.check_process import CheckSettings, vocabulary_of
from sglang.srt.constrained.xgrammar_backend import GrammarCompiler
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.entrypoints.startup_checks import resolve_model_path
from sglang.srt.sampling.sampling_params import GrammarSpec

PAGE = {
    "type": "object",
    "properties": {"number": {"type": "integer"}, "text": {"type": "string", "minLength": 400}},
    "required": ["number", "text"],
}
BOOK = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 80},
        "pages": {"type": "array", "items": PAGE, "minItems": 9},
    },
    "required": ["title", "pages"],
}
# None of them is complete before the answer's last token.
GRAMMARS: dict[str, GrammarSpec] = {
    "JSON schema": GrammarSpec("json_schema", json.dumps(BOOK)),
    "regular expression": GrammarSpec("regex", "([A-Z][a-z ]{20,}[.] ){40}"),
    "rules": GrammarSpec("ebnf", 'root ::= word " " root\nword ::= [a-z]+ | "(" word ")"'),
    "nested counts": GrammarSpec("regex", "([A-Z][a-z]{2,12}( [a-z]{1,12}){4,12}[.] ){40}"),
}
SHORT = 4


def answers_s(engine: Engine, num: int, tokens: int, grammars: list[GrammarSpec | None]) -> float:
    """Seconds for all answers, of which each has this many tokens."""
    params = []
    for n in range(num):
        grammar = grammars[n % len(grammars)]
        restricted = {} if grammar is None else {grammar.kind: grammar.source}
        params.append(
            {"max_new_tokens": tokens, "temperature": 0.8, "sampling_seed": n, "ignore_eos": True, **restricted}
        )
    prompts = [f"Page {n} of the book tells of a journey to" for n in range(num)]
    began = time.perf_counter()
    found = engine.generate(prompts, params)
    seconds = time.perf_counter() - began
    assert isinstance(found, list)
    lengths = {answer["meta_info"]["completion_tokens"] for answer in found}
    assert lengths == {tokens}, f"an answer ended early: {lengths}"
    return seconds


def steps(num: int, tokens: int, rounds: int) -> list[dict[str, object]]:
    mixes: dict[str, list[GrammarSpec | None]] = {"no grammar": [None]}
    mixes |= {name: [spec] for name, spec in GRAMMARS.items()}
    mixes[f"1 of {num}: JSON schema"] = [GRAMMARS["JSON schema"], *[None] * (num - 1)]
    step_ms: dict[str, list[float]] = {name: [] for name in mixes}
    with Engine(model_path="smollm2", max_total_tokens=num * (tokens + 64)) as engine:
        for grammars in mixes.values():  # compile, and take the prompts into the cache
            answers_s(engine, num, SHORT, grammars)
        for _ in range(rounds):
            for name, grammars in mixes.items():
                long, short = (answers_s(engine, num, n, grammars) for n in (tokens, SHORT))
                step_ms[name].append(1e3 * (long - short) / (tokens - SHORT))
    free = step_ms["no grammar"]
    return [
        {
            "answers": name,
            "step ms": round(median(found), 1),
            "/ no grammar, median": round(median(a / b for a, b in zip(found, free)), 3),
            "least": round(min(a / b for a, b in zip(found, free)), 3),
            "most": round(max(a / b for a, b in zip(found, free)), 3),
        }
        for name, found in step_ms.items()
    ]


def compilations() -> list[dict[str, object]]:
    path = str(resolve_model_path("smollm2"))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = vocabulary_of(
            CheckSettings(
                tokenizer_path=path,
                vocab_size=49152,
                vocabulary_file=f"{folder}/vocabulary.json",
                max_whitespace=None,
                parent_pid=0,
            )
        )
        size = Path(f"{folder}/vocabulary.json").stat().st_size
    compiler = GrammarCompiler(vocabulary)
    for name, spec in GRAMMARS.items():
        times = []
        for _ in range(5):
            began = time.perf_counter()
            compiled = compiler.compile(spec)
            times.append(time.perf_counter() - began)
        rows.append(
            {"grammar": name, "compile ms": round(1e3 * median(times), 1), "KB": compiled.memory_size_bytes // 1000}
        )
    print(f"the vocabulary's file has {size / 1e6:.1f} MB")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rows = steps(args.requests, args.tokens, args.rounds)
    print_table(f"a decode step of {args.requests} requests, SmolLM2 in float32", rows)
    compiled = compilations()
    print_table("compiling a grammar for its 49,152 tokens", compiled)
    write_json("grammar", vars(args), rows, compilations=compiled)


if __name__ == "__main__":
    main()
