"""Upstream SGLang's own storage backends, unmodified from its wheel, behind `PluginStore`.

The wheel is downloaded once (28 MB) into the user's cache folder; without a network the tests skip. Its folder
`mem_cache/storage` is appended to the path of ours, so that modules import each other under their upstream names.
What upstream's modules import from the rest of upstream and is not here comes from the wheel too, or a stand-in is
named beside the test.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import signal
import sys
import types
import zipfile
from pathlib import Path

import pytest
import torch

import sglang.srt.mem_cache.storage as storage_package
import sglang.srt.mem_cache.storage.file as file_package
import sglang.srt.observability.metrics_collector as metrics_collector
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from sglang.srt.mem_cache.page_memory import torch_dtype
from sglang.srt.mem_cache.storage.registry import StoreParams, storage_backend
from support.plugin_fixture import Blocks, FakePool, block_keys
from support.upstream_wheel import STANDS_ON, upstream_wheel

pytestmark = pytest.mark.clients

BLOCK = 64
STORAGE = "sglang.srt.mem_cache.storage"


@pytest.fixture(scope="module")
def upstream(tmp_path_factory) -> Path:
    """The folder sglang/srt of the wheel, with those parts that are used here."""
    folder = tmp_path_factory.mktemp("upstream")
    wanted = ("sglang/srt/environ.py", "sglang/srt/mem_cache/hicache_storage.py", "sglang/srt/mem_cache/storage/")
    with zipfile.ZipFile(upstream_wheel(STANDS_ON)) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(wanted)])
    return folder / "sglang" / "srt"


@pytest.fixture(autouse=True)
def imports(upstream, monkeypatch):
    """Modules of the wheel's storage folder can be imported, until the test ends."""
    before = dict(sys.modules)
    folder = upstream / "mem_cache" / "storage"
    monkeypatch.setattr(storage_package, "__path__", [*storage_package.__path__, str(folder)])
    monkeypatch.setattr(file_package, "__path__", [*file_package.__path__, str(folder / "file")])
    yield
    for name in set(sys.modules) - set(before):
        if name.startswith(("sglang.", "upstream_", "simm")):
            del sys.modules[name]
            parent, _, child = name.rpartition(".")
            if parent in sys.modules:
                vars(sys.modules[parent]).pop(child, None)


def module_from(path: Path, name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def stand_in(name: str, **contents: object) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module
    return module


def create(module_path: str, class_name: str, pool: FakePool, **config):
    config |= {"backend_name": class_name, "module_path": module_path, "class_name": class_name}
    return storage_backend("dynamic").open(StoreParams(config, "ns", pool, BLOCK, "a/model"))


def check_that_it_stores(store, blocks: Blocks) -> None:
    keys = block_keys(5)
    assert store.exists(keys) == 0 and blocks.load(store, keys) == 0
    assert blocks.store(store, keys[:3]) == 3
    assert store.exists(keys) == 3 and blocks.load(store, keys) == 3
    assert blocks.store(store, keys) == 5 and store.exists(keys) == 5 and blocks.load(store, keys) == 5
    assert blocks.load(store, [keys[4], keys[0]]) == 2
    stats = store.stats()
    assert stats["read_errors"] == stats["write_errors"] == 0


@pytest.fixture(params=[(1, torch.float32), (16, torch.bfloat16), (64, torch.bfloat16)], ids=str)
def pool(request):
    page_size, dtype = request.param
    return FakePool(num_pages=10 * BLOCK // page_size, page_size=page_size, dtype=dtype)


# HiCacheFile: generic interface, made by (storage_config, kwargs). Stand-in: human_readable_int, which only parses
# the limits of its eviction. sglang.srt.environ is the wheel's. It derives from the wheel's HiCacheStorage.


@pytest.fixture
def file_module(upstream, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "hicache"))
    module_from(upstream / "environ.py", "sglang.srt.environ")
    stand_in("sglang.srt.utils.common", human_readable_int=int)
    return module_from(upstream / "mem_cache" / "hicache_storage.py", "upstream_hicache_storage")


def test_file(file_module, pool, tmp_path):
    store, blocks = create("upstream_hicache_storage", "HiCacheFile", pool), Blocks(pool, BLOCK)
    assert not issubclass(file_module.HiCacheFile, HiCacheStorage)
    check_that_it_stores(store, blocks)

    keys = block_keys(5)
    restarted = create("upstream_hicache_storage", "HiCacheFile", pool)
    assert restarted.exists(keys) == 5 and blocks.load(restarted, keys) == 5
    restarted.clear()
    assert not list((tmp_path / "hicache").iterdir()) and restarted.exists(keys) == 0


@pytest.mark.parametrize("how", ["flipped", "short", "empty", "of another block"])
def test_file_with_a_damaged_file(file_module, tmp_path, how):
    pool = FakePool()
    store, blocks = create("upstream_hicache_storage", "HiCacheFile", pool), Blocks(pool, BLOCK)
    keys = block_keys(3)
    blocks.store(store, keys)
    (path,) = (tmp_path / "hicache").glob(f"{keys[1].hex()}*")
    data = path.read_bytes()
    if how == "flipped":
        path.write_bytes(data[:99] + bytes([data[99] ^ 1]) + data[100:])
    elif how == "of another block":
        path.write_bytes(next((tmp_path / "hicache").glob(f"{keys[2].hex()}*")).read_bytes())
    else:
        path.write_bytes(data[: len(data) // 2 if how == "short" else 0])
    assert store.exists(keys) == 3 and blocks.load(store, keys) == 1
    if how in ("short", "empty"):
        # HiCacheFile raises. It does so in an outage too, until other blocks come right.
        assert store.exists(keys) == 3 and blocks.load(store, keys) == 1
    assert store.stats()["read_errors"] > 0 and store.exists(keys) == 1
    assert blocks.store(store, keys) == 3, "upstream's set skips the name that exists"
    assert blocks.load(store, keys) == 3


def test_file_with_eviction(file_module):
    pool = FakePool()
    blocks, keys = Blocks(pool, BLOCK), block_keys(6)
    (record,) = {create("upstream_hicache_storage", "HiCacheFile", pool).staging.page_bytes}
    store = create("upstream_hicache_storage", "HiCacheFile", pool, max_size=4 * record)
    assert blocks.store(store, keys) == 6
    assert store.exists(keys) == 0, "the oldest are gone"
    assert blocks.load(store, keys[-1:]) == 1
    assert blocks.store(store, keys[:3]) == 3 and blocks.load(store, keys[:3]) == 3


# HiCacheSiMM: v1 interface through addresses and registered memory. Stand-ins: the transport's client, simm.kv,
# as a dictionary that copies from and to the addresses as RDMA would; the search for network cards, which fails on a
# machine without InfiniBand.


class BlockView:
    def __init__(self, address: int, size: int) -> None:
        self.address, self.size = address, size

    @classmethod
    def from_buffer(cls, address, size, region):
        first, end = region
        assert first <= address and address + size <= end, "outside the registered memory"
        return cls(address, size)


class Allocated:
    def __init__(self, size: int) -> None:
        self.memory = torch.zeros(size, dtype=torch.uint8)

    def as_ref(self):
        return self.memory

    def view(self):
        return BlockView(self.memory.data_ptr(), len(self.memory))


class Store:
    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}

    def allocate(self, size):
        return Allocated(size)

    def put(self, key, view):
        self.data[key] = ctypes.string_at(view.address, view.size)
        return 0

    def get(self, key, view):
        if key not in self.data:
            return -1
        assert len(self.data[key]) == view.size
        ctypes.memmove(view.address, self.data[key], view.size)
        return view.size

    def exists(self, key):
        return key in self.data

    def mput(self, keys, views):
        return [self.put(key, view) for key, view in zip(keys, views)]

    def mget(self, keys, views):
        return [self.get(key, view) for key, view in zip(keys, views)]

    def mexists(self, keys):
        return [key in self.data for key in keys]


@pytest.fixture
def simm(monkeypatch):
    def register_mr(tensor):
        assert tensor.is_contiguous()
        return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes

    stand_in("simm").__path__ = []
    stand_in("simm.kv", BlockView=BlockView, Store=Store, register_mr=register_mr, set_flag=lambda *_: None)
    module = importlib.import_module(f"{STORAGE}.simm.hicache_simm")
    monkeypatch.setattr(module, "get_numa_nic_mapping", dict)


def test_simm(simm, pool):
    store = create(f"{STORAGE}.simm.hicache_simm", "HiCacheSiMM", pool, interface_v1=1, manager_address="here:1")
    blocks = Blocks(pool, BLOCK)
    check_that_it_stores(store, blocks)

    data = store._plugin.store.data
    keys = block_keys(5)
    del data[next(name for name in data if name.startswith(keys[3].hex()) and name.endswith("_v"))]
    assert store.exists(keys) == 3 and blocks.load(store, keys) == 3
    name = next(name for name in data if name.startswith(keys[1].hex()) and name.endswith("_k"))
    data[name] = bytes(len(data[name]))
    assert blocks.load(store, keys) == 1
    assert blocks.store(store, keys) == 5 and blocks.load(store, keys) == 5


# HiCacheHF3FS: v1 interface through views of the pool, with the mock client of the wheel. A subclass gives it the
# constructor that plugins have. Stand-ins: its metadata client (the wheel's needs `requests`) and StorageMetrics,
# which only its statistics use.


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_hf3fs(pool, tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_collector, "StorageMetrics", object, raising=False)
    upstream = importlib.import_module(f"{STORAGE}.hf3fs.storage_hf3fs")

    class Metadata(upstream.Hf3fsMetadataInterface):
        def __init__(self):
            self.pages, self.free = {}, []

        def initialize(self, rank, num_pages, namespace="kv"):
            self.free = list(range(num_pages))

        def reserve_and_allocate_page_indices(self, rank, keys, namespace="kv"):
            return [(True, self.pages[key]) if key in self.pages else (False, self.free.pop()) for key, _ in keys]

        def confirm_write(self, rank, written_keys_to_confirm, pages_to_release, namespace="kv"):
            self.pages.update(written_keys_to_confirm)
            self.free += pages_to_release

        def get_page_indices(self, rank, keys, namespace="kv"):
            return [self.pages.get(key) for key in keys]

        def delete_keys(self, rank, keys, namespace="kv"): ...

        def exists(self, rank, keys, namespace="kv"):
            return [key in self.pages for key in keys]

        def clear(self, rank, namespace="kv"):
            self.pages.clear()

    class HF3FS(upstream.HiCacheHF3FS):
        def __init__(self, storage_config, kwargs):
            super().__init__(
                rank=storage_config.tp_rank,
                file_path=str(tmp_path / "hf3fs.bin"),
                file_size=1 << 24,
                numjobs=1,
                bytes_per_page=storage_config.extra_config["run_bytes"],
                entries=2,
                client_timeout=5,
                dtype=torch_dtype(pool.page_layout.dtype),
                metadata_client=Metadata(),
                use_mock_client=True,
                is_page_first_layout=storage_config.is_page_first_layout,
            )

    stand_in("upstream_hf3fs_plugin", HF3FS=HF3FS)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)}
    # One job is enough: the wheel's mock seeks and reads through one descriptor.
    run_bytes = create(f"{STORAGE}.shm.hicache_shm", "HiCacheShm", pool).staging.run_bytes
    store = create("upstream_hf3fs_plugin", "HF3FS", pool, interface_v1=True, run_bytes=run_bytes)
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    blocks = Blocks(pool, BLOCK)
    check_that_it_stores(store, blocks)

    with open(tmp_path / "hf3fs.bin", "r+b") as file:  # all that is stored
        file.write(bytes(1 << 24))
    keys = block_keys(5)
    assert store.exists(keys) == 5 and blocks.load(store, keys) == 0
    assert store.stats()["read_errors"] == 1
    store.clear()
    assert store.exists(keys) == 0 and blocks.store(store, keys) == 5 and blocks.load(store, keys) == 5
    store.close()


# HiCacheShm: a backend that stores nothing and says that it did. Nothing stands in.


def test_shm(pool):
    store, blocks = create(f"{STORAGE}.shm", "HiCacheShm", pool), Blocks(pool, BLOCK)
    keys = block_keys(3)
    assert blocks.store(store, keys) == 3
    assert store.exists(keys) == blocks.load(store, keys) == 0
    assert store.stats()["read_errors"] == 0, "it never said that it has them"


# SimHiCacheStorage: keeps keys and answers reads without bytes. A subclass gives it the constructor of a plugin.


@pytest.mark.parametrize("v1", [False, True], ids=["generic", "v1"])
def test_sim_is_seen_through(v1):
    upstream = importlib.import_module(f"{STORAGE}.sim_storage")

    class Sim(upstream.SimHiCacheStorage):
        def __init__(self, storage_config, kwargs):
            super().__init__(storage_config)

    stand_in("upstream_sim_plugin", Sim=Sim)
    pool = FakePool()
    store = create("upstream_sim_plugin", "Sim", pool, interface_v1=v1, sim_op_latency_us=0, sim_write_gbps=0)
    blocks, keys = Blocks(pool, BLOCK), block_keys(3)
    assert blocks.store(store, keys) == 3 and store.exists(keys) == 3
    assert blocks.load(store, keys) == 0
    assert store.stats()["read_errors"] == 1 and store.exists(keys) == 0


def test_a_backend_that_needs_more_of_upstream_is_refused_with_what_it_lacks():
    with pytest.raises(ValueError, match=r"cannot be imported .* it needs a part of upstream SGLang") as refused:
        create(f"{STORAGE}.nixl.hicache_nixl", "HiCacheNixl", FakePool())
    assert "sglang.srt.environ" in str(refused.value)
