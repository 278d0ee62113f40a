"""Settings under vLLM's names: taken where they mean something here, and else told what to use instead."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from engine.errors import ConfigError

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_FEW = 1024
"""a swap space below so much is one in GiB, as vLLM has it, and not in bytes"""

RENAMED = {
    "gpu_memory_utilization": "memory_fraction",
    "kv_cache_memory_bytes": "kv_cache_memory",
}
WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "compilation_config": ({},),
    "cpu_offload_gb": (0,),
    "disable_custom_all_reduce": (),
    "disable_log_requests": (),
    "disable_log_stats": (),
    "enable_log_requests": (),
    "enable_sleep_mode": (),
    "default_mm_loras": ({},),
    "disable_sliding_window": (False,),
    "enable_chunked_prefill": (None, True),
    "enable_lora_bias": (False,),
    "expert_placement_strategy": ("linear",),
    "fully_sharded_loras": (False,),
    "generation_config": ("auto",),
    "guided_decoding_backend": ("auto",),
    "hf_overrides": ({},),
    "limit_mm_per_prompt": ({},),
    "lora_dtype": ("auto",),
    "lora_extra_vocab_size": (0, 256),
    "max_parallel_loading_workers": (),
    "mm_processor_kwargs": ({},),
    "show_hidden_metrics_for_version": (),
    "skip_tokenizer_init": (False,),
    "convert": ("auto", "none", "embed", "classify"),
    "task": ("auto", "generate", "embed", "embedding", "score", "classify", "reward"),
    "runner": ("auto", "generate", "pooling"),
    "tokenizer_mode": ("auto",),
    "trust_remote_code": (False, True),
    "use_tqdm_on_load": (),
}
"""with the values that ask for nothing; (): all do"""
INSTEAD = {
    "collect_detailed_traces": "spans have a request's times; engine-bench profile has a step's",
    "cpu_offload_gb": "use quantization, or a GGUF file that fits",
    "compilation_config": "use compile and graphs",
    "cuda_graph_sizes": "use graphs; sizes are chosen by max_num_seqs",
    "default_mm_loras": "only text is read",
    "disable_sliding_window": "windows are the model's own",
    "enable_chunked_prefill": "prompts are always computed in parts; max_num_batched_tokens says how large",
    "enable_lora_bias": "adapters with biases are not read",
    "enforce_eager": "use compile='none'",
    "expert_placement_strategy": "use expert_placement",
    "fully_sharded_loras": "each rank has its part of each matrix",
    "generation_config": "use override_generation_config",
    "guided_decoding_backend": "say it with each request: StructuredOutputsParams(backend=...)",
    "hf_overrides": "change config.json",
    "hf_token": "set HF_TOKEN",
    "limit_mm_per_prompt": "only text is read",
    "lora_dtype": "factors are held as the model computes (dtype)",
    "lora_extra_vocab_size": "adapters bring no tokens",
    "max_seq_len_to_capture": "use max_model_len and graphs",
    "mm_processor_kwargs": "only text is read",
    "num_gpu_blocks_override": "use kv_cache_memory",
    "otlp_traces_endpoint": "it is engine-serve's",
    "reasoning_parser": "it is engine-serve's",
    "runner": "every model generates and is pooled, as requests ask",
    "skip_tokenizer_init": "give token ids, and detokenize=False",
    "convert": "every model generates and is pooled, as requests ask; classifiers are known by their architecture",
    "task": "every model generates and is pooled, as requests ask; classifiers are known by their architecture",
    "tokenizer_mode": "the fast tokenizer is always used",
    "tokenizer_revision": "name the tokenizer's directory",
    "trust_remote_code": "true or false",
    "worker_cls": "workers are the engine's own",
}

VALUES = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"bfloat16": "bf16", "fp8_e4m3": "fp8"},
    "model_impl": {"vllm": "native"},
    "load_format": {"gguf": "auto", "hf": "auto", "safetensors": "auto"},
}
"""of settings that have the same name, where they have another here"""
StoredMethod = Literal[
    "gptq",
    "gptq_marlin",
    "awq",
    "awq_marlin",
    "auto-round",
    "inc",
    "compressed-tensors",
    "fbgemm_fp8",
    "mxfp4",
    "bitsandbytes",
    "torchao",
    "gguf",
]
"""vLLM's names of what a checkpoint may be stored as, those of its kernels among them"""
_STORED_AS = {
    "gptq": ("gptq", "gptqmodel"),
    "gptq_marlin": ("gptq", "gptqmodel"),
    "awq_marlin": ("awq",),
    "inc": ("auto-round",),
}
"""`quant_method` of the config where it has another name"""
SHORT = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "decode_context_parallel_size": "-dcp",
    "enable_expert_parallel": "-ep",
}
"""options of vLLM's command line"""

VLLMS_NAMES = sorted({"enforce_eager", *RENAMED, *WITHOUT_EFFECT, *INSTEAD})


def renamed(value: object, setting: str) -> object:
    """A value in our name."""
    return VALUES.get(setting, {}).get(value, value) if isinstance(value, str) else value


def check_stored_as(method: str, found: str | None) -> None:
    """`method`: a `StoredMethod`; `found`: the `quant_method` of a checkpoint, "gguf", or None. Raises `ConfigError`
    unless they mean the same."""
    if found in _STORED_AS.get(method, (method,)):
        return
    what = "not quantised, and is not quantised so when it is loaded" if found is None else f"stored as {found}"
    raise ConfigError(
        f"quantization={method!r}: the checkpoint is {what}; 'auto' takes it as it is, 'int8', 'int4' and 'fp8' "
        "quantise it"
    )


def unknown(name: str, ours: Iterable[str]) -> TypeError:
    """For a setting that is none, neither of `ours` nor of vLLM's."""
    from difflib import get_close_matches

    near = get_close_matches(name, [*ours, *VLLMS_NAMES], n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "engine-serve --help lists all"
    return TypeError(f"there is no setting {name!r}: {hint}")


def translated(settings: Mapping[str, Any]) -> dict[str, Any]:
    """In our names. Raises `ConfigError` for what means something in vLLM and nothing here, and where two names of one
    setting are given."""
    ours: dict[str, Any] = {}
    for name, value in settings.items():
        if value is None:  # not set
            continue
        own = RENAMED.get(name, name)
        if name == "enforce_eager":
            if not value:
                continue
            own, value = "compile", "none"
        elif name in WITHOUT_EFFECT and (not WITHOUT_EFFECT[name] or value in WITHOUT_EFFECT[name]):
            if name == "trust_remote_code" and value:
                logger.warning("trust_remote_code has no effect: no code of a checkpoint is ever run")
            continue
        elif name in INSTEAD:
            raise ConfigError(f"{name}={value!r} is refused: {INSTEAD[name]} (vLLM's setting)")
        elif name == "swap_space" and isinstance(value, (int, float)) and not isinstance(value, bool) and value < _FEW:
            value = int(value * _GIB)
        else:
            value = renamed(value, name)
        if own in ours or (own != name and settings.get(own) is not None):
            raise ConfigError(f"{name} and {own} are one setting: give one")
        ours[own] = value
    return ours
