"""Namespaces of the cache: one string of what separates requests. Stateless.

cache_salt, extra_key ──namespace_of──► shared: requests with equal ones share their prefixes
                                          │ private                │ alone
                                          ▼                        ▼
                                 in storage only           with no other request
"""

from __future__ import annotations

import msgspec

# Stands between a namespace and the owner of a private part of it. No namespace that a user gives contains it.
_PRIVATE = "\0"


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


def salt_of(namespace: str) -> str:
    """The cache_salt of the requests that share it, or a part of it."""
    return parts_of_namespace(shared_part(namespace))[0]


def private(namespace: str, owner: int) -> str:
    """A namespace for one owner, for the tiers that share by comparing tokens. Its blocks keep the names of the
    original namespace, so that they are still shared in storage."""
    return f"{namespace}{_PRIVATE}{owner}"


def alone(namespace: str, owner: int) -> str:
    """A namespace for one owner whose blocks storage neither gets nor is asked for."""
    return private(namespace, owner) + _PRIVATE


def shared_part(namespace: str) -> str:
    """The namespace from which a private one was made; others are their own."""
    return namespace.partition(_PRIVATE)[0]


def is_private(namespace: str) -> bool:
    return _PRIVATE in namespace


def is_alone(namespace: str) -> bool:
    return namespace.endswith(_PRIVATE)
