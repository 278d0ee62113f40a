"""The rounds of `compare_peers` on engines that compute nothing: turns, pauses, failures, medians, ratios, verdicts."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from peers import catalogue, plot, ratios, report
from peers.catalogue import START, Engine, Mode
from peers.process import EngineFailedError, Running, Worker
from peers.rounds import Limits, Measurement, Rounds

from entrypoints.bench.workloads import workload

FAKE = Path(__file__).with_name("fake_worker.py")
LIMITS = Limits(start_s=20, measure_s=20, quiet_wait_s=0)
pytestmark = pytest.mark.timeout(120)


def engine(
    folder: Path, name: str, *values: float, workloads: tuple[str, ...] = ("W2",), ours: bool = False, **behaviour: Any
) -> Engine:
    settings = {"name": name, "log": str(folder / "log"), "alive": str(folder / f"alive.{name}"), "values": values}
    command = [sys.executable, str(FAKE), json.dumps(settings | behaviour)]

    def start(mode: Mode, timeout_s: float) -> Running:
        return Worker(command, {}, timeout_s)

    return Engine(name, "bf16", ours, workloads, 0, False, start)


def orders(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "log").read_text().splitlines()]


def turns(folder: Path) -> list[tuple[str, str, int]]:
    return [(name, w, int(repeat)) for name, w, repeat, *_ in orders(folder) if w != "WARM" and repeat != "-1"]


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if "fake_worker" in " ".join(p.cmdline())]


def test_engines_take_turns_and_each_is_loaded_once(tmp_path: Path) -> None:
    both = [engine(tmp_path, "a", 1, workloads=("W2", "W4")), engine(tmp_path, "b", 1, workloads=("W2",))]
    rounds = Rounds(both, LIMITS)
    rounds.run(["W2", "W4"], 2)
    assert turns(tmp_path) == [
        ("a", "W2", 0), ("b", "W2", 0), ("a", "W2", 1), ("b", "W2", 1), ("a", "W4", 0), ("a", "W4", 1)
    ]  # fmt: skip
    assert len({(name, pid) for name, *_, pid in orders(tmp_path)}) == 2
    assert [m.repeat for m in rounds.measurements if m.engine == "b"] == [0, 1]
    assert children() == []


def test_long_single_requests_are_warmed_up_once_and_the_warm_up_does_not_count(tmp_path: Path) -> None:
    rounds = Rounds([engine(tmp_path, "a", 5, workloads=("W1",))], LIMITS)
    rounds.run(["W1"], 2)
    told = [(w, int(r)) for _, w, r, *_ in orders(tmp_path)]
    assert told == [("W1", -1), ("WARM", -1), ("W1", 0), ("WARM", -1), ("W1", 1)]
    assert [m.figures["wall_s"] for m in rounds.measurements] == [5, 5]


def test_who_has_no_turn_does_not_run(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []

    class Watched(Rounds):
        def _rest(self, member: Any) -> None:
            super()._rest(member)
            time.sleep(0.05)
            before = (tmp_path / f"alive.{member.name}").read_text()
            time.sleep(0.2)
            seen.append((before, (tmp_path / f"alive.{member.name}").read_text()))
            [process] = [p for p in children() if f'"name": "{member.name}"' in p.cmdline()[-1]]
            assert process.status() == psutil.STATUS_STOPPED

    rounds = Watched([engine(tmp_path, "a", 1), engine(tmp_path, "b", 1)], LIMITS)
    rounds.run(["W2"], 2)
    assert len(seen) == 4
    assert all(before == after for before, after in seen)
    assert len(rounds.measurements) == 4  # and went on after every pause


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("dies", "status 11"),
        ("hangs", "no answer within 1 s"),
        ("babbles", "something else than a JSON object"),
        ("refuses", "too long"),
        ("ends early", "1 ended early"),
    ],
)
def test_a_failing_engine_is_reported_and_the_others_go_on(tmp_path: Path, does: str, reason: str) -> None:
    bad = engine(tmp_path, "bad", 1, workloads=("W2", "W4"), does={"W2": does})
    good = engine(tmp_path, "good", 1, workloads=("W2",))
    rounds = Rounds([bad, good], Limits(start_s=20, measure_s=1, quiet_wait_s=0))
    rounds.run(["W2", "W4"], 3)
    assert [m.engine for m in rounds.measurements] == ["good"] * 3
    assert [f.engine for f in rounds.failures] == ["bad", "bad"]  # then it is left out, of W4 too
    assert reason in rounds.failures[0].reason
    assert children() == []


def test_an_engine_that_failed_once_is_started_again(tmp_path: Path) -> None:
    rounds = Rounds([engine(tmp_path, "a", 1, workloads=("W2", "W4"), does={"W2": "dies"})], LIMITS)
    rounds.run(["W2", "W4"], 1)
    assert [m.workload for m in rounds.measurements] == ["W4"]
    assert len({pid for *_, pid in orders(tmp_path)}) == 2


def test_an_engine_that_cannot_start_says_what_it_printed(tmp_path: Path) -> None:
    rounds = Rounds([engine(tmp_path, "a", 1, dies_at_start=True)], LIMITS)
    rounds.run(["W2"], 1)
    assert "status 3" in rounds.failures[0].reason
    assert "no such model" in rounds.failures[0].reason


def test_an_engine_that_hangs_while_loading_is_ended(tmp_path: Path) -> None:
    rounds = Rounds([engine(tmp_path, "a", 1, hangs_at_start=True)], Limits(start_s=1, quiet_wait_s=0))
    rounds.run(["W2"], 1)
    assert "no answer within 1 s" in rounds.failures[0].reason
    assert children() == []


def test_nothing_begins_after_the_budget(tmp_path: Path) -> None:
    rounds = Rounds([engine(tmp_path, "a", 1)], Limits(budget_s=0.0, quiet_wait_s=0))
    rounds.run(["W2"], 3)
    assert rounds.measurements == []
    assert [f.reason for f in rounds.failures] == ["not measured: the run's time was spent"]


def test_short_memory_ends_the_one_unused_for_longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = -1

    monkeypatch.setattr("peers.rounds.psutil.virtual_memory", Memory)
    rounds = Rounds([engine(tmp_path, "a", 1), engine(tmp_path, "b", 1)], LIMITS)
    rounds.run(["W2"], 2)
    assert len(rounds.measurements) == 4
    assert [len(m.startups_s) for m in rounds.members] == [2, 2]


def test_start_is_measured_with_a_fresh_process_each_time(tmp_path: Path) -> None:
    rounds = Rounds([engine(tmp_path, "a", 1, workloads=("W2", START))], LIMITS)
    rounds.run(["W2", START], 2)
    starts = [m.figures["startup_s"] for m in rounds.measurements if m.workload == START]
    assert len(starts) == 2
    assert all(0 < s < 20 for s in starts)
    assert len(rounds.members[0].startups_s) == 3


def test_a_worker_reports_memory_of_its_whole_tree(tmp_path: Path) -> None:
    worker = engine(tmp_path, "a", 1).start("offline", 20)
    try:
        assert worker.peak_memory_bytes() > 5 << 20
    finally:
        worker.stop()
    assert worker.peak_memory_bytes() > 5 << 20
    worker.stop()


def test_asking_a_stopped_worker_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    worker = engine(tmp_path, "a", 1).start("offline", 20)
    worker.stop()
    with pytest.raises(EngineFailedError):
        worker.measure("W2", 0, 5)


def measured(
    engine: str, values: list[float], name: str = "W2", figure: str = "output_tokens_per_s"
) -> list[Measurement]:
    return [Measurement(name, engine, i, {figure: value}, 0.0, 0.0) for i, value in enumerate(values)]


def test_ratios_are_of_medians_and_their_range_is_of_pairs() -> None:
    rows = ratios.ratios(
        measured("ours", [10, 30, 20]) + measured("openvino", [10, 10, 100]),
        {"ours": "bf16", "openvino": "bf16"},
        {"ours"},
    )
    [row] = rows
    assert (row.ratio, row.low, row.high) == (2.0, 0.2, 3.0)
    assert (row.target, row.met) == (1.35, True)


@pytest.mark.parametrize(("ours", "met"), [(7.4, True), (7.5, True), (7.6, False)])
def test_less_is_better_for_times(ours: float, met: bool) -> None:
    found = measured("ours", [ours], "W1", "tpot_mean_ms") + measured("llamacpp", [10.0], "W1", "tpot_mean_ms")
    [row] = ratios.ratios(found, {"ours": "bf16", "llamacpp": "bf16"}, {"ours"})
    assert (row.target, row.met) == (0.75, met)


def test_a_target_holds_for_its_kind_of_weights_only() -> None:
    found = [m for name in ("b", "i", "openvino") for m in measured(name, [10.0])]
    rows = ratios.ratios(found, {"b": "bf16", "i": "int8", "openvino": "bf16"}, {"b", "i"})
    assert {row.ours: row.target for row in rows} == {"b": 1.35, "i": 2.1}


def test_every_target_names_what_is_measured() -> None:
    for target in ratios.TARGETS:
        assert target.figure in dict(ratios.FIGURES[target.workload])
        assert target.peer is None or target.workload in catalogue.PEERS[target.peer].workloads
    yardsticks = {(t.peer, t.workload) for t in ratios.TARGETS if t.peer}
    for name in ("llamacpp", "llamacpp-q4_1", "openvino", "vllm"):
        assert {(name, w) for w in catalogue.PEERS[name].workloads} == {y for y in yardsticks if y[0] == name}


def test_the_document_becomes_tables_with_ours_marked_and_failures_told(tmp_path: Path) -> None:
    mine = engine(tmp_path, "ours", 14, ours=True)
    bad = engine(tmp_path, "vllm", 1, does={"W2": "dies"})
    rounds = Rounds([mine, engine(tmp_path, "openvino", 10), bad], LIMITS)
    rounds.run(["W2"], 3)
    document = json.loads(json.dumps(report.document(rounds, "a run", 3)))
    page = report.markdown(document)
    assert "| **14.0**" in page
    assert "| W2 | output tokens/s | ours | openvino | **1.40** | 1.40 to 1.40 | 1.35 | met |" in page
    assert "Not measured: vllm, W2 #0" in page
    assert "exited with status 11" in page
    plain = report.text(document)
    assert "|" not in plain
    assert plot.advantages(document)[0][1:] == ("ours", 1.4, 1.35)
    assert document["machine"]["cores"] >= 1
    assert [e["peak_memory_mib"] > 0 for e in document["engines"]][:2] == [True, True]


def test_times_become_advantages_the_other_way_round() -> None:
    row = {"workload": "W4", "figure": "wall_s", "ours": "o", "peer": "vllm", "ratio": 0.5, "target": 0.65}
    [(_, _, times, wanted)] = plot.advantages({"ratios": [row]})
    assert (times, round(wanted or 0, 3)) == (2.0, 1.538)


def test_peers_and_their_workloads_are_read_from_words() -> None:
    read = catalogue.parse_peers(["llamacpp,vllm", "openvino:w2,W5"])
    assert read == {"llamacpp": None, "vllm": None, "openvino": ("W2", "W5")}
    with pytest.raises(ValueError, match="unknown peer 'ollama'"):
        catalogue.parse_peers(["ollama"])
    with pytest.raises(ValueError, match="unknown workload 'W9'"):
        catalogue.parse_peers(["vllm:W9"])


def test_a_peer_that_is_not_set_up_is_named_with_what_sets_it_up(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"vllm: .* is missing; tools/peers/setup\.sh"):
        catalogue.peer_engine("vllm", tmp_path, 2, None)
    with pytest.raises(ValueError, match="needs --peers-dir"):
        catalogue.peer_engine("vllm", None, 2, None)


@pytest.mark.parametrize(("name", "dtype"), [("vllm", "bfloat16"), ("vllm-float32", "float32")])
def test_vllm_is_told_its_dtype_in_process_and_as_a_server(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("vllm/bin/python", catalogue.PEERS[name].model):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    commands: list[list[str]] = []
    environments: list[dict[str, str]] = []

    def record(command: list[str], environment: dict[str, str], timeout_s: float) -> None:
        commands.append(command)
        environments.append(environment)

    monkeypatch.setattr(catalogue, "Worker", record)
    monkeypatch.setattr(catalogue, "Server", record)
    peer = catalogue.peer_engine(name, tmp_path, 2, None)
    peer.start("offline", 1.0)
    peer.start("http", 1.0)
    worker, server = commands
    assert json.loads(worker[-1])["dtype"] == dtype
    assert server[server.index("--dtype") + 1] == dtype
    assert [env["VLLM_CPU_OMP_THREADS_BIND"] for env in environments] == ["0-1", "0-1"]


@pytest.mark.parametrize(
    ("quantization", "model", "kind"),
    [
        ("auto", "dir", "bf16"),
        ("auto", "m.Q4_1.gguf", "int4"),
        ("auto", "m.Q8_0.gguf", "int8"),
        ("none", "m.Q4_1.gguf", "bf16"),
        ("int8", "m.Q4_1.gguf", "int8"),
        ("int4", "dir", "int4"),
    ],
)
def test_kind_of_weights_follows_option_and_file(quantization: str, model: str, kind: str) -> None:
    assert catalogue.weights_kind(quantization, model) == kind


def test_our_engine_takes_label_workloads_options_and_model() -> None:
    chosen = catalogue.our_engine("fast:W1,W5=--quantization int8 other.gguf", "given", 2, lambda kind: ("W2",))
    assert (chosen.name, chosen.kind, chosen.workloads, chosen.ours) == ("fast", "int8", ("W1", "W5"), True)
    plain = catalogue.our_engine("--max-num-seqs 8", "given", None, lambda kind: ("W2",) if kind == "bf16" else ())
    assert (plain.name, plain.workloads) == ("pageloom --max-num-seqs 8", ("W2",))


def test_the_worker_protocol_survives_libraries_that_print(tmp_path: Path) -> None:
    adapter = tmp_path / "peers" / "adapter_loud.py"
    adapter.parent.mkdir()
    adapter.write_text(
        "import os\nfrom entrypoints.bench.metrics import Record\n"
        "class Loud:\n    versions = {'loud': '1'}\n    facts = {}\n"
        "    def run(self, requests):\n        print('noise')\n        os.write(1, b'more noise\\n')\n"
        "        records = [Record(0.0, 1.0, 3.0, 1, r.max_tokens, r.max_tokens) for r in requests]\n"
        "        return records, 0.0, 3.0\n"
        "def load(settings):\n    return Loud()\n"
    )
    tools = Path(catalogue.__file__).parents[1]
    code = (
        f"import sys; sys.path += [{str(tools.parent)!r}, {str(tools)!r}]\n"
        f"import peers; peers.__path__.append({str(adapter.parent)!r})\n"
        "from peers.worker import serve; serve('loud', {})"
    )
    worker = Worker([sys.executable, "-c", code], {"PYTHONPATH": ""}, 30)
    try:
        figures = worker.measure("W1", 0, 20)
    finally:
        worker.stop()
    assert figures["output_tokens"] == 128
    assert figures["tpot_mean_ms"] == pytest.approx(2e3 / 127)


DIGESTS = {
    "W1": "99f679320ce17da8",
    "W2": "23ac2b1ea9511f12",
    "W3": "41735b53161a250a",
    "W4": "3e4514fc782c1e76",
    "W5": "e0cd9941c87c8e16",
    "W6": "837d2c2a6cfba782",
    "W7": "0163a5a84bef5363",
    "WARM": "1e92c986bd8d0603",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_workloads_are_those_that_the_published_figures_were_taken_with(name: str) -> None:
    requests = [(r.prompt_token_ids, r.max_tokens, round(r.arrival_s, 6)) for r in workload(name, 0)]
    assert hashlib.sha256(json.dumps(requests).encode()).hexdigest()[:16] == DIGESTS[name]


def test_no_process_outlives_an_interrupted_run(tmp_path: Path) -> None:
    class Interrupted(Rounds):
        def _turn(self, member: Any, workload: str, repeat: int) -> None:
            if repeat == 1:
                raise KeyboardInterrupt
            super()._turn(member, workload, repeat)

    with pytest.raises(KeyboardInterrupt):
        Interrupted([engine(tmp_path, "a", 1), engine(tmp_path, "b", 1)], LIMITS).run(["W2"], 2)
    assert children() == []
    assert not any(os.path.exists(f"/proc/{pid}") for *_, pid in orders(tmp_path))
