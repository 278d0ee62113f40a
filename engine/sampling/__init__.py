"""Picks tokens on the device: filters, seeded draws, penalties, log-probabilities. README.md tells how."""

from __future__ import annotations

from engine.sampling.logprobs import LogprobTensors
from engine.sampling.sampler import SampleOutput, Sampler

__all__ = ["LogprobTensors", "SampleOutput", "Sampler"]
