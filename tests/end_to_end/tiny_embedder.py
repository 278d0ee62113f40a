"""A tiny random embedding model: the bare decoder, without head and prefix of names, as Qwen3-Embedding and e5-mistral
are stored, and what sentence-transformers writes beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tiny_families import save_tokenizer


def save_bare_embedder(path: Path) -> Any:
    """Returns transformers' module, float32."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    torch.manual_seed(4)
    model = transformers.Qwen3Model(config).float().eval()
    model.save_pretrained(path)
    save_tokenizer(path)
    return model


def sentence_transformer(path: Path, mode: str, *, normalize: bool, prompts: dict[str, str] | None = None) -> None:
    """What sentence-transformers writes beside a model."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    names = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": names[i], "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, mode: True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts or {}}))
