"""Host values to the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


def upload(
    values: Sequence[int] | Sequence[float] | npt.NDArray[np.generic], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A 1-D tensor of `values`. On a GPU the copy is queued on the current stream from pinned memory: a pageable source
    would make the host wait for everything queued before it."""
    host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda" and host.numel():
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
