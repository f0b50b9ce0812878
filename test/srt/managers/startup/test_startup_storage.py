"""`StorageOpener.setup` by example: what a user may say about storage, and every sentence that refuses."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from sglang.srt.configs.model_files import ModelConfigError
from sglang.srt.distributed.parallel_state import Replicas
from sglang.srt.managers.startup import storage
from sglang.srt.managers.startup.storage import StorageOpener, parse_extra_config
from sglang.srt.managers.storage_setup import StorageSetup
from sglang.srt.mem_cache.block_store import BlockStore, StoreError
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.storage.dynamic.dynamic_store import PluginStore
from sglang.srt.mem_cache.storage.registry import StoreParams
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.offload.codec import BlockLayout, make_codec


@dataclass
class Pool:
    page_size: int = 1
    num_pages: int = 4096
    page_bytes: int = 1000
    dtype: str = "float32"

    @property
    def page_layout(self) -> PageLayout:
        return PageLayout.kv(self.page_size, 1, 1, 1, self.dtype)


def opener(model: str = "model", rank: int = 0, size: int = 1, **pool: Any) -> StorageOpener:
    return StorageOpener(lambda: model, "name", Pool(**pool), rank, size)  # type: ignore[arg-type]


def setup(extra: Any = None, prefetch: str = "timeout", write: str = "write_through", **of: Any) -> StorageSetup:
    text = extra if isinstance(extra, str) else json.dumps({"secret": "s"} | (extra or {}))
    return opener(**of).setup("file", text, prefetch, write)


def test_what_nobody_said() -> None:
    found = setup()
    assert (found.backend, found.block_tokens, found.write_policy) == ("file", 64, "write_through")
    opened = {"backend": "file", "config": {}, "block_tokens": 64, "is_exclusive": {"file": False}}
    told = json.loads(found.setup)
    assert len(bytes.fromhex(told.pop("mac_key"))) == 32 and told == opened
    assert json.loads(setup({"secret": ""}).setup)["mac_key"] == ""
    prefetch = found.prefetch
    assert (prefetch.policy, prefetch.threshold) == ("timeout", 256)
    assert (prefetch.timeout_base_s, prefetch.timeout_per_ki_token_s) == (1.0, 0.25)
    # Of 4,096: what hangs takes a sixteenth at most, reads and writes each.
    limits = found.limits
    assert (limits.max_fetch_pages, limits.max_store_pages) == (256, 256)
    assert limits.max_pinned_pages == 2048
    assert 0 < len(found.secret) <= 64


def test_what_somebody_said() -> None:
    ours = {
        "block_tokens": 128,
        "fetch_order": "sjf",
        "fetch_window_ops": 3,
        "prefetch_threshold": 0,
        "prefetch_timeout_base": 2,
        "prefetch_timeout_per_ki_token": 0.5,
        "secret": "hush",
    }
    found = setup({**ours, "path": "/there", "limit_gb": 3}, "best_effort", "write_back")
    assert json.loads(found.setup)["config"] == {"path": "/there", "limit_gb": 3}, "the rest is the backend's"
    assert "hush" not in found.setup
    assert (found.block_tokens, found.write_policy, found.prefetch.policy) == (128, "write_back", "best_effort")
    assert (found.prefetch.threshold, found.prefetch.timeout_base_s) == (0, 2.0)
    assert found.prefetch.timeout_per_ki_token_s == 0.5
    assert (found.prefetch.fetch_order, found.limits.fetch_window_ops) == ("sjf", 3)


@pytest.mark.parametrize(("page", "block"), [(1, 64), (16, 64), (48, 96), (64, 64), (100, 100)])
def test_a_block_is_whole_pages(page: int, block: int) -> None:
    assert setup(page_size=page).block_tokens == block


@pytest.mark.parametrize(("page_bytes", "blocks"), [(1, 256), (1 << 14, 32), (1 << 19, 1), (1 << 30, 1)])
def test_an_operation_is_a_fraction_of_a_second(page_bytes: int, blocks: int) -> None:
    assert setup(page_bytes=page_bytes, num_pages=1 << 20).limits.blocks_per_op == blocks


@pytest.mark.parametrize(
    ("num_pages", "page", "per_op", "in_flight"),
    [(256, 1, 1, 64), (1024, 1, 2, 256), (8192, 1, 4, 512), (64, 64, 2, 4)],
)
def test_two_operations_hold_on_to_a_sixteenth_of_the_host(
    num_pages: int, page: int, per_op: int, in_flight: int
) -> None:
    """But to four blocks, as far as they are a quarter of it."""
    limits = setup(page_size=page, num_pages=num_pages).limits
    assert (limits.blocks_per_op, limits.max_fetch_pages, limits.max_store_pages) == (per_op, in_flight, in_flight)


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ("{", "has to be JSON"),
        ("nonsense", "has to be JSON"),
        ("[" * 100_000, "has to be JSON"),
        ('{"block_tokens": 1' + "0" * 5000 + "}", "has to be JSON"),
        ("[1]", "has to be a JSON object"),
        ('"text"', "has to be a JSON object"),
        ("@/nowhere/at/all", "cannot read /nowhere/at/all"),
        ("@", "cannot read"),
        ("@\0", "cannot read"),
        ('{"path": "\\ud800"}', "half of a surrogate pair"),
        ('{"a": {"b": ["\udcff"]}}', "a byte that is no UTF-8"),
        ({"path": "a\0b", "secret": ""}, "path has a NUL character"),
        ({"path": "/tmp/" + "a" * 256, "secret": ""}, "(File name too long): name one that"),
        ({"fetch_order": "lifo"}, 'fetch_order is "lifo", but it has to be one of fifo, sjf'),
        ({"fetch_order": 1}, "fetch_order is 1"),
        ({"fetch_window_ops": 0}, "fetch_window_ops is 0, but it has to be a whole number from 1"),
        ({"block_tokens": 0}, "block_tokens is 0, but it has to be a whole number from 1"),
        ({"block_tokens": 64.0}, "block_tokens is 64.0"),
        ({"block_tokens": True}, "block_tokens is true"),
        ({"block_tokens": "64"}, 'block_tokens is "64"'),
        ({"block_tokens": None}, "block_tokens is null"),
        ({"block_tokens": 10**30}, "whole number"),
        ({"block_tokens": 4096}, "more than a quarter of the host tier"),
        ({"prefetch_threshold": -1}, "prefetch_threshold is -1"),
        ({"prefetch_threshold": 10**30}, "whole number"),
        ({"prefetch_timeout_base": -0.5}, "number of seconds"),
        ({"prefetch_timeout_base": "1"}, "number of seconds"),
        ({"prefetch_timeout_base": 10**400}, "number of seconds"),
        ('{"prefetch_timeout_base": NaN}', "number of seconds"),
        ('{"prefetch_timeout_per_ki_token": Infinity}', "number of seconds"),
        ({"prefetch_timeout_per_ki_token": False}, "number of seconds"),
        ({"secret": 5}, "secret is 5, but it has to be a string"),
    ],
)
def test_what_is_refused(extra: Any, sentence: str) -> None:
    with pytest.raises(StoreError) as refused:
        setup(extra)
    assert sentence in str(refused.value) and len(str(refused.value)) < 400
    str(refused.value).encode()


def test_what_else_is_refused() -> None:
    with pytest.raises(StoreError, match="no multiple of the page size 16"):
        setup({"block_tokens": 40}, page_size=16)
    with pytest.raises(StoreError, match="raise --hicache-size"):
        setup(num_pages=255)
    assert setup(num_pages=256).limits.max_store_pages == 64, "one block fits"
    with pytest.raises(StoreError, match="best_effort, wait_complete, timeout"):
        setup(prefetch="never")
    with pytest.raises(StoreError, match="write_through_selective"):
        setup(write="never")
    with pytest.raises(StoreError, match=r"mooncake is not built in.*'dynamic' loads plugins"):
        opener().setup("mooncake", "", "timeout", "write_through")


def test_settings_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text('{"block_tokens": 32, "secret": "s"}')
    assert setup(f"@{path}").block_tokens == 32
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(StoreError, match="cannot read"):
        setup(f"@{path}")
    assert parse_extra_config("") == {}


def test_ranks_name_blocks_alike_and_other_models_do_not() -> None:
    """What the bytes of a block depend on, and the secret, go into the names; the rank does not."""
    secrets = [
        setup(rank=0, size=2).secret,
        setup(dtype="float16").secret,
        setup(model="other").secret,
        setup({"block_tokens": 128}).secret,
        setup({"secret": "t"}).secret,
    ]
    assert len(set(secrets)) == len(secrets)
    assert setup(rank=1, size=2).secret == secrets[0]
    # The page size belongs to a remote block and not to one on the disk.
    assert setup(page_size=16).secret == secrets[0]
    secrets = [
        opener(page_size=size).setup(name, "{}", "timeout", "write_through").secret
        for size in (8, 16)
        for name in ("remote", "file,remote")
    ]
    assert len(set(secrets)) == 2 and secrets[0] == secrets[1]


def test_the_secret_of_a_folder_is_shared_by_all_who_use_it(tmp_path: Path) -> None:
    here, there = {"path": str(tmp_path / "a"), "secret": ""}, {"path": str(tmp_path / "b"), "secret": ""}
    assert setup(here, rank=0, size=2).secret == setup(here, rank=1, size=2).secret
    assert setup(here).secret != setup(there).secret
    assert setup(here).secret != setup(here, model="other").secret


def test_blocks_of_k_and_v_have_the_names_that_they_always_had() -> None:
    """Else all that was ever stored is unknown after an update."""
    layout = PageLayout.kv(16, 2, 3, 8, torch.bfloat16)
    pool = MHATokenToKVPoolHost(MHATokenToKVPool(2, layout), 64)
    found = StorageOpener(lambda: "fp", "name", pool, 0, 1)
    assert found._namespace(64, ("remote",)) == found._namespace(64, ("file", "remote"))
    assert found._namespace(64, ("remote",)) == "v1 fp torch.bfloat16 page 16 block 64"
    assert found._namespace(64, ("file",)) == "v1 fp torch.bfloat16 block 64"
    secret = found._chain_secret(("remote",), {}, "s", 64)
    assert secret.hex() == "6f86845176855f016cc7907df4a82d7c00f8879da8244fb8f5079930a428cb41"
    params = StoreParams({}, found._namespace(64, ("dynamic",)), pool, 64, "name")
    plugin = PluginStore(mock.Mock(), params, "plugin", False, 256_000_000)
    assert plugin._digest.hex() == "6e8a662c30863432415402a978212e1e"
    assert plugin.staging.dtype == torch.bfloat16 and plugin.staging.page_bytes == 16384
    block = BlockLayout(4, layout)
    assert block.spec == "4x2x2x16x3x8 bfloat16 in 2097152" and block.piece_bytes == 12288
    for config, fingerprint in (
        ({}, 0xEEABAEB153EECDBE),
        ({"coder": "deflate"}, 0xE37AD58982B4C19D),
        ({"codec": "raw"}, 0xFA127845629C2FA2),
        ({"codec": "binned"}, 0x0F9830A14E5B6B65),
    ):
        raw = np.zeros(block.block_bytes, np.uint8)
        codec = make_codec(config, block)
        stored = np.empty(codec.max_stored_bytes(len(raw)), np.uint8)
        size = codec.encode(raw, 0, bytes(16), stored)
        assert codec.parse(stored[:size], 0, bytes(16)).fingerprint == fingerprint, config


def test_a_model_whose_files_have_changed_is_a_sentence() -> None:
    def model() -> str:
        raise ModelConfigError("the files have changed")

    with pytest.raises(StoreError, match="the files have changed"):
        StorageOpener(model, "name", Pool(), 0, 1).setup("file", '{"secret": "s"}', "timeout", "auto")  # type: ignore


def real_opener(rank: int = 0, size: int = 1, model: str = "m float32", page_size: int = 16) -> StorageOpener:
    device = MHATokenToKVPool(4, PageLayout.kv(page_size, 2, 1, 4, torch.float32))
    return StorageOpener(lambda: model, "name", MHATokenToKVPoolHost(device, 64), rank, size)


def test_stores_of_ranks_models_and_block_sizes_keep_apart(tmp_path: Path) -> None:
    """Each of these writes the same key, and finds only what it wrote itself."""
    kinds = [
        (real_opener(0, 2), 16),
        (real_opener(1, 2), 16),
        (real_opener(), 16),
        (real_opener(model="m float16"), 16),
        (real_opener(), 32),
    ]
    for each, block in kinds:
        words = each.setup(
            "file", json.dumps({"path": str(tmp_path), "block_tokens": block}), "timeout", "write_through"
        )
        store = each.open(words.setup)
        assert store.exists([bytes(16)]) == 0
        frames = np.arange(block // each.pool.page_size, dtype=np.int32)
        each.pool.kv.zero_()
        assert store.set([bytes(16)], frames) == 1 == store.exists([bytes(16)])
        store.close()


def test_a_store_that_does_not_open_says_what_to_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        each = real_opener()
        each.open(each.setup("file", json.dumps({"path": f"{tmp_path}/file"}), "timeout", "write_through").setup)
    each = real_opener()
    with pytest.raises(StoreError, match="lacks backend_name, module_path, class_name"):
        each.open(each.setup("dynamic", "{}", "timeout", "write_through").setup)


# -- two backends -----------------------------------------------------------------------------------------------


def two(extra: dict[str, Any], backend: str = "file,remote") -> StorageSetup:
    return opener().setup(backend, json.dumps(extra), "timeout", "write_through")


def test_two_backends_have_their_settings_under_their_names() -> None:
    found = two({"file": {"path": "/there"}, "remote": {"url": "redis://there"}, "secret": "s"})
    assert found.tiers == (Tier.DISK, Tier.REMOTE) and found.block_tokens == 64 and not found.is_lossy
    assert json.loads(found.setup)["config"] == {"file": {"path": "/there"}, "remote": {"url": "redis://there"}}
    assert found.secret != two({"secret": "t"}).secret == two({"secret": "t"}).secret


@pytest.mark.parametrize(
    ("backend", "extra", "says"),
    [
        ("remote,file", {}, "a local and a remote one, in this order"),
        ("file,dynamic", {}, "a local and a remote one"),
        ("file,remote,remote", {}, "a local and a remote one"),
        ("file,mooncake", {}, "mooncake is not built in"),
        ("file,remote", {"path": "/there"}, "path belongs to one of file and remote"),
        ("file,remote", {"file": "/there"}, "file has to be a JSON object"),
        ("file,remote", {"remote": {"codec": "binned"}}, "lossy"),
        ("file,remote", {"remote": {"codec": {"codec": "binned", "bins": 32}}}, "lossy"),
    ],
)
def test_two_backends_that_are_refused(backend: str, extra: dict[str, Any], says: str) -> None:
    with pytest.raises(StoreError, match=says):
        two(extra, backend)


@pytest.mark.parametrize(
    ("codec", "lossy"), [("lossless", False), ("raw", False), ("binned", True), ({"codec": "binned"}, True)]
)
def test_a_lossy_codec_is_known_as_such(codec: Any, lossy: bool) -> None:
    assert two({"codec": codec}, "remote").is_lossy == lossy


def test_a_group_of_ranks_stores_under_the_name_of_its_leader(tmp_path: Path) -> None:
    """It finds what that rank stored when it was in no group, and nothing of a model that is split otherwise."""
    config = json.dumps({"path": str(tmp_path), "block_tokens": 16})

    def opened(rank: int, leaders: tuple[int, ...], is_shared: bool = True) -> BlockStore:
        size = len(leaders)
        found = replace(real_opener(rank, size), replicas=Replicas(rank, leaders) if is_shared else None)
        return found.open(found.setup("file", config, "timeout", "write_through").setup)

    alone = [(0, (0,)), *((rank, (0, 1)) for rank in (0, 1)), *((rank, (0, 1, 2, 3)) for rank in range(4))]
    names = {place: bytes([i]) * 16 for i, place in enumerate((rank, len(leaders)) for rank, leaders in alone)}
    for rank, leaders in alone:
        store = opened(rank, leaders, is_shared=False)
        assert store.set([names[rank, len(leaders)]], np.arange(1, dtype=np.int32)) == 1
        store.close()
    for rank, leaders in (*alone, (0, (0, 0)), (0, (0, 0, 2, 2)), (2, (0, 0, 2, 2)), (0, (0, 0, 0, 0))):
        store = opened(rank, leaders)
        found = [place for place, key in names.items() if store.exists([key])]
        assert found == [(rank, len(leaders))]
        store.close()
    with pytest.raises(AssertionError, match="rank 2 opens the store of rank 3"):
        opened(3, (0, 0, 2, 2))


@pytest.mark.parametrize("backend", ["file", "remote", "bluefield", "dynamic"])
def test_groups_of_ranks_share_what_a_backend_is_given(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many ranks as there are groups: limits are divided by it, and plugins are told."""
    told: list[StoreParams] = []
    opening = mock.Mock(takes_any_page_size=True, open=told.append)
    monkeypatch.setattr(storage, "storage_backend", lambda name: opening)
    setup = json.dumps(
        {"backend": backend, "config": {}, "block_tokens": 16, "is_exclusive": {backend: False}, "mac_key": ""}
    )
    for rank, leaders in ((2, (0, 1, 2, 3)), (2, (0, 0, 2, 2)), (3, (0, 0, 2, 3)), (0, (0, 0, 0, 0))):
        replace(real_opener(rank, 4), replicas=Replicas(rank, leaders)).open(setup)
    assert [(each.tp_rank, each.tp_size) for each in told] == [(2, 4), (1, 2), (2, 3), (0, 1)]
    assert [each.namespace.partition("rank")[2] for each in told] == [" 2 of 4", " 2 of 4", " 3 of 4", " 0 of 4"]
