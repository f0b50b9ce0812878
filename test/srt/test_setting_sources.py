"""Settings from a file and from the environment: which of them counts, and the one sentence for what is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sglang.srt import setting_sources
from sglang.srt.server_args import ServerArgs, make_parser
from sglang.srt.setting_sources import CONFIG_VARIABLE, PREFIX, variable_of

EXTRA = "hicache-storage-backend-extra-config"
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
    assert isinstance(args.hicache_size, float) and args.page_size is None
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
        ("fp8-gemm-backend: triton", "server.yaml: this engine does not have the flag --fp8-gemm-backend: how a"),
        ("port: http", "server.yaml: port is 'http', but it must be a whole number"),
        ("port: 1.5", "port is '1.5', but it must be a whole number"),
        ("port: true", "port is 'true', but it must be a whole number"),
        ("port: [1]", "port is a list or a table, but it must be a whole number"),
        ("hicache: 3", "hicache is '3', but it must be true or false"),
        ("hicache: maybe", "but it must be true or false"),
        ("host: {a: 1, b: [x: 2", "is no YAML: "),
        ("just words", "must hold names and values"),
        ("port: 1\n--port: 2", "'port' and '--port' set the same flag: keep one of the two"),
        ("tp: 1\ntp_size:", "'tp' and 'tp_size' set the same flag"),
        ("port: 1\nport: 2", "'port' is there twice: keep one of the two"),
        (f"{EXTRA}: {{a: [{{path: 1, path: 2}}]}}", f"{EXTRA}: 'path' is there twice"),
        (f"{EXTRA}: {{a: 2026-01-01}}", f"{EXTRA} holds what JSON does not have, such as a date"),
        ("[a, b]: 1", "a list or a table stands where a name or a value must be"),
        ("cors-allow-origins: [[a]]", "a list or a table stands where a name or a value must be"),
        ("[" * 5000, "has more than 32 tables or lists within each other"),
        ("- " * 5000, "has more than 32 tables or lists within each other"),
        ("host: &a b\napi-key: *a", "has an anchor, an alias or a tag: write the values out"),
        ("host: !!binary eA==", "has an anchor, an alias or a tag: write the values out"),
        ('host: "\\U99999999"', "is no YAML: "),
        ("host: \0", "is no YAML: "),
        ("port: 1\n---\nport: 2", "is no YAML: "),
        ("#" * (1 << 20) + "#", "is over 1 MiB: name a file that holds flags"),
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


def test_a_file_of_too_many_values_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(setting_sources, "MAX_VALUES", 3)
    file = write(tmp_path, "port: 1\n")
    assert ServerArgs.from_cli(["--model", "m", "--config", file], {}).port == 1
    with pytest.raises(SystemExit):
        ServerArgs.from_cli(["--config", write(tmp_path, "port: 1\nmodel: m\n")], {})
    assert "has more than 3 values" in capsys.readouterr().err


def test_a_scalar_of_the_file_is_read_as_on_the_command_line(tmp_path):
    text = """
    model: 2026-01-01
    api-key: 0123
    hicache-bubble-filling: off
    hicache: on
    strict-fields: 0
    max-total-tokens: 1_000
    mem-fraction-static: 1e-1
    served-model-name: "null"
    hicache-storage-backend: [file, remote]
    hicache-storage-backend-extra-config: {file: {path: /kv, limit_gb: 1}, remote: {uri: "null", on: true}}
    """
    args = ServerArgs.from_cli(["--config", write(tmp_path, text)], {})
    assert (args.model_path, args.api_key, args.hicache_bubble_filling) == ("2026-01-01", "0123", "off")
    assert (args.enable_hierarchical_cache, args.strict_fields) == (True, False)
    assert (args.max_total_tokens, args.mem_fraction_static, args.served_model_name) == (1000, 0.1, "null")
    assert args.hicache_storage_backend == "file,remote"
    assert json.loads(args.hicache_storage_backend_extra_config)["file"] == {"path": "/kv", "limit_gb": 1}


def test_a_switch_is_turned_off_over_the_environment_and_that_over_the_file(tmp_path):
    file = write(tmp_path, "model: m\nhicache: true\n")
    assert not ServerArgs.from_cli(["--config", file], {"SGLANG_HICACHE": "0"}).enable_hierarchical_cache
    for flag in ("--no-hicache", "--no-enable-hierarchical-cache"):
        args = ServerArgs.from_cli(["--config", file, flag], {"SGLANG_HICACHE": "1"})
        assert not args.enable_hierarchical_cache


def test_aliases_count_in_the_environment(capsys):
    args = ServerArgs.from_cli([], {"SGLANG_MODEL": "m", "SGLANG_HICACHE": "1", "SGLANG_TP": "2"})
    assert (args.model_path, args.enable_hierarchical_cache, args.tp_size) == ("m", True, 2)
    with pytest.raises(SystemExit):
        ServerArgs.from_cli(["--model", "m"], {"SGLANG_TP": "2", "SGLANG_TP_SIZE": "2"})
    assert "SGLANG_TP_SIZE and SGLANG_TP set the same flag: keep one of the two" in capsys.readouterr().err


def test_a_variable_that_the_command_line_overrides_is_not_looked_at(caplog):
    environ = {"SGLANG_PORT": "http", "SGLANG_TP": "many"}
    args = ServerArgs.from_cli(["--model", "m", "--port", "1", "--tp", "2"], environ)
    assert (args.port, args.tp_size) == (1, 2)
    assert not caplog.records


@pytest.mark.parametrize("scheme", ["tcp", "udp"])
def test_variables_of_kubernetes_are_ignored_with_a_line(scheme, caplog):
    value = f"{scheme}://10.96.0.17:30000"
    args = ServerArgs.from_cli(["--model", "m"], {"SGLANG_PORT": value, "SGLANG_API_KEY": value})
    assert (args.port, args.api_key) == (30000, value)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"SGLANG_PORT is ignored: Kubernetes set it to {value}")


def test_a_wrong_variable_is_named_and_others_are_ignored(capsys):
    args = ServerArgs.from_cli(["--model", "m"], {"SGLANG_TEST_DEVICE": "cpu", "SGLANG_PROT": "1", "SGLANG_PORT": ""})
    assert args.port == 30000
    with pytest.raises(SystemExit):
        ServerArgs.from_cli(["--model", "m"], {"SGLANG_PORT": "http"})
    assert "SGLANG_PORT is 'http', but it must be a whole number" in capsys.readouterr().err


def test_no_flag_has_the_name_of_another_variable():
    folders = (ROOT / "python", ROOT / "test" / "support", ROOT / "Makefile")
    files = [path for folder in folders for path in ([folder] if folder.is_file() else folder.rglob("*.py"))]
    # The first three name variables as examples; the commands take the server's keys from the same variables.
    named = ("flag_reference.py", "server_args.py", "setting_sources.py", "cli/server.py")
    files = [path for path in files if not path.as_posix().endswith(named)]
    others = {name for path in files for name in re.findall(rf"\b{PREFIX}[A-Z_]+\b", path.read_text())}
    assert len(others) > 3
    flags = [flag for action in make_parser()._actions for flag in action.option_strings]
    assert others & {variable_of(flag.lstrip("-").replace("-", "_")) for flag in flags} == {CONFIG_VARIABLE} & others
