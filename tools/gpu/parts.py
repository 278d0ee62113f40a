"""The suite's table of contents: every part, when it runs, what it needs and how long it may take.

Order is importance: correctness first. Parts of one stage that is `together` run at once: they check or compile, and
time nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gpu.context import Context

Kind = Literal["preparation", "correctness", "benchmark"]
Stage = Literal["build", "check", "warm", "measure"]


@dataclass(frozen=True)
class Part:
    name: str
    kind: Kind
    stage: Stage
    run: Callable[[Context], None]
    """imports what it needs when it runs, so that a missing package fails this part alone"""
    need_s: float
    """not started with less"""
    limit_s: float
    """ended by force after this"""


def _build(name: str) -> Callable[[Context], None]:
    def run(context: Context) -> None:
        from gpu.backends import build

        build(context, name)

    return run


def _machine(context: Context) -> None:
    from gpu.machine import run

    run(context)


def _ceilings(context: Context) -> None:
    from gpu.ceilings import run

    run(context)


def _attention(name: str) -> Callable[[Context], None]:
    def run(context: Context) -> None:
        from gpu.check_attention import run

        run(context, name)

    return run


def _models(*names: str) -> Callable[[Context], None]:
    def run(context: Context) -> None:
        from gpu.check_models import run_parity

        run_parity(context, names)

    return run


def _server(name: str) -> Callable[[Context], None]:
    def run(context: Context) -> None:
        from gpu import check_server

        {"check": check_server.run_server, "load": check_server.run_load}[name](context)

    return run


def _graphs(context: Context) -> None:
    from gpu.check_graphs import run_graphs

    run_graphs(context)


def _sync(context: Context) -> None:
    from gpu.check_graphs import run_sync

    run_sync(context)


def _inputs(context: Context) -> None:
    from gpu.check_kernels import run_inputs

    run_inputs(context)


def _sampling(context: Context) -> None:
    from gpu.check_kernels import run_sampling

    run_sampling(context)


def _products(name: str) -> Callable[[Context], None]:
    def run(context: Context) -> None:
        from gpu import products

        {
            "check": products.run_checks,
            "states": products.run_states,
            "experts": products.run_experts,
            "packed": products.run_packed,
        }[name](context)

    return run


def _marked(context: Context) -> None:
    from gpu.check_kernels import run_marked_tests

    run_marked_tests(context)


def _pieces(context: Context) -> None:
    from gpu.bench_engine import warm_pieces

    warm_pieces(context)


def _kernels(name: str) -> Callable[[Context], None]:
    def run(context: Context) -> None:
        from gpu import bench_attention

        {
            "decode": bench_attention.run_decode,
            "prefill": bench_attention.run_prefill,
            "flashinfer": bench_attention.run_flashinfer,
            "others": bench_attention.run_other_shapes,
        }[name](context)

    return run


def _linears(context: Context) -> None:
    from gpu.bench_linear import run

    run(context)


def _cache(context: Context) -> None:
    from gpu.bench_cache import run

    run(context)


def _sampler(context: Context) -> None:
    from gpu.bench_sampler import run

    run(context)


def _engine(name: str) -> Callable[[Context], None]:
    def run(context: Context) -> None:
        from gpu.bench_engine import VARIANTS, run

        run(context, VARIANTS[name])

    return run


def _peer(context: Context) -> None:
    from gpu.bench_peer import run

    run(context)


def _latents(context: Context) -> None:
    from gpu.check_latents import run

    run(context)


MODELS: dict[int, tuple[str, ...]] = {
    1: ("Llama", "Mistral"),
    2: ("Qwen3", "Gemma2"),
    3: ("Qwen3Moe", "OPT"),
    4: ("GptOss", "Qwen2"),
    5: ("FlexOlmo",),
    6: ("DeepseekV3",),
    7: ("Qwen3_5",),
    8: ("Lfm2",),
    9: ("GraniteMoeHybrid",),
    10: ("FalconH1",),
}
"""the tests' tiny families, in parts that run at once"""
PARTS: tuple[Part, ...] = (
    Part("machine", "preparation", "build", _machine, 5, 60),
    Part("build-cuda", "preparation", "build", _build("cuda"), 10, 150),
    Part("ceilings", "benchmark", "build", _ceilings, 10, 60),
    Part("attention-cuda", "correctness", "check", _attention("cuda"), 20, 220),
    Part("attention-latents", "correctness", "check", _latents, 20, 150),
    *(Part(f"models-{number}", "correctness", "check", _models(*names), 20, 200) for number, names in MODELS.items()),
    Part("graph-modes", "correctness", "check", _graphs, 20, 200),
    Part("no-hidden-wait", "correctness", "check", _sync, 20, 120),
    Part("input-kernels", "correctness", "check", _inputs, 10, 90),
    Part("sampling", "correctness", "check", _sampling, 10, 90),
    Part("products", "correctness", "check", _products("check"), 10, 120),
    Part("states", "correctness", "check", _products("states"), 10, 60),
    Part("server", "correctness", "check", _server("check"), 20, 150),
    Part("build-flashinfer", "preparation", "check", _build("flashinfer"), 10, 180),
    Part("attention-flashinfer", "correctness", "check", _attention("flashinfer"), 20, 180),
    Part("tests-marked-gpu", "correctness", "warm", _marked, 10, 150),
    Part("compile-pieces", "preparation", "warm", _pieces, 30, 240),
    Part("decode-kernels", "benchmark", "measure", _kernels("decode"), 15, 60),
    Part("prefill-kernels", "benchmark", "measure", _kernels("prefill"), 15, 45),
    Part("linears", "benchmark", "measure", _linears, 15, 60),
    Part("experts", "benchmark", "measure", _products("experts"), 15, 60),
    Part("packed-linears", "benchmark", "measure", _products("packed"), 15, 45),
    Part("engine-8b-full", "benchmark", "measure", _engine("engine-8b-full"), 50, 140),
    Part("engine-8b-piecewise", "benchmark", "measure", _engine("engine-8b-piecewise"), 30, 80),
    Part("engine-0.6b-full", "benchmark", "measure", _engine("engine-0.6b-full"), 30, 90),
    Part("server-0.6b", "benchmark", "measure", _server("load"), 30, 90),
    Part("cache-kernels", "benchmark", "measure", _cache, 10, 30),
    Part("sampler", "benchmark", "measure", _sampler, 12, 40),
    Part("engine-0.6b-none", "benchmark", "measure", _engine("engine-0.6b-none"), 30, 80),
    Part("engine-0.6b-piecewise", "benchmark", "measure", _engine("engine-0.6b-piecewise"), 30, 80),
    Part("engine-0.6b-flashinfer", "benchmark", "measure", _engine("engine-0.6b-flashinfer"), 30, 80),
    Part("engine-hybrid", "benchmark", "measure", _engine("engine-hybrid"), 30, 90),
    Part("transformers", "benchmark", "measure", _peer, 30, 80),
    Part("engine-8b-none", "benchmark", "measure", _engine("engine-8b-none"), 50, 130),
    Part("engine-8b-flashinfer", "benchmark", "measure", _engine("engine-8b-flashinfer"), 50, 130),
    Part("flashinfer-kernels", "benchmark", "measure", _kernels("flashinfer"), 15, 60),
    Part("other-shapes", "benchmark", "measure", _kernels("others"), 15, 45),
    Part("engine-8b-piecewise-throughput", "benchmark", "measure", _engine("engine-8b-piecewise-throughput"), 50, 130),
)
STAGES: tuple[tuple[Stage, bool], ...] = (("build", True), ("check", True), ("warm", False), ("measure", False))
"""stage, and whether its parts run together; pieces hold the choice of linear kernels, which is timed, so they are
compiled alone, and tests ask how much memory of the device they have taken"""


def part_named(name: str) -> Part:
    """Raises ValueError naming those that exist."""
    for part in PARTS:
        if part.name == name:
            return part
    raise ValueError(f"no part {name!r}; there are {', '.join(p.name for p in PARTS)}")


def chosen(only: str | None) -> list[Part]:
    """The parts of a comma-separated list, in the suite's order; None: all."""
    if only is None:
        return list(PARTS)
    names = {part_named(name).name for name in only.split(",")}
    return [part for part in PARTS if part.name in names]
