"""What can be refused before any process starts: no torch is needed for it, and it takes milliseconds.

Each check uses the code that would find the same later, so that the sentences are the same. Owns nothing. It makes
what the server makes anyway: the embedded model's files, the folder of storage and its secret.
"""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

from sglang.srt.configs.model_files import (
    check_config,
    check_tokenizer_files,
    check_weight_files,
    read_config_json,
    resolve_model_path,
    resolve_tokenizer_path,
)
from sglang.srt.managers.startup.page_checks import check_page_size
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.byte_sizes import shown_size
from sglang.srt.utils.chat_template import check_chat_template
from sglang.srt.utils.child_process import StartupError
from sglang.srt.utils.peer_endpoint import PeerError, check_endpoint, check_unused, of_rank


def check_before_start(args: ServerArgs) -> Path:
    """Returns the directory of the model. Raises StartupError, or another typed error of one sentence."""
    model_dir = resolve_model_path(args.model_path)
    raw = read_config_json(model_dir)
    impl = check_config(args.model_path, raw, args.dtype, args.context_length, args.tp_size, args.model_impl)
    if args.load_format != "dummy":
        check_weight_files(model_dir, args.load_format, impl)
    check_tokenizer_files(tokenizer_dir(args, model_dir))
    if args.chat_template is not None:
        check_chat_template(args.chat_template, tokenizer_dir(args, model_dir))
    check_page_size(args, args.page_size or 1, raw.get("max_position_embeddings"))
    try:
        _check_peers(args)
    except PeerError as error:
        raise StartupError(str(error)) from error
    if args.layer_stream_disk_path is not None:
        _check_swap_folder(args.layer_stream_disk_path, args.layer_stream_disk_size * 1e9)
    if args.record_steps is not None:
        file = Path(args.record_steps).absolute()
        folder = file.parent
        if file.is_dir():
            raise StartupError(f"--record-steps {args.record_steps} is a folder: name a file")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise StartupError(f"--record-steps {args.record_steps}: no file can be made in {folder}; name another")
    if args.crash_dump_folder is not None:
        try:
            os.makedirs(args.crash_dump_folder, mode=0o700, exist_ok=True)
        except OSError as error:
            raise StartupError(f"--crash-dump-folder {args.crash_dump_folder}: {error.strerror}") from None
        if not os.access(args.crash_dump_folder, os.W_OK | os.X_OK):
            raise StartupError(f"--crash-dump-folder {args.crash_dump_folder} cannot be written: name another")
    return model_dir


def tokenizer_dir(args: ServerArgs, model_dir: Path) -> Path:
    """Raises StartupError, as `check_before_start`."""
    return resolve_tokenizer_path(args.tokenizer_path) if args.tokenizer_path else model_dir


def _check_peers(args: ServerArgs) -> None:
    for endpoint in (args.peer_endpoint or "").split(",") if args.peer_role else ():
        for rank in range(args.tp_size):
            of_this = of_rank(endpoint, rank)
            check_endpoint(of_this)
            if args.peer_role == "worker":
                check_unused(of_this)
                _check_port(of_this)


def _check_port(endpoint: str) -> None:
    scheme, _, rest = endpoint.partition("://")
    if scheme != "tcp":
        return
    host, _, port = rest.rpartition(":")
    with socket.socket() as sock:
        # As ZeroMQ does: a restart may follow at once.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, int(port)))
        except OSError as error:
            raise StartupError(
                f"--peer-endpoint {endpoint}: a lender cannot listen there ({error.strerror}); choose another port"
            ) from error


def _check_swap_folder(folder: str, size_bytes: float) -> None:
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        why = "no file can be made there"
    elif shutil.disk_usage(folder).free < size_bytes:
        why = "there is not so much space"
    else:
        return
    raise StartupError(
        f"a file of {shown_size(size_bytes)} in {folder} cannot be had ({why}): free space, lower "
        "--layer-stream-disk-size or name another folder with --layer-stream-disk-path"
    )
