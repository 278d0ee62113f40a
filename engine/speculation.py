"""What a user says of drafts (`EngineArgs.speculative_config`), checked."""

from __future__ import annotations

from typing import get_args, get_type_hints

from engine.config import EngineArgs
from engine.errors import ConfigError
from engine.given_settings import read_setting
from engine.speculation_config import SpeculationConfig

_MTP = ("deepseek_mtp", "qwen3_next_mtp", "qwen3_5_mtp")
"""older names that vLLM has for "mtp", by family"""


def speculation_of(args: EngineArgs, device: str) -> SpeculationConfig:
    """Raises `ConfigError` naming the field."""
    given = dict(args.speculative_config)
    if given.get("method") in _MTP:
        given["method"] = "mtp"
    methods = get_args(get_args(get_type_hints(SpeculationConfig)["method"])[0])
    if given.get("method") not in (None, *methods):
        raise ConfigError(f"speculative_config: method must be one of {', '.join(methods)}, got {given['method']!r}")
    if isinstance(longest := given.get("prompt_lookup_max"), int):
        given.setdefault("prompt_lookup_min", min(longest, SpeculationConfig().prompt_lookup_min))
    config = read_setting("speculative_config", given, SpeculationConfig)
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise ConfigError(
            f"speculative_config: prompt_lookup_min ({config.prompt_lookup_min}) exceeds prompt_lookup_max "
            f"({config.prompt_lookup_max})"
        )
    needs_model = config.method in ("draft_model", "eagle3")
    if needs_model != (config.model is not None):
        wants = "a model: the path of its directory" if needs_model else "no model: leave it out"
        raise ConfigError(f"speculative_config: method {config.method!r} takes {wants}")
    if config.method is None:
        return config
    if args.decode_context_parallel_size > 1 and (needs_model or config.method == "mtp"):
        raise ConfigError(
            f"speculative_config: method {config.method!r} keeps keys and values of its own, which "
            "decode_context_parallel_size does not divide; use 'ngram' or 'suffix'"
        )
    if config.method == "mtp" and (args.tensor_parallel_size > 1 or args.enable_expert_parallel):
        raise ConfigError(
            "speculative_config: method 'mtp' is of models that one rank has whole so far (tensor_parallel_size 1, "
            "without enable_expert_parallel); use 'ngram'"
        )
    if config.method == "suffix" and device != "cpu":
        raise ConfigError("speculative_config: method 'suffix' needs device='cpu'; a GPU proposes with 'ngram'")
    if (stages := args.pipeline_parallel_size) > 1 and config.method != "ngram":
        raise ConfigError(
            f"speculative_config: method {config.method!r} is not of models in stages (pipeline_parallel_size "
            f"{stages}); use 'ngram'"
        )
    return config
