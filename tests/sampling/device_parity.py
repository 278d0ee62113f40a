"""The sampler of a device against the CPU's: same rows, same logits, same seeds, so the same tokens.

`check` is run on a GPU by the GPU suite, and on a CPU over the Triton interpreter by interpret_sampling.py. What may
differ is the last bits of exp and log: a differing token must be one that the documented algorithm draws but for
rounding (`assert_is_the_draw`), and must be rare. Everything else is equal exactly, but log-probabilities, to 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from sampling_oracle import CPU, Table, assert_is_the_draw, process

from engine.sampling import SampleOutput, Sampler
from engine.sampling.kernels import SamplingKernels
from engine.step import RowParams

MakeKernels = Callable[[int], SamplingKernels | None]
"""vocabulary → kernels; None: those of the device"""

_EDITED = RowParams(
    seed=21, temperature=0.9, top_p=0.95, logit_bias={3: 2.0, 7: -3.0}, bad_words=[[5], [1, 2]], min_tokens=3,
    stop_token_ids=[0, 4],
)  # fmt: skip
PARAMS = [
    RowParams(seed=0, temperature=0.0),
    RowParams(seed=1),
    RowParams(seed=-2, temperature=0.6, top_k=20, top_p=0.95),
    RowParams(seed=3, top_p=0.9),
    RowParams(seed=2**63 - 1, min_p=0.05),
    RowParams(seed=5, temperature=0.7, top_k=50, min_p=0.02),
    RowParams(seed=6, temperature=1.5, top_k=2000, top_p=0.8, min_p=0.001),
    RowParams(seed=7, top_k=1),
    RowParams(seed=8, temperature=1e-4, top_p=0.5),
    RowParams(seed=9, temperature=100.0, top_p=0.3),
    RowParams(seed=10, top_k=2, top_p=0.01),
    RowParams(seed=11, temperature=0.8, top_p=0.95, repetition_penalty=1.3, presence_penalty=0.5, logprobs=5),
    RowParams(seed=12, temperature=0.0, frequency_penalty=0.7, repetition_penalty=0.8, logprobs=0),
    RowParams(seed=13, min_p=1.0, logprobs=20),
    RowParams(seed=14, temperature=2.0, top_k=1000, allowed_token_ids=list(range(3, 200, 2))),
    _EDITED,
    RowParams(seed=16, temperature=1.2, top_k=10**6, top_p=0.999999, logprobs=1),
    RowParams(seed=17, top_k=40, presence_penalty=-1.0, frequency_penalty=0.1),
]


def logits_of(kind: str, rng: np.random.Generator, vocab: int) -> np.ndarray:
    """float32 `[vocab]` of one of the shapes that have broken samplers."""
    x = rng.normal(0, 3, vocab).astype(np.float32)
    if kind == "peaked":
        x[rng.integers(0, vocab, 20)] = rng.normal(14, 3, 20)
    elif kind == "ties":
        x = np.round(x)
        x[rng.random(vocab) < 0.1] = -0.0
    elif kind == "flat":
        x[:] = 1.5
    elif kind == "masked":
        x[rng.random(vocab) < 0.9] = -np.inf
    elif kind == "outliers":
        x[rng.random(vocab) < 0.3] = -1e9
        x[rng.integers(0, vocab)] = -3e38
    elif kind == "huge":
        x[rng.integers(0, vocab, 3)] = (3e38, -3e38, 2.9e38)
    elif kind in FAULTS:
        x[rng.integers(0, vocab) if kind != "-inf" else slice(None)] = float(kind)
    return x


FAULTS = ("nan", "inf", "-inf")
KINDS = ("normal", "peaked", "ties", "flat", "masked", "outliers", "huge")


def tables(device: torch.device, vocab: int, rows: int, make: MakeKernels | None) -> tuple[Table, Table]:
    """(the CPU's, the device's)"""
    kernels = None if make is None else make(vocab)
    sampler = Sampler(rows, vocab, device, 64, kernels)
    return Table(vocab, rows, sampler=Sampler(rows, vocab, CPU, 64)), Table(vocab, rows, device=device, sampler=sampler)


class Parity:
    """Counts draws, and those that differ."""

    def __init__(self) -> None:
        self.draws = self.differing = 0

    def step(
        self, cpu: Table, other: Table, logits: np.ndarray, rows: Sequence[int], params: dict[int, RowParams]
    ) -> None:
        histories = {row: cpu.history(row) for row in rows}
        want = cpu.step(torch.from_numpy(logits), rows)
        got = other.step(torch.from_numpy(logits), rows)
        tokens = got.token_ids.tolist()
        assert got.faults.tolist() == want.faults.tolist()
        self.draws += len(rows)
        for at, row in enumerate(rows):
            if tokens[at] != int(want.token_ids[at]):
                self.differing += 1
                prompt = cpu.prompt_lens[row]
                processed = process(logits[at], params[row], histories[row], prompt)
                assert_is_the_draw(tokens[at], processed, params[row], len(histories[row]))
                other.tokens[row, other.lengths[row] - 1] = int(want.token_ids[at])
        compare_logprobs(want, got, skip=want.faults.tolist(), rows=rows, equal=tokens == want.token_ids.tolist())

    def report(self) -> dict[str, int]:
        assert self.differing <= 1 + self.draws // 1000, f"{self.differing} of {self.draws} tokens differ"
        return {"draws": self.draws, "differing": self.differing}


def compare_logprobs(
    want: SampleOutput, got: SampleOutput, skip: Sequence[bool], rows: Sequence[int], equal: bool
) -> None:
    assert (want.logprobs is None) == (got.logprobs is None)
    if want.logprobs is None or got.logprobs is None or not equal:
        return
    faulty = {row for row, fault in zip(rows, skip) if fault}
    ours = got.logprobs.to_host().by_row()
    for row, (entry,) in want.logprobs.to_host().by_row().items():
        if row in faulty:
            continue
        (found,) = ours[row]
        assert found.token_ids == entry.token_ids and found.rank == entry.rank, (row, entry, found)
        np.testing.assert_allclose(found.logprobs, entry.logprobs, rtol=1e-6, atol=1e-5)


def check_mixed(device: torch.device, vocab: int, steps: int, copies: int, make: MakeKernels | None) -> dict[str, int]:
    """Rows of every kind of parameters and logits in one batch, with histories that grow."""
    rng = np.random.default_rng(vocab)
    params = {row: PARAMS[row % len(PARAMS)] for row in range(copies * len(PARAMS))}
    cpu, other = tables(device, vocab, len(params), make)
    for row, p in params.items():
        history = rng.integers(0, min(vocab, 12), int(rng.integers(1, 6))).tolist()
        for table in (cpu, other):
            table.add(row, p, history, max(1, len(history) - 1))
    parity = Parity()
    for step in range(steps):
        rows = rng.permutation(len(params))[: max(1, len(params) - step)].tolist()
        kinds = [KINDS[int(rng.integers(len(KINDS)))] for _ in rows]
        if step % 2:
            kinds[: len(FAULTS)] = FAULTS[: len(rows)]
        parity.step(cpu, other, np.stack([logits_of(k, rng, vocab) for k in kinds]), rows, params)
    return parity.report()


def check_filters(device: torch.device, vocab: int, make: MakeKernels | None) -> dict[str, int]:
    """Each kind of filter on each kind of logits: borders in ties, in masked tails, over a whole flat row."""
    rng = np.random.default_rng(vocab)
    filters = [{"top_k": vocab // 3}, {"top_p": 0.7}, {"top_k": vocab // 5, "top_p": 0.9, "min_p": 0.01}]
    pairs = [(kind, fields) for kind in KINDS for fields in filters]
    params = {row: RowParams(seed=row, temperature=1.3, **fields) for row, (_, fields) in enumerate(pairs)}
    cpu, other = tables(device, vocab, len(pairs), make)
    for row, p in params.items():
        for table in (cpu, other):
            table.add(row, p, [1])
    parity = Parity()
    parity.step(cpu, other, np.stack([logits_of(k, rng, vocab) for k, _ in pairs]), range(len(pairs)), params)
    return parity.report()


def check_seeds(device: torch.device, vocab: int, draws: int, make: MakeKernels | None) -> dict[str, int]:
    """One distribution, many seeds: token by token the CPU's draws, so their distribution is the CPU's too."""
    rng = np.random.default_rng(1)
    logits = np.repeat(logits_of("normal", rng, vocab)[None], draws, 0)
    parity = Parity()
    for fields in ({}, {"top_p": 0.9}, {"top_k": 7, "temperature": 1.4}):
        cpu, other = tables(device, vocab, draws, make)
        params = {row: RowParams(seed=int(rng.integers(-(2**62), 2**62)), **fields) for row in range(draws)}
        for row, p in params.items():
            for table in (cpu, other):
                table.add(row, p, [0] * int(row % 50 + 1))
        parity.step(cpu, other, logits, list(range(draws)), params)
    return parity.report()


def check_prompt_logprobs(device: torch.device, vocab: int, n: int, make: MakeKernels | None) -> None:
    rng = np.random.default_rng(2)
    logits = np.stack([logits_of(KINDS[i % 6], rng, vocab) for i in range(n)])
    targets = torch.from_numpy(rng.integers(0, vocab, n))
    ours = Sampler(1, vocab, device, 8, None if make is None else make(vocab))
    twin = Sampler(1, vocab, CPU, 8)
    for k in (0, 1, 5, 32, 40):
        want = twin.prompt_logprobs(torch.from_numpy(logits), targets, k)
        got = ours.prompt_logprobs(torch.from_numpy(logits).to(device), targets.to(device), k)
        assert got.token_ids.tolist() == want.token_ids.tolist() and got.ranks.tolist() == want.ranks.tolist()
        np.testing.assert_allclose(got.logprobs.cpu().numpy(), want.logprobs.numpy(), rtol=1e-6, atol=1e-5)


def check_drafts(device: torch.device, vocab: int, steps: int, make: MakeKernels | None) -> int:
    """Penalised rows and others behind drafts of which some are right: logits and lists, exactly; steps are launched
    twice now and then. Returns how many positions were compared."""
    rng = np.random.default_rng(vocab)
    penalties = {"repetition_penalty": 1.7, "presence_penalty": 0.3, "frequency_penalty": 0.25}
    twins = [
        Table(vocab, 6, 256, at, Sampler(6, vocab, at, 256, kernels))
        for at, kernels in ((CPU, None), (device, None if make is None else make(vocab)))
    ]
    for row, length in enumerate((1, 9, 64, 100, 140, 170)):
        history = rng.integers(-2, vocab + 5, length).tolist()
        for table in twins:
            params = RowParams(seed=row, temperature=0.0, **(penalties if row % 3 else {}))
            table.add(row, params, history, max(1, length // 2))
    compared = 0
    for _ in range(steps):
        rows = rng.permutation(6)[: rng.integers(1, 7)].tolist()
        each = rng.integers(1, 8, len(rows))
        index = torch.from_numpy(np.repeat(rows, each))
        known = np.array([twins[0].lengths[row] for row in rows])
        positions = torch.from_numpy(np.concatenate([np.arange(at, at + n) for at, n in zip(known, each)]))
        logits = torch.from_numpy(rng.normal(0, 1, (len(index), vocab)).astype(np.float32))
        drafts = torch.from_numpy(rng.integers(-1, 20, len(index)).astype(np.int32))
        right, again = rng.integers(0, each), 1 + int(rng.random() < 0.2)
        changed = []
        for table in twins:
            at, where = index.to(table.device), positions.to(table.device)
            table.tokens[at, where] = drafts.to(table.device)
            for _ in range(again):
                changed.append(logits.clone().to(table.device))
                table.sampler.sample(changed[-1], at, index.tolist(), where, table.tokens)
            for row, accepted in zip(rows, right):
                table.lengths[row] += 1 + int(accepted)
        assert all(torch.equal(changed[0], other.cpu()) for other in changed[1:])
        _compare_lists(*(table.sampler._seen.tensors() for table in twins))
        compared += len(index)
    return compared


def _compare_lists(want: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> None:
    ids, counts, sizes, counted = (values.cpu() for values in got)
    assert torch.equal(sizes, want[2]) and torch.equal(counted, want[3])
    for slot, size in enumerate(sizes.tolist()):
        assert torch.equal(ids[slot, :size], want[0][slot, :size])
        assert torch.equal(counts[slot, :size], want[1][slot, :size])


def check(
    device: torch.device,
    vocabs: Sequence[int] = (257, 32_001, 151_936, 262_144),
    draws: int = 512,
    copies: int = 2,
    steps: int = 4,
    make: MakeKernels | None = None,
) -> dict[str, dict[str, int]]:
    """Everything above over `vocabs`; the defaults are for a GPU. Raises `AssertionError` at the first difference;
    returns how many draws were compared, and how many differed by rounding."""
    found = {}
    for vocab in vocabs:
        found[f"mixed_{vocab}"] = check_mixed(device, vocab, steps, copies, make)
        found[f"filters_{vocab}"] = check_filters(device, vocab, make)
        check_prompt_logprobs(device, vocab, 4 * copies, make)
        check_drafts(device, vocab, 2 * steps, make)
    found["seeds"] = check_seeds(device, min(vocabs), draws, make)
    return found


def check_no_wait(device: torch.device, vocab: int = 32_000, steps: int = 3) -> None:
    """On CUDA: admission and decode steps of a mixed batch under the debug mode that makes every wait an error, and
    after `warm_up` no kernel compiles. Raises `RuntimeError` or `AssertionError`."""
    from engine.sampling.kernels import device as kernels_room

    distinct = list(range(len(PARAMS)))
    rows = [row for row in distinct for _ in range(1 + row % 2)]  # every other one behind a draft
    sampler = Sampler(len(distinct), vocab, device, 64)
    sampler.warm_up()
    index = torch.tensor(rows, device=device)
    tokens = torch.zeros((len(distinct), 64), dtype=torch.int32, device=device)
    logits = torch.randn(steps, len(rows), vocab, device=device)
    first = torch.tensor([4 + at for row in distinct for at in range(1 + row % 2)], device=device)
    positions = [first + step for step in range(steps)]
    writes = _admit(sampler, distinct)
    tables_of = sampler.tables()
    for table, row, start, values in writes:
        target = tables_of[table]
        target[row, start : start + len(values)] = torch.tensor(values, dtype=target.dtype, device=device)
    torch.cuda.synchronize(device)
    kernels = [getattr(kernels_room, name) for name in kernels_room.__all__ if name.endswith("_kernel")]
    compiled = [_compiled(kernel) for kernel in kernels]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(steps):
            sampler.sample(logits[step], index, rows, positions[step], tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [_compiled(kernel) for kernel in kernels] == compiled


def _admit(sampler: Sampler, rows: Sequence[int]) -> list[tuple[int, int, int, list[float] | list[int]]]:
    """Admission must not wait either."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        for row in rows:
            sampler.add(row, PARAMS[row], [1, 2, 3], 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sampler.drain_writes()


def _compiled(kernel: object) -> int:
    """How many binaries Triton holds of a kernel."""
    caches = getattr(kernel, "device_caches", {})
    return sum(len(cache[0]) for cache in caches.values())
