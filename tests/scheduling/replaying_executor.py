"""A deterministic device without a model: it holds only what plans tell it, so a wrong plan gives a wrong token.

Every KV slot stores the digest of all tokens up to its position, as the row that wrote it knew them. A sampled token
is a function of the slots that the row's block tables name, read after all rows have written, as in a layer of a real
step: a layer group with a window gives the last slots, and what it has must be what those without one have. `toy_model`
has the oracle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
from states_on_device import StatesOnDevice
from toy_grammars import VOCAB
from toy_model import POISON, candidates, digests, sample

from engine.layer_groups import State, Window, first_kept
from engine.step import (
    Pooling,
    RowLogprobs,
    RowVectors,
    ScheduledRow,
    StepMasks,
    StepPlan,
    StepResult,
    TokenLogprobs,
    decode_masks,
    decode_plan,
    decode_result,
    encode_step,
)


@dataclass
class _Row:
    tokens: dict[int, int]
    prompt_len: int
    prompt_logprobs: bool
    seed: int
    num_candidates: int | None
    pooling: Pooling | None
    tables: list[list[int]]
    """of each layer group"""
    adapter_slot: int
    next_position: int = 0
    end: int = 0
    """its table's entries behind as many tokens were for drafts that were wrong: they may be others' now"""
    drafted: bool = False


class ReplayingExecutor:
    """Runs plans in the order of submission and checks that each keeps the rules of `engine.step`."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_rows: int,
        budget: int,
        max_model_len: int,
        windows: Sequence[Window] = (None,),
        num_host_blocks: int = 0,
        max_sampled: int = 1000,
        pads: bool = False,
    ) -> None:
        """`pads`: computes as many drafts as planned, whatever they are; else as many as it finds."""
        self.max_sampled, self.pads = max_sampled, pads
        self.host_slots: list[list[int | None]] = [[None] * block_size for _ in range(num_host_blocks)]
        self.windows = windows
        self.block_size, self.num_rows, self.budget, self.max_model_len = block_size, num_rows, budget, max_model_len
        self.slots: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.rows: dict[int, _Row] = {}
        self.adapters: dict[int, int] = {}
        """by slot: whose numbers it holds"""
        self.unsampled: deque[StepPlan] = deque()
        """submitted; the first one waits for masks"""
        self.results: deque[StepResult] = deque()
        self.computed_tokens = 0
        self.some_failed = False
        """requests have ended amid planning: their rows are not told everything, and not in the step either"""
        self.expected_step = 0
        self.states = StatesOnDevice(windows, block_size)

    def submit(self, plan: StepPlan) -> None:
        told, plan = plan, decode_plan(encode_step(plan))
        assert plan == told, "what travels as bytes arrives"
        self._check(plan)
        self.unsampled.append(plan)
        if len(self.unsampled) == 1 and not plan.masked:
            self._go_on()

    def sample(self, masks: StepMasks) -> None:
        told, masks = masks, decode_masks(encode_step(masks))
        assert masks == told and masks.step_id == self.unsampled[0].step_id and len(masks.bits)
        self._go_on(masks)

    def _go_on(self, masks: StepMasks | None = None) -> None:
        """As far as no masks are missing."""
        self._run(self.unsampled.popleft(), masks)
        while self.unsampled and not self.unsampled[0].masked:
            self._run(self.unsampled.popleft(), None)

    def _run(self, plan: StepPlan, masks: StepMasks | None) -> None:
        self._apply(plan)
        bits = [] if masks is None else masks.bits[:, 0].tolist()
        given = set(plan.drafts.where[1].tolist())
        rows = [self._settled(row, row.row in given) for row in plan.rows.each()]
        for row in rows:
            state = self.rows[row.row]
            state.next_position, state.end = row.computed, row.computed + row.query_len
        self._write_all(rows, rows[:: -1 if plan.step_id % 2 else 1])
        tokens, prompt_logprobs, logprobs, pooled, faults, counts, drafted = [], {}, {}, [], [], [], []
        for index, row in enumerate(rows):
            state = self.rows[row.row]
            state.next_position = row.computed + row.query_len
            known = self._read(state, row)
            if state.prompt_logprobs:
                last = min(row.computed + row.query_len, state.prompt_len - 1)
                entries = [_entry(state.tokens[p], p) for p in range(row.computed + 1, last + 1)]
                prompt_logprobs[row.row] = entries
            if state.pooling is not None and (row.samples or state.pooling != "last"):
                pooled.append((row.row, _pooled(state.pooling, known[row.computed :])))
            if not row.samples:
                continue
            assert row.samples == 1 or state.num_candidates is None, "a beam with drafts"
            first = row.computed + row.query_len - row.samples + 1
            may_be = [bits.pop(0) if index in plan.masked else -1 for _ in range(row.samples)]
            count = 0
            for end, mask in enumerate(may_be, first):
                may = [token for token in range(VOCAB) if mask >> token & 1]
                token = sample(known[:end], state.seed, may)
                if state.num_candidates is not None:
                    logprobs[row.row] = candidates(known, state.num_candidates, may)
                    token = logprobs[row.row].token_ids[0]
                if POISON in state.tokens.values():
                    faults.append(row.row)
                    token = 0
                tokens.append(token)
                count += 1
                if state.tokens.get(end) != token:
                    state.tokens = {p: t for p, t in state.tokens.items() if p < end} | {end: token}
                    break
            counts.append(count)
            drafted.append(row.samples - 1)
            state.next_position = state.end = first + count - 1
        assert not bits
        self.computed_tokens += plan.num_tokens
        many = max(drafted, default=0) > 0
        self.results.append(
            StepResult(
                step_id=plan.step_id,
                token_ids=tokens,
                counts=counts if many else [],
                drafted=drafted if many else [],
                logprobs=RowLogprobs.of(logprobs),
                prompt_logprobs=prompt_logprobs,
                pooled=RowVectors.of(pooled),
                faults=faults,
            )
        )

    def _known(self, row: ScheduledRow) -> list[int]:
        """Digests of its past with the step's tokens."""
        state = self.rows[row.row]
        tokens = [state.tokens[position] for position in range(row.computed + row.query_len)]
        return digests(tokens, self.adapters.get(state.adapter_slot, 0))

    def _settled(self, row: ScheduledRow, given: bool) -> ScheduledRow:
        """Where it really starts, with as many drafts as there are."""
        state, computed, drafts = self.rows[row.row], row.computed, row.samples - 1
        if row.unsure:
            assert row.query_len == row.samples > 0, "nobody but who decodes is unsure"
            computed = len(state.tokens) - 1 - drafts * given
            assert row.computed - row.unsure <= computed <= row.computed, "an unsure row is not where it may be"
        if drafts > 0:
            state.drafted = True
        if drafts > 0 and not given:
            known = len(state.tokens)
            guess = self._guess(state, drafts)[:drafts]
            guess += [1] * (drafts - len(guess)) if self.pads else []
            state.tokens |= dict(enumerate(guess, known))
            drafts = len(guess)
        fewer = row.samples - 1 - drafts if row.samples else 0
        return ScheduledRow(row.row, computed, row.query_len - fewer, row.samples - fewer)

    def _guess(self, state: _Row, most: int) -> list[int]:
        """What comes next where no grammar is, as far as that is guessed."""
        if POISON in state.tokens.values():
            return []
        known = [state.tokens[position] for position in range(len(state.tokens))]
        tokens = known.copy()
        for _ in range(sum(known) % 4):
            tokens.append(sample(digests(tokens, self.adapters.get(state.adapter_slot, 0)), state.seed))
        return [*tokens[len(known) :], sum(tokens) % VOCAB][:most]

    def collect(self) -> StepResult:
        result = self.results.popleft()
        arrived = decode_result(encode_step(result))
        assert arrived == result
        return arrived

    def _check(self, plan: StepPlan) -> None:
        assert plan.step_id == self.expected_step
        self.expected_step += 1
        rows = plan.rows.each()
        assert rows, "an empty step"
        assert 1 <= plan.num_tokens <= self.budget
        assert len({row.row for row in plan.rows.each()}) == len(rows)
        assert all(0 <= row.row < self.num_rows for row in plan.rows.each())
        forked = [after.query_len == 0 for after in rows[1:]] + [False]
        decodes = [row.query_len == row.samples and not forks for row, forks in zip(rows, forked)]
        assert sum(max(row.samples, 1) for row in rows) <= self.max_sampled
        starting = {new.row for new in plan.added}  # such a row might have had forks, and is no decode then
        first = decodes.index(False) if False in decodes else len(rows)
        late = {row.row for row, decode in zip(rows[first:], decodes[first:]) if decode}
        assert self.some_failed or late <= starting, "decode rows come first"
        for before, row in pairwise(rows):
            if row.query_len == 0:
                assert before.samples and before.computed + before.query_len == row.computed, "not behind its source"
        assert rows[0].query_len > 0
        assert len(set(plan.released)) == len(plan.released)

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.released:
            del self.rows[row]
            self.states.drafts.pop(row, None)
        for new in plan.added:
            assert new.row not in self.rows, "a row was added over one in use"
            tokens = dict(enumerate(new.token_ids))
            scores = new.params.prompt_logprobs is not None
            tables: list[list[int]] = [[] for _ in self.windows]
            params = new.params
            self.rows[new.row] = _Row(
                tokens, new.prompt_len, scores, params.seed, params.logprobs, params.pooling, tables, new.adapter_slot
            )
        for rewrite in plan.rewrites.each():
            state = self.rows[rewrite.row]
            assert state.prompt_len <= rewrite.start <= len(state.tokens), "a rewrite of the prompt, or with a hole"
            kept = {position: token for position, token in state.tokens.items() if position < rewrite.start}
            state.tokens = kept | dict(enumerate(rewrite.values, rewrite.start))
        for draft in plan.drafts.each():
            state = self.rows[draft.row]
            assert draft.start == len(state.tokens), "drafts are not behind what is known"
            state.tokens |= dict(enumerate(draft.values, draft.start))
        for append in plan.block_appends.each():
            table = self.rows[append.row].tables[append.group]
            assert append.start <= len(table), "a hole in a block table"
            table[append.start :] = append.values
        for new in plan.added:  # where a row begins that is not computed in this step: behind whole blocks
            state = self.rows[new.row]
            state.next_position = state.end = len(state.tables[0]) * self.block_size
        self.states.bundles |= {blocks[0]: blocks for blocks in plan.bundles}
        for source, destination in plan.swap_out:
            self.host_slots[destination] = list(self.slots[source])
        for source, destination in plan.swap_in:
            self.slots[destination] = list(self.host_slots[source])
        for source, destination in plan.block_copies:
            self.slots[destination] = list(self.slots[source])
        for block in plan.cleaned:
            self.slots[block] = [None] * self.block_size

    def _write_all(self, rows: list[ScheduledRow], mixed: list[ScheduledRow]) -> None:
        for row in rows:
            self._write(row, rows)
        for row in mixed:
            self.states.mix(self.slots, self.rows[row.row].tables, row, self._known(row))

    def _write(self, row: ScheduledRow, rows: list[ScheduledRow]) -> None:
        state = self.rows[row.row]
        end = row.computed + row.query_len
        assert row.query_len >= 1 or row.samples
        for table in state.tables:
            assert len(table) * self.block_size >= end, "the block table does not cover the step"
            waste = len(table) * self.block_size - end
            assert waste < self.block_size or state.drafted, "more than one block of waste"
        assert end < self.max_model_len + (not row.samples), "a sampled token would not fit the row"
        planned = {other.row for other in rows}
        known = self._known(row)
        keeps = [group for group, window in enumerate(self.windows) if not isinstance(window, State)]
        for group, position in product(keeps, range(row.computed, end)):
            index, offset = divmod(position, self.block_size)
            block = state.tables[group][index]
            # Who shares a block that is being filled reads it in this very step, so the step must fill it to its end.
            forks = {other.row for other in rows if other.query_len == 0 and other.computed == end}
            # A beam that is not in the step may have been dropped; its row is rewritten before it is used again.
            idle = {number for number, other in self.rows.items() if other.num_candidates is not None} - planned
            away = idle if not self.some_failed else set(self.rows) - planned
            readers = [other for number, other in self.rows.items() if number not in forks | away]
            shared = sum(block in self._seen(other) for other in readers) > 1
            assert not shared or end >= (index + 1) * self.block_size, "a write to a shared block"
            assert len(self.slots[block]) == self.block_size, "keys and values lie over what is left of a state"
            self.slots[block][offset] = known[position]

    def _seen(self, state: _Row) -> list[int]:
        """Blocks that the row reads from its next position on."""
        last = -(-state.end // self.block_size)
        return [
            block
            for table, window in zip(state.tables, self.windows, strict=True)
            for block in table[first_kept(state.next_position, window) // self.block_size : last]
        ]

    def _read(self, state: _Row, row: ScheduledRow) -> list[int]:
        end = row.computed + row.query_len
        known = self._known(row)
        for table, window in zip(state.tables, self.windows, strict=True):
            for position in (
                () if isinstance(window, State) else range(first_kept(row.computed - (row.query_len == 0), window), end)
            ):
                slot = self.slots[table[position // self.block_size]][position % self.block_size]
                assert slot == known[position], "a row reads KV of other tokens, or that nobody wrote"
        return known


def states_of(tokens: list[int], adapter: int = 0) -> np.ndarray:
    """float32 [tokens, 1]: what a prompt's positions bring where it is pooled."""
    return np.array([[digest % 997] for digest in digests(tokens, adapter)], dtype=np.float32)


def _pooled(kind: Pooling, known: list[int]) -> np.ndarray:
    """Of a chunk, by its digests."""
    states = np.array([[digest % 997] for digest in known], dtype=np.float32)
    return {"last": states[-1:], "mean": states.sum(axis=0, keepdims=True), "all": states}[kind]


def _entry(token: int, position: int) -> TokenLogprobs:
    return TokenLogprobs(token_ids=[token], logprobs=[-float(position)], rank=1)
