"""Whether the engine makes tokens: what `/health_generate` waits for. Stateless."""

from __future__ import annotations

import asyncio
import contextlib

from sglang.srt.managers.tokenizer_manager import GenerateRequest, TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.errors import RequestError

# As upstream has it.
_TIMEOUT_S = 20.0
# Where requests run, their tokens are waited for first.
_OTHERS_S = 1.0


async def wait_for_token(manager: TokenizerManager) -> None:
    """Returns once any request has a token: one of a client, or a request of our own, for which the queue is never
    full. Raises RequestError if none comes in time, or the server stops."""
    manager.token_came.clear()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            if manager.is_active:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_OTHERS_S):
                        await manager.token_came.wait()
                        return
            await _first_of(manager)
    except TimeoutError:
        raise RequestError(f"no token was generated within {_TIMEOUT_S:g} s", 503) from None


async def _first_of(manager: TokenizerManager) -> None:
    async def own() -> None:
        probe = GenerateRequest(
            prompt=[0], params=SamplingParams(max_new_tokens=1, temperature=0.0), is_health_check=True
        )
        async for _ in manager.generate(probe):
            pass

    tasks = asyncio.create_task(own()), asyncio.create_task(manager.token_came.wait())
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
