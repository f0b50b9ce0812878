"""The process in which a client's grammar is compiled for the first time. It may cost a fork of it its life.

A hostile schema can take any time and memory, or overflow the stack, within a library call that nothing ends. So it
happens here, within limits of the kernel, before an engine compiles the same grammar:

    parent --[length][CheckOrder]--> this process, which has the library and the vocabulary
                                       | fork: compiles; ended by SIGPROF over its time, by an error over its room
    parent <--[length][CheckResult]----+

The first frame that it writes tells whether it can check anything.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import IO

import msgspec

from sglang.srt.constrained.xgrammar_backend import GrammarCompiler, GrammarError, check_characters, make_vocabulary
from sglang.srt.sampling.sampling_params import GrammarSpec
from sglang.srt.utils.child_process import die_with_parent

# Beyond what the process has taken when it is ready.
MAX_MEMORY_BYTES = 1 << 30
# Of a compiled grammar, which the engine keeps.
MAX_COMPILED_BYTES = 32 << 20

_HEAD_BYTES = 4


class CheckSettings(msgspec.Struct, frozen=True, kw_only=True):
    tokenizer_path: str
    vocab_size: int
    # Where the vocabulary lies in xgrammar's form; written by the first process.
    vocabulary_file: str
    # See `GrammarCompiler`.
    max_whitespace: int | None
    parent_pid: int


class CheckOrder(msgspec.Struct, frozen=True):
    spec: GrammarSpec
    # The processor's seconds that it may take.
    cpu_s: float


class CheckResult(msgspec.Struct, frozen=True):
    # Why the grammar cannot be used; "" if it can.
    message: str = ""
    # Nothing was found out: it took too long, or others ended the process.
    is_over_time: bool = False
    is_killed: bool = False


def write_frame(file: IO[bytes], message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    file.write(len(data).to_bytes(_HEAD_BYTES, "little") + data)
    file.flush()


def read_frame(file: IO[bytes]) -> bytes | None:
    """None at the end of the file."""
    head = file.read(_HEAD_BYTES)
    if len(head) < _HEAD_BYTES:
        return None
    size = int.from_bytes(head, "little")
    data = file.read(size)
    return data if len(data) == size else None


def vocabulary_of(settings: CheckSettings) -> str:
    """From its file, which is there in whole or not at all."""
    try:
        with open(settings.vocabulary_file) as file:
            return file.read()
    except FileNotFoundError:
        pass
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    vocabulary = make_vocabulary(get_tokenizer(settings.tokenizer_path), settings.vocab_size)
    # What cleans the temporary files may have removed the engine's folder.
    os.makedirs(os.path.dirname(settings.vocabulary_file), mode=0o700, exist_ok=True)
    new = f"{settings.vocabulary_file}.{os.getpid()}"
    with open(new, "w") as file:
        file.write(vocabulary)
    os.replace(new, settings.vocabulary_file)
    return vocabulary


def check(compiler: GrammarCompiler, spec: GrammarSpec) -> CheckResult:
    try:
        compiled = compiler.compile(spec)
        check_characters(compiled)
    except GrammarError as error:
        return CheckResult(str(error))
    except MemoryError:
        return _too_large(spec)
    size = compiled.memory_size_bytes
    if size > MAX_COMPILED_BYTES:
        return CheckResult(
            f"{spec.kind} takes {size >> 20} MiB when compiled, over {MAX_COMPILED_BYTES >> 20}: simplify it"
        )
    return CheckResult()


def check_in_fork(compiler: GrammarCompiler, order: CheckOrder) -> CheckResult:
    """`check` within the limits."""
    read_fd, write_fd = os.pipe()
    mine = os.getpid()
    child = os.fork()
    if child == 0:
        # Whatever happens, this copy returns to none of its callers.
        try:
            die_with_parent(mine)
            os.close(read_fd)
            limit_memory()
            # RLIMIT_CPU counts whole seconds.
            signal.setitimer(signal.ITIMER_PROF, order.cpu_s)
            with os.fdopen(write_fd, "wb") as file:
                file.write(msgspec.msgpack.encode(check(compiler, order.spec)))
        finally:
            os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as file:
        data = file.read()
    _, status = os.waitpid(child, 0)
    if data:
        return msgspec.msgpack.decode(data, type=CheckResult)
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if ended_by == signal.SIGPROF:
        return CheckResult(f"{order.spec.kind} takes too long to compile: simplify it", is_over_time=True)
    return CheckResult(is_killed=True) if ended_by == signal.SIGKILL else _too_large(order.spec)


def _too_large(spec: GrammarSpec) -> CheckResult:
    return CheckResult(f"{spec.kind} takes too much memory to compile: simplify it")


def limit_memory() -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MAX_MEMORY_BYTES, resource.RLIM_INFINITY))


def main() -> None:
    settings = msgspec.json.decode(sys.argv[1], type=CheckSettings)
    die_with_parent(settings.parent_pid)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(5)  # requests that are being served go first
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what prints would break the frames
    try:
        compiler = GrammarCompiler(vocabulary_of(settings), settings.max_whitespace)
    except GrammarError as error:
        write_frame(replies, CheckResult(str(error)))
        return
    write_frame(replies, CheckResult())
    # The library writes about what it does not know in a schema: that would be a client's way into the server's log.
    silence = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(silence, output)
    while (data := read_frame(sys.stdin.buffer)) is not None:
        write_frame(replies, check_in_fork(compiler, msgspec.msgpack.decode(data, type=CheckOrder)))


if __name__ == "__main__":
    main()
