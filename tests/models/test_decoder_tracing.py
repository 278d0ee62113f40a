"""The decoder traces into one graph for any number of tokens, in which all layers are the same operations."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from dense_attention import DenseAttention
from tiny_models import make_model, save

from attention_backends.op import ATTENTION_OP
from compilation.split import Piece, split
from compilation.structure import structural_hash
from compilation.trace import trace
from engine.models.decoder import Decoder
from engine.models.description import describe
from engine.weights.loader import load_weights

ATTENTION = torch.ops.pageloom.attention


def traced(model: Decoder) -> list[torch.fx.GraphModule]:
    """The graphs that Dynamo makes of one forward, token dimension unbacked; nothing is run."""
    graphs: list[torch.fx.GraphModule] = []

    def collect(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return lambda *arguments: (torch.zeros(5, model.spec.hidden_size),)

    ids, positions = torch.zeros(5, dtype=torch.int64), torch.arange(5)
    mark = torch._dynamo.decorators.mark_unbacked
    shared = {"shape_id": "n"} if "shape_id" in inspect.signature(mark).parameters else {}
    mark(ids, 0, **shared)
    mark(positions, 0, **shared)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=collect, fullgraph=True)(ids, positions)
    return graphs


def layer_operations(graph: torch.fx.Graph) -> list[list[str]]:
    """What lies between one attention call and the next, operators only (weights and sizes are inputs)."""
    pieces: list[list[str]] = [[]]
    for node in graph.nodes:
        if node.op == "placeholder" or node.op == "output":
            continue
        if "attention" in str(node.target) and node.op == "call_function":
            pieces.append([])
            continue
        constants = [argument for argument in node.args if isinstance(argument, (int, float, bool, tuple, list))]
        name = torch.fx.node._get_qualified_name(node.target) if callable(node.target) else str(node.target)
        pieces[-1].append(f"{name} {[c for c in constants if not _holds_node(c)]}")
    return pieces


def _holds_node(value: object) -> bool:
    return isinstance(value, (tuple, list)) and any(isinstance(item, torch.fx.Node) for item in value)


ALIKE = ["gemma3_windows", "gemma3_windows_untied", "gemma2_windows", "opt_norms_after", "gpt2"]
ALIKE += ["phi3_long_rope", "granite", "olmo2", "olmo3_windows", "glm4", "ministral3", "cohere", "hunyuan", "exaone4"]
ALIKE += ["nemotron", "apertus", "gpt_neox", "stablelm_parallel"]


BY_DEFAULT = ("gemma3_windows", "opt_norms_after", "gpt2", "phi3_long_rope", "olmo3_windows", "cohere", "exaone4")


@pytest.mark.parametrize(
    "case", [each if each in BY_DEFAULT else pytest.param(each, marks=pytest.mark.exhaustive) for each in ALIKE]
)
def test_layers_of_every_family_are_the_same_piece(case: str, tmp_path: Path) -> None:
    """Gemma 3's layers with and without a window differ in the rows of another rope table: an input like any other."""
    model = Decoder(describe(save(make_model(case), tmp_path)).spec, dtype=torch.float32)
    model.set_attention(ATTENTION)
    with torch.no_grad():
        steps = split(trace(model, (torch.zeros(5, dtype=torch.int64), torch.arange(5))), frozenset({ATTENTION_OP}))
    pieces = [structural_hash(step.module.graph) for step in steps if isinstance(step, Piece)]
    assert len(pieces) == model.spec.num_layers + 1
    assert len(set(pieces)) == 3 and len(set(pieces[1:-1])) == 1


def test_layers_with_inputs_of_their_own_are_the_same_piece(tmp_path: Path) -> None:
    """Gemma 4's with a window, one after another: what each is given for a token is an input like any other."""
    model = Decoder(describe(save(make_model("gemma4"), tmp_path)).spec, dtype=torch.float32)
    model.set_attention(ATTENTION)
    with torch.no_grad():
        steps = split(trace(model, (torch.zeros(5, dtype=torch.int64), torch.arange(5))), frozenset({ATTENTION_OP}))
    pieces = [structural_hash(step.module.graph) for step in steps if isinstance(step, Piece)]
    assert len(pieces) == model.spec.num_layers + 1
    assert [layer.mixer.window for layer in model.spec.layers] == [16] * 5 + [None] * 2
    assert len(set(pieces[1:5])) == 1


def test_a_layer_that_turns_nothing_is_one_more_piece(tmp_path: Path) -> None:
    """That before its attention; the one behind it is like any other."""
    model = Decoder(describe(save(make_model("smollm3"), tmp_path)).spec, dtype=torch.float32)
    model.set_attention(ATTENTION)
    with torch.no_grad():
        steps = split(trace(model, (torch.zeros(5, dtype=torch.int64), torch.arange(5))), frozenset({ATTENTION_OP}))
    between = [structural_hash(step.module.graph) for step in steps if isinstance(step, Piece)][1:-1]
    assert [layer.mixer.rope for layer in model.spec.layers] == [0, 0, 0, None, 0]
    assert between[0] == between[1] == between[3] != between[2]


@pytest.mark.parametrize("case", ["llama", "qwen3_bias_windows", "qwen2_tied_windows"])
def test_one_graph_in_which_every_layer_is_the_same_operations(case: str, tmp_path: Path) -> None:
    description = describe(save(make_model(case), tmp_path))
    model = Decoder(description.spec, dtype=torch.float32)
    load_weights(model, description)
    model.set_attention(ATTENTION)
    graphs = traced(model)
    assert len(graphs) == 1
    calls = [node for node in graphs[0].graph.nodes if "pageloom" in str(node.target)]
    assert [node.args[4] for node in calls] == [0, 1, 2]
    pieces = layer_operations(graphs[0].graph)
    assert len(pieces) == 4
    assert pieces[1] == pieces[2]
    assert len(pieces[1]) > 10
    sizes = [node.meta["example_value"].shape[0] for node in calls[0].args[:2]]
    assert all(isinstance(size, torch.SymInt) for size in sizes)


def test_compiled_with_a_bound_function_equals_eager_for_any_number_of_tokens(tmp_path: Path) -> None:
    """`aot_eager` runs the decomposed graph that Inductor would get, without compiling C++."""
    description = describe(save(make_model("qwen3"), tmp_path))
    model = Decoder(description.spec, dtype=torch.float32)
    load_weights(model, description)
    torch._dynamo.reset()
    for count in (1, 2, 33):
        ids, positions = torch.arange(count), torch.arange(count)
        model.set_attention(DenseAttention(model.spec))
        expected = model(ids, positions)
        model.set_attention(DenseAttention(model.spec))
        compiled = torch.compile(model, backend="aot_eager", dynamic=True)
        torch.testing.assert_close(compiled(ids, positions), expected, rtol=1e-5, atol=1e-5)
        torch._dynamo.reset()
