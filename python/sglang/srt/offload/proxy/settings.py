"""`ProxySettings`: the resources of an offload proxy, and profiles of machines. Owns what is said of bad ones."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.block_store import StoreError
from sglang.srt.offload.codec.layout import MAX_PIECE_BYTES as PIECE_BYTES

STAGES = ("receive", "decompress", "dequantize", "deliver")
ENGINES = ("software", "emulated")
_MAX_THREADS = 256
_MAX_BUFFER_BYTES = 1 << 40


@dataclass(frozen=True, kw_only=True)
class ProxySettings:
    """receive_threads … deliver_threads: of each stage; write_threads: that store. cores: stage -> cores that its
    threads are pinned to, in turn; "write" too; stages that are not named are not pinned.

    buffer_bytes: of each of the buffers of compressed, decompressed and dequantized pieces (the last is the source of
    DMA). They are allocated once, and hold as many pieces as fit.
    window: requests to the store that each receiving thread has on its way.
    direct: dequantize into the engine's memory itself where a piece lies there in one run, rather than into a buffer
    that is then copied.

    Baselines (ShadowServe 6.4): pipelined False sends block after block through the stages, each on all threads of
    its stage ("no CP"); preallocated False maps fresh memory for each piece ("no MM").

    engine: "software" does the work on these cores; "emulated" does it as well, and lets each stage take at least as
    long as an accelerator: rates_gbps, stage -> 10^9 bits per second of what the stage puts out (of what it takes
    in: receive), for all its threads together. poll_us: how often an accelerator is asked whether it is done.
    """

    receive_threads: int = 2
    decompress_threads: int = 2
    dequantize_threads: int = 1
    deliver_threads: int = 1
    write_threads: int = 1
    cores: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    compressed_buffer_bytes: int = 32 << 20
    decompressed_buffer_bytes: int = 32 << 20
    dequantized_buffer_bytes: int = 32 << 20
    window: int = 2
    direct: bool = True
    pipelined: bool = True
    preallocated: bool = True
    engine: str = "software"
    rates_gbps: dict[str, float] = dataclasses.field(default_factory=dict)
    poll_us: float = 10.0
    store_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        for stage in (*STAGES, "write"):
            if not 1 <= self.threads(stage) <= _MAX_THREADS:
                raise StoreError(f"proxy: {stage}_threads has to be from 1 to {_MAX_THREADS}")
        for name in ("compressed", "decompressed", "dequantized"):
            size = getattr(self, f"{name}_buffer_bytes")
            # A slot is a little more than a piece; each receiving thread fills one, and a later stage empties one.
            least = (self.receive_threads + 1) * 2 * PIECE_BYTES
            if not least <= size <= _MAX_BUFFER_BYTES:
                raise StoreError(f"proxy: {name}_buffer_bytes has to be at least {least}, not {size}")
        if self.engine not in ENGINES:
            raise StoreError(f"proxy: engine {self.engine!r} is none of {', '.join(ENGINES)}")
        if not all(
            isinstance(c, list) and c and all(type(i) is int and i >= 0 for i in c) for c in self.cores.values()
        ):
            raise StoreError('proxy: cores are lists of core numbers by stage, like {"receive": [0, 1]}')
        if not all(type(rate) in (int, float) for rate in self.rates_gbps.values()):
            raise StoreError('proxy: rates_gbps are numbers by stage, like {"receive": 20.6}')
        if unknown := set(self.cores) - {*STAGES, "write"}:
            raise StoreError(
                f"proxy: cores names {', '.join(sorted(unknown))}; stages are {', '.join(STAGES)}, write"
            )
        if unknown := set(self.rates_gbps) - set(STAGES):
            raise StoreError(f"proxy: rates_gbps names {', '.join(sorted(unknown))}; stages are {', '.join(STAGES)}")
        if not self.window >= 1:
            raise StoreError("proxy: window has to be at least 1")
        if not self.store_timeout_s > 0 or not self.poll_us >= 0 or not all(r > 0 for r in self.rates_gbps.values()):
            raise StoreError("proxy: store_timeout_s and rates_gbps have to be above 0, poll_us at least 0")

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


# Host cores; ShadowServe's BlueField-3 (5): 2 Arm cores receive, 14 dequantize, accelerators decompress and copy; and
# the same emulated, at the rates that its stages reach while all of them run (Table 1, Fig. 13 with its text).
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
