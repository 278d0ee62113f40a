"""What a user says of drafts (`EngineArgs.speculative_config`), checked."""

from __future__ import annotations

import msgspec

from engine.config import EngineArgs, SpeculationConfig
from engine.errors import ConfigError


def speculation_of(args: EngineArgs, device: str) -> SpeculationConfig:
    """Raises `ConfigError` naming the field."""
    try:
        config = msgspec.convert(args.speculative_config, SpeculationConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"speculative_config: {error}") from None
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
    if config.method == "suffix" and device != "cpu":
        raise ConfigError("speculative_config: method 'suffix' needs device='cpu'; a GPU proposes with 'ngram'")
    return config
