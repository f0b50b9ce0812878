"""The two units of time. They never share a name: `now` is seconds, `launch` is the number of a launch.

`LaunchClock` is the account of launches that the tree, the frame tables and the controllers count their time in. The
scheduler alone advances it.
"""

from __future__ import annotations

from typing import NewType

Seconds = NewType("Seconds", float)
LaunchSeq = NewType("LaunchSeq", int)

NO_LAUNCH = LaunchSeq(-1)


class LaunchClock:
    """Launches are numbered from 0."""

    def __init__(self) -> None:
        # The number of the next launch.
        self.next = LaunchSeq(0)
        # Launches below this number have completed.
        self.done = LaunchSeq(0)

    @property
    def last(self) -> LaunchSeq:
        """The last launch that was issued, `NO_LAUNCH` if there is none."""
        return LaunchSeq(self.next - 1)

    @property
    def is_running(self) -> bool:
        """Whether an issued launch has not completed."""
        return self.next > self.done

    def issue(self) -> LaunchSeq:
        """Take the next number."""
        seq = self.next
        self.next = LaunchSeq(seq + 1)
        return seq

    def complete(self, done: int) -> None:
        """Launches below `done` have completed."""
        assert self.done <= done <= self.next
        self.done = LaunchSeq(done)
