"""What a step costs on a server of the paper's: a roofline with stated efficiencies, in seconds of a virtual clock.

    step = host + rows x host_per_row
         + max(weight bytes / (read efficiency x bandwidth), 2 x parameters x tokens / (math efficiency x FLOP/s))
         + KV bytes of all contexts / (KV efficiency x bandwidth)
         + all-reduces + block copies + swaps

Bandwidth, FLOP/s and memory are data sheet figures of the A100 (SXM4); sizes are the paper's Table 1. Fitted is one
constant alone: `HOST_S`, so that OPT-13B batches 30.4 requests at 2 requests/s of ShareGPT (Fig. 13a) when prompts run
in steps of their own, as they did in the paper's engine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.step import StepPlan

READ_EFFICIENCY = 0.8
"""of the data sheet's bandwidth, for weights"""
MATH_EFFICIENCY = 0.7
"""of the data sheet's FLOP/s, for large products (about 220 TFLOP/s a GPU)"""
KV_EFFICIENCY = 0.75
"""of the bandwidth, for contiguous keys and values"""
PAGED_PENALTY = 1.23
"""a paged attention kernel against a contiguous one: +20 % to +26 % in the paper (§7.1)"""
SMALL_BLOCK_TOKENS = 3.0
"""a warp that reads a block of b tokens idles as if it were b + this many: blocks of one token cost four times as much
to read as large ones (assumed; relative to blocks of 16, which `PAGED_PENALTY` is of)"""
ALL_REDUCE_S = 40e-6
"""one all-reduce of few tokens over NVLink; two a layer"""
PCIE_BYTES_PER_S = 13e9
"""of large copies between device and host: PCIe 4.0 x16 has 31.5e9 by its data sheet; fitted to the paper's §7.3, by
which recomputing is at most 1.2x of swapping"""
TRANSFER_S = 3e-6
"""of each copy's start (assumed); a swapped block is one for the keys and one for the values of every layer"""
HOST_S = 7e-3
HOST_PER_ROW_S = 50e-6

_GIB = 1 << 30


@dataclass(frozen=True)
class Server:
    """A model on GPUs; bytes and FLOP/s are of all GPUs together."""

    name: str
    gpus: str
    num_gpus: int
    parameters: float
    layers: int
    hidden: int
    bandwidth: float
    flops: float
    kv_memory: float
    """bytes for the KV cache"""
    max_model_len: int = 2048
    host_s: float = HOST_S
    host_per_row_s: float = HOST_PER_ROW_S

    @property
    def slot_bytes(self) -> int:
        """KV of one token: two vectors a layer, float16."""
        return 2 * self.layers * self.hidden * 2

    @property
    def num_slots(self) -> int:
        return int(self.kv_memory // self.slot_bytes)


def _a100(
    name: str, parameters: float, layers: int, hidden: int, kv_gib: float, *, gpus: int = 1, large: bool = False
) -> Server:
    return Server(
        name=name,
        gpus=f"{gpus} x A100-{'80' if large else '40'}GB",
        num_gpus=gpus,
        parameters=parameters,
        layers=layers,
        hidden=hidden,
        bandwidth=gpus * (2039e9 if large else 1555e9),
        flops=gpus * 312e12,
        kv_memory=kv_gib * _GIB,
    )


OPT_13B = _a100("OPT-13B", 13e9, 40, 5120, 12)
OPT_66B = _a100("OPT-66B", 66e9, 64, 9216, 21.4, gpus=4)
OPT_175B = _a100("OPT-175B", 173e9, 96, 12288, 264, gpus=8, large=True)
LLAMA_13B = replace(OPT_13B, name="LLaMA-13B")
SERVERS = (OPT_13B, OPT_66B, OPT_175B)


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step on `server`."""

    server: Server
    block_size: int = 16
    paged: bool = True
    copied_share: float = 0.0
    """of all contexts, what is copied in every step because it cannot be shared (beams)"""
    separate_prompts: bool = False
    """prompts run in steps of their own, between which all who decode wait: what the paper's engine did then"""
    read_once: int = 0
    """tokens at the start of every context whose KV is read once a step, not once a row"""

    @property
    def seconds_per_context_token(self) -> float:
        """Reading one token's keys and values in all layers."""
        contiguous = self.server.slot_bytes / (KV_EFFICIENCY * self.server.bandwidth)
        if not self.paged:
            return contiguous
        by_size = (1 + SMALL_BLOCK_TOKENS / self.block_size) / (1 + SMALL_BLOCK_TOKENS / 16)
        return contiguous * PAGED_PENALTY * by_size

    @property
    def seconds_per_copied_token(self) -> float:
        """One token's KV read and written on the device."""
        return 2 * self.server.slot_bytes / (KV_EFFICIENCY * self.server.bandwidth)

    def of(self, rows: int, tokens: int, context: float) -> float:
        """`rows` sequences compute `tokens` tokens and read `context` tokens' KV."""
        server = self.server
        weights = 2 * server.parameters / (READ_EFFICIENCY * server.bandwidth)
        products = 2 * server.parameters * tokens / (MATH_EFFICIENCY * server.flops)
        reduces = 2 * server.layers * ALL_REDUCE_S if server.num_gpus > 1 else 0.0
        host = server.host_s + rows * server.host_per_row_s
        context -= self.read_once * max(0, rows - 1)
        reading = context * (self.seconds_per_context_token + self.copied_share * self.seconds_per_copied_token)
        return host + max(weights, products) + reading + reduces

    def of_plan(self, plan: StepPlan) -> float:
        """Its copies and swaps included."""
        query_lens = plan.rows.query_lens
        tokens = plan.num_tokens
        context = tokens + int(plan.rows.computed.sum())
        prompts = query_lens[query_lens > 1]
        prompt_rows, prompt_tokens = len(prompts), int(prompts.sum())
        if self.separate_prompts and 0 < prompt_rows < len(plan.rows):
            seconds = self.of(len(plan.rows) - prompt_rows, tokens - prompt_tokens, context - prompt_tokens)
            seconds += self.of(prompt_rows, prompt_tokens, prompt_tokens)
        else:
            seconds = self.of(len(plan.rows), tokens, context)
        if plan.block_copies:
            seconds += len(plan.block_copies) * self.block_size * self.seconds_per_copied_token
        swapped = len(plan.swap_out) + len(plan.swap_in)
        return seconds + self.swap(swapped) if swapped else seconds

    def swap(self, blocks: int) -> float:
        """Moving so many blocks between device and host, in one direction or the other."""
        copies = blocks * 2 * self.server.layers
        return copies * TRANSFER_S + blocks * self.block_size * self.server.slot_bytes / PCIE_BYTES_PER_S
