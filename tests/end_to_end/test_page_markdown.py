"""What the page makes of Markdown: as marked splits it, but however it is written in bounded work."""

from __future__ import annotations

import json
from typing import Any

import pytest
from page_browser import Visit, as_stream

HARD = {
    "address": "a." * 99_999 + "@",
    "underscores": "_a" * 30_000,
    "spaces": "a" + " " * 60_000 + "b",
    "lines of an item": "- " + "a\n" * 99_000,
    "items": "\n- a" * 40_000,
    "lists in lists": "- " * 90_000,
    "short lists in lists": "- " * 1_000,
    "quotations in quotations": "> " * 1_000,
    "paragraphs": ("*_a" * 600 + "\n\n") * 10,
    "emphasis in emphasis": "*a _b " * 300 + "b_ a*" * 300,
    "wide table": "|" * 3_000 + "\n" + "|-" * 3_000 + "\n" + "a|\n" * 1_000,
    "padded table": "|" * 300 + "\n" + "|-" * 300 + "\n" + "a|\n" * 400,
    "links": "[a](" * 40_000,
    "ticks": "`" * 199_999,
    "fences": "```\n" * 40_000,
}
COUNT = """async ([texts, step]) => {
    const { Lexer } = await import("/page/vendor/marked.esm.js");
    const { lex, ...most } = await import("/page/lexer.js");
    let work;
    let depth = 0;
    const largest = (name, value) => (work[name] = Math.max(work[name], value));
    for (const name of ["blockTokens", "inlineTokens"]) {
        const own = Lexer.prototype[name];
        Lexer.prototype[name] = function (source, ...others) {
            work.pieces++;
            work[name] += source.length;
            largest("depth", ++depth);
            largest(name === "blockTokens" ? "block" : "paragraph", source.length);
            if (name === "blockTokens") largest("product", source.length * source.split("\\n").length);
            try { return own.call(this, source, ...others) } finally { depth-- }
        };
    }
    let now = 0;
    performance.now = () => (now += step);
    return [texts.map((text) => {
        work = { blockTokens: 0, inlineTokens: 0, pieces: 0, paragraph: 0, block: 0, product: 0, cells: 0, depth: 0 };
        for (const token of lex(text)) {
            if (token.type === "table") largest("cells", token.header.length * (token.rows.length + 1));
        }
        return work;
    }), most];
}"""
USUAL = """1. **First**, see [it][ref]:

   ```py
   def f():

       return 1
   ```

2. Then

   - nested
   - twice

     and more

A title
=======

> quoted
> ```js
> code
> ```
> more

  ```sh
  a

    b
  ```

~~~
ticks ``` within
~~~

    indented

    more

Some:
- [ ] task
- [x] done

* a
* b
```c
after a list
```
| a | b |
|---|--:|
| 1 | 2 |

[ref]: https://x.example "T"

```` md
```
inner
```
````
```
open
"""


def test_marked_is_given_bounded_work(page: Visit) -> None:
    """However long it may take: the clock stands."""
    found, most = page.page.evaluate(COUNT, [list(HARD.values()), 0])
    for (name, text), work in zip(HARD.items(), found, strict=True):
        assert work["paragraph"] <= most["MOST_INLINE"] and work["block"] <= most["MOST_BLOCK"], name
        assert work["product"] <= most["MOST_WORK"] and work["cells"] <= most["MOST_CELLS"], name
        assert work["depth"] <= most["MOST_NESTED"], name
        assert max(work["blockTokens"], work["inlineTokens"]) <= len(text) * most["MOST_NESTED"], name


def test_marked_is_given_nothing_when_time_is_up(page: Visit) -> None:
    [work], most = page.page.evaluate(COUNT, [["*a*\n\n" * 30_000], 1])
    assert most["MOST_MS"] // 2 < work["pieces"] <= most["MOST_MS"]


def test_usual_texts_are_split_as_marked_splits_them(page: Visit) -> None:
    ours, marked = page.page.evaluate(
        """async (text) => {
            const { Lexer } = await import("/page/vendor/marked.esm.js");
            const { lex } = await import("/page/lexer.js");
            const shown = (tokens) => JSON.parse(JSON.stringify(tokens.filter((token) => token.type !== "space"),
                (name, value) => (["raw", "codeBlockStyle"].includes(name) ? undefined : value)));
            return [shown(lex(text)), shown(new Lexer({ gfm: true, breaks: true }).lex(text))];
        }""",
        USUAL,
    )
    assert ours == marked
    kinds = {token["type"] for token in ours}
    assert kinds == {"list", "heading", "blockquote", "code", "paragraph", "table", "def"}


def test_a_long_list_stays_a_list(page: Visit) -> None:
    text = "".join(f"{n}. item *{n}* {'x' * 90}\n" for n in range(1, 1_001))
    lists = page.page.evaluate(
        """async (text) => (await import("/page/lexer.js")).lex(text).map((t) => [t.type, t.start, t.items?.length])""",
        text,
    )
    assert sum(count for _, _, count in lists) == 1_000 and {kind for kind, _, _ in lists} == {"list"}
    assert [start for _, start, _ in lists] == [1 + sum(n for _, _, n in lists[:i]) for i in range(len(lists))]


@pytest.mark.parametrize("way", ["streamed", "restored"])
def test_every_character_of_a_hard_text_is_shown(page: Visit, way: str) -> None:
    texts = [text for text in HARD.values() if len(text) < 70_000]
    if way == "streamed":
        body = as_stream(*({"content": texts[0][i : i + 9_999]} for i in range(0, len(texts[0]), 9_999)))
        page.page.route("**/v1/chat/completions", lambda r: r.fulfill(content_type="text/event-stream", body=body))
        page.say("Go")
        page.answered()
        texts = texts[:1]
    else:
        messages: list[dict[str, Any]] = [{"role": "assistant", "content": text} for text in texts]
        messages += [{"role": "assistant", "content": "**last**"}]
        file = {
            "name": "c.json",
            "mimeType": "application/json",
            "buffer": json.dumps([{"messages": messages}]).encode(),
        }
        page.page.get_by_label("File to import").set_input_files(file)
        page.wait_for(".assistant", len(messages))
        page.page.reload()
        page.page.wait_for_selector(".assistant")
        page.wait_for(".markdown strong:text-is('last')", 1)
    shown = page.page.locator(".markdown").evaluate_all("all => all.map((e) => e.textContent)")
    for text, seen in zip(texts, shown, strict=False):
        assert seen.count("a") == text.count("a")
