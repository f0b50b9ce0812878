"""The benchmark client against a live server, the one of test_server_e2e.py."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang.bench_serving import INTERRUPTED, main
from support.server_fixture import Server

pytestmark = pytest.mark.e2e

COMMAND = [sys.executable, "-m", "sglang.bench_serving"]
SMALL = ["--dataset-name", "random", "--random-input-len", "20", "--random-output-len", "4", "--num-prompts", "4"]


@pytest.fixture
def server(small_server: Server) -> Server:
    return small_server


def measure(server: Server, tmp_path: Path, *flags: str) -> tuple[int, list[dict[str, Any]]]:
    path = tmp_path / "out.jsonl"
    code = main(["--base-url", server.url, "--output-file", str(path), "--disable-tqdm", *flags])
    return code, [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat", "vllm"])
def test_a_live_server_is_measured(
    server: Server, backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = ["--multi-turn-num-turns", "3", "--multi-turn-message-len", "20", "--multi-turn-output-len", "4"]
    talk += ["--multi-turn-system-len", "40", "--multi-turn-think-time", "0.01"]
    flags = ["--dataset-name", "multi-turn", "--num-prompts", "9", *talk, "--backend", backend, "--output-details"]
    code, (line,) = measure(server, tmp_path, *flags)
    assert code == 0 and line["completed"] == 9 and line["errors"] == [""] * 9
    assert line["total_output_tokens"] == sum(line["output_lens"]) > 9
    assert 0 < line["mean_ttft_ms"] < line["mean_e2e_latency_ms"] < line["duration"] * 1000
    # A turn finds its history: at least the two later turns of three.
    assert line["total_cached_tokens"] > 0.5 * line["total_input_tokens"]
    tiers = line["cached_tokens_by_tier"]
    assert tiers is None if backend == "vllm" else sum(tiers.values()) == line["total_cached_tokens"]
    assert line["server_info"]["max_total_num_tokens"] == 1024
    assert line["arguments"]["multi_turn_num_turns"] == 3
    out = capsys.readouterr().out
    assert "Mean TTFT (ms):" in out and "Errors:" not in out


def test_several_rates_are_run_in_one_go(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "load.svg"
    flags = [*SMALL, "--request-rate", "20,inf", "--plot", str(picture), "--tokenize-prompt"]
    code, lines = measure(server, tmp_path, *flags)
    assert code == 0 and [line["request_rate"] for line in lines] == [20.0, "inf"]
    assert all(line["completed"] == 4 for line in lines) and picture.read_text().startswith("<?xml")
    # Each rate has texts of its own: at most a chance token is shared.
    assert all(line["total_cached_tokens"] <= 4 for line in lines)
    assert "Load against Latency" in capsys.readouterr().out
    code, (_, _, line) = measure(server, tmp_path, *SMALL, "--tokenize-prompt", "--flush-cache")
    assert code == 0 and line["total_cached_tokens"] <= 4
    code, (*_, line) = measure(server, tmp_path, *SMALL, "--tokenize-prompt")
    assert code == 0 and line["total_cached_tokens"] > 4, "the same texts come again with the same seed"


def test_requests_that_do_not_fit_are_counted(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--dataset-name", "mooncake", "--num-prompts", "40", "--mooncake-slowdown-factor", "0.01"]
    code, lines = measure(server, tmp_path, *flags, "--scale-lengths", "0.02", "--context-len", "100")
    assert code == 0 and 0 < lines[0]["dropped"] < 40 == lines[0]["dropped"] + lines[0]["completed"]
    assert lines[0]["length_scale"] == 10 / 512 and lines[0]["failed"] == 0
    out = capsys.readouterr().out
    assert "Lengths are scaled by 0.01953" in out and "do not fit the 100 tokens" in out
    code, _ = measure(server, tmp_path, *flags, "--context-len", "500")
    assert code == 1
    assert "no request of at most 500 tokens" in capsys.readouterr().err


def test_requests_that_all_fail_give_code_1(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["--backend", "sglang-oai", "--model", "other", "--tokenizer", "embedded"]
    code, lines = measure(server, tmp_path, *SMALL, *wrong)
    assert (code, lines) == (1, []) and "The warm-up failed: HTTP 404: the model 'other'" in capsys.readouterr().err
    code, lines = measure(server, tmp_path, *SMALL, *wrong, "--warmup-requests", "0")
    assert code == 1 and lines[0]["failed"] == 4 and list(lines[0]["error_counts"].values()) == [4]
    assert re.search(r"4 x HTTP 404: the model 'other'", capsys.readouterr().out)


def test_an_interrupt_prints_what_was_measured(server: Server, tmp_path: Path) -> None:
    flags = ["--base-url", server.url, "--request-rate", "0.001,1", "--output-file", str(tmp_path / "out.jsonl")]
    process = subprocess.Popen(
        [*COMMAND, *SMALL, *flags, "--disable-tqdm"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    while "measuring" not in process.stderr.readline():  # the first request is sent at once, the next in minutes
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == INTERRUPTED
    assert "Unfinished requests:" in out and "The run was interrupted." in out and out.count("Benchmark Result") == 1


def test_a_result_that_cannot_be_written_is_one_sentence_after_the_table(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--base-url", server.url, "--output-file", "/dev/full", "--disable-tqdm", *SMALL]) == 1
    shown = capsys.readouterr()
    assert "Successful requests" in shown.out
    assert "cannot be written to /dev/full: No space left on device." in shown.err
