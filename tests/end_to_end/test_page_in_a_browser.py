"""The page in headless Chromium, against a real server."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import numpy as np
import pytest
from page_browser import KEY, Visit, as_stream, visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

HEADERS = {"Authorization": f"Bearer {KEY}"}
HOSTILE = """<script>window.taken = 1</script><img src=x onerror="window.taken = 2"> <svg onload="window.taken = 3">

[click](javascript:window.taken=4) [and](JaVaScRiPt:window.taken=5) [data](data:text/html,<script>taken=6</script>)
[&#106;avascript:window.taken=7](&#106;avascript:window.taken=7) <a href="javascript:window.taken=8">x</a>
[own](/v1/models) ![image](https://evil.example/image.png) ![x](x" onerror="window.taken=9)
<iframe srcdoc="<script>parent.taken=1</script>"> <style>* { display: none !important }</style>
<link rel=stylesheet href=https://evil.example/a.css> <base href="https://evil.example/">
<form action="https://evil.example/"><input name=q></form>

Plain: <https://plain.example/path> www.evil.example

| a | b |
|---|---|
| <script>window.taken = 10</script> | `<img src=x onerror=window.taken=11>` |

```html
<script>window.taken = 12</script>
```
"""


def answer_of(page_base: str, messages: list[dict[str, str]], **settings: Any) -> str:
    """What the server says without the page; the model is greedy."""
    body = {"messages": messages, **settings}
    reply = httpx.post(f"{page_base}/v1/chat/completions", json=body, headers=HEADERS, timeout=60)
    return str(reply.json()["choices"][0]["message"]["content"])


def test_an_answer_is_streamed_and_is_the_servers(page: Visit, page_base: str) -> None:
    page.say("Hello, wörld")
    page.answered()
    asked, got = page.kept()
    assert asked == {"role": "user", "content": "Hello, wörld"}
    assert got["content"] == answer_of(page_base, [asked]) and len(got["content"]) > 5
    assert got["stats"]["tokens"] == 24 and got["stats"]["finish"] == "length" and got["stats"]["rate"] > 0
    assert "24 tokens" in page.page.locator(".stats").inner_text()
    page.say("And then?")
    page.answered(2)
    history = [{"role": m["role"], "content": m["content"]} for m in page.kept()[:3]]
    assert page.kept()[3]["content"] == answer_of(page_base, history)


def test_pieces_are_shown_as_they_come_and_escape_stops_them(page: Visit, page_base: str) -> None:
    def ask_for_more(route: Route) -> None:
        asked = {
            **json.loads(route.request.post_data or ""),
            "ignore_eos": True,
            "max_tokens": 6000,
        }  # until it is stopped
        route.continue_(post_data=json.dumps(asked))

    page.page.route("**/v1/chat/completions", ask_for_more)
    page.say("Count")
    some = re.compile(r"\S.*\S", re.DOTALL)
    page.page.locator(".assistant[aria-busy=true] .markdown", has_text=some).wait_for()
    page.page.keyboard.press("Escape")
    page.answered()
    got = page.kept()[-1]
    assert got["stats"]["finish"] == "stopped" and got["error"] is None
    assert "stopped" in page.page.locator(".stats").inner_text()
    page.say("Go on")  # the server is free again
    page.page.wait_for_selector(".assistant[aria-busy=true] .markdown")
    page.page.get_by_role("button", name="Stop").click()
    page.answered(2)


def test_regenerate_and_edit_go_on_from_there(page: Visit, page_base: str) -> None:
    for count, text in enumerate(("one", "two"), 1):
        page.say(text)
        page.answered(count)
    before = page.kept()
    page.set("Seed", "7")
    page.set("Temperature", "1.5")
    page.page.keyboard.press("Escape")
    page.page.get_by_role("button", name="Regenerate").last.click()
    while page.kept()[3:] == before[3:]:  # its figures differ, where its text does not
        page.page.wait_for_timeout(20)
    page.answered(2)
    after = page.kept()
    assert after[:3] == before[:3] and len(after) == 4
    history = [{"role": m["role"], "content": m["content"]} for m in after[:3]]
    assert after[3]["content"] == answer_of(page_base, history, seed=7, temperature=1.5) != before[3]["content"]
    page.page.locator(".user").first.hover()
    page.page.get_by_role("button", name="Edit").first.click()
    page.page.get_by_label("Your message").fill("three")
    page.page.keyboard.press("Enter")
    page.answered(1)
    asked, got = page.kept()
    assert asked["content"] == "three"
    assert got["content"] == answer_of(page_base, [asked], seed=7, temperature=1.5)


def test_an_answer_keeps_to_its_schema(page: Visit) -> None:
    schema = {
        "type": "object",
        "properties": {"sure": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
        "required": ["sure", "kind"],
        "additionalProperties": False,
    }
    page.set("Schema of the answer", "{ not JSON")
    page.page.locator(".settings .error", has_text="not JSON").wait_for()
    page.set("Schema of the answer", json.dumps(schema))
    page.set("Most tokens", "200")
    page.say("An object")
    page.answered()
    jsonschema.validate(json.loads(page.kept()[-1]["content"]), schema)
    page.set("Schema of the answer", '{"type": "no-such-type"}')
    page.say("Another")
    page.answered(2)
    error = page.page.locator(".assistant .error").inner_text()
    assert "no-such-type" in error and page.kept()[-1]["error"] == error


def test_tokens_are_coloured_by_what_the_server_says_of_them(page: Visit, page_base: str) -> None:
    page.set("Log-probabilities", "3")
    page.set("Most tokens", "8")
    page.page.keyboard.press("Escape")
    page.say("Tokens")
    page.answered()
    body = {"messages": [page.kept()[0]], "max_tokens": 8, "logprobs": True, "top_logprobs": 3}
    reply = httpx.post(f"{page_base}/v1/chat/completions", json=body, headers=HEADERS, timeout=60).json()
    told = reply["choices"][0]["logprobs"]["content"]
    kept = page.kept()[-1]["tokens"]
    assert [token[1] for token in kept] == pytest.approx([at["logprob"] for at in told], abs=1e-3)
    page.page.locator(".actions").get_by_role("button", name="Tokens").click()
    spans = page.page.locator(".token-text [data-at]")
    assert spans.count() == 8
    edges = [0.9, 0.7, 0.5, 0.3, 0.15, 0.05]
    for index, (_, logprob, _) in enumerate(kept):
        level = next((i for i, least in enumerate(edges) if np.exp(logprob) >= least), len(edges))
        assert re.search(rf"\blevel-{level}\b", spans.nth(index).get_attribute("class"))
    spans.nth(2).hover()
    rows = page.page.locator(".alternatives tr")
    assert rows.count() in (3, 4) and page.page.locator(".alternatives .chosen").count() == 1
    shown = [float(row.split("\t")[-1]) for row in rows.all_inner_texts()]
    assert shown[:3] == pytest.approx([at["logprob"] for at in told[2]["top_logprobs"]], abs=1e-3)


@pytest.mark.parametrize("way", ["streamed", "imported"])
def test_what_a_model_writes_is_never_html(page: Visit, way: str) -> None:
    if way == "streamed":
        body = as_stream(*({"content": HOSTILE[i : i + 7]} for i in range(0, len(HOSTILE), 7)))
        page.page.route("**/v1/chat/completions", lambda r: r.fulfill(content_type="text/event-stream", body=body))
        page.say(HOSTILE)
    else:
        messages = [
            {"role": "user", "content": HOSTILE},
            {"role": "assistant", "content": HOSTILE, "reasoning": HOSTILE},
        ]
        file = {"conversations": [{"title": HOSTILE[:150], "messages": messages, "__proto__": {"taken": 1}}]}
        given = {"name": "c.json", "mimeType": "application/json", "buffer": json.dumps(file).encode()}
        page.page.get_by_label("File to import").set_input_files(given)
    page.answered()
    found = page.page.evaluate(
        """() => {
            const all = [...document.querySelectorAll(".column *")];
            return {
                tags: [...new Set(all.map((e) => e.tagName.toLowerCase()))],
                handlers: all.flatMap((e) => e.getAttributeNames()).filter((n) => n.startsWith("on") || n === "srcdoc"),
                links: [...document.querySelectorAll(".column a")].map((a) => [a.href, a.rel, a.target]),
                text: document.querySelector(".markdown").textContent,
            };
        }"""
    )
    assert not {"script", "img", "iframe", "style", "link", "base", "object", "embed"} & set(found["tags"])
    assert found["handlers"] == []
    assert sorted(link[0] for link in found["links"]) == [
        "http://www.evil.example/",
        "https://evil.example/image.png",
        "https://plain.example/path",
    ]
    assert {(rel, target) for _, rel, target in found["links"]} == {("noopener noreferrer nofollow", "_blank")}
    for written in ("<script>window.taken = 1</script>", "<style>", "<script>window.taken = 12</script>"):
        assert written in found["text"], "HTML is shown as it was written"
    for link in page.page.locator(".column .no-link").all():
        link.click()
    assert page.page.evaluate("window.taken") is None


def test_the_policy_is_in_force(page_base: str, browser: Browser) -> None:
    """Whatever slipped through above would be refused by the browser."""
    with visit(browser, page_base) as page:
        page.open()
        later = "new Promise((told) => setTimeout(() => {"  # while a debugger evaluates, the policy lets it
        evaluates = later + " try { told(new Function('return 1')()) } catch (error) { told(error.name) } }))"
        assert page.page.evaluate(evaluates) == "EvalError"
        sink = "() => { try { document.body.innerHTML = '<b>x</b>'; return 'done' } catch (e) { return e.name } }"
        assert page.page.evaluate(sink) == "TypeError"
        fetches = "fetch('https://evil.example/').then(() => 'done', (error) => error.name)"
        assert page.page.evaluate(fetches) == "TypeError"
        assert any("Content Security Policy" in text for text in page.complaints)
        page.complaints.clear()
        page.requests = [url for url in page.requests if "evil.example" not in url]


def test_the_key_is_asked_for_kept_for_the_tab_and_for_longer_where_told(page_base: str, browser: Browser) -> None:
    with visit(browser, page_base, key=None) as page:
        page.open()
        dialog = page.page.get_by_role("dialog")
        dialog.get_by_label("Key", exact=True).fill("wrong")
        dialog.get_by_role("button", name="Use it").click()
        page.page.get_by_text("The server refused that key.").wait_for()
        dialog.get_by_label("Key", exact=True).fill(KEY)
        dialog.get_by_role("button", name="Use it").click()
        page.page.get_by_text("tiny answers here").wait_for()
        assert page.page.evaluate("[sessionStorage['pageloom.key'], localStorage['pageloom.key'] ?? null]") == [
            KEY,
            None,
        ]
        page.say("Hi")
        page.answered()
        page.page.reload()
        page.page.locator(".brand .model:text-is('tiny')").wait_for()
        assert page.page.get_by_role("dialog").count() == 0
        page.page.get_by_role("button", name="Settings", exact=True).click()
        page.page.get_by_role("button", name="Forget the key").click()
        page.page.reload()
        dialog.get_by_label("Key", exact=True).fill(KEY)
        dialog.get_by_label("Keep it in this browser").check()
        dialog.get_by_role("button", name="Use it").click()
        page.page.get_by_text("tiny").first.wait_for()
        assert page.page.evaluate("localStorage['pageloom.key']") == KEY


def test_conversations_are_kept_renamed_exported_imported_and_deleted(page: Visit) -> None:
    page.say("First of all")
    page.answered()
    page.page.get_by_role("button", name="New conversation", exact=True).first.click()
    page.say("Second")
    page.answered()
    entries = page.page.locator(".conversations .open")
    assert entries.all_inner_texts() == ["Second", "First of all"]
    page.page.get_by_role("button", name="Rename Second").click()
    page.page.get_by_label("Name of the conversation").fill("Renamed")
    page.page.keyboard.press("Enter")
    page.page.reload()
    page.page.wait_for_selector(".assistant")
    assert entries.all_inner_texts() == ["Renamed", "First of all"]
    with page.page.expect_download() as download:
        page.page.get_by_role("button", name="Export").click()
    exported = json.loads(download.value.path().read_text())
    assert [c["messages"][0]["content"] for c in exported["conversations"]] == ["Second", "First of all"]
    page.page.get_by_role("button", name="Delete Renamed").click()
    page.wait_for(".conversations .open", 1)
    assert entries.all_inner_texts() == ["First of all"]
    page.page.get_by_label("File to import").set_input_files(download.value.path())
    page.wait_for(".conversations .open", 3)
    assert sorted(entries.all_inner_texts()) == ["First of all", "First of all", "Renamed"]
    wrong = {"name": "wrong.json", "mimeType": "application/json", "buffer": b'{"conversations": [{"messages": [{}]}]}'}
    page.page.get_by_label("File to import").set_input_files(wrong)
    page.page.locator(".sidebar .error", has_text="wrong.json: message 0").wait_for()
    many = json.dumps([{"messages": [{"role": "user", "content": "x"}]}] * 100).encode()
    given = {"name": "many.json", "mimeType": "application/json", "buffer": many}
    page.page.get_by_label("File to import").set_input_files(given)
    page.wait_for(".conversations .open", 100)
    page.page.locator(".sidebar .error", has_text="no room for 3 of 100").wait_for()


def test_the_board_shows_what_the_server_counts(page_base: str, browser: Browser) -> None:
    for text in ("a" * 100, "a" * 100):
        answer_of(page_base, [{"role": "user", "content": text}])
    with visit(browser, page_base) as page:
        page.open("board")
        page.page.wait_for_selector(".tile")
        look = httpx.get(f"{page_base}/v1/board", headers=HEADERS).json()
        tiles = dict(text.split("\n", 1) for text in page.page.locator(".tile").all_inner_texts())
        stats = look["stats"]
        assert f"{stats['generated_tokens']} in all" in tiles["Generated"]
        assert f"{stats['prompt_tokens']} in all" in tiles["Prompts"]
        assert f"0 of {stats['kv_blocks_total']} blocks" in tiles["KV cache"]
        hits = stats["prefix_hit_tokens"] / stats["prefix_query_tokens"]
        assert f"{100 * hits:.0f} %" in tiles["Prefix hits"] and hits > 0.1
        legend = dict(
            text.split() for text in page.page.locator(".keys-row li", has_not_text="in use").all_inner_texts()
        )
        assert int(legend["cached"]) == stats["kv_blocks_cached"] > 0
        assert int(legend["free"]) == stats["kv_blocks_total"] - stats["kv_blocks_cached"]
        parts = page.page.locator(".parts th").all_inner_texts()
        assert {"inputs", "model", "logits", "sampling", "collect"} <= set(parts)
        page.page.wait_for_selector(".plot canvas")
        page.wait_for(".plot canvas", 4)


def test_the_board_looks_only_while_somebody_sees_it(page_base: str, browser: Browser) -> None:
    with visit(browser, page_base) as page:
        page.open("board")
        page.page.wait_for_selector(".tile")
        hide = "hidden => { Object.defineProperty(document, 'hidden', { get: () => hidden, configurable: true });"
        hide += " document.dispatchEvent(new Event('visibilitychange')) }"
        page.page.evaluate(hide, True)
        page.page.wait_for_load_state("networkidle")
        page.requests.clear()
        page.page.wait_for_timeout(2500)
        assert polls(page) == 0
        with page.page.expect_request("**/v1/board"):
            page.page.evaluate(hide, False)
        with page.page.expect_request("**/v1/board"):
            pass
        page.page.get_by_role("link", name="Chat").click()
        page.page.wait_for_load_state("networkidle")
        page.requests.clear()
        page.page.wait_for_timeout(2500)
        assert polls(page) == 0
        page.requests.append(page_base)


def polls(page: Visit) -> int:
    """Of the board (browsers ask for an icon when they like)."""
    return sum(url.endswith("/v1/board") for url in page.requests)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_small_screen(page_base: str, browser: Browser, scheme: str) -> None:
    with visit(browser, page_base, width=390, color_scheme=scheme) as page:
        page.open()
        wide = (
            "| "
            + " | ".join(["wide"] * 30)
            + " |\n|"
            + "---|" * 30
            + "\n\n```\n"
            + "long " * 200
            + "\n```\n"
            + "x" * 500
        )
        body = as_stream({"content": HOSTILE + wide, "reasoning": "y" * 500})
        page.page.route("**/v1/chat/completions", lambda r: r.fulfill(content_type="text/event-stream", body=body))
        page.say("z" * 500)
        page.answered()
        page.page.locator("summary").click()
        assert page.too_wide() == []
        page.page.get_by_role("button", name="Settings", exact=True).click()
        assert page.too_wide() == []
        page.page.keyboard.press("Escape")
        page.page.get_by_role("button", name="Conversations").click()
        page.page.locator(".conversations .open").first.wait_for(state="visible")
        assert page.too_wide() == []
        page.page.keyboard.press("Escape")
        page.page.get_by_role("link", name="Board").click()
        page.page.wait_for_selector(".plot canvas")
        assert page.too_wide() == []
        dark = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (max(map(int, re.findall(r"\d+", dark)[:3])) < 60) is (scheme == "dark")


def test_everything_has_a_name_for_who_does_not_see_it(page: Visit) -> None:
    page.say("Hi")
    page.answered()
    page.page.get_by_role("button", name="Settings", exact=True).click()
    nameless = """[...document.querySelectorAll("button, input, textarea, select, a")]
        .filter((e) => !(e.textContent.trim() || e.getAttribute("aria-label") || e.labels?.length))
        .map((e) => e.outerHTML)"""
    assert page.page.evaluate(nameless) == []
    page.page.get_by_role("status").get_by_text("The answer is complete.", exact=True).wait_for(state="attached")
