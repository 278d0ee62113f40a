"""What a user's draft is: a second model, or a head of the target. Read in milliseconds and without torch."""

from __future__ import annotations

import msgspec

from engine.errors import ConfigError, UnsupportedModelError, WeightsError
from engine.models.description import ModelDescription, describe
from engine.models.eagle_spec import EagleSpec, read_eagle_spec
from engine.models.facts import ModelFacts
from engine.models.mtp_spec import MtpSpec, mtp_spec
from engine.models.spec import DecoderSpec
from engine.speculation_config import SpeculationConfig


class DraftDescription(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    model: ModelDescription | None = None
    """of a second model; None: it is a head"""
    head: EagleSpec | None = None
    mtp: MtpSpec | None = None
    """a head in the target's own checkpoint"""

    @property
    def spec(self) -> DecoderSpec:
        """Of its layers."""
        if self.head is not None:
            return self.head.layer
        if self.mtp is not None:
            return self.mtp.layer
        assert self.model is not None and self.model.spec is not None
        return self.model.spec

    @property
    def facts(self) -> ModelFacts:
        return self.spec.facts

    @property
    def shown_layers(self) -> tuple[int, ...]:
        """Of the target, whose inputs it must be shown."""
        return () if self.head is None else self.head.shown_layers


def describe_draft(config: SpeculationConfig, described: ModelDescription) -> DraftDescription | None:
    """None: drafts come from elsewhere. Raises ConfigError, UnsupportedModelError or WeightsError for what is no draft
    of this target."""
    target = described.facts
    if config.method == "mtp":
        return DraftDescription(path=described.path, mtp=mtp_spec(described))
    if config.method not in ("draft_model", "eagle3") or config.model is None:
        return None
    if config.method == "eagle3" and target.states:
        raise UnsupportedModelError(
            f"speculative_config: method eagle3: layers of {target.family} keep states, and heads are not shown "
            "what is between those yet; use method 'ngram', 'suffix' or 'draft_model'"
        )
    try:
        if config.method == "eagle3":
            return DraftDescription(path=config.model, head=read_eagle_spec(config.model, target))
        draft = describe(config.model, "native")
        if draft.facts.states:
            what = f"layers of {draft.facts.family} keep states"
            raise UnsupportedModelError(f"model: {config.model}: {what}, which draft models do not yet")
    except (ConfigError, UnsupportedModelError, WeightsError) as error:
        raise type(error)(f"speculative_config: {error}") from error
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"speculative_config: model: {config.model} knows {draft.vocab_size} tokens and the target "
            f"{target.vocab_size}: a draft model must have the target's vocabulary"
        )
    return DraftDescription(path=config.model, model=draft)


def check_length(draft: DraftDescription, max_model_len: int) -> None:
    """Raises ConfigError: the draft model was made for shorter sequences. (A head's config says how long those were
    that it was trained on, which forbids nothing.)"""
    if draft.model is not None and draft.model.max_position < max_model_len:
        raise ConfigError(
            f"speculative_config: model: {draft.path} was made for {draft.model.max_position} positions; set "
            f"max_model_len to at most that (now {max_model_len})"
        )
