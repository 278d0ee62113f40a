"""The systems that are compared, each on a server: ours, and the baselines that differ from it in memory alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from engine.config import Preemption
from engine.kv_cache.kv_cache import KVCache
from entrypoints.bench.paper.buddy import chunk_size
from entrypoints.bench.paper.candidates import turnover
from entrypoints.bench.paper.cost import Server, StepCost
from entrypoints.bench.paper.reservation import POLICIES, ReservingKVCache
from entrypoints.bench.paper.traces import Job, Workload

OURS = "ours"
STATIC = "FasterTransformer"
ORCA = tuple(POLICIES)
TOKEN_BUDGET = 2560
MAX_NUM_SEQS = 256
"""both as in the paper's engine when it was published"""
BLOCK_SIZE = 16

_turnover = cache(turnover)


@dataclass(frozen=True)
class Setup:
    """One system on one server."""

    system: str
    server: Server
    block_size: int = BLOCK_SIZE
    prefix_caching: bool = False
    """the paper's engine keeps nothing between requests but prefixes that are set beforehand (§6.4)"""
    max_num_seqs: int = MAX_NUM_SEQS
    token_budget: int = TOKEN_BUDGET
    preemption: Preemption = "recompute"
    """of ours; a baseline never takes back what it reserved"""
    prompts_apart: bool = False
    """prompts run in steps of their own, as in the paper's engine"""
    read_once: int = 0
    """see `StepCost`"""

    @property
    def num_blocks(self) -> int:
        return self.server.num_slots // self.block_size

    def kv_cache(self) -> KVCache:
        if self.system == OURS:
            # The paper, 4.5: never more blocks are swapped than the device has.
            num_host_blocks = 0 if self.preemption == "recompute" else self.num_blocks
            return KVCache(self.num_blocks, self.block_size, self.prefix_caching, num_host_blocks=num_host_blocks)
        return ReservingKVCache(self.num_blocks, self.block_size)

    def reservation(self, job: Job) -> tuple[int, int]:
        """Slots that a sequence of the request will fill, and that the policy reserves for it. The last token is never
        computed, so it fills none."""
        policy = POLICIES[self.system]
        return len(job.prompt) + job.output - 1, policy(len(job.prompt), job.output, self.server.max_model_len)

    def cost(self, workload: Workload, spread: float) -> StepCost:
        """Ours reads pages; a system that cannot share copies what beams take over from each other."""
        paged = self.system == OURS
        cost = StepCost(
            self.server, self.block_size, paged, separate_prompts=self.prompts_apart, read_once=self.read_once
        )
        if workload.beams and self.system != OURS:
            return replace(cost, copied_share=_turnover(workload.samples, spread))
        return cost

    def guess(self, workload: Workload, seed: int) -> float:
        """Requests a second that it will sustain, from averages: where a search begins."""
        jobs = workload.backlog(400, seed)
        steps = sum(job.output for job in jobs)
        context = sum(job.output * (len(job.prompt) + job.output / 2) for job in jobs) / steps
        if self.system == OURS:
            held = context + self.block_size / 2
        elif self.system == STATIC:
            held = self.server.max_model_len
        else:
            units = [-(-self.reservation(job)[1] // self.block_size) for job in jobs]
            held = sum(job.output * chunk_size(size) for job, size in zip(jobs, units)) / steps * self.block_size
        rows = max(1.0, min(self.server.num_slots / held, self.max_num_seqs))
        cost = self.cost(workload, 1.0).of(int(rows), int(rows * 1.4), int(rows * context))
        return rows / cost / (steps / len(jobs)) / workload.samples
