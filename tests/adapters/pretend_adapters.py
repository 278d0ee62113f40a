"""Run by test_device_adapters.py in a process of its own: `python pretend_adapters.py FOLDER COMPILE GRAPHS` serves
adapters on a pretend GPU, and compares with a CPU's tokens."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / room) for room in ("adapters", "end_to_end", "models", "pretend_gpu")]

from pretend_gpu import pretend_gpu  # noqa: E402 - the path comes first
from test_merged_weights import PROMPT, open_llm, tokens  # noqa: E402
from tiny_adapters import ALL, request, save_adapter  # noqa: E402
from tiny_families import save_tiny  # noqa: E402

from engine import SamplingParams  # noqa: E402

SHORT = PROMPT[:14]
"""an interpreter computes it"""
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)


def main(folder: Path, compile: str, graphs: str) -> None:
    model = save_tiny("Llama", folder / "model", head_dim=64)
    for index in range(2):
        save_adapter(folder / str(index), model, index, rank=8 * (1 + index), targets=ALL, size=0.1)
    adapters = [None, request(folder / "0", 1), request(folder / "1", 2)]
    with open_llm(folder / "model") as llm:
        expected = tokens(llm, [SHORT] * 3, adapters, GREEDY)
    assert expected[0] != expected[1] != expected[2]
    full = graphs in ("both", "full_decode")
    backend, dtype = ("flashinfer", "float16") if full else ("reference", "float32")
    options = {"device": "cuda", "dtype": dtype, "attention_backend": backend, "compile": compile, "graphs": graphs}
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_lora_rank": 16}
    with pretend_gpu(inductor=False), open_llm(folder / "model", **sizes, **options) as llm:
        llm.wait_compiled()
        assert tokens(llm, [SHORT] * 3, adapters, GREEDY) == expected
        assert tokens(llm, [SHORT] * 2, [adapters[2], None], GREEDY) == [expected[2], expected[0]]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
