"""Graphs on a CPU: a replay calls what was captured again, into the tensors that the capture returned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from attention_backends.interface import AttentionBatch, AttentionLayer, Capabilities
from attention_backends.reference import ReferenceBackend

T = TypeVar("T")


class FakeGraph:
    def __init__(self, call: Callable[[], Any], outputs: list[torch.Tensor]) -> None:
        self._call = call
        self._outputs = outputs

    def replay(self) -> None:
        for target, value in zip(self._outputs, tensors(self._call()), strict=True):
            target.copy_(value)


class FakeCapturer:
    """Capturing leaves NaN in what replays will write, so that nobody can live on what a capture computed."""

    def __init__(self, bytes_per_session: int = 1000) -> None:
        self.bytes_per_session = bytes_per_session
        self.taken_bytes = self.captures = 0
        self.before_capture: Callable[[], None] = lambda: None

    @contextmanager
    def session(self) -> Iterator[None]:
        yield
        self.taken_bytes += self.bytes_per_session

    def warm_up(self, function: Callable[[], object]) -> None:
        function()

    def capture(self, function: Callable[[], T]) -> tuple[FakeGraph, T]:
        self.before_capture()
        self.captures += 1
        assert isinstance(function, partial)

        def call() -> T:
            # a piece empties the list of its arguments
            return function.func(*(list(a) if isinstance(a, list) else a for a in function.args))

        result = call()
        outputs = tensors(result)
        for output in outputs:
            if output.is_floating_point():
                output.fill_(torch.nan)
        return FakeGraph(call, outputs), result

    def memory_bytes(self) -> int:
        return self.taken_bytes


def tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for item in value for leaf in tensors(item)] if isinstance(value, (list, tuple)) else []


class CaptureSafeReference(ReferenceBackend):
    """The oracle, held to what a capture-safe backend is promised; `out` starts as NaN, as memory of a pool may."""

    def __init__(self) -> None:
        self.batches: list[AttentionBatch] = []

    @classmethod
    def capabilities(cls) -> Capabilities:
        from dataclasses import replace

        return replace(super().capabilities(), capture_safe=True)

    def build_metadata(self, batch: AttentionBatch) -> AttentionBatch:
        self.batches.append(batch)
        size = batch.graph_size
        if size is not None:
            real = len(batch.query_lens_host)
            assert batch.num_seqs == batch.num_tokens == batch.num_decodes == size == len(batch.seq_lens)
            assert batch.query_start_loc.tolist() == list(range(size + 1))
            assert batch.seq_lens.tolist() == [*batch.seq_lens_host, *[0] * (size - real)]
            assert (batch.slot_mapping[real:] == -1).all() and batch.max_query_len == 1
        else:
            assert batch.num_tokens == sum(batch.query_lens_host) == len(batch.slot_mapping)
            assert batch.num_seqs == len(batch.query_lens_host) == len(batch.seq_lens_host)
        return batch

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: AttentionLayer,
        metadata: object,
    ) -> None:
        out.fill_(torch.nan)
        super().forward(q, k, v, out, kv_cache, layer, metadata)
