"""Files of an adapter that change behind it: what was loaded is served, or nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace
from tiny_adapters import request, save_adapter
from tiny_families import save_tiny

from engine import AsyncEngine, EngineArgs, LoRARequest, SamplingParams
from engine.errors import EngineError, InvalidRequestError

ARGS = EngineArgs(
    model="",
    dtype="float32",
    device="cpu",
    max_model_len=100,
    kv_cache_memory=1 << 24,
    compile="none",
    enable_lora=True,
    max_loras=1,
    max_cpu_loras=1,
)


async def tokens(engine: AsyncEngine, adapter: LoRARequest) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": list(range(5, 45))}
    *_, last = [output async for output in engine.generate(prompt, params, lora_request=adapter)]
    return list(last.outputs[0].token_ids)


def test_what_was_pushed_out_comes_back_as_it_was_or_not_at_all(tmp_path: Path) -> None:
    model = save_tiny("Llama", tmp_path / "model")
    paths = [tmp_path / name for name in ("one", "other")]
    for seed, path in enumerate(paths):
        save_adapter(path, model, seed, size=0.5)

    async def go() -> None:
        async with AsyncEngine(replace(ARGS, model=str(tmp_path / "model"))) as engine:
            one, other = [await engine.checked_lora(request(path)) for path in paths]
            first = await tokens(engine, one)
            assert await tokens(engine, other) != first and await tokens(engine, one) == first
            save_adapter(paths[0], model, 7, size=0.5)
            assert await tokens(engine, one) == first, "it is still in its slot"
            await tokens(engine, other)
            with pytest.raises(EngineError, match="load it again") as failure:
                await tokens(engine, one)
            assert not isinstance(failure.value, InvalidRequestError), "it is not this request's fault"
            again = await engine.checked_lora(LoRARequest(one.lora_name, 99, one.lora_path))
            assert await tokens(engine, again) != first

    asyncio.run(asyncio.wait_for(go(), 120))
