"""What grammars allow, as the host says it: a bit for each token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.sampling.upload import upload


def restrict(logits: torch.Tensor, places: Sequence[int], bits: np.ndarray) -> None:
    """Logits of tokens that are not allowed become minus infinity. `logits` float32 `[m, V]`; `bits` int32
    `[len(places), ceil(V / 32)]`, of the rows `places`, ascending: the lowest bit is the first token."""
    if logits.device.type == "cpu":
        flat = np.ascontiguousarray(~bits).view(np.uint8)
        forbidden = torch.from_numpy(
            np.unpackbits(flat, axis=1, count=logits.shape[1], bitorder="little").view(np.bool_)
        )
        if len(places) == len(logits):
            logits.masked_fill_(forbidden, float("-inf"))
            return
        for place, row in zip(places, forbidden):
            logits[place].masked_fill_(row, float("-inf"))
        return
    words = upload(bits.reshape(-1), torch.int32, logits.device).view(len(places), -1, 1)
    single = torch.arange(32, dtype=torch.int32, device=logits.device)
    forbidden = ((words >> single) & 1).view(len(places), -1)[:, : logits.shape[1]] == 0
    if len(places) == len(logits):
        logits.masked_fill_(forbidden, float("-inf"))
        return
    at = upload(places, torch.int64, logits.device)
    logits.index_copy_(0, at, logits.index_select(0, at).masked_fill_(forbidden, float("-inf")))
