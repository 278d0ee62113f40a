"""Drafts in NumPy: what a CPU without a compiler runs, and what the other implementations are tested against."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from engine.lookup import matches

END = -1
"""no token: the end of a text"""
MOST_MATCHES = 64
"""places with the same tokens before them that `propose_suffix` looks at, the latest ones"""


class HostDraftKernels:
    """See `SuffixKernels`."""

    def propose_ngram(
        self,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        most: torch.Tensor,
        longest: int,
        shortest: int,
    ) -> torch.Tensor:
        def find(own: np.ndarray, room: int) -> np.ndarray:
            ends, length = matches(own, longest)
            return own[:0] if length < shortest else np.resize(own[ends[-1] + 1 :], room)

        return _write(tokens, rows, lengths, most, find)

    def propose_suffix(
        self,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        most: torch.Tensor,
        recent: torch.Tensor,
        longest: int,
        factor: float,
        least: float,
    ) -> torch.Tensor:
        others = recent.numpy()

        def find(own: np.ndarray, room: int) -> np.ndarray:
            text = np.concatenate((others, own))
            ends, length = matches(text, min(longest, len(own)))
            return most_often(text, ends[-MOST_MATCHES:] + 1, min(room, int(factor * length)), least)

        return _write(tokens, rows, lengths, most, find)


def most_often(text: np.ndarray, places: np.ndarray, most: int, least: float) -> np.ndarray:
    """Of what `text` has from `places` on, the tokens that come most often; see `SuffixKernels`. int32 [drafts]"""
    likely = 1.0
    drafts: list[int] = []
    while len(places) and len(drafts) < most:
        following = text[places]
        tokens, counts = np.unique(following, return_counts=True)
        best = int(np.argmax(counts))
        likely *= counts[best] / len(places)
        if tokens[best] == END or likely < least:
            break
        drafts.append(int(tokens[best]))
        places = places[following == tokens[best]] + 1
        places = places[places < len(text)]
    return np.array(drafts, dtype=np.int32)


def _write(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    most: torch.Tensor,
    find: Callable[[np.ndarray, int], np.ndarray],
) -> torch.Tensor:
    """`find`: known tokens, and for how many drafts there is room → drafts."""
    table, known = tokens.numpy(), lengths.numpy()
    counts = torch.zeros(len(rows), dtype=torch.int32)
    for at, (row, wanted) in enumerate(zip(rows.tolist(), most.tolist())):
        n = int(known[row])
        room = min(wanted, table.shape[1] - n)
        if n > 0 and room > 0:
            drafts = find(table[row, :n], room)
            table[row, n : n + len(drafts)] = drafts
            counts[at] = len(drafts)
    return counts
