"""A prompt's hidden states, as they come from the core chunk by chunk, made into what was asked for."""

from __future__ import annotations

import numpy as np

from engine.step import Pooling


class PooledPrompt:
    """`num_tokens`: of the prompt."""

    def __init__(self, kind: Pooling, num_tokens: int) -> None:
        self._kind = kind
        self._num_tokens = num_tokens
        self._parts: list[np.ndarray] = []

    def add(self, part: bytes, start: int) -> None:
        """float32 of the chunk that begins at position `start`. At 0 all begins anew: a sequence that was preempted
        computes its prompt again."""
        if start == 0:
            self._parts.clear()
        self._parts.append(np.frombuffer(part, dtype=np.float32))

    def vectors(self) -> np.ndarray | None:
        """float32 [vectors, size]: one, or one for each token; None before anything has come."""
        if not self._parts:
            return None
        if self._kind in ("all", "judge_all"):
            joined: np.ndarray = np.concatenate(self._parts).reshape(self._num_tokens, -1)
            return joined
        if self._kind in ("last", "judge"):
            return self._parts[-1][None]
        if self._kind == "cls":
            return self._parts[0][None]
        if self._kind == "max":
            largest: np.ndarray = np.stack(self._parts).max(axis=0)[None]
            return largest
        mean: np.ndarray = np.stack(self._parts).mean(axis=0, dtype=np.float64) * len(self._parts) / self._num_tokens
        return mean.astype(np.float32)[None]
