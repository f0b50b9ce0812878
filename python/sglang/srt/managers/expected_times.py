"""`ExpectedTimes`: what launches, loads and fetches will take, and when those that are issued will be over.

Owns what was learned of costs, and a `Forecast` of each queue of operations. Reads no clock: `now` comes from the
step's inputs. What is not known yet takes no time, so that nothing is decided by it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from sglang.srt.managers.cost_model import CostModel
from sglang.srt.managers.late_copies import OVERDUE_S, OVERDUE_TIMES
from sglang.srt.managers.schedule_policy import NO_LOADS, LoadTimes, PrefillWork, stall_seconds
from sglang.srt.mem_cache.transfer import EXEC, FETCH_LINKS, H2D, P2D, Ticket
from sglang.srt.utils.time_units import Seconds

# An operation that took too long keeps others away for so many times as long, and for so many seconds at most: a
# link that has hung may be as fast as ever.
_DOUBT_TIMES, _DOUBT_S = 2.0, 0.25
# Of the time that is expected. Beside a prefill a kernel's load got 7 of 48 GB/s on an H200.
_OVERDUE_TIMES_OF_KERNELS = 8.0


@dataclass
class _Issued:
    """Seconds: when it was issued, what it takes, and when it is expected to end."""

    at: float
    seconds: float
    end: float


class Forecast:
    """Seconds, as in `StepInputs.now`. free_at: when all that has been issued is expected to be over."""

    def __init__(self, overdue_times: float = OVERDUE_TIMES) -> None:
        self.free_at = 0.0
        self._overdue_times = overdue_times
        self._issued: dict[int, _Issued] = {}
        # How much later than expected the last operation that was measured was over, 0 where that is no reason to
        # doubt, infinite after a failure; until when nothing else should begin.
        self._late_s = 0.0
        self._doubted_until = 0.0

    def begin(self, seq: int, seconds: float, now: Seconds) -> None:
        """Operation seq is issued, and takes so long once those before it are over."""
        self.free_at = max(now, self.free_at) + seconds
        self._issued[seq] = _Issued(now, seconds, self.free_at)

    def complete(self, done: int, now: Seconds) -> None:
        """Operations below `done` are over, the last of them now: the next ones follow from here."""
        over = [seq for seq in self._issued if seq < done]
        if not over:
            return
        for seq in over:
            del self._issued[seq]
        self.free_at = now
        for each in self._issued.values():
            self.free_at = each.end = max(self.free_at, each.at) + each.seconds

    def is_overdue(self, now: Seconds) -> bool:
        """Whether the oldest operation takes far longer than expected."""
        oldest = next(iter(self._issued.values()), None)
        return oldest is not None and now > oldest.end + self._patience_s(oldest.seconds)

    def note(self, seconds: float, expected_s: float, now: Seconds) -> None:
        """An operation took so long."""
        late_s = seconds - expected_s
        self._late_s = late_s if late_s > self._patience_s(expected_s) else 0.0
        self._doubted_until = now + min(_DOUBT_S, _DOUBT_TIMES * seconds)

    def note_failed(self, now: Seconds) -> None:
        """An operation failed."""
        self._late_s, self._doubted_until = math.inf, now + _DOUBT_S

    def is_doubtful(self, now: Seconds, bearable_s: float = 0.0) -> bool:
        """Whether another operation should not begin: one takes far longer than expected, or the last one did, and
        more than bearable_s longer, or it failed. Then one at a time is tried, each after a while."""
        if self.is_overdue(now):
            return True
        return self._late_s > bearable_s and (now < self._doubted_until or bool(self._issued))

    def _patience_s(self, expected_s: float) -> float:
        return max(OVERDUE_S, (self._overdue_times - 1) * expected_s)

    def times_of(self, seq: int) -> tuple[float, float] | None:
        """When an operation is expected to begin, or began, and to end; None if it is over."""
        each = self._issued.get(seq)
        return None if each is None else (each.end - each.seconds, each.end)


class ExpectedTimes:
    """bytes_per_token: of KV, on the link from the host. num_layers: of the model; loads arrive layer by layer.
    kernel_links, windowed_share, window_reach: see `SchedulerConfig`. now: seconds, as in `StepInputs.now`, set at
    every step."""

    def __init__(
        self,
        bytes_per_token: float,
        num_layers: int,
        kernel_links: Collection[str] = (),
        windowed_share: float = 0.0,
        window_reach: int = 0,
    ) -> None:
        self.now = Seconds(0.0)
        self.costs = CostModel(bytes_per_token, kernel_links)
        self.launches = Forecast()
        self.loads = {
            link: Forecast(_OVERDUE_TIMES_OF_KERNELS if link in kernel_links else OVERDUE_TIMES)
            for link in (H2D, P2D)
        }
        # By the place of the store.
        self.fetches = tuple(Forecast() for _ in FETCH_LINKS)
        self._bytes_per_token = bytes_per_token
        self._num_layers = num_layers
        self._windowed_share, self._window_reach = windowed_share, window_reach

    # -- what things take ---------------------------------------------------------------------------------------

    def load_seconds(self, num_tokens: int, link: str = H2D, behind: int = 0) -> float:
        """Of tokens of a prefix with so many behind them; layers with a window see only its end."""
        left_out = self._windowed_share * max(0, num_tokens - max(0, self._window_reach - behind))
        num_bytes = int((num_tokens - left_out) * self._bytes_per_token)
        return (num_tokens and self.costs.load_seconds(num_bytes, link)) or 0.0

    def compute_seconds(self, work: PrefillWork) -> float:
        return self.costs.prefill_seconds(*work) or 0.0

    def decode_seconds(self) -> float:
        """Of another decode step like the last one."""
        return self.costs.decode_seconds() or 0.0

    def stream_seconds(self, num_tokens: int, from_disk: int) -> float:
        """Of copying so many tokens through the layer stream cache, all layers. from_disk: so many of them."""
        size = self._bytes_per_token
        return (num_tokens and self.costs.stream_seconds(int(num_tokens * size), int(from_disk * size))) or 0.0

    def fetch_seconds(
        self, num_tokens: int, tokens_per_op: int, seen_only: bool = False, place: int = 0
    ) -> float | None:
        """Of so many tokens from the store at that place, by operations of tokens_per_op; None while that is not
        known. seen_only: of layers with a window only the end comes."""
        left_out = self._windowed_share * max(0, num_tokens - self._window_reach) if seen_only else 0.0
        num_bytes = int((num_tokens - left_out) * self._bytes_per_token)
        return self.costs.stores[place].fetch_seconds(-(-num_tokens // tokens_per_op), num_bytes)

    # -- when ---------------------------------------------------------------------------------------------------

    def arrival_of(self, tickets: Iterable[Ticket]) -> LoadTimes:
        """When what these loads bring is there."""
        loads = NO_LOADS
        for ticket in tickets:
            if (times := self.loads[ticket.link].times_of(ticket.seq)) is not None:
                loads = loads.and_also(LoadTimes.between(*times, self._num_layers))
        return loads

    def arrival_if_begun(self, from_host: int, from_peers: int = 0) -> LoadTimes:
        """When so many tokens would be there if their loads began now."""
        loads = NO_LOADS
        for link, num_tokens in ((H2D, from_host), (P2D, from_peers)):
            if seconds := self.load_seconds(num_tokens, link):
                start = max(self.now, self.loads[link].free_at)
                loads = loads.and_also(LoadTimes.between(start, start + seconds, self._num_layers))
        return loads

    def arrival_of_stream(self, num_tokens: int, from_disk: int) -> LoadTimes:
        """When so many tokens have come that the next launch streams. It begins with the launch."""
        if not (seconds := self.stream_seconds(num_tokens, from_disk)):
            return NO_LOADS
        start = max(self.now, self.launches.free_at)
        return LoadTimes.between(start, start + seconds, self._num_layers)

    def stall_seconds(self, work: PrefillWork, loads: LoadTimes) -> float:
        """How long the next launch would wait for loads, if it computes `work`."""
        start = max(self.now, self.launches.free_at)
        return stall_seconds(loads, start, self.compute_seconds(work), self._num_layers)

    def link_lasts(self, work: PrefillWork, stall_s: float) -> bool:
        """Whether the link from the host has loads till the next launch, which computes `work` after a stall, is
        over."""
        end = max(self.now, self.launches.free_at) + stall_s + self.compute_seconds(work)
        return self.loads[H2D].free_at > end

    # -- what was issued ----------------------------------------------------------------------------------------

    def note_load(self, link: str, num_bytes: int, seconds: float) -> None:
        """What a load took, before it changes what is expected."""
        if (expected_s := self.costs.load_seconds(num_bytes, link)) is not None:
            self.loads[link].note(seconds, expected_s, self.now)

    def note_failed_load(self, link: str) -> None:
        self.loads[link].note_failed(self.now)

    def begin_load(self, ticket: Ticket, num_bytes: int) -> None:
        link, seq = ticket
        self.loads[link].begin(seq, self.costs.load_seconds(num_bytes, link) or 0.0, self.now)

    def begin_prefill(self, seq: int, work: PrefillWork, loads: LoadTimes) -> None:
        seconds = self.compute_seconds(work) + self.stall_seconds(work, loads)
        self.launches.begin(seq, seconds, self.now)

    def begin_decode(self, seq: int, streamed: int = 0, from_disk: int = 0) -> None:
        seconds = self.decode_seconds()
        start = max(self.now, self.launches.free_at)
        stall_s = stall_seconds(self.arrival_of_stream(streamed, from_disk), start, seconds, self._num_layers)
        self.launches.begin(seq, seconds + stall_s, self.now)

    def begin_fetch(self, ticket: Ticket, num_bytes: int) -> None:
        place = FETCH_LINKS.index(ticket.link)
        seconds = self.costs.stores[place].fetch_seconds(1, num_bytes) or 0.0
        self.fetches[place].begin(ticket.seq, seconds, self.now)

    def complete(self, done: Mapping[str, int]) -> None:
        """Launches, and operations of links, below these numbers are over."""
        for name, forecast in ((EXEC, self.launches), *zip(FETCH_LINKS, self.fetches), *self.loads.items()):
            forecast.complete(done.get(name, 0), self.now)
