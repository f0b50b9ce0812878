"""`BlockKeys`: names for blocks of tokens on the storage tiers: a keyed hash chain. Pure; numpy and hashlib only.

    root ──► key 0 ──► key 1 ──► key 2        key i = BLAKE2b(key i-1 + tokens of block i), 128 bits, with a secret
             tokens    tokens    tokens
             0..63     64..127   128..191

A key stands for everything that the block's KV depends on: all tokens before it and, through the root, the namespace
of the request and the facts that the deployment mixes into the secret (model, weights, dtype, layout). Without the
secret it is impossible to tell from a name whether a text is stored, or to make two texts collide.
"""

from __future__ import annotations

import hashlib

import numpy as np

from sglang.srt.mem_cache.namespaces import shared_part

KEY_BYTES = 16
TENANT_BYTES = 8
NO_KEYS = np.empty((0, KEY_BYTES), np.uint8)


class BlockKeys:
    """secret: up to 64 bytes. block_tokens: tokens per block. tenant_key: of tenants' names, the same for all models
    and settings that share a folder or a store."""

    def __init__(self, secret: bytes, block_tokens: int, tenant_key: bytes = b"") -> None:
        if block_tokens < 1:
            raise ValueError(f"a block needs at least one token, got {block_tokens}")
        self.secret = secret
        self._tenant_key = tenant_key
        self.block_tokens = block_tokens
        # Equal if the same tokens get the same names.
        self.naming = hashlib.blake2b(b"%d" % block_tokens, key=secret, digest_size=8, person=b"naming").digest()

    def root(self, namespace: str) -> bytes:
        """The key to which the namespace's first block is chained."""
        shared = shared_part(namespace)
        return hashlib.blake2b(shared.encode(), key=self.secret, digest_size=KEY_BYTES).digest()

    def tenant(self, salt: str) -> bytes:
        """What stands for a `cache_salt` in storage, 8 bytes; none for the empty one."""
        if not salt:
            return b""
        return hashlib.blake2b(
            salt.encode(), key=self._tenant_key, digest_size=TENANT_BYTES, person=b"tenant"
        ).digest()

    def chain(self, last: bytes, tokens: np.ndarray) -> np.ndarray:
        """Keys of the whole blocks in tokens (int32), of which the first follows the block with key `last`.

        Returns (len(tokens) // block_tokens, 16) uint8.
        """
        num_blocks = len(tokens) // self.block_tokens
        size = self.block_tokens * 4
        data = np.ascontiguousarray(tokens[: num_blocks * self.block_tokens], "<i4").data.cast("B")
        keys = []
        for start in range(0, num_blocks * size, size):
            hashed = hashlib.blake2b(last, key=self.secret, digest_size=KEY_BYTES)
            hashed.update(data[start : start + size])
            last = hashed.digest()
            keys.append(last)
        return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)

    def of_prompt(self, namespace: str, tokens: np.ndarray) -> np.ndarray:
        return self.chain(self.root(namespace), tokens)


def to_bytes(keys: np.ndarray) -> list[bytes]:
    """keys: (n, 16) uint8."""
    data = keys.tobytes()
    return [data[i : i + KEY_BYTES] for i in range(0, len(data), KEY_BYTES)]
