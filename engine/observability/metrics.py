"""What the server shows under /metrics, in Prometheus' form. Every engine has a registry of its own.

All names carry the label ``model_name``.

| name | kind | meaning |
|---|---|---|
| pageloom_num_requests_running | gauge | sequences in the running batch |
| pageloom_num_requests_waiting | gauge | sequences that wait to be scheduled |
| pageloom_kv_cache_usage_ratio | gauge | KV blocks held by sequences, of all (0 to 1) |
| pageloom_kv_blocks_pinned | gauge | KV blocks of pinned prefixes, part of those held |
| pageloom_kv_blocks_cached | gauge | free KV blocks that are still found by what they hold |
| pageloom_host_kv_blocks_used | gauge | blocks of the host tier held by swapped sequences |
| pageloom_host_kv_blocks_cached | gauge | blocks of the host tier that can be found by a prefix |
| pageloom_prefix_cache_queries_total | counter | prompt tokens looked up in the prefix cache |
| pageloom_prefix_cache_hits_total | counter | of those, tokens that were found |
| pageloom_prompt_tokens_total | counter | prompt tokens processed |
| pageloom_generation_tokens_total | counter | tokens generated |
| pageloom_spec_decode_num_drafts_total | counter | steps of sequences that computed drafts |
| pageloom_spec_decode_num_draft_tokens_total | counter | drafts computed |
| pageloom_spec_decode_num_accepted_tokens_total | counter | of those, drafts that were right |
| pageloom_spec_decode_num_accepted_tokens_per_pos_total | counter | the same by ``position`` among a step's drafts |
| pageloom_preemptions_total | counter | sequences preempted |
| pageloom_preemptions_swapped_total | counter | of those, sequences whose blocks went to the host tier |
| pageloom_kv_blocks_swapped_out_total | counter | blocks copied to the host tier: of sequences, and evicted prefixes |
| pageloom_kv_blocks_swapped_in_total | counter | blocks copied back |
| pageloom_engine_steps_total | counter | steps of the core |
| pageloom_compiling | gauge | 1 while steps run eagerly because pieces still compile behind them |
| pageloom_compile_failed | gauge | 1 if they could not be compiled and steps stay eager |
| pageloom_compiles_after_ready_total | counter | compilations after compiled pieces took over; stays 0 |
| pageloom_request_success_total | counter | finished samples by ``finished_reason``: stop, length, abort, error |
| pageloom_time_to_first_token_seconds | histogram | arrival to first token |
| pageloom_time_per_output_token_seconds | histogram | mean time between a request's tokens after the first |
| pageloom_e2e_request_latency_seconds | histogram | arrival to end |
| pageloom_request_prompt_tokens | histogram | prompt length of a finished request |
| pageloom_request_generation_tokens | histogram | tokens that a finished request generated |

Gauges and the core's counters are read from its latest `CoreStats` when somebody scrapes: a step costs nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from engine.core.wire import CoreStats
from engine.observability.timings import RequestTimings

_PREFIX = "pageloom_"
_LABEL = "model_name"
_REASONS = ("stop", "length", "abort", "error")
_FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_PER_TOKEN_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
_LATENCY_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960, 1920)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Distribution(msgspec.Struct, frozen=True):
    """A histogram since the start: `counts[i]` values were at most `bounds[i]` and above the bound before, the last of
    the counts above all bounds. Differences of two are the distribution of what came between."""

    bounds: list[float]
    counts: list[int]
    sum: float


class EngineMetrics:
    """Metrics of one engine. `stats` is replaced at every step, `observe_request` is called once a request."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.stats = CoreStats()
        self._model_name = model_name
        self.registry.register(_CoreCollector(self, model_name))
        self._finished = Counter(
            _PREFIX + "request_success", "Finished samples", [_LABEL, "finished_reason"], registry=self.registry
        )
        for reason in _REASONS:
            self._finished.labels(model_name, reason)  # shown as 0 before the first
        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token", _FIRST_TOKEN_S)
        self._per_token = self._histogram("time_per_output_token_seconds", "Between a request's tokens", _PER_TOKEN_S)
        self._latency = self._histogram("e2e_request_latency_seconds", "Arrival to end", _LATENCY_S)
        self._prompt_tokens = self._histogram("request_prompt_tokens", "Prompt length", _TOKENS)
        self._generated = self._histogram("request_generation_tokens", "Generated tokens", _TOKENS)

    def observe_request(self, timings: RequestTimings) -> None:
        for reason in timings.finish_reasons:
            self._finished.labels(self._model_name, reason).inc()
        if (first := timings.time_to_first_token_s) is not None:
            self._first_token.observe(first)
        if (per_token := timings.time_per_output_token_s) is not None:
            self._per_token.observe(per_token)
        self._latency.observe(timings.end_to_end_s)
        self._prompt_tokens.observe(timings.prompt_tokens)
        self._generated.observe(timings.generated_tokens)

    def render(self) -> bytes:
        """Prometheus' text format, UTF-8."""
        return generate_latest(self.registry)

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
        histogram = Histogram(_PREFIX + name, meaning, [_LABEL], registry=self.registry, buckets=buckets)
        return histogram.labels(self._model_name)


class _CoreCollector(Collector):
    def __init__(self, owner: EngineMetrics, model_name: str) -> None:
        self._owner = owner
        self._labels = [model_name]

    def collect(self) -> Iterable[Metric]:
        stats = self._owner.stats
        usage = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        gauges = (
            ("num_requests_running", "Sequences in the running batch", stats.running),
            ("num_requests_waiting", "Sequences that wait to be scheduled", stats.waiting),
            ("kv_cache_usage_ratio", "KV blocks held by sequences, of all", usage),
            ("kv_blocks_pinned", "KV blocks of pinned prefixes", stats.kv_blocks_pinned),
            ("kv_blocks_cached", "Free KV blocks that are still found", stats.kv_blocks_cached),
            ("host_kv_blocks_used", "Host blocks held by swapped sequences", stats.host_blocks_used),
            ("host_kv_blocks_cached", "Host blocks that can be found", stats.host_blocks_cached),
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
            ("engine_steps", "Steps of the core", stats.steps),
            ("compiles_after_ready", "Compilations after compiled pieces took over", stats.compiles_after_ready),
        )
        for name, meaning, value in gauges:
            gauge = GaugeMetricFamily(_PREFIX + name, meaning, labels=[_LABEL])
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, meaning, value in counters:
            counter = CounterMetricFamily(_PREFIX + name, meaning, labels=[_LABEL])
            counter.add_metric(self._labels, value)
            yield counter
        name, meaning = "spec_decode_num_accepted_tokens_per_pos", "Drafts that were right, by position"
        accepted = CounterMetricFamily(_PREFIX + name, meaning, labels=[_LABEL, "position"])
        for position, value in enumerate(stats.accepted_at):
            accepted.add_metric([*self._labels, str(position)], value)
        yield accepted
