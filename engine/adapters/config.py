"""Adapters as the rooms are told of them."""

from __future__ import annotations

import msgspec


class LoRAConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Adapters (Hu et al., LoRA, 2021). Names are vLLM's."""

    max_lora_rank: int
    max_lora_expert_rank: int = 0
    """of what an adapter changes in the matrices of experts; 0: nothing"""
    max_loras: int
    """slots: adapters that the rows of one step may have"""
    max_cpu_loras: int
    """adapters that are kept as they were read, beside those in slots"""


BLOCK = 64
"""outputs that the CPU kernels read together (their `kAdapterBlock`)"""
