"""Programs of tapes: nothing lies where something else is needed, and steps that were fused compute what they did."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_stages import NativeRows, PretendAttention
from tape_builder import INPUT, RESULT, SCRATCH, STEP, rows_at
from torch import Tensor, fx, nn

from attention_backends.interface import NativeLayer
from attention_backends.op import ATTENTION_OP
from compilation.split import Call, Fused, Piece, Step, split
from compilation.trace import Traced, trace
from engine.config import Quantization
from engine.cpu_kernels.linear import LinearOps
from engine.cpu_kernels.tape import fuse_native_steps
from engine.cpu_kernels.tape_program import TapeProgram, _Value
from engine.models.decoder import Decoder
from engine.models.description import describe
from engine.models.layers import Linear
from engine.models.packed import ActivatedLinear, JoinedLinear, PackedLinear
from engine.weights.loader import load_weights
from engine.weights.packing import Packer

values = st.lists(
    st.tuples(st.sampled_from([2, 16, 31, 64, 320, 1000]), st.integers(0, 30), st.integers(0, 9), st.integers(0, 5)),
    min_size=1,
    max_size=40,
)
"""columns, the call that makes it, calls until it is read last; 0: an input, 1: a result, else scratch"""


@given(values)
def test_values_that_are_needed_together_never_overlap(drawn: list[tuple[int, int, int, int]]) -> None:
    program = TapeProgram({}, lambda layer: None)
    inputs = [index for index, (*_, kind) in enumerate(drawn) if kind == 0]
    results = [index for index, (*_, kind) in enumerate(drawn) if kind == 1][::-1]
    graph = fx.Graph()
    program._of_input = {graph.placeholder(f"a{index}"): index for index in inputs}
    program._values = [_Value(columns, 2, kind == 0, first, first + more) for columns, first, more, kind in drawn]
    places = program._places({index: order for order, index in enumerate(results)})
    assert [places[index] for index in inputs] == [(INPUT, order) for order in range(len(inputs))]
    assert [places[index] for index in results] == [(RESULT, order) for order in range(len(results))]
    scratch = [index for index in range(len(drawn)) if index not in inputs and index not in results]
    for index in scratch:
        place, at = places[index]
        value = program._values[index]
        assert place == SCRATCH and at >= 0 and at % 64 == 0
        for other in scratch:
            beside = program._values[other]
            together = value.first <= beside.last and beside.first <= value.last
            if other != index and together:
                begin, end = at, at + 2 * value.columns
                assert end <= places[other][1] or places[other][1] + 2 * beside.columns <= begin


def test_memory_is_given_again_once_its_value_is_dead() -> None:
    program = TapeProgram({}, lambda layer: None)
    program._values = [_Value(64, 2, False, call, call + 1) for call in range(50)]
    assert {at for _, at in program._places({})} == {0, 128}, "each value and the one that it is made of"


def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int) -> None:
    """[tokens, heads, dim] each: something that depends on all of them."""
    groups = q.size(1) // k.size(1)
    wide = [x.repeat_interleave(groups, dim=1) for x in (k, v)]
    out.copy_(q * 0.5 + wide[0].flip(0) - wide[1] * (layer + 1))


@dataclass
class Model:
    """A packed decoder, cut at its attention; natively its attention is `attend`, too."""

    decoder: Decoder
    traced: Traced = field(init=False)
    steps: tuple[Step, ...] = field(init=False)
    native: set[int] = field(init=False)
    """layers whose attention has a native entry"""

    def __post_init__(self) -> None:
        spec = self.decoder.spec
        self.decoder.set_attention(torch.ops.pageloom.attention)
        ids = torch.arange(4)
        self.traced = trace(self.decoder, (ids, ids.clone()))
        self.steps = split(self.traced, frozenset({ATTENTION_OP}))
        self.native = set(range(spec.num_layers))
        self._layers = [torch.full((1,), index, dtype=torch.uint8) for index in range(spec.num_layers)]
        self._pretend = PretendAttention(self._attend)
        self.calls = 0

    def _attend(self, layer: int, step: int, r: NativeRows) -> None:
        assert step == STEP.data_ptr()
        mixer = self.decoder.spec.layers[0].mixer
        places = [
            (r.q, r.q_stride, mixer.num_heads),
            (r.k, r.k_stride, mixer.num_kv_heads),
            (r.v, r.v_stride, mixer.num_kv_heads),
            (r.out, r.out_stride, mixer.num_heads),
        ]
        q, k, v, out = (
            rows_at(address, stride, r.rows, heads * mixer.head_dim).view(r.rows, heads, mixer.head_dim)
            for address, stride, heads in places
        )
        self.calls += 1
        attend(q, k, v, out, [x.data_ptr() for x in self._layers].index(layer))

    def layer_of(self, layer: int) -> NativeLayer | None:
        return NativeLayer(self._pretend.address, self._layers[layer]) if layer in self.native else None

    def fused(self) -> Sequence[Step]:
        return fuse_native_steps(self.layer_of, lambda: [STEP])(self.traced, self.steps)

    def run(self, steps: Sequence[Step], tokens: int) -> Tensor:
        """What the flat program does."""
        ids = torch.arange(tokens) * 7 % 90
        known: dict[Any, Any] = dict(self.traced.weights)
        given = (ids, torch.arange(tokens))
        known.update({node: x for node, x in zip(self.traced.inputs, given, strict=True) if node is not None})
        for step in steps:
            if isinstance(step, Call):
                attend(*[known.get(argument, argument) for argument in step.args])
                continue
            arguments = [tokens, *(known[node] for node in step.inputs)]
            outputs = step.module(*arguments) if isinstance(step, Piece) else step.function(arguments)
            known.update(zip(step.outputs, outputs, strict=True))
        result: Tensor = known[self.traced.output]
        return result


Make = Callable[..., Model]


@pytest.fixture
def make(linear_ops: LinearOps, tmp_path: Path) -> Iterator[Make]:
    def made(
        quantization: Quantization = "none", change: Callable[[Decoder], None] = lambda model: None, **settings: object
    ) -> Model:
        config: dict[str, object] = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 101,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "eos_token_id": 2,
        }
        (tmp_path / "config.json").write_text(json.dumps(config | settings))
        description = describe(str(tmp_path))
        decoder = Decoder(description.spec, dtype=torch.bfloat16)
        load_weights(decoder, description, load_format="dummy", packer=Packer(linear_ops, quantization))
        with torch.no_grad():
            for name, parameter in decoder.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
        change(decoder)
        return Model(decoder)

    with torch.inference_mode():
        yield made


def kinds(steps: Sequence[Step]) -> str:
    return "".join(type(step).__name__[0] for step in steps)


def assert_unchanged(model: Model, steps: Sequence[Step]) -> None:
    for tokens in (1, 2, 9, 70):
        found, expected = model.run(steps, tokens), model.run(model.steps, tokens)
        assert torch.equal(found.contiguous().view(torch.int16), expected.contiguous().view(torch.int16))


QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32}


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        QWEN2,
        QWEN3,
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 1, "head_dim": 80, "num_attention_heads": 3},
        {"num_key_value_heads": 1, "num_attention_heads": 1},
        {"hidden_size": 96, "num_attention_heads": 6},
    ],
    ids=["llama", "qwen2", "qwen3", "biases", "one_kv_head", "one_head", "hidden_96"],
)
def test_a_fused_model_computes_the_same_bits(make: Make, quantization: Quantization, config: dict[str, Any]) -> None:
    model = make(quantization, **config)
    steps = model.fused()
    assert kinds(model.steps) == "PCPCPCPCP"
    assert kinds(steps) in ("PFP", "PF")
    assert_unchanged(model, steps)
    assert model.calls == 4 * 4, "the native attention was called by every run"


MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 3},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
    },
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.8,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 16},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 48, "moe_layer_start_index": 1},
}
ARCHITECTURES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
}


@pytest.mark.parametrize("quantization", ["none", "int4"])
@pytest.mark.parametrize("name", MIXTURES)
def test_all_of_a_model_with_experts_is_one_tape(make: Make, name: str, quantization: Quantization) -> None:
    model = make(quantization, model_type=name, architectures=[ARCHITECTURES[name]], **MIXTURES[name])
    steps = model.fused()
    assert kinds(model.steps) == "PCPCPCPCP" and kinds(steps) in ("PFP", "PF")
    assert_unchanged(model, steps)
    assert model.calls == 4 * 4


def joined(linear: Any) -> JoinedLinear:
    """The same layer as if it had been encoded in two formats."""
    assert isinstance(linear, PackedLinear)
    half = linear.n // 64 * 32
    ops = type("Ops", (), {"packed_linear": linear.op})
    cuts = ((0, half), (half, linear.n))
    return JoinedLinear(
        [
            PackedLinear(ops, linear.weight[a // 32 : -(-b // 32)].clone(), b - a, linear.k, linear.format)  # type: ignore[arg-type]  # only its operator
            for a, b in cuts
        ]
    )


def dense(linear: Any) -> Linear:
    layer = Linear(linear.k, linear.n, False, torch.bfloat16, torch.device("cpu"))
    with torch.no_grad():
        layer.weight.normal_(0, 0.05)
    return layer


@pytest.mark.parametrize(
    "of", [n if n in (0, 1, 6, 8, 11, 15) else pytest.param(n, marks=pytest.mark.exhaustive) for n in range(16)]
)
def test_whichever_layers_are_joined_all_is_one_tape_and_the_bits_stay(make: Make, of: int) -> None:
    chosen = [layer for layer in range(4) if of >> layer & 1]

    def change(decoder: Decoder) -> None:
        for index in chosen:
            layer: Any = decoder.layers[index]
            layer.qkv_proj = joined(layer.qkv_proj)

    model = make(change=change)
    steps = model.fused()
    assert_unchanged(model, steps)
    assert kinds(steps) in ("PFP", "PF")


@pytest.mark.parametrize("name", ["qkv_proj", "o_proj", "down_proj"])
def test_a_model_of_dense_layers_stays_as_it_was(make: Make, name: str) -> None:
    def change(decoder: Decoder) -> None:
        layer: nn.Module
        for layer in decoder.layers:
            setattr(layer, name, dense(getattr(layer, name)))

    model = make(change=change)
    steps = model.fused()
    if "F" in kinds(steps):  # the last layers may be native where only the projection of the next one is not
        assert name == "qkv_proj" and kinds(steps) == "PCPCPCPF"
    else:
        assert list(steps) == list(model.steps)
    assert_unchanged(model, steps)


@pytest.mark.parametrize("hidden", [48, 62, 63])
def test_odd_sizes_serve(make: Make, hidden: int) -> None:
    model = make(hidden_size=hidden, intermediate_size=40, num_attention_heads=2, num_key_value_heads=2, head_dim=16)
    kind = Linear if hidden % 2 else ActivatedLinear
    assert isinstance(model.decoder.layers[0].gate_up_proj, kind), "40 gates do not fill half panels"
    assert list(model.fused()) == list(model.steps)
    assert_unchanged(model, model.fused())


@pytest.mark.parametrize("layers", [1, 2])
def test_few_layers(make: Make, layers: int) -> None:
    model = make(num_hidden_layers=layers)
    assert_unchanged(model, model.fused())


@pytest.mark.parametrize("native", [set(), {0}, {1, 2}, {0, 1, 2}, {1, 2, 3}, {0, 3}], ids=str)
def test_layers_without_native_attention_are_called_one_by_one(make: Make, native: set[int]) -> None:
    model = make()
    model.native = native
    steps = model.fused()
    called = [step.args[-1] for step in steps if isinstance(step, Call)]
    assert set(range(4)) - native <= set(called)
    if not native:
        assert called == [0, 1, 2, 3] and kinds(steps).count("F") <= 1
    assert_unchanged(model, steps)


def test_a_timed_run_is_the_same_and_has_its_parts_in_order(make: Make) -> None:
    model = make()
    fused_steps = model.fused()
    (fused,) = (step for step in fused_steps if isinstance(step, Fused))
    timed: list[tuple[str, int]] = []

    def watched(arguments: list[Any]) -> Sequence[Any]:
        outputs, parts = fused.timed(arguments)
        timed.extend(parts)
        return outputs

    steps = [replace(step, function=watched) if isinstance(step, Fused) else step for step in fused_steps]
    assert torch.equal(model.run(steps, 5), model.run(model.steps, 5))
    labels, times = [label for label, _ in timed], [at for _, at in timed]
    assert labels.count("attention") == 4 and times == sorted(times)
    assert {label for label in labels if label not in fused.reads} == {"attention"}
    assert all(isinstance(x, Tensor) for reads in fused.reads.values() for x in reads)
