"""`create_store`: from what --hicache-storage-backend and its extra config say to an open `BlockStore`.

Owns the list of backends, and the sentences for what cannot be opened.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Mapping
from importlib.machinery import PathFinder
from typing import Any

from sglang.srt.mem_cache.block_store import BlockStore, StoreError
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig

logger = logging.getLogger(__name__)

BACKENDS = ("file", "dynamic")

_REQUIRED = ("backend_name", "module_path", "class_name")
_DYNAMIC = "--hicache-storage-backend dynamic"
_METHODS = ("register_mem_pool_host", "batch_exists", "clear")


def create_store(
    name: str,
    config: Mapping[str, Any],
    namespace: str,
    pool: Any,
    block_tokens: int,
    model_name: str,
    tp_rank: int,
    tp_size: int,
) -> BlockStore:
    """Open a backend for one rank.

    name: one of `BACKENDS`. config: --hicache-storage-backend-extra-config. namespace: config and weights
    fingerprint, dtype, layout version, rank. pool: the `MHATokenToKVPoolHost` whose pages are stored. Raises
    `StoreError`.
    """
    if name == "file":
        from sglang.srt.mem_cache.storage.file.file_store import HiCacheFile

        return HiCacheFile.from_config(dict(config), namespace, pool, block_tokens, num_ranks=tp_size)
    if name == "dynamic":
        return _create_dynamic(dict(config), namespace, pool, block_tokens, model_name, tp_rank, tp_size)
    raise StoreError(
        f"--hicache-storage-backend {name} is not built in (there are: {', '.join(BACKENDS)}); a plugin for it is"
        " loaded by --hicache-storage-backend dynamic with backend_name, module_path and class_name in"
        " --hicache-storage-backend-extra-config"
    )


def check_dynamic_config(config: Mapping[str, Any]) -> None:
    """What can be refused of a plugin without running its code. Raises StoreError."""
    missing = [key for key in _REQUIRED if not isinstance(config.get(key), str) or not config[key]]
    if missing:
        raise StoreError(
            f"{_DYNAMIC}: --hicache-storage-backend-extra-config lacks {', '.join(missing)}; it has to be like"
            ' {"backend_name": "mine", "module_path": "my_package.my_module", "class_name": "MyStorage"}'
        )
    staging_mb = config.get("staging_mb", 1)
    if not isinstance(staging_mb, (int, float)) or isinstance(staging_mb, bool) or not 0 < staging_mb < math.inf:
        raise StoreError(f"{_DYNAMIC}: staging_mb has to be a positive number of megabytes, not {staging_mb!r}")
    package = config["module_path"].partition(".")[0]
    if package not in sys.modules and not _can_be_found(package):
        raise StoreError(
            f"{_DYNAMIC}: module {config['module_path']} cannot be imported (No module named {package!r}); install "
            "it and what it needs, or put its folder on PYTHONPATH"
        )


def _can_be_found(package: str) -> bool:
    try:
        # The scheduler process is started with -m, so it looks into the working directory too.
        return bool(importlib.util.find_spec(package) or PathFinder.find_spec(package, [os.getcwd()]))
    except (ValueError, ImportError):
        return False


def _create_dynamic(
    config: dict[str, Any],
    namespace: str,
    pool: Any,
    block_tokens: int,
    model_name: str,
    tp_rank: int,
    tp_size: int,
) -> BlockStore:
    from sglang.srt.mem_cache.storage.dynamic.dynamic_store import DEFAULT_STAGING_BYTES, PluginStore

    where = _DYNAMIC
    check_dynamic_config(config)
    staging_mb = config.get("staging_mb", DEFAULT_STAGING_BYTES / 1e6)
    interface_v1 = bool(config.get("interface_v1", 0))
    plugin_class = _plugin_class(where, config["module_path"], config["class_name"], interface_v1)

    storage_config = HiCacheStorageConfig(
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name=model_name,
        extra_config=config,
    )
    handlers = _signal_handlers()
    try:
        plugin = plugin_class(storage_config, {})
        store = PluginStore(
            plugin,
            config["backend_name"],
            namespace,
            pool,
            block_tokens,
            tp_rank=tp_rank,
            tp_size=tp_size,
            interface_v1=interface_v1,
            staging_bytes=int(staging_mb * 1e6),
        )
    except (Exception, SystemExit) as error:
        raise StoreError(
            f"{where}: {plugin_class.__name__} does not start ({type(error).__name__}: {error}); it is made as"
            f" {plugin_class.__name__}(storage_config, {{}}) and then gets register_mem_pool_host(pool):"
            " correct what it says, or its settings in --hicache-storage-backend-extra-config"
        ) from error
    finally:
        _restore_signal_handlers(handlers, config["backend_name"])
    logger.info(
        "storage plugin %s: %s.%s, blocks of %d tokens, %d bytes each, interface %s",
        config["backend_name"],
        config["module_path"],
        config["class_name"],
        block_tokens,
        store.staging.page_bytes,
        "v1" if interface_v1 else "generic",
    )
    return store


def _plugin_class(where: str, module_path: str, class_name: str, interface_v1: bool) -> type:
    try:
        module = importlib.import_module(module_path)
    except (Exception, SystemExit) as error:  # it runs the plugin's code
        if isinstance(error, ImportError) and (error.name or "").startswith("sglang."):
            hint = "it needs a part of upstream SGLang that this engine does not have"
        elif isinstance(error, ModuleNotFoundError):
            hint = "install it and what it needs, or put its folder on PYTHONPATH"
        else:
            hint = "correct what it says"
        raise StoreError(
            f"{where}: module {module_path} cannot be imported ({type(error).__name__}: {error}); {hint}"
        ) from error
    plugin_class = getattr(module, class_name, None)
    if not isinstance(plugin_class, type):
        raise StoreError(f"{where}: module {module_path} has no class {class_name}; correct class_name")
    data = ("batch_get_v1", "batch_set_v1") if interface_v1 else ("batch_get", "batch_set")
    # A class with the methods will do: the plugin may derive from another installation's HiCacheStorage.
    lacking = [method for method in (*_METHODS, *data) if not callable(getattr(plugin_class, method, None))]
    if lacking:
        raise StoreError(
            f"{where}: {module_path}.{class_name} is no storage plugin, it lacks {', '.join(lacking)}; derive it from"
            " sglang.srt.mem_cache.hicache_storage.HiCacheStorage"
        )
    if interface_v1 and any(getattr(plugin_class, m) is getattr(HiCacheStorage, m) for m in data):
        raise StoreError(
            f"{where}: interface_v1 is set, but {module_path}.{class_name} does not define batch_get_v1 and"
            " batch_set_v1; leave interface_v1 out"
        )
    return plugin_class


def _signal_handlers() -> dict[signal.Signals, Any]:
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)}


def _restore_signal_handlers(handlers: dict[signal.Signals, Any], plugin_name: str) -> None:
    """Some plugins take over the signals by which an engine is stopped; `close` is what they wait for."""
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler and handler is not None:
            signal.signal(number, handler)
            logger.warning("storage plugin %s took over %s; given back", plugin_name, number.name)
