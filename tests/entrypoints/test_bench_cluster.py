"""Clusters on a virtual clock: costs found again, runs that can be worked out by hand, the command line."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from scripted_server import save_model
from virtual_clusters import OF, REPORT, costs, given

from engine.config import EngineConfig, make_args
from engine.errors import ConfigError, EngineError
from engine.models.description import describe
from engine.replicas.router import Router
from engine.resolve import resolve_here
from engine.step import Rows, ScheduledRow
from entrypoints.bench.cli import main
from entrypoints.bench.cluster.costs import StepCosts, StepWork, fit, read_costs
from entrypoints.bench.cluster.layouts import Layout
from entrypoints.bench.cluster.outcome import Outcome, for_all, mean_of
from entrypoints.bench.cluster.routers import TakingTurns
from entrypoints.bench.cluster.search import fewest
from entrypoints.bench.cluster.simulate import replicated
from entrypoints.bench.cluster.stages import Stages, stages_of
from entrypoints.bench.cluster.traffic import Arrival, Traffic, arrivals, check


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("cluster") / "tiny")


@pytest.fixture(scope="module")
def config(model: Path) -> EngineConfig:
    return resolve_here(make_args(str(model), {"device": "cpu", "max_num_batched_tokens": 256}))[1]


def test_what_a_step_has_to_do() -> None:
    rows = Rows.of([ScheduledRow(0, 99, 1, 1), ScheduledRow(1, 9, 1, 1), ScheduledRow(2, 10, 4, 0)])
    assert StepWork.of(rows) == StepWork(tokens=6, sampled=2, decode_context=110, prompt_pairs=50)


def test_costs_are_found_again_from_noisy_steps() -> None:
    draw = np.random.default_rng(1)
    truth = costs(token_s=2e-4, step_s=3e-3, sampled=5e-5, decode_context=1e-7, prompt_pairs=2e-8)
    works = [
        StepWork(int(tokens), int(draw.integers(1, 64)), int(draw.integers(0, 9000)), int(draw.integers(0, 9000)))
        for tokens in np.exp(draw.uniform(0, np.log(900), size=600))
    ]
    seconds = [truth.seconds(work) * draw.uniform(0.97, 1.03) for work in works]
    found = fit(works, seconds, source="", of=OF, budget=1000, report=REPORT)
    assert found.error < 0.03
    for work in works:
        assert found.seconds(work) == pytest.approx(truth.seconds(work), rel=0.05)
    assert msgspec.json.decode(msgspec.json.encode(found), type=StepCosts) == found


def test_no_amount_is_negative_and_few_steps_are_too_few() -> None:
    works = [StepWork(tokens, 1, tokens * 10, 0) for tokens in range(1, 61)]
    found = fit(works, [0.01 + 0.001 / work.tokens for work in works], source="", of=OF, budget=64, report=REPORT)
    assert min(*found.at_knots_s, *found.each_s.values()) >= 0.0
    with pytest.raises(ConfigError, match="at least 50 steps, got 9"):
        fit(works[:9], [1.0] * 9, source="", of=OF, budget=64, report=REPORT)
    with pytest.raises(ConfigError, match=r"holds no step costs \(engine-bench step-costs"):
        read_costs(b"{}", "x.json")


def staged_config(model: Path) -> EngineConfig:
    settings = {"device": "cpu", "max_num_batched_tokens": 256, "pipeline_parallel_size": 2}
    return resolve_here(make_args(str(model), settings))[1]


def test_one_request_takes_its_steps(config: EngineConfig) -> None:
    [arrival] = given(config, rate=1e-9, seconds=0.0, output_len=8)
    seen = replicated(config, costs(), 1, Router(16)).run([arrival])
    assert seen.ttft_p50 == pytest.approx(0.01 + 0.04)
    assert seen.tpot_p50 == pytest.approx(0.01 + 0.001)
    assert seen.seconds == pytest.approx(0.05 + 7 * 0.011)
    assert (seen.requests, seen.hits, seen.load_max_over_mean) == (1, 0.0, 1.0)


def test_stages_compute_side_by_side_what_is_in_different_steps(model: Path, config: EngineConfig) -> None:
    """Two sequences in turn: each step passes two stages of 5.5 ms, and one leaves the last one every 5.5 ms."""
    staged = staged_config(model)
    halves = Stages((0.5, 0.5))
    [alone] = given(config, rate=1e-9, seconds=0.0, output_len=9)
    seen = replicated(staged, costs(), 1, Router(16), halves).run([alone])
    assert (seen.ttft_p50, seen.tpot_p50) == (pytest.approx(0.05), pytest.approx(0.011))
    pair = [alone, Arrival(0.0, msgspec.structs.replace(alone.message, request_id="second"))]
    seen = replicated(staged, costs(), 1, Router(16), halves).run(pair)
    assert seen.tpot_p90 == pytest.approx(0.011, rel=0.1)
    assert replicated(config, costs(), 1, Router(16)).run(pair).tpot_p50 == pytest.approx(0.012, rel=0.05)
    busy = given(config, rate=80.0)
    both, one = (replicated(staged, costs(), 1, Router(16), each).run(busy) for each in (halves, Stages((1.0, 0.0))))
    assert both.tokens_per_s > 1.7 * one.tokens_per_s


def test_a_step_hops_from_stage_to_stage_and_back(model: Path, config: EngineConfig) -> None:
    staged = staged_config(model)
    one = given(config, rate=1e-9, seconds=0.0, output_len=9)
    here, there = (replicated(staged, costs(), 1, Router(16), Stages((0.5, 0.5), hop)).run(one) for hop in (0.0, 0.002))
    assert there.tpot_p50 - here.tpot_p50 == pytest.approx(0.004)


def test_a_stage_holds_its_layers_and_the_last_one_samples(model: Path) -> None:
    spec = describe(str(model)).spec
    stages = stages_of(spec, 2)
    assert sum(stages.shares) == pytest.approx(1.0) and min(stages.shares) > 0.0
    assert stages_of(spec, 1) == stages_of(None, 3) == Stages((1.0,))
    table, work = costs(sampled=0.5), StepWork(1, 1, 0, 0)
    assert stages.seconds(table, work) == pytest.approx([0.011 * stages.shares[0], 0.011 * stages.shares[1] + 0.5])
    assert sum(stages.seconds(table, work)) == pytest.approx(table.seconds(work))
    assert stages.report(REPORT).block_bytes == round(1024 * max(stages.shares))


def test_a_cell_stands_for_all(config: EngineConfig) -> None:
    traffic = Traffic(rate=90.0, input_len=40, output_len=8)

    def run(replicas: int, share: float) -> Outcome:
        requests = arrivals(traffic.of_some(share), 20.0, 0, config.model.vocab_size)
        return for_all(replicated(config, costs(), replicas, Router(16)).run(requests), Layout(12))

    whole, cell = run(12, 1.0), run(4, 1 / 3)
    assert cell.replicas == whole.replicas == 12
    for name in ("tokens_per_s", "requests", "ttft_p50"):
        assert getattr(cell, name) == pytest.approx(getattr(whole, name), rel=0.1)


def test_nothing_depends_on_anything_but_the_seed(config: EngineConfig) -> None:
    runs = [replicated(config, costs(), 3, Router(16)).run(given(config, rate=40.0, seed=seed)) for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]
    together = mean_of(runs)
    assert together.ttft_p50 == pytest.approx(sum(run.ttft_p50 for run in runs) / 3)
    assert together.spread["ttft_p50"] > 0.0


def test_more_replicas_are_faster_and_evenly_loaded(config: EngineConfig) -> None:
    runs = {size: replicated(config, costs(), size, Router(16)).run(given(config, rate=60.0)) for size in (1, 2, 4)}
    assert runs[1].ttft_p90 > 3 * runs[2].ttft_p90 > 3 * runs[4].ttft_p90
    assert runs[4].load_max_over_mean < 1.1


def test_the_router_finds_prefixes_that_taking_turns_does_not(config: EngineConfig) -> None:
    """Each replica's cache holds half of all heads."""
    small = msgspec.structs.replace(config.cache, kv_cache_memory=100 * 1024)
    of_little = msgspec.structs.replace(config, cache=small)
    heads = given(config, rate=15.0, seconds=40.0, input_len=160, heads=16, head_tokens=128)
    routed = replicated(of_little, costs(), 2, Router(16)).run(heads)
    in_turn = replicated(of_little, costs(), 2, TakingTurns(16)).run(heads)
    assert routed.hits > in_turn.hits + 0.1
    assert routed.ttft_p90 < in_turn.ttft_p90
    assert routed.load_max_over_mean < 1.2


def test_a_lost_replicas_requests_are_computed_by_the_others(config: EngineConfig) -> None:
    requests = given(config, rate=40.0, seconds=8.0)
    whole = replicated(config, costs(), 2, Router(16)).run(requests)
    less = replicated(config, costs(), 2, Router(16)).run(requests, lose_at_s=3.0)
    assert less.requests == whole.requests == len(requests)
    assert less.ttft_p90 > whole.ttft_p90


def test_the_fewest_replicas_are_found(config: EngineConfig) -> None:
    sizes: list[int] = []

    def run(size: int):  # type: ignore[no-untyped-def]
        sizes.append(size)
        return replicated(config, costs(), size, Router(16)).run(given(config, rate=100.0, seconds=1.0))

    found = fewest(run, lambda seen: seen.replicas >= 5, 64)
    assert (sizes, [size for size, _ in found]) == ([1, 2, 4, 8, 6, 5], [1, 2, 4, 5])
    with pytest.raises(ConfigError, match=r"not even 2 hold: TTFT p90 [0-9.]+ s, TPOT p90 [0-9.]+ s$"):
        fewest(run, lambda seen: False, 2)

    def refuses(size: int) -> Outcome:
        if size < 3:
            raise EngineError("4096 sequences wait already")
        return run(size)

    assert [size for size, _ in fewest(refuses, lambda seen: True, 64)] == [3]
    with pytest.raises(ConfigError, match="not even 2 hold: 4096 sequences wait"):
        fewest(refuses, lambda seen: True, 2)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"range_ratio": 1.0}, r"range_ratio must be in \[0, 1\)"),
        ({"rate": 0.0}, "rate must be positive"),
        ({"rate": float("nan")}, "rate must be positive"),
        ({"heads": 2, "head_tokens": 40}, "leave the shortest prompt no token of its own"),
        ({"input_len": 5000}, "exceed max_model_len"),
    ],
)
def test_traffic_that_cannot_be_is_refused(changes: dict[str, float], problem: str) -> None:
    traffic = msgspec.convert({"rate": 1.0, "input_len": 40, "output_len": 8, **changes}, Traffic)
    with pytest.raises(ConfigError, match=problem):
        check(traffic, 512)


def test_costs_measured_here_and_a_cluster_of_them(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "costs.json"
    settings = ["--device", "cpu", "--compile", "none", "--threads", "1", "--max-num-batched-tokens", "256"]
    settings += ["--max-num-seqs", "8", "--kv-cache-memory", "8MiB", "--load-format", "dummy"]
    assert main(["step-costs", str(model), "--out", str(file), "--most-error", "9", *settings]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["results"][0]
    assert found["steps"] > 100 and found["knots"][-1] <= 256
    traffic = ["--rate", "200", "--seconds", "2", "--seeds", "2", "--input-len", "32", "--output-len", "8"]
    command = ["cluster", str(model), "--costs", str(file), *traffic, *settings]
    assert main([*command, "--replicas", "1,2"]) == 0
    out = capsys.readouterr().out
    results = json.loads(out.splitlines()[-1])["results"]
    assert [(each["kind"], each["replicas"]) for each in results] == [("simulated", 1.0), ("simulated", 2.0)]
    assert "±" in out and "step costs: model tiny, dtype bfloat16, " in out
    assert main([*command, "--layouts", "2x1,1x2", "--seeds", "1"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [(each["replicas"], each["stages"]) for each in results] == [(2.0, 1.0), (1.0, 2.0)]
    assert main([*command, "--replicas", "1000", "--cell", "2", "--rate", "1000"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [each["replicas"] for each in results] == [1000.0]
    assert main([*command, "--ttft", "10", "--tpot", "10"]) == 0
    assert main([*command, "--max-num-batched-tokens", "512"]) == 1
    assert "exceeds the 256 that the step costs were measured for" in capsys.readouterr().err
