"""One pure function from what the user set to what the rooms receive. Every contradiction is refused here, once.

Defaults that are choices
- dtype "auto": bfloat16 for bfloat16 and float32 checkpoints (as vLLM), float16 for float16 ones. A device that lacks
  the format gets the nearest one that it has: bfloat16 instead of float16 on CPUs (whose kernels know bfloat16 and
  float32), float16 instead of bfloat16 on GPUs before compute capability 8.0.
- max_model_len: what the model was trained for, cut to what an explicit `kv_cache_memory` can hold.
- max_num_seqs 128 on CPU, 256 on GPU; max_num_batched_tokens 8,192 on GPU: a prefill chunk of that size is long
  enough to run at the machine's speed and short enough not to stall those who decode. On a CPU as many as the linear
  layers multiply in about half a second on two cores (`_CPU_STEP_OPERATIONS`), between 256 and 2,048: who decodes,
  arrives or leaves waits for the step.
- max_mixed_prefill_tokens half of that on a CPU, at least 256, and the whole step on a GPU: who decodes waits for the
  prompts in its step; half as many tokens cost a few percent more in all.
- kv_cache_dtype "auto": the model's dtype, exact. int8 (CPU) and fp8 (GPU) halve the cache; neither device reads the
  other's. bf16 is the name of what "auto" gives a bfloat16 model.
- quantization "auto": the checkpoint's own. In 16 bits a GGUF file runs from its blocks ("none" decodes them first:
  four times the memory, on CPUs half the speed, and the values that other engines compute with); in float32 they are
  always decoded. So it is with quantised Hugging Face checkpoints (`engine/weights/README.md`): integers of
  GPTQ, AWQ and compressed-tensors and 8- and 4-bit floats stay packed, "none" decodes them. int8, int4 and fp8 keep
  what is stored in no more bits, and quantise the rest; fp8 of a checkpoint that is fp8 is "auto".
- graphs: whatever compile mode and attention backend allow on a GPU (the runner knows both), none on a CPU.
- block_size 16: the paper's choice; waste stays under 16 tokens a sequence and prefixes are shared in steps of 16.
- async_scheduling: on for GPUs. On a CPU planning takes the cores that compute, so a step ahead would hide nothing, and
  who arrives would wait for one step more.
- served_model_name: the directory's name, or the file's without ".gguf".
- threads: physical cores, since a second hyper-thread shares the vector units of the first; ranks and
  replicas divide them.
- who computes on which core: each compute thread has one while a step computes, where there are as many; else it runs
  wherever the operating system puts it. `cores` names the CPUs of as many threads, also for what is between steps.
  The front end is never bound. It works in one burst a step, and gives way through the scheduler's fairness alone.
"""

from __future__ import annotations

import logging
import os.path
from typing import TYPE_CHECKING, Literal

import msgspec

from engine.adapters.settings import lora_of
from engine.config import (
    CacheConfig,
    CompileConfig,
    DeviceConfig,
    EngineArgs,
    EngineConfig,
    ModelConfig,
    Quantization,
    SchedulerConfig,
)
from engine.errors import ConfigError
from engine.hub import local_models
from engine.kv_budget import DTYPE_BYTES, SequenceSizes, kv_bytes_per_token, shortened_context
from engine.machine import Machine, probe_machine
from engine.models.facts import ModelFacts
from engine.models.generation import overridden
from engine.models.stages import stage_layers
from engine.parallel_settings import check_model, crowded, facts_of_one, parallel_of, placed
from engine.setting_checks import (
    Kind,
    batch_invariant_of,
    check_files,
    check_settings,
    debug_sync_of,
    graphs_of,
    kv_cache_memory_of,
    kv_events_of,
    kv_transfer_of,
    swap_space_of,
)
from engine.sizes import size_text
from engine.speculation import speculation_of
from engine.speculation_config import SpeculationConfig
from engine.vllm_names import check_stored_as

if TYPE_CHECKING:
    from engine.models.description import ModelDescription

logger = logging.getLogger(__name__)

RealDType = Literal["bfloat16", "float16", "float32"]
CacheDType = Literal["bfloat16", "float16", "float32", "float8_e4m3fn", "int8"]


def resolve(
    args: EngineArgs, model: ModelDescription, machine: Machine, draft: ModelFacts | None = None
) -> EngineConfig:
    """Turn settings into configuration. Raises `ConfigError` naming the settings that cannot hold together, and
    `UnsupportedModelError`. `draft`: of a draft's layers, which keep keys and values, too."""
    kind, parallel = check_settings(args, machine), parallel_of(args, model, machine)
    dtype = _dtype(args, model.default_dtype, kind, machine)
    facts, vocab_size = model.facts, model.vocab_size
    _check_logprobs(args.max_logprobs, vocab_size)
    kv_dtype, step_tokens = _kv_dtype(args, dtype, kind), _step_tokens(args, kind, facts, dtype)
    block_size, quantization = (args.block_size or 16) * parallel.context, _quantization(args, dtype, kind, model)
    _check_weights_fit(facts_of_one(model, args), quantization, dtype, _replica_bytes(args, kind, machine))
    sizes = SequenceSizes(
        model=facts,
        dtype=kv_dtype,
        block_size=block_size,
        step_tokens=step_tokens,
        longest=args.max_model_len or model.max_position,
        draft_bytes=0 if draft is None else kv_bytes_per_token(draft.layers, kv_dtype, kind),
        ranks=parallel.kv_copies,
        stages=stage_layers(model.spec, parallel.pipeline),
        model_dtype=dtype,
        device=kind,
    )
    max_model_len = _max_model_len(args, model.max_position, sizes)
    step_tokens = step_tokens if facts.keeps_kv else _encoder_step(args, step_tokens, max_model_len)
    return EngineConfig(
        model=ModelConfig(
            path=_absolute(args.model, machine),
            tokenizer=_absolute(args.tokenizer if args.tokenizer is not None else args.model, machine),
            served_name=args.served_model_name or _base_name(args.model, machine),
            dtype=dtype,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=tuple(model.eos_token_ids),
            seed=args.seed,
            load_format=args.load_format,
            quantization=quantization,
            model_impl=args.model_impl,
            rope_by_length=facts.rope_by_length,
        ),
        cache=_cache(args, block_size, kv_dtype, kind, machine, facts),
        scheduler=_scheduler(args, kind, max_model_len, step_tokens, facts, machine),
        compile=CompileConfig(mode=args.compile, graphs=graphs_of(args, kind), cache_dir=_cache_dir(args, machine)),
        device=DeviceConfig(
            kind=kind,
            threads=_threads(args, machine),
            cores=args.cores,
            attention_backend=args.attention_backend,
            debug_sync=debug_sync_of(args, kind),
            batch_invariant=batch_invariant_of(args, kind, dtype),
        ),
        max_logprobs=args.max_logprobs,
        limits=args.limits,
        parallel=parallel,
        kv_events=kv_events_of(args),
        kv_transfer=kv_transfer_of(args, kind),
        lora=lora_of(args, kind, model),
        core_restarts=0 if parallel.backend == "external_launcher" else args.core_restarts,
    )


def _check_logprobs(most: int, vocab_size: int) -> None:
    if not 0 <= most <= vocab_size:
        raise ConfigError(f"max_logprobs must be in [0, {vocab_size}] (the vocabulary), got {most}")


def resolve_here(args: EngineArgs, *, warns: bool = True) -> tuple[ModelDescription, EngineConfig]:
    """Bring the model here, read its description and this machine, and resolve: the one impure step between a door and
    its engine. Raises what `describe` and `resolve` raise. `warns` of a context that `kv_cache_memory` cut, and of
    more threads than cores."""
    from engine.models.description import describe
    from engine.models.drafts import check_length, describe_draft

    machine = probe_machine(args.device)
    kind = check_settings(args, machine)
    check_files(args)
    args = local_models(args, machine)
    read = describe(_absolute(args.model, machine), args.model_impl)
    draft = describe_draft(_speculation(args, kind, machine), read)
    defaults = overridden(read.generation_defaults, args.override_generation_config)
    description = msgspec.structs.replace(read, generation_defaults=defaults)
    config = resolve(args, description, machine, None if draft is None else draft.facts)
    check_model(config, description)
    config = placed(config, args, description)
    if draft is not None:
        check_length(draft, config.model.max_model_len)
    cut = shortened_context(args, description, config, None if draft is None else draft.facts)
    for warning in filter(None, (cut, crowded(config, machine)) if warns else ()):
        logger.warning("%s", warning)
    return description, config


def _threads(args: EngineArgs, machine: Machine) -> int:
    if args.threads is not None:
        return args.threads
    if args.cores is not None:
        return len(args.cores)
    ranks = args.tensor_parallel_size * args.pipeline_parallel_size * args.data_parallel_size
    return max(machine.physical_cores // ranks, 1)


def _dtype(args: EngineArgs, checkpoint: str, kind: Kind, machine: Machine) -> RealDType:
    has_bfloat16 = kind == "cpu" or machine.cuda[0].capability >= (8, 0)
    if args.dtype == "auto":
        if kind == "cuda" and (checkpoint == "float16" or not has_bfloat16):
            return "float16"
        return "bfloat16"
    if args.dtype == "float16" and kind == "cpu":
        raise ConfigError("dtype='float16' is not available on device='cpu'; use 'bfloat16' or 'float32'")
    if args.dtype == "bfloat16" and not has_bfloat16:
        device = machine.cuda[0]
        raise ConfigError(
            f"dtype='bfloat16' needs compute capability 8.0; {device.name} has "
            f"{device.capability[0]}.{device.capability[1]}: use 'float16' or 'float32'"
        )
    return args.dtype


def keeps_stored(quantization: str, model: ModelDescription) -> bool:
    """Whether that setting, or what it was resolved to, leaves a checkpoint as it is stored. "fp8" does so, too, where
    it is stored so, as in vLLM."""
    is_fp8 = model.quantized is not None and model.quantized.method == "fp8"
    return quantization not in ("none", "int8", "int4", "fp8") or (quantization == "fp8" and is_fp8)


def _quantization(args: EngineArgs, dtype: RealDType, kind: Kind, model: ModelDescription) -> Quantization:
    wanted = args.quantization
    packs = dtype == "bfloat16" if kind == "cpu" else dtype != "float32" and model.spec is not None
    if keeps_stored(wanted, model):
        stored = None if model.quantized is None else model.quantized.method
        if wanted != "auto":
            check_stored_as(wanted, "gguf" if model.source == "gguf" else stored)
        if not packs or args.load_format != "auto":
            return "none"
        return "gguf" if model.source == "gguf" else "none" if model.quantized is None else "stored"
    assert wanted in ("none", "int8", "int4", "fp8")
    if wanted != "none" and not packs:
        raise ConfigError(
            f"quantization={wanted!r} needs dtype='bfloat16', or on a GPU 'float16', got {dtype!r}"
            if kind == "cpu" or dtype == "float32"
            else f"quantization={wanted!r} on a GPU needs a model that runs natively; this one runs by the library"
        )
    return wanted


def _kv_dtype(args: EngineArgs, dtype: RealDType, kind: Kind) -> CacheDType:
    if args.kv_cache_dtype == "auto":
        return dtype
    if args.kv_cache_dtype == "bf16":
        if dtype != "bfloat16":
            raise ConfigError(f"kv_cache_dtype='bf16' needs dtype='bfloat16', got {dtype!r}; leave it at 'auto'")
        return dtype
    if args.kv_cache_dtype == "int8":
        if kind != "cpu":
            raise ConfigError("kv_cache_dtype='int8' needs device='cpu': no GPU kernel reads int8, use 'fp8'")
        if dtype != "bfloat16":
            raise ConfigError(f"kv_cache_dtype='int8' needs dtype='bfloat16', got {dtype!r}")
        return "int8"
    if kind == "cpu":
        raise ConfigError("kv_cache_dtype='fp8' needs device='cuda': no CPU kernel reads fp8, use 'int8'")
    if dtype == "float32":
        raise ConfigError("kv_cache_dtype='fp8' needs dtype='bfloat16' or 'float16', got 'float32'")
    return "float8_e4m3fn"


def _speculation(args: EngineArgs, kind: Kind, machine: Machine) -> SpeculationConfig:
    found = speculation_of(args, kind)
    return found if found.model is None else msgspec.structs.replace(found, model=_absolute(found.model, machine))


def _max_model_len(args: EngineArgs, max_position: int, sizes: SequenceSizes) -> int:
    wanted, memory = args.max_model_len, kv_cache_memory_of(args)
    if wanted is not None and wanted > max_position:
        raise ConfigError(f"max_model_len ({wanted}) exceeds the {max_position} positions that the model was made for")
    length = wanted if wanted is not None else max_position
    if memory is None:
        return length
    fits = sizes.tokens_in(memory)
    if fits < 1 or (wanted is not None and wanted > fits):
        raise ConfigError(
            f"kv_cache_memory ({memory} bytes) holds {fits} tokens, but one sequence may need "
            f"{wanted or sizes.block_size}: raise kv_cache_memory to at least "
            f"{sizes.bytes_of(wanted or sizes.block_size)} or lower max_model_len"
        )
    return fits


def _encoder_step(args: EngineArgs, tokens: int, max_model_len: int) -> int:
    """Tokens of a step of an encoder, which computes prompts whole and keeps nothing of them."""
    unused = ("kv_cache_memory", "swap_space", "speculative_config", "enable_prefix_caching")
    given = [name for name in unused if getattr(args, name)] + ["kv_cache_dtype"] * (args.kv_cache_dtype != "auto")
    given += ["kv_transfer_config"] * bool(args.kv_transfer_config)
    given += ["kv_events_config"] * (kv_events_of(args) is not None)
    if given:
        raise ConfigError(f"{given[0]} has no effect here: the model is an encoder, which keeps no KV; leave it out")
    if args.max_num_batched_tokens is not None and tokens < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens ({tokens}) must be at least max_model_len ({max_model_len}): the model is an "
            "encoder, which computes a prompt in one step; raise it, or lower max_model_len"
        )
    return max(tokens, max_model_len)


def _cache(
    args: EngineArgs, block_size: int, dtype: CacheDType, kind: Kind, machine: Machine, facts: ModelFacts
) -> CacheConfig:
    device_bytes, wanted = _replica_bytes(args, kind, machine), kv_cache_memory_of(args)
    if wanted is not None and wanted > device_bytes:
        whose = "the device" if device_bytes == _device_bytes(kind, machine) else "a replica's share of this machine"
        raise ConfigError(f"kv_cache_memory ({wanted} bytes) exceeds {whose}'s memory ({device_bytes} bytes)")
    return CacheConfig(
        block_size=block_size,
        dtype=dtype,
        kv_cache_memory=wanted,
        memory_fraction=args.memory_fraction,
        enable_prefix_caching=args.enable_prefix_caching is not False and facts.keeps_kv,
        swap_space=swap_space_of(args, kind, machine),
    )


def _device_bytes(kind: Kind, machine: Machine) -> int:
    return machine.cuda[0].memory_bytes if kind == "cuda" else machine.memory_bytes


def _replica_bytes(args: EngineArgs, kind: Kind, machine: Machine) -> int:
    """Replicas on a CPU share its memory; ranks on GPUs have one each, and those that others place may."""
    memory, ranks = _device_bytes(kind, machine), args.tensor_parallel_size * args.pipeline_parallel_size
    apart = kind == "cuda" or args.distributed_executor_backend in ("ray", "external_launcher")
    return memory * ranks if apart else memory // args.data_parallel_size


_LEAST_WEIGHT_BYTES = {"int8": 1.0, "int4": 0.5, "fp8": 1.0, "gguf": 0.25, "stored": 0.5}


def _check_weights_fit(facts: ModelFacts, quantization: Quantization, dtype: str, device_bytes: int) -> None:
    """A model that is far too large is refused here by its dimensions, before its memory is taken."""
    each = _LEAST_WEIGHT_BYTES.get(quantization, DTYPE_BYTES[dtype])
    embeddings = facts.vocab_size * (facts.final_size)
    needed = int((facts.linear_weights + embeddings) * each)
    if needed > device_bytes:
        raise ConfigError(
            f"the weights alone take at least {size_text(needed)}, and the device has {size_text(device_bytes)}: the "
            f"model says num_hidden_layers={facts.num_layers}, hidden_size={facts.hidden_size}, "
            f"intermediate_size={facts.intermediate_size}, vocab_size={facts.vocab_size}; choose a smaller model, or "
            "quantization='int4'"
        )


_CPU_STEP_OPERATIONS = {"bfloat16": 600e9, "float32": 150e9}
_CPU_STEP_TOKENS = (256, 512, 1024, 2048)


def _cpu_step_tokens(facts: ModelFacts, dtype: str) -> int:
    """Tokens of a step by its work: a multiplication and an addition for each weight and token."""
    budget = _CPU_STEP_OPERATIONS[dtype] / (2 * facts.active_weights)
    return max(tokens for tokens in _CPU_STEP_TOKENS if tokens <= max(budget, _CPU_STEP_TOKENS[0]))


def _step_tokens(args: EngineArgs, kind: Kind, facts: ModelFacts, dtype: str) -> int:
    seqs, tokens = args.max_num_seqs, args.max_num_batched_tokens
    if seqs is not None and tokens is not None and tokens < seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({tokens}) must be at least max_num_seqs ({seqs}): "
            "each running sequence needs one token of a step"
        )
    return tokens or max(_cpu_step_tokens(facts, dtype) if kind == "cpu" else 8192, seqs or 0)


def _scheduler(
    args: EngineArgs, kind: Kind, max_model_len: int, tokens: int, facts: ModelFacts, machine: Machine
) -> SchedulerConfig:
    speculation, stages = _speculation(args, kind, machine), args.pipeline_parallel_size
    ahead = args.async_scheduling or (args.async_scheduling is None and kind == "cuda")
    mixed = args.max_mixed_prefill_tokens
    if mixed is not None and mixed > tokens:
        raise ConfigError(f"max_mixed_prefill_tokens ({mixed}) exceeds max_num_batched_tokens ({tokens})")
    if mixed is None and kind == "cpu":
        mixed = min(tokens, max(tokens // 2, _CPU_STEP_TOKENS[0]))
    return SchedulerConfig(
        max_num_seqs=args.max_num_seqs or min(128 if kind == "cpu" else 256, tokens),
        max_num_batched_tokens=tokens,
        max_mixed_prefill_tokens=mixed,
        max_model_len=max_model_len,
        max_waiting=args.max_waiting,
        policy=args.scheduling_policy,
        preemption=args.preemption,
        vocab_size=facts.num_token_ids,
        steps_in_flight=stages + ahead,
        speculation=speculation,
        whole_prompts=not facts.keeps_kv,
        stages=stages,
        row_tokens=facts.row_tokens,
    )


def _cache_dir(args: EngineArgs, machine: Machine) -> str:
    if args.cache_dir is not None:
        return _absolute(args.cache_dir, machine)
    return os.path.join(machine.home, ".cache", "pageloom")


def _base_name(path: str, machine: Machine) -> str:
    return os.path.basename(_absolute(path, machine)).removesuffix(".gguf")


def _absolute(path: str, machine: Machine) -> str:
    if path == "~" or path.startswith("~/"):
        path = machine.home + path[1:]
    return os.path.normpath(os.path.join(machine.working_directory, path))
