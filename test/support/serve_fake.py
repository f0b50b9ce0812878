"""`python serve_fake.py '<json list of the fake scheduler's flags>' <drain timeout> <server flags>`: a whole server
with the fake scheduler in the model's place."""

from __future__ import annotations

import json
import sys
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

from tokenizers import Tokenizer

from sglang.srt.entrypoints import engine
from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.chat_template import DEFAULT, own_templates
from sglang.srt.utils.child_process import exit_now
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

FAKE = (sys.executable, str(Path(__file__).with_name("fake_scheduler.py")))


class LateTokenizer:
    """The model's tokenizer. Transformers, whose import takes half the processor time of a fake server's start, is
    imported for the first chat."""

    def __init__(self, path: str, named: str | None = None) -> None:
        self._path = path
        self.chat_template = own_templates(Path(path))[DEFAULT]
        self.backend_tokenizer = Tokenizer.from_file(f"{path}/tokenizer.json")
        self.added_tokens_decoder = self.backend_tokenizer.get_added_tokens_decoder()
        self.all_special_ids = [token for token, entry in self.added_tokens_decoder.items() if entry.special]

    @cached_property
    def _whole(self) -> Any:
        whole = get_tokenizer(self._path)
        whole.chat_template = self.chat_template
        return whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()


if __name__ == "__main__":
    flags, timeout, *argv = sys.argv[1:]
    with mock.patch.object(engine, "get_tokenizer", LateTokenizer):
        exit_now(launch_server(ServerArgs.from_cli(argv), (*FAKE, *json.loads(flags)), float(timeout)))
