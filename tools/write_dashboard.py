"""Writes docs/grafana/pageloom.json, a Grafana dashboard. usage: python tools/write_dashboard.py [--check]"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

BOARD = Path(__file__).resolve().parents[1] / "docs" / "grafana" / "pageloom.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SERIES = '{model_name=~"$model_name",instance=~"$instance"}'
Queries = list[tuple[str, str]]
"""(expression, legend)"""


def rate(name: str, by: str = "") -> str:
    """Of a counter, per second, over all instances that are looked at."""
    return f"sum{by and f' by ({by})'} (rate(pageloom_{name}{SERIES}[$__rate_interval]))"


def now(name: str, how: str = "sum") -> str:
    return f"{how} (pageloom_{name}{SERIES})"


def quantiles(name: str) -> Queries:
    buckets = rate(f"{name}_bucket", "le")
    shown = [(f"histogram_quantile({q}, {buckets})", f"p{round(100 * q)}") for q in (0.5, 0.9, 0.99)]
    return [*shown, (mean(name), "mean")]


def mean(name: str) -> str:
    return share(rate(f"{name}_sum"), rate(f"{name}_count"))


def share(part: str, whole: str) -> str:
    return f"{part} / ({whole} > 0)"


DRAFTED, ACCEPTED = "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens"
ROWS: dict[str, list[tuple[str, str, str, Queries]]] = {
    "Traffic": [
        (
            "Requests ended",
            "Samples, by what ended them",
            "reqps",
            [(rate("request_success_total", "finished_reason"), "{{finished_reason}}")],
        ),
        (
            "Tokens",
            "Prompts of requests that have begun, and tokens generated",
            "short",
            [(rate("prompt_tokens_total"), "prompt"), (rate("generation_tokens_total"), "generated")],
        ),
        (
            "Running and waiting",
            "Sequences in the batch, and those that wait to be scheduled",
            "short",
            [(now("num_requests_running"), "running"), (now("num_requests_waiting"), "waiting")],
        ),
        (
            "Errors and aborts",
            "Share of what ended",
            "percentunit",
            [
                (
                    share(
                        f"sum by (finished_reason) (rate(pageloom_request_success_total{SERIES[:-1]},finished_reason=~"
                        '"error|abort"}[$__rate_interval]))',
                        rate("request_success_total"),
                    ).replace("/ (", "/ on () group_left () ("),
                    "{{finished_reason}}",
                )
            ],
        ),
    ],
    "Latency": [
        ("Time to first token", "From arrival", "s", quantiles("time_to_first_token_seconds")),
        ("Between tokens", "Of one sequence", "s", quantiles("inter_token_latency_seconds")),
        ("Whole request", "From arrival to end", "s", quantiles("e2e_request_latency_seconds")),
        ("In the queue", "Until a step took the request up", "s", quantiles("request_queue_time_seconds")),
        (
            "Where a request's time goes",
            "Means",
            "s",
            [(mean(f"request_{phase}_time_seconds"), phase) for phase in ("queue", "prefill", "decode")],
        ),
    ],
    "KV cache": [
        (
            "Blocks in use",
            "Held by sequences, of all",
            "percentunit",
            [(now("kv_cache_usage_ratio", "max"), "fullest instance"), (now("kv_cache_usage_ratio", "avg"), "mean")],
        ),
        (
            "Prompt tokens from the prefix cache",
            "Of those that were looked up",
            "percentunit",
            [(share(rate("prefix_cache_hits_total"), rate("prefix_cache_queries_total")), "found")],
        ),
        (
            "Preemptions",
            "Sequences that gave their blocks back; to host memory, if swapped",
            "short",
            [(rate("preemptions_total"), "all"), (rate("preemptions_swapped_total"), "swapped")],
        ),
        (
            "Host memory",
            "Blocks copied there and back, a second",
            "short",
            [(rate("kv_blocks_swapped_out_total"), "out"), (rate("kv_blocks_swapped_in_total"), "in")],
        ),
        (
            "Blocks by holder",
            "Pinned prefixes, cached ones; swapped sequences and prefixes in host memory",
            "short",
            [
                (now("kv_blocks_pinned"), "pinned"),
                (now("kv_blocks_cached"), "free and found"),
                (now("host_kv_blocks_used"), "swapped"),
                (now("host_kv_blocks_cached"), "found in host memory"),
            ],
        ),
    ],
    "Steps": [
        ("Time of a step", "", "s", quantiles("step_seconds")),
        ("Tokens of a step", "Prompts, generated ones, drafts", "short", quantiles("step_tokens")),
        ("Steps", "A second", "short", [(rate("engine_steps_total"), "steps")]),
        (
            "Cores",
            "That serve; that died; 1 while the engine sleeps",
            "short",
            [(now("replicas"), "serve"), (now("core_deaths_total"), "died"), (now("asleep", "max"), "asleep")],
        ),
        (
            "Compilation",
            "1 while pieces compile, or could not be; compilations after that are a defect",
            "short",
            [
                (now("compiling", "max"), "compiling"),
                (now("compile_failed", "max"), "failed"),
                (now("compiles_after_ready_total"), "after ready"),
            ],
        ),
    ],
    "Speculation": [
        (
            "Drafts that were right",
            "Of those that were computed",
            "percentunit",
            [(share(rate(f"{ACCEPTED}_total"), rate(DRAFTED)), "accepted")],
        ),
        (
            "Accepted drafts of a step",
            "Of a sequence that computed some",
            "short",
            [(share(rate(f"{ACCEPTED}_total"), rate("spec_decode_num_drafts_total")), "tokens")],
        ),
        (
            "Accepted drafts by position",
            "A second",
            "short",
            [(rate(f"{ACCEPTED}_per_pos_total", "position"), "{{position}}")],
        ),
    ],
    "Requests": [
        ("Prompt length", "Tokens", "short", quantiles("request_prompt_tokens")),
        ("Prompt tokens computed", "Not from the cache", "short", quantiles("request_computed_prompt_tokens")),
        ("Generated tokens", "Over all samples", "short", quantiles("request_generation_tokens")),
        ("Tokens asked for", "max_tokens, within the context", "short", quantiles("request_params_max_tokens")),
    ],
}


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }


def panels() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    top = 0
    for row, shown in ROWS.items():
        made.append({"id": len(made) + 1, "type": "row", "title": row, "gridPos": box(0, top, 24, 1), "panels": []})
        top += 1
        for place, (title, description, unit, queries) in enumerate(shown):
            made.append(
                {
                    "id": len(made) + 1,
                    "type": "timeseries",
                    "title": title,
                    "description": description,
                    "datasource": SOURCE,
                    "gridPos": box(8 * (place % 3), top + 8 * (place // 3), 8, 8),
                    "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                    "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
                    "targets": [
                        {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
                        for i, (expr, legend) in enumerate(queries)
                    ],
                }
            )
        top += 8 * -(-len(shown) // 3)
    return made


def box(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def board() -> str:
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1}
    models = "label_values(pageloom_num_requests_running, model_name)"
    instances = 'label_values(pageloom_num_requests_running{model_name=~"$model_name"}, instance)'
    made = {
        "uid": "pageloom",
        "title": "Pageloom",
        "description": "Written by tools/write_dashboard.py; what the figures mean is in docs/metrics.md",
        "tags": ["pageloom", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [source, variable("model_name", "Model", models), variable("instance", "Instance", instances)]
        },
        "panels": panels(),
    }
    return json.dumps(made, indent=1) + "\n"


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        return BOARD.read_text() != board()
    BOARD.write_text(board())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
