"""Prefill apart from decode on a virtual clock: what can be worked out by hand, leases that end, what is lost."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from scripted_server import save_model
from virtual_clusters import OF, REPORT, costs, given

from engine.config import EngineArgs, EngineConfig, make_args
from engine.core.wire import AddRequest
from engine.resolve import resolve_here
from engine.step import RowParams
from entrypoints.bench.cli import main
from entrypoints.bench.cluster.apart import TwoHops, apart_args, prefill_apart
from entrypoints.bench.cluster.clock import Clock
from entrypoints.bench.cluster.costs import StepCosts, read_costs
from entrypoints.bench.cluster.layouts import Layout, layout
from entrypoints.bench.cluster.outcome import Outcome, Ranked, ranked_alike
from entrypoints.bench.cluster.simulate import Cluster
from entrypoints.bench.cluster.stages import Stages
from entrypoints.bench.cluster.traffic import Arrival
from entrypoints.bench.cluster.transfers import Link, Transfers
from entrypoints.bench.cluster.virtual_core import VirtualCore

LINK = Link(latency_s=0.002, bytes_per_s=2 * REPORT.block_bytes / 0.003)
"""5 ms for two blocks"""


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> EngineArgs:
    model = save_model(tmp_path_factory.mktemp("apart") / "tiny")
    return make_args(str(model), {"device": "cpu", "max_num_batched_tokens": 256, "swap_space": "8MiB"})


@pytest.fixture(scope="module")
def configs(args: EngineArgs) -> tuple[EngineConfig, EngineConfig]:
    prefill, decode = (resolve_here(each)[1] for each in apart_args(args))
    return prefill, decode


def run(
    configs: tuple[EngineConfig, EngineConfig], requests: list[Arrival], of: str = "1P+1D", **link: float
) -> Outcome:
    made = prefill_apart(*configs, costs(), layout(of), msgspec.structs.replace(LINK, **link))
    return made.run(requests)


def one(prompt: int, output: int = 8) -> list[Arrival]:
    message = AddRequest(
        request_id="alone",
        prompt_token_ids=[*range(prompt)],
        params=RowParams(seed=0, temperature=0.0),
        max_tokens=output,
    )
    return [Arrival(0.0, message)]


def test_layouts_are_read_and_written() -> None:
    for text, found in (("4x2", Layout(4, 2)), ("3x1", Layout(3)), ("1P+2D", Layout(2, prefill=1))):
        assert layout(text) == found and str(found) == text
    assert layout("3") == Layout(3)
    assert [layout(text).devices for text in ("4x2", "1P+2D")] == [8, 3]
    assert str(layout("1P+2D").times(3)) == "3P+6D"
    assert Layout(2, 2, ranks=2).times(3).devices == 24
    for text in ("0x1", "2x", "1P", "1P+0D", "P+D", "2x2P+1D", ""):
        with pytest.raises(ValueError, match="is no layout, as 4x2"):
            layout(text)


def test_one_request_passes_both_servers(configs: tuple[EngineConfig, EngineConfig]) -> None:
    """40 tokens at one, two blocks of 16 over the link, and the last 8 at the other."""
    seen = run(configs, one(40))
    assert seen.ttft_p50 == pytest.approx(0.01 + 0.04 + 0.005 + 0.01 + 0.008)
    assert seen.tpot_p50 == pytest.approx(0.011)
    assert seen.load_max_over_mean == pytest.approx((40 + 1) / ((40 + 1 + 8 + 8) / 2))


def test_a_prompt_of_no_whole_block_is_computed_twice(configs: tuple[EngineConfig, EngineConfig]) -> None:
    assert run(configs, one(16)).ttft_p50 == pytest.approx(2 * (0.01 + 0.016))


def test_pages_that_come_too_late_are_computed(configs: tuple[EngineConfig, EngineConfig]) -> None:
    prefill, decode = configs
    limits = msgspec.structs.replace(decode.limits, kv_lease_s=0.05)
    late = msgspec.structs.replace(decode, limits=limits)
    requests = given(prefill, rate=300.0, seconds=0.1)
    slow = msgspec.structs.replace(LINK, latency_s=0.5)
    made = prefill_apart(prefill, late, costs(), layout("1P+1D"), slow)
    seen = made.run(requests)
    assert seen.requests == len(requests) > 8
    assert seen.load_max_over_mean < run(configs, requests).load_max_over_mean  # of both, and not of one


def test_a_link_that_is_too_slow_fails_at_the_limit(configs: tuple[EngineConfig, EngineConfig]) -> None:
    limits = msgspec.structs.replace(configs[1].limits, kv_fetch_s=2.0)
    late = configs[0], msgspec.structs.replace(configs[1], limits=limits)
    seen = run(late, one(40), bytes_per_s=1.0)
    assert 2.0 < seen.ttft_p50 < 2.2  # asked, given up, and computed


def _parts(configs: tuple[EngineConfig, EngineConfig]) -> tuple[Clock, list[VirtualCore]]:
    clock = Clock()
    transfers = Transfers(clock, LINK, configs[1].limits, REPORT.block_bytes)
    return clock, [VirtualCore(each, costs(), Stages(), clock, transfers.connect) for each in configs]


def test_every_lease_ends(configs: tuple[EngineConfig, EngineConfig]) -> None:
    clock, cores = _parts(configs)
    requests = given(configs[0], rate=30.0, seconds=3.0)
    Cluster(clock, TwoHops(cores[:1], cores[1:])).run(requests)
    prefill, decode = (core.stats for core in cores)
    assert (decode.kv_fetches, decode.kv_fetch_failures) == (len(requests), 0)
    assert (prefill.kv_leases_expired, prefill.kv_leases_gave_way, decode.kv_blocks_used) == (0, 0, 0)
    assert prefill.kv_leases == 0


def test_a_lost_prefill_server_is_done_without(configs: tuple[EngineConfig, EngineConfig]) -> None:
    requests = given(configs[0], rate=10.0, seconds=6.0)
    whole = run(configs, requests)
    made = prefill_apart(*configs, costs(), layout("1P+1D"), LINK)
    less = made.run(requests, lose_at_s=3.0)
    assert less.requests == whole.requests
    assert less.tpot_p90 > whole.tpot_p90


def test_prompts_hold_up_nobody_who_decodes(configs: tuple[EngineConfig, EngineConfig]) -> None:
    requests = given(configs[0], rate=6.0, seconds=5.0, input_len=120, output_len=30)
    two = [run(configs, requests, "2P+1D") for _ in range(2)]
    one_each = run(configs, requests)
    assert one_each.tpot_p90 < 0.02 and two[0].ttft_p90 < one_each.ttft_p90
    assert two[0] == two[1]


def outcome(ttft_p90: float, spread: float | None = 0.1) -> Outcome:
    names = [name for name in Outcome.__struct_fields__ if name not in ("ttft_p90", "spread")]
    spreads = {} if spread is None else {"ttft_p90": spread}
    return Outcome(ttft_p90=ttft_p90, spread=spreads, **dict.fromkeys(names, 0.0))


def test_pairs_that_are_ranked_alike() -> None:
    simulated, real = ([outcome(seconds) for seconds in each] for each in ((1.0, 2.0, 3.0), (1.0, 3.0, 2.0)))
    assert ranked_alike(simulated, real, "ttft_p90") == Ranked(alike=2, pairs=3, alike_apart=2, apart=3)


def test_what_real_runs_do_not_tell_apart_is_not_counted_as_ranked() -> None:
    simulated = [outcome(seconds) for seconds in (1.0, 2.0, 3.0)]
    real = [outcome(1.0, 0.2), outcome(3.0, 0.8), outcome(2.5, 0.6)]  # the last two differ by less than they vary
    found = ranked_alike(simulated, real, "ttft_p90")
    assert found == Ranked(alike=2, pairs=3, alike_apart=2, apart=2)
    assert str(found) == "2 of 3, 2 of the 2 that real runs tell apart"
    once = [outcome(seconds, None) for seconds in (1.0, 3.0, 2.0)]
    assert ranked_alike(simulated, once, "ttft_p90") == Ranked(alike=2, pairs=3, alike_apart=0, apart=0)


def test_layouts_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from entrypoints.bench.cluster.plot import draw

    told = [("simulated", Layout(2)), ("simulated", Layout(1, prefill=1)), ("real", Layout(2))]
    draw([(*each, outcome(0.4)) for each in told], {"ttft_p90": 0.5, "tpot_p90": None}, tmp_path / "layouts.svg")
    assert (tmp_path / "layouts.svg").read_text().count("<svg") == 1


SETTINGS = ["--device", "cpu", "--max-num-batched-tokens", "256", "--threads", "1", "--compile", "none"]
SETTINGS += ["--load-format", "dummy", "--swap-space", "8MiB", "--kv-cache-memory", "8MiB"]
TRAFFIC = ["--rate", "20", "--seconds", "2", "--seeds", "1", "--input-len", "40", "--output-len", "8"]
OVER = ["--transfer-ms", "2", "--transfer-mb-per-s", "1000"]


def _command(args: EngineArgs, folder: Path, *more: str) -> list[str]:
    (folder / "costs.json").write_bytes(msgspec.json.encode(costs()))
    return ["cluster", args.model, "--costs", str(folder / "costs.json"), *TRAFFIC, *SETTINGS, *more]


def test_layouts_of_all_kinds_on_the_command_line(
    args: EngineArgs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_command(args, tmp_path, "--layouts", "2x1,1P+1D", *OVER)) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [(each["layout"], each["prefill"], each["replicas"]) for each in results] == [("2x1", 0, 2), ("1P+1D", 1, 1)]
    search = ["--layouts", "1x1,1P+1D", *OVER, "--rate", "40", "--seconds", "1", "--ttft", "0.5", "--tpot", "0.04"]
    assert main(_command(args, tmp_path, *search)) == 0
    out = capsys.readouterr().out
    assert "fewest devices: " in out and "P+" in out


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["--layouts", "1P+1D"], "need --transfer-ms and --transfer-mb-per-s (of"),
        (["--layouts", "1P+1D", *OVER, "--cell", "2"], "leave layouts as 1P"),
        (["--layouts", "2x1", "--kv-events-config", "{}"], "--kv-events-config has no effect here"),
        (["--layouts", "2x1", *OVER], "--transfer-ms has no effect without layouts as 1P"),
        (["--layouts", "1P"], "'1P' is no layout"),
        (["--layouts", "1P+1D", *OVER[2:], "--transfer-ms", "0"], "'0' is not a positive number"),
        (["--layouts", "1P+1D", *OVER, "--replicas", "2"], "--replicas has no effect with --layouts"),
        (["--layouts", "1P+1D", *OVER, "-pp", "2"], "--pipeline-parallel-size has no effect with --layouts"),
        (["--layouts", "2x1,1P+1D", *OVER, "--router", "turns"], "--router has no effect on layouts as 1P+1D"),
        (["-dp", "2"], "--data-parallel-size has no effect here: --replicas"),
        (["--kv-transfer-config", "{}"], "--kv-transfer-config has no effect here"),
        (["--head-tokens", "8"], "--head-tokens has no effect without --heads"),
        (["--replicas", "2", "--ttft", "1", "--tpot", "1"], "--replicas has no effect with --ttft and --tpot"),
        (["--ttft", "1"], "--ttft and --tpot go together"),
        (["--ttft", "0", "--tpot", "0"], "'0' is not a positive number"),
        (["--replicas", "65"], "at most 64 replicas, got 65; more with --cell"),
        (["--replicas", "two"], "'two' is not a number from 1 on"),
        (["--replicas", "2", "--lose-at", "2"], "--lose-at (2) is not within the --seconds (2) of traffic"),
        (["--lose-at", "1"], "takes one of several servers away, and 1x1 is one"),
        (["--replicas", "4", "--cell", "2", "--lose-at", "1"], "leave --cell and --real out"),
        (["--replicas", "2", "--real", "--lose-at", "1"], "leave --cell and --real out"),
        (["--rate", "inf"], "'inf' is not a positive number"),
        (["--rate", "1e9"], "make 2e+09 requests of 9.6e+10 tokens; at most 200,000 of 100,000,000"),
        (["--seeds", "1000000"], "at most 200,000"),
        (["--seconds", "0"], "'0' is not a positive number"),
    ],
)
def test_what_does_not_go_together_is_refused(
    given: list[str], problem: str, args: EngineArgs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(_command(args, tmp_path, *given))
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("of", "given", "problem"),
    [
        (
            {"model": "other"},
            [],
            "measured of model other, and asked for is model tiny: name the same, or measure a table",
        ),
        ({}, ["--dtype", "float32"], "of dtype bfloat16, kv_cache_dtype bfloat16, and asked for is dtype float32"),
        ({}, ["-tp", "2"], "of tensor_parallel_size 1, and asked for is tensor_parallel_size 2"),
        ({}, ["--threads", "2"], "of threads 1, and asked for is threads 2"),
    ],
)
def test_a_table_of_something_else_is_refused(
    of: dict[str, str],
    given: list[str],
    problem: str,
    args: EngineArgs,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = _command(args, tmp_path, *given)
    table = msgspec.structs.replace(costs(), of=msgspec.structs.replace(OF, **of))
    (tmp_path / "costs.json").write_bytes(msgspec.json.encode(table))
    assert main(command) == 1
    assert problem in capsys.readouterr().err


def test_whoever_asks_after_a_loss_is_told_of_more_than_one(
    args: EngineArgs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_command(args, tmp_path, "--lose-at", "1", "--ttft", "9", "--tpot", "9")) == 0
    assert "fewest devices: 2, as 2x1" in capsys.readouterr().out


def test_step_costs_are_written_where_that_can_be(
    args: EngineArgs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for out, problem in ((tmp_path / "none" / "x.json", "is not a directory"), (tmp_path, "could not be written")):
        with pytest.raises(SystemExit):
            main(["step-costs", args.model, "--out", str(out), *SETTINGS])
        assert problem in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["step-costs", args.model, "--out", str(tmp_path / "x.json"), *SETTINGS, "-pp", "2"])
    assert "--pipeline-parallel-size has no effect here: steps of one replica" in capsys.readouterr().err


def test_step_costs_that_fit_poorly_are_no_table(
    args: EngineArgs, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object, **__: object) -> StepCosts:
        return msgspec.structs.replace(costs(), error=0.2)

    monkeypatch.setattr("entrypoints.bench.cluster.measure.measure", measured)
    file = tmp_path / "costs.json"
    command = ["step-costs", args.model, "--out", str(file), *SETTINGS]
    assert main(command) == 1
    assert "off by 20.0 % in the mean" in capsys.readouterr().err and not file.exists()
    assert main([*command, "--most-error", "0.2"]) == 0
    assert read_costs(file.read_bytes(), "").error == 0.2


@pytest.mark.exhaustive
def test_real_servers_beside_virtual_ones(args: EngineArgs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(_command(args, tmp_path, "--layouts", "1P+1D", *OVER, "--real")) == 0
    simulated, real = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert real["requests"] == simulated["requests"]
    assert real["load_max_over_mean"] == pytest.approx(simulated["load_max_over_mean"], rel=0.01)
