"""Parts of the demos: servers started as a user would, and conversations with two of them, side by side."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sglang.srt.utils.parent_death import ends_with_parent

if TYPE_CHECKING:
    from openai import OpenAI

ANSWER_TOKENS = 32
START_TIMEOUT_S = 300.0
# A start that takes longer prints a line this often.
PROGRESS_S = 10.0
# Of a line that a demo prints.
MAX_COLUMNS = 100
# What a log has in front of its text: time and level, and how long the server has been starting.
LOG_PREFIX = re.compile(r"^\[[^\]]*\] [A-Z]+: (still starting, after \d+ s: )?")
# In place of characters that the output's encoding lacks: those of the bar, and what models write.
ASCII = {"█": "#", "▓": "=", "▒": "-", "·": ".", "’": "'", "‘": "'", "“": '"', "”": '"', "–": "-", "—": "-"}
# An answer of a model that means nothing by its end, of full length.
IGNORE_EOS = {"ignore_eos": True}

Messages = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """ttft_s: from request to first token. tiers: tier -> prompt tokens that were found there."""

    text: str
    ttft_s: float
    seconds: float
    prompt_tokens: int
    tiers: dict[str, int]


def system_prompt(num_rules: int = 40) -> str:
    """A long one, as assistants have: the house rules of a library."""
    things = ("a map", "a letter", "an old atlas", "a lamp", "a film", "a globe", "a diary")
    places = ("the reading room", "the tower", "the archive", "the garden", "the hall")
    who = ("guest", "member", "teacher", "child")
    rules = [
        f"Rule {i}: a {who[i % 4]} who takes {things[i % 7]} from {places[i % 5]} brings it back within {2 + i % 9} "
        f"days and tells the desk in {places[(i + 2) % 5]} what was learned from it."
        for i in range(1, num_rules + 1)
    ]
    return "You help at the desk of a library. These are the rules of the house.\n" + "\n".join(rules)


def question(name: str, turn: int) -> str:
    lines = [
        f"On day {turn * 7 + i} {name} read page {turn * 31 + i * 3} and wrote {i + 2} notes." for i in range(10)
    ]
    return f"I am {name}, and this is my visit number {turn}. " + " ".join(lines) + " Which rules are mine?"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Interrupts:
    """The signals that end a demo. The first one raises KeyboardInterrupt in the main thread, and later ones do
    nothing, because they would interrupt the end of the servers. Between `hold` and `release` none is raised."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._held = False
        self._came = False

    def install(self) -> None:
        """Handle SIGINT even if it is ignored, as shells have it for what they start in the background: the servers
        handle it, too."""
        for number in self.NUMBERS:
            signal.signal(number, self._handle)

    def _handle(self, *_: object) -> None:
        first, self._came = not self._came, True
        if first and not self._held:
            raise KeyboardInterrupt

    def hold(self) -> None:
        self._held = True

    def release(self) -> None:
        """Raise what came meanwhile."""
        self._held = False
        if self._came:
            raise KeyboardInterrupt

    def ignore(self) -> None:
        """From here on. The end of the interpreter would give the signals back to the system, which ends the process
        by them."""
        for number in self.NUMBERS:
            signal.signal(number, signal.SIG_IGN)


_interrupts = Interrupts()


class NotStartedError(SystemExit):
    """A part is not ready. The message has the end of its log."""


class Part:
    """A process that a demo kills, stops and starts again. It dies with the demo, however that dies. Its output goes
    to a file without a name. environment: on top of this process's."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """It is not started yet. name: stands in what is printed."""
        self.name = name
        self._command = list(command)
        self._environment = {**os.environ, **(environment or {})}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        _interrupts.hold()  # an interrupted start would leave a process that nothing ends
        self._process = subprocess.Popen(
            ends_with_parent(self._command),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=self._environment,
        )
        _interrupts.release()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "it was not started"
        return self._process

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Prints the stage of its start now and then. Raises NotStartedError if it ends meanwhile, or is not ready in
        time."""
        began = shown = time.monotonic()
        while not is_ready():
            now = time.monotonic()
            code = self.process.poll()
            if code is not None or now > began + START_TIMEOUT_S:
                why = "it was not ready" if code is None else f"it ended with exit code {code}"
                log = self.log_end()
                raise NotStartedError(
                    f"the {self.name} did not start: {why} after {now - began:.0f} s, at this stage: {self.stage()}\n"
                    + (f"Its log ends with:\n{log}" if log else "It logged nothing.")
                )
            if now > shown + PROGRESS_S:
                shown = now
                line = f"the {self.name} is still starting after {now - began:.0f} s: {self.stage()}"
                print(textwrap.shorten(line, MAX_COLUMNS, placeholder=" ..."), flush=True)
            time.sleep(0.05)

    def log_end(self) -> str:
        """Its last lines. Beside the position at which it writes, which the processes share."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), 4000, max(size - 4000, 0)).decode(errors="replace")

    def stage(self) -> str:
        """What it is doing while it starts: its last line of log."""
        lines = [line for line in self.log_end().splitlines() if line.strip()]
        return LOG_PREFIX.sub("", lines[-1].strip())[:200] if lines else "importing what it needs"

    def stop(self) -> bool:
        """End it, whatever state it is in. Returns whether it ended as it should; what was not started did."""
        if self._process is None:
            return True
        self.resume()
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
        return self._process.returncode == 0

    def close(self) -> None:
        self.stop()
        self._log.close()


def listens(path: Path) -> bool:
    """Whether a process listens on the Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0


@contextlib.contextmanager
def server(*flags: str, module: str = "sglang.launch_server", name: str = "server") -> Iterator[tuple[Part, str]]:
    """Start a server in a process of its own and stop it at the end: (part, URL). It is not ready yet. name: stands
    in errors, which end with the last lines of the server's log."""
    port = free_port()
    with contextlib.closing(Part(name, [sys.executable, "-m", module, "--port", str(port), *flags])) as part:
        told = False
        try:
            part.start()
            yield part, f"http://127.0.0.1:{port}"
        except (KeyboardInterrupt, NotStartedError):
            told = True
            raise
        finally:
            if not part.stop() and not told:
                sys.stderr.write(part.log_end())
        if part.process.returncode != 0:
            raise SystemExit(f"the {name} ended with exit code {part.process.returncode}")


def wait_ready(part: Part, url: str) -> None:
    """Raises NotStartedError."""

    def is_ready() -> bool:
        try:
            with urllib.request.urlopen(url + "/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    part.wait_until(is_ready)


def get_json(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)


def post(url: str) -> None:
    """Without a body."""
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30) as response:
        response.read()


def ask(
    client: OpenAI,
    messages: Messages,
    model: str = "embedded",
    num_tokens: int = ANSWER_TOKENS,
    fields: Mapping[str, object] = IGNORE_EOS,
    on_text: Callable[[str], None] | None = None,
) -> Answer:
    """fields: of the request, beside OpenAI's. on_text: gets the answer piece by piece."""
    start = time.perf_counter()
    first: float | None = None
    text, usage = "", None
    create: Any = client.chat.completions.create
    stream = create(
        model=model,
        messages=messages,
        temperature=0,
        max_tokens=num_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_cached_tokens_details": True, **fields},
    )
    for chunk in stream:
        first = first or time.perf_counter()
        usage = chunk.usage or usage
        for choice in chunk.choices:
            piece = choice.delta.content or ""
            text += piece
            if on_text is not None:
                on_text(piece)
    end = time.perf_counter()
    assert first is not None and usage is not None
    details = usage.prompt_tokens_details
    return Answer(
        text=text,
        ttft_s=first - start,
        seconds=end - start,
        prompt_tokens=usage.prompt_tokens,
        tiers=(details.model_extra or {}).get("cached_tokens_details", {}) if details else {},
    )


def connect(url: str, model: str = "embedded") -> OpenAI:
    from openai import OpenAI  # imported so late because that takes a second, more on a busy machine

    client = OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    # The first request of a process pays for what is set up lazily. Prompts that come later begin alike.
    ask(client, [{"role": "user", "content": "Good morning."}], model, fields={**IGNORE_EOS, "cache": "no_store"})
    return client


def summarise(pairs: Sequence[tuple[Answer, Answer]], tiers: Sequence[str], expected: Sequence[str]) -> bool:
    """Print the sums over all answers. Returns whether all answers are equal and every expected tier was used."""
    prompt = sum(warm.prompt_tokens for _, warm in pairs)
    found = {tier: sum(warm.tiers.get(tier, 0) for _, warm in pairs) for tier in tiers}
    reused = [
        (cold, warm)
        for cold, warm in pairs
        if 2 * sum(warm.tiers.get(tier, 0) for tier in tiers) > warm.prompt_tokens
    ]
    parts = ", ".join(f"{tokens} from {tier}" for tier, tokens in found.items())
    print(f"prompt tokens   {prompt}, reused: {parts} ({100 * sum(found.values()) / prompt:.0f} %)")
    if reused:
        cold_ms = statistics.median(cold.ttft_s for cold, _ in reused) * 1e3
        warm_ms = statistics.median(warm.ttft_s for _, warm in reused) * 1e3
        print(f"first token     {cold_ms:.0f} ms cold, {warm_ms:.0f} ms with reuse (medians of {len(reused)} turns)")
    same = sum(cold.text == warm.text for cold, warm in pairs)
    print(f"answers         {same} of {len(pairs)} equal those of the server without a cache")
    for cold, warm in pairs:
        if cold.text != warm.text:
            print(f"  cold   {cold.text!r}\n  cached {warm.text!r}")
    missing = [tier for tier in expected if not found[tier]]
    for tier in missing:
        print(f"no tokens came from the {tier}: the demo expects some")
    return same == len(pairs) and not missing


def replace_by_ascii(error: UnicodeError) -> tuple[str, int]:
    """A handler of encoding errors."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(ASCII.get(each, "?") for each in error.object[error.start : error.end]), error.end


codecs.register_error("demo_ascii", replace_by_ascii)


def drop_unread_output() -> None:
    """What has no reader any more is not tried again when the interpreter ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def run(main: Callable[[], int]) -> NoReturn:
    """End the process with main's exit code. Its servers have ended before, however it ends."""
    _interrupts.install()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="demo_ascii")
    try:
        code = main()
        sys.stdout.flush()
        sys.exit(code)
    except BrokenPipeError:
        sys.exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            sys.stderr.write("\ninterrupted; the servers are stopped\n")
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        from openai import OpenAIError

        if not isinstance(error, OpenAIError | urllib.error.URLError):
            raise
        sys.exit(f"a server did not answer as it should: {error}")
    finally:
        _interrupts.ignore()
        drop_unread_output()
