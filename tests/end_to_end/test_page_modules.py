"""The page's modules by themselves, in headless Chromium, against brute force."""

from __future__ import annotations

import json

import numpy as np
import pytest
from page_browser import Visit


def test_a_full_storage_gives_up_colours_then_what_is_oldest(page: Visit) -> None:
    """The bound is the page's own, below what browsers give."""
    counts = page.page.evaluate(
        """async () => {
            const c = await import("/page/conversations.js");
            const { state } = await import("/page/store.js");
            const tokens = Array(100).fill(["x".repeat(1000), -1, []]);
            for (let i = 0; i < 60; i++) {
                const one = c.create();
                const message = { role: "assistant", content: String(i).padEnd(90_000), tokens };
                one.messages.push({ role: "user", content: "q" }, message);
                c.save(one);
                one.updated = i;
            }
            const size = Object.keys(localStorage).reduce((n, k) => n + localStorage[k].length, 0);
            const kept = Object.keys(localStorage).filter((k) => k.includes("conversation."));
            const has = (text) => kept.some((k) => localStorage[k].includes(text));
            return { size, most: c.MOST_CHARS, kept: kept.length, last: has('"59 '), first: has('"0 ') };
        }"""
    )
    assert counts["most"] * 0.8 < counts["size"] <= counts["most"]
    assert 40 <= counts["kept"] < 60 and counts["last"] and not counts["first"]


def test_one_that_is_too_long_to_be_kept_costs_no_other(page: Visit) -> None:
    kept = page.page.evaluate(
        """async () => {
            const c = await import("/page/conversations.js");
            for (const size of [10, 10, c.MOST_CHARS]) {
                const one = c.create();
                one.messages.push({ role: "user", content: "x".repeat(size) });
                c.save(one);
            }
            return Object.keys(localStorage).filter((k) => k.includes("conversation.")).length;
        }"""
    )
    assert kept == 2


@pytest.mark.parametrize(("own", "size", "imported"), [(0, 10, 100), (60, 10, 40), (100, 10, 0), (5, 100_000, 39)])
def test_what_is_imported_costs_nothing_that_is_there(page: Visit, own: int, size: int, imported: int) -> None:
    """100 conversations and an empty one, the oldest first in their file."""
    file = [{"updated": 0, "messages": []}]
    file += [{"updated": n + 1, "messages": [{"role": "user", "content": f"{n} ".ljust(size)}]} for n in range(100)]
    found = page.page.evaluate(
        """async ([own, text]) => {
            const c = await import("/page/conversations.js");
            const { state } = await import("/page/store.js");
            for (let i = 0; i < own; i++) {
                const one = c.create();
                one.messages.push({ role: "user", content: "own" });
                c.save(one);
            }
            const told = c.importText(text);
            const kept = Object.keys(localStorage).filter((k) => k.includes("conversation."));
            const shown = state.conversations.map((one) => [one.messages[0].content.trim(), one.updated]);
            c.load();
            const again = state.conversations.map((one) => [one.messages[0]?.content.trim(), one.updated]);
            return { told, shown, again, kept: kept.length };
        }""",
        [own, json.dumps(file)],
    )
    assert found["told"] == {"imported": imported, "left": 100 - imported}
    assert [text for text, _ in found["shown"][:own]] == ["own"] * own
    assert found["shown"][own:] == [[str(n), n + 1] for n in range(99, 99 - imported, -1)]
    assert found["again"] == found["shown"] and found["kept"] == own + imported


def test_quantiles_and_cells_by_brute_force(page: Visit) -> None:
    random = np.random.default_rng(3)
    cases = [
        {"bounds": np.cumsum(random.random(8)).tolist(), "counts": random.integers(0, 9, 9).tolist()} for _ in range(50)
    ]
    cases += [{"bounds": [1.0], "counts": [0, 0]}, {"bounds": [1.0, 2.0], "counts": [0, 4, 0]}]
    shares = [0.01, 0.5, 0.95, 1.0]
    code = "async ([cases, shares]) => { const f = await import('/page/figures.js');"
    found = page.page.evaluate(
        code + " return cases.map((c) => shares.map((s) => f.quantile(c, s))) }", [cases, shares]
    )
    for case, values in zip(cases, found, strict=True):
        bounds, counts = [0.0, *case["bounds"]], case["counts"]
        samples = [
            low + (high - low) * (i + 1) / (count * 1000)
            for low, high, count in zip(bounds, [*bounds[1:], bounds[-1]], counts, strict=True)
            for i in range(count * 1000)
        ]
        for share, value in zip(shares, values, strict=True):
            if not samples:
                assert value is None
            else:
                assert value == pytest.approx(samples[int(np.ceil(share * len(samples))) - 1], abs=2e-3)
    kinds = page.page.evaluate(
        "async () => { const f = await import('/page/figures.js');"
        "return [[5000, 1, 0, 2500], [10, 10, 0, 0], [7, 0, 2, 3]]"
        ".map(([all, pinned, used, cached]) => f.cellKinds({ all, pinned, used, cached }, Math.min(all, 100))) }"
    )
    assert [kinds[0].count(kind) for kind in ("pinned", "used", "cached", "free")] == [1, 0, 50, 49]
    assert kinds[1] == ["pinned"] * 10 and kinds[2] == ["used"] * 2 + ["cached"] * 3 + ["free"] * 2


def test_events_are_read_however_they_are_cut(page: Visit) -> None:
    code = """async (size) => {
        const { events } = await import("/page/api.js");
        const text = 'data: {"a": "wörld 😀"}\\r\\n\\r\\n: note\\n\\ndata:one\\ndata: two\\n\\ndata: [DONE]\\n\\n';
        const bytes = new TextEncoder().encode(text);
        const stream = new ReadableStream({
            start(controller) {
                for (let i = 0; i < bytes.length; i += size) controller.enqueue(bytes.slice(i, i + size));
                controller.close();
            },
        });
        const found = [];
        for await (const event of events(stream)) found.push(event);
        return found;
    }"""
    for size in (1, 2, 3, 7, 1000):
        assert page.page.evaluate(code, size) == ['{"a": "wörld 😀"}', "one\ntwo", "[DONE]"]
