"""A backend that is chosen, and pieces by Inductor, on a pretend GPU: cases of pretend_cases.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest.mock import patch

from pretend_gpu import pretend_gpu
from pretend_workloads import (
    GREEDY,
    PROMPTS,
    TIE_NATS,
    Oracles,
    check_closed,
    check_graphs,
    generate,
    loaded,
    same_but_for_ties,
)
from shared_natives import cache_with_natives

import compilation.model as compiled_model
from attention_backends.toolchain import default_cache_dir
from compilation.toolchain import toolchain_directory
from engine import LLM, SamplingParams


def prepare(folder: Path, oracles: Oracles) -> None:
    """Build what all other cases use, so that processes side by side find it."""
    for backend in ("cuda", "reference"):
        with pretend_gpu(inductor=False), loaded(folder, device="cuda", attention_backend=backend, compile="pieces"):
            pass


def chosen_by_itself(folder: Path, oracles: Oracles) -> None:
    """Nothing but the model is given: device, backend, graphs, dtype, memory; weights are invented."""
    with pretend_gpu(total_bytes=1 << 30, inductor=False) as machine:
        with LLM(
            str(folder), load_format="dummy", max_num_seqs=4, max_num_batched_tokens=32, memory_fraction=0.4
        ) as llm:
            assert llm.config.device.kind == "cuda"
            assert llm.ready.attention_backend == "cuda"
            outputs = generate(llm, PROMPTS[:3], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
            assert [len(o.outputs[0].token_ids) for o in outputs] == [4, 4, 4]
            check_graphs(machine, llm, "both")
        check_closed(machine)


def compiled(folder: Path, oracles: Oracles) -> None:
    """Pieces by Inductor (for the processor that is there), keys by the GPU's properties, stored and loaded again. What
    takes longer than the pieces is there: the header that each of them includes, and attention as `prepare` built it.
    """
    oracle = oracles.greedy("bfloat16")
    headers = toolchain_directory(default_cache_dir()) / "precompiled_headers"
    shutil.copytree(folder / "cache" / "attention-cuda", folder / "inductor" / "attention-cuda")
    found = []
    for _ in range(2):
        with patch.object(compiled_model._Builder, "_headers", lambda _: headers), pretend_gpu() as machine:
            cache = {"cache_dir": str(cache_with_natives(folder / "inductor")), "attention_backend": "cuda"}
            with loaded(folder, device="cuda", compile="pieces", graphs="piecewise", **cache) as llm:
                found.append(llm.ready.pieces_compiled)
                outputs = generate(llm, PROMPTS[:4], GREEDY)
            check_closed(machine)
        same_but_for_ties(outputs, oracle[:4], 2 * TIE_NATS)
    assert found[0] == llm.ready.distinct_pieces > 0 == found[1], found
