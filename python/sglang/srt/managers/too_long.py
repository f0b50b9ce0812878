"""`TooLongRequests`: requests that are longer than the memory that is there.

Owns how long each may wait for what peers lend, how often it may start again, and the messages with which they end.
Ends none and moves no memory: the scheduler does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.managers.layer_streaming import NoLayerStreaming
from sglang.srt.managers.schedule_batch import FAILURE_LIMIT, Req
from sglang.srt.managers.slab_exchange import SlabBorrower
from sglang.srt.mem_cache.transfer import D2S
from sglang.srt.utils.time_units import Seconds

# Up to `FAILURE_LIMIT`: a request that lacks memory although there should be enough starts again twice.
_FAILURE_WITHOUT_ROOM = 10


class TooLongRequests:
    """borrower: None if no peers lend. patience_s: how long a request may wait for what they lend."""

    def __init__(self, streaming: NoLayerStreaming, borrower: SlabBorrower | None, patience_s: float) -> None:
        self._streaming = streaming
        self._borrower = borrower
        self._patience_s = patience_s
        # By request id: when one that waits ends.
        self._until: dict[str, Seconds] = {}

    @property
    def is_possible(self) -> bool:
        """Whether a request that was accepted may be too long."""
        return self._streaming.is_enabled or bool(self._until)

    @property
    def accepted_len(self) -> int:
        """The most tokens of a request that may wait: for what peers may lend, too."""
        return self._streaming.longest_len if self._borrower is not None else self._streaming.max_total_len

    @property
    def wake_at(self) -> Seconds | None:
        """When the next one ends that waits."""
        return min(self._until.values(), default=None)

    def note_room(self) -> None:
        """Remember the most room that there has been for each request that streams."""
        limit = self._streaming.max_total_len
        for req in self._streaming.reqs:
            req.most_room = max(req.most_room, limit)

    def take_ended(self, waiting: Iterable[Req], now: Seconds) -> list[tuple[Req, str]]:
        """Those of the waiting requests that have been too long for too long, and why each ends."""
        streaming, limit = self._streaming, self._streaming.max_total_len
        most, patience = 0, 0.0
        if self._borrower is not None:
            most, patience = streaming.max_len_with(self._borrower.most_pages), self._patience_s
        since, too_long = self._until, [req for req in waiting if req.least_len > limit]
        self._until = {
            req.rid: since.get(req.rid, Seconds(now + patience)) if req.least_len <= most else now for req in too_long
        }
        ended = []
        for req in too_long:
            if self._until[req.rid] > now:
                continue
            del self._until[req.rid]
            if req.least_len <= most:
                message = (
                    f"peers have not lent the memory that the request's {req.num_known} tokens need for "
                    f"{patience:g} s; there is room for {limit - 1} now. Send it again when the workers need less "
                    f"themselves, or see {streaming.limit_flags}"
                )
            else:
                message = (
                    f"the request has {req.num_known} tokens; with all that the peers can lend there is room for "
                    f"{max(limit, most) - 1}: see --max-total-tokens of the workers, and {streaming.limit_flags}"
                )
            ended.append((req, message))
        return ended

    def note_late_copy(self, req: Req, link: str) -> str:
        """The only copy of a part of the request is on its way by a link that hangs. Returns why the request ends; ""
        if it starts again, as other tiers may take that part. None does what is to go to the swap file."""
        req.num_failures += _FAILURE_WITHOUT_ROOM
        return _late_message(req, {link}) if link == D2S or req.num_failures >= FAILURE_LIMIT else ""

    def note_no_room(self, req: Req, broken_links: Collection[str], late_links: Collection[str] = ()) -> str:
        """No tier has any more room for the only request. Returns why it ends; "" if it starts again: it waits for
        what peers may lend, or should have room. broken_links, late_links: those that are not tried now, as copies
        failed or hang."""
        limit = self._streaming.max_total_len
        if self._borrower is not None and limit < req.least_len <= self.accepted_len:
            return ""
        if late_links:
            return _late_message(req, late_links)
        req.num_failures += _FAILURE_WITHOUT_ROOM
        # What others left, or peers took back, is still to be dropped or moved.
        if req.least_len <= limit and req.num_failures < FAILURE_LIMIT:
            return ""
        if broken_links:
            return (
                f"after {req.num_known} tokens the device has no more room, and copies to the tiers below it fail "
                f"({', '.join(sorted(broken_links))}): see the server's log"
            )
        return (
            f"after {req.num_known} tokens neither the device nor a tier below it has room for more; see "
            "--hicache-size, --peer-size and --layer-stream-disk-size"
        )


def _late_message(req: Req, links: Collection[str]) -> str:
    return (
        f"after {req.num_known} tokens the device has no more room, and copies to the tiers below it do not end "
        f"({', '.join(sorted(links))}): send the request again later"
    )


def end_without_room(req: Req, message: str) -> FinishReason:
    """An answer that has outgrown all room that there was ends as at the limit of the model's context. One that has
    not begun, or for which there was more room, is an error."""
    num_new = req.num_known - req.num_prompt
    if num_new and req.num_known >= req.most_room:
        return FinishReason(type="length", length=num_new)
    return FinishReason(type="abort", message=message, status_code=503)
