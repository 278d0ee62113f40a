"""What a line of the request log says of parameters: numbers, and of texts how many."""

from __future__ import annotations

import pytest

from engine.request import SamplingParams, StructuredOutputsParams
from entrypoints.server.request_log import all_shortened, shortened, shown_params

SECRET = "tell nobody"


def test_parameters_are_shown_without_texts() -> None:
    params = SamplingParams(
        n=2,
        top_p=0.5,
        seed=7,
        ignore_eos=True,
        max_tokens=None,
        stop=SECRET,
        bad_words=[SECRET, "b"],
        logit_bias={5: 1.0},
        structured_outputs=StructuredOutputsParams(regex=SECRET),
    )
    shown = shown_params(params)
    assert shown == {
        "n": 2,
        "temperature": 1.0,
        "max_tokens": None,
        "top_p": 0.5,
        "seed": 7,
        "ignore_eos": True,
        "stop": 1,
        "bad_words": 2,
        "logit_bias": 1,
        "structured_outputs": "regex",
    }
    assert SECRET not in str(shown)


@pytest.mark.parametrize(("text", "shown"), [("", ""), ("abc", "abc"), ("abcd", "abc... (1 characters more)")])
def test_texts_are_cut(text: str, shown: str) -> None:
    assert shortened(text, 3) == shown
    assert shortened(None, 3) is None


def test_answers_share_their_room() -> None:
    assert all_shortened(["ab", "cd", "ef"], 3) == ["ab", "c... (1 characters more)", "... (2 characters more)"]
