"""The sampling step in torch: what a CPU engine runs, and what the Triton kernels are tested against.

It looks at no data on a device other than the CPU, so it serves any device that torch knows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.sampling import columns
from engine.sampling.batch import BatchPlan, DrawGroup
from engine.sampling.draw import DrawRows, draw_narrow, draw_probed, draw_wide
from engine.sampling.grammar_masks import restrict
from engine.sampling.kernels import StepTensors
from engine.sampling.logprobs import LogprobTensors, score
from engine.sampling.noise import Noise
from engine.sampling.order import row_argmax
from engine.sampling.penalties import SeenTokens


class HostKernels:
    """See `SamplingKernels`."""

    groups_rows = True

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._noise = Noise(vocab_size, device)

    @property
    def size_bytes(self) -> int:
        return self._noise.size_bytes

    def restrict(self, logits: torch.Tensor, places: Sequence[int], bits: np.ndarray) -> None:
        restrict(logits, places, bits)

    def penalise(self, step: StepTensors, seen: SeenTokens, plan: BatchPlan) -> None:
        group = plan.penalised
        assert group is not None
        slots, rows, positions = group.slots, step.rows[group.places], step.positions[group.places]
        floats = step.floats[rows]
        factors = floats[:, columns.REPETITION], floats[:, columns.PRESENCE], floats[:, columns.FREQUENCY]
        behind, width = seen.expect(group.slots_host, group.each)

        def last(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return step.tokens[rows, (positions - 1).clamp_(min=0)].to(torch.int64)

        for back in range(behind - 1, -1, -1):
            seen.count(slots, last(rows, positions - back), positions - back, width)
        seen.penalise(step.logits, group.places, slots, width, factors)
        if not group.drafted:
            return
        certain = seen.state(slots, width)
        for drafts, which in enumerate(group.drafted, 1):
            ends = positions[which] + drafts
            seen.count(slots[which], last(rows[which], ends), ends, width)
            places = group.places[which] + drafts
            seen.penalise(step.logits, places, slots[which], width, [f[which] for f in factors])
        seen.restore(slots, certain)

    def draw(self, step: StepTensors, plan: BatchPlan) -> tuple[torch.Tensor, torch.Tensor]:
        maxima, token_ids = row_argmax(step.logits)
        for group in plan.draws:
            drawn = self._draw(group, step, maxima)
            if group.index is None:
                token_ids = drawn
            else:
                token_ids[group.index] = drawn
        faults = ~maxima.isfinite()
        return token_ids.masked_fill(faults, 0), faults

    def score(
        self, logits: torch.Tensor, targets: torch.Tensor, rows: Sequence[int], ks: Sequence[int]
    ) -> LogprobTensors:
        return score(logits, targets, rows, ks)

    def _draw(self, group: DrawGroup, step: StepTensors, maxima: torch.Tensor) -> torch.Tensor:
        rows = group.select(step.rows)
        floats, ints = step.floats[rows], step.ints[rows]
        drawn = DrawRows(
            maxima=group.select(maxima),
            temperature=floats[:, columns.TEMPERATURE],
            log_min_p=floats[:, columns.LOG_MIN_P],
            top_p=floats[:, columns.TOP_P],
            top_k=ints[:, columns.TOP_K],
            keys=self._noise.draw_keys(ints[:, columns.SEED_WORDS], group.select(step.positions)),
        )
        draw = {"narrow": draw_narrow, "probed": draw_probed, "wide": draw_wide}[group.kind]
        return draw(group.select(step.logits), drawn, group.filters, self._noise)
