"""The advice: sizes, flags, links; from a trace, from a saved sample, and from a server."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang.cli import advise
from sglang.cli.__main__ import main
from sglang.cli.advise import GB, Wishes, least_host_gb, plan
from sglang.cli.reference_sources import read_trace
from sglang.cli.reuse import HitCurve, ReferenceLog
from sglang.cli.server import CommandError
from sglang.cli.server import Server as LiveServer
from sglang.cli.token_costs import Costs, Given, WindowedLayers, find_costs
from sglang.srt.managers.startup.sizes import window_reach_of
from sglang.srt.server_args import ServerArgs
from support.server_fixture import Server
from support.tiny_model import tiny_llama
from support.windowed_model import write_windowed_model

COSTS = Costs(bytes_per_token=1e6, prefill_tokens_per_s=1000)
# 1 GB are 1,000 tokens. Of 10,000 prompt tokens 2,000 are found with 2 GB, 3,000 more with 5 GB, 100 more with 50 GB.
CURVE = HitCurve(10_000, 800, 50_000, np.array([2000.0, 5000, 50_000]), np.array([2000.0, 5000, 5100]))


def sizes(**wishes: float | None) -> dict[str, tuple[float, float]]:
    gains = {"host": 0.01, "disk": 0.0001}
    return {each.name: (each.size_gb, each.hits) for each in plan(CURVE, COSTS, Wishes(wishes, gains))}


def test_tiers_add_up() -> None:
    found = sizes(device=2.0, host=2.0, disk=1.0, remote=45.0)
    assert found == {"device": (2, 2000), "host": (2, 0), "disk": (1, 3000), "remote": (45, 100)}


def test_sizes_that_are_worth_it() -> None:
    found = sizes(device=2.0, host=None, disk=None)
    assert found["host"][0] == pytest.approx(3, rel=0.1) and found["host"][1] == 3000
    assert found["disk"][0] == pytest.approx(45, rel=0.1) and found["disk"][1] == 100
    assert sizes(device=5.0, host=None)["host"] == (0, 0), "a gigabyte brings less than one percent"


def test_layers_with_a_window_are_kept_for_some_tokens_alone() -> None:
    """Of a token's 1 MB they have 0.8, for half of the tokens on the device and a quarter below."""
    costs = replace(COSTS, windowed=WindowedLayers(8e5, 0.5, 0.25, 0.1))
    assert costs.bytes_held("device") == pytest.approx(6e5) and costs.bytes_held("disk") == pytest.approx(4e5)
    assert costs.bytes_loaded == pytest.approx(2.8e5) and costs.pays_above == pytest.approx(2.8e8)
    found = plan(CURVE, costs, Wishes({"device": 1.2, "host": 1.2, "disk": 18.0}, {}))
    assert [each.hits for each in found] == [2000, 3000, 100, 0], "2,000, 3,000 and 45,000 tokens"
    assert advise.endless_gb(CURVE, costs) == pytest.approx(20)
    assert "kept for 50 % of the tokens on the device, and about 25 % below" in advise.as_text(
        CURVE, costs, found, None
    )


def test_a_link_pays_where_it_is_faster_than_computing() -> None:
    assert COSTS.pays_above == 1e6 * 1000 == GB


def test_the_flags_are_the_server_s() -> None:
    plans = plan(CURVE, COSTS, Wishes({"device": 1.0, "host": 4.0, "disk": 45.0}, {}))
    found = advise.flags(plans, 1.6)
    args = ServerArgs.from_cli(["--model-path", "m", *found], {})
    assert (args.enable_hierarchical_cache, args.hicache_size, args.hicache_storage_backend) == (True, 4, "file")
    assert json.loads(args.hicache_storage_backend_extra_config) == {"limit_gb": 45}
    both = advise.flags(plan(CURVE, COSTS, Wishes({"disk": 3.0, "remote": 2.0}, {})), 1.6)
    args = ServerArgs.from_cli(["--model-path", "m", *both], {})
    assert (args.hicache_size, args.hicache_storage_backend) == (1.6, "file,remote"), "storage passes through a host"
    assert advise.flags(plan(CURVE, COSTS, Wishes({"device": 9.0}, {})), 1.6) == []


ROWS = [
    {"timestamp": 0, "input_length": 1200, "output_length": 9, "hash_ids": [1, 2, 3]},
    {"timestamp": 2000, "input_length": 1536, "output_length": 9, "hash_ids": [1, 2, 4]},
    {"timestamp": 1000, "input_length": 512, "output_length": 9, "hash_ids": [2]},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with gzip.open(path, "wt") if path.suffix == ".gz" else open(path, "w") as file:
        file.write(text)
    return path


def test_a_trace_of_single_prompts(tmp_path: Path) -> None:
    log, seconds = read_trace(write(tmp_path / "trace.jsonl.gz", ROWS), 100)
    curve = log.curve()
    assert (log.num_requests, log.prompt_tokens, log.longest_prompt, seconds) == (3, 3248, 1536, 2)
    # The front of the first prompt; not block 2 at the beginning of another.
    assert curve.most == 1024 and curve.distinct_tokens == 1200 + 512 + 512 + 3 * 9
    assert [curve.hits(size) for size in (1032, 1033, 1544, 1545)] == [0, 512, 512, 1024]


def test_a_trace_of_sessions(tmp_path: Path) -> None:
    rows = [
        {"session_id": "a", "timestamp": 0, "input_length": 512, "output_length": 100, "hash_ids": [1]},
        {"session_id": "b", "timestamp": 500, "input_length": 512, "output_length": 7, "hash_ids": [1]},
        {"session_id": "a", "delay": 1000, "input_length": 30, "output_length": 5, "hash_ids": [2]},
    ]
    log, seconds = read_trace(write(tmp_path / "trace.jsonl", rows), 100)
    curve = log.curve()
    assert log.prompt_tokens == 512 + 512 + (512 + 100 + 30)
    assert seconds is None, "the delay counts from an answer"
    assert curve.most == 512 + 512 + 100, "the session finds its own answer"


def test_the_command_on_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(write(tmp_path / "trace.jsonl", ROWS))
    command = ["hicache", "advise", "--trace", trace, "--device-gb", "0.5"]
    assert main(command) == 1 and "Give --bytes-per-token or --model-path" in capsys.readouterr().err
    command += ["--bytes-per-token", "1e6"]
    assert main(command) == 1 and "a trace does not tell" in capsys.readouterr().err
    command += ["--prefill-tokens-per-s", "1000", "--host-gb", "1.2", "--disk-gb", "0"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "a cache without end: 31.5 % of them found, 2.251 GB" in text and "a link pays above 1 GB/s" in text
    assert "flags: --hicache --hicache-size 3.072" in text, "two of the longest prompts"
    assert main([*command, "--json"]) == 0
    host = json.loads(capsys.readouterr().out)["tiers"][1]
    assert host["name"] == "host" and host["found_share"] == pytest.approx(1024 / 3248)


def test_turns_that_wait_for_answers_have_no_reads_per_second(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"session_id": "a", **ROWS[0]}, {"session_id": "a", **ROWS[1], "delay": 1000}]
    trace = str(write(tmp_path / "trace.jsonl", rows))
    command = ["hicache", "advise", "--trace", trace, "--device-gb", "1", "--bytes-per-token", "1e6"]
    command += ["--prefill-tokens-per-s", "1000"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "prompt tokens, 1,000,000 bytes each" in text and "GB/s on average" not in text
    assert "no reads per second: turns wait" in text
    assert main([*command, "--json"]) == 0 and json.loads(capsys.readouterr().out)["seconds"] is None


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--device-gb", "-5"),
        ("--device-gb", "nan"),
        ("--device-gb", "inf"),
        ("--host-gb", "-3"),
        ("--disk-gb", "1e300"),
        ("--remote-gb", "nan"),
        ("--host-gain", "nan"),
        ("--disk-gain", "-1"),
        ("--num-rows", "-5"),
        ("--num-rows", "0"),
        ("--num-rows", "9" * 400),
        ("--bytes-per-token", "0"),
        ("--bytes-per-token", "1e300"),
        ("--prefill-tokens-per-s", "1e-300"),
        ("--prefill-tokens-per-s", "nan"),
    ],
)
def test_numbers_that_no_server_has(
    flag: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["hicache", "advise", "--trace", str(write(tmp_path / "trace.jsonl", ROWS)), "--device-gb", "1"]
    command += ["--bytes-per-token", "1", "--prefill-tokens-per-s", "1", f"{flag}={value}"]
    assert main(command) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {flag} is ") and not printed.out


def test_a_wrong_trace_names_this_command_s_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("[1]\n")
    assert main(["hicache", "advise", "--trace", str(path), "--device-gb", "1"]) == 1
    assert "give --trace a trace" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--sample", "nothing.json"], "save the reply of GET /hicache/sample there"),
        (["--trace", "nothing.jsonl"], "give --trace the trace, as .jsonl"),
        (["--url", "http://127.0.0.1:9"], "cannot be reached"),
    ],
)
def test_what_cannot_be_read(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    costs = ["--bytes-per-token", "1", "--prefill-tokens-per-s", "1", "--device-gb", "1"]
    assert main(["hicache", "advise", *arguments, *costs]) == 1
    assert sentence in capsys.readouterr().err


def gzipped_but_broken() -> bytes:
    content = bytearray(gzip.compress(b'{"timestamp": 0}\n' * 9))
    content[12:16] = b"\xff\xff\xff\xff"
    return bytes(content)


EVENT = {"blocks": ["a"], "prompt_tokens": 70, "is_answer": False}
SAMPLE = {"block_tokens": 64, "rate": 1, "seconds": 2, "events": [EVENT]}


@pytest.mark.parametrize(
    ("flag", "name", "content", "sentence"),
    [
        ("--trace", "t.jsonl.gz", gzipped_but_broken(), "is not a trace in JSON lines (Error -3"),
        ("--trace", "t.jsonl", b"\n", "t.jsonl has no requests"),
        ("--trace", "t.jsonl", ROWS[0] | {"output_length": 1e300}, "output_length is 1e+300"),
        ("--trace", "t.jsonl", ROWS[0] | {"timestamp": 1e300}, "timestamp is 1e+300"),
        ("--sample", "s.json", b"[" * 100_000, "cannot be read (maximum recursion depth"),
        ("--sample", "s.json", {}, "block_tokens in the server's reply is None, but it must be a number from 1"),
        ("--sample", "s.json", [], "block_tokens in the server's reply is None"),
        ("--sample", "s.json", SAMPLE | {"block_tokens": 0}, "block_tokens in the server's reply is 0"),
        ("--sample", "s.json", SAMPLE | {"block_tokens": [[]]}, "block_tokens in the server's reply is list"),
        ("--sample", "s.json", SAMPLE | {"block_tokens": math.inf}, "block_tokens in the server's reply is inf"),
        ("--sample", "s.json", SAMPLE | {"rate": 0}, "rate in the server's reply is 0"),
        ("--sample", "s.json", SAMPLE | {"rate": 1e-320}, "rate in the server's reply is 9.99989e-321"),
        ("--sample", "s.json", SAMPLE | {"rate": -1}, "rate in the server's reply is -1"),
        ("--sample", "s.json", SAMPLE | {"seconds": math.nan}, "seconds in the server's reply is nan"),
        ("--sample", "s.json", SAMPLE | {"seconds": -1}, "seconds in the server's reply is -1"),
        ("--sample", "s.json", SAMPLE | {"events": [EVENT | {"prompt_tokens": -1}]}, "prompt_tokens in the"),
        ("--sample", "s.json", SAMPLE | {"events": [EVENT | {"prompt_tokens": 63}]}, "1 blocks of 64 tokens in a"),
        ("--sample", "s.json", SAMPLE | {"events": [EVENT | {"blocks": "a"}]}, "blocks is no list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_with_what_no_server_writes(
    flag: str, name: str, content: Any, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    costs = ["--bytes-per-token", "1", "--prefill-tokens-per-s", "1", "--device-gb", "1"]
    assert main(["hicache", "advise", flag, str(path), *costs]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and sentence in printed.err and not printed.out


@pytest.mark.parametrize(
    ("state", "field"),
    [
        ({}, "page_bytes"),
        ({"page_bytes": 4, "page_size": 0}, "page_size"),
        ({"page_bytes": 4, "page_size": 1, "costs": []}, "costs.token_s"),
        (
            {"page_bytes": 4, "page_size": 1, "costs": {"token_s": 1, "pair_s": 0}, "tiers": {"device": 5}},
            "tiers.device.total_tokens",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_state_without_a_number(
    state: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {"/hicache/state": {"links": {}, **state}, "/hicache/sample": SAMPLE}
    monkeypatch.setattr(LiveServer, "ask", lambda self, method, path: answers[path])
    assert main(["hicache", "advise"]) == 1
    assert capsys.readouterr().err.startswith(f"error: {field} in the server's reply is ")


@pytest.mark.slow
@pytest.mark.e2e
def test_a_live_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server("--hicache", "--admin-api-key", "root") as server:
        ids = list(range(1, 301))
        for _ in range(3):
            body = {
                "input_ids": ids,
                "sampling_params": {"max_new_tokens": 100, "ignore_eos": True, "temperature": 0},
            }
            answer = server.post("/generate", body).json()
        server.post("/generate", {**body, "input_ids": [*ids, *answer["output_ids"], 5]})
        command = ["hicache", "advise", "--url", server.url]
        assert main(command) == 1 and "the server wants its admin key" in capsys.readouterr().err
        assert main([*command, "--admin-api-key", "root", "--json"]) == 0
        advice = json.loads(capsys.readouterr().out)
    # Whole blocks of 64 tokens: four of 300, six of 401 with the answer's.
    assert advice["prompt_tokens"] == 3 * 300 + 401
    assert advice["endless"]["found_share"] == pytest.approx((2 * 4 + 6) * 64 / 1301)
    assert advice["tiers"][0]["size_gb"] > 0 and advice["pays_above_gb_per_s"] > 0


def bytes_per_token(folder: Path, kv_cache_dtype: str) -> float:
    return find_costs(Given(None, 1.0, str(folder), kv_cache_dtype), {}, ReferenceLog()).bytes_per_token


def test_the_kv_caches_type_counts(tmp_path):
    config = tiny_llama(tmp_path)
    size = bytes_per_token(tmp_path, "auto")
    assert size == 2 * config.num_layers * config.num_kv_heads * config.head_dim * config.dtype.itemsize
    assert size == 4 * bytes_per_token(tmp_path, "fp8_e4m3") == 2 * bytes_per_token(tmp_path, "bf16")
    with pytest.raises(CommandError, match="--kv-cache-dtype fp4 is none of auto, bf16"):
        bytes_per_token(tmp_path, "fp4")


WINDOWED_STATE = {
    "page_bytes": 4800,
    "page_size": 16,
    "windowed_page_bytes": 4000,
    "window_reach": 100,
    "tiers": {
        "device": {"total_tokens": 1000, "windowed": {"total_tokens": 300}},
        "host": {"windowed": {"total_tokens": 5}},
    },
}


def log_of(*lengths: int) -> ReferenceLog:
    log = ReferenceLog()
    for number, length in enumerate(lengths):
        log.add_request(length, length)
        log.use(1000 * number + np.arange(length // 10), [10] * (length // 10), length // 10)
    return log


def test_a_server_tells_of_its_layers_with_a_window() -> None:
    given, log = Given(prefill_tokens_per_s=1.0), log_of(200)
    found = find_costs(given, WINDOWED_STATE, log)
    assert found.bytes_per_token == 300 and found.windowed == WindowedLayers(250, 0.3, 0.5, 0.5)
    one_pool = {**WINDOWED_STATE, "tiers": {"device": {"total_tokens": 1000}, "host": {"total_tokens": 1000}}}
    assert find_costs(given, one_pool, log).windowed == WindowedLayers(250, 1, 1, 0.5)
    # A host that is advised would be divided.
    no_host = {**WINDOWED_STATE, "tiers": {"device": {"total_tokens": 1000}}}
    assert find_costs(given, no_host, log).windowed == WindowedLayers(250, 1, 0.5, 0.5)
    assert find_costs(given, {**WINDOWED_STATE, "window_reach": 0}, log).windowed is None
    assert find_costs(replace(given, bytes_per_token=7.0), WINDOWED_STATE, log) == Costs(7.0, 1.0)
    broken = {**WINDOWED_STATE, "window_reach": "many"}
    with pytest.raises(CommandError, match="window_reach in the server's reply is "):
        find_costs(given, broken, log)


def test_a_checkpoint_tells_of_its_layers_with_a_window(tmp_path: Path) -> None:
    """A window of 64 tokens in all layers but one of four."""
    folder = write_windowed_model(tmp_path / "model", 64)
    found = find_costs(Given(None, 1.0, str(folder)), {}, log_of(1000))
    assert found.windowed is not None
    assert found.windowed.bytes_per_token == 0.75 * found.bytes_per_token and found.windowed.device_share == 0.25
    # Checkpoints are four windows apart, and the last one is at the end.
    reach = window_reach_of([64])
    assert found.windowed.share == pytest.approx((1 + (1000 - 1) // (4 * reach)) * reach / 1000, abs=0.01)
    assert found.windowed.loaded_share == reach / 1000
    # With a server, its pool tells.
    with_server = find_costs(Given(None, 1.0, str(folder)), WINDOWED_STATE, log_of(1000))
    assert with_server.windowed == replace(found.windowed, device_share=0.3)
    assert least_host_gb(log_of(1000).curve(), found) == 2 * 1000 * found.bytes_held("host") / GB
