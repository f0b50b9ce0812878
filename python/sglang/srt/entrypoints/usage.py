"""What a reply says of the cache. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def cached_tokens_details(by_tier: Mapping[str, int]) -> dict[str, int]:
    """Prompt tokens found in the cache, by tier; upstream's name for all that is beyond the host is `storage`."""
    details = dict(by_tier)
    if "disk" in details or "remote" in details:
        details["storage"] = details.get("disk", 0) + details.get("remote", 0)
    return details
