"""Pages that no model here has go through every tier, link, store and lossless codec and come back, bit for bit.

So a new form of attention changes an attention path and `PageLayout`, and no tier. Strict copies between two engines
are in test/srt/peer/memory/test_strict_copies.py.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglang.srt.mem_cache.block_store import BlockStore, StoreError
from sglang.srt.mem_cache.layer_stream_cache import LayerStreamCache
from sglang.srt.mem_cache.link import CopyLink, CopyOptions
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.page_memory import ORDERS
from sglang.srt.mem_cache.pool_host import HostKVCache
from sglang.srt.mem_cache.storage.dynamic.dynamic_store import PluginStore
from sglang.srt.mem_cache.storage.file.file_store import HiCacheFile
from sglang.srt.mem_cache.storage.registry import StoreParams, storage_backend
from sglang.srt.mem_cache.swap_file import SwapFile
from sglang.srt.mem_cache.transfer import D2H, H2D, Ticket, Tier, TransferOp
from sglang.srt.offload.codec import BlockLayout, make_codec
from sglang.srt.peer.memory.elastic_pool import ElasticPool
from sglang.srt.peer.memory.slabs import GRANULARITY, SlabRange
from sglang.srt.peer.protocol.elastic_units import stride_bytes
from support.codec_cases import CONFIGS, round_trip
from support.page_layouts import LAYERS, LAYOUTS, are_equal, contents, fill, layouts
from support.plugin_fixture import block_keys
from support.pool_pages import poison
from support.remote_fixture import BUFFERS
from support.stream_emulator import StreamEmulator

SEED = 17
DEVICE_PAGES, NUM_PAGES = 11, 17
# Of `kvcacheio.BACKENDS`, those with code of their own on the CPU.
IO_BACKENDS = ("auto", "dma", "direct")
EXACT_CODECS = {name: config for name, config in CONFIGS.items() if not name.startswith("binned")}

each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@pytest.fixture
def rng() -> np.random.Generator:
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)


class Links:
    """Between a device pool and one below it."""

    def __init__(self, device: MHATokenToKVPool, below: Any, io_backend: str = "auto") -> None:
        self.emulator = StreamEmulator(SEED)
        self.page_bytes = device.page_layout.page_bytes
        self.links = {
            name: CopyLink(
                name,
                device,
                below,
                self.emulator.stream(name),
                lambda launch: None,
                options=CopyOptions(io_backend=io_backend),
            )
            for name in (D2H, H2D)
        }
        self._seqs = dict.fromkeys(self.links, 0)

    def copy(self, name: str, src: np.ndarray, dst: np.ndarray) -> None:
        ticket = Ticket(name, self._seqs[name])
        self._seqs[name] += 1
        tiers = (Tier.DEVICE, Tier.HOST) if name == D2H else (Tier.HOST, Tier.DEVICE)
        self.links[name].submit(TransferOp(ticket, *tiers, src, dst, len(src) * self.page_bytes))
        self.emulator.run(1 << 20)
        (result,) = self.links[name].poll()
        assert result.ok, result.error


def some(rng: np.random.Generator, num_pages: int, n: int, in_order: bool) -> np.ndarray:
    pages = rng.permutation(num_pages)[:n] if not in_order else np.arange(n) + int(rng.integers(num_pages - n + 1))
    return pages.astype(np.int32)


def go_there_and_back(
    rng: np.random.Generator, device: MHATokenToKVPool, below: Any, there: np.ndarray, io: str
) -> None:
    """From the device to pages `there` and to other pages of the device; no other page changes."""
    layout, n = device.page_layout, len(there)
    links = Links(device, below, io)
    fill(device, rng)
    mine, back = some(rng, DEVICE_PAGES, n, False), some(rng, DEVICE_PAGES, n, True)
    wanted = contents(layout, device, mine)
    links.copy(D2H, mine, there)
    assert are_equal(contents(layout, below, there), wanted)
    others = np.setdiff1d(np.arange(DEVICE_PAGES), back)
    before = contents(layout, device, others)
    links.copy(H2D, there, back)
    assert are_equal(contents(layout, device, back), wanted)
    assert are_equal(contents(layout, device, others), before), "pages that were not named were written"


def host_pool(layout: PageLayout, order: str = "page_first", num_pages: int = NUM_PAGES) -> MHATokenToKVPoolHost:
    return MHATokenToKVPoolHost(MHATokenToKVPool(1, layout), num_pages, order)


# -- pools and links ---------------------------------------------------------------------------------------------


@pytest.mark.sampled(36)
@each_layout
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("io_backend", IO_BACKENDS)
def test_device_and_host(layout: PageLayout, order: str, io_backend: str, rng: np.random.Generator):
    device = MHATokenToKVPool(DEVICE_PAGES, layout, has_scratch=True)
    host = MHATokenToKVPoolHost(device, NUM_PAGES, order)
    for in_order in (True, False):
        go_there_and_back(rng, device, host, some(rng, NUM_PAGES, 7, in_order), io_backend)


@each_layout
def test_tokens_are_stored_where_views_find_them(layout: PageLayout, rng: np.random.Generator):
    slabs = SlabRange.owned(1, stride_bytes(layout.page_bytes, layout.page_bytes, GRANULARITY))
    for pool in (MHATokenToKVPool(DEVICE_PAGES, layout), ElasticPool(slabs, layout)):
        slots = torch.tensor([1, pool.page_size, 0]) if pool.page_size > 1 else torch.tensor([2, 0])
        for layer in range(LAYERS):
            components = pool.view(layer).components
            tokens = [components[i] for i in layout.per_token]
            values = [torch.randint(1, 99, (len(slots), *each.shape[2:])).to(each.dtype) for each in tokens]
            pool.store(layer, slots, *values)
            for each, value in zip(tokens, values):
                assert torch.equal(each[slots // pool.page_size, slots % pool.page_size], value)
        with pytest.raises(AssertionError, match="values for"):
            pool.store(0, slots, *values, values[0])


@each_layout
def test_slabs_with_padding(layout: PageLayout, rng: np.random.Generator):
    page_bytes = layout.page_bytes
    slab_bytes = -(-5 * page_bytes // GRANULARITY) * GRANULARITY
    peer = ElasticPool(SlabRange.owned(3, slab_bytes, stride_bytes(slab_bytes, page_bytes, GRANULARITY)), layout)
    frames = rng.permutation(np.concatenate([peer.frames_of(slab) for slab in range(3)]))[:9].astype(np.int32)
    go_there_and_back(rng, MHATokenToKVPool(DEVICE_PAGES, layout), peer, frames, "auto")
    # An engine's own pool is one, too.
    host = MHATokenToKVPoolHost(peer, NUM_PAGES, "layer_first")
    wanted, there = contents(layout, peer, frames), some(rng, NUM_PAGES, len(frames), False)
    links = Links(peer, host)  # type: ignore[arg-type]
    links.copy(D2H, frames, there)
    assert are_equal(contents(layout, host, there), wanted)
    poison(peer, torch.from_numpy(frames).long())
    assert all((each == 0xFF).all() for each in contents(layout, peer, frames))
    links.copy(H2D, there, frames)
    assert are_equal(contents(layout, peer, frames), wanted)


@each_layout
def test_swap_file_and_buffers_of_a_layer(layout: PageLayout, rng: np.random.Generator, tmp_path: Path):
    device, swap = MHATokenToKVPool(DEVICE_PAGES, layout), SwapFile(tmp_path, NUM_PAGES, layout)
    host = host_pool(layout)
    fill(device, rng)
    fill(host, rng)
    mine, there = some(rng, DEVICE_PAGES, 8, False), some(rng, NUM_PAGES, 8, False)
    wanted = contents(layout, device, mine)
    links = Links(device, swap)
    links.copy(D2H, mine, there)
    emulator = StreamEmulator(SEED)
    cache = LayerStreamCache(2, 3, device, {Tier.HOST: host, Tier.DISK: swap}, emulator.stream("layer-stream"))
    cache.kv.view(torch.uint8).fill_(255)
    of_host = some(rng, NUM_PAGES, 2, False)
    parts = [(Tier.DISK, there[:5]), (Tier.HOST, of_host), (Tier.DISK, there[5:])]
    streamed = contents(layout, host, of_host)
    expected = [np.concatenate([a[:, :5], b, a[:, 5:]], axis=1) for a, b in zip(wanted, streamed)]
    for layer in range(LAYERS):
        at = 0
        for piece in cache.pieces(parts):
            filled = cache.fill(layer, piece)
            emulator.run(1 << 20)
            filled.check()
            for component, of_layer in zip(filled.view.components, expected, strict=True):
                found = component[: piece.num_pages].contiguous().view(torch.uint8).numpy()
                assert np.array_equal(found, of_layer[layer, at : at + piece.num_pages])
            at += piece.num_pages
    fill(device, rng)
    links.copy(H2D, there, mine)
    assert are_equal(contents(layout, device, mine), wanted)


# -- storage -----------------------------------------------------------------------------------------------------


def store_and_fetch(store: BlockStore, host: MHATokenToKVPoolHost, rng: np.random.Generator) -> None:
    """Blocks go to the store from pages of the host and come back to others."""
    layout = host.page_layout
    frames = rng.permutation(host.num_pages).astype(np.int32)
    fill(host, rng)
    keys = block_keys(3)
    n = 3 * store.block_tokens // layout.page_size
    mine, back = frames[:n], frames[n : 2 * n]
    wanted = contents(layout, host, mine)
    assert store.set(keys, mine) == 3 and store.exists(keys) == 3
    assert store.get(keys, back) == 3
    assert are_equal(contents(layout, host, back), wanted)


@each_layout
@pytest.mark.parametrize("order", ORDERS)
def test_file_store(layout: PageLayout, order: str, rng: np.random.Generator, tmp_path: Path):
    host = host_pool(layout, order)
    store = HiCacheFile(tmp_path, "namespace", host, 2 * layout.page_size)
    store_and_fetch(store, host, rng)
    store.close()


class Plugin:
    """Keeps records as a plugin may: by the addresses of their runs, or as tensors."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}

    def register_mem_pool_host(self, pool: HostKVCache) -> None:
        self.pool = pool

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.records), len(keys))

    def batch_set(self, keys: list[str], values: list[torch.Tensor], **_: Any) -> bool:
        self.records |= {key: value.view(torch.uint8).numpy().tobytes() for key, value in zip(keys, values)}
        return True

    def batch_get(self, keys: list[str], target_locations: list[torch.Tensor], **_: Any) -> list[torch.Tensor]:
        return [
            torch.frombuffer(bytearray(self.records[key]), dtype=target.dtype)
            for key, target in zip(keys, target_locations)
        ]

    def _runs(self, indices: torch.Tensor) -> list[list[tuple[int, int]]]:
        """K and V of each page, address and size."""
        runs = list(zip(*self.pool.get_page_buffer_meta(indices)))
        return [runs[i : i + 2] for i in range(0, len(runs), 2)]

    def batch_set_v1(self, keys: list[str], indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        for key, runs in zip(keys, self._runs(indices)):
            self.records[key] = b"".join(ctypes.string_at(address, size) for address, size in runs)
        for i, key in enumerate(keys):
            page = self.pool.get_data_page(indices[i * self.pool.page_size])
            assert page.view(torch.uint8).numpy().tobytes() == self.records[key]
        return [True] * len(keys)

    def batch_get_v1(self, keys: list[str], indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        for key, runs in zip(keys, self._runs(indices)):
            record = self.records[key]
            for address, size in runs:
                ctypes.memmove(address, record[:size], size)
                record = record[size:]
        return [True] * len(keys)


@each_layout
@pytest.mark.parametrize("interface_v1", [False, True])
def test_plugin(layout: PageLayout, interface_v1: bool, rng: np.random.Generator):
    for order in ORDERS:
        host = host_pool(layout, order)
        params = StoreParams({}, "namespace", host, 2 * layout.page_size, "a/model")
        store = PluginStore(Plugin(), params, "mine", interface_v1, staging_bytes=1 << 16)
        store_and_fetch(store, host, rng)


# -- the remote tier ---------------------------------------------------------------------------------------------


@pytest.mark.sampled(24)
@each_layout
@pytest.mark.parametrize("codec", EXACT_CODECS.values(), ids=EXACT_CODECS)
def test_every_lossless_codec(layout: PageLayout, codec: dict[str, object], rng: np.random.Generator):
    host = host_pool(layout, "layer_first", 2 * 4)
    mine, back = rng.permutation(8).astype(np.int32).reshape(2, 4)
    for max_piece_bytes in (2 << 20, 3 * layout.page_bytes, layout.page_bytes // 2 + 1):
        block = BlockLayout(4, layout, max_piece_bytes)
        assert block.block_bytes == 4 * layout.page_bytes
        fill(host, rng)
        for is_compressible in (False, True):
            if is_compressible:
                # Most bytes alike; random ones are stored as they are.
                memory = host.kv.view(-1).view(torch.uint8)
                memory[torch.from_numpy(rng.random(len(memory)) < 0.9)] = 0x7F
            raw = np.empty(block.block_bytes, np.uint8)
            host.copy_out(mine, raw)
            found = round_trip(block, codec, raw)
            assert np.array_equal(found, raw)
            host.copy_in(back, found)
            assert are_equal(contents(layout, host, back), contents(layout, host, mine))


@pytest.mark.parametrize("name", ["latent 37", "int8 with scales"])
def test_a_proxy_and_a_store(name: str, rng: np.random.Generator, tmp_path: Path):
    host = host_pool(layouts(3)[name])
    store = open_remote("lossless", host, 6, tmp_path)
    store_and_fetch(store, host, rng)
    store.close()


def open_remote(codec: str, host: MHATokenToKVPoolHost, block_tokens: int, directory: Path) -> BlockStore:
    config = {"in_process": True, "proxy": BUFFERS, "codec": codec}
    params = StoreParams(config, "namespace", host, block_tokens, "a/model", directory=directory)
    return storage_backend("remote").open(params)


@each_layout
def test_a_lossy_codec_refuses_what_has_no_heads_of_k_and_v(layout: PageLayout):
    block = BlockLayout(2, layout)
    if layout.kv_shape is not None:
        assert make_codec({"codec": "binned"}, block).lossy
        return
    with pytest.raises(ValueError, match=f"scales the heads of K and V in .*, and this cache has {layout}"):
        make_codec({"codec": "binned"}, block)


def test_a_lossy_codec_is_refused_when_the_engine_starts(tmp_path: Path):
    host = host_pool(layouts(16)["latent 72"])
    with pytest.raises(StoreError, match="latent 72 bfloat16 per token, 3 layers: use codec lossless or raw"):
        open_remote("binned", host, 16, tmp_path)
