"""What a rank refuses before it reads a model, and what it logs at work."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import zmq

from sglang.simulator.simulation import SimulatedHardware, Simulation
from sglang.srt.constrained.grammar_cache import GrammarCache
from sglang.srt.constrained.grammar_manager import GrammarManager
from sglang.srt.distributed.parallel_state import SINGLE_RANK
from sglang.srt.managers import scheduler_process
from sglang.srt.managers.io_struct import (
    EraseSaltReqInput,
    TokenizedGenerateReqInput,
    decode_to_detokenizer,
    encode,
    ids_to_bytes,
)
from sglang.srt.managers.rank_sync import RankSync
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.managers.scheduler_process import SchedulerProcess
from sglang.srt.managers.startup.engine import build_core
from sglang.srt.managers.startup.rank_setup import RankSetup
from sglang.srt.mem_cache.namespaces import namespace_of
from sglang.srt.mem_cache.transfer import D2H
from sglang.srt.sampling.sampling_params import GrammarSpec, SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.child_process import StartupError


def grammars() -> GrammarManager:
    return GrammarManager(GrammarCache(Path("none"), None), lambda: None)


class _CompilesLater(GrammarCache):
    """Never holds what it has compiled: it has no room yet."""

    def get(self, spec: GrammarSpec) -> Any:
        return None

    def hold(self, spec: GrammarSpec) -> bool:
        return False


@pytest.mark.parametrize(("aborts", "trouble"), [(False, ""), (True, ""), (True, "storage hangs")])
def test_who_waits_for_a_grammar_is_seen_when_the_salt_is_erased(
    aborts: bool, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a request came to the scheduler after the erasing, and left a part of what had been erased."""
    core = Simulation(SchedulerConfig(1, 100, 0, page_bytes=100, context_len=90), SimulatedHardware(1, Mock())).core
    monkeypatch.setattr(core.scheduler.cache_admin, "storage_trouble", lambda: trouble)
    params = SamplingParams(grammar=GrammarSpec("regex", "a"))
    requests = [
        TokenizedGenerateReqInput(rid, ids_to_bytes([1]), params, extra_key=namespace_of(salt, ""))
        for rid, salt in (("mine", "tenant"), ("other", "another"))
    ]
    erase = EraseSaltReqInput(id="e", cache_salt="tenant", aborts_requests=aborts)
    with zmq.Context() as context, ExitStack() as sockets:
        to_scheduler, receiver, sender, outputs = (
            sockets.enter_context(context.socket(kind)) for kind in (zmq.PUSH, zmq.PULL, zmq.PUSH, zmq.PULL)
        )
        for mine, theirs, name in ((receiver, to_scheduler, "in"), (outputs, sender, "out")):
            mine.bind(f"inproc://{name}")
            theirs.connect(f"inproc://{name}")
        waiting = GrammarManager(_CompilesLater(Path("none"), None), lambda: None)
        sync = RankSync(SINGLE_RANK, context, "")
        process = SchedulerProcess(core, None, sync, receiver, sender, -1, waiting)
        for message in (*requests, erase):
            to_scheduler.send(encode(message))
        inbox = process._receive()
        sent = [decode_to_detokenizer(outputs.recv()) for _ in range(2 if trouble else 3)]
    assert not inbox.new and waiting.waiting_of("another") == ["other"]
    if trouble:
        assert inbox.admin == [erase] and waiting.waiting_of("tenant") == ["mine"], "the scheduler refuses it"
    elif aborts:
        assert inbox.admin == [erase] and not waiting.waiting_of("tenant")
        assert [(o.rid, o.finish_reason.status_code) for o in sent[2].outputs] == [("mine", 503)]
    else:
        assert not inbox.admin and waiting.waiting_of("tenant") == ["mine"]
        assert (sent[2].id, sent[2].success) == ("e", False) and "1 requests with this cache_salt" in sent[2].message


def test_a_line_tells_which_link_is_left_alone_and_when_it_is_used_again(caplog):
    config = SchedulerConfig(1, 100, num_host_pages=100, page_bytes=100, context_len=90)
    core = Simulation(config, SimulatedHardware(1, lambda launch: 1.0)).core
    links = core.scheduler.cache.controller.links
    shown = lambda: core.scheduler.state()["links"][D2H]["left_alone"]  # noqa: E731
    with zmq.Context() as context, context.socket(zmq.PULL) as receiver, context.socket(zmq.PUSH) as sender:
        receiver.bind("inproc://scheduler")
        wake_fd = os.eventfd(0)
        process = SchedulerProcess(
            core, None, RankSync(SINGLE_RANK, context, ""), receiver, sender, wake_fd, grammars()
        )
        for late in ((), (D2H,), (D2H,), (), (D2H,)):
            links.late = frozenset(late)
            process._log_links()
            assert shown() == bool(late)
        os.close(wake_fd)
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "no more copies by the link d2h from the device",
        "the link d2h from the device is used again",
    ], "a line of a kind once a minute"


def test_the_line_of_throughput_comes_while_a_launch_takes_long(monkeypatch, caplog):
    """The clock of the simulation stands still, so that the launch is never over."""
    monkeypatch.setattr(scheduler_process, "LOG_EVERY_S", 0.01)
    config = SchedulerConfig(1, 100, num_host_pages=0, page_bytes=100, context_len=90)
    core = Simulation(config, SimulatedHardware(1, lambda launch: 1.0)).core
    params = SamplingParams(max_new_tokens=1, temperature=0.0)
    request = TokenizedGenerateReqInput(rid="r", input_ids=ids_to_bytes([1, 2, 3]), sampling_params=params)
    core.step(0.0, core.progress(), [request])
    with zmq.Context() as context, context.socket(zmq.PULL) as receiver, context.socket(zmq.PUSH) as sender:
        receiver.bind("inproc://scheduler")
        wake_fd = os.eventfd(0)
        process = SchedulerProcess(
            core, None, RankSync(SINGLE_RANK, context, ""), receiver, sender, wake_fd, grammars()
        )
        with caplog.at_level(logging.INFO):
            while "#running-req: 1" not in caplog.text:
                process._sleep()
        os.close(wake_fd)


@pytest.mark.parametrize(
    ("stall_s", "hits", "line"),
    [
        (0.0, 0, None),
        (0.004, 0, None),
        (0.42, 0, "Loads. stall: 0.42 s"),
        (0.42, 3, "Loads. stall: 0.42 s, #bundle-hits: 3"),
        (0.0, 3, "Loads. #bundle-hits: 3"),
    ],
)
def test_the_line_of_loads_has_what_is_not_0(stall_s, hits, line, monkeypatch, caplog):
    monkeypatch.setattr(scheduler_process, "LOG_EVERY_S", 0.0)
    config = SchedulerConfig(1, 100, num_host_pages=100, page_bytes=100, context_len=90)
    core = Simulation(config, SimulatedHardware(1, lambda launch: 1.0)).core
    core.scheduler.planner.stall_s = stall_s
    core.scheduler.admission.counters["bundle_hits"] = hits
    with zmq.Context() as context, context.socket(zmq.PULL) as receiver, context.socket(zmq.PUSH) as sender:
        receiver.bind("inproc://scheduler")
        wake_fd = os.eventfd(0)
        process = SchedulerProcess(
            core, None, RankSync(SINGLE_RANK, context, ""), receiver, sender, wake_fd, grammars()
        )
        with caplog.at_level(logging.INFO):
            process._log_throughput()
        os.close(wake_fd)
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0].startswith("Batch. ") and messages[1:] == ([] if line is None else [line])


def test_an_io_backend_that_needs_a_gpu_is_refused_on_the_cpu():
    """Upstream's default: who asks for it gets told, not something else."""
    args = ServerArgs(model_path="/no/model", enable_hierarchical_cache=True, hicache_io_backend="kernel")
    with pytest.raises(StartupError, match="--hicache-io-backend kernel cannot run here: it needs a GPU; on the CPU"):
        build_core(args, RankSetup(SINGLE_RANK, lambda: None, Path(), ExitStack()))
