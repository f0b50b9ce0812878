"""One of each kind is added from outside, without a change of the package: flags, checks, `--help`, the reference and
opening see it, and a name that is not registered is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglang.simulator.simulation import SimulatedHardware, Simulation
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_families import MODEL_FAMILIES
from sglang.srt.configs.model_files import ModelConfigError
from sglang.srt.distributed.parallel_state import SINGLE_RANK
from sglang.srt.entrypoints.startup_checks import check_before_start
from sglang.srt.flag_reference import render_flags, render_storage
from sglang.srt.function_call.function_call_parser import TOOL_CALL_PARSERS
from sglang.srt.function_call.qwen25_detector import Qwen25Detector
from sglang.srt.layers.attention.attention_registry import (
    ATTENTION_BACKENDS,
    AttentionEntry,
    make_attention_backend,
    pick_attention_backend,
    why_not,
)
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, ids_to_bytes
from sglang.srt.managers.schedule_batch import BatchDecision
from sglang.srt.managers.schedule_policy import QUEUE_POLICIES
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.managers.startup.storage import StorageOpener
from sglang.srt.mem_cache.block_store import BlockStore, StoreError
from sglang.srt.mem_cache.eviction import EVICTION_POLICIES
from sglang.srt.mem_cache.hiradix_tree import HiRadixTree
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.node import Node
from sglang.srt.mem_cache.page_layout import PageLayout
from sglang.srt.mem_cache.storage.guarded_store import GuardedStore
from sglang.srt.mem_cache.storage.registry import (
    STORAGE_BACKENDS,
    StorageBackend,
    StorageEntry,
    StoreParams,
    storage_backend,
)
from sglang.srt.mem_cache.storage.tiered_store import TieredStore
from sglang.srt.mem_cache.transfer import Tier
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.registry import get_model_class
from sglang.srt.offload.codec import BlockLayout, make_codec
from sglang.srt.offload.codec.base import PieceCodec
from sglang.srt.offload.codec.header import PieceHeader
from sglang.srt.offload.codec.registry import CODECS, codec_class
from sglang.srt.parser.chat_format import ChatFormat
from sglang.srt.parser.reasoning_parser import REASONING_PARSERS, ReasoningFormat, ReasoningParser, Start
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, make_parser
from sglang.srt.utils.child_process import StartupError
from sglang.srt.utils.registry import STRING, WHOLE_NUMBER, Option, load_object
from sglang.srt.utils.time_units import LaunchSeq
from support.codec_cases import KEY, SMALL, decode, encode, normal_kv
from support.evictions import evict
from support.memory_store import MemoryStore


def refuses(flags: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The sentence about the flags."""
    with pytest.raises(SystemExit):
        ServerArgs.from_cli(["--model", "embedded", "--hicache", *flags])
    return capsys.readouterr().err


def accepts(flags: list[str]) -> ServerArgs:
    return ServerArgs.from_cli(["--model", "embedded", "--hicache", *flags])


def help_text() -> str:
    return " ".join(make_parser().format_help().split())


# -- a storage backend ------------------------------------------------------------------------------------------


class DrawerBackend(StorageBackend):
    options = (
        Option("label", STRING, "", "what stands on the drawer"),
        Option("num_blocks", WHOLE_NUMBER, 4, "blocks that fit into the drawer"),
    )

    def check(self, config: Mapping[str, Any]) -> None:
        if not self.values(config)["label"]:
            raise StoreError(f"{self.flag} needs a label")

    def open(self, params: StoreParams) -> BlockStore:
        values = self.values(params.config)
        store = MemoryStore(params.pool, params.block_tokens, max_blocks=values["num_blocks"])
        store.name = values["label"]
        return store

    def shared_secret(self, config: Mapping[str, Any]) -> bytes:
        return str(self.values(config)["label"]).encode()


DRAWER = StorageEntry(Tier.DISK, "in a drawer", f"{__name__}:DrawerBackend")


def test_a_storage_backend(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--hicache-storage-backend", "drawer"]
    assert "drawer is not built in" in refuses(flags, capsys) and "in a drawer" not in help_text()
    monkeypatch.setitem(STORAGE_BACKENDS, "drawer", DRAWER)

    assert accepts(flags).hicache_storage_backend == "drawer"
    assert accepts(["--hicache-storage-backend", "drawer,remote"])
    assert "a local and a remote one" in refuses(["--hicache-storage-backend", "remote,drawer"], capsys)
    assert f"{', '.join(STORAGE_BACKENDS)}, or two of" in refuses(["--hicache-storage-backend", "cupboard"], capsys)
    assert "'drawer' in a drawer" in help_text()
    assert "'drawer' in a drawer" in render_flags()
    assert "| `drawer` | disk | In a drawer |" in render_storage()
    assert "| `num_blocks` | a whole number | `4` | Blocks that fit into the drawer. |" in render_storage()


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("no_such_package.backend:Backend", "cannot be imported: No module named 'no_such_package'"),
        (f"{__name__}:NoBackend", "is not there"),
        ("no_colon", 'has to be written like "module:attribute"'),
    ],
)
def test_a_storage_backend_that_cannot_be_loaded_is_a_sentence(
    path: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STORAGE_BACKENDS, "drawer", StorageEntry(Tier.DISK, "100 % | in a drawer", path))
    with pytest.raises(StoreError, match="--hicache-storage-backend drawer: .*" + sentence):
        storage_backend("drawer")
    with pytest.raises(StartupError, match=sentence):
        check_before_start(accepts(["--hicache-storage-backend", "drawer"]))
    assert "100 % | in a drawer" in help_text()


class BlurredBackend(DrawerBackend):
    def is_lossy(self, config: Mapping[str, Any]) -> bool:
        return True


def test_a_lossy_backend_of_two_is_refused_on_either_side(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = StorageEntry(Tier.DISK, "in a drawer", f"{__name__}:BlurredBackend")
    monkeypatch.setitem(STORAGE_BACKENDS, "drawer", entry)
    extra = ["--hicache-storage-backend-extra-config", json.dumps({"drawer": {"label": "kv"}})]
    with pytest.raises(StartupError, match=r"drawer is lossy, and what came back from it .* by remote"):
        check_before_start(accepts(["--hicache-storage-backend", "drawer,remote", *extra]))


def test_a_storage_backend_is_checked_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STORAGE_BACKENDS, "drawer", DRAWER)

    def start(config: dict[str, Any], backend: str = "drawer") -> None:
        extra = ["--hicache-storage-backend-extra-config", json.dumps(config)]
        check_before_start(accepts(["--hicache-storage-backend", backend, *extra]))

    start({"label": "kv"})
    start({"drawer": {"label": "kv"}}, "drawer,remote")
    for config, sentence in (
        ({}, "drawer needs a label"),
        ({"label": 3}, "label is 3, but it has to be a string"),
        ({"label": "kv", "num_blocks": "many"}, 'num_blocks is "many", but it has to be a whole number'),
        ({"colour": "red"}, "drawer has no option 'colour'; its options are label, num_blocks"),
    ):
        with pytest.raises(StartupError, match=sentence):
            start(config)


def test_a_storage_backend_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STORAGE_BACKENDS, "drawer", DRAWER)
    pool = MHATokenToKVPoolHost(MHATokenToKVPool(4, PageLayout.kv(16, 2, 1, 4, torch.float32)), 64)
    opener = StorageOpener(lambda: "model", "name", pool, 0, 1)

    def setup(config: dict[str, Any], backend: str = "drawer") -> Any:
        return opener.setup(backend, json.dumps({"block_tokens": 16, **config}), "timeout", "write_through")

    found = setup({"label": "kv"})
    assert found.tiers == (Tier.DISK,) and not found.is_lossy
    assert found.secret != setup({"label": "other"}).secret, "the label is its secret"
    store = opener.open(found.setup)
    assert isinstance(store, MemoryStore) and store.name == "kv" and store.block_tokens == 16
    keys = [bytes([i]) * 16 for i in range(4)]
    assert store.set(keys, np.arange(4, dtype=np.int32)) == 4 == store.exists(keys)

    monkeypatch.setitem(STORAGE_BACKENDS, "far", StorageEntry(Tier.REMOTE, "far away", DRAWER.backend))
    both = setup({"drawer": {"label": "near"}, "far": {"label": "far"}}, "drawer,far")
    store = opener.open(both.setup)
    assert isinstance(store, TieredStore) and store.name == "near,far" and both.tiers == (Tier.DISK, Tier.REMOTE)
    assert isinstance(store.far, GuardedStore) and store.far.stats()["left_alone"] == 0
    store.close()


def test_every_storage_backend_is_what_its_entry_names() -> None:
    for name in STORAGE_BACKENDS:
        backend = storage_backend(name)
        assert isinstance(backend, StorageBackend) and backend.name == name
        names = [option.name for option in backend.options]
        assert len(set(names)) == len(names)
        assert all(option.help and not option.help.endswith(".") for option in backend.options)


# -- a codec ----------------------------------------------------------------------------------------------------


class FlippedCodec(PieceCodec):
    """Every bit is turned over, and one byte is put in front."""

    name = "flipped"
    codec_id = 99
    summary = "every bit, after it was turned over twice"
    options = (Option("mark", WHOLE_NUMBER, 7, "the byte in front"),)

    def __init__(self, layout: BlockLayout, mark: int = 7) -> None:
        self._mark = mark
        super().__init__(layout)

    @classmethod
    def from_settings(cls, layout: BlockLayout, settings: Mapping[str, Any]) -> FlippedCodec:
        return cls(layout, settings.get("mark", 7))

    def _settings(self) -> dict[str, object]:
        return {"mark": self._mark}

    def _compress(self, raw: np.ndarray, piece: int, payload: np.ndarray) -> int | None:
        np.bitwise_not(raw, out=payload)
        return len(raw)

    def _decompress(self, payload: np.ndarray, header: PieceHeader, mid: np.ndarray) -> None: ...

    def _dequantize(self, payload: np.ndarray, header: PieceHeader, mid: np.ndarray, out: np.ndarray) -> None:
        np.bitwise_not(payload, out=out)


def test_a_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown codec 'flipped'"):
        make_codec({"codec": "flipped"}, SMALL)
    monkeypatch.setitem(CODECS, "flipped", f"{__name__}:FlippedCodec")

    codec = make_codec({"codec": "flipped", "mark": 3}, SMALL)
    assert codec.spec == "flipped-v1 mark=3"
    raw = normal_kv(SMALL)
    stored = encode(codec, raw, key=KEY)
    start, end = SMALL.piece(0)
    assert np.array_equal(decode(codec, stored, key=KEY), raw[start:end])
    with pytest.raises(ValueError, match="codec flipped has no option 'level'; its options are mark"):
        make_codec({"codec": "flipped", "level": 1}, SMALL)
    with pytest.raises(ValueError, match='mark is "x", but it has to be a whole number'):
        make_codec({"codec": "flipped", "mark": "x"}, SMALL)
    assert "| `mark` | a whole number | `7` | The byte in front. |" in render_storage()

    remote = storage_backend("remote")
    assert not remote.is_lossy({"codec": "flipped"})
    monkeypatch.setattr(FlippedCodec, "lossy", True)
    assert remote.is_lossy({"codec": "flipped"}) and remote.is_lossy({"codec": {"codec": "flipped"}})


def test_every_codec_is_what_its_entry_names() -> None:
    codecs = {name: codec_class(name) for name in CODECS}
    assert all(issubclass(codec, PieceCodec) and codec.name == name for name, codec in codecs.items())
    assert len({codec.codec_id for codec in codecs.values()}) == len(codecs)


# -- an attention backend ---------------------------------------------------------------------------------------


class OtherAttention(TorchNativeAttnBackend): ...


def test_an_attention_backend(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--attention-backend", "other"]
    assert "choose from 'cpu', 'torch_native', 'triton', 'flashinfer')" in refuses(flags, capsys)
    assert why_not("other", "cpu") is not None
    monkeypatch.setitem(ATTENTION_BACKENDS, "other", AttentionEntry(f"{__name__}:OtherAttention", "cpu"))

    assert accepts(flags).attention_backend == "other"
    assert "--attention-backend {cpu,torch_native,triton,flashinfer,other}" in help_text()
    assert "One of `cpu`, `torch_native`, `triton`, `flashinfer`, `other`." in render_flags()
    with pytest.raises(ValueError, match="one of cpu, torch_native, triton, flashinfer, other"):
        ServerArgs(model_path="embedded", attention_backend="none")
    assert pick_attention_backend("other", "cpu") == "other" and pick_attention_backend(None, "cpu") == "cpu"
    assert type(make_attention_backend("other", "cpu")) is OtherAttention
    assert why_not("other", "cuda") == (
        "The attention backend other computes on the CPU only; on cuda, use triton or flashinfer."
    )


def test_every_attention_backend_is_what_its_entry_names() -> None:
    for name, entry in ATTENTION_BACKENDS.items():
        if entry.package is None:
            assert callable(load_object(entry.backend)().forward), name


# -- a model family ---------------------------------------------------------------------------------------------


class OtherForCausalLM(LlamaForCausalLM):
    qk_norm = True


def test_a_model_family(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    embedded = ModelConfig.from_pretrained("embedded")
    for file in embedded.local_path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": ["OtherForCausalLM"]}))
    args = ServerArgs(model_path=str(tmp_path), model_impl="native")
    with pytest.raises(ModelConfigError, match="OtherForCausalLM, which is not supported; supported are LlamaFor"):
        check_before_start(args)
    monkeypatch.setitem(MODEL_FAMILIES, "OtherForCausalLM", f"{__name__}:OtherForCausalLM")

    assert check_before_start(args) == tmp_path
    config = ModelConfig.from_pretrained(str(tmp_path))
    assert config.architecture == "OtherForCausalLM"
    model = get_model_class(config)(config, TorchNativeAttnBackend(), SINGLE_RANK)
    assert type(model) is OtherForCausalLM and model.num_layers == embedded.num_layers


def test_every_model_family_is_what_its_entry_names() -> None:
    embedded = ModelConfig.from_pretrained("embedded")
    for architecture in MODEL_FAMILIES:
        assert callable(get_model_class(replace(embedded, architecture=architecture)).forward_layer)


# -- a format of tool calls, a kind of reasoning -----------------------------------------------------------------


class ShoutedCalls(Qwen25Detector):
    """As Qwen's, in templates that shout."""

    @classmethod
    def matches_template(cls, template: str) -> bool:
        return "CALL!" in template


def test_a_format_of_tool_calls(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--tool-call-parser", "shouted"]
    assert "'llama3', 'gpt-oss')" in refuses(flags, capsys)
    monkeypatch.setitem(TOOL_CALL_PARSERS, "shouted", ShoutedCalls)

    assert accepts(flags).tool_call_parser == "shouted"
    assert "`gpt-oss`, `shouted`." in render_flags()
    assert (
        ChatFormat.of("CALL!", "auto", None).detector is ChatFormat.of("", "shouted", None).detector is ShoutedCalls
    )


def test_a_kind_of_reasoning(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--reasoning-parser", "muse"]
    assert "'qwen3-thinking', 'gpt-oss')" in refuses(flags, capsys)
    monkeypatch.setitem(REASONING_PARSERS, "muse", ReasoningFormat("<muse>", "</muse>", forced=False))

    assert accepts(flags).reasoning_parser == "muse"
    assert "`gpt-oss`, `muse`." in render_flags()
    form = ChatFormat.of("", None, "muse").reasoning
    assert form is not None
    split = ReasoningParser(form, Start.BEFORE).parse_non_stream("<muse>a</muse>b")
    assert (split.reasoning_text, split.normal_text) == ("a", "b")


# -- policies ---------------------------------------------------------------------------------------------------


def longest_first(node: Node, last_access: int) -> tuple[int, ...]:
    return -len(node.key), last_access


def test_an_eviction_policy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--radix-eviction-policy", "longest"]
    assert "choose from 'lru', 'lfu', 'priority')" in refuses(flags, capsys)
    monkeypatch.setitem(EVICTION_POLICIES, "longest", longest_first)

    assert accepts(flags).radix_eviction_policy == "longest"
    assert "--radix-eviction-policy {lru,lfu,priority,longest}" in help_text()
    assert "One of `lru`, `lfu`, `priority`, `longest`." in render_flags()

    def first_evicted(policy: str) -> list[int]:
        tree = HiRadixTree(1, policy)
        for launch, (tokens, frames) in enumerate((([1, 2], [0, 1]), ([3, 4, 5], [2, 3, 4]))):
            run = np.array(tokens, np.int32), np.array(frames, np.int32)
            tree.insert_prefix("", None, *run, LaunchSeq(launch), LaunchSeq(launch))
        return [frame for frames, _ in evict(tree, Tier.DEVICE, 1).cached for frame in frames.tolist()]

    assert set(first_evicted("lru")) <= {0, 1} and set(first_evicted("longest")) <= {2, 3, 4}


def test_a_queue_policy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--schedule-policy", "shortest"]
    assert "choose from 'fcfs', 'lpm')" in refuses(flags, capsys)
    monkeypatch.setitem(QUEUE_POLICIES, "shortest", lambda candidate: candidate.compute)

    assert accepts(flags).schedule_policy == "shortest"
    assert "--schedule-policy {fcfs,lpm,shortest}" in help_text()
    assert "One of `fcfs`, `lpm`, `shortest`." in render_flags()

    def order(policy: str) -> list[int]:
        """The lengths of the prompts of one batch, in the order in which they were admitted."""
        config = SchedulerConfig(
            page_size=1,
            num_device_pages=1000,
            num_host_pages=0,
            page_bytes=1,
            context_len=900,
            schedule_policy=policy,
            max_ahead=1,
        )
        simulation = Simulation(config, SimulatedHardware(1, lambda launch: 1.0, 1e9))
        launches = []

        def note(decision: BatchDecision) -> None:
            if decision.launch is not None:
                launches.append(decision.launch)

        arrivals = [(0.0, request(50, 1)), *((0.1, request(n, n)) for n in (30, 10, 20))]
        simulation.run(arrivals, after_step=note)
        return next(launch.lens.tolist() for launch in launches if len(launch.lens) == 3)

    assert order("fcfs") == [30, 10, 20] and order("shortest") == [10, 20, 30]


def request(length: int, first: int) -> TokenizedGenerateReqInput:
    return TokenizedGenerateReqInput(
        rid=str(length),
        input_ids=ids_to_bytes(list(range(1000 * first, 1000 * first + length))),
        sampling_params=SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
        stream=True,
    )
