"""The servers that are compared: one model, dtype, number of threads and memory for all.

Owns their processes and the model's directory. A server is a command, an environment and nothing else; all are asked
through OpenAI's completions.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from benchmark.common import OUT
from benchmark.peers.deadline import Deadline

CONTEXT = 5120
# vLLM compiles the model at its first start.
START_TIMEOUT_S = 600.0
IDLE_TIMEOUT_S = 60.0
IDLE_WINDOW_S = 0.5
# From SIGTERM to SIGKILL, for all servers that are stopped together.
STOP_TIMEOUT_S = 30.0
LOG_TAIL_BYTES = 3000
# Our host tier over our device pool.
HOST_RATIO = 0.25
# A block of vLLM's cache on the CPU.
VLLM_BLOCK = 128
# Of SmolLM2-135M's KV in float32.
BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4
# Floats in a vector -> what the CPU's makers call it.
VECTOR_LEVELS = {16: "AVX-512", 8: "AVX", 4: "128 bits"}
# The same weights for llama.cpp, beside the others.
GGUF = "model.gguf"


@dataclass(frozen=True)
class Setting:
    """What all servers have in common."""

    # In Hugging Face's format, float32.
    model: Path
    # Of KV cache, in all tiers of memory together.
    memory_tokens: int
    threads: int
    # For the disk tier of the servers that have one.
    folder: Path

    @property
    def disk(self) -> Path:
        return self.folder / "disk"


@dataclass(frozen=True)
class ServerKind:
    name: str
    # (settings, port) -> command line.
    command: Callable[[Setting, int], list[str]]
    environment: Callable[[Setting], Mapping[str, str]]
    # Requests that it computes together.
    most_at_once: int = 64


def _ours(setting: Setting, port: int) -> list[str]:
    # Both are this machine's memory, so that most belongs on the device, and loads and copies to the host cost most.
    device = int(setting.memory_tokens / (1 + HOST_RATIO))
    return [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(setting.model), "--port", str(port)),
        *("--dtype", "float32", "--context-length", str(CONTEXT), "--log-level", "error", "--hicache"),
        *("--max-total-tokens", str(device), "--hicache-ratio", str(HOST_RATIO), "--max-running-requests", "64"),
        *("--hicache-storage-backend", "file"),
        *("--hicache-storage-backend-extra-config", json.dumps({"path": str(setting.disk)})),
    ]


def can_compile() -> bool:
    """Whether vLLM finds what its compiler needs. Without it, it runs up to 1.5 times slower."""
    return shutil.which("g++") is not None


def _vllm(setting: Setting, port: int) -> list[str]:
    blocks = setting.memory_tokens // VLLM_BLOCK
    return [
        *(
            str(VLLM_PYTHON.with_name("vllm")),
            "serve",
            str(setting.model),
            "--port",
            str(port),
            "--host",
            "127.0.0.1",
        ),
        *("--dtype", "float32", "--max-model-len", str(CONTEXT), "--max-num-seqs", "64"),
        *(() if can_compile() else ("--enforce-eager",)),
        *("--num-gpu-blocks-override", str(blocks), "--served-model-name", str(setting.model)),
        *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
    ]


def _vllm_environment(setting: Setting) -> dict[str, str]:
    gib = -(-setting.memory_tokens * BYTES_PER_TOKEN // 2**30)
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(gib),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{setting.threads - 1}",
        "OMP_NUM_THREADS": str(setting.threads),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "PYTHONPATH": "",
    }


def _llama_cpp(setting: Setting, port: int) -> list[str]:
    script = Path(__file__).with_name("llama_cpp_server.py")
    cache_bytes = setting.memory_tokens * BYTES_PER_TOKEN
    return [
        *(str(LLAMA_CPP_PYTHON), str(script), str(setting.model / GGUF), str(port), str(setting.threads)),
        *(str(CONTEXT), str(cache_bytes)),
    ]


VLLM_PYTHON = Path(os.environ.get("VLLM_PYTHON", ".venv-peers/bin/python")).absolute()
LLAMA_CPP_PYTHON = Path(os.environ.get("LLAMA_CPP_PYTHON", VLLM_PYTHON)).absolute()
OURS = ServerKind("ours", _ours, lambda setting: {"OMP_NUM_THREADS": str(setting.threads)})
VLLM = ServerKind("vLLM", _vllm, _vllm_environment)
LLAMA_CPP = ServerKind("llama.cpp", _llama_cpp, lambda setting: {"PYTHONPATH": ""}, most_at_once=1)


def has_package(python: Path, name: str) -> str | None:
    """The version of a package in that environment; None without it."""
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True) if python.is_file() else None
    return done.stdout.strip() if done is not None and done.returncode == 0 else None


def kernel_lanes() -> int | None:
    """Floats in a vector of our kernels in C, which are compiled now if necessary. None: they cannot be compiled, and
    torch computes in their place."""
    from sgl_kernel.cpu.library import LIBRARY

    return int(LIBRARY.function("cpu_lanes")()) if LIBRARY.is_available() else None


def warn(text: str) -> None:
    print(f"\n{'!' * len(text)}\n{text}\n{'!' * len(text)}\n", file=sys.stderr, flush=True)


def compiled_parts() -> dict[str, object]:
    """What is compiled on this machine, for the report. Warns of what is not, as it decides the result."""
    lanes = kernel_lanes()
    if lanes is None:
        warn("OUR KERNELS IN C DO NOT COMPILE HERE: ours runs up to three times slower. Install gcc, or set CC.")
    if not can_compile():
        warn("THERE IS NO g++: vLLM runs without its compiler, up to 1.5 times slower.")
    level = "not compiled" if lanes is None else f"compiled, vectors of {lanes} floats ({VECTOR_LEVELS[lanes]})"
    return {"our C kernels": level, "vLLM compiles the model": can_compile()}


class ServerError(Exception):
    """A server cannot be measured any further. The message names it and has the reason."""

    def __init__(self, server: RunningServer, reason: str) -> None:
        super().__init__(f"{server.kind.name} {reason}")
        self.server = server
        # The end of the server's log.
        self.log = server.log_tail()


class RunningServer:
    def __init__(self, kind: ServerKind, setting: Setting, deadline: Deadline | None = None) -> None:
        """Not started yet: what stops it on a signal has to know it before. deadline: of its waits; None: each has
        its own limit alone."""
        self.kind, self.setting = kind, setting
        self._deadline = deadline or Deadline(math.inf)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Until it answers. Raises `ServerError`, or `OutOfTime`."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", **self.kind.environment(self.setting)}
        end = time.monotonic() + self._deadline.within(START_TIMEOUT_S)
        self._process = subprocess.Popen(
            self.kind.command(self.setting, port),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=environment,
            start_new_session=True,
        )
        while not self._is_healthy():
            if (ended := self._how_it_ended()) is not None:
                raise ServerError(self, f"did not start: it {ended}")
            if time.monotonic() > end:
                self._deadline.check()
                raise ServerError(self, f"did not start within {START_TIMEOUT_S:.0f} s")
            time.sleep(0.5)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _how_it_ended(self) -> str | None:
        """None: it runs."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def failure(self, reason: str) -> ServerError:
        """For a request that failed for that reason. A server that is just dying has a second to end."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
        ended = self._how_it_ended()
        return ServerError(self, f"failed: {reason}" if ended is None else f"{ended} ({reason})")

    def log_tail(self) -> str:
        """What it wrote last. Leaves the place where the server writes on as it is."""
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), LOG_TAIL_BYTES, max(0, size - LOG_TAIL_BYTES))
        return tail.decode(errors="replace")

    def wait_until_idle(self) -> None:
        """Until its processes use no core. vLLM looks for work, without a pause, for a second after each answer.
        Raises `ServerError`, or `OutOfTime`."""
        end = time.monotonic() + self._deadline.within(IDLE_TIMEOUT_S)
        before = self._processor_s()
        while True:
            time.sleep(IDLE_WINDOW_S)
            now = self._processor_s()
            if now - before < 0.1 * IDLE_WINDOW_S:
                return
            if time.monotonic() > end:
                self._deadline.check()
                raise ServerError(self, f"still computes {IDLE_TIMEOUT_S:.0f} s after its last answer")
            before = now

    def _processor_s(self) -> float:
        """Seconds of the processor that its processes have used."""
        total = 0.0
        assert self._process is not None
        if (ended := self._how_it_ended()) is not None:
            raise ServerError(self, ended)
        main = psutil.Process(self._process.pid)
        for process in (main, *main.children(recursive=True)):
            try:
                times = process.cpu_times()
                total += times.user + times.system
            except psutil.NoSuchProcess:
                pass
        return total

    def stop(self) -> None:
        """Raises `OutOfTime` before it has stopped anything."""
        stop_all([self], self._deadline.within(STOP_TIMEOUT_S))


def stop_all(servers: Iterable[RunningServer], timeout_s: float) -> None:
    """SIGTERM to all, then one wait for all together, then SIGKILL to what is left of their process groups."""
    processes = [server._process for server in servers if server._process is not None]
    for process in processes:
        process.terminate()
    end = time.monotonic() + timeout_s
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)


def forget_pages(folder: Path) -> None:
    """Files below a folder are read from the disk again, and not from the kernel's memory."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def make_model() -> Path:
    """SmolLM2-135M-Instruct with float32 weights, for servers that do not read GGUF. Kept in bench-out/."""
    from safetensors.torch import save_file

    from sglang.srt.configs.model_files import resolve_model_path
    from sglang.srt.configs.smollm2_model import ensure_smollm2
    from sglang.srt.model_loader.gguf_weights import GGUFWeights

    final = OUT / "smollm2-float32"
    if (final / "config.json").is_file():
        return final
    source = resolve_model_path("smollm2")
    final.mkdir(parents=True, exist_ok=True)
    weights = GGUFWeights(source)
    names = weights.keys()
    save_file({name: weights.get_tensor(name) for name in names}, final / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, final / name)
    _write_float32_gguf(ensure_smollm2(), final / GGUF)
    config = json.loads((source / "config.json").read_text()) | {"dtype": "float32"}
    (final / "config.json").write_text(json.dumps(config, indent=1))
    return final


def _write_float32_gguf(source: Path, target: Path) -> None:
    """The same file with dequantised tensors."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        writer.add_key_value(
            field.name, field.contents(), field.types[0], field.types[1] if len(field.types) > 1 else None
        )
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
