"""The engine on the device against transformers: greedy tokens in float32, log-probabilities in bf16."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine import LLM, SamplingParams
from engine.config import EngineArgs
from engine.pooling import PoolingParams
from engine.request import RequestOutput
from gpu.context import Context, load_test_module
from gpu.models import read_config, save_tiny

LONGEST = 700
COUNT = 32


def prompts_of(count: int, longest: int, vocab: int) -> list[list[int]]:
    rng = random.Random(7)
    lengths = [1, 2, 15, 16, 17, longest, *(rng.randint(1, longest) for _ in range(count - 6))]
    return [[rng.randrange(5, vocab) for _ in range(n)] for n in lengths[:count]]


def arguments(context: Context, model: Path, **changes: object) -> EngineArgs:
    """A small engine."""
    values: dict[str, object] = {
        "model": str(model),
        "device": context.device.torch_device.type,
        "max_model_len": 1024,
        "max_num_seqs": 4 if context.dry else 32,
        "max_num_batched_tokens": 32 if context.dry else 256,
        "kv_cache_memory": 4 << 20 if context.dry else 1 << 30,
        "cache_dir": str(context.cache_dir),
        **changes,
    }
    return EngineArgs(**values)  # type: ignore[arg-type]  # plain keyword values of a table


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


def run_parity(context: Context, names: Sequence[str]) -> None:
    """Parts `models-1` and so on: families of the tests."""
    oracle = load_test_module("end_to_end", "oracle")
    count, longest, tokens = (6, 20, 4) if context.dry else (24, LONGEST, COUNT)
    for family in names[:1] if context.dry else names:
        model = save_tiny(family, context.scratch / family)
        prompts = prompts_of(count, longest, int(read_config(context.scratch / family)["vocab_size"]))
        greedy = oracle.GreedyOracle(model, prompts, tokens)
        for name, options in _float32_variants(context).items():
            if context.out_of_time(f"{family}: {name}", 20.0):
                continue
            with LLM.from_args(arguments(context, context.scratch / family, dtype="float32", **options)) as llm:
                params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
                ours = tokens_of(generate(llm, prompts, params))
                vectors = _wrong_vectors(llm, model, prompts)
            context.check(f"{family}: float32 embeddings, {name}", vectors)
            problem = oracle.first_difference(ours, greedy.tokens(guesses=ours)) or None
            if problem is not None:
                problem += f"; {_gap(model, prompts, ours, greedy.tokens(guesses=ours))}"
            context.check(f"{family}: float32 greedy tokens, {name}", problem)
        for backend in ("cuda", "flashinfer"):
            if not context.out_of_time(f"{family}: bf16 by {backend}", 20.0):
                _bf16_logprobs(context, family, model, prompts, backend)


@torch.inference_mode()
def _gap(model: torch.nn.Module, prompts: list[list[int]], ours: list[list[int]], theirs: list[list[int]]) -> str:
    """How far apart transformers has the two tokens at the first difference."""
    which, at = next((i, j) for i, a in enumerate(ours) for j, x in enumerate(a) if x != theirs[i][j])
    ids = torch.tensor([[*prompts[which], *theirs[which][:at]]])
    logits: torch.Tensor = model.float().cpu()(input_ids=ids).logits[0, -1]
    return f"by {(logits[theirs[which][at]] - logits[ours[which][at]]).item():.6f} in transformers' logits"


@torch.inference_mode()
def _wrong_vectors(llm: LLM, model: torch.nn.Module, prompts: list[list[int]]) -> str | None:
    """Where a pooled prompt is not what transformers' hidden states make of it."""
    given = [{"prompt_token_ids": ids} for ids in prompts]
    base: Any = getattr(model, str(model.base_model_prefix)).float().cpu()
    for kind in ("last", "mean"):
        params = PoolingParams(pooling_type=kind, normalize=False)
        for ids, output in zip(prompts, llm.encode(given, params, use_tqdm=False), strict=True):
            states = base(torch.tensor([ids])).last_hidden_state[0]
            expected = states[-1] if kind == "last" else states.mean(dim=0)
            error = (torch.from_numpy(output.outputs.data) - expected).abs().max().item()
            if not error <= 2e-3 * max(1.0, expected.abs().max().item()):
                return f"{kind} of {len(ids)} tokens is off by {error:.5f}"
    return None


def cannot_start(context: Context, name: str, backend: str, error: ValueError) -> None:
    """FlashInfer is an option; everything else must start."""
    if backend == "flashinfer":
        context.skipped(name, str(error))
    else:
        context.check(name, f"the engine does not start: {error}")


def _float32_variants(context: Context) -> dict[str, dict[str, object]]:
    eager: dict[str, object] = {"attention_backend": "reference", "compile": "none"}
    return {
        "pieces, piecewise graphs": {"attention_backend": "reference", "graphs": "piecewise"},
        "eager": eager,
        "eager, n-gram drafts": {**eager, "speculative_config": {"method": "ngram", "prompt_lookup_min": 1}},
    }


def _bf16_logprobs(
    context: Context, family: str, model: torch.nn.Module, prompts: list[list[int]], backend: str
) -> None:
    """Our mean error against float32 must be about that of transformers' own bf16."""
    scored = [p for p in prompts if len(p) > 1]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    args = arguments(context, context.scratch / family, dtype="bfloat16", attention_backend=backend, graphs="none")
    name = f"{family}: bf16 log-probabilities by {backend}"
    try:
        with LLM.from_args(args) as llm:
            outputs = generate(llm, scored, params)
    except ValueError as error:
        cannot_start(context, name, backend, error)
        return
    ours = torch.tensor(
        [
            at[token].logprob
            for prompt, output in zip(scored, outputs, strict=True)
            for token, at in zip(prompt[1:], (output.prompt_logprobs or [])[1:], strict=True)
            if at is not None
        ]
    )
    exact = _hf_logprobs(model, scored, torch.device("cpu"))
    theirs = _hf_logprobs(copy.deepcopy(model).bfloat16(), scored, context.device.torch_device)
    our_error, their_error = (ours - exact).abs().mean().item(), (theirs - exact).abs().mean().item()
    context.figure("bf16_logprobs", {"family": family, "backend": backend, "ours": our_error, "theirs": their_error})
    limit = 1.5 * their_error + 1e-3
    wrong = not our_error <= limit
    context.check(name, f"mean |error| {our_error:.5f} nats, limit {limit:.5f}" if wrong else None)


@torch.inference_mode()
def _hf_logprobs(model: torch.nn.Module, prompts: list[list[int]], device: torch.device) -> torch.Tensor:
    model = model.to(device)
    rows = []
    for prompt in prompts:
        logits = model(input_ids=torch.tensor([prompt], device=device)).logits[0, :-1].float().log_softmax(-1)
        rows.append(logits.gather(1, torch.tensor(prompt[1:], device=device)[:, None])[:, 0].cpu())
    return torch.cat(rows)
