"""`CacheAdmin`: what an administrator changes of the cache while the server runs, but for storage itself.

Owns the prefixes that are kept, the labels of prefixes, the tenants' quotas, and which erasures wait for storage.
Attaching, detaching and clearing storage is in storage_admin.py; which tiers are on in tier_switches.py.

    erase a salt ──► its requests end, or are a reason to refuse ──► it leaves device, peers and host ──► done
                                                                      └── storage is attached: ERASE ──┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.managers.io_struct import (
    AdminReqInput,
    EraseSaltReqInput,
    LabelPrefixReqInput,
    RetainPrefixReqInput,
    SetPoliciesReqInput,
    SetQuotaReqInput,
    SwitchTierReqInput,
    bytes_to_ids,
)
from sglang.srt.managers.kv_cache import KVCache
from sglang.srt.managers.load_planner import LoadPlanner
from sglang.srt.managers.prefix_retention import PrefixRetention
from sglang.srt.managers.request_queues import RequestQueues
from sglang.srt.managers.schedule_batch import ControlReply, Req
from sglang.srt.managers.schedule_policy import QUEUE_POLICIES
from sglang.srt.managers.storage_setup import PREFETCH_POLICIES
from sglang.srt.mem_cache.eviction import EVICTION_POLICIES
from sglang.srt.mem_cache.namespaces import salt_of
from sglang.srt.mem_cache.placement import WRITE_POLICIES
from sglang.srt.mem_cache.prefix_labels import PrefixLabels
from sglang.srt.mem_cache.transfer import TIER_NAMES, StorageAction, StorageOp, Ticket, Tier
from sglang.srt.utils.time_units import Seconds

# By the names of their flags: what a policy may be, where that is one of a list.
_CHOICES: dict[str, Sequence[str]] = {
    "schedule_policy": tuple(QUEUE_POLICIES),
    "radix_eviction_policy": tuple(EVICTION_POLICIES),
    "hicache_write_policy": WRITE_POLICIES,
    "hicache_storage_prefetch_policy": PREFETCH_POLICIES,
}
# Fields of `CachePolicies`, by the names of their flags.
_FIELDS = {
    "schedule_policy": "schedule_policy",
    "hicache_load_ratio": "load_ratio",
    "hicache_bubble_filling": "bubble_filling",
    "hicache_load_or_recompute": "load_or_recompute",
    "hicache_deferral_threshold": "deferral_threshold",
}
# To a request that is ended.
ERASED = "an administrator has erased what is cached of this cache_salt: send it again"


def has_requests(num_reqs: int) -> str:
    """Why nothing is erased."""
    return (
        f"{num_reqs} requests with this cache_salt are queued or running: wait until they have ended, or give "
        "abort_requests"
    )


@dataclass(eq=False)
class _Told:
    """What storage is being told. reply: for the last operation's end; None: nothing waits for it. num_open:
    operations that have not ended. before: the tenant's quotas in storage until then. failed: tiers that could not.
    """

    reply: ControlReply | None
    salt: str = ""
    num_open: int = 1
    before: dict[Tier, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


class CacheAdmin:
    """end_request: ends a request that is queued or runs, as an abort does."""

    def __init__(
        self, cache: KVCache, planner: LoadPlanner, queues: RequestQueues, end_request: Callable[[Req], None]
    ) -> None:
        self._cache = cache
        self._planner = planner
        self._queues = queues
        self._end_request = end_request
        most = max([table.num_pages for table in cache.tables.values()]) * cache.page_size // 2
        self.retention = PrefixRetention(cache.tree, cache.clock, most, cache.storage.stores.note_kept)
        self.labels = PrefixLabels(cache.page_size)
        self.quotas = cache.quotas
        # Erasures and quotas that storage is being told of.
        self._told: dict[Ticket, _Told] = {}
        # Whether storage was opened, and is to be told the quotas.
        self._tells_quotas = False
        self._replies: list[ControlReply] = []

    def serve(self, requests: Sequence[AdminReqInput], now: Seconds) -> None:
        for request in requests:
            if isinstance(request, SwitchTierReqInput):
                self._reply(request.id, self._cache.turn(request.tier, request.reads, request.writes))
            elif isinstance(request, SetPoliciesReqInput):
                self._reply(request.id, self._set_policies(request.policies))
            elif isinstance(request, RetainPrefixReqInput):
                self._reply(request.id, self._retain(request, now))
            elif isinstance(request, LabelPrefixReqInput):
                self._reply(request.id, self._label(request))
            elif isinstance(request, EraseSaltReqInput):
                self._erase(request)
            else:
                self._set_quota(request)

    def note_storage_opened(self) -> None:
        """What is attached now has not heard of any quota."""
        self._tells_quotas = True

    def step(self, now: Seconds) -> None:
        """After the step's launch was built."""
        if self._tells_quotas and self._cache.storage.is_open:
            self._tells_quotas = False
            for tier in self._tiers_with_limits():
                for salt, limit_tokens in self.quotas.of(tier).items():
                    self._tell_limit(salt, tier, limit_tokens)
        self.retention.step(now)
        self.quotas.enforce(is_idle=not self._queues.active())

    def take_replies(self) -> list[ControlReply]:
        replies, self._replies = self._replies, []
        return replies

    def _reply(self, id: str, refusal: str, result: dict[str, Any] | None = None) -> None:
        self._replies.append(ControlReply(id, not refusal, refusal, result or {}))

    # -- policies -----------------------------------------------------------------------------------------------

    def _set_policies(self, wanted: dict[str, Any]) -> str:
        """All of them, or none. Returns why that cannot be, "" if it is done."""
        cache, storage = self._cache, self._cache.storage
        known = self.policies()
        for name, value in wanted.items():
            if name not in known:
                return f"there is no policy {name!r} to change; there are {', '.join(known)}"
            if name in _CHOICES and value not in _CHOICES[name]:
                return f"{name} is one of {', '.join(_CHOICES[name])}, not {value!r}"
        if "hicache_write_policy" in wanted and storage.setup is not None:
            return (
                "hicache_write_policy decides how storage is opened: detach it, and attach it again with the policy "
                "(PUT /hicache/storage-backend)"
            )
        if "hicache_write_policy" in wanted and not cache.controller.has_host:
            return "there is no host tier to write to: start the server with --hicache"
        if "hicache_storage_prefetch_policy" in wanted and storage.setup is None:
            return "no storage backend is attached"
        for name, value in wanted.items():
            if name in _FIELDS:
                setattr(self._planner.policies, _FIELDS[name], value)
            elif name == "radix_eviction_policy":
                cache.tree.set_eviction_policy(value)
            elif name == "hicache_write_policy":
                cache.controller.set_write_policy(value)
            else:
                storage.set_prefetch_policy(value)
        self._planner.obey_policies()
        return ""

    def policies(self) -> dict[str, Any]:
        """By the names of their flags."""
        cache = self._cache
        return {
            **{name: getattr(self._planner.policies, field) for name, field in _FIELDS.items()},
            "radix_eviction_policy": cache.tree.eviction_policy,
            "hicache_write_policy": cache.controller.write_policy,
            "hicache_storage_prefetch_policy": cache.storage.config.policy,
        }

    # -- retention ----------------------------------------------------------------------------------------------

    def _retain(self, request: RetainPrefixReqInput, now: Seconds) -> str:
        if not request.seconds:
            is_released = self.retention.release(request.name)
            return "" if is_released else f"no prefix is kept under the name {request.name!r}"
        return self.retention.keep(
            request.name, request.extra_key, bytes_to_ids(request.input_ids), request.seconds, now
        )

    def _label(self, request: LabelPrefixReqInput) -> str:
        if not request.input_ids:
            return "" if self.labels.remove(request.name) else f"no prefix has the label {request.name!r}"
        return self.labels.put(request.name, request.extra_key, bytes_to_ids(request.input_ids))

    # -- tenants ------------------------------------------------------------------------------------------------

    def _erase(self, request: EraseSaltReqInput) -> None:
        cache, salt = self._cache, request.cache_salt
        requests = [req for req in self._queues.all() if salt_of(req.namespace) == salt]
        if requests and not request.aborts_requests:
            self._reply(request.id, has_requests(len(requests)))
            return
        if trouble := self.storage_trouble():
            self._reply(request.id, trouble)
            return
        for req in requests:
            self._end_request(req)
        self.retention.forget_salt(salt)
        erased = cache.erase(salt)
        result = {
            "requests": len(requests),
            # A backend that is not attached keeps what it has.
            "tiers": [TIER_NAMES[tier] for tier in cache.tiers],
            "erased_tokens": {TIER_NAMES[tier]: n for tier, n in erased.items()},
        }
        reply = ControlReply(request.id, True, "", result)
        names = cache.tree.names.keys
        if names is None:
            self._replies.append(reply)
            return
        told = _Told(reply, num_open=len(cache.storage.tiers))
        for tier in cache.storage.tiers:
            self._told[cache.storage.tell(StorageAction.ERASE, names.tenant(salt), tier=tier)] = told

    def _set_quota(self, request: SetQuotaReqInput) -> None:
        if request.tokens is None:
            self._reply(request.id, "", self.quotas.table(request.cache_salt))
            return
        # What was detached keeps its quotas for when it is attached again.
        has = [tier for tier in Tier if request.cache_salt in self.quotas.of(tier)]
        tiers = {TIER_NAMES[tier]: tier for tier in (*self._cache.tiers, *has)}
        if unknown := [name for name in request.tokens if name not in tiers]:
            self._reply(request.id, f"this server has no tier {unknown[0]!r}; it has {', '.join(tiers)}")
            return
        salt, tokens = request.cache_salt, {tiers[name]: limit for name, limit in request.tokens.items()}
        told = [t for t in self._tiers_with_limits() if t in tokens or salt in self.quotas.of(t)]
        if told and (trouble := self.storage_trouble()):
            self._reply(request.id, trouble)
            return
        before = {tier: self.quotas.of(tier)[salt] for tier in told if salt in self.quotas.of(tier)}
        if refusal := self.quotas.set(salt, tokens):
            self._reply(request.id, refusal)
            return
        change = _Told(ControlReply(request.id, True, "", {}), salt, len(told), before)
        for tier in told:
            self._tell_limit(salt, tier, tokens.get(tier, -1), change)
        if not told:
            self._reply(request.id, "", self.quotas.table(salt))

    def _tiers_with_limits(self) -> list[Tier]:
        """Of storage, which keeps to limits itself."""
        return [] if self._cache.tree.names.keys is None else list(self._cache.storage.tiers)

    def _tell_limit(self, salt: str, tier: Tier, limit_tokens: int, told: _Told | None = None) -> None:
        """limit_tokens: below 0 for none."""
        names = self._cache.tree.names.keys
        assert names is not None
        limit = -1 if limit_tokens < 0 else limit_tokens // names.block_tokens
        ticket = self._cache.storage.tell(StorageAction.LIMIT, names.tenant(salt), limit, tier)
        self._told[ticket] = told or _Told(None, salt)

    def storage_trouble(self) -> str:
        """Why storage cannot be told anything now, "" if it can, or if there is none."""
        storage = self._cache.storage
        if storage.setup is None:
            return ""
        if not storage.is_open:
            return "storage is being attached, emptied or detached: try again"
        for store in storage.stores:
            if store.writes.hangs:
                reason = store.writes.reason
                return f"storage is left alone ({reason}), and could not be told: try again when it works"
        return ""

    def end(self, ticket: Ticket, count: int) -> bool:
        """A storage operation is over. False if no administrator has asked for it."""
        if ticket not in self._told:
            return False
        told = self._told.pop(ticket)
        op = self._cache.ledger.end(ticket)
        assert isinstance(op, StorageOp)
        told.num_open -= 1
        if count == 0:
            told.failed.append(TIER_NAMES[op.tier])
            if op.action == StorageAction.LIMIT and told.reply is not None:
                self._put_quota_back(told, op.tier)
        # Without a reply the store's log has the reason.
        if told.num_open or told.reply is None:
            return True
        message = ""
        result = told.reply.result or self.quotas.table(told.salt)
        where = " and ".join(told.failed)
        if told.failed and op.action == StorageAction.ERASE:
            result["tiers"] = [name for name in result["tiers"] if name not in told.failed]
            message = (
                f"memory was erased, but {where} did not do its part, or cannot; the server's log has the reason"
            )
        elif told.failed:
            message = f"{where} did not take the quota, or cannot, and keeps to what was set before; the others hold"
            message += "; the server's log has the reason"
        self._replies.append(ControlReply(told.reply.id, not message, message, result))
        return True

    def _put_quota_back(self, told: _Told, tier: Tier) -> None:
        """A tier of storage did not take a tenant's quota. A later one that it is being told counts."""
        before = told.before.get(tier)
        for ticket, later in self._told.items():
            op = self._cache.in_flight[ticket]
            if (later.salt, op.tier, op.action) == (told.salt, tier, StorageAction.LIMIT):
                later.before.pop(tier, None)
                if before is not None:
                    later.before[tier] = before
                return
        self.quotas.put_back(told.salt, tier, before)

    def state(self, now: Seconds) -> dict[str, Any]:
        return {
            "policies": self.policies(),
            "retention": self.retention.state(now),
            "labels": self.labels.state(),
            "quotas": self.quotas.state(),
        }

    def check_invariants(self) -> None:
        self.retention.check_invariants()
        self.labels.check_invariants()
        self.quotas.check_invariants()
        assert self._told.keys() <= self._cache.in_flight.keys()
