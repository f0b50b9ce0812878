"""The part of a reply that counts cached tokens. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def cached_tokens_details(by_tier: Mapping[str, int]) -> dict[str, int]:
    """Prompt tokens found in the cache, by tier. `storage` is upstream's name for all tiers beyond the host."""
    details = dict(by_tier)
    if "disk" in details or "remote" in details:
        details["storage"] = details.get("disk", 0) + details.get("remote", 0)
    return details
