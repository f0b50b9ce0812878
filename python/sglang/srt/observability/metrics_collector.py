"""Prometheus metrics under upstream's names. Owns the registry of one server; never talks to another process.

Numbers of requests (latencies, token counts) are counted as they happen. Numbers of the scheduler (pools, queues,
totals) are read from its last state, key by key. A missing key makes its metric absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sglang.srt.observability.http_metrics import HttpMetrics
from sglang.srt.observability.latency_sketch import LatencySketch
from sglang.srt.offload.proxy.settings import BUFFERS, STAGES

_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 120, 240)
_TOKEN_SECONDS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.8, 2)
_TOKENS = (1, 4, 16, 64, 100, 300, 500, 1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000)

disable_created_metrics()  # a second series per metric that upstream does not have

# metric, help, path in the scheduler's state
_GAUGES = (
    ("num_running_reqs", "Requests in the running batch.", ("queues", "running")),
    ("num_queue_reqs", "Requests that wait in the queue.", ("queues", "waiting")),
    ("gen_throughput", "Tokens generated per second.", ("gen_throughput",)),
    ("num_used_tokens", "Tokens of KV cache in use on the device.", ("tiers", "device", "used_tokens")),
    ("num_pages", "Pages of KV cache on the device.", ("tiers", "device", "num_pages")),
    ("page_size", "Tokens per page.", ("page_size",)),
    ("max_total_num_tokens", "Tokens of KV cache on the device.", ("tiers", "device", "total_tokens")),
    (
        "max_total_num_tokens_swa",
        "Tokens on the device in the pool for layers with a sliding window.",
        ("tiers", "device", "windowed", "total_tokens"),
    ),
    (
        "swa_available_tokens",
        "Tokens of that pool that are free.",
        ("tiers", "device", "windowed", "free_tokens"),
    ),
    ("kv_used_tokens", "Tokens of KV cache in use on the device.", ("tiers", "device", "used_tokens")),
    ("kv_evictable_tokens", "Cached tokens that may be evicted.", ("tiers", "device", "evictable_tokens")),
    ("hicache_host_total_tokens", "Tokens of KV cache on the host.", ("tiers", "host", "total_tokens")),
    ("hicache_peer_total_tokens", "Tokens of KV cache in memory that peers lend.", ("tiers", "peer", "total_tokens")),
    ("hicache_peer_slab_bytes", "Bytes of a slab, the unit that peers lend.", ("peers", "slab_bytes")),
    ("hicache_peer_borrowers", "Masters that this worker may lend to.", ("peers", "borrowers")),
    ("hicache_sessions", "Sessions of clients that are known.", ("sessions", "known")),
    ("hicache_storage_tokens", "Tokens of KV cache in storage.", ("storage_tier", "cached_tokens")),
    ("hicache_storage_size_bytes", "Bytes that storage takes.", ("storage_tier", "size_bytes")),
    (
        "hicache_storage_limit_bytes",
        "Bytes that storage may take, 0 without a limit.",
        ("storage_tier", "limit_bytes"),
    ),
    ("hicache_storage_read_errors", "Blocks that were damaged or not read at all.", ("storage_tier", "read_errors")),
    ("hicache_storage_write_errors", "Writes to storage that failed.", ("storage_tier", "write_errors")),
    (
        "hicache_storage_lock_timeouts",
        "Pauses in writing because another process kept the disk's folder locked.",
        ("storage_tier", "lock_timeouts"),
    ),
    (
        "hicache_storage_refused_segments",
        "Files on disk in an earlier format, which are not read.",
        ("storage_tier", "refused_segments"),
    ),
    (
        "hicache_storage_written_bytes",
        "Bytes of blocks stored on disk since the start.",
        ("storage_tier", "written_bytes"),
    ),
    (
        "hicache_storage_copied_bytes",
        "Bytes of hot blocks copied forward on disk since the start.",
        ("storage_tier", "copied_bytes"),
    ),
    (
        "hicache_storage_device_written_bytes",
        "Bytes of any kind written to the disk since the start.",
        ("storage_tier", "device_written_bytes"),
    ),
    (
        "hicache_storage_last_day_written_bytes",
        "Bytes of any kind written to the disk in the last 24 hours.",
        ("storage_tier", "last_day_written_bytes"),
    ),
    (
        "hicache_storage_refused_blocks",
        "Blocks not stored because the daily limit of the disk was used up.",
        ("storage_tier", "refused_blocks"),
    ),
    ("hicache_storage_reads_off", "1 while storage is not read, see the log.", ("storage", "reads", "off")),
    ("hicache_storage_writes_off", "1 while storage is not written, see the log.", ("storage", "writes", "off")),
    (
        "hicache_remote_left_alone",
        "1 while the disk goes on without it, see the log.",
        ("tiers", "remote", "left_alone"),
    ),
)
# metric, help, name among the state's counters. A counter appears once it has counted something.
_COUNTERS = (
    ("evicted_tokens", "Tokens evicted from the device.", "evicted_tokens_device"),
    ("load_back_tokens", "Tokens loaded from the host.", "load_back_tokens"),
    ("hicache_backup_tokens", "Tokens written to the host.", "backup_tokens"),
    ("hicache_backup_dropped_tokens", "Tokens not backed up to the host.", "backup_dropped_tokens"),
    ("hicache_dropped_tokens", "Tokens evicted from the host.", "evicted_tokens_host"),
    (
        "hicache_session_kept_tokens",
        "Tokens that sessions found and that would have been evicted without them.",
        "session_kept_tokens",
    ),
    ("prefetched_tokens", "Tokens brought from storage to the host.", "prefetched_tokens"),
    ("backuped_tokens", "Tokens written to storage.", "backuped_tokens"),
    ("storage_prefetch_hit_tokens", "Tokens of prompts found in storage and not on the host.", "storage_hit_tokens"),
    ("hicache_storage_probes", "Prompts that were looked up in storage.", "storage_probes"),
    ("hicache_prefetch_timeouts", "Requests that stopped waiting for storage.", "prefetch_timeouts"),
    ("hicache_storage_losses", "Times that storage had lost a block of a prompt in use.", "storage_losses"),
    (
        "hicache_storage_asked_again",
        "Requests that asked storage again, because less was cached at their start than before.",
        "storage_asked_again",
    ),
    (
        "hicache_prefetch_dropped_tokens",
        "Tokens not fetched, because the host had no room.",
        "prefetch_dropped_tokens",
    ),
    (
        "hicache_storage_backup_failed_tokens",
        "Tokens that storage did not store.",
        "storage_backup_failed_tokens",
    ),
    ("hicache_bundle_hits", "Requests that shared a load with their batch.", "bundle_hits"),
    ("hicache_deprioritised", "Times that a younger request overtook an older one.", "deprioritised"),
    ("hicache_deferred", "Requests that waited for others to compute what they share.", "deferred"),
    ("hicache_bubbles_filled", "Launches that ran while an earlier request's load was under way.", "bubbles_filled"),
    (
        "hicache_recomputed_instead",
        "Times that a request computed what it would have loaded, or a part of it.",
        "recomputed_instead",
    ),
    ("hicache_recomputed_tokens", "Tokens computed instead of loaded.", "recomputed_instead_tokens"),
    ("layer_stream_requests", "Requests that were longer than the device.", "streamed_reqs"),
    ("layer_stream_tokens", "Tokens read layer by layer, once per launch.", "streamed_tokens"),
    ("layer_stream_spilled_tokens", "Tokens moved to the host by requests that stream.", "spilled_tokens"),
    ("layer_stream_swapped_tokens", "Tokens moved to disk by requests that stream.", "swapped_tokens"),
    ("layer_stream_demoted_tokens", "Device tokens that streaming requests gave up.", "demoted_tokens"),
    ("layer_stream_promoted_tokens", "Tokens that streaming requests loaded back to the device.", "promoted_tokens"),
    ("hicache_fetches_cut", "Requests that computed stored tokens because that was faster.", "fetches_cut"),
    (
        "hicache_fetch_cut_tokens",
        "Stored tokens that were computed because that was faster.",
        "fetch_cut_tokens",
    ),
    ("hicache_peer_load_tokens", "Tokens loaded from peers.", "load_peer_tokens"),
    ("hicache_peer_backup_tokens", "Tokens written to peers.", "peer_backup_tokens"),
    (
        "hicache_slabs_withdrawn",
        "Borrowed slabs that lenders recalled, that were lost, or whose lender does not answer.",
        "slabs_withdrawn",
    ),
    ("hicache_slabs_lent", "Slabs of the device lent to peers.", "slabs_lent"),
    ("hicache_slabs_asked_back", "Lent slabs of the device recalled from peers.", "slabs_asked_back"),
    ("num_retracted_requests", "Requests taken out of the batch for lack of memory.", "retracted_reqs"),
    ("num_preempted_requests", "Requests that gave way to a higher priority.", "preempted_reqs"),
)
# The remote tier's proxy, by stage or buffer of its pipeline: metric, help, label, part -> name in its state, unit.
_PROXY = (
    ("remote_stage_bytes", "Bytes that a stage produced.", "stage", {s: f"{s}_bytes" for s in STAGES}, 1.0),
    ("remote_stage_seconds", "Seconds of a stage's threads at work.", "stage", {s: f"{s}_us" for s in STAGES}, 1e-6),
    ("remote_stage_queue", "Pieces that wait for a stage.", "stage", {s: f"{s}_queue" for s in STAGES[1:]}, 1.0),
    ("remote_buffer_slots", "Slots of a buffer.", "buffer", {b: f"{b}_slots" for b in BUFFERS}, 1.0),
    ("remote_buffer_slots_used", "Slots that hold a piece.", "buffer", {b: f"{b}_slots_used" for b in BUFFERS}, 1.0),
)
# mode, name among the state's counters: tokens by how the scheduler handled them
_REALTIME = (
    ("prefill_compute", ("prefill_tokens",)),
    ("prefill_cache", tuple(f"hit_tokens_{tier}" for tier in ("device", "peer", "host", "disk", "remote"))),
    ("decode", ("decode_tokens",)),
)


def _at(state: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = state
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return float(value) if isinstance(value, int | float) else None


def _free_tokens(state: Mapping[str, Any], tier: str) -> float | None:
    pages, page_size = _at(state, ("tiers", tier, "free_pages")), _at(state, ("page_size",))
    return None if pages is None or page_size is None else pages * page_size


class MetricsCollector:
    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        self._state: Mapping[str, Any] = {}
        self._prompt_total = 0
        self._cached_total = 0
        # Since the last point of the history: time to first token, between tokens, in the queue.
        self.recent = {name: LatencySketch() for name in ("ttft", "itl", "queue")}
        self._cached_tokens = Counter(
            "sglang:cached_tokens",
            "Prompt tokens found in the cache, by tier.",
            [*self._labels, "cache_source"],
            registry=self._registry,
        )
        self._cached_tokens.labels(**self._labels, cache_source="device")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        self._reused_ids = self._counter(
            "tokenizer_reused_tokens", "Prompt tokens whose ids came from an earlier request."
        )
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._requests = self._counter("num_requests", "Requests processed.")
        self._aborted = self._counter("num_aborted_requests", "Requests that were aborted.")
        self._first_token = self._histogram("time_to_first_token_seconds", "Time to the first token.", _SECONDS)
        self._inter_token = self._histogram("inter_token_latency_seconds", "Time between tokens.", _TOKEN_SECONDS)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token of an answer.", _TOKEN_SECONDS
        )
        self._queue_time = self._histogram(
            "queue_time_seconds", "Time in the queue, from arrival to the first launch.", _SECONDS
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Time of a whole request.", _SECONDS)
        self._prompt_lengths = self._histogram("prompt_tokens_histogram", "Tokens of a prompt.", _TOKENS)
        self._uncached_lengths = self._histogram(
            "uncached_prompt_tokens_histogram", "Tokens of a prompt that were not in the cache.", _TOKENS
        )
        self._answer_lengths = self._histogram("generation_tokens_histogram", "Tokens of a whole answer.", _TOKENS)
        self.http = HttpMetrics(self._registry, self._labels)
        self._registry.register(self)  # type: ignore[arg-type]  # any object with `collect` is a collector

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(f"sglang:{name}", help, list(self._labels), registry=self._registry).labels(**self._labels)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(f"sglang:{name}", help, list(self._labels), buckets=buckets, registry=self._registry)
        return metric.labels(**self._labels)

    def first_token(self, seconds: float, prompt_tokens: int, cached_tokens: Mapping[str, int]) -> None:
        self._first_token.observe(seconds)
        self.recent["ttft"].add(seconds)
        self._prompt_tokens.inc(prompt_tokens)
        self._prompt_total += prompt_tokens
        self._prompt_lengths.observe(prompt_tokens)
        self._uncached_lengths.observe(prompt_tokens - sum(cached_tokens.values()))
        for tier, tokens in cached_tokens.items():
            self._cached_tokens.labels(**self._labels, cache_source=tier).inc(tokens)
            self._cached_total += tokens

    def queued(self, seconds: float) -> None:
        self._queue_time.observe(seconds)
        self.recent["queue"].add(seconds)

    @property
    def cache_hit_rate(self) -> float:
        """Part of all prompt tokens that were found in the cache; 0 before the first."""
        return self._cached_total / self._prompt_total if self._prompt_total else 0.0

    def prompt_tokens_reused(self, count: int) -> None:
        self._reused_ids.inc(count)

    def tokens(self, count: int, num_gaps: int, seconds: float) -> None:
        """num_gaps: how many of the tokens follow one whose time is known. seconds: all these gaps together."""
        self._generation_tokens.inc(count)
        if num_gaps > 0:
            self.recent["itl"].add(seconds / num_gaps, num_gaps)
            for _ in range(num_gaps):
                self._inter_token.observe(seconds / num_gaps)

    def finished(self, seconds: float, completion_tokens: int, decode_seconds: float) -> None:
        """seconds: of the whole request. decode_seconds: from its first token to its last."""
        self._requests.inc()
        if completion_tokens > 1:
            self._per_token.observe(decode_seconds / (completion_tokens - 1))
        self._e2e.observe(seconds)
        self._answer_lengths.observe(completion_tokens)

    def aborted(self) -> None:
        self._requests.inc()
        self._aborted.inc()

    def set_scheduler_state(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """Not those without samples: sglang-router joins servers' metrics only if their labels agree, and takes such
        a metric for one without labels."""
        return (metric for metric in self._metrics() if metric.samples)

    def _metrics(self) -> Iterator[Metric]:
        names, values = list(self._labels), list(self._labels.values())

        def gauge(name: str, help: str, value: float) -> Metric:
            metric = GaugeMetricFamily(f"sglang:{name}", help, labels=names)
            metric.add_metric(values, value)
            return metric

        tiers = self._state.get("tiers", {})
        state = {**self._state, "storage_tier": tiers.get("disk") or tiers.get("remote") or {}}
        for name, help, path in _GAUGES:
            if (value := _at(state, path)) is not None:
                yield gauge(name, help, value)
        used = _at(self._state, ("tiers", "device", "used_tokens"))
        total = _at(self._state, ("tiers", "device", "total_tokens"))
        if used is not None and total:
            for name in ("token_usage", "full_token_usage"):  # upstream's second one counts only the KV cache
                yield gauge(name, "Part of the device's KV cache in use.", used / total)
        if (free := _free_tokens(self._state, "device")) is not None:
            yield gauge("kv_available_tokens", "Tokens of KV cache that are free.", free)
        host_total, host_free = _at(self._state, ("tiers", "host", "total_tokens")), _free_tokens(self._state, "host")
        if host_total is not None and host_free is not None:  # on the host, all used tokens are cached
            yield gauge("hicache_host_used_tokens", "Tokens of KV cache on the host in use.", host_total - host_free)
        if self._prompt_total:
            help = "Part of all prompt tokens that were found in the cache."
            yield gauge("cache_hit_rate", help, self.cache_hit_rate)
        for name, help, label, parts, unit in _PROXY:
            # Gauges, even where they only grow, because they begin anew with each proxy.
            found = {part: _at(self._state, ("tiers", "remote", key)) for part, key in parts.items()}
            if all(value is not None for value in found.values()):
                family = GaugeMetricFamily(f"sglang:hicache_{name}", help, labels=[*names, label])
                for part, value in found.items():
                    family.add_metric([*values, part], unit * (value or 0))
                yield family
        yield from self._links(self._state.get("links") or {})
        yield self._reasons(self._state.get("lost_hits") or {})
        yield self._switches(self._state.get("switches") or {})
        if canary := self._state.get("canary"):
            yield from self._canary(canary)
        yield from self._peer_slabs(self._state.get("peers") or {})
        if "counters" in self._state:
            for name, help, key in _COUNTERS:
                counter = CounterMetricFamily(f"sglang:{name}", help, labels=names)
                counter.add_metric(values, _at(self._state, ("counters", key)) or 0)
                yield counter
            stall = CounterMetricFamily(
                "sglang:hicache_stall_seconds", "Seconds that launches waited for loads.", labels=names
            )
            stall.add_metric(values, _at(self._state, ("stall_seconds",)) or 0)
            yield stall
            realtime = CounterMetricFamily("sglang:realtime_tokens", "Tokens processed.", labels=[*names, "mode"])
            for mode, keys in _REALTIME:
                realtime.add_metric([*values, mode], sum(_at(self._state, ("counters", key)) or 0 for key in keys))
            yield realtime

    def _reasons(self, lost_hits: Mapping[str, int]) -> Metric:
        help = "Prompt tokens that were computed, by the reason why they were not found in the cache."
        family = CounterMetricFamily("sglang:hicache_computed_tokens", help, labels=[*self._labels, "reason"])
        for reason, num_tokens in lost_hits.items():
            family.add_metric([*self._labels.values(), reason], num_tokens)
        return family

    def _links(self, links: Mapping[str, Mapping[str, int]]) -> Iterator[Metric]:
        names, values = [*self._labels, "link"], list(self._labels.values())
        help = "Bytes that a link between tiers has moved, of rank 0."
        moved = CounterMetricFamily("sglang:hicache_link_bytes", help, labels=names)
        help = "1 while nothing more is copied from the device by a link, because it hangs or fails, see the log."
        alone = GaugeMetricFamily("sglang:hicache_link_left_alone", help, labels=names)
        for link, numbers in links.items():
            moved.add_metric([*values, link], numbers["bytes_done"])
            if "left_alone" in numbers:
                alone.add_metric([*values, link], numbers["left_alone"])
        yield moved
        yield alone

    def _canary(self, canary: Mapping[str, Any]) -> Iterator[Metric]:
        tokens = CounterMetricFamily(
            "sglang:hicache_canary_tokens",
            "Cached tokens that were computed again, by whether their KV was equal.",
            labels=[*self._labels, "result"],
        )
        for result in ("equal", "different"):
            tokens.add_metric([*self._labels.values(), result], canary[f"{result}_tokens"])
        yield tokens
        differences = CounterMetricFamily(
            "sglang:hicache_canary_differences",
            "Comparisons that found other KV than the model computes, by the tier that it came from.",
            labels=[*self._labels, "tier"],
        )
        for tier, count in canary["differences"].items():
            differences.add_metric([*self._labels.values(), tier], count)
        yield differences

    def _switches(self, switches: Mapping[str, Mapping[str, bool]]) -> Metric:
        family = GaugeMetricFamily(
            "sglang:hicache_tier_on",
            "0 while an administrator has turned a tier's reads or writes off.",
            labels=[*self._labels, "tier", "what"],
        )
        for tier, whats in switches.items():
            for what, is_on in whats.items():
                family.add_metric([*self._labels.values(), tier, what], is_on)
        return family

    def _peer_slabs(self, peers: Mapping[str, Any]) -> Iterator[Metric]:
        names, values = list(self._labels), list(self._labels.values())
        if "slabs" in peers:
            own = GaugeMetricFamily("sglang:hicache_peer_slabs", "Slabs of this worker.", labels=[*names, "state"])
            for state, count in peers["slabs"].items():
                own.add_metric([*values, state], count)
            yield own
            for key, help in (
                ("bytes", "Bytes that this worker copied for masters."),
                ("refused", "Copies for masters that this worker refused."),
            ):
                copies = CounterMetricFamily(f"sglang:hicache_peer_copies_{key}", help, labels=names)
                copies.add_metric(values, peers["copies"][key])
                yield copies
        if "lenders" in peers:
            labels = [*names, "lender"]
            here = GaugeMetricFamily(
                "sglang:hicache_peer_connected", "1 if the worker is connected, else 0.", labels=labels
            )
            borrowed = GaugeMetricFamily(
                "sglang:hicache_peer_borrowed_slabs", "Slabs that a worker has lent.", labels=[*labels, "state"]
            )
            alone = GaugeMetricFamily(
                "sglang:hicache_peer_left_alone",
                "1 while a worker is not asked for copies because it does not answer, else 0.",
                labels=labels,
            )
            times = CounterMetricFamily(
                "sglang:hicache_peer_times_left_alone",
                "How often a worker did not answer, and was left alone.",
                labels=labels,
            )
            for lender in peers["lenders"]:
                here.add_metric([*values, lender["endpoint"]], lender["connected"])
                alone.add_metric([*values, lender["endpoint"]], lender["left_alone"])
                times.add_metric([*values, lender["endpoint"]], lender["times_left_alone"])
                for state, count in lender["slabs"].items():
                    borrowed.add_metric([*values, lender["endpoint"], state], count)
            yield from (here, borrowed, alone, times)

    def render(self) -> bytes:
        return generate_latest(self._registry)
