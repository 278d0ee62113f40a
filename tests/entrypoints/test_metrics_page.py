"""docs/metrics.md against what the server shows."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from scripted_server import Server

DOC = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


async def scrape_after_one_request(server: Server) -> str:
    async with server.client() as client:
        await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 4})
        return (await client.get("/metrics")).text


def families(page: str) -> dict[str, str]:
    """Name → type, without the times at which series began."""
    found = re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE)
    assert len(found) == len(dict(found)), "a family is shown twice"
    return {name: kind for name, kind in found if not name.endswith("_created")}


def test_the_page_lists_exactly_the_names_and_types_that_are_shown(server: Server) -> None:
    shown = families(asyncio.run(scrape_after_one_request(server)))
    listed = re.findall(r"^\| `(\w+)` \| (\w+) \| [^|]+ \| [^|]+ \|$", DOC, re.MULTILINE)
    ours = {name: kind for name, kind in shown.items() if name.startswith("pageloom_")}
    assert len(listed) == len(dict(listed)) and dict(listed) == ours


def test_what_is_said_of_vllms_names_is_so(server: Server) -> None:
    page = asyncio.run(scrape_after_one_request(server))
    shown = families(page)
    rows = re.findall(r"^\| ((?:`vllm:\w+`(?:, )?)+) \| `(\w+)` \|$", DOC, re.MULTILINE)
    listed = {name: own for names, own in rows for name in re.findall(r"`([^`]+)`", names)}
    assert set(listed) == {name for name in shown if name.startswith("vllm:")}
    values = re.findall(r"^(\w[\w:]*)\{(.*)\} (\S+)$", page, re.MULTILINE)
    for name, own in listed.items():
        assert shown[name] == shown[own], name
        theirs = {(s.removeprefix(name), labels, value) for s, labels, value in values if s.startswith(name)}
        mine = {(s.removeprefix(own), labels, value) for s, labels, value in values if s.startswith(own)}
        kept = {(suffix, labels, value) for suffix, labels, value in mine if not suffix.endswith("_created")}
        assert {(suffix, labels.replace('engine="0",', ""), value) for suffix, labels, value in theirs} == kept, name
        assert all('engine="0"' in labels for _, labels, _ in theirs)


def test_every_series_is_labelled_and_an_ended_request_is_counted(server: Server) -> None:
    page = asyncio.run(scrape_after_one_request(server))
    series = [line for line in page.splitlines() if line and not line.startswith("#")]
    assert series and all('model_name="tiny"' in line for line in series)
    assert 'pageloom_request_success_total{finished_reason="length",model_name="tiny"} 1.0' in page
    assert 'pageloom_request_generation_tokens_sum{model_name="tiny"} 4.0' in page
