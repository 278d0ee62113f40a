"""The GPU suite without a GPU: the same code runs with fakes, and every part is reported, whatever happens to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu import launch
from gpu.bench_engine import VARIANTS, warmed
from gpu.check_attention import difference
from gpu.check_graphs import not_greedy
from gpu.context import load_test_module
from gpu.device import DryDevice, union_length
from gpu.parts import PARTS, part_named
from gpu.report import empty_document, problems, read_part, table, write
from gpu.targets import TARGETS, judge
from gpu.timing import time_calls, time_replays
from gpu.workloads import MIXED_OUTPUT_TOKENS, MIXED_PROMPT_TOKENS, mixed, uniform

from engine.request import Logprob, RequestOutput

SUITE = Path(__file__).parents[2] / "tools" / "gpu_suite.py"
FAST = ("machine", "ceilings", "input-kernels", "compile-pieces")
THEN = "engine-0.6b-full"


def run_suite(out: Path, *options: str, timeout_s: float = 240.0) -> tuple[subprocess.CompletedProcess[str], Any]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SUITE), str(out), "--dry", "--cache", str(out / "cache"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment, cwd=out)
    return done, json.loads((out / "gpu_suite.json").read_text())


@pytest.mark.timeout(300)
def test_dry_parts_pass_every_part_is_reported_and_a_later_run_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done, before = run_suite(tmp_path, "--only", ",".join(FAST))
    assert problems(before) == [] and done.returncode == 0
    assert before["dry"] and before["finished"]
    for part in PARTS:
        entry = before["parts"][part.name]
        assert entry["status"] == ("passed" if part.name in FAST else "not selected"), entry
    pieces = compiled_pieces(tmp_path)
    assert pieces
    done, document = run_suite(tmp_path, "--only", ",".join((*FAST, THEN)))
    assert problems(document) == [] and done.returncode == 0
    assert [line.split()[2] for line in done.stdout.splitlines() if line.endswith(": passed")] == [f"{THEN}:"]
    assert all(document["parts"][name] == before["parts"][name] for name in FAST)
    figures = document["parts"][THEN]["figures"]
    assert figures["decode_step"][0]["step_ms"] > 0 and figures["throughput"][0]["output_tokens"] > 0
    assert compiled_pieces(tmp_path) == pieces, "what is measured was not what had been compiled for it"
    assert {t["verdict"] for t in document["targets"]} <= {"dry", "not measured"}
    assert "dry run" in done.stdout.splitlines()[-1]


def compiled_pieces(out: Path) -> set[str]:
    return {path.parent.name for path in (out / "cache" / "pieces").glob("*/manifest.json")}


@pytest.mark.timeout(120)
def test_parts_that_time_is_too_short_for_are_reported_as_skipped(tmp_path: Path) -> None:
    done, document = run_suite(
        tmp_path, "--only", "machine,models-1,engine-8b-full", "--minutes", "0.05", timeout_s=100
    )
    assert problems(document) == []
    for name in ("machine", "models-1", "engine-8b-full"):
        assert document["parts"][name]["status"] == "skipped"
        assert document["parts"][name]["reason"] == "no time"
    assert done.returncode == 0


def test_every_engine_part_has_its_pieces_compiled_before_it() -> None:
    names = [part.name for part in PARTS]
    for name, variant in VARIANTS.items():
        assert names.index("compile-pieces") < names.index(name)
        assert any(
            (one.shape, one.graphs == "none") == (variant.shape, variant.graphs == "none") for one in warmed()
        ), name


FAKE_PART = """
import json, pathlib, sys, time
out, name = pathlib.Path(sys.argv[1]), sys.argv[3]
with (out / "asked").open("a") as asked:
    asked.write(name + "\\n")
with (out / "parts" / f"{name}.jsonl").open("a") as lines:
    lines.write(json.dumps({"check": "a", "problem": None}) + "\\n")
    lines.flush()
    doing = json.loads((out / "doing.json").read_text()).get(name, "passes")
    if doing == "hangs":
        time.sleep(600)
    if doing == "crashes":
        sys.exit(3)
    lines.write(json.dumps({"end": "passed", "reason": ""}) + "\\n")
"""


class FakeSuite:
    """Three quick parts, run by a script that does as it is told."""

    def __init__(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out = out
        (out / "part.py").write_text(FAKE_PART)
        parts = [replace(part_named(name), need_s=0.0, limit_s=60.0) for name in ("machine", "models-1", "sampler")]
        monkeypatch.setattr(launch, "chosen", lambda only: parts)

    def run(self, doing: dict[str, str], minutes: float = 5.0, sources: str = "one") -> tuple[list[str], Any]:
        """The parts that were started, and the document."""
        (self.out / "doing.json").write_text(json.dumps(doing))
        (self.out / "asked").write_text("")
        settings = launch.Settings(self.out / "part.py", self.out, self.out, False, None, minutes, sources)
        with suppress(SystemExit):
            launch.Suite(settings).run()
        return (self.out / "asked").read_text().split(), json.loads((self.out / "gpu_suite.json").read_text())


@pytest.fixture
def fake_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSuite:
    return FakeSuite(tmp_path, monkeypatch)


def statuses(document: Any) -> list[str]:
    return [document["parts"][name]["status"] for name in ("machine", "models-1", "sampler")]


def test_a_suite_that_is_cut_off_keeps_what_it_has_and_the_next_goes_on(
    fake_suite: FakeSuite, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        path = fake_suite.out / "parts" / "models-1.jsonl"
        if path.is_file() and path.read_text():
            raise SystemExit  # as SIGTERM does

    monkeypatch.setattr(launch, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    asked, document = fake_suite.run({"models-1": "hangs"})
    assert asked == ["machine", "models-1"] and statuses(document) == ["passed", "cut off", "not run yet"]
    assert document["parts"]["models-1"]["checks"]["passed"] == 1 and not document["finished"]
    assert problems(document) == []
    monkeypatch.setattr(launch, "time", time)
    asked, document = fake_suite.run({})
    assert asked == ["models-1", "sampler"] and statuses(document) == ["passed"] * 3
    assert document["finished"] and document["runs"] == 2
    assert fake_suite.run({})[0] == []


def test_a_suite_whose_time_is_over_ends_its_parts_and_the_next_goes_on(fake_suite: FakeSuite) -> None:
    asked, document = fake_suite.run({"models-1": "hangs"}, minutes=(launch.REPORT_S + 3) / 60)
    assert asked[:2] == ["machine", "models-1"] and statuses(document)[:2] == ["passed", "cut off"]
    assert "left" in table(document).splitlines()[-1]
    assert statuses(fake_suite.run({})[1]) == ["passed"] * 3


def test_a_part_that_crashes_has_a_second_chance_and_no_third(fake_suite: FakeSuite) -> None:
    for again in (["machine", "models-1", "sampler"], ["models-1"], []):
        asked, document = fake_suite.run({"models-1": "crashes"})
        assert asked == again and statuses(document) == ["passed", "crashed", "passed"]


def test_what_another_tree_has_found_is_not_gone_on_with(fake_suite: FakeSuite) -> None:
    fake_suite.run({})
    asked, document = fake_suite.run({}, sources="another")
    assert len(asked) == 3 and document["runs"] == 1
    assert (fake_suite.out / "gpu_suite.before.json").is_file()


def test_an_unknown_part_is_named_before_anything_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SUITE), str(tmp_path), "--only", "machine,nonsense"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "nonsense" in done.stderr
    assert not (tmp_path / "gpu_suite.json").exists()


def test_the_mixed_workload_has_the_totals_that_it_is_known_by() -> None:
    workload = mixed(256)
    assert (workload.prompt_tokens, workload.output_tokens) == (MIXED_PROMPT_TOKENS, MIXED_OUTPUT_TOKENS)
    lengths = [*map(len, workload.prompts), *workload.output_lens]
    assert min(lengths) >= 100 and max(lengths) <= 1024
    assert uniform(3, 5, 7).output_tokens == 21 and uniform(3, 5, 7).prompt_tokens == 15


def finished_part(tmp_path: Path, lines: list[dict[str, Any]], code: int | None, cut: str = "") -> dict[str, Any]:
    path, log = tmp_path / "part.jsonl", tmp_path / "part.log"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + cut)
    log.write_text("Segmentation fault")
    return read_part(PARTS[0], path, code, log, 12.0)


FOUND = [{"figure": "decode", "value": {"us": 3}}, {"check": "a", "problem": None}]


def test_what_a_part_found_survives_its_crash_its_hang_and_a_line_cut_short(tmp_path: Path) -> None:
    crashed = finished_part(tmp_path, FOUND, -11, cut='{"figure": "dec')
    hung = finished_part(tmp_path, FOUND, None)
    for entry, status in ((crashed, "crashed"), (hung, "timeout")):
        assert entry["status"] == status
        assert entry["figures"] == {"decode": [{"us": 3}]}
        assert entry["checks"] == {"passed": 1, "failed": 0}
    assert "Segmentation fault" in crashed["reason"]


def test_a_failed_check_fails_its_part(tmp_path: Path) -> None:
    lines = [*FOUND, {"check": "b", "problem": "differs"}, {"end": "passed", "reason": ""}]
    entry = finished_part(tmp_path, lines, 0)
    assert entry["status"] == "failed"
    assert entry["failures"] == [{"name": "b", "problem": "differs"}]


def document_with(figures: dict[str, list[dict[str, Any]]], **statuses: str) -> dict[str, Any]:
    document = empty_document(False, 9, "now") | {"finished": True, "seconds": 500.0}
    for name, entry in document["parts"].items():
        entry["status"] = statuses.get(name.replace("-", "_"), "passed")
        entry["reason"] = "a reason"
    document["parts"]["machine"]["figures"] = figures
    return document


def step(batch: int, graphs: str, **values: float) -> dict[str, Any]:
    return {"shape": "qwen3-8b", "backend": "cuda", "graphs": graphs, "batch": batch, **values}


GOOD: dict[str, list[dict[str, Any]]] = {
    "decode": [
        {"backend": "cuda", "batch": 32, "context": 2048, "copy_share": 0.8},
        {"backend": "cuda", "batch": 1, "context": 2048, "copy_share": 0.1},
        {"backend": "flashinfer", "batch": 32, "context": 2048, "copy_share": 0.2},
    ],
    "decode_step": [
        step(1, "both", step_ms=4.0, over_weights_floor=1.1),
        step(1, "piecewise", step_ms=4.2, over_weights_floor=1.2),
        step(256, "both", step_ms=9.0, over_weights_floor=3.0, exposed_host_share=0.01),
    ],
}


def verdicts(document: dict[str, Any]) -> dict[str, tuple[float | None, str]]:
    return {t["name"]: (t["measured"], t["verdict"]) for t in judge(document)}


def test_targets_are_judged_by_the_rows_they_are_about() -> None:
    judged = verdicts(document_with(GOOD))
    assert judged["decode kernel, batch >= 32, context >= 2k: worst"] == (0.8, "pass")
    assert judged["8B decode step, batch 1, full graphs"] == (1.1, "pass")
    assert judged["8B decode step, batch 1, piecewise"] == (1.05, "pass")
    assert judged["exposed host time, batch 256, 8B"] == (0.01, "pass")
    assert judged["exposed host time, batch 256, 0.6B"] == (None, "not measured")
    assert judged["correctness parts that failed"] == (0, "pass")
    worse = {**GOOD, "decode": [*GOOD["decode"], GOOD["decode"][0] | {"batch": 256, "copy_share": 0.7}]}
    assert verdicts(document_with(worse))["decode kernel, batch >= 32, context >= 2k: worst"] == (0.7, "fail")
    assert len(judged) == len(TARGETS)


def test_correctness_is_not_green_while_a_part_of_it_is_unknown() -> None:
    name = "correctness parts that failed"
    assert verdicts(document_with({}, models_1="skipped"))[name] == (None, "not measured")
    assert verdicts(document_with({}, attention_cuda="unavailable"))[name] == (None, "not measured")
    assert verdicts(document_with({}, attention_flashinfer="unavailable"))[name] == (0, "pass")
    assert verdicts(document_with({}, models_1="timeout"))[name] == (1, "fail")


def test_the_report_is_whole_and_its_table_names_every_selected_part(tmp_path: Path) -> None:
    document = document_with(GOOD, sampler="not selected")
    write(document, tmp_path / "suite.json")
    again = json.loads((tmp_path / "suite.json").read_text())
    assert problems(again) == []
    shown = table(again)
    assert all((part.name in shown) == (part.name != "sampler") for part in PARTS)
    del again["parts"]["models-1"]
    again["parts"]["machine"]["status"] = "fine"
    assert problems(again) == ["part machine has status 'fine'", "part models-1 is not reported"]


def test_a_token_that_is_not_greedy_is_excused_only_at_a_tie() -> None:
    best = {4: -0.1, 5: -0.70, 6: -0.71, 7: -3.0}

    def scored(*tokens: int) -> list[RequestOutput]:
        """Behind a prompt of two tokens."""
        at = [{t: Logprob(best[t]) for t in (5, token)} for token in tokens]
        ids = [4, 4, *tokens]
        return [
            RequestOutput(
                request_id="0",
                prompt=None,
                prompt_token_ids=ids,
                outputs=[],
                finished=True,
                prompt_logprobs=[None, {4: Logprob(-9.0), 5: Logprob(-0.7)}, *at],
            )
        ]

    assert not_greedy(scored(5, 5), [[4, 4]]) == (None, 0)
    assert not_greedy(scored(5, 6), [[4, 4]]) == (None, 1)
    assert "token 1: 7 is 2.300 nats behind" in str(not_greedy(scored(5, 7), [[4, 4]])[0])


def test_a_wrong_attention_output_is_seen() -> None:
    want = torch.randn(40, 4, 64, dtype=torch.float64)
    right = want.bfloat16()
    assert difference(right, want, torch.bfloat16)[0] is None
    one_off, poisoned, scaled = right.clone(), right.clone(), (want * 1.02).bfloat16()
    one_off[3, 1, 5] += 0.5
    poisoned[0, 0, 0] = float("nan")
    assert "beyond tolerance" in str(difference(one_off, want, torch.bfloat16)[0])
    assert "not finite" in str(difference(poisoned, want, torch.bfloat16)[0])
    assert "relative norm error" in str(difference(scaled, want, torch.bfloat16)[0])


def test_overlapping_kernels_count_once() -> None:
    assert union_length([(0, 4), (1, 2), (3, 6), (8, 9)]) == 7
    assert union_length([]) == 0


def test_timing_calls_every_copy_equally_often() -> None:
    calls = [0, 0, 0]

    def call(i: int) -> None:
        calls[i] += 1

    with load_test_module("pretend_gpu", "pretend_gpu").pretend_torch():
        assert time_replays(DryDevice(), call, 3).median_us > 0
        assert len(set(calls)) == 1 and calls[0] >= 2
        assert time_calls(DryDevice(), call, 3).median_us > 0
        assert len(set(calls)) == 1
