"""States in the blocks of a device of plain lists: what a row's layers with states read and write in a step."""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv_cache.block_pool import NO_BLOCK
from engine.layer_groups import State, Window
from engine.step import ScheduledRow

Slots = list[list[int | None]]


class StatesOnDevice:
    def __init__(self, windows: Sequence[Window], block_size: int) -> None:
        self._groups = [group for group, window in enumerate(windows) if isinstance(window, State)]
        self._size = block_size
        self.bundles: dict[int, list[int]] = {}
        """by their first blocks"""
        self.drafts: dict[int, tuple[int, list[int]]] = {}
        """by row, of those of its last step: where the first one was, and what layers were given for them"""

    def mix(self, slots: Slots, tables: list[list[int]], row: ScheduledRow, known: list[int]) -> None:
        """The row reads what the tokens before it have made, takes in what was right of the drafts of its last step,
        and then writes, whatever rows before it have written. `known`: the digest of each token's whole past."""
        begin, drafts = self.drafts.pop(row.row, (row.computed, []))
        assert 0 <= row.computed - begin <= len(drafts), "a row goes on where it has no state"
        assert drafts[: row.computed - begin] == known[begin : row.computed], "wrong drafts are taken in"
        certain = len(known) - max(row.samples - 1, 0)
        if certain < len(known):
            self.drafts[row.row] = certain, known[certain:]
        for table in [tables[group] for group in self._groups if row.query_len]:
            if begin:
                for part, block in enumerate(self.bundles[table[(begin - 1) // self._size]]):
                    assert slots[block] == _state(known[begin - 1], part), "a row reads another state"
            assert table[(certain - 1) // self._size] != NO_BLOCK, "what a row has made is lost"
            for index in range(begin // self._size, -(-certain // self._size)):
                if table[index] != NO_BLOCK:
                    upto = min((index + 1) * self._size, certain)
                    for part, block in enumerate(self.bundles[table[index]]):
                        slots[block] = _state(known[upto - 1], part)


def _state(digest: int, part: int) -> list[int | None]:
    """In the place of a block's slots, of which there are never as many."""
    return [digest, part, *[None] * 9]
