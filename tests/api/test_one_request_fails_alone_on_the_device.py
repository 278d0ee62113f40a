"""What raises for one request in the runner or the sampler ends that request; the others get the tokens that they would
get without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine import LLM, SamplingParams
from engine.runner import step_sampler
from engine.sampling import batch, sampler
from engine.sampling.penalties import SeenTokens
from engine.step import RowParams

MARK = 1.25
"""the victim's bias: nobody else has it"""
VICTIM = SamplingParams(
    temperature=0.5, seed=3, max_tokens=8, logit_bias={5: MARK}, presence_penalty=0.5, logprobs=2, prompt_logprobs=3
)
OTHERS = [
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=1, max_tokens=9, logprobs=1, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=2, max_tokens=9, n=2, frequency_penalty=0.3, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=9, bad_words=["fox"], prompt_logprobs=1, ignore_eos=True),
]


class InjectedError(Exception):
    pass


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(
        str(tiny_model),
        device="cpu",
        dtype="float32",
        load_format="dummy",
        compile="none",
        max_num_batched_tokens=16,
        max_num_seqs=8,
        kv_cache_memory="4MiB",
    ) as llm:
        yield llm


def run(llm: LLM, victim: SamplingParams) -> tuple[Any, list[Any]]:
    prompts = ["the quick brown fox jumps over", "hello", "lazy dog", "stop words", "the fox the fox the fox"]
    first, *others = llm.generate(prompts, [victim, *OTHERS], use_tqdm=False)
    return first, [[(o.token_ids, o.finish_reason, o.logprobs) for o in each.outputs] for each in others]


def add(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sampler.row_edits

    def row_edits(params: RowParams, *args: Any) -> Any:
        if MARK in params.logit_bias.values():
            raise InjectedError("add")
        return real(params, *args)

    monkeypatch.setattr(sampler, "row_edits", row_edits)


def plan(monkeypatch: pytest.MonkeyPatch) -> None:
    real = batch.combine

    def combine(rows: Any, device: Any) -> Any:
        if any(MARK in edits.values.tolist() for _, edits in rows):
            raise InjectedError("plan")
        return real(rows, device)

    monkeypatch.setattr(batch, "combine", combine)


def penalise_after_logits_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sampler.Sampler._plan

    def _plan(self: sampler.Sampler, rows: Any) -> Any:
        made = real(self, rows)
        if any(MARK in self._states[row].params.logit_bias.values() for row in rows):
            assert made.edits is not None
            return msgspec.structs.replace(made, edits=Breaking(made.edits))
        return made

    class Breaking:
        def __init__(self, edits: Any) -> None:
            self.edits = edits

        def apply(self, *args: Any) -> None:
            self.edits.apply(*args)
            raise InjectedError("penalise")

    monkeypatch.setattr(sampler.Sampler, "_plan", _plan)


def history(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = SeenTokens.acquire, []

    def acquire(self: SeenTokens, token_ids: Any, prompt_len: int) -> int:
        calls.append(prompt_len)
        if len(calls) == 1:  # the victim comes first
            raise InjectedError("history")
        return real(self, token_ids, prompt_len)

    monkeypatch.setattr(SeenTokens, "acquire", acquire)


def score(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sampler.Sampler.prompt_logprobs

    def prompt_logprobs(self: sampler.Sampler, logits: Any, targets: Any, k: int) -> Any:
        if k == 3:
            raise InjectedError("score")
        return real(self, logits, targets, k)

    monkeypatch.setattr(step_sampler.Sampler, "prompt_logprobs", prompt_logprobs)


@pytest.mark.parametrize(
    "point", [add, plan, penalise_after_logits_have_changed, history, score], ids=lambda p: p.__name__
)
def test_an_exception_for_one_row_is_its_fault_alone(llm: LLM, point: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served, undisturbed = run(llm, VICTIM)
    assert served.outputs[0].finish_reason != "error"
    point(monkeypatch)
    failed, others = run(llm, VICTIM)
    assert failed.outputs[0].finish_reason == "error" and "InjectedError" in str(failed.outputs[0].stop_reason)
    assert others == undisturbed
    monkeypatch.undo()
    again, others = run(llm, VICTIM)
    assert others == undisturbed and again.outputs[0].token_ids == served.outputs[0].token_ids
    assert llm.stats().kv_blocks_used == 0
