"""OpenVINO GenAI's ContinuousBatchingPipeline (paged attention on CPUs), every handle read after every step."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from entrypoints.bench.metrics import Record
from entrypoints.bench.workloads import BenchRequest


class OpenVino:
    def __init__(self, settings: dict[str, Any]) -> None:
        import openvino
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = settings["kv_gib"]
        scheduler.max_num_seqs = 128
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        properties = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": settings["threads"]}
        self._openvino, self._genai = openvino, openvino_genai
        self._pipe = openvino_genai.ContinuousBatchingPipeline(settings["model"], scheduler, "CPU", properties)
        self._next_id = 0
        self.versions = {"openvino": openvino.__version__, "openvino-genai": openvino_genai.__version__}
        self.facts = {"model": settings["model"], "properties": properties, "kv_gib": settings["kv_gib"]}

    def run(self, requests: list[BenchRequest]) -> tuple[list[Record], float, float]:
        start = time.perf_counter()
        live = [
            (self._submit(r), Record(start, None, start, len(r.prompt_token_ids), 0, r.max_tokens)) for r in requests
        ]
        records = [record for _, record in live]
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
            now = time.perf_counter()
            for handle, record in live:
                while handle.can_read():
                    for output in handle.read().values():
                        _take(record, len(output.generated_ids), now)
            live = [(handle, record) for handle, record in live if record.output_tokens < record.wanted_tokens]
        return records, start, time.perf_counter()

    def _submit(self, request: BenchRequest) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = request.max_tokens, True, False
        ids = self._openvino.Tensor(np.array([request.prompt_token_ids], dtype=np.int64))
        self._next_id += 1
        return self._pipe.add_request(self._next_id, ids, config)


def _take(record: Record, count: int, now: float) -> None:
    if not count:
        return
    if record.first_token is None:
        record.first_token = now
    else:
        record.gaps.append(now - record.finished)
    record.finished = now
    record.output_tokens += count


def load(settings: dict[str, Any]) -> OpenVino:
    return OpenVino(settings)
