"""Models without a family of ours run through the transformers library's own module: token-exact, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_attention import DenseAttention
from safetensors.torch import load_file, save_file
from tiny_architectures import ATTENTION, BYPASSING, DECODER_HALVES, HYBRIDS, config_of, known
from transformers import AutoModelForCausalLM, PreTrainedModel

import attention_backends.op  # noqa: F401 - registers pageloom::attention
from compilation.split import Call, Piece, split
from compilation.structure import structural_hash
from compilation.trace import trace
from engine.errors import ConfigError, UnsupportedModelError, WeightsError
from engine.models.description import describe
from engine.models.fallback.model import FallbackModel
from engine.weights.fallback_loader import load_fallback

PROMPT = torch.randint(3, 199, (40,), generator=torch.Generator().manual_seed(7)).tolist()
REFUSED = {
    "biogpt": "does not let its attention be replaced",
    "dbrx": "does not run with attention from outside",
    "diffllama": "attend, 6 times in all",
    "dory": "attend, 6 times in all",
    "gemma4_text": "neither all before it nor a window|heads of",
    "hrm_text": "attend, 8 times in all",
    "jetmoe": "does not run with attention from outside",
    "llama4_text": "does not run with attention from outside|neither all before it nor a window",
    "longcat_flash": "does not run with attention from outside",
    "nemotron": "keeps from its attention what the model is called with",
    "stablelm": "does not let its attention be replaced",
}
"""attention alone, and yet not served"""
SERVED = [name for name in known() if name in ATTENTION and name not in REFUSED]
SAMPLE = {"deepseek_v3", "gemma2", "gpt_oss", "phi3", "qwen3_moe"}
"""traced in every run: latent attention, caps and windows, sinks, experts, fused projections"""


def library_model(name: str, directory: Path, **changes: Any) -> PreTrainedModel:
    """A tiny random model, saved."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config_of(name, **changes), attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():  # so that norms, biases and sinks count
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.eval().save_pretrained(directory)
    return model


def served(directory: Path, max_position: int = 256, dtype: torch.dtype = torch.float32) -> FallbackModel:
    description = describe(str(directory), "transformers")
    assert description.spec is None
    cpu = torch.device("cpu")
    model = load_fallback(description, dtype=dtype, device=cpu, max_position=max_position, dummy=False, seed=0)
    model.set_attention(DenseAttention(description.facts, model.sinks))
    return model


def greedy(model: FallbackModel, prompt: list[int], chunks: tuple[int, ...], num_tokens: int) -> list[int]:
    """The prompt in chunks of these sizes, then the rest at once, then token by token."""
    at, tokens = 0, []
    for size in (*chunks, len(prompt) - sum(chunks)):
        hidden = model(torch.tensor(prompt[at : at + size]), torch.arange(at, at + size))
        at += size
    for _ in range(num_tokens):
        tokens.append(int(model.compute_logits(hidden[-1:]).argmax()))
        hidden = model(torch.tensor(tokens[-1:]), torch.tensor([at]))
        at += 1
    return tokens


def library_greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_at_least_55_architectures_are_served() -> None:
    assert len(SERVED) >= 55


@torch.no_grad()
@pytest.mark.parametrize("name", SERVED)
def test_greedy_tokens_equal_the_librarys(name: str, tmp_path: Path) -> None:
    library = library_model(name, tmp_path)
    expected = library_greedy(library, PROMPT, 8)
    assert greedy(served(tmp_path), PROMPT, (1, 17, 3), 8) == expected


@pytest.mark.parametrize(
    "name",
    [
        name if name in SAMPLE else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in SERVED
        if name != "ctrl"  # its forward replaces a buffer
    ],
)
def test_it_traces_into_one_graph_whose_layers_share_pieces(name: str, tmp_path: Path) -> None:
    library_model(name, tmp_path)
    model = served(tmp_path)
    model.set_attention(torch.ops.pageloom.attention)
    steps = split(trace(model, (torch.arange(8), torch.arange(8))), frozenset({"pageloom::attention"}))
    calls = [step for step in steps if isinstance(step, Call)]
    assert [call.args[-1] for call in calls] == list(range(len(describe(str(tmp_path), "transformers").facts.layers)))
    pieces = [step for step in steps if isinstance(step, Piece)]
    assert len({structural_hash(piece.module.graph) for piece in pieces}) <= len(pieces)


@pytest.mark.parametrize("name", [name for name in known() if name in {**HYBRIDS, **BYPASSING} or name in REFUSED])
def test_what_would_be_served_wrongly_is_refused_by_name(name: str, tmp_path: Path) -> None:
    library_model(name, tmp_path)
    with pytest.raises(UnsupportedModelError, match=REFUSED.get(name, ".")) as raised:
        served(tmp_path)
    assert "Error" not in str(raised.value)


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in known() if name in DECODER_HALVES])
def test_half_of_another_model_is_refused_or_right(name: str, tmp_path: Path) -> None:
    library = library_model(name, tmp_path)
    try:
        model = served(tmp_path)
    except UnsupportedModelError:
        return
    assert greedy(model, PROMPT, (1, 17, 3), 8) == library_greedy(library, PROMPT, 8)


LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


@torch.no_grad()
def test_longrope_is_that_of_the_longest_sequence_that_can_come(tmp_path: Path) -> None:
    """The library chooses by the batch at hand: what one sequence computes would depend on its neighbours."""
    rope = {**LONGROPE, "original_max_position_embeddings": 64}
    library = library_model("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=64)
    short = PROMPT[:30]
    assert greedy(served(tmp_path, max_position=64), short, (5,), 8) == library_greedy(library, short, 8)
    long = PROMPT * 2
    model = served(tmp_path, max_position=256)
    assert greedy(model, long, (5, 30), 8) == library_greedy(library, long, 8)


@torch.no_grad()
def test_dynamic_rope_does_not_look_at_the_batch(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    library = library_model("llama", tmp_path, rope_parameters=rope)
    assert greedy(served(tmp_path), PROMPT, (5,), 8) == library_greedy(library, PROMPT, 8)


def test_the_first_choice_is_a_family_of_ours(tmp_path: Path) -> None:
    library_model("llama", tmp_path)
    assert describe(str(tmp_path)).spec is not None
    assert describe(str(tmp_path), "native").spec is not None


def test_a_model_that_neither_serves_is_told_both_reasons(tmp_path: Path) -> None:
    library_model("mamba", tmp_path)
    reasons = r"MambaForCausalLM.*is not supported.*not through transformers.*mamba"
    with pytest.raises(UnsupportedModelError, match=reasons):
        describe(str(tmp_path))
    with pytest.raises(UnsupportedModelError, match="supported architectures"):
        describe(str(tmp_path), "native")


@pytest.mark.parametrize("architecture", ["HeliumForSequenceClassification", "LlamaForCausalLM"])
def test_another_head_is_not_taken_for_a_language_model(architecture: str, tmp_path: Path) -> None:
    library_model("helium", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": [architecture]}))
    with pytest.raises(UnsupportedModelError, match=rf"only HeliumForCausalLM and HeliumModel.*{architecture}"):
        describe(str(tmp_path), "transformers")


@torch.no_grad()
def test_a_bare_model_makes_vectors_and_no_tokens(tmp_path: Path) -> None:
    library = library_model("helium", tmp_path / "whole")
    library.base_model.save_pretrained(tmp_path / "bare")
    description = describe(str(tmp_path / "bare"), "transformers")
    assert not description.generates and describe(str(tmp_path / "whole"), "transformers").generates
    ids = torch.tensor(PROMPT)
    found = served(tmp_path / "bare")(ids, torch.arange(len(ids)))
    torch.testing.assert_close(found, served(tmp_path / "whole")(ids, torch.arange(len(ids))))


@pytest.mark.parametrize("change", ["missing", "shape", "extra"])
def test_a_checkpoint_that_does_not_fit_is_refused(change: str, tmp_path: Path) -> None:
    library_model("helium", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.mlp.down_proj.weight"
    if change == "missing":
        del tensors[name]
    elif change == "shape":
        tensors[name] = tensors[name][:7].clone()
    else:
        tensors["model.layers.9.mlp.down_proj.weight"] = torch.zeros(3)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"down_proj"):
        served(tmp_path)


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size"])
def test_absurd_sizes_are_refused_before_a_module_is_built(key: str, tmp_path: Path) -> None:
    library_model("helium", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: 10**12}))
    with pytest.raises(ConfigError, match=key):
        describe(str(tmp_path), "transformers")
