"""What is read from upstream's source: a small upstream, as a folder and as a wheel."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from sglang.rebase import reader
from sglang.rebase.reader import UnreadableError
from sglang.rebase.upstream_names import FlagFacts, load_names, parameters_of

FIELDS = """
class Memory(msgspec.Struct):
    page_size: A[int, "tokens per page"] = 1
    model_path: A[str, Arg(help="weights", aliases=["--model"])]
    policy: A[str, Arg(help="which", choices=POLICIES)] = "lru"
    mode: A[Optional[Literal["a", "b"]], "how"] = None
    gemm: A[str, Arg(help="kernel", cli_name="--gemm-backend", choices=computed())] = DEFAULT_GEMM
    hidden: A[bool, Arg(no_cli=True)] = False
    no_flag: int = 3
"""
SERVER_ARGS = """
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--config", type=str, help="a file")
        parser.add_argument("--kind", "-k", choices=["x"] + MORE, default="x")
MORE = ["y", "z"]
"""
HTTP = """
@app.get("/health")
@app.post("/health")
async def health(): ...
@app.api_route("/flush", methods=["GET", "POST"])
async def flush(): ...
@app.post(os.environ.get("ROUTE", "/api/chat"))
async def chat(): ...
@app.websocket("/v1/realtime")
async def realtime(): ...
@other.get("/not_of_the_app")
async def other(): ...
@app.middleware("http")
async def middle(): ...
"""
PROTOCOL = """
class Base(BaseModel):
    bootstrap_host: Optional[str] = None
class ChatCompletionRequest(Base):
    model: str
    kinds: ClassVar[int] = 3
    _private: int = PrivateAttr(0)
    def dump(self): ...
class CompletionRequest(Base):
    prompt: str
class EmbeddingRequest(BaseModel):
    input: str
class TokenizeRequest(BaseModel):
    prompt: str
class DetokenizeRequest(BaseModel):
    tokens: list
class ResponsesRequest(BaseModel):
    input: str
"""
STORAGE = """
class PoolName(str, Enum):
    KV = "kv"
class HiCacheStorage(ABC):
    def get(self, key: str, target: Optional[Any]=None) -> bool: ...
    def _own(self): ...
class HiCacheStorageConfig:
    tp_rank: int
class HiCacheStorageExtraInfo:
    prefix_keys: int
class PoolHitPolicy(str, Enum):
    ALL = "all"
class PoolTransfer:
    keys: int
class PoolTransferResult:
    hit: int
"""
METRICS = """
Counter(name="sglang:prompt_tokens_total", documentation="sglang:not_a_metric")
Gauge("sglang:num_running_reqs", "help")
torch.library.custom_op("sglang::an_op")
log("sglang:two words")
"""


def small_upstream() -> dict[str, str]:
    sources = dict.fromkeys((*reader.ROUTE_FILES, *reader.REQUEST_CLASSES.values(), *reader.INTERFACES.values()), "")
    for table in (reader.REQUEST_CLASSES, reader.INTERFACES):
        for name, file in table.items():
            sources[file] += f"class {name}:\n    field: int\n"
    return {
        **sources,
        "srt/arg_groups/choices.py": 'POLICIES = ["lru"]\nPOLICIES: list = [*POLICIES, "lfu"]\n',
        "srt/arg_groups/fields/memory.py": FIELDS,
        "srt/server_args.py": SERVER_ARGS,
        "srt/entrypoints/http_server.py": HTTP,
        "srt/entrypoints/openai/protocol.py": PROTOCOL,
        "srt/mem_cache/hicache_storage.py": STORAGE,
        "srt/observability/metrics_collector.py": METRICS,
    }


def write_folder(folder: Path, sources: dict[str, str]) -> str:
    for name, text in sources.items():
        path = folder / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


def test_flags_with_their_defaults_choices_and_other_names(tmp_path: Path) -> None:
    assert load_names(write_folder(tmp_path, small_upstream())).flags == {
        "--config": FlagFacts(),
        "--gemm-backend": FlagFacts("DEFAULT_GEMM"),
        "--help": FlagFacts(),
        "--kind": FlagFacts("x", ["x", "y", "z"]),
        "-k": FlagFacts("x", ["x", "y", "z"], "--kind"),
        "--mode": FlagFacts("", ["a", "b"]),
        "--model": FlagFacts(alias_of="--model-path"),
        "--model-path": FlagFacts(),
        "--page-size": FlagFacts("1"),
        "--policy": FlagFacts("lru", ["lru", "lfu"]),
    }


def test_endpoints_fields_metrics_and_interfaces(tmp_path: Path) -> None:
    names = load_names(write_folder(tmp_path, small_upstream()))
    own = {path: methods for path, methods in names.endpoints.items() if path not in reader._ROUTES_WITHOUT_DECORATOR}
    assert own == {
        "/api/chat": ["POST"],
        "/flush": ["GET", "POST"],
        "/health": ["GET", "POST"],
        "/v1/realtime": ["WEBSOCKET"],
    }
    assert names.fields["ChatCompletionRequest"] == ["bootstrap_host", "model"], "with the fields of its base"
    assert names.metrics == ["sglang:num_running_reqs", "sglang:prompt_tokens_total"]
    assert names.members["HiCacheStorage"] == {"get": "(self, key: str, target: Optional[Any]=None) -> bool"}
    assert names.members["PoolName"] == {"KV": "'kv'"} and names.members["HiCacheStorageConfig"] == {"tp_rank": ""}


def test_a_wheel_a_folder_and_recorded_names_are_the_same(tmp_path: Path) -> None:
    sources = small_upstream()
    folder = write_folder(tmp_path / "0.9.1", sources)
    wheel = tmp_path / "sglang-0.9.1-cp311-cp311-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in sources.items():
            archive.writestr(f"sglang/{name}", text)
    recorded = tmp_path / "names.json"
    recorded.write_text(load_names(folder).as_json())
    assert load_names(folder) == load_names(str(wheel)) == load_names(str(recorded))
    assert load_names(folder).version == "0.9.1"


def test_lists_of_names_by_another_tool(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    path.write_text(
        '{"source": "x", "1": {"flags": ["--a"], "endpoints": ["/b"], "metrics": ["sglang:c"], '
        '"request_fields": {"GenerateReqInput": ["d", "_private"]}, "storage": {"HiCacheStorage": {}}}}'
    )
    names = load_names(f"{path}:1")
    assert (names.version, list(names.flags), names.fields) == ("1", ["--a"], {"GenerateReqInput": ["d"]})
    with pytest.raises(UnreadableError, match="holds several versions: name one"):
        load_names(str(path))
    with pytest.raises(UnreadableError, match="has no version 2; it has source, 1"):
        load_names(f"{path}:2")


def test_what_moved_is_an_error_with_its_name(tmp_path: Path) -> None:
    sources = small_upstream()
    del sources["srt/entrypoints/v1_loads.py"]
    with pytest.raises(UnreadableError, match=r"has no file srt/entrypoints/v1_loads.py: find where it moved"):
        load_names(write_folder(tmp_path / "a", sources))
    sources = small_upstream() | {"srt/managers/io_struct.py": ""}
    with pytest.raises(UnreadableError, match=r"has no class GenerateReqInput in srt/managers/io_struct\.py"):
        load_names(write_folder(tmp_path / "b", sources))
    with pytest.raises(UnreadableError, match="is not there: give a wheel"):
        load_names(str(tmp_path / "nothing"))
    (tmp_path / "text.whl").write_text("text")
    with pytest.raises(UnreadableError, match="is no wheel"):
        load_names(str(tmp_path / "text.whl"))


def test_parameters_of_a_method() -> None:
    assert list(parameters_of("(self, key: str, *, n: int=3) -> tuple[int, str]")) == ["self", "key", "n"]
    assert list(parameters_of("'kv'")) == list(parameters_of("")) == []
