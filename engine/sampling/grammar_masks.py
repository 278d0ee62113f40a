"""What grammars allow, as the host says it: a bit for each token. In torch, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.sampling.upload import upload


def restrict(logits: torch.Tensor, places: Sequence[int], bits: np.ndarray) -> None:
    """See `SamplingKernels.restrict`."""
    device, (rows, vocab_size) = logits.device, logits.shape
    words = upload(bits.reshape(-1), torch.int32, device).view(len(places), -1, 1)
    single = torch.arange(32, dtype=torch.int32, device=device)
    forbidden = ((words >> single) & 1).view(len(places), -1)[:, :vocab_size] == 0
    if len(places) == rows:
        logits.masked_fill_(forbidden, float("-inf"))
        return
    at = upload(places, torch.int64, device)
    logits.index_copy_(0, at, logits.index_select(0, at).masked_fill_(forbidden, float("-inf")))
