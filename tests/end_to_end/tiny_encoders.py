"""Tiny random encoders of BERT's kind, and a byte-level tokenizer that marks texts and pairs as theirs do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

_SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 514,
    "initializer_range": 0.3,
}
_DISTILBERT: dict[str, Any] = {
    "vocab_size": 300,
    "dim": 64,
    "hidden_dim": 96,
    "n_layers": 3,
    "n_heads": 4,
    "initializer_range": 0.3,
}
_MODERNBERT: dict[str, Any] = {
    **{name: value for name, value in _SHAPE.items() if name != "max_position_embeddings"},
    "num_hidden_layers": 4,
    "local_attention": 32,
    "pad_token_id": 1,
}
_GEMMA: dict[str, Any] = {
    **{name: value for name, value in _SHAPE.items() if name != "initializer_range"},
    "num_key_value_heads": 2,
    "head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 34,
    "use_bidirectional_attention": True,
    "initializer_range": 0.1,
}
"""EmbeddingGemma's"""
ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": _SHAPE,
    "Roberta": _SHAPE,
    "XLMRoberta": {**_SHAPE, "type_vocab_size": 1},
    "DistilBert": _DISTILBERT,
    "ModernBert": _MODERNBERT,
}


def save_encoder(family: str, path: Path, kind: str = "Model", **changes: Any) -> Any:
    """`kind`: "Model" or "ForSequenceClassification" and the like. Returns transformers' module, float32."""
    import transformers

    shape = _GEMMA if family == "Gemma3Text" else ENCODERS[family]
    config = getattr(transformers, f"{family}Config")(**{**shape, **changes})
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}{kind}")(config).float().eval()
    model.save_pretrained(path)
    _save_tokenizer(path)
    return model


def _save_tokenizer(path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    marks = {"[CLS]": 0, "[PAD]": 1, "[SEP]": 2, "[UNK]": 3}
    vocab = {**marks, **{c: i + 4 for i, c in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 0), ("[SEP]", 2)]
    )
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=512, model_input_names=inputs, **names
    ).save_pretrained(path)
