"""vLLM's CPU build, through the add_request/step loop that its own LLM.generate runs."""

from __future__ import annotations

import os
import time
from typing import Any

from entrypoints.bench.metrics import Record
from entrypoints.bench.workloads import BenchRequest


class Vllm:
    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        import vllm
        from vllm.sampling_params import RequestOutputKind

        self._vllm, self._delta = vllm, RequestOutputKind.DELTA
        options = {"dtype": settings["dtype"], "max_model_len": 4096, "seed": 0, "max_num_seqs": 128}
        self._llm = vllm.LLM(model=settings["model"], **options)
        self._engine = self._llm.llm_engine
        self._next_id = 0
        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        given = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
        self.facts = {"model": settings["model"], "options": options, "environment": given}

    def run(self, requests: list[BenchRequest]) -> tuple[list[Record], float, float]:
        if requests[0].beams:
            return self._search(requests)
        start = time.perf_counter()
        records: dict[str, Record] = {}
        for request in requests:
            self._next_id += 1
            name = f"r{self._next_id}e"
            records[name] = Record(start, None, start, len(request.prompt_token_ids), 0, request.max_tokens)
            params = self._vllm.SamplingParams(
                temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, output_kind=self._delta
            )
            self._engine.add_request(name, {"prompt_token_ids": request.prompt_token_ids}, params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                now = time.perf_counter()
                count = sum(len(choice.token_ids) for choice in output.outputs)
                # Newer versions append a suffix to the name that they were given.
                record = records[output.request_id.split("e")[0] + "e"]
                if count and record.first_token is None:
                    record.first_token = now
                elif count:
                    record.gaps.append(now - record.finished)
                if count:
                    record.finished = now
                    record.output_tokens += count
        return list(records.values()), start, time.perf_counter()

    def _search(self, requests: list[BenchRequest]) -> tuple[list[Record], float, float]:
        """Its own beam search, all prompts at once; they have one width and length."""
        from vllm.sampling_params import BeamSearchParams

        first = requests[0]
        params = BeamSearchParams(beam_width=first.beams, max_tokens=first.max_tokens, ignore_eos=True)
        start = time.perf_counter()
        outputs = self._llm.beam_search([{"prompt_token_ids": r.prompt_token_ids} for r in requests], params)
        end = time.perf_counter()
        counts = [len(o.sequences[0].tokens) - len(r.prompt_token_ids) for o, r in zip(outputs, requests)]
        records = [
            Record(start, end, end, len(r.prompt_token_ids), count, r.max_tokens) for r, count in zip(requests, counts)
        ]
        return records, start, end


def load(settings: dict[str, Any]) -> Vllm:
    return Vllm(settings)
