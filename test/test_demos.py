"""The demos fail when they should, run through, and leave nothing behind."""

from __future__ import annotations

import itertools
import os
import pty
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from sglang import demo, demo_common, demo_peers
from sglang.demo_common import (
    Answer,
    Interrupts,
    NotStartedError,
    Part,
    run,
    server,
    summarise,
    wait_ready,
)
from sglang.demo_peers_report import LongPrompt, Outcome, Slabs, Turn, Work, longest_wait_s, problems, table

TIERS = ("device", "peer", "host")
COLD = Answer(text="yes", ttft_s=0.5, seconds=1.0, prompt_tokens=100, tiers={})
QUESTIONS = [sys.executable, "-m", "sglang.demo"]
PEERS = [sys.executable, "-m", "sglang.demo_peers"]
ALL_TIERS = [sys.executable, "-m", "sglang.demo_tiers"]
# The end of a script: it tells that it has come there, and waits.
WAIT = "print('here', flush=True); import time; time.sleep(600)"
# What it calls is bound: the names of modules may be gone when the interpreter ends.
WAIT_SHORT = "lambda self, write=os.write, sleep=sys.modules['time'].sleep: [write(1, b'end\\n'), sleep(0.5)]"
LATIN = {"PYTHONIOENCODING": "latin-1"}
# As a shell starts what it does not wait for.
IN_THE_BACKGROUND = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]


def test_a_demo_fails_if_an_answer_differs_or_a_tier_gave_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    warm = replace(COLD, tiers={"device": 10, "peer": 80})
    assert summarise([(COLD, warm)], TIERS, ["device", "peer"])
    assert not summarise([(COLD, warm)], TIERS, ["host"])
    assert "no tokens came from the host" in capsys.readouterr().out
    assert not summarise([(COLD, warm), (COLD, replace(warm, text="no"))], TIERS, ["peer"])
    assert "1 of 2 equal" in capsys.readouterr().out


def test_the_bar_shows_where_the_tokens_of_a_prompt_came_from() -> None:
    answer = replace(COLD, prompt_tokens=96, tiers={"device": 24, "host": 2, "disk": 46, "storage": 46})
    assert demo.shares(answer) == {"device": 24, "host": 2, "disk": 46, "computed": 24}
    assert demo.bar(answer, colours=False) == "█" * 12 + "▓" + "▒" * 23 + "·" * 12
    coloured = demo.bar(answer, colours=True)
    assert re.sub(r"\x1b\[\d+m", "", coloured) == demo.bar(answer, colours=False) and coloured.count("\x1b[0m") == 4
    for tokens in range(97):
        part = replace(COLD, prompt_tokens=96, tiers={"host": tokens})
        assert len(demo.bar(part, colours=False)) == demo.BAR_WIDTH


def test_the_demo_fails_if_answers_are_wrong_or_differ_from_those_without_the_cache(
    capsys: pytest.CaptureFixture[str],
) -> None:
    questions = demo.questions()
    tiers = {"device": 30, "host": 30, "disk": 30}

    def asked(right: int, same: int) -> demo.Interview:
        interview = demo.Interview("smollm2")
        for at, question in enumerate(questions):
            text = f"It is {question.answer.upper()}." if at < right else "I do not know."
            answer = replace(COLD, text=text, tiers=tiers)
            uncached = replace(COLD, text=text if at < same else "another", ttft_s=2.5)
            interview.asked.append(demo.Asked(question, answer, uncached))
        return interview

    assert asked(right=8, same=10).summarise()
    assert "8 of 10;" in (out := capsys.readouterr().out) and "20.0 s of waiting in 10 questions" in out
    assert not asked(right=7, same=10).summarise()
    assert not asked(right=10, same=9).summarise()
    tiers["disk"] = 0
    assert not asked(right=10, same=10).summarise()
    assert "no tokens came from the disk" in capsys.readouterr().out


def test_each_question_is_about_a_page_that_holds_its_answer() -> None:
    questions = demo.questions()
    assert len(questions) == 10 and len({question.page for question in questions}) == 4
    assert all(question.answer in demo.page_text(question.page) for question in questions)
    first = [question.page for question in questions[: demo.NUM_BEFORE_RESTART]]
    assert len(set(first[:4])) == 4, "each page once, before it comes again"


def test_the_first_request_of_a_client_leaves_nothing_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(demo_common, "ask", lambda *_, **more: asked.append(more))
    demo_common.connect("http://127.0.0.1:1")
    assert [each["fields"]["cache"] for each in asked] == ["no_store"]


@pytest.mark.slow
@pytest.mark.e2e
def test_the_demo_answers_right_and_as_without_the_cache() -> None:
    done = subprocess.run(QUESTIONS, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    right = re.search(r"right answers +(\d+) of 10", done.stdout)
    assert right is not None and int(right[1]) >= 8, done.stdout
    assert "6 of 6 with and without the cache" in done.stdout, "each page that comes again is found"
    for part in ("device", "host", "disk"):
        assert re.search(rf"prompt tokens .*[1-9]\d* from {part}", done.stdout)
    after_restart = done.stdout.split("starts anew")[1]
    assert re.search(r"(\d+) tokens: \d+ disk, \d+ computed", after_restart.split("Page ")[1]), (
        "no tokens of the device"
    )


@pytest.mark.slow
@pytest.mark.e2e
def test_on_a_terminal_the_demo_stays_up_until_it_is_interrupted() -> None:
    leader, follower = pty.openpty()
    process = subprocess.Popen(QUESTIONS, stdin=follower, stdout=follower, stderr=follower, start_new_session=True)
    os.close(follower)
    shown = b""
    try:
        while b"Ctrl-C ends" not in shown:
            shown += os.read(leader, 4096)
        (url,) = re.findall(rb"http://127.0.0.1:\d+/hicache", shown)
        with urllib.request.urlopen(url.decode(), timeout=10) as page:
            assert page.status == 200
        assert b"\x1b[34m" in shown, "the bar has colours"
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        os.close(leader)


@pytest.fixture
def own_signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(demo_common, "_interrupts", Interrupts())
    before = {number: signal.getsignal(number) for number in Interrupts.NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("own_signals")
def test_an_interrupted_start_of_a_server_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        """A process that is interrupted three times: before its start, after it, and while it ends."""

        def __init__(self, _command: list[str], **kwargs: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            super().__init__([sys.executable, "-c", "import time; time.sleep(600)"], **kwargs)
            started.append(self)
            os.kill(os.getpid(), signal.SIGTERM)

        def terminate(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            super().terminate()

    monkeypatch.setattr(subprocess, "Popen", Interrupted)

    def main() -> int:
        with server():
            raise AssertionError("the start was interrupted")

    with pytest.raises(SystemExit) as end:
        run(main)
    assert end.value.code == 130 and capsys.readouterr().err == "\ninterrupted; the servers are stopped\n"
    assert [process.returncode for process in started] == [-signal.SIGTERM]


HIT = replace(COLD, tiers={"device": 10, "peer": 80}, ttft_s=0.05)
TURN = Turn(2, uncached=COLD, alone=replace(COLD, tiers={"device": 10}), master=HIT)
LONG = LongPrompt(2993, 10825, "status 400, too long", replace(COLD, prompt_tokens=9000), COLD)
OUTCOME = Outcome(
    turns=[replace(TURN, number=1, master=COLD), TURN],
    long_prompt=LONG,
    work_lent=Work(lends=(COLD,), alone=(HIT,)),
    work_idle=Work(lends=(HIT, HIT), alone=(HIT, HIT)),
    slabs=Slabs(lent=9, asked_back=5, withdrawn=6, longest_s=0.0371),
)


def test_the_demo_of_peers_shows_gains_and_cost_in_one_table() -> None:
    assert problems(OUTCOME) == []
    lines = table(OUTCOME)
    assert max(len(line) for line in lines) <= demo_common.MAX_COLUMNS
    assert [re.sub("  +", " | ", line) for line in lines] == [
        "What the master gains | alone | with peers",
        "prompt tokens found, 1 returning turns | 10 (10%) | 90 (90%)",
        "their time to first token, median, measured | 500 ms | 50 ms",
        "longest prompt that it accepts, tokens | 2,993 | 10,825",
        "a prompt of 9,000 tokens | refused | answered, equal",
        "",
        "What it costs the worker | alone | lends",
        "memory lent: prompt tokens found, 1 second turns | 90 (90%) | 0 (0%)",
        "memory lent: time to first token, median, measured | 50 ms | 500 ms",
        "master idle: prompt tokens found, 2 second turns | 180 (90%) | 180 (90%)",
        "master idle: time to first token, median, measured | 50 ms | 50 ms",
        "slabs lent, and asked back | - | 9, 5",
        "longest wait for slabs, measured | - | 37 ms",
    ]


@pytest.mark.parametrize(
    ("missed", "change"),
    [
        ("1 of 2 answers differ", {"turns": [TURN, replace(TURN, alone=replace(COLD, text="no"))]}),
        ("1 of 2 answers differ", {"turns": [TURN, replace(TURN, master=replace(HIT, text="no"))]}),
        ("no tokens at peers", {"turns": [replace(TURN, master=replace(HIT, tiers={"device": 90}))]}),
        (
            "20% of them more are expected",
            {"turns": [replace(TURN, master=replace(HIT, tiers={"device": 10, "peer": 19}))]},
        ),
        ("2993 tokens with peers, 2993 alone", {"long_prompt": replace(LONG, limit_master=2993)}),
        ("took a prompt of 9000 tokens", {"long_prompt": replace(LONG, refusal="")}),
        ("the answer to the long prompt differs", {"long_prompt": replace(LONG, master=replace(COLD, text="no"))}),
        (
            "at least 95% are expected",
            {"work_idle": Work(lends=(HIT, replace(HIT, tiers={"device": 80})), alone=(HIT, HIT))},
        ),
        ("found 0 tokens of its second turns", {"work_idle": Work(lends=(COLD,), alone=(COLD,))}),
        ("no slab was lent", {"slabs": replace(OUTCOME.slabs, lent=0)}),
        ("none was reclaimed", {"slabs": replace(OUTCOME.slabs, asked_back=0)}),
        ("none was reclaimed", {"slabs": replace(OUTCOME.slabs, withdrawn=0)}),
    ],
)
def test_the_demo_of_peers_fails_if_it_misses_an_aim(missed: str, change: dict[str, Any]) -> None:
    (problem,) = problems(replace(OUTCOME, **change))
    assert missed in problem


def test_a_gain_in_first_turns_does_not_count() -> None:
    first, second = replace(TURN, number=1), replace(TURN, master=replace(HIT, tiers={"peer": 12}))
    assert len(problems(replace(OUTCOME, turns=[first, second]))) == 1


def test_the_wait_for_slabs_counts_from_the_look_before_they_were_asked_back() -> None:
    #        seconds, asked back since the start, of these not back
    idle = [(0.0, 3, 0), (1.0, 3, 0)]
    assert longest_wait_s(idle) == 0.0
    assert longest_wait_s([*idle, (2.0, 5, 2), (3.0, 6, 3), (4.5, 6, 0), (9.0, 6, 0)]) == 3.5
    assert longest_wait_s([*idle, (1.25, 5, 0), (2.0, 5, 0), (3.0, 6, 1), (3.5, 6, 0)]) == 1.5
    assert longest_wait_s([*idle, (2.0, 5, 2), (8.0, 5, 2)]) == 7.0, "they are not back at the end"


def test_both_workers_get_the_same_turns_and_each_is_first_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def ask(_client: object, messages: demo_common.Messages, model: str, _num_tokens: int) -> Answer:
        asked.append((model, "\n".join(message["content"] for message in messages)))
        return replace(COLD, text=f"answer of {model}", tiers={"device": len(messages)})

    monkeypatch.setattr(demo_peers, "ask", ask)
    works: list[Work] = [demo_peers.work(None, number) for number in range(2)]  # type: ignore[arg-type]
    for done in works:
        assert [answer.tiers["device"] for answer in (*done.lends, *done.alone)] == [3] * 10, "second turns alone"
    lends, twin = ([text for model, text in asked if model == name] for name in ("busy", demo_peers.TWIN))
    assert [text.replace("answer of busy", f"answer of {demo_peers.TWIN}") for text in lends] == twin
    assert len(set(twin)) == len(twin) == 20, "each round has new conversations"
    assert [model for model, _ in asked[::2]].count("busy") == 10


@pytest.mark.slow
@pytest.mark.e2e
def test_the_demo_of_peers_lends_uses_and_takes_back() -> None:
    done = subprocess.run(PEERS, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "answers to 20 of 20 questions equal" in done.stdout and done.stderr == ""
    assert max(len(line) for line in done.stdout.splitlines()) <= demo_common.MAX_COLUMNS
    long = re.search(
        r"longest prompt that it accepts, tokens +([\d,]+) +([\d,]+)\na prompt of ([\d,]+) ", done.stdout
    )
    assert long is not None, done.stdout
    alone, master, prompt = (int(number.replace(",", "")) for number in long.groups())
    assert alone < 3072 and 0.9 * master < prompt <= master
    assert "status 400" in done.stdout and f"the {alone + 1}" in done.stdout


@pytest.mark.slow
@pytest.mark.e2e
def test_the_demo_of_all_tiers_uses_all_and_survives_their_faults() -> None:
    done = subprocess.run(ALL_TIERS, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    same = re.search(r"(\d+) of (\d+) equal", done.stdout)
    assert same is not None and same[1] == same[2] and done.stderr == ""


def test_a_part_that_does_not_start_ends_the_demo_with_its_output() -> None:
    part = Part("store", [sys.executable, "-c", "import sys; sys.exit('no memory')"])
    try:
        part.start()
        with pytest.raises(
            NotStartedError, match=r"did not start: it ended with exit code 1 after .*\n.*:\nno memory"
        ):
            part.wait_until(lambda: False)
    finally:
        part.close()


def test_a_part_that_takes_long_tells_its_stage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_common, "PROGRESS_S", 0.1)
    line = "[2026-01-01 00:00:00 x] INFO: still starting, after 10 s: loading the weights " + "of a model " * 9
    part = Part("store", [sys.executable, "-c", f"import time; print({line!r}, flush=True); time.sleep(600)"])
    part.start()
    polls = itertools.count()
    part.wait_until(lambda: next(polls) > 4 and "weights" in part.log_end())
    monkeypatch.setattr(demo_common, "START_TIMEOUT_S", 0.3)
    with pytest.raises(NotStartedError) as failed:
        part.wait_until(lambda: False)
    part.close()
    stage = "at this stage: loading the weights of a model "
    assert f"it was not ready after 0 s, {stage}" in str(failed.value)
    assert f"\nIts log ends with:\n{line}\n" in str(failed.value)
    shown = capsys.readouterr().out.splitlines()[-1]
    assert shown.startswith("the store is still starting after 0 s: loading the weights of a model of ")
    assert len(shown) <= demo_common.MAX_COLUMNS and shown.endswith(" ...")


def test_a_server_that_does_not_start_tells_it_once(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(NotStartedError, match=r"the peer did not start.*\n.*\n.*No module named"),
        server(module="sglang.no_such_module", name="peer") as (part, url),
    ):
        wait_ready(part, url)
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_a_part_dies_with_a_demo_that_is_killed() -> None:
    code = "from sglang.demo_common import Part; p = Part('store', ['/bin/sleep', '600']); p.start();"
    with subprocess.Popen([sys.executable, "-c", code + WAIT], stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        demo.stdout.readline()
        (part,) = psutil.Process(demo.pid).children()
        demo.kill()
    _, alive = psutil.wait_procs([part], timeout=60)
    assert not alive


def run_in_process(main: str, **environment: str) -> subprocess.Popen[str]:
    """main: the body of a demo."""
    code = f"import os, sys, time\nfrom sglang import demo, demo_common\ndef main():\n  {main}\ndemo_common.run(main)"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="latin-1",
        env={**os.environ, **environment},
    )


def test_a_demo_whose_reader_has_gone_ends_quietly() -> None:
    with run_in_process("while True: print('x' * 5000, flush=True)") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 128 + signal.SIGPIPE


def test_characters_that_the_output_cannot_encode_are_replaced() -> None:
    process = run_in_process("print(''.join(demo.PARTS[each][0] for each in demo.PARTS), '\u2019\u3042')", **LATIN)
    assert process.communicate() == ("#=-\xb7 '?\n", "") and process.returncode == 0


def test_a_second_interrupt_does_not_change_the_exit_code() -> None:
    """It comes while the interpreter ends, which takes long where much was imported."""
    main = f"demo.slow = type('Slow', (), {{'__del__': {WAIT_SHORT}}})(); {WAIT}"
    with run_in_process(main) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "end\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == "\ninterrupted; the servers are stopped\n"
    assert process.returncode == 130


def test_a_part_is_killed_stopped_and_started_again() -> None:
    part = Part("store", [sys.executable, "-c", "import time; time.sleep(600)"])
    part.start()
    part.kill()
    assert part.process.returncode == -signal.SIGKILL
    part.start()
    part.pause()
    part.close()
    assert part.process.returncode == -signal.SIGTERM, "it ends although it stood still"


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("demo_command", [PEERS, ALL_TIERS], ids=["peers", "tiers"])
@pytest.mark.parametrize("prefix", [[], IN_THE_BACKGROUND], ids=["foreground", "background"])
def test_an_interrupted_demo_ends_its_servers(prefix: list[str], demo_command: list[str]) -> None:
    demo = subprocess.Popen(
        [*prefix, *demo_command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    children: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 240
        # Of either demo: servers, parts, and processes of theirs.
        while len(children) < 6:
            assert time.monotonic() < deadline and demo.poll() is None
            time.sleep(0.05)
            children = psutil.Process(demo.pid).children(recursive=True)
        os.killpg(demo.pid, signal.SIGINT)
        _, error = demo.communicate(timeout=240)
        assert (demo.returncode, error) == (130, "\ninterrupted; the servers are stopped\n")
        _, alive = psutil.wait_procs(children, timeout=240)
        assert not alive
    finally:
        if demo.poll() is None:
            os.killpg(demo.pid, signal.SIGKILL)
