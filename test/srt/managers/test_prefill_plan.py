"""What the cache saved a request, by the tier that had it when the request came."""

from types import SimpleNamespace

import pytest

from sglang.srt.managers.prefill_plan import hits_by_tier
from sglang.srt.managers.schedule_batch import Span, SpanSource
from sglang.srt.mem_cache.transfer import H2D, P2D, Ticket, Tier

H, P = Ticket(H2D, 1), Ticket(P2D, 1)
DEVICE, LOAD, STREAM, COMPUTE = SpanSource.DEVICE, SpanSource.LOAD, SpanSource.STREAM, SpanSource.COMPUTE


@pytest.mark.parametrize(
    ("plan", "facts", "expected"),
    [
        ([(DEVICE, 64, None), (LOAD, 128, H), (LOAD, 192, P)], {}, {"device": 64, "host": 64, "peer": 64}),
        ([(DEVICE, 64, None), (COMPUTE, 128, None), (LOAD, 192, H)], {}, {"device": 64, "host": 64}),
        # Loaded ahead, some of it from peers.
        (
            [(DEVICE, 256, None)],
            {"loaded": ((64, 192),), "loaded_from_peers": ((64, 96), (128, 160))},
            {"device": 128, "host": 64, "peer": 64},
        ),
        # What storage has brought, in part loaded ahead. Some lies on the device, some has moved to a peer.
        (
            [(DEVICE, 128, None), (LOAD, 192, P), (LOAD, 256, H)],
            {"fetched": (((64, 160),), ((160, 224),)), "loaded": ((32, 80),)},
            {"device": 32, "host": 64, "disk": 96, "remote": 64},
        ),
        # Read layer by layer, 100 tokens of them from peers.
        (
            [(DEVICE, 64, None), (STREAM, 256, None)],
            {"fetched": (((224, 256),), ())},
            {"device": 64, "peer": 100, "host": 60, "disk": 32},
        ),
        # A peer's between two fetches, and others' between two loads ahead.
        (
            [(DEVICE, 128, None), (LOAD, 192, P), (LOAD, 256, H)],
            {"fetched": (((96, 128), (192, 256)), ()), "loaded": ((32, 64), (96, 128))},
            {"device": 64, "peer": 64, "host": 32, "disk": 96},
        ),
    ],
)
def test_each_token_counts_where_it_was_found(plan: list, facts: dict, expected: dict) -> None:
    spans, start = [], 0
    for source, end, ticket in [*plan, (COMPUTE, 300, None)]:
        spans.append(Span(start, end, source, ticket))
        start = end
    req = SimpleNamespace(plan=tuple(spans), **({"fetched": (), "loaded": (), "loaded_from_peers": ()} | facts))
    found = hits_by_tier(req, 100, (Tier.DISK, Tier.REMOTE))
    assert {name: n for name, n in found.items() if n} == expected
