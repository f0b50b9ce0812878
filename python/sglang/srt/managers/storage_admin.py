"""`StorageAdmin`: attach, detach and clear storage while the server runs.

Owns the requests of administrators and the one that is under way. They are served one after another, each when
nothing else is on its way to storage or from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sglang.srt.managers.schedule_batch import ControlReply, StorageRequest
from sglang.srt.managers.storage_breaker import StorageBreaker
from sglang.srt.managers.storage_controller import StorageController
from sglang.srt.managers.storage_setup import StorageSetup
from sglang.srt.mem_cache.transfer import TIER_NAMES, StorageAction, Ticket, Tier


class StorageAdmin:
    """attached: called when storage was attached or emptied."""

    def __init__(self, storage: StorageController, attached: Callable[[], None]) -> None:
        self._storage = storage
        self._attached = attached
        self._requests: deque[StorageRequest] = deque()
        self._ticket: Ticket | None = None
        self._replies: list[ControlReply] = []

    def attach(self, setup: StorageSetup, works: bool = True) -> None:
        """works: False where what is left alone stays so."""
        self._attached()
        self._storage.attach_storage(setup, works)

    def serve(self, requests: Iterable[StorageRequest] = ()) -> None:
        """Take new requests, and begin the next one if it can begin."""
        self._requests.extend(requests)
        while self._requests and self._ticket is None:
            request = self._requests[0]
            refusal = self._refusal(request)
            if refusal:
                self._requests.popleft()
                self._replies.append(ControlReply(request.id, False, refusal))
                continue
            if self._storage.is_open:
                self._storage.close()
            if self._storage.has_outstanding:
                return
            setup = request.what.setup if request.what is not None else ""
            self._ticket = self._storage.administer(request.action, setup)

    def end(self, ticket: Ticket, count: int) -> bool:
        """An operation of the probe link is over. False if it was no administrator's."""
        if ticket != self._ticket:
            return False
        self._storage.ledger.end(ticket)
        success, request = count > 0, self._requests.popleft()
        self._ticket = None
        if request.action == StorageAction.CLEAR:
            assert self._storage.setup is not None
            self.attach(self._storage.setup, success)
        elif request.action == StorageAction.DETACH:
            self._storage.detach_storage()
        elif success and request.what is not None:
            self.attach(request.what)
        message = "" if success else "the backend did not succeed; the server's log has the reason"
        result = {} if success or request.action != StorageAction.CLEAR else {"cleared": False}
        self._replies.append(ControlReply(request.id, success, message, result))
        self.serve()
        return True

    def state(self) -> dict[str, Any] | None:
        """What `GET /hicache/state` shows; None if nothing is attached."""
        storage, setup = self._storage, self._storage.setup
        if setup is None:
            return None
        page = storage.tree.page_size
        return {
            "backend": setup.backend,
            "tiers": [TIER_NAMES[tier] for tier in setup.tiers],
            "prefetch_policy": setup.prefetch.policy,
            "fetch_order": setup.prefetch.fetch_order,
            "write_policy": setup.write_policy,
            "block_tokens": setup.block_tokens,
            "fetching_tokens": storage.stores.fetching_pages * page,
            "fetching_limit_tokens": len(setup.tiers) * setup.limits.max_fetch_pages * page,
            "storing_tokens": storage.stores.storing_pages * page,
            "storing_limit_tokens": len(setup.tiers) * setup.limits.max_store_pages * page,
            "reads": _breakers_state(setup.tiers, [store.reads for store in storage.stores]),
            "writes": _breakers_state(setup.tiers, [store.writes for store in storage.stores]),
        }

    def take_replies(self) -> list[ControlReply]:
        replies, self._replies = self._replies, []
        return replies

    def _refusal(self, request: StorageRequest) -> str:
        storage = self._storage
        if not storage.controller.has_host:
            return "there is no host tier for storage to fill: start the server with --hicache"
        if request.action == StorageAction.ATTACH and storage.setup is not None:
            return f"the backend {storage.setup.backend!r} is attached: detach it first"
        if request.action != StorageAction.ATTACH and storage.setup is None:
            return "no storage backend is attached"
        return ""


def _breakers_state(tiers: Sequence[Tier], breakers: Sequence[StorageBreaker]) -> dict[str, Any]:
    return {
        "off": any(breaker.is_open for breaker in breakers),
        "tiers_off": [TIER_NAMES[tier] for tier, breaker in zip(tiers, breakers) if breaker.is_open],
        "reason": "; ".join(breaker.reason for breaker in breakers if breaker.is_open),
        "times_off": sum(breaker.num_opened for breaker in breakers),
    }
