"""Which tokens a row has seen and how often it generated them: what the penalties need, on the device.

A count per vocabulary entry would cost V integers a row and a pass over V each step. A history has few distinct
tokens, so each penalised row owns a list of those with their counts: `8 * min(V, max_model_len)` bytes. Slots are
allocated when a row with penalties arrives, doubling, and never for others.

The host runs one step ahead and does not know the last tokens. So a step begins by reading them from the request table,
and `counted` makes that idempotent: a position is counted once, however often it is seen. Drafts are counted one by one
while the logits behind them are changed, and taken back in the same step: nobody knows yet whether they are right.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.sampling.upload import upload


class SeenTokens:
    """Distinct tokens of penalised rows, `[slots, capacity]`, and how often each was generated (0: prompt only)."""

    def __init__(self, max_slots: int, vocab_size: int, max_model_len: int, device: torch.device) -> None:
        self._max_slots = max_slots
        self._vocab = vocab_size
        self._device = device
        self._capacity = min(vocab_size, max_model_len)
        self._ids = torch.zeros((0, self._capacity), dtype=torch.int32, device=device)
        self._counts = torch.zeros_like(self._ids)
        self._sizes = torch.zeros(0, dtype=torch.int64, device=device)
        self._counted = torch.zeros_like(self._sizes)
        self._free: list[int] = []
        self._bounds: dict[int, int] = {}
        """by slot, how long its list can be, without drafts"""
        self._uncounted: dict[int, int] = {}
        """by slot, how many tokens may have come since its last step"""

    @property
    def size_bytes(self) -> int:
        return self._ids.nbytes + self._counts.nbytes + self._sizes.nbytes + self._counted.nbytes

    @property
    def max_size_bytes(self) -> int:
        """What `size_bytes` is when every row uses penalties."""
        return self._max_slots * (8 * self._capacity + 16)

    def acquire(self, token_ids: Sequence[int], prompt_len: int) -> int:
        """A slot that holds the history `token_ids`, of which the first `prompt_len` are the prompt."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        history = np.asarray(token_ids, dtype=np.int64)
        generated = np.arange(len(history)) >= prompt_len
        known = (history >= 0) & (history < self._vocab)
        ids, place = np.unique(history[known], return_inverse=True)
        counts = np.bincount(place.reshape(-1), weights=generated[known], minlength=len(ids))
        self._ids[slot, : len(ids)] = upload(ids, torch.int32, self._device)
        self._counts[slot, : max(1, len(ids))].zero_()
        self._counts[slot, : len(ids)] = upload(counts, torch.int32, self._device)
        # Through slices: assignment to one element copies a scalar of the host, for which a GPU makes it wait.
        self._sizes[slot : slot + 1].fill_(len(ids))
        self._counted[slot : slot + 1].fill_(len(history))
        self._bounds[slot] = len(ids)
        self._uncounted[slot] = 1
        return slot

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """ids and counts int32 `[slots, capacity]`; how many of a slot are in use, and up to which position its
        history is counted, int64 `[slots]`. New ones after an `acquire` that grew them."""
        return self._ids, self._counts, self._sizes, self._counted

    def release(self, slot: int) -> None:
        del self._bounds[slot], self._uncounted[slot]
        self._free.append(slot)

    def expect(self, slots: Sequence[int], each: Sequence[int]) -> tuple[int, int]:
        """A step of rows with these slots, each sampled at as many positions, begins: (tokens of a row that may have to
        be counted before the first, width that holds every list), upper bounds that the host knows without asking the
        device."""
        behind, width = 0, 0
        for slot, positions in zip(slots, each, strict=True):
            behind = max(behind, self._uncounted[slot])
            self._bounds[slot] = min(self._bounds[slot] + self._uncounted[slot], self._capacity)
            self._uncounted[slot] = positions
            width = max(width, self._bounds[slot] + positions - 1)
        return behind, min(width, self._capacity)

    def state(self, slots: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What `restore` goes back to."""
        return self._counts[:, :width].index_select(0, slots), self._sizes[slots], self._counted[slots]

    def restore(self, slots: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        """Forget what was counted since `state`. Tokens that were new stay behind the list's end."""
        counts, self._sizes[slots], self._counted[slots] = state
        self._counts[:, : counts.shape[1]].index_copy_(0, slots, counts)

    def count(self, slots: torch.Tensor, last: torch.Tensor, positions: torch.Tensor, width: int) -> None:
        """Count the token `last` int64 `[n]` at `positions - 1` where that position is new."""
        new = (positions > self._counted[slots]) & (last >= 0) & (last < self._vocab)
        sizes = self._sizes[slots]
        columns = torch.arange(width, device=self._device)
        match = self._ids[:, :width].index_select(0, slots) == last.unsqueeze(1)
        match &= columns < sizes.unsqueeze(1)
        known = match.any(1)
        # An unknown token goes behind the list; without a new one, that place holds nothing and may be overwritten.
        place = torch.where(known, match.to(torch.int32).argmax(1), sizes.clamp(max=width - 1))
        old = self._counts[slots, place]
        appended = new & ~known
        self._ids[slots, place] = torch.where(appended, last.to(torch.int32), self._ids[slots, place])
        self._counts[slots, place] = torch.where(appended, 1, old + (new & known))
        self._sizes[slots] = sizes + appended
        self._counted[slots] = torch.maximum(self._counted[slots], positions)

    def penalise(
        self,
        logits: torch.Tensor,
        index: torch.Tensor,
        slots: torch.Tensor,
        width: int,
        factors: Sequence[torch.Tensor],
    ) -> None:
        """Change `logits[index]` in place; `factors` are repetition, presence and frequency, float32 `[n]` each."""
        sizes = self._sizes[slots].unsqueeze(1)
        columns = torch.arange(width, device=self._device)
        columns = torch.where(columns < sizes, columns, 0)  # places past the end repeat the first: same value twice
        ids = self._ids[:, :width].index_select(0, slots).gather(1, columns).to(torch.int64)
        counts = self._counts[:, :width].index_select(0, slots).gather(1, columns)
        repetition, presence, frequency = (f.unsqueeze(1) for f in factors)
        repetition = torch.where(sizes > 0, repetition, 1.0)
        at = (index.unsqueeze(1), ids)
        values = logits[at]
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[at] = values - frequency * counts - presence * (counts > 0)

    def _grow(self) -> None:
        old = self._ids.shape[0]
        new = min(max(4, 2 * old), self._max_slots) - old
        if new <= 0:
            raise ValueError(f"more than {self._max_slots} rows use penalties: rows were added and never released")
        self._ids, self._counts, self._sizes, self._counted = (
            torch.cat((t, t.new_zeros((new, *t.shape[1:]))))
            for t in (self._ids, self._counts, self._sizes, self._counted)
        )
        self._free.extend(range(old + new - 1, old - 1, -1))
