"""Where every token of an admitted request comes from, and what the cache saved it: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

from sglang.srt.managers.schedule_batch import Req, Span, SpanSource
from sglang.srt.mem_cache.node import Node
from sglang.srt.mem_cache.transfer import P2D, TIER_NAMES, Tier


def plan_spans(path: Sequence[Node], num_tokens: int, recomputed: tuple[int, int]) -> tuple[Span, ...]:
    """The plan of a sequence of num_tokens tokens whose cached part is the path, top first. recomputed: tokens
    [start, end) that the cache has and the request computes."""
    spans: list[Span] = []
    pos = 0
    for node in path:
        ticket = node.tickets[Tier.DEVICE]
        source = SpanSource.DEVICE if ticket is None else SpanSource.LOAD
        if node.frames[Tier.DEVICE] is None:
            source = SpanSource.STREAM
        if recomputed[0] <= node.start < recomputed[1]:
            source = SpanSource.COMPUTE
        end = pos + len(node.key)
        if spans and (spans[-1].source, spans[-1].ticket) == (source, ticket):
            spans[-1] = Span(spans[-1].start, end, source, ticket)
        else:
            spans.append(Span(pos, end, source, ticket))
        pos = end
    return (*spans, Span(pos, num_tokens, SpanSource.COMPUTE))


def hits_by_tier(req: Req, streamed_from_peers: int, storage_tiers: Sequence[Tier]) -> dict[str, int]:
    """Tokens that the cache saves a request that has its plan, by the name of the tier that had them when it came:
    what storage has brought for it may lie anywhere by now, and what was loaded ahead lies on the device."""
    found = dict.fromkeys(TIER_NAMES, 0)
    borders = {border for run in chain(*req.fetched, req.loaded, req.loaded_from_peers) for border in run}
    for span in req.plan[:-1]:
        if span.source == SpanSource.COMPUTE:
            continue
        cuts = sorted({span.start, span.end, *(border for border in borders if span.start < border < span.end)})
        for start, end in pairwise(cuts):
            size = end - start
            fetched_by = [tier for tier, runs in zip(storage_tiers, req.fetched) if _have(runs, start)]
            if fetched_by:
                found[TIER_NAMES[fetched_by[0]]] += size
                continue
            if span.source == SpanSource.STREAM:
                from_peers = min(size, streamed_from_peers)
                streamed_from_peers -= from_peers
            elif span.source == SpanSource.LOAD:
                from_peers = size if span.ticket is not None and span.ticket.link == P2D else 0
            elif _have(req.loaded, start):
                from_peers = size if _have(req.loaded_from_peers, start) else 0
            else:
                found["device"] += size
                continue
            found["peer"] += from_peers
            found["host"] += size - from_peers
    return found


def _have(runs: Sequence[tuple[int, int]], token: int) -> bool:
    return any(start <= token < end for start, end in runs)
