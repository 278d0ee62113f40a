"""`AsyncEngine`: who leaves is aborted, who is slow gets more at once, who waits learns that the core died."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from scripted_core import EchoCore

from engine import AsyncEngine, EngineArgs, SamplingParams
from engine.errors import ConfigError, CoreDiedError, InvalidRequestError, QueueFullError, RequestFailedError
from engine.limits import Limits
from engine.request import RequestOutput

pytestmark = pytest.mark.timeout(60)


def make(path: Path, limits: Limits | None = None, **core: Any) -> AsyncEngine:
    args = EngineArgs(model=str(path), device="cpu", limits=limits or Limits())
    return AsyncEngine(args, client_factory=lambda config: EchoCore(config, **core))


def run(path: Path, body: Callable[[AsyncEngine], Awaitable[None]], **core: Any) -> None:
    async def main() -> None:
        async with make(path, **core) as engine:
            await body(engine)

    asyncio.run(main())


def core_of(engine: AsyncEngine) -> EchoCore:
    core = engine._require().client
    assert isinstance(core, EchoCore)
    return core


async def until(condition: Callable[[], object]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("never happened")


async def collect(engine: AsyncEngine, text: str, **params: Any) -> list[RequestOutput]:
    delta = params.pop("delta", False)
    return [o async for o in engine.generate(text, SamplingParams(**params), delta=delta)]


def test_concurrent_streams_each_get_their_own_text(tiny_model: Path) -> None:
    async def body(engine: AsyncEngine) -> None:
        texts = [f"hello world {i} " * (1 + i % 3) for i in range(40)]
        lengths = [len(await engine.tokenize(t)) for t in texts]
        streams = [collect(engine, t, max_tokens=n, delta=i % 2 == 0) for i, (t, n) in enumerate(zip(texts, lengths))]
        for i, outputs in enumerate(await asyncio.gather(*streams)):
            parts = [o.outputs[0].text for o in outputs]
            assert ("".join(parts) if i % 2 == 0 else parts[-1]) == texts[i]
            assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        assert len(engine._require().processor) == 0

    run(tiny_model, body)


def test_the_core_is_told_its_vocabulary_before_anybody_streams(tiny_model: Path) -> None:
    async def body(engine: AsyncEngine) -> None:
        for _ in range(2):
            await collect(engine, "hello", max_tokens=2)
        [(vocabulary, after)] = core_of(engine).vocabularies
        assert after == 0 and vocabulary.tokenizer.startswith("{") and vocabulary.eos_token_ids

    run(tiny_model, body)


def test_a_request_that_the_queue_refuses_is_aborted_nowhere(tiny_model: Path) -> None:
    async def body(engine: AsyncEngine) -> None:
        core_of(engine).room = 0
        with pytest.raises(QueueFullError):
            await collect(engine, "hello", max_tokens=3)
        core_of(engine).room = None
        assert (await collect(engine, "hello", max_tokens=3))[-1].finished
        assert core_of(engine).aborted == [] and len(engine._require().processor) == 0 and engine.num_streams == 0

    run(tiny_model, body)


@pytest.mark.parametrize("how", ["break", "cancel", "close"])
def test_who_leaves_is_aborted_in_the_core(tiny_model: Path, how: str) -> None:
    async def consume(engine: AsyncEngine) -> None:
        async for _ in engine.generate("hello", SamplingParams(max_tokens=10_000, n=2)):
            if how == "break":
                return

    async def body(engine: AsyncEngine) -> None:
        core = core_of(engine)
        if how == "close":
            async with aclosing(engine.generate("hello", SamplingParams(max_tokens=10_000, n=2))) as stream:
                await anext(stream)
        else:
            task = asyncio.create_task(consume(engine))
            await until(lambda: core.steps >= 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not core.running)
        assert sorted(core.aborted) == sorted(name for r in core.added for name in r.request_ids)
        assert len(engine._require().processor) == 0

    run(tiny_model, body)


def test_a_slow_consumer_gets_several_steps_in_one_output(tiny_model: Path) -> None:
    async def body(engine: AsyncEngine) -> None:
        core = core_of(engine)
        text, pieces = "", 0
        async for output in engine.generate("hello ", SamplingParams(max_tokens=200), delta=True):
            text += output.outputs[0].text
            pieces += 1
            if pieces == 1:
                await until(lambda: not core.running)
        whole = (await collect(engine, "hello ", max_tokens=200))[-1].outputs[0].text
        assert text == whole
        assert pieces == 2

    run(tiny_model, body)


def test_abort_by_id_ends_the_stream_with_what_there_is(tiny_model: Path) -> None:
    async def body(engine: AsyncEngine) -> None:
        outputs = []
        async for output in engine.generate("hello", SamplingParams(max_tokens=10_000), "mine"):
            outputs.append(output)
            if len(outputs) == 3:
                await engine.abort("mine")
                await engine.abort("unknown")
        last = outputs[-1].outputs[0]
        assert last.finish_reason == "abort"
        assert len(last.token_ids) >= 3
        await until(lambda: not core_of(engine).running)

    run(tiny_model, body)


def test_a_dead_core_is_told_to_every_stream_and_to_health(tiny_model: Path) -> None:
    async def body(engine: AsyncEngine) -> None:
        engine.check_health()
        results = await asyncio.gather(
            *(collect(engine, "hello", max_tokens=10_000) for _ in range(5)), return_exceptions=True
        )
        assert all(isinstance(r, CoreDiedError) and "on fire" in str(r) for r in results)
        for attempt in (engine.check_health, lambda: engine.reset_prefix_cache()):
            with pytest.raises(CoreDiedError):
                attempt()
        with pytest.raises(CoreDiedError):
            await collect(engine, "hello")

    run(tiny_model, body, die_after=5)


def test_errors_reach_the_stream_concerned_and_no_other(tiny_model: Path) -> None:
    async def body(engine: AsyncEngine) -> None:
        async def poisoned() -> None:
            async for _ in engine.generate({"prompt_token_ids": [7, 8]}):
                pass

        good, bad = await asyncio.gather(collect(engine, "hello", max_tokens=20), poisoned(), return_exceptions=True)
        assert isinstance(good, list) and good[-1].finished
        assert isinstance(bad, RequestFailedError)
        with pytest.raises(InvalidRequestError):
            await collect(engine, "", max_tokens=5)
        stream = engine.generate("hello", SamplingParams(max_tokens=50), "twice")
        await anext(stream)
        with pytest.raises(InvalidRequestError, match="in flight"):
            await anext(engine.generate("hello", SamplingParams(), "twice"))
        await stream.aclose()

    run(tiny_model, body, poison=7)


def test_shutdown_releases_who_waits_and_closes_the_core(tiny_model: Path) -> None:
    async def main() -> None:
        engine = make(tiny_model)
        await engine.start()
        core = core_of(engine)
        core.paused = True
        waiting = asyncio.create_task(collect(engine, "hello", max_tokens=5))
        await until(lambda: core.running)
        await engine.shutdown()
        with pytest.raises(CoreDiedError, match="shut down"):
            await waiting
        assert core.closed
        await engine.shutdown()
        with pytest.raises(CoreDiedError):
            await engine.start()

    asyncio.run(main())


def test_it_starts_once_with_the_first_of_many_requests(tiny_model: Path) -> None:
    async def main() -> None:
        engine = make(tiny_model)
        results = await asyncio.gather(*(collect(engine, "hello", max_tokens=2) for _ in range(4)))
        assert all(r[-1].finished for r in results)
        await engine.shutdown()

    asyncio.run(main())


def test_a_start_that_fails_closes_the_core_and_says_why(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())  # no tokenizer there
    cores: list[EchoCore] = []

    def core(config: Any) -> EchoCore:
        cores.append(EchoCore(config))
        return cores[-1]

    async def main() -> None:
        engine = AsyncEngine(EngineArgs(model=str(tmp_path), device="cpu"), client_factory=core)
        with pytest.raises(ConfigError, match="tokenizer"):
            await engine.start()
        await engine.shutdown()

    asyncio.run(main())
    assert cores[0].closed


def test_the_event_loop_runs_on_while_a_long_text_is_tokenized(tiny_model: Path) -> None:
    async def body(engine: AsyncEngine) -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        ticker = asyncio.create_task(tick())
        text = json.dumps(list(range(60_000)))
        ids = await engine.tokenize(text)
        ticker.cancel()
        assert await engine.detokenize(ids) == text
        assert ticks > 3

    run(tiny_model, body, limits=Limits(contexts_translated=100_000))


def test_metrics_tell_what_happened(tiny_model: Path) -> None:
    async def body(engine: AsyncEngine) -> None:
        await collect(engine, "hello", max_tokens=4, n=2)
        stream = engine.generate("hello", SamplingParams(max_tokens=10_000))
        await anext(stream)
        await stream.aclose()
        value = engine.metrics.registry.get_sample_value
        labels = {"model_name": "tiny-llama"}
        assert value("pageloom_request_success_total", {**labels, "finished_reason": "length"}) == 2
        assert value("pageloom_request_success_total", {**labels, "finished_reason": "abort"}) == 1
        assert value("pageloom_request_success_total", {**labels, "finished_reason": "error"}) == 0
        assert value("pageloom_time_to_first_token_seconds_count", labels) == 2
        assert value("pageloom_e2e_request_latency_seconds_count", labels) == 2
        assert value("pageloom_request_generation_tokens_sum", labels) >= 9
        assert value("pageloom_kv_cache_usage_ratio", labels) == 0.5
        assert value("pageloom_engine_steps_total", labels) == engine.stats().steps > 4
        assert b'pageloom_preemptions_total{model_name="tiny-llama"} 0.0' in engine.metrics.render()

    run(tiny_model, body)
