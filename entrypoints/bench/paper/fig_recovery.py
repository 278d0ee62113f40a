"""Fig. 19: what bringing a preempted sequence back costs, by computing it again or by swapping it (OPT-13B)."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import Preemption
from entrypoints.bench.paper import published
from entrypoints.bench.paper.cost import OPT_13B, PCIE_BYTES_PER_S, TRANSFER_S, StepCost
from entrypoints.bench.paper.fig_blocks import by_block_size, shown_latency
from entrypoints.bench.paper.figure import Figure, Published, Series, Study, Table, verdict
from entrypoints.bench.paper.lengths import SHAREGPT
from entrypoints.bench.paper.simulate import Outcome, Simulation
from entrypoints.bench.paper.systems import BLOCK_SIZE, OURS, Setup
from entrypoints.bench.paper.traces import plain

RECOVERIES: tuple[Preemption, ...] = ("recompute", "swap", "auto")
"""how the scheduler brings a preempted sequence back; a curve of (b) for each"""
_HEAVY_LOAD = 0.95
"""of what blocks of 16 sustain, roughly"""
_GIVE_UP_S = 1.0
_SWAPPED_TOKENS = 256
"""as in the authors' talk on the paper"""
_MEDIUM = (16, 64)
_WORSE = Published(1.0, float("inf"), "x")

Pressed = dict[Preemption, dict[int, Outcome]]


def recovery(study: Study) -> Figure:
    """(a) what bringing a sequence back costs; (b) latency when it happens often."""
    sizes = study.scale.block_sizes
    head = [str(size) for size in sizes]
    cost = StepCost(OPT_13B)
    recompute = cost.of(1, _SWAPPED_TOKENS, _SWAPPED_TOKENS)
    one_way = {size: StepCost(OPT_13B, size).swap(-(-_SWAPPED_TOKENS // size)) for size in sizes}
    pressed: Pressed = {mode: _under_pressure(study, mode, sizes) for mode in RECOVERIES}
    apart: Pressed = {mode: _under_pressure(study, mode, (BLOCK_SIZE,), apart=True) for mode in RECOVERIES[:2]}
    told = [*_statements(recompute, one_way, pressed), *_more_statements(pressed, apart)]
    xs = [float(size) for size in sizes]
    micro = [
        Series("recompute", [1e3 * recompute] * len(sizes), xs),
        Series("swap in or out", [1e3 * seconds for seconds in one_way.values()], xs),
        Series("swap in and out", [2e3 * seconds for seconds in one_way.values()], xs),
    ]
    macro = [
        Series(mode, [min(outcome.normalised_latency_s, _GIVE_UP_S) for outcome in found.values()], xs)
        for mode, found in pressed.items()
    ]
    return Figure(
        key="fig19",
        title="Fig. 19: recomputing against swapping",
        about=f"OPT-13B. (a) One sequence of {_SWAPPED_TOKENS} tokens; (b) ShareGPT near saturation.",
        tables=[
            Table(["(a) block size", *head], _costs(recompute, one_way)),
            Table(["(b) block size", *head], _latencies(pressed)),
            Table(["what the paper says (§7.3)", "here", "paper", ""], told),
        ],
        panels=[
            by_block_size(f"(a) {_SWAPPED_TOKENS} tokens", "ms", micro),
            by_block_size("(b) ShareGPT, near saturation", "s/token", macro, log_y=True),
        ],
        remarks=_remarks(recompute),
        data={
            "recompute_s": recompute,
            "swap_one_way_s": {str(size): seconds for size, seconds in one_way.items()},
            "end_to_end_s_per_token": {
                mode: {str(size): outcome.normalised_latency_s for size, outcome in found.items()}
                for mode, found in pressed.items()
            },
        },
    )


def _under_pressure(study: Study, mode: Preemption, sizes: Sequence[int], apart: bool = False) -> dict[int, Outcome]:
    """Near saturation; the virtual clock is charged for every block that a plan moves. `apart`: prompts run in steps of
    their own."""
    workload = plain(SHAREGPT)
    rate = _HEAVY_LOAD * Setup(OURS, OPT_13B).guess(workload, study.seed)
    jobs = workload.jobs(rate, study.scale.sharegpt_s, study.seed)
    found = {}
    for size in sizes:
        study.progress(f"Fig. 19: {mode}, blocks of {size}{', prompts apart' if apart else ''}")
        setup = Setup(OURS, OPT_13B, size, preemption=mode, prompts_apart=apart)
        found[size] = Simulation(setup, workload, jobs, _GIVE_UP_S).run()
    return found


def _costs(recompute: float, one_way: dict[int, float]) -> list[list[str]]:
    return [
        ["recompute, ms", *(f"{1e3 * recompute:.0f}" for _ in one_way)],
        ["swap in or out, ms", *(f"{1e3 * seconds:.0f}" for seconds in one_way.values())],
        ["swap in and out, ms", *(f"{2e3 * seconds:.0f}" for seconds in one_way.values())],
        ["recompute / swap in and out", *(f"{recompute / (2 * seconds):.2f}" for seconds in one_way.values())],
    ]


def _latencies(pressed: Pressed) -> list[list[str]]:
    rows = []
    for mode, found in pressed.items():
        rows.append([f"{mode}: s/token", *(shown_latency(outcome) for outcome in found.values())])
        rows.append([f"{mode}: preemptions", *(str(outcome.preemptions) for outcome in found.values())])
        if mode != "recompute":
            rows.append([f"{mode}: of them swapped", *(str(outcome.swapped) for outcome in found.values())])
    return rows


def _statements(recompute: float, one_way: dict[int, float], pressed: Pressed) -> list[list[str]]:
    """Ratios here beside what the paper's text says of them."""
    most = max(recompute / (2 * seconds) for seconds in one_way.values())
    over = {size: _over(pressed, size) for size in one_way}
    smallest = min(one_way)
    medium = [ratio for size, ratio in over.items() if _MEDIUM[0] <= size <= _MEDIUM[1]]
    farthest = max(medium, key=lambda ratio: abs(ratio - 1))
    told: list[tuple[str, float, Published, str]] = [
        ("(a) recomputing / swapping in and out, at most", most, published.RECOMPUTE_OVER_SWAP, "at most 1.2x"),
        (f"(a) swapping / recomputing, blocks of {smallest}", 2 * one_way[smallest] / recompute, _WORSE, "worse"),
        (f"(b) latency, swapping / recomputing, blocks of {smallest}", over[smallest], _WORSE, "worse"),
        ("(b) the same, blocks of 16 to 64, farthest from 1", farthest, published.COMPARABLE, "comparable"),
    ]
    return [[what, f"{ratio:.2f}x", name, verdict(ratio, paper)] for what, ratio, paper, name in told]


def _more_statements(pressed: Pressed, apart: Pressed) -> list[list[str]]:
    """What says why (b) is as it is."""
    auto = max(
        outcome.normalised_latency_s / min(pressed[mode][size].normalised_latency_s for mode in RECOVERIES[:2])
        for size, outcome in pressed["auto"].items()
    )
    ratio = _over(apart, BLOCK_SIZE)
    stands = verdict(ratio, published.COMPARABLE)
    return [
        [f"(b) the same, blocks of {BLOCK_SIZE}, prompts in steps of their own", f"{ratio:.2f}x", "comparable", stands],
        ["(b) auto / the better of both, at most", f"{auto:.2f}x", "", ""],
    ]


def _over(pressed: Pressed, size: int) -> float:
    return pressed["swap"][size].normalised_latency_s / pressed["recompute"][size].normalised_latency_s


def _remarks(recompute: float) -> list[str]:
    moved = 2 * _SWAPPED_TOKENS * OPT_13B.slot_bytes
    fastest = moved / (recompute / published.RECOMPUTE_OVER_SWAP.high) / 1e9
    return [
        "As in the paper, recomputing costs the same for every block size, and swapping small blocks is expensive: "
        f"each is {2 * OPT_13B.layers} copies, one for the keys and one for the values of every layer.",
        "The paper's text gives neither the link's bandwidth nor a copy's latency. It says that recomputing is never "
        f'"higher than 20% of swapping\'s latency", read here as at most {published.RECOMPUTE_OVER_SWAP.high:g}x of '
        "it, because the same sentence has swapping as the more efficient one for large blocks. With what the cost "
        f"model takes for {_SWAPPED_TOKENS} tokens of a prompt, {1e3 * recompute:.0f} ms, that holds for a link of up "
        f"to {fastest:.1f} GB/s: {PCIE_BYTES_PER_S / 1e9:g} GB/s are taken (PCIe 4.0 x16 has 31.5 by its data sheet), "
        f"and {TRANSFER_S * 1e6:g} us a copy are assumed. So the first ratio below (b) is fitted; the others follow.",
        "(b) has a host tier of as many blocks as the device (the paper's §4.5), and a step waits for its transfers. "
        "Recomputing is ahead at every size, where the paper has swapping ahead with large blocks: this scheduler "
        "takes the tokens along in a step that reads the weights for others anyway. With prompts in steps of their "
        "own, as in the paper's engine, both are closer (last table).",
        "`auto` is the engine's default: it swaps where the transfers are estimated to take less than computing the "
        "tokens again, from what steps took longer for a token of a prompt than those that only decode. Where prompts "
        "are computed beside sequences that decode that is little, so it does not swap here.",
    ]
