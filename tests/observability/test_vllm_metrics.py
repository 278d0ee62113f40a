"""What is made for vLLM finds what it asks for: names, labels and buckets of its boards, of llm-d and the Gateway API's
endpoint picker, and of scalers (KEDA, prometheus-adapter)."""

from __future__ import annotations

import pytest
from exposition import Page

BOARD = {
    "vllm:e2e_request_latency_seconds_bucket": {"le", "model_name"},
    "vllm:e2e_request_latency_seconds_sum": {"model_name"},
    "vllm:e2e_request_latency_seconds_count": {"model_name"},
    "vllm:prompt_tokens_total": {"model_name"},
    "vllm:generation_tokens_total": {"model_name"},
    "vllm:inter_token_latency_seconds_bucket": {"le", "model_name"},
    "vllm:inter_token_latency_seconds_sum": {"model_name"},
    "vllm:inter_token_latency_seconds_count": {"model_name"},
    "vllm:time_per_output_token_seconds_bucket": {"le", "model_name"},
    "vllm:request_time_per_output_token_seconds_bucket": {"le", "model_name"},
    "vllm:num_requests_running": {"model_name"},
    "vllm:num_requests_waiting": {"model_name"},
    "vllm:time_to_first_token_seconds_bucket": {"le", "model_name"},
    "vllm:time_to_first_token_seconds_sum": {"model_name"},
    "vllm:time_to_first_token_seconds_count": {"model_name"},
    "vllm:kv_cache_usage_perc": {"model_name"},
    "vllm:gpu_cache_usage_perc": {"model_name"},
    "vllm:request_prompt_tokens_bucket": {"le", "model_name"},
    "vllm:request_generation_tokens_bucket": {"le", "model_name"},
    "vllm:request_success_total": {"finished_reason", "model_name"},
    "vllm:request_queue_time_seconds_sum": {"model_name"},
    "vllm:request_prefill_time_seconds_sum": {"model_name"},
    "vllm:request_decode_time_seconds_sum": {"model_name"},
    "vllm:request_inference_time_seconds_sum": {"model_name"},
    "vllm:request_max_num_generation_tokens_sum": {"model_name"},
    "vllm:prefix_cache_queries_total": {"model_name"},
    "vllm:prefix_cache_hits_total": {"model_name"},
    "vllm:num_preemptions_total": {"model_name"},
    "vllm:iteration_tokens_total_bucket": {"le", "model_name"},
    "vllm:request_params_n_sum": {"model_name"},
    "vllm:request_params_max_tokens_sum": {"model_name"},
    "vllm:request_prefill_kv_computed_tokens_sum": {"model_name"},
    "vllm:spec_decode_num_drafts_total": {"model_name"},
    "vllm:spec_decode_num_draft_tokens_total": {"model_name"},
    "vllm:spec_decode_num_accepted_tokens_total": {"model_name"},
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": {"model_name", "position"},
}
"""what vLLM's example boards ask for, by which labels"""
GATEWAY = {
    "vllm:num_requests_waiting": set[str](),
    "vllm:num_requests_running": set[str](),
    "vllm:kv_cache_usage_perc": set[str](),
    "vllm:cache_config_info": {"block_size", "num_gpu_blocks"},
}
BUCKETS = {
    "vllm:time_to_first_token_seconds": "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 "
    "20.0 40.0 80.0 160.0 640.0 2560.0 +Inf",
    "vllm:inter_token_latency_seconds": "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 "
    "40.0 80.0 +Inf",
    "vllm:e2e_request_latency_seconds": "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 "
    "240.0 480.0 960.0 1920.0 7680.0 +Inf",
    "vllm:request_prompt_tokens": "1.0 2.0 5.0 10.0 20.0 50.0 100.0 200.0 +Inf",
    "vllm:iteration_tokens_total": "1.0 8.0 16.0 32.0 64.0 128.0 256.0 512.0 1024.0 2048.0 4096.0 8192.0 16384.0 +Inf",
    "vllm:request_params_n": "1.0 2.0 5.0 10.0 20.0 +Inf",
}
"""vLLM's, as its labels spell them; the context is 256"""
PER_REQUEST = ("e2e_request_latency", "request_queue_time", "request_inference_time", "request_prefill_time")


@pytest.fixture(scope="module")
def page(busy_page: str) -> Page:
    return Page(busy_page)


@pytest.mark.parametrize(("name", "labels"), [*BOARD.items(), *GATEWAY.items()])
def test_what_boards_and_gateways_ask_for_is_there(page: Page, name: str, labels: set[str]) -> None:
    assert labels | {"engine"} <= page.labels[name]


@pytest.mark.parametrize("name", BUCKETS)
def test_histograms_have_all_of_vllms_buckets(page: Page, name: str) -> None:
    limits = {labels["le"] for labels, _ in page.values[name + "_bucket"]}
    assert set(BUCKETS[name].split()) <= limits


def test_counts_are_those_that_vllm_would_tell(page: Page) -> None:
    for name in PER_REQUEST:
        assert page.total(f"vllm:{name}_seconds_count") == 3
    assert page.total("vllm:inter_token_latency_seconds_count") == 5 * (24 - 1)
    assert page.total("vllm:request_success_total") == 5
    assert page.total("vllm:request_params_max_tokens_sum") == 3 * 24
    ((info, one),) = page.values["vllm:cache_config_info"]
    assert one == 1 and info["block_size"] == "16" and int(info["num_gpu_blocks"]) > 0


def test_nothing_is_counted_twice(page: Page) -> None:
    for ours, theirs in (
        ("generation_tokens_total", "generation_tokens_total"),
        ("preemptions_total", "num_preemptions_total"),
    ):
        assert page.total(f"pageloom_{ours}") == page.total(f"vllm:{theirs}")
