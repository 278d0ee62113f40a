"""The same figures under the names that vLLM gives them, for the boards, gateways and scalers that ask for those.

Nothing is counted twice: when somebody scrapes, what the engine's own collectors show is shown once more, renamed, with
vLLM's label ``engine`` ("0", and of a replica its number). Histograms have all of vLLM's buckets
(`engine.observability.histograms`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

PREFIX = "vllm:"
REPLICA = "replica_"
"""before the name of a family that shows each replica, in whose place vLLM has no sum"""
VLLMS_NAMES: dict[str, tuple[str, ...]] = {
    "num_requests_running": ("num_requests_running",),
    "num_requests_waiting": ("num_requests_waiting",),
    "kv_cache_usage_ratio": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "cache_config_info": ("cache_config_info",),
    "prefix_cache_queries": ("prefix_cache_queries", "gpu_prefix_cache_queries"),
    "prefix_cache_hits": ("prefix_cache_hits", "gpu_prefix_cache_hits"),
    "prompt_tokens": ("prompt_tokens",),
    "generation_tokens": ("generation_tokens",),
    "preemptions": ("num_preemptions",),
    "spec_decode_num_drafts": ("spec_decode_num_drafts",),
    "spec_decode_num_draft_tokens": ("spec_decode_num_draft_tokens",),
    "spec_decode_num_accepted_tokens": ("spec_decode_num_accepted_tokens",),
    "spec_decode_num_accepted_tokens_per_pos": ("spec_decode_num_accepted_tokens_per_pos",),
    "kv_fetch_failures": ("nixl_num_failed_transfers",),
    "kv_leases_expired": ("nixl_num_kv_expired_reqs",),
    "step_tokens": ("iteration_tokens_total",),
    "request_success": ("request_success",),
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "time_per_output_token_seconds": ("request_time_per_output_token_seconds",),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
    "request_queue_time_seconds": ("request_queue_time_seconds",),
    "request_prefill_time_seconds": ("request_prefill_time_seconds",),
    "request_decode_time_seconds": ("request_decode_time_seconds",),
    "request_inference_time_seconds": ("request_inference_time_seconds",),
    "request_prompt_tokens": ("request_prompt_tokens",),
    "request_computed_prompt_tokens": ("request_prefill_kv_computed_tokens",),
    "request_generation_tokens": ("request_generation_tokens",),
    "request_longest_generation_tokens": ("request_max_num_generation_tokens",),
    "request_params_n": ("request_params_n",),
    "request_params_max_tokens": ("request_params_max_tokens",),
}
"""of a family, without prefix and, of counters, without ``_total``; several where vLLM has renamed it"""


class VllmMetrics(Collector):
    """What `collectors` show whose names begin with `prefix`, as far as vLLM has it."""

    def __init__(self, collectors: Sequence[Collector], prefix: str) -> None:
        self._collectors, self._prefix = collectors, prefix

    def collect(self) -> Iterable[Metric]:
        shown = [family for collector in self._collectors for family in collector.collect()]
        families = {family.name.removeprefix(self._prefix): family for family in shown}
        for ours, theirs in VLLMS_NAMES.items():
            if family := families.get(REPLICA + ours, families.get(ours)):
                yield from (_renamed(family, PREFIX + name) for name in theirs)


def _renamed(family: Metric, name: str) -> Metric:
    renamed = Metric(name, family.documentation, family.type)
    renamed.samples = [
        Sample(name + sample.name.removeprefix(family.name), {"engine": "0", **sample.labels}, sample.value)
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]
    return renamed
