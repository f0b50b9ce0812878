"""`python -m sglang.bench_serving`: measures a running server under load, and prints a table and JSON lines.

Owns the order of a benchmark; its parts are in `serving_benchmark`. Flags, labels and keys are upstream's.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson
from tqdm import tqdm

from sglang.serving_benchmark import metrics, plot, report
from sglang.serving_benchmark.arguments import FIT, parse
from sglang.serving_benchmark.arrivals import poisson_starts, trace_starts
from sglang.serving_benchmark.backends import BACKENDS, Settings
from sglang.serving_benchmark.datasets.errors import DatasetError
from sglang.serving_benchmark.datasets.registry import DATASETS
from sglang.serving_benchmark.datasets.traces import fitting_scale
from sglang.serving_benchmark.http_stream import Server, key_header
from sglang.serving_benchmark.records import RequestRecord
from sglang.serving_benchmark.runner import Outcome, Runner, Target
from sglang.serving_benchmark.server_facts import (
    ServerError,
    ServerFacts,
    ask_facts,
    check_alive,
    flush_cache,
    wait_ready,
)
from sglang.serving_benchmark.vocabulary import Vocabulary, VocabularyError
from sglang.serving_benchmark.workload import Limits, Message, Workload, first_requests, fit, made_up

_WARMUP_OUTPUT_LEN = 32
# Tokens that a chat template puts around a first and a later message: enough for those in use.
_CHAT_EXTRA, _CHAT_TURN_EXTRA = 64, 16
# Of a prompt, that the server may count otherwise than the tokenizer.
_COUNT_TOLERANCE = 0.1
# Of the warm-up's texts: no run's.
_WARMUP_SALT = 1 << 40
INTERRUPTED = 130


class Progress:
    """The bar of one run."""

    def __init__(self, total: int, label: str, is_shown: bool) -> None:
        self._bar = tqdm(total=total, desc=label, unit="req", disable=None if is_shown else True, dynamic_ncols=True)
        self._failed = 0
        self._tokens = 0

    def add(self, record: RequestRecord) -> None:
        self._failed += not record.has_succeeded
        self._tokens += record.output_len
        self._bar.set_postfix({"tokens": self._tokens, "failed": self._failed}, refresh=False)
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


class Benchmark:
    """One command: a server, a workload, and one run per rate."""

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self._dataset = DATASETS[args.dataset_name]
        self._results: list[dict[str, Any]] = []

    async def run(self) -> int:
        """The exit code. Raises an error whose message is one sentence for the user."""
        args = self._args
        server = self._server()
        await wait_ready(server, args.ready_check_timeout_sec, _tell)
        facts = await ask_facts(server)
        target = self._target(server, facts)
        vocabulary = self._vocabulary(facts, target)
        workload = self._workload(vocabulary, facts, target)
        _tell(
            f"{server.url}, model {target.settings.model}, dataset {args.dataset_name}, seed {args.seed}, "
            f"requests: {workload.num_requests}, sessions: {len(workload.sessions)}"
        )
        notes = list(workload.notes)
        notes += await self._warm_up(target, vocabulary, workload)
        if "trace" in args.request_rate and args.mooncake_slowdown_factor != 1:
            notes.append(f"Times and delays are those of the trace, times {args.mooncake_slowdown_factor:g}.")
        if args.benchmark_duration:
            notes.append(f"A rate ends after {args.benchmark_duration:g} s (--benchmark-duration).")
        if len(args.request_rate) > 1 and not self._dataset.is_made_up and not args.flush_cache:
            notes.append("Every rate sends the same texts, which the cache has after the first: see --flush-cache.")
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, _interrupt, stop)
        problem = None
        for number, rate in enumerate(args.request_rate):
            try:
                if number:
                    await check_alive(server)
                if args.flush_cache:
                    await flush_cache(server, target.backend.flush_path)
            except ServerError as error:
                if not number:
                    raise
                problem = f"{error} Not measured: {_rates_text(args.request_rate[number:])}."
                break
            outcome = await self._measure(number, rate, workload, (target, vocabulary), stop)
            self._results.append(self._result(outcome, rate, workload, facts, target, notes))
            print(report.table(self._results[-1], notes), flush=True)
            self._write(self._results[-1], outcome)
            if stop.is_set():
                break
        return self._finish(stop.is_set(), notes, problem)

    def _server(self) -> Server:
        args = self._args
        try:
            headers = key_header(os.environ.get("OPENAI_API_KEY"))
        except ValueError as error:
            raise ServerError(f"OPENAI_API_KEY {error}.") from None
        host = f"[{args.host}]" if ":" in args.host else args.host
        url = args.base_url or f"http://{host}:{args.port}"
        try:
            return Server.from_url(url, headers)
        except ValueError as error:
            raise ServerError(f"{error}: name another with --base-url.") from None

    def _target(self, server: Server, facts: ServerFacts) -> Target:
        args = self._args
        model = args.served_model_name or args.model or facts.model
        if model is None:
            raise ServerError(f"{server.url} lists no model: name one with --model.")
        settings = Settings(
            model=model,
            stream=not args.disable_stream,
            ignore_eos=not args.disable_ignore_eos,
            temperature=args.temperature,
            top_p=args.top_p,
            timeout_s=args.request_timeout_sec,
            extra_body=args.extra_request_body,
        )
        return Target(server, BACKENDS[args.backend], settings, args.tokenize_prompt, args.apply_chat_template)

    def _vocabulary(self, facts: ServerFacts, target: Target) -> Vocabulary:
        return Vocabulary.load(self._args.tokenizer or facts.tokenizer or target.settings.model)

    def _workload(self, vocabulary: Vocabulary, facts: ServerFacts, target: Target) -> Workload:
        args = self._args
        is_chat = target.backend.is_chat or target.applies_template
        limits = Limits(
            args.context_len or facts.max_total_len,
            _CHAT_EXTRA if is_chat else vocabulary.num_special_tokens,
            _CHAT_TURN_EXTRA if is_chat else 0,
        )
        whole = self._build(vocabulary, limits)
        workload = fit(whole, limits)
        if not workload.sessions:
            if not whole.sessions:
                raise DatasetError(f"The dataset {args.dataset_name} has no requests.")
            more = "; --scale-lengths fit shortens them" if self._dataset.is_trace else ""
            what = f"has no request of at most {limits.max_total_len} tokens"
            raise DatasetError(f"The dataset {args.dataset_name} {what}, answer included{more}.")
        if workload.num_dropped:
            note = f"{workload.num_dropped} requests do not fit the {limits.max_total_len} tokens of the server."
            workload = replace(workload, notes=(*workload.notes, note))
        return workload

    def _build(self, vocabulary: Vocabulary, limits: Limits) -> Workload:
        args = self._args
        if args.scale_lengths != FIT:
            return self._first(args, vocabulary)
        if limits.max_total_len is None:
            raise DatasetError("The server does not tell its longest request: give --context-len for fit.")
        factor = fitting_scale(self._first(Namespace(**vars(args) | {"scale_lengths": 1.0}), vocabulary), limits)
        whole = self._first(Namespace(**vars(args) | {"scale_lengths": factor}), vocabulary)
        most = limits.max_total_len
        rule = (
            f"The factor is the largest, down to one token a block, at which all fit the {most} tokens of the server."
        )
        return replace(whole, notes=(*whole.notes, rule))

    def _first(self, args: Namespace, vocabulary: Vocabulary) -> Workload:
        workload = first_requests(self._dataset.build(args, vocabulary), args.num_prompts)
        if not self._dataset.is_trace:
            return workload
        rule = f"Sent are the trace's first {workload.num_requests} requests, {len(workload.sessions)} sessions."
        return replace(workload, notes=(rule, *workload.notes))

    async def _warm_up(self, target: Target, vocabulary: Vocabulary, workload: Workload) -> list[str]:
        """Sentences about what it showed. Raises `ServerError` if no request succeeds."""
        count = self._args.warmup_requests
        if not count:
            return []
        session = workload.sessions[0]
        length = session.turns[0].message.num_tokens + (session.context.num_tokens if session.context else 0)
        output_len = min(session.turns[0].output_len, _WARMUP_OUTPUT_LEN)
        runner = Runner(target, vocabulary, salt=self._args.seed + _WARMUP_SALT)
        slots = asyncio.Semaphore(self._args.max_concurrency or count)

        async def ask(message: Message) -> RequestRecord:
            async with slots:
                return await runner.ask_once(message, output_len)

        records = await asyncio.gather(*(ask(made_up(key, length)) for key in range(count)))
        done = [record for record in records if record.has_succeeded]
        if not done:
            raise ServerError(f"The warm-up failed: {(records[0].error or '').rstrip('.')}.")
        counted = done[0].prompt_len - vocabulary.num_special_tokens
        is_plain = not (target.backend.is_chat or target.applies_template)
        if is_plain and abs(counted - length) > max(_COUNT_TOLERANCE * length, 2):
            return [
                f"The server counts {counted} tokens where the tokenizer counts {length}. Name the model's tokenizer "
                "with --tokenizer."
            ]
        return []

    async def _measure(
        self, number: int, rate: float | str, workload: Workload, to: tuple[Target, Vocabulary], stop: asyncio.Event
    ) -> Outcome:
        """number: of the rate. Each rate has other texts, because the cache has those before."""
        args = self._args
        if isinstance(rate, str):
            starts = trace_starts(workload, args.mooncake_slowdown_factor)
        else:
            starts = poisson_starts(workload, rate, args.seed)
        _tell(f"measuring at rate {report.rate_text(rate)}; Ctrl-C ends it and shows what was measured")
        progress = Progress(workload.num_requests, f"rate {report.rate_text(rate)}", not args.disable_tqdm)
        runner = Runner(
            *to,
            max_concurrency=args.max_concurrency,
            max_duration_s=args.benchmark_duration,
            salt=args.seed + (number << 32),
            on_end=progress.add,
        )
        try:
            return await runner.run(workload, starts, stop)
        finally:
            progress.close()

    def _result(
        self,
        outcome: Outcome,
        rate: float | str,
        workload: Workload,
        facts: ServerFacts,
        target: Target,
        notes: Sequence[str],
    ) -> dict[str, Any]:
        args = self._args
        return {
            "tag": args.tag,
            "backend": args.backend,
            "model": target.settings.model,
            "dataset_name": args.dataset_name,
            "dataset_path": args.dataset_path or None,
            "request_rate": rate,
            "max_concurrency": args.max_concurrency,
            "num_prompts": workload.num_requests,
            "num_sessions": len(workload.sessions),
            "seed": args.seed,
            "sharegpt_output_len": args.sharegpt_output_len,
            "random_input_len": args.random_input_len,
            "random_output_len": args.random_output_len,
            "random_range_ratio": args.random_range_ratio,
            "length_scale": workload.length_scale,
            "dropped": workload.num_dropped,
            "notes": list(notes),
            "arguments": vars(args),
            "server_info": facts.info,
            **metrics.summarize(outcome),
        }

    def _write(self, result: dict[str, Any], outcome: Outcome) -> None:
        line = result | metrics.details(outcome.records) if self._args.output_details else result
        try:
            with open(self._output_file(), "ab") as file:
                file.write(orjson.dumps(report.json_ready(line)) + b"\n")
        except OSError as error:
            raise ServerError(f"The result cannot be written to {self._output_file()}: {error.strerror}.") from None

    def _output_file(self) -> Path:
        args = self._args
        name = f"{args.backend}_{datetime.now():%m%d}_{args.num_prompts}_{args.dataset_name}.jsonl"
        return Path(args.output_file or name)

    def _finish(self, was_interrupted: bool, notes: Sequence[str], problem: str | None) -> int:
        """problem: why rates were left out. Returns the exit code."""
        problems = [] if problem is None else [problem]
        if len(self._results) > 1:
            print(report.comparison(self._results))
        failed = [result["request_rate"] for result in self._results if not result["completed"]]
        print(f"\nResults were added to {self._output_file()}.")
        if self._args.plot and len(failed) < len(self._results):
            try:
                plot.draw(self._results, self._args.plot, notes)
                print(f"Load against latency is drawn in {self._args.plot}.")
            except OSError as error:
                problems.append(f"the plot cannot be written to {self._args.plot}: {error.strerror}")
        if was_interrupted:
            print("The run was interrupted.")
        elif failed:
            problems.append(f"no request succeeded at {_rates_text(failed)}")
        for each in problems:
            _tell(each)
        return INTERRUPTED if was_interrupted else int(bool(problems))


def _rates_text(rates: Sequence[float | str]) -> str:
    return f"rate{'s' if len(rates) > 1 else ''} {', '.join(map(report.rate_text, rates))}"


def _tell(sentence: str) -> None:
    print(f"bench_serving: {sentence}", file=sys.stderr, flush=True)


def _interrupt(stop: asyncio.Event) -> None:
    """The first time, measuring ends; the second, the process."""
    if stop.is_set():
        os._exit(INTERRUPTED)
    stop.set()


def _allow_connections() -> None:
    """Every request under way has a file descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard) if soft < hard else (soft, hard))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    _allow_connections()
    try:
        import uvloop

        return uvloop.run(Benchmark(args).run())
    except (ServerError, DatasetError, VocabularyError) as error:
        _tell(str(error))
        return 1
    except KeyboardInterrupt:
        _tell("interrupted before anything was measured")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
