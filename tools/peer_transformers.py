"""transformers as a peer: the named workloads through `generate()` on left-padded static batches, exact lengths.

usage: python tools/peer_transformers.py [MODEL] [--workload W1,W2] [--reps 3]. MODEL is a Hugging Face directory or a
GGUF file; without it, the demo model. The last line is JSON, in `engine-bench`'s shape. A batch answers when it is
done; W3 runs in arrival order in batches of 32.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, StoppingCriteria
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine.frontend.demo import demo_model_path
from entrypoints.bench.metrics import Figures, Record, figures, median_of, table
from entrypoints.bench.workloads import WARM_UP_REPEAT, BenchRequest, workload

BATCH = {"W3": 32}


class Stamp(StoppingCriteria):
    """Notes the time of every step and never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.monotonic())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def load(path: str, dtype: torch.dtype) -> Any:
    file = Path(path)
    if file.is_dir():
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict({name: torch.as_tensor(value) for name, value in tensors.items()}, strict=False)
    model.tie_weights()
    return model.to(dtype)


@torch.inference_mode()
def run_batch(model: Any, batch: list[BenchRequest]) -> Stamp:
    longest = max(len(r.prompt_token_ids) for r in batch)
    count = max(r.max_tokens for r in batch)
    ids = torch.full((len(batch), longest), 2)
    mask = torch.zeros_like(ids)
    for i, request in enumerate(batch):
        ids[i, longest - len(request.prompt_token_ids) :] = torch.tensor(request.prompt_token_ids)
        mask[i, longest - len(request.prompt_token_ids) :] = 1
    stamp = Stamp()
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=count, min_new_tokens=count, eos_token_id=None, pad_token_id=2, use_cache=True
    )
    model.generate(input_ids=ids, attention_mask=mask, generation_config=settings, stopping_criteria=[stamp])
    return stamp


def run(model: Any, name: str, requests: list[BenchRequest]) -> Figures:
    size = BATCH.get(name, len(requests))
    records, start = [], time.monotonic()
    for first in range(0, len(requests), size):
        batch = requests[first : first + size]
        stamp = run_batch(model, batch)
        times = stamp.times
        for r in batch:
            prompt_len = len(r.prompt_token_ids)
            records += [Record(start, times[0], times[-1], prompt_len, r.max_tokens, r.max_tokens)]
    return figures(records, start, time.monotonic())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--workload", default="W1,W2,W3,W4,W5")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--reps", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load(options.model or demo_model_path(), getattr(torch, options.dtype))
    run(model, "WARM", workload("WARM", WARM_UP_REPEAT))
    results: list[dict[str, object]] = []
    for name in options.workload.split(","):
        if name in ("W1", "W5"):
            run(model, name, workload(name, WARM_UP_REPEAT))
        result = median_of([run(model, name, workload(name, i)) for i in range(options.reps)])
        print(table(f"transformers, {name}", result), flush=True)
        results.append({"workload": name, "mode": "transformers static", **result})
    print(json.dumps({"command": "peer_transformers", "results": results}))


if __name__ == "__main__":
    main()
