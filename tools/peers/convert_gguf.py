"""A GGUF file → a Hugging Face directory (bf16 safetensors and tokenizer), for the peers that read no GGUF.

Runs in the environment `ref` of `setup.sh`: python convert_gguf.py FILE.gguf FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),  # without it the weights stay packed
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the saved weights are dense
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
