"""Who must not share KV shares not one token: every endpoint and tier, every part of the names that keep KV apart.

A check writes with A, reads with B, and expects nothing; then it reads with A again, and expects something. Each part
has mutants, which leave it out of the names: under them the check has to fail.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import shutil
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from sglang.srt.configs.embedded_model import ensure_embedded_model
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import SINGLE_RANK
from sglang.srt.entrypoints import engine as engine_module
from sglang.srt.entrypoints import native
from sglang.srt.entrypoints.openai import protocol, serving_chat, serving_completions
from sglang.srt.managers.engine_core import EngineCore
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, ids_to_bytes
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.startup import storage as storage_setup
from sglang.srt.managers.startup.engine import build_core
from sglang.srt.managers.startup.rank_setup import RankSetup
from sglang.srt.managers.startup.storage import StorageOpener
from sglang.srt.managers.storage_setup import PrefetchConfig, StorageLimits, StorageSetup
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.mem_cache.block_keys import BlockKeys
from sglang.srt.mem_cache.block_store import BlockStore
from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.offload import remote_backend
from sglang.srt.offload.proxy import session
from sglang.srt.offload.store.embedded import EmbeddedStore
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from support.in_process_server import InProcessServer
from support.local_engine import LocalEngine
from support.memory_store import MemoryStore

PAGE, BLOCK = 16, 32
fresh = count(1000)


class Leak(AssertionError):
    """B found what A has written."""


# -- mutants ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """In the source of `name`, which `owner` has, `old` becomes `new`. where: the cells that have to see it, if not
    all."""

    owner: Any
    name: str
    old: str
    new: str
    where: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{getattr(self.owner, '__name__', self.owner)}.{self.name}: {self.old} -> {self.new or 'nothing'}"

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        real = inspect.getattr_static(self.owner, self.name)
        function = inspect.unwrap(real.fget if isinstance(real, property) else real)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"nothing to plant {self} in"
        made: dict[str, Any] = {}
        exec("from __future__ import annotations\n" + source.replace(self.old, self.new), function.__globals__, made)
        setattr(self.owner, self.name, made[self.name])
        try:
            yield
        finally:
            setattr(self.owner, self.name, real)


# -- requests: endpoints and tiers ------------------------------------------------------------------------------

ENDPOINTS = ("/generate", "/v1/completions", "/v1/chat/completions", "Engine")
STORED = ("disk", "remote")
TIERS = ("device", "host", "peer", *STORED)
# A's fields and B's.
PAIRS: tuple[tuple[dict[str, str], dict[str, str]], ...] = (
    ({"cache_salt": "a"}, {"cache_salt": "b"}),
    ({"cache_salt": "a"}, {}),
    ({}, {"cache_salt": "a"}),
    ({"extra_key": "a"}, {"extra_key": "b"}),
    ({"extra_key": "a"}, {}),
    ({"cache_salt": "a"}, {"extra_key": "a"}),
    ({"cache_salt": "a", "extra_key": "b"}, {"cache_salt": "ab"}),
    ({"cache_salt": "a"}, {"cache_salt": "a\0b"}),
)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's tokenizer, and next to no model."""
    path = tmp_path_factory.mktemp("chat model")
    shutil.copytree(ensure_embedded_model(), path, dirs_exist_ok=True)
    (path / "model.safetensors").unlink()
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    config = json.loads((path / "config.json").read_text()) | small
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def servers(chat_model: Path) -> Iterator[Callable[[str], InProcessServer]]:
    """By the tier that is to be read from."""
    opened: dict[str, InProcessServer] = {}
    config = ModelConfig.from_pretrained(str(chat_model), dtype="float32")

    def serve(tier: str) -> InProcessServer:
        if tier not in opened:
            setup = StorageSetup(
                backend="memory",
                setup="",
                secret=b"test",
                block_tokens=BLOCK,
                limits=StorageLimits(blocks_per_op=64, max_fetch_pages=64, max_store_pages=64),
                prefetch=PrefetchConfig(policy="wait_complete", threshold=1),
                write_policy="write_through",
                tiers=(Tier.REMOTE if tier == "remote" else Tier.DISK,),
            )
            rank = LocalEngine(
                config,
                num_device_pages=64,
                num_host_pages=256,
                num_peer_pages=64 if tier == "peer" else 0,
                # What the device gives up goes to peers whatever the host has.
                write_policy="write_through",
                page_size=PAGE,
                load_format="dummy",
                open_store=lambda pool: MemoryStore(pool, BLOCK),
                storage=setup if tier in STORED else None,
            )
            opened[tier] = InProcessServer(str(chat_model), rank)
        return opened[tier]

    yield serve
    for server in opened.values():
        server.close()


def only_on(tier: str, rank: LocalEngine) -> None:
    """Everything leaves the tiers that are nearer."""
    rank.settle()
    if tier in STORED:
        rank.forget()
    elif tier != "device":
        controller = rank.scheduler.cache.controller
        controller.evict(Tier.DEVICE, rank.scheduler.cache.device.num_pages)
        rank.core.step(time.monotonic(), rank.core.progress())
        rank.settle()


def ask(server: InProcessServer, endpoint: str, text: str, fields: dict[str, str]) -> dict[str, int]:
    """Where the prompt's tokens were found."""
    if endpoint == "Engine":
        server.engine.generate(text, {"max_new_tokens": 1}, **fields)
    elif endpoint == "/generate":
        server.post(endpoint, {"text": text, "sampling_params": {"max_new_tokens": 1}, **fields})
    else:
        prompt = {"messages": [{"role": "user", "content": text}]} if "chat" in endpoint else {"prompt": text}
        server.post(endpoint, {**prompt, "max_tokens": 1, **fields})
    return server.cached_tokens_details


def check_requests(server: InProcessServer, endpoint: str, tier: str, pair: tuple[dict[str, str], ...]) -> None:
    (a, b), text = pair, f"{next(fresh)} " * 60
    # What fills peers would have the copy go to the host.
    server.on_rank(lambda rank: rank.forget())
    ask(server, endpoint, text, a)
    server.on_rank(lambda rank: only_on(tier, rank))
    found = ask(server, endpoint, text, b)
    if sum(found.values()):
        raise Leak(f"{endpoint}: what {a} left on the {tier}, {b} found: {found}")
    server.on_rank(lambda rank: only_on(tier, rank))
    found = ask(server, endpoint, text, a)
    assert found[tier] >= 3 * PAGE and sum(found.values()) == found[tier], f"this check can not fail: {found}"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_requests_of_other_namespaces(servers: Callable[[str], InProcessServer], endpoint: str, tier: str) -> None:
    for pair in PAIRS:
        check_requests(servers(tier), endpoint, tier, pair)


CHAT, COMPLETIONS, GENERATE = ("/v1/chat/completions",), ("/v1/completions",), ("/generate", "Engine")
OPENAI = CHAT + COMPLETIONS
SALT, NOT_OR_SALT, KEY, SALT_OR_KEY, BOTH_OR_SALT, ODD_SALT = (PAIRS[i] for i in (0, 2, 3, 5, 6, 7))
_NATIVE = "namespace(req.cache_salt, req.extra_key)"
_OPENAI = "namespace(self.cache_salt, self.extra_key)"
_ROOT = "self.roots.get(namespace)"
_JOINED = 'namespace_of(cache_salt or "", extra_key or "")'
_ENGINE = '"stream": stream, **fields}'
# where: endpoints, and tiers.
REQUEST_MUTANTS = (
    (Mutant(serving_chat, "chat_request", "extra_key=req.namespace,", "", CHAT), SALT),
    (Mutant(serving_completions, "_generate_requests", "extra_key=req.namespace,", "", COMPLETIONS), SALT),
    (Mutant(native, "_generate_requests", f"extra_key={_NATIVE},", "", GENERATE), SALT),
    (Mutant(native, "_generate_requests", _NATIVE, "namespace(None, req.extra_key)", GENERATE), SALT),
    (Mutant(native, "_generate_requests", _NATIVE, "namespace(req.cache_salt, None)", GENERATE), KEY),
    (Mutant(protocol.OpenAIRequest, "namespace", _OPENAI, "namespace(None, self.extra_key)", OPENAI), SALT),
    (Mutant(protocol.OpenAIRequest, "namespace", _OPENAI, "namespace(self.cache_salt, None)", OPENAI), KEY),
    (Mutant(engine_module, "_request", _ENGINE, _ENGINE[:-1] + ', "cache_salt": None}', ("Engine",)), SALT),
    (Mutant(engine_module, "_request", _ENGINE, _ENGINE[:-1] + ', "extra_key": None}', ("Engine",)), KEY),
    (Mutant(TokenizerManager, "_tokenized", "extra_key=req.extra_key,", ""), SALT),
    (Mutant(Req, "__init__", "self.namespace = msg.extra_key", 'self.namespace = ""', TIERS), SALT),
    (Mutant(HiRadixTree, "match", _ROOT, f"self.roots.get('') or {_ROOT}", TIERS[:3]), NOT_OR_SALT),
    (Mutant(BlockKeys, "root", "shared.encode()", 'b""', STORED), SALT),
    # How salt and key become one name.
    (Mutant(native, "namespace", _JOINED, "cache_salt or extra_key or ''"), SALT_OR_KEY),
    (Mutant(native, "namespace", _JOINED, "(cache_salt or '') + (extra_key or '')"), BOTH_OR_SALT),
    (Mutant(native, "namespace", _JOINED, "f'{extra_key} {cache_salt}'", STORED), ODD_SALT),
    (Mutant(protocol, "namespace", _JOINED, "cache_salt or extra_key or ''", OPENAI), SALT_OR_KEY),
)


def test_mutants_of_requests(servers: Callable[[str], InProcessServer]) -> None:
    for mutant, pair in REQUEST_MUTANTS:
        endpoints = [each for each in ENDPOINTS if each in mutant.where] or ENDPOINTS[:1]
        tiers = [each for each in TIERS if each in mutant.where] or TIERS[:1]
        with mutant.planted():
            for endpoint in endpoints:
                for tier in tiers:
                    with pytest.raises(Leak):
                        check_requests(servers(tier), endpoint, tier, pair)
                        pytest.fail(f"survived at {endpoint}, {tier}: {mutant}")


# -- deployments: what a block's name depends on besides its tokens ---------------------------------------------

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
# Factors for 4 frequencies: which are used depends on the context's length.
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 2.0, 4.5, 6.0],
    "original_max_position_embeddings": 256,
    "rope_theta": 10000.0,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models that differ in one thing each."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(root / "model")
    for name in ("other config", "other weights", "longrope"):
        shutil.copytree(root / "model", root / name)
    config = json.loads((root / "model/config.json").read_text())
    (root / "other config/config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    (root / "longrope/config.json").write_text(json.dumps(config | {"rope_parameters": LONGROPE}))
    weights = load_file(root / "other weights/model.safetensors")
    weights["model.layers.0.self_attn.v_proj.weight"].mul_(1.5)
    save_file(weights, root / "other weights/model.safetensors", metadata={"format": "pt"})
    return root


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    store = EmbeddedStore.start(tmp_path_factory.mktemp("redis"), 64 << 20)
    yield str(store.address)
    store.stop()


@dataclass(frozen=True)
class Deployment:
    """model: a name in the folder of models. flags: of the server. storage: of the extra config. layout: the version
    of blocks."""

    model: str = "model"
    flags: dict[str, Any] = field(default_factory=dict)
    storage: dict[str, Any] = field(default_factory=dict)
    layout: int = 1


def with_flags(**flags: Any) -> Deployment:
    return Deployment(flags=flags)


USUAL = Deployment()
# Which part -> A and B, which differ in it alone.
PARTS: dict[str, tuple[Deployment, Deployment]] = {
    "config": (USUAL, Deployment("other config")),
    "weights": (USUAL, Deployment("other weights")),
    "dtype": (with_flags(dtype="bfloat16"), with_flags(dtype="float16")),
    "rotary factors": (Deployment("longrope"), Deployment("longrope", {"context_length": 256})),
    "dummy weights": (with_flags(load_format="dummy"), with_flags(load_format="dummy", random_seed=7)),
    "model code": (USUAL, with_flags(model_impl="transformers")),
    "layout version": (USUAL, Deployment(layout=2)),
    "page size": (USUAL, with_flags(page_size=2 * PAGE)),
    "block size": (USUAL, Deployment(storage={"block_tokens": 2 * BLOCK})),
    "secret": (USUAL, Deployment(storage={"secret": "t"})),
    "codec": (Deployment(storage={"codec": "binned"}), USUAL),
}
_FACTORS = "self.context_length > original"
# Servers with different page sizes share what is on a disk.
PLACES = [(part, tier) for part in PARTS for tier in STORED if tier != "disk" or part not in ("codec", "page size")]


class Rank:
    def __init__(self, core: EngineCore, store: BlockStore) -> None:
        self.core = core
        self.store = store

    def ask(self, tokens: np.ndarray) -> dict[str, int]:
        """Where the prompt's tokens were found."""
        params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True, sampling_seed=0)
        new = [TokenizedGenerateReqInput(rid="r", input_ids=ids_to_bytes(tokens), sampling_params=params)]
        found: dict[str, int] = {}
        while new or not self.core.is_idle:
            progress = self.core.progress()
            if new or self.core.has_work(time.monotonic()):
                for output in self.core.step(time.monotonic(), progress, new).outputs:
                    found = output.cached_tokens_details
                new = []
            else:
                time.sleep(0.0005)
        return found


# Of 96 MiB by default, which are written once at the start.
BUFFERS = ("compressed_buffer_bytes", "decompressed_buffer_bytes", "dequantized_buffer_bytes")
PROXY = {"receive_threads": 1, **dict.fromkeys(BUFFERS, 8 << 20)}


class Places:
    """Where deployments run. root: of the disk tier."""

    def __init__(self, models: Path, redis: str, root: Path) -> None:
        self.models = models
        self.redis = redis
        self.root = root

    def storage(self, tier: str) -> dict[str, Any]:
        """The backend's own part of the extra config."""
        return {"path": str(self.root)} if tier == "disk" else {"url": self.redis, "in_process": True, "proxy": PROXY}

    @contextlib.contextmanager
    def run(self, deployment: Deployment, tier: str) -> Iterator[Rank]:
        """As a scheduler process makes it of its flags."""
        extra = {"block_tokens": BLOCK, "prefetch_threshold": 1, "secret": "s"} | self.storage(tier)
        extra |= deployment.storage
        flags = {"dtype": "float32", "device": "cpu", "page_size": PAGE, "max_total_tokens": 512, **deployment.flags}
        args = ServerArgs(
            model_path=str(self.models / deployment.model),
            enable_hierarchical_cache=True,
            hicache_storage_backend="file" if tier == "disk" else "remote",
            hicache_storage_backend_extra_config=json.dumps(extra),
            hicache_storage_prefetch_policy="wait_complete",
            hicache_load_or_recompute="off",
            **flags,
        )
        with contextlib.ExitStack() as on_exit, pytest.MonkeyPatch.context() as patch:
            patch.setattr(storage_setup, "_LAYOUT_VERSION", deployment.layout)
            core, storage = build_core(args, RankSetup(SINGLE_RANK, lambda: None, self.root, on_exit))
            assert storage is not None and storage.slot.store is not None
            for stream in {each.stream for each in (core.executor, *core.links.values())}:
                on_exit.callback(stream.close)
            yield Rank(core, storage.slot.store)


@pytest.fixture
def places(models: Path, redis: str, tmp_path: Path) -> Places:
    return Places(models, redis, tmp_path)


def check_deployments(places: Places, part: str, tier: str) -> None:
    a, b = PARTS[part]
    tokens = np.random.default_rng(next(fresh)).integers(3, 97, 100).astype(np.int32)
    with places.run(a, tier) as rank:
        rank.ask(tokens)
    with places.run(b, tier) as rank:
        found = rank.ask(tokens)
        # Blocks of others are not even looked at: what stands in them might be taken for one's own.
        if sum(found.values()) or rank.store.stats()["read_errors"]:
            raise Leak(f"another {part} has found {found} on the {tier}, {rank.store.stats()}")
    with places.run(a, tier) as rank:
        assert rank.ask(tokens)[tier] == 3 * BLOCK, "this check can not fail"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("part", "tier"), PLACES)
def test_deployments_that_differ(places: Places, part: str, tier: str) -> None:
    check_deployments(places, part, tier)


def test_a_server_with_another_page_size_finds_what_is_on_the_disk(places: Places) -> None:
    a, b = PARTS["page size"]
    tokens = np.random.default_rng(next(fresh)).integers(3, 97, 100).astype(np.int32)
    for deployment, found in ((a, 0), (b, 3 * BLOCK), (a, 3 * BLOCK)):
        with places.run(deployment, "disk") as rank:
            assert rank.ask(tokens)["disk"] == found


# Part -> mutants.
PART_MUTANTS: dict[str, tuple[Mutant, ...]] = {
    "config": (Mutant(ModelConfig, "_fingerprint", "json.dumps(config_json, sort_keys=True).encode()", "b''"),),
    "weights": (
        Mutant(ModelConfig, "_fingerprint", "digest.update(digest_weights(self.local_path, load_format))", "pass"),
    ),
    "dtype": (
        # The file store has the contents of a token in its own names.
        Mutant(StorageOpener, "_namespace", "{pages}", "page {self.pool.page_size}", ("remote",)),
    ),
    "rotary factors": (Mutant(ModelConfig, "_fingerprint", _FACTORS, "True"),),
    "dummy weights": (Mutant(ModelConfig, "_fingerprint", "dummy {seed}", "dummy"),),
    "model code": (Mutant(ModelConfig, "_fingerprint", 'b"transformers"', 'b""'),),
    "layout version": (Mutant(StorageOpener, "_namespace", "v{_LAYOUT_VERSION}", ""),),
    "page size": (Mutant(StorageOpener, "_namespace", "else layout.fingerprint", "else layout.contents"),),
    "secret": (Mutant(StorageOpener, "_chain_secret", "secret.encode()", "b''"),),
    "codec": (Mutant(session.Session, "_begin", "self.codec.spec.encode()", "b''"),),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("part", PART_MUTANTS)
def test_mutants_of_deployments(places: Places, part: str) -> None:
    for mutant in PART_MUTANTS[part]:
        for tier in mutant.where or [tier for each, tier in PLACES if each == part]:
            with mutant.planted(), pytest.raises(Leak):
                check_deployments(places, part, tier)
                pytest.fail(f"survived on {tier}: {mutant}")


# -- ranks ------------------------------------------------------------------------------------------------------


def check_ranks(places: Places, tier: str, a: tuple[int, int], b: tuple[int, int]) -> None:
    """Ranks name a block alike, whatever part of the heads they have. a, b: rank and number of ranks."""

    def opened(rank: int, size: int) -> BlockStore:
        pool = MHATokenToKVPoolHost(MHATokenToKVPool(4, PageLayout.kv(PAGE, 2, 1, 8, torch.float32)), 64)
        pool.kv.fill_(rank)
        opener = StorageOpener(lambda: "model", "name", pool, rank, size, places.root)
        extra = places.storage(tier)
        setup = opener.setup(
            "file" if tier == "disk" else "remote",
            json.dumps({"block_tokens": BLOCK, "secret": str(places.root), **extra}),
            "wait_complete",
            "write_through",
        )
        secrets.add(setup.secret)
        return opener.open(setup.setup)

    secrets: set[bytes] = set()
    key, frames = next(fresh).to_bytes(16, "big"), np.arange(2, dtype=np.int32)
    found = []
    for each in (a, b, a):
        store = opened(*each)
        found.append(store.exists([key]))
        store.set([key], frames)
        store.close()
    assert len(secrets) == 1 and found[2] == 1, "this check can not fail"
    if found[1]:
        raise Leak(f"rank {b} has found what rank {a} left on the {tier}")


RANKS = (((0, 2), (1, 2)), ((0, 2), (0, 4)))


@pytest.mark.parametrize("tier", STORED)
def test_ranks(places: Places, tier: str) -> None:
    for a, b in RANKS:
        check_ranks(places, tier, a, b)
    of_rank, of_size = "rank {self.tp_rank} ", "of {self.tp_size}"
    for (a, b), part in zip(RANKS, (of_rank, of_size)):
        with Mutant(StorageOpener, "_open_one", part, "").planted(), pytest.raises(Leak):
            check_ranks(places, tier, a, b)
    nothing = Mutant(remote_backend, "open_remote_store", "namespace.encode()", "b''")
    if tier == "remote":
        with nothing.planted(), pytest.raises(Leak):
            check_ranks(places, tier, *RANKS[0])
