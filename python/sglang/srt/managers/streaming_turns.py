"""`StreamingTurns`: whose prompt comes next where a request streams, its own or that of another request.

A chunk of a request that streams takes long. After each, the others have a turn: one launch with their prompts, and
all chunks of the prompt that the turn began with. Owns whose turn it is; launches nothing.
"""

from __future__ import annotations

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.utils.time_units import NO_LAUNCH, LaunchSeq


class StreamingTurns:
    def __init__(self) -> None:
        self.is_others = False
        # The last launch with a chunk of a request that streams.
        self._chunk = NO_LAUNCH
        # The prompt of several chunks that is computed in the others' turn.
        self._prompt: Req | None = None

    def is_chunk_done(self, done: int) -> bool:
        """Whether the last chunk is computed: the next one does not come before, so that who comes meanwhile is next.
        done: launches that have completed."""
        return done > self._chunk

    def note_chunk(self, launch: LaunchSeq) -> None:
        """A chunk of a request that streams was launched."""
        self.is_others, self._prompt, self._chunk = True, None, launch

    def note_others(self, prompt: Req | None) -> None:
        """Prompts of others were launched; prompt: the one that has chunks left. One that began beside another's last
        chunk waits, else the turn might never end."""
        self.is_others = self.is_others and prompt is not None and self._prompt in (None, prompt)
        self._prompt = prompt if self.is_others else None

    def forget_chunk(self) -> None:
        """All launches are void."""
        self._chunk = NO_LAUNCH
