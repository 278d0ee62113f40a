"""A profile as text: one block a case, a line a part, and the floor beside each."""

from __future__ import annotations

from collections.abc import Sequence

from engine.observability.step_profile import CORE_PARTS
from engine.observability.step_work import Ceilings
from entrypoints.bench.profile_cases import CaseFigures

_WIDTH = 30
_HEAD = f"{'part':<{_WIDTH}}{'calls':>7}{'ms':>10}{'share':>8}{'floor ms':>10}{'of floor':>9}{'read':>11}{'ops':>10}"


def ceilings_table(ceilings: Ceilings) -> str:
    """What the machine gave in this run."""
    size = _scaled(ceilings.weights_bytes, "B", 1024)
    read, far = (f"{rate / 1e9:.1f} GB/s" for rate in (ceilings.read_bytes_per_s, ceilings.main_memory_bytes_per_s))
    products = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in sorted(ceilings.ops_per_s.items()))
    return (
        f"Machine: reads {size} at {read} ({ceilings.read_method}), main memory at {far}; "
        f"multiplies at {products} GOP/s"
    )


def case_table(figures: CaseFigures) -> str:
    """All parts of one case; the lines above the rule add up to the one below it."""
    about = f"mean of the middle half of {figures.units} {figures.per}{'s' if figures.units != 1 else ''}"
    if figures.per != "step":
        about += f", {figures.steps_per_unit:.0f} steps each"
    about += f", {figures.tokens_per_unit:,.0f} tokens, mean length {figures.context:,.0f}"
    lines = [figures.case, f"  per {figures.per}: {about}", "  " + _HEAD]
    for part in figures.parts:
        line = f"  {_cut(part.name):<{_WIDTH}}{part.calls:>7.0f}{part.ms:>10.3f}{_share(part.ms, figures):>8}"
        if part.floor_ms is not None:
            line += f"{part.floor_ms:>10.3f}{_ratio(part.floor_ms, part.ms):>9}"
            line += f"{_scaled(part.read_bytes, 'B', 1024):>11}{_scaled(part.ops, 'OP'):>10}"
        lines.append(line)
    lines.append(
        f"  {'unaccounted':<{_WIDTH}}{'':>7}{figures.unaccounted_ms:>10.3f}{_share(figures.unaccounted_ms, figures):>8}"
    )
    lines.append("  " + "-" * len(_HEAD))
    lines.append(_total(f"{figures.per}, watched", figures.wall_ms, figures))
    if figures.undisturbed_ms is not None:
        lines.append(_total(f"{figures.per}, undisturbed", figures.undisturbed_ms, figures))
    if figures.fastest_ms is not None:
        lines.append(_total(f"{figures.per}, fastest", figures.fastest_ms, figures))
    if figures.beside_ms:
        known = [part for part in CORE_PARTS if part in figures.beside_ms]
        parts = [*known, *(part for part in figures.beside_ms if part not in known)]
        listed = ", ".join(f"{part} {figures.beside_ms[part]:.3f}" for part in parts)
        lines.append(f"  meanwhile, on the core's thread (ms): {listed}")
    return "\n".join(lines)


def _total(name: str, ms: float, figures: CaseFigures) -> str:
    floor = f"{figures.floor_ms:>10.3f}{_ratio(figures.floor_ms, ms):>9}"
    return f"  {name:<{_WIDTH}}{'':>7}{ms:>10.3f}{_share(ms, figures):>8}{floor}"


def _share(ms: float, figures: CaseFigures) -> str:
    return f"{100 * ms / figures.wall_ms:.1f} %"


def _ratio(floor_ms: float, ms: float) -> str:
    """How much of the ceiling was reached."""
    return f"{100 * floor_ms / ms:.0f} %" if ms > 0 else ""


def _cut(name: str) -> str:
    return name if len(name) < _WIDTH else name[: _WIDTH - 2] + "…"


def _scaled(value: float, unit: str, base: int = 1000) -> str:
    """ "12.3 MiB", "4.5 GOP" """
    prefixes: Sequence[str] = ("", "Ki", "Mi", "Gi", "Ti") if base == 1024 else ("", "k", "M", "G", "T")
    index = 0
    while value >= base and index < len(prefixes) - 1:
        value, index = value / base, index + 1
    return f"{value:.{0 if index == 0 else 1}f} {prefixes[index]}{unit}"
