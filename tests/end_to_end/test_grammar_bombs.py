"""Grammars made to take an engine down are refused, by the field, or served; streams beside them bring what they bring
alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

import pytest
from grammar_bombs import BOMBS
from msgspec.structs import replace
from tiny_families import save_tiny

from engine import AsyncEngine, EngineArgs, SamplingParams, StructuredOutputsParams
from engine.errors import InvalidRequestError, RequestFailedError

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
STREAMS = 8
TOKENS = 300


async def stream(engine: AsyncEngine, number: int) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    seen: list[int] = []
    async for output in engine.generate({"prompt_token_ids": [number + 3] * 4}, params):
        seen = list(output.outputs[0].token_ids)
    return seen


async def drop(engine: AsyncEngine, bomb: StructuredOutputsParams) -> str:
    """Why it was refused or could not go on, or "served"."""
    params = SamplingParams(n=2, seed=1, max_tokens=12, structured_outputs=bomb)
    try:
        async for output in engine.generate({"prompt_token_ids": [5, 6, 7]}, params):
            ends = [one.finish_reason for one in output.outputs]
    except InvalidRequestError as error:
        assert error.field == "structured_outputs"
        return str(error)
    except RequestFailedError as error:  # at a token in the middle, where the grammar is too much for the parser
        return str(error)
    assert set(ends) <= {"stop", "length"}
    return "served"


@pytest.mark.parametrize(("backend", "least_served"), [("llguidance", 20), ("xgrammar", 15)])
def test_each_is_refused_by_name_or_served_and_streams_beside_them_notice_nothing(
    tmp_path: Path, backend: Literal["llguidance", "xgrammar"], least_served: int
) -> None:
    if backend != "llguidance":
        pytest.importorskip(backend)
    bombs = {name: replace(bomb, backend=backend) for name, bomb in BOMBS.items()}
    save_tiny("Llama", tmp_path / "model")
    args = EngineArgs(
        model=str(tmp_path / "model"), compile="none", dtype="float32", device="cpu", max_model_len=512,
        max_num_seqs=24, kv_cache_memory=8 << 20, max_waiting=4 * len(BOMBS),
    )  # fmt: skip

    async def go() -> dict[str, str]:
        engine = AsyncEngine.from_args(args)
        try:
            alone = await asyncio.gather(*(stream(engine, number) for number in range(STREAMS)))
            beside = asyncio.gather(*(stream(engine, number) for number in range(STREAMS)))
            ends = dict(zip(bombs, await asyncio.gather(*(drop(engine, bomb) for bomb in bombs.values()))))
            assert await beside == alone
            assert await asyncio.gather(*(stream(engine, number) for number in range(STREAMS))) == alone
            simple = StructuredOutputsParams(choice=["yes", "no"])
            assert await drop(engine, simple) == "served"
            return ends
        finally:
            await engine.shutdown()

    ends = asyncio.run(go())
    assert len(ends) >= 60
    # A slow machine refuses some that a fast one serves: the time of one grammar is bounded.
    assert sum(end == "served" for end in ends.values()) >= least_served
    wrong = {
        n: e for n, e in ends.items() if e != "served" and not (e.startswith("structured_outputs") and len(e) < 700)
    }
    assert wrong == {}
