"""Who decodes in which step, where stages compute several steps at once.

A sequence is in one step at a time, because the next one needs its token. So those that decode are divided into as many
steps as there are stages, of equal cost: a row costs what its weights do, and as much again for every so many tokens of
its context (`SchedulerConfig.row_tokens`).
"""

from __future__ import annotations

import numpy as np


def in_turn(turns: np.ndarray, costs: np.ndarray, in_flight: int, stages: int) -> np.ndarray:
    """Of those that could decode now, bool [rows]: who does. Who was planned longest ago comes first (`turns`).

    `costs`: of each; `in_flight`: of those that others steps compute. The step gets its share of all of that, to the
    nearest row, and one row at least.
    """
    order = np.argsort(turns, kind="stable")
    ordered = costs[order].astype(np.int64)
    ends = np.cumsum(ordered)
    share = (in_flight + int(ordered.sum())) / stages
    chosen = np.zeros(len(turns), dtype=bool)
    chosen[order] = ends - ordered / 2 <= share
    chosen[order[:1]] = True
    return chosen


def most_prompt_tokens(pending: int, stages: int, least: int) -> int:
    """Of one step, so that prompts that come at once give every stage something to do.

    A stage waits for the first part, or behind the last one: with four times as many parts as stages that is a ninth of
    the time of two stages. `pending`: tokens of prompts that are not planned yet; `least`: smaller parts cost more than
    they spare.
    """
    return max(-(-pending // (4 * stages)), least)
