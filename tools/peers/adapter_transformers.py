"""transformers' generate() on left-padded batches, as people run it: a batch goes on until its longest request is done
(W3 in batches of 32 in order of arrival), and only the tokens that were asked for count."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

from entrypoints.bench.metrics import Record
from entrypoints.bench.workloads import BenchRequest

BATCH_OF_MIXED = 32
PAD = 2


def load_model(path: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    file = Path(path)
    if file.is_dir():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict({name: torch.as_tensor(value) for name, value in tensors.items()}, strict=False)
    model.tie_weights()
    return model.to(torch.bfloat16)


class Transformers:
    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        import transformers

        torch.set_num_threads(settings["threads"])
        self._model = load_model(settings["model"])
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        self.facts = {"model": settings["model"], "threads": settings["threads"], "batches": "static"}

    def run(self, requests: list[BenchRequest]) -> tuple[list[Record], float, float]:
        mixed = len({(len(r.prompt_token_ids), r.max_tokens) for r in requests}) > 1
        size = BATCH_OF_MIXED if mixed else len(requests)
        records: list[Record] = []
        start = time.perf_counter()
        for first in range(0, len(requests), size):
            batch = requests[first : first + size]
            times = self._batch(batch)
            gaps = [after - before for before, after in itertools.pairwise(times)] if len(requests) == 1 else []
            records += [
                Record(start, times[0], times[-1], len(r.prompt_token_ids), r.max_tokens, r.max_tokens, gaps)
                for r in batch
            ]
        return records, start, time.perf_counter()

    def _batch(self, batch: list[BenchRequest]) -> list[float]:
        """The time of every step."""
        import torch
        from transformers import GenerationConfig, StoppingCriteria

        times: list[float] = []

        class Stamp(StoppingCriteria):
            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
                times.append(time.perf_counter())
                return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        longest, count = max(len(r.prompt_token_ids) for r in batch), max(r.max_tokens for r in batch)
        ids = torch.full((len(batch), longest), PAD)
        mask = torch.zeros_like(ids)
        for i, request in enumerate(batch):
            ids[i, longest - len(request.prompt_token_ids) :] = torch.tensor(request.prompt_token_ids)
            mask[i, longest - len(request.prompt_token_ids) :] = 1
        settings = GenerationConfig(
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            eos_token_id=None,
            pad_token_id=PAD,
            use_cache=True,
        )
        with torch.inference_mode():
            self._model.generate(
                input_ids=ids, attention_mask=mask, generation_config=settings, stopping_criteria=[Stamp()]
            )
        return times


def load(settings: dict[str, Any]) -> Transformers:
    return Transformers(settings)
