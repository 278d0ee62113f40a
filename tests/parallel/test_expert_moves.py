"""Experts that move between ranks while they compute: maps and weights change together, and results do not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from dense_attention import logits_of
from model_parts import filled
from test_expert_parts import PROMPT, SMALL, scattered, spec_of
from thread_group import ThreadGroup, in_ranks
from tiny_models import make_model, save

from engine.models.expert_exchange import DividedExperts, ExpertExchange, join_experts
from engine.models.placement import ExpertPlacement, imbalance
from engine.models.sharding import Shard
from engine.parallel_config import EplbConfig
from engine.step import RoundStart

EVERY = EplbConfig(window_size=2, step_interval=3, log_balancedness=True)


@pytest.mark.parametrize("case", SMALL)
def test_weights_and_maps_move_together(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path, size = save(make_model(case), tmp_path), 3
    spec, whole = spec_of(path), filled(path)
    expected, placement = logits_of(whole, PROMPT), scattered(spec, size)
    of_whole = whole.state_dict()

    def work(group: ThreadGroup) -> tuple[list[list[int]], list[list[int]], int]:
        model = filled(path, Shard(group.rank, size, placement, only_experts=True))
        exchange = ExpertExchange(group, torch.float32, spec.num_layers)
        join_experts(model, exchange, placement, size)
        exchange.move(EVERY)
        came = 0
        for _ in range(7):
            exchange.begin(RoundStart(False, 1), len(PROMPT))
            torch.testing.assert_close(logits_of(model, PROMPT), expected, rtol=1e-4, atol=1e-4)
            came += exchange.end().experts_moved
        ranks: list[list[int]] = []
        for index, layer in enumerate(model.layers):
            if not isinstance(layer.experts, DividedExperts):
                ranks.append([])
                continue
            divided = exchange._layers[index]
            ranks.append(divided.ranks.tolist())
            places = divided.part.places
            assert places is not None
            assert [rank == group.rank for rank in ranks[-1]] == (places >= 0).tolist()
            for name, stack in divided.part.state_dict().items():
                if name != "places":
                    assert all(
                        torch.equal(stack[place], of_whole[f"layers.{index}.experts.{name}"][expert])
                        for expert, place in enumerate(places.tolist())
                        if place >= 0
                    )
        return ranks, exchange.loads(), came

    found = in_ranks(size, work)
    ranks, loads, _ = found[0]
    assert all(each[:2] == (ranks, loads) for each in found)
    assert sum(came for *_, came in found) > 0
    moved = ExpertPlacement(tuple(tuple(layer) for layer in ranks))
    assert imbalance(moved, loads, size) < imbalance(placement, loads, size)
    assert [sorted(layer) for layer in ranks] == [sorted(layer) for layer in placement.ranks], "as many each"
    assert "expert balancedness (mean of replicas over the busiest) of 2 steps: 0." in caplog.text


def test_a_window_begins_so_many_rounds_before_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads of earlier rounds do not count; moves that are too large for one round go on in the next ones."""
    path = save(make_model("qwen3_moe"), tmp_path)
    spec = spec_of(path)
    monkeypatch.setattr("engine.models.expert_moves._ROUND_BYTES", 1)
    seen: list[list[int]] = []
    monkeypatch.setattr(
        "engine.models.expert_moves.exchanges", lambda ranks, loads, size: seen.append(loads) or [(0, len(loads) - 1)]
    )

    def work(group: ThreadGroup) -> list[int]:
        model = filled(path, Shard(group.rank, 2, ExpertPlacement(), only_experts=True))
        exchange = ExpertExchange(group, torch.float32, spec.num_layers)
        join_experts(model, exchange, ExpertPlacement(), 2)
        exchange.move(EplbConfig(window_size=1, step_interval=4))
        came = []
        for length in (9, 8, 7, 6, 5, 4):
            exchange.begin(RoundStart(True, 1), length)
            logits_of(model, PROMPT[:length])
            came.append(exchange.end().experts_moved)
            exchange.begin(RoundStart(True, 1), 0)  # in which nobody computes
        return came

    layers = len([layer for layer in spec.layers if layer.experts is not None])
    assert layers >= 2
    assert in_ranks(2, work) == [[0, 0, 0, 1, 1, 1 if layers > 2 else 0]] * 2
    top_k = next(layer.experts.router.top_k for layer in spec.layers if layer.experts is not None)
    assert {sum(loads) for loads in seen} == {2 * 7 * top_k}, "of both ranks, in the round before"
