"""Parameters of another kind are refused by their names, before anybody computes with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine import SamplingParams
from engine.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        *((name, 1.5, "an integer, got 1.5") for name in ("n", "best_of", "max_tokens", "min_tokens", "top_k", "seed")),
        *((name, 1.5, "an integer, got 1.5") for name in ("logprobs", "prompt_logprobs", "truncate_prompt_tokens")),
        ("max_tokens", "5", "an integer, got '5'"),
        ("max_tokens", [5], "an integer, got list"),
        ("n", None, "an integer, got NoneType"),
        ("temperature", "hot", "a number, got 'hot'"),
        ("top_p", [0.5], "a number, got list"),
        ("temperature", None, "a number, got NoneType"),
        ("ignore_eos", "yes", "true or false, got 'yes'"),
        ("skip_special_tokens", 2, "true or false, got 2"),
        ("detokenize", 1.0, "true or false, got 1.0"),
        ("early_stopping", "maybe", "true or false, got 'maybe'"),
        ("stop", 5, "a list of strings, got 5"),
        ("stop", [5], "a list of strings, got list"),
        ("bad_words", "word", "a list of strings, got 'word'"),
        ("bad_words", [5], "a list of strings, got list"),
        ("stop_token_ids", 5, "a list of token ids, got 5"),
        ("stop_token_ids", "12", "a list of token ids, got '12'"),
        ("stop_token_ids", np.array(5), "a list of token ids, got ndarray"),
        ("stop_token_ids", np.array([1.5]), "must be an integer, got 1.5"),
        ("stop_token_ids", [1, 1.5], "must be an integer, got 1.5"),
        ("allowed_token_ids", [1.5], "must be an integer, got 1.5"),
        ("logit_bias", [(5, 1.0)], "token ids with their biases, got list"),
        ("logit_bias", {1.5: 1.0}, "must be an integer, got 1.5"),
        ("logit_bias", {"x": 1.0}, "must be an integer, got 'x'"),
        ("logit_bias", {5: "much"}, "a number, got 'much'"),
        ("logit_bias", {"9" * 5000: 1.0}, "must be an integer, got '999"),
        pytest.param("stop", 10**5000, "a list of strings, got int", id="huge"),
        ("early_stopping", np.array(["never"]), "true or false, got ndarray"),
        ("stop_token_ids", torch.empty(2, device="meta"), "a list of token ids, got Tensor"),
        ("structured_outputs", {"json": {}}, "StructuredOutputsParams"),
        ("extra_args", [1], "extra_args"),
    ],
)
def test_another_kind_is_refused_by_its_name(name: str, value: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        SamplingParams(**{name: value})
    assert says in str(refusal.value) and str(refusal.value).startswith(name)
    assert refusal.value.field == name


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("max_tokens", np.int64(5), 5),
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", 1, 1),
        ("stop_token_ids", np.array([1, 2]), [1, 2]),
        ("stop_token_ids", (1, np.int32(2)), [1, 2]),
        ("logit_bias", {"5": 1, 6: np.float64(2)}, {5: 1, 6: 2.0}),
        ("stop", ("a", "b"), ["a", "b"]),
        ("ignore_eos", 1, True),
        ("ignore_eos", np.bool_(False), False),
        ("seed", True, 1),
    ],
)
def test_what_means_the_same_is_taken(name: str, value: Any, kept: Any) -> None:
    found = getattr(SamplingParams(**{name: value}), name)
    assert found == kept and type(found) is type(kept)


def test_what_is_changed_later_is_checked_when_a_request_is_made_of_it() -> None:
    from engine.frontend.texts import check_params

    params = SamplingParams()
    params.max_tokens = 2.5  # type: ignore[assignment]
    with pytest.raises(InvalidRequestError, match=r"max_tokens must be an integer, got 2\.5"):
        check_params(params)
