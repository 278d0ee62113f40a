"""Hugging Face directories: sharded or not they load alike; what does not fit is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import WeightsError
from engine.models.decoder import Decoder
from engine.models.description import describe
from engine.models.families.registry import family_named
from engine.weights.loader import load_weights

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """What a checkpoint of the directory's config holds, random."""
    spec = describe(str(directory)).spec
    model = Decoder(spec, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn((rows.count, *model.get_parameter(rows.parameter).shape[1:]), generator=generator)
        for name, rows in family_named(spec.family).weight_rows(spec).items()
    }


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(tmp_path), tmp_path / "model.safetensors")
    return tmp_path


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    description = describe(str(directory))
    model = Decoder(description.spec, dtype=dtype)
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    assert load_weights(model, description) == sum(p.numel() for p in model.parameters()) * dtype.itemsize
    return model


def shard(directory: Path, wrong: dict[str, str] | None = None) -> None:
    content = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(content)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: content[name] for name in held}, directory / file)
    weight_map = {name: file for file, held in parts.items() for name in held} | (wrong or {})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def change(directory: Path, changes: dict[str, torch.Tensor | None]) -> None:
    content = {**load_file(directory / "model.safetensors"), **changes}
    save_file({name: value for name, value in content.items() if value is not None}, directory / "model.safetensors")


def test_parts_of_merged_parameters_land_in_their_rows(directory: Path) -> None:
    stored = load_file(directory / "model.safetensors")
    model = load(directory)
    layer = "model.layers.1."
    for target, sources in {
        "layers.1.qkv_proj.weight": [f"{layer}self_attn.{part}_proj.weight" for part in "qkv"],
        "layers.1.qkv_proj.bias": [f"{layer}self_attn.{part}_proj.bias" for part in "qkv"],
        "layers.1.gate_up_proj.weight": [f"{layer}mlp.gate_proj.weight", f"{layer}mlp.up_proj.weight"],
    }.items():
        assert torch.equal(model.get_parameter(target), torch.cat([stored[name] for name in sources]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sharded_checkpoint_loads_as_the_whole_one(directory: Path, dtype: torch.dtype) -> None:
    whole = load(directory, dtype)
    shard(directory)
    for (name, one), (_, other) in zip(whole.named_parameters(), load(directory, dtype).named_parameters()):
        assert torch.equal(one, other), name
        assert one.dtype == dtype
        assert one.isfinite().all(), name


def test_missing_extra_misshapen_and_integer_tensors_are_named(directory: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    original = load_file(directory / "model.safetensors")[name]
    change(directory, {name: None})
    with pytest.raises(WeightsError, match=rf"{name} is missing from .*model\.safetensors"):
        load(directory)
    change(directory, {name: torch.zeros(48, 31)})
    with pytest.raises(WeightsError, match=rf"\.safetensors: tensor {name} has shape \(48, 31\), expected \(48, 32\)"):
        load(directory)
    change(directory, {name: torch.zeros(48, 32, dtype=torch.int8)})
    with pytest.raises(WeightsError, match=f"{name} is stored as I8"):
        load(directory)
    change(directory, {name: original, "model.layers.2.mlp.up_proj.weight": torch.zeros(1)})
    with pytest.raises(WeightsError, match=r"layers\.2\.mlp\.up_proj\.weight is not part of a qwen2 model"):
        load(directory)
    change(directory, {"model.layers.2.mlp.up_proj.weight": None, "model.rotary_emb.inv_freq": torch.zeros(4)})
    load(directory)


def test_cut_files_and_files_that_the_index_misses_are_named(directory: Path) -> None:
    file = directory / "model.safetensors"
    content = file.read_bytes()
    for size in (0, 5, 100, len(content) - 1):
        file.write_bytes(content[:size])
        with pytest.raises(WeightsError, match=r"model\.safetensors.*damaged or cut short"):
            load(directory)
    file.write_bytes(content)
    shard(directory, {"model.norm.weight": "c.safetensors"})
    with pytest.raises(WeightsError, match=r"c\.safetensors.*missing"):
        load(directory)


def test_an_index_that_points_out_of_the_directory_or_at_the_wrong_shard_is_refused(directory: Path) -> None:
    content = (directory / "model.safetensors").read_bytes()
    shard(directory, {"model.norm.weight": "../outside.safetensors"})
    with pytest.raises(WeightsError, match="not a file of this directory"):
        load(directory)
    (directory / "model.safetensors").write_bytes(content)
    shard(directory, {"not.there": "a.safetensors"})
    with pytest.raises(WeightsError, match=r"not\.there is missing"):
        load(directory)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("[]", "holds list"),
        ("{}", "weight_map must be an object"),
        ('{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}', "'a' stands there twice"),
        ('{"weight_map": {"a": 5}}', r"weight_map\['a'\] is 5"),
        ('{"weight_map": {"a": {"b": []}}}', r"weight_map\['a'\]"),
        ('{"weight_map": {"a": ""}}', r"weight_map\['a'\]"),
        (r'{"weight_map": {"a": "\u0000.safetensors"}}', "safetensors"),
        (r'{"weight_map": {"a": "\ud83d.safetensors"}}', "safetensors"),
    ],
)
def test_an_absurd_index_is_refused_by_name(index: str, says: str, directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsError, match=says) as refused:
        load(directory)
    assert str(directory) in str(refused.value)


def test_a_directory_without_safetensors_is_refused(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="safetensors"):
        load(directory)


def test_a_tied_checkpoint_may_repeat_its_head_but_not_change_it(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    embedding = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    with pytest.raises(WeightsError, match=r"lm_head\.weight differs"):
        load(directory)
    change(directory, {"lm_head.weight": embedding.clone()})
    assert torch.equal(load(directory).lm_head.weight, embedding)
    change(directory, {"lm_head.weight": None})
    assert torch.equal(load(directory).lm_head.weight, embedding)


def test_dummy_weights_need_no_file_and_follow_the_seed(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    description = describe(str(directory))
    models = [Decoder(description.spec, dtype=torch.bfloat16) for _ in range(3)]
    for model, seed in zip(models, (4, 4, 5)):
        load_weights(model, description, load_format="dummy", seed=seed)
    first, same, other = ([p.float() for p in model.parameters()] for model in models)
    assert all(torch.equal(a, b) for a, b in zip(first, same))
    assert not all(torch.equal(a, b) for a, b in zip(first, other))
    assert all(0 < p.abs().max() <= 1 for p in first)
