"""Settings from a file and from the environment: which of them counts, and the one sentence for what is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sglang.srt.server_args import ServerArgs
from sglang.srt.setting_sources import CONFIG_VARIABLE, PREFIX, variable_of

ROOT = Path(__file__).parents[2]


def write(folder: Path, text: str) -> str:
    path = folder / "server.yaml"
    path.write_text(text)
    return str(path)


def test_the_command_line_comes_before_the_environment_and_that_before_the_file(tmp_path):
    file = write(tmp_path, "port: 1\nhost: file\nmodel-path: file\nhicache: true\nhicache_size: 2\napi_key: a\n")
    environ = {"SGLANG_PORT": "2", "SGLANG_HOST": "environment", "SGLANG_ENABLE_HIERARCHICAL_CACHE": "off"}
    args = ServerArgs.from_cli(["--config", file, "--port", "3"], environ)
    assert (args.port, args.host, args.model_path) == (3, "environment", "file")
    assert (args.enable_hierarchical_cache, args.hicache_size, args.api_key) == (False, 2.0, "a")
    assert isinstance(args.hicache_size, float) and args.page_size == 1
    assert ServerArgs.from_cli(["--hicache"], {CONFIG_VARIABLE: file}).enable_hierarchical_cache


def test_names_may_be_written_as_flags_and_values_as_yaml_has_them(tmp_path):
    text = """
    --model: m
    cors-allow-origins: [https://a.example, https://b.example]
    hicache: yes
    hicache_storage_backend: file
    hicache-storage-backend-extra-config: {path: /tmp/kv, limit_gb: 1}
    served_model_name: null
    request_timeout: 30
    """
    args = ServerArgs.from_cli(["--config", write(tmp_path, text)], {})
    assert args.cors_allow_origins == "https://a.example,https://b.example"
    assert json.loads(args.hicache_storage_backend_extra_config) == {"path": "/tmp/kv", "limit_gb": 1}
    assert (args.served_model_name, args.request_timeout) == (None, 30.0)
    assert ServerArgs.from_cli(["--model", "m", "--config", write(tmp_path, "# nothing\n")], {}).port == 30000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 1", "server.yaml: 'prot' is not a flag of this engine: did you mean 'port'?"),
        ("quantization: fp8", "'quantization' is not a flag of this engine"),
        ("port: http", "server.yaml: port is 'http', but it must be a whole number"),
        ("port: 1.5", "port is 1.5, but it must be a whole number"),
        ("port: true", "port is True, but it must be a whole number"),
        ("port: [1]", "but it must be a whole number"),
        ("hicache: 3", "hicache is 3, but it must be true or false"),
        ("hicache: maybe", "but it must be true or false"),
        ("host: {a: 1, b: [x: 2", "is no YAML: "),
        ("just words", "must hold names and values"),
        ("port: 1\n--port: 2", "'--port' sets port for the second time"),
        ("schedule_policy: best", "--schedule-policy is 'best', but it must be one of"),
        ("port: 0", "--port is 0, but it must be from 1 to 65535"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_wrong_file_ends_with_one_sentence(text, words, tmp_path, capsys):
    file = write(tmp_path, text) if text is not None else str(tmp_path / "absent.yaml")
    with pytest.raises(SystemExit) as ended:
        ServerArgs.from_cli(["--model", "m", "--config", file], {})
    error = capsys.readouterr().err
    assert ended.value.code == 2 and words in error and error.count("\n") == 1


def test_a_wrong_variable_is_named_and_others_are_ignored(capsys):
    args = ServerArgs.from_cli(["--model", "m"], {"SGLANG_TEST_DEVICE": "cpu", "SGLANG_PROT": "1", "SGLANG_PORT": ""})
    assert args.port == 30000
    with pytest.raises(SystemExit):
        ServerArgs.from_cli(["--model", "m"], {"SGLANG_PORT": "http"})
    assert "SGLANG_PORT is 'http', but it must be a whole number" in capsys.readouterr().err


def test_no_flag_has_the_name_of_another_variable():
    folders = (ROOT / "python", ROOT / "test" / "support", ROOT / "Makefile")
    files = [path for folder in folders for path in ([folder] if folder.is_file() else folder.rglob("*.py"))]
    # These name variables as examples.
    files = [path for path in files if path.name not in ("flag_reference.py", "server_args.py", "setting_sources.py")]
    others = {name for path in files for name in re.findall(rf"\b{PREFIX}[A-Z_]+\b", path.read_text())}
    assert len(others) > 3
    assert others & {variable_of(name) for name in ServerArgs.__dataclass_fields__} == set()
