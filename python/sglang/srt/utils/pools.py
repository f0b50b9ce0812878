"""Handing work to a pool of threads where the system may start no more of them. Stateless."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from sglang.srt.utils.errors import RequestError

T = TypeVar("T")

logger = logging.getLogger(__name__)


def submit(pool: Executor, function: Callable[..., T], *args: Any) -> Future[T]:
    """Raises RequestError where no thread can be started. What was handed over may be done later all the same."""
    try:
        return pool.submit(function, *args)
    except RuntimeError as error:
        logger.warning("a request was refused (%s): raise the limit of processes (ulimit -u, pids.max)", error)
        raise RequestError(f"the server has no thread for this request ({error}): try again later", 503) from None


async def run_in_pool(pool: Executor, function: Callable[..., T], *args: Any) -> T:
    """The result of `submit`, for an event loop."""
    return await asyncio.wrap_future(submit(pool, function, *args))
