"""`AsyncEngine`: what one request raises ends that request; pins that do not complete leave nothing in the core."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from failing_requests import Panic, raise_for_one
from scripted_core import EchoCore

from engine import AsyncEngine, EngineArgs, SamplingParams
from engine.core.wire import StepOutputs
from engine.errors import CoreDiedError, InvalidRequestError, RequestFailedError
from engine.frontend.output_processor import OutputProcessor

pytestmark = pytest.mark.timeout(60)
TEXT = "the quick brown fox"


def run(path: Path, body: Callable[[AsyncEngine, EchoCore], Awaitable[None]], core: Any = EchoCore) -> None:
    async def main() -> None:
        cores: list[EchoCore] = []

        def make(config: Any) -> EchoCore:
            cores.append(core(config))
            return cores[0]

        async with AsyncEngine(EngineArgs(model=str(path), device="cpu"), client_factory=make) as engine:
            await body(engine, cores[0])

    asyncio.run(main())


async def until(condition: Callable[[], object]) -> None:
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("never happened")


async def text_of(engine: AsyncEngine, *, delta: bool = False, **params: Any) -> str:
    outputs = [o async for o in engine.generate(TEXT, SamplingParams(max_tokens=40, **params), delta=delta)]
    return "".join(o.outputs[0].text for o in outputs) if delta else outputs[-1].outputs[0].text


@pytest.mark.parametrize("kind", [ValueError, Panic])
@pytest.mark.parametrize("method", ["extend", "output", "_advance_text", "_convert_logprobs"])
def test_what_one_request_raises_ends_no_other(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, method: str, kind: type[BaseException]
) -> None:
    """While its deltas are taken in, its text or scores made; with stop strings, text is made while taking in."""

    async def body(engine: AsyncEngine, core: EchoCore) -> None:
        expected = await text_of(engine)
        raise_for_one(monkeypatch, f"engine.frontend.sample.Sample.{method}", kind)
        scores: dict[str, Any] = {"logprobs": 1} if method == "_convert_logprobs" else {}
        others = [asyncio.create_task(text_of(engine, delta=i % 2 == 0)) for i in range(4)]
        for stop in (None, "never"):
            for delta in (False, True):
                with pytest.raises(RequestFailedError, match=kind.__name__):
                    await text_of(engine, min_tokens=1, stop=stop, delta=delta, **scores)
        assert await asyncio.gather(*others) == [expected] * 4
        engine.check_health()
        assert await text_of(engine) == expected
        await until(lambda: not core.running)
        assert len(engine._require().processor) == 0

    run(tiny_model, body)


class PanickingCore(EchoCore):
    async def recv_async(self) -> StepOutputs:
        outputs = await super().recv_async()
        if self.steps == 3:
            raise Panic("no exception")
        return outputs


def test_whatever_ends_the_receiver_is_told_to_health_and_streams(tiny_model: Path) -> None:
    async def body(engine: AsyncEngine, core: EchoCore) -> None:
        with pytest.raises(CoreDiedError, match="Panic"):
            await asyncio.wait_for(text_of(engine), 30)
        with pytest.raises(CoreDiedError):
            engine.check_health()

    run(tiny_model, body, PanickingCore)


def test_only_the_end_is_rendered_where_only_the_end_is_wanted(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    take = OutputProcessor.take

    def counted(self: OutputProcessor, request_id: str) -> Any:
        taken.append(request_id)
        return take(self, request_id)

    monkeypatch.setattr(OutputProcessor, "take", counted)

    async def body(engine: AsyncEngine, core: EchoCore) -> None:
        whole = await text_of(engine)
        assert len(taken) > 10
        taken.clear()
        params = SamplingParams(max_tokens=40)
        [output] = [o async for o in engine.generate(TEXT, params, final_only=True)]
        assert output.finished and output.outputs[0].text == whole
        assert len(taken) == 1
        with pytest.raises(InvalidRequestError):
            await anext(engine.generate(TEXT, params, final_only=True, delta=True))

    run(tiny_model, body)


@pytest.mark.parametrize("how", ["cancel", "abort"])
def test_a_pin_that_is_left_leaves_nothing_in_the_core(tiny_model: Path, how: str) -> None:
    async def body(engine: AsyncEngine, core: EchoCore) -> None:
        core.paused = True
        pinning = asyncio.create_task(engine.pin_prefix("a", "hello world"))
        await until(lambda: core.pinned)
        if how == "cancel":
            pinning.cancel()
        else:
            await engine.abort(engine._require().processor.request_ids())
        [error] = await asyncio.gather(pinning, return_exceptions=True)
        assert isinstance(error, (asyncio.CancelledError, RequestFailedError))
        await until(lambda: not core.pinned)
        assert engine.pinned_prefixes() == {}
        core.paused = False
        assert await engine.pin_prefix("a", "hello") == engine.pinned_prefixes()["a"]
        assert core.pinned == {"a"}

    run(tiny_model, body)


def test_a_name_belongs_to_the_first_who_pins_it(tiny_model: Path) -> None:
    async def body(engine: AsyncEngine, core: EchoCore) -> None:
        core.paused = True
        first = asyncio.create_task(engine.pin_prefix("a", "hello"))
        await until(lambda: core.pinned)
        for attempt in (engine.pin_prefix("a", "world"), engine.pin_prefix("a", "hello")):
            with pytest.raises(InvalidRequestError, match="pinned already"):
                await attempt
        with pytest.raises(InvalidRequestError, match="being computed"):
            engine.unpin_prefix("a")
        assert engine.pinned_prefixes() == {}
        core.paused = False
        core._sent.set()
        assert await first == engine.pinned_prefixes()["a"]
        assert [request.pin for request in core.added] == ["a"]
        engine.unpin_prefix("a")
        await until(lambda: not core.pinned)

    run(tiny_model, body)


@pytest.mark.parametrize("name", ["", "\ud83d", "x" * 300, 5])
def test_what_is_no_name_is_refused(tiny_model: Path, name: Any) -> None:
    async def body(engine: AsyncEngine, core: EchoCore) -> None:
        with pytest.raises(InvalidRequestError) as caught:
            await engine.pin_prefix(name, "hello")
        assert caught.value.field == "name"
        with pytest.raises(InvalidRequestError) as caught:
            await anext(engine.generate("hello", SamplingParams(), name))
        assert caught.value.field == "request_id"
        assert core.added == []

    run(tiny_model, body)
