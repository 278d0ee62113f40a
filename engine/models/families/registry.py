"""Which family serves a config. A new family is one line here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from engine.errors import ConfigError, UnsupportedModelError
from engine.models.families.apertus import APERTUS
from engine.models.families.bamba import BAMBA
from engine.models.families.bert import BERT, CAMEMBERT, DISTILBERT, ROBERTA, XLM_ROBERTA
from engine.models.families.cohere import COHERE, COHERE2
from engine.models.families.common import Family
from engine.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from engine.models.families.ernie4_5 import ERNIE4_5
from engine.models.families.ernie4_5_moe import ERNIE4_5_MOE
from engine.models.families.exaone4 import EXAONE4
from engine.models.families.falcon_h1 import FALCON_H1
from engine.models.families.gemma2 import GEMMA2
from engine.models.families.gemma3 import GEMMA3
from engine.models.families.gemma4 import GEMMA4
from engine.models.families.glm import GLM, GLM4
from engine.models.families.glm4_moe import DOTS1, GLM4_MOE
from engine.models.families.glm4_moe_lite import GLM4_MOE_LITE
from engine.models.families.gpt2 import GPT2
from engine.models.families.gpt_neox import GPT_NEOX
from engine.models.families.gpt_oss import GPT_OSS
from engine.models.families.granite import GRANITE
from engine.models.families.granite_hybrid import GRANITE_HYBRID
from engine.models.families.granite_moe import GRANITE_MOE, GRANITE_MOE_SHARED
from engine.models.families.helium import HELIUM
from engine.models.families.hunyuan import HUNYUAN
from engine.models.families.hunyuan_moe import HUNYUAN_MOE
from engine.models.families.kimi_linear import KIMI_LINEAR
from engine.models.families.lfm2 import LFM2, LFM2_MOE
from engine.models.families.llama import LLAMA
from engine.models.families.llama4 import LLAMA4
from engine.models.families.minimax_m2 import MINIMAX_M2
from engine.models.families.ministral import MINISTRAL, MINISTRAL3
from engine.models.families.mistral import MISTRAL
from engine.models.families.mistral4 import MISTRAL4
from engine.models.families.mixtral import MIXTRAL
from engine.models.families.modernbert import MODERNBERT
from engine.models.families.nemotron import NEMOTRON
from engine.models.families.nemotron_h import NEMOTRON_H
from engine.models.families.olmo2 import OLMO2, OLMO3
from engine.models.families.olmoe import OLMOE
from engine.models.families.opt import OPT
from engine.models.families.phi import PHI
from engine.models.families.phi3 import PHI3
from engine.models.families.qwen2 import MIMO, QWEN2
from engine.models.families.qwen3 import QWEN3
from engine.models.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from engine.models.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from engine.models.families.seed_oss import SEED_OSS
from engine.models.families.smollm3 import SMOLLM3
from engine.models.families.stablelm import STABLELM
from engine.models.families.starcoder2 import STARCODER2
from engine.models.heads import HeadForm, Purpose
from engine.models.json_file import shown

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    GEMMA2,
    GEMMA3,
    GEMMA4,
    OPT,
    GPT2,
    PHI3,
    SMOLLM3,
    GRANITE,
    OLMO2,
    OLMO3,
    GLM,
    GLM4,
    SEED_OSS,
    MINISTRAL,
    MINISTRAL3,
    HELIUM,
    COHERE,
    COHERE2,
    HUNYUAN,
    ERNIE4_5,
    EXAONE4,
    NEMOTRON,
    APERTUS,
    STARCODER2,
    GPT_NEOX,
    PHI,
    STABLELM,
    MIMO,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    OLMOE,
    GPT_OSS,
    GLM4_MOE,
    DOTS1,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE_LITE,
    MISTRAL4,
    MINIMAX_M2,
    LLAMA4,
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
    GRANITE_HYBRID,
    FALCON_H1,
    BAMBA,
    NEMOTRON_H,
    KIMI_LINEAR,
    LFM2,
    LFM2_MOE,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
    HUNYUAN_MOE,
    ERNIE4_5_MOE,
    BERT,
    ROBERTA,
    XLM_ROBERTA,
    CAMEMBERT,
    DISTILBERT,
    MODERNBERT,
)

_HEAD = re.compile("ForCausalLM|LMHeadModel|Model")
_BARE = ("Model", "TextModel", "ForMaskedLM")
"""endings of what has no head, or one that nobody asks here"""


class Found(NamedTuple):
    family: Family
    purpose: Purpose
    form: HeadForm | None = None
    """of the head, where it has one that judges"""


def find_family(config: Mapping[str, object]) -> Found:
    """By `architectures`, or by `model_type` where a config names no architecture."""
    named = _architectures(config)
    for family in FAMILIES:
        if family.architecture in named or (not named and family.name == config.get("model_type")):
            is_causal = family.causal and config.get("is_causal") is not False
            return Found(family, "generates" if is_causal else "embeds")
        if any(_HEAD.sub(ending, family.architecture) in named for ending in _BARE):
            return Found(family, "embeds")
        for ending, form in family.heads.items():
            if any(_HEAD.sub(text + ending, family.architecture) in named for text in ("", "Text")):
                return Found(family, "rewards" if ending == "ForRewardModel" else "classifies", form)
    found = f"architectures {shown(named[:4])}" if named else f"model_type {shown(config.get('model_type'))}"
    supported = ", ".join(family.architecture.removesuffix("ForCausalLM") for family in FAMILIES)
    raise UnsupportedModelError(f"{found} is not supported; supported architectures (ForCausalLM) are {supported}")


def text_config(config: Mapping[str, object]) -> dict[str, object]:
    """The text model's own, where a family's `Wrapper` names the architecture; any other config as it is. What stands
    around it holds where it says nothing. Of several families it is the one that its `model_type` names, the first one
    where it has none. Raises ConfigError, `UnsupportedModelError`."""
    named, text = _architectures(config), config.get("text_config")
    inside = [family for family in FAMILIES if family.wrapper is not None and family.wrapper.architecture in named]
    if not inside:
        return dict(config)
    if not isinstance(text, Mapping):
        raise ConfigError(f"text_config must be an object, found {shown(text)}")
    kind = text.get("model_type")
    family = inside[0] if kind is None else next((each for each in inside if each.name == kind), None)
    if family is None:
        known = ", ".join(each.name for each in inside)
        raise UnsupportedModelError(
            f"{shown(named[:4])} with a text model of the model_type {shown(kind)} is not supported; {known} are"
        )
    around = {key: value for key, value in config.items() if text.get(key) is None}
    return {**text, **around, "architectures": [family.architecture]}


def _architectures(config: Mapping[str, object]) -> list[str]:
    named = config.get("architectures")
    return [str(name) for name in named] if isinstance(named, list) else []


def family_named(name: str) -> Family:
    """The family whose function made a spec (`DecoderSpec.family`)."""
    return next(family for family in FAMILIES if family.name == name)
