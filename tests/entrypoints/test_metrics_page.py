"""docs/metrics.md against what the server shows."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from scripted_server import Server

DOC = Path(__file__).parents[2] / "docs" / "metrics.md"


async def scrape_after_one_request(server: Server) -> str:
    async with server.client() as client:
        await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 4})
        return (await client.get("/metrics")).text


def test_the_page_lists_exactly_the_names_and_types_that_are_shown(server: Server) -> None:
    page = asyncio.run(scrape_after_one_request(server))
    shown = {(name, kind) for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE)}
    shown = {(name, kind) for name, kind in shown if not name.endswith("_created")}
    listed = re.findall(r"^\| `(\w+)` \| (\w+) \| [^|]+ \| [^|]+ \|$", DOC.read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed)) and set(listed) == shown


def test_every_series_is_labelled_and_an_ended_request_is_counted(server: Server) -> None:
    page = asyncio.run(scrape_after_one_request(server))
    series = [line for line in page.splitlines() if line and not line.startswith("#")]
    assert series and all('model_name="tiny"' in line for line in series)
    assert 'pageloom_request_success_total{finished_reason="length",model_name="tiny"} 1.0' in page
    assert 'pageloom_request_generation_tokens_sum{model_name="tiny"} 4.0' in page
