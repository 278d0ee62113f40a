"""What grammars allow, as the host says it: a bit for each token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.sampling.upload import upload


def restrict(logits: torch.Tensor, places: Sequence[int], bits: np.ndarray) -> None:
    """Logits of tokens that are not allowed become minus infinity. `logits` float32 `[m, V]`; `bits` int32
    `[len(places), ceil(V / 32)]`, of the rows `places`, ascending: the lowest bit is the first token."""
    device, vocab_size = logits.device, logits.shape[1]
    if device.type == "cpu":
        forbidden = forbidden_by_host(bits, vocab_size)
    else:
        forbidden = forbidden_by_device(upload(bits.reshape(-1), torch.int32, device), len(places), vocab_size)
    if len(places) == len(logits):
        logits.masked_fill_(forbidden, float("-inf"))
        return
    at = upload(places, torch.int64, device)
    logits.index_copy_(0, at, logits.index_select(0, at).masked_fill_(forbidden, float("-inf")))


def forbidden_by_host(bits: np.ndarray, vocab_size: int) -> torch.Tensor:
    """bool `[rows, V]`"""
    by_byte = np.ascontiguousarray(~bits).view(np.uint8)
    forbidden = np.unpackbits(by_byte, axis=1, count=vocab_size, bitorder="little")
    return torch.from_numpy(forbidden.view(np.bool_))


def forbidden_by_device(bits: torch.Tensor, rows: int, vocab_size: int) -> torch.Tensor:
    """The same of int32 `[rows * words]`, where they are."""
    single = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits.view(rows, -1, 1) >> single) & 1).view(rows, -1)[:, :vocab_size] == 0
