"""What must go with the size of a page: the parent checks --page-size, or 1, before any process starts; each rank
checks what its device has by default. Needs no torch. Owns nothing; with the backend "file" it makes the folder and
reads its secret, as the server does anyway.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from sglang.srt.mem_cache.block_store import StoreError
from sglang.srt.mem_cache.storage.registry import storage_backend
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.child_process import StartupError

# Of a host pool whose size is not known yet: nothing is refused for it.
_ANY_NUMBER = 1 << 60


def check_page_size(args: ServerArgs, page_size: int, own_context: int | None) -> None:
    """page_size: in tokens. own_context: the model's, None if it is not known. Raises StartupError."""
    if args.max_total_tokens is not None and args.max_total_tokens < 2 * page_size:
        raise StartupError(
            f"--max-total-tokens {args.max_total_tokens} are less than two pages, which have {page_size} tokens: "
            "raise it, or give a smaller --page-size"
        )
    if args.hicache_storage_backend is not None:
        _check_storage(args, args.hicache_storage_backend, page_size)
    if args.layer_stream and args.max_total_tokens is not None:
        _check_layer_stream(args, args.max_total_tokens, page_size, own_context)


def _check_storage(args: ServerArgs, backend: str, page_size: int) -> None:
    from sglang.srt.managers.startup.storage import StorageOpener, split_config  # with what the scheduler needs
    from sglang.srt.mem_cache.page_layout import PageLayout

    layout = PageLayout.kv(page_size, 1, 1, 1, "uint8")
    pool: Any = SimpleNamespace(
        page_layout=layout, page_size=page_size, page_bytes=layout.page_bytes, num_pages=_ANY_NUMBER
    )
    try:
        setup = StorageOpener(str, args.model_name, pool, 0, args.tp_size).setup(
            backend,
            args.hicache_storage_backend_extra_config,
            args.hicache_storage_prefetch_policy,
            args.hicache_write_policy,
        )
        config = json.loads(setup.setup)["config"]
        for name, own in split_config(backend, config).items():
            storage_backend(name).check(own)
    except StoreError as error:
        raise StartupError(str(error)) from error


def _check_layer_stream(args: ServerArgs, num_tokens: int, page_size: int, own_context: int | None) -> None:
    """Before the buffers take their part of the device, which depends on the memory that is free."""
    from sglang.srt.managers.layer_streaming import check_room_for_chunks
    from sglang.srt.managers.schedule_policy import pages_for

    chunk = args.chunked_prefill_size
    if chunk == -1:
        # Prompts are computed whole. Transformers knows the context that config.json leaves out.
        chunk = args.context_length or own_context or 1
    chunk = min(max(chunk, page_size), max(args.max_prefill_tokens, page_size))
    try:
        check_room_for_chunks(pages_for(chunk, page_size), num_tokens // page_size)
    except ValueError as error:
        raise StartupError(str(error)) from error
