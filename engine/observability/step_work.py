"""What a step cannot do without: the bytes that it must read and the operations that it must compute, part by part, and
the least time that this takes on a machine whose ceilings were measured (the roofline model, Williams et al. 2009).

Weights count once a step, by the bytes that they really take in memory; KV counts once per distinct block, so shared
prefixes are not an excuse; activations, which stay in caches, and everything on the host count nothing: the floor
is a bound, not a prediction (but of experts, which count as if each token chose any of them alike). Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from engine.layer_groups import Chunk, State, Window, first_kept
from engine.models.facts import HeadsSpec, ModelFacts
from engine.observability.step_profile import ATTENTION, LOGITS, MODEL, SAMPLING
from engine.step import StepPlan

_LOGIT_BYTES = 4


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """Measured on this machine, in this run, with the engine's threads."""

    read_bytes_per_s: float
    """streaming through a buffer as large as what a step reads"""
    main_memory_bytes_per_s: float
    """the same through a buffer larger than every cache that may be this process's"""
    ops_per_s: dict[str, float]
    """of matrix products, by the dtype that they multiply in; a multiply-add is two"""
    read_method: str = ""
    weights_bytes: int = 0
    """size of the smaller buffer"""


@dataclass
class Work:
    """Bytes read from memory, and operations by the dtype that they multiply in."""

    bytes: float = 0.0
    ops: dict[str, float] = field(default_factory=dict)

    def add(self, other: Work, times: float = 1.0) -> None:
        self.bytes += times * other.bytes
        for dtype, ops in other.ops.items():
            self.ops[dtype] = self.ops.get(dtype, 0.0) + times * ops

    @property
    def total_ops(self) -> float:
        return sum(self.ops.values())

    def floor_s(self, ceilings: Ceilings) -> float:
        """Memory and arithmetic may overlap, so the slower of the two; dtypes share the units, so their sum."""
        compute = sum(ops / ceilings.ops_per_s[dtype] for dtype, ops in self.ops.items())
        return max(self.bytes / ceilings.read_bytes_per_s, compute)


class Weight(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of the model as it lies in memory."""

    name: str
    size_bytes: int
    ops_per_token: float = 0.0
    """2 n k for a matrix [n, k]"""
    ops_dtype: str = ""
    rows: int | None = None
    """a table of which each token reads one row; None: read whole"""
    chosen: float = 1.0
    """share of it that each token chooses, one as likely as another: experts"""

    def work(self, tokens: int) -> Work:
        if self.rows is not None:
            return Work(self.size_bytes / self.rows * min(tokens, self.rows))
        read = self.size_bytes * (1.0 - (1.0 - self.chosen) ** tokens)
        return Work(read, {self.ops_dtype: self.ops_per_token * tokens} if self.ops_per_token else {})


@dataclass(frozen=True)
class ModelWeights:
    """Which tensors each part of a step reads."""

    pieces: Mapping[str, Sequence[Weight]]
    """mark of a piece → what one call of it reads"""
    model: Sequence[Weight]
    """everything before the logits, where pieces are not told apart"""
    logits: Sequence[Weight]


class StepWork:
    """The work of steps in the order in which they ran, from the first step of an idle engine on (block tables are
    followed through the plans)."""

    def __init__(
        self,
        model: ModelFacts,
        weights: ModelWeights,
        *,
        block_size: int,
        kv_token_bytes: float,
        attention_dtype: str,
    ) -> None:
        """`kv_token_bytes`: keys and values of one token over all layers. `attention_dtype`: of scores and values."""
        self._model = model
        self._weights = weights
        self._block_size = block_size
        self._kv_token_bytes = kv_token_bytes
        self._attention_dtype = attention_dtype
        self._tables: dict[int, list[int]] = {}

    def of(self, plan: StepPlan, calls: Mapping[str, int]) -> dict[str, Work]:
        """Work by part. `calls`: how often each part ran, from which it follows whether pieces were told apart."""
        self._follow(plan)
        if not len(plan.rows):
            return {}
        tokens, samples = plan.num_tokens, int(plan.rows.samples.sum())
        work = {ATTENTION: self._attention(plan)}
        if pieces := [part for part in calls if part in self._weights.pieces]:
            for part in pieces:
                work[part] = _sum((w.work(tokens) for w in self._weights.pieces[part]), calls[part])
        else:
            work[MODEL] = _sum(w.work(tokens) for w in self._weights.model)
        if samples:
            work[LOGITS] = _sum(w.work(samples) for w in self._weights.logits)
            work[SAMPLING] = Work(samples * self._model.vocab_size * _LOGIT_BYTES)
        return work

    def _follow(self, plan: StepPlan) -> None:
        for row in plan.released:
            self._tables.pop(row, None)
        for added in plan.added:
            self._tables[added.row] = []
        for append in plan.block_appends.each():
            if append.group == 0:
                table = self._tables.setdefault(append.row, [])
                table[append.start :] = append.values

    def _attention(self, plan: StepPlan) -> Work:
        """Each key and value that some query sees is read once a step, each new one written; every query multiplies
        with every key it sees, twice (scores, values)."""
        size_bytes = self._kv_token_bytes / sum(kept.size for kept in self._model.kept if kept is not None)
        work = Work(plan.num_tokens * self._kv_token_bytes)
        kinds: dict[HeadsSpec, int] = {}
        for layer in self._model.layers:
            kind = HeadsSpec(
                num_heads=layer.num_heads,
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                scale=layer.scale,
                window=layer.window,
                chunk=layer.chunk,
                latent=layer.latent,
            )
            kinds[kind] = kinds.get(kind, 0) + 1
        for layer, count in kinds.items():
            pairs = sum(_pairs(row.computed, row.query_len, layer.span) for row in plan.rows.each())
            ops = {self._attention_dtype: 2.0 * layer.pair_products * pairs}
            kept_bytes = size_bytes * layer.kept_values
            work.add(Work(self._tokens_read(plan, layer.span) * kept_bytes, ops), count)
        return work

    def _tokens_read(self, plan: StepPlan, window: Window) -> int:
        """Distinct cached tokens that the step's queries see, those of the step itself not counted."""
        size = self._block_size
        read: dict[int, int] = {}
        for row in plan.rows.each():
            first = first_kept(row.computed, window)
            table = self._tables.get(row.row, [])
            for index in range(first // size, -(-row.computed // size)):
                tokens = min(size, row.computed - index * size) - max(0, first - index * size)
                block = table[index] if index < len(table) else -1 - index - row.row * (1 << 20)
                read[block] = max(read.get(block, 0), tokens)
        return sum(read.values())


def _pairs(computed: int, queries: int, window: Window) -> int:
    """(query, key) pairs of a causal chunk: the query at position p sees p + 1 keys, or those that `window` leaves."""

    def below(position: int) -> int:
        if isinstance(window, Chunk):
            whole, rest = divmod(position, window.tokens)
            return whole * (window.tokens * (window.tokens + 1) // 2) + rest * (rest + 1) // 2
        if window is None or isinstance(window, State) or position <= window:
            return position * (position + 1) // 2
        return window * (window + 1) // 2 + (position - window) * window

    return below(computed + queries) - below(computed)


def _sum(works: Iterable[Work], times: float = 1.0) -> Work:
    total = Work()
    for work in works:
        total.add(work, times)
    return total
