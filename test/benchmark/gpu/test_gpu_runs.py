"""The run of all parts: a part that crashes, hangs or finds no time costs the others nothing. And each benchmark runs
on the CPU, as small as it gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from benchmark.gpu_summary import LINES

from benchmark import gpu
from benchmark.gpu import MODEL_PARTS, OTHER_PARTS, PARTS, Part, run, run_part

WRITES = """
import json, os, sys, time
name = sys.argv[0].rsplit("bench_", 1)[1].removesuffix(".py")
with open(os.path.join(os.environ["BENCH_OUT"], name + "_cpu.json"), "w") as file:
    json.dump({"complete": %s, "rows": []}, file)
print("about to end")
"""
SCRIPTS = {
    "well": WRITES % "True",
    "crashes": WRITES % "False" + "raise RuntimeError('lost the device')",
    "hangs": "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + WRITES % "False" + "time.sleep(600)",
}


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with these benchmarks, and an empty folder out/."""
    (tmp_path / "benchmark").mkdir()
    for name, script in SCRIPTS.items():
        (tmp_path / "benchmark" / f"bench_{name}.py").write_text(script)
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "GRACE_S", 0.5)
    monkeypatch.setattr(gpu, "MARGIN_S", 0.0)
    return tmp_path / "out"


def test_parts_end_as_they_end_and_the_next_begins(fakes: Path) -> None:
    parts = [Part("crashes", 60), Part("hangs", 6), Part("well", 60)]
    crashed, hung, well = run(parts, "cpu", fakes, 130)
    assert (crashed.returncode, crashed.last_line) == (1, "RuntimeError: lost the device")
    assert hung.returncode is None and hung.complaint.startswith("killed after ")
    # Both had written something by then.
    assert crashed.report == hung.report == {"complete": False, "rows": []}
    assert well.is_well and not well.complaint and well.last_line == "about to end"
    assert (fakes / "gpu.log").read_text().count("about to end") == 3


def test_all_so_far_is_kept_in_one_file(fakes: Path, tmp_path: Path) -> None:
    seen = []

    def keep() -> None:
        gpu.pack([fakes / name for name in ("gpu.log", "well_cpu.json", "crashes_cpu.json")], tmp_path / "gpu.tar")
        with tarfile.open(tmp_path / "gpu.tar") as archive:
            seen.append(archive.getnames())

    run([Part("well", 60), Part("crashes", 60)], "cpu", fakes, 130, keep)
    assert seen == [["gpu.log", "well_cpu.json"], ["gpu.log", "well_cpu.json", "crashes_cpu.json"]]
    assert not list(tmp_path.glob("*.part"))


def test_nothing_begins_without_time(fakes: Path) -> None:
    (outcome,) = run([Part("well", 30)], "cpu", fakes, 0.2)
    assert outcome.complaint == "not begun: no time left" and not outcome.is_well


def test_a_report_of_an_earlier_run_does_not_count(fakes: Path) -> None:
    (fakes / "missing_cpu.json").write_text("{}")
    with (fakes / "gpu.log").open("ab") as log:
        outcome = run_part(Part("missing", 30), "cpu", fakes, 30, log)
    assert outcome.report is None and outcome.returncode == 2


@pytest.mark.parametrize("parts", [PARTS, MODEL_PARTS])
def test_all_parts_together_have_eight_minutes(parts: tuple[Part, ...]) -> None:
    assert sum(part.limit_s for part in parts) <= 480
    # These two have no line in the last table.
    assert {part.name for part in parts} - set(LINES) <= {"gpu_kernels", "host_memory"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kvcacheio", "interference", *(part.name for part in (*MODEL_PARTS, *OTHER_PARTS))])
def test_a_benchmark_runs_on_the_cpu(tmp_path: Path, name: str) -> None:
    run_of = [sys.executable, "-m", "benchmark.gpu", "--device", "cpu", "--only", name, "--out", str(tmp_path)]
    is_first = name not in {part.name for part in MODEL_PARTS}
    run_of += [] if is_first else ["--models"]
    done = subprocess.run(run_of, capture_output=True, text=True, timeout=120, cwd=gpu.ROOT)
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "gpu.log").read_text()
    report = json.loads((tmp_path / f"{name}_cpu.json").read_text())
    assert report["complete"] and report["rows"] and not any("error" in row for row in report["rows"])
    summary = json.loads((tmp_path / ("gpu.json" if is_first else "gpu_models.json")).read_text())
    assert [part["returncode"] for part in summary["parts"]] == [0]
    assert done.stdout.rstrip().rsplit("##", 1)[1].startswith(" Summary")


@pytest.mark.slow
def test_the_engine_serves_every_part_on_the_cpu(tmp_path: Path) -> None:
    run_of = [
        sys.executable,
        "-m",
        "benchmark.gpu",
        "--device",
        "cpu",
        "--only",
        "gpu_engine",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(run_of, capture_output=True, text=True, timeout=240, cwd=gpu.ROOT)
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "gpu.log").read_text()
    rows = json.loads((tmp_path / "gpu_engine_cpu.json").read_text())["rows"]
    assert {row["part"] for row in rows} == {"prefill", "decode", "stream", "documents"}
    of = {row["variant"]: row for row in rows if row["part"] == "documents"}
    hierarchies = [row for name, row in of.items() if name != "no hierarchy"]
    assert len(hierarchies) == 5 and all(row["from host"] > 0 and row["loaded"] > 0 for row in hierarchies)
    assert of["no hierarchy"]["from host"] == 0 < of["no hierarchy"]["computed"]
    # The same weights and float32: whatever the tiers did, the answers are the same.
    assert all(row["answers that differ"] == 0 and row["cut off"] == "" for row in of.values())
    one, two = (row for row in rows if row["part"] == "stream")
    assert one["streamed"] == 0 < two["streamed"]


@pytest.mark.slow
def test_a_variant_without_time_says_how_far_it_came(tmp_path: Path) -> None:
    script = str(gpu.ROOT / "benchmark" / "bench_gpu_engine.py")
    options = ["--device", "cpu", "--parts", "documents", "--variant-s", "0"]
    env = {**os.environ, "BENCH_OUT": str(tmp_path)}
    subprocess.run([sys.executable, script, *options], env=env, check=True, capture_output=True, timeout=120)
    rows = json.loads((tmp_path / "gpu_engine_cpu.json").read_text())["rows"]
    assert len(rows) == 6 and all(row["cut off"].startswith("0 of 16 in ") for row in rows)
    assert all(row["requests/s"] == 0 and row["TTFT p50 s"] is None for row in rows)
