"""What a figure of the evaluation is before it is written: tables, panels to draw, and remarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from entrypoints.bench.paper.cost import OPT_175B, Server
from entrypoints.bench.paper.lengths import SHAREGPT, Lengths

Json = dict[str, object]


@dataclass(frozen=True)
class Table:
    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Series:
    """`y` over `x`; of bars, `y` over the panel's categories."""

    name: str
    y: list[float]
    x: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Panel:
    title: str
    x_label: str
    y_label: str
    kind: Literal["lines", "bars", "stacked"]
    series: list[Series]
    categories: list[str] = field(default_factory=list)
    y_max: float | None = None
    bound: float | None = None
    """a dashed line across"""
    band: tuple[float, float] | None = None
    """the paper's range, shaded"""
    log_x: bool = False
    log_y: bool = False
    value_format: str = "{:.3g}"
    """of what is written on bars"""


@dataclass(frozen=True)
class Figure:
    key: str
    """names its files"""
    title: str
    about: str
    tables: list[Table]
    panels: list[Panel]
    remarks: list[str]
    data: Json


@dataclass(frozen=True)
class Published:
    """A value of the paper: one figure, or a range."""

    low: float
    high: float
    unit: str = ""
    digits: int = 1

    def __str__(self) -> str:
        text = f"{self.low:.{self.digits}f}"
        if self.high != self.low:
            text += f" to {self.high:.{self.digits}f}"
        return text + self.unit

    def holds(self, value: float, slack: float = 0.0) -> bool:
        return self.low - slack <= value <= self.high + slack


def exactly(value: float, unit: str = "", digits: int = 1) -> Published:
    return Published(value, value, unit, digits)


def verdict(value: float, published: Published, slack: float = 0.0) -> str:
    """How a figure stands to the paper's, for the last column of a table."""
    if published.holds(value):
        return "as the paper"
    if published.holds(value, slack):
        return f"within {slack:g}{published.unit}"
    return "above" if value > published.high else "below"


@dataclass(frozen=True)
class Scale:
    """How much is simulated. Seconds are of the virtual clock."""

    name: str
    sharegpt_s: float
    alpaca_s: float
    """of its shorter requests"""
    backlog: int
    """requests of a run that saturates"""
    tolerance: float
    """of a sustained rate, relative"""
    bound_s: float
    """mean seconds per token up to which a rate counts as sustained. In the paper curves are told apart where they
    leave the axis, at 1 s/token in one hour. Above its capacity c a system's queue grows for as long as requests come,
    so its mean latency at rate r grows with the trace's length T, as (1 - c/r) T/2: traces of four minutes cross
    0.2 s/token at an overload of about 20 %, those of one hour cross 1 s/token at 10 %. It lifts all systems alike."""
    num_servers: int
    widths: tuple[int, ...]
    block_sizes: tuple[int, ...]
    real_requests: int
    """of a run on this machine"""

    @property
    def give_up_s(self) -> float:
        """A run that is certain to be above it is not finished."""
        return 2 * self.bound_s

    def seconds(self, lengths: Lengths, server: Server) -> float:
        """Of a trace. The largest model has traces of half the length (in the paper, of a quarter)."""
        seconds = self.sharegpt_s if lengths is SHAREGPT else self.alpaca_s
        return seconds / 2 if server is OPT_175B else seconds


DEFAULT = Scale("default", 240, 48, 800, 0.05, 0.2, 3, (2, 4, 6), (1, 2, 4, 8, 16, 32, 64, 128, 256), 48)
QUICK = Scale("quick", 30, 4, 100, 0.16, 0.06, 1, (4,), (1, 16, 256), 12)


@dataclass(frozen=True)
class Study:
    scale: Scale
    seed: int
    progress: Callable[[str], None]
