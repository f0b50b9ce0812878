"""The embedded model: the same everywhere, whoever writes it first, and good enough to test with."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from sglang.srt.configs.embedded_model import IM_END, VOCAB_SIZE, ensure_embedded_model
from sglang.srt.configs.model_config import ModelConfig, ModelConfigError


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return ensure_embedded_model(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tokenizer(path):
    return AutoTokenizer.from_pretrained(path)


def hashes(path):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}


def start(cache, **env):
    code = "import sys\nfrom sglang.srt.configs.embedded_model import *\nprint(ensure_embedded_model(sys.argv[1]))"
    return subprocess.Popen(
        [sys.executable, "-c", code, str(cache)], env=os.environ | env, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_processes_that_race_agree_to_the_byte(path, tmp_path):
    writers = [start(tmp_path, PYTHONHASHSEED=str(i), RAYON_NUM_THREADS=str(1 + i % 2)) for i in range(3)]
    places = {writer.communicate(timeout=120)[0].strip() for writer in writers}
    assert all(writer.returncode == 0 for writer in writers)
    (place,) = places
    assert hashes(Path(place)) == hashes(path)
    assert [p.name for p in Path(place).parent.iterdir()] == [path.name], "a writer left something behind"


def test_a_damaged_copy_is_replaced_and_a_whole_one_kept(path, tmp_path):
    mine = ensure_embedded_model(tmp_path)
    before = (mine / "model.safetensors").stat().st_mtime_ns
    assert ensure_embedded_model(tmp_path) == mine
    assert (mine / "model.safetensors").stat().st_mtime_ns == before
    (mine / "tokenizer.json").unlink()
    assert ensure_embedded_model(tmp_path) == mine
    assert hashes(mine) == hashes(path)


def test_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = ModelConfig.from_pretrained("embedded")
    assert config.local_path.parent == tmp_path / "sglang-embedded"
    assert config.model_path == "embedded" and config.dtype == torch.float32 and config.context_length == 32768
    tokenizer = AutoTokenizer.from_pretrained(config.local_path)
    assert config.eos_token_ids[0] == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids(IM_END)
    assert len(tokenizer) == config.vocab_size == VOCAB_SIZE


def test_a_cache_that_cannot_be_written_is_replaced_by_a_temporary_folder(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = tmp_path / f"sglang-{os.getuid()}"
    path = ensure_embedded_model()
    assert path.is_relative_to(own) and own.stat().st_mode & 0o777 == 0o700
    assert ensure_embedded_model() == path
    own.chmod(0o777)  # others may have put a model there
    with pytest.raises(ModelConfigError, match="set XDG_CACHE_HOME"):
        ModelConfig.from_pretrained("embedded")


def test_tokenizer(tokenizer):
    for text in ("Hello world", "def main():\n    return 1", "Grüße, 世界! \n\n\t  ¿qué? 🦜 \x00", ""):
        ids = tokenizer.encode(text)
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids[1:]) == text
    assert len(tokenizer.encode("The ancient harbor will remember the merchant quietly.")) < 16
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]},
    ]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|begin_of_text|><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(rendered, add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids[:2]) == ["<|begin_of_text|>", "<|im_start|>"]
    # A second turn extends the first: prefix caches depend on it.
    longer = [*chat, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Bye"}]
    assert tokenizer.apply_chat_template(longer, tokenize=False, add_generation_prompt=True).startswith(rendered)
