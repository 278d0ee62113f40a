"""A library's module, packed and folded: nothing but native calls between two attentions, and the same results."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from transformers import AutoModelForCausalLM, PreTrainedModel

sys.path.append(str(Path(__file__).parents[1] / "models"))
from dense_attention import DenseAttention
from tiny_architectures import config_of

import attention_backends.op  # noqa: F401 - registers pageloom::attention
from attention_backends.toolchain import default_cache_dir
from compilation.split import Piece, op_name, split
from compilation.trace import Traced, trace
from engine.cpu_kernels.folding import fold
from engine.cpu_kernels.linear import load
from engine.cpu_kernels.tape_program import is_allocation, is_view, native_name
from engine.models.description import describe
from engine.models.fallback.model import FallbackModel
from engine.weights.fallback_loader import load_fallback
from engine.weights.packing import Packer

ATTENTION = "pageloom::attention"
NATIVE = ["llama", "qwen3", "mistral", "seed_oss", "iquestcoder", "phi3", "gemma2", "gemma3_text"]
"""all between two attentions is native: norms of heads and behind the residual, biases, dropout, partial rotation"""
OTHERS = ["granite", "olmo2", "glm4", "gpt_neox", "starcoder2", "cohere", "qwen3_moe", "gpt_oss", "deepseek_v3"]
"""something is left to the compiler: multipliers, partial rotations, LayerNorm, experts, latent attention"""
BY_DEFAULT = ("phi3", "gemma3_text", "gpt_neox", "cohere", "gpt_oss", "deepseek_v3")
TOKENS = torch.randint(3, 199, (24,), generator=torch.Generator().manual_seed(7))


def library_model(name: str, directory: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    config = config_of(name, initializer_range=0.06, vocab_size=200)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(directory)
    return model


def packed(directory: Path, quantization: Any = "none") -> FallbackModel:
    description = describe(str(directory), "transformers")
    packer = Packer(load(default_cache_dir()), quantization)
    return load_fallback(
        description,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        max_position=256,
        dummy=False,
        seed=0,
        packer=packer,
    )


def traced(model: FallbackModel) -> Traced:
    model.set_attention(torch.ops.pageloom.attention)
    return trace(model, (torch.arange(8), torch.arange(8)))


def run(graph: Traced, attend: Callable[..., None], ids: torch.Tensor) -> torch.Tensor:
    """Node by node."""
    size, positions = len(ids), torch.arange(len(ids))
    known: dict[fx.Node, Any] = {graph.size: size, **graph.weights}
    known |= {node: x for node, x in zip(graph.inputs, (ids, positions), strict=True) if node is not None}
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        arguments: Any = fx.map_arg(node.args, known.__getitem__)
        if op_name(node) == ATTENTION:
            attend(*arguments)
        elif node.op == "call_method":
            known[node] = getattr(arguments[0], str(node.target))(*arguments[1:], **node.kwargs)
        else:
            kwargs: Any = fx.map_arg(node.kwargs, known.__getitem__)
            known[node] = node.target(*arguments, **kwargs)  # type: ignore[operator]
    result: torch.Tensor = known[graph.output]
    return result


@torch.inference_mode()
@pytest.mark.parametrize(
    "name",
    [each if each in BY_DEFAULT else pytest.param(each, marks=pytest.mark.exhaustive) for each in NATIVE + OTHERS],
)
def test_a_folded_graph_computes_what_the_library_computes(name: str, tmp_path: Path) -> None:
    library = library_model(name, tmp_path)
    exact = torch.log_softmax(library.float()(TOKENS[None], use_cache=False).logits[0], dim=-1)
    theirs = torch.log_softmax(library.bfloat16()(TOKENS[None], use_cache=False).logits[0].float(), dim=-1)
    model = packed(tmp_path)
    facts = describe(str(tmp_path), "transformers").facts
    graph = traced(model)
    fold(graph)
    hidden = run(graph, DenseAttention(facts, model.sinks), TOKENS)
    mine = torch.log_softmax(model.compute_logits(hidden), dim=-1)
    assert (mine - exact).abs().mean() <= 1.3 * (theirs - exact).abs().mean()
    if name in NATIVE:
        only_native_calls_are_left(graph)


def only_native_calls_are_left(graph: Traced) -> None:
    """Between attentions."""
    pieces = [step for step in split(graph, frozenset({ATTENTION})) if isinstance(step, Piece)]
    left = [
        str(node.target)
        for piece in pieces[1:]
        for node in piece.module.graph.nodes
        if node.op not in ("placeholder", "output") and not (native_name(node) or is_allocation(node) or is_view(node))
    ]
    assert left == []
    products = [node for node in graph.graph.nodes if native_name(node) == "packed_linear"]
    assert len(products) == 4 * (len(pieces) - 1)


@torch.inference_mode()
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_librarys_model_is_quantised_too(quantization: str, tmp_path: Path) -> None:
    library = library_model("llama", tmp_path)
    exact = torch.log_softmax(library.float()(TOKENS[None], use_cache=False).logits[0], dim=-1)
    model = packed(tmp_path, quantization)
    model.set_attention(DenseAttention(describe(str(tmp_path), "transformers").facts))
    found = torch.log_softmax(model.compute_logits(model(TOKENS, torch.arange(len(TOKENS)))), dim=-1)
    assert 1e-4 < (found - exact).abs().mean() < {"int8": 0.03, "int4": 0.3}[quantization]


def test_without_a_compiler_joined_products_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library_model("llama", tmp_path)
    model = packed(tmp_path)
    facts = describe(str(tmp_path), "transformers").facts
    model.set_attention(DenseAttention(facts))
    joined = {module for module in model.modules() if type(module).__name__ == "Joined"}
    calls = []
    for module in joined:
        module.inner.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[union-attr, operator]
    with torch.inference_mode():
        model(TOKENS, torch.arange(len(TOKENS)))
    assert len(calls) == len(joined) == len(facts.layers)
