"""The main benchmarks of a GPU in one run of under nine minutes: JSON in one folder, a short table last.

    python -m benchmark.gpu [--models] [--out DIR] [--budget-s 480] [--only kvcacheio,gpu_engine] [--device cpu]

--models takes the time for what the others leave out: experts, latents, quantised weights and fp8 KV. --only also
takes what neither has time for: transformers' code, and attention over fp8 KV.
Owns the folder (default: bench-out/) and the processes, one benchmark each with its own limit of time, the most
important first. A benchmark that crashes or is killed does not affect the others, and its report so far counts. After
each one everything so far is in $OUT/gpu.tar, or gpu_models.tar, where OUT is set: a machine may send few files back.
gpu_summary.py makes the table. The exit code is 1 if a part crashed or was killed, and 0 for every measured result.
On the CPU everything is as small as possible: that shows that the script runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from benchmark.common import environment, print_table
from benchmark.gpu_summary import Constants, Outcome, constants, summary
from benchmark.simulator.profiles import H200

ROOT = Path(__file__).resolve().parent.parent
# Seconds between the request to end and the kill.
GRACE_S = 5.0
# Seconds before its limit at which a part ends by itself, where it can.
MARGIN_S = 12.0


@dataclass(frozen=True)
class Part:
    """A benchmark whose report has this name. limit_s: it is killed after that. arguments: on a GPU. small: arguments
    on the CPU. ends_itself: it takes --budget-s. script: whose it is, of the same name by default."""

    name: str
    limit_s: float
    arguments: tuple[str, ...] = ()
    small: tuple[str, ...] = ()
    ends_itself: bool = True
    has_device: bool = True
    script: str = ""

    def command(self, device: str, limit_s: float) -> list[str]:
        command = [sys.executable, str(ROOT / "benchmark" / f"bench_{self.script or self.name}.py")]
        command += self.arguments if device == "cuda" else self.small
        if self.has_device:
            command += ["--device", device]
        if self.ends_itself:
            command += ["--budget-s", f"{max(limit_s - MARGIN_S, limit_s / 2):.0f}"]
        return command


# The most important transfers of pages come first, in case the time runs out.
_PAGE_SIZES = "1,64,16,32,1024,4,256,2,8,128,512"
PARTS = (
    Part(
        "kvcacheio",
        70,
        ("--tokens", "8192", "--page-sizes", _PAGE_SIZES, "--layouts", "page_first", "--orders", "scattered,in runs")
        + ("--rounds", "4"),
        ("--tokens", "256", "--layers", "2", "--page-sizes", "1,32", "--layouts", "page_first", "--rounds", "1"),
    ),
    Part("gpu_engine", 170),
    Part("attention", 90, ("--rounds", "5"), ("--rounds", "1", "--page-sizes", "16"), False, False),
    Part("interference", 70, ("--pairs", "2"), ("--pairs", "1", "--window-s", "0.002")),
    Part("gpu_kernels", 60, ends_itself=False),
    Part(
        "host_memory", 20, ("--size-gb", "0.5", "--rounds", "2"), ("--size-gb", "0.05", "--rounds", "1"), False, False
    ),
)


def _engine_of(name: str, *shape: str, parts: str = "prefill,decode") -> Part:
    arguments = *shape, "--parts", parts
    return Part(f"gpu_engine_{name}", 70, arguments, arguments, script="gpu_engine")


def _experts_of(shape: str) -> Part:
    arguments = "--shape", shape, "--rounds", "5", "--tokens"
    few = (*arguments, "1,32,256,2048,8192"), (*arguments, "1,16")
    return Part(f"experts_{shape}", 50, *few, False, False, "experts")


MODEL_PARTS = (
    _engine_of("experts_fp8", "--experts", "--fp8-weights"),
    _engine_of("gpt_oss", "--gpt-oss"),
    _engine_of("latents", "--latents"),
    _experts_of("qwen3"),
    _experts_of("gpt-oss"),
    _experts_of("deepseek"),
    Part("quantized", 50, ("--rounds", "5"), ("--rows", "1", "--rounds", "1"), False, False),
    _engine_of("fp8kv", "--fp8-kv"),
)
_FP8_KV = "--kv-dtype", "fp8_e4m3", "--rounds"
# For which neither run has time.
OTHER_PARTS = (
    _engine_of("transformers", "--model-impl", "transformers", parts="prefill,decode,stream"),
    Part("attention_fp8_e4m3", 90, (*_FP8_KV, "5"), (*_FP8_KV, "1", "--page-sizes", "16"), False, False, "attention"),
)


def run_part(part: Part, device: str, out: Path, limit_s: float, log: IO[bytes]) -> Outcome:
    """limit_s: the most seconds; 0 if no time is left."""
    report = out / f"{part.name}_{device}.json"
    report.unlink(missing_ok=True)  # a report afterwards is this run's
    if limit_s <= 0:
        return Outcome(part.name, None, 0.0)
    command = part.command(device, limit_s)
    log.write(f"\n$ {' '.join(command)}\n".encode())
    log.flush()
    begin_log, began = log.tell(), time.monotonic()
    path = os.pathsep.join(
        [str(ROOT / "python"), str(ROOT / "sgl-kernel" / "python"), os.environ.get("PYTHONPATH", "")]
    )
    env = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "BENCH_OUT": str(out)}
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=ROOT, process_group=0)
    returncode = _end_of(process, limit_s)
    seconds = time.monotonic() - began
    return Outcome(part.name, returncode, seconds, _read(report), _last_line(Path(log.name), begin_log))


def pack(paths: list[Path], target: Path) -> None:
    """Put those that are there into an archive, in place of an earlier one."""
    part = target.with_suffix(".part")
    with tarfile.open(part, "w") as archive:
        for path in filter(Path.exists, paths):
            archive.add(path, path.name)
    part.replace(target)


def _end_of(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """The exit code; None if the part and its children were killed. The part does not outlive this process,
    either."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.returncode is None:
            for sig in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
                    os.killpg(process.pid, sig)
                    process.wait(GRACE_S)
                    break


def _read(path: Path) -> dict[str, Any] | None:
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return report if isinstance(report, dict) else None


def _last_line(path: Path, begin: int) -> str:
    with path.open("rb") as file:
        file.seek(begin)
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def run(
    parts: list[Part], device: str, out: Path, budget_s: float, keep: Callable[[], None] = lambda: None
) -> list[Outcome]:
    """keep: called after each part."""
    deadline = time.monotonic() + budget_s
    outcomes = []
    # Opened for appending, because the parts write to it, too, each at its end.
    (out / "gpu.log").unlink(missing_ok=True)
    with (out / "gpu.log").open("ab") as log:
        for part in parts:
            left = deadline - GRACE_S - time.monotonic()
            limit_s = min(part.limit_s, left) if left > MARGIN_S else 0.0
            outcome = run_part(part, device, out, limit_s, log)
            log.seek(0, os.SEEK_END)
            outcomes.append(outcome)
            print(f"{part.name}: {outcome.complaint or 'done'}, {outcome.seconds:.0f} s", flush=True)
            keep()
    return outcomes


def profile_of_h200() -> Constants:
    gpu, link, loss = H200.gpu, H200.link, H200.interference
    return Constants(
        matrix_flops=gpu.matrix_flops,
        memory_bytes_per_s=gpu.hbm_bytes_per_s,
        link_bytes_per_s=link.peak,
        matmul_efficiency=gpu.matmul_efficiency,
        attention_efficiency=gpu.attention_efficiency,
        memory_efficiency=gpu.hbm_efficiency,
        usable=link.usable,
        copy_s=link.copy_s,
        cta_bytes=link.cta_bytes,
        kernel_latency_s=link.kernel_latency_s,
        step_s=gpu.step_s,
        prefill_per_cta=loss.prefill_per_cta,
        decode_per_cta=loss.decode_per_cta,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(ROOT / "bench-out"))
    parser.add_argument("--budget-s", type=float, default=480)
    parser.add_argument("--models", action="store_true")
    parser.add_argument("--only", default="", help="some parts, of any run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    all_parts = {part.name: part for part in (*PARTS, *MODEL_PARTS, *OTHER_PARTS)}
    wanted = args.only.split(",") if args.only else []
    if unknown := set(wanted) - set(all_parts):
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}; there are {', '.join(all_parts)}")
    out = Path(args.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    # On a signal, the current part ends first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    began = time.monotonic()
    name = "gpu_models" if args.models else "gpu"
    chosen = [all_parts[each] for each in all_parts if each in wanted] or [*(MODEL_PARTS if args.models else PARTS)]
    paths = [out / f"{name}.json", out / "gpu.log", *(out / f"{part.name}_{args.device}.json" for part in chosen)]
    paths[0].unlink(missing_ok=True)

    def keep() -> None:
        if target := os.environ.get("OUT"):
            pack(paths, Path(target, f"{name}.tar"))

    outcomes = run(chosen, args.device, out, args.budget_s, keep)
    rows, beside = summary(outcomes), [] if args.models else constants(outcomes, profile_of_h200())
    ends = [{key: value for key, value in asdict(outcome).items() if key != "report"} for outcome in outcomes]
    # The children report the GPU and torch's version; this process starts no device.
    measured: dict[str, Any] = next((outcome.report for outcome in outcomes if outcome.report), {})
    where = environment()
    where |= {key: measured[key] for key in ("hardware", "versions") if key in measured}
    report: dict[str, Any] = {"benchmark": "gpu", **where, "seconds": time.monotonic() - began, "parts": ends}
    report |= {"summary": rows, "simulator": beside}
    paths[0].write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    keep()
    print(f"\nJSON and gpu.log in {out}; {where['hardware']}; {time.monotonic() - began:.0f} s")
    if beside:
        print_table("The simulator's H200 beside it", beside)
    print_table("Summary", rows)
    sys.exit(0 if all(outcome.is_well for outcome in outcomes) else 1)


if __name__ == "__main__":
    main()
