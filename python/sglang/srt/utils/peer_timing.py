"""`PeerTiming`: how long the two sides of a loan wait for what. Owns the defaults, and the form of `--peer-timing`.

Pure data: the protocol, the coordinators and the scheduler take the numbers from here.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class PeerTiming:
    """All in seconds. Each field is a name in `--peer-timing`."""

    # Between two heartbeats without news, on both sides.
    heartbeat: float = 0.5
    # A master that a worker has not heard for this time is lent nothing more. A master keeps its slabs when it stands
    # still; a garbage collection or a checkpoint takes less than this.
    silence: float = 30.0
    # A master has this time to choose the slabs that it gives back, and to move what is hot in them.
    recall: float = 10.0
    # Slabs that it has not given back then are named, and quarantined after this time.
    grace: float = 20.0
    # A slab that no master takes is cache of its worker again after this time.
    offer: float = 2.0
    # What a master lacked room for in this time it asks for.
    demand: float = 10.0
    # A master gives a slab back that it has not used for this time. People think for less between two turns.
    idle: float = 60.0
    # A request that is longer than the memory that is there waits this long for what its peers may lend.
    patience: float = 30.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 < value < math.inf:
                raise ValueError(f"{field.name} is {value}, but it must be above 0 seconds")
        if self.silence < 4 * self.heartbeat:
            raise ValueError(
                f"silence is {self.silence:g} s, but it must be at least four heartbeats, {4 * self.heartbeat:g} s"
            )

    @classmethod
    def parse(cls, text: str) -> PeerTiming:
        """text: as "recall=10,idle=60"; what it does not name keeps its default. Raises ValueError."""
        values: dict[str, float] = {}
        names = [field.name for field in dataclasses.fields(cls)]
        for part in text.split(",") if text else ():
            name, _, value = part.partition("=")
            if name not in names or name in values:
                raise ValueError(f"{name!r} must be one of {', '.join(names)}, each once, as in recall=10,idle=60")
            try:
                values[name] = float(value)
            except ValueError:
                raise ValueError(f"{name} is {value!r}, but it must be a number of seconds") from None
        return cls(**values)

    def shown(self) -> str:
        """As `parse` reads it."""
        return ",".join(f"{name}={value:g}" for name, value in dataclasses.asdict(self).items())
