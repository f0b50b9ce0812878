"""`TokenizerThreads`: the tokenizer's work for the event loop, without Python's lock where the tokenizer is fast.

Owns the helper threads, and the prompts that are being tokenised. Requests with the same text share one encoding. A
text that no thread has begun is dropped when they have all left. All methods belong to one event loop. Knows no
limits of length and no vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sglang.srt.managers.text_encoder import EncodedText, TextEncoder
from sglang.srt.utils.pools import run_in_pool
from sglang.srt.utils.shared_tasks import SharedTasks

# Characters. Longer texts take half a second and more. They wait for each other, so that short ones need not wait.
_LONG_TEXT = 1 << 20
# Tokens. Python takes milliseconds for the log-probabilities of this many.
_MANY_TOKENS = 256

T = TypeVar("T")


class TokenizerThreads:
    """tokenizer: see `TextEncoder`. reused: called for each shared encoding with the tokens that came from the table
    of reuse."""

    def __init__(self, tokenizer: Any, reused: Callable[[int], None]) -> None:
        self.encoder = TextEncoder(tokenizer)
        self._reused = reused
        # By text, add_special_tokens and namespace.
        self._shared = SharedTasks[tuple[str, bool, str], EncodedText]()
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._long_pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize-long")

    async def encode(
        self, text: str, add_special_tokens: bool, namespace: str | None = None, max_tokens: int | None = None
    ) -> EncodedText:
        """As `TextEncoder.encode`."""

        def run() -> EncodedText:
            return self.encoder.encode(
                text, add_special_tokens=add_special_tokens, namespace=namespace, max_tokens=max_tokens
            )

        pool = self._pool if len(text) <= _LONG_TEXT else self._long_pool
        return await run_in_pool(pool, run)

    async def encode_shared(
        self, text: str, add_special_tokens: bool, namespace: str, max_tokens: int
    ) -> EncodedText:
        """The same, once for all that ask at the same time."""
        key = text, add_special_tokens, namespace
        return await self._shared.get(key, lambda: self._encode_counted(*key, max_tokens))

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        return await run_in_pool(self._pool, function, *args)

    async def run_if_many(self, num_tokens: int, function: Callable[..., T], *args: Any) -> T:
        """Python's work for each of num_tokens tokens: here if they are few, off the event loop if they are many."""
        return await self.run(function, *args) if num_tokens > _MANY_TOKENS else function(*args)

    def close(self) -> None:
        for pool in (self._pool, self._long_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _encode_counted(
        self, text: str, add_special_tokens: bool, namespace: str, max_tokens: int
    ) -> EncodedText:
        encoded = await self.encode(text, add_special_tokens, namespace, max_tokens)
        self._reused(encoded.reused)
        return encoded
