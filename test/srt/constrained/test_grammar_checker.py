"""The checker's processes: what they find is kept, and a grammar that ends one ends no other request."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import threading
from pathlib import Path

import pytest

from sglang.srt.constrained import check_process, grammar_checker
from sglang.srt.constrained.check_process import CheckOrder, CheckSettings, check_in_fork
from sglang.srt.constrained.grammar_checker import MAX_SOURCE_CHARS, GrammarChecker
from sglang.srt.sampling.sampling_params import GrammarSpec
from sglang.srt.utils.errors import RequestError
from support.grammars import write_vocabulary

pytest.importorskip("xgrammar")

# Takes its part without importing what compiles: each text is an order. Counts its starts and its checks in files.
FAKE = """
import json, os, sys, time
import msgspec
from sglang.srt.constrained.check_process import CheckOrder, CheckResult, read_frame, write_frame
folder = json.loads(sys.argv[1])["vocabulary_file"]
with open(f"{folder}/start-{os.getpid()}", "w") as file:
    json.dump(sorted(os.environ), file)
out = sys.stdout.buffer
if os.path.exists(f"{folder}/broken"):
    sys.exit(1)
write_frame(out, CheckResult("this tokenizer is of no use" if os.path.exists(f"{folder}/useless") else ""))
while (data := read_frame(sys.stdin.buffer)) is not None:
    found = msgspec.msgpack.decode(data, type=CheckOrder)
    order = found.spec.source
    with open(f"{folder}/checked", "a") as file:
        file.write(f"{order}\\n")
    if order == "killed" or (order == "killed-once" and not os.path.exists(f"{folder}/once")):
        open(f"{folder}/once", "w").close()
        write_frame(out, CheckResult(is_killed=True))
        continue
    if order.startswith("die"):
        os._exit(7)
    while order == "long-wait" and found.cpu_s > 5 and not os.path.exists(f"{folder}/go"):
        time.sleep(0.01)
    if order.startswith("long"):
        over = found.cpu_s < 5 or order == "long-for-ever"
        write_frame(out, CheckResult("it takes too long" if over else "", is_over_time=over))
        continue
    if order.startswith("hang"):
        time.sleep(1000)
    while order.startswith("wait") and not os.path.exists(f"{folder}/go"):
        time.sleep(0.01)
    write_frame(out, CheckResult("" if not order.startswith("bad") else f"{order} is bad"))
"""


def settings(vocabulary_file: Path, tokenizer_path: Path) -> CheckSettings:
    return CheckSettings(
        tokenizer_path=str(tokenizer_path),
        vocab_size=97,
        vocabulary_file=str(vocabulary_file),
        max_whitespace=None,
        parent_pid=os.getpid(),
    )


def spec(source: str) -> GrammarSpec:
    return GrammarSpec("regex", source)


async def why_not(checker: GrammarChecker, source: str, kind: str = "regex") -> tuple[int, str]:
    with pytest.raises(RequestError) as refusal:
        await checker.check(GrammarSpec(kind, source))
    return refusal.value.status_code, refusal.value.message


def checked(folder: Path) -> list[str]:
    return (folder / "checked").read_text().split()


def run(test):
    """pytest without a plugin for coroutines."""

    def wrapper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        async def main() -> None:
            made = GrammarChecker(settings(tmp_path, tmp_path), (sys.executable, "-c", FAKE))
            try:
                await test(made, tmp_path, monkeypatch)
            finally:
                made.close()

        asyncio.run(main())

    return wrapper


@run
async def test_results_are_kept_and_shared(checker: GrammarChecker, folder: Path, _: pytest.MonkeyPatch):
    await asyncio.gather(*(checker.check(spec("good")) for _ in range(5)))
    await checker.check(spec("good"))
    for _ in range(2):
        assert await why_not(checker, "bad") == (400, "bad is bad")
    assert checked(folder) == ["good", "bad"]


@run
async def test_the_process_has_no_keys(checker: GrammarChecker, folder: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("API_KEY", "ADMIN_API_KEY", "LOG_LEVEL"):
        monkeypatch.setenv(f"SGLANG_{name}", "warning")
    await checker.check(spec("good"))
    (start,) = folder.glob("start-*")
    names = set(json.loads(start.read_text()))
    assert "SGLANG_LOG_LEVEL" in names and not names & {"SGLANG_API_KEY", "SGLANG_ADMIN_API_KEY"}


@run
async def test_a_process_starts_beside_a_thousand_clients(
    checker: GrammarChecker, folder: Path, _: pytest.MonkeyPatch
):
    """Each has a descriptor, and the server has raised its limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < 2048:
        pytest.skip("this machine allows fewer descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 2048), before[1]))
    clients: list[int] = []
    try:
        while not clients or clients[-1] < 1024:
            clients.append(os.open(os.devnull, os.O_RDONLY))
        await checker.check(spec("good"))
    finally:
        for descriptor in clients:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert checked(folder) == ["good"]


@run
async def test_a_grammar_that_takes_long_changes_the_lane(
    checker: GrammarChecker, folder: Path, _: pytest.MonkeyPatch
):
    assert await checker.check(spec("good")) == 0
    for _ in range(2):
        assert await checker.check(spec("long")) == 2
        assert await why_not(checker, "long-for-ever") == (400, "it takes too long")
    assert checked(folder) == ["good"] + ["long"] * 3 + ["long-for-ever"] * 3, "what was found is remembered"


@run
async def test_a_process_that_others_end_says_nothing_about_the_grammar(
    checker: GrammarChecker, folder: Path, _: pytest.MonkeyPatch
):
    """The kernel kills when memory runs out, and whom."""
    await checker.check(spec("killed-once"))
    for order in ("killed", "die"):
        for _ in range(2):
            assert (await why_not(checker, order))[0] == 503
        assert checked(folder).count(order) == 4, "twice each time, and not remembered"
    await checker.check(spec("good"))


@run
async def test_a_slow_grammar_holds_up_no_other(checker: GrammarChecker, folder: Path, _: pytest.MonkeyPatch):
    slow = asyncio.create_task(checker.check(spec("long-wait")))
    while "long-wait" not in (checked(folder) if (folder / "checked").exists() else []):
        await asyncio.sleep(0.01)
    await checker.check(spec("good"))
    (folder / "go").touch()
    await slow


@run
async def test_what_all_clients_have_left_is_dropped(checker: GrammarChecker, folder: Path, _: pytest.MonkeyPatch):
    busy = asyncio.create_task(checker.check(spec("wait")))
    left = asyncio.create_task(checker.check(spec("left")))
    while not (folder / "checked").exists():
        await asyncio.sleep(0.01)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    (folder / "go").touch()
    await busy
    await checker.check(spec("good"))
    assert checked(folder) == ["wait", "good"]


@run
async def test_a_client_that_leaves_does_not_end_the_check_of_others(
    checker: GrammarChecker, folder: Path, _: pytest.MonkeyPatch
):
    first, second = (asyncio.create_task(checker.check(spec("wait"))) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    (folder / "go").touch()
    await second
    assert checked(folder) == ["wait"]


@run
async def test_a_process_that_is_silent_is_replaced(
    checker: GrammarChecker, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    await checker.check(spec("good"))
    monkeypatch.setattr(grammar_checker, "_TIMEOUT_S", 0.2)
    status, _ = await why_not(checker, "hang")
    assert status == 503
    monkeypatch.undo()
    await checker.check(spec("other"))


@run
async def test_too_many_and_too_long(checker: GrammarChecker, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checker._lanes[0], "_max_waiting", 2)
    waiting = [asyncio.create_task(checker.check(spec(f"wait-{n}"))) for n in range(2)]
    for _ in range(2):  # the task of the request, and that of the check
        await asyncio.sleep(0)
    assert (await why_not(checker, "good"))[0] == 503
    (folder / "go").touch()
    await asyncio.gather(*waiting)
    await checker.check(spec("good"))
    status, message = await why_not(checker, "x" * (MAX_SOURCE_CHARS + 1))
    assert status == 400 and str(MAX_SOURCE_CHARS) in message


@run
async def test_too_many_that_take_long(checker: GrammarChecker, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checker._lanes[-1], "_max_waiting", 1)
    slow = asyncio.create_task(checker.check(spec("long-wait")))
    while not (folder / "checked").exists() or checked(folder).count("long-wait") < 3:
        await asyncio.sleep(0.01)
    assert (await why_not(checker, "long"))[0] == 503
    assert await checker.check(spec("good")) == 0
    (folder / "go").touch()
    assert await slow == 2
    assert await checker.check(spec("long")) == 2, "the refusal is not remembered"


@run
async def test_what_is_remembered_is_bounded(checker: GrammarChecker, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_checker, "_MAX_KNOWN_CHARS", 10)
    for order in ("good-1", "good-2", "good-2", "good-1"):
        await checker.check(spec(order))
    assert checked(folder) == ["good-1", "good-2", "good-1"]


@run
async def test_processes_that_do_not_start(checker: GrammarChecker, folder: Path, _: pytest.MonkeyPatch):
    (folder / "broken").touch()
    assert (await why_not(checker, "good"))[0] == 500
    (folder / "broken").unlink()
    (folder / "useless").touch()
    assert await why_not(checker, "good") == (501, "this tokenizer is of no use")
    (folder / "useless").unlink()
    await checker.check(spec("good"))


@run
async def test_a_system_that_starts_no_thread_or_process(
    checker: GrammarChecker, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def popen(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        status, message = await why_not(checker, "good")
        assert status == 503 and "has no thread for this request" in message
    with monkeypatch.context() as patch:
        patch.setattr(grammar_checker.subprocess, "Popen", popen)
        status, message = await why_not(checker, "good")
        assert status == 503 and "cannot be started (Too many open files)" in message
    assert await checker.check(spec("good")) == 0


def test_a_folder_that_was_cleaned_gets_the_vocabulary_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sglang.srt.utils.hf_transformers_utils.get_tokenizer", lambda path: None)
    monkeypatch.setattr(check_process, "make_vocabulary", lambda tokenizer, size: "words")
    file = tmp_path / "gone" / "vocabulary"
    assert check_process.vocabulary_of(settings(file, tmp_path)) == "words" == file.read_text()
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_a_server_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        checker = GrammarChecker(settings(tmp_path, tmp_path))
        status, message = await why_not(checker, "a")
        assert status == 501 and "pip install xgrammar" in message
        checker.close()

    monkeypatch.setattr(grammar_checker, "is_installed", lambda: False)
    asyncio.run(main())


def test_the_time_of_a_check_is_limited_below_a_second():
    class Endless:
        def compile(self, spec: GrammarSpec) -> None:
            while True:
                pass

    result = check_in_fork(Endless(), CheckOrder(spec("a"), 0.05))  # type: ignore[arg-type]
    assert result.is_over_time and "takes too long" in result.message


@pytest.mark.slow
def test_real_grammars_useful_and_hostile(tmp_path: Path):
    """In the real process. Each hostile one is refused, or harmless within the limits."""

    async def main() -> None:
        checker = GrammarChecker(settings(write_vocabulary(tmp_path / "vocabulary.json"), tmp_path))
        await checker.check(spec("[a-z]+"))
        await checker.check(
            GrammarSpec("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}')
        )
        deep = "{}"
        for _ in range(20_000):
            deep = '{"type":"array","items":' + deep + "}"
        hostile = {
            "nested": ("json_schema", deep[:MAX_SOURCE_CHARS]),
            "nested, short": ("json_schema", '{"items":' * 900 + "{}" + "}" * 900),
            "brackets": ("ebnf", "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000),
            "brackets of a regex": ("regex", "(" * 50_000 + "a" + ")" * 50_000),
            "repetition": ("regex", "((((a{1,99}){1,99}){1,99}){1,99}){1,99}"),
            "long": ("json_schema", '{"type": "string", "maxLength": 100000000}'),
            "enum": ("json_schema", '{"enum": [' + ",".join(f'"v{n}"' for n in range(20_000)) + "]}"),
            "reference": ("json_schema", '{"$ref": "https://example.com/schema.json"}'),
            "loop": ("json_schema", '{"$ref": "#"}'),
            "rules": (
                "ebnf",
                "root ::= "
                + " | ".join(f"r{n} r{n}" for n in range(3000))
                + "\n"
                + "\n".join(f'r{n} ::= r{(n + 1) % 3000} "a" | "b"' for n in range(3000)),
            ),
        }
        for name, (kind, source) in hostile.items():
            try:
                await checker.check(GrammarSpec(kind, source))
                assert name not in ("nested", "brackets", "reference"), name
            except RequestError as refusal:
                print(name, refusal.message)
                assert refusal.status_code == 400, f"{name}: {refusal.message}"
        await checker.check(spec("[0-9]+"))
        checker.close()

    asyncio.run(main())
