"""What several front ends show is one text: sums of what each has seen, and once what all have from the same cores."""

from __future__ import annotations

import re

from exposition import Page
from prometheus_client.parser import text_string_to_metric_families

from engine.config import CacheConfig
from engine.core.wire import CoreReady, CoreStats, StepTaken
from engine.observability.added_up import added_up
from engine.observability.metrics import EngineMetrics
from engine.observability.timings import RequestTimings
from engine.request import RequestMetrics


def front_end(stats: CoreStats, requests: int, steps: int) -> EngineMetrics:
    ready = CoreReady(
        num_blocks=64,
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
    metrics = EngineMetrics("m", cache, ready)
    metrics.stats = stats
    metrics.stats_of_each = lambda: {0: stats, 1: stats}
    for _ in range(requests):
        metrics.observe_request(
            RequestTimings(
                times=RequestMetrics(arrival_time=1.0),
                finished_time=2.0,
                prompt_tokens=5,
                cached_tokens=1,
                sample_tokens=[3],
                n=1,
                max_tokens=7,
                finish_reasons=["stop"],
            )
        )
    for _ in range(steps):
        metrics.observe_step(StepTaken(0.01, 4))
    return metrics


BEFORE = CoreStats(running=2, prompt_tokens=50, generated_tokens=30, steps=12, accepted_at=[3], kv_blocks_total=64)
NOW = CoreStats(running=2, prompt_tokens=50, generated_tokens=33, steps=13, accepted_at=[3, 1], kv_blocks_total=64)


def test_of_one_it_is_what_it_shows() -> None:
    metrics = front_end(NOW, requests=2, steps=13)
    alone, whole = Page(added_up([metrics.render()], metrics.of_cores()).decode()), Page(metrics.render().decode())
    assert alone.values == whole.values
    kinds = [
        {family.name: (family.type, family.documentation) for family in text_string_to_metric_families(text.decode())}
        for text in (metrics.render(), added_up([metrics.render()], metrics.of_cores()))
    ]
    assert kinds[0] == kinds[1]


def test_requests_and_steps_are_added_up_and_cores_are_counted_once() -> None:
    each = [front_end(BEFORE, requests=2, steps=13), front_end(NOW, requests=5, steps=0)]
    shown = Page(added_up([metrics.render() for metrics in each], each[0].of_cores()).decode())
    for prefix in ("pageloom_", "vllm:"):
        assert shown.total(f"{prefix}request_success_total") == 7
        assert shown.total(f"{prefix}request_prompt_tokens_sum") == 35
        assert shown.total(f"{prefix}e2e_request_latency_seconds_count") == 7
        assert shown.total(f"{prefix}prompt_tokens_total") == 50
        assert shown.total(f"{prefix}generation_tokens_total") == 33
    assert [value for _, value in shown.values["pageloom_num_requests_running"]] == [2]
    assert shown.total("pageloom_step_seconds_count") == shown.total("pageloom_engine_steps_total") == 13
    assert shown.total("pageloom_cache_config_info") == 1
    assert [value for _, value in shown.values["pageloom_replica_num_requests_running"]] == [2, 2]
    positions = shown.values["pageloom_spec_decode_num_accepted_tokens_per_pos_total"]
    assert [(labels["position"], value) for labels, value in positions] == [("0", 3), ("1", 1)]
    created = [float(at) for text in each for at in re.findall(rb"(?m)^pageloom_\w+_created{.*} (.*)$", text.render())]
    assert {value for name in shown.values if name.endswith("_created") for _, value in shown.values[name]} <= {
        *created
    }


def test_what_one_alone_shows_is_shown() -> None:
    texts = [b'# TYPE a counter\na_total{key="x"} 1.0\n', b'# TYPE a counter\na_total{key="y"} 2.0\n']
    shown = Page(added_up(texts, set()).decode())
    assert [({**labels}, value) for labels, value in shown.values["a_total"]] == [({"key": "x"}, 1), ({"key": "y"}, 2)]
