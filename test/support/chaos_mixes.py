"""What a chaos' seed draws: flags of its server, of each line one or none; options of its storage; and its parts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Literal

from support.all_tiers import IN_PROCESS, Neighbour

# Each is as likely as any other of its line.
_DRAWN = (
    ("", "--page-size 16", "--page-size 32", "--page-size 64"),
    ("", "", "", "--tp-size 2"),
    ("", "", "", "", *(f"--kv-cache-dtype {name}" for name in ("bfloat16", "fp8_e4m3", "fp8_e5m2"))),
    ("", "--layer-stream 2 --layer-stream-tokens 128"),
    # Requests that wait for older ones have no priority.
    (
        "",
        *(
            "--enable-priority-scheduling" + more
            for more in ("", "", " --priority-scheduling-preemption-threshold 0")
        ),
        "--enable-priority-scheduling --disable-priority-preemption",
        "--enable-priority-scheduling --schedule-low-priority-values-first --default-priority-value 5",
        "--hicache-publish-at completion",
    ),
    ("", "", "--max-prefill-tokens 100"),
    ("", "", "--stream-interval 4"),
    ("", "", "--hicache-deferral-threshold 0"),
    ("", "", "--hicache-rate-limit h2d=0.02,d2h=0.02,store=0.02"),
    ("", "", '--kv-events-config {"publisher":"zmq","endpoint":"inproc://events"}'),
    # A master waits for a lender that stands still no longer than that.
    ("", "", "--peer-timing heartbeat=0.2,silence=1,recall=1,grace=1,demand=2,idle=2,patience=2"),
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
# Of all storage. Where pages are larger, blocks are as large as pages.
_STORAGE: tuple[dict[str, Any], ...] = ({}, {"fetch_order": "sjf"}, {"fetch_window_ops": 1})
_DISK: tuple[dict[str, Any], ...] = ({}, {"rewrite_share": 0}, {"rewrite_share": 1})
# Most damage is no valid data to a codec that compresses; with `raw` nothing but checksums finds it.
_CODECS: tuple[Any, ...] = ("raw", "lossless", {"codec": "lossless", "coder": "deflate", "level": 1})


@dataclass(frozen=True)
class Mix:
    """Without arguments the server has its defaults."""

    flags: tuple[str, ...] = ()
    # Another server has the same storage, and clients ask both. It may borrow from the same lender, or lend, too.
    neighbour: Neighbour | Literal[""] = ""
    # Prompts may be longer than device, peers and host together.
    swaps: bool = False
    # Its steps are recorded, and replayed at the end.
    records: bool = False
    # The lender copies for the server.
    strict: bool = False
    # Of the remote store.
    backend: str = "bluefield"
    # A proxy that the server does not start is reached as one on another machine.
    is_elsewhere: bool = False
    # In place of the disk tier, see `Parts`.
    plugin: Literal["", "generic", "v1"] = ""
    codec: Any = "raw"
    # All layers of the model but one have a sliding window.
    has_windows: bool = False
    # Options of all storage, and of the disk tier.
    storage: dict[str, Any] = field(default_factory=dict)
    disk: dict[str, Any] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        return 2 if "--tp-size" in self.flags else 1

    @property
    def kv_bytes(self) -> int:
        """Of a number."""
        return 1 if {"fp8_e4m3", "fp8_e5m2"} & {*self.flags} else 2 if self.rounds else 4

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
    flags = " ".join(rng.choice(line) for line in _DRAWN)
    # By numbers of its own, so that all else is as without. The code of transformers is for one rank.
    if "--tp-size" not in flags and random.Random(f"{seed} model").random() < 0.25:
        flags += " --model-impl transformers"
    blocks = {"block_tokens": 64, "prefetch_threshold": 64} if "--page-size 64" in flags else {}
    return Mix(
        tuple(flags.split()),
        neighbour=rng.choice(("", "", "", "alone", "borrows", "borrows" if "--layer-stream" in flags else "lends")),
        swaps="--layer-stream" in flags and rng.random() < 0.5,
        records=rng.random() < 0.3,
        plugin=rng.choice(("", "", "", "", "generic", "v1")),
        strict=rng.random() < 0.3,
        backend=rng.choice(("bluefield", "bluefield", "remote", IN_PROCESS)),
        codec=rng.choice(_CODECS),
        storage={**blocks, **rng.choice(_STORAGE)},
        disk=rng.choice(_DISK),
        is_elsewhere=rng.random() < 0.3,
        # Where a query sees few tokens, rounded ones change the best answers between batches, without a cache, too.
        has_windows="--kv-cache-dtype" not in flags and random.Random(f"{seed} windows").random() < 0.3,
    )
