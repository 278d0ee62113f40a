"""Admission: what can be served reaches the core resolved; what can never be is refused, naming field and limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_front import MAX_POSITION, Front

from engine.core.wire import AddRequest
from engine.errors import InvalidRequestError
from engine.frontend.admission import default_sampling_params, parse_prompt
from engine.request import SamplingParams


def _refusal(front: Front, token_ids: list[int], priority: int = 0, **params: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        front.admission.admit("r", None, token_ids, SamplingParams(**params), priority=priority)
    return caught.value


def _one(front: Front, **params: Any) -> AddRequest:
    return front.admit("hello", **params).message


@pytest.mark.parametrize(
    ("token_ids", "params", "field", "mentions"),
    [
        ([], {}, "prompt", "empty"),
        ([5, 340], {}, "prompt", "340"),
        ([-1], {}, "prompt", "-1"),
        ([5] * MAX_POSITION, {}, "prompt", "max_model_len"),
        ([5], {"logprobs": 21}, "logprobs", "max_logprobs"),
        ([5], {"prompt_logprobs": 21}, "prompt_logprobs", "max_logprobs"),
        ([5], {"stop_token_ids": [340]}, "stop_token_ids", "340"),
        ([5], {"allowed_token_ids": [1, 999]}, "allowed_token_ids", "999"),
        ([5], {"allowed_token_ids": [1] * 341}, "allowed_token_ids", "341"),
        ([5], {"logit_bias": {-2: 1.0}}, "logit_bias", "-2"),
        ([5], {"stop": "x", "detokenize": False}, "stop", "detokenize"),
        ([5] * 200, {"min_tokens": 100, "max_tokens": None}, "min_tokens", "56"),
        ([5], {"stop": ["x"] * 65}, "stop", "stop_strings=64"),
        ([5], {"stop": "x" * 1025}, "stop", "stop_string_chars=1024"),
        ([5], {"stop": ["x" * 1000] * 9}, "stop", "stop_strings_chars=8192"),
        ([5], {"stop_token_ids": list(range(257))}, "stop_token_ids", "stop_token_ids=256"),
        ([5], {"bad_words": ["x"] * 1025}, "bad_words", "bad_words=1024"),
        ([5], {"bad_words": ["x" * 257]}, "bad_words", "bad_word_chars=256"),
        ([5], {"bad_words": ["x" * 200] * 100}, "bad_words", "bad_words_chars=16384"),
        ([5], {"logit_bias": dict.fromkeys(range(4097), 1.0)}, "logit_bias", "logit_bias=4096"),
        (
            [5],
            {"use_beam_search": True, "n": 64, "stop_token_ids": list(range(100))},
            "best_of",
            "beam_candidates=2048",
        ),
    ],
)
def test_what_can_never_be_served_is_refused_by_field(
    front: Front, token_ids: list[int], params: dict[str, Any], field: str, mentions: str
) -> None:
    error = _refusal(front, token_ids, **params)
    assert error.field == field
    assert mentions in str(error)


def test_priority_is_refused_where_it_would_have_no_effect(front: Front, tiny_model: Path) -> None:
    assert _refusal(front, [5], priority=1).field == "priority"
    other = Front(tiny_model, scheduling_policy="priority")
    assert other.admission.admit("r", None, [5], SamplingParams(), priority=-3).message.priority == -3


def test_the_longest_prompt_that_fits_leaves_room_for_one_token(front: Front) -> None:
    admitted = front.admission.admit("r", None, [5] * (MAX_POSITION - 1), SamplingParams(max_tokens=50))
    assert admitted.message.max_tokens == 1


def test_without_max_tokens_the_context_is_filled(front: Front) -> None:
    request = _one(front, max_tokens=None)
    assert request.max_tokens == MAX_POSITION - len(request.prompt_token_ids)


def test_samples_take_consecutive_seeds_and_distinct_ids(front: Front) -> None:
    message = front.admit("hello", n=3, seed=2**63 - 2, prompt_logprobs=1).message
    assert [message.params.seed, *(follower.seed for follower in message.followers)] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert len(set(message.request_ids)) == 3
    assert message.params.prompt_logprobs == 1


def test_a_request_id_used_again_gets_other_core_ids(front: Front) -> None:
    assert front.admit("hello").message.request_id != front.admit("hello").message.request_id


def test_unseeded_requests_differ_within_an_engine_and_repeat_across_equal_ones(tiny_model: Path) -> None:
    runs = [[_one(engine).params.seed for _ in range(4)] for engine in (Front(tiny_model), Front(tiny_model))]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 4
    assert _one(Front(tiny_model, seed=1)).params.seed != runs[0][0]


def test_eos_ends_a_sequence_unless_ignored(front: Front) -> None:
    assert _one(front, stop_token_ids=[9]).params.stop_token_ids == [1, 9]
    assert _one(front, stop_token_ids=[9], ignore_eos=True).params.stop_token_ids == [9]


def test_bad_words_are_spelled_at_a_start_and_after_a_space(front: Front) -> None:
    words = _one(front, bad_words=["hello"]).params.bad_words
    assert sorted(front.tokenizer.decode(ids) for ids in words) == [" hello", "hello"]


def test_greedy_and_top_k_arrive_normalised(front: Front) -> None:
    params = _one(front, temperature=1e-7, top_k=-1, allowed_token_ids=[7, 3, 7]).params
    assert (params.temperature, params.top_k, params.allowed_token_ids) == (0.0, 0, [3, 7])


@pytest.mark.parametrize(
    "prompt", [5, None, {}, {"text": "x"}, {"prompt": 3}, {"prompt_token_ids": "ab"}, {"prompt": "a", "x": 1}]
)
def test_other_prompt_shapes_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_prompt(prompt)
    assert caught.value.field == "prompt"


def test_recommended_sampling_values_become_defaults() -> None:
    params = default_sampling_params({"temperature": 0.25, "top_k": 7, "max_new_tokens": 5, "do_sample": True})
    assert params == SamplingParams(temperature=0.25, top_k=7, max_tokens=5)
