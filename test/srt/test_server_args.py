"""Flags: what is accepted, and the one sentence for what is not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict, fields, replace
from datetime import date
from pathlib import Path

import msgspec
import pytest

from sglang.srt.flag_reference import render_flags, render_storage
from sglang.srt.server_args import GROUPS, ServerArgs, make_parser
from sglang.srt.utils.child_process import ChildArgs


def test_defaults_are_upstreams():
    args = ServerArgs.from_cli(["--model-path", "embedded"])
    assert (args.host, args.port, args.schedule_policy, args.stream_interval) == ("127.0.0.1", 30000, "fcfs", 1)
    assert args.max_prefill_tokens == 16384
    assert not args.enable_hierarchical_cache


@pytest.mark.parametrize("flag", ["--hicache", "--enable-hicache", "--enable-hierarchical-cache"])
def test_the_names_of_the_host_tier(flag):
    assert ServerArgs.from_cli(["--model", "m", flag]).enable_hierarchical_cache


def test_a_child_process_gets_every_setting():
    args = ServerArgs(model_path="m", page_size=16, enable_hierarchical_cache=True, hicache_size=1.5, random_seed=7)
    sent = msgspec.json.encode(ChildArgs(server_args=asdict(args), ipc={}))
    assert ServerArgs(**msgspec.json.decode(sent, type=ChildArgs).server_args) == args


def test_rate_limits_are_bytes_per_second():
    assert ServerArgs(model_path="m").rate_limits == {}
    args = ServerArgs.from_cli(["--model", "m", "--hicache-rate-limit", "h2d=10,d2h=2.5,fetch=1e-3,store=1"])
    assert args.rate_limits == {"h2d": 10e9, "d2h": 2.5e9, "fetch": 1e6, "store": 1e9}


def test_the_served_name():
    assert ServerArgs(model_path="m").model_name == "m"
    assert ServerArgs(model_path="m", served_model_name="n").model_name == "n"


@pytest.mark.parametrize(
    "flags, words",
    [
        ("", "--model-path is missing"),
        (
            "--model m --pp-size 2",
            "this engine does not have the flag --pp-size: a model is split by --tp-size alone",
        ),
        (
            "--model m --fp8-gemm-backend=triton",
            "this engine does not have the flag --fp8-gemm-backend: how a checkpoint is quantized is read",
        ),
        ("--model m --nonsense", "--nonsense is not a flag of this engine"),
        ("--model m --hicache-rat 3", "--hicache-rat is not a flag"),
        ("--model m stray", "'stray' belongs to no flag"),
        ("--model m --port 0", "from 1 to 65535"),
        ("--model m --port 70000", "from 1 to 65535"),
        ("--model m --port http", "--port"),
        ("--model m --context-length 0", "--context-length is 0, but it must be at least 2"),
        ("--model m --context-length 1", "at least 2, for one token of a prompt and one of its answer"),
        ("--model m --page-size 0", "--page-size is 0, but it must be at least 1"),
        ("--model m --max-total-tokens 8 --page-size 16", "at least two pages, 32"),
        ("--model m --max-total-tokens 1", "--max-total-tokens is 1, but it must be at least two pages, 2"),
        ("--model m --hicache-ratio -1", "--hicache-ratio is -1.0"),
        ("--model m --hicache-ratio nan", "--hicache-ratio is nan"),
        ("--model m --hicache-size -2", "0 or more GB"),
        ("--model m --chunked-prefill-size 0", "at least 1, or -1"),
        ("--model m --mem-fraction-static 1.5", "between 0 and 1"),
        ("--model m --max-queued-requests 0", "at least 1"),
        ("--model m --api-key=", "printable ASCII"),
        ("--model m --admin-api-key é", "--admin-api-key must be printable ASCII"),
        ("--model m\udcff", "--model-path is 'm\\udcff', but it must be text in UTF-8"),
        (
            "--model m --peer-role worker --peer-endpoint tcp://127.0.0.1:1,tcp://127.0.0.1:2",
            "a master takes several",
        ),
        ("--model m --schedule-policy random", "fcfs"),
        ("--model m --hicache --hicache-load-ratio some", "'auto', or a number"),
        ("--model m --hicache --hicache-load-ratio -1", "'auto', or a number"),
        ("--model m --hicache --hicache-load-ratio nan", "'auto', or a number"),
        ("--model m --hicache --hicache-bubble-filling maybe", "on"),
        ("--model m --hicache --hicache-publish-at finish", "completion"),
        ("--model m --hicache --hicache-deferral-threshold -1", "0 or more tokens"),
        ("--model m --hicache-bypass-local", "add --hicache"),
        ("--model m --peer-role donor --peer-endpoint tcp://127.0.0.1:1", "worker"),
        ("--model m --peer-role worker", "give both, or neither"),
        ("--model m --layer-stream 2", "add --hicache"),
        ("--model m --hicache --disable-radix-cache --layer-stream 2", "add --hicache"),
        ("--model m --hicache --layer-stream -1", "0 or more buffers"),
        ("--model m --hicache --layer-stream 2 --layer-stream-tokens -1", "0 or more tokens"),
        ("--model m --hicache --layer-stream 2 --layer-stream-max-tpot 0", "above 0 seconds"),
        ("--model m --hicache --layer-stream 2 --layer-stream-disk-size 1", "give both"),
        ("--model m --hicache --layer-stream-disk-size 1 --layer-stream-disk-path /tmp", "add --layer-stream"),
        (
            "--model m --hicache --layer-stream 2 --peer-role worker --peer-endpoint tcp://127.0.0.1:1",
            "use one of the two",
        ),
        ("--model m --peer-role worker --peer-endpoint tcp://10.0.0.1:1", "only loopback"),
        ("--model m --peer-role worker --peer-endpoint tcp://127.0.0.1:0", "port 0 is a free port, which no master"),
        ("--model m --peer-role master --hicache --peer-endpoint tcp://127.0.0.1:00", "name one from 1 to 65535"),
        ("--model m --peer-endpoint tcp://127.0.0.1:1", "give both, or neither"),
        ("--model m --peer-role master --peer-endpoint tcp://127.0.0.1:1", "add --hicache"),
        ("--model m --peer-role worker --peer-endpoint tcp://127.0.0.1:1 --peer-window 0", "above 0 seconds"),
        ("--model m --peer-timing silence=1", "at least four heartbeats, 2 s"),
        ("--model m --peer-timing idle=0", "above 0 seconds"),
        ("--model m --peer-timing idle=soon", "must be a number of seconds"),
        ("--model m --peer-timing courage=3", "must be one of heartbeat, silence"),
        ("--model m --peer-strict", "add --peer-role worker"),
        (
            "--model m --hicache --peer-role master --peer-endpoint tcp://127.0.0.1:1 --peer-strict",
            "add --peer-role worker",
        ),
        (
            "--model m --peer-role master --hicache --peer-endpoint tcp://127.0.0.1:1 --peer-slab-size 0",
            "at least 1 MiB",
        ),
        ("--model m --peer-role master --hicache --peer-endpoint tcp://127.0.0.1:1 --peer-size 0", "above 0 GB"),
        ("--model m --hicache-write-policy sometimes", "write_through"),
        ("--model m --hicache-mem-layout page_head", "page_first"),
        ("--model m --hicache --hicache-storage-backend mooncake", "one of file, remote, bluefield, dynamic"),
        ("--model m --hicache --hicache-storage-backend file,dynamic", "like file,remote"),
        ("--model m --hicache-storage-backend file", "add --hicache"),
        ("--model m --hicache --hicache-storage-backend-extra-config {}", "add --hicache-storage-backend"),
        ("--model m --hicache --hicache-storage-prefetch-policy never", "best_effort"),
        ("--model m --hicache-io-backend kernel_ascend", "auto"),
        ("--model m --tool-call-parser gorilla", "'auto', 'qwen3_coder', 'qwen25', 'qwen', 'hermes', 'mistral'"),
        ("--model m --reasoning-parser loud", "'auto', 'deepseek-r1', 'qwen3', 'qwen3-thinking'"),
        ("--model m --default-chat-template-kwargs [1]", "must be a JSON object"),
        ("--model m --default-chat-template-kwargs {", "must be a JSON object"),
        (
            '--model m --default-chat-template-kwargs {"tools":[]}',
            "--default-chat-template-kwargs may not hold tools, which the engine sets itself",
        ),
        ('--model m --default-chat-template-kwargs {"a":1,"messages":[]}', "may not hold messages"),
        ("--model m --hicache-rate-limit nvlink=3", "some of h2d, d2h, fetch, fetch_far, store, store_far"),
        ("--model m --hicache-rate-limit h2d", "GB/s above 0"),
        ("--model m --hicache-rate-limit h2d=0", "GB/s above 0"),
        ("--model m --hicache-rate-limit h2d=nan", "GB/s above 0"),
        ("--model m --hicache-rate-limit h2d=inf", "GB/s above 0"),
        ("--model m --hicache-rate-limit h2d=1,h2d=2", "each once"),
        ("--model m --hicache-rate-limit=", "each once"),
        ("--model m --attention-backend fa3", "torch_native"),
        ("--model m --hicache --disable-radix-cache", "drop --disable-radix-cache"),
    ],
)
def test_a_wrong_flag_ends_with_one_sentence(flags, words, capsys):
    with pytest.raises(SystemExit) as exit:
        ServerArgs.from_cli(flags.split())
    assert exit.value.code == 2
    output = capsys.readouterr().err
    assert words in output
    assert output.startswith("error: ") and output.count("\n") == 1


def test_keywords_are_checked_alike():
    with pytest.raises(ValueError, match="--page-size is 0"):
        ServerArgs(model_path="m", page_size=0)
    with pytest.raises(TypeError, match="pp_size"):
        ServerArgs(model_path="m", pp_size=2)  # type: ignore[call-arg]


def test_a_keyword_of_a_flag_that_takes_json_may_be_a_mapping():
    mapping = {"path": "/tmp/kv", "limit_gb": 1, "file": {"codec": "none"}}
    args = ServerArgs(
        model_path="m",
        enable_hierarchical_cache=True,
        hicache_storage_backend="file",
        hicache_storage_backend_extra_config=mapping,  # type: ignore[arg-type]
        default_chat_template_kwargs={"enable_thinking": False},  # type: ignore[arg-type]
        kv_events_config={"publisher": "zmq", "hwm": 7},  # type: ignore[arg-type]
    )
    assert json.loads(args.hicache_storage_backend_extra_config) == mapping
    assert args.chat_template_defaults == {"enable_thinking": False}
    assert (args.kv_events.publisher, args.kv_events.hwm) == ("zmq", 7)
    assert replace(args, port=1).hicache_storage_backend_extra_config == args.hicache_storage_backend_extra_config


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("default_chat_template_kwargs", {"a": date(2026, 1, 1)}, "-kwargs holds what JSON does not have"),
        ("default_chat_template_kwargs", {"a": float("nan")}, "-kwargs holds what JSON does not have"),
        ("default_chat_template_kwargs", ["a"], "-kwargs is a list or a table, but it must be a text"),
        ("cors_allow_origins", ["*"], "--cors-allow-origins is a list or a table, but it must be a text"),
        ("port", {"a": 1}, "--port is a list or a table, but it must be a whole number"),
        ("schedule_policy", {"a": 1}, "but it must be one of"),
    ],
)
def test_other_collections_are_refused_with_a_sentence(name, value, words):
    with pytest.raises(ValueError, match=words):
        ServerArgs(model_path="m", **{name: value})


def test_flags_are_checked_without_heavy_imports():
    code = (
        "import sys, sglang, sglang.launch_server, sglang.srt.server_args;"
        "print(sorted({'torch', 'transformers', 'fastapi', 'zmq', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_what_is_shown_has_no_secrets():
    args = ServerArgs(
        model_path="m",
        api_key="key-1",
        admin_api_key="key-2",
        enable_hierarchical_cache=True,
        hicache_storage_backend="remote",
        hicache_storage_backend_extra_config='{"url": "redis://:hush@there"}',
    )
    shown = args.shown()
    assert shown["hicache_storage_backend"] == "remote"
    assert not any(word in str(shown) for word in ("key-1", "key-2", "hush"))
    named = replace(args, hicache_storage_backend_extra_config="@/there/remote.json").shown()
    assert named["hicache_storage_backend_extra_config"] == "@/there/remote.json"


def test_help_shows_every_flag_in_its_group():
    text = make_parser().format_help()
    sections = {title: text.split(f"\n{title}:\n")[1].split("\n\n")[0] for title in GROUPS}
    for field in fields(ServerArgs):
        flag = "--" + field.name.replace("_", "-")
        assert re.search(rf"^  {flag}\b", sections[field.metadata["group"]], re.MULTILINE), flag


def test_the_generated_pages_are_up_to_date():
    folder = Path(__file__).parents[2] / "docs" / "reference"
    for page, text in (("flags.md", render_flags()), ("storage.md", render_storage())):
        assert (folder / page).read_text() == text, "run make docs"
