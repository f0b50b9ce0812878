"""Each benchmark runs to its end in its smallest form: what they measure is not looked at."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmark"
# They ask for a trace, which is not in the repository.
WITH_A_TRACE = {"advise", "sessions", "window_blocks"}
SMALLEST = {
    "attention": "--rounds 1",
    "beside_streaming": "--quick --rounds 1",
    "bounds": "--quick --sets 1",
    "chunk_size": "",
    "codecs": "--rounds 1 --tokens 512",
    "controller": "--rounds 3",
    "cpu_layers": "embedded --rounds 1",
    "destinations": "--rounds 1",
    "disk": "--rounds 1 --tokens 4096",
    "elastic": "--quick",
    "end_to_end": "--rounds 1",
    "experts": "--tokens 1,16 --rounds 1",
    "frames": "--quick",
    "gpu_engine": "--device cpu",
    "gpu_kernels": "--device cpu",
    "grammar": "--rounds 1 --requests 4 --tokens 16",
    "host_memory": "--size-gb 1 --rounds 1",
    "interference": "--device cpu",
    "kv_events": "--rounds 1",
    "kvcacheio": "--device cpu --rounds 1 --page-sizes 16",
    "latents": "--rounds 1 --prefix 256 --layers 1",
    "layer_stream": "--quick --rounds 1",
    "lending": "--rounds 1 --window 2",
    "long_prompts": "--rounds 1",
    "loop_lag": "--seconds 1",
    "lost_slabs": "--rounds 1",
    "offload": "--rounds 1 --blocks 64",
    "quantized": "--rounds 1",
    "remote": "--rounds 1 --rates 10 --tokens 1025",
    "scheduler": "--steps 20",
    "server_memory": "--minutes 0.2",
    "serving_overhead": "--rounds 1",
    "stalls": "--rounds 1",
    "stopped_lender": "--quick",
    "store": "--rounds 1",
    "strict": "--quick",
    "tree": "--quick",
    "ttft": "--rounds 1",
    "windows": "--rounds 1",
}


def test_all_benchmarks_are_run() -> None:
    found = {path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py")}
    assert found == SMALLEST.keys() | WITH_A_TRACE
    left_out = re.search(r"addprefix benchmark/bench_,([\w. ]+)\)", (ROOT / "Makefile").read_text())
    assert left_out is not None and set(left_out[1].split()) == {f"{name}.py" for name in WITH_A_TRACE}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SMALLEST)
def test_it_runs(name: str, tmp_path: Path) -> None:
    """As `make bench` does, with the results elsewhere."""
    paths = [str(ROOT), str(ROOT / "test"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "BENCH_OUT": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(FOLDER / f"bench_{name}.py"), *SMALLEST[name].split()]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "written to" in done.stdout and list(tmp_path.iterdir()), done.stdout[-2000:]
