"""How preempted sequences come back: what they had computed is computed again, or swapped to host memory and back.

Kwon et al., *PagedAttention*, §4.5 and §7.3: swapping costs transfers, recomputing a prefill; which is less depends on
the machine. Both are estimated from what they took here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.config import Preemption
from engine.kv_cache.kv_cache import NO_GROWTH, Growth, KVCache
from engine.kv_cache.swapping import Leaving, lost_with, swap_out
from engine.scheduling.sequence import Sequence as Seq
from engine.scheduling.steps_in_flight import PlannedStep

_MEMORY = 0.8
"""weight of the past in running means"""


class PreemptionCosts:
    def __init__(self, mode: Preemption, swap_block_s: float = 0.0) -> None:
        """`swap_block_s`: a block to the host and back, measured; 0: unknown."""
        self._mode = mode
        self._swap_block_s = swap_block_s
        self._decodes_s = self._token_s = 0.0

    def observe(self, step: PlannedStep, seconds: float) -> None:
        """The step has taken as long. What a token of a prompt costs is what a step takes longer for it: beside
        sequences that decode, a step reads the weights anyway."""
        num_tokens, num_rows = step.rows.num_tokens, len(step.rows)
        num_decodes = step.num_decodes
        if num_decodes == num_rows:
            self._decodes_s = _mean(self._decodes_s, seconds)
        elif num_tokens >= 2 * num_rows:
            extra = seconds - self._decodes_s if num_decodes else seconds
            self._token_s = _mean(self._token_s, max(extra, 0.0) / (num_tokens - num_decodes))

    def prefers_swap(self, num_tokens: int, num_blocks: int) -> bool:
        """Rather than computing `num_tokens` again, transfer `num_blocks`. Where one of both is not known, compute."""
        if self._mode != "auto":
            return self._mode == "swap"
        return 0.0 < num_blocks * self._swap_block_s < num_tokens * self._token_s


def _mean(past: float, new: float) -> float:
    return _MEMORY * past + (1 - _MEMORY) * new if past else new


def try_swap_out(
    kv: KVCache, costs: PreemptionCosts, victims: Sequence[Seq], growths: Mapping[Seq, tuple[int, Growth]]
) -> bool:
    """Move all blocks of sequences at rest to the host tier, if there is one with room, and that is the cheaper way.
    `growths`: what was appended for a step that is not planned now."""
    if kv.host is None:
        return False
    if not costs.prefers_swap(*lost_with(kv, [seq.blocks for seq in victims])):
        return False
    leaving = []
    for seq in victims:
        _, growth = growths.get(seq, (0, NO_GROWTH))
        leaving.append(Leaving(seq.blocks, seq.blocks.num_tokens, [*seq.moved.copies, *growth.copies]))
    return swap_out(kv, kv.host, leaving)
