"""What an EAGLE-3 head is, read from its config. Torch-free.

Such a head is one decoder layer that guesses, from what three layers of its target make of a token and from the next
token, what the target will make of that one (Li et al., EAGLE-3, 2025). Public checkpoints call themselves
`LlamaForCausalLMEagle3`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from engine.errors import ConfigError, UnsupportedModelError
from engine.models.bounds import CONFIG_BYTES
from engine.models.facts import ModelFacts
from engine.models.families.common import Config, decoder_spec, flag, integer
from engine.models.families.names import LLAMA_NAMES
from engine.models.families.rows import Rows
from engine.models.json_file import read_json_object, shown
from engine.models.spec import DecoderSpec

ARCHITECTURE = "LlamaForCausalLMEagle3"
NUM_SHOWN = 3


class EagleSpec(msgspec.Struct, frozen=True, kw_only=True):
    layer: DecoderSpec
    """its one layer; the vocabulary is the target's"""
    draft_vocab_size: int
    """tokens that it can guess"""
    shown_layers: tuple[int, int, int]
    """of the target, whose inputs it is shown, in ascending order"""
    target_hidden_size: int
    norm_before_residual: bool = False
    """the residual of its layer is what it is shown after the norm, not before"""


def eagle_spec(config: Config, target: ModelFacts) -> EagleSpec:
    """Raises ConfigError, UnsupportedModelError."""
    if config.get("architectures") != [ARCHITECTURE]:
        found = shown(config.get("architectures"))
        raise UnsupportedModelError(f"architectures {found} is no EAGLE-3 head: {ARCHITECTURE} is supported")
    if integer(config, "num_hidden_layers", 1) != 1:
        raise UnsupportedModelError(f"num_hidden_layers {config['num_hidden_layers']}: an EAGLE-3 head has one")
    layer = decoder_spec(
        {"tie_word_embeddings": False, "max_position_embeddings": 2048, **config},
        "llama",
        windows=[None],
        qkv_bias=flag(config, "attention_bias"),
        o_bias=flag(config, "attention_bias"),
        mlp_bias=flag(config, "mlp_bias"),
    )
    if layer.vocab_size != target.vocab_size:
        raise ConfigError(f"vocab_size {layer.vocab_size} is not the target's, {target.vocab_size}")
    draft_vocab_size = integer(config, "draft_vocab_size", layer.vocab_size)
    if draft_vocab_size > layer.vocab_size:
        raise ConfigError(f"draft_vocab_size {draft_vocab_size} exceeds vocab_size {layer.vocab_size}")
    if integer(config, "target_hidden_size", target.hidden_size) != target.hidden_size:
        raise ConfigError(f"target_hidden_size {config['target_hidden_size']} is not the target's {target.hidden_size}")
    own = config.get("eagle_config")
    own = own if isinstance(own, Mapping) else {}
    return EagleSpec(
        layer=layer,
        draft_vocab_size=draft_vocab_size,
        shown_layers=_shown_layers({**own, **config}, target.num_layers),
        target_hidden_size=target.hidden_size,
        norm_before_residual=flag(config, "norm_before_residual"),
    )


def _shown_layers(config: Config, num_layers: int) -> tuple[int, int, int]:
    """Counted as vLLM does: layer i shows what it is given. Without a word in the config: the third layer, the middle,
    and the third from the end, as in the paper's code."""
    found = config.get("eagle_aux_hidden_state_layer_ids")
    layers = sorted({2, num_layers // 2, num_layers - 3}) if found is None else found
    if (
        not isinstance(layers, list)
        or len(layers) != NUM_SHOWN
        or not all(isinstance(layer, int) and 0 <= layer < num_layers for layer in layers)
        or layers != sorted(set(layers))
    ):
        raise ConfigError(
            f"eagle_aux_hidden_state_layer_ids must be {NUM_SHOWN} ascending layers of the {num_layers} that the "
            f"target has, found {shown(layers)}"
        )
    low, middle, high = layers
    return low, middle, high


def read_eagle_spec(directory: str, target: ModelFacts) -> EagleSpec:
    """Raises ConfigError, UnsupportedModelError naming the file."""
    file = Path(directory) / "config.json"
    if not file.is_file():
        raise ConfigError(f"speculative_config: model: {directory} is no directory with a config.json")
    try:
        return eagle_spec(read_json_object(file, CONFIG_BYTES), target)
    except (ConfigError, UnsupportedModelError) as error:
        raise type(error)(f"{file}: {error}") from error


def eagle_weight_rows(spec: EagleSpec) -> dict[str, Rows]:
    """Names in public checkpoints → places in `engine.models.eagle.EagleHead`; without the embedding, which a
    checkpoint may have or leave to the target, and the tables of its vocabulary."""
    hidden = spec.layer.hidden_size
    rows = {
        "fc.weight": Rows("fc.weight", 0, hidden),
        "norm.weight": Rows("norm.weight", 0, hidden),
        "lm_head.weight": Rows("lm_head.weight", 0, spec.draft_vocab_size),
        "midlayer.hidden_norm.weight": Rows("layer.hidden_norm.weight", 0, hidden),
    }
    return rows | LLAMA_NAMES.layer_rows(spec.layer, 0, "midlayer", "layer")
