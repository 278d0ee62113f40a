"""The sampler at the batch and vocabulary of serving: device time and host time of one call per kind of request."""

from __future__ import annotations

import torch

from engine.sampling import Sampler
from engine.step import RowParams
from gpu.context import Context
from gpu.device import Device
from gpu.timing import host_us, time_calls

VOCAB = 151_936
HISTORY = 512
KINDS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k top_p min_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.05},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    "5 logprobs": {"temperature": 0.0, "logprobs": 5},
}


class Case:
    """`batch` rows of one kind, history of random tokens; `self(i)` samples all of them once."""

    def __init__(self, device: Device, kind: str, batch: int, vocab: int, history: int) -> None:
        target = device.torch_device
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(vocab, (batch, history), generator=generator, dtype=torch.int32)
        self.tokens = torch.cat((tokens, torch.zeros(batch, 64, dtype=torch.int32)), dim=1).to(target)
        self.sampler = Sampler(batch, vocab, target, history + 64)
        for row in range(batch):
            params = RowParams(seed=row, **KINDS[kind])  # type: ignore[arg-type]  # plain keyword values of a table
            self.sampler.add(row, params, tokens[row].tolist(), history // 2)
        tables = self.sampler.tables()
        for table, row, column, values in self.sampler.drain_writes():
            tables[table][row, column : column + len(values)] = torch.tensor(values, dtype=tables[table].dtype).to(
                target
            )
        self.rows_host = list(range(batch))
        self.rows = torch.arange(batch, device=target)
        self.positions = torch.full((batch,), history, dtype=torch.int64, device=target)
        self.logits = [torch.randn(batch, vocab, device=target) * 4 for _ in range(2 if device.dry else 4)]

    def __call__(self, i: int) -> torch.Tensor:
        logits = self.logits[i % len(self.logits)]
        return self.sampler.sample(logits, self.rows, self.rows_host, self.positions, self.tokens).token_ids


def run(context: Context) -> None:
    """Part `sampler`. "us" is bounded below by the host where "host_us" is larger than the device's work."""
    device = context.device
    vocab, history = (997, 32) if context.dry else (VOCAB, HISTORY)
    with torch.inference_mode():
        for batch in (2,) if context.dry else (256, 64, 1):
            for kind in KINDS:
                if context.out_of_time(f"sampler {kind} at batch {batch}", 5.0):
                    continue
                case = Case(device, kind, batch, vocab, history)
                timing = time_calls(device, case, len(case.logits))
                profile = device.profile(lambda case=case: case(0))  # type: ignore[misc]  # bound now
                row = {"kind": kind, "batch": batch, "vocab": vocab, "us": round(timing.median_us, 1)}
                row |= {"busy_us": round(1e3 * profile.busy_ms, 1), "kernels": profile.count}
                row |= {"host_us": round(host_us(device, lambda case=case: case(0)), 1)}  # type: ignore[misc]
                context.figure("sampler", row)
