"""A mark that is to hold a tool's name, and holds none, is a part of the text."""

from __future__ import annotations

import pytest
from conversations import TOOLS

from engine.dialects.answers import AnswerReader, response_template
from engine.dialects.families import DIALECTS


@pytest.mark.parametrize("streamed", [(), ("now",)])
def test_a_mark_whose_name_is_blank_is_content(streamed: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    text = '<function= >{"a": 1}</function>, and on'
    dialect = DIALECTS["functionary_v31"]
    for cuts in ([text], list(text)):
        template = response_template(dialect, with_calls=True)
        reader = AnswerReader(dialect, template, tools=TOOLS, streamed=streamed)
        pieces = [piece for cut in cuts for piece in reader.feed(cut)] + reader.end()
        assert "".join(piece.content for piece in pieces) == text
        assert all(piece.call is None for piece in pieces)
    assert not caplog.records, "nothing has failed"
