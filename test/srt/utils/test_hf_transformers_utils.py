"""Tokenizers: the ones that AutoTokenizer would make, without what importing it costs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from sglang.srt.configs.embedded_model import ensure_embedded_model
from sglang.srt.utils.child_process import StartupError
from sglang.srt.utils.hf_transformers_utils import _TOKENIZER_CLASSES, get_tokenizer

TEXT = "<|im_start|>user\nThe old man went to the sea 12 times; naïve 你好.<|im_end|>"


def write(path, tokenizer_class, model_type):
    model = ensure_embedded_model()
    shutil.copy(model / "tokenizer.json", path)
    config = json.loads((model / "tokenizer_config.json").read_text()) | {"tokenizer_class": tokenizer_class}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    config = json.loads((model / "config.json").read_text()) | {"model_type": model_type}
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("tokenizer_class", "model_type"),
    [
        *((name + suffix, kind) for name, kind in _TOKENIZER_CLASSES for suffix in ("", "Fast")),
        ("PreTrainedTokenizerFast", "llama"),
        ("TokenizersBackend", "qwen3"),
        ("LlamaTokenizer", "llama"),
        ("LlamaTokenizerFast", "llama"),
    ],
)
def test_the_tokenizer_is_the_one_of_auto_tokenizer(tmp_path, tokenizer_class, model_type):
    write(tmp_path, tokenizer_class, model_type)
    ours, theirs = get_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    assert type(ours) is type(theirs)
    assert ours.encode(TEXT) == theirs.encode(TEXT)
    assert ours.decode(ours.encode(TEXT)) == theirs.decode(theirs.encode(TEXT))
    message = [{"role": "user", "content": "a"}]
    assert ours.apply_chat_template(message, tokenize=False) == theirs.apply_chat_template(message, tokenize=False)


def test_the_parent_process_imports_no_torch(tmp_path):
    """All that entrypoints/engine.py does before and while its children start."""
    write(tmp_path, "Qwen2Tokenizer", "qwen3")
    code = f"""
import sys
import sglang.srt.entrypoints.engine, sglang.srt.entrypoints.http_server
from sglang.srt.configs.model_files import resolve_model_path
from sglang.srt.utils.hf_transformers_utils import *
path = resolve_model_path({str(tmp_path)!r})
get_context_and_vocab(path), get_tokenizer(path), get_tokenizer(resolve_model_path("embedded"))
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_broken_tokenizer_is_refused_with_a_sentence(tmp_path):
    for change in (lambda: None, lambda: (tmp_path / "tokenizer.json").write_text("{")):
        change()
        with pytest.raises(StartupError, match="holds no usable tokenizer"):
            get_tokenizer(str(tmp_path))
        write(tmp_path, "Qwen2TokenizerFast", "qwen2")
