"""An engine in this process whose core and runner tell a recorder what they do, and which weights each part reads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from engine.config import EngineArgs, EngineConfig
from engine.core.client import InProcessClient
from engine.errors import ConfigError, EngineError
from engine.executor.inline import local_executor
from engine.kv_budget import kv_bytes_per_token
from engine.llm import LLM
from engine.models.experts import Experts, Router
from engine.models.facts import ModelFacts
from engine.models.packed_experts import PackedExperts
from engine.models.rope import RopeTable
from engine.observability.step_profile import Recorder
from engine.observability.step_work import Ceilings, ModelWeights, StepWork, Weight
from engine.runner.loading import RunnerParts, load_parts
from engine.runner.model_runner import ModelRunner
from entrypoints.bench.profile_device import CudaClock, measure_ceilings

_TABLES = ("embed_tokens", "ropes")
"""of these a token reads one row"""
_LOGITS = "lm_head"
_QUANTISED_BELOW = 0.75
"""of the bytes that a matrix would take in the model's dtype: packing pads a little, quantising saves at least a
third"""


class ProfiledEngine:
    """`llm` serves as ever; while `recorder.active`, its steps are recorded. Use it as a context manager."""

    def __init__(self, args: EngineArgs) -> None:
        """Raises `ConfigError` for several ranks or replicas, and what `LLM` raises."""
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(args, name) > 1:
                raise ConfigError(f"{name}: what is profiled is a model that one rank computes; leave it out")
        if args.data_parallel_size > 1:
            raise ConfigError("data_parallel_size: what is profiled is one replica; leave it out")
        self._runner: ModelRunner | None = None
        self._parts: RunnerParts | None = None
        self._pieces: dict[str, list[Weight]] = {}
        self._by_address: dict[int, Weight] = {}
        self.recorder: Recorder
        self._client: InProcessClient
        self.llm = LLM.from_args(args, client_factory=self._make_client)
        self._client.wait_compiled()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.llm.shutdown()

    @property
    def facts(self) -> ModelFacts:
        return self._loaded()[1].facts

    def step_work(self) -> StepWork:
        """For the steps from now on; the engine must be idle. Pieces are known once a watched step has run."""
        _, parts = self._loaded()
        weights = list(_weights(parts))
        block_size = self.llm.config.cache.block_size
        return StepWork(
            parts.facts,
            ModelWeights(
                pieces=self._pieces,
                model=[weight for weight in weights if not weight.name.startswith(_LOGITS)],
                logits=_unembedding(weights, parts),
            ),
            block_size=block_size,
            kv_token_bytes=kv_bytes_per_token(parts.facts.layers, self.llm.config.cache.dtype),
            attention_dtype=_name(parts.dtype),
        )

    def piece_name(self, part: str) -> str:
        """A piece by the matrices that it reads: "o + gate_up + down + qkv"."""
        names: dict[str, None] = {}
        for weight in self._pieces.get(part, ()):
            if weight.ops_per_token and (name := _layer_name(weight.name)):
                names[name.removesuffix("_proj")] = None
        return " + ".join(names) or part

    def measure_ceilings(self) -> Ceilings:
        runner, parts = self._loaded()
        dtypes = {_name(parts.dtype), *(weight.ops_dtype for weight in _weights(parts) if weight.ops_dtype)}
        config = self.llm.config
        device = torch.device(config.device.kind, config.device.index) if config.device.kind == "cuda" else "cpu"
        measure = partial(
            measure_ceilings,
            torch.device(device),
            config.device.threads,
            runner.report.weight_bytes,
            dtypes,
            Path(config.compile.cache_dir),
        )
        with ThreadPoolExecutor(1) as short_lived:  # its OpenMP threads end with it
            return short_lived.submit(measure).result()

    def _make_client(self, config: EngineConfig) -> InProcessClient:
        self.recorder = Recorder(device=CudaClock() if config.device.kind == "cuda" else None)
        self.recorder.on_first_call = self._examine
        self._client = InProcessClient(
            config, executor=lambda config: local_executor(config, self._load), observer=self.recorder
        )
        return self._client

    def _load(self, config: EngineConfig) -> ModelRunner:
        def parts(config: EngineConfig) -> RunnerParts:
            self._parts = load_parts(config)
            return self._parts

        self._runner = ModelRunner.load(config, parts)
        self._by_address = {}
        for weight, tensor in _tensors(self._parts):
            self._by_address.setdefault(tensor.data_ptr(), weight)
        self._runner.observe(self.recorder)
        return self._runner

    def _examine(self, part: str, arguments: list[Any]) -> None:
        """Which weights a piece reads: those of the model that are among its arguments."""
        addresses = {a.data_ptr(): None for a in arguments if isinstance(a, torch.Tensor)}
        self._pieces[part] = [self._by_address[a] for a in addresses if a in self._by_address]

    def _loaded(self) -> tuple[ModelRunner, RunnerParts]:
        if self._runner is None or self._parts is None:
            raise EngineError("the engine is not loaded")
        return self._runner, self._parts


def _weights(parts: RunnerParts) -> Iterator[Weight]:
    for weight, _ in _tensors(parts):
        yield weight


def _tensors(parts: RunnerParts | None) -> Iterator[tuple[Weight, torch.Tensor]]:
    """Every tensor of the model once, by its first name, with what a matrix product of it costs."""
    if parts is None or not isinstance(parts.model, nn.Module):
        return
    seen = set()
    for path, module in parts.model.named_modules():
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                yield _weight(f"{path}.{name}".strip("."), tensor, module, parts), tensor


def _weight(name: str, tensor: torch.Tensor, module: nn.Module, parts: RunnerParts) -> Weight:
    if isinstance(module, (Experts, PackedExperts)) and name.endswith((".gate_up", ".down")):
        return _experts(name, tensor, module, parts)
    rows = next((_rows(tensor, parts.facts, table) for table in _TABLES if table in name.split(".")), None)
    shape: tuple[int, ...]
    n, k = getattr(module, "n", None), getattr(module, "k", None)
    if isinstance(n, int) and isinstance(k, int):  # packed: its shape says nothing of the matrix
        shape = (n, k) if name.endswith(".weight") else ()
    else:
        shape = tuple(tensor.shape) if tensor.dim() == 2 else ()
    if len(shape) != 2 or isinstance(module, RopeTable):
        return Weight(name=name, size_bytes=tensor.nbytes, rows=rows)
    ops = 2.0 * shape[0] * shape[1]
    dtype = _multiplied_in(tensor.nbytes, ops, parts.dtype)
    return Weight(name=name, size_bytes=tensor.nbytes, rows=rows, ops_per_token=ops, ops_dtype=dtype)


def _experts(name: str, tensor: torch.Tensor, module: Experts | PackedExperts, parts: RunnerParts) -> Weight:
    """All experts of a layer, of which each token has a few; what no router is beside is every token's."""
    assert isinstance(parts.model, nn.Module)
    layer = parts.model.get_submodule(name.rsplit(".", 2)[0])
    tops = [each.spec.top_k for each in layer.children() if isinstance(each, Router)]
    if isinstance(module, PackedExperts):
        gated = 2 if name.endswith(".gate_up") else 1
        elements = gated * module.inner * parts.facts.hidden_size
    else:
        elements = tensor[0].numel()
    count = tensor.shape[0]
    top_k = min([*tops, count])
    ops, chosen = 2.0 * elements * top_k, top_k / count
    dtype = _multiplied_in(tensor.nbytes, 2.0 * elements * count, parts.dtype)
    return Weight(name=name, size_bytes=tensor.nbytes, ops_per_token=ops, ops_dtype=dtype, chosen=chosen)


def _multiplied_in(size_bytes: int, ops: float, dtype: torch.dtype) -> str:
    """Quantised weights meet activations of eight bits."""
    return "int8" if size_bytes < _QUANTISED_BELOW * ops / 2 * dtype.itemsize else _name(dtype)


def _rows(tensor: torch.Tensor, model: ModelFacts, table: str) -> int:
    return tensor.shape[0] if table == "ropes" else model.vocab_size


def _unembedding(weights: list[Weight], parts: RunnerParts) -> list[Weight]:
    """The matrix that makes logits; with tied embeddings it is the table of tokens, read whole."""
    own = [weight for weight in weights if weight.name.startswith(_LOGITS)]
    tied = [weight for weight in weights if weight.name.startswith(_TABLES[0])]
    ops = 2.0 * parts.facts.vocab_size * parts.facts.hidden_size
    return [
        Weight(
            name=weight.name,
            size_bytes=weight.size_bytes,
            ops_per_token=ops,
            ops_dtype=_multiplied_in(weight.size_bytes, ops, parts.dtype),
        )
        for weight in own or tied
    ]


def _layer_name(name: str) -> str:
    """ "layers.3.qkv_proj.parts.0.weight" → "qkv_proj" """
    return next((part for part in name.split(".") if not part.isdigit() and part != "layers"), "")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
