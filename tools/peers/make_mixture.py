"""A mixture of experts with random weights in Qwen3-MoE's shape, as a Hugging Face directory and as a BF16 GGUF file
with a real tokenizer, for every engine of a comparison.

    python tools/peers/make_mixture.py TOKENIZER_FOLDER TOKENIZER.gguf FOLDER

FOLDER then has the names that `compare_peers.py` looks for in a `--peers-dir`.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, get_tensor_name_map, quants
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

SHAPE: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 384,
    "norm_topk_prob": True,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}
NAME = "smollm2-135m-bf16"
"""of the model in `compare_peers.py`'s catalogue"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("tokenizer_gguf", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    reader = GGUFReader(str(arguments.tokenizer_gguf))
    vocabulary = len(reader.fields["tokenizer.ggml.tokens"].data)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SHAPE, vocab_size=vocabulary, bos_token_id=1, eos_token_id=2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    directory = arguments.folder / NAME
    model.save_pretrained(directory)
    for file in arguments.tokenizer.glob("*token*"):
        shutil.copy(file, directory)
    write_gguf(model, reader, arguments.folder / f"{NAME}.gguf")


def write_gguf(model: PreTrainedModel, tokenizer: GGUFReader, path: Path) -> None:
    config = model.config
    writer = GGUFWriter(str(path), "qwen3moe")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    for name, field in tokenizer.fields.items():
        if name.startswith("tokenizer."):
            kind = field.types[0]
            inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, inner)
    name_map = get_tensor_name_map(MODEL_ARCH.QWEN3MOE, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        parts = {name: tensor}
        if name.endswith("experts.gate_up_proj"):
            halves = zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True)
            parts = {name.replace("gate_up_proj", f"{part}.weight"): half for part, half in halves}
        elif name.endswith("experts.down_proj"):
            parts = {f"{name}.weight": tensor}
        for part, rows in parts.items():
            plain = rows.ndim < 2 or name.endswith("mlp.gate.weight")
            stored = GGMLQuantizationType.F32 if plain else GGMLQuantizationType.BF16
            short = name_map.get_name(part, try_suffixes=(".weight",))
            values = np.ascontiguousarray(rows.float().numpy())
            writer.add_tensor(short, quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
