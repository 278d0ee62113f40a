"""vLLM's engines: stepped by hand, or on an event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from scripted_core import EchoCore

from engine import (
    LLM,
    AsyncEngine,
    AsyncLLM,
    AsyncLLMEngine,
    EngineArgs,
    LLMEngine,
    RequestOutputKind,
    SamplingParams,
)
from engine.errors import CoreDiedError, InvalidRequestError, ShutDownError
from engine.session import open_session
from engine.stepping import Stepper

pytestmark = pytest.mark.timeout(60)
TEXTS = ["the quick brown fox", "hello", "jumps over the lazy dog"]


def stepping(path: Path, core: Any = EchoCore, **settings: Any) -> tuple[LLMEngine, EchoCore]:
    session = open_session(EngineArgs(model=str(path), device="cpu", **settings), core)
    assert isinstance(session.client, EchoCore)
    return LLMEngine(session, Stepper(session)), session.client


# -- LLMEngine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_steps_bring_what_the_output_kind_says(tiny_model: Path, kind: RequestOutputKind) -> None:
    engine, _ = stepping(tiny_model)
    tokens = {text: engine.get_tokenizer().encode(text) for text in TEXTS}
    for text in TEXTS:
        engine.add_request(text, text, SamplingParams(max_tokens=len(tokens[text]), output_kind=kind))
    assert engine.get_num_unfinished_requests() == 3
    seen: dict[str, list[list[int]]] = {text: [] for text in TEXTS}
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen[output.request_id].append(output.outputs[0].token_ids)
            assert output.finished == (sum(map(len, seen[output.request_id])) == len(tokens[output.request_id])) or (
                kind is RequestOutputKind.CUMULATIVE
            )
    for text, parts in seen.items():
        expected = {
            RequestOutputKind.CUMULATIVE: [tokens[text][: i + 1] for i in range(len(tokens[text]))],
            RequestOutputKind.DELTA: [[token] for token in tokens[text]],
            RequestOutputKind.FINAL_ONLY: [tokens[text]],
        }[kind]
        assert parts == expected
    assert engine.step() == [] and engine.get_num_unfinished_requests() == 0
    engine.shutdown()
    engine.shutdown()


def test_an_engine_that_was_shut_down_takes_no_request(tiny_model: Path) -> None:
    engine, _ = stepping(tiny_model)
    engine.shutdown()
    with pytest.raises(ShutDownError):
        engine.add_request("late", "hello")
    assert not engine.has_unfinished_requests()


def test_an_aborted_request_has_no_further_outputs(tiny_model: Path) -> None:
    engine, core = stepping(tiny_model, max_waiting=2)
    for name in "abcd":
        engine.add_request(name, "hello", SamplingParams(max_tokens=50))
    engine.step()
    assert core.most_at_once == 2  # the others wait here
    engine.abort_request(["a", "d", "unknown"])
    engine.abort_request("b")
    with pytest.raises(InvalidRequestError, match="in flight"):
        engine.add_request("c", "hello")
    names = set()
    while engine.has_unfinished_requests():
        names |= {output.request_id for output in engine.step()}
    core._drain()
    assert names == {"c"} and len(core.aborted) == 2 and not core.running
    engine.shutdown()


def test_a_request_that_fails_ends_alone(tiny_model: Path) -> None:
    engine, _ = stepping(tiny_model, lambda config: EchoCore(config, poison=7))
    engine.add_request("bad", [7, 8], SamplingParams(max_tokens=3))
    engine.add_request("good", [8, 9], SamplingParams(max_tokens=3))
    last = {}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
    reasons = {name: output.outputs[0].finish_reason for name, output in last.items()}
    assert reasons == {"bad": "error", "good": "length"}
    assert all(output.finished for output in last.values())
    engine.shutdown()


def test_a_dead_core_is_told_by_the_step(tiny_model: Path) -> None:
    engine, _ = stepping(tiny_model, lambda config: EchoCore(config, die_after=1))
    engine.add_request("a", "hello", SamplingParams(max_tokens=5))
    engine.step()
    with pytest.raises(CoreDiedError, match="fire"):
        engine.step()
    engine.shutdown()


def test_an_llm_gives_its_engines_requests_back(tiny_model: Path) -> None:
    """What was added by hand goes on while `generate` runs, and its outputs are there afterwards."""
    llm = LLM.from_args(EngineArgs(model=str(tiny_model), device="cpu"), client_factory=EchoCore)
    engine = llm.llm_engine
    engine.add_request("mine", TEXTS[0], SamplingParams(max_tokens=2, output_kind=RequestOutputKind.DELTA))
    outputs = llm.generate(TEXTS, SamplingParams(max_tokens=6), use_tqdm=False)
    assert [output.prompt for output in outputs] == TEXTS and engine.has_unfinished_requests()
    kept = []
    while engine.has_unfinished_requests():
        kept += engine.step()
    assert [output.request_id for output in kept] == ["mine", "mine"]
    assert [token for output in kept for token in output.outputs[0].token_ids] == kept[0].prompt_token_ids[:2]
    llm.shutdown()


# -- AsyncLLM --------------------------------------------------------------------------------------------------------


def test_async_llm_streams_as_the_output_kind_says(tiny_model: Path) -> None:
    async def main() -> None:
        engine = AsyncLLM(AsyncEngine(EngineArgs(model=str(tiny_model), device="cpu"), client_factory=EchoCore))
        tokens = (await engine.get_tokenizer()).encode(TEXTS[0])
        counts = {}
        for kind in RequestOutputKind:
            params = SamplingParams(max_tokens=len(tokens), output_kind=kind)
            got = [output async for output in engine.generate(TEXTS[0], params, request_id=f"r{kind}")]
            counts[kind] = len(got)
            if kind is RequestOutputKind.DELTA:
                assert "".join(output.outputs[0].text for output in got) == TEXTS[0]
            else:
                assert got[-1].outputs[0].text == TEXTS[0]
        assert counts[RequestOutputKind.FINAL_ONLY] == 1 < counts[RequestOutputKind.CUMULATIVE]
        assert engine.is_running and engine.dead_error is None
        await engine.check_health()
        assert await engine.reset_prefix_cache() and (await engine.get_model_config()).max_model_len == 256
        engine.shutdown()
        assert engine.errored
        with pytest.raises(CoreDiedError):
            await engine.check_health()

    asyncio.run(main())


def test_leaving_an_async_llms_stream_aborts_it(tiny_model: Path) -> None:
    async def main() -> None:
        inner = AsyncEngine(EngineArgs(model=str(tiny_model), device="cpu"), client_factory=EchoCore)
        engine = AsyncLLMEngine(inner)
        stream = engine.generate("hello", SamplingParams(max_tokens=10_000), "r")
        await anext(stream)
        await stream.aclose()
        core = inner._require().client
        assert isinstance(core, EchoCore)
        while core.running:
            await asyncio.sleep(0.001)
        assert len(core.aborted) == 1
        outputs = []
        async for output in engine.generate("hello", SamplingParams(max_tokens=10_000), "s"):
            outputs.append(output)
            await engine.abort("s")
        assert outputs[-1].outputs[0].finish_reason == "abort"
        engine.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize("turns", [0, 3])
def test_shutdown_without_await_closes_the_core_and_ends_streams(tiny_model: Path, turns: int) -> None:
    """Also where the event loop ends with it."""
    cores: list[EchoCore] = []

    def core(config: Any) -> EchoCore:
        cores.append(EchoCore(config))
        return cores[-1]

    async def main() -> None:
        engine = AsyncLLM(AsyncEngine(EngineArgs(model=str(tiny_model), device="cpu"), client_factory=core))
        stream = engine.generate("hello", SamplingParams(max_tokens=10_000), "r")
        await anext(stream)
        engine.shutdown()
        if turns:
            with pytest.raises(CoreDiedError):
                while True:
                    await anext(stream)
        for _ in range(turns):
            await asyncio.sleep(0)
        assert not turns or cores[0].closed

    asyncio.run(main())
    assert cores[0].closed
