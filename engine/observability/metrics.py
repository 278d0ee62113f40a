"""What the server shows under /metrics, in Prometheus' form (docs/metrics.md). Every engine has a registry of its own.

Gauges and the core's counters are read from its latest `CoreStats` when somebody scrapes: a step costs one or two
observations here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from engine.config import CacheConfig
from engine.core.wire import CoreReady, CoreStats, StepTaken
from engine.observability.histograms import (
    FIRST_TOKEN_S,
    LATENCY_S,
    PER_TOKEN_S,
    PHASE_S,
    SAMPLES,
    STEP_TOKENS,
    WeightedHistogram,
    up_to,
)
from engine.observability.timings import RequestTimings
from engine.observability.vllm_metrics import REPLICA, VllmMetrics

_PREFIX = "pageloom_"
_LABEL = "model_name"
_REASONS = ("stop", "length", "abort", "error", "refused")


class Distribution(msgspec.Struct, frozen=True):
    """A histogram since the start: `counts[i]` values were at most `bounds[i]` and above the bound before, the last of
    the counts above all bounds. Differences of two are the distribution of what came between."""

    bounds: list[float]
    counts: list[int]
    sum: float


class EngineMetrics:
    """Metrics of one engine. `stats` is replaced at every step. Written and rendered in one thread."""

    def __init__(self, model_name: str, cache: CacheConfig, ready: CoreReady) -> None:
        self.registry = CollectorRegistry()
        self.stats = CoreStats(compiling=ready.compiling)
        self.stats_of_each: Callable[[], Mapping[int, CoreStats]] = dict
        """by the places of replicas; of none where there is one core"""
        self._model_name = model_name
        self._collectors: list[Collector] = []
        self._of_cores: list[Collector] = [_CoreCollector(self, model_name), _CacheInfo(model_name, cache, ready)]
        for collector in self._of_cores:
            self._add(collector)
        self._finished = Counter(
            _PREFIX + "request_success", "Finished samples", [_LABEL, "finished_reason"], registry=None
        )
        self._add(self._finished)
        for reason in _REASONS:
            self._finished.labels(model_name, reason)  # shown as 0 before the first
        tokens = up_to(ready.max_model_len)
        seconds, whole = self._seconds, self._histogram
        self._first_token = seconds("time_to_first_token", "Arrival to first token", FIRST_TOKEN_S)
        self._gap = self._weighted("inter_token_latency_seconds", "Between a sequence's tokens", PER_TOKEN_S)
        self._per_token = seconds("time_per_output_token", "Mean time between a request's tokens", PER_TOKEN_S)
        self._latency = seconds("e2e_request_latency", "Arrival to end", LATENCY_S)
        self._queue = seconds("request_queue_time", "Handed to the core to begun", PHASE_S)
        self._prefill = seconds("request_prefill_time", "Begun to first token", PHASE_S)
        self._decode = seconds("request_decode_time", "First token to end", LATENCY_S)
        self._inference = seconds("request_inference_time", "Begun to end", LATENCY_S)
        self._prompt = whole("request_prompt_tokens", "Prompt length", tokens)
        self._computed = whole("request_computed_prompt_tokens", "Prompt tokens that no cache had", tokens)
        self._generated = whole("request_generation_tokens", "Generated tokens", tokens)
        self._longest = whole("request_longest_generation_tokens", "Generated tokens of the longest sample", tokens)
        self._n = whole("request_params_n", "Samples asked for", SAMPLES)
        self._max_tokens = whole("request_params_max_tokens", "Tokens that a sample may have", tokens)
        self._step = self._weighted("step_seconds", "Steps of the core", PER_TOKEN_S)
        self._step_tokens = self._weighted("step_tokens", "Tokens computed in a step", STEP_TOKENS)
        self.registry.register(VllmMetrics(self._collectors, _PREFIX))

    def observe_request(self, timings: RequestTimings) -> None:
        """Once for each. What was made into a vector is none of those that generate."""
        for reason in timings.finish_reasons:
            self._finished.labels(self._model_name, reason).inc()
        of_all = (
            (self._latency, timings.end_to_end_s),
            (self._queue, timings.queue_s),
            (self._inference, timings.inference_s),
            (self._prompt, timings.prompt_tokens),
            (self._computed, timings.prompt_tokens - timings.cached_tokens),
        )
        generating = (
            (self._first_token, timings.time_to_first_token_s),
            (self._per_token, timings.time_per_output_token_s),
            (self._prefill, timings.prefill_s),
            (self._decode, timings.decode_s),
            (self._generated, timings.generated_tokens),
            (self._longest, max(timings.sample_tokens)),
            (self._n, timings.n),
            (self._max_tokens, timings.max_tokens),
        )
        for histogram, value in of_all if timings.pooled else (*of_all, *generating):
            if value is not None:
                histogram.observe(value)

    def observe_step(self, step: StepTaken) -> None:
        self._step.observe(step.seconds)
        self._step_tokens.observe(step.tokens)

    def observe_gaps(self, gaps: Mapping[tuple[float, int], int], now: float) -> None:
        """`Progress.gaps` of what has come `now`. Tokens that come together share the time since the ones before."""
        for (before, tokens), sequences in gaps.items():
            self._gap.observe((now - before) / tokens, tokens * sequences)

    def render(self) -> bytes:
        """Prometheus' text format, UTF-8."""
        return generate_latest(self.registry)

    def of_cores(self) -> set[str]:
        """Names of the families that all front ends of the same cores show alike."""
        shown = [*self._of_cores, VllmMetrics(self._of_cores, _PREFIX)]
        return {family.name for collector in shown for family in collector.collect()}

    def _add(self, collector: Collector) -> None:
        self._collectors.append(collector)
        self.registry.register(collector)

    def _seconds(self, name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
        return self._histogram(name + "_seconds", meaning, buckets)

    def distribution(self, name: str) -> Distribution:
        """Of the histogram that /metrics shows as `pageloom_<name>`."""
        upto = {float(at.labels["le"]): int(at.value) for at in self._samples(f"{name}_bucket")}
        counts = [here - before for before, here in pairwise([0, *upto.values()])]
        return Distribution([*upto][:-1], counts, sum(at.value for at in self._samples(f"{name}_sum")))

    def ended(self) -> dict[str, int]:
        """Samples by the reason of their end."""
        return {at.labels["finished_reason"]: int(at.value) for at in self._samples("request_success_total")}

    def _samples(self, name: str) -> list[Sample]:
        shown = self.registry.restricted_registry([_PREFIX + name]).collect()
        return [sample for metric in shown for sample in metric.samples]

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(_PREFIX + name, meaning, [_LABEL], registry=None, buckets=buckets)
        self._add(histogram)
        return histogram.labels(self._model_name)

    def _weighted(self, name: str, meaning: str, buckets: tuple[float, ...]) -> WeightedHistogram:
        histogram = WeightedHistogram(_PREFIX + name, meaning, {_LABEL: self._model_name}, buckets)
        self._add(histogram)
        return histogram


class _CacheInfo(Collector):
    """What the KV cache is, as labels with vLLM's names."""

    def __init__(self, model_name: str, cache: CacheConfig, ready: CoreReady) -> None:
        self._labels = {
            _LABEL: model_name,
            "block_size": str(ready.block_size),
            "num_gpu_blocks": str(ready.num_blocks),
            "cache_dtype": cache.dtype,
            "enable_prefix_caching": str(cache.enable_prefix_caching),
            "gpu_memory_utilization": str(cache.memory_fraction),
            "kv_cache_memory_bytes": str(cache.kv_cache_memory),
            "swap_space_bytes": str(cache.swap_space),
        }

    def collect(self) -> Iterable[Metric]:
        info = GaugeMetricFamily(_PREFIX + "cache_config_info", "What the KV cache is: 1", labels=list(self._labels))
        info.add_metric(list(self._labels.values()), 1)
        yield info


class _CoreCollector(Collector):
    def __init__(self, owner: EngineMetrics, model_name: str) -> None:
        self._owner = owner
        self._labels = [model_name]

    def collect(self) -> Iterable[Metric]:
        stats = self._owner.stats
        gauges = (
            *((name, meaning, of(stats)) for name, meaning, of in _OF_EACH),
            ("kv_blocks_pinned", "KV blocks of pinned prefixes", stats.kv_blocks_pinned),
            ("kv_blocks_cached", "Free KV blocks that are still found", stats.kv_blocks_cached),
            ("host_kv_blocks_used", "Host blocks held by swapped sequences", stats.host_blocks_used),
            ("host_kv_blocks_cached", "Host blocks that can be found", stats.host_blocks_cached),
            ("kv_leases", "Prompts that wait for another engine to read them", stats.kv_leases),
            ("replicas", "Cores that serve", stats.replicas),
            ("asleep", "The engine sleeps: its memory is free, and requests wait", int(stats.asleep)),
            ("compiling", "Steps run eagerly while pieces compile behind them", int(stats.compiling)),
            ("compile_failed", "Pieces could not be compiled: steps stay eager", int(stats.compile_failed)),
        )
        counters = (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.prefix_query_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.prefix_hit_tokens),
            ("prompt_tokens", "Prompt tokens processed", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated", stats.generated_tokens),
            ("spec_decode_num_drafts", "Steps of sequences that computed drafts", stats.drafts),
            ("spec_decode_num_draft_tokens", "Drafts computed", stats.drafted_tokens),
            ("spec_decode_num_accepted_tokens", "Drafts that were right", stats.accepted_tokens),
            ("preemptions", "Sequences preempted", stats.preemptions),
            ("preemptions_swapped", "Of those, swapped to host memory", stats.preemptions_swapped),
            ("kv_blocks_swapped_out", "KV blocks copied to host memory", stats.blocks_swapped_out),
            ("kv_blocks_swapped_in", "KV blocks copied from host memory", stats.blocks_swapped_in),
            ("kv_fetches", "Prompts whose pages came from another engine", stats.kv_fetches),
            ("kv_fetch_failures", "Prompts that were computed, for their pages did not come", stats.kv_fetch_failures),
            ("kv_fetched_bytes", "Bytes of pages from other engines", stats.kv_fetched_bytes),
            ("kv_fetch_seconds", "Seconds in which they came", stats.kv_fetch_s),
            ("kv_leases_expired", "Prompts that no other engine read in time", stats.kv_leases_expired),
            ("kv_leases_gave_way", "Prompts for other engines whose blocks were needed", stats.kv_leases_gave_way),
            *((name, meaning, of(stats)) for name, meaning, of in _COUNTED_OF_EACH),
            ("experts_moved", "Experts that came to a replica from another while serving", stats.experts_moved),
            ("engine_steps", "Steps of the core", stats.steps),
            ("core_deaths", "Cores that died while their requests went on", stats.core_deaths),
            ("compiles_after_ready", "Compilations after compiled pieces took over", stats.compiles_after_ready),
        )
        for name, meaning, value in gauges:
            gauge = GaugeMetricFamily(_PREFIX + name, meaning, labels=[_LABEL])
            gauge.add_metric(self._labels, value)
            yield gauge
        yield from self._of_each()
        for name, meaning, value in counters:
            counter = CounterMetricFamily(_PREFIX + name, meaning, labels=[_LABEL])
            counter.add_metric(self._labels, value)
            yield counter
        name, meaning = "spec_decode_num_accepted_tokens_per_pos", "Drafts that were right, by position"
        accepted = CounterMetricFamily(_PREFIX + name, meaning, labels=[_LABEL, "position"])
        for position, value in enumerate(stats.accepted_at):
            accepted.add_metric([*self._labels, str(position)], value)
        yield accepted

    def _of_each(self) -> Iterable[Metric]:
        if stats := self._owner.stats_of_each():
            for name, meaning, of in _OF_EACH:
                gauge = GaugeMetricFamily(_PREFIX + REPLICA + name, meaning, labels=[_LABEL, "engine"])
                for place, each in stats.items():
                    gauge.add_metric([*self._labels, str(place)], of(each))
                yield gauge
            for name, meaning, of in _COUNTED_OF_EACH:
                counter = CounterMetricFamily(_PREFIX + REPLICA + name, meaning, labels=[_LABEL, "engine"])
                for place, each in stats.items():
                    counter.add_metric([*self._labels, str(place)], of(each))
                yield counter


def _usage(stats: CoreStats) -> float:
    return stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0


_OF_EACH: tuple[tuple[str, str, Callable[[CoreStats], float]], ...] = (
    ("num_requests_running", "Sequences in the running batch", lambda stats: stats.running),
    ("num_requests_waiting", "Sequences that wait to be scheduled", lambda stats: stats.waiting),
    ("kv_cache_usage_ratio", "KV blocks held by sequences, of all", _usage),
)
"""of all replicas together, and of each"""
_COUNTED_OF_EACH: tuple[tuple[str, str, Callable[[CoreStats], float]], ...] = (
    ("expert_tokens", "Rows of tokens that a replica's experts computed", lambda stats: stats.expert_tokens),
)
"""the same of what counts since the start"""
