"""What every graph mode says, scored by eager execution; and a steady decode step without a hidden wait."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine import SamplingParams
from engine.request import RequestOutput
from gpu.check_models import LONGEST, arguments, cannot_start, generate, prompts_of, tokens_of
from gpu.context import Context
from gpu.engine_probe import Probe, SteadyDecode, open_probe
from gpu.models import read_config, save_tiny

TIE_NATS = 0.25
"""bf16: two tokens whose log-probabilities differ by less may change places when a step is padded to another shape: two
units in the last place of logits between 8 and 16, which these models have, and as much again of the layers before"""

EAGER: dict[str, object] = {"compile": "none", "graphs": "none"}


def run_graphs(context: Context) -> None:
    """Part `graph modes`: what each says is scored by eager, memory that nobody wrote poisoned with NaN.

    In bf16 a padded batch may take another matrix kernel, whose rounding decides near ties, and what follows is another
    text; a wrong page, a stale buffer or a poisoned tail is far outside.
    """
    count, longest, tokens = (6, 20, 4) if context.dry else (48, LONGEST, 48)
    path = context.scratch / "Qwen3"
    save_tiny("Qwen3", path)
    prompts = prompts_of(count, longest, int(read_config(path)["vocab_size"]))
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    modes: list[dict[str, object]] = [EAGER]
    modes += [{"graphs": mode} for mode in ("none", "both", "full_decode", "piecewise")]
    modes += [{"compile": "none", "graphs": "full_decode"}]
    modes += [{"attention_backend": "flashinfer", "graphs": mode} for mode in ("none", "both")]
    said: dict[str, list[list[int]]] = {}
    for changes in modes:
        name = ", ".join(f"{k} {v}" for k, v in changes.items())
        if context.out_of_time(f"graph modes: {name}", 25.0):
            continue
        options: dict[str, object] = {"attention_backend": "cuda", "dtype": "bfloat16", **changes}
        try:
            probe = open_probe(arguments(context, path, **options))
        except ValueError as error:
            cannot_start(context, f"graph modes: {name}", str(options["attention_backend"]), error)
            continue
        try:
            probe.client.runner.wait_captured(min(40.0, context.left_s() / 2))
            _poison(context, probe, nan_in_cache=options["attention_backend"] == "cuda")
            outputs = generate(probe.llm, prompts, params)
            late = probe.client.runner.compiles_after_ready()
        finally:
            probe.close()
        context.check(f"{name}: nothing compiled after ready", f"{late} compilations" if late else None)
        failed = [o.outputs[0].stop_reason for o in outputs if o.outputs[0].finish_reason != "length"]
        context.check(f"{name}: no sequence failed", f"{len(failed)} failed: {failed[0]}" if failed else None)
        said[name] = tokens_of(outputs)
    _score(context, path, prompts, said)


def _score(context: Context, path: Path, prompts: list[list[int]], said: dict[str, list[list[int]]]) -> None:
    """Eager reads what each mode has said behind each prompt."""
    probe = open_probe(arguments(context, path, attention_backend="cuda", dtype="bfloat16", **EAGER))
    try:
        for name, answers in said.items():
            texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
            params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)
            problem, ties = not_greedy(generate(probe.llm, texts, params), prompts)
            count = sum(map(len, answers))
            context.check(f"{name}: tokens are greedy by eager", problem, f"{ties} of {count} are second at a tie")
    finally:
        probe.close()


def _poison(context: Context, probe: Probe, nan_in_cache: bool) -> None:
    """A slot of the KV cache that nobody wrote, and freed memory, read as NaN from now on."""
    if nan_in_cache:
        for cache in probe.client.runner.kv_caches():
            cache.view(torch.int16).fill_(0x7FFF)  # a NaN in bf16 and in float16
    context.device.poison_free_memory(1 << 20 if context.dry else 4 << 30)
    context.device.synchronize()


def not_greedy(scored: Sequence[RequestOutput], prompts: Sequence[Sequence[int]]) -> tuple[str | None, int]:
    """Where a token behind its prompt is no tie with the best one, or None; and how many are not the best themselves.

    scored: of prompts with what was said, with `prompt_logprobs`.
    """
    ties = 0
    for i, (output, prompt) in enumerate(zip(scored, prompts, strict=True)):
        said: Any = list(zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True))[len(prompt) :]
        for at, (token, candidates) in enumerate(said):
            gap = max(each.logprob for each in candidates.values()) - candidates[token].logprob
            if not gap <= TIE_NATS:
                return f"sequence {i}, token {at}: {token} is {gap:.3f} nats behind the best", ties
            ties += gap > 0
    return None, ties


def run_sync(context: Context) -> None:
    """Part `no hidden wait`: steady decode steps while any synchronising call is an error."""
    for family in ("Qwen3", "Qwen3_5"):
        save_tiny(family, context.scratch / family)
    modes: list[dict[str, object]] = [{"graphs": mode} for mode in ("both", "piecewise", "none")]
    modes += [EAGER, {"model": "Qwen3_5", "graphs": "piecewise"}]
    modes += [{"attention_backend": "flashinfer", "graphs": "both"}]
    batch, steps = (3, 3) if context.dry else (16, 24)
    for changes in modes:
        name = ", ".join(f"{k} {v}" for k, v in changes.items())
        path = context.scratch / str(changes.pop("model", "Qwen3"))
        vocab = int(read_config(path)["vocab_size"])
        if context.out_of_time(f"no hidden wait: {name}", 15.0):
            continue
        options: dict[str, object] = {"attention_backend": "cuda", "dtype": "bfloat16", "debug_sync": True, **changes}
        try:
            probe = open_probe(arguments(context, path, **options))
        except ValueError as error:
            cannot_start(context, f"no hidden wait: {name}", str(options["attention_backend"]), error)
            continue
        problem = None
        try:
            probe.client.runner.wait_captured(min(40.0, context.left_s() / 2))
            decode = SteadyDecode(probe.client, batch, 8 if context.dry else 40, 64, vocab)
            with context.device.sync_is_error():
                decode.steps(steps)
            decode.leave()
        except RuntimeError as error:
            problem = f"{type(error).__name__}: {error}"
        finally:
            probe.close()
            context.device.waits_are_fine()
        context.check(f"no hidden wait: {name}", problem)
