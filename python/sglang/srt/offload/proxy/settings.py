"""`ProxySettings`: the resources of an offload proxy, and profiles of machines. Owns the messages about bad
settings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.block_store import StoreError
from sglang.srt.mem_cache.rate_limit import RateLimit
from sglang.srt.offload.codec.layout import MAX_PIECE_BYTES as PIECE_BYTES
from sglang.srt.utils.byte_sizes import shown_size
from sglang.srt.utils.memory import available_memory

STAGES = ("receive", "decompress", "dequantize", "deliver")
# Of what a stage hands to the next one.
BUFFERS = ("compressed", "decompressed", "dequantized")
ENGINES = ("software", "emulated")
DATA_PLANES = ("threads", "process")
# Of one block, which a writing thread encodes as a whole.
MAX_BLOCK_BYTES = 1 << 30
_MAX_TTL_S = 10 * 365 * 24 * 3600
_MAX_TIMEOUT_S = 24 * 3600
_MAX_THREADS = 256
# What Linux' masks of cores hold.
_MAX_CORES = 1024
_MAX_BUFFER_BYTES = 1 << 40
# Requests that a receiving thread of the data plane has room for (MAX_ASKED in csrc/kvplane/plane.h).
_MAX_WINDOW = 64
# A piece of 2 MiB takes 1.7 s at the lowest rate.
_MIN_GBPS = 0.01
_MAX_GBPS = 1_000_000
_MAX_POLL_US = 1_000_000
_BUFFERS = tuple(f"{name}_buffer_bytes" for name in BUFFERS)


@dataclass(frozen=True, kw_only=True)
class ProxySettings:
    """Threads, buffers and behaviour of one offload proxy."""

    # Threads of each stage.
    receive_threads: int = 2
    decompress_threads: int = 2
    dequantize_threads: int = 1
    deliver_threads: int = 1
    # Threads that encode and store blocks.
    write_threads: int = 2
    # Stage, or "write" -> cores to which its threads are pinned, in turn. Other stages' threads are not pinned.
    cores: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    # Sizes of the three buffers of pieces. They are allocated once, and hold as many pieces as fit. The last one is
    # the source of DMA.
    compressed_buffer_bytes: int = 32 << 20
    decompressed_buffer_bytes: int = 32 << 20
    dequantized_buffer_bytes: int = 32 << 20
    # Requests to the store that each receiving thread keeps in flight.
    window: int = 2
    # Dequantize straight into the engine's memory where a piece lies there in one run, without the last buffer.
    direct: bool = True
    # "threads" of the proxy; or a "process" of its own, a program without Python, for a proxy that runs by itself.
    data_plane: str = "threads"
    # False: block after block goes through the stages, each on all threads of its stage. This is a baseline, "no CP"
    # in ShadowServe 6.4.
    pipelined: bool = True
    # False: fresh memory is mapped for each piece. This is a baseline, "no MM" in ShadowServe 6.4.
    preallocated: bool = True
    # "software" does the work on these cores. "emulated" does so too, and makes each stage take at least as long as
    # an accelerator with the rates below.
    engine: str = "software"
    # Stage -> 10^9 bits per second of its output (receive: of its input), for all its threads together.
    rates_gbps: dict[str, float] = dataclasses.field(default_factory=dict)
    # Microseconds between two questions to an accelerator whether it is done.
    poll_us: float = 10.0
    # Seconds that the store may take for one value.
    store_timeout_s: float = 5.0
    # Seconds without use after which the store drops a block; 0: never.
    ttl_s: int = 0
    # The most 10^9 bits per second that are read from the store, and written to it; 0: no limit.
    max_read_gbps: float = 0.0
    max_write_gbps: float = 0.0

    def __post_init__(self) -> None:
        for stage in (*STAGES, "write"):
            if not 1 <= self.threads(stage) <= _MAX_THREADS:
                raise StoreError(f"proxy: {stage}_threads has to be from 1 to {_MAX_THREADS}")
        for name in _BUFFERS:
            size = getattr(self, name)
            # A slot is a little more than a piece; each receiving thread fills one, and a later stage empties one.
            least = (self.receive_threads + 1) * 2 * PIECE_BYTES
            if size < least:
                raise StoreError(f"proxy: {name} has to be at least {least}, not {size}")
            if size > _MAX_BUFFER_BYTES:
                raise StoreError(f"proxy: {name} has to be at most {_MAX_BUFFER_BYTES}, not {size}")
        if self.engine not in ENGINES:
            raise StoreError(f"proxy: engine {self.engine!r} is none of {', '.join(ENGINES)}")
        if self.data_plane not in DATA_PLANES:
            raise StoreError(f"proxy: data_plane {self.data_plane!r} is none of {', '.join(DATA_PLANES)}")
        if not all(
            isinstance(c, list) and c and all(type(i) is int and 0 <= i < _MAX_CORES for i in c)
            for c in self.cores.values()
        ):
            raise StoreError(
                f'proxy: cores are lists of core numbers below {_MAX_CORES} by stage, like {{"receive": [0, 1]}}'
            )
        if not all(type(rate) in (int, float) for rate in self.rates_gbps.values()):
            raise StoreError('proxy: rates_gbps are numbers by stage, like {"receive": 20.6}')
        if unknown := set(self.cores) - {*STAGES, "write"}:
            raise StoreError(
                f"proxy: cores names {', '.join(sorted(unknown))}; stages are {', '.join(STAGES)}, write"
            )
        if unknown := set(self.rates_gbps) - set(STAGES):
            raise StoreError(f"proxy: rates_gbps names {', '.join(sorted(unknown))}; stages are {', '.join(STAGES)}")
        if not 1 <= self.window <= _MAX_WINDOW:
            raise StoreError(f"proxy: window has to be from 1 to {_MAX_WINDOW}")
        if self.ttl_s > _MAX_TTL_S:
            raise StoreError(f"proxy: ttl_s has to be at most {_MAX_TTL_S}, ten years")
        if self.ttl_s < 0:
            raise StoreError("proxy: ttl_s has to be at least 0")
        if not all(rate == 0 or _is_rate(rate) for rate in (self.max_read_gbps, self.max_write_gbps)):
            raise StoreError(
                f"proxy: max_read_gbps and max_write_gbps have to be 0, or from {_MIN_GBPS} to {_MAX_GBPS}"
            )
        if not all(map(_is_rate, self.rates_gbps.values())):
            raise StoreError(f"proxy: rates_gbps have to be from {_MIN_GBPS} to {_MAX_GBPS}")
        if self.store_timeout_s > _MAX_TIMEOUT_S:
            raise StoreError(f"proxy: store_timeout_s has to be at most {_MAX_TIMEOUT_S}, a day")
        if not self.store_timeout_s > 0:
            raise StoreError("proxy: store_timeout_s has to be above 0")
        if not 0 <= self.poll_us <= _MAX_POLL_US:
            raise StoreError(f"proxy: poll_us has to be from 0 to {_MAX_POLL_US}, a second")

    def check_memory(self) -> None:
        """Raises StoreError if this machine has no memory for the buffers."""
        needed, free = sum(getattr(self, name) for name in _BUFFERS), available_memory()
        if self.preallocated and needed > free:
            raise StoreError(
                f"proxy: its buffers take {shown_size(needed)}, and {shown_size(free)} of memory are free: lower "
                f"{', '.join(_BUFFERS[:-1])} or {_BUFFERS[-1]}"
            )

    def threads(self, stage: str) -> int:
        return getattr(self, f"{stage}_threads")

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ProxySettings:
        """config: fields, and "profile": one of `PROFILES`, which they change. Raises StoreError."""
        config = dict(config)
        name = config.pop("profile", "host")
        if not isinstance(name, str) or name not in PROFILES:
            raise StoreError(f"proxy: profile {name!r} is none of {', '.join(PROFILES)}")
        values: dict[str, Any] = {**PROFILES[name], **config}
        fields = {f.name: f for f in dataclasses.fields(cls)}
        for key, value in values.items():
            if key not in fields:
                raise StoreError(f"proxy: {key} is no setting; there are profile, {', '.join(fields)}")
            default = getattr(cls(), key)
            kinds = (int, float) if isinstance(default, float) else type(default)
            if not isinstance(value, kinds) or isinstance(value, bool) != isinstance(default, bool):
                raise StoreError(f"proxy: {key} has to be like {default!r}, not {value!r}")
        return cls(**values)


def _is_rate(gbps: float) -> bool:
    return _MIN_GBPS <= gbps <= _MAX_GBPS


def limit_of(gbps: float) -> RateLimit | None:
    """gbps: 10^9 bits per second; 0: no limit."""
    return RateLimit(gbps * 1e9 / 8) if gbps else None


# "host": cores of the host. "bluefield3": ShadowServe's BlueField-3 (5), where 2 Arm cores receive, 14 dequantize,
# and accelerators decompress and copy. The emulated one has the rates that its stages reach while all of them run
# (Table 1, Fig. 13 with its text).
_BLUEFIELD_3: dict[str, Any] = {
    "receive_threads": 2,
    "decompress_threads": 1,
    "dequantize_threads": 14,
    "deliver_threads": 1,
    "cores": {"receive": [0, 1], "dequantize": list(range(2, 16))},
    "compressed_buffer_bytes": 256 << 20,
    "decompressed_buffer_bytes": 256 << 20,
    "dequantized_buffer_bytes": 512 << 20,
    "direct": False,
    "poll_us": 10.0,
}
_CONTENDED_GBPS = {"receive": 20.6, "decompress": 201.5, "dequantize": 167.0, "deliver": 174.8}
PROFILES: dict[str, dict[str, Any]] = {
    "host": {},
    "bluefield-3": _BLUEFIELD_3,
    "bluefield-3-emulated": {**_BLUEFIELD_3, "cores": {}, "engine": "emulated", "rates_gbps": _CONTENDED_GBPS},
}
