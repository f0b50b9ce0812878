"""What is packaged: every file of the packages, one version, and units and manifests that agree with the server."""

from __future__ import annotations

import configparser
import fnmatch
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import sglang
from sglang.srt.entrypoints.http_server import DRAIN_TIMEOUT_S
from sglang.srt.server_args import ServerArgs
from support.deploy_queries import DEPLOY
from support.doc_pages import ROOT
from support.release import PACKAGES, package_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
STATEFUL_SET = yaml.safe_load((DEPLOY / "kubernetes" / "statefulset.yaml").read_text())
SERVER = STATEFUL_SET["spec"]["template"]["spec"]["containers"][0]


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(DEPLOY / "sglang.service")
    return parser


def is_packaged(path: str) -> bool:
    """By pyproject.toml: every module, and what `package-data` names."""
    if path.endswith(".py"):
        return True
    for package, patterns in PROJECT["tool"]["setuptools"]["package-data"].items():
        inside = path.removeprefix(package.replace(".", "/") + "/")
        if inside != path and any(
            fnmatch.fnmatch(inside, pattern) and inside.count("/") == pattern.count("/") for pattern in patterns
        ):
            return True
    return False


def test_every_file_of_the_packages_is_in_the_wheel() -> None:
    files = package_files()
    assert {Path(path).suffix for path in files} >= {".py", ".c", ".cu", ".h", ".html", ".txt"}
    assert [path for path in files if not is_packaged(path)] == []
    assert not is_packaged("sglang/srt/managers/notes.txt") and not is_packaged("sgl_kernel/csrc/deep/er/kernel.c")


def test_each_pattern_of_the_package_data_matches_files() -> None:
    for package, patterns in PROJECT["tool"]["setuptools"]["package-data"].items():
        top, _, below = package.partition(".")
        folder = ROOT / PACKAGES[top] / below.replace(".", "/")
        assert all(any(folder.glob(pattern)) for pattern in patterns), package


def test_the_version_stands_in_one_place() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"] and "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "sglang.__version__"}
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in changelog
    released = re.findall(r"^## \[(\d\S*)\]", changelog, re.M)
    assert released == [] or released[0] == sglang.__version__
    for path in ("Dockerfile", "kubernetes/statefulset.yaml"):
        assert set(re.findall(r"sglang:([\d.]+)", (DEPLOY / path).read_text())) == {sglang.__version__}


def test_a_gpu_without_a_network_gets_what_the_engine_imports() -> None:
    """The file's head tells what is there; transformers brings the rest. Without xgrammar there are no grammars."""
    lines = (ROOT / "gpu-wheels.txt").read_text().splitlines()
    fetched = {line for line in lines if line and not line.startswith("#")}
    needed = {re.match(r"[\w-]+", each)[0] for each in PROJECT["project"]["dependencies"]}  # type: ignore[index]
    there = {
        "torch",
        "numpy",
        "transformers",
        "tokenizers",
        "safetensors",
        "huggingface-hub",
        "jinja2",
        "pyyaml",
        "tqdm",
    }
    assert needed - there - {"xgrammar"} <= fetched


def test_a_service_manager_waits_for_the_drain_and_is_told() -> None:
    service = unit()["Service"]
    assert service["Type"] == "notify"
    assert int(service["TimeoutStopSec"]) == DRAIN_TIMEOUT_S + 20
    pod = STATEFUL_SET["spec"]["template"]["spec"]
    wait_s = int(SERVER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] == DRAIN_TIMEOUT_S + 20 > DRAIN_TIMEOUT_S + wait_s
    liveness = SERVER["livenessProbe"]
    assert liveness["periodSeconds"] * (liveness["failureThreshold"] - 1) > DRAIN_TIMEOUT_S + 20


def test_the_flags_of_the_deployment_are_flags(tmp_path: Path) -> None:
    (config,) = yaml.safe_load_all((DEPLOY / "kubernetes" / "config.yaml").read_text())
    file = tmp_path / "server.yaml"
    file.write_text(config["data"]["server.yaml"])
    *command, flag, path = shlex.split(unit()["Service"]["ExecStart"])
    assert command[1:] == ["-m", "sglang.launch_server"] and flag == "--config"
    assert SERVER["args"] == [flag, path]
    args = ServerArgs.from_cli([flag, str(file)])
    assert (args.port, args.host) == (SERVER["ports"][0]["containerPort"], "0.0.0.0")
    kv: Any = {mount["name"]: mount["mountPath"] for mount in SERVER["volumeMounts"]}["kv"]
    assert f'"{kv}/' in str(args.hicache_storage_backend_extra_config).replace("'", '"')


def test_the_image_runs_the_server_itself() -> None:
    text = re.sub(r"\\\n", "", (DEPLOY / "Dockerfile").read_text())
    lines = dict(
        line.split(maxsplit=1) for line in text.splitlines() if re.match(r"(ENTRYPOINT|USER|STOPSIGNAL) ", line)
    )
    # A shell between would keep signals to itself.
    assert lines == {
        "ENTRYPOINT": '["python", "-m", "sglang.launch_server"]',
        "USER": str(STATEFUL_SET["spec"]["template"]["spec"]["securityContext"]["runAsUser"]),
        "STOPSIGNAL": "SIGTERM",
    }
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.M)
    assert all((ROOT / path).exists() for paths in copied for path in paths.split())


@pytest.mark.clients
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("needs systemd-analyze: apt-get install systemd")
    # The program that it starts is elsewhere.
    text = (DEPLOY / "sglang.service").read_text().replace("/opt/sglang/.venv/bin/python", "/bin/true")
    (tmp_path / "sglang.service").write_text(text)
    done = subprocess.run([program, "verify", tmp_path / "sglang.service"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
