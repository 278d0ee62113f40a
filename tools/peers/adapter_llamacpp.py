"""llama.cpp through llama-cpp-python: one request after another, where it is the best peer."""

from __future__ import annotations

import importlib.metadata
import time
from pathlib import Path
from typing import Any

from entrypoints.bench.metrics import Record
from entrypoints.bench.workloads import BenchRequest


class LlamaCpp:
    def __init__(self, settings: dict[str, Any]) -> None:
        import llama_cpp

        threads, amx = settings["threads"], True
        if settings["weights"] != "bf16" and _has_amx():
            amx = False
            _without_amx_buffers()
        self._llm = llama_cpp.Llama(
            settings["model"],
            n_ctx=4096,
            n_threads=threads,
            n_threads_batch=threads,
            n_batch=2048,
            n_ubatch=512,
            verbose=False,
        )
        self.versions = {"llama-cpp-python": importlib.metadata.version("llama-cpp-python")}
        self.facts = {"model": settings["model"], "threads": threads, "amx_buffers": amx}

    def run(self, requests: list[BenchRequest]) -> tuple[list[Record], float, float]:
        start = time.perf_counter()
        return [self._one(request, start) for request in requests], start, time.perf_counter()

    def _one(self, request: BenchRequest, start: float) -> Record:
        """Waiting for the requests before it counts: all were submitted at the start."""
        record = Record(start, None, start, len(request.prompt_token_ids), 0, request.max_tokens)
        self._llm.reset()
        stream = self._llm.generate(request.prompt_token_ids, top_k=1, temp=0.0, repeat_penalty=1.0, reset=True)
        for _ in stream:
            now = time.perf_counter()
            if record.first_token is None:
                record.first_token = now
            else:
                record.gaps.append(now - record.finished)
            record.finished = now
            record.output_tokens += 1
            if record.output_tokens == request.max_tokens:
                break
        stream.close()
        return record


def _has_amx() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "amx_int8" in cpuinfo.read_text()


def _without_amx_buffers() -> None:
    """Its AMX path crashes at the first token of packed weights (ggml-org/llama.cpp#20824); `Llama` has no switch."""
    import llama_cpp.llama_cpp as binding

    defaults = binding.llama_model_default_params

    def changed() -> Any:
        params = defaults()
        params.use_extra_bufts = False
        return params

    binding.llama_model_default_params = changed


def load(settings: dict[str, Any]) -> LlamaCpp:
    return LlamaCpp(settings)
