"""`PageHashes`: the names that KV events have for pages. They are upstream's, so that its routers can make them."""

from __future__ import annotations

import hashlib

import numpy as np

DIGEST_BYTES = 32
# Upstream's seeds.
_SALT_TAG = b"sglang-cache-salt-v1\0"
_NAMESPACE_TAG = b"sglang-kv-event-namespace-v1"


def namespace_seed(extra_key: str | None, cache_salt: str | None) -> bytes | None:
    """Seed of `namespaced`; None where both are None."""
    if extra_key is None and cache_salt is None:
        return None
    digest = hashlib.sha256(_NAMESPACE_TAG)
    for part in (extra_key, cache_salt):
        if part is None:
            digest.update(b"\0")
        else:
            encoded = part.encode()
            digest.update(b"\1" + len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def namespaced(hashes: list[int], seed: bytes | None) -> list[int]:
    """Published hashes of a namespace, from the first 8 bytes of SHA-256(seed + hash)."""
    if seed is None:
        return hashes
    digests = (hashlib.sha256(seed + each.to_bytes(8, "big", signed=True)).digest() for each in hashes)
    return [int.from_bytes(digest[:8], "big", signed=True) for digest in digests]


class PageHashes:
    """How the pages of one namespace are hashed: a chain of SHA-256 over page after page, of which the first 8 bytes
    count. The chain begins with the salt. format: "default" hashes the extra_key, if there is one, into each result,
    which upstream does not; "dynamo" the salt too, as upstream."""

    def __init__(self, page_size: int, cache_salt: str | None, extra_key: str | None, format: str) -> None:
        self.page_size = page_size
        self.cache_salt = cache_salt
        self.first = hashlib.sha256(_SALT_TAG + cache_salt.encode()).digest() if cache_salt is not None else b""
        self._seed = namespace_seed(extra_key, cache_salt if format == "dynamo" else None)

    def chain(self, last: bytes, tokens: np.ndarray) -> np.ndarray:
        """Digests of the pages in tokens (int32, whole pages), of which the first follows the page with digest `last`
        (b"" or `first`: none). Returns (pages, 32) uint8."""
        data = np.ascontiguousarray(tokens, "<u4").tobytes()
        size, digests, sha256 = 4 * self.page_size, [], hashlib.sha256
        for start in range(0, len(data), size):
            last = sha256(last + data[start : start + size]).digest()
            digests.append(last)
        return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES)

    def published(self, digests: np.ndarray) -> list[int]:
        """digests: (pages, 32) uint8."""
        return namespaced(np.ascontiguousarray(digests[:, :8]).view(">i8").ravel().tolist(), self._seed)
