"""A text is plain only where the library's own search would find nothing to hold in it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_parsing.response_templates import load_response_template

from engine.dialects.answers import response_template
from engine.dialects.families import DIALECTS
from engine.dialects.plain_text import Template, Watched

TEMPLATES = {name: response_template(dialect, with_calls=True) for name, dialect in DIALECTS.items()}
MARKS = ["<", "[", "{", " to=", "<|", "\n", " ", "functools", "\u4e2d", "\u3000", "`", "a", "0", "<\uff5ctool"]


def _watched(template: Template, region: str | None) -> list[Watched]:
    spec = template.spec
    if region is not None and region != spec.implicit:
        field = spec.fields[region]
        return [("close", field)] if field.close_re is not None else []
    return [("open", field) for field in spec.fields.values() if field.open_re is not None]


@pytest.mark.parametrize("name", TEMPLATES)
@given(text=st.lists(st.sampled_from(MARKS) | st.text(max_size=3), min_size=1, max_size=5).map("".join))
def test_nothing_begins_in_a_plain_text(name: str, text: str) -> None:
    template = TEMPLATES[name]
    for region in (template.spec.implicit, *template.texts):
        watched = _watched(template, region)
        if template.is_plain(region, lambda found=watched: found, text):
            for kind, field in watched:
                pattern = field.open_re if kind == "open" else field.close_re
                found = pattern.search(text, partial=True)
                assert found is None or found.start() == len(text), (region, field.name)


def test_most_families_find_words_plain() -> None:
    """Else each token of theirs is searched."""
    plain = [
        name
        for name, each in TEMPLATES.items()
        if each.is_plain(each.spec.implicit, lambda of=each: _watched(of, of.spec.implicit), " w\u00f6rter")
    ]
    assert len(plain) >= len(TEMPLATES) - 4, sorted(set(TEMPLATES) - set(plain))


@pytest.mark.parametrize("begins", ["[[:upper:]]CALL ", r"(?:\m|\M)<call>", r"(?<=x)<call>", "(?i)k", r"\p{Lu}"])
def test_what_cannot_be_found_out_by_trying_is_never_plain(begins: str) -> None:
    fields = {"tool_calls": {"open_pattern": begins, "close": "</call>", "content": "text", "repeats": True}}
    template = Template(load_response_template({"start_anchor": "x", "fields": {"content": {}, **fields}}))
    assert not template.is_plain("content", lambda: _watched(template, "content"), "words")
