"""A real server that streams a request over memory that it borrows, over HTTP: its lender needs the memory in the
middle of the request, dies or stands still. The answer is that of a server without a cache, or an error with status
503 where no tier has room. At the end no tier holds a page of it, and the next long request is served."""

from __future__ import annotations

import contextlib
import json
import random
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.all_tiers import Lender, borrowed_tokens
from support.server_fixture import NO_TLS, PATIENCE_S, Server, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Device for 672 tokens beside the buffers.
MASTER = (
    "--hicache --max-total-tokens 800 --chunked-prefill-size 32 --hicache-load-or-recompute off --layer-stream 2 "
    "--layer-stream-tokens 128 --peer-role master --peer-slab-size 1 --peer-size 0.05 --peer-timing idle=3"
)
# A slab has 512 tokens of this model. With the first ratio the host has room for what the device lacks.
ROOMY, TIGHT = 4.0, 1.0
WORKER = (
    "--max-total-tokens 4096 --context-length 512 --page-size 4 --peer-role worker --peer-slab-size 1 --peer-window 1"
)
NUM_SLABS, LONG, SHORT = 8, 2400, 400
# Of the worker's requests, which need nearly all that it has.
NUM_AT_ONCE = 10
# How often a request is repeated that ends before its lender has acted.
ATTEMPTS = 5


def prompt(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300, 1900) for _ in range(num_tokens)]


def body(ids: Any, max_new_tokens: int) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": params, "return_cached_tokens_details": True}


def generate(server: Server, ids: list[int], max_new_tokens: int) -> dict[str, Any]:
    response = server.post("/generate", body(ids, max_new_tokens))
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


@dataclass(frozen=True)
class Moment:
    """When a lender acts."""

    # Of a request of LONG tokens: tokens that are computed, and tokens of the answer.
    num_computed: int
    num_generated: int
    max_new_tokens: int


MOMENTS = {"prefill": Moment(LONG // 2, 0, 8), "decode": Moment(LONG, 3, 160)}


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    """Without a cache."""
    with Server("--disable-radix-cache", "--chunked-prefill-size", "512") as server:
        yield server


class LongRequest:
    """A request in a thread of its own, whose answer comes piece by piece."""

    def __init__(self, server: Server, seed: int, moment: Moment) -> None:
        self.output_ids: list[int] = []
        self.details: dict[str, int] = {}
        self.error = self.finish_reason = ""
        self.is_over = False
        self._server = server
        self._wanted = {**body(prompt(seed, LONG), moment.max_new_tokens), "stream": True}
        self._moment = moment
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            with httpx.stream(
                "POST", self._server.url + "/generate", json=self._wanted, timeout=PATIENCE_S, verify=NO_TLS
            ) as response:
                if response.status_code != 200:
                    self.error = response.read().decode() + f" status {response.status_code}"
                    return
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    reply = json.loads(line.removeprefix("data: "))
                    if "error" in reply:
                        self.error = line + f" status {reply['error']['code']}"
                        return
                    self.output_ids = reply["output_ids"]
                    self.details = reply["meta_info"]["cached_tokens_details"]
                    self.finish_reason = (reply["meta_info"]["finish_reason"] or {"type": ""})["type"]
        except Exception as error:
            self.error = repr(error)
        finally:
            self.is_over = True

    def expect_end_without_room(self, wanted: list[int]) -> None:
        """With an error, behind what has come of its answer."""
        assert self.output_ids == wanted[: len(self.output_ids)] and len(self.output_ids) < len(wanted)
        assert "status 503" in self.error and "peers have not lent the memory" in self.error

    def is_at_its_moment(self) -> bool:
        """Whether it has come so far, with pages at its lender; or is over."""
        state = self._server.state()
        stream = state["layer_stream"]
        is_there = stream["resident_tokens"] + stream["streamed_tokens"] >= self._moment.num_computed
        is_lent = state["tiers"]["peer"]["used_tokens"] > 0
        return self.is_over or (is_there and is_lent and len(self.output_ids) >= self._moment.num_generated)

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert self.is_over, "the request does not end"


@dataclass
class Work:
    """Of a worker: requests that need nearly all of its memory, again and again until it is closed."""

    server: Server
    wrong: list[str] = field(default_factory=list)
    num_done: int = 0

    def __post_init__(self) -> None:
        self._prompts = [prompt(100 + i, SHORT) for i in range(NUM_AT_ONCE)]
        self._wanted = [generate(self.server, ids, 32)["output_ids"] for ids in self._prompts]
        self._closed = threading.Event()

    def _run(self) -> None:
        while not self._closed.is_set():
            reply = self.server.post("/generate", body(self._prompts, 32))
            if reply.status_code != 200 or [each["output_ids"] for each in reply.json()] != self._wanted:
                self.wrong.append(reply.text)
            self.num_done += 1

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        self._closed.clear()
        # The second batch waits while the first one is served: at no time the worker has nothing to do.
        threads = [threading.Thread(target=self._run) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._closed.set()
            for thread in threads:
                thread.join()
        assert not self.wrong, self.wrong[0]


def expect_room_again(master: Server) -> None:
    """Nothing is held, and all pages are free once the cache is dropped."""

    def is_quiet() -> bool:
        # In one state: an idle server may still begin copies to the host.
        state = master.state()
        pages = [tier["pages"] for tier in state["tiers"].values()]
        return not any(link["operations_in_flight"] for link in state["links"].values()) and not any(
            each["held"] or each["filling"] for each in pages
        )

    wait_until(is_quiet)
    state = master.state()
    assert not any(state["queues"].values())
    assert state["layer_stream"]["requests"] == 0
    wait_until(lambda: master.post("/flush_cache").status_code == 200)
    wait_until(lambda: all(t["free_pages"] == t["num_pages"] for t in master.state()["tiers"].values()))


def counters(server: Server) -> dict[str, int]:
    found: dict[str, int] = server.state()["counters"]
    return found


def withdrawn(master: Server) -> int:
    return counters(master).get("slabs_withdrawn", 0)


def begun_long(master: Server, seed: int, moment: Moment) -> LongRequest:
    """One that has come to its moment and is not over."""
    for _ in range(ATTEMPTS):
        request = LongRequest(master, seed, moment)
        wait_until(request.is_at_its_moment)
        if not request.is_over:
            return request
        assert not request.error, request.error
        wait_until(lambda: master.post("/flush_cache").status_code == 200)
    raise AssertionError("the request always ends before its moment")


def has_room(master: Server) -> bool:
    """Whether the master has borrowed room for what its device and host lack; it borrows what it is asked for."""
    generate(master, prompt(99, LONG), 1)
    return borrowed_tokens(master) >= 1024


# -- a lender that needs its memory --------------------------------------------------------------------------------


def request_that_is_robbed(master: Server, work: Work, moment: Moment, until_end: bool) -> LongRequest:
    """One whose lender has taken memory back in its middle. until_end: the lender is busy until the request ends."""
    for _ in range(ATTEMPTS):
        wait_until(lambda: master.post("/flush_cache").status_code == 200)
        before = withdrawn(master)
        request = begun_long(master, 1, moment)
        with work.going_on():
            while not (is_robbed := withdrawn(master) > before) and not request.is_over:
                time.sleep(0.02)
            if until_end:
                request.join()
        request.join()
        if is_robbed:
            return request
    raise AssertionError("the worker always takes its memory back too late")


@pytest.mark.parametrize(
    ("outcome", "where", "strict"),
    [
        ("moves to the host", "prefill", ()),
        ("moves to the host", "decode", ("--peer-strict",)),
        ("waits for the worker", "prefill", ("--peer-strict",)),
        ("waits for the worker", "decode", ()),
        ("has no room", "prefill", ()),
        ("has no room", "decode", ("--peer-strict",)),
    ],
)
def test_the_lender_needs_its_memory(
    outcome: str, where: str, strict: tuple[str, ...], tmp_path: Path, plain: Server
) -> None:
    """In the middle of a request that needs device, borrowed memory and host."""
    tmp_path.chmod(0o700)
    endpoint = ("--peer-endpoint", f"ipc://{tmp_path}/peers")
    ratio = ROOMY if outcome == "moves to the host" else TIGHT
    moment = MOMENTS[where]
    wanted = generate(plain, prompt(1, LONG), moment.max_new_tokens)["output_ids"]
    worker = Server(*WORKER.split(), *endpoint, *strict)
    with worker, Server(*MASTER.split(), *endpoint, "--hicache-ratio", str(ratio)) as master:
        work = Work(worker)
        wait_until(lambda: has_room(master))
        # If it has no room it waits for what the worker, which is busy, might lend.
        request = request_that_is_robbed(master, work, moment, until_end=outcome == "has no room")
        if outcome == "has no room":
            request.expect_end_without_room(wanted)
        else:
            assert not request.error and request.output_ids == wanted
        expect_room_again(master)
        # Idle again, it lends again.
        answer = generate(master, prompt(1, LONG), moment.max_new_tokens)
        assert answer["output_ids"] == wanted
        expect_room_again(master)
        # What the master does not use it gives back.
        wait_until(lambda: worker.state()["tiers"]["device"]["total_tokens"] == 4096)
        state = worker.state()
        assert state["peers"]["slabs"]["home"] == NUM_SLABS and state["tiers"]["device"]["pages"]["lent"] == 0
        with work.going_on():
            before_num = work.num_done
            wait_until(lambda: work.num_done > before_num)
        worker.stop()
        master.stop()


# -- a lender that dies or stands still ----------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True], ids=["mapped", "strict"])
def test_a_second_turn_finds_what_the_first_one_spilled(strict: bool, tmp_path: Path, plain: Server) -> None:
    lender = Lender(tmp_path / "lender", NUM_SLABS, strict)
    try:
        with Server(*MASTER.split(), "--peer-endpoint", lender.endpoint, "--hicache-ratio", str(TIGHT)) as master:
            ids = prompt(2, LONG)
            first = generate(master, ids, 16)
            assert first["output_ids"] == generate(plain, ids, 16)["output_ids"]
            ids += first["output_ids"] + prompt(3, 100)
            second = generate(master, ids, 16)
            assert second["output_ids"] == generate(plain, ids, 16)["output_ids"]
            found = second["meta_info"]["cached_tokens_details"]
            assert found["peer"] > 700 and sum(found.values()) > LONG - 64, found
            assert counters(master)["streamed_reqs"] == 2
            expect_room_again(master)
            master.stop()
    finally:
        lender.kill()


@pytest.mark.parametrize(
    ("ratio", "where", "strict"),
    [
        (ROOMY, "prefill", False),
        (ROOMY, "decode", False),
        (ROOMY, "decode", True),
        (TIGHT, "prefill", True),
        (TIGHT, "decode", False),
    ],
)
def test_the_lender_is_killed(ratio: float, where: str, strict: bool, tmp_path: Path, plain: Server) -> None:
    """With a host that has room for it all the request starts again. Else it ends, as no other peer lends."""
    moment = MOMENTS[where]
    wanted = generate(plain, prompt(4, LONG), moment.max_new_tokens)["output_ids"]
    lender = Lender(tmp_path / "lender", NUM_SLABS, strict)
    try:
        with Server(*MASTER.split(), "--peer-endpoint", lender.endpoint, "--hicache-ratio", str(ratio)) as master:
            wait_until(lambda: has_room(master))
            request = begun_long(master, 4, moment)
            lender.kill()
            request.join()
            if ratio == ROOMY:
                assert not request.error and request.output_ids == wanted
            else:
                request.expect_end_without_room(wanted)
            assert borrowed_tokens(master) == 0
            # In strict mode a copy may fail before its death is noticed.
            assert re.search(r"is gone, and \d+ slabs? of its memory with it|is left alone", master.output())
            expect_room_again(master)
            lender.start()
            wait_until(lambda: has_room(master))
            assert generate(master, prompt(4, LONG), moment.max_new_tokens)["output_ids"] == wanted
            expect_room_again(master)
            master.stop()
    finally:
        lender.kill()


@pytest.mark.parametrize(
    ("ratio", "where"), [(ROOMY, "prefill"), (ROOMY, "decode"), (TIGHT, "prefill"), (TIGHT, "decode")]
)
def test_a_strict_lender_stands_still(ratio: float, where: str, tmp_path: Path, plain: Server) -> None:
    """With a host that has room for it all the request starts again. Else it waits until the lender goes on."""
    moment = MOMENTS[where]
    wanted = generate(plain, prompt(5, LONG), moment.max_new_tokens)["output_ids"]
    lender = Lender(tmp_path / "lender", NUM_SLABS, strict=True)
    try:
        with Server(*MASTER.split(), "--peer-endpoint", lender.endpoint, "--hicache-ratio", str(ratio)) as master:
            wait_until(lambda: has_room(master))
            request = begun_long(master, 5, moment)
            lender.pause()
            if ratio == TIGHT:
                wait_until(lambda: master.state()["peers"]["lenders"][0]["left_alone"] or request.is_over)
                assert not request.is_over
                lender.resume()
            request.join()
            assert not request.error and request.output_ids == wanted
            assert "is left alone until it answers" in master.output()
            expect_room_again(master)
            if ratio == ROOMY:
                lender.resume()
            wait_until(lambda: has_room(master))
            assert generate(master, prompt(5, LONG), moment.max_new_tokens)["output_ids"] == wanted
            expect_room_again(master)
            master.stop()
    finally:
        lender.kill()
