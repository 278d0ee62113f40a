"""Adapters of experts over checkpoints that are stored quantised."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.extend(str(Path(__file__).parents[1] / room) for room in ("frontend", "models", "weights"))
from gguf import GGMLQuantizationType
from gguf_models import write_gguf
from stored_forms import FORMS, Form, write
from test_adapted_packed_models import logprobs
from test_merged_weights import PROMPT, open_llm, tokens
from tiny_adapters import add_experts, request, save_adapter
from tiny_front import save_model
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from attention_backends.toolchain import default_cache_dir
from engine.cpu_kernels.linear import load
from engine.errors import ConfigError

pytestmark = pytest.mark.timeout(300)

QWEN = Qwen3MoeConfig(
    vocab_size=224,
    hidden_size=128,
    intermediate_size=256,
    moe_intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
    initializer_range=0.2,
    num_experts=4,
    num_experts_per_tok=2,
    norm_topk_prob=True,
)
RANK = {"max_lora_expert_rank": 8}


def quantized_mixture(form: Form, folder: Path) -> PreTrainedModel:
    """As `quantized_model`, with the matrices of each expert apart."""
    torch.manual_seed(0)
    generator, model = torch.Generator().manual_seed(0), AutoModelForCausalLM.from_config(QWEN).eval()
    tensors: dict[str, torch.Tensor] = {}

    def put(name: str, parameter: torch.Tensor) -> None:
        made, values = form.make(*parameter.shape, generator)
        tensors.update({f"{name}.{part}": tensor for part, tensor in made.items()})
        parameter.copy_(values)

    for name, parameter in model.state_dict().items():
        module, _, last = name.rpartition(".")
        if last in ("gate_up_proj", "down_proj"):
            names = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
            for expert, matrix in enumerate(parameter):
                for called, rows in zip(names, matrix.chunk(len(names)), strict=True):
                    put(f"{module}.{expert}.{called}", rows)
        elif "_proj" in module:
            put(module, parameter)
        else:
            tensors[name] = parameter.bfloat16()
            parameter.copy_(tensors[name])
    config = {**QWEN.to_dict(), "architectures": [type(model).__name__], "dtype": "bfloat16"}
    write(folder, tensors, {**config, "quantization_config": form.config})
    return model


def stored(form: str, folder: Path) -> tuple[Path, PreTrainedModel, dict[str, str]]:
    if form != "gguf":
        return folder, quantized_mixture(FORMS[form], folder), {}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(QWEN).eval()
    path = Path(write_gguf(model, folder / "model.gguf", GGMLQuantizationType.Q8_0))
    return path, model, {"tokenizer": str(save_model(folder / "tokenizer"))}


@pytest.mark.parametrize(
    "form", ["mxfp4", "gguf", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("gptq", "awq", "packed"))]
)
def test_stored_experts_are_adapted_as_dense_ones(form: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    path, model, options = stored(form, tmp_path / "model")
    for number in range(2):
        save_adapter(tmp_path / f"adapter-{number}", model, number, targets=("q_proj", "v_proj")[:number])
        add_experts(tmp_path / f"adapter-{number}", model, number, 8, "stacked")
    model.save_pretrained(tmp_path / "exact")
    adapters = [None, *(request(tmp_path / f"adapter-{number}", 1 + number) for number in range(2))]
    with open_llm(tmp_path / "exact", **RANK) as llm:
        exact = [logprobs(llm, adapter) for adapter in adapters]
    tiles = "amx" in load(default_cache_dir()).isas  # which multiply many rows of such weights otherwise than few
    settings = {"dtype": "bfloat16", "batch_invariant": not tiles, "enable_prefix_caching": False}
    with open_llm(path, **settings, **options, **RANK) as llm:
        found = [logprobs(llm, adapter) for adapter in adapters]
        together = tokens(llm, [PROMPT] * 3, adapters)
        alone = [tokens(llm, [PROMPT], adapter)[0] for adapter in adapters]
    assert together == alone or tiles
    if tiles:
        with pytest.raises(ConfigError, match="batch_invariant: with AMX, weights as"):
            open_llm(path, **(settings | {"batch_invariant": True}), **options, **RANK)
    for index, each in enumerate(found):
        errors = [float((each - other).abs().mean()) for other in exact]
        assert errors[index] < 0.1 * min(errors[:index] + errors[index + 1 :]), errors
