"""`StorageRequests`: requests to attach, detach and clear storage on their way to the scheduler.

Owns the thread that reads what a backend needs: the names of its blocks depend on all of the model's weights, and its
folder may hang. The scheduler hears of a request afterwards, so that no step waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from sglang.srt.managers.io_struct import (
    AttachHiCacheStorageReqInput,
    DetachHiCacheStorageReqInput,
    StorageReqInput,
)
from sglang.srt.managers.schedule_batch import StorageRequest
from sglang.srt.managers.startup.storage import StorageOpener
from sglang.srt.mem_cache.block_store import StoreError
from sglang.srt.mem_cache.transfer import StorageAction
from sglang.srt.utils.errors import RequestError
from sglang.srt.utils.pools import submit

logger = logging.getLogger(__name__)


class StorageRequests:
    """Belongs to the scheduler process's main thread. opener: None where there is no host tier. notify: called from
    another thread when settings are read."""

    def __init__(self, opener: StorageOpener | None, notify: Callable[[], None]) -> None:
        self._opener = opener
        self._notify = notify
        self._thread: ThreadPoolExecutor | None = None
        # By request id, in the order of arrival.
        self._waiting: dict[str, Future[StorageRequest]] = {}

    def add(self, message: StorageReqInput) -> None:
        """`take_ready` returns it when it is ready; to detach and to clear wait for no folder that may hang."""
        if isinstance(message, AttachHiCacheStorageReqInput):
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="storage-settings")
            try:
                future = submit(self._thread, self._read, message)
            except RequestError as error:
                future = Future()
                future.set_exception(StoreError(error.message))
        else:
            is_detach = isinstance(message, DetachHiCacheStorageReqInput)
            action = StorageAction.DETACH if is_detach else StorageAction.CLEAR
            future = Future()
            future.set_result(StorageRequest(id=message.id, action=action))
        self._waiting[message.id] = future
        future.add_done_callback(lambda _: self._notify())

    def _read(self, message: AttachHiCacheStorageReqInput) -> StorageRequest:
        """Raises StoreError."""
        if self._opener is None:
            raise StoreError("there is no host tier for storage to fill: start the server with --hicache")
        what = self._opener.setup(
            message.backend, message.extra_config, message.prefetch_policy, message.write_policy
        )
        return StorageRequest(id=message.id, action=StorageAction.ATTACH, what=what)

    def take_ready(self) -> tuple[list[StorageRequest], list[tuple[str, str]]]:
        """What the scheduler can hear of now, and ids of requests whose settings cannot be used, with the reason."""
        ready: list[StorageRequest] = []
        failed: list[tuple[str, str]] = []
        for id in [id for id, future in self._waiting.items() if future.done()]:
            future = self._waiting.pop(id)
            error = future.exception()
            if isinstance(error, StoreError):
                failed.append((id, str(error)))
            elif error is not None:
                # Whatever it is, requests go on.
                logger.error("storage cannot be attached", exc_info=error)
                failed.append(
                    (id, f"storage cannot be attached, see the server's log: {type(error).__name__} {error}")
                )
            else:
                ready.append(future.result())
        return ready, failed
