"""What the metrics count, on a real engine: sums that must hold, whatever the steps were."""

from __future__ import annotations

import math

import pytest
from exposition import Page
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.config import CacheConfig
from engine.core.wire import CoreReady, CoreStats
from engine.observability.histograms import PER_TOKEN_S, WeightedHistogram, up_to
from engine.observability.metrics import EngineMetrics
from engine.observability.timings import RequestTimings
from engine.replicas.together import counters_of, stats_of_all
from engine.request import RequestMetrics


@pytest.fixture(scope="module")
def page(busy_page: str) -> Page:
    return Page(busy_page)


def test_tokens_of_steps_requests_and_the_core_agree(page: Page) -> None:
    generated = page.total("pageloom_generation_tokens_total")
    assert generated == page.total("pageloom_request_generation_tokens_sum") == 5 * 24
    assert page.total("pageloom_request_longest_generation_tokens_sum") == 3 * 24
    prompts = page.total("pageloom_prompt_tokens_total")
    assert prompts == page.total("pageloom_request_prompt_tokens_sum")
    computed = page.total("pageloom_request_computed_prompt_tokens_sum")
    assert prompts - computed == page.total("pageloom_prefix_cache_hits_total") > 0
    drafts = page.total("pageloom_spec_decode_num_draft_tokens_total")
    accepted = page.total("pageloom_spec_decode_num_accepted_tokens_total")
    assert accepted > 0
    # A sequence's last token is never computed. What was wrong is computed for nothing, and so is what was planned of a
    # sequence when it ended: two steps at most, each of a token and three drafts.
    needed, wrong, beyond = computed + generated - 5, drafts - accepted, 5 * 2 * (1 + 3)
    assert needed <= page.total("pageloom_step_tokens_sum") <= needed + wrong + beyond


def test_every_step_and_every_gap_is_counted_once(page: Page) -> None:
    assert page.total("pageloom_step_seconds_count") == page.total("pageloom_step_tokens_count")
    assert page.total("pageloom_step_seconds_count") == page.total("pageloom_engine_steps_total") > 0
    assert page.total("pageloom_inter_token_latency_seconds_count") == 5 * 24 - 5


def test_the_parts_of_a_request_add_up(page: Page) -> None:
    phases = {
        name: page.total(f"pageloom_request_{name}_time_seconds_sum")
        for name in ("queue", "prefill", "decode", "inference")
    }
    assert min(phases.values()) >= 0
    assert math.isclose(phases["prefill"] + phases["decode"], phases["inference"], rel_tol=1e-9)
    assert phases["queue"] + phases["prefill"] <= page.total("pageloom_time_to_first_token_seconds_sum")
    whole = page.total("pageloom_time_to_first_token_seconds_sum") + phases["decode"]
    assert math.isclose(whole, page.total("pageloom_e2e_request_latency_seconds_sum"), rel_tol=1e-9)
    for name in phases:
        assert page.total(f"pageloom_request_{name}_time_seconds_count") == 3


def _metrics() -> EngineMetrics:
    ready = CoreReady(
        num_blocks=1,
        block_size=16,
        max_model_len=64,
        attention_backend="cpu",
        ledger="",
        distinct_pieces=0,
        pieces_compiled=0,
        startup_seconds=0,
    )
    cache = CacheConfig(
        block_size=16, dtype="float32", kv_cache_memory=None, memory_fraction=0.5, enable_prefix_caching=True
    )
    return EngineMetrics("m", cache, ready)


def test_what_the_experts_of_each_replica_computed_is_shown_and_their_sum() -> None:
    metrics = _metrics()
    each = {0: CoreStats(expert_tokens=5, experts_moved=1), 2: CoreStats(expert_tokens=7, experts_moved=1)}
    metrics.stats, metrics.stats_of_each = stats_of_all([*each.values()], CoreStats(expert_tokens=1)), lambda: each
    shown = metrics.render().decode()
    assert 'pageloom_expert_tokens_total{model_name="m"} 13.0' in shown
    assert 'pageloom_experts_moved_total{model_name="m"} 2.0' in shown
    for place, tokens in ((0, 5), (2, 7)):
        assert f'pageloom_replica_expert_tokens_total{{engine="{place}",model_name="m"}} {tokens}.0' in shown


def test_of_a_core_that_died_only_what_it_counted_remains() -> None:
    numbers = {name: 1 for name, kind in CoreStats.__annotations__.items() if kind in ("int", "float")}
    held = CoreStats(**numbers, compiling=True, compile_failed=True, asleep=True, accepted_at=[1])
    died, new = _metrics(), _metrics()
    died.stats, new.stats = stats_of_all([CoreStats()], counters_of(held)), CoreStats()
    shown, expected = (
        {family.name: family for family in text_string_to_metric_families(each.render().decode())}
        for each in (died, new)
    )
    for name, family in shown.items():
        if family.type == "gauge" and not name.endswith("_created"):
            assert family.samples == expected[name].samples, name
    for name in ("engine_steps", "kv_leases_expired", "kv_blocks_swapped_in"):
        assert [each.value for each in shown[f"pageloom_{name}"].samples] == [1.0]


def test_a_vector_is_no_answer_of_no_tokens() -> None:
    metrics = _metrics()
    for pooled, tokens in ((True, 0), (False, 3), (True, 0)):
        metrics.observe_request(
            RequestTimings(
                times=RequestMetrics(arrival_time=1.0),
                finished_time=2.0,
                prompt_tokens=5,
                cached_tokens=1,
                sample_tokens=[tokens],
                n=1,
                max_tokens=7,
                finish_reasons=["stop"],
                pooled=pooled,
            )
        )
    shown = Page(metrics.render().decode())
    for prefix in ("pageloom_", "vllm:"):
        for name in ("generation_tokens", "params_max_tokens", "params_n"):
            assert shown.total(f"{prefix}request_{name}_count") == 1, name
        assert shown.total(f"{prefix}request_prompt_tokens_count") == 3
        assert shown.total(f"{prefix}e2e_request_latency_seconds_count") == 3


def test_a_request_without_tokens_has_no_phases() -> None:
    timings = RequestTimings(
        times=RequestMetrics(arrival_time=1.0, queued_time=2.0),
        finished_time=5.0,
        prompt_tokens=3,
        cached_tokens=0,
        sample_tokens=[0],
        n=1,
        max_tokens=4,
        finish_reasons=["abort"],
    )
    assert timings.queue_s is timings.prefill_s is timings.decode_s is timings.inference_s is None
    assert timings.time_to_first_token_s is timings.time_per_output_token_s is None
    assert timings.end_to_end_s == 4.0


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 9))))
def test_a_weighted_histogram_is_prometheus_own(values: list[tuple[float, int]]) -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    one_by_one = Histogram("x", "y", ["model_name"], registry=theirs, buckets=PER_TOKEN_S).labels("m")
    weighted = WeightedHistogram("x", "y", {"model_name": "m"}, PER_TOKEN_S)
    ours.register(weighted)
    for value, times in values:
        weighted.observe(value, times)
        for _ in range(times):
            one_by_one.observe(value)
    expected, found = Page(generate_latest(theirs).decode()), Page(generate_latest(ours).decode())
    assert found.values["x_bucket"] == expected.values["x_bucket"]
    assert found.total("x_count") == expected.total("x_count")
    assert found.total("x_sum") == pytest.approx(expected.total("x_sum"))


@pytest.mark.parametrize(("most", "buckets"), [(1, (1,)), (49, (1, 2, 5, 10, 20)), (50, (1, 2, 5, 10, 20, 50))])
def test_buckets_go_as_far_as_a_context(most: int, buckets: tuple[int, ...]) -> None:
    assert up_to(most) == buckets
