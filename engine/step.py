"""A step's data: what the scheduler tells the runner (`StepPlan`) and what comes back (`StepResult`). Both are columns,
and bytes where the runner is elsewhere.

Torch-free. A *row* is a sequence's place in the device tables from the moment it starts running until it finishes or is
preempted. Nothing that the device already holds is sent again: a plan carries differences.

Invariants
- A row that is in `released` holds nothing any more; it may be in `added` of the same plan again (release is applied
  first).
- `added` carries every known token (prompt, and after a preemption what was generated too). The token that step N
  samples for a row is written by the device at `tokens[row, computed + query_len]`, where step N+1 reads it; the host
  never sends it.
- Drafts are guesses of what comes behind a row's known tokens, in the same table: the plan's, or else what the device
  proposes when the step starts. A row that computes some samples at every one of its positions: drafts are right as far
  as they are what is sampled there, and the token behind the last right one is right anyway. So such a row brings
  between one and `samples` tokens, the same ones as without drafts.
- Who plans behind a step with drafts does not know yet how many were right. The device does: a row that is `unsure`
  starts at its last known token wherever that is, and what the plan says of its place is an upper bound.
- Order of application on the device: released, added, rewrites, drafts, block_appends, bundles, swap_out, swap_in,
  block_copies, cleaned, then the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

Pooling = Literal["last", "mean", "all", "cls", "max", "judge", "judge_all"]
"""what of a prompt's hidden states is wanted in place of tokens: the last one, their mean, each, the first, the largest
of each number; or what the model's head makes of the prompt, or of each token"""


class RowParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling as the device needs it: every default resolved, every word a token id."""

    seed: int
    """64-bit; with the position it keys every random draw"""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words: list[list[int]] = []
    """token sequences whose last token is forbidden where the ones before it have just been generated"""
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    """all ids that end the sequence, EOS included unless ignored; forbidden until `min_tokens` are generated"""
    logprobs: int | None = None
    """None: off; k: the sampled token and the k most likely"""
    prompt_logprobs: int | None = None
    pooling: Pooling | None = None
    """the row ends with its prompt: what it samples does not count"""

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class NewRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    row: int
    token_ids: list[int]
    """all tokens known now; positions 0 .. len-1"""
    prompt_len: int
    """the first `prompt_len` of them are the prompt; the rest was generated before a preemption"""
    params: RowParams
    adapter_slot: int = -1
    """where the adapter is that it is computed with; -1: it has none"""
    cache_salt: str | None = None
    """drafts come of what rows with an equal one have brought"""


class Columns(msgspec.Struct, frozen=True, eq=False):
    """Flat arrays, which nobody writes to any more; equal where all of them are."""

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in self.__struct_fields__)

    __hash__ = None  # type: ignore[assignment]


class ScheduledRow(NamedTuple):
    """One of `Rows`."""

    row: int
    computed: int
    """tokens whose KV exists before this step = position of the first query token"""
    query_len: int
    """tokens to compute in this step; 0: a fork, which samples from the logits of the row before it in the plan (or of
    the one before that, if it is a fork, too)"""
    samples: int
    """positions at which tokens are sampled, the last ones of the row: 1 when this step reaches the last known token,
    for the one at computed + query_len; 1 + k when k drafts behind it are computed, too; else 0"""
    unsure: int = 0
    """how many of `computed` are drafts of steps in flight: that many less it may be"""


class Rows(Columns, frozen=True, eq=False):
    columns: np.ndarray
    """int32 [5, rows]: the fields of `ScheduledRow`"""

    @classmethod
    def of(cls, rows: Iterable[ScheduledRow]) -> Rows:
        return cls(np.array(list(rows), dtype=np.int32).reshape(-1, 5).T)

    def __len__(self) -> int:
        return int(self.columns.shape[1])

    @property
    def row(self) -> np.ndarray:
        return self._column(0)

    @property
    def computed(self) -> np.ndarray:
        return self._column(1)

    @property
    def query_lens(self) -> np.ndarray:
        return self._column(2)

    @property
    def samples(self) -> np.ndarray:
        return self._column(3)

    @property
    def unsure(self) -> np.ndarray:
        return self._column(4)

    @property
    def num_tokens(self) -> int:
        return int(self.columns[2].sum())

    def each(self) -> list[ScheduledRow]:
        """One by one, where speed is not the point."""
        columns = zip(*self.columns.tolist(), strict=True)
        return [ScheduledRow(*row) for row in columns]

    def _column(self, index: int) -> np.ndarray:
        column: np.ndarray = self.columns[index]
        return column


class Write(NamedTuple):
    """One of `Writes`."""

    group: int
    """layer group; 0 for tokens"""
    row: int
    start: int
    values: list[int]


class Writes(Columns, frozen=True, eq=False):
    """Consecutive columns of rows of a table, from `start` on, become `values`; of writes that overlap the last one
    counts."""

    where: np.ndarray
    """int32 [4, writes]: group, row, start, number of values (positive)"""
    values: np.ndarray
    """int32 [sum of the numbers], one write after the other"""

    @classmethod
    def of(cls, writes: Iterable[Write]) -> Writes:
        where: list[tuple[int, int, int, int]] = []
        values: list[int] = []
        for group, row, start, those in writes:
            where.append((group, row, start, len(those)))
            values += those
        if not where:
            return NO_WRITES
        return cls(np.array(where, dtype=np.int32).T, np.array(values, dtype=np.int32))

    def __len__(self) -> int:
        return int(self.where.shape[1])

    def each(self) -> list[Write]:
        """One by one, where speed is not the point."""
        values, ends = self.values.tolist(), np.cumsum(self.where[3]).tolist()
        columns = zip(*self.where.tolist(), ends, strict=True)
        return [Write(group, row, start, values[end - count : end]) for group, row, start, count, end in columns]


NO_ROWS = Rows(np.zeros((5, 0), dtype=np.int32))
NO_WRITES = Writes(np.zeros((4, 0), dtype=np.int32), np.zeros(0, dtype=np.int32))


class RoundStart(msgspec.Struct, frozen=True, array_like=True):
    """What a replica tells the others as a step begins that all take together (`engine.core.rounds`)."""

    busy: bool = False
    """it has requests that have not ended"""
    wake: int = 0
    """the last one that it has seen"""


class RoundEnd(msgspec.Struct, frozen=True, array_like=True):
    """What such a step has brought."""

    quiet: int | None = None
    """nobody was busy, and this was the last wake that each had seen"""
    expert_tokens: int = 0
    """rows that this replica's experts computed, one for each choice of a token"""
    experts_moved: int = 0
    """that came from other replicas"""


NO_ROUND = RoundEnd()


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    step_id: int
    rows: Rows = NO_ROWS
    """decode rows (query_len 1 and sampling) first, then prefill chunks and those with forks (or that might have had
    some when they started), each before its forks"""
    released: list[int] = []
    added: list[NewRow] = []
    rewrites: Writes = NO_WRITES
    """of tokens: a row's sequence took over another one's history (beams), and it holds nothing behind them"""
    drafts: Writes = NO_WRITES
    """of tokens, behind what a row knows: those that it computes in this step. The device proposes those of other rows
    that sample more than once, and computes as many as it finds"""
    block_appends: Writes = NO_WRITES
    """of the rows' block tables, which hold nothing behind them"""
    block_copies: list[tuple[int, int]] = []
    """(source, destination): copy-on-write, one after the other"""
    swap_out: list[tuple[int, int]] = []
    """(device block, host block), one after the other"""
    swap_in: list[tuple[int, int]] = []
    """(host block, device block), one after the other"""
    bundles: list[list[int]] = []
    """blocks that hold a state together from now on, by the first one"""
    cleaned: list[int] = []
    """blocks for keys and values that held a state: they become zeros"""
    masked: list[int] = []
    """of `rows`, in order, those whose samples wait for `StepMasks` to say what they may be; they are not unsure, and
    their drafts are the plan's"""

    round: RoundStart = RoundStart()
    """where replicas take steps together"""

    @property
    def num_tokens(self) -> int:
        return self.rows.num_tokens


class StepMasks(Columns, frozen=True, eq=False):
    """What the host has to say before a step's masked rows sample. It is known when the results of all steps before
    have come, while the step's forward pass runs."""

    step_id: int
    bits: np.ndarray
    """int32 [masked positions, words of 32 tokens]: the lowest bit is the first token; 1 where it is allowed"""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """One position: the token in question first, then the top alternatives, most likely first."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """1-based rank of token_ids[0] in the vocabulary"""


class RowLogprobs(Columns, frozen=True, eq=False):
    """Of sampled positions, by row, of one row in their order; an entry is made when it is asked for."""

    rows: np.ndarray
    """int32 [rows]"""
    widths: np.ndarray
    """int32 [rows]: how many columns count"""
    token_ids: np.ndarray
    """int32 [rows, columns]"""
    logprobs: np.ndarray
    """float64 [rows, columns]"""
    ranks: np.ndarray
    """int32 [rows]"""

    @classmethod
    def of(cls, found: Mapping[int, TokenLogprobs]) -> RowLogprobs:
        if not found:
            return NO_LOGPROBS
        widths = np.array([len(entry.token_ids) for entry in found.values()], dtype=np.int32)
        token_ids = np.zeros((len(found), widths.max()), dtype=np.int32)
        logprobs = np.zeros(token_ids.shape)
        for index, entry in enumerate(found.values()):
            token_ids[index, : widths[index]], logprobs[index, : widths[index]] = entry.token_ids, entry.logprobs
        ranks = np.array([entry.rank for entry in found.values()], dtype=np.int32)
        return cls(np.array(list(found), dtype=np.int32), widths, token_ids, logprobs, ranks)

    def __len__(self) -> int:
        return len(self.rows)

    def by_row(self) -> dict[int, list[TokenLogprobs]]:
        columns = (self.rows, self.widths, self.token_ids, self.logprobs, self.ranks)
        found: dict[int, list[TokenLogprobs]] = {}
        for row, width, ids, values, rank in zip(*(column.tolist() for column in columns), strict=True):
            entry = TokenLogprobs(token_ids=ids[:width], logprobs=values[:width], rank=rank)
            found.setdefault(row, []).append(entry)
        return found


_NONE = np.zeros(0, dtype=np.int32)
NO_LOGPROBS = RowLogprobs(_NONE, _NONE, np.zeros((0, 1), dtype=np.int32), np.zeros((0, 1)), _NONE)


class RowVectors(Columns, frozen=True, eq=False):
    """Hidden states behind the final norm, by row: the last one, the sum of a chunk's, or each of a chunk's."""

    rows: np.ndarray
    """int32 [rows]"""
    counts: np.ndarray
    """int32 [rows]: how many of the vectors are the row's"""
    vectors: np.ndarray
    """float32 [sum of the counts, hidden_size]"""

    @classmethod
    def of(cls, found: list[tuple[int, np.ndarray]]) -> RowVectors:
        if not found:
            return NO_VECTORS
        rows, vectors = zip(*found, strict=True)
        counts = [len(each) for each in vectors]
        return cls(np.array(rows, dtype=np.int32), np.array(counts, dtype=np.int32), np.concatenate(vectors))

    def of_row(self, row: int) -> np.ndarray:
        """float32 [vectors, hidden_size]"""
        chosen: np.ndarray = self.vectors[np.repeat(self.rows == row, self.counts)]
        return chosen


NO_VECTORS = RowVectors(_NONE, _NONE, np.zeros((0, 0), dtype=np.float32))


class StepResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a step has brought."""

    step_id: int
    token_ids: list[int]
    """of the plan's rows that sample, in the plan's order"""
    counts: list[int] = []
    """of each of these rows, how many of them; empty: one each"""
    drafted: list[int] = []
    """of each of these rows, how many drafts it computed; empty: none"""
    logprobs: RowLogprobs = NO_LOGPROBS
    """of the sampled positions, for rows that asked"""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    """row → one entry per prompt token at positions computed+1 .. min(computed+query_len, prompt_len-1), for rows that
    asked. The chunk's query at position p scores the known token at p+1, so position 0 never has an entry."""
    pooled: RowVectors = NO_VECTORS
    """of rows that are pooled: "last" brings its vector with its sample, the others something of every chunk"""
    faults: list[int] = []
    """rows whose logits held NaN (or nothing allowed), or of which anything else failed: their token does not count"""
    reasons: dict[int, str] = {}
    """of the faults that are something else: what failed"""
    round: RoundEnd = NO_ROUND
    """where replicas take steps together"""


def encode_step(step: StepPlan | StepMasks | StepResult) -> bytes:
    """For another process: what `decode_plan`, `decode_masks` and `decode_result` give back is equal."""
    return _ENCODER.encode(step)


def decode_plan(encoded: bytes) -> StepPlan:
    """Raises `msgspec.DecodeError` or ValueError for what is none."""
    return _PLANS.decode(encoded)


def decode_masks(encoded: bytes) -> StepMasks:
    """As `decode_plan`."""
    return _MASKS.decode(encoded)


def decode_result(encoded: bytes) -> StepResult:
    """As `decode_plan`."""
    return _RESULTS.decode(encoded)


def _of_array(array: object) -> tuple[str, tuple[int, ...], bytes]:
    if not isinstance(array, np.ndarray):
        raise NotImplementedError(f"{type(array).__name__} is no part of a step")
    return array.dtype.char, array.shape, array.tobytes()


def _to_array(kind: type, encoded: Any) -> np.ndarray:
    char, shape, data = encoded
    return np.frombuffer(data, dtype=char).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_of_array)
_PLANS = msgspec.msgpack.Decoder(StepPlan, dec_hook=_to_array)
_MASKS = msgspec.msgpack.Decoder(StepMasks, dec_hook=_to_array)
_RESULTS = msgspec.msgpack.Decoder(StepResult, dec_hook=_to_array)
