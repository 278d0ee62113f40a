"""Where drafts come from: tokens that are there already. Which tokens come does not depend on what is proposed, only
how many steps they take."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from engine.runner.batch import StepBatch
from engine.runner.kernels.ngram import DraftKernels, SuffixKernels, cpu_draft_kernels, select_draft_kernels
from engine.runner.kernels.ngram_host import END
from engine.runner.request_table import RequestTable
from engine.sampling.upload import upload
from engine.speculation_config import SpeculationConfig

_RECENT_TOKENS, _RECENT_SALTS = 1 << 16, 64
_NOTHING = torch.zeros(0, dtype=torch.int32)


class Proposer(Protocol):
    def propose(self, rows: Sequence[int], most: Sequence[int]) -> Sequence[int]:
        """Write drafts behind what those rows know, at most so many of each, when a step starts that computes them.
        Returns how many there are; as many as asked for where the host cannot know, whatever they are."""
        ...

    def observe(self, batch: StepBatch, hidden: torch.Tensor) -> None:
        """A step has computed `hidden` [tokens, columns of what the model returns], and what it sampled is in the table
        with the lengths. On the stream of the step, and before anything else touches its inputs."""
        ...

    def end(self, row: int) -> None:
        """The row is about to be given away."""
        ...


class NgramProposer:
    """From the row's own tokens alone."""

    def __init__(self, config: SpeculationConfig, table: RequestTable, kernels: DraftKernels) -> None:
        self._longest, self._shortest = config.prompt_lookup_max, config.prompt_lookup_min
        self._table, self._kernels = table, kernels

    def propose(self, rows: Sequence[int], most: Sequence[int]) -> Sequence[int]:
        tokens, lengths = self._table.tokens, self._table.lengths
        where, wanted = upload(rows, torch.int64, tokens.device), upload(most, torch.int32, tokens.device)
        counts = self._kernels.propose_ngram(tokens, where, lengths, wanted, self._longest, self._shortest)
        return counts.tolist() if tokens.device.type == "cpu" else most

    def observe(self, batch: StepBatch, hidden: torch.Tensor) -> None:
        """The table says all."""

    def end(self, row: int) -> None:
        """Nothing is kept."""


class SuffixProposer:
    """From the row's own tokens and from recent outputs of rows with an equal cache salt; on a CPU."""

    def __init__(self, config: SpeculationConfig, table: RequestTable, kernels: SuffixKernels) -> None:
        self._config, self._table, self._kernels = config, table, kernels
        self._recent: OrderedDict[str | None, torch.Tensor] = OrderedDict()
        """outputs by their rows' salt; that to which one was added last is the last"""

    def propose(self, rows: Sequence[int], most: Sequence[int]) -> Sequence[int]:
        counts = [0] * len(rows)
        salts = self._table.cache_salts
        for salt in dict.fromkeys(salts.get(row) for row in rows):
            places = [place for place, row in enumerate(rows) if salts.get(row) == salt]
            some = self._propose([rows[place] for place in places], [most[place] for place in places], salt)
            for place, count in zip(places, some, strict=True):
                counts[place] = count
        return counts

    def _propose(self, rows: Sequence[int], most: Sequence[int], salt: str | None) -> Sequence[int]:
        counts = self._kernels.propose_suffix(
            self._table.tokens,
            torch.tensor(rows, dtype=torch.int64),
            self._table.lengths,
            torch.tensor(most, dtype=torch.int32),
            self._recent.get(salt, _NOTHING),
            self._config.suffix_decoding_max_tree_depth,
            self._config.suffix_decoding_max_spec_factor,
            self._config.suffix_decoding_min_token_prob,
        )
        return counts.tolist()

    def observe(self, batch: StepBatch, hidden: torch.Tensor) -> None:
        """The table says all."""

    def end(self, row: int) -> None:
        output = self._table.tokens[row, self._table.prompt_len.get(row, 0) : self._table.lengths[row]]
        if len(output) > 1:
            salt, end = self._table.cache_salts.get(row), torch.tensor([END], dtype=torch.int32)
            recent = self._recent.pop(salt, _NOTHING)
            self._recent[salt] = torch.cat((recent, output, end))[-_RECENT_TOKENS:].contiguous()
            if len(self._recent) > _RECENT_SALTS:
                self._recent.popitem(last=False)


def proposer_of(config: SpeculationConfig, table: RequestTable, cache_dir: Path) -> Proposer | None:
    """`cache_dir`: where kernels that are built on this machine are kept. None: drafts do not come from the table."""
    if config.method == "ngram":
        return NgramProposer(config, table, select_draft_kernels(table.tokens.device, cache_dir))
    return SuffixProposer(config, table, cpu_draft_kernels(cache_dir)) if config.method == "suffix" else None
