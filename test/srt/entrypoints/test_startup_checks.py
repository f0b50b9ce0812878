"""Every sentence that ends a start before any process is started, and that none of them needs torch."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.configs.embedded_model import ensure_embedded_model
from sglang.srt.entrypoints.startup_checks import check_before_start, tokenizer_dir
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.child_process import StartupError, is_for_the_user


def refusal(**args: Any) -> str:
    with pytest.raises(Exception) as refused:
        check_before_start(ServerArgs(**{"model_path": "embedded", **args}))
    assert is_for_the_user(refused.value)
    return str(refused.value)


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., str]:
    """A copy of the embedded model's small files, with changes to its config; None takes an entry out."""

    def make(*without: str, **changes: Any) -> str:
        path = tmp_path / "model"
        path.mkdir()
        for file in ensure_embedded_model().iterdir():
            if file.name not in without:
                (path / file.name).symlink_to(file)
        if "config.json" not in without:
            config = json.loads((path / "config.json").read_text()) | changes
            (path / "config.json").unlink()
            config = {key: value for key, value in config.items() if value is not None}
            (path / "config.json").write_text(json.dumps(config))
        return str(path)

    return make


def test_a_model_that_can_be_served(model: Callable[..., str], tmp_path: Path) -> None:
    assert check_before_start(ServerArgs(model_path="embedded")) == ensure_embedded_model()
    path = model("model.safetensors", intermediate_size=None, num_key_value_heads=None, max_position_embeddings=None)
    args = ServerArgs(model_path=path, load_format="dummy", tp_size=2, context_length=512, dtype="half")
    assert check_before_start(args) == Path(path)
    args = ServerArgs(model_path="embedded", model_impl="transformers")
    assert check_before_start(args) == ensure_embedded_model()


# Of text and images.
IMAGES = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}


@pytest.mark.parametrize(
    ("without", "changes", "args", "sentence"),
    [
        ("config.json", {}, {}, "has no config.json; give a directory in Hugging Face's format"),
        (
            "",
            {"architectures": ["GPT2LMHeadModel"]},
            {"model_impl": "native"},
            "GPT2LMHeadModel, which is not supported; supported are",
        ),
        ("", {"architectures": None}, {}, "has the architecture unknown, which is not supported; supported are"),
        (
            "",
            {"num_attention_heads": 6},
            {"tp_size": 4, "model_impl": "transformers"},
            "6 attention heads cannot be divided over 4 ranks; choose a --tp-size that divides 6",
        ),
        (
            "",
            {"quantization_config": {"quant_method": "quip"}},
            {},
            "it is quantized as 'quip', which is not supported",
        ),
        ("", {"hidden_act": "gelu"}, {}, "'gelu' is not supported"),
        (
            "",
            IMAGES | {"text_config": {"hidden_activation": "relu"}},
            {},
            "use a checkpoint of its text model alone, with --model-impl transformers",
        ),
        ("", IMAGES | {"text_config": [5]}, {}, "text_config in its config is [5], but it has to be an object"),
        (
            "",
            IMAGES | {"text_config": {"num_attention_heads": 5}},
            {"tp_size": 2},
            "5 attention heads cannot be divided",
        ),
        ("", {"dtype": "float8_e4m3fn"}, {}, "dtype float8_e4m3fn is not supported; choose one with --dtype"),
        ("", {}, {"tp_size": 3}, "8 attention heads cannot be divided over 3 ranks; choose a --tp-size"),
        ("", {"num_key_value_heads": 3}, {"tp_size": 2}, "3 KV heads can neither be divided over 2 ranks"),
        ("", {}, {"context_length": 40000}, "40000 is more than the model's 32768"),
        ("", {"num_hidden_layers": "four"}, {}, "num_hidden_layers in its config is 'four', but it has to be a"),
        ("", {"vocab_size": 0}, {}, "vocab_size in its config is 0, but it has to be a whole number above 0"),
        ("", {"head_dim": True}, {}, "head_dim in its config is True, but"),
        ("model.safetensors", {}, {}, "has no *.safetensors; other formats are not read"),
        ("tokenizer.json tokenizer_config.json", {}, {}, "holds no tokenizer (none of tokenizer.json,"),
    ],
)
def test_models(
    without: str, changes: dict[str, Any], args: dict[str, Any], sentence: str, model: Callable[..., str]
) -> None:
    assert sentence in refusal(model_path=model(*without.split(), **changes), **args)


@pytest.mark.parametrize(
    ("name", "keep", "sentence"),
    [
        ("tokenizer.json", 0, "tokenizer.json' is not valid JSON"),
        ("tokenizer.json", 5000, "tokenizer.json' is not valid JSON"),
        ("tokenizer_config.json", 20, "tokenizer_config.json' is not valid JSON"),
        ("model.safetensors", 0, "model.safetensors' cannot be read as safetensors (incomplete download?)"),
        ("model.safetensors", 1000, "model.safetensors' cannot be read as safetensors (incomplete download?)"),
        ("model.safetensors", 1_000_000, "model.safetensors' cannot be read as safetensors (incomplete download?)"),
    ],
)
def test_files_that_end_too_early(name: str, keep: int, sentence: str, model: Callable[..., str]) -> None:
    path = model(name)
    with open(ensure_embedded_model() / name, "rb") as whole:
        (Path(path) / name).write_bytes(whole.read(keep))
    assert sentence in refusal(model_path=path)
    if name == "model.safetensors":
        check_before_start(ServerArgs(model_path=path, load_format="dummy"))


def test_weights_behind_an_index_are_checked_too(model: Callable[..., str]) -> None:
    path = Path(model("model.safetensors"))
    (path / "1.safetensors").write_bytes(bytes(8))
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "1.safetensors", "b": "1.safetensors"}}')
    assert "1.safetensors' cannot be read as safetensors" in refusal(model_path=str(path))


def test_places_without_a_model(model: Callable[..., str], tmp_path: Path) -> None:
    assert "There is no directory '/nowhere/model'" in refusal(model_path="/nowhere/model")
    path = model("model.safetensors")
    assert "is a file" in refusal(model_path=path + "/config.json")
    (Path(path) / "model.safetensors.index.json").write_text('{"weight_map": {"a": "1.safetensors"}}')
    assert "names files that are not there: 1.safetensors" in refusal(model_path=path)
    (Path(path) / "model.safetensors.index.json").write_text("[]")
    assert "is no index of weights" in refusal(model_path=path)
    (Path(path) / "config.json").write_text("{")
    assert "not valid JSON" in refusal(model_path=path)


def test_places_without_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no tokenizer" in refusal(tokenizer_path=str(tmp_path / "empty"))
    assert "There is no directory '/nowhere/tokenizer'" in refusal(tokenizer_path="/nowhere/tokenizer")
    (tmp_path / "file").touch()
    assert "is a file; give the directory that holds the tokenizer's" in refusal(
        tokenizer_path=str(tmp_path / "file")
    )

    def download(name: str, allow_patterns: list[str], **kwargs: Any) -> str:
        assert not any("safetensors" in pattern for pattern in allow_patterns)
        raise OSError("no such repository")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert "could not be fetched from the Hugging Face hub (no such" in refusal(tokenizer_path="nowhere/tokenizer")


def test_a_tokenizer_of_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ensure_embedded_model()
    (tmp_path / "other").symlink_to(model)
    args = ServerArgs(model_path=str(model), tokenizer_path="embedded")
    assert check_before_start(args) == tokenizer_dir(args, model) == model
    monkeypatch.setenv("HOME", str(tmp_path))
    args = ServerArgs(model_path=str(model), tokenizer_path="~/other")
    assert check_before_start(args) == model and tokenizer_dir(args, model) == tmp_path / "other"
    args = ServerArgs(model_path=str(model))
    assert tokenizer_dir(args, model) == model


def storage(backend: str, **extra: Any) -> dict[str, Any]:
    return {
        "enable_hierarchical_cache": True,
        "hicache_storage_backend": backend,
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }


def test_storage(tmp_path: Path) -> None:
    check_before_start(ServerArgs(model_path="embedded", **storage("file", path=str(tmp_path / "kv"))))
    (tmp_path / "kv" / "secret").write_bytes(b"short")
    assert "holds 5 bytes instead of 32: delete it" in refusal(**storage("file", path=str(tmp_path / "kv")))
    (tmp_path / "file").write_text("")
    for own in ({}, {"secret": "mine"}):
        sentence = refusal(**storage("file", path=f"{tmp_path}/file/kv", **own))
        assert "cannot use the folder" in sentence and "Not a directory" in sentence
    args = storage("file") | {"hicache_storage_backend_extra_config": f"@{tmp_path}/absent"}
    assert "cannot read" in refusal(**args)
    assert "block_tokens is 0" in refusal(**storage("file", path=str(tmp_path / "other"), block_tokens=0))
    assert "belongs to one of file and remote" in refusal(**storage("file,remote", path=str(tmp_path)))
    assert "an unknown scheme" in refusal(**storage("remote", url="http://there"))
    assert "receive_threads" in refusal(**storage("remote", proxy={"receive_threads": 0}))
    bluefield = storage("bluefield", proxy=str(tmp_path / "sock"), token_file=str(tmp_path / "absent"))
    assert "token_file cannot be read" in refusal(**bluefield)


TOKEN = {"proxy": "/proxy.sock", "token_file": "/dev/null"}
PLUGIN = {"backend_name": "mine", "class_name": "Mine"}


@pytest.mark.parametrize(
    ("backend", "extra", "sentence"),
    [
        ("file", {"pth": "/tmp/x"}, "-backend file has no option 'pth'; its options are path, limit_gb, segment_mb"),
        ("file", {"limit_gb": "lots"}, 'limit_gb is "lots", but it has to be a number above 0 and below 1e9'),
        ("file", {"limit_gb": float("inf")}, "is Infinity, but it has to be a number above 0 and below 1e9"),
        ("remote", {"foo": 1}, "remote has no option 'foo'; its options are url, limit_gb, proxy,"),
        ("remote", {"limit_gb": "lots"}, 'limit_gb is "lots", but it has to be 0, or a number'),
        ("remote", {"limit_gb": 1e-10}, "limit_gb is 1e-10, but it has to be 0, or a number from 0.01"),
        ("remote", {"hang_timeout_s": 0.3}, "hang_timeout_s is 0.3, but it has to be a number from 2"),
        ("remote", {"in_process": 1}, "in_process is 1, but it has to be true or false"),
        ("remote", {"synchronous": 1}, "synchronous is 1, but it has to be true or false"),
        ("remote", {"codec": 5}, "codec is 5, but it has to be the name of a codec or a JSON object"),
        ("bluefield", {**TOKEN, "foo": 1}, "bluefield has no option 'foo'"),
        ("remote", {"codec": "lossles"}, "remote: unknown codec 'lossles': use one of lossless, binned, raw"),
        ("remote", {"codec": {"codec": "binned", "bin": 9}}, "remote: codec binned has no option 'bin'"),
        ("bluefield", {**TOKEN, "codec": {"level": "x"}}, 'bluefield: codec lossless: level is "x", but it has'),
        (
            "bluefield",
            {"proxy": "/proxy.sock"},
            'bluefield needs {"proxy": "/path/to/proxy.sock", "token_file"',
        ),
        ("file,remote", {"file": {"pth": 1}}, "file has no option 'pth'"),
        ("file,remote", {"remote": {"foo": 1}}, "remote has no option 'foo'"),
        ("dynamic", {"class_name": "Mine"}, "lacks backend_name, module_path"),
        (
            "dynamic",
            {**PLUGIN, "module_path": "no.such"},
            "no.such cannot be imported (No module named 'no'); install it",
        ),
        (
            "dynamic",
            {**PLUGIN, "module_path": "json", "staging_mb": 0},
            "staging_mb is 0, but it has to be a number above 0",
        ),
        ("dynamic,remote", {"dynamic": {**PLUGIN, "module_path": ".x"}}, "cannot be imported (No module named '')"),
    ],
)
def test_settings_of_storage(
    backend: str, extra: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "kv"))
    assert sentence in refusal(**storage(backend, **extra))


def test_a_plugin_is_looked_for_where_the_scheduler_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plugin_in_the_working_directory.py").write_text("raise SystemExit")
    extra = {**PLUGIN, "module_path": "plugin_in_the_working_directory.part"}
    with pytest.raises(StartupError, match="No module named 'plugin_in_the_working_directory'"):
        check_before_start(ServerArgs(model_path="embedded", **storage("dynamic", **extra)))
    monkeypatch.chdir(tmp_path)
    check_before_start(ServerArgs(model_path="embedded", **storage("dynamic", **extra)))


def test_a_limit_above_what_the_disk_has_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_before_start(ServerArgs(model_path="embedded", **storage("file", path=str(tmp_path), limit_gb=1e-6)))
    assert not caplog.records
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "00000001.kv").write_bytes(bytes(1 << 20))
    check_before_start(ServerArgs(model_path="embedded", **storage("file", path=str(tmp_path), limit_gb=123456)))
    (record,) = caplog.records
    assert re.fullmatch(
        rf"limit_gb is 123456, but the file system of {tmp_path} has \d+\.\d\d GB left "
        r"beside 1\.05 MB of stored KV: .*",
        record.getMessage(),
    )


def behind_a_free_port() -> socket.socket:
    """A socket that listens. Nothing uses the port before its own."""
    while True:
        taken = socket.create_server(("127.0.0.1", 0))
        with socket.socket() as before:
            try:
                before.bind(("127.0.0.1", taken.getsockname()[1] - 1))
            except OSError:
                taken.close()
                continue
            return taken


def test_peers(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with behind_a_free_port() as taken, socket.socket(socket.AF_UNIX) as other:
        other.bind(f"{tmp_path}/peers")
        other.listen()
        port = taken.getsockname()[1]
        # Rank 1 of a server listens beside rank 0.
        tcp = {"peer_role": "worker", "peer_endpoint": f"tcp://127.0.0.1:{port - 1}", "tp_size": 2}
        assert f"127.0.0.1:{port}: a lender cannot listen there (Address already in use)" in refusal(**tcp)
        ipc = {"peer_role": "worker", "peer_endpoint": f"ipc://{tmp_path}/peers"}
        assert "another worker listens there; give each its own" in refusal(**ipc)
        ipc["peer_role"] = "master"
        check_before_start(ServerArgs(model_path="embedded", enable_hierarchical_cache=True, **ipc))


def test_files_of_its_own(tmp_path: Path) -> None:
    streams = {"enable_hierarchical_cache": True, "layer_stream": 2, "layer_stream_disk_size": 1e9}
    assert "there is not so much space" in refusal(**streams, layer_stream_disk_path=str(tmp_path))
    assert "no file can be made there" in refusal(**streams, layer_stream_disk_path=f"{tmp_path}/absent")
    assert "is a folder: name a file" in refusal(record_steps=str(tmp_path))
    assert "no file can be made in" in refusal(record_steps=f"{tmp_path}/absent/steps")


@pytest.mark.parametrize(
    ("flags", "pages"),
    [
        ({"max_total_tokens": 4097}, 4098),
        ({"max_total_tokens": 4097, "page_size": 16}, 258),
        ({"max_total_tokens": 201, "chunked_prefill_size": 100}, 202),
        ({"max_total_tokens": 2001, "chunked_prefill_size": -1, "context_length": 1000}, 2002),
        ({"max_total_tokens": 201, "max_prefill_tokens": 100}, 202),
    ],
)
def test_layer_streaming_without_room_for_two_chunks(flags: dict[str, int], pages: int) -> None:
    streams = {"enable_hierarchical_cache": True, "layer_stream": 2} | flags
    assert f"needs room for two chunks of a prompt on the device, {pages} pages" in refusal(**streams)
    streams["max_total_tokens"] = pages * flags.get("page_size", 1)
    check_before_start(ServerArgs(model_path="embedded", **streams))


def test_nothing_of_it_needs_torch(tmp_path: Path) -> None:
    code = """
import sys
from sglang.srt.entrypoints.startup_checks import check_before_start, tokenizer_dir
from sglang.srt.server_args import ServerArgs
flags = ["--hicache", "--layer-stream", "2", "--max-total-tokens", "5000"]
flags += ["--hicache-storage-backend", "file,remote", "--hicache-storage-backend-extra-config"]
check_before_start(ServerArgs.from_cli(["--model-path", "embedded", *flags, sys.argv[1]]))
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    extra = json.dumps({"file": {"path": str(tmp_path / "kv")}, "remote": {"url": "redis://127.0.0.1:1"}})
    subprocess.run([sys.executable, "-c", code, extra], check=True, timeout=120)


def test_a_folder_in_which_root_cannot_write_either() -> None:
    assert "cannot use the folder /proc/kv" in refusal(**storage("file", path="/proc/kv"))
