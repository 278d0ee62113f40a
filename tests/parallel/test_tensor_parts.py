"""A model in parts, one for each rank, computes what the whole computes."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from dense_attention import greedy, logits_of
from model_parts import filled, part_of
from safetensors.torch import load_file, save_file
from thread_group import ThreadGroup, in_ranks
from tiny_families import save_tiny
from tiny_models import CASES, STATEFUL, make_model, save
from transformers import LlamaConfig, LlamaForCausalLM

from engine.errors import ConfigError, WeightsError
from engine.models.decoder import Decoder
from engine.models.description import describe
from engine.models.mixers import MixerSpec
from engine.models.sharding import Shard, keys_of, queries_of, sharded
from engine.models.spec import MlpSpec
from engine.weights.loader import load_weights
from engine.weights.safetensors_source import SafetensorsSource

PROMPT = torch.randint(0, 199, (40,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.mark.parametrize(
    ("case", "size"),
    [
        *((case, 2 + index % 2) for index, case in enumerate((*CASES, "deepseek_v2", "deepseek_v3"))),
        *((case, 2) for case in STATEFUL),
        *(("lfm2", 3), ("qwen3_5_text", 3), ("qwen3_5_text", 4)),
    ],
)
def test_parts_give_the_logits_and_tokens_of_the_whole(case: str, size: int, tmp_path: Path) -> None:
    path = save(make_model(case), tmp_path)
    description = describe(path)
    whole = Decoder(description.spec, dtype=torch.float32)
    load_weights(whole, description)

    def work(group: ThreadGroup) -> tuple[torch.Tensor, list[int]]:
        model = part_of(path, group)
        return logits_of(model, PROMPT, (1, 17, 3)), greedy(model, PROMPT, 6)

    (logits, tokens), *others = in_ranks(size, work)
    near = 1e-3 if case in STATEFUL else 1e-4  # a recurrence carries what roundings differ by
    torch.testing.assert_close(logits, logits_of(whole, PROMPT), rtol=near, atol=near)
    assert tokens == greedy(whole, PROMPT, 6)
    for of_other, tokens_of_other in others:
        assert torch.equal(of_other, logits)
        assert tokens_of_other == tokens


def test_a_checkpoint_that_repeats_its_tied_head_is_read_in_parts(tmp_path: Path) -> None:
    path = save(make_model("llama_tied"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    [embedding] = (tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
    save_file({**tensors, "lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors", {"format": "pt"})
    in_ranks(2, lambda group: part_of(path, group))
    save_file({**tensors, "lm_head.weight": embedding + 1.0}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightsError, match=r"lm_head\.weight differs"):
        in_ranks(2, lambda group: part_of(path, group))


@pytest.mark.parametrize("tied", [True, False])
def test_each_rank_has_the_whole_of_a_head_made_of_rows_of_the_unembedding(tied: bool, tmp_path: Path) -> None:
    save_tiny("Qwen3", tmp_path, tie_word_embeddings=tied)
    file = tmp_path / "config.json"
    said = {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1, "classifier_from_token": [500, 7]}
    file.write_text(json.dumps({**json.loads(file.read_text()), **said}))
    whole = filled(str(tmp_path)).head
    assert whole is not None
    for head in in_ranks(2, lambda group: part_of(str(tmp_path), group).head):
        assert head is not None and torch.equal(head.out.weight, whole.out.weight)


@pytest.mark.parametrize(
    ("size", "message"),
    [(5, "exceeds the 4 heads of a layer"), (7, "199 tokens are too few"), (4, "an MLP of 48 units is divided in")],
)
def test_a_model_that_has_no_part_for_each_rank_is_refused(size: int, message: str, tmp_path: Path) -> None:
    spec = describe(save(make_model("llama_biases"), tmp_path)).spec
    assert spec is not None
    layer = msgspec.structs.replace(spec.layers[0], mlp=MlpSpec(intermediate_size=48 if size == 4 else 1600))
    with pytest.raises(ConfigError, match=message):
        sharded(msgspec.structs.replace(spec, layers=(layer,)), Shard(0, size))


@pytest.mark.parametrize("size", range(1, 13))
@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 12), (12, 4), (12, 3), (12, 1), (15, 5)])
def test_ranks_have_every_query_head_once_with_its_keys(heads: int, kv_heads: int, size: int) -> None:
    mixer = MixerSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=8, scale=1.0)
    found: list[int] = []
    for rank in range(size):
        queries, keys = queries_of(mixer, Shard(rank, size)), keys_of(mixer, Shard(rank, size))
        assert queries.count % keys.count == 0
        own = list(range(queries.first, queries.end))
        assert own
        assert {head * kv_heads // heads for head in own} == set(range(keys.first, keys.end))
        found += own
    assert found == list(range(heads))


def test_sixty_four_ranks_hold_every_weight_once_and_shared_keys_eight_times(tmp_path: Path) -> None:
    ranks = 64
    config = LlamaConfig(
        vocab_size=2080,
        hidden_size=64,
        intermediate_size=2048,
        num_hidden_layers=1,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=8,
        tie_word_embeddings=False,
    )
    reference = LlamaForCausalLM(config)
    path = save(reference, tmp_path)
    description = describe(path)
    assert description.spec is not None
    parts = []
    for rank in range(ranks):
        shard = Shard(rank, ranks)
        part = Decoder(sharded(description.spec, shard), dtype=torch.float32)
        load_weights(part, description, shard=shard)
        parts.append(part.state_dict())

    def joined(name: str, rows: slice = slice(None), dim: int = 0) -> torch.Tensor:
        return torch.cat([part[name][rows] for part in parts], dim=dim)

    own = reference.model.layers[0]
    assert torch.equal(joined("layers.0.qkv_proj.weight", slice(0, 8)), own.self_attn.q_proj.weight)
    keys = joined("layers.0.qkv_proj.weight", slice(8, 16)).unflatten(0, (8, 8, 8))
    assert torch.equal(keys, own.self_attn.k_proj.weight.unflatten(0, (8, 1, 8)).expand(8, 8, 8, 64))
    assert torch.equal(joined("layers.0.o_proj.weight", dim=1), own.self_attn.o_proj.weight)
    assert torch.equal(joined("layers.0.gate_up_proj.weight", slice(32, 64)), own.mlp.up_proj.weight)
    assert torch.equal(joined("layers.0.down_proj.weight", dim=1), own.mlp.down_proj.weight)
    assert torch.equal(joined("embed_tokens.weight"), reference.model.embed_tokens.weight)
    assert torch.equal(joined("lm_head.weight"), reference.lm_head.weight)
    assert {sharded(description.spec, Shard(rank, ranks)).facts.layers[0].num_heads for rank in range(ranks)} == {1}


def test_what_is_divided_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, read_into = list[str](), SafetensorsSource.read_into

    def watched(self: SafetensorsSource, name: str, destination: torch.Tensor, expert: int | None = None) -> None:
        read.append(name)
        read_into(self, name, destination, expert)

    monkeypatch.setattr(SafetensorsSource, "read_into", watched)
    description = describe(save(make_model("qwen2"), tmp_path))
    assert description.spec is not None
    shard = Shard(1, 2)
    load_weights(Decoder(sharded(description.spec, shard), dtype=torch.float32), description, shard=shard)
    assert read
    assert all("norm" in name for name in read)
