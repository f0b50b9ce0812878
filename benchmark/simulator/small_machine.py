"""A small machine with any mix of tiers, whose link speeds are multiples of recomputing. For bounds.py and harm.py.

Owns no state. All that comes out of it is simulated. Sizes are tokens; a few thousand of them make a run a matter of
a second, and ratios are what counts. Copies slow no launch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmark.simulator.data_plane import Codec, DataPlane, Stage, smart_nic_stages
from benchmark.simulator.profiles import CHUNK_COMPRESSED_SHARE, CHUNK_QUANTIZED_SHARE, L40S_BLUEFIELD3

from sglang.simulator.health import LinkHealth
from sglang.simulator.simulation import SimulatedHardware, SimulatedStore
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.managers.storage_setup import PrefetchConfig, StorageLimits, StorageSetup
from sglang.srt.mem_cache.transfer import D2H, D2P, FETCH_LINKS, H2D, P2D, PROBE, STORE_LINKS, Tier
from sglang.srt.model_executor.launch import Launch, LaunchMode

# A launch takes so long, and each new token of a prefill so much more.
PREFILL_S = 0.002
TOKEN_S = 100e-6
# A decode step, and each request in it.
DECODE_S = 0.004
DECODE_REQ_S = 100e-6
NUM_LAYERS = 8
BYTES_PER_TOKEN = 1 << 16
LINK_LATENCY_S = 50e-6
# By tier: a probe's answer.
PROBE_S = {Tier.DISK: 0.0002, Tier.REMOTE: 0.002}
BLOCK_TOKENS, BLOCKS_PER_OP = 64, 8
LINKS_OF = {
    Tier.HOST: (H2D, D2H),
    Tier.PEER: (P2D, D2P),
}
# What a link is usually like: a token takes so many times less to bring than to compute.
USUAL_SPEEDS = {Tier.PEER: 50.0, Tier.HOST: 20.0, Tier.DISK: 5.0, Tier.REMOTE: 2.0}
# The bluefield profile: what its SmartNIC does with all stages at once.
_CODEC = Codec(CHUNK_QUANTIZED_SHARE, CHUNK_COMPRESSED_SHARE)
assert L40S_BLUEFIELD3.nic is not None
_NIC_STAGES = smart_nic_stages(L40S_BLUEFIELD3.nic.together, _CODEC, float("inf"))


@dataclass(frozen=True)
class SmallMachine:
    """sizes: tier -> tokens; the device is one. A machine without a host has a single page of it where peers need
    one."""

    sizes: Mapping[Tier, int]
    # Tier -> how many times faster than computing a token its link brings one, and takes one.
    speeds: Mapping[Tier, float] = field(default_factory=dict)
    # Tier -> health of its links.
    health: Mapping[Tier, LinkHealth] = field(default_factory=dict)
    page_size: int = 16
    # None: the engine's default.
    write_policy: str | None = None
    chunk_tokens: int = 512
    context_len: int = 2048

    @property
    def storage(self) -> tuple[Tier, ...]:
        return tuple(tier for tier in (Tier.DISK, Tier.REMOTE) if self.sizes.get(tier))

    def links_of(self, tier: Tier) -> tuple[str, ...]:
        """Probes go by the link of the first store."""
        if tier not in self.storage:
            return LINKS_OF.get(tier, ())
        place = self.storage.index(tier)
        return (*(() if place else (PROBE,)), FETCH_LINKS[place], STORE_LINKS[place])

    @property
    def sum_tokens(self) -> int:
        return sum(self.sizes.values())

    def config(self) -> SchedulerConfig:
        policy = self.write_policy or SchedulerConfig.write_policy
        pages = {tier: size // self.page_size for tier, size in self.sizes.items()}
        host = pages.get(Tier.HOST, 0)
        if pages.get(Tier.PEER):
            host = max(1, host)
        return SchedulerConfig(
            page_size=self.page_size,
            num_device_pages=pages[Tier.DEVICE],
            num_host_pages=host,
            num_peer_pages=pages.get(Tier.PEER, 0),
            page_bytes=self.page_size * BYTES_PER_TOKEN,
            context_len=self.context_len,
            chunked_prefill_size=self.chunk_tokens,
            write_policy=policy,
            storage=self._storage_setup(policy, host),
        )

    def hardware(self) -> SimulatedHardware:
        stores = tuple(
            SimulatedStore(
                self._data_plane(tier).fetch, self._bandwidth(tier), self.sizes[tier] // BLOCK_TOKENS, PROBE_S[tier]
            )
            for tier in self.storage
        )
        return SimulatedHardware(
            num_layers=NUM_LAYERS,
            launch_seconds=launch_seconds,
            h2d_bandwidth=self._bandwidth(Tier.HOST),
            d2h_bandwidth=self._bandwidth(Tier.HOST),
            p2d_bandwidth=self._bandwidth(Tier.PEER),
            d2p_bandwidth=self._bandwidth(Tier.PEER),
            link_latency_s=LINK_LATENCY_S,
            stores=stores,
            health={link: health for tier, health in self.health.items() for link in self.links_of(tier)},
        )

    def _bandwidth(self, tier: Tier) -> float:
        """Bytes per second, each way."""
        return self.speeds.get(tier, USUAL_SPEEDS[tier]) * BYTES_PER_TOKEN / TOKEN_S

    def _data_plane(self, tier: Tier) -> DataPlane:
        """The remote tier is a SmartNIC, all of whose stages are scaled alike."""
        byte_s = 1 / self._bandwidth(tier)
        if tier == Tier.DISK:
            return DataPlane((Stage("disk", byte_s),))
        nic = DataPlane(_NIC_STAGES, overlaps=True)
        return DataPlane(_NIC_STAGES, overlaps=True, slower=byte_s / nic.pace(1.0))

    def _storage_setup(self, write_policy: str, num_host_pages: int) -> StorageSetup | None:
        if not self.storage:
            return None
        return StorageSetup(
            backend="simulated",
            setup="",
            secret=b"small machine",
            block_tokens=BLOCK_TOKENS,
            limits=StorageLimits.of_host(
                num_host_pages, BLOCK_TOKENS // self.page_size, BLOCKS_PER_OP, num_stores=len(self.storage)
            ),
            prefetch=PrefetchConfig(),
            write_policy=write_policy,
            tiers=self.storage,
        )


def launch_seconds(launch: Launch) -> float:
    if launch.mode == LaunchMode.DECODE:
        return DECODE_S + DECODE_REQ_S * len(launch.lens)
    return PREFILL_S + TOKEN_S * int(launch.lens.sum())
