"""`SchedulerControl`: what the HTTP server asks the scheduler beside requests, and waits for.

Owns the questions that are not answered. What an administrator asks for is decided in cache_admin.py and
storage_admin.py.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.managers.io_struct import (
    AttachHiCacheStorageReqInput,
    ClearHiCacheReqInput,
    ControlReqOutput,
    DetachHiCacheStorageReqInput,
    EraseSaltReqInput,
    FlushCacheReqInput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    LabelPrefixReqInput,
    RetainPrefixReqInput,
    SetPoliciesReqInput,
    SetQuotaReqInput,
    SwitchTierReqInput,
    encode,
    ids_to_bytes,
)
from sglang.srt.utils.errors import RequestError

_TIMEOUT_S = 30.0


class SchedulerControl:
    """send: passes one encoded message to the scheduler's socket. forget_texts: drops what is known of prompts'
    texts."""

    def __init__(self, send: Callable[[bytes], Any], forget_texts: Callable[[], None]) -> None:
        self._send = send
        self._forget_texts = forget_texts
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        # Questions that may change something.
        self.num_changes = 0
        # Why nothing is answered any more.
        self._end: RequestError | None = None

    def answer(self, message: ControlReqOutput | GetInternalStateReqOutput) -> None:
        if (future := self._waiting.pop(message.id, None)) is not None and not future.done():
            future.set_result(message)

    def fail_all(self, error: RequestError) -> None:
        """No question is answered, now and from now on."""
        self._end = error
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    async def state(self, is_brief: bool = False) -> bytes:
        """The JSON of `GET /hicache/state`; without lists of prefixes if it is brief."""
        answer: GetInternalStateReqOutput = await self._ask(lambda id: GetInternalStateReq(id=id, is_brief=is_brief))
        return answer.state

    async def flush_cache(self) -> ControlReqOutput:
        result: ControlReqOutput = await self._ask(lambda id: FlushCacheReqInput(id=id))
        if result.success:
            self._forget_texts()
        return result

    async def attach_hicache_storage(
        self, backend: str, extra_config: str, prefetch_policy: str, write_policy: str
    ) -> ControlReqOutput:
        return await self._ask(
            lambda id: AttachHiCacheStorageReqInput(
                id=id,
                backend=backend,
                extra_config=extra_config,
                prefetch_policy=prefetch_policy,
                write_policy=write_policy,
            ),
            timeout_s=None,
        )

    async def detach_hicache_storage(self) -> ControlReqOutput:
        return await self._ask(lambda id: DetachHiCacheStorageReqInput(id=id), timeout_s=None)

    async def clear_hicache_storage(self) -> ControlReqOutput:
        return await self._ask(lambda id: ClearHiCacheReqInput(id=id), timeout_s=None)

    async def switch_tier(self, tier: str, reads: bool | None, writes: bool | None) -> ControlReqOutput:
        return await self._ask(lambda id: SwitchTierReqInput(id=id, tier=tier, reads=reads, writes=writes))

    async def set_policies(self, policies: dict[str, Any]) -> ControlReqOutput:
        return await self._ask(lambda id: SetPoliciesReqInput(id=id, policies=policies))

    async def retain_prefix(self, name: str, extra_key: str, ids: Sequence[int], seconds: float) -> ControlReqOutput:
        return await self._ask(
            lambda id: RetainPrefixReqInput(
                id=id, name=name, seconds=seconds, extra_key=extra_key, input_ids=ids_to_bytes(ids)
            )
        )

    async def label_prefix(self, name: str, extra_key: str, ids: Sequence[int]) -> ControlReqOutput:
        return await self._ask(
            lambda id: LabelPrefixReqInput(id=id, name=name, extra_key=extra_key, input_ids=ids_to_bytes(ids))
        )

    async def erase_salt(self, cache_salt: str, aborts_requests: bool) -> ControlReqOutput:
        try:
            return await self._ask(
                lambda id: EraseSaltReqInput(id=id, cache_salt=cache_salt, aborts_requests=aborts_requests),
                timeout_s=None,
            )
        finally:
            # Of all tenants: without them texts are only tokenised again. At the end, as prompts are tokenised
            # meanwhile.
            self._forget_texts()

    async def set_quota(self, cache_salt: str, tokens: dict[str, int] | None) -> ControlReqOutput:
        return await self._ask(
            lambda id: SetQuotaReqInput(id=id, cache_salt=cache_salt, tokens=tokens), timeout_s=None
        )

    async def _ask(self, make: Callable[[str], Any], timeout_s: float | None = _TIMEOUT_S) -> Any:
        """timeout_s: None for what takes as long as a storage medium needs. Raises RequestError."""
        if self._end is not None:
            raise self._end
        id = uuid.uuid4().hex
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[id] = future
        message = make(id)
        self.num_changes += not isinstance(message, GetInternalStateReq)
        self._send(encode(message))
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise RequestError("the scheduler did not answer in time", 503) from None
        finally:
            self._waiting.pop(id, None)
