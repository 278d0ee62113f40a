"""Which models of the library can be served through their own module, and what planners must know of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from engine.errors import UnsupportedModelError
from engine.models.facts import ModelFacts
from engine.models.fallback.probe import SeenLayer, probe
from engine.models.fallback.rotation import fix_rope, looks_at_length
from engine.models.json_file import shown

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_SHOWN = 300
"""characters of an error of the library's"""
_LEAST = 1
"""positions, where nothing is computed"""
_RECURRENT = frozenset({"linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid", "hybrid_sliding"})
"""kinds of layers in a config's `layer_types`"""


def read_facts(path: str) -> tuple[ModelFacts, bool]:
    """With whether its checkpoint has a head. Raises UnsupportedModelError naming what is missing here."""
    config = read_config(path)
    whole, layers = probed(config)
    named = [str(name) for name in getattr(config, "architectures", None) or []]
    causal, bare = type(whole).__name__, type(whole.base_model).__name__
    if named and not {causal, bare} & set(named):
        raise UnsupportedModelError(f"of {config.model_type} only {causal} and {bare} are served, not {shown(named)}")
    return facts_of(config, whole, layers), not named or causal in named


def read_config(path: str) -> PreTrainedConfig:
    """Raises UnsupportedModelError: the library does not know it, or not as a causal language model."""
    from transformers import AutoConfig, __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise UnsupportedModelError(f"transformers {__version__} does not read its config: {_first(error)}") from error
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"transformers {__version__} has no causal language model {shown(config.model_type)}"
        )
    if config.get_text_config() is not config:
        raise UnsupportedModelError(f"{config.model_type} reads more than text; only models of text alone are served")
    if recurrent := sorted({str(kind) for kind in getattr(config, "layer_types", None) or []} & _RECURRENT):
        raise UnsupportedModelError(
            f"layers of {config.model_type} ({', '.join(recurrent)}) keep another state than keys and values"
        )
    return config


def module_of(config: PreTrainedConfig, device: str = "meta", dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The library's module; on the meta device no memory is taken. Raises UnsupportedModelError."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device(device), quiet():
            whole: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except Exception as error:
        raise UnsupportedModelError(f"its module cannot be built: {_first(error)}") from error
    for module in whole.modules():
        fix_rope(module, _LEAST)
    name = type(whole).__name__
    if whole._is_stateful:
        raise UnsupportedModelError(f"layers of {name} keep a recurrent state, and only keys and values are kept here")
    if not whole._supports_attention_backend:
        raise UnsupportedModelError(f"{name} does not let its attention be replaced (AttentionInterface)")
    return whole.eval()


def probed(config: PreTrainedConfig) -> tuple[PreTrainedModel, list[SeenLayer]]:
    """The module on the meta device, and each layer's attention. Raises UnsupportedModelError where a layer has none,
    or several."""
    whole = module_of(config)
    layers, count = probe(whole), int(config.num_hidden_layers)
    names = {layer.name for layer in layers}
    if not len(names) == len(layers) == count:
        raise UnsupportedModelError(f"{len(names)} of its {count} layers attend, {len(layers)} times in all")
    return whole, layers


def facts_of(config: PreTrainedConfig, whole: PreTrainedModel, layers: Sequence[SeenLayer]) -> ModelFacts:
    tables = [module for module in (whole.get_input_embeddings(), whole.get_output_embeddings()) if module is not None]
    apart = {id(parameter) for table in tables for parameter in table.parameters()}
    matrices = [each for each in whole.parameters() if each.dim() > 1 and id(each) not in apart]
    hidden = int(config.hidden_size)
    widest = max((max(each.shape[-2:]) for each in matrices), default=hidden)
    return ModelFacts(
        family=str(config.model_type),
        vocab_size=int(config.vocab_size),
        hidden_size=hidden,
        final_size=_width(tables[-1], hidden),
        layers=tuple(layer.heads for layer in layers),
        intermediate_size=widest,
        mlp_values=4 * hidden + 3 * widest * int(getattr(config, "num_experts_per_tok", None) or 1),
        linear_weights=sum(each.numel() for each in matrices),
        active_weights=sum(_active(each, int(getattr(config, "num_experts_per_tok", None) or 1)) for each in matrices),
        tie_embeddings=bool(config.tie_word_embeddings),
        max_position=_max_position(config),
        rope_by_length=looks_at_length(config),
    )


def _active(matrix: nn.Parameter, top_k: int) -> int:
    """Weights of it that a token meets; of stacked ones, those of its experts."""
    stacked = matrix.shape[0] if matrix.dim() > 2 else 1
    return matrix.numel() // stacked * min(top_k, stacked)


def _width(head: nn.Module, hidden: int) -> int:
    weight = getattr(head, "weight", None)
    return int(weight.shape[-1]) if isinstance(weight, torch.Tensor) else hidden


def _max_position(config: Any) -> int:
    for name in ("max_position_embeddings", "max_seq_len", "n_positions", "max_sequence_length"):
        if (found := getattr(config, name, None)) is not None:
            return int(found)
    raise UnsupportedModelError("its config does not say how long a sequence may be (max_position_embeddings)")


def _first(error: Exception) -> str:
    """The line that says most."""
    found = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return found[:_SHOWN]


@contextmanager
def quiet() -> Iterator[None]:
    """Without what the library logs, and its bars of progress."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
