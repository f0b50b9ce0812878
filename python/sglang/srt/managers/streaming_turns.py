"""`StreamingTurns`: whose launch comes next where a prompt streams, its own or that of other requests.

A chunk of a request that streams takes long. After each, the others have a turn that lasts as long as the chunk took:
their prompts are computed as they come, and those that run decode. It lasts longer for one launch with their prompts,
and for the chunks of a prompt that began in it. Owns whose turn it is; launches nothing.
"""

from __future__ import annotations

import math

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.utils.time_units import NO_LAUNCH, LaunchSeq, Seconds


class StreamingTurns:
    """Seconds are as in `StepInputs.now`: ranks agree on them."""

    def __init__(self) -> None:
        self._is_others = False
        # The last launch with a chunk of a request that streams, and when it began: once those ahead of it had ended.
        self._chunk = NO_LAUNCH
        self._began_at = 0.0
        self._is_behind = False
        # When the time of the others is over; infinite while the chunk is computed.
        self._until = -math.inf
        # Whether a launch with prompts was in the turn, and the prompt of several chunks that goes on in it.
        self._had_prompts = False
        self._prompt: Req | None = None

    def has_time(self, now: Seconds) -> bool:
        """Whether the others' time lasts."""
        return now < self._until

    def is_others(self, now: Seconds) -> bool:
        """Whether the others' prompts come first."""
        return self._is_others and (not self._had_prompts or self._prompt is not None or self.has_time(now))

    def is_chunk_done(self, done: int) -> bool:
        """Whether the last chunk is computed: the next one does not come before, so that who comes meanwhile is next.
        done: launches that have completed."""
        return done > self._chunk

    def watch(self, done: int, now: Seconds) -> None:
        """done: launches that have completed, with the last step or before."""
        if self._until != math.inf:
            return
        if self.is_chunk_done(done):
            self._until = now + (now - self._began_at)
        elif self._is_behind:
            self._began_at, self._is_behind = now, done < self._chunk

    def note_chunk(self, launch: LaunchSeq, done: int, now: Seconds) -> None:
        """A chunk of a request that streams was launched."""
        self._is_others, self._had_prompts, self._prompt = True, False, None
        self._chunk, self._began_at, self._is_behind, self._until = launch, now, done < launch, math.inf

    def note_others(self, prompt: Req | None, now: Seconds) -> None:
        """Prompts of others were launched; prompt: the one that has chunks left. One that began beside another's last
        chunk when the time was over waits, else the turn might never end."""
        goes_on = self._prompt in (None, prompt) or self.has_time(now)
        self._had_prompts = True
        self._prompt = prompt if self.is_others(now) and goes_on else None

    def forget_chunk(self) -> None:
        """All launches are void."""
        self._chunk, self._until = NO_LAUNCH, -math.inf
