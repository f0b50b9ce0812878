"""`SessionTable`: what is known of clients' sessions, and of when they return.

Owns one record per session, the least recently used first, and the gaps of all sessions. Never reads the tree. Time
is counted in launches.

    begin_turn ──► in a turn ── end_turn, leave_turn ──► between turns ── begin_turn: a gap is learned ──► in a turn
                                                  │
                                                  └── no turn for twice the longest gap and age, or the
                                                      table is full: it has ended, and is forgotten
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from sglang.srt.mem_cache.namespaces import salt_of
from sglang.srt.mem_cache.session_weights import Returns, expected_returns
from sglang.srt.utils.time_units import NO_LAUNCH, LaunchSeq

# (namespace, the client's name): two tenants' sessions never meet.
SessionKey = tuple[str, str]

MAX_SESSIONS = 4096
# The last gaps that are remembered, of a session and of all; and the last waits.
_OWN_GAPS = 16
_KNOWN_GAPS = 512


@dataclass
class SessionRecord:
    # Launches from an answer to the next turn.
    gaps: deque[int] = field(default_factory=lambda: deque(maxlen=_OWN_GAPS))
    # When its last answer ended, while it is between turns.
    answered: LaunchSeq | None = None
    # Tokens that stay longer for it, and until which launch that is expected to last.
    path_tokens: int = 0
    stays_until: LaunchSeq = NO_LAUNCH


class SessionTable:
    """max_sessions: more displace the least recently used."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._records: dict[SessionKey, SessionRecord] = {}
        # That any tier reaches with pages before it gives them up, in launches; 0 while none gives up any.
        self.longest_age = 0
        self._known: deque[int] = deque(maxlen=_KNOWN_GAPS)
        # Launches from a turn's arrival to its start.
        self._waits: deque[int] = deque(maxlen=_KNOWN_GAPS)
        # Answers after which the session returned, and after which it had ended; older ones count less.
        self._num_returned = 0.0
        self._num_ended = 0.0

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: SessionKey) -> SessionRecord | None:
        return self._records.get(key)

    @property
    def return_share(self) -> float:
        """Of all answers, those after which the session returned (Laplace's rule of succession)."""
        return (self._num_returned + 1) / (self._num_returned + self._num_ended + 2)

    def begin_turn(self, key: SessionKey, launch: LaunchSeq) -> None:
        """A request of the session has come."""
        record = self._use(key, launch)
        if record.answered is not None:
            # With the launch that can use the pages: until then they must stay.
            gap = launch - record.answered + 1
            record.gaps.append(gap)
            self._known.append(gap)
            self._fade()
            self._num_returned += 1
            record.answered = None

    def end_turn(self, key: SessionKey, launch: LaunchSeq) -> SessionRecord:
        """A request of the session has been answered."""
        record = self._use(key, launch)
        record.answered = launch
        return record

    def leave_turn(self, key: SessionKey, launch: LaunchSeq) -> None:
        """A request of the session has ended, perhaps without an answer: it must not be in a turn for ever."""
        record = self._records.get(key)
        if record is not None and record.answered is None:
            record.answered = launch

    @staticmethod
    def note_weight(record: SessionRecord, num_tokens: int, until: LaunchSeq) -> None:
        """The session's last answer, with all before it, stays longer, as far as is expected until then."""
        record.path_tokens, record.stays_until = num_tokens, until

    def expected_returns(self, record: SessionRecord) -> Returns:
        return expected_returns(record.gaps, np.fromiter(self._known, np.int64), self.return_share)

    def note_wait(self, wait: int) -> None:
        """A turn has started with the wait-th launch since it came."""
        self._waits.append(wait)

    def expected_starts(self) -> Returns:
        """Of a turn that has just come: it starts for certain."""
        return expected_returns((), np.fromiter(self._waits, np.int64), 1.0)

    def num_between_turns(self) -> int:
        return sum([record.answered is not None for record in self._records.values()])

    def weighted_tokens(self, launch: LaunchSeq) -> int:
        """Tokens that stay longer for sessions between turns; what sessions share counts for each."""
        records = self._records.values()
        return sum([r.path_tokens for r in records if r.answered is not None and r.stays_until > launch])

    def forget_salt(self, salt: str) -> None:
        """Forget the sessions of its requests, as if they had never been."""
        self._records = {key: record for key, record in self._records.items() if salt_of(key[0]) != salt}

    def _use(self, key: SessionKey, launch: LaunchSeq) -> SessionRecord:
        """The session's record, which becomes the most recently used."""
        record = self._records.pop(key, None) or SessionRecord()
        if self._known and self.longest_age:
            self._forget_ended(LaunchSeq(launch - 2 * max(self.longest_age, *self._known)))
        while len(self._records) >= self._max_sessions:
            self._forget_first()
        self._records[key] = record
        return record

    def _forget_ended(self, before: LaunchSeq) -> None:
        """Forget the first records, which have been between turns since then or longer."""
        while self._records:
            answered = next(iter(self._records.values())).answered
            if answered is None or answered >= before:
                break
            self._forget_first()

    def _forget_first(self) -> None:
        record = self._records.pop(next(iter(self._records)))
        if record.answered is not None:
            self._fade()
            self._num_ended += 1

    def _fade(self) -> None:
        """As many answers count as gaps are remembered."""
        rest = 1 - 1 / _KNOWN_GAPS
        self._num_returned *= rest
        self._num_ended *= rest

    def check_invariants(self, launch: LaunchSeq) -> None:
        assert len(self._records) <= self._max_sessions
        for known in (self._known, self._waits):
            assert len(known) <= _KNOWN_GAPS and all(gap >= 0 for gap in known)
        assert 0 < self.return_share < 1
        for key, record in self._records.items():
            assert len(record.gaps) <= _OWN_GAPS, f"{key} remembers too much"
            assert record.answered is None or record.answered <= launch, f"{key} is answered in the future"
