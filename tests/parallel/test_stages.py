"""A model in stages: each weight in one of them, and together the bits of the whole."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from dense_attention import bind, logits_of
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import CASES, STATEFUL, make_model, save

from engine.errors import ConfigError, UnsupportedModelError, WeightsError
from engine.layer_groups import Kept, group_layers
from engine.models.decoder import Decoder
from engine.models.description import describe
from engine.models.mixers import MixerSpec
from engine.models.sharding import Span
from engine.models.spec import DecoderSpec, LayerSpec, MlpSpec, layer_weights
from engine.models.stages import Stage, check_stages, layers_of, stage_groups, stage_of
from engine.weights.loader import load_weights
from engine.weights.safetensors_source import SafetensorsSource

PROMPT = torch.randint(0, 199, (40,), generator=torch.Generator().manual_seed(7)).tolist()


def loaded(path: str, stage: Stage | None = None) -> Decoder:
    description = describe(path)
    assert description.spec is not None
    spec = description.spec if stage is None else stage_of(description.spec, stage)
    model = Decoder(spec, dtype=torch.float32)
    load_weights(model, description, stage=stage)
    return model


def logits_in_stages(stages: list[Decoder], token_ids: list[int], chunks: tuple[int, ...]) -> torch.Tensor:
    for model in stages:
        bind(model)
    ids, at, parts = torch.tensor(token_ids), 0, []
    for size in (*chunks, len(token_ids) - sum(chunks)):
        states = ids[at : at + size]
        for model in stages:
            states = model(states, torch.arange(at, at + size))
        parts.append(stages[-1].compute_logits(states))
        at += size
    return torch.cat(parts)


@pytest.mark.parametrize("case", [*CASES, *STATEFUL])
def test_stages_give_the_bits_of_the_whole_and_hold_each_weight_once(case: str, tmp_path: Path) -> None:
    path = save(make_model(case), tmp_path)
    spec = describe(path).spec
    assert spec is not None
    try:
        check_stages(spec, 2)
    except UnsupportedModelError as error:
        assert case.startswith(("gemma4", "falcon_h1"))
        assert "pipeline_parallel_size (2)" in str(error)
        return
    whole = loaded(path)
    stages = [loaded(path, Stage(index, 2)) for index in range(2)]
    expected = logits_of(whole, PROMPT, (1, 17, 3))
    assert torch.equal(logits_in_stages(stages, PROMPT, (1, 17, 3)), expected)
    names = sorted(name for name, _ in whole.named_parameters())
    first = layers_of(spec, Stage(0, 2)).count
    found = []
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            kind, _, rest = name.partition(".")
            if kind == "layers":
                layer, _, rest = rest.partition(".")
                name = f"layers.{int(layer) + first * index}.{rest}"
            if index and name == "lm_head.weight" and spec.tie_embeddings:
                assert torch.equal(parameter, whole.get_parameter("embed_tokens.weight"))
                continue
            assert torch.equal(parameter, whole.get_parameter(name))
            found.append(name)
    assert sorted(found) == names


def deep(layers: int, tied: bool, tmp_path: Path) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=199,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    return save(LlamaForCausalLM(config), tmp_path)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("count", [3, 5, 7])
def test_more_stages_give_the_bits_of_the_whole(count: int, tied: bool, tmp_path: Path) -> None:
    path = deep(7, tied, tmp_path)
    stages = [loaded(path, Stage(index, count)) for index in range(count)]
    assert torch.equal(logits_in_stages(stages, PROMPT, (5,)), logits_of(loaded(path), PROMPT, (5,)))


def test_a_stage_reads_nothing_of_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read, read_into = deep(4, True, tmp_path), list[str](), SafetensorsSource.read_into

    def watched(self: SafetensorsSource, name: str, destination: torch.Tensor, expert: int | None = None) -> None:
        read.append(name)
        read_into(self, name, destination, expert)

    monkeypatch.setattr(SafetensorsSource, "read_into", watched)
    of_each = []
    for index in range(3):
        read.clear()
        loaded(path, Stage(index, 3))
        of_each.append(set(read))
    first, middle, last = of_each
    assert first & last == {"model.embed_tokens.weight"}
    assert not middle & (first | last)
    assert first | middle | last == set(load_file(Path(path) / "model.safetensors"))


def test_a_tied_head_that_is_stored_again_is_compared_by_the_first_stage(tmp_path: Path) -> None:
    path = deep(2, True, tmp_path)
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, file, {"format": "pt"})
    for index in range(2):
        loaded(path, Stage(index, 2))
    save_file({**tensors, "lm_head.weight": embedding + 1.0}, file, {"format": "pt"})
    with pytest.raises(WeightsError, match=r"lm_head\.weight differs"):
        loaded(path, Stage(0, 2))
    save_file({**tensors, "model.layers.0.unknown": embedding.clone()}, file, {"format": "pt"})
    for index in range(2):
        with pytest.raises(WeightsError, match="not part of"):
            loaded(path, Stage(index, 2))


def spec_of(units: list[int], vocab_size: int, shares: dict[int, int] | None = None) -> DecoderSpec:
    def layer(index: int, inner: int) -> LayerSpec:
        mixer = MixerSpec(num_heads=1, num_kv_heads=1, head_dim=8, scale=1.0, shares=(shares or {}).get(index))
        return LayerSpec(mixer=mixer, mlp=MlpSpec(intermediate_size=inner))

    layers = tuple(layer(index, inner) for index, inner in enumerate(units))
    return DecoderSpec(
        family="llama", vocab_size=vocab_size, hidden_size=8, layers=layers, norm_eps=1e-5, max_position=64
    )


@given(units=st.lists(st.integers(1, 60), min_size=1, max_size=12), vocab_size=st.integers(1, 500), data=st.data())
def test_layers_are_divided_by_what_they_cost(units: list[int], vocab_size: int, data: st.DataObject) -> None:
    spec = spec_of(units, vocab_size)
    count = data.draw(st.integers(1, len(units)))
    spans = [layers_of(spec, Stage(index, count)) for index in range(count)]
    assert [layer for span in spans for layer in range(span.first, span.end)] == list(range(len(units)))
    assert all(span.count for span in spans)
    costs = [layer_weights(spec, layer) for layer in spec.layers]
    costs[-1] += vocab_size * 8 // 2
    most = max(sum(costs[span.first : span.end]) for span in spans)
    assert most == least_bottleneck(tuple(costs), count)


def least_bottleneck(costs: tuple[int, ...], count: int) -> int:
    best = {(0, 0): 0}
    for stages in range(1, count + 1):
        for end in range(stages, len(costs) + 1):
            found = [
                max(best[stages - 1, begin], sum(costs[begin:end]))
                for begin in range(end)
                if (stages - 1, begin) in best
            ]
            best[stages, end] = min(found)
    return best[count, len(costs)]


@given(kinds=st.lists(st.sampled_from([None, 16, 64]), min_size=2, max_size=12), data=st.data())
def test_groups_are_those_of_the_whole_model_with_the_layers_of_the_stage(
    kinds: list[int | None], data: st.DataObject
) -> None:
    groups = group_layers([Kept(window, data.draw(st.sampled_from([8, 16]))) for window in kinds], 4096)
    border = data.draw(st.integers(1, len(kinds) - 1))
    first, second = (stage_groups(groups, own) for own in (Span(0, border), Span(border, len(kinds) - border)))
    for whole, ahead, behind in zip(groups, first, second, strict=True):
        assert (*ahead.layers, *(layer + border for layer in behind.layers)) == whole.layers
        assert ahead.window == behind.window == whole.window
        assert ahead.together == behind.together == whole.together


def test_what_is_not_divided_is_refused_by_name() -> None:
    spec = spec_of([8, 8, 8], 16)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size \(4\) exceeds the 3 layers"):
        check_stages(spec, 4)
    with pytest.raises(UnsupportedModelError, match="runs through the library"):
        check_stages(None, 2)
    with pytest.raises(UnsupportedModelError, match="an encoder"):
        check_stages(msgspec.structs.replace(spec, causal=False), 2)
    with pytest.raises(UnsupportedModelError, match="layer 2 reads the keys of layer 0"):
        check_stages(spec_of([8, 8, 8], 16, {2: 0}), 3)
    check_stages(spec_of([8, 8, 8], 16, {2: 1}), 2)
    check_stages(None, 1)
