"""A scheduler process without a model: it answers a prompt by repeating it, so that every text is known beforehand.
With --script it answers with the token ids in a file instead, and ends.

Run as `python fake_scheduler.py [flags] '<json>'`; the flags make it slow or broken, as a test needs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from sglang.srt.managers.io_struct import (
    AbortReq,
    AttachHiCacheStorageReqInput,
    BatchTokenIDOutput,
    ClearHiCacheReqInput,
    ControlReqOutput,
    DetachHiCacheStorageReqInput,
    FinishReason,
    FlushCacheReqInput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    SchedulerReady,
    SwitchTierReqInput,
    TokenizedGenerateReqInput,
    TokenOutput,
    bytes_to_ids,
    decode_to_scheduler,
    detokenize_req,
    encode,
    ids_to_bytes,
)
from sglang.srt.sampling.logprob_types import TokenLogprob
from sglang.srt.sampling.sampling_params import GrammarSpec, SamplingParams
from sglang.srt.utils.child_process import ChildArgs, StartupError, open_pull, open_push, run_child
from sglang.srt.utils.startup_progress import StartupProgress

EOS = 1


@dataclass
class Running:
    req: TokenizedGenerateReqInput
    prompt: list[int]
    script: list[int] | None = None
    done: int = 0

    def step(self) -> TokenOutput:
        answer = self.prompt if self.script is None else [*self.script, EOS]
        token = answer[self.done % len(answer)]
        self.done += 1
        params = self.req.sampling_params
        reason = None
        if token in params.stop_token_ids or (token == EOS and not params.ignore_eos):
            reason = FinishReason(type="stop", matched=token)
        elif self.done >= params.max_new_tokens:
            reason = FinishReason(type="length", length=params.max_new_tokens)
        return self.output([token], reason)

    def logprob(self, token: int, first: bool = False) -> TokenLogprob:
        """Made up, so that a test knows it: token 100 has -0.1, and the likeliest are it and those after it."""
        spec = self.req.logprobs
        if first:
            return TokenLogprob(token, None)
        top = [(-(token + i) / 1000, token + i) for i in range(spec.top)]
        return TokenLogprob(token, -token / 1000, top, [(-other / 1000, other) for other in spec.token_ids])

    def output(self, ids: list[int], reason: FinishReason | None) -> TokenOutput:
        size = len(self.prompt)
        logprobs, prompt_logprobs = [], []
        if self.req.logprobs is not None:
            logprobs = [self.logprob(token) for token in ids]
            start = self.req.logprobs.prompt_from
            if start is not None and self.done == len(ids):
                prompt_logprobs = [self.logprob(self.prompt[i], first=i == 0) for i in range(start, size)]
        return TokenOutput(
            rid=self.req.rid,
            output_ids=ids_to_bytes(ids),
            finish_reason=reason,
            prompt_tokens=size,
            completion_tokens=self.done,
            cached_tokens=size // 2 + size // 4,
            cached_tokens_details={"device": size // 2, "host": size // 4},
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


class FakeScheduler:
    def __init__(self, flags: argparse.Namespace, args: ChildArgs) -> None:
        self.flags = flags
        context = zmq.Context()
        self.receive = open_pull(context, args.ipc["scheduler_in"])
        self.send_socket = open_push(context, args.ipc["detokenizer_in"])
        self.running: dict[str, Running] = {}
        self.counters = {"aborted": 0, "requests": 0, "steps": 0, "load_back_tokens": 7}
        self.seeds: list[int | None] = []
        self.params: list[SamplingParams] = []
        self.grammars: list[GrammarSpec | None] = []
        self.prompts: list[list[int]] = []
        self.session_ids: list[str] = []
        self.storage: dict[str, str] | None = None
        self.switches = {"device": {"reads": True, "writes": True}, "host": {"reads": True, "writes": True}}

    def send(self, message: object) -> None:
        self.send_socket.send(encode(message))

    def serve(self) -> None:
        self.send(
            SchedulerReady(
                max_total_num_tokens=4096,
                max_req_input_len=self.flags.max_req_input_len,
                info={"max_running_requests": 256, "page_size": 16},
            )
        )
        while True:
            while self.receive.poll(0 if self.running else 1000):
                self.handle(decode_to_scheduler(self.receive.recv()))
            if self.running and not self.is_held():
                self.step()

    def is_held(self) -> bool:
        held = bool(self.flags.hold) and os.path.exists(self.flags.hold)
        if held:
            time.sleep(0.01)
        return held

    def handle(self, message: object) -> None:
        if isinstance(message, TokenizedGenerateReqInput):
            self.counters["requests"] += 1
            self.seeds.append(message.sampling_params.sampling_seed)
            self.params.append(message.sampling_params)
            self.session_ids.append(message.session_id)
            self.send(detokenize_req(message))
            self.grammars.append(message.sampling_params.grammar)
            prompt = bytes_to_ids(message.input_ids).tolist()
            self.prompts.append(prompt)
            script = json.loads(Path(self.flags.script).read_text()) if self.flags.script else None
            self.running[message.rid] = Running(message, prompt, script)
        elif isinstance(message, AbortReq):
            if (req := self.running.pop(message.rid, None)) is not None:
                self.counters["aborted"] += 1
                self.send(BatchTokenIDOutput(outputs=[req.output([], FinishReason(type="abort"))]))
        elif isinstance(message, FlushCacheReqInput):
            busy = bool(self.running)
            self.send(ControlReqOutput(id=message.id, success=not busy, message="busy" if busy else ""))
        elif isinstance(message, AttachHiCacheStorageReqInput):
            refusal = "detach it first" if self.storage is not None else ""
            if not refusal:
                self.storage = {
                    "backend": message.backend,
                    "prefetch_policy": message.prefetch_policy,
                    "write_policy": message.write_policy,
                    "extra_config": message.extra_config,
                }
            self.send(ControlReqOutput(id=message.id, success=not refusal, message=refusal))
        elif isinstance(message, DetachHiCacheStorageReqInput | ClearHiCacheReqInput):
            refusal = "no storage backend is attached" if self.storage is None else ""
            if isinstance(message, DetachHiCacheStorageReqInput):
                self.storage = None
            self.send(ControlReqOutput(id=message.id, success=not refusal, message=refusal))
        elif isinstance(message, SwitchTierReqInput):
            refusal = "" if message.tier in self.switches else f"this server has no tier {message.tier!r}"
            given = {"reads": message.reads, "writes": message.writes}
            self.switches.get(message.tier, {}).update({way: on for way, on in given.items() if on is not None})
            self.send(ControlReqOutput(id=message.id, success=not refusal, message=refusal))
        elif isinstance(message, GetInternalStateReq):
            if self.flags.deaf:
                return
            state = {
                "page_size": 1,
                "tiers": {
                    "device": {"total_tokens": 4096, "used_tokens": 1024, "free_pages": 3072},
                    "host": {"total_tokens": 8192, "used_tokens": 0, "free_pages": 8100},
                },
                "queues": {"running": len(self.running), "waiting": 0, "waiting_tokens": 0},
                "transient": {"in_queue_tokens": 0, "in_flight_tokens": 0},
                "counters": self.counters,
                "seeds": self.seeds,
                "grammars": [grammar and [grammar.kind, grammar.source] for grammar in self.grammars[-8:]],
                "prompts": self.prompts[-8:],
                "params": [msgspec.structs.asdict(params) for params in self.params[-8:]],
                "session_ids": self.session_ids,
                "storage": self.storage,
                "switches": self.switches,
            }
            self.send(GetInternalStateReqOutput(id=message.id, state=msgspec.json.encode(state)))

    def step(self) -> None:
        self.counters["steps"] += 1
        if self.counters["steps"] == self.flags.crash_at:
            raise RuntimeError("the fake scheduler was told to crash")
        if self.counters["steps"] == self.flags.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        outputs = [req.step() for req in self.running.values()]
        for output in outputs:
            if output.finish_reason is not None:
                del self.running[output.rid]
        self.send(BatchTokenIDOutput(outputs=outputs))
        time.sleep(self.flags.delay_s)


def start(args: ChildArgs, on_exit: ExitStack) -> Callable[[], None]:
    if FLAGS.fail:
        raise StartupError(FLAGS.fail)
    if FLAGS.start_hold:
        Path(FLAGS.start_hold).touch()
        StartupProgress(args.stage_file).stage("standing still")
        while os.path.exists(FLAGS.start_hold):
            time.sleep(0.01)
    if FLAGS.stuck:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    return FakeScheduler(FLAGS, args).serve


parser = argparse.ArgumentParser()
parser.add_argument("--delay-s", type=float, default=0.0)
parser.add_argument("--crash-at", type=int, default=0, help="raise at this step")
parser.add_argument("--kill-at", type=int, default=0, help="die by SIGKILL at this step")
parser.add_argument("--fail", default="", help="fail at start-up with this sentence")
parser.add_argument("--hold", default="", help="stand still while this file exists, once a request runs")
parser.add_argument("--start-hold", default="", help="make this file, and get ready when it is gone")
parser.add_argument("--script", default="", help="a file with a JSON list of the token ids of every answer")
parser.add_argument("--deaf", action="store_true", help="never answer questions about the state")
parser.add_argument("--stuck", action="store_true", help="do not stop when asked to")
parser.add_argument("--max-req-input-len", type=int, default=4000)
parser.add_argument("name", nargs="?")
FLAGS = parser.parse_args()

if __name__ == "__main__":
    run_child(start)
