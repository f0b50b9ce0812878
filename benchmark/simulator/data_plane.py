"""Data planes: the time to bring stored KV over a network to a GPU, chunk by chunk through stages.

Owns when each stage of a pipeline is free. Knows no system (papers/shadowserve_systems.py) and no scheduler. Seconds,
bytes, and bytes per second. All results are simulated.

    chunk 0   network | inflate | dequantize | DMA
    chunk 1             network | inflate    | dequantize | DMA          pipelined: the slowest stage sets the pace
    chunk 1                                                 network | …  one after another: their sum sets the pace
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.mem_cache.transfer import StorageOp


@dataclass(frozen=True)
class Codec:
    """What is left of a byte of KV. quantized: after quantizing, what decompressing gives; compressed: in the store
    and on the network."""

    quantized: float
    compressed: float


RAW = Codec(1.0, 1.0)


@dataclass(frozen=True)
class Stage:
    """seconds_per_byte: of KV as the GPU wants it; busy: the same while the GPU computes, if the stage runs there."""

    name: str
    seconds_per_byte: float
    busy: float | None = None

    def seconds(self, num_bytes: float, is_busy: bool) -> float:
        rate = self.busy if is_busy and self.busy is not None else self.seconds_per_byte
        return num_bytes * rate


@dataclass(frozen=True)
class DataPlane:
    """stages: of a chunk, in order. pipelined: different chunks are in different stages at a time. overlaps: an
    operation begins while the one before it is still on its way; else the pipeline runs empty in between. slower: all
    stages take so many times as long (buffers that are registered anew for each chunk). blocks: nothing is launched
    meanwhile."""

    stages: tuple[Stage, ...]
    pipelined: bool = True
    overlaps: bool = False
    slower: float = 1.0
    blocks: bool = False

    def chunk_seconds(self, num_bytes: float, is_busy: bool = False) -> list[float]:
        return [self.slower * stage.seconds(num_bytes, is_busy) for stage in self.stages]

    def pace(self, num_bytes: float, is_busy: bool = False) -> float:
        """Seconds per chunk of a long fetch."""
        seconds = self.chunk_seconds(num_bytes, is_busy)
        return max(seconds) if self.pipelined else sum(seconds)

    def fetch(self) -> DataPlaneClock:
        return DataPlaneClock(self)


class DataPlaneClock:
    """When operations end: a `FetchTimes`. A block is a chunk."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._free_at = [0.0] * len(plane.stages)
        self._last_end = 0.0

    def __call__(self, op: StorageOp, submitted: float, is_busy: bool) -> float:
        plane = self._plane
        seconds = plane.chunk_seconds(op.size_bytes / len(op.keys), is_busy)
        end = submitted if plane.overlaps else max(submitted, self._last_end)
        begin = end
        for _ in range(len(op.keys)):
            end = begin if plane.pipelined else max(begin, end)
            for i, each in enumerate(seconds):
                end = self._free_at[i] = max(end, self._free_at[i]) + each
        self._last_end = end
        return end


def smart_nic_stages(rates: dict[str, float], codec: Codec, network_limit: float) -> tuple[Stage, ...]:
    """The four stages of a SmartNIC at the given rates, see `SmartNic`."""
    return (
        Stage("network", codec.compressed / min(rates["network"], network_limit)),
        Stage("decompress", codec.quantized / rates["decompress"]),
        Stage("dequantize", 1 / rates["dequantize"]),
        Stage("dma", 1 / rates["dma"]),
    )


def loss_as_delay(loss: float) -> float:
    """A task that loses this share of its throughput takes by this share longer."""
    return loss / (1 - loss)
