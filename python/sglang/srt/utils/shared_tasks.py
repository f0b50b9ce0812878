"""`SharedTasks`: what several coroutines ask for at the same time is done once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class _Shared(Generic[T]):
    """A task, and how many wait for it."""

    def __init__(self, task: asyncio.Task[T]) -> None:
        self.task = task
        self.num_waiting = 0


class SharedTasks(Generic[K, T]):
    """Of one event loop. A task ends with the last of those that wait for it: it is cancelled if all have left."""

    def __init__(self) -> None:
        self._shared: dict[K, _Shared[T]] = {}

    def __len__(self) -> int:
        """Tasks that are waited for."""
        return len(self._shared)

    async def get(self, key: K, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of the task of that key, which is begun if there is none. Raises what it raises."""
        if (shared := self._shared.get(key)) is None:
            shared = self._shared[key] = _Shared(asyncio.create_task(begin()))
        shared.num_waiting += 1
        try:
            return await asyncio.shield(shared.task)
        finally:
            shared.num_waiting -= 1
            if shared.num_waiting == 0:
                del self._shared[key]
                shared.task.cancel()
