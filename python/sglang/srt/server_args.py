"""Owns the server's settings: one dataclass, from which the command line is derived.

A flag is a field: its name, type, default and help stand in one place. What upstream has under the same meaning has
the same name here; a flag that is not a field is refused with a sentence, never ignored. Imports nothing heavy, so
that `--help` and a bad flag answer at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import typing
from dataclasses import dataclass
from typing import Any, NoReturn

from sglang.srt.peer.endpoint import PeerError, check_endpoint

EMBEDDED_MODEL = "embedded"
RATE_LIMITED_LINKS = ("h2d", "d2h", "fetch", "store")


def arg(default: Any, help: str, aliases: tuple[str, ...] = (), choices: tuple[str, ...] = ()) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "aliases": aliases, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """Settings of one server. None means: chosen at start-up from the model and the machine.

    Build one with `from_cli` or by keyword; both end in `check`, so that an instance is always valid. Raises
    ValueError with a sentence that says what to do.
    """

    model_path: str = arg(
        "", "a Hugging Face directory or hub name, or 'embedded' for the built-in model", aliases=("--model",)
    )
    tokenizer_path: str | None = arg(None, "where the tokenizer lies, if not with the model")
    served_model_name: str | None = arg(None, "the name that clients ask for (default: the model path)")
    load_format: str = arg(
        "auto", "auto and safetensors read weights, dummy makes random ones", choices=("auto", "safetensors", "dummy")
    )
    dtype: str = arg(
        "auto",
        "type of weights and cache; auto takes the checkpoint's",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
    )
    context_length: int | None = arg(None, "longest prompt plus answer in tokens (default: the model's)")
    random_seed: int | None = arg(None, "seed of dummy weights and of requests that bring none")
    device: str = arg(
        "auto", "where the model runs; auto takes a GPU if there is one", choices=("auto", "cpu", "cuda")
    )

    host: str = arg("127.0.0.1", "address to listen on")
    port: int = arg(30000, "port to listen on")
    api_key: str | None = arg(None, "key that clients must send as 'Authorization: Bearer <key>'")
    admin_api_key: str | None = arg(None, "key for what changes the server, in place of --api-key")

    tp_size: int = arg(1, "ranks that share the model", aliases=("--tp", "--tensor-parallel-size"))
    page_size: int = arg(1, "tokens per page of the KV cache")
    max_total_tokens: int | None = arg(
        None, "tokens of KV cache on the device (default: four full contexts, or what memory allows)"
    )
    mem_fraction_static: float | None = arg(
        None,
        "on a GPU, part of its memory for weights and KV cache (default: 0.88); on the CPU, of what is free (0.6)",
    )
    max_running_requests: int | None = arg(None, "most requests in one batch")
    max_queued_requests: int | None = arg(None, "most requests that wait for their first token; more get a 503")
    chunked_prefill_size: int = arg(2048, "most tokens of one prompt in one step; -1 computes prompts whole")
    max_prefill_tokens: int = arg(16384, "most prompt tokens in one step")
    schedule_policy: str = arg(
        "fcfs",
        "order of the queue: first come, first served, or longest cached prefix first",
        choices=("fcfs", "lpm"),
    )
    radix_eviction_policy: str = arg(
        "lru",
        "what the cache gives up first: the least recently used, the least frequently used, or what only requests of "
        "low priority have used",
        choices=("lru", "lfu", "priority"),
    )
    disable_radix_cache: bool = arg(False, "share no prefix between requests")
    disable_overlap_schedule: bool = arg(False, "schedule only once the previous step's tokens are known")
    attention_backend: str | None = arg(
        None,
        "attention kernels (default: torch_native on the CPU, triton on a GPU)",
        choices=("torch_native", "triton", "flashinfer"),
    )
    disable_cuda_graph: bool = arg(False, "on a GPU, start every kernel of a decode by itself")
    cuda_graph_max_bs_decode: int | None = arg(
        None, "on a GPU, largest decode that is captured as a CUDA graph (default: --max-running-requests)"
    )

    enable_hierarchical_cache: bool = arg(
        False, "keep evicted KV cache in host memory", aliases=("--hicache", "--enable-hicache")
    )
    hicache_ratio: float = arg(2.0, "host pool's size as a multiple of the device pool's")
    hicache_size: float = arg(0, "host pool's size in GB; wins over the ratio when above 0")
    hicache_write_policy: str = arg(
        "write_through",
        "when pages go to the host: at once, on leaving the device, or when a second request uses them",
        choices=("write_through", "write_back", "write_through_selective"),
    )
    hicache_mem_layout: str = arg(
        "page_first",
        "how the host pool lies in memory: whole pages together, or a layer of all pages",
        choices=("page_first", "layer_first"),
    )
    hicache_io_backend: str = arg(
        "auto",
        "what copies between device and host pool: a kernel, the copy engines, or these page by page",
        choices=("auto", "kernel", "dma", "direct"),
    )
    hicache_rate_limit: str | None = arg(
        None, "for experiments: links made as slow as this, in GB/s (1e9 bytes), as h2d=10,d2h=10,fetch=2,store=1"
    )
    hicache_load_ratio: str = arg(
        "100",
        "a batch may load so many tokens from the host per token that it computes before it puts off requests that "
        "would load more; 'auto' for as many as take as long, as measured; 0 for first come, first served",
    )
    hicache_bubble_filling: str = arg(
        "on", "decode, or prefill others, while a request's KV cache comes from the host", choices=("on", "off")
    )
    hicache_load_or_recompute: str = arg(
        "on",
        "compute the front of what a request would load, while the rest is loaded and there is nothing else to do",
        choices=("on", "off"),
    )
    hicache_publish_at: str = arg(
        "launch",
        "when a prompt's KV cache can be shared: as soon as its computation is issued, or once it is complete, as "
        "upstream",
        choices=("launch", "completion"),
    )
    hicache_deferral_threshold: int = arg(
        100,
        "a request that shares more tokens than this with what an older one is about to compute lets that one go "
        "first, and comes right after it; 0 to turn that off",
    )
    hicache_storage_backend: str | None = arg(
        None,
        "keep KV cache beyond host memory: 'file' on a disk, 'remote' in a Redis store, 'bluefield' through an "
        "offload proxy that you start on this machine, 'dynamic' through a plugin; 'file,remote' has both",
    )
    hicache_storage_backend_extra_config: str = arg(
        "", "settings of the storage backend: JSON, or @ and the name of a file with it"
    )
    hicache_storage_prefetch_policy: str = arg(
        "timeout",
        "how long a queued request waits for storage: not beyond its turn, till everything has come, or for a time "
        "that grows with its length",
        choices=("best_effort", "wait_complete", "timeout"),
    )

    hicache_bypass_local: bool = arg(
        False,
        "for experiments: find nothing on the device or the host, so that every request fetches from storage what "
        "that has of its prompt",
    )

    peer_role: str | None = arg(
        None,
        "share KV memory with other models on this machine: a worker lends what it does not need, a master borrows "
        "it",
        choices=("master", "worker"),
    )
    peer_endpoint: str | None = arg(
        None,
        "where a worker listens, tcp://127.0.0.1:PORT or ipc:///DIRECTORY/NAME; for a master all its workers', "
        "separated by commas",
    )
    peer_slab_size: int = arg(64, "MiB that are lent at a time, the same on both sides")
    peer_size: float = arg(4.0, "most GB that a master borrows")
    peer_window: float = arg(
        60.0, "seconds: a worker keeps what its requests needed at a time in so many of the last"
    )
    peer_strict: bool = arg(
        False, "a worker lets nobody map what it lends: it copies for them, and takes it back when the time is up"
    )

    layer_stream: int = arg(
        0,
        "serve requests that are longer than the device: what it has no room for stays on the host and is read layer "
        "by layer, through so many buffers; 2 is enough, 0 turns it off",
    )
    layer_stream_tokens: int = arg(
        4096, "tokens that a buffer holds, of one layer; 0: as many as the host has, so that a piece is a whole layer"
    )
    layer_stream_disk_size: float = arg(
        0.0, "GB of disk for such a request, where neither device nor host has room; read again for every token"
    )
    layer_stream_disk_path: str | None = arg(None, "the folder of that file; it needs the space from the start")
    layer_stream_max_tpot: float | None = arg(
        None, "seconds: refuse a request whose tokens are expected to take longer each, as it must stream"
    )

    record_steps: str | None = arg(None, "write every scheduler step to this file, for replay")

    log_level: str = arg("info", "level of the log", choices=("debug", "info", "warning", "error", "critical"))
    log_level_http: str | None = arg(
        None,
        "level of the access log (default: --log-level)",
        choices=("debug", "info", "warning", "error", "critical"),
    )
    strict_fields: bool = arg(False, "refuse request fields that this server does not know, instead of ignoring them")
    stream_interval: int = arg(1, "tokens per chunk of a streamed answer")
    enable_metrics: bool = arg(False, "accepted for upstream's sake: /metrics always answers")
    enable_cache_report: bool = arg(False, "accepted for upstream's sake: usage always has cached_tokens")

    def __post_init__(self) -> None:
        self.check()

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model_path

    def check(self) -> None:
        def require(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise ValueError(f"{flag_name(name)} is {getattr(self, name)!r}, but it must be {rule}")

        if not self.model_path:
            raise ValueError(
                "--model-path is missing: give a directory, a hub name, or 'embedded' for the built-in one"
            )
        for field in dataclasses.fields(self):
            value, choices = getattr(self, field.name), field.metadata["choices"]
            if choices and value is not None:
                require(value in choices, field.name, "one of " + ", ".join(choices))
            if isinstance(value, float):
                require(math.isfinite(value), field.name, "a finite number")
        require(1 <= self.port <= 65535, "port", "from 1 to 65535")
        require(self.page_size >= 1, "page_size", "at least 1")
        require(1 <= self.tp_size <= 64, "tp_size", "from 1 to 64")
        for name in ("api_key", "admin_api_key"):
            key = getattr(self, name)
            require(
                key is None or (key != "" and key.isascii() and key.isprintable() and " " not in key),
                name,
                "printable ASCII without spaces, as a header carries it",
            )
        for name in ("context_length", "max_running_requests", "max_queued_requests", "cuda_graph_max_bs_decode"):
            require((getattr(self, name) or 1) >= 1 and getattr(self, name) != 0, name, "at least 1")
        require(
            self.max_total_tokens is None or self.max_total_tokens >= 2 * self.page_size,
            "max_total_tokens",
            f"at least two pages, {2 * self.page_size}",
        )
        require(
            self.chunked_prefill_size == -1 or self.chunked_prefill_size >= 1,
            "chunked_prefill_size",
            "at least 1, or -1 to compute prompts whole",
        )
        require(self.max_prefill_tokens >= 1, "max_prefill_tokens", "at least 1")
        require(
            self.mem_fraction_static is None or 0 < self.mem_fraction_static < 1,
            "mem_fraction_static",
            "between 0 and 1",
        )
        if self.hicache_storage_backend is not None:
            backends = ("file", "remote", "bluefield", "dynamic")
            near, _, far = self.hicache_storage_backend.partition(",")
            require(
                near in backends if not far else near in ("file", "dynamic") and far in ("remote", "bluefield"),
                "hicache_storage_backend",
                "one of " + ", ".join(backends) + ", or a local and a remote one, like file,remote",
            )
            if not self.enable_hierarchical_cache:
                raise ValueError("--hicache-storage-backend fills the host tier: add --hicache")
        elif self.hicache_storage_backend_extra_config:
            raise ValueError(
                "--hicache-storage-backend-extra-config is for a storage backend: add --hicache-storage-backend"
            )
        if self.hicache_bypass_local and not self.enable_hierarchical_cache:
            raise ValueError(
                "--hicache-bypass-local leaves storage as the only cache, which fills the host tier: add --hicache"
            )
        if (self.peer_role is None) != (self.peer_endpoint is None):
            raise ValueError("--peer-role and --peer-endpoint belong together: give both, or neither")
        if self.peer_role == "master" and not self.enable_hierarchical_cache:
            raise ValueError("--peer-role master has borrowed memory in front of the host tier: add --hicache")
        for endpoint in (self.peer_endpoint or "").split(",") if self.peer_role else ():
            try:
                check_endpoint(endpoint)
            except PeerError as error:
                raise ValueError(str(error)) from error
        require(self.peer_slab_size >= 1, "peer_slab_size", "at least 1 MiB")
        require(self.peer_size > 0, "peer_size", "above 0 GB")
        require(self.peer_window > 0, "peer_window", "above 0 seconds")
        if self.peer_strict and self.peer_role != "worker":
            raise ValueError("--peer-strict says how memory is lent, which --peer-role worker does")
        if self.layer_stream and not (self.enable_hierarchical_cache and not self.disable_radix_cache):
            raise ValueError(
                "--layer-stream keeps in the host's part of the radix cache what the device has no room for: "
                "add --hicache, and no --disable-radix-cache"
            )
        if self.layer_stream and self.peer_role == "worker":
            raise ValueError("--layer-stream needs the memory that --peer-role worker lends: use one of the two")
        require(self.layer_stream >= 0, "layer_stream", "0 or more buffers")
        if bool(self.layer_stream_disk_size) != (self.layer_stream_disk_path is not None):
            raise ValueError(
                "--layer-stream-disk-size and --layer-stream-disk-path belong together: give both, or neither"
            )
        if self.layer_stream_disk_size and not self.layer_stream:
            raise ValueError("--layer-stream-disk-size is for requests that stream: add --layer-stream")
        require(self.layer_stream_disk_size >= 0, "layer_stream_disk_size", "0 or more GB")
        require(self.layer_stream_tokens >= 0, "layer_stream_tokens", "0 or more tokens")
        require(
            self.layer_stream_max_tpot is None or self.layer_stream_max_tpot > 0,
            "layer_stream_max_tpot",
            "above 0 seconds",
        )
        require(self.hicache_ratio > 0, "hicache_ratio", "above 0")
        try:
            ratio = self.load_ratio
        except ValueError:
            ratio = -1.0
        require(
            ratio == "auto" or 0 <= float(ratio) < math.inf, "hicache_load_ratio", "'auto', or a number from 0 up"
        )
        require(self.hicache_deferral_threshold >= 0, "hicache_deferral_threshold", "0 or more tokens")
        require(self.hicache_size >= 0, "hicache_size", "0 or more GB")
        parse_rate_limits(self.hicache_rate_limit)
        require(self.stream_interval >= 1, "stream_interval", "at least 1")
        if self.enable_hierarchical_cache and self.disable_radix_cache:
            raise ValueError("--hicache needs the radix cache: drop --disable-radix-cache")

    @property
    def rate_limits(self) -> dict[str, float]:
        """Link name -> bytes per second, for links that are limited."""
        return parse_rate_limits(self.hicache_rate_limit)

    @property
    def load_ratio(self) -> float | str:
        return self.hicache_load_ratio if self.hicache_load_ratio == "auto" else float(self.hicache_load_ratio)

    def without_keys(self) -> ServerArgs:
        """For whoever passes on the settings, where others may read them."""
        return dataclasses.replace(self, api_key=None, admin_api_key=None)

    def shown(self) -> dict[str, Any]:
        """For clients: without keys, and without a storage backend's settings, which may hold a store's password or
        the secret of its names; the name of a file with them stays."""
        values = dataclasses.asdict(self.without_keys())
        extra = self.hicache_storage_backend_extra_config
        if extra and not extra.startswith("@"):
            values["hicache_storage_backend_extra_config"] = "(given inline, not shown)"
        return values

    @classmethod
    def from_cli(cls, argv: list[str]) -> ServerArgs:
        """Ends the process with code 2 and one sentence if the flags are wrong."""
        parser = make_parser()
        values, unknown = parser.parse_known_args(argv)
        if unknown:
            flags = [word.split("=")[0] for word in unknown if word.startswith("-")]
            parser.error(
                f"{flags[0]} is not a flag of this engine; --help lists those that are"
                if flags
                else f"{unknown[0]!r} belongs to no flag; --help lists the flags"
            )
        try:
            return cls(**vars(values))
        except ValueError as error:
            parser.error(str(error))


def parse_rate_limits(text: str | None) -> dict[str, float]:
    """ "h2d=10,fetch=0.5" -> bytes per second by link."""
    limits: dict[str, float] = {}
    for part in text.split(",") if text is not None else ():
        name, _, value = part.partition("=")
        try:
            gb_per_s = float(value)
        except ValueError:
            gb_per_s = math.nan
        if name not in RATE_LIMITED_LINKS or name in limits or not 0 < gb_per_s < math.inf:
            raise ValueError(
                f"--hicache-rate-limit is {text!r}, but it must be GB/s above 0 for some of "
                f"{', '.join(RATE_LIMITED_LINKS)}, each once, as in h2d=10,fetch=0.5"
            )
        limits[name] = gb_per_s * 1e9
    return limits


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


class OneSentenceParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"error: {message.removeprefix('argument ')}\n")
        sys.exit(2)


def make_parser() -> argparse.ArgumentParser:
    parser = OneSentenceParser(prog="python -m sglang.launch_server", allow_abbrev=False)
    hints = typing.get_type_hints(ServerArgs)
    for field in dataclasses.fields(ServerArgs):
        names = [flag_name(field.name), *field.metadata["aliases"]]
        base = next(t for t in (typing.get_args(hints[field.name]) or (hints[field.name],)) if t is not type(None))
        shown = (
            ""
            if field.default in (None, False, "") or "default" in field.metadata["help"]
            else " (default: %(default)s)"
        )
        options: dict[str, Any] = {
            "dest": field.name,
            "default": field.default,
            "help": field.metadata["help"] + shown,
        }
        if base is bool:
            parser.add_argument(*names, action="store_true", **options)
        else:
            if field.metadata["choices"]:
                options["choices"] = field.metadata["choices"]
            else:
                options["metavar"] = base.__name__.upper()
            parser.add_argument(*names, type=base, **options)
    return parser
