"""A GGUF file in another type, by llama.cpp itself. Runs in the environment `llama` of `setup.sh`.

python requantize_gguf.py FILE.gguf OUT.gguf BF16
"""

from __future__ import annotations

import sys


def main(source: str, out: str, kind: str) -> int:
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.allow_requantize = True
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    return int(llama_cpp.llama_model_quantize(source.encode(), out.encode(), params))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
