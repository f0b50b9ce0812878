"""Namespaces of the cache: one string of what separates requests. Stateless."""

from __future__ import annotations

import msgspec


def namespace_of(cache_salt: str, extra_key: str) -> str:
    """No two pairs give the same string; empty names give the empty one."""
    if not cache_salt and not extra_key:
        return ""
    return msgspec.json.encode([cache_salt, extra_key]).decode()


def parts_of_namespace(namespace: str) -> tuple[str, str]:
    """cache_salt and extra_key. A namespace that is no pair counts as an extra_key."""
    try:
        return msgspec.json.decode(namespace, type=tuple[str, str])
    except msgspec.DecodeError:
        return "", namespace
