"""`PluginStore`: a storage plugin written for SGLang, as a `BlockStore`.

Owns the plugin's instance, the staging memory that it works on, and what is known about blocks that it returned
wrong. Believes nothing that it answers: a block counts if its record verifies.

A *record* is what the plugin keeps under one key: the block's pages as `MHATokenToKVPoolHost.copy_out` gives them,
padding, and a trailer with the key, the namespace and a checksum.

    | page 0 | page 1 | ... | padding | trailer |
    '------- K run -------''------- V run ------'      as the plugin sees it

A plugin cannot delete, and many skip a key that exists. So a bad block gets *another name* for the rest of this
process: the next `set` really writes it. After a restart the first name is tried again, fails to verify again, and
the second one is found. A block that fails again and again rests between its failures: see `block_troubles.py`.

A plugin that hangs cannot be interrupted from here: the caller bounds how long it waits, and the thread is lost.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
import threading
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from sglang.srt.mem_cache.block_store import ExistsFailed
from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE, HiCacheStorageExtraInfo
from sglang.srt.mem_cache.page_memory import torch_dtype
from sglang.srt.mem_cache.pool_host import HostKVCache, bytes_of
from sglang.srt.mem_cache.storage.dynamic.block_troubles import BlockTroubles
from sglang.srt.mem_cache.storage.host_pages import HostPages
from sglang.srt.mem_cache.storage.registry import StoreParams

logger = logging.getLogger(__name__)

RECORD_VERSION = 1
# magic, digest of the namespace, key, bytes of the payload, CRC-32 of the payload, CRC-32 of the fields before.
_HEADER = struct.Struct("<8s16s16sQ")
_TRAILER_BYTES = 64
_MAGIC = b"hicache1"

# Blocks whose other names are remembered.
MAX_REWRITTEN = 65536
LOG_INTERVAL_S = 60.0

# Stands for the answer of a call that raised.
_RAISED = object()


class PluginStore:
    """plugin: an instance of a `HiCacheStorage`, or of a class with the same methods; it is registered here.

    params: its pool is a `HostPages`. Blocks stored under another namespace are never found; what the bytes depend
    on besides (rank, block and page size, dtype) is added here. plugin_name: what the log calls the plugin.
    interface_v1: call `batch_get_v1` and `batch_set_v1`, which work on the staging memory, and not `batch_get` and
    `batch_set`. staging_bytes: about how much of it, for reads and for writes together; at least two blocks.
    """

    name = "dynamic"

    def __init__(
        self,
        plugin: Any,
        params: StoreParams,
        plugin_name: str,
        interface_v1: bool,
        staging_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        pool: HostPages = params.pool
        namespace, block_tokens = params.namespace, params.block_tokens
        tp_rank, tp_size = params.tp_rank, params.tp_size
        assert block_tokens % pool.page_size == 0
        self.block_tokens = block_tokens
        self._plugin = plugin
        self._plugin_name = plugin_name
        self._pool = pool
        self._interface_v1 = interface_v1
        self._clock = clock
        self._frames_per_block = block_tokens // pool.page_size
        self._payload_bytes = self._frames_per_block * pool.page_bytes
        identity = [RECORD_VERSION, namespace, tp_rank, tp_size, block_tokens, pool.page_size, self._payload_bytes]
        self._namespace = json.dumps([*identity, pool.page_layout.contents]).encode()
        self._digest = hashlib.blake2b(self._namespace, digest_size=16).digest()

        record_bytes = self._payload_bytes + _TRAILER_BYTES
        self._batch_blocks = min(max(staging_bytes // (2 * record_bytes), 1), STORAGE_BATCH_SIZE)
        # The first half of its pages is for reads, the other for writes: both may run at the same time.
        self.staging = HostKVCache(
            2 * self._batch_blocks, block_tokens, record_bytes, torch_dtype(pool.page_layout.dtype)
        )
        # Records are checked in here, where a plugin that is late cannot change them any more.
        self._read_scratch = np.zeros(self.staging.page_bytes, np.uint8)
        self._write_scratch = np.zeros(self.staging.page_bytes, np.uint8)

        self._lock = threading.Lock()  # for what follows: calls come from several threads
        self._counters: Counter[str] = Counter()
        self._rewrites: OrderedDict[bytes, int] = OrderedDict()  # how often blocks were renamed
        self._troubles = BlockTroubles(clock)
        self._generation = 0  # another one after a `clear` that cleared nothing
        self._known: bytes | None = None  # a key that the plugin held when it was last asked
        self._log_at: dict[str, float] = {}
        self._unlogged: Counter[str] = Counter()

        plugin.register_mem_pool_host(self.staging)
        # A class that does not derive from ours may be older than this method.
        if callable(registered := getattr(plugin, "on_host_pools_registered", None)):
            registered()

    # BlockStore

    def exists(self, keys: Sequence[bytes]) -> int:
        return _in_batches(STORAGE_BATCH_SIZE, len(keys), lambda part: self._ask_existing(self._readable(keys[part])))

    def get(self, keys: Sequence[bytes], frames: np.ndarray) -> int:
        rows = frames.reshape(len(keys), self._frames_per_block)
        return _in_batches(self._batch_blocks, len(keys), lambda part: self._get_batch(keys[part], rows[part]))

    def set(self, keys: Sequence[bytes], frames: np.ndarray, tenant: bytes = b"") -> int:
        rows = frames.reshape(len(keys), self._frames_per_block)
        return _in_batches(self._batch_blocks, len(keys), lambda part: self._set_batch(keys[part], rows[part]))

    def clear(self) -> bool:
        """Forget every block. The plugin's `clear` knows no namespaces and may drop those of other engines too. Where
        it does nothing, which upstream allows, all blocks get other names until a restart."""
        known = self._known
        answer = self._call("write", self._plugin.clear)
        cleared = answer is not _RAISED and answer is not False  # some say that they failed; None is usual
        with self._lock:
            self._rewrites.clear()
            self._troubles.clear()
            self._counters["stored"] = 0
        if cleared and (known is None or not self._count_existing([known])):
            return True
        with self._lock:
            self._generation += 1
            self._known = None
        logger.warning(
            "storage plugin %s has not cleared: its blocks are not used until a restart", self._plugin_name
        )
        return False

    def close(self) -> None:
        close = getattr(self._plugin, "close", None)
        if close is not None:
            self._call("write", close)

    def stats(self) -> dict[str, int]:
        """`blocks` and `size_bytes` count what `set` of this process reported, a block that was there already
        included: a plugin does not say what it holds, and evicts when it likes.
        rewritten_blocks: those that have another name now."""
        with self._lock:
            counters, rewritten = self._counters.copy(), len(self._rewrites)
        return {
            "blocks": counters["stored"],
            "size_bytes": counters["stored"] * self.staging.page_bytes,
            "limit_bytes": 0,
            "read_errors": counters["read"],
            "write_errors": counters["write"],
            "rewritten_blocks": rewritten,
            "staging_bytes": self.staging.page_num * self.staging.page_bytes,
        }

    # Calls of one batch

    def _count_existing(self, keys: Sequence[bytes]) -> int:
        """Leading keys that the plugin claims to have; 0 if it raises."""
        try:
            return self._ask_existing(keys)
        except ExistsFailed:
            return 0

    def _ask_existing(self, keys: Sequence[bytes]) -> int:
        names = self._names(keys)
        if not names:
            return 0
        answer = self._call("read", self._plugin.batch_exists, names, _no_info())
        if answer is _RAISED:
            raise ExistsFailed
        count = _leading(answer, len(names), counts=True)
        if count is None:
            self._complain("read", f"batch_exists answered {_shown(answer)}, not a number")
            return 0
        if count:
            self._known = keys[0]
        return count

    def _get_batch(self, keys: Sequence[bytes], frames: np.ndarray) -> int:
        names = self._names(self._readable(keys))
        if not names:
            return 0
        fetched = self._fetch_v1(names) if self._interface_v1 else self._fetch(names)
        if fetched is None:
            if len(names) > 1:  # which of them was it?
                return _in_batches(1, len(keys), lambda part: self._get_batch(keys[part], frames[part]))
            self._note_absent(keys[0])
            return 0
        for i, source in enumerate(fetched):
            if source is None:
                self._note_absent(keys[i])
                return i
            if not self._load(source) or not self._verifies(self._read_scratch, keys[i]):
                self._rename(keys[i], "came wrong")
                return i
            with self._lock:
                self._troubles.note_right(keys[i])
            self._pool.copy_in(frames[i], self._read_scratch[: self._payload_bytes])
        return len(fetched)

    def _fetch_v1(self, names: list[str]) -> list[int | torch.Tensor | None] | None:
        """Staging pages that the plugin claims to have filled, None for a block that it has not. None: it raised."""
        for page in range(len(names)):
            self.staging.wipe_end(page, _TRAILER_BYTES)  # it shows if nothing is written
        answer = self._call("read", self._plugin.batch_get_v1, names, self._indices(0, len(names)), _no_info())
        if answer is _RAISED:
            return None
        count = _leading(answer, len(names), counts=True)
        if count is None:
            self._complain("read", f"batch_get_v1 answered {_shown(answer)}, not a list of truths")
            return None
        return [page if page < count else None for page in range(min(count + 1, len(names)))]

    def _fetch(self, names: list[str]) -> list[int | torch.Tensor | None] | None:
        """Tensors from the plugin, None for a block that it has not. None: it raised."""
        targets = [self.staging.get_dummy_flat_data_page() for _ in names]
        answer = self._call("read", self._plugin.batch_get, names, targets)
        if answer is _RAISED:
            return None
        if isinstance(answer, (list, tuple)):
            fetched: list[int | torch.Tensor | None] = []
            for value, target in zip(answer, targets):
                # True: it is in the target.
                fetched.append(value if isinstance(value, torch.Tensor) else target if _is_true(value) else None)
            return fetched if len(fetched) == len(names) else [*fetched, None]
        count = _leading(answer, len(names), counts=True)
        if count is None:
            self._complain("read", f"batch_get answered {_shown(answer)}, not a list of tensors")
            return None
        return [*targets[:count], *[None] * (count < len(names))]

    def _set_batch(self, keys: Sequence[bytes], frames: np.ndarray) -> int:
        names = self._names(keys)
        if not names:
            return 0
        if self._interface_v1:
            for i in range(len(names)):
                self._seal(self._write_scratch, keys[i], frames[i])
                self.staging.write(self._batch_blocks + i, self._write_scratch)
            indices = self._indices(self._batch_blocks, len(names))
            answer = self._call("write", self._plugin.batch_set_v1, names, indices, _no_info())
        else:
            values = [self.staging.get_dummy_flat_data_page() for _ in names]
            for key, pages, value in zip(keys, frames, values):
                self._seal(bytes_of(value), key, pages)
            answer = self._call("write", self._plugin.batch_set, names, values)
        count = 0
        if answer is not _RAISED:
            stored = _leading(answer, len(names), counts=False)
            if stored is None:
                self._complain("write", f"batch_set answered {_shown(answer)}, not a truth")
            elif stored < len(names):
                self._complain("write", f"batch_set stored {stored} of {len(names)} blocks")
            count = stored or 0
        if count < len(names):
            # Not all: a plugin answers no more than that. The leading ones may be there.
            count = max(count, self._count_existing(keys[: len(names)]))
        with self._lock:
            self._counters["stored"] += count
            if count:
                self._known = keys[0]
        return count

    def _indices(self, page: int, num_pages: int) -> torch.Tensor:
        """Token indices of staging pages, as plugins expect them."""
        return torch.arange(page * self.block_tokens, (page + num_pages) * self.block_tokens)

    # Records

    def _seal(self, record: np.ndarray, key: bytes, frames: np.ndarray) -> None:
        """Make the record of a block. record: (staging.page_bytes,) uint8, zero where nothing is written."""
        self._pool.copy_out(frames, record[: self._payload_bytes])
        record[-_TRAILER_BYTES:] = np.frombuffer(self._trailer(record, key), np.uint8)

    def _verifies(self, record: np.ndarray, key: bytes) -> bool:
        return record[-_TRAILER_BYTES:].tobytes() == self._trailer(record, key)

    def _trailer(self, record: np.ndarray, key: bytes) -> bytes:
        header = _HEADER.pack(_MAGIC, self._digest, key, self._payload_bytes)
        checksum = zlib.crc32(header, zlib.crc32(record[: self._payload_bytes].data))
        return (header + checksum.to_bytes(4, "little")).ljust(_TRAILER_BYTES, b"\0")

    def _load(self, source: int | torch.Tensor) -> bool:
        """Copy a staging page, or a tensor of the plugin's, to where it is checked. False: it has another size."""
        if isinstance(source, int):
            self.staging.read(source, self._read_scratch)
            return True
        try:
            data = bytes_of(source)
        except Exception:  # a kind of tensor that has no memory of its own
            return False
        if data.nbytes != self._read_scratch.nbytes:
            return False
        np.copyto(self._read_scratch, data)
        return True

    # Names

    def _readable(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """The leading keys whose blocks do not rest. A block that rests is written all the same."""
        with self._lock:
            return keys[: next((i for i, key in enumerate(keys) if self._troubles.rests(key)), len(keys))]

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        """The plugin's keys of blocks: 64 hexadecimal digits as upstream has them, the first half from the key, the
        second from the namespace and from how often the block was renamed."""
        names = []
        with self._lock:
            for key in keys:
                salt = struct.pack("<II", self._generation, self._rewrites.get(key, 0))
                names.append(key.hex() + hashlib.blake2b(salt + self._namespace, digest_size=16).hexdigest())
        return names

    def _note_absent(self, key: bytes) -> None:
        """The plugin did not bring a block. In an outage this tells nothing about the block. If other blocks come
        right, and the plugin claims to have this one, it will neither bring it next time nor store it anew."""
        with self._lock:
            is_alone = self._troubles.is_alone(key)
            if not is_alone:
                self._troubles.note_absent(key)
        if self._count_existing([key]) == 0:
            return
        if is_alone:
            self._rename(key, "exists but does not come")
        else:
            self._complain("read", f"block {key.hex()} exists but does not come")

    def _rename(self, key: bytes, why: str) -> None:
        """Count a failure of the block itself, and give the block another name if it may have one."""
        with self._lock:
            trouble = self._troubles.note_bad(key)
            if trouble.may_rename:
                self._rewrites[key] = self._rewrites.pop(key, 0) + 1
            if len(self._rewrites) > MAX_REWRITTEN:
                self._rewrites.popitem(last=False)
        fate = ", is stored under another name next time" if trouble.may_rename else ""
        rest = f", is not read for {trouble.rest_s:g} s" if trouble.rest_s else ""
        self._complain("read", f"block {key.hex()} {why}{fate}{rest}")

    # The plugin and its failures

    def _call(self, kind: str, method: Callable[..., Any], *args: Any) -> Any:
        try:
            return method(*args)
        except BaseException as error:  # as asyncio.CancelledError, which a plugin with a loop of its own may let out
            self._complain(kind, f"{getattr(method, '__name__', method)} raised {type(error).__name__}: {error}")
            logger.debug("storage plugin %s", self._plugin_name, exc_info=True)
            return _RAISED

    def _complain(self, kind: str, message: str) -> None:
        """Count an error ("read" or "write"), and log it if none of its kind was logged within a minute."""
        with self._lock:
            self._counters[kind] += 1
            now = self._clock()
            if now - self._log_at.get(kind, -LOG_INTERVAL_S) < LOG_INTERVAL_S:
                self._unlogged[kind] += 1
                return
            self._log_at[kind] = now
            unlogged = self._unlogged.pop(kind, 0)
        more = f" ({unlogged} more {kind} errors since the last line)" if unlogged else ""
        logger.warning("storage plugin %s: %s%s", self._plugin_name, message, more)


def _in_batches(batch_size: int, total: int, run: Callable[[slice], int]) -> int:
    """Run the parts of a call of `total` blocks one after the other, up to one that does not succeed whole. Returns
    how many leading blocks succeeded."""
    for start in range(0, total, batch_size):
        part = slice(start, min(start + batch_size, total))
        done = run(part)
        if done < part.stop - start:
            return start + done
    return total


def _no_info() -> HiCacheStorageExtraInfo:
    """prefix_keys stays None: a call here does not know what came before its keys."""
    return HiCacheStorageExtraInfo()


def _is_true(value: object) -> bool:
    try:
        return bool(value)
    except Exception:  # a tensor of many elements, an object with a mind of its own
        return False


def _leading(answer: object, asked: int, counts: bool) -> int | None:
    """How many leading blocks an answer grants, as far as it can be understood; None if it cannot.

    A list (tuple, array, tensor) of truths: its leading true ones; one truth: all or none; a number, if counts: so
    many. Never less than 0 nor more than were asked for.
    """
    if isinstance(answer, (bool, np.bool_)):
        return asked if answer else 0
    if isinstance(answer, (torch.Tensor, np.ndarray)):
        answer = answer.tolist()
        if not isinstance(answer, list):
            return _leading(answer, asked, counts)
    if isinstance(answer, (list, tuple)):
        return next((i for i, value in enumerate(answer[:asked]) if not _is_true(value)), min(len(answer), asked))
    if counts and isinstance(answer, (int, np.integer)):
        return min(max(int(answer), 0), asked)
    return None


def _shown(answer: object) -> str:
    return f"{type(answer).__name__} {answer!r}"[:80]
