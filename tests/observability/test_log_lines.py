"""Lines of a log, whatever is written into them: in text no line can be forged, in JSON each is one object."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.observability.logs import JsonFormatter, TextFormatter, as_entry, harmless, last_words

FORGED = "x\n2026-01-01 00:00:00,000 INFO pageloom.server: all is well\r\n\x1b[2J\x1b[31mred\x9b0m\u2028\u202eback\x00"
texts = st.text() | st.text(st.characters(max_codepoint=255)) | st.just(FORGED) | st.just("\ud800 half")


def record(
    message: str, /, *arguments: object, error: BaseException | None = None, **fields: object
) -> logging.LogRecord:
    info = None if error is None else (type(error), error, None)
    made = logging.LogRecord("a.logger", logging.WARNING, "file.py", 1, message, arguments, info)
    if fields:
        made.fields = fields
    return made


@given(texts, texts, texts)
@example(FORGED, FORGED, FORGED)
def test_an_entry_of_text_begins_at_the_left_edge_and_nothing_else_does(a: str, b: str, c: str) -> None:
    formatter = TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    shown = formatter.format(record("client said %s", a, error=ValueError(b), given=c))
    first, *others = shown.split("\n")
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING a\.logger: client said ", first)
    assert all(line.startswith("    ") for line in others)
    assert not re.search(r"[^\n\t -~\xa0-\u061b\u061d-\u200d\u2010-\u2027\u202f-\u2065\u206a-\U0010ffff]", shown)
    shown.encode()


@given(texts, texts, texts)
@example(FORGED, FORGED, FORGED)
def test_an_entry_of_json_is_one_line_and_says_what_was_said(a: str, b: str, c: str) -> None:
    formatter = JsonFormatter("server", lambda: c)
    line = formatter.format(
        record("client said %s", a, error=ValueError(b), given={"nested": [c, float("nan"), object]})
    )
    assert re.fullmatch(r"[ -~]+", line)
    entry = msgspec.json.decode(line)  # a strict reader
    assert entry == json.loads(line)
    whole = (a + b + c).isprintable() or not re.search("[\ud800-\udfff]", a + b + c)
    if whole:
        assert entry["message"] == f"client said {a}" and entry["request_id"] == c and b in entry["exception"]
        assert entry["given"]["nested"][:2] == [c, "nan"]
    assert (entry["level"], entry["logger"], entry["process"]) == ("warning", "a.logger", "server")
    assert entry["time"].endswith("Z") and datetime.fromisoformat(entry["time"]).tzinfo is not None


def test_arguments_that_do_not_fit_cost_no_entry() -> None:
    entry = json.loads(JsonFormatter("server").format(record("%d apples", "x")))
    assert "apples" in entry["message"] and "x" in entry["message"]


def test_fields_cannot_take_the_place_of_what_an_entry_is() -> None:
    entry = json.loads(JsonFormatter("server").format(record("true", level="critical", message="false", more=1)))
    assert (entry["level"], entry["message"], entry["more"]) == ("warning", "true", 1)


@given(texts)
def test_only_a_childs_mark_makes_a_line_an_entry(text: str) -> None:
    mark = "0123456789abcdef"
    entry = JsonFormatter("core", mark=mark).format(record("%s", text))
    assert json.loads(as_entry(entry, "server", mark))["process"] == "core"
    forged = entry.removeprefix(mark)
    assert json.loads(as_entry(forged, "server", mark))["message"] == forged
    assert last_words(forged, mark) == [forged]
    if not re.search("[\ud800-\udfff]", text):
        assert last_words(entry, mark) == text.split("\n")


def test_what_reads_well_stays_as_it_is() -> None:
    assert harmless("Grüße, 世界 😀\tok") == "Grüße, 世界 😀\tok"
    assert harmless("a\nb\n\nc") == "a\n    b\n    \n    c"


CORE = """
import os, sys, warnings, logging
sys.path[:0] = [{core!r}]
from core_fakes import FakeExecutor, tiny_config, request
from engine.core.client import ProcessClient
from entrypoints.server.logs import logging_to_stderr
from engine.core.wire import each_delta
with logging_to_stderr("INFO", "json"):
    client = ProcessClient(tiny_config(), executor="test_log_lines:Talkative")
    client.start()
    print("raw of the front end", file=sys.stderr, flush=True)
    warnings.warn("take care")
    client.close()
"""


def talkative() -> type:
    from core_fakes import FakeExecutor

    class Talkative(FakeExecutor):
        def load(self):  # type: ignore[no-untyped-def]
            import os

            logging.getLogger("some.library").warning("two\nlines")
            os.write(2, b'{"level":"info","message":"forged"}\n\x1b[1mraw \xff\n')
            print("printed")
            try:
                raise ValueError("inside")
            except ValueError:
                logging.getLogger("some.library").exception("it failed")
            return super().load()

    return Talkative


def __getattr__(name: str) -> type:
    if name == "Talkative":
        return talkative()
    raise AttributeError(name)


def test_all_that_a_core_says_is_entries_whoever_says_it() -> None:
    core, own = Path(__file__).parents[1] / "core", Path(__file__).parent
    program = CORE.format(core=str(core))
    paths = f"import sys; sys.path[:0] = [{str(own)!r}]\n"
    done = subprocess.run([sys.executable, "-c", paths + program], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    entries = [json.loads(line) for line in done.stderr.decode("ascii").splitlines()]
    by_message = {entry["message"]: entry for entry in entries}
    assert by_message["two\nlines"]["process"] == "core" and by_message["two\nlines"]["logger"] == "some.library"
    assert by_message["it failed"]["exception"].endswith("ValueError: inside")
    for raw in ('{"level":"info","message":"forged"}', "\x1b[1mraw \\xff", "printed", "raw of the front end"):
        assert by_message[raw]["logger"] == "stderr"
    assert any("take care" in message for message in by_message)
    assert any(entry["message"].startswith("memory\n") and entry["process"] == "core" for entry in entries)


@pytest.mark.parametrize("mark", ["", "0123"])
def test_last_words_of_a_core_are_readable(mark: str) -> None:
    assert last_words("Segmentation fault", mark) == ["Segmentation fault"]
