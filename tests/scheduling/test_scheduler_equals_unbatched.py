"""Whatever the pool, the budget, the order and the interruptions: every request gets the tokens it would get alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replaying_executor import states_of
from scheduler_loop import Loop
from toy_adapters import BROKEN
from toy_model import POISON, generate, search

from engine.core.wire import BeamParams
from engine.frontend.pooled_prompt import PooledPrompt
from engine.layer_groups import State, Window, most_blocks
from engine.request import Tenant
from engine.step import Pooling


@dataclass
class Job:
    prompt: list[int]
    max_tokens: int
    stop: list[int]
    min_tokens: int
    priority: int
    arrives: int
    aborted_after: int | None
    prompt_logprobs: bool
    salt: str | None
    samples: int
    alike: bool
    width: int
    grammar: str | None
    pooling: Pooling | None
    adapter: int
    tenant: Tenant


_GRAMMARS = st.tuples(st.sampled_from("abc"), st.sampled_from([0, 1, 4, 9]), st.sampled_from([0, 0, 1, 5])).map(
    lambda parts: ":".join(map(str, parts))
)


@st.composite
def jobs(draw: st.DrawFn) -> list[Job]:
    heads = draw(st.lists(st.lists(st.integers(0, 10), min_size=1, max_size=14), min_size=1, max_size=3))
    out = []
    for _ in range(draw(st.integers(1, 12))):
        prompt = list(draw(st.sampled_from(heads))) + draw(st.lists(st.integers(0, 10), max_size=8))
        if draw(st.integers(0, 14)) == 0:
            prompt[draw(st.integers(0, len(prompt) - 1))] = POISON
        max_tokens = draw(st.integers(1, 14))
        out.append(
            Job(
                prompt=prompt,
                max_tokens=max_tokens,
                stop=draw(st.lists(st.integers(0, 10), max_size=2)),
                min_tokens=draw(st.integers(0, max_tokens)),
                priority=draw(st.integers(-1, 1)),
                arrives=draw(st.integers(0, 12)),
                aborted_after=draw(st.one_of(st.none(), st.none(), st.integers(0, 10))),
                prompt_logprobs=draw(st.integers(0, 4)) == 0,
                salt=draw(st.sampled_from([None, None, "a"])),
                samples=draw(st.sampled_from([1, 1, 2, 5])),
                alike=draw(st.booleans()),
                width=draw(st.sampled_from([0, 0, 0, 1, 2, 3])),
                grammar=draw(st.none() | st.none() | _GRAMMARS),
                pooling=draw(st.sampled_from([*([None] * 9), "last", "mean", "all"])),
                adapter=draw(st.sampled_from([0, 0, 0, 1, 2, 3, BROKEN])),
                tenant=Tenant(draw(st.sampled_from("abc")), draw(st.sampled_from([0.5, 1.0, 4.0]))),
            )
        )
    return out


@st.composite
def loops(draw: st.DrawFn) -> Loop:
    block_size, budget = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 24))
    state = State(draw(st.integers(1, 3)), block_size * draw(st.integers(1, 4)))
    windows: tuple[Window, ...] = draw(
        st.sampled_from(
            [(None,), (None,), (None,), (5,), (None, 3), (2, None, 9), (4, 4), (None, state), (3, None, state)]
        )
    )
    stages, drafts = draw(st.sampled_from([1, 1, 1, 2, 3])), draw(st.sampled_from([0, 1, 3, 8]))
    depth = draw(st.sampled_from([0, 1, 1, 2])) if stages == 1 else stages - 1
    most = max(budget, (depth + 1) * (1 + drafts))
    enough = sum(most_blocks(26, window, block_size, most) for window in windows)
    return Loop(
        depth=depth,
        num_blocks=enough + draw(st.integers(0, 3) | st.integers(0, 20)),
        block_size=block_size,
        rows=draw(st.integers(1, 6)),
        budget=budget,
        windows=windows,
        num_host_blocks=draw(st.sampled_from([0, 1, 4, 16, 40, 80])),
        preemption=draw(st.sampled_from(["auto", "recompute", "swap", "swap"])),
        swap_block_s=draw(st.sampled_from([0.0, 0.00001, 0.0001, 0.01])),
        min_shared_chunk=draw(st.sampled_from([1, 4, 256])),
        drafts=drafts,
        pads=draw(st.booleans()),
        exact=draw(st.sampled_from([False, False, True])),
        stages=(stages, draw(st.sampled_from([1, 8, 100]))),
        max_model_len=draw(st.integers(23, 27)),
        policy=draw(st.sampled_from(["fcfs", "priority", "fair", "fair"])),
        caching=draw(st.booleans()),
        mixed=draw(st.none() | st.integers(1, 24)),
        adapters=(draw(st.integers(1, 3)), draw(st.sampled_from([0, 1, 3]))),
    )


def _beams(loop: Loop, job: Job) -> BeamParams | None:
    """The job is a search where the rows and the pool have room for one."""
    if job.pooling is not None:
        return None
    max_total = min(len(job.prompt) + job.max_tokens, loop.max_model_len)
    own = loop.kv.blocks_beyond(len(job.prompt), max_total - 1)
    fits = loop.kv.blocks_for(max_total - 1, job.width - 1) + (job.width - 1) * own <= loop.kv.pool.num_blocks
    return BeamParams(width=job.width) if 0 < job.width <= loop.executor.num_rows and fits else None


def _samples(loop: Loop, job: Job) -> int:
    if job.pooling is not None:
        return 1
    return job.samples if _beams(loop, job) is None else min(job.samples, job.width)


def _expected(loop: Loop, job: Job, sample: int) -> tuple[list[int], str]:
    if job.adapter == BROKEN:
        return [], "error"
    if job.pooling is not None:
        return [], "error" if POISON in job.prompt else "stop"
    max_total = min(len(job.prompt) + job.max_tokens, loop.max_model_len)
    beams = _beams(loop, job)
    if beams is not None:
        if POISON in job.prompt:
            return [], "error"
        found = search(job.prompt, max_total, set(job.stop), beams, _grammar(loop, job), job.adapter)[
            sample : sample + 1
        ]
        if not found:  # the grammar has not as many outputs
            return [], "length"
        return found[0].token_ids, "stop" if found[0].stopped else "length"
    seed = 0 if job.alike else sample
    return generate(job.prompt, max_total, set(job.stop), job.min_tokens, seed, _grammar(loop, job), job.adapter)


def _grammar(loop: Loop, job: Job) -> str | None:
    """A search goes on behind the end of a grammar, with EOS: here it has none."""
    if job.pooling is not None:
        return None
    if job.grammar is None or _beams(loop, job) is None:
        return job.grammar
    name, _, delay = job.grammar.split(":")
    return f"{name}:0:{delay}"


def _scored(loop: Loop, job: Job) -> bool:
    return job.prompt_logprobs and _beams(loop, job) is None and job.pooling is None


def _vectors(loop: Loop, name: str, job: Job) -> np.ndarray:
    """What a front end makes of the chunks that have come."""
    assert job.pooling is not None
    pooled = PooledPrompt(job.pooling, len(job.prompt))
    for delta in loop.deltas[name]:
        pooled.add(delta.pooled, delta.pooled_from)
    found = pooled.vectors()
    assert found is not None
    return found


def _expected_vectors(prompt: list[int], kind: Pooling, adapter: int) -> np.ndarray:
    states = states_of(prompt, adapter)
    mean = (states.sum(axis=0, dtype=np.float64, keepdims=True) / len(prompt)).astype(np.float32)
    return {"last": states[-1:], "mean": mean, "all": states}[kind]


def _name(index: int, sample: int) -> str:
    return f"{index}.{sample}" if sample else str(index)


def _serve(loop: Loop, work: list[Job]) -> None:
    for turn in range(3000):
        for index, job in enumerate(work):
            if job.arrives == turn:
                loop.add(
                    str(index),
                    job.prompt,
                    1 if job.pooling else job.max_tokens,
                    stop=() if job.pooling else job.stop,
                    min_tokens=0 if job.pooling else job.min_tokens,
                    priority=job.priority,
                    salt=job.salt,
                    prompt_logprobs=1 if _scored(loop, job) else None,
                    followers=[_name(index, sample) for sample in range(1, _samples(loop, job))],
                    alike=job.alike,
                    beams=_beams(loop, job),
                    grammar=_grammar(loop, job),
                    pooling=job.pooling,
                    adapter_number=job.adapter,
                    tenant=job.tenant,
                )
            if job.aborted_after is not None and job.arrives + job.aborted_after == turn:
                loop.abort([_name(index, 0), _name(index, 3), "unknown"])
        assert loop.turn() or not loop.scheduler.has_work, "stuck"
        if turn > 24 and not loop.scheduler.has_work and not loop.waits_elsewhere:
            return
    raise AssertionError("requests starve")


@settings(max_examples=2 * settings.default.max_examples)
@given(loop=loops(), work=jobs())
@pytest.mark.timeout(1500)
def test_every_request_gets_the_tokens_it_would_get_alone(loop: Loop, work: list[Job]) -> None:
    _serve(loop, work)
    for name, job, sample in (
        (_name(i, n), each, n) for i, each in enumerate(work) for n in range(_samples(loop, each))
    ):
        tokens, reason = _expected(loop, job, sample)
        got = loop.tokens[name]
        if loop.reason(name) == "abort":
            assert job.aborted_after is not None
            assert got == tokens[: len(got)]
        else:
            assert (got, loop.reason(name)) == (tokens, reason)
        (end,) = loop.ends[name]
        counted = len(tokens) > job.min_tokens or _beams(loop, job) is not None
        stopped = end.finish_reason == "stop" and counted and not job.pooling and tokens[-1] in job.stop
        assert end.stop_token_id == (tokens[-1] if stopped else None)
        positions = [-int(entry.logprobs[0]) for entry in loop.prompt_logprobs[name]]
        assert positions == list(range(1, len(positions) + 1)), "each prompt position once, in order"
        if job.pooling is not None and end.finish_reason == "stop":
            assert (
                _vectors(loop, name, job).tolist() == _expected_vectors(job.prompt, job.pooling, job.adapter).tolist()
            )
        if _scored(loop, job) and sample == 0 and end.finish_reason in ("stop", "length"):
            assert len(positions) == len(job.prompt) - 1
            assert [entry.token_ids[0] for entry in loop.prompt_logprobs[name]] == job.prompt[1:]
            assert loop.cached(name) == 0
    loop.assert_nothing_leaked()


def test_a_step_whose_sequences_have_all_given_way_becomes_the_step_of_others() -> None:
    """With stages: those that gave way had the turn, and nothing is in flight that would bring the others theirs."""
    rows: dict[str, Any] = {"rows": 4, "budget": 7, "max_model_len": 23, "caching": False, "windows": (5,)}
    loop = Loop(num_blocks=12, block_size=1, min_shared_chunk=1, drafts=1, stages=(2, 1), **rows)
    for name in "abcd":
        loop.add(name, [POISON], 1, prompt_logprobs=1)
    loop.add("e", [0], 7, prompt_logprobs=1)
    for name in "fg":
        loop.add(name, [POISON], 1, prompt_logprobs=1)
    loop.add("h", [0, 0], 4, prompt_logprobs=1, followers=["h1", "h2", "h3", "h4"], alike=False)
    loop.abort(["h", "h3"])
    loop.run()
    assert loop.scheduler.stats().preemptions > 0
    assert loop.tokens["e"] == generate([0], 8, set())[0]
    loop.assert_nothing_leaked()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("caching", [False, True])
def test_a_pool_that_holds_one_sequence_serves_eight(depth: int, caching: bool) -> None:
    loop = Loop(depth=depth, num_blocks=8, block_size=4, rows=8, budget=16, max_model_len=33, caching=caching)
    prompts = [[(7 * i + j) % 11 for j in range(3)] for i in range(8)]
    for i, prompt in enumerate(prompts):
        loop.add(str(i), prompt, 29)
    loop.run()
    assert loop.scheduler.stats().preemptions > 0, "the test must force preemption"
    for i, prompt in enumerate(prompts):
        assert loop.tokens[str(i)] == generate(prompt, 32, set())[0]
    loop.assert_nothing_leaked()
