"""What counts as free memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from sglang.srt.utils.memory import available_memory

NOWHERE = Path("/nowhere")


def test_a_containers_limit_counts(tmp_path):
    machine = available_memory(tmp_path)
    assert machine > 1 << 20
    (tmp_path / "memory.current").write_text("300000\n")
    (tmp_path / "memory.stat").write_text("anon 100000\ninactive_file 150000\nactive_file 50000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) > 1 << 20
    (tmp_path / "memory.max").write_text("1000000\n")
    assert available_memory(tmp_path) == 900_000


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """/sys/devices/system/node: a processor with memory, a GPU's memory with 7 of its 8 nodes empty, CXL memory."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=600 << 30))
    for name, numbers in (("has_cpu", "0"), ("has_memory", "0-1,9"), ("has_generic_initiator", "1-8")):
        (tmp_path / name).write_text(f"{numbers}\n")
    for number, free_gib, files_gib in ((0, 400, 10), (1, 90, 4), (9, 90, 0)):
        (tmp_path / f"node{number}").mkdir()
        lines = (("MemTotal:", 500), ("MemFree:", free_gib), ("Inactive(file):", files_gib), ("Active(file):", 1))
        text = "".join(f"Node {number} {name:15} {gib << 20} kB\n" for name, gib in lines)
        (tmp_path / f"node{number}/meminfo").write_text(f"{text}Node {number} HugePages_Free:      0\n")
    return tmp_path


def test_an_accelerators_memory_is_not_the_hosts(nodes):
    assert available_memory(NOWHERE, nodes) == (600 - 90 - 4 - 1) << 30


@pytest.mark.parametrize("name, numbers", [("has_generic_initiator", ""), ("has_cpu", "0-1"), ("has_memory", "0,9")])
def test_what_is_no_accelerators_memory_is_the_hosts(nodes, name, numbers):
    (nodes / name).write_text(f"{numbers}\n")
    assert available_memory(NOWHERE, nodes) == 600 << 30


def test_a_kernel_that_names_no_initiators(nodes):
    (nodes / "has_generic_initiator").unlink()
    assert available_memory(NOWHERE, nodes) == available_memory(NOWHERE, NOWHERE) == 600 << 30
