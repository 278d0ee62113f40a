"""Searches whose beams decode in step, in columns: planning, choosing among candidates and letting beams follow their
parents are a few array operations a step, however many searches there are.

A search enters after a choice when every beam has a row and a partly filled last block of its own; it leaves before
anything but tokens and blocks is to be decided: a stop token is among the best candidates, the limit is near, the pool
is empty, or it is preempted, aborted or at fault. Meanwhile what is new of it is here: the tokens in the last blocks,
how far its beams are computed, their scores and order; `leave` brings them back.

A beam that follows another one gets a copy of its last, partly filled block. Two beams that hold the same last full
block have the same tokens up to its end (a block's content depends on all that comes before it); where they do not, and
where last blocks are full, block tables are exchanged, one beam after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.kv_cache.kv_cache import Growth, KVCache
from engine.kv_cache.take_over import take_over
from engine.row_writes import RowWrites
from engine.scheduling.beam_group import BeamGroup
from engine.scheduling.sequence import Sequence
from engine.step import RowLogprobs, ScheduledRow, StepResult

FEWEST_SEARCHES = 10
"""Where fewer searches run, choosing for one after the other costs less than the array operations."""
MOST_STOP_TOKENS = 8
_UNREGISTERED = 4
"""full blocks that a beam may have that cannot be found: most beams are dropped soon"""
_NOTHING, _TELL, _TOKEN, _FOLLOWS = range(4)
"""what the device is to be told of a beam: it has sampled the new token itself; what the sequence says; the new token;
the tokens in its last block"""


@dataclass(frozen=True, slots=True)
class SearchesStep:
    """One planned token for each beam of searches of one shape. Nobody writes to the arrays any more."""

    table: SearchTable
    slots: np.ndarray
    """int64 [searches]"""
    entries: np.ndarray
    """int64 [searches]: which entry of its search this was"""
    beams: np.ndarray
    """object [searches, width]: sequences, in the order of the choice"""
    rows: np.ndarray
    """int64 [searches, width]"""
    computed: np.ndarray
    """int64 [searches]: before the step"""

    def __len__(self) -> int:
        return int(self.rows.size)

    def holds(self, search: int) -> bool:
        """The search has been steady since."""
        return self.table.holds(int(self.slots[search]), int(self.entries[search]))

    @property
    def positions(self) -> np.ndarray:
        """int64 [searches * width]: what each row has computed before the step"""
        return self.computed.repeat(self.rows.shape[1])

    def row_of(self, search: int, beam: int) -> ScheduledRow:
        return ScheduledRow(int(self.rows[search, beam]), int(self.computed[search]), 1, samples=True)


@dataclass(frozen=True, slots=True)
class News:
    """What the device is to be told of searches that are placed."""

    rewrites: RowWrites
    appends: RowWrites
    copies: list[tuple[int, int]]
    """(source, destination)"""
    beams: list[Sequence]
    """those that say it themselves"""


class SearchTable:
    """Searches of one width with as many candidates. A slot is a search's place in the arrays; its beams are there in
    the order of the last choice."""

    def __init__(self, width: int, most: int, kv: KVCache) -> None:
        """`most`: searches that can run at once."""
        self._kv = kv
        self._free = list(range(most - 1, -1, -1))
        self._num_entries = 0
        self._entries = np.zeros(most, dtype=np.int64)
        """when its search entered, in order; 0: nobody"""
        self._ready = np.zeros(most, dtype=bool)
        """its beams have their tokens: the next step can compute them"""
        self._of_search = np.zeros((5, most), dtype=np.int64)
        self._computed, self._start, self._since, self._length, self._limit = self._of_search
        """of all its beams; first token of the last block, and the first one there that is not the prompt's; as in
        `BeamSearch`"""
        self._stop = np.full((most, MOST_STOP_TOKENS), -1, dtype=np.int64)
        self._scores = np.zeros((most, width))
        self._beams = np.full((most, width), None, dtype=object)
        self._of_beam = np.zeros((most, width, 5), dtype=np.int64)
        self._rows, self._last, self._full, self._source, self._told = np.moveaxis(self._of_beam, 2, 0)
        """row; last block; the one before (-1: there is none); 1 + block to be copied into the last one (0: none); what
        the device is to be told"""
        self._recent = np.zeros((most, width, kv.block_size), dtype=np.int64)
        """tokens in the last block"""
        self._grown = np.zeros(most, dtype=bool)
        """the device was not told of the last blocks"""
        self._groups: dict[int, BeamGroup] = {}
        self._width = width
        self._each, self._place = np.arange(most * width), np.arange(kv.block_size)
        self._first_of = self._each[::width, None]
        """[searches, 1]: index of a search's first beam where those of all searches are in one row"""

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def num_ready(self) -> int:
        """Tokens that `place` would plan."""
        return int(np.count_nonzero(self._ready)) * self._width

    def holds(self, slot: int, entry: int) -> bool:
        return bool(self._entries[slot] == entry)

    # -- coming and going ------------------------------------------------------------------------------------------

    def enter(self, group: BeamGroup) -> None:
        """After a choice, when `fits`."""
        slot, search = self._free.pop(), group.search
        self._num_entries += 1
        self._entries[slot], self._ready[slot] = self._num_entries, True
        first = group.beams[0]
        computed, size = first.computed, self._kv.block_size
        start = computed // size * size
        self._computed[slot], self._start[slot] = computed, start
        self._since[slot] = max(first.prompt_len, start)
        self._length[slot], self._limit[slot] = search.length, search.limit
        self._stop[slot] = -1
        self._stop[slot, : len(search.stop_token_ids)] = tuple(search.stop_token_ids)
        self._scores[slot], self._beams[slot] = search.scores, group.beams
        self._rows[slot] = [beam.row for beam in group.beams]
        tables = [beam.blocks.tables[0] for beam in group.beams]
        self._last[slot] = [table[-1] for table in tables]
        self._full[slot] = [table[-2] if start else -1 for table in tables]
        self._source[slot], self._told[slot] = 0, _TELL
        self._recent[slot, :, : computed + 1 - start] = [beam.tokens[start:] for beam in group.beams]
        for beam in group.beams:
            beam.waits = True
        self._groups[slot] = group
        group.table, group.slot = self, slot

    def leave(self, group: BeamGroup) -> None:
        """The fields of the group and its beams hold what has happened to them."""
        slot = group.slot
        ready, computed, start = bool(self._ready[slot]), int(self._computed[slot]), int(self._start[slot])
        recent = self._recent[slot, :, : computed + ready - start].tolist()
        group.beams = self._beams[slot].tolist()
        group.search.scores, group.search.length = self._scores[slot].tolist(), int(self._length[slot])
        for index, beam in enumerate(group.beams):
            beam.tokens[start:] = recent[index]
            beam.computed = beam.blocks.num_tokens = computed
            beam.in_flight, beam.waits = int(not ready), not ready
            if ready and self._told[slot, index] != _TELL:
                beam.rewrite_from = computed
                if self._told[slot, index] == _FOLLOWS:
                    beam.rewrite_from = int(self._since[slot])
                    copy = (int(self._source[slot, index]) - 1, int(self._last[slot, index]))
                    beam.moved = Growth(start // self._kv.block_size, [], [copy])
        self._entries[slot], self._ready[slot] = 0, False
        self._beams[slot], self._grown[slot] = None, False
        self._free.append(slot)
        del self._groups[slot]
        group.table = None

    def look_out(self) -> None:
        """Those get blocks whose last ones are full, or leave where there are none."""
        slots = np.flatnonzero(self._ready & ~self._grown & (self._computed == self._start))
        if len(slots) and not self._lengthen(slots):
            for slot in slots.tolist():
                if not self._lengthen(np.array([slot])):
                    self.leave(self._groups[slot])

    def _lengthen(self, slots: np.ndarray) -> bool:
        """Blocks for all of their beams, or for none."""
        kv, late, all_blocks = self._kv, [], []
        for beam in self._beams[slots].ravel().tolist():
            blocks = beam.blocks
            all_blocks.append(blocks)
            have = len(blocks.tables[0])
            if have - blocks.num_registered >= _UNREGISTERED:
                blocks.num_tokens = have * kv.block_size
                late.append((blocks, beam.tokens))
        kv.register_all(late)
        new = kv.append_one(all_blocks)
        if new is None:
            return False
        self._last[slots] = np.array(new).reshape(-1, self._width)
        self._grown[slots] = True
        return True

    # -- a step ----------------------------------------------------------------------------------------------------

    def place(self) -> tuple[SearchesStep, News]:
        """All that are ready compute a token of each beam in the step that is planned."""
        slots = np.flatnonzero(self._ready)
        rows, last, _, source, told = np.moveaxis(self._of_beam.take(slots, 0), 2, 0)
        computed, start, since, _, _ = self._of_search.take(slots, 1)
        step = SearchesStep(self, slots, self._entries.take(slots), self._beams.take(slots, 0), rows, computed)
        recent = self._recent.take(slots, 0)
        search, beam = (told == _TELL).nonzero()
        beams: list[Sequence] = step.beams[search, beam].tolist()
        columns = (recent[search, beam], computed.take(search), start.take(search))
        for seq, tokens, at, first in zip(beams, *(column.tolist() for column in columns), strict=True):
            seq.tokens[first:] = tokens[: at + 1 - first]
        grown = self._grown.take(slots)
        starts = (start[grown] // self._kv.block_size).repeat(self._width)
        appends = RowWrites(rows[grown].ravel(), starts, np.ones_like(starts), last[grown].ravel())
        copied = source > 0
        copies = list(zip((source[copied] - 1).tolist(), last[copied].tolist(), strict=True))
        self._computed[slots] = computed + 1
        self._ready[slots] = self._grown[slots] = False
        self._of_beam[slots, :, 3:] = 0
        return step, News(self._rewrites(step, start, since, told, recent), appends, copies, beams)

    def _rewrites(
        self, step: SearchesStep, start: np.ndarray, since: np.ndarray, told: np.ndarray, recent: np.ndarray
    ) -> RowWrites:
        """Of beams that the device is told tokens of their last blocks."""
        search, beam = (told >= _TOKEN).nonzero()
        computed, first = step.computed.take(search), start.take(search)
        begin = np.where(told[search, beam] == _FOLLOWS, since.take(search), computed)
        new = (self._place >= (begin - first)[:, None]) & (self._place <= (computed - first)[:, None])
        return RowWrites(step.rows[search, beam], begin, computed + 1 - begin, recent[search, beam][new])

    def take(self, step: SearchesStep, result: StepResult) -> list[int]:
        """The candidates that the step has brought: every beam goes on. Returns the searches of the step (indices) that
        are left to the caller, because they have left, or do so now."""
        slots, rows, left = step.slots, step.rows, []
        alive = self._entries.take(slots) == step.entries
        if result.faults:
            alive &= ~np.isin(rows, result.faults).any(axis=1)
        if not alive.all():
            left = np.flatnonzero(~alive).tolist()
            slots, rows = slots[alive], rows[alive]
            if not len(slots):
                return left
        count, width = len(slots), self._width
        sampled, tokens, logprobs = _candidates(result, rows.ravel(), width)
        totals = (self._scores.take(slots, 0).reshape(-1, 1) + logprobs).reshape(count, -1)
        best = (-totals).argsort(axis=1, kind="stable")[:, :width]
        first, each = self._first_of[:count], logprobs.shape[1]
        parents, places = best // each + first, best + first * each
        chosen, scores = tokens.ravel().take(places), totals.ravel().take(places)
        known = sampled.take(parents) == chosen
        _, _, _, length, limit = self._of_search.take(slots, 1)
        special = length + 1 >= limit
        stops = chosen[:, :, None] == self._stop.take(slots, 0)[:, None, :]
        if stops.any():
            special |= stops.any(axis=(1, 2))
        if special.any():
            left += np.flatnonzero(alive)[special].tolist()
            plain = ~special
            slots, chosen, scores, known = slots[plain], chosen[plain], scores[plain], known[plain]
            parents = (parents - first)[plain] + self._first_of[: len(slots)]
        if len(slots):
            self._scores[slots] = scores
            self._follow(slots, parents.ravel(), chosen.ravel(), known.ravel())
        return left

    def _follow(self, slots: np.ndarray, parents: np.ndarray, chosen: np.ndarray, known: np.ndarray) -> None:
        """`parents`, `chosen`: int64 [searches * width], of each beam that goes on; `known`: its parent's row has
        sampled the same token. The first child of a beam stays on its row, others take the rows of beams without a
        child."""
        width, each = self._width, self._each[: len(parents)]
        first_child = np.full(len(parents), -1)
        first_child[parents[::-1]] = each[::-1]  # of several, the last one assigned stays
        child = (first_child.take(parents) != each).nonzero()[0]
        spare = (first_child < 0).nonzero()[0]  # as many of each search, in the same order
        parent, carriers = parents.take(child), parents.copy()
        carriers[child] = spare
        before, beams = self._of_beam.take(slots, 0).reshape(-1, 5), self._beams.take(slots, 0).ravel()
        computed, start, _, _, _ = self._of_search.take(slots, 1)
        last, full, after = before[:, 1], before[:, 2], before.take(carriers, 0)
        exchanges = full.take(spare) != full.take(parent)
        turns = computed == start + self._kv.block_size
        if turns.any():
            turning = turns.repeat(width)
            full[turning] = last[turning]
            exchanges |= turning.take(child)
            self._turn(slots[turns])
            start = self._start.take(slots)
        after[:, 2], after[:, 3], after[:, 4] = full.take(parents), 0, np.where(known, _NOTHING, _TOKEN)
        after[child, 3], after[child, 4] = last.take(parent) + 1, _FOLLOWS
        exchanged = exchanges.nonzero()[0]
        one = child.take(exchanged)
        after[one, 3], after[one, 4] = 0, _TELL
        search = one // width
        of_beam = (beams.take(spare.take(exchanged)), beams.take(parent.take(exchanged)))
        columns = (*of_beam, computed.take(search), start.take(search))
        for beam, former, at, first in zip(*(column.tolist() for column in columns), strict=True):
            self._exchange(beam, former, at, first)
        size = self._kv.block_size
        recent = self._recent.take(slots, 0).reshape(-1, size).take(parents, 0)
        recent[each, (computed - start).repeat(width)] = chosen
        self._recent[slots] = recent.reshape(-1, width, size)
        self._beams[slots] = beams.take(carriers).reshape(-1, width)
        self._of_beam[slots] = after.reshape(-1, width, 5)
        self._length[slots] += 1
        self._ready[slots] = True

    def _turn(self, slots: np.ndarray) -> None:
        """Their last blocks are full, and there are no others yet."""
        for slot in slots.tolist():
            start = int(self._start[slot])
            for beam, tokens in zip(self._beams[slot].tolist(), self._recent[slot].tolist(), strict=True):
                beam.tokens[start:] = tokens
        self._start[slots] += self._kv.block_size
        self._since[slots] = self._start[slots]

    def _exchange(self, beam: Sequence, parent: Sequence, computed: int, start: int) -> None:
        """The beam goes on with the parent's history, of which it does not hold all full blocks."""
        beam.blocks.num_tokens = parent.blocks.num_tokens = computed
        beam.moved = take_over(self._kv, beam.blocks, parent.blocks)
        common = beam.moved.start * self._kv.block_size
        beam.tokens[common:] = parent.tokens[common:start]
        beam.rewrite_from = max(beam.prompt_len, common)


def _candidates(result: StepResult, rows: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sampled tokens int64 [rows], and tokens int64 and log-probabilities float64, [rows, candidates]: no beam has
    more children than there are beams."""
    if isinstance(result.logprobs, RowLogprobs):
        tokens, logprobs = result.logprobs.columns(rows, 1 + most)
    else:
        found = [result.logprobs[row] for row in rows.tolist()]
        tokens = np.array([one.token_ids[: 1 + most] for one in found])
        logprobs = np.array([one.logprobs[: 1 + most] for one in found])
    return tokens[:, 0], tokens[:, 1:], logprobs[:, 1:]


class SteadySearches:
    def __init__(self, num_rows: int, kv: KVCache, fewest: int = FEWEST_SEARCHES) -> None:
        """`fewest`: searches that must run for one to enter."""
        self._num_rows, self._kv, self._fewest = num_rows, kv, fewest
        self._tables: dict[tuple[int, int], SearchTable] = {}

    @property
    def num_ready(self) -> int:
        """Tokens that can be planned."""
        return sum(table.num_ready for table in self.tables)

    def enter(self, group: BeamGroup, num_running: int) -> None:
        """After a choice, if `num_running` searches run and nothing has to be decided but tokens for a while."""
        if num_running < self._fewest or not self._fits(group):
            return
        width = len(group.members)
        key = (width, group.search.num_candidates)
        if key not in self._tables:
            self._tables[key] = SearchTable(width, self._num_rows // width, self._kv)
        self._tables[key].enter(group)

    def _fits(self, group: BeamGroup) -> bool:
        kv, search, first = self._kv, group.search, group.beams[0]
        filled = first.computed % kv.block_size
        if kv.num_groups > 1 or kv.slides or not filled:
            return False
        if len(group.beams) < len(group.members) or len(search.stop_token_ids) > MOST_STOP_TOKENS:
            return False
        if len(search.finished) == len(group.members):
            return False
        counts, blocks = kv.pool.ref_counts, first.computed // kv.block_size + 1
        for beam in group.beams:
            table = beam.blocks.tables[0]
            if beam.new_row or beam.computed != first.computed or len(table) != blocks or counts[table[-1]] > 1:
                return False
        return True

    @property
    def tables(self) -> list[SearchTable]:
        """Those that hold a search."""
        return [table for table in self._tables.values() if len(table)]
