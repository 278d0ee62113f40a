"""Layers that keep states, in ranks and in stages: the tokens of one process, and the bits of one that computes all
parts, or all layers, in the same steps."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_state_layers import CROWD, FAMILIES
from test_tensor_parallel import answers
from thread_ranks import ThreadRanks
from tiny_families import save_tiny

from attention_backends.toolchain import find_compiler
from engine import LLM, EngineArgs, SamplingParams
from engine.core.in_process_client import InProcessClient
from engine.errors import ConfigError, UnsupportedModelError
from engine.executor.inline import local_executor
from engine.kv_budget import SequenceSizes
from engine.layer_groups import state_page, state_pages
from engine.models.description import describe
from engine.models.sharding import check_divided
from engine.models.stages import stage_layers

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"),
    pytest.mark.timeout(300),
]

EXPERTS: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
}
NORMED: dict[str, Any] = {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "ssm_out_multiplier": 1.33}
SUBJECTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, FAMILIES[family]) for family in FAMILIES},
    # All layers' states fit into as many pages as a stage's, for the process that computes all.
    "KimiLinear": ("KimiLinear", {**FAMILIES["KimiLinear"], "kv_lora_rank": 104}),
    "one group": ("GraniteMoeHybrid", {**FAMILIES["GraniteMoeHybrid"], "mamba_n_groups": 1}),
    "one normed group beside attention": ("FalconH1", {**FAMILIES["FalconH1"], **NORMED}),
    "experts": ("Qwen3_5Moe", {**FAMILIES["Qwen3_5"], **EXPERTS}),
}
WHOLE: dict[str, Any] = {"enable_expert_parallel": True}
TOKENS = 16
TIGHT: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 64, "kv_cache_memory": 5 << 16}
LONG = [3 + (7 * i) % 240 for i in range(600)]
FIRST = [*CROWD[:40], LONG]
LATER = [[*LONG, 9, 4], *CROWD[:4]]
"""which find what the first have left: of the long one behind a snapshot on its way, too"""


class Subject:
    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        family, changes = SUBJECTS.get(name) or (name, FAMILIES[name])
        save_tiny(family, path, **changes)
        self.path = path

    def run(self, first: list[list[int]] = FIRST, executor: Any = None, **settings: Any) -> tuple[list[Any], Any, int]:
        """Answers, figures, and tokens that the later ones found. `executor`: None: as many processes as ranks."""
        args = EngineArgs(
            model=str(self.path),
            device="cpu",
            **{
                "dtype": "float32",
                "max_model_len": 1024,
                "compile": "none",
                "threads": 1,
                "max_num_batched_tokens": 80,
                "kv_cache_memory": 1 << 25,
                "swap_space": 1 << 24,
                **settings,
            },
        )
        factory = None if executor is None else functools.partial(InProcessClient, executor=executor)
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=1)
        with LLM.from_args(args, client_factory=factory) as llm:
            found, hits = [], 0
            for some in (first, LATER if LONG in first else []):
                before = llm.stats().prefix_hit_tokens
                given = [{"prompt_token_ids": prompt} for prompt in some]
                found += answers(llm.generate(given, params, use_tqdm=False))
                hits = llm.stats().prefix_hit_tokens - before
            stats = llm.stats()
        assert stats.kv_blocks_used == 0
        return found, stats, hits

    def tokens(self, first: list[list[int]] = FIRST) -> list[list[int]]:
        """Of one process with room for all."""
        return [tokens for tokens, _ in self.run(first, local_executor)[0]]


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(request.param, tmp_path_factory.mktemp("subject"))


def exhaustive(*cases: tuple[Any, ...]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.exhaustive) for case in cases]


@pytest.mark.parametrize(
    ("subject", "settings"),
    [
        ("one group", {}),
        *exhaustive(("experts", WHOLE), *((name, {}) for name in SUBJECTS if name != "one group")),
    ],
    indirect=["subject"],
)
def test_parts_in_little_memory_give_the_tokens_of_one_process(subject: Subject, settings: dict[str, Any]) -> None:
    found, stats, _ = subject.run(CROWD, ThreadRanks, tensor_parallel_size=2, **TIGHT, **settings)
    assert stats.preemptions > 0
    assert [tokens for tokens, _ in found] == subject.tokens(CROWD)


@pytest.mark.parametrize(
    ("subject", "tensor", "settings"),
    exhaustive(*((name, tensor, {}) for name in SUBJECTS for tensor in (1, 2)), ("experts", 2, WHOLE)),
    indirect=["subject"],
)
@pytest.mark.parametrize("stages", [1, 2])
def test_ranks_have_the_bits_of_one_process(
    subject: Subject, tensor: int, stages: int, settings: dict[str, Any]
) -> None:
    if tensor * stages == 1:
        pytest.skip("one rank")
    settings = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages, **settings}
    found, _, hits = subject.run(**settings)
    assert hits > 512, "behind a state that was kept on the way"
    assert found == subject.run(executor=local_executor if tensor == 1 else ThreadRanks, **settings)[0]
    assert [tokens for tokens, _ in found] == subject.tokens()


@pytest.mark.parametrize(
    ("subject", "tensor", "stages", "preemption"),
    [
        ("Lfm2", 1, 2, "swap"),
        *exhaustive(
            *((name, 1, 3, "swap") for name in FAMILIES),  # in a stage nothing attends, or nothing keeps a state
            *((name, 1, 2, "recompute") for name in FAMILIES),
            *((name, 2, 2, "swap") for name in SUBJECTS),
        ),
    ],
    indirect=["subject"],
)
def test_stages_in_little_memory_give_the_tokens_of_one_process(
    subject: Subject, tensor: int, stages: int, preemption: str
) -> None:
    settings = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages, "preemption": preemption}
    tight = TIGHT
    if subject.name == "KimiLinear" and tensor == 2:  # both parts keep all of a latent
        tight = {**TIGHT, "kv_cache_memory": 6 << 16}
    found, stats, _ = subject.run(CROWD, **tight, **settings)
    assert stats.preemptions > 0
    assert [tokens for tokens, _ in found] == subject.tokens(CROWD)


@pytest.mark.exhaustive
@pytest.mark.parametrize("subject", SUBJECTS, indirect=True)
def test_compiled_ranks_give_the_same_tokens(subject: Subject) -> None:
    found, _, _ = subject.run(compile="pieces", tensor_parallel_size=2)
    assert [tokens for tokens, _ in found] == subject.tokens()


@pytest.mark.exhaustive
@pytest.mark.parametrize("subject", SUBJECTS, indirect=True)
@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_packed_weights_have_the_same_bits_whoever_computes_the_parts(subject: Subject, quantization: str) -> None:
    settings = {"dtype": "bfloat16", "quantization": quantization, "tensor_parallel_size": 2}
    assert subject.run(FIRST[-12:], **settings)[0] == subject.run(FIRST[-12:], ThreadRanks, **settings)[0]


RANKS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5000)), min_size=1, max_size=6)


@given(ranks=RANKS.filter(lambda ranks: any(page for page, _ in ranks)))
def test_states_fit_into_as_many_pages_in_every_rank(ranks: list[tuple[int, int]]) -> None:
    pages = state_pages(ranks)
    for page, state in ranks:
        assert pages * (page or state_page(state, max(pages, 1))) >= state * bool(pages)
    fewer = pages - 1
    too_few = [fewer * page < state for page, state in ranks if page]
    all_pages, all_states = (sum(each) for each in zip(*ranks, strict=True))
    assert any(too_few) or fewer * all_pages < all_states or not pages


@pytest.mark.parametrize("subject", ["one group"], indirect=True)
def test_a_stage_in_which_nothing_attends_has_pages_for_its_states(subject: Subject) -> None:
    """Of three layers each is a stage: the second one attends."""
    model = describe(str(subject.path))
    alone = SequenceSizes(model=model.facts, dtype="float32", block_size=16, step_tokens=80, longest=1024)
    kept = 16 * 2 * 2 * 16 * 4
    assert alone.block_bytes == kept
    for ranks in (1, 2):
        stages = stage_layers(model.spec, 3)
        sizes = SequenceSizes(
            model=model.facts, dtype="float32", block_size=16, step_tokens=80, longest=1024, ranks=ranks, stages=stages
        )
        assert alone.state is not None and sizes.state is not None
        assert abs(alone.state.pages - sizes.state.pages) <= 1
        states = sizes.state.pages * (sizes.block_bytes - kept)
        assert 2 * 8 * 16 * 16 * 4 < states < 2 * 2 * 8 * 16 * 16 * 4


@pytest.mark.parametrize(
    ("subject", "ranks", "error", "message"),
    [
        ("GraniteMoeHybrid", 3, UnsupportedModelError, "norms of 2 groups of heads are not divided among more ranks"),
        ("Lfm2", 5, ConfigError, "a convolution of 64 units is divided in multiples of 16"),
        ("Qwen3_5", 5, ConfigError, "exceeds the 4 heads of a layer"),
    ],
    indirect=["subject"],
)
def test_what_is_not_divided_is_refused_by_name(
    subject: Subject, ranks: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_divided(describe(str(subject.path)).spec, ranks)
