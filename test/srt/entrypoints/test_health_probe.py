"""What `/health_generate` waits for: a token of any request, beside a full queue too."""

from __future__ import annotations

import asyncio

import pytest

from sglang.srt.entrypoints import health_probe
from sglang.srt.entrypoints.health_probe import wait_for_token
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.errors import RequestError
from support.tokenizer_manager_harness import Harness, run

ONE_WAITS = ServerArgs(model_path="m", max_queued_requests=1)


def test_an_idle_server_makes_a_token() -> None:
    async def test(h: Harness) -> None:
        waiting = asyncio.create_task(wait_for_token(h.manager))
        probe = await h.until_sent(1)
        await h.settle()
        assert not waiting.done()
        h.output(probe.rid, "a", [0], FinishReason(type="length", length=1))
        await waiting
        assert len(h.sent) == 1

    run(test)


def test_a_token_of_a_client_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is sent, and the queue may be full."""
    monkeypatch.setattr(health_probe, "_OTHERS_S", 1e6)
    monkeypatch.setattr(health_probe, "_TIMEOUT_S", 1e6)

    async def test(h: Harness) -> None:
        client = h.start()
        message = await h.until_sent(1)
        waiting = asyncio.create_task(wait_for_token(h.manager))
        await asyncio.sleep(0)
        h.output(message.rid, "a", [0])
        await waiting
        assert len(h.sent) == 1
        client.cancel()

    run(test, args=ONE_WAITS)


def test_the_queue_is_never_full_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_probe, "_OTHERS_S", 0.0)

    async def test(h: Harness) -> None:
        client = h.start()
        message = await h.until_sent(1)
        for of_client in (True, False):  # whose token comes first
            waiting = asyncio.create_task(wait_for_token(h.manager))
            probe = await h.until_sent(len(h.sent) + 1)
            h.output((message if of_client else probe).rid, "a", [0], FinishReason(type="length", length=1))
            await waiting
        await client
        await h.settle()
        assert not h.manager.is_active

    run(test, args=ONE_WAITS)


def test_it_takes_no_place_in_the_queue() -> None:
    """Else a client would be refused for it, or take its place."""

    async def test(h: Harness) -> None:
        waiting = asyncio.create_task(wait_for_token(h.manager))
        probe = await h.until_sent(1)
        clients = [h.start(priority=5) for _ in range(2)]
        await h.until_sent(2)
        await h.settle()
        assert [client.done() for client in clients] == [False, True] and not waiting.done()
        with pytest.raises(RequestError, match="the queue is full"):
            clients[1].result()
        h.output(probe.rid, "a", [0], FinishReason(type="length", length=1))
        await waiting
        clients[0].cancel()

    run(test, args=ServerArgs(model_path="m", max_queued_requests=1, enable_priority_scheduling=True))


def test_a_server_that_makes_no_token_is_ill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_probe, "_OTHERS_S", 0.0)
    monkeypatch.setattr(health_probe, "_TIMEOUT_S", 0.05)

    async def test(h: Harness) -> None:
        client = h.start()
        await h.until_sent(1)
        with pytest.raises(RequestError, match="no token was generated within") as error:
            await wait_for_token(h.manager)
        assert error.value.status_code == 503
        client.cancel()

    run(test)
