"""Experts that are whole in one rank each: ranks compute what the whole computes, and read no others' experts."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
import torch
from dense_attention import greedy, logits_of
from model_parts import filled, part_of
from thread_group import ThreadGroup, in_ranks
from tiny_models import MIXTURES, make_model, save
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from engine.errors import ConfigError
from engine.models.description import describe
from engine.models.expert_exchange import ExpertExchange, join_experts
from engine.models.placement import ExpertPlacement
from engine.models.sharding import Shard, check_divided, experts_of, sharded
from engine.models.spec import DecoderSpec
from engine.step import RoundEnd, RoundStart
from engine.weights.safetensors_source import SafetensorsSource

PROMPT = torch.randint(0, 199, (40,), generator=torch.Generator().manual_seed(7)).tolist()
SMALL = ("qwen3_moe", "glm4_moe_groups", "gpt_oss")
"""a tensor for each expert; groups, a correction and shared experts; stacked tensors with biases"""


def spec_of(path: str) -> DecoderSpec:
    spec = describe(path).spec
    assert spec is not None
    return spec


def scattered(spec: DecoderSpec, size: int, seed: int = 3) -> ExpertPlacement:
    """Any rank may have any of a layer's experts, and at least one."""
    chance = random.Random(seed)
    layers = []
    for layer in spec.layers:
        count = 0 if layer.experts is None else layer.experts.count
        ranks = [*range(size), *(chance.randrange(size) for _ in range(count - size))] if count else []
        chance.shuffle(ranks)
        layers.append(tuple(ranks))
    return ExpertPlacement(tuple(layers))


@pytest.mark.parametrize(
    ("case", "size"),
    [
        pytest.param(case, 2 + index % 2, marks=() if case in SMALL else pytest.mark.exhaustive)
        for index, case in enumerate(case for case in MIXTURES if case != "llama4_dense")
    ],
)
def test_parts_give_the_logits_and_tokens_of_the_whole(case: str, size: int, tmp_path: Path) -> None:
    path = save(make_model(case), tmp_path)
    if all(layer.experts is None for layer in spec_of(path).layers):
        pytest.skip("no experts")
    whole = filled(path)
    for placement in (ExpertPlacement(), scattered(spec_of(path), size)):

        def work(group: ThreadGroup, placement: ExpertPlacement = placement) -> tuple[torch.Tensor, list[int]]:
            model = part_of(path, group, placement)
            return logits_of(model, PROMPT, (1, 17, 3)), greedy(model, PROMPT, 6)

        (logits, tokens), *others = in_ranks(size, work)
        torch.testing.assert_close(logits, logits_of(whole, PROMPT), rtol=1e-4, atol=1e-4)
        assert tokens == greedy(whole, PROMPT, 6)
        for of_other, tokens_of_other in others:
            assert torch.equal(of_other, logits)
            assert tokens_of_other == tokens


@pytest.mark.parametrize("case", SMALL)
def test_replicas_compute_their_own_tokens_with_everybodys_experts(case: str, tmp_path: Path) -> None:
    """Of three, each has another prompt, and the last one has none."""
    path, prompts = save(make_model(case), tmp_path), (PROMPT, PROMPT[7:20], [])
    spec, whole = spec_of(path), filled(path)
    given = [0 if layer.experts is None else layer.experts.router.top_k for layer in spec.layers]
    for placement in (ExpertPlacement(), scattered(spec, 3)):

        def work(
            group: ThreadGroup, placement: ExpertPlacement = placement
        ) -> tuple[RoundEnd, torch.Tensor | None, list[list[int]]]:
            model = filled(path, Shard(group.rank, group.size, placement, only_experts=True))
            exchange = ExpertExchange(group, torch.float32, spec.num_layers)
            join_experts(model, exchange, placement, group.size)
            mine = prompts[group.rank]
            exchange.begin(RoundStart(False, 1), len(mine))
            logits, ended = logits_of(model, mine) if mine else None, exchange.end()
            for start, quiet, why in (
                (RoundStart(False, group.rank // 2), None, "one has seen another wake"),
                (RoundStart(group.rank == 1, 4), None, "one is busy"),
                (RoundStart(False, 4), 4, "none is"),
            ):
                exchange.begin(start, 0)
                assert exchange.end() == RoundEnd(quiet), why
            return ended, logits, exchange.loads()

        found = in_ranks(3, work)
        assert sum(ended.expert_tokens for ended, _, _ in found) == sum(map(len, prompts)) * sum(given)
        for prompt, (ended, logits, loads) in zip(prompts, found, strict=True):
            assert ended.quiet is None and (logits is None) == (not prompt)
            assert [sum(layer) for layer in loads] == [sum(map(len, prompts)) * top_k for top_k in given], "of all"
            if logits is not None:
                torch.testing.assert_close(logits, logits_of(whole, prompt), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", SMALL)
def test_every_expert_is_held_once_whoever_has_it(case: str, tmp_path: Path) -> None:
    path, size = save(make_model(case), tmp_path), 3
    whole, spec = filled(path).state_dict(), spec_of(path)
    for placement in (ExpertPlacement(), scattered(spec, size)):
        shards = [Shard(rank, size, placement) for rank in range(size)]
        parts = [filled(path, shard).state_dict() for shard in shards]
        for name in (name for name in whole if ".experts." in name and not name.endswith("places")):
            held = [
                (expert, part[name][own])
                for shard, part in zip(shards, parts, strict=True)
                for own, expert in enumerate(experts_of(spec, shard, int(name.split(".")[1])) or ())
            ]
            assert [expert for expert, _ in sorted(held, key=lambda each: each[0])] == list(range(len(whole[name])))
            assert all(torch.equal(of_rank, whole[name][expert]) for expert, of_rank in held)


def test_sixty_four_ranks_hold_a_hundred_experts_once(tmp_path: Path) -> None:
    ranks, experts = 64, 100
    config = Qwen3MoeConfig(
        vocab_size=2080,
        hidden_size=64,
        intermediate_size=2048,
        moe_intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=8,
        num_experts=experts,
        num_experts_per_tok=4,
    )
    path = save(Qwen3MoeForCausalLM(config), tmp_path)
    whole = filled(path).layers[0]
    parts = [filled(path, Shard(rank, ranks, ExpertPlacement())).layers[0] for rank in range(ranks)]
    for name in ("gate_up", "down"):
        held = [getattr(part.experts, name) for part in parts]
        assert [len(each) for each in held] == [2] * 36 + [1] * 28
        assert torch.equal(torch.cat(held), getattr(whole.experts, name)), "with all their inner units, few as they are"
    places = torch.stack([part.experts.places for part in parts])
    assert torch.equal((places >= 0).sum(0), torch.ones(experts, dtype=torch.int64))
    assert all(torch.equal(part.router.logits.weight, whole.router.logits.weight) for part in parts)


def _number(name: str) -> int:
    return int(name.split(".experts.")[1].split(".")[0])


@pytest.mark.parametrize("case", SMALL)
def test_others_experts_are_not_read(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, tensor = list[tuple[str, int | None]](), SafetensorsSource.tensor

    def watched(self: SafetensorsSource, name: str, index: int | None = None) -> torch.Tensor:
        read.append((name, index))
        return tensor(self, name, index)

    path = save(make_model(case), tmp_path)
    monkeypatch.setattr(SafetensorsSource, "tensor", watched)
    shard = Shard(1, 2, ExpertPlacement())
    filled(path, shard)
    spec = spec_of(path)
    own = {expert for layer in range(spec.num_layers) for expert in experts_of(spec, shard, layer) or ()}
    of_experts = [(name, index) for name, index in read if ".experts." in name]
    assert {_number(name) if index is None else index for name, index in of_experts} == own
    assert len(set(of_experts)) == len(of_experts), "each once"


def test_placements_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    spec = spec_of(save(make_model("glm4_moe"), tmp_path))
    counts = [0 if layer.experts is None else layer.experts.count for layer in spec.layers]
    assert counts[0] == 0 and set(counts[1:]) == {8}
    good = scattered(spec, 2)
    check_divided(spec, 2, good)
    with pytest.raises(ConfigError, match="8 experts are too few for 9 ranks"):
        good.check(counts, 9)
    with pytest.raises(ConfigError, match=f"is of 1 layers, and the model has {len(counts)}"):
        sharded(spec, Shard(0, 2, ExpertPlacement(((0, 1),))))
    for wrong, message in (
        ((0,) * 8, "layer 1 names the ranks \\[0\\]"),
        ((0, 1, 2, 0, 1, 0, 1, 0), "names the ranks \\[0, 1, 2\\]; each of 0 to 1"),
        ((0, 1), "layer 1 has 8 experts, 2 are placed"),
    ):
        ranks = (good.ranks[0], wrong, *good.ranks[2:])
        with pytest.raises(ConfigError, match=message):
            check_divided(spec, 2, ExpertPlacement(ranks))
    dense = msgspec.structs.replace(spec, layers=spec.layers[:1])
    with pytest.raises(ConfigError, match="enable_expert_parallel: the model has no experts"):
        check_divided(dense, 2, ExpertPlacement())


@pytest.mark.parametrize(("count", "size"), [(5, 2), (6, 3), (7, 3), (64, 64), (8, 1)])
def test_experts_are_divided_in_order_and_the_first_ranks_have_one_more(count: int, size: int) -> None:
    owned = [ExpertPlacement().own(0, count, rank, size) for rank in range(size)]
    assert [expert for own in owned for expert in own] == list(range(count))
    assert [len(own) for own in owned] == sorted((len(own) for own in owned), reverse=True)
    assert len(owned[0]) - len(owned[-1]) <= 1
