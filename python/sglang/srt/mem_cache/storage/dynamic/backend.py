"""The storage backend "dynamic": from the name of a class to a storage plugin behind `PluginStore`.

Owns the sentences for what cannot be loaded. The checks run none of the plugin's code.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from importlib.machinery import PathFinder
from typing import Any

from sglang.srt.mem_cache.block_store import BlockStore, StoreError
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
from sglang.srt.mem_cache.storage.registry import CONFIG_FLAG, StorageBackend, StoreParams
from sglang.srt.utils.registry import POSITIVE_NUMBER, STRING, Kind, Option

logger = logging.getLogger(__name__)

_REQUIRED = ("backend_name", "module_path", "class_name")
# What every plugin has, beside its data methods.
_METHODS = ("register_mem_pool_host", "batch_exists", "clear")


class DynamicBackend(StorageBackend):
    options = (
        Option("backend_name", STRING, "", "what the log calls the plugin", "required"),
        Option("module_path", STRING, "", "the module of the plugin's class, as Python imports it", "required"),
        Option("class_name", STRING, "", "the plugin's class", "required"),
        Option(
            "interface_v1",
            Kind("0 or 1", lambda value: value in (0, 1, "0", "1")),  # and false or true
            0,
            "1: the plugin has batch_get_v1 and batch_set_v1, which work on the host memory of this engine",
        ),
        Option(
            "staging_mb",
            POSITIVE_NUMBER,
            256.0,
            "memory in MB (1e6 bytes) between the host pool and the plugin, for reads and writes together",
        ),
    )
    takes_any_key = True

    def check(self, config: Mapping[str, Any]) -> None:
        missing = [key for key in _REQUIRED if not isinstance(config.get(key), str) or not config[key]]
        if missing:
            raise StoreError(
                f"{self.flag}: {CONFIG_FLAG} lacks {', '.join(missing)}; it has to be like"
                ' {"backend_name": "mine", "module_path": "my_package.my_module", "class_name": "MyStorage"}'
            )
        self.values(config)
        package = config["module_path"].partition(".")[0]
        if package not in sys.modules and not _can_be_found(package):
            raise StoreError(
                f"{self.flag}: module {config['module_path']} cannot be imported (No module named {package!r}); "
                "install it and what it needs, or put its folder on PYTHONPATH"
            )

    def open(self, params: StoreParams) -> BlockStore:
        # It imports torch, which `check` must not.
        from sglang.srt.mem_cache.storage.dynamic.dynamic_store import PluginStore

        self.check(params.config)
        values = self.values(params.config)
        plugin_name, interface_v1 = values["backend_name"], bool(int(values["interface_v1"]))
        plugin_class = self._plugin_class(values["module_path"], values["class_name"], interface_v1)
        handlers = _signal_handlers()
        try:
            plugin = plugin_class(_plugin_config(params), {})
            store = PluginStore(plugin, params, plugin_name, interface_v1, int(values["staging_mb"] * 1e6))
        except BaseException as error:  # as asyncio.CancelledError, which a plugin with a loop of its own may let out
            raise StoreError(
                f"{self.flag}: {plugin_class.__name__} does not start ({type(error).__name__}: {error}); it is made "
                f"as {plugin_class.__name__}(storage_config, {{}}) and then gets register_mem_pool_host(pool):"
                f" correct the cause, or the plugin's settings in {CONFIG_FLAG}"
            ) from error
        finally:
            _restore_signal_handlers(handlers, plugin_name)
        logger.info(
            "storage plugin %s: %s.%s, blocks of %d tokens, %d bytes each, interface %s",
            plugin_name,
            values["module_path"],
            values["class_name"],
            params.block_tokens,
            store.staging.page_bytes,
            "v1" if interface_v1 else "generic",
        )
        return store

    def _plugin_class(self, module_path: str, class_name: str, interface_v1: bool) -> type:
        try:
            module = importlib.import_module(module_path)
        except BaseException as error:  # it runs the plugin's code
            if isinstance(error, ImportError) and (error.name or "").startswith("sglang."):
                hint = "it needs a part of upstream SGLang that this engine does not have"
            elif isinstance(error, ModuleNotFoundError):
                hint = "install it and what it needs, or put its folder on PYTHONPATH"
            else:
                hint = "correct the cause"
            raise StoreError(
                f"{self.flag}: module {module_path} cannot be imported ({type(error).__name__}: {error}); {hint}"
            ) from error
        plugin_class = getattr(module, class_name, None)
        if not isinstance(plugin_class, type):
            raise StoreError(f"{self.flag}: module {module_path} has no class {class_name}; correct class_name")
        data = ("batch_get_v1", "batch_set_v1") if interface_v1 else ("batch_get", "batch_set")
        # A class with the methods will do: the plugin may derive from another installation's HiCacheStorage.
        lacking = [method for method in (*_METHODS, *data) if not callable(getattr(plugin_class, method, None))]
        if lacking:
            raise StoreError(
                f"{self.flag}: {module_path}.{class_name} is no storage plugin, it lacks {', '.join(lacking)}; "
                "derive it from sglang.srt.mem_cache.hicache_storage.HiCacheStorage"
            )
        if interface_v1 and any(getattr(plugin_class, m) is getattr(HiCacheStorage, m) for m in data):
            raise StoreError(
                f"{self.flag}: interface_v1 is set, but {module_path}.{class_name} does not define batch_get_v1 and"
                " batch_set_v1; leave interface_v1 out"
            )
        return plugin_class


def _plugin_config(params: StoreParams) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(
        tp_rank=params.tp_rank,
        tp_size=params.tp_size,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name=params.model_name,
        extra_config=dict(params.config),
    )


def _can_be_found(package: str) -> bool:
    try:
        # The scheduler process is started with -m, so it looks into the working directory too.
        return bool(importlib.util.find_spec(package) or PathFinder.find_spec(package, [os.getcwd()]))
    except (ValueError, ImportError):
        return False


def _signal_handlers() -> dict[signal.Signals, Any]:
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)}


def _restore_signal_handlers(handlers: dict[signal.Signals, Any], plugin_name: str) -> None:
    """Some plugins take over the signals by which an engine is stopped, and wait for them before they close."""
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler and handler is not None:
            signal.signal(number, handler)
            logger.warning("storage plugin %s took over %s; given back", plugin_name, number.name)
