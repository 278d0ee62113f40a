"""Drafts as the rooms receive them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Drafts: tokens that are computed before it is known whether they come next. Names are vLLM's."""

    method: Literal["ngram", "suffix", "draft_model", "eagle3", "mtp"] | None = None
    """where they come from; None: from grammars alone, which force some. ngram: what came after the same tokens earlier
    in the prompt or the output; suffix: there and in recent outputs of all requests (`engine/runner/proposals.py`);
    draft_model: a second, smaller model; eagle3: a head that sees the model's own hidden states;
    mtp: such a head in the model's own checkpoint (`engine/runner/drafts.py`)"""
    model: str | None = None
    """draft_model: a Hugging Face directory or one GGUF file, with the same vocabulary; eagle3: a directory"""
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=0, le=64)] = 10
    """of each sequence in a step, at most: fewer where they would cost more than they bring. 0: none"""
    prompt_lookup_max: Annotated[int, msgspec.Meta(ge=1, le=64)] = 5
    prompt_lookup_min: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    """ngram: how many tokens must be the same, at best and at least"""
    suffix_decoding_max_tree_depth: Annotated[int, msgspec.Meta(ge=1, le=256)] = 24
    """suffix: how many tokens may be the same"""
    suffix_decoding_max_spec_factor: Annotated[float, msgspec.Meta(gt=0, le=64)] = 1.0
    """suffix: drafts for each token that is the same"""
    suffix_decoding_min_token_prob: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1
    """suffix: of all places with the same tokens, the share that must go on with the same drafts"""
