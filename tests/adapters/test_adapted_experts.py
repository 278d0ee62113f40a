"""Adapters that change the matrices of experts: the tokens of the model with each merged into its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_merged_weights import PROMPT, greedy, open_llm, tokens
from tiny_adapters import add_experts, merged, merged_experts, request, save_adapter
from tiny_families import save_tiny

from engine.adapters.config import LoRAConfig
from engine.adapters.experts import AdaptedExperts
from engine.adapters.peft import check_files
from engine.adapters.tables import AdapterTables
from engine.adapters.targets import table_bytes
from engine.errors import ConfigError, InvalidRequestError
from engine.models.decoder import Decoder
from engine.models.description import describe
from engine.models.spec import DecoderSpec

pytestmark = pytest.mark.timeout(300)

OTHERS = [[9 + (5 * i * i + start) % 90 for i in range(20 + 11 * start)] for start in range(3)]
SHAPES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3_5Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 48,
        "layer_types": ["full_attention"] * 3,
        "head_dim": 16,
    },
}
RANK = {"max_lora_expert_rank": 8}


def two_adapters(family: str, form: str, path: Path) -> tuple[torch.nn.Module, list[list[list[int]]]]:
    """A model and two adapters of it, the first one of experts alone; of no adapter and of each the tokens of all
    prompts, by transformers."""
    model = save_tiny(family, path / "model", **SHAPES.get(family, {}))
    model.generation_config.eos_token_id = None  # whose score would be taken away
    prompts = [PROMPT, *OTHERS]
    expected = [[greedy(model, prompt) for prompt in prompts]]
    for number, targets in enumerate(((), ("q_proj", "o_proj"))):
        place = path / f"adapter-{number}"
        added = save_adapter(place, model, number, targets=targets)
        experts = add_experts(place, model, number, 4 + 2 * number, form)
        merged(model, added)
        merged_experts(model, experts)
        expected.append([greedy(model, prompt) for prompt in prompts])
        merged(model, added, -1)
        merged_experts(model, experts, -1)
    return model, expected


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("Qwen3Moe", "apart"),
        ("Qwen3Moe", "turned"),
        ("Qwen3_5Moe", "stacked"),
        ("GptOss", "turned"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (("Mixtral", "apart"), ("Mixtral", "stacked"), ("Qwen3_5Moe", "apart"))
        ),
    ],
)
def test_tokens_are_those_of_merged_weights(family: str, form: str, tmp_path: Path) -> None:
    """Of several adapters, and none, in one batch."""
    _, expected = two_adapters(family, form, tmp_path)
    assert all(len({tuple(each[prompt]) for each in expected}) == 3 for prompt in range(2))
    adapters = [None, *(request(tmp_path / f"adapter-{number}", 1 + number) for number in range(2))]
    cases = [(prompt, number) for prompt in range(4) for number in range(3)]
    prompts = [[PROMPT, *OTHERS][prompt] for prompt, _ in cases]
    with open_llm(tmp_path / "model", **RANK) as llm:
        found = tokens(llm, prompts, [adapters[number] for _, number in cases])
    assert found == [expected[number][prompt] for prompt, number in cases]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen")
    model = save_tiny("Qwen3Moe", path / "model", moe_intermediate_size=64)
    for number in range(2):
        save_adapter(path / f"adapter-{number}", model, number, targets=("q_proj", "v_proj")[:number])
        add_experts(path / f"adapter-{number}", model, number, 8, "stacked")
    return path


def spec_of(path: Path) -> DecoderSpec:
    spec = describe(str(path / "model")).spec
    assert spec is not None
    return spec


@pytest.fixture(scope="module", params=["Qwen3Moe", "GptOss"])
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, qwen: Path) -> Path:
    if request.param == "Qwen3Moe":
        return qwen
    path = tmp_path_factory.mktemp("gpt-oss")
    model = save_tiny("GptOss", path / "model")
    for number in range(2):
        save_adapter(path / f"adapter-{number}", model, number, targets=("q_proj", "v_proj")[:number])
        add_experts(path / f"adapter-{number}", model, number, 8, "turned")
    return path


@pytest.mark.parametrize("quantization", ["int8", pytest.param("none", marks=pytest.mark.exhaustive)])
def test_packed_experts_have_bits_of_their_own_and_are_near_the_exact_ones(mixture: Path, quantization: str) -> None:
    from test_adapted_packed_models import logprobs

    adapters = [None, request(mixture / "adapter-0", 1), request(mixture / "adapter-1", 2)]
    with open_llm(mixture / "model", **RANK) as llm:
        exact = [logprobs(llm, adapter) for adapter in adapters]
    options = {"dtype": "bfloat16", "compile": "pieces", "quantization": quantization, "enable_prefix_caching": False}
    with open_llm(mixture / "model", batch_invariant=True, **options, **RANK) as llm:
        found = [logprobs(llm, adapter) for adapter in adapters]
        together = tokens(llm, [PROMPT] * 3 + [OTHERS[0]] * 3, adapters * 2)
        alone = [tokens(llm, [prompt], each)[0] for prompt in (PROMPT, OTHERS[0]) for each in adapters]
    assert together == alone
    for index, each in enumerate(found):
        errors = [float((each - other).abs().mean()) for other in exact]
        assert errors[index] < 0.5 * min(errors[:index] + errors[index + 1 :]), errors


def test_a_model_whose_rows_have_no_adapter_computes_what_it_did(qwen: Path) -> None:
    """The bits, with room for adapters of experts and without."""
    options = {"dtype": "bfloat16", "enable_prefix_caching": False}
    from test_adapted_packed_models import logprobs

    found = []
    for settings in (RANK, {"enable_lora": False, "max_lora_rank": None}):
        with open_llm(qwen / "model", **options, **settings) as llm:
            found.append(logprobs(llm, None))
    assert torch.equal(*found)


def test_memory_for_experts_is_counted_before_it_is_taken(qwen: Path) -> None:
    spec = spec_of(qwen)
    config = LoRAConfig(max_lora_rank=16, max_lora_expert_rank=8, max_loras=3, max_cpu_loras=3)
    plain = LoRAConfig(max_lora_rank=16, max_loras=3, max_cpu_loras=3)
    model = Decoder(spec, dtype=torch.float32)
    AdapterTables(model, spec, config, 8)
    found = sum(layer.nbytes for layer in model.modules() if isinstance(layer, AdaptedExperts))
    assert 2 * found == table_bytes(spec, config, 4) - table_bytes(spec, plain, 4) > 0


def test_what_does_not_fit_is_refused_by_name(qwen: Path, tmp_path: Path) -> None:
    spec, place = spec_of(qwen), request(qwen / "adapter-0")
    roomy = LoRAConfig(max_lora_rank=16, max_lora_expert_rank=8, max_loras=1, max_cpu_loras=1)
    check_files(place, spec, roomy)

    def refused(said: str, config: LoRAConfig = roomy, path: Path = tmp_path, **tensors: torch.Tensor) -> None:
        if tensors:
            names = {
                f"base_model.model.model.layers.1.mlp.experts.{key}.weight": each.clone()
                for key, each in tensors.items()
            }
            save_file(names, tmp_path / "adapter_model.safetensors")
        with pytest.raises(InvalidRequestError, match=said):
            check_files(request(path), spec, config)

    refused(
        "set --max-lora-expert-rank", LoRAConfig(max_lora_rank=16, max_loras=1, max_cpu_loras=1), qwen / "adapter-0"
    )
    small = LoRAConfig(max_lora_rank=16, max_lora_expert_rank=4, max_loras=1, max_cpu_loras=1)
    refused(r"has rank 8; 1 to 4 are served \(--max-lora-expert-rank\)", small, qwen / "adapter-0")
    (tmp_path / "adapter_config.json").write_bytes((qwen / "adapter-0" / "adapter_config.json").read_bytes())
    a, b = torch.zeros(8, 64), torch.zeros(128, 8)
    refused("must have a lora_A and a lora_B", lora_A=a)
    refused(r"\(7, 64\) and \(128, 7\) are not of 4 experts", lora_A=a[:7], lora_B=b[:, :7])
    refused("fit no matrix of these experts", lora_A=a, lora_B=b[:100])
    refused("inputs and outputs are as many", lora_A=a, lora_B=b[:64])
    refused(
        "tensors of one kind twice", **{f"{n}lora_{x}": t for n in ("", "base_layer.") for x, t in (("A", a), ("B", b))}
    )
    refused(r"experts.4.up_proj' cannot be adapted here", **{"4.up_proj.lora_A": a[:, :], "4.up_proj.lora_B": b[:64]})
    config = (tmp_path / "adapter_config.json").read_text()
    wrong = config.replace('"r":', '"target_parameters": ["self_attn.q_proj.weight"], "r":')
    (tmp_path / "adapter_config.json").write_text(wrong)
    refused("target_parameters")


def test_experts_are_not_adapted_where_they_cannot_be(qwen: Path, tmp_path: Path) -> None:
    save_tiny("Llama", tmp_path / "llama")
    for path, options, said in (
        (tmp_path / "llama", {}, "max_lora_expert_rank: the model has no experts"),
        (qwen / "model", {"max_lora_expert_rank": 1000}, "max_lora_expert_rank must be in"),
        (qwen / "model", {"enable_lora": False, "max_lora_rank": None}, "max_lora_expert_rank is of adapters"),
    ):
        with pytest.raises(ConfigError, match=said):
            open_llm(path, **{**RANK, **options})
