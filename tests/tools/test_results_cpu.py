"""The results page holds what the JSON holds, and says what was not measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import results_cpu
from peers import machine, report
from peers.catalogue import Engine, Mode
from peers.process import Running
from peers.rounds import Limits, Measurement, Rounds

PROFILE = {
    "results": [
        {
            "case": "decode, batch 1",
            "per": "step",
            "wall_ms": 10.0,
            "undisturbed_ms": 9.5,
            "floor_ms": 5.0,
            "parts": [{"name": "attention", "calls": 30.0, "ms": 2.5, "floor_ms": None}],
        }
    ]
}
START = {"options": [], "median": {"cold": {"first_token_s": 7.25}}, "starts": {"cold": [{}, {}]}}


def never_started(mode: Mode, timeout_s: float) -> Running:
    raise AssertionError("nothing runs here")


def comparison() -> dict[str, Any]:
    engines = [Engine(n, "bf16", n == "ours", ("W2",), 0, False, never_started) for n in ("ours", "openvino")]
    rounds = Rounds(engines, Limits())
    values = {"ours": 700.0, "openvino": 500.0}
    rounds.measurements = [Measurement("W2", n, 0, {"output_tokens_per_s": v}, 0.5, 0.0) for n, v in values.items()]
    return report.document(rounds, "", 1)


def write(folder: Path, name: str, document: dict[str, Any], before: str = "") -> str:
    (folder / name).write_text(before + json.dumps(document) + "\n")
    return str(folder / name)


def test_every_figure_of_the_page_comes_from_the_files(tmp_path: Path) -> None:
    out = tmp_path / "cpu.md"
    linear = {
        "threads": 2,
        "results": [{"rows": 1, "packed_ms": 5.5}, {"rows": 16, "packed_ms": 14.25, "onednn_ms": 20.0}],
    }
    status = results_cpu.main(
        [
            *("--compare", write(tmp_path, "c.json", comparison()), "--profile", write(tmp_path, "p.json", PROFILE)),
            *("--start", write(tmp_path, "s.txt", START, "a table\n"), "--linear", write(tmp_path, "l.json", linear)),
            *("--out", str(out)),
        ]
    )
    page = out.read_text()
    assert status == 0
    assert "| W2 | output tokens/s | ours | openvino | **1.40**" in page
    assert "† In at least one" in page
    assert "| cold | 2 | 7.25 |" in page
    assert "| attention | 30 | 2.5 | 25.0 % | - |" in page
    assert "| decode, batch 1 | 9.5 | 5 |" in page
    assert "| 1 | 5.5 | - |" in page
    assert "| 16 | 14.2 | 20.0 |" in page
    assert machine.facts()["cpu"] in page
    assert page.count(results_cpu.NOT_MEASURED) == 3
    assert "{{" not in page


def test_the_shipped_template_names_every_section_once() -> None:
    template = results_cpu.TEMPLATE.read_text()
    assert sorted(results_cpu.PLACE.findall(template)) == sorted([*results_cpu.SECTIONS, "compare", "machine"])


def test_an_unknown_place_and_a_broken_file_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="nonsense"):
        results_cpu.page("{{nonsense}}", {}, machine.facts())
    (tmp_path / "x").write_text("no json\n")
    assert results_cpu.main(["--start", str(tmp_path / "x"), "--out", str(tmp_path / "o")]) == 1
    assert "ends with a JSON object" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_any_bench_becomes_tables() -> None:
    text = results_cpu.tables({"threads": 2, "decode": [{"case": "a", "gb_s": 30.25}], "medians": {"x": {"ms": 1.5}}})
    assert "threads 2." in text
    assert "| case | gb s |" in text
    assert "| a | 30.2 |" in text
    assert "| x | 1.5 |" in text
