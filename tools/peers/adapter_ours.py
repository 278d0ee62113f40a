"""This engine, in process, with the options of the doors."""

from __future__ import annotations

import argparse
import importlib.metadata
from typing import Any

from entrypoints.bench.metrics import Record
from entrypoints.bench.workloads import BenchRequest


def build_parser() -> argparse.ArgumentParser:
    from entrypoints.options import FlexibleArgumentParser, add_engine_options, add_model

    parser = FlexibleArgumentParser(prog="--ours", description="engine options")
    add_model(parser)
    add_engine_options(parser)
    return parser


def parse(arguments: list[str]) -> Any:
    """`EngineArgs` from `--option ... [MODEL]`; without a model, the demo model."""
    from entrypoints.options import engine_args

    options = build_parser().parse_args(arguments)
    return engine_args(options, options.model)


class Ours:
    def __init__(self, settings: dict[str, Any]) -> None:
        from engine import LLM

        self._served = False
        args = parse(settings["arguments"])
        self._llm = LLM.from_args(args)
        config, ready = self._llm.config, self._llm.ready
        self.versions = {name: importlib.metadata.version(name) for name in ("pageloom", "torch", "transformers")}
        self.facts = {
            "model": args.model,
            "dtype": config.model.dtype,
            "kv_cache_dtype": config.cache.dtype,
            "threads": config.device.threads,
            "kv_tokens": ready.num_blocks * ready.block_size,
            "attention_backend": ready.attention_backend,
            "ledger": ready.ledger,
        }

    def run(self, requests: list[BenchRequest]) -> tuple[list[Record], float, float]:
        from entrypoints.bench.offline import run_records

        if self._served:
            self._llm.wait_compiled()  # the first token may come before; what is measured is the steady state
        self._served = True
        return run_records(self._llm, requests, progress=False)


def load(settings: dict[str, Any]) -> Ours:
    return Ours(settings)
