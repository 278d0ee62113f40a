"""Run by tests/end_to_end/test_pretend_gpu.py in a process of its own (Triton must be imported with TRITON_INTERPRET=1
already set): `python pretend_cases.py FOLDER CASE...` runs engines on a pretend GPU and prints a JSON line for each
case, with what was wrong."""

from __future__ import annotations

import itertools
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(TESTS), *(str(TESTS / room) for room in ("end_to_end", "models"))]

import torch  # noqa: E402 - the path comes first
from pretend_choices import chosen_by_itself, compiled, prepare  # noqa: E402
from pretend_gpu import pretend_gpu  # noqa: E402
from pretend_products import (  # noqa: E402
    chunks,
    experts,
    invariant,
    invariant_experts,
    latents,
    latents_by_the_oracle,
    library_experts,
    not_invariant,
    packed,
)
from pretend_workloads import (  # noqa: E402
    GREEDY,
    HALF_TIE_NATS,
    PROMPTS,
    ROOMY,
    SCORED,
    TIE_NATS,
    Oracles,
    check_closed,
    check_graphs,
    exact,
    generate,
    loaded,
    mixed_params,
    run_mixed,
    run_samples,
    same_but_for_ties,
    save_models,
    small_pool,
    tokens,
)

import engine.models.linear_choice as linear_choice  # noqa: E402
import engine.models.linear_timing as linear_timing  # noqa: E402
import engine.runner.loading as loading  # noqa: E402
import engine.runner.model_runner as model_runner  # noqa: E402
from engine import LLM  # noqa: E402


def greedy(
    folder: Path, oracles: Oracles, backend: str, graphs: str, compile: str, dtype: str = "float16", **options: Any
) -> None:
    oracle = oracles.greedy("bfloat16" if dtype == "bfloat16" else "float32")
    with pretend_gpu(inductor=False) as machine:
        with loaded(
            folder, device="cuda", attention_backend=backend, graphs=graphs, compile=compile, dtype=dtype, **options
        ) as llm:
            assert llm.ready.attention_backend == backend
            outputs = generate(llm, PROMPTS, GREEDY)
            again = generate(llm, PROMPTS[3:], GREEDY)
            check_graphs(machine, llm, graphs)
        check_closed(machine)
    differing = same_but_for_ties(outputs, oracle, TIE_NATS if dtype == "bfloat16" else HALF_TIE_NATS)
    assert differing <= (3 if dtype == "bfloat16" else 1), f"{differing} of {len(PROMPTS)} sequences differ"
    same_but_for_ties(again, oracle[3:], TIE_NATS if dtype == "bfloat16" else HALF_TIE_NATS)


DRAFTS: dict[str, Any] = {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
}


def with_model(case: Callable[..., None], method: str, folder: Path, oracles: Oracles, **options: Any) -> None:
    """The case with drafts from a model; its layer beside the target's three takes a quarter of the pool."""
    target, name = folder / "deep", "head" if method == "eagle3" else "model"
    config = {"method": method, "model": str(target / name), "num_speculative_tokens": 3}
    case(target, Oracles(target, 3), layers=4, speculative_config=config, **options)


def over_states(case: Callable[..., None], folder: Path, oracles: Oracles, **options: Any) -> None:
    """The case with a model whose layers keep states; with room for little more than one sequence."""
    target = folder / "states"
    case(target, Oracles(target, 1.25), **options)


def mixed_equals_cpu(
    folder: Path, oracles: Oracles, graphs: str, compile: str, layers: float = 2, near: float = 1e-5, **options: Any
) -> None:
    """By the same arithmetic, so token for token: what differs is everything but the matrix products."""
    oracle = oracles.mixed()
    pool = exact(small_pool(layers))
    options |= {"attention_backend": "reference", "graphs": graphs, "compile": compile, **pool}
    with pretend_gpu(inductor=False) as machine:
        with loaded(folder, device="cuda", **options) as llm:
            ours = run_mixed(llm)
            check_drafts(llm, options)
        check_closed(machine)
    for mine, theirs in zip(ours, oracle, strict=True):
        differing = [i for i, (a, b) in enumerate(zip(tokens(mine), tokens(theirs), strict=True)) if a != b]
        assert not differing, {i: (tokens(mine)[i], tokens(theirs)[i]) for i in differing}
        for a, b in zip(mine, theirs, strict=True):
            same_logprobs(a.prompt_logprobs or [], b.prompt_logprobs or [], near)
            for x, y in zip(a.outputs, b.outputs, strict=True):
                same_logprobs(x.logprobs or [], y.logprobs or [], near)


def samples_equal_cpu(folder: Path, oracles: Oracles, backend: str, graphs: str, compile: str) -> None:
    """Token for token by the same arithmetic; in half precision, but for a few draws between neighbours."""
    oracle = oracles.samples()
    dtype = "float32" if backend == "reference" else "float16"
    with pretend_gpu(inductor=False) as machine:
        options = {"attention_backend": backend, "graphs": graphs, "compile": compile, "dtype": dtype, **ROOMY}
        with loaded(folder, device="cuda", **options) as llm:
            ours = run_samples(llm)
        check_closed(machine)
    pairs = list(zip(tokens(ours), tokens(oracle), strict=True))
    differing = [(i, a, b) for i, (a, b) in enumerate(pairs) if a != b]
    allowed = 0 if dtype == "float32" else len(pairs) // 20
    assert len(differing) <= allowed, f"{len(differing)} of {len(pairs)} sequences differ: {differing[:8]}"


def check_drafts(llm: LLM, options: dict[str, Any]) -> None:
    """Some were wrong, where there were any."""
    stats = llm.stats()
    wanted = "speculative_config" in options
    assert (stats.drafted_tokens > stats.accepted_tokens) == wanted, (stats.drafted_tokens, stats.accepted_tokens)


def same_logprobs(ours: Sequence[Any], theirs: Sequence[Any], near: float) -> None:
    assert len(ours) == len(theirs)
    for mine, wanted in zip(ours, theirs, strict=True):
        assert (mine is None) == (wanted is None)
        if mine is not None:
            assert list(mine) == list(wanted)
            for token in mine:
                assert mine[token].rank == wanted[token].rank
                assert abs(mine[token].logprob - wanted[token].logprob) < near


def mixed_runs(
    folder: Path,
    oracles: Oracles,
    backend: str,
    graphs: str,
    compile: str,
    layers: float = 2,
    near: float = 1e-5,
    **options: Any,
) -> None:
    """Every feature on a native backend; a request of the same kind gives the same tokens in another batch."""
    settings = {"attention_backend": backend, "graphs": graphs, "compile": compile, **small_pool(layers)}
    with pretend_gpu(inductor=False) as machine:
        with loaded(folder, device="cuda", **settings, **options) as llm:
            first, second = run_mixed(llm)
            check_drafts(llm, options)
        check_closed(machine)
        assert machine.waits == []
    differing = sum(a != b for a, b in zip(tokens(first[::3]), tokens(second), strict=True))
    assert differing <= 1, f"{differing} sequences differ from their repetition"


def fp8(folder: Path, oracles: Oracles) -> None:
    """Two implementations over the same rounded keys and values."""
    outputs = []
    for backend in ("cuda", "flashinfer"):
        with pretend_gpu(inductor=False) as machine:
            with loaded(
                folder, device="cuda", attention_backend=backend, compile="pieces", kv_cache_dtype="fp8"
            ) as llm:
                outputs.append(generate(llm, PROMPTS[:4], SCORED))
                check_graphs(machine, llm, "both")
            check_closed(machine)
    assert same_but_for_ties(*outputs, TIE_NATS) <= 2


def no_hidden_wait(folder: Path, oracles: Oracles, backend: str, graphs: str, compile: str) -> None:
    """A wait in a steady decode step is an error there, so a run that ends proves that there is none."""
    prompts, params = mixed_params()
    watched: list[int] = []
    with pretend_gpu(inductor=False) as machine:
        settings = {"attention_backend": backend, "graphs": graphs, "compile": compile}
        with loaded(folder, device="cuda", debug_sync=True, **settings) as llm:
            set_mode = torch._C._cuda_set_sync_debug_mode

            def counted(mode: int) -> None:
                watched.append(mode)
                set_mode(mode)

            torch._C._cuda_set_sync_debug_mode = counted
            generate(llm, prompts[1:6], params[1:6])
        check_closed(machine)
        assert machine.waits == []
    assert watched.count(2) >= 8, f"{watched.count(2)} steps were watched"


def a_hidden_wait_is_found(folder: Path, oracles: Oracles) -> None:
    """The oracle backend reads lengths from the device in every step."""
    with pretend_gpu(inductor=False) as machine:
        try:
            with loaded(folder, device="cuda", attention_backend="reference", debug_sync=True):
                pass
        except RuntimeError as error:
            assert "synchronizing" in str(error), error
        else:
            raise AssertionError("nothing was found")
        assert machine.waits
        check_closed(machine)


def captures_between_steps(folder: Path, oracles: Oracles) -> None:
    """Start-up ends with a few graphs; the others come while requests are served."""
    before, model_runner.FIRST_CAPTURES_S = model_runner.FIRST_CAPTURES_S, 0.0
    oracle = oracles.greedy("bfloat16")
    try:
        with pretend_gpu(inductor=False) as machine:
            with loaded(folder, device="cuda", attention_backend="cuda", compile="pieces", graphs="both") as llm:
                at_start = machine.captures
                outputs = [generate(llm, [prompt], GREEDY)[0] for prompt in PROMPTS]
                until = time.monotonic() + 20
                while machine.captures < at_start + 6 and time.monotonic() < until:
                    time.sleep(0.05)
                assert machine.captures >= at_start + 6, (at_start, machine.captures)
            check_closed(machine)
        same_but_for_ties(outputs, oracle, TIE_NATS)
    finally:
        model_runner.FIRST_CAPTURES_S = before


def own_linears(folder: Path, oracles: Oracles) -> None:
    """Two plans are tried for each number of rows, and the last counts as fastest; every seventh call of any kind is
    timed as on a GPU."""
    times = itertools.count()
    plans_for, median_us = linear_choice.plans_for, linear_choice.CudaTimer.median_us

    def two_plans(*shape: int) -> list[Any]:
        return [plans_for(*shape)[0], plans_for(*shape)[-1]]

    def ever_faster(timer: Any, call: Any, *sizes: int) -> float:
        asked = next(times)
        assert asked % 7 or median_us(timer, call, *sizes) > 0
        return 1.0 if call.__name__ == "library" else 0.9 * 0.999**asked

    with ExitStack() as stack:
        for target, name, value in (
            (loading, "choose_linears", partial(linear_choice.choose_linears, least_bytes=1)),
            (linear_choice, "plans_for", two_plans),
            (linear_choice.CudaTimer, "median_us", ever_faster),
            (linear_timing, "_MAX_CALLS", 2),
            (linear_timing, "_COPY_BYTES", 1 << 10),
            (linear_choice, "doubts", lambda shapes, copy: {}),
            (linear_timing, "_SAMPLES", 1),
        ):
            stack.enter_context(patch.object(target, name, value))
        greedy(folder, oracles, "cuda", "both", "pieces")
    assert next(times) >= 3 * 5 * 5


Case = Callable[[Path, Oracles], None]
MODES = (("none", "none"), ("none", "pieces"), ("piecewise", "pieces"), ("full_decode", "none"), ("both", "pieces"))
CASES: dict[str, Case] = {
    **{
        f"greedy {backend} graphs={graphs} compile={compile}": partial(
            greedy, backend=backend, graphs=graphs, compile=compile
        )
        for backend in ("cuda", "flashinfer", "reference")
        for graphs, compile in MODES
        if backend != "reference" or graphs in ("none", "piecewise")
    },
    **{
        f"greedy bfloat16 {backend}": partial(
            greedy, backend=backend, graphs="both", compile="pieces", dtype="bfloat16"
        )
        for backend in ("cuda", "flashinfer")
    },
    "mixed equals the CPU, eager": partial(mixed_equals_cpu, graphs="none", compile="none"),
    "mixed equals the CPU, piecewise": partial(mixed_equals_cpu, graphs="piecewise", compile="pieces"),
    **{
        f"mixed on {backend}": partial(mixed_runs, backend=backend, graphs="both", compile="pieces")
        for backend in ("cuda", "flashinfer")
    },
    "mixed equals the CPU, with drafts": partial(mixed_equals_cpu, graphs="piecewise", compile="pieces", **DRAFTS),
    **{
        f"mixed equals the CPU, with {method}": partial(
            with_model, mixed_equals_cpu, method, graphs="piecewise", compile="pieces"
        )
        for method in ("draft_model", "eagle3")
    },
    **{
        f"mixed with {method} on cuda": partial(
            with_model, mixed_runs, method, backend="cuda", graphs="both", compile="pieces"
        )
        for method in ("draft_model", "eagle3")
    },
    **{
        f"mixed with drafts on {backend}": partial(
            mixed_runs, backend=backend, graphs="both", compile="pieces", **DRAFTS
        )
        for backend in ("cuda", "flashinfer")
    },
    **{
        f"40 requests of 1 to 6 samples on {backend}": partial(
            samples_equal_cpu, backend=backend, graphs=graphs, compile="pieces"
        )
        for backend, graphs in (("reference", "piecewise"), ("cuda", "both"), ("flashinfer", "both"))
    },
    "fp8 cache": fp8,
    **{
        f"no hidden wait {backend} graphs={graphs}": partial(
            no_hidden_wait, backend=backend, graphs=graphs, compile="pieces"
        )
        for backend, graphs in (("cuda", "both"), ("cuda", "piecewise"), ("cuda", "none"), ("flashinfer", "both"))
    },
    **{
        f"states: mixed equals the CPU, {name}": partial(
            over_states, mixed_equals_cpu, layers=1.25, near=5e-4, **options
        )
        for name, options in (
            ("eager", {"graphs": "none", "compile": "none"}),
            ("piecewise", {"graphs": "piecewise", "compile": "pieces"}),
            ("with drafts", {"graphs": "piecewise", "compile": "pieces", **DRAFTS}),
        )
    },
    "states: no hidden wait": partial(
        over_states, no_hidden_wait, backend="cuda", graphs="piecewise", compile="pieces"
    ),
    "a hidden wait is found": a_hidden_wait_is_found,
    "captures between steps": captures_between_steps,
    "own linears": own_linears,
    "experts": experts,
    "chunks": chunks,
    "latents": latents,
    "latents, eager": partial(latents, graphs="none", compile="none"),
    "latents, with drafts": partial(latents, **DRAFTS),
    "latents by the oracle": latents_by_the_oracle,
    "packed": packed,
    "invariant": invariant,
    "invariant, with drafts": partial(invariant, **DRAFTS),
    "invariant, experts": invariant_experts,
    "not invariant": not_invariant,
    "experts of the library": library_experts,
    "prepare": prepare,
    "chosen by itself": chosen_by_itself,
    "compiled by Inductor": compiled,
}


def main() -> int:
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(CASES)
    torch.set_num_threads(1)
    if not (folder / "config.json").exists():
        save_models(folder)
    oracles = Oracles(folder)
    failed = 0
    for name in names:
        began, problem = time.process_time(), None
        try:
            CASES[name](folder, oracles)
        except Exception:
            problem = traceback.format_exc()
            failed += 1
        line = {"case": name, "problem": problem, "seconds": round(time.process_time() - began, 2)}
        print(json.dumps(line), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
