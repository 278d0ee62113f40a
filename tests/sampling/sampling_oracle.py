"""Brute force in float64 and Python integers: what the sampler must do, written the slow and obvious way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.sampling import SampleOutput, Sampler
from engine.sampling.kernels import SamplingKernels
from engine.sampling.kernels.native import NativeKernels
from engine.step import RowParams

MakeNative = Callable[..., NativeKernels]
"""(vocabulary, isa = "auto") → kernels; skips where the CPU lacks the ISA"""

M32 = 0xFFFFFFFF
CPU = torch.device("cpu")


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & M32
    x ^= x >> 15
    x = x * 0x846CA68B & M32
    return x ^ x >> 16


def bits31(seed: int, position: int, token: int) -> int:
    m64 = (1 << 64) - 1
    x = (seed + 0x9E3779B97F4A7C15) & m64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & m64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & m64
    x ^= x >> 31
    k0 = mix(((x & M32) + position * 0x9E3779B9) & M32)
    k1 = mix(((x >> 32) + position * 0x85EBCA6B) & M32)
    x = (token * 0x9E3779B9 + k0) & M32
    x ^= x >> 16
    x = (x * 0x7FEB352D + k1) & M32
    x ^= x >> 15
    x = x * 0x846CA68B & M32
    return (x ^ (x >> 16 | (0xFFFF0000 if x >> 31 else 0))) & M32


def gumbel(seed: int, position: int, vocab: int) -> np.ndarray:
    n = np.array([bits31(seed, position, t) for t in range(vocab)], dtype=np.float64)
    return -np.log(-np.log1p(-(n + 0.5) * 2.0**-31 * (1 - 2.0**-24)))


def process(logits: np.ndarray, p: RowParams, history: Sequence[int], prompt_len: int) -> np.ndarray:
    """Bias, masks, penalties, in the documented order."""
    x = logits.astype(np.float64).copy()
    generated = list(history[prompt_len:])
    if p.allowed_token_ids is not None:
        x[[t for t in range(len(x)) if t not in p.allowed_token_ids]] = -np.inf
    for token, bias in p.logit_bias.items():
        x[token] += bias
    for word in p.bad_words:
        before = word[:-1]
        if not before or generated[-len(before) :] == before:
            x[word[-1]] = -np.inf
    if len(generated) < p.min_tokens:
        x[p.stop_token_ids] = -np.inf
    for token in set(history):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(generated):
        x[token] -= p.frequency_penalty * generated.count(token) + p.presence_penalty
    return x


def scaled(processed: np.ndarray, p: RowParams) -> np.ndarray:
    return (processed - processed.max()) / p.temperature


def kept(processed: np.ndarray, p: RowParams, slack: float = 0.0) -> np.ndarray:
    """Indices that min-p, top-k and top-p keep; `slack` moves the borders outwards (positive) or inwards."""
    order = np.argsort(-processed, kind="stable")
    z = scaled(processed, p)[order]
    probs = np.exp(z)
    stay = probs >= min(1.0, float(np.float32(p.min_p)) * (1 - slack))
    if p.top_k > 0:
        stay &= np.arange(len(z)) < p.top_k
    probs = np.where(stay, probs, 0.0)
    if p.top_p < 1.0:
        before = np.cumsum(probs) - probs
        stay &= before < float(np.float32(p.top_p)) * probs.sum() * (1 + slack)
    return order[stay]


def assert_is_the_draw(token: int, processed: np.ndarray, p: RowParams, position: int) -> None:
    """`token` is what the documented algorithm draws, up to float32 rounding of a border or a near tie."""
    if p.temperature == 0.0 or p.top_k == 1:
        assert processed[token] >= processed.max() - 1e-4
        return
    scores = scaled(processed, p) + gumbel(p.seed, position, len(processed))
    assert token in kept(processed, p, 1e-5)
    assert scores[token] >= scores[kept(processed, p, -1e-5)].max() - 1e-4 * max(1.0, 1.0 / p.temperature)


def torch_path(vocab: int) -> SamplingKernels | None:
    """What a sampler on a CPU takes when it is told nothing."""
    return None


kernels_of: Callable[[int], SamplingKernels | None] = torch_path
"""vocabulary → the kernels of a `Table` that is given no sampler"""


class Table:
    """A request table of the runner's kind, with a sampler on it."""

    def __init__(
        self,
        vocab: int,
        rows: int = 16,
        max_len: int = 64,
        device: torch.device = CPU,
        sampler: Sampler | None = None,
    ) -> None:
        self.sampler = Sampler(rows, vocab, device, max_len, kernels_of(vocab)) if sampler is None else sampler
        self.tokens = torch.full((rows, max_len), 7 % vocab, dtype=torch.int32, device=device)
        self.lengths = [0] * rows
        self.prompt_lens = [0] * rows
        self.device = device

    def add(self, row: int, params: RowParams, history: Sequence[int] = (0,), prompt_len: int | None = None) -> None:
        known = len(history)
        self.prompt_lens[row] = known if prompt_len is None else prompt_len
        self.sampler.add(row, params, list(history), self.prompt_lens[row])
        self.tokens[row, :known] = torch.tensor(history, dtype=torch.int32)
        self.lengths[row] = known
        apply_writes(self.sampler)

    def step(self, logits: torch.Tensor, rows: Sequence[int]) -> SampleOutput:
        """Sample and, as the device would, write the tokens to the table."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.device)
        positions = torch.tensor([self.lengths[r] for r in rows], dtype=torch.int64, device=self.device)
        out = self.sampler.sample(logits.clone().to(self.device), index, list(rows), positions, self.tokens)
        self.tokens[index, positions] = out.token_ids.to(torch.int32)
        for row in rows:
            self.lengths[row] += 1
        return out

    def history(self, row: int) -> list[int]:
        return self.tokens[row, : self.lengths[row]].tolist()


def apply_writes(sampler: Sampler) -> None:
    tables = sampler.tables()
    for table, row, start, values in sampler.drain_writes():
        target = tables[table]
        target[row, start : start + len(values)] = torch.tensor(values, dtype=target.dtype, device=target.device)


def draw_once(logits: torch.Tensor, params: RowParams, position: int = 1, row: int = 0) -> int:
    table = Table(logits.shape[-1], max_len=max(64, position + 1))
    table.add(row, params, [0] * position)
    return int(table.step(logits.reshape(1, -1), [row]).token_ids[0])
