"""Owns the server's settings: one dataclass, from which the command line is derived.

A flag is a field: its name, type, default and help stand in one place. What upstream has under the same meaning has
the same name here; a flag that is not a field is refused with a sentence, never ignored. Imports nothing heavy, so
that `--help` and a bad flag answer at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from sglang.srt.disaggregation.kv_events import KVEventsConfig
from sglang.srt.function_call.function_call_parser import TOOL_CALL_PARSERS
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.managers.schedule_policy import PRIORITIES, QUEUE_POLICIES
from sglang.srt.mem_cache.eviction import EVICTION_POLICIES
from sglang.srt.mem_cache.placement import WRITE_POLICIES
from sglang.srt.mem_cache.storage.registry import describe_backends, parse_backends
from sglang.srt.missing_flags import missing_flag
from sglang.srt.parser.reasoning_parser import REASONING_PARSERS
from sglang.srt.setting_sources import (
    CONFIG_VARIABLE,
    from_environment,
    from_file,
    text_of_python_value,
    variable_of,
)
from sglang.srt.utils.api_key import KEY_RULE, is_key
from sglang.srt.utils.peer_endpoint import PeerError, check_endpoint
from sglang.srt.utils.peer_timing import PeerTiming
from sglang.srt.utils.template_variables import reserved_variable
from sglang.srt.utils.unicode import is_unicode

RATE_LIMITED_LINKS = ("h2d", "d2h", "fetch", "fetch_far", "store", "store_far")


# The groups of --help and of docs/reference/flags.md, in their order.
MODEL = "Model"
HTTP = "HTTP server"
DEVICE = "Device and parallelism"
SCHEDULING = "Memory and scheduling"
HICACHE = "Hierarchical cache"
STORAGE = "Storage and remote tier"
PEERS = "Peers"
LAYER_STREAM = "Layer streaming"
OBSERVABILITY = "Logs and metrics"
DEBUGGING = "Debugging and experiments"
GROUPS = (MODEL, HTTP, DEVICE, SCHEDULING, HICACHE, STORAGE, PEERS, LAYER_STREAM, OBSERVABILITY, DEBUGGING)


# Never shown.
_KEYS = ("api_key", "admin_api_key")


def arg(
    group: str,
    default: Any,
    help: str | Callable[[], str],
    unset: str = "",
    aliases: tuple[str, ...] = (),
    choices: Collection[str] = (),
) -> Any:
    """help: one sentence, without its full stop, or what makes it from a registry. unset: what the server takes where
    the default is None. choices: names, or a registry, which is read anew each time."""
    return dataclasses.field(
        default=default,
        metadata={"group": group, "help": help, "unset": unset, "aliases": aliases, "choices": choices},
    )


def _policies(what: str, policies: Mapping[str, Callable[..., Any]]) -> str:
    """Each policy's docstring, by its name."""
    return f"{what}: " + "; ".join(f"{name}, {policy.__doc__ or 'undescribed'}" for name, policy in policies.items())


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """Settings of one server. None means: chosen at start-up from the model and the machine.

    Build one with `from_cli` or by keyword; both end in `check`, so that an instance is always valid. A keyword of a
    flag that takes JSON may be a mapping, which becomes its text. Raises ValueError with a sentence about what to do.
    """

    model_path: str = arg(
        MODEL,
        "",
        "a Hugging Face directory, a .gguf file, a hub name, 'smollm2' for a small trained model (93 MB, fetched "
        "once), or 'embedded' for one with random weights",
        aliases=("--model",),
    )
    tokenizer_path: str | None = arg(MODEL, None, "the directory of the tokenizer", unset="the model's directory")
    served_model_name: str | None = arg(MODEL, None, "the model name that clients ask for", unset="the model path")
    load_format: str = arg(
        MODEL,
        "auto",
        "how weights are made: auto, safetensors and gguf read them from files, dummy draws random ones",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    model_impl: str = arg(
        MODEL,
        "auto",
        "whose code computes the model: native (or sglang), this engine's; auto, native where there is one",
        choices=("auto", "native", "sglang", "transformers"),
    )
    dtype: str = arg(
        MODEL,
        "auto",
        "data type of weights and activations; auto takes the checkpoint's, or float32 on a CPU without instructions "
        "for it",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
    )
    kv_cache_dtype: str = arg(
        MODEL,
        "auto",
        "data type of the KV cache in all tiers; auto takes --dtype's; fp8 halves the bytes of a 16-bit one and "
        "changes answers a little",
        choices=("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2"),
    )
    quantization: str | None = arg(
        MODEL,
        None,
        "how weights are kept; fp8 quantizes a checkpoint's that are not, on a GPU",
        choices=("fp8", "compressed-tensors", "awq", "gptq", "mxfp4"),
        unset="as the checkpoint has them",
    )
    quantization_param_path: str | None = arg(
        MODEL,
        None,
        "a JSON file with a scale of K and V for each layer, for a KV cache of fp8",
        unset="the checkpoint's, else 1",
    )
    context_length: int | None = arg(
        MODEL, None, "the longest prompt plus answer, in tokens", unset="the model's context"
    )
    chat_template: str | None = arg(
        MODEL,
        None,
        "a file with a Jinja template of conversations, or the name of one of the tokenizer's own",
        unset="the tokenizer's",
    )
    default_chat_template_kwargs: str | None = arg(
        MODEL, None, "a JSON object of variables for the chat template, for requests that do not set them"
    )
    sampling_defaults: str = arg(
        MODEL,
        "model",
        "sampling parameters of chats that leave them out: the model's (generation_config.json) or OpenAI's",
        choices=("openai", "model"),
    )
    tool_call_parser: str | None = arg(
        MODEL,
        None,
        "the format of the model's tool calls; auto finds it in the chat template",
        unset="calls are not parsed",
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str | None = arg(
        MODEL,
        None,
        "how the model marks its reasoning, which answers then hold apart; auto finds it in the chat template",
        unset="reasoning is part of the text",
        choices=REASONING_PARSERS,
    )
    random_seed: int | None = arg(
        MODEL,
        None,
        "seed of dummy weights and of requests that bring no seed",
        unset="0 for weights, drawn for each request",
    )

    host: str = arg(HTTP, "127.0.0.1", "the address to listen on")
    port: int = arg(HTTP, 30000, "the port to listen on")
    api_key: str | None = arg(
        HTTP, None, "the key that clients must send as 'Authorization: Bearer KEY'", unset="no key"
    )
    admin_api_key: str | None = arg(
        HTTP, None, "the key for requests that change the server, in place of --api-key", unset="--api-key"
    )
    drain_delay: float = arg(
        HTTP,
        0.0,
        "seconds after SIGTERM in which requests are still taken while /health answers 503, as a warning to load "
        "balancers",
    )
    strict_fields: bool = arg(HTTP, False, "refuse unknown request fields with status 400 instead of ignoring them")
    grammar_backend: str = arg(
        HTTP,
        "xgrammar",
        "what makes answers follow a grammar or a JSON schema; none refuses requests that have one",
        choices=("xgrammar", "none"),
    )
    constrained_json_max_whitespace_cnt: int | None = arg(
        HTTP,
        None,
        "the most characters of white space between the parts of a JSON value",
        unset="no limit",
    )
    stream_interval: int = arg(HTTP, 1, "tokens per event of a streamed answer")
    cors_allow_origins: str | None = arg(
        HTTP,
        None,
        "origins whose web pages may read replies, separated by commas, or *",
        unset="none",
    )
    request_timeout: float | None = arg(
        HTTP,
        None,
        "seconds after which a request that is not answered to its end is ended with status 504",
        unset="no limit",
    )

    device: str = arg(
        DEVICE, "auto", "where the model runs; auto takes a GPU if there is one", choices=("auto", "cpu", "cuda")
    )
    tp_size: int = arg(
        DEVICE,
        1,
        "tensor-parallel ranks, one process each",
        aliases=("--tp", "--tensor-parallel-size"),
    )
    attention_backend: str | None = arg(
        DEVICE,
        None,
        "the attention kernels",
        unset="cpu; on a GPU triton, or flashinfer without Triton",
        choices=ATTENTION_BACKENDS,
    )
    disable_cuda_graph: bool = arg(DEVICE, False, "on a GPU, launch each kernel by itself")
    disable_prefill_cuda_graph: bool = arg(DEVICE, False, "on a GPU, launch each kernel of a prefill by itself")
    cuda_graph_max_bs_prefill: int = arg(
        DEVICE, 512, "on a GPU, the tokens of the largest prefill that is captured as a CUDA graph"
    )
    cuda_graph_max_bs_decode: int | None = arg(
        DEVICE,
        None,
        "on a GPU, the largest decode batch that is captured as a CUDA graph",
        unset="as --max-running-requests; none where transformers computes",
    )

    page_size: int | None = arg(
        SCHEDULING,
        None,
        "tokens per page of the KV cache",
        unset="1; on a GPU with --hicache 64 to 256, for copy engines",
    )
    max_total_tokens: int | None = arg(
        SCHEDULING,
        None,
        "tokens of KV cache on the device",
        unset="on a CPU four full contexts or what memory allows, on a GPU what memory allows",
    )
    mem_fraction_static: float | None = arg(
        SCHEDULING,
        None,
        "on a GPU, the part of its memory for weights and KV cache; on a CPU, the part of the free memory",
        unset="0.88 on a GPU, 0.6 on a CPU",
    )
    swa_full_tokens_ratio: float | None = arg(
        SCHEDULING,
        None,
        "of models with sliding windows in some layers: pages of such layers on device and host, per page of the "
        "others",
        unset="0.25 (long windows: to 0.8, host 0.5) where that gives more tokens, else 1",
    )
    disable_hybrid_swa_memory: bool = arg(
        SCHEDULING, False, "give layers with a sliding window as many pages as the others, and load what windows hide"
    )
    max_running_requests: int | None = arg(SCHEDULING, None, "the most requests in one batch", unset="256")
    max_queued_requests: int | None = arg(
        SCHEDULING,
        None,
        "the most requests that wait for their first token; more get status 503, but one body is let in whole",
        unset="no limit",
    )
    chunked_prefill_size: int = arg(
        SCHEDULING, 2048, "the most tokens of one prompt in one step; -1 computes prompts whole"
    )
    max_prefill_tokens: int = arg(SCHEDULING, 16384, "the most prompt tokens in one step")
    schedule_policy: str = arg(
        SCHEDULING,
        "fcfs",
        lambda: _policies("order of the queue", QUEUE_POLICIES),
        choices=QUEUE_POLICIES,
    )
    enable_priority_scheduling: bool = arg(
        SCHEDULING,
        False,
        "serve requests of higher priority first; those of the lowest may wait for ever",
    )
    schedule_low_priority_values_first: bool = arg(
        SCHEDULING, False, "with --enable-priority-scheduling, a lower value is a higher priority"
    )
    default_priority_value: int = arg(
        SCHEDULING, 0, "the priority of requests that bring none, with --enable-priority-scheduling"
    )
    priority_scheduling_preemption_threshold: int = arg(
        SCHEDULING,
        10,
        "a waiting request takes the memory of running ones whose priority is lower by more than this",
    )
    disable_priority_preemption: bool = arg(
        SCHEDULING, False, "with --enable-priority-scheduling, leave running requests alone"
    )
    abort_on_priority_when_disabled: bool = arg(
        SCHEDULING, False, "refuse requests with a priority on a server without --enable-priority-scheduling"
    )
    radix_eviction_policy: str = arg(
        SCHEDULING,
        "lru",
        lambda: _policies("what the cache evicts first", EVICTION_POLICIES),
        choices=EVICTION_POLICIES,
    )
    disable_radix_cache: bool = arg(SCHEDULING, False, "share no prefix between requests")
    disable_overlap_schedule: bool = arg(
        SCHEDULING, False, "plan a step only when the tokens of the previous step are known"
    )

    enable_hierarchical_cache: bool = arg(
        HICACHE,
        False,
        "keep KV cache in host memory too, beyond what the device has room for",
        aliases=("--hicache", "--enable-hicache"),
    )
    hicache_ratio: float = arg(HICACHE, 2.0, "size of the host pool as a multiple of the device pool")
    hicache_size: float = arg(
        HICACHE, 0, "size of the host pool in GB (1e9 bytes) over all ranks; above 0 it wins over the ratio"
    )
    hicache_write_policy: str = arg(
        HICACHE,
        "auto",
        "when pages are copied to peers and host: auto (at once while there is room, else ahead of eviction, so that "
        "the tiers' capacities add up), write_through (at once), write_back (when the device evicts them) or "
        "write_through_selective (when a second request uses them)",
        choices=WRITE_POLICIES,
    )
    hicache_mem_layout: str = arg(
        HICACHE,
        "page_first",
        "layout of the host pool: each page in one piece, or each layer in one piece",
        choices=("page_first", "layer_first"),
    )
    hicache_io_backend: str = arg(
        HICACHE,
        "auto",
        "what copies between device and host pool: a kernel, the copy engines by runs of pages or page by page, or "
        "one kernel for all layers of a load, which was not run on a GPU yet",
        choices=("auto", "kernel", "dma", "direct", "persistent"),
    )
    hicache_load_ratio: str = arg(
        HICACHE,
        "100",
        "the most tokens that a batch loads from the host per token that it computes; 'auto' uses measured costs, 0 "
        "turns balanced batches off",
    )
    hicache_bubble_filling: str = arg(
        HICACHE,
        "on",
        "decode or prefill other requests while a request's load is under way; 'decode': the whole batch waits, and "
        "only decode steps run meanwhile",
        choices=("on", "decode", "off"),
    )
    hicache_load_or_recompute: str = arg(
        HICACHE,
        "on",
        "compute the front of a prefix while the rest of it is loaded, where that is sooner done",
        choices=("on", "off"),
    )
    hicache_publish_at: str = arg(
        HICACHE,
        "launch",
        "when a prompt's KV cache is inserted for others: at its launch, or at its completion as upstream does",
        choices=("launch", "completion"),
    )
    hicache_deferral_threshold: int = arg(
        HICACHE,
        100,
        "defer a request that shares more than this many tokens with a prompt that an older request is about to "
        "compute; 0 turns that off",
    )
    hicache_canary: float = arg(
        HICACHE,
        0.0,
        "the share of cache hits that an idle server computes again to compare, such as 0.001; where they differ, "
        "the tier that they came from is read no more",
    )
    hicache_canary_dir: str = arg(
        HICACHE, "~/.cache/sglang/hicache-canary", "folder for the KV of hits that the canary found to differ"
    )

    hicache_storage_backend: str | None = arg(
        STORAGE,
        None,
        describe_backends,
        unset="no storage",
    )
    hicache_storage_backend_extra_config: str = arg(
        STORAGE, "", "settings of the storage backend: JSON, or @ and the name of a file with JSON"
    )
    hicache_storage_prefetch_policy: str = arg(
        STORAGE,
        "timeout",
        "how long a queued request waits for storage: not beyond its turn, until everything is fetched, or for a "
        "time that grows with its length",
        choices=("best_effort", "wait_complete", "timeout"),
    )

    peer_role: str | None = arg(
        PEERS,
        None,
        "share KV memory with other servers on this machine: a worker lends, a master borrows",
        unset="neither",
        choices=("master", "worker"),
    )
    peer_endpoint: str | None = arg(
        PEERS,
        None,
        "where a worker listens, tcp://127.0.0.1:PORT or ipc:///DIRECTORY/NAME; a master names all its workers, "
        "separated by commas",
    )
    peer_slab_size: int = arg(PEERS, 64, "size of a slab in MiB, the same for lender and borrower")
    peer_size: float = arg(PEERS, 4.0, "the most GB that a master borrows")
    peer_window: float = arg(
        PEERS,
        60.0,
        "a worker keeps as much memory as its requests needed at once in this many last seconds, and cache that they "
        "used then",
    )
    peer_timing: str = arg(
        PEERS,
        "",
        "how long a worker and a master wait for what, in seconds, as in recall=10,idle=60",
        unset=PeerTiming().shown(),
    )
    peer_strict: bool = arg(
        PEERS, False, "a worker copies pages for its masters instead of letting them map its memory"
    )

    layer_stream: int = arg(
        LAYER_STREAM,
        0,
        "number of buffers for requests that are longer than the device pool; 2 is enough, 0 turns streaming off",
    )
    layer_stream_tokens: int | None = arg(
        LAYER_STREAM,
        None,
        "tokens of one layer that a buffer holds; 0 holds as many as the host pool",
        unset="16384 on a GPU, 4096 on a CPU",
    )
    layer_stream_disk_size: float = arg(
        LAYER_STREAM, 0.0, "size in GB of a swap file for a request that exceeds device and host together"
    )
    layer_stream_disk_path: str | None = arg(
        LAYER_STREAM, None, "the folder of the swap file, whose space is taken at start-up"
    )
    layer_stream_max_tpot: float | None = arg(
        LAYER_STREAM,
        None,
        "refuse a streaming request whose tokens are expected to take longer than this many seconds each",
        unset="no limit",
    )

    log_level: str = arg(
        OBSERVABILITY, "info", "level of the log", choices=("debug", "info", "warning", "error", "critical")
    )
    log_level_http: str | None = arg(
        OBSERVABILITY,
        None,
        "level of the access log",
        unset="--log-level",
        choices=("debug", "info", "warning", "error", "critical"),
    )
    enable_trace: bool = arg(OBSERVABILITY, False, "send a trace of every request to an OpenTelemetry collector")
    otlp_traces_endpoint: str = arg(
        OBSERVABILITY, "http://localhost:4318/v1/traces", "where --enable-trace sends traces, as OTLP over HTTP"
    )
    kv_events_config: str | None = arg(
        OBSERVABILITY,
        None,
        "a JSON object: publish what of which prompt is on which tier, for routers, as in "
        '{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557"}',
        unset="nothing is published",
    )
    enable_metrics: bool = arg(
        OBSERVABILITY, False, "has no effect, exists for upstream's command lines: /metrics always answers"
    )
    enable_cache_report: bool = arg(
        OBSERVABILITY, False, "has no effect, exists for upstream's command lines: usage always has cached_tokens"
    )

    record_steps: str | None = arg(DEBUGGING, None, "write every scheduler step to this file, for replay")
    crash_dump_folder: str | None = arg(
        DEBUGGING,
        None,
        "keep a record here from which a crash of the scheduler is replayed",
        unset="none",
    )
    hicache_rate_limit: str | None = arg(
        DEBUGGING,
        None,
        "slow links down to these rates in GB/s (1e9 bytes), as in h2d=10,d2h=10,fetch=2,store=1",
        unset="no limit",
    )
    hicache_bypass_local: bool = arg(
        DEBUGGING,
        False,
        "find nothing on the device and the host, so that every request fetches its prefix from storage",
    )

    def __post_init__(self) -> None:
        self._turn_mappings_into_text()
        self.check()

    def _turn_mappings_into_text(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not isinstance(value, str | int | float):
                text = text_of_python_value(flag_name(name), value, _kinds()[name])
                object.__setattr__(self, name, text)

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model_path

    def check(self) -> None:
        def require(ok: bool, name: str, rule: str) -> None:
            if not ok:
                # Keys are secret.
                is_now = "" if name in _KEYS else f" is {getattr(self, name)!r}, but it"
                raise ValueError(f"{flag_name(name)}{is_now} must be {rule}")

        if not self.model_path:
            raise ValueError(
                "--model-path is missing: give a directory, a hub name, or 'smollm2' for a small trained model"
            )
        for field in dataclasses.fields(self):
            value, choices = getattr(self, field.name), field.metadata["choices"]
            if choices and value is not None:
                require(value in choices, field.name, "one of " + ", ".join(choices))
            if isinstance(value, float):
                require(math.isfinite(value), field.name, "a finite number")
            if isinstance(value, str) and field.name not in _KEYS:
                require(is_unicode(value), field.name, "text in UTF-8")
        require(1 <= self.port <= 65535, "port", "from 1 to 65535")
        require(self.page_size is None or self.page_size >= 1, "page_size", "at least 1")
        require(1 <= self.tp_size <= 64, "tp_size", "from 1 to 64")
        for name in _KEYS:
            key = getattr(self, name)
            require(key is None or is_key(key), name, KEY_RULE)
        for name in ("max_running_requests", "max_queued_requests", "cuda_graph_max_bs_decode"):
            require((getattr(self, name) or 1) >= 1 and getattr(self, name) != 0, name, "at least 1")
        require(
            self.context_length is None or self.context_length >= 2,
            "context_length",
            "at least 2, for one token of a prompt and one of its answer",
        )
        require(
            self.max_total_tokens is None or self.max_total_tokens >= 2 * (self.page_size or 1),
            "max_total_tokens",
            f"at least two pages, {2 * (self.page_size or 1)}",
        )
        require(
            self.chunked_prefill_size == -1 or self.chunked_prefill_size >= 1,
            "chunked_prefill_size",
            "at least 1, or -1 to compute prompts whole",
        )
        require(self.max_prefill_tokens >= 1, "max_prefill_tokens", "at least 1")
        require(self.cuda_graph_max_bs_prefill >= 1, "cuda_graph_max_bs_prefill", "at least 1")
        require(
            self.quantization_param_path is None or self.kv_cache_dtype.startswith("fp8"),
            "quantization_param_path",
            "left out, unless --kv-cache-dtype is fp8_e4m3 or fp8_e5m2",
        )
        require(
            self.mem_fraction_static is None or 0 < self.mem_fraction_static < 1,
            "mem_fraction_static",
            "between 0 and 1",
        )
        require(self.drain_delay >= 0, "drain_delay", "at least 0 seconds")
        require(self.request_timeout is None or self.request_timeout > 0, "request_timeout", "above 0 seconds")
        for origin in self.cors_allow_origins.split(",") if self.cors_allow_origins is not None else ():
            require(
                origin.strip() == "*" or is_origin(origin.strip()),
                "cors_allow_origins",
                "* or origins such as https://example.org, separated by commas",
            )
        require(
            self.otlp_traces_endpoint.startswith(("http://", "https://")),
            "otlp_traces_endpoint",
            "a URL such as http://localhost:4318/v1/traces (OTLP over HTTP, not gRPC)",
        )
        try:
            self.kv_events  # noqa: B018
        except ValueError as error:
            raise ValueError(f"--kv-events-config: {error}") from None
        self._check_priorities(require)
        if self.record_steps is not None and self.crash_dump_folder is not None:
            raise ValueError("--record-steps has what --crash-dump-folder would keep: use one of the two")
        if self.hicache_storage_backend is not None:
            parse_backends(self.hicache_storage_backend)
            if not self.enable_hierarchical_cache:
                raise ValueError("--hicache-storage-backend fills the host tier: add --hicache")
        elif self.hicache_storage_backend_extra_config:
            raise ValueError(
                "--hicache-storage-backend-extra-config is for a storage backend: add --hicache-storage-backend"
            )
        if self.hicache_canary and not self.enable_hierarchical_cache:
            raise ValueError("--hicache-canary checks what --hicache brings: add it")
        if self.hicache_bypass_local and not self.enable_hierarchical_cache:
            raise ValueError(
                "--hicache-bypass-local makes storage the only cache, and storage fills the host tier: add --hicache"
            )
        if (self.peer_role is None) != (self.peer_endpoint is None):
            raise ValueError("--peer-role and --peer-endpoint belong together: give both, or neither")
        if self.peer_role == "master" and not self.enable_hierarchical_cache:
            raise ValueError("--peer-role master puts borrowed memory in front of the host tier: add --hicache")
        endpoints = (self.peer_endpoint or "").split(",") if self.peer_role else []
        require(
            len(endpoints) < 2 or self.peer_role == "master",
            "peer_endpoint",
            "one endpoint, at which the worker listens; a master takes several",
        )
        for endpoint in endpoints:
            try:
                check_endpoint(endpoint)
            except PeerError as error:
                raise ValueError(str(error)) from error
            if endpoint.startswith("tcp:") and int(endpoint.rpartition(":")[2]) == 0:
                raise ValueError(
                    f"--peer-endpoint {endpoint}: port 0 is a free port, which no master would know: name one from 1 "
                    "to 65535"
                )
        require(self.peer_slab_size >= 1, "peer_slab_size", "at least 1 MiB")
        require(self.peer_size > 0, "peer_size", "above 0 GB")
        require(self.peer_window > 0, "peer_window", "above 0 seconds")
        try:
            PeerTiming.parse(self.peer_timing)
        except ValueError as error:
            raise ValueError(f"--peer-timing: {error}") from error
        if self.peer_strict and self.peer_role != "worker":
            raise ValueError("--peer-strict is a setting of the lender: add --peer-role worker")
        if self.layer_stream and not (self.enable_hierarchical_cache and not self.disable_radix_cache):
            raise ValueError(
                "--layer-stream keeps the tokens beyond the device pool in the host tier of the radix cache: "
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
        require(
            self.layer_stream_tokens is None or self.layer_stream_tokens >= 0,
            "layer_stream_tokens",
            "0 or more tokens",
        )
        require(
            self.layer_stream_max_tpot is None or self.layer_stream_max_tpot > 0,
            "layer_stream_max_tpot",
            "above 0 seconds",
        )
        require(self.hicache_ratio > 0, "hicache_ratio", "above 0")
        require(
            self.swa_full_tokens_ratio is None or 0 < self.swa_full_tokens_ratio <= 1,
            "swa_full_tokens_ratio",
            "above 0, and 1 at most",
        )
        try:
            ratio = self.load_ratio
        except ValueError:
            ratio = -1.0
        require(
            ratio == "auto" or 0 <= float(ratio) < math.inf, "hicache_load_ratio", "'auto', or a number from 0 up"
        )
        require(self.hicache_deferral_threshold >= 0, "hicache_deferral_threshold", "0 or more tokens")
        require(self.hicache_size >= 0, "hicache_size", "0 or more GB")
        require(0 <= self.hicache_canary <= 1, "hicache_canary", "from 0 to 1")
        parse_rate_limits(self.hicache_rate_limit)
        require(
            isinstance(self.chat_template_defaults, dict),
            "default_chat_template_kwargs",
            """a JSON object, as in '{"enable_thinking": false}'""",
        )
        if reserved := reserved_variable(self.chat_template_defaults):
            raise ValueError(f"--default-chat-template-kwargs may not hold {reserved}, which the engine sets itself")
        require(self.stream_interval >= 1, "stream_interval", "at least 1")
        whitespace = self.constrained_json_max_whitespace_cnt
        require(whitespace is None or whitespace >= 1, "constrained_json_max_whitespace_cnt", "at least 1")
        if self.enable_hierarchical_cache and self.disable_radix_cache:
            raise ValueError("--hicache needs the radix cache: drop --disable-radix-cache")

    def _check_priorities(self, require: Callable[[bool, str, str], None]) -> None:
        values_first, threshold = "schedule_low_priority_values_first", "priority_scheduling_preemption_threshold"
        require(self.priority_scheduling_preemption_threshold >= 0, threshold, "0 or more")
        require(self.default_priority_value in PRIORITIES, "default_priority_value", "a 32-bit number")
        if self.enable_priority_scheduling:
            if self.hicache_publish_at == "completion":
                raise ValueError(
                    "--enable-priority-scheduling does not go with --hicache-publish-at completion, which keeps "
                    "requests waiting for older ones: drop one of the two"
                )
            return
        for name in (values_first, "disable_priority_preemption"):
            if getattr(self, name):
                raise ValueError(f"{flag_name(name)} is about priorities: add --enable-priority-scheduling")

    @property
    def rate_limits(self) -> dict[str, float]:
        """Link name -> bytes per second, for links that are limited."""
        return parse_rate_limits(self.hicache_rate_limit)

    @property
    def kv_events(self) -> KVEventsConfig:
        return KVEventsConfig.from_cli(self.kv_events_config) if self.kv_events_config else KVEventsConfig()

    @property
    def load_ratio(self) -> float | str:
        return self.hicache_load_ratio if self.hicache_load_ratio == "auto" else float(self.hicache_load_ratio)

    @property
    def chat_template_defaults(self) -> dict[str, Any]:
        """Empty if there are none; None if they are no JSON."""
        try:
            values: dict[str, Any] = json.loads(self.default_chat_template_kwargs or "{}")
        except ValueError:
            return None  # type: ignore[return-value]
        return values

    def without_keys(self) -> ServerArgs:
        """The settings without keys, for places where others may read them."""
        return dataclasses.replace(self, api_key=None, admin_api_key=None)

    def shown(self) -> dict[str, Any]:
        """The settings as clients may see them: without keys, and without a storage backend's settings, which may
        hold a store's password or the secret of its names. The name of a file with settings stays."""
        values = dataclasses.asdict(self.without_keys())
        extra = self.hicache_storage_backend_extra_config
        if extra and not extra.startswith("@"):
            values["hicache_storage_backend_extra_config"] = "(given inline, not shown)"
        return values

    @classmethod
    def from_cli(cls, argv: list[str], environ: Mapping[str, str] = os.environ) -> ServerArgs:
        """The command line, over the environment, over the file of --config. Ends the process with code 2 and one
        sentence if a setting is wrong."""
        parser = make_parser()
        given, unknown = parser.parse_known_args(argv)
        if unknown:
            flags = [word.split("=")[0] for word in unknown if word.startswith("-")]
            if not flags:
                parser.error(f"{unknown[0]!r} belongs to no flag; --help lists the flags")
            missing = missing_flag(flags[0])
            parser.error(missing or f"{flags[0]} is not a flag of this engine; --help lists those that are")
        values = vars(given)
        path = values.pop("config", None) or environ.get(CONFIG_VARIABLE)
        try:
            in_file = from_file(path, _kinds(), _aliases()) if path else {}
            return cls(**{**in_file, **from_environment(_kinds(), _aliases(), environ, values), **values})
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


def is_origin(text: str) -> bool:
    scheme, _, host = text.partition("://")
    return scheme in ("http", "https") and bool(host) and "/" not in host


def _kinds() -> dict[str, type]:
    """Setting -> the type of its value, without None."""
    hints = typing.get_type_hints(ServerArgs)
    return {
        field.name: next(
            t for t in (typing.get_args(hints[field.name]) or (hints[field.name],)) if t is not type(None)
        )
        for field in dataclasses.fields(ServerArgs)
    }


def _aliases() -> dict[str, str]:
    """Other name of a setting -> the setting."""
    return {
        alias.lstrip("-").replace("-", "_"): field.name
        for field in dataclasses.fields(ServerArgs)
        for alias in field.metadata["aliases"]
    }


def make_parser() -> argparse.ArgumentParser:
    """What it parses has the settings that the command line gives, and no others."""
    parser = OneSentenceParser(
        prog="python -m sglang.launch_server",
        usage="python -m sglang.launch_server --model-path MODEL [flags]",
        description=f"Each flag may also stand in a YAML file (--config FILE, 'port: 30000') or in the environment "
        f"({variable_of('port')}=30000). The command line comes first, then the environment, then the file. 'no-' "
        f"before a switch turns it off: --no-hicache.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help=f"a YAML file with flags, by their names (default: {CONFIG_VARIABLE})",
    )
    kinds = _kinds()
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    for field in dataclasses.fields(ServerArgs):
        base = kinds[field.name]
        default = default_text(field)
        options: dict[str, Any] = {
            "dest": field.name,
            "default": argparse.SUPPRESS,
            "help": (help_text(field) + (f" (default: {default})" if default not in ("", "off") else "")).replace(
                "%", "%%"
            ),
        }
        if base is bool:
            options["action"] = "store_true"
        else:
            options["type"] = base
            if field.metadata["choices"]:
                options["choices"] = tuple(field.metadata["choices"])
            else:
                options["metavar"] = base.__name__.upper()
        flags = (flag_name(field.name), *field.metadata["aliases"])
        groups[field.metadata["group"]].add_argument(*flags, **options)
        if base is bool:  # for a switch that the environment or the file turns on
            negated = [flag.replace("--", "--no-", 1) for flag in flags]
            hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            parser.add_argument(*negated, dest=field.name, action="store_false", **hidden)
    return parser


def help_text(field: dataclasses.Field[Any]) -> str:
    """One sentence, without its full stop."""
    text = field.metadata["help"]
    return text if isinstance(text, str) else text()


def default_text(field: dataclasses.Field[Any]) -> str:
    """The default as a reader sees it; empty where the flag has none."""
    if field.default is False:
        return "off"
    return field.metadata["unset"] if field.default in (None, "") else str(field.default)
