"""The flags of `python -m sglang.bench_serving`. Names and defaults are upstream's where upstream has the flag."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from sglang.serving_benchmark import plot
from sglang.serving_benchmark.backends import BACKENDS
from sglang.serving_benchmark.datasets.registry import DATASETS

_NUM_PROMPTS = 1000
# Bounds of flags. A request takes about a kilobyte of memory before it is sent. No model takes longer texts. A larger
# seed cannot be written as JSON.
_MOST_REQUESTS, _MOST_TOKENS, _MOST_SEED = 1_000_000, 10_000_000, (1 << 64) - 1
# Of --scale-lengths: as the server needs it.
FIT = "fit"
# Fields of a body that hold the prompt, by kind of server.
_PROMPT_FIELDS = ("text", "input_ids", "prompt", "messages")
# Flags of upstream's command for what this one does not measure.
_UPSTREAM_ONLY = {
    *("--agentic-max-turns", "--dataset-offset", "--speed-bench-category", "--speed-bench-output-len"),
    *("--image-count", "--image-resolution", "--random-image-count", "--image-format", "--image-content"),
    *("--print-requests", "--return-logprob", "--top-logprobs-num", "--token-ids-logprob", "--logprob-start-len"),
    *("--return-routed-experts", "--profile", "--plot-throughput", "--profile-activities", "--profile-start-step"),
    *("--profile-steps", "--profile-num-steps", "--profile-by-stage", "--profile-stages", "--profile-output-dir"),
    *("--profile-prefix", "--profile-prefill-url", "--profile-decode-url", "--pd-separated", "--fake-prefill"),
    *("--lora-name", "--lora-request-distribution", "--lora-zipf-alpha", "--prompt-suffix", "--header"),
    *("--gsp-fast-prepare", "--gsp-send-routing-key", "--flush-cache-timeout"),
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Ends the process with a sentence and code 2 if a flag is wrong. `request_rate` is a list; without the flag it
    is ["trace"] for a trace, else [inf]."""
    parser = _parser()
    for word in argv:
        if word.encode(errors="replace").decode() != word:
            # JSON lines, which hold the flags, are UTF-8.
            parser.error(f"{word!r} is no text in UTF-8")
    args, unknown = parser.parse_known_args(argv)
    for word in unknown:
        if word.split("=")[0] in _UPSTREAM_ONLY:
            parser.error(f"{word.split('=')[0]} is a flag of upstream's that is not supported here")
    if unknown:
        parser.error(f"unknown: {' '.join(unknown)}")
    problem = _problem(args)
    if problem:
        parser.error(problem)
    has_times = DATASETS[args.dataset_name].is_trace
    if args.use_trace_timestamps or (has_times and args.request_rate is None):
        args.request_rate = ["trace"]
    args.request_rate = args.request_rate or [math.inf]
    if args.num_prompts is None:
        args.num_prompts = _num_sharing(args) or _NUM_PROMPTS
    if args.port is None:
        args.port = BACKENDS[args.backend].default_port
    args.extra_request_body = orjson.loads(args.extra_request_body) if args.extra_request_body else {}
    return args


def _num_sharing(args: argparse.Namespace) -> int:
    """Requests that generated-shared-prefix makes; 0 for another dataset."""
    is_it = args.dataset_name == "generated-shared-prefix"
    return args.gsp_num_groups * args.gsp_prompts_per_group * args.gsp_num_turns if is_it else 0


def _problem(args: argparse.Namespace) -> str | None:
    dataset, backend = DATASETS[args.dataset_name], BACKENDS[args.backend]
    if args.use_trace_timestamps and not dataset.is_trace:
        return f"the dataset {args.dataset_name} has no times: leave out --use-trace-timestamps"
    if args.use_trace_timestamps and args.request_rate:
        return "--use-trace-timestamps and --request-rate exclude each other"
    if args.scale_lengths != 1 and not dataset.is_trace:
        return f"--scale-lengths is for traces; {args.dataset_name} has flags for its lengths"
    if args.tokenize_prompt and backend.is_chat:
        return f"--tokenize-prompt sends token ids, which {args.backend} does not take"
    if args.tokenize_prompt and args.apply_chat_template:
        return "--tokenize-prompt and --apply-chat-template exclude each other"
    if args.apply_chat_template and backend.is_chat:
        return f"the server applies the chat template with {args.backend}: leave out --apply-chat-template"
    if (args.gsp_group_distribution == "zipf") != (args.gsp_zipf_alpha is not None):
        return "--gsp-group-distribution zipf and --gsp-zipf-alpha belong together"
    if args.extra_request_body:
        try:
            content = orjson.loads(args.extra_request_body)
            # A body that can be read may be too deep to be sent, and a result has it below other objects.
            orjson.dumps([[[[content]]]])
        except (ValueError, TypeError):
            content = None
        if not isinstance(content, dict):
            return f"--extra-request-body {args.extra_request_body[:80]!r} is no JSON object that can be sent"
        if problem := _problem_of_body(content, not args.disable_stream):
            return f"--extra-request-body {problem}"
    if args.output_file and (
        Path(args.output_file).is_dir() or not Path(args.output_file).absolute().parent.is_dir()
    ):
        return f"--output-file {args.output_file} must be a file in a folder that exists"
    if args.output_file and Path(args.output_file).exists() and not os.access(args.output_file, os.W_OK):
        return f"--output-file {args.output_file} may not be written"
    if not 0 <= args.temperature < math.inf:
        return f"--temperature {args.temperature:g} must be 0 or more"
    if not 0 < args.top_p <= 1:
        return f"--top-p {args.top_p:g} must be above 0, and 1 at most"
    if (count := _num_sharing(args)) > _MOST_REQUESTS:
        flags = "--gsp-num-groups, --gsp-prompts-per-group and --gsp-num-turns"
        return f"{flags} make {count:,} requests, but {_MOST_REQUESTS:,} are the most"
    return plot.problem_with(args.plot) if args.plot else None


def _problem_of_body(extra: dict[str, Any], is_stream: bool) -> str | None:
    """Why the answers to bodies with these fields would not be measured right. Other fields may change."""
    for name in _PROMPT_FIELDS:
        if name in extra:
            return f"sets {name}, but the benchmark makes the prompts: leave it out"
    if extra.get("stream", is_stream) is not is_stream:
        value = json.dumps(extra["stream"])
        if is_stream:
            return (
                f"sets stream to {value}, but the benchmark measures streams: --disable-stream measures whole answers"
            )
        return f"sets stream to {value}, but --disable-stream measures whole answers: leave one of them out"
    params = extra.get("sampling_params")
    for fields in (extra, params if isinstance(params, dict) else {}):
        for name in ("n", "best_of"):
            if fields.get(name) not in (None, 1):
                value = json.dumps(fields[name])
                return f"sets {name} to {value}, but the benchmark measures one answer of each request: leave it out"
    options = extra.get("stream_options", {})
    if is_stream and not (isinstance(options, dict) and options.get("include_usage", True) is True):
        return "leaves include_usage out of stream_options, but the benchmark reads token counts from it: leave it in"
    return None


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = [0.0]
    if not all(rate > 0 for rate in rates):
        raise argparse.ArgumentTypeError(f"{text!r} is no rate above 0, inf, or a list such as 1,2,4")
    return rates


def _whole(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        # Python reads no number of thousands of digits.
        if not text.isdecimal() or len(text) > len(str(most)) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number from {least} to {most:,}")
        return int(text)

    return read


_count, _count_or_zero = _whole(1, _MOST_REQUESTS), _whole(0, _MOST_REQUESTS)
_tokens, _tokens_or_zero = _whole(1, _MOST_TOKENS), _whole(0, _MOST_TOKENS)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def _scale(text: str) -> float | str:
    return FIT if text == FIT else _positive(text)


def _positive_or_zero(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else _positive(text)


def _share(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 1")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sglang.bench_serving",
        description="Sends requests to a running server and measures latencies, throughput and cache hits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_server(parser.add_argument_group("server"))
    _add_load(parser.add_argument_group("load"))
    _add_requests(parser.add_argument_group("requests"))
    _add_output(parser.add_argument_group("output"))
    _add_datasets(parser)
    return parser


def _add_server(group: Any) -> None:
    add = group.add_argument
    add("--backend", choices=BACKENDS, default="sglang", help="kind of server and endpoint")
    add("--base-url", help="the server's address; without it --host and --port")
    add("--host", default="127.0.0.1", help="the server's host")
    add("--port", type=int, help="the server's port; without it 30000, for vLLM 8000")
    add("--model", help="model to ask for; without it the first one that the server lists")
    add("--served-model-name", help="name that requests send in place of --model")
    add("--tokenizer", help="directory, hub name or embedded; without it as the server names it")
    add(
        "--context-len",
        type=_tokens,
        help="longest prompt with its answer, in tokens; without it as the server tells",
    )
    add("--ready-check-timeout-sec", type=_positive_or_zero, default=60.0, help="how long to wait for the server")


def _add_load(group: Any) -> None:
    add = group.add_argument
    datasets = "; ".join(f"{name}: {dataset.summary}" for name, dataset in DATASETS.items())
    add("--dataset-name", choices=DATASETS, default="sharegpt", help=datasets)
    add("--dataset-path", default="", help="file of sharegpt or of a trace; a trace has a small sample built in")
    add("--num-prompts", type=_count, help=f"requests to send, every turn counts; without it {_NUM_PROMPTS}")
    add(
        "--request-rate",
        type=_rates,
        metavar="RATE[,RATE…]",
        help="requests per second, as a Poisson process; inf sends all at once; several are run one after another; "
        "without it inf, and for a trace its own times",
    )
    add("--use-trace-timestamps", action="store_true", help="send at the trace's times, as without --request-rate")
    add(
        "--max-concurrency",
        type=_count,
        help="most requests under way; others wait, and their waiting is not measured",
    )
    add(
        "--benchmark-duration",
        type=_positive,
        metavar="SECONDS",
        help="of each rate, at most; requests that are under way or not sent by then are counted as unfinished",
    )
    add("--warmup-requests", type=_count_or_zero, default=1, help="requests before the run, with other texts")
    add("--flush-cache", action="store_true", help="empty the server's cache before each rate")
    add("--seed", type=_whole(0, _MOST_SEED), default=42, help="of lengths, orders, texts and times")


def _add_requests(group: Any) -> None:
    add = group.add_argument
    add("--disable-stream", action="store_true", help="get answers whole: only their end is measured")
    add("--disable-ignore-eos", action="store_true", help="let answers end before their length")
    add(
        "--request-timeout-sec",
        type=_positive,
        default=3600.0,
        help="a request without a whole answer by then has failed",
    )
    add("--temperature", type=float, default=0.0, help="of sampling")
    add("--top-p", type=float, default=1.0, help="of sampling")
    add("--extra-request-body", metavar="JSON", help="fields to lay over the body of every request")
    add("--apply-chat-template", action="store_true", help="put texts through the model's chat template")
    add("--tokenize-prompt", action="store_true", help="send token ids, not texts")


def _add_output(group: Any) -> None:
    add = group.add_argument
    add("--output-file", help="JSON lines to append to; without it a name of backend, date and dataset")
    add("--output-details", action="store_true", help="write every request's times, texts and errors too")
    add("--plot", metavar="FILE", help="draw load against latency, as .svg, .png or .pdf")
    add("--disable-tqdm", action="store_true", help="show no progress bar")
    add("--cache-report", action="store_true", help="has no effect: cache hits are always reported")
    add("--tag", help="a text for the JSON line")


def _add_datasets(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sharegpt").add_argument
    add("--sharegpt-output-len", type=_tokens, help="length of all answers; without it as in the file")
    add("--sharegpt-context-len", type=_tokens, help="leave out longer chats")
    add = parser.add_argument_group("random").add_argument
    add("--random-input-len", type=_tokens, default=1024, help="tokens of a prompt")
    add("--random-output-len", type=_tokens, default=1024, help="tokens of an answer")
    add("--random-range-ratio", type=_share, default=0.0, help="the shortest length, as a share of the longest")
    add = parser.add_argument_group("generated-shared-prefix").add_argument
    add("--gsp-num-groups", type=_count, default=64, help="system prompts")
    add("--gsp-prompts-per-group", type=_count, default=16, help="prompts that share one")
    add("--gsp-system-prompt-len", type=_tokens, default=2048, help="tokens of a system prompt")
    add("--gsp-question-len", type=_tokens, default=128, help="tokens of a question")
    add("--gsp-output-len", type=_tokens, default=256, help="tokens of an answer")
    add("--gsp-range-ratio", type=_share, default=1.0, help="the shortest length, as a share of the longest")
    add("--gsp-num-turns", type=_count, default=1, help="turns of every prompt")
    add("--gsp-ordered", action="store_true", help="one group after another, not shuffled")
    add("--gsp-group-distribution", choices=("uniform", "zipf"), default="uniform", help="how often a group is asked")
    add("--gsp-zipf-alpha", type=_positive, help="exponent of zipf")
    add = parser.add_argument_group("multi-turn").add_argument
    add("--multi-turn-num-turns", type=_count, default=5, help="turns of a conversation")
    add("--multi-turn-system-len", type=_tokens_or_zero, default=256, help="tokens before all conversations; 0: none")
    add("--multi-turn-message-len", type=_tokens, default=128, help="mean tokens of a message")
    add("--multi-turn-output-len", type=_tokens, default=128, help="mean tokens of an answer")
    add("--multi-turn-think-time", type=_positive_or_zero, default=1.0, help="mean seconds before the next message")
    add = parser.add_argument_group("loogle").add_argument
    add("--loogle-num-documents", type=_count, default=16, help="documents")
    add("--loogle-document-len", type=_tokens, default=8192, help="mean tokens of a document")
    add("--loogle-question-len", type=_tokens, default=32, help="mean tokens of a question")
    add("--loogle-output-len", type=_tokens, default=16, help="mean tokens of an answer")
    add("--loogle-order", choices=("shuffle", "zipf"), default="shuffle", help="which document comes next")
    add("--loogle-zipf-alpha", type=_positive, default=1.0, help="exponent of zipf")
    add = parser.add_argument_group("traces").add_argument
    add(
        "--scale-lengths",
        type=_scale,
        default=1.0,
        metavar="FACTOR|fit",
        help="factor of all lengths; fit: the largest one at which the server takes every request",
    )
    add("--mooncake-slowdown-factor", type=_positive, default=1.0, help="2 replays a trace half as fast")
    add("--mooncake-num-rounds", type=_count, default=1, help="times that a session repeats its prompt")
    add(
        "--mooncake-workload",
        choices=("mooncake", "conversation", "synthetic", "toolagent"),
        default="conversation",
        help="which built-in sample to take; there are conversation and synthetic",
    )
