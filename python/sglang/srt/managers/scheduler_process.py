"""The scheduler processes, one per rank: an `EngineCore` with a model, real pools and links, between sockets.

Owns the sockets and the clock; startup/engine.py builds the rest. It gathers what came in and what completed, steps
the state machine, and sends out what it decides; when nothing can happen it sleeps until a message or a completion
wakes it.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
import zmq

from sglang.srt.constrained.grammar_cache import GrammarCache
from sglang.srt.constrained.grammar_manager import GrammarManager
from sglang.srt.constrained.xgrammar_backend import VOCABULARY_FILE
from sglang.srt.disaggregation.event_publisher import ZmqEventPublisher
from sglang.srt.disaggregation.kv_events import KVEventsConfig
from sglang.srt.distributed.parallel_state import init_tensor_parallel
from sglang.srt.managers.cache_admin import ERASED, has_requests
from sglang.srt.managers.crash_folder import replay_hint
from sglang.srt.managers.crash_record import CrashRecord
from sglang.srt.managers.engine_core import EngineCore
from sglang.srt.managers.io_struct import (
    AbortReq,
    AdminReqInput,
    BatchTokenIDOutput,
    BlockNaming,
    ControlReqOutput,
    EraseSaltReqInput,
    FinishReason,
    FlushCacheReqInput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    RequestTimesOutput,
    SchedulerReady,
    SwitchTierReqInput,
    TokenizedGenerateReqInput,
    TokenOutput,
    decode_to_scheduler,
    detokenize_req,
    encode,
)
from sglang.srt.managers.kv_events_publisher import SchedulerKvEventsPublisher
from sglang.srt.managers.progress import Progress
from sglang.srt.managers.rank_sync import RankSync, Tick
from sglang.srt.managers.schedule_batch import BatchDecision, StorageRequest
from sglang.srt.managers.scheduler import SCHEDULING_COUNTERS, Scheduler
from sglang.srt.managers.startup.device import pick_device
from sglang.srt.managers.startup.engine import Storage, build_core
from sglang.srt.managers.startup.rank_setup import RankSetup
from sglang.srt.managers.storage_requests import StorageRequests
from sglang.srt.mem_cache.block_keys import BlockKeys
from sglang.srt.mem_cache.hottest_prefixes import HottestPrefixes
from sglang.srt.mem_cache.storage.tiered_store import parts_of
from sglang.srt.mem_cache.transfer import TIER_NAMES, Tier
from sglang.srt.peer.memory.borrowed_memory import BorrowedMemory
from sglang.srt.peer.memory.lent_memory import LentMemory
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.child_process import ChildArgs, StartupError, open_pull, open_push, run_child
from sglang.srt.utils.clock import monotonic
from sglang.srt.utils.errors import RequestError
from sglang.srt.utils.rare_log import RareLog
from sglang.srt.utils.startup_progress import StartupProgress

logger = logging.getLogger(__name__)

LOG_EVERY_S = 5.0
IDLE_CHECK_AFTER_MS = 5000
# Checking takes some 40 us per node of the tree, in which no request is heard.
IDLE_CHECK_MAX_NODES = 5000


@dataclass
class _Inbox:
    new: list[TokenizedGenerateReqInput] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    flush: list[str] = field(default_factory=list)
    storage: list[StorageRequest] = field(default_factory=list)
    admin: list[AdminReqInput] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.new or self.aborts or self.flush or self.storage or self.admin)


class SchedulerProcess:
    """Rank 0. wake_fd: an eventfd that completions write to."""

    def __init__(
        self,
        core: EngineCore,
        storage: Storage | None,
        sync: RankSync,
        receiver: zmq.Socket,
        sender: zmq.Socket,
        wake_fd: int,
        grammars: GrammarManager,
        kv_events: SchedulerKvEventsPublisher | None = None,
    ) -> None:
        self.core = core
        self.storage = storage
        self.sync = sync
        self.receiver = receiver
        self.sender = sender
        self.wake_fd = wake_fd
        self.grammars = grammars
        self.kv_events = kv_events
        opener = storage.opener if storage is not None else None
        self._storage_requests = StorageRequests(opener, lambda: os.eventfd_write(wake_fd, 1))
        self._poller = zmq.Poller()
        self._poller.register(receiver, zmq.POLLIN)
        self._poller.register(wake_fd, zmq.POLLIN)
        if sync.poke_fd is not None:
            self._poller.register(sync.poke_fd, zmq.POLLIN)
        self._busy_since_check = False
        self._logged_at = monotonic()
        self._slept_s = 0.0
        self._logged: dict[str, int] = {}
        self._logged_stall_s = 0.0
        self._gen_throughput = 0.0
        # Of storage's breakers, why they are open.
        self._logged_reasons: dict[str, str] = {}
        # Links that are left alone, and why.
        self._logged_links: dict[str, str] = {}
        self._rare_log = RareLog(logger)
        self._logged_differences = 0
        admin = core.scheduler.cache_admin
        self._hottest = HottestPrefixes(core.scheduler.cache.tree, labels=(admin.labels, admin.retention.labels))
        # How the tokenizer manager names blocks.
        self._announced: BlockKeys | None = None
        self._announce_naming()

    def serve(self) -> None:
        try:
            self._serve()
        except Exception:
            if isinstance(record := self.core.record, CrashRecord) and record.is_open:
                record.keep()
                logger.error("%s", replay_hint(record.path))
            raise

    def _serve(self) -> None:
        while True:
            inbox = self._receive()
            progress = self.core.progress()
            # Both, always: a poke must not be left to wake the poller again.
            if self.sync.take_pokes() or inbox or self.core.has_work(monotonic()):
                tick = Tick(
                    now=monotonic(),
                    new=tuple(inbox.new),
                    aborts=tuple(inbox.aborts),
                    flush=tuple(inbox.flush),
                    storage=tuple(inbox.storage),
                    admin=tuple(inbox.admin),
                    results=progress.results,
                    findings=progress.findings,
                    cost=progress.cost,
                )
                progress = self.sync.lead(tick, progress)
                decision = _step(self.core, tick, progress)
                self._send(decision)
                if self.kv_events is not None:
                    self.kv_events.publish_kv_events()
                switches = {each.id for each in tick.admin if isinstance(each, SwitchTierReqInput)}
                if any(reply.success and reply.id in switches for reply in decision.replies):
                    logger.warning("an administrator switched tiers: %s", self.core.scheduler.cache.shown_switches())
                self._busy_since_check = True
                self._announce_naming()
                self._log_breakers()
                self._log_links()
                self._log_differences()
                self._log_throughput()
            else:
                self._sleep()

    def _receive(self) -> _Inbox:
        inbox = _Inbox()
        ready, failed = self.grammars.take_ready()
        inbox.new += ready
        for rid, reason in failed:
            self._refuse(rid, reason, 400)
        while True:
            try:
                message = decode_to_scheduler(self.receiver.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
            if isinstance(message, TokenizedGenerateReqInput):
                self.sender.send(encode(detokenize_req(message)))
                try:
                    if self.grammars.add(message):
                        inbox.new.append(message)
                except RequestError as error:
                    self._refuse(message.rid, error.message, error.status_code)
            elif isinstance(message, AbortReq):
                if self.grammars.abort(message.rid):
                    self._refuse(message.rid, "the request was aborted", 499)
                else:
                    inbox.aborts.append(message.rid)
            elif isinstance(message, FlushCacheReqInput):
                inbox.flush.append(message.id)
            elif isinstance(message, AdminReqInput):
                if not isinstance(message, EraseSaltReqInput) or self._may_erase(message):
                    inbox.admin.append(message)
            elif isinstance(message, GetInternalStateReq):
                self.sender.send(
                    encode(GetInternalStateReqOutput(id=message.id, state=self._state(message.is_brief)))
                )
            else:
                self._storage_requests.add(message)
        inbox.storage, unusable = self._storage_requests.take_ready()
        for id, reason in unusable:
            self.sender.send(encode(ControlReqOutput(id=id, success=False, message=reason)))
        return inbox

    def _may_erase(self, message: EraseSaltReqInput) -> bool:
        """The scheduler does not know requests whose grammar is compiled: they end, or it is answered that the
        erasing has to wait for them."""
        rids = self.grammars.waiting_of(message.cache_salt)
        if rids and not message.aborts_requests:
            self.sender.send(encode(ControlReqOutput(id=message.id, success=False, message=has_requests(len(rids)))))
            return False
        # Where storage cannot be told, nothing is erased, and they go on.
        for rid in () if self.core.scheduler.cache_admin.storage_trouble() else rids:
            self.grammars.abort(rid)
            self._refuse(rid, ERASED, 503)
        return True

    def _refuse(self, rid: str, message: str, status_code: int) -> None:
        """End a request of which the scheduler has not heard."""
        reason = FinishReason(type="abort", message=message, status_code=status_code)
        output = TokenOutput(
            rid=rid, output_ids=b"", finish_reason=reason, prompt_tokens=0, completion_tokens=0, cached_tokens=0
        )
        self.sender.send(encode(BatchTokenIDOutput(outputs=[output])))

    def _send(self, decision: BatchDecision) -> None:
        if times := self.core.scheduler.times.known:
            self.sender.send(encode(RequestTimesOutput(times=times)))
        for output in decision.outputs:
            if output.finish_reason is not None:
                self.grammars.release(output.rid)
        if decision.outputs:
            self.sender.send(encode(BatchTokenIDOutput(outputs=list(decision.outputs))))
        for reply in decision.replies:
            message = reply.message
            if self.storage is not None and self.storage.slot.last_error and not reply.success:
                message, self.storage.slot.last_error = self.storage.slot.last_error, ""
            answer = ControlReqOutput(id=reply.id, success=reply.success, message=message, result=reply.result)
            self.sender.send(encode(answer))

    def _sleep(self) -> None:
        """Until something happens, or the next line of the log is due while there is work. After some idle seconds,
        once: check all invariants and put garbage away."""
        idle, started = self.core.is_idle, monotonic()
        wake_at = self.core.scheduler.wake_at
        due: list[float] = [] if wake_at is None else [wake_at]
        if not idle:
            due.append(self._logged_at + LOG_EVERY_S)
        elif self._busy_since_check and wake_at is None:
            due.append(started + IDLE_CHECK_AFTER_MS / 1000)
        timeout_ms = int(max(0.0, min(due) - started) * 1000) + 1 if due else None
        ready = dict(self._poller.poll(timeout_ms))
        if self.wake_fd in ready:
            os.eventfd_read(self.wake_fd)
        if not idle:
            self._log_throughput()
            return
        self._slept_s += monotonic() - started
        if not ready and wake_at is None:
            self._busy_since_check = False
            self._gen_throughput = 0.0
            tidy_up(self.core)

    def _state(self, is_brief: bool) -> bytes:
        state = self.core.scheduler.state(is_brief)
        state["gen_throughput"] = round(self._gen_throughput, 2)
        state["steps"] = self.core.num_steps
        store = self.storage.slot.store if self.storage is not None else None
        if store is not None and state["storage"] is not None:
            for tier, part in zip(state["storage"]["tiers"], parts_of(store)):
                stats = part.stats()
                state["tiers"][tier] = {"cached_tokens": stats["blocks"] * part.block_tokens, **stats}
        peers = self.core.slabs
        state["peers"] = peers.state() if isinstance(peers, BorrowedMemory | LentMemory) else None
        if not is_brief:
            state["hottest"] = self._hottest.table(self.core.scheduler.clock.next)
        return msgspec.json.encode(state)

    def _announce_naming(self) -> None:
        """Prompts come with the names of their blocks, so that no step is held up by hashing."""
        names = self.core.scheduler.cache.tree.names.keys
        if names is not self._announced:
            self._announced = names
            naming = (
                BlockNaming() if names is None else BlockNaming(secret=names.secret, block_tokens=names.block_tokens)
            )
            self.sender.send(encode(naming))

    def _log_breakers(self) -> None:
        """A line when storage is left alone, and one when it is used again."""
        storage = self.core.scheduler.storage
        breakers = {
            f"{what} of {TIER_NAMES[tier]} storage": breaker
            for tier, store in zip(storage.tiers, storage.stores)
            for what, breaker in (("reads", store.reads), ("writes", store.writes))
        }
        for what, breaker in breakers.items():
            if breaker.reason == self._logged_reasons.get(what, ""):
                continue
            self._logged_reasons[what] = breaker.reason
            if breaker.is_open:
                logger.warning(
                    "no more %s: %s; requests go on without it, and trials show when it works again",
                    what,
                    breaker.reason,
                )
            else:
                logger.warning("%s work again", what)

    def _log_links(self) -> None:
        """A line when a link from the device is left alone, and one when it is used again."""
        left_alone = self.core.scheduler.cache.links_left_alone()
        before, self._logged_links = self._logged_links, left_alone
        for link in {**before, **left_alone}:
            if link not in before:
                text = "no more copies by the link %s from the device: %s; what has no other copy is computed again"
                self._rare_log.warn(f"{link} left alone", text, link, left_alone[link])
            elif link not in left_alone:
                self._rare_log.warn(f"{link} used again", "the link %s from the device is used again", link)

    def _log_differences(self) -> None:
        """What the canary has turned off; `CheckLink` tells what differed."""
        scheduler = self.core.scheduler
        if scheduler.canary.num_differences > self._logged_differences:
            self._logged_differences = scheduler.canary.num_differences
            logger.error(
                "CANARY: memory was emptied, and these are off: %s; clear storage, then turn them on with "
                "PUT /hicache/tiers/...",
                scheduler.cache.shown_switches(),
            )

    def _log_throughput(self) -> None:
        now = monotonic()
        if now - self._logged_at < LOG_EVERY_S:
            return
        # Of the time at work: after an idle hour, one request would look slow.
        elapsed = now - self._logged_at - self._slept_s
        scheduler = self.core.scheduler
        counters = dict(scheduler.counters)

        def per_second(name: str) -> float:
            return (counters.get(name, 0) - self._logged.get(name, 0)) / elapsed

        self._gen_throughput = per_second("generation_tokens")
        cache, queues = scheduler.cache, scheduler.queues
        table = cache.device
        in_use = table.num_pages - table.num_free - cache.tree.evictable_pages(Tier.DEVICE)
        logger.info(
            "Batch. #running-req: %d, #queue-req: %d, #token: %d, token usage: %.2f, "
            "prefill throughput (token/s): %.1f, gen throughput (token/s): %.1f",
            len(queues.active()),
            len(queues.waiting),
            in_use * scheduler.page_size,
            in_use / table.num_pages,
            per_second("prefill_tokens"),
            self._gen_throughput,
        )
        if cache.host is not None:
            acted = {name: counters.get(name, 0) - self._logged.get(name, 0) for name in SCHEDULING_COUNTERS}
            acted["layer_streamed_token"] = scheduler.streaming.gap_len
            stall = f"{scheduler.planner.stall_s - self._logged_stall_s:.2f} s"
            shown = [f"stall: {stall}"] if stall != "0.00 s" else []
            shown += [f"#{name.replace('_', '-')}: {n}" for name, n in acted.items() if n]
            if shown:
                logger.info("Loads. %s", ", ".join(shown))
        self._logged_at, self._logged, self._slept_s = now, counters, 0.0
        self._logged_stall_s = scheduler.planner.stall_s


class FollowerProcess:
    """Any other rank: sleeps until rank 0 starts a step, and joins it."""

    def __init__(self, core: EngineCore, sync: RankSync) -> None:
        self.core = core
        self.sync = sync

    def serve(self) -> None:
        assert self.sync.socket is not None
        busy_since_check = False
        while True:
            if busy_since_check and not self.sync.socket.poll(IDLE_CHECK_AFTER_MS):
                busy_since_check = False
                if self.core.is_idle:
                    tidy_up(self.core)
            tick, progress = self.sync.follow(self.sync.socket.recv(), self.core.progress)
            _step(self.core, tick, progress)
            busy_since_check = True


def _step(core: EngineCore, tick: Tick, progress: Progress) -> BatchDecision:
    return core.step(tick.now, progress, tick.new, tick.aborts, tick.flush, tick.storage, tick.admin)


def tidy_up(core: EngineCore) -> None:
    """In an idle moment: check all invariants, unless that would take long, and put garbage away."""
    if core.scheduler.cache.tree.num_nodes <= IDLE_CHECK_MAX_NODES:
        core.scheduler.check_invariants()
    if isinstance(core.record, CrashRecord):
        core.record.tidy_up()
    gc.collect()
    gc.freeze()


def start(child: ChildArgs, on_exit: ExitStack) -> Callable[[], None]:
    args = ServerArgs(**child.server_args)
    rank, directory = child.extra["tp_rank"], Path(child.extra["directory"])
    progress = StartupProgress(child.stage_file, child.columns, is_leader=rank == 0)
    if args.tp_size > 1:
        progress.stage(f"meeting the other {args.tp_size - 1} ranks")
    context = zmq.Context()
    receiver = open_pull(context, child.ipc["scheduler_in"]) if rank == 0 else None
    device = pick_device(args, rank)
    group = init_tensor_parallel(rank, args.tp_size, f"{directory}/ranks", device)
    sync = RankSync(group, context, child.extra["directory"])
    torch.manual_seed(args.random_seed or 0)
    if group.size > 1:
        # Each rank would take all cores, and they would wait for each other's threads.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // group.size))
    if receiver is None:
        core, _ = build_core(args, RankSetup(group, sync.poke, directory, on_exit, None, device, progress))
        gc.collect()
        gc.freeze()
        return FollowerProcess(core, sync).serve
    sender = open_push(context, child.ipc["detokenizer_in"])
    wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
    notify = lambda: os.eventfd_write(wake_fd, 1)  # noqa: E731
    cache = GrammarCache(directory / VOCABULARY_FILE, args.constrained_json_max_whitespace_cnt)
    core, storage = build_core(args, RankSetup(group, notify, directory, on_exit, cache, device, progress))
    kv_events = _open_kv_events(args, core, storage, on_exit)
    grammars = GrammarManager(cache, notify)
    process = SchedulerProcess(core, storage, sync, receiver, sender, wake_fd, grammars, kv_events)
    gc.collect()
    gc.freeze()
    accelerator = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    sender.send(encode(ready_message(core.scheduler, accelerator, args.kv_events)))
    return process.serve


def _open_kv_events(
    args: ServerArgs, core: EngineCore, storage: Storage | None, on_exit: ExitStack
) -> SchedulerKvEventsPublisher | None:
    """Raises StartupError."""
    config = args.kv_events
    if not config.is_on:
        return None
    try:
        publisher = ZmqEventPublisher(config)
    except ValueError as error:
        raise StartupError(f"--kv-events-config: {error}") from error
    on_exit.callback(publisher.close)
    slot = storage.slot if storage is not None else None
    return SchedulerKvEventsPublisher(core.scheduler.cache, publisher, config, slot)


def ready_message(
    scheduler: Scheduler, accelerator: str | None = None, kv_events: KVEventsConfig | None = None
) -> SchedulerReady:
    """Nothing is borrowed yet. accelerator: the GPU's name."""
    config = scheduler.config
    return SchedulerReady(
        max_total_num_tokens=config.num_device_pages * config.page_size,
        max_req_input_len=scheduler.accepted_len - 1,
        max_unlent_len=scheduler.max_total_len,
        max_unanswered_len=scheduler.max_unanswered_len,
        context_len=config.context_len,
        vocab_size=config.vocab_size,
        info={
            "num_host_pages": config.num_host_pages,
            "page_size": config.page_size,
            "max_running_requests": config.max_running_requests,
            "dp_size": 1,
            "accelerator": accelerator,
            "kv_events": kv_events.describe(config.page_size) if kv_events is not None else None,
        },
    )


if __name__ == "__main__":
    run_child(start)
