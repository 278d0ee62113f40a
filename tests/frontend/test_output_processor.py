"""Deltas of the core become the outputs that callers see: merged, cumulative or new only, stopped where asked."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_front import Front, deltas

from engine.core.wire import SequenceDelta
from engine.errors import InvalidRequestError, QueueFullError, RequestFailedError, TooShortError
from engine.frontend.output_processor import OutputProcessor
from engine.request import Logprob, RequestOutput
from engine.step import TokenLogprobs


def _run(front: Front, text: str, chunk: int = 1, **params: Any) -> tuple[RequestOutput, list[str], int]:
    """Generate `text`; the final output, what the core is told to abort, and how many tokens it had given by then."""
    processor = OutputProcessor(front.tokenizer)
    admitted = front.admit("hello", **params)
    processor.add(admitted, now=0.0)
    core_id = admitted.message.request_id
    ids = front.tokenizer.encode(text)
    aborts: list[str] = []
    fed = 0
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        last = start + chunk >= len(ids)
        delta = SequenceDelta(request_id=core_id, token_ids=part, finish_reason="length" if last else None)
        aborts += processor.process([delta], 1.0).aborts
        fed += len(part)
        if processor.finished("r"):
            break
    output = processor.take("r")
    assert output is not None
    return output, aborts, fed


@pytest.mark.parametrize("chunk", [1, 2, 3, 50])
def test_a_stop_string_over_token_borders_cuts_the_text_and_stops_the_core(front: Front, chunk: int) -> None:
    output, aborts, fed = _run(front, "the quick brown fox jumps over", chunk, stop=["n fo", "zzz"])
    sample = output.outputs[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("the quick brow", "stop", "n fo")
    assert output.finished
    # The token that completed the match is the last; the core is told unless it had ended by itself.
    text_of_tokens = front.tokenizer.decode(sample.token_ids)
    assert "n fo" in text_of_tokens and "n fo" not in front.tokenizer.decode(sample.token_ids[:-1])
    assert len(aborts) == (0 if fed == len(front.tokenizer.encode("the quick brown fox jumps over")) else 1)


def test_included_stop_string_and_held_back_text(front: Front) -> None:
    assert _run(front, "abc stop def", stop="stop", include_stop_str_in_output=True)[0].outputs[0].text == "abc stop"
    output = _run(front, "abc sto", stop="stop")[0].outputs[0]
    assert (output.text, output.finish_reason) == ("abc sto", "length")


def test_min_tokens_hold_for_stop_strings_too(front: Front) -> None:
    text = "stop and stop again"
    first = len(front.tokenizer.encode("stop"))
    output = _run(front, text, stop="stop", min_tokens=first, max_tokens=50)[0].outputs[0]
    assert (output.text, output.stop_reason) == ("stop and ", "stop")


@pytest.mark.parametrize(
    ("params", "text", "reason"),
    [
        ({}, "hello", None),
        ({"skip_special_tokens": False}, "hello", None),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "hello</s>", None),
        ({"stop_token_ids": [1]}, "hello", 1),
        ({"stop": "zz"}, "hello", None),
        ({"detokenize": False}, "", None),
    ],
)
def test_the_ending_token_is_in_the_ids_and_not_in_the_text(
    front: Front, params: dict[str, Any], text: str, reason: int | None
) -> None:
    processor = OutputProcessor(front.tokenizer)
    admitted = front.admit("x", **params)
    processor.add(admitted, now=0.0)
    ids = [*front.tokenizer.encode("hello"), 1]
    core_id = admitted.message.request_id
    processor.process(deltas(core_id, ids, finish_reason="stop", stop_token_id=1), 1.0)
    output = processor.take("r")
    assert output is not None
    sample = output.outputs[0]
    assert (sample.text, sample.token_ids, sample.finish_reason, sample.stop_reason) == (text, ids, "stop", reason)


@given(
    ids=st.lists(st.integers(0, 335), min_size=1, max_size=60), looks=st.sets(st.integers(0, 59)), stop=st.booleans()
)
def test_deltas_joined_equal_the_cumulative_output(front: Front, ids: list[int], looks: set[int], stop: bool) -> None:
    """However rarely the consumer looks."""
    params: dict[str, Any] = {"stop": "he"} if stop else {}
    joined, finals = "", []
    for delta_mode in (True, False):
        processor = OutputProcessor(front.tokenizer)
        admitted = front.admit("x", **params)
        processor.add(admitted, now=0.0, delta=delta_mode)
        tokens: list[int] = []
        for i, delta in enumerate(deltas(admitted.message.request_id, ids, finish_reason="length")):
            processor.process([delta], 1.0)
            output = processor.take("r") if i in looks or processor.finished("r") else None
            if output is not None and delta_mode:
                joined += "".join(s.text for s in output.outputs)
                tokens += [t for s in output.outputs for t in s.token_ids]
            if output is not None and output.finished:
                finals.append((output, tokens))
                break
    (delta_final, tokens), (final, _) = finals
    assert joined == final.outputs[0].text
    assert tokens == final.outputs[0].token_ids
    assert delta_final.outputs[0].finish_reason == final.outputs[0].finish_reason


def test_samples_of_one_request_merge_and_finish_together(front: Front) -> None:
    processor = OutputProcessor(front.tokenizer)
    admitted = front.admit("x", n=2)
    processor.add(admitted, now=10.0)
    a, b = admitted.message.request_ids
    hello, world = front.tokenizer.encode("hello"), front.tokenizer.encode("world")
    assert processor.process(deltas(a, hello, finish_reason="length", cached_tokens=0), 11.0).finished == []
    assert not processor.finished("r")
    progress = processor.process(deltas(b, world, finish_reason="length"), 12.0)
    output = processor.take("r")
    assert output is not None and output.finished and output.metrics is not None
    assert [s.text for s in output.outputs] == ["hello", "world"]
    assert (output.metrics.arrival_time, output.metrics.first_token_time, output.metrics.finished_time) == (10, 11, 12)
    timings = progress.finished[0]
    assert timings.generated_tokens == len(hello) + len(world)
    assert timings.end_to_end_s == 2.0


def test_log_probabilities_carry_ranks_and_text_chosen_first(front: Front) -> None:
    processor = OutputProcessor(front.tokenizer)
    admitted = front.admit("hello", logprobs=2, prompt_logprobs=0)
    prompt = admitted.prompt_token_ids
    processor.add(admitted, now=0.0)
    delta = SequenceDelta(
        request_id=admitted.message.request_id,
        token_ids=[40, 41],
        logprobs=[
            TokenLogprobs([40, 50, 40], [-2.0, -0.5, -2.0], 2),
            TokenLogprobs([41, 60, 61], [-9.0, -0.1, -3.0], 7),
        ],
        prompt_logprobs=[TokenLogprobs([t], [-1.0], 1) for t in prompt[1:]],
        finish_reason="length",
        cached_tokens=3,
        accepted_tokens=1,
    )
    processor.process([delta], 1.0)
    output = processor.take("r")
    assert output is not None and output.outputs[0].logprobs is not None and output.prompt_logprobs is not None
    first, second = output.outputs[0].logprobs
    text = front.tokenizer.token_text
    assert list(first.items()) == [(40, Logprob(-2.0, 2, text(40))), (50, Logprob(-0.5, 1, text(50)))]
    assert [(t, p.rank) for t, p in second.items()] == [(41, 7), (60, 1), (61, 2)]
    assert output.outputs[0].cumulative_logprob == pytest.approx(-11.0)
    assert output.prompt_logprobs[0] is None
    assert [list(p or {}) for p in output.prompt_logprobs[1:]] == [[t] for t in prompt[1:]]
    assert (output.num_cached_tokens, output.num_accepted_tokens) == (3, 1)


def test_log_probabilities_end_where_the_stop_string_ends(front: Front) -> None:
    processor = OutputProcessor(front.tokenizer)
    admitted = front.admit("x", stop="wor", logprobs=0)
    processor.add(admitted, now=0.0)
    ids = front.tokenizer.encode("hello world and the dog")
    entries = [TokenLogprobs([t], [-1.0], 1) for t in ids]
    processor.process([SequenceDelta(request_id=admitted.message.request_id, token_ids=ids, logprobs=entries)], 1.0)
    output = processor.take("r")
    assert output is not None and output.outputs[0].logprobs is not None
    sample = output.outputs[0]
    assert len(sample.token_ids) < len(ids)
    assert [next(iter(p)) for p in sample.logprobs or []] == sample.token_ids


@pytest.mark.parametrize(
    ("kind", "exception"),
    [
        ("queue_full", QueueFullError),
        ("too_short", TooShortError),
        ("invalid", InvalidRequestError),
        ("fault", RequestFailedError),
    ],
)
def test_one_failing_sample_fails_its_request_and_stops_its_siblings(
    front: Front, kind: str, exception: type[Exception]
) -> None:
    processor = OutputProcessor(front.tokenizer)
    admitted = front.admit("x", n=2)
    processor.add(admitted, now=0.0)
    a, b = admitted.message.request_ids
    failed = SequenceDelta(request_id=a, finish_reason="error", error="NaN", error_kind=kind)
    progress = processor.process([failed], 1.0)
    assert progress.aborts == [b]
    assert isinstance(processor.error("r"), exception)
    assert processor.process(deltas(b, [5]), 2.0).touched == []
    timings = [*progress.finished, processor.remove("r", 2.0)[1]]
    told = [each.finish_reasons for each in timings if each is not None]
    assert told == [["refused" if kind in ("queue_full", "too_short") else "error"] * 2]


def test_abort_keeps_what_was_generated_and_ignores_what_comes_later(front: Front) -> None:
    processor = OutputProcessor(front.tokenizer)
    admitted = front.admit("x")
    processor.add(admitted, now=0.0)
    core_id = admitted.message.request_id
    ids = front.tokenizer.encode("hello world")
    processor.process(deltas(core_id, ids), 1.0)
    assert processor.abort("r", 2.0)[0] == [core_id]
    assert processor.abort("r", 2.0)[0] == []
    processor.process(deltas(core_id, ids), 3.0)
    output = processor.take("r")
    assert output is not None and output.finished
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("hello world", "abort")


def test_an_id_in_flight_can_not_be_used_again(front: Front) -> None:
    processor = OutputProcessor(front.tokenizer)
    processor.add(front.admit("x"), now=0.0)
    with pytest.raises(InvalidRequestError) as caught:
        processor.add(front.admit("y"), now=0.0)
    assert caught.value.field == "request_id"
    processor.remove("r", 1.0)
    processor.add(front.admit("y"), now=0.0)


@pytest.mark.parametrize("final_only", [True, False])
def test_scores_of_a_prompt_are_converted_once(front: Front, monkeypatch: pytest.MonkeyPatch, final_only: bool) -> None:
    """However many outputs show them."""
    converted: list[int] = []

    def counted(entry: TokenLogprobs, tokenizer: object) -> dict[int, Logprob]:
        converted.append(entry.token_ids[0])
        return {entry.token_ids[0]: Logprob(entry.logprobs[0])}

    monkeypatch.setattr("engine.frontend.output_processor.to_logprobs", counted)
    processor = OutputProcessor(front.tokenizer)
    admitted = front.admit("hello world", prompt_logprobs=0)
    prompt, core_id = admitted.prompt_token_ids, admitted.message.request_id
    processor.add(admitted, now=0.0, **({"final_only": True} if final_only else {}))
    scores = [TokenLogprobs([t], [-1.0], 1) for t in prompt[1:]]
    processor.process([SequenceDelta(request_id=core_id, prompt_logprobs=scores)], 1.0)
    outputs = []
    for delta in deltas(core_id, [40] * 30, finish_reason="length"):
        processor.process([delta], 1.0)
        outputs.append(processor.take("r"))
    shown = [output for output in outputs if output is not None]
    assert len(shown) == (1 if final_only else 30)
    assert [len(output.prompt_logprobs or []) for output in shown] == [len(prompt)] * len(shown)
    assert converted == prompt[1:]


def test_samples_of_a_request_that_failed_are_given_up_in_the_core(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = OutputProcessor(front.tokenizer)
    admitted, other = front.admit("x", n=3, stop="never"), front.admit("y", "other")
    processor.add(admitted, now=0.0)
    processor.add(other, now=0.0)
    a, b, c = admitted.message.request_ids
    processor.process(deltas(a, [40], finish_reason="length"), 1.0)

    def broken(self: object, text: str) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr("engine.frontend.stop.StopMatcher.feed", broken)
    news = [*deltas(b, [41]), *deltas(other.message.request_id, [42]), *deltas(c, [43])]
    progress = processor.process(news, 2.0)
    assert sorted(progress.aborts) == sorted([b, c])
    assert [t.finish_reasons for t in progress.finished] == [["length", "error", "error"]]
    assert isinstance(processor.error("r"), RequestFailedError) and processor.error("other") is None
    assert progress.touched == ["r", "other"]
    taken = processor.take("other")
    assert taken is not None and taken.outputs[0].token_ids == [42]
    assert processor.remove("r", 3.0) == ([], None)
