"""Which rank should have which expert of a mixture, so that all have as much to do with texts like yours?

Runs the model over the prompts of a file, a line each (empty ones are passed over), counts how many tokens every expert
of every layer is given, and writes the placement that balances them for `--expert-placement`. Prints
how much the busiest rank has to do, over the mean, in order and so placed, on these texts.

    python tools/place_experts.py MODEL PROMPTS.txt OUT.json --ranks 2 [--max-tokens 64]

Replicas that each have some experts count while they serve, and tell their logs as they end. From such a log, of its
last such line, without running the model:

    python tools/place_experts.py MODEL SERVER.log OUT.json --ranks 2 --log
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from engine import LLM, EngineArgs, SamplingParams
from engine.config import EngineConfig
from engine.core.in_process_client import InProcessClient
from engine.errors import EngineError
from engine.executor.inline import InlineExecutor
from engine.models.decoder import Decoder
from engine.models.decoder_layer import DecoderLayer
from engine.models.placement import ExpertPlacement, balanced, imbalance, write_placement
from engine.runner.loading import RunnerParts, load_parts
from engine.runner.model_runner import ModelRunner

_LOGGED = re.compile(r"expert loads of replica \d+: (\[\[.*?\]\])")


class Loads:
    """Tokens that each expert of each layer was given."""

    def __init__(self) -> None:
        self.of_layers: list[torch.Tensor] = []

    def load(self, config: EngineConfig) -> RunnerParts:
        """Parts of a runner whose routers are counted."""
        parts = load_parts(config)
        assert isinstance(parts.model, Decoder)
        for layer, spec in zip(parts.model.layers, parts.model.spec.layers, strict=True):
            assert isinstance(layer, DecoderLayer)
            self.of_layers.append(torch.zeros(0 if spec.experts is None else spec.experts.count, dtype=torch.int64))
            if layer.router is not None:
                layer.router.register_forward_hook(partial(self._count, len(self.of_layers) - 1))
        return parts

    def _count(self, layer: int, router: object, given: object, chosen: tuple[torch.Tensor, torch.Tensor]) -> None:
        own = self.of_layers[layer]
        own += torch.bincount(chosen[0].flatten().long(), minlength=len(own))


def loads_of(args: EngineArgs, prompts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Of each layer; none of a layer without experts."""
    loads = Loads()

    def executor(config: EngineConfig) -> InlineExecutor:
        return InlineExecutor(config, lambda config: ModelRunner.load(config, loads.load))

    with LLM.from_args(args, client_factory=partial(InProcessClient, executor=executor)) as llm:
        for own in loads.of_layers:
            own.zero_()  # what was seen while it started
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens), use_tqdm=False)
    return [own.tolist() for own in loads.of_layers]


def logged_loads(log: str) -> list[list[int]]:
    """Of each layer: of all replicas together, as the last one told."""
    told = _LOGGED.findall(log)
    if not told:
        raise SystemExit("the log has no line 'expert loads of replica ...': replicas tell them as they are shut down")
    loads: list[list[int]] = json.loads(told[-1])
    return loads


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--log", action="store_true", help="PROMPTS is the log of replicas that have served")
    given = parser.parse_args(argv)
    if given.ranks < 1:
        parser.error(f"--ranks must be at least 1, got {given.ranks}")
    args = EngineArgs(model=given.model, device="cpu", compile="none")
    try:
        text = given.prompts.read_text()
        prompts = [line for line in text.splitlines() if line.strip()]
        if not prompts:
            parser.error(f"{given.prompts} has no prompts")
        loads = logged_loads(text) if given.log else loads_of(args, prompts, given.max_tokens)
        placement = balanced(loads, given.ranks)
        write_placement(placement, given.out)
    except (EngineError, OSError, UnicodeDecodeError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    for name, each in (("in order", ExpertPlacement()), ("balanced", placement)):
        print(f"{name}: the busiest rank has {imbalance(each, loads, given.ranks):.3f} of the mean")


if __name__ == "__main__":
    main()
