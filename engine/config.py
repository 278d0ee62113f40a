"""Configuration as a value: what a door collects (`EngineArgs`) and what the rooms receive (`EngineConfig`).

`EngineArgs` is parsed once at a door; `engine.resolve.resolve` turns it, once, into an `EngineConfig`, which is passed
down by constructor and crosses the process border as JSON. No room reads the environment.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.limits import MAX_LOGPROBS, MAX_WAITING, Limits

DType = Literal["auto", "bfloat16", "float16", "float32"]
Device = Literal["auto", "cpu", "cuda"]
CompileMode = Literal["none", "pieces"]
Quantization = Literal["none", "gguf", "int8", "int4"]
"""of weights; gguf: each matrix as its file encodes it"""
KVCacheDType = Literal["auto", "bf16", "int8", "fp8"]
GraphMode = Literal["auto", "none", "piecewise", "full_decode", "both"]
"""auto: all that compile mode and attention backend allow (GPU)"""
Policy = Literal["fcfs", "priority"]
Preemption = Literal["auto", "recompute", "swap"]
"""auto: what is estimated to cost less"""


class EngineArgs(msgspec.Struct, frozen=True, kw_only=True):
    """What the user may set. None means "choose for me"; `resolve` chooses."""

    model: str
    served_model_name: str | None = None
    tokenizer: str | None = None
    dtype: DType = "auto"
    quantization: Literal["auto", "none", "int8", "int4"] = "auto"
    """of weights (CPU): int8 per output with int8 activations, int4 in groups of 32; none: the dtype; auto: as the
    checkpoint has them, so a GGUF file runs from its blocks"""
    device: Device = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_mixed_prefill_tokens: int | None = None
    """of a step in which other sequences decode, whose next token waits for the whole of it"""
    max_waiting: int = MAX_WAITING
    """sequences, all samples of a request counted"""
    block_size: int | None = None
    kv_cache_dtype: KVCacheDType = "auto"
    """auto: the model's dtype; bf16: that of a bfloat16 model, by name; int8: half the memory, with a scale for each
    token and KV head (CPU); fp8: e4m3, half the memory (GPU backends that read it)"""
    kv_cache_memory: int | str | None = None
    """bytes, or a text as 4GiB"""
    memory_fraction: float = 0.9
    enable_prefix_caching: bool = True
    swap_space: int | str = 0
    """bytes, or a text as 4GiB, of host memory for KV blocks: of preempted sequences, and of prefixes that the device
    evicts"""
    preemption: Preemption = "auto"
    """whether a preempted sequence is computed again or swapped to `swap_space` (where that is full, computed)"""
    scheduling_policy: Policy = "fcfs"
    async_scheduling: bool | None = None
    """plan a step while the one before computes; None: on a GPU"""
    compile: CompileMode = "pieces"
    graphs: GraphMode | None = None
    """None: auto on a GPU, none on a CPU"""
    attention_backend: str | None = None
    threads: int | None = None
    cores: tuple[int, ...] | None = None
    """logical CPUs that the compute threads are bound to (CPU); None: the operating system places them"""
    seed: int = 0
    override_generation_config: dict[str, object] = {}
    """sampling for requests that leave it out, before what the model's own files recommend: temperature, top_k, top_p,
    min_p, repetition_penalty, max_new_tokens"""
    max_logprobs: int = MAX_LOGPROBS
    limits: Limits = Limits()
    cache_dir: str | None = None
    debug_sync: bool = False
    """fail a steady decode step in which the host waits for the GPU (tests, hunting slow steps)"""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: random weights of the model's shape, for benchmarks"""


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


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    max_num_seqs: int
    """rows of the device tables: sequences that run at once"""
    max_num_batched_tokens: int
    """token budget of one step"""
    max_model_len: int
    max_waiting: int
    policy: Policy = "fcfs"
    async_scheduling: bool = True
    max_mixed_prefill_tokens: int | None = None
    """of the budget, for prompts beside sequences that decode; None: all of it"""
    preemption: Preemption = "auto"
    vocab_size: int = 2**31 - 1
    """a token id is below it"""


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


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    compile: CompileConfig
    device: DeviceConfig
    max_logprobs: int
    limits: Limits = Limits()
