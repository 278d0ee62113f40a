"""Adapters whose matrices are divided with the model's: the tokens of one process, and the bits of one that computes
all parts, or all layers, in the same steps."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_tensor_parallel import answers
from thread_ranks import ThreadRanks
from tiny_adapters import BESIDE, add_experts, request, save_adapter
from tiny_families import STATE_FAMILIES, save_tiny

from attention_backends.toolchain import find_compiler
from engine import LLM, EngineArgs, LoRARequest, SamplingParams
from engine.core.in_process_client import InProcessClient
from engine.errors import ConfigError
from engine.executor.inline import local_executor
from engine.plan import plan_of

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"),
    pytest.mark.timeout(300),
]

PROMPTS = [[5 + (7 * i * i + start) % 90 for i in range(10 + 9 * start)] for start in range(5)]
KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj")
GREEDY = [
    SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=1) for count in (40, 6, 12, 6, 40)
]
"""those without an adapter, the first and the last, go on while adapters take turns"""
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"num_key_value_heads": 1},
    "Qwen3_5": STATE_FAMILIES["Qwen3_5"],  # gates beside queries
    "Gemma2": {},
    "Phi3": {"pad_token_id": 0},  # one matrix for queries, keys and values
    "Olmo2": {},  # norms over all heads
    "Qwen3Moe": {},
    "Glm4Moe": BESIDE["Glm4Moe"],  # an MLP beside experts
}
OF_EXPERTS = ("Qwen3Moe",)


class Subject:
    """A model with three adapters, of which the second one changes some layers alone; those of `OF_EXPERTS` change
    experts, too."""

    def __init__(self, family: str, path: Path) -> None:
        self.lora = {
            "enable_lora": True,
            "max_loras": 1,
            **({"max_lora_expert_rank": 8} if family in OF_EXPERTS else {}),
        }
        model = save_tiny(family, path / "model", **FAMILIES[family])
        self.path = path / "model"
        self.places = [path / f"adapter-{index}" for index in range(3)]
        for index, place in enumerate(self.places):
            save_adapter(place, model, index, 4 << index, KINDS, layers=(1,) if index == 1 else None)
            if family in OF_EXPERTS:
                add_experts(place, model, index, 2 << index, "stacked")

    @property
    def requests(self) -> list[LoRARequest | None]:
        return [None, *(request(place, number) for number, place in enumerate(self.places, 1)), None]

    def args(self, **settings: Any) -> EngineArgs:
        given = {
            "device": "cpu",
            "dtype": "float32",
            "max_model_len": 128,
            "compile": "none",
            "threads": 1,
            "kv_cache_memory": 1 << 22,
            "max_num_batched_tokens": 64,
            **self.lora,
            **settings,
        }
        return EngineArgs(model=str(self.path), **given)

    def run(self, *, executor: Any = None, **settings: Any) -> list[Any]:
        """Of each prompt with an adapter of its own, there being fewer slots than adapters. `executor`: None: as many
        processes as ranks."""
        factory = None if executor is None else functools.partial(InProcessClient, executor=executor)
        with LLM.from_args(self.args(**settings), client_factory=factory) as llm:
            llm.wait_compiled()
            return answers(llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=self.requests))

    def tokens(self) -> list[list[int]]:
        """Of one process."""
        return [tokens for tokens, _ in self.run(executor=local_executor)]


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(request.param, tmp_path_factory.mktemp("subject"))


def exhaustive(*cases: tuple[Any, ...]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.exhaustive) for case in cases]


@pytest.mark.parametrize(
    ("subject", "tensor", "stages"),
    [
        ("Llama", 2, 2),
        *exhaustive(*((family, tensor, stages) for family in FAMILIES for tensor, stages in ((2, 1), (1, 2)))),
        *exhaustive(("Qwen3", 2, 2), ("Qwen3", 4, 1)),
    ],
    indirect=["subject"],
)
def test_ranks_have_the_bits_of_one_process(subject: Subject, tensor: int, stages: int) -> None:
    settings = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
    found = subject.run(**settings)
    assert found == subject.run(executor=ThreadRanks, **settings)
    tokens = subject.tokens()
    assert [each for each, _ in found] == tokens
    assert len({tuple(each[:4]) for each in tokens}) > 3


@pytest.mark.parametrize(
    ("subject", "quantization", "compile"),
    [("Llama", "int8", "pieces"), *exhaustive(("Llama", "none", "pieces"), ("Qwen3", "int8", "none"))],
    indirect=["subject"],
)
def test_packed_weights_have_the_same_bits_whoever_computes_the_parts(
    subject: Subject, quantization: str, compile: str
) -> None:
    settings = {"dtype": "bfloat16", "quantization": quantization, "tensor_parallel_size": 2}
    found = subject.run(compile=compile, **settings)
    assert found == subject.run(executor=ThreadRanks, **settings)


@pytest.mark.parametrize("subject", ["Llama"], indirect=True)
@pytest.mark.parametrize("in_process", [False, *exhaustive((True,))])
def test_what_cannot_be_loaded_fails_alone(subject: Subject, in_process: bool, tmp_path: Path) -> None:
    """In every rank; what is loaded later is loaded while others run, and nothing of it is another's."""
    gone = tmp_path / "gone"
    shutil.copytree(subject.places[0], gone)
    (gone / "adapter_model.safetensors").write_bytes(b"nothing")
    adapters = subject.requests
    expected = subject.tokens()
    with LLM.from_args(subject.args(tensor_parallel_size=2), in_process=in_process) as llm:
        for _ in range(2):
            outputs = llm.generate(
                [*PROMPTS, PROMPTS[0]], [*GREEDY, GREEDY[0]], use_tqdm=False, lora_request=[*adapters, request(gone, 9)]
            )
            assert outputs[-1].outputs[0].finish_reason == "error"
            assert "damaged or cut short" in str(outputs[-1].outputs[0].stop_reason)
            assert [tokens for tokens, _ in answers(outputs[:-1])] == expected
        gone_for_one = request(subject.places[0], 10)
        [output] = llm.generate(PROMPTS[1:2], GREEDY[1:2], use_tqdm=False, lora_request=gone_for_one)
        assert list(output.outputs[0].token_ids) == expected[1]


@pytest.mark.parametrize("subject", ["Llama"], indirect=True)
def test_each_rank_keeps_its_part(subject: Subject) -> None:
    """Of what slots have room for, ranks share the columns of what they add up and the rows of all else."""

    def weights(**settings: Any) -> list[int]:
        plans = [plan_of(subject.args(**settings, **lora)) for lora in ({}, {"enable_lora": False, "max_loras": None})]
        ranks = [[rank.weight_bytes for rank in plan.ranks] or [plan.weight_bytes] for plan in plans]
        return [with_tables - without for with_tables, without in zip(*ranks, strict=True)]

    [alone] = weights()
    parts = weights(tensor_parallel_size=2)
    assert alone < sum(parts) < 2 * alone
    assert sum(weights(pipeline_parallel_size=2)) == alone


@pytest.mark.parametrize("subject", ["Qwen3Moe"], indirect=True)
def test_what_does_not_go_together_is_refused_by_name(subject: Subject) -> None:
    with pytest.raises(ConfigError, match="enable_expert_parallel"):
        LLM.from_args(subject.args(tensor_parallel_size=2, enable_expert_parallel=True))
