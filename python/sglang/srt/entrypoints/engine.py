"""Starts the engine's processes, watches them, and ends them; and `sglang.Engine`, the same without HTTP.

Owns the children, the private directory of their sockets, and the tokenizer manager's loop. It is the parent of

    parent: tokenizer manager  --PUSH scheduler_in-->  scheduler
               ^                                          | PUSH detokenizer_in
               +------- PUSH tokenizer_in ------- detokenizer

srt/utils/child_process.py describes how a child behaves.
"""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import glob
import importlib.metadata
import importlib.util
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import msgspec
import zmq
import zmq.asyncio

from sglang.srt.configs.gguf_model import gguf_file_of
from sglang.srt.configs.smollm2_model import fetched_or_embedded
from sglang.srt.constrained.check_process import CheckSettings
from sglang.srt.constrained.grammar_checker import GrammarChecker
from sglang.srt.constrained.xgrammar_backend import VOCABULARY_FILE
from sglang.srt.entrypoints.native import GenerateReqInput, serve_generate
from sglang.srt.entrypoints.request_fields import UNSUPPORTED_GENERATE, convert
from sglang.srt.entrypoints.sampling_defaults import read_sampling_defaults
from sglang.srt.entrypoints.server_info import read_model_kind, server_info
from sglang.srt.entrypoints.startup_checks import check_before_start, tokenizer_dir
from sglang.srt.entrypoints.streams import close
from sglang.srt.managers.crash_folder import record_of, replay_hint
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.observability.metrics_collector import MetricsCollector
from sglang.srt.observability.trace import NO_TRACE, Tracer, open_tracer
from sglang.srt.server_args import ServerArgs
from sglang.srt.setting_sources import environment_without_keys
from sglang.srt.utils import unix_sockets
from sglang.srt.utils.chat_template import read_chat_template
from sglang.srt.utils.child_process import STOP_SIGNAL, ChildArgs, StartupError, open_pull, open_push
from sglang.srt.utils.errors import RequestError
from sglang.srt.utils.hf_transformers_utils import get_context_and_vocab, get_tokenizer
from sglang.srt.utils.loop_thread import LoopThread

T = TypeVar("T")

SCHEDULER_COMMAND = (sys.executable, "-m", "sglang.srt.managers.scheduler_process")
# The most answers of one call of Engine.generate. Its process has no other clients.
_MAX_ANSWERS = 1 << 16
DETOKENIZER_COMMAND = (sys.executable, "-m", "sglang.srt.managers.detokenizer_manager")

_CHILD_ENVIRONMENT = {
    # Torch's threads sleep between its parallel operations. Spinning, they held the cores that the threads of our own
    # kernels wait for: a prompt of 512 tokens took a third more of the processor's time. Read when OpenMP is loaded.
    "OMP_WAIT_POLICY": "passive",
    # Work queues of a GPU; with peers and layer streaming there are more streams than the 8 that it has else, and two
    # that share a queue wait for each other's kernels and copies. Read when CUDA starts.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}
_WATCH_INTERVAL_S = 0.1
_STOP_TIMEOUT_S = 10.0
_STOP_INTERVAL_S = 0.02
# A start that takes longer logs a line about its current stage this often.
_PROGRESS_INTERVAL_S = 10.0
# In a server's directory: of a remote store for one kind of layers.
_LONGEST_SOCKET_NAME = "/sglang-xxxxxxxx/rank99/0/store/redis.sock"

logger = logging.getLogger(__name__)


class EngineDeadError(RuntimeError):
    """A process of the engine has ended; the message names the process and the reason."""


class Child:
    """One child process. A thread passes its stderr on and keeps the last lines, which explain its end."""

    def __init__(self, name: str, command: Sequence[str], args: ChildArgs) -> None:
        self.name = name
        self._error_file = args.error_file
        self._stage_file = args.stage_file
        self._tail = b""
        self._ended_at = math.inf
        # Other users can read a command line, and a pipe would have to be written while the child starts.
        with _file_in_memory() as settings:
            settings.write(msgspec.json.encode(args))
            settings.seek(0)
            # A session of its own: the terminal's Ctrl-C reaches only the parent, which drains first.
            self.process = subprocess.Popen(
                [*command, name],
                stdin=settings,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env={**_CHILD_ENVIRONMENT, **environment_without_keys()},
            )
        assert self.process.stderr is not None
        self._reader = threading.Thread(target=self._pass_on, args=(self.process.stderr,), daemon=True)
        self._reader.start()

    def _pass_on(self, stderr: BinaryIO) -> None:
        while data := os.read(stderr.fileno(), 65536):
            self._tail = (self._tail + data)[-4096:]
            try:
                sys.stderr.buffer.write(data)
                sys.stderr.flush()
            except (AttributeError, OSError, ValueError):  # no stderr any more, or one without bytes (a notebook)
                pass
        self._ended_at = time.monotonic()

    def dead(self) -> bool:
        return self.process.poll() is not None

    def ended_at(self) -> float:
        """When it ended, by the monotonic clock. The death of one rank ends the others; the first one names the
        cause."""
        self._reader.join(0.5)
        return self._ended_at

    def stage(self) -> str:
        """What it is doing while it starts; "" if it shows its progress itself."""
        try:
            with open(self._stage_file) as file:
                return file.read()
        except OSError:
            return f"importing what the {self.name} process needs"

    def startup_error(self) -> str | None:
        try:
            with open(self._error_file) as file:
                return file.read().strip() or None
        except OSError:
            return None

    def describe_end(self) -> str:
        """One line: which process ended, and why. The reason is its last line of log, unless a signal ended it."""
        code = self.process.returncode
        if code < 0:
            return f"the {self.name} process was killed by {_signal_name(-code)}"
        last = self.last_log_line()
        return f"the {self.name} process ended with exit code {code}" + (f": {last}" if last else "")

    def last_log_line(self) -> str:
        self._reader.join(0.5)
        lines = self._tail.decode(errors="replace").replace("\r", "\n").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def log_signal_hints(self) -> None:
        """If a signal ended the process: log what helps to find the sender of the signal."""
        if self.process.returncode < 0:
            hint = "; the kernel sends SIGKILL when memory runs out" if self.process.returncode == -9 else ""
            last = (
                f"its last line of log was {words!r}" if (words := self.last_log_line()) else "it had logged nothing"
            )
            logger.warning("about the %s: %s%s", self.name, last, hint)

    def ask_to_stop(self) -> None:
        if not self.dead():
            self.process.send_signal(STOP_SIGNAL)

    def end(self) -> None:
        """Kill it if it still runs, and reap it."""
        if not self.dead():
            self.process.kill()
            self.process.wait()
        self._reader.join(1.0)
        if self.process.stderr is not None and not self._reader.is_alive():
            self.process.stderr.close()


class EngineProcesses:
    """The children, their sockets, and the tokenizer manager. It belongs to one event loop, whose thread must outlive
    it: Linux ends a child with the thread that started it."""

    def __init__(self, server_args: ServerArgs, scheduler_command: Sequence[str] = SCHEDULER_COMMAND) -> None:
        self._args = server_args
        self._scheduler_command = scheduler_command
        self._children: list[Child] = []
        self._context: zmq.Context | None = None
        self._directory: str | None = None
        self._lock = -1
        self._receive: asyncio.Task[None] | None = None
        self._stage = "looking for the model's files"
        self.tracer: Tracer = NO_TRACE
        self.manager: TokenizerManager
        self.ready_info: dict[str, Any] = {}

    async def start(self) -> None:
        """Return when the first request may come. Raises a typed error with one sentence; then nothing is left
        behind."""
        progress = asyncio.create_task(self._report_progress())
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        finally:
            progress.cancel()

    async def _report_progress(self) -> None:
        started = time.monotonic()
        while True:
            await asyncio.sleep(_PROGRESS_INTERVAL_S)
            stages = [child.stage() for child in self._children if "scheduler" in child.name] or [self._stage]
            if shown := ", ".join(dict.fromkeys(filter(None, stages))):
                logger.info("still starting, after %.0f s: %s", time.monotonic() - started, shown)

    async def _start(self) -> None:
        args = self._args
        refuse_mixed_installation()
        if args.enable_trace:
            self.tracer = open_tracer(args.model_name, args.otlp_traces_endpoint)
        model_path = await asyncio.to_thread(check_before_start, args)
        tokenizer_path = str(await asyncio.to_thread(tokenizer_dir, args, model_path))
        model_dir = str(model_path)
        own_context, vocab_size = get_context_and_vocab(model_dir)
        logger.info("starting %d processes", args.tp_size + 1)
        self._directory, self._lock = private_directory()
        ipc = {name: f"ipc://{self._directory}/{name}" for name in ("scheduler_in", "detokenizer_in", "tokenizer_in")}

        def child(
            name: str,
            command: Sequence[str],
            sockets: tuple[str, ...],
            extra: dict[str, Any],
            remove_directory: str = "",
            log_prefix: str = "",
        ) -> Child:
            made = Child(
                name,
                command,
                ChildArgs(
                    server_args=asdict(args.without_keys()),
                    ipc={key: ipc[key] for key in sockets},
                    error_file=f"{self._directory}/{name}.error".replace(" ", "_"),
                    stage_file=f"{self._directory}/{name}.stage".replace(" ", "_"),
                    columns=shutil.get_terminal_size().columns if _is_terminal(sys.stderr) else 0,
                    parent_pid=os.getpid(),
                    remove_directory=remove_directory,
                    log_prefix=log_prefix,
                    extra=extra,
                ),
            )
            self._children.append(made)
            return made

        os.mkfifo(f"{self._directory}/poke", 0o600)  # how ranks wake rank 0: see managers/rank_sync.py
        for rank in range(args.tp_size):
            name = "scheduler" if args.tp_size == 1 else f"scheduler rank {rank}"
            extra = {"tp_rank": rank, "directory": self._directory}
            prefix = "" if args.tp_size == 1 else f"TP{rank}"
            child(name, self._scheduler_command, ("scheduler_in", "detokenizer_in"), extra, log_prefix=prefix)
        # The detokenizer starts meanwhile; it is ready long before the model is.
        gguf_file = gguf_file_of(Path(tokenizer_path))
        tokenizer = await asyncio.to_thread(get_tokenizer, tokenizer_path, str(gguf_file or tokenizer_path))
        if args.chat_template is not None:
            tokenizer.chat_template = read_chat_template(args.chat_template, tokenizer_path)
        _check_context_length(args.context_length, tokenizer)
        path = await asyncio.to_thread(self._tokenizer_for_child, tokenizer, tokenizer_path)
        sockets = ("detokenizer_in", "tokenizer_in")
        child("detokenizer", DETOKENIZER_COMMAND, sockets, {"tokenizer": path}, remove_directory=self._directory)

        self._context = zmq.Context()
        receive = zmq.asyncio.Socket(open_pull(self._context, ipc["tokenizer_in"]))
        send = open_push(self._context, ipc["scheduler_in"])
        self.manager = TokenizerManager(
            args,
            tokenizer=tokenizer,
            vocab_size=vocab_size or len(tokenizer),
            context_length=args.context_length or own_context or 1 << 30,
            send=send.send,
            metrics=MetricsCollector(args.model_name),
            grammars=self._grammar_checker(tokenizer_path, vocab_size or len(tokenizer)),
            sampling_defaults=read_sampling_defaults(model_path, args.sampling_defaults),
            tracer=self.tracer,
        )
        self._receive = asyncio.create_task(self.manager.receive_forever(receive.recv))
        died = asyncio.create_task(self.wait_for_death())
        try:
            await asyncio.wait((self.manager.ready, died), return_when=asyncio.FIRST_COMPLETED)
        finally:
            died.cancel()
        if not self.manager.ready.done():
            dead = await asyncio.to_thread(self._first_dead)
            assert dead is not None
            raise StartupError(dead.startup_error() or dead.describe_end())
        ready = self.manager.ready.result()
        self.ready_info = {
            "max_total_num_tokens": ready.max_total_num_tokens,
            "max_req_input_len": ready.max_req_input_len,
            **ready.info,
            **read_model_kind(model_path),
        }

    def _grammar_checker(self, tokenizer_path: str, vocab_size: int) -> GrammarChecker | None:
        if self._args.grammar_backend == "none":
            return None
        return GrammarChecker(
            CheckSettings(
                tokenizer_path=tokenizer_path,
                vocab_size=vocab_size,
                vocabulary_file=f"{self._directory}/{VOCABULARY_FILE}",
                max_whitespace=self._args.constrained_json_max_whitespace_cnt,
                parent_pid=os.getpid(),
            )
        )

    def _tokenizer_for_child(self, tokenizer: Any, path: str) -> str:
        """A file with the same tokenizer, which the detokenizer can read without importing transformers."""
        if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
            return path
        file = Path(f"{self._directory}/tokenizer.json")
        try:
            file.write_text(backend.to_str(pretty=False))
        except OSError as error:
            raise StartupError(
                f"cannot write {file} ({error.strerror}): free space there, set another TMPDIR, or raise `ulimit -f`"
            ) from None
        return str(file)

    def _first_dead(self) -> Child | None:
        """One that a signal ended comes before others: those end because it is gone, perhaps in the same moment."""
        dead = [child for child in self._children if child.dead()]
        return min(dead, key=lambda child: (child.process.returncode >= 0, child.ended_at()), default=None)

    def _log_records(self, folder: Path) -> None:
        """Name the record of a scheduler that a signal ended. One that ends by an error names its record itself."""
        for child in self._children:
            if child.dead() and child.process.returncode < 0 and (path := record_of(folder, child.process.pid)):
                logger.error("%s", replay_hint(path))

    async def wait_for_death(self) -> str:
        """Return when a child, or this end of the sockets, has ended: one line that names it and the reason."""
        while True:
            if any(child.dead() for child in self._children):
                dead = await asyncio.to_thread(self._first_dead)
                assert dead is not None
                await asyncio.to_thread(dead.log_signal_hints)
                if self._args.crash_dump_folder is not None:
                    self._log_records(Path(self._args.crash_dump_folder))
                return await asyncio.to_thread(dead.describe_end)
            if self._receive is not None and self._receive.done():
                return f"the tokenizer manager failed: {self._receive.exception()!r}"
            await asyncio.sleep(_WATCH_INTERVAL_S)

    async def stop(self) -> None:
        """End the children and remove their files. May be called twice."""
        if self._receive is not None:
            self._receive.cancel()
            await asyncio.gather(self._receive, return_exceptions=True)
            self._receive = None
            self.manager.close()
        # No helper thread here: an Engine may be ended by atexit, when Python starts no threads any more. The signal
        # is sent again and again, because a child that receives it just before it sleeps on its socket sees it only
        # when it wakes.
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while time.monotonic() < deadline and not all(child.dead() for child in self._children):
            for child in self._children:
                child.ask_to_stop()
            await asyncio.sleep(_STOP_INTERVAL_S)
        for child in self._children:
            child.end()
        self._children = []
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
        self.tracer.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            os.close(self._lock)
            self._directory = None


def _signal_name(number: int) -> str:
    """Most real-time signals have no name in Python."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _is_terminal(stream: Any) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


def _file_in_memory() -> BinaryIO:
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("settings", os.MFD_CLOEXEC), "w+b")
    return cast(BinaryIO, tempfile.TemporaryFile())


def private_directory() -> tuple[str, int]:
    """A directory that only its owner may enter, so that no other user can write to the sockets in it, and the
    descriptor of the lock in it. While the descriptor is open, the directory is in use."""
    parent = tempfile.gettempdir()
    if not unix_sockets.fits(parent + _LONGEST_SOCKET_NAME):
        parent = "/tmp"
    _remove_deserted(parent)
    while True:
        path = tempfile.mkdtemp(prefix="sglang-", dir=parent)
        lock = os.open(f"{path}/lock", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(f"{path}/lock"):  # else another server found it before it was locked
            return path, lock
        os.close(lock)


def _remove_deserted(parent: str) -> None:
    """Remove the directories of servers that were killed together with all their processes. Their locks are free."""
    for path in glob.glob(f"{glob.escape(parent)}/sglang-*/lock"):
        try:
            lock = os.open(path, os.O_RDWR)
        except OSError:  # another user's, or just removed
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(os.path.dirname(path), ignore_errors=True)
        except OSError:
            pass
        finally:
            os.close(lock)


def _check_context_length(context_length: int | None, tokenizer: Any) -> None:
    """Raises StartupError for a context without room for a text of one token and an answer of one."""
    special = tokenizer.num_special_tokens_to_add()
    if context_length is not None and context_length < special + 2:
        raise StartupError(
            f"--context-length {context_length} has no room for a text and an answer, because the tokenizer adds "
            f"special tokens ({special}) to each text: give at least {special + 2}"
        )


def refuse_mixed_installation() -> None:
    """This package replaces upstream's. An environment with files of both would run neither."""
    for kernels in ("sgl-kernel", "sglang-kernel"):
        try:
            importlib.metadata.distribution(kernels)
        except importlib.metadata.PackageNotFoundError:
            continue
        raise StartupError(f"upstream's {kernels} is installed beside this engine: pip uninstall sglang {kernels}")
    if importlib.util.find_spec("sglang.lang") is not None:
        raise StartupError("upstream's sglang is mixed into this engine: pip uninstall sglang, then install this one")


class Engine:
    """The engine in a Python program: `Engine(model_path="embedded").generate("Hello", {"max_new_tokens": 8})`.

    Takes the fields of ServerArgs. Answers are what POST /generate answers: a dict, for several prompts a list.
    A thread of its own runs the event loop; all methods may be called from any thread.
    """

    def __init__(self, *, scheduler_command: Sequence[str] = SCHEDULER_COMMAND, **server_args: Any) -> None:
        self._args = ServerArgs(**{"log_level": "error", **server_args})
        self._args = replace(self._args, model_path=fetched_or_embedded(self._args.model_path))
        self._loop = LoopThread("the engine", EngineDeadError)
        self._processes = EngineProcesses(self._args, scheduler_command)
        self._watch: asyncio.Task[None] | None = None
        self._streams: weakref.WeakSet[_Stream] = weakref.WeakSet()
        atexit.register(self.shutdown)
        try:
            self._loop.run(self._start())
        except BaseException:
            self.shutdown()
            raise

    async def _start(self) -> None:
        await self._processes.start()
        self._watch = asyncio.create_task(self._fail_on_death())

    async def _fail_on_death(self) -> None:
        why = await self._processes.wait_for_death()
        logger.error("%s; this engine can only be shut down", why)
        self._processes.manager.fail_all(why)

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> dict[str, Any] | list[dict[str, Any]] | Iterator[dict[str, Any]]:
        """fields: other fields of GenerateReqInput, such as rid, return_logprob or cache_salt. With stream, an
        iterator of dicts, each with the whole text so far. Raises ValueError for a request that is wrong,
        RuntimeError for one that this engine could not serve (its queue is full, it took too long), EngineDeadError
        if the engine died."""
        events = self._events(_request(prompt, sampling_params, input_ids, stream, fields))
        if stream:
            return self._iterate(self._opened(events))
        return self._loop.run(_only(events))

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """`generate` for a running event loop; with stream an asynchronous iterator."""
        events = self._events(_request(prompt, sampling_params, input_ids, stream, fields))
        if stream:
            return self._iterate_async(self._opened(events))
        return await self._loop.run_async(_only(events))

    async def _events(self, request: GenerateReqInput) -> AsyncIterator[Any]:
        events = serve_generate(request, self._processes.manager, _MAX_ANSWERS)
        try:
            async for event in events:
                yield event
        except RequestError as error:
            raise self._raised(error) from None
        finally:
            await close(events)

    def _raised(self, error: RequestError) -> Exception:
        if not self._processes.manager.is_ready:
            return EngineDeadError(error.message)
        return (RuntimeError if error.status_code >= 500 else ValueError)(error.message)

    def _opened(self, events: AsyncIterator[Any]) -> _Stream:
        stream = _Stream(events)
        self._streams.add(stream)
        return stream

    def _iterate(self, stream: _Stream) -> Iterator[dict[str, Any]]:
        try:
            while (event := self._loop.run(stream.next())) is not None:
                yield event
        finally:
            # Garbage collection may run this in any thread, also in the loop's.
            self._loop.post(stream.close())

    async def _iterate_async(self, stream: _Stream) -> AsyncIterator[dict[str, Any]]:
        try:
            while (event := await self._loop.run_async(stream.next())) is not None:
                yield event
        finally:
            self._loop.post(stream.close())

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """End the requests with this rid, or all. They answer with the tokens that they have, and finish reason
        abort."""

        async def abort() -> None:
            self._processes.manager.abort(None if abort_all else rid)

        self._loop.run(abort())

    def flush_cache(self) -> bool:
        return self._ask(self._processes.manager.control.flush_cache()).success

    def get_server_info(self) -> dict[str, Any]:
        state = self._ask(self._processes.manager.get_internal_state())
        return server_info(self._args, self._processes.ready_info, state)

    def _ask(self, question: Any) -> Any:
        try:
            return self._loop.run(question)
        except RequestError as error:
            raise self._raised(error) from None

    def shutdown(self) -> None:
        """End the processes; running requests fail. May be called twice."""
        atexit.unregister(self.shutdown)
        self._loop.stop(self._stop())

    async def _stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._processes.manager.fail_all("the engine was shut down", 503)
            # Those that are not read would never end.
            if closing := [asyncio.create_task(stream.close()) for stream in list(self._streams)]:
                await asyncio.wait(closing, timeout=1.0)
            await self._processes.manager.drained(1.0)
        await self._processes.stop()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _request(
    prompt: Any, sampling_params: Any, input_ids: Any, stream: bool, fields: dict[str, Any]
) -> GenerateReqInput:
    """Checked like a body of /generate, except that an unknown name is an error, as in any call of a function."""
    for name in fields:
        if name not in GenerateReqInput.__struct_fields__ and name not in UNSUPPORTED_GENERATE:
            raise TypeError(f"generate() has no argument {name!r}")
    body = {"text": prompt, "input_ids": input_ids, "sampling_params": sampling_params, "stream": stream, **fields}
    try:
        return convert(body, GenerateReqInput, UNSUPPORTED_GENERATE)
    except RequestError as error:
        raise ValueError(error.message) from None


class _Stream:
    """An answer's events, read and closed by other threads. The close waits for a read that is being cancelled."""

    def __init__(self, events: AsyncIterator[Any]) -> None:
        self._events = events
        self._lock = asyncio.Lock()

    async def next(self) -> Any:
        """None at the end."""
        async with self._lock:
            return await anext(self._events, None)

    async def close(self) -> None:
        async with self._lock:
            await close(self._events)


async def _only(events: AsyncIterator[T]) -> T:
    try:
        return await anext(events)
    finally:
        await close(events)
