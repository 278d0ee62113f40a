"""Stop strings: found at the first place where one is complete, however the text arrives; little is held back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.frontend.stop import StopMatcher

text = st.text("ab\n", max_size=40)
stops = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=4)


def _oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def _feed(matcher: StopMatcher, text: str, sizes: list[int]) -> str:
    shown, start = "", 0
    for size in [*sizes, len(text)]:
        shown += matcher.feed(text[start : start + size])
        start += size
        if matcher.matched is not None:
            return shown
    return shown + matcher.flush()


@given(text=text, stops=stops, sizes=st.lists(st.integers(0, 5), max_size=20))
def test_the_first_complete_match_wins_wherever_the_text_breaks(text: str, stops: list[str], sizes: list[int]) -> None:
    matcher = StopMatcher(stops)
    assert (_feed(matcher, text, sizes), matcher.matched) == _oracle(text, stops)


@given(text=text, stops=stops, sizes=st.lists(st.integers(0, 5), max_size=20))
def test_an_included_stop_string_ends_the_text(text: str, stops: list[str], sizes: list[int]) -> None:
    matcher = StopMatcher(stops, include_stop=True)
    before, stop = _oracle(text, stops)
    assert _feed(matcher, text, sizes) == before + (stop or "")


@given(text=text, stops=stops)
def test_what_is_held_back_could_still_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for i, character in enumerate(text):
        shown += matcher.feed(character)
        if matcher.matched is not None:
            return
        held = text[len(shown) : i + 1]
        assert not held or any(stop.startswith(held) for stop in stops)
        # And it is the longest such suffix: showing more than that would show part of a stop string.
        assert not any(stop.startswith(text[start : i + 1]) for stop in stops for start in range(len(shown)))
