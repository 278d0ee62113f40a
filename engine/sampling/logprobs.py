"""Log-probabilities of chosen tokens and of the most likely ones, kept on the device until the host asks.

They describe the model, not the sampler: computed from logits before any bias, list, penalty or temperature. Only a
grammar comes before them, as in vLLM: what it forbids is no alternative.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from engine.sampling.draw import row_tiles
from engine.sampling.order import top_ids
from engine.step import RowLogprobs, TokenLogprobs


class LogprobTensors(msgspec.Struct, frozen=True):
    """Scores of n positions; entry j of `widths` is how many columns of row j count (1 + alternatives asked for)."""

    rows: tuple[int, ...]
    """table rows for sampled tokens; 0 .. n-1 for prompt tokens"""
    widths: tuple[int, ...]
    token_ids: torch.Tensor
    """int64 `[n, 1 + k]`: the token in question, then the k most likely (which may repeat it), most likely first"""
    logprobs: torch.Tensor
    """float32 `[n, 1 + k]`"""
    ranks: torch.Tensor
    """int64 `[n]`: 1 + number of tokens with a strictly greater logit"""

    def start_copy(self) -> LogprobTensors:
        """The same on the host, in pinned memory where the source is a GPU; valid once the current stream gets
        there."""
        if self.token_ids.device.type == "cpu":
            return self
        return LogprobTensors(
            self.rows, self.widths, _pinned(self.token_ids), _pinned(self.logprobs), _pinned(self.ranks)
        )

    def to_list(self) -> list[TokenLogprobs]:
        """One entry per position. Waits for the device, unless called on what `start_copy` gave."""
        ids, logprobs, ranks = self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist()
        return [
            TokenLogprobs(token_ids=i[:width], logprobs=p[:width], rank=rank)
            for i, p, rank, width in zip(ids, logprobs, ranks, self.widths, strict=True)
        ]

    def to_host(self) -> RowLogprobs:
        """The same in columns. Waits like `to_list`; a copy, which later steps do not change."""
        logprobs, widths = self.logprobs.to("cpu", torch.float64).numpy(), np.array(self.widths, dtype=np.int32)
        if np.isneginf(logprobs).any():  # a grammar allows fewer; all that it allows come first
            counts = np.arange(logprobs.shape[1]) < widths[:, None]
            widths = np.count_nonzero(counts & ~np.isneginf(logprobs), axis=1).astype(np.int32)
        return RowLogprobs(
            np.array(self.rows, dtype=np.int32),
            widths,
            self.token_ids.to("cpu", torch.int32).numpy(),
            logprobs,
            self.ranks.to("cpu", torch.int32).numpy(),
        )


def _pinned(source: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(source, device="cpu", pin_memory=True).copy_(source, non_blocking=True)


def empty_scores(device: torch.device) -> LogprobTensors:
    """Scores of no position."""
    empty = torch.empty((0, 1), dtype=torch.int64, device=device)
    return LogprobTensors((), (), empty, empty.to(torch.float32), empty[:, 0])


def joined(scores: Sequence[LogprobTensors]) -> LogprobTensors | None:
    """One behind the other; None of none."""
    if not scores:
        return None
    columns = max(one.token_ids.shape[1] for one in scores)

    def widened(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(values, (0, columns - values.shape[1]))

    return LogprobTensors(
        rows=tuple(row for one in scores for row in one.rows),
        widths=tuple(width for one in scores for width in one.widths),
        token_ids=torch.cat([widened(one.token_ids) for one in scores]),
        logprobs=torch.cat([widened(one.logprobs) for one in scores]),
        ranks=torch.cat([one.ranks for one in scores]),
    )


def score(logits: torch.Tensor, targets: torch.Tensor, rows: Sequence[int], ks: Sequence[int]) -> LogprobTensors:
    """Score `targets` int64 `[n]` under unmodified logits float32 `[n, V]`, with `ks[j]` alternatives for position
    j."""
    vocab = logits.shape[1]
    widths = tuple(1 + min(k, vocab) for k in ks)
    columns = max(widths, default=1) - 1
    ids, logprobs, ranks = [], [], []
    for s in row_tiles(logits.shape[0], vocab, logits.device):
        part, target = logits[s], targets[s].unsqueeze(1)
        chosen = torch.cat((target, top_ids(part, columns)), dim=1) if columns else target
        values = part.gather(1, chosen)
        ids.append(chosen)
        logprobs.append(values - part.logsumexp(-1, keepdim=True))
        ranks.append((part > values[:, :1]).sum(-1) + 1)
    if not ids:
        return empty_scores(logits.device)
    return LogprobTensors(tuple(rows), widths, torch.cat(ids), torch.cat(logprobs), torch.cat(ranks))
