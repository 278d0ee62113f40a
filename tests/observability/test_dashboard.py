"""The dashboard against /metrics: each of its expressions is PromQL, and asks for series and labels that are there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from exposition import Page

ROOT = Path(__file__).parents[2]
BOARD: dict[str, Any] = json.loads((ROOT / "docs" / "grafana" / "pageloom.json").read_text())
OF_THE_SCRAPER = {"instance", "job"}
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"], target["legendFormat"]) for panel in PANELS for target in panel["targets"]]
NOT_SHOWN = {
    *("pageloom_time_per_output_token_seconds", "pageloom_request_inference_time_seconds"),
    *("pageloom_request_longest_generation_tokens", "pageloom_request_params_n", "pageloom_cache_config_info"),
    *("pageloom_kv_fetches_total", "pageloom_kv_fetch_failures_total", "pageloom_kv_fetched_bytes_total"),
    *("pageloom_kv_fetch_seconds_total", "pageloom_kv_leases", "pageloom_kv_leases_expired_total"),
    *("pageloom_kv_leases_gave_way_total", "pageloom_expert_tokens_total", "pageloom_experts_moved_total"),
}
"""said by others better, or of little use over time; of several replicas and experts that they divide, or of prompts
that are taken over: most servers have neither"""


@pytest.fixture(scope="module")
def page(busy_page: str) -> Page:
    return Page(busy_page)


def nodes(expression: Any) -> Iterator[Any]:
    yield expression
    for name in ("expr", "lhs", "rhs", "vector_selector", "param", "args"):
        child = getattr(expression, name, None)
        for each in child if isinstance(child, list) else [child]:
            if each is not None:
                yield from nodes(each)


def parsed(expression: str) -> list[Any]:
    """With Grafana's own variables replaced as it does."""
    return list(nodes(promql_parser.parse(expression.replace("$__rate_interval", "1m"))))


def selectors(expression: str) -> list[Any]:
    return [node for node in parsed(expression) if isinstance(node, promql_parser.VectorSelector)]


@pytest.mark.parametrize(("title", "expression", "legend"), QUERIES)
def test_each_query_asks_for_what_is_there(page: Page, title: str, expression: str, legend: str) -> None:
    found = selectors(expression)
    assert found
    labels = set.intersection(*(page.labels[each.name] for each in found))
    for each in found:
        assert each.name in page.values, f"{title}: no series {each.name}"
        asked = {matcher.name for matcher in each.matchers.matchers}
        assert {"model_name", "instance"} <= asked <= page.labels[each.name] | OF_THE_SCRAPER
    grouped = {name for node in parsed(expression) for name in _grouped_by(node)}
    assert grouped <= labels | OF_THE_SCRAPER | ({"finished_reason"} & grouped)
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= grouped


def _grouped_by(node: Any) -> list[str]:
    if not isinstance(node, promql_parser.AggregateExpr) or node.modifier is None:
        return []
    return list(node.modifier.labels)


@pytest.mark.parametrize(("title", "expression", "legend"), QUERIES)
def test_rates_are_of_counters_and_quantiles_of_buckets(
    busy_page: str, title: str, expression: str, legend: str
) -> None:
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", busy_page, re.MULTILINE))
    for node in parsed(expression):
        if not isinstance(node, promql_parser.Call):
            continue
        named = [each.name for each in nodes(node) if isinstance(each, promql_parser.VectorSelector)]
        for name in named:
            family = re.sub("_(bucket|sum|count)$", "", name)
            if node.func.name == "rate":
                assert kinds.get(name) == "counter" or kinds.get(family) == "histogram", (title, name)
            if node.func.name == "histogram_quantile":
                assert name.endswith("_bucket") and any(_grouped_by(each) == ["le"] for each in nodes(node))


def test_every_metric_is_on_the_board_or_left_out_on_purpose(page: Page) -> None:
    shown = {re.sub("_(bucket|sum|count)$", "", each.name) for _, expr, _ in QUERIES for each in selectors(expr)}
    ours = {name for name in page.values if name.startswith("pageloom_") and not name.endswith("_created")}
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in ours}
    assert families - shown == NOT_SHOWN


def test_variables_ask_for_what_is_there(page: Page) -> None:
    variables = {each["name"]: each for each in BOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps([PANELS, BOARD["templating"]]))) - {"__rate_interval", "__all"}
    assert used == set(variables)
    for each in variables.values():
        if each["type"] == "query":
            metric, label = re.fullmatch(r"label_values\(([^{,]+).*, (\w+)\)", each["query"]["query"]).groups()  # type: ignore[union-attr]
            assert metric in page.values and label in page.labels[metric] | OF_THE_SCRAPER


def test_panels_have_their_own_places_and_numbers() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells


def test_the_file_is_what_the_tool_writes() -> None:
    checked = subprocess.run([sys.executable, str(ROOT / "tools/write_dashboard.py"), "--check"], cwd=ROOT)
    assert checked.returncode == 0, "run tools/write_dashboard.py"
