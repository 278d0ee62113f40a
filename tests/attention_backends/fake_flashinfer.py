"""FlashInfer's two wrappers and the device they run on, for a CPU: same constructors, `plan` and `run`, brute force
inside.

The device is a queue: whatever a real call would queue is a function here, and the test says when queued work runs. As
in the library, `plan` fills a host buffer that belongs to the wrapper and queues its copy to the workspace, and `run`
computes only from what the device holds by then; so a buffer that is refilled too early gives wrong numbers here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from attention_backends.flashinfer_library import Runtime
from attention_backends.page_kernels.host import HostKernels


class Stream:
    """Runs work in order: at once, or `late`: when somebody waits for it or the test lets it."""

    def __init__(self, late: bool = False) -> None:
        self.late = late
        self.queued: list[Callable[[], None]] = []
        self.done = 0
        self.waits = 0
        self.recording: list[Callable[[], None]] | None = None

    def push(self, work: Callable[[], None]) -> None:
        if self.recording is not None:
            self.recording.append(work)
            return
        self.queued.append(work)
        if not self.late:
            self.run_until(len(self.queued))

    def run_until(self, count: int) -> None:
        while self.done < min(count, len(self.queued)):
            self.done += 1
            self.queued[self.done - 1]()

    def capture(self, function: Callable[[], None]) -> list[Callable[[], None]]:
        self.recording = []
        function()
        recorded, self.recording = self.recording, None
        return recorded

    def replay(self, recorded: Sequence[Callable[[], None]]) -> None:
        for work in recorded:
            self.push(work)


class StreamEvent:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._at = 0

    def record(self) -> None:
        self._at = len(self._stream.queued)

    def synchronize(self) -> None:
        if self._stream.done < self._at:
            self._stream.waits += 1
            self._stream.run_until(self._at)


class QueuedKernels(HostKernels):
    """The torch twins, each call queued as a kernel launch would be."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def gather_pages(self, *args: object) -> None:
        super_call = super().gather_pages
        self._stream.push(lambda: super_call(*args))

    def write_kv(self, *args: object) -> None:
        super_call = super().write_kv
        self._stream.push(lambda: super_call(*args))


@dataclass(frozen=True)
class PlanByValue:
    """What `run` takes from the wrapper's attributes, so what a captured graph holds for ever."""

    window_left: int
    soft_cap: float
    sm_scale: float
    causal: bool


class FakeWrapper:
    _stream: Stream

    def __init__(self, floats: torch.Tensor, kv_layout: str, backend: str) -> None:
        assert (kv_layout, backend) == ("HND", "fa2")
        self._source = np.zeros(0, np.int32)
        self._workspace = torch.empty(8 << 20, dtype=torch.uint8)
        self._by_value: PlanByValue | None = None
        self.reset_workspace_buffer(floats, self._workspace)

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        assert float_workspace_buffer.dtype == int_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.data_ptr() % 16 == int_workspace_buffer.data_ptr() % 16 == 0
        self._workspace = int_workspace_buffer
        self._source = np.zeros(int_workspace_buffer.numel() // 4, np.int32)

    def _send_schedule(self, schedule: torch.Tensor) -> None:
        """Into the pinned source now, to the device when the queue comes to it."""
        source, workspace, count = self._source, self._workspace.view(torch.int32), schedule.numel()
        source[:count] = schedule.numpy()
        self._stream.push(lambda: workspace[:count].copy_(torch.from_numpy(source[:count])))

    def _remember(
        self,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float,
        causal: bool,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        self._by_value = PlanByValue(window_left, logits_soft_cap or 0.0, sm_scale, causal)
        self._dtypes = (q_data_type, kv_data_type)

    def _queue_run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor,
        k_scale: float | None,
        v_scale: float | None,
        out: torch.Tensor | None,
        buffers: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        assert (q.dtype, paged_kv_cache.dtype) == self._dtypes
        assert q.stride(-1) == 1
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype)
        assert out.shape == q.shape and out.dtype == q.dtype
        assert out.is_contiguous(), "the library would write rows without gaps"
        plan, target, workspace = self._by_value, out, self._workspace.view(torch.int32)
        assert plan is not None

        def work() -> None:
            attended = attend(q, paged_kv_cache, workspace, buffers, plan, k_scale or 1.0)
            target.copy_(attended.to(target.dtype))
            if v_scale is not None and v_scale != 1.0:
                target.mul_(v_scale)

        self._stream.push(work)
        return out


class FakeDecodeWrapper(FakeWrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert use_tensor_cores
        self._graph = use_cuda_graph
        given = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        if use_cuda_graph:
            assert all(buffer is not None for buffer in given)
        self._buffers: list[torch.Tensor] = [buffer for buffer in given if buffer is not None]
        super().__init__(float_workspace_buffer, kv_layout, backend)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
        non_blocking: bool = True,
        seq_lens: torch.Tensor | None = None,
    ) -> None:
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32 and non_blocking
        assert len(indptr) == len(last_page_len) + 1 and sm_scale is not None and kv_data_type is not None
        assert seq_lens is not None
        check_lengths(seq_lens, indptr, last_page_len, page_size)
        if self._graph:
            buffers = self._buffers
            assert len(buffers[0]) == len(indptr), "the batch size of a graph is fixed"
            assert len(indices) <= len(buffers[1])
            for buffer, value in zip(buffers, (indptr, indices, last_page_len)):
                self._stream.push(lambda buffer=buffer, value=value: buffer[: len(value)].copy_(value))
        else:
            self._buffers = [indptr, indices, last_page_len]
        self._send_schedule(torch.cat((torch.arange(len(indptr), dtype=torch.int32), indptr)))
        self._remember(window_left, logits_soft_cap, sm_scale, False, q_data_type, kv_data_type)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor,
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert q.shape[0] == len(self._buffers[2])
        return self._queue_run(q, paged_kv_cache, k_scale, v_scale, out, self._buffers)


class FakePrefillWrapper(FakeWrapper):
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        non_blocking: bool = True,
        seq_lens: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
    ) -> None:
        assert causal and non_blocking and sm_scale is not None and kv_data_type is not None
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert max_token_per_sequence == int((qo_indptr[1:] - qo_indptr[:-1]).max())
        assert seq_lens is not None
        check_lengths(seq_lens, paged_kv_indptr, paged_kv_last_page_len, page_size)
        self._rows = int(qo_indptr[-1])
        self._buffers = [paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len]
        self._send_schedule(torch.cat((qo_indptr, paged_kv_indptr)))
        self._remember(window_left, logits_soft_cap, sm_scale, True, q_data_type, kv_data_type)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor,
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert q.shape[0] == self._rows
        return self._queue_run(q, paged_kv_cache, k_scale, v_scale, out, self._buffers)


def check_lengths(seq_lens: torch.Tensor, indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> None:
    """seq_lens says what indptr and last_page_len say, in full or as its maximum only."""
    lens = ((indptr[1:] - indptr[:-1] - 1) * page_size + last_page_len).where(indptr[1:] > indptr[:-1], 0)
    if len(seq_lens) == len(lens):
        assert torch.equal(seq_lens, lens.to(torch.int32))
    else:
        assert seq_lens.tolist() == [int(lens.max())]


def attend(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    schedule: torch.Tensor,
    buffers: Sequence[torch.Tensor],
    plan: PlanByValue,
    k_scale: float,
) -> torch.Tensor:
    """Row by row in float64. The schedule must be that of the batch whose pages the buffers hold."""
    indptr, indices, last_page_lens = buffers
    count, page_size = len(last_page_lens), kv_cache.shape[3]
    query_starts, planned = schedule[: count + 1].tolist(), schedule[count + 1 : 2 * count + 2]
    if not torch.equal(planned, indptr):
        return torch.full(q.shape, float("nan"))  # computed with the plan of another step
    result = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // kv_cache.shape[2]
    for seq, (begin, end) in enumerate(zip(indptr.tolist(), indptr.tolist()[1:])):
        pages = indices[begin:end].long()
        assert ((pages >= 0) & (pages < kv_cache.shape[0])).all(), "a page that does not exist was named"
        length = (end - begin - 1) * page_size + int(last_page_lens[seq]) if end > begin else 0
        raw = (
            kv_cache.view(torch.uint8)[pages].view(kv_cache.dtype) if kv_cache.dtype.itemsize == 1 else kv_cache[pages]
        )
        keys, values = (raw[:, half].double().transpose(1, 2).flatten(0, 1)[:length] for half in (0, 1))
        rows = range(query_starts[seq], query_starts[seq + 1])
        for row in rows if length else ():
            at = length - len(rows) + (row - rows[0])  # causal: aligned at the end; without causality there is one row
            position = torch.arange(length)
            seen = (position <= at) if plan.causal else torch.ones(length, dtype=torch.bool)
            if plan.window_left >= 0:
                seen &= position >= at - plan.window_left
            scores = (
                torch.einsum("hgd,khd->hgk", q[row].double().unflatten(0, (-1, group)), keys * k_scale) * plan.sm_scale
            )
            if plan.soft_cap > 0:
                scores = plan.soft_cap * torch.tanh(scores / plan.soft_cap)
            weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1)
            result[row] = torch.einsum("hgk,khd->hgd", weights, values).flatten(0, 1)
    return result


def fake_runtime(stream: Stream | None = None, only_longest: bool = False) -> Runtime:
    stream = stream or Stream()
    decode = type("Decode", (FakeDecodeWrapper,), {"_stream": stream})
    prefill = type("Prefill", (FakePrefillWrapper,), {"_stream": stream})
    return Runtime(
        make_decode=decode,
        make_prefill=prefill,
        only_longest=only_longest,
        device=torch.device("cpu"),
        multiprocessors=4,
        kernels=QueuedKernels(stream),
        make_event=lambda: StreamEvent(stream),
        capturing=lambda: stream.recording is not None,
    )
