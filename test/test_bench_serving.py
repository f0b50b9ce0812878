"""The command as a user runs it: flags, exit codes and sentences. test_server_bench_e2e.py has a live server."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang.bench_serving import Benchmark, main
from sglang.serving_benchmark import plot
from sglang.serving_benchmark.arguments import parse
from sglang.serving_benchmark.datasets.errors import DatasetError
from support.fake_http_server import FakeServer, reply_of, stream_of
from support.server_fixture import free_port

COMMAND = [sys.executable, "-m", "sglang.bench_serving"]
SMALL = ["--dataset-name", "random", "--random-input-len", "20", "--random-output-len", "4", "--num-prompts", "4"]


def test_the_client_loads_no_torch() -> None:
    code = "import sys, sglang.bench_serving; print(*{'torch', 'transformers', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == []


def test_flags_have_upstreams_names_and_defaults() -> None:
    args = parse(["--num-prompt", "7", "--dataset-name", "random", "--random-input", "50"])  # as upstream's pages
    assert (args.backend, args.num_prompts, args.random_input_len, args.random_output_len) == ("sglang", 7, 50, 1024)
    assert (args.seed, args.warmup_requests, args.request_rate, args.port) == (42, 1, [math.inf], 30000)
    assert parse(["--backend", "vllm"]).port == 8000 and parse([]).dataset_name == "sharegpt"
    assert parse(["--dataset-name", "generated-shared-prefix"]).num_prompts == 64 * 16
    assert parse(["--dataset-name", "mooncake"]).request_rate == ["trace"]
    assert parse(["--dataset-name", "mooncake", "--request-rate", "1,inf"]).request_rate == [1, math.inf]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lora-name x", "--lora-name is a flag of upstream's that is not supported here"),
        ("--profile-prefix=x", "--profile-prefix is a flag of upstream's"),
        ("--nonsense", "unknown: --nonsense"),
        ("--request-rate 1,0", "'1,0' is no rate"),
        ("--request-rate x", "'x' is no rate"),
        ("--num-prompts 0", "'0' is no whole number from 1 to 1,000,000"),
        ("--max-concurrency -1", "'-1' is no whole number"),
        ("--random-range-ratio 2", "'2' is no number from 0 to 1"),
        ("--scale-lengths 0", "'0' is no number above 0"),
        ("--scale-lengths 0.5", "is for traces"),
        ("--scale-lengths fit", "is for traces"),
        ("--benchmark-duration 0", "'0' is no number above 0"),
        ("--use-trace-timestamps", "has no times"),
        ("--dataset-name mooncake --use-trace-timestamps --request-rate 2", "exclude each other"),
        ("--backend sglang-oai-chat --tokenize-prompt", "which sglang-oai-chat does not take"),
        ("--backend vllm-chat --apply-chat-template", "the server applies"),
        ("--tokenize-prompt --apply-chat-template", "exclude each other"),
        ("--gsp-group-distribution zipf", "belong together"),
        ("--extra-request-body [1]", "no JSON object"),
        ("--extra-request-body {", "no JSON object"),
        ('--extra-request-body {"stream":false}', "the benchmark measures streams: --disable-stream measures whole"),
        ('--disable-stream --extra-request-body {"stream":true}', "leave one of them out"),
        ('--extra-request-body {"n":2}', "sets n to 2, but the benchmark measures one answer of each request"),
        ('--extra-request-body {"sampling_params":{"n":2}}', "sets n to 2"),
        ('--extra-request-body {"prompt":"x"}', "sets prompt, but the benchmark makes the prompts"),
        ('--extra-request-body {"stream_options":{"include_usage":false}}', "leaves include_usage out"),
        ("--plot x.gif", "must end in"),
        ("--output-file /no/where/x", "a folder that exists"),
        ("--output-file /tmp", "a folder that exists"),
        ("--temperature nan", "--temperature nan must be 0 or more"),
        ("--temperature -1", "--temperature -1 must be 0 or more"),
        ("--top-p nan", "--top-p nan must be above 0, and 1 at most"),
        ("--top-p 0", "--top-p 0 must be above 0"),
        (f"--seed {1 << 64}", "no whole number from 0 to 18,446,744,073,709,551,615"),
        ("--num-prompts 99999999999", "no whole number from 1 to 1,000,000"),
        ("--num-prompts " + "9" * 5000, "no whole number from 1 to 1,000,000"),
        ("--random-input-len 10000001", "no whole number from 1 to 10,000,000"),
        ("--multi-turn-num-turns 99999999", "no whole number from 1 to 1,000,000"),
        ("--dataset-name generated-shared-prefix --gsp-num-groups 100000", "make 1,600,000 requests"),
        ("--tag \udcff", "is no text in UTF-8"),
        ("--served-model-name \udcff", "is no text in UTF-8"),
        ("--extra-request-body " + "[" * 100_000, "is no JSON object that can be sent"),
        ('--extra-request-body {"a":"\\ud800"}', "is no JSON object that can be sent"),
        ('--extra-request-body {"a":' + "[" * 253 + "]" * 253 + "}", "is no JSON object that can be sent"),
        ("--request-timeout-sec 0", "--request-timeout-sec"),
        ("--seed -1", "'-1' is no whole number"),
    ],
)
def test_a_wrong_flag_is_one_sentence(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(flags.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_harmless_fields_are_laid_over_the_body() -> None:
    extra = {"stream": True, "n": 1, "sampling_params": {"min_p": 0.1}, "stream_options": {"other": 1}}
    assert parse(["--extra-request-body", json.dumps(extra)]).extra_request_body == extra


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ready-check-timeout-sec", "0"], "nothing answers at http://127.0.0.1:{port}"),
        (["--base-url", "nonsense"], "'nonsense' is no address"),
    ],
)
def test_a_server_that_is_not_there_is_one_sentence(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    assert main([*SMALL, "--port", str(port), *flags]) == 1
    assert message.format(port=port) in capsys.readouterr().err


@pytest.mark.parametrize("key", ["a\nb", "é"])
def test_a_key_that_no_header_carries_is_one_sentence(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    assert main(SMALL) == 1
    assert capsys.readouterr().err == (
        "bench_serving: OPENAI_API_KEY must be printable ASCII without spaces, as a header carries it.\n"
    )


MEASURED = stream_of(
    [{"text": "a", "meta_info": {"prompt_tokens": 9, "completion_tokens": n, "finish_reason": None}} for n in (1, 4)]
)


@pytest.mark.parametrize("flags", [(), ("--flush-cache",)], ids=str)
def test_a_server_that_dies_between_rates_ends_the_command(
    flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.jsonl"

    def answer(path: str, _: Any) -> bytes:
        num_asked = [path for path, _ in fake.requests].count("/generate")
        if num_asked > 4 or (num_asked == 4 and path != "/generate"):
            return b""  # the connection ends
        return MEASURED if path == "/generate" else reply_of({"data": []})

    fake = FakeServer(answer)

    async def go() -> int:
        async with fake.running() as server:
            args = [*SMALL, "--model", "m", "--tokenizer", "embedded", "--warmup-requests", "0", "--disable-tqdm"]
            args += ["--base-url", server.url, "--output-file", str(path), "--request-rate", "inf,20,30", *flags]
            return await Benchmark(parse(args)).run()

    assert asyncio.run(go()) == 1
    (line,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert line["completed"] == 4 and line["request_rate"] == "inf"
    shown = capsys.readouterr()
    assert re.search(r"http://127\S+ does not answer any more: .*\. Not measured: rates 20, 30\.\n$", shown.err)
    assert shown.err.count("measuring at") == 1 and "Results were added to" in shown.out


def test_a_rate_without_a_success_gives_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(path: str, _: Any) -> bytes:
        if path != "/generate":
            return reply_of({"data": []})
        return MEASURED if [path for path, _ in fake.requests].count("/generate") <= 4 else reply_of({}, "400 No")

    fake = FakeServer(answer)

    async def go() -> int:
        async with fake.running() as server:
            args = [*SMALL, "--model", "m", "--tokenizer", "embedded", "--warmup-requests", "0", "--disable-tqdm"]
            args += [
                "--base-url",
                server.url,
                "--output-file",
                str(tmp_path / "x"),
                "--request-rate",
                "inf,1000,2000",
            ]
            return await Benchmark(parse(args)).run()

    assert asyncio.run(go()) == 1
    assert "no request succeeded at rates 1000, 2000" in capsys.readouterr().err


def test_a_plot_that_cannot_be_written_loses_no_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def draw(*_: Any) -> None:
        raise OSError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(plot, "problem_with", lambda _: None)
    monkeypatch.setattr(plot, "draw", draw)
    fake = FakeServer(lambda path, _: MEASURED if path == "/generate" else reply_of({"data": []}))

    async def go() -> int:
        async with fake.running() as server:
            args = [*SMALL, "--model", "m", "--tokenizer", "embedded", "--warmup-requests", "0", "--disable-tqdm"]
            # The largest seed can be written, too.
            args += ["--base-url", server.url, "--output-file", str(tmp_path / "x"), "--seed", str((1 << 64) - 1)]
            return await Benchmark(parse([*args, "--plot", "/proc/x.svg"])).run()

    assert asyncio.run(go()) == 1
    assert json.loads((tmp_path / "x").read_text())["completed"] == 4
    assert "the plot cannot be written to /proc/x.svg: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("knows_length", [True, False], ids=["known", "unknown"])
def test_a_trace_is_fitted_to_the_server(
    knows_length: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first three rows. With its answer the longest has 4.5 blocks, which fit 230 tokens; one more begins every
    prompt."""
    lengths = ((1024, [1, 2]), (2048, [1, 2, 3, 4]), (512, [5]), (90_000, list(range(10, 200))))
    rows = [{"timestamp": 0, "input_length": n, "output_length": 256, "hash_ids": ids} for n, ids in lengths]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fake = FakeServer(lambda path, _: MEASURED if path == "/generate" else reply_of({"data": []}))

    async def go() -> int:
        async with fake.running() as server:
            args = ["--dataset-name", "mooncake", "--dataset-path", str(trace), "--num-prompts", "3"]
            args += ["--scale-lengths", "fit", *(("--context-len", "231") if knows_length else ())]
            args += ["--model", "m", "--tokenizer", "embedded", "--warmup-requests", "0", "--disable-tqdm"]
            args += ["--tokenize-prompt", "--base-url", server.url, "--benchmark-duration", "600"]
            return await Benchmark(parse([*args, "--output-file", str(tmp_path / "out.jsonl")])).run()

    if not knows_length:
        with pytest.raises(DatasetError, match="give --context-len"):
            asyncio.run(go())
        return
    assert asyncio.run(go()) == 0
    sent = sorted((body for path, body in fake.requests if path == "/generate"), key=lambda b: len(b["input_ids"]))
    one, two, four = (body["input_ids"] for body in sent)
    assert [len(one), len(two), len(four)] == [51, 102, 204] and four[:102] == two and one != two[:51]
    assert {body["sampling_params"]["max_new_tokens"] for body in sent} == {26}
    shown = capsys.readouterr().out
    assert "Sent are the trace's first 3 requests" in shown and "a block of 512 tokens has 51" in shown
    assert "fit the 231 tokens" in shown and "ends after 600 s" in shown
