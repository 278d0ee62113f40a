"""What a model needs and whether this machine has it, told before anything large is fetched or loaded.

The figures are estimates by the model's description (`engine.weights.sizes`, `engine.models.step_memory`), divided by
the memory ledger itself: what fits here fits when it is loaded, but for what attention, graphs and the allocator take
on a GPU. Which setting would help is found by trying.
"""

from __future__ import annotations

import logging
import os
import tempfile
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from engine.adapters.targets import table_bytes
from engine.config import EngineArgs, EngineConfig, Quantization
from engine.core.rounds import in_rounds
from engine.errors import ConfigError, UnsupportedModelError, WeightsError
from engine.hub import HubFile, HubName, beginning_of, fetched, free_disk, hub_name, offered, weights_of
from engine.kv_budget import DTYPE_BYTES, SequenceSizes, kv_bytes_per_token, sequence_sizes
from engine.kv_cache.ledger import MemoryLedger, human, memory_ledger
from engine.layer_groups import with_layers_behind
from engine.machine import Machine, main_memory, probe_machine
from engine.model_plan import ModelPlan, RankPlan
from engine.models.description import ModelDescription, describe
from engine.models.drafts import describe_draft
from engine.models.facts import ModelFacts
from engine.models.gguf_header import read_gguf_header
from engine.models.sharding import Shard
from engine.models.spec import DecoderSpec
from engine.models.stages import Stage, layers_of
from engine.models.step_memory import estimate_step_bytes, estimate_workspace_bytes
from engine.parallel_settings import crowded, held_by_one, placed, rank_specs
from engine.reports import LoadReport
from engine.resolve import keeps_stored, resolve, resolve_here
from engine.setting_checks import check_files, check_settings
from engine.speculation import speculation_of
from engine.weights.safetensors_headers import CheckpointHeaders
from engine.weights.sizes import Place, gguf_weight_bytes, mtp_weight_bytes, stored_weight_bytes, weight_bytes

logger = logging.getLogger(__name__)

_HEADS = (8 << 20, 64 << 20, 256 << 20)
"""bytes of a GGUF file in which its header is looked for"""
_LEAST_CONTEXT = 16
_CANDIDATES: tuple[dict[str, Any], ...] = (
    {"kv_cache_memory": None},
    {"kv_cache_dtype": "int8"},
    {"kv_cache_dtype": "fp8"},
    {"max_num_seqs": 16, "max_num_batched_tokens": 256},
    {"quantization": "int8"},
    {"quantization": "int4"},
    {"quantization": "int4", "kv_cache_dtype": "int8"},
)


class _Files(msgspec.Struct):
    """A model's description as far as it is here, and what the whole weighs."""

    path: str
    weights: list[HubFile]
    others: list[HubFile]


def plan_of(args: EngineArgs, machine: Machine | None = None, free_bytes: int | None = None) -> ModelPlan:
    """`machine` and `free_bytes`: another than this, and what of its memory nobody uses. Raises `ConfigError` and
    `UnsupportedModelError` for what is no model at all."""
    machine = probe_machine(args.device) if machine is None else machine
    check_settings(args, machine)
    check_files(args)
    on_gpu = args.device != "cpu" and bool(machine.cuda)
    total = machine.cuda[0].memory_bytes if on_gpu else machine.memory_bytes
    if free_bytes is None:
        free_bytes = total if on_gpu else min(main_memory()[1], total)
    with _described(args.model, args.revision, args) as files, _local_draft(args) as (local, draft):
        brought = (*files.weights, *files.others, *draft)
        missing = sum(each.size for each in brought if each.missing)
        plan = ModelPlan(
            model=args.model,
            device=machine.cuda[0].name if on_gpu else "cpu",
            file_bytes=sum(each.size for each in files.weights),
            download_bytes=missing,
            memory_total=total,
            memory_free=free_bytes,
        )
        local = replace(local, model=files.path)
        fit = _Fit(local, machine, total, free_bytes, plan.file_bytes if missing else None)
        try:
            _enter(plan, *(found := fit.of(local)))
            plan.ranks, plan.replicas = fit.ranks(found[0]), found[0].parallel.data
            plan.warnings += filter(None, [crowded(found[0], machine)])
        except ConfigError as error:
            plan.weight_bytes = fit.weights(local.dtype, local.quantization)
            plan.problems.append(f"{error} (its weights alone: {human(plan.weight_bytes)})")
            plan.advice += fit.advice()
        if files.weights and not missing and args.load_format == "auto":
            plan.problems += damage(files.path)
        if not files.weights and args.load_format == "auto":
            plan.problems.append(f"{files.path} holds no weights that are read (*.safetensors, or one .gguf file)")
    if missing:
        place, plan.disk_free = free_disk(args.download_dir)
        plan.disk_place = str(place)
        if missing > plan.disk_free:
            plan.problems.append(f"{place} has {human(plan.disk_free)} free: set HF_HOME or --download-dir")
    plan.fits = not plan.problems
    return plan


def damage(path: str) -> list[str]:
    """Files that are cut short, or stand for others that were never fetched."""
    if not os.path.isdir(path):
        return []  # a GGUF file, whose header has been read
    try:
        with CheckpointHeaders(path):
            return []
    except WeightsError as error:
        return [str(error)]


def _enter(plan: ModelPlan, config: EngineConfig, ledger: MemoryLedger, sizes: SequenceSizes) -> None:
    plan.dtype, plan.quantization, plan.kv_cache_dtype = config.model.dtype, config.model.quantization, sizes.dtype
    plan.weight_bytes, plan.kv_cache_bytes = ledger.weight_bytes, ledger.kv_bytes
    plan.kv_bytes_per_token = (
        kv_bytes_per_token(sizes.model.layers if sizes.model.keeps_kv else (), sizes.dtype, sizes.device)
        + sizes.draft_bytes
    )
    plan.num_blocks, plan.block_size, plan.max_model_len = ledger.num_blocks, ledger.block_size, ledger.max_model_len
    plan.sequences = round(ledger.num_blocks / ledger.sequence_blocks, 1)
    plan.table = ledger.table()


class _Fit:
    """One model on one machine, under settings that may change."""

    def __init__(self, args: EngineArgs, machine: Machine, total: int, free: int, absent_bytes: int | None) -> None:
        """`absent_bytes`: of weights that have not been downloaded."""
        self._absent_bytes = absent_bytes
        self._args, self._machine, self._total, self._free = args, machine, total, free
        self._model = describe(args.model, args.model_impl)
        self._header = read_gguf_header(args.model) if self._model.source == "gguf" else None
        kind = "cuda" if args.device != "cpu" and machine.cuda else "cpu"
        self._draft = describe_draft(speculation_of(args, kind), self._model)

    def of(self, args: EngineArgs) -> tuple[EngineConfig, MemoryLedger, SequenceSizes]:
        """Raises `ConfigError` where they do not hold together, or do not fit."""
        config = resolve(args, self._model, self._machine, None if self._draft is None else self._draft.facts)
        config = placed(config, args, self._model)
        sizes = sequence_sizes(config, self._model, None if self._draft is None else self._draft.facts)
        report = self._report(config, sizes)
        ledger = memory_ledger(
            load=report,
            cache=config.cache,
            scheduler=config.scheduler,
            device=config.device.kind,
            replicas=config.parallel.data,
        )
        return config, ledger, sizes

    def _report(self, config: EngineConfig, sizes: SequenceSizes) -> LoadReport:
        scheduler, length = config.scheduler, config.model.max_model_len
        ranks = self.ranks(config)
        weights = self.weights(config.model.dtype, config.model.quantization) + self._draft_weights(config)
        weights += self._table_bytes(config)
        activations = self._activations(config, self._model.facts)
        workspace = estimate_workspace_bytes(scheduler.max_num_seqs, length, sizes.blocks_of(length))
        block_bytes = sizes.block_bytes
        if ranks:
            # GPUs have a memory each, and ranks that others place may have a host each
            together = config.device.kind == "cpu" and config.parallel.backend == "mp"
            of_all = sum if together else max
            weights = of_all(rank.weight_bytes for rank in ranks)
            activations = of_all(rank.activation_bytes for rank in ranks)
            workspace = of_all([workspace] * len(ranks))
            block_bytes = block_bytes if together else -(-block_bytes // len(ranks))
        groups = sizes.groups
        if self._draft is not None:
            groups = with_layers_behind(groups, self._model.facts.num_layers, self._draft.spec.num_layers)
        return LoadReport(
            weight_bytes=weights,
            activation_bytes=activations,
            workspace_bytes=workspace,
            block_bytes=block_bytes,
            windows=tuple(group.window for group in groups),
            device_bytes_total=self._total,
            device_bytes_free=self._free,
            attention_backend="",
        )

    def _table_bytes(self, config: EngineConfig, part: int = 0, stage: Stage | None = None) -> int:
        """Of adapters, in one process or in one rank."""
        spec, parallel = self._model.spec, config.parallel
        if config.lora is None or spec is None:
            return 0
        shard = None if stage is None or parallel.tensor == 1 else Shard(part, parallel.tensor, parallel.experts)
        on_device = config.device.kind != "cpu"
        return table_bytes(spec, config.lora, DTYPE_BYTES[config.model.dtype], shard, stage, on_device)

    def ranks(self, config: EngineConfig) -> list[RankPlan]:
        """Where there are several; of a model that runs through the library's module nothing is told."""
        spec = self._model.spec
        if spec is None or config.parallel.ranks == 1:
            return []
        found = []
        for stage, part, own in rank_specs(spec, config):
            layers = layers_of(spec, stage)
            found.append(
                RankPlan(
                    stage=stage.index,
                    part=part,
                    layers=(layers.first, layers.end),
                    weight_bytes=self.weights(config.model.dtype, config.model.quantization, own)
                    + self._draft_weights(config)
                    + self._table_bytes(config, part, stage),
                    activation_bytes=self._activations(config, own.facts, stage.is_last),
                )
            )
        return found

    def _activations(self, config: EngineConfig, own: ModelFacts, makes_logits: bool = True) -> int:
        return estimate_step_bytes(
            config,
            own,
            makes_logits=makes_logits,
            whole=self._model.facts if config.parallel.context > 1 else None,
            exchanged=self._model.spec if in_rounds(config) else None,
            draft=None if self._draft is None else self._draft.facts,
        )

    def _draft_weights(self, config: EngineConfig) -> int:
        """Each rank has all of a draft."""
        if self._draft is None:
            return 0
        if self._draft.mtp is not None and config.model.quantization == "stored":
            return 0  # `weights` has counted all that the checkpoint holds
        packs = config.device.kind == "cpu" and config.model.dtype == "bfloat16"  # GPUs' drafts stay dense
        dtype_bytes = DTYPE_BYTES[config.model.dtype]
        of_draft = weight_bytes if self._draft.mtp is None else mtp_weight_bytes
        return of_draft(self._draft.spec, dtype_bytes, config.model.quantization, "cpu" if packs else None)

    def weights(self, dtype: str, quantization: str, part: DecoderSpec | None = None) -> int:
        """Their bytes, under settings ("auto" among them) or as they were resolved. `part`: what a rank has; of weights
        that run as they are stored as large a share as of the numbers."""
        on_cpu = self._args.device == "cpu" or not self._machine.cuda
        place: Place | None = "cpu" if on_cpu else "gpu"
        if dtype not in ("auto", "bfloat16") and (on_cpu or dtype != "float16"):
            place = None
        if self._model.spec is None:  # by the library's module: dense
            return self._model.facts.parameters * DTYPE_BYTES.get(dtype, 2)
        as_stored = self._args.load_format == "auto" and keeps_stored(quantization, self._model)
        if as_stored and place is not None and self._header is not None:
            return self._share(part, gguf_weight_bytes(self._header.tensors, self._model.spec, place))
        if as_stored and place is not None and self._model.quantized is not None:
            if self._absent_bytes is not None:
                return self._share(part, self._absent_bytes)  # nearly, unless no kernel multiplies what they hold
            stored = stored_weight_bytes(self._model.path, self._model.quantized, self._model.spec, place)
            return self._share(part, stored)
        kinds: dict[str, Quantization] = {"int8": "int8", "int4": "int4", "fp8": "fp8"}
        kind = kinds.get(quantization, "none")
        held = held_by_one(self._model.spec, self._args) if part is None else part
        return weight_bytes(held, DTYPE_BYTES.get(dtype, 2), kind, place)

    def _share(self, part: DecoderSpec | None, stored: int) -> int:
        if part is None or self._model.spec is None:
            return stored
        return stored * weight_bytes(part, 2, "none", None) // weight_bytes(self._model.spec, 2, "none", None)

    def advice(self) -> list[str]:
        """What would make it fit: one setting, or the longest context with or without another quantization."""
        found = [
            _as_options(change)
            for change in _CANDIDATES
            if any(getattr(self._args, name) != value for name, value in change.items()) and self._fits(change)
        ]
        for quantization in dict.fromkeys((self._args.quantization, "int8", "int4")):
            change = {"quantization": quantization}
            if self._fits(change):  # without a shorter context
                break
            length = self._longest(change)
            if length is not None:
                own = {} if quantization == self._args.quantization else change
                found.append(_as_options({**own, "max_model_len": length}))
                break
        return list(dict.fromkeys(found))

    def _fits(self, change: dict[str, Any]) -> bool:
        try:
            self.of(replace(self._args, **change))
        except ConfigError:
            return False
        return True

    def _longest(self, change: dict[str, Any]) -> int | None:
        """Context below the one that is asked for."""
        asked = self._args.max_model_len or self._model.max_position
        lengths = range(_LEAST_CONTEXT, asked, _LEAST_CONTEXT)
        place = bisect_left(lengths, True, key=lambda length: not self._fits({**change, "max_model_len": length}))
        return lengths[place - 1] if place else None


def _as_options(change: dict[str, Any]) -> str:
    """`--quantization int8`"""
    shown = []
    for name, value in change.items():
        flag = "--" + name.replace("_", "-")
        shown.append(f"no {flag}" if value is None else f"{flag} {value}")
    return " ".join(shown)


@contextmanager
def _local_draft(args: EngineArgs) -> Iterator[tuple[EngineArgs, list[HubFile]]]:
    """With a path in place of a draft's name, and the draft's files where it had one."""
    model = str(args.speculative_config.get("model", ""))
    if not model or hub_name(model) is None:
        yield args, []
        return
    with _described(model, None, args) as files:
        speculative = {**args.speculative_config, "model": files.path}
        yield replace(args, speculative_config=speculative), [*files.weights, *files.others]


@contextmanager
def _described(model: str, revision: str | None, args: EngineArgs) -> Iterator[_Files]:
    """Only texts, and the beginning of a GGUF file, are brought here."""
    name = hub_name(model)
    if name is None:
        path = Path(model).expanduser()
        found = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        yield _Files(str(path), [_local(each) for each in found], [])
        return
    files = offered(name, revision=revision, cache_dir=args.download_dir)
    weights = weights_of(files)
    others = [each for each in files if each not in weights]
    if not weights or not weights[0].name.endswith(".gguf"):
        place = fetched(name, revision=revision, cache_dir=args.download_dir, memory_bytes=None)
        yield _Files(place, weights, others)
    elif not weights[0].missing:
        place = fetched(name, revision=revision, cache_dir=args.download_dir, memory_bytes=weights[0].size)
        yield _Files(place, weights, others)
    else:
        with tempfile.TemporaryDirectory(prefix="pageloom-plan-") as folder:
            path = Path(folder) / weights[0].name
            _bring_header(name, weights[0], path, revision)
            yield _Files(str(path), weights, others)


def _local(file: Path) -> HubFile:
    """Raises `ConfigError`."""
    try:
        return HubFile(file.name, file.stat().st_size, False)
    except OSError as error:
        what = "it is a link to a file that is gone" if file.is_symlink() else error.strerror or str(error)
        raise ConfigError(f"{file}: {what}: fetch the model again") from error


def _bring_header(name: HubName, file: HubFile, path: Path, revision: str | None) -> None:
    """A file of the same length with nothing behind its header. Raises `ConfigError`, `WeightsError`."""
    for num_bytes in _HEADS:
        path.write_bytes(beginning_of(name, file, min(num_bytes, file.size), revision=revision))
        os.truncate(path, file.size)  # sparse
        try:
            describe(str(path))
        except (ConfigError, UnsupportedModelError, WeightsError):
            if num_bytes >= min(_HEADS[-1], file.size):
                raise
        else:
            return


def resolve_with_plan(args: EngineArgs) -> tuple[ModelDescription, EngineConfig]:
    """As `resolve_here`; where weights are to be fetched, their plan is logged before."""
    if hub_name(args.model) is not None:
        try:
            plan = plan_of(args)
        except (ConfigError, UnsupportedModelError, WeightsError):
            pass  # said with more of a cause by what follows
        else:
            if plan.download_bytes:
                logger.log(logging.INFO if plan.fits else logging.WARNING, "before it is fetched:\n%s", plan.text())
    return resolve_here(args)
