"""Work that several coroutines ask for at the same time."""

from __future__ import annotations

import asyncio

import pytest

from sglang.srt.utils.shared_tasks import SharedTasks


def test_it_is_done_once_and_anew_for_who_comes_later() -> None:
    async def main() -> None:
        shared, begun = SharedTasks[str, int](), 0
        go_on = asyncio.Event()

        async def work() -> int:
            nonlocal begun
            begun += 1
            await go_on.wait()
            return begun

        asking = [asyncio.create_task(shared.get("a", work)) for _ in range(3)]
        await asyncio.sleep(0)
        go_on.set()
        assert await asyncio.gather(*asking) == [1, 1, 1]
        assert await shared.get("a", work) == 2 and await shared.get("b", work) == 3

    asyncio.run(main())


def test_it_is_cancelled_when_all_have_left() -> None:
    async def main() -> None:
        shared, was_cancelled = SharedTasks[str, None](), False

        async def work() -> None:
            nonlocal was_cancelled
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                was_cancelled = True
                raise

        first, last = (asyncio.create_task(shared.get("a", work)) for _ in range(2))
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.wait([first])
        await asyncio.sleep(0.01)
        assert not was_cancelled, "one waits for it still"
        last.cancel()
        await asyncio.wait([last])
        await asyncio.sleep(0.01)
        assert was_cancelled

    asyncio.run(main())


def test_all_get_its_error() -> None:
    async def main() -> None:
        shared = SharedTasks[str, None]()

        async def work() -> None:
            raise ValueError("no")

        for each in await asyncio.gather(*(shared.get("a", work) for _ in range(2)), return_exceptions=True):
            assert isinstance(each, ValueError)
        with pytest.raises(ValueError, match="no"):
            await shared.get("a", work)

    asyncio.run(main())
