"""Float32 greedy tokens equal transformers' exactly: batched, chunked, preempted, reused, compiled."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from oracle import GreedyOracle, first_difference
from smollm2 import smollm2_by_transformers, smollm2_path
from tiny_families import TINY_FAMILIES, save_tiny

from engine import LLM, SamplingParams

COUNT = 64
"""tokens generated per prompt"""


def prompt_ids(count: int, longest: int, vocab: int) -> list[list[int]]:
    rng = random.Random(7)
    lengths = [1, 2, 15, 16, 17, longest, *(rng.randint(1, longest) for _ in range(count - 6))]
    return [[rng.randrange(5, vocab) for _ in range(n)] for n in lengths]


@dataclass(frozen=True)
class Variant:
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    twice: bool = False
    """generate twice; the second run finds the first one's blocks in the prefix cache"""
    preempts: bool = False

    @property
    def compiles(self) -> bool:
        return "compile" not in self.options


EAGER = {"compile": "none"}


def variants(small_pool: int) -> list[Variant]:
    return [
        Variant("pieces, one step ahead"),
        Variant("eager", EAGER),
        Variant("not ahead", {"async_scheduling": False, **EAGER}),
        Variant("preempted", {"kv_cache_memory": small_pool, **EAGER}, preempts=True),
        Variant("reused prefixes", EAGER, twice=True),
    ]


def check(model: str, variant: Variant, oracle: GreedyOracle, max_len: int, count: int = COUNT) -> None:
    options: dict[str, Any] = {"kv_cache_memory": 1 << 30, **variant.options}
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    with LLM(
        model,
        dtype="float32",
        device="cpu",
        max_model_len=max_len,
        max_num_seqs=32,
        max_num_batched_tokens=256,
        **options,
    ) as llm:
        if variant.compiles:
            llm.wait_compiled()
        for _ in range(2 if variant.twice else 1):
            outputs = llm.generate([{"prompt_token_ids": p} for p in oracle.prompts], params, use_tqdm=False)
            ours = [o.outputs[0].token_ids for o in outputs]
            assert first_difference(ours, oracle.tokens(guesses=ours)) == ""
        if variant.twice:
            cached = [o.num_cached_tokens for o in outputs]
            assert sum(cached) > 0.8 * sum((len(p) - 1) // 16 * 16 for p in oracle.prompts)
        stats = llm.stats()
        assert stats.kv_blocks_used == 0
        assert (stats.preemptions > 0) == variant.preempts
        assert stats.compiles_after_ready == 0
        assert llm.ready.distinct_pieces <= 5


EVERY_WAY = "Llama"
"""by default; what decides about steps does not know the family, and the table of models has most ways of each"""


@pytest.fixture(scope="module")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, GreedyOracle]:
    path = tmp_path_factory.mktemp(request.param)
    model = save_tiny(request.param, path)
    count = 32 if request.config.getoption("exhaustive") else 32 if request.param == EVERY_WAY else 10
    prompts = prompt_ids(count, 700, model.config.vocab_size)
    return str(path), GreedyOracle(model, prompts, COUNT)


def tiny_cases() -> Iterator[Any]:
    for family in TINY_FAMILIES:
        for index, variant in enumerate(variants(0)):
            chosen = index == 0 or family == EVERY_WAY
            marks = () if chosen else pytest.mark.exhaustive
            yield pytest.param(family, index, id=f"{family}-{variant.name}", marks=marks)


@pytest.mark.parametrize(("tiny", "index"), tiny_cases(), indirect=["tiny"])
def test_tiny_families_equal_transformers(tiny: tuple[str, GreedyOracle], index: int) -> None:
    path, oracle = tiny
    check(path, variants(small_pool=2 << 20)[index], oracle, max_len=1024)


@dataclass(frozen=True)
class Size:
    """How much the real model is asked."""

    prompts: int
    longest: int
    count: int
    max_len: int
    small_pool: int


WHOLE = Size(prompts=12, longest=300, count=COUNT, max_len=512, small_pool=30 << 20)
FEWER = Size(prompts=7, longest=100, count=16, max_len=256, small_pool=15 << 20)
"""by default; longer sequences in more blocks are the tiny families'"""


@pytest.fixture(scope="module")
def smollm2(pytestconfig: pytest.Config) -> tuple[str, GreedyOracle, Size]:
    size = WHOLE if pytestconfig.getoption("exhaustive") else FEWER
    path, model = smollm2_path(), smollm2_by_transformers()
    prompts = prompt_ids(size.prompts, size.longest, model.config.vocab_size)
    return path, GreedyOracle(model, prompts, size.count), size


REAL_WEIGHTS = ("pieces, one step ahead",)
"""by default: others differ in what decides about steps, not about numbers, and every tiny family has them"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "index",
    [
        pytest.param(index, id=v.name, marks=() if v.name in REAL_WEIGHTS else pytest.mark.exhaustive)
        for index, v in enumerate(variants(0))
    ],
)
def test_smollm2_equals_transformers(smollm2: tuple[str, GreedyOracle, Size], index: int) -> None:
    path, oracle, size = smollm2
    check(path, variants(size.small_pool)[index], oracle, size.max_len, size.count)
