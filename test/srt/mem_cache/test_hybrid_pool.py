"""A device pool with memory of its own for layers with a window: what it holds, what links copy to and from it, and
that a model computes the same as with one pool."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import GptOssConfig, PretrainedConfig, Qwen2Config

from sgl_kernel.kvcacheio import KVPages, transfer_kv_all_layer_pf_lf
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.cpu_backend import CpuAttnBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.check_link import CheckLink
from sglang.srt.mem_cache.hybrid_pages import HybridPages, runs_alike
from sglang.srt.mem_cache.link import CopyLink, CopyOptions
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.page_layout import Component, PageLayout
from sglang.srt.mem_cache.page_memory import ORDERS
from sglang.srt.mem_cache.transfer import D2H, H2D, CheckOp, Ticket, Tier, TransferOp
from sglang.srt.model_executor.executor import ExecutorOptions, ModelExecutor
from sglang.srt.model_executor.kernel_warm_up import warm_up_kernels, warm_up_transfers
from sglang.srt.model_executor.launch import Launch, LaunchMode, PageRun
from sglang.srt.model_executor.page_table import PageTable
from sglang.srt.model_loader.loader import load_model
from sglang.srt.sampling.sample_spec import SampleSpec
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.cuda_stream import make_stream
from sglang.srt.utils.device import CPU, settle_memory
from sglang.srt.utils.stream import ThreadStream
from support.device_emulator import emulated_device
from support.page_layouts import LAYOUTS
from support.paged_attention import PagedAttention
from support.pool_pages import fill_all, pages_of, poison, poison_windowed

WINDOWED = (True, False, True, True, False)
PAGES, WINDOWED_PAGES, HOST_PAGES = 12, 7, 20


def hybrid(page_size: int = 4, has_scratch: bool = False) -> MHATokenToKVPool:
    layout = PageLayout.kv(page_size, len(WINDOWED), 2, 4, torch.float32)
    pool = MHATokenToKVPool(PAGES, layout, CPU, has_scratch, WINDOWED, WINDOWED_PAGES)
    pool.kv.copy_(torch.randint(256, pool.kv.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3)))
    return pool


def bytes_of(pool: MHATokenToKVPool) -> list[list[torch.Tensor]]:
    """Of each layer, a copy of its components: (num_pages, bytes of a page)."""
    views = [pool.view(layer) for layer in range(pool.page_layout.num_layers)]
    return [[each.flatten(1).view(torch.uint8).clone() for each in view.components] for view in views]


def are_equal(some: list[list[torch.Tensor]], others: list[list[torch.Tensor]]) -> bool:
    return all(torch.equal(a, b) for x, y in zip(some, others, strict=True) for a, b in zip(x, y, strict=True))


def ids(*frames: int) -> np.ndarray:
    return np.array(frames, np.int32)


# -- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("head_dims", [(4, 4), (4, 6)])
def test_storage_sees_whole_pages_of_a_hybrid_host(order: str, head_dims: tuple[int, int]):
    """As of a host with one pool, wherever the layers of a page lie."""
    components = tuple(Component(name, (2, dim), "float32") for name, dim in zip("KV", head_dims))
    layout = PageLayout(components, len(WINDOWED), 4)
    device = MHATokenToKVPool(PAGES, layout, CPU, False, WINDOWED, WINDOWED_PAGES)
    host = MHATokenToKVPoolHost(device, HOST_PAGES, order, num_windowed_pages=9, windowed=WINDOWED)
    assert host.buffers(ids(0)) is None
    rng = np.random.default_rng(7)
    blocks = rng.integers(0, 256, (5, layout.page_bytes), dtype=np.uint8)
    for start, stop in layout.padding:
        blocks[:, start:stop] = 0
    frames, of_windows = ids(4, 5, 6, 19, 0), ids(8, 0, 1, -1, 2)
    host.set_windowed(frames, of_windows)
    before = host.kv.clone()
    host.copy_in(frames, blocks)
    whole = np.flatnonzero(of_windows >= 0)
    found = np.empty((4, layout.page_bytes), np.uint8)
    host.copy_out(frames[whole], found)
    assert np.array_equal(found, blocks[whole])
    plain = MHATokenToKVPoolHost(MHATokenToKVPool(1, layout), HOST_PAGES)
    plain.copy_in(frames, blocks)
    there, of_windows_there = (torch.from_numpy(each[whole].astype(np.int64)) for each in (frames, of_windows))
    both = (pages_of(host, there, of_windows_there), pages_of(plain, there))
    assert torch.equal(*(each.view(-1).view(torch.uint8) for each in both))
    with pytest.raises(AssertionError, match="frames beyond the pool"):
        host.copy_out(frames, np.empty((5, layout.page_bytes), np.uint8))
    # Nothing else is written: of page 19 only layers with full attention, and no other page of layers with a window.
    changed = host.kv != before
    assert changed.sum() <= 5 * host.regions[0].page_bytes + 4 * host.regions[1].page_bytes


def test_each_kind_of_layer_has_as_many_pages_as_it_is_given():
    pool = hybrid(has_scratch=True)
    assert [len(pool.view(layer).k) for layer in range(5)] == [8, 13, 8, 8, 13]
    assert (pool.scratch_slot, pool.windowed_scratch_slot) == (PAGES * 4, WINDOWED_PAGES * 4)
    layer_bytes = pool.page_layout.layer_bytes
    assert pool.kv.nbytes == (2 * 13 + 3 * 8) * layer_bytes and pool.kv.dtype == torch.uint8
    plain = MHATokenToKVPool(PAGES, pool.page_layout, has_scratch=True, windowed=WINDOWED)
    assert plain.windowed_scratch_slot == plain.scratch_slot and not isinstance(plain.kv_pages, HybridPages)


@pytest.mark.parametrize("page_size", [1, 4])
def test_layers_lie_beside_each_other_and_take_their_own_slots(page_size: int):
    pool = hybrid(page_size)
    wanted = bytes_of(pool)
    for layer, is_windowed in enumerate(WINDOWED):
        loc = torch.tensor([0, 6, 3]) + (0 if is_windowed else 5)
        k, v = torch.randn(2, 3, 2, 4).unbind()
        pool.store(layer, loc, k, v)
        for component, value in zip(wanted[layer], (k, v)):
            component.view(torch.float32).view(-1, 2, 4)[loc] = value
        assert are_equal(bytes_of(pool), wanted), "another layer was written to"


def test_any_layout_may_be_hybrid():
    for name, layout in LAYOUTS.items():
        kinds = (False, True, False)
        pool = MHATokenToKVPool(5, layout, windowed=kinds, num_windowed_pages=2)
        pool.kv.fill_(1)
        for layer, is_windowed in enumerate(kinds):
            for i, component in enumerate(pool.view(layer).components):
                component.view(torch.uint8).fill_(10 * layer + i)
                assert len(component) == (2 if is_windowed else 5), name
        for layer in range(3):
            found = [int(each.view(torch.uint8).unique()) for each in pool.view(layer).components]
            assert found == [10 * layer + i for i in range(len(found))], name


def test_parts_are_layers_of_one_kind():
    pages = hybrid().kv_pages
    assert isinstance(pages, HybridPages)
    assert runs_alike(WINDOWED) == [range(0, 1), range(1, 2), range(2, 4), range(4, 5)] and not runs_alike(())
    assert [pages.part(layers).num_pages for layers in runs_alike(WINDOWED)] == [7, 12, 7, 12]
    assert pages.part(range(2, 4)).components[0].data_ptr() == pages.of_windows.components[0][1].data_ptr()
    assert pages.part(range(2, 4)) is pages.part(range(2, 4))
    with pytest.raises(AssertionError, match="both kinds"):
        pages.part(range(1, 3))


def test_poison_and_copies_of_pages():
    pool = hybrid()
    before = bytes_of(pool)
    poison(pool, ids(3))
    poison_windowed(pool, ids(5))
    for layer, is_windowed in enumerate(WINDOWED):
        for found, old in zip(bytes_of(pool)[layer], before[layer]):
            assert (found != old).any(1).nonzero().flatten().tolist() == [5 if is_windowed else 3]
    copy = pages_of(pool, torch.tensor([3, 4]), torch.tensor([0, 5]))
    nans = copy.isnan().flatten(3).all(3)
    assert nans[0].tolist() == 2 * [[False, True, False, False, True]]
    assert nans[1].tolist() == 2 * [[True, False, True, True, False]]
    fill_all(pool, 2.0)
    assert (pool.kv.view(torch.float32) == 2.0).all()


# -- links --------------------------------------------------------------------------------------------------------


class Links:
    """Both links of a hybrid pool, and what their operations should leave. windowed_host: of the host's pool for
    layers with a window; 0 for a host without one."""

    def __init__(
        self,
        stream: ThreadStream,
        seed: int,
        page_size: int,
        order: str,
        io_backend: str,
        windowed_host: int = 0,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.device = hybrid(page_size)
        self.host = MHATokenToKVPoolHost(
            self.device, HOST_PAGES, order, num_windowed_pages=windowed_host, windowed=WINDOWED
        )
        raw = self.host.kv.view(-1).view(torch.uint8)
        raw.copy_(torch.from_numpy(self.rng.integers(0, 256, len(raw), dtype=np.uint8)))
        self.links = {
            name: CopyLink(name, self.device, self.host, stream, lambda seq: None, options=CopyOptions(io_backend))
            for name in (H2D, D2H)
        }
        self.wanted, self.wanted_below = bytes_of(self.device), self.below()
        self.num = {H2D: 0, D2H: 0}

    def below(self) -> list[list[torch.Tensor]]:
        """As `bytes_of`."""
        layers = [self.host.kv_pages.part(range(i, i + 1)).components for i in range(len(WINDOWED))]
        return [[each[0].flatten(1).contiguous().view(torch.uint8).clone() for each in layer] for layer in layers]

    def op(self, link: str) -> TransferOp:
        """Of a few pages: a backup, or a load of all layers, or without some of them."""
        n = int(self.rng.integers(1, WINDOWED_PAGES + 1))
        full_only, windowed_only = 0, 0
        windowed_host = self.host.num_windowed_pages
        if link == H2D or windowed_host:
            full_only = int(self.rng.integers(n + 1))
            full_only, windowed_only = [(0, 0), (full_only, 0), (0, n)][self.rng.integers(3 if link == H2D else 2)]
        there, here, of_windows, of_windows_there = (
            self.rng.permutation(count)[:n].astype(np.int32)
            for count in (HOST_PAGES, PAGES, WINDOWED_PAGES, max(n, windowed_host))
        )
        tiers, frames = (Tier.HOST, Tier.DEVICE), (there, here)
        if link == D2H:
            tiers, frames = tiers[::-1], frames[::-1]
        size = n * self.device.page_layout.page_bytes
        cut: dict[str, object] = {"num_full_only_pages": full_only, "num_windowed_only_pages": windowed_only}
        cut["dst_windowed" if link == H2D else "src_windowed"] = of_windows[full_only:]
        if windowed_host:
            cut["src_windowed" if link == H2D else "dst_windowed"] = of_windows_there[full_only:]
        self.num[link] += 1
        return TransferOp(Ticket(link, self.num[link] - 1), *tiers, *frames, size, **cut)

    def expect(self, op: TransferOp) -> None:
        """Page by page, layer by layer."""
        loads = op.src == Tier.HOST
        for layer, is_windowed in enumerate(WINDOWED):
            above, below = (op.dst_frames, op.src_frames) if loads else (op.src_frames, op.dst_frames)
            first = op.num_full_only_pages if is_windowed else op.num_windowed_only_pages
            above, below = above[first:], below[first:]
            if is_windowed:
                of_windows = (op.src_windowed, op.dst_windowed)[:: -1 if loads else 1]
                above, below = (y if x is None else x for x, y in zip(of_windows, (above, below)))
            for mine, theirs in zip(above.tolist(), below.tolist(), strict=True):
                for component, of_host in zip(self.wanted[layer], self.wanted_below[layer], strict=True):
                    there = of_host[theirs]
                    to, of = (component[mine], there) if loads else (there, component[mine])
                    to.copy_(of)


@pytest.fixture
def stream() -> Iterator[ThreadStream]:
    thread = ThreadStream("link")
    yield thread
    thread.close()


@pytest.mark.parametrize(("order", "io_backend"), [(ORDERS[0], "auto"), (ORDERS[1], "dma"), (ORDERS[0], "direct")])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("windowed_host", [0, 9])
def test_loads_and_backups_are_exact(
    stream: ThreadStream, page_size: int, order: str, io_backend: str, windowed_host: int
):
    for seed in range(3):
        print(f"seed {seed}")
        links = Links(stream, seed, page_size, order, io_backend, windowed_host)
        for _ in range(12):
            link = (H2D, D2H)[links.rng.integers(2)]
            links.links[link].submit(op := links.op(link))
            links.expect(op)
            gate = links.links[link].gate(op.ticket) if link == H2D else None
            for layer in range(len(WINDOWED)) if gate else ():
                gate.wait(layer, stream)
        stream.record().synchronize()
        results = [result for link in links.links.values() for result in link.poll()]
        assert len(results) == 12 and all(result.ok for result in results), results
        assert are_equal(bytes_of(links.device), links.wanted) and are_equal(links.below(), links.wanted_below)


@pytest.mark.parametrize("windowed_host", [0, 10])
def test_kernels_load_layers_of_one_kind_at_once_and_a_launch_waits_for_its_own(
    windowed_host: int, monkeypatch: pytest.MonkeyPatch
):
    kinds = (True, True, False) * 4
    num_layers: list[int] = []

    def load(host: KVPages, pages: KVPages, *frames: torch.Tensor, backend: str) -> None:
        num_layers.append(pages.num_layers)
        transfer_kv_all_layer_pf_lf(host, pages, *frames, backend=backend)

    monkeypatch.setattr("sglang.srt.mem_cache.link.transfer_kv_all_layer_pf_lf", load)
    with emulated_device(2):
        device = torch.device("cuda", 0)
        layout = PageLayout.kv(4, len(kinds), 2, 4, torch.float32)
        pool = MHATokenToKVPool(PAGES, layout, device, False, kinds, WINDOWED_PAGES)
        host = MHATokenToKVPoolHost(pool, HOST_PAGES, num_windowed_pages=windowed_host, windowed=kinds)
        raw = host.kv.view(-1).view(torch.uint8).view(torch.float32)
        raw.copy_(torch.arange(len(raw), dtype=torch.float32))
        settle_memory(device)
        copies, compute = make_stream(H2D, device), make_stream("compute", device)
        link = CopyLink(H2D, pool, host, copies, lambda seq: None, options=CopyOptions("persistent"))
        frames = {"src_frames": ids(3, 9, 5), "dst_frames": ids(11, 0, 2), "dst_windowed": ids(6, 0, 1)}
        if windowed_host:
            frames["src_windowed"] = ids(2, 1, 8)
        link.submit(TransferOp(Ticket(H2D, 0), Tier.HOST, Tier.DEVICE, size_bytes=0, **frames))
        gate = link.gate(Ticket(H2D, 0))
        there = {name: torch.from_numpy(each.astype(np.int64)) for name, each in frames.items()}
        seen: list[torch.Tensor] = []
        for layer in range(len(kinds)):
            gate.wait(layer, compute)
            compute.enqueue(partial(lambda layer: seen.append(pool.view(layer).k.clone()), layer))
        for stream in (copies, compute):
            stream.close()
        assert [result.ok for result in link.poll()] == [True]
        assert num_layers == ([1, 1, 1, 2, 1, 4, 2] if windowed_host else [1, 1, 1, 2, 1, 2, 1, 2, 1]), num_layers
        for layer, is_windowed in enumerate(kinds):
            of_kind = "windowed" if is_windowed else "frames"
            src = there.get(f"src_{of_kind}", there["src_frames"])
            wanted = host.kv_pages.part(range(layer, layer + 1)).k[0, src]
            assert torch.equal(seen[layer].cpu()[there[f"dst_{of_kind}"]], wanted), layer


def test_an_array_is_converted_once_per_operation(stream: ThreadStream, monkeypatch: pytest.MonkeyPatch):
    links = Links(stream, 0, 1, "page_first", "auto")
    converted: list[int] = []
    monkeypatch.setattr(
        "sglang.srt.mem_cache.link.to_device", lambda array, where: converted.append(1) or torch.from_numpy(array)
    )
    op = TransferOp(Ticket(H2D, 0), Tier.HOST, Tier.DEVICE, ids(1, 2), ids(3, 4), 10, dst_windowed=ids(0, 1))
    links.links[H2D].submit(op)
    stream.record().synchronize()
    assert len(converted) == 3


@pytest.mark.parametrize("windowed_host", [0, 1])
def test_the_page_of_each_scratch_slot_goes_to_the_host_and_back(windowed_host: int):
    pool = hybrid(has_scratch=True)
    host = MHATokenToKVPoolHost(pool, 2, num_windowed_pages=windowed_host, windowed=WINDOWED)
    for layer in range(5):
        pool.view(layer).k[-1], pool.view(layer).v[-1] = layer, layer
    before = bytes_of(pool)
    warm_up_transfers(pool, host.kv_pages, "auto", WINDOWED)
    assert are_equal(bytes_of(pool), before)
    found = pages_of(host, torch.tensor([0]), torch.tensor([0]))
    assert [found[0, :, layer].unique().tolist() for layer in range(5)] == [[0], [1], [2], [3], [4]]


def test_pages_are_compared_in_both_kinds_of_layers(stream: ThreadStream, tmp_path: Path):
    pool = hybrid()
    for layer, is_windowed in enumerate(WINDOWED):
        for component in pool.view(layer).components:
            component.fill_(1.0)
            component[5 if is_windowed else 7] += torch.arange(32.0).view(4, 2, 4)
            component[6 if is_windowed else 8] = component[5 if is_windowed else 7]
    link = CheckLink(pool, tmp_path, 0, stream)

    def check(seq: int) -> bool:
        frames = {"src_frames": ids(0, 7), "dst_frames": ids(1, 8)}
        of_windows = {"src_windowed": ids(0, 5), "dst_windowed": ids(1, 6)}
        tokens = np.arange(8, dtype=np.int32)
        link.submit(
            CheckOp(
                Ticket(link.name, seq),
                Tier.DEVICE,
                Tier.DEVICE,
                size_bytes=0,
                tokens=tokens,
                came_from=Tier.HOST,
                **frames,
                **of_windows,
            )
        )
        stream.record().synchronize()
        (result,) = link.poll()
        return result.ok

    assert check(0)
    pool.view(2).v[6] += 100
    assert not check(1)
    (file,) = tmp_path.iterdir()
    kept = np.load(file)
    assert kept["cached_1"].shape == (5, 4, 2, 4) and len(kept["tokens"]) == 8
    differ = (kept["cached_1"] != kept["computed_1"]).any((1, 2, 3))
    assert differ.tolist() == [False, False, True, False, False]
    assert np.array_equal(kept["cached_0"], kept["computed_0"])
    pool.view(2).v[6] -= 100
    pool.view(4).k[8] += 100
    assert not check(2)


# -- the page table -----------------------------------------------------------------------------------------------


class Apart(PageTable):
    """The tables are other memory than the mirror: what a device without one would have."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._is_apart = True
        self._use_tables(self._new_tables())


@pytest.mark.parametrize("kind", [PageTable, Apart])
def test_both_tables_stand_at_the_same_places(kind: type[PageTable]):
    for seed in range(3):
        print(f"seed {seed}")
        rng = random.Random(seed)
        table = kind(4, CPU, 128, 1000)
        assert table.windowed_table is not table.table
        frame_of = dict.fromkeys(range(1000), 0)
        model: dict[int, list[tuple[int, int]]] = {}
        for _ in range(80):
            given = [(rng.randrange(1000), rng.randrange(100)) for _ in range(rng.choice((0, 1, 30)))]
            frame_of |= dict(given)
            runs, singles = [], []
            for slot in rng.sample(range(4), rng.randrange(3)):
                frames = [rng.randrange(1000) for _ in range(rng.choice((1, 62, 126)))]
                runs.append(PageRun(slot, 0, np.array(frames, np.int32), fresh=True))
                model[slot] = [(page, frame_of[page]) for page in frames]
            for slot in rng.sample(sorted(model), rng.randint(0, len(model))):
                page = rng.randrange(1000)
                singles.append((slot, len(model[slot]), page))
                model[slot].append((page, frame_of[page]))
            appends = np.array(singles, np.int32).reshape(-1, 3).T
            table.apply(runs, appends, np.array(given, np.int32).reshape(-1, 2).T)
            table.write(*map(torch.from_numpy, table.changes()))
            for slot, pages in model.items():
                places = slice(table.starts[slot], table.starts[slot] + len(pages))
                found = torch.stack((table.table[places], table.windowed_table[places]), 1)
                assert found.tolist() == [list(each) for each in pages]
                assert table.at(np.arange(places.start, places.stop)).T.tolist() == found.tolist()
        assert table.version > 0, "the tables grew"


def test_without_a_pool_for_windows_there_is_one_table():
    table = PageTable(4, CPU, 64)
    table.apply([PageRun(0, 0, ids(*range(70)), fresh=True)], np.empty((3, 0), np.int32))
    assert table.version and table.windowed_table is table.table and table.at(np.arange(3)).tolist() == [[0, 1, 2]]


# -- the executor -------------------------------------------------------------------------------------------------

PAGE, CONTEXT, SLOTS = 4, 96, 3
SLOT_PAGES = CONTEXT // PAGE
NUM_PAGES = SLOTS * SLOT_PAGES


SHAPE = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    sliding_window=9,
)


def write(path: Path, config: PretrainedConfig, architecture: str) -> Path:
    """A model with weights that are made up."""
    config.architectures = [architecture]
    config.save_pretrained(path)
    model = load_model(ModelConfig.from_pretrained(str(path), dtype="float32"), "dummy", CpuAttnBackend(), 1)
    weights = {
        name: each.tensor.narrow(each.dim, each.start, each.shape[each.dim]).clone()
        for name, each in model.weight_targets().items()
    }
    save_file(weights, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model whose second layer has a window."""
    config = Qwen2Config(**SHAPE, use_sliding_window=True, max_window_layers=1)
    return write(tmp_path_factory.mktemp("model"), config, "Qwen2ForCausalLM")


class Requests:
    """Requests that prefill in parts and decode. is_hybrid: pages have other frames for the layer with a window, and
    give them up behind the window."""

    def __init__(self, config: ModelConfig, backend: AttentionBackend, device: torch.device, is_hybrid: bool) -> None:
        model = load_model(config, "auto", backend, device=device)
        model.finish_loading()
        self.windowed = [window is not None for window in model.windows]
        layout = PageLayout.kv(PAGE, config.num_layers, config.num_kv_heads, config.head_dim, config.dtype)
        has_graphs = device.type == "cuda"
        num_windowed = NUM_PAGES // 2 if is_hybrid else 0
        self.pool = pool = MHATokenToKVPool(NUM_PAGES, layout, device, has_graphs, self.windowed, num_windowed)
        fill_all(pool, float("nan"))
        if has_graphs:
            for layer, is_windowed in enumerate(self.windowed):
                slot = pool.windowed_scratch_slot if is_windowed else pool.scratch_slot
                assert slot is not None
                for component in pool.view(layer).components:
                    component[slot // PAGE] = 0
        self.logits: list[torch.Tensor] = []
        self.stream = make_stream("compute", device)
        options = ExecutorOptions(PAGE, config.attn_scale, config.vocab_size, SLOTS, self._sample, device=device)
        if has_graphs:
            options = ExecutorOptions(
                **{**vars(options), "attention": backend, "graph_batch_size": 6, "graph_prefill_tokens": 32}
            )
        self.executor = ModelExecutor(model, pool, self.stream, {}, options)
        self.executor.capture_graphs()
        self.window = max((window or 0 for window in model.windows), default=0)
        # The first page has what a wrong slot of 0 would write to.
        self.free = [0, *1 + np.random.default_rng(5).permutation(max(num_windowed - 1, 0))]
        self.frame_of: dict[int, int] = {}
        self.lens = [0] * SLOTS
        self.tokens: list[bytes] = []
        self.seq = 0

    def _spoil(self, frame: int) -> None:
        """Finite, as kernels read whole tiles, see `WINDOW_TILE`."""
        for layer, is_windowed in enumerate(self.windowed):
            for component in self.pool.view(layer).components if is_windowed else ():
                component[frame] = 1e3

    def _sample(self, logits: torch.Tensor, sampling: SamplingBatchInfo) -> torch.Tensor:
        self.logits.append(logits.clone())
        return logits.argmax(-1)

    def launch(self, mode: LaunchMode, parts: dict[int, np.ndarray]) -> None:
        """parts: of each slot, the next tokens."""
        runs, given = [], []
        for slot, ids_of in parts.items():
            start, end = self.lens[slot], self.lens[slot] + len(ids_of)
            first, last = -(-start // PAGE), -(-end // PAGE)
            # Pages of all slots lie one among the other.
            pages = np.arange(first, last, dtype=np.int32) * SLOTS + slot
            if len(pages):
                runs.append(PageRun(slot, first, pages, fresh=start == 0))
            if self.pool.num_windowed_pages:
                for page in range(max(0, (start + 1 - self.window) // PAGE)):
                    # No query sees it any more.
                    if (frame := self.frame_of.pop(page * SLOTS + slot, None)) is not None:
                        self._spoil(frame)
                        self.free.append(frame)
                for page in pages.tolist():
                    self.frame_of[page] = self.free.pop(0)
                    given.append((page, self.frame_of[page]))
            self.lens[slot] = end
        slots = np.array(list(parts), np.int32)
        lens = np.array([len(each) for each in parts.values()], np.int32)
        self.executor.launch(
            Launch(
                seq=self.seq,
                mode=mode,
                slots=slots,
                starts=np.array([self.lens[slot] for slot in parts], np.int32) - lens,
                lens=lens,
                input_ids=np.concatenate(list(parts.values())).astype(np.int32),
                samples=np.ones(len(slots), bool),
                sampling=tuple(SampleSpec(SamplingParams(temperature=0.0), (), 0) for _ in slots),
                page_runs=tuple(runs),
                page_appends=np.empty((3, 0), np.int32),
                gates=(),
                windowed_frames=np.array(given, np.int32).reshape(-1, 2).T if self.pool.num_windowed_pages else None,
            )
        )
        self.seq += 1
        while not (results := self.executor.poll()):
            time.sleep(1e-4)
        assert not results[0].failed
        self.tokens.append(results[0].tokens)

    def run(self) -> tuple[list[bytes], list[torch.Tensor]]:
        rng = np.random.default_rng(2)
        for lens in ((20, 5, 11), (1, 30, 7)):
            parts = {slot: rng.integers(3, 97, n) for slot, n in enumerate(lens)}
            self.launch(LaunchMode.EXTEND, parts)
        for slots in 6 * [(0, 1, 2), (2, 0)]:
            self.launch(LaunchMode.DECODE, {slot: np.array([-1]) for slot in slots})
        self.launch(LaunchMode.EXTEND, {1: rng.integers(3, 97, 13)})
        return self.tokens, self.logits


@pytest.mark.parametrize("backend", [CpuAttnBackend, TorchNativeAttnBackend])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_model_computes_the_same_with_one_pool_and_two(
    folder: Path, tmp_path: Path, backend: type[AttentionBackend], has_sinks: bool
):
    """With sinks, the first layer is the one with a window."""
    if has_sinks:
        theirs = GptOssConfig(**SHAPE, head_dim=16, num_local_experts=3, num_experts_per_tok=2)
        folder = write(tmp_path, theirs, "GptOssForCausalLM")
    config = ModelConfig.from_pretrained(str(folder), dtype="float32")
    assert config.windows == ((9, None) if has_sinks else (None, 9))
    (tokens, logits), (same_tokens, same_logits) = (
        Requests(config, backend(), CPU, is_hybrid).run() for is_hybrid in (False, True)
    )
    assert tokens == same_tokens
    for some, others in zip(logits, same_logits, strict=True):
        assert some.isfinite().all() and torch.equal(some, others)


@pytest.mark.parametrize("captures_extends", [False, True])
def test_graphs_read_both_tables(folder: Path, captures_extends: bool):
    """The window is longer than all requests, as the emulator's attention has none."""
    config = ModelConfig.from_pretrained(str(folder), dtype="float32")
    config = replace(config, windows=tuple(None if each is None else 200 for each in config.windows))
    tokens, _ = Requests(config, CpuAttnBackend(), CPU, False).run()
    with emulated_device(4):
        attention = PagedAttention(captures_extends)
        found, _ = Requests(config, attention, torch.device("cuda", 0), True).run()
    assert found == tokens
    # 12 decodes, and what is short of the prefills, each for both kinds of layers.
    assert attention.replayed == 2 * (12 + (1 if captures_extends else 0))


def test_kernels_are_warmed_up_with_both_scratch_pages(folder: Path):
    config = ModelConfig.from_pretrained(str(folder), dtype="float32")
    backend = CpuAttnBackend()
    model = load_model(config, "auto", backend)
    layout = PageLayout.kv(PAGE, config.num_layers, config.num_kv_heads, config.head_dim, config.dtype)
    pool = MHATokenToKVPool(5, layout, CPU, True, [window is not None for window in model.windows], 2)
    poison(pool, np.arange(5))
    poison_windowed(pool, np.arange(2))
    warm_up_kernels(model, pool, config.attn_scale, 97, lambda logits, sampling: logits.argmax(-1), backend, False)
    assert pages_of(pool, torch.arange(5), torch.tensor([0, 1, 0, 1, 0])).isnan().all()
    assert not pages_of(pool, torch.tensor([5]), torch.tensor([2])).isnan().any()
