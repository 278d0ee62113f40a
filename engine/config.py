"""Configuration as a value: what a door collects (`EngineArgs`) and what the rooms receive (`EngineConfig`).

`EngineArgs` is parsed once at a door; `engine.resolve.resolve` turns it, once, into an `EngineConfig`, which is passed
down by constructor and crosses the process border as JSON. No room reads the environment.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import Field, make_dataclass
from typing import Annotated, Any, ClassVar, Literal, cast, get_args, get_origin, get_type_hints

import msgspec

from engine.adapters.config import LoRAConfig
from engine.command_line import P, add_options
from engine.errors import ConfigError
from engine.kv_settings import KVEventsConfig, KVTransferConfig
from engine.limits import MAX_LOGPROBS, MAX_WAITING, Limits, limits_of, parse_limits
from engine.parallel_config import ExecutorBackend, ParallelConfig, RayPlacement
from engine.speculation_config import SpeculationConfig
from engine.vllm_names import RENAMED, VLLMS_NAMES, StoredMethod, translated, unknown

DType = Literal["auto", "bfloat16", "float16", "float32"]
Device = Literal["auto", "cpu", "cuda"]
CompileMode = Literal["none", "pieces"]
Quantization = Literal["none", "gguf", "stored", "int8", "int4", "fp8"]
"""of weights; gguf, stored: each matrix as its file encodes it, GGUF or a quantised Hugging Face checkpoint"""
KVCacheDType = Literal["auto", "bf16", "int8", "fp8"]
GraphMode = Literal["auto", "none", "piecewise", "full_decode", "both"]
"""auto: all that compile mode and attention backend allow (GPU)"""
Policy = Literal["fcfs", "priority", "fair"]
Preemption = Literal["auto", "recompute", "swap"]
"""auto: what is estimated to cost less"""


def _about(text: str, **how: object) -> msgspec.Meta:
    """What a setting is, for every door's help. `how`: `flag`, of names that differ; `hidden`: no option of its own;
    `size`: bytes, or a text as 4GiB."""
    return msgspec.Meta(description=text, extra=how)


_SIZE = {"size": True}


class _Checked(msgspec.StructMeta):
    """Of a struct that takes vLLM's names, too, and whose values are checked. Raises `ConfigError` for a name that
    means nothing here and for a value of another type, TypeError for a name that is none."""

    def __call__(cls, **given: Any) -> Any:  # noqa: N805 (of a metaclass)
        written = {RENAMED.get(name, name): name for name in given}
        ours = {name: _plain_value(value) for name, value in translated(given).items()}
        for name in ours:
            if name not in EngineArgs.__struct_fields__:
                raise unknown(name, EngineArgs.__struct_fields__)
        limits = ours.get("limits")
        if isinstance(limits, Mapping):
            ours["limits"] = limits_of(limits)
        elif isinstance(limits, list):
            ours["limits"] = parse_limits(limits)
        try:
            return msgspec.convert(ours, cls)
        except msgspec.ValidationError as error:
            what, _, where = str(error).rpartition(" - at `$.")
        if not what:
            raise TypeError(where)  # without a model
        name = where.rstrip("`").split(".")[0].split("[")[0]
        kind = get_type_hints(EngineArgs)[name]
        if get_origin(kind) is Literal:
            what = f"must be one of {', '.join(get_args(kind))}"
        raise ConfigError(f"{written.get(name, name)}: {what}, got {ours[name]!r}")


class EngineArgs(msgspec.Struct, frozen=True, kw_only=True, metaclass=_Checked):
    """What the user may set, declared here for all doors: Python's `LLM` and `AsyncEngine`, and the command line. None
    means "choose for me"; `resolve` chooses."""

    model: Annotated[str, _about("a Hugging Face directory, one GGUF file, or a hub's name for either", hidden=True)]
    served_model_name: Annotated[str | None, _about("the model's name in the API", hidden=True)] = None
    tokenizer: Annotated[
        str | None, _about("directory, GGUF file or hub's name of the tokenizer, where it is not the model's own")
    ] = None
    chat_template: Annotated[
        str | None,
        _about("a Jinja file, or a template itself, in place of the model's own; dialects are found by it, too"),
    ] = None
    revision: Annotated[str | None, _about("branch, tag or commit of a model that comes from a hub")] = None
    download_dir: Annotated[str | None, _about("where models from a hub are kept; default: as HF_HOME says")] = None
    dtype: Annotated[DType, _about("of weights and activations")] = "auto"
    quantization: Annotated[
        Literal["auto", "none", "int8", "int4", "fp8", StoredMethod],
        _about(
            "of weights: int8 per output (on CPUs with int8 activations), int4 in groups of 32, fp8 (e4m3) per output, "
            "of what is not stored in as few bits; none: the dtype, to which a GGUF file or a quantised checkpoint is "
            "decoded; auto: as the checkpoint has them, so a GGUF file runs from its blocks, and GPTQ, AWQ, compressed "
            "integers, fp8, nvfp4 and mxfp4 stay packed; vLLM's other names mean auto, and are refused where the "
            "checkpoint is stored otherwise"
        ),
    ] = "auto"
    device: Device = "auto"
    max_model_len: Annotated[int | None, _about("longest sequence, prompt and answer, in tokens")] = None
    max_num_seqs: Annotated[int | None, _about("sequences that run at once")] = None
    max_num_batched_tokens: Annotated[int | None, _about("tokens computed in one step")] = None
    max_mixed_prefill_tokens: Annotated[
        int | None, _about("tokens of prompts in a step in which others decode, who wait for the whole of it")
    ] = None
    max_waiting: Annotated[
        int, _about("sequences that may wait, all samples of a request counted; more are answered with 503")
    ] = MAX_WAITING
    block_size: Annotated[int | None, _about("tokens per KV block")] = None
    kv_cache_dtype: Annotated[
        KVCacheDType,
        _about(
            "auto: the model's dtype; bf16: that of a bfloat16 model, by name; int8 (CPU) and fp8 (e4m3, GPU): half "
            "the memory"
        ),
    ] = "auto"
    kv_cache_memory: Annotated[int | str | None, _about("memory of the KV cache, as 4GiB", **_SIZE)] = None
    memory_fraction: Annotated[float, _about("share of the device's memory to use")] = 0.9
    enable_prefix_caching: Annotated[
        bool | None,
        _about(
            "keep what was computed for prompts that begin alike; default: yes, but for encoders",
            flag="prefix-caching enable-prefix-caching",
        ),
    ] = None
    swap_space: Annotated[
        int | str | None,
        _about(
            "host memory for KV blocks of preempted sequences and of prefixes that the device evicts, as 4GiB", **_SIZE
        ),
    ] = None
    preemption: Annotated[
        Preemption, _about("how a preempted sequence comes back; auto: what costs less here, as far as there is room")
    ] = "auto"
    scheduling_policy: Annotated[
        Policy, _about("the order in which requests start; fair: each key gets its share (--keys), behind priorities")
    ] = "fcfs"
    async_scheduling: Annotated[bool | None, _about("plan a step while one computes; default: on a GPU")] = None
    compile: Annotated[CompileMode, _about("torch.compile of what lies between attention")] = "pieces"
    graphs: Annotated[
        GraphMode | None, _about("CUDA graphs; default: all that --compile and the attention backend allow")
    ] = None
    attention_backend: Annotated[str | None, _about("by name; default: the first that fits")] = None
    threads: Annotated[int | None, _about("compute threads on a CPU")] = None
    cores: Annotated[
        tuple[int, ...] | None, _about("logical CPUs that the compute threads are bound to (CPU), as 0,1 or 0-3")
    ] = None
    tensor_parallel_size: Annotated[
        int,
        _about("ranks that compute a model together, each with its part of every matrix; on a CPU with threads each"),
    ] = 1
    decode_context_parallel_size: Annotated[int, _about("1, or those ranks: each has positions of KV")] = 1
    pipeline_parallel_size: Annotated[int, _about("stages, each with some of the layers; on a CPU, threads each")] = 1
    data_parallel_size: Annotated[
        int,
        _about("replicas of the model behind one front end, each with a KV cache of its own; on a CPU, threads each"),
    ] = 1
    core_restarts: Annotated[
        int,
        _about(
            "deaths of engine cores in ten minutes that another start follows: requests pause, then go on; the next "
            "ends the engine (0: the first; not of ranks of torchrun, nor of replicas that share experts)"
        ),
    ] = 4
    distributed_executor_backend: Annotated[
        ExecutorBackend,
        _about(
            "who starts those ranks: mp, this process, on this host; ray, a Ray cluster, also on other hosts; "
            "external_launcher, torchrun, which starts this program once for each (docs/many-hosts.md); uni: there is "
            "one"
        ),
    ] = "mp"
    ray_placement_strategy: Annotated[
        RayPlacement | None, _about("how ranks are dealt out to the nodes of a Ray cluster; default: PACK")
    ] = None
    distributed_timeout_seconds: Annotated[
        float | None, _about("how long ranks that ray or torchrun starts may take to join; default: 300")
    ] = None
    enable_expert_parallel: Annotated[
        bool, _about("each rank, or each replica, has some of a mixture's experts, whole, and computes them for all")
    ] = False
    expert_placement: Annotated[str | None, _about("who has which expert: a file of tools/place_experts.py")] = None
    enable_eplb: Annotated[
        bool,
        _about("experts move between replicas (data_parallel_size, enable_expert_parallel): each has as much to do"),
    ] = False
    eplb_config: Annotated[
        dict[str, object], _about("""when, in steps, as '{"window_size": 1000, "step_interval": 3000}'""")
    ] = {}
    enable_lora: Annotated[bool, _about("requests may name adapters (LoRA), which are computed in one batch")] = False
    max_lora_rank: Annotated[int | None, _about("largest rank of an adapter; default: 16")] = None
    max_lora_expert_rank: Annotated[int | None, _about("in the matrices of experts; default: they stay (CPU)")] = None
    max_loras: Annotated[int | None, _about("adapters that rows of one step may have; default: 8")] = None
    max_cpu_loras: Annotated[int | None, _about("adapters that are kept as they were read; default: max_loras")] = None
    seed: Annotated[int, _about("of requests that bring none")] = 0
    speculative_config: Annotated[
        dict[str, object],
        _about(
            "drafts, which make tokens cheaper where they are right, and change none: method (ngram, suffix, "
            "draft_model, eagle3, mtp), model (of draft_model and eagle3), num_speculative_tokens, prompt_lookup_max, "
            "prompt_lookup_min and others of vLLM's, as "
            """'{"method": "ngram", "num_speculative_tokens": 10}'"""
        ),
    ] = {}
    kv_events_config: Annotated[
        dict[str, object],
        _about(
            "what the prefix cache stores and forgets, published over ZeroMQ as vLLM does: enable_kv_cache_events, "
            "publisher (zmq, null), endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size, topic, as "
            """'{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'"""
        ),
    ] = {}
    kv_transfer_config: Annotated[
        dict[str, object],
        _about(
            "prompts are computed for other engines, or taken from them, by vLLM's contract (CPU): kv_connector "
            "(NixlConnector), kv_role (kv_producer, kv_consumer, kv_both), kv_ip, kv_port, kv_sources, "
            """kv_connector_extra_config, as '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'"""
        ),
    ] = {}
    override_generation_config: Annotated[
        dict[str, object],
        _about(
            "sampling for requests that leave it out, before what the model's own files recommend: temperature, top_k, "
            """top_p, min_p, repetition_penalty, max_new_tokens, as '{"temperature": 0.7}'"""
        ),
    ] = {}
    max_logprobs: Annotated[int, _about("alternatives that a request may ask for, of each token")] = MAX_LOGPROBS
    limits: Annotated[
        Limits,
        _about(
            "another bound on requests, as body_bytes=64MiB; may be repeated; docs/limits.md lists them", flag="limit"
        ),
    ] = Limits()
    cache_dir: Annotated[str | None, _about("compiled code; default: PAGELOOM_CACHE or ~/.cache/pageloom")] = None
    batch_invariant: Annotated[bool, _about("no bit of an answer depends on others (docs/invariance.md)")] = False
    debug_sync: Annotated[bool, _about("fail a steady decode step in which the host waits for the GPU (tests)")] = False
    model_impl: Annotated[
        Literal["auto", "native", "transformers"],
        _about(
            "who computes the model: a family of the engine's own (native), or the transformers library's module with "
            "the engine's attention; auto: native where there is a family"
        ),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "dummy"], _about("dummy: random weights of the model's shape, for benchmarks")
    ] = "auto"

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    """what `dataclasses.asdict`, `fields` and `replace` read, which vLLM's users call"""

    @classmethod
    def add_cli_args(cls, parser: P) -> P:
        """To a parser or a group: every setting and the model, as `LLM`'s keywords, None where not set. Returns it."""
        add_options(parser, cls, prefix="")
        parser.add_argument("--model", help="Hugging Face directory, GGUF file, or hub's name")
        parser.add_argument("--served-model-name")
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """Of options that `add_cli_args` added; others are left alone. Raises `ConfigError`."""
        names = {*cls.__struct_fields__, *VLLMS_NAMES} - {"model"}
        if args.model is None:
            raise ConfigError("--model is missing")
        return make_args(args.model, {name: value for name, value in vars(args).items() if name in names})


_FIELDS = make_dataclass("EngineArgs", EngineArgs.__struct_fields__)
EngineArgs.__dataclass_fields__ = _FIELDS.__dataclass_fields__  # type: ignore[attr-defined]


def make_args(model: str | os.PathLike[str], settings: Mapping[str, object]) -> EngineArgs:
    """`settings` by their names, or by vLLM's; limits as a mapping or "NAME=VALUE"s, too. Raises TypeError for a name
    that is none, `ConfigError` for a value of another type."""
    return EngineArgs(model=cast(str, model), **cast(Any, settings))


def _plain_value(value: object) -> object:
    """Numbers of NumPy's, paths and ranges are taken, too."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, range):
        return tuple(value)
    item = getattr(value, "item", None)
    return item() if callable(item) else value


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    """a Hugging Face directory or one GGUF file"""
    tokenizer: str
    served_name: str
    dtype: Literal["bfloat16", "float16", "float32"]
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    seed: int
    load_format: Literal["auto", "dummy"]
    quantization: Quantization = "none"
    model_impl: Literal["auto", "native", "transformers"] = "auto"
    rope_by_length: bool = False


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    block_size: int
    """tokens per block"""
    dtype: Literal["bfloat16", "float16", "float32", "float8_e4m3fn", "int8"]
    """of keys and values"""
    kv_cache_memory: int | None
    """bytes; None: what `memory_fraction` of the device leaves after weights and activations"""
    memory_fraction: float
    enable_prefix_caching: bool
    swap_space: int = 0
    """bytes of host memory"""
    tell_front_end: bool = False
    """what the prefix cache stores and forgets (`StepOutputs.kv_events`)"""
    pages_fd: int | None = None
    """of a rank: what it keeps keys and values in (`kv_transfer/rank_caches.py`); None: memory of its own"""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    max_num_seqs: int
    """rows of the device tables: sequences that run at once"""
    max_num_batched_tokens: int
    """token budget of one step"""
    max_model_len: int
    max_waiting: int
    policy: Policy = "fcfs"
    steps_in_flight: int = 2
    """steps that are submitted and not collected, at most; 1: lockstep, 2: one is planned while another one computes"""
    max_mixed_prefill_tokens: int | None = None
    """of the budget, for prompts beside sequences that decode; None: all of it"""
    min_shared_chunk: int = 256
    """tokens that a prompt takes of a step, if there are as many, although others wait for theirs: of more it leaves
    them half"""
    preemption: Preemption = "auto"
    vocab_size: int = 2**31 - 1
    """an id that the model is fed is below it: those of its vocabulary, times the kinds of tokens"""
    speculation: SpeculationConfig = SpeculationConfig()
    whole_prompts: bool = False
    """a prompt is computed in one step, or not yet"""
    stages: int = 1
    """that compute a step each; a sequence whose token is in flight waits for it, and those that decode are divided"""
    row_tokens: int = 1 << 20
    """of a context that take as long to be looked at as all else of a token"""

    @property
    def max_drafts(self) -> int:
        """Of one step: rather fewer for each of many sequences, where drafts pay less, than logits without bound."""
        return max(self.speculation.num_speculative_tokens, min(self.max_num_seqs, 64))

    @property
    def max_sampled(self) -> int:
        """Positions at which one step may sample."""
        return self.max_num_seqs + self.max_drafts


class CompileConfig(msgspec.Struct, frozen=True, kw_only=True):
    mode: CompileMode
    graphs: GraphMode
    cache_dir: str
    """absolute; holds compiled pieces and kernels"""


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True):
    kind: Literal["cpu", "cuda"]
    index: int = 0
    threads: int = 1
    """compute threads of the runner (CPU)"""
    cores: tuple[int, ...] | None = None
    """logical CPUs that they are bound to; None: not bound"""
    attention_backend: str | None = None
    debug_sync: bool = False
    """a hidden synchronisation in a steady decode step is an error (CUDA)"""
    batch_invariant: bool = False
    """a row's bits are its own: what would cut sums by the batch is left out, at a price, or refused"""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    compile: CompileConfig
    device: DeviceConfig
    max_logprobs: int
    limits: Limits = Limits()
    parallel: ParallelConfig = ParallelConfig()
    kv_events: KVEventsConfig | None = None
    """None: nothing is published"""
    kv_transfer: KVTransferConfig | None = None
    """None: no other engine has to do with its prompts"""
    lora: LoRAConfig | None = None
    """None: no adapters"""
    core_restarts: int = 0
    """deaths within ten minutes that another start follows"""
