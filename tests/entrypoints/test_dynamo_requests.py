"""What Dynamo's frontend sends becomes our parameters; what we generate becomes its chunks."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import InvalidRequestError
from engine.request import CompletionOutput, Logprob, RequestOutput, SamplingParams
from entrypoints.dynamo.requests import chunks, sampling_params

DEFAULTS = SamplingParams(temperature=0.6, top_p=0.9, max_tokens=16)


def output(*samples: CompletionOutput, **changes: Any) -> RequestOutput:
    given = {"prompt_token_ids": [1, 2, 3], "num_cached_tokens": 2, "finished": False, **changes}
    return RequestOutput(request_id="r", prompt=None, outputs=list(samples), **given)


def test_what_is_not_said_is_the_models_default_and_null_is_not_said() -> None:
    request = {"token_ids": [1], "sampling_options": {"top_p": None, "top_k": 7, "use_beam_search": False}}
    params = sampling_params(request, DEFAULTS)
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.9, 7)
    assert params.max_tokens is None and not params.detokenize  # as long as there is room; text is Dynamo's


def test_tokens_that_end_come_from_both_lists_and_strings_are_dynamos() -> None:
    stops = {"stop": ["x"], "stop_token_ids_hidden": [3, 4], "stop_token_ids": [4, 5], "max_tokens": 9, "min_tokens": 2}
    params = sampling_params({"stop_conditions": stops, "output_options": {"logprobs": "2"}}, DEFAULTS)
    assert params.stop_token_ids == [3, 4, 5] and params.stop is None
    assert (params.max_tokens, params.min_tokens, params.logprobs, params.detokenize) == (9, 2, 2, True)


def test_a_grammar_is_one_of_ours() -> None:
    params = sampling_params({"sampling_options": {"guided_decoding": {"regex": "a+", "json": None}}}, DEFAULTS)
    assert params.structured_outputs is not None and params.structured_outputs.regex == "a+"


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"stop_conditions": {"max_thinking_tokens": 5}}, "max_thinking_tokens"),
        ({"sampling_options": {"temperature": -1}}, "temperature"),
        ({"sampling_options": {"guided_decoding": "a"}}, "guided_decoding"),
        ({"sampling_options": [1]}, "sampling_options"),
        ({"output_options": {"logprobs": "many"}}, "logprobs"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(request_: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        sampling_params(request_, DEFAULTS)
    assert refused.value.field == field


def test_chunks_are_of_each_sample_and_the_last_one_tells_why_and_how_much() -> None:
    generated: dict[int, int] = {}
    first = output(CompletionOutput(index=0, text="", token_ids=[5]), CompletionOutput(index=1, text="", token_ids=[]))
    assert list(chunks(first, generated)) == [{"token_ids": [5], "index": 0}]
    ends = [
        CompletionOutput(index=0, text="", token_ids=[6, 7], finish_reason="stop"),
        CompletionOutput(index=1, text="", token_ids=[], finish_reason="abort"),
    ]
    usage = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    assert list(chunks(output(*ends, finished=True), generated)) == [
        {
            "token_ids": [6, 7],
            "index": 0,
            "finish_reason": "stop",
            "completion_usage": {**usage, "completion_tokens": 3, "total_tokens": 6},
        },
        {
            "token_ids": [],
            "index": 1,
            "finish_reason": "cancelled",
            "completion_usage": {**usage, "completion_tokens": 0, "total_tokens": 3},
        },
    ]


def test_logprobs_are_the_chosen_tokens_and_the_best() -> None:
    at = {5: Logprob(-1.5, 2, "é"), 8: Logprob(-0.5, 1, None)}
    sample = CompletionOutput(index=0, text="", token_ids=[5], logprobs=[at], finish_reason="length")
    (chunk,) = chunks(output(sample, finished=True, prompt_logprobs=[None, at]), {})
    assert chunk["log_probs"] == [-1.5]
    assert chunk["top_logprobs"] == [
        [
            {"rank": 2, "token_id": 5, "token": "é", "logprob": -1.5, "bytes": [195, 169]},
            {"rank": 1, "token_id": 8, "token": "", "logprob": -0.5, "bytes": []},
        ]
    ]
    assert chunk["engine_data"]["prompt_logprobs"][1]["5"]["decoded_token"] == "é"
