"""Checks what `make release` has built: python -m support.release contents DIST FROM_TREE, and smoke.

contents: the wheel from the source distribution in DIST equals the one in FROM_TREE, and has every file of the
packages.
smoke: by a Python in whose environment the wheel is installed. A server of it answers one request.
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Package -> its folder below the root.
PACKAGES = {"sglang": "python/sglang", "sgl_kernel": "sgl-kernel/python/sgl_kernel"}
_LEFT_OUT = ("__pycache__",)


def package_files() -> list[str]:
    """Every file of the packages, by its path in a wheel."""
    return sorted(
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for package, folder in PACKAGES.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not any(part in _LEFT_OUT for part in path.parts)
    )


def _contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def check_contents(dist: Path, from_tree: Path) -> None:
    (wheel,), (again,) = dist.glob("*.whl"), from_tree.glob("*.whl")
    built, other = _contents(wheel), _contents(again)
    differ = sorted(name for name in built.keys() | other.keys() if built.get(name) != other.get(name))
    if differ:
        sys.exit(f"the source distribution does not build what the tree builds: {', '.join(differ)}")
    lacks = sorted(set(package_files()) - built.keys())
    foreign = sorted(name for name in built.keys() - set(package_files()) if ".dist-info/" not in name)
    if lacks or foreign:
        sys.exit(f"{wheel.name} lacks {lacks} and has {foreign}; see [tool.setuptools] in pyproject.toml")
    print(f"{wheel.name}: {len(built)} files, the same from the source distribution and from the tree")


def smoke() -> None:
    import sglang

    installed = Path(sglang.__file__ or "").resolve()
    if not installed.is_relative_to(Path(sysconfig.get_path("purelib")).resolve()):
        sys.exit(f"this is not the installed package: {installed}")
    from support.server_fixture import Server

    with (
        tempfile.TemporaryDirectory() as folder,
        Server("--hicache", environment={"XDG_CACHE_HOME": folder}) as server,
    ):
        body = {"text": "The owl sat in the tree.", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
        answers = [server.post("/generate", body).raise_for_status().json() for _ in range(2)]
        first, second = (answer["meta_info"] for answer in answers)
        if (
            first["completion_tokens"] != 4
            or second["cached_tokens"] == 0
            or answers[0]["text"] != answers[1]["text"]
        ):
            sys.exit(f"the installed server answers wrong: {answers}")
        server.stop()
    print(f"sglang {sglang.__version__} runs from {installed.parent}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["contents"]:
        check_contents(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        smoke()
