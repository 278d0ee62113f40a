"""What adapters cost: usage: python tools/bench_adapters.py [MODEL] [--rank 16] [--tokens 128] [--pairs 7]

Seconds of one request and of 64 (prompts cached, so nearly all of it is decoding), as ratios to an engine without
adapters, in pairs of runs one behind the other; and what a request waits for whose adapter is not there, of 1,000 that
have names. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import torch
from safetensors.torch import save_file

from engine import LLM, AsyncEngine, EngineArgs, LoRARequest, SamplingParams
from engine.adapters.config import LoRAConfig
from engine.adapters.targets import Targets
from engine.frontend.demo import demo_model_path
from engine.models.description import describe
from engine.models.spec import DecoderSpec

REGISTERED = 1000
Span = tuple[float, float]
PROMPT = [3 + (i * 37) % 190 for i in range(32)]


def save_adapter(path: Path, spec: DecoderSpec, rank: int) -> None:
    """Random factors of all linear layers."""
    path.mkdir(parents=True)
    targets, tensors = Targets(spec, LoRAConfig(max_lora_rank=rank, max_loras=1, max_cpu_loras=1)), {}
    for part, name in {part: name for name, part in targets.named.items()}.items():
        a = torch.randn(rank, targets.inputs[part.layer]) * 0.02
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(torch.bfloat16)
        b = torch.randn(part.rows.count, rank) * 0.02
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(torch.bfloat16)
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


def seconds(llm: LLM, adapters: list[LoRARequest | None], tokens: int) -> float:
    """Of a batch, whole; its prompts are cached from the second time on."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [*PROMPT, index]} for index in range(len(adapters))]
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
    return time.perf_counter() - began


def paired(engines: tuple[LLM, LLM], cases: tuple[list[LoRARequest | None], ...], options: argparse.Namespace) -> Any:
    """Quartiles of the second case's seconds over the first one's, each pair one right behind the other, in turns."""
    for engine, case in zip(engines, cases, strict=True):
        seconds(engine, case, options.tokens)
    found = []
    for turn in range(options.pairs):
        taken = [0.0, 0.0]
        for which in (0, 1) if turn % 2 else (1, 0):
            taken[which] = seconds(engines[which], cases[which], options.tokens)
        found.append(taken[1] / taken[0])
    return [round(each, 4) for each in quantiles(found, n=4)]


def ratios(model: str, places: list[Path], options: argparse.Namespace) -> dict[str, Any]:
    """Of seconds with adapters to those of an engine without; and of the same engine's own steps without any."""
    adapters = [LoRARequest(place.name, number, str(place)) for number, place in enumerate(places, 1)]
    many: list[LoRARequest | None] = [None] * 64
    cases: dict[str, tuple[list[LoRARequest | None], ...]] = {
        "one request, none": ([None], [None]),
        "one request, one adapter": ([None], [adapters[0]]),
        "64 requests, none": (many, many),
        "64 requests, 8 adapters": (many, [adapters[i % 8] for i in range(64)]),
        "64 requests, 64 adapters": (many, [adapters[i] for i in range(64)]),
    }
    common: dict[str, Any] = {"device": "cpu", "max_model_len": 512, "max_num_seqs": 64, "kv_cache_memory": 1 << 30}
    common["quantization"] = options.quantization
    lora: dict[str, Any] = {"enable_lora": True, "max_loras": 64, "max_lora_rank": options.rank}
    found = {}
    with LLM(model, **common) as plain, LLM(model, **common, **lora) as able:
        plain.wait_compiled()
        able.wait_compiled()
        for name, case in cases.items():
            found[name] = paired((plain, able), case, options)
            print(f"{name}: quartiles {found[name]} of an engine without", flush=True)
    return found


async def misses(model: str, places: list[Path], options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds to the first token: resident, and not; and gaps of another stream meanwhile: of all, and the longest
    behind each request that came."""
    args = EngineArgs(
        model=model,
        device="cpu",
        max_model_len=2048,
        enable_lora=True,
        max_loras=8,
        max_lora_rank=options.rank,
        threads=options.threads,
        quantization=options.quantization,
    )
    registered = [LoRARequest(f"a{n}", n, str(places[n % len(places)])) for n in range(1, REGISTERED + 1)]
    async with AsyncEngine(args) as engine:
        await engine.wait_compiled()

        async def first(adapter: LoRARequest, salt: int) -> float:
            params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
            prompt, began = {"prompt_token_ids": [5 + salt % 100, salt // 100 + 5]}, time.perf_counter()
            async for _ in engine.generate(prompt, params, lora_request=adapter):
                pass
            asked.append((began, time.perf_counter()))
            return 1e3 * (asked[-1][1] - began)

        asked: list[Span] = []
        gaps: list[Span] = []

        async def stream() -> None:
            params = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True, detokenize=False)
            last = time.perf_counter()
            async for _ in engine.generate({"prompt_token_ids": PROMPT}, params, delta=True):
                now = time.perf_counter()
                gaps.append((now, 1e3 * (now - last)))
                last = now

        await first(registered[0], 0)
        hits = [await first(registered[0], salt) for salt in range(1, 40)]
        cold = [await first(registered[n], 100 + n) for n in range(1, 40)]
        other = asyncio.create_task(stream())
        await asyncio.sleep(2)
        began, hot = time.perf_counter(), [await first(registered[39], 300 + n) for n in range(40)]
        beside = [await first(registered[n], 400 + n) for n in range(40, 80)]
        await asyncio.sleep(0.1)
        other.cancel()

    return {
        "first token, resident": median(hits),
        "first token, a miss": median(cold),
        "beside a stream, resident": median(hot),
        "beside a stream, a miss": median(beside),
        **of_stream(gaps, began, asked[-80:-40], asked[-40:]),
    }


def of_stream(gaps: list[Span], began: float, hits: list[Span], misses: list[Span]) -> dict[str, float]:
    """`gaps`: when each ended, and its milliseconds; `began`: the first hit; the others: from when to when."""

    def longest(requests: list[Span]) -> float:
        return median(
            max((gap for at, gap in gaps if start < at < end + gap / 1e3), default=0.0) for start, end in requests
        )

    turn = misses[0][0]
    return {
        "the stream's mean gap, alone": mean(gap for at, gap in gaps[5:] if at < began),
        "the stream's mean gap, all resident": mean(gap for at, gap in gaps if began <= at < turn),
        "the stream's mean gap, misses": mean(gap for at, gap in gaps if turn <= at < misses[-1][1]),
        "its longest gap behind a request, resident": longest(hits),
        "its longest gap behind a request, a miss": longest(misses),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=None)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument(
        "--threads", type=int, help="of the engine whose misses are timed; one leaves a core to loading"
    )
    parser.add_argument("--quantization", default="none", help="of all engines; none: blocks of a file as bfloat16")
    parser.add_argument("--only", choices=["ratios", "misses"])
    options = parser.parse_args()
    model = options.model or str(demo_model_path())
    spec = describe(model).spec
    assert spec is not None
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / f"adapter-{index}" for index in range(64)]
        for place in places:
            save_adapter(place, spec, options.rank)
        found: dict[str, Any] = {}
        if options.only != "misses":
            found["ratios"] = ratios(model, places, options)
        if options.only != "ratios":
            found["milliseconds"] = asyncio.run(misses(model, places, options))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
