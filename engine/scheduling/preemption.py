"""How preempted sequences come back: what they had computed is computed again, or swapped to host memory and back.

Kwon et al., *PagedAttention*, §4.5 and §7.3: swapping costs transfers, recomputing a prefill; which is less depends on
the machine. Both are estimated from what they took here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.config import Preemption
from engine.kv_cache.kv_cache import KVCache
from engine.kv_cache.sequence_blocks import NO_GROWTH, Growth
from engine.kv_cache.swapping import Leaving, lost_with, swap_out
from engine.scheduling.sequence import Sequence as Seq
from engine.step_costs import StepCosts


class PreemptionCosts:
    def __init__(self, mode: Preemption, swap_block_s: float, steps: StepCosts) -> None:
        """`swap_block_s`: a block to the host and back, measured; 0: unknown."""
        self._mode, self._swap_block_s, self._steps = mode, swap_block_s, steps

    def prefers_swap(self, num_tokens: int, num_blocks: int) -> bool:
        """Rather than computing `num_tokens` again, transfer `num_blocks`. Where one of both is not known, compute."""
        if self._mode != "auto":
            return self._mode == "swap"
        return 0.0 < num_blocks * self._swap_block_s < num_tokens * self._steps.prompt_token_s


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
