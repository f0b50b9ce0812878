"""Flags of a chaos' server that its seed draws: of each line one, or none."""

from __future__ import annotations

import random
from dataclasses import dataclass

# Each is as likely as any other of its line.
_DRAWN = (
    ("", "--page-size 16", "--page-size 32"),
    ("", "", "", "--tp-size 2"),
    ("", "", "", "", *(f"--kv-cache-dtype {name}" for name in ("bfloat16", "fp8_e4m3"))),
    ("", "--layer-stream 2 --layer-stream-tokens 128"),
    # Requests that wait for older ones have no priority.
    ("", "--enable-priority-scheduling", "--enable-priority-scheduling", "--hicache-publish-at completion"),
    ("", "", "--max-running-requests 2"),
    ("", "--schedule-policy lpm"),
    ("", "--radix-eviction-policy lfu", "--radix-eviction-policy priority"),
    ("", "", "--disable-overlap-schedule"),
    (
        "",
        "",
        *(f"--hicache-write-policy {name}" for name in ("write_through", "write_through_selective", "write_back")),
    ),
    ("", "--hicache-io-backend direct"),
    ("", "--hicache-bubble-filling decode", "--hicache-bubble-filling off"),
    ("", "--hicache-load-ratio 0", "--hicache-load-ratio auto"),
    ("", "--hicache-canary 0.5"),
    ("", "--hicache-storage-prefetch-policy wait_complete", "--hicache-storage-prefetch-policy timeout"),
)


@dataclass(frozen=True)
class Mix:
    """Without flags it is the server with its defaults."""

    flags: tuple[str, ...] = ()
    # Another server has the same storage, and clients ask both.
    has_neighbour: bool = False

    @property
    def num_ranks(self) -> int:
        return 2 if "--tp-size" in self.flags else 1

    @property
    def kv_bytes(self) -> int:
        """Of a number."""
        return 1 if "fp8_e4m3" in self.flags else 2 if self.rounds else 4

    @property
    def rounds(self) -> bool:
        """Whether keys and values are rounded, so that more than the last bits of answers depend on the batch."""
        return "--kv-cache-dtype" in self.flags

    @property
    def streams(self) -> bool:
        """Whether prompts may be longer than the device."""
        return "--layer-stream" in self.flags


def drawn_mix(seed: int) -> Mix:
    rng = random.Random(f"{seed} flags")
    return Mix(tuple(" ".join(rng.choice(line) for line in _DRAWN).split()), rng.random() < 0.3)
