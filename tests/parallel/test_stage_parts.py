"""Stages of which several ranks compute parts: the bits of parts without stages, and every weight in its place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dense_attention import logits_of
from model_parts import filled, part_of
from test_stages import PROMPT, logits_in_stages
from thread_group import ThreadGroup, in_ranks
from tiny_models import CASES, STATEFUL, make_model, save
from transformers import LlamaConfig, LlamaForCausalLM

from engine.errors import UnsupportedModelError
from engine.models.description import describe
from engine.models.placement import balanced
from engine.models.sharding import Shard
from engine.models.stages import Stage, check_stages, layers_of
from engine.parallel.stage_group import Place, place_of_rank


@pytest.mark.parametrize("case", [*CASES, "deepseek_v3", *STATEFUL])
def test_parts_of_stages_give_the_bits_of_parts(case: str, tmp_path: Path) -> None:
    path = save(make_model(case), tmp_path)
    spec = describe(path).spec
    try:
        check_stages(spec, 2)
    except UnsupportedModelError:
        assert case.startswith("gemma4")
        return

    def work(group: ThreadGroup) -> tuple[torch.Tensor, torch.Tensor]:
        stages = [part_of(path, group, stage=Stage(index, 2)) for index in range(2)]
        return logits_in_stages(stages, PROMPT, (1, 17)), logits_of(part_of(path, group), PROMPT, (1, 17))

    for in_stages, expected in in_ranks(2, work):
        assert torch.equal(in_stages, expected)


def test_experts_that_are_placed_are_placed_by_the_layers_of_the_whole(tmp_path: Path) -> None:
    path = save(make_model(next(each for each in CASES if each.startswith("qwen3_moe"))), tmp_path)
    spec = describe(path).spec
    assert spec is not None
    counts = [0 if layer.experts is None else layer.experts.count for layer in spec.layers]
    placement = balanced(
        [[(7 * layer + 3 * each) % 11 for each in range(count)] for layer, count in enumerate(counts)], 2
    )

    def work(group: ThreadGroup) -> tuple[torch.Tensor, torch.Tensor]:
        stages = [part_of(path, group, placement, Stage(index, 2)) for index in range(2)]
        return logits_in_stages(stages, PROMPT, (5,)), logits_of(part_of(path, group, placement), PROMPT, (5,))

    for in_stages, expected in in_ranks(2, work):
        assert torch.equal(in_stages, expected)


def test_eight_stages_of_eight_parts_hold_every_weight_of_a_part_once(tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=520,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=9,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=8,
        tie_word_embeddings=False,
    )
    path = save(LlamaForCausalLM(config), tmp_path)
    spec = describe(path).spec
    assert spec is not None
    firsts = [layers_of(spec, Stage(index, 8)).first for index in range(8)]
    for part in range(8):
        whole = filled(path, Shard(part, 8)).state_dict()
        found: dict[str, torch.Tensor] = {}
        for index, first in enumerate(firsts):
            for name, tensor in filled(path, Shard(part, 8), Stage(index, 8)).state_dict().items():
                kind, _, rest = name.partition(".")
                if kind == "layers":
                    layer, _, rest = rest.partition(".")
                    name = f"layers.{int(layer) + first}.{rest}"
                assert name not in found
                found[name] = tensor
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


def test_rank_0_has_the_first_part_of_the_last_stage_and_every_place_is_taken_once() -> None:
    assert place_of_rank(0, 3, 2) == Place(Stage(2, 3), 0)
    assert [place_of_rank(rank, 3, 2)[:] for rank in (1, 2, 5)] == [
        (Stage(2, 3), 1),
        (Stage(0, 3), 0),
        (Stage(1, 3), 1),
    ]
    for stages, parts in ((1, 4), (4, 1), (8, 8)):
        places = {place_of_rank(rank, stages, parts) for rank in range(stages * parts)}
        assert places == {Place(Stage(index, stages), part) for index in range(stages) for part in range(parts)}
