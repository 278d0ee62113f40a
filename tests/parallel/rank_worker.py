"""A process that is a rank of any number of groups, one after another, and does what the test says over a pipe:
`rank_worker.py DESCRIPTOR`. Answers are (True, result) or (False, words of the RuntimeError)."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any, cast

import torch
from rank_cases import draw_case, hash_of, run_case, run_deal_case

from engine.executor.joining import MakeGroup, named
from engine.parallel.socket_group import SocketGroup


class Worker:
    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._group: Any = None

    def join(self, name: str, rank: int, size: int, cache_dir: Path, make_group: str) -> None:
        fd = recv_handle(self._pipe)
        if self._group is not None:
            self._group.close()
        try:
            self._group = cast(MakeGroup, named(make_group))(fd, name, rank, size, cache_dir)
        finally:
            os.close(fd)

    def join_by_sockets(self, name: str, rank: int, others: list[bool], cache_dir: Path) -> None:
        sockets = [recv_handle(self._pipe) if is_other else -1 for is_other in others]
        if self._group is not None:
            self._group.close()
        self._group = SocketGroup(sockets, name, rank, cache_dir)

    def abort(self, reason: str) -> None:
        self._group.abort(reason)

    def leave(self) -> None:
        self._group.close()
        self._group.close()

    def run_cases(self, first: int, count: int, most_rows: int, most_columns: int) -> list[str]:
        cases = (draw_case(seed, self._group.size, most_rows, most_columns) for seed in range(first, first + count))
        return [hash_of(self._run(case)) for case in cases]

    def run_deal_cases(self, first: int, count: int, most_rows: int, most_columns: int) -> list[str]:
        group = self._group
        cases = (draw_case(seed, group.size, most_rows, most_columns) for seed in range(first, first + count))
        return [hash_of(run_deal_case(case, group.rank, group.all_to_all, group.name)) for case in cases]

    def run_many(self, seed: int, kinds: int, count: int) -> list[int]:
        """Collectives of `kinds` cases in random order, with pauses that only this rank makes; which of them came out
        otherwise than the first time."""
        cases = [draw_case(kind, self._group.size, 3, 40) for kind in range(kinds)]
        order, pauses = random.Random(seed), random.Random(self._group.rank)
        first = [self._run(case) for case in cases]
        wrong = []
        for i in range(count):
            kind = order.randrange(kinds)
            if pauses.random() < 0.01:
                time.sleep(pauses.choice((0.0, 0.0005, 0.002)))
            if i % 1000 == 500 and self._group.rank == i // 1000 % self._group.size:
                time.sleep(0.05)  # the others wait until they sleep
            if not torch.equal(self._run(cases[kind]), first[kind]):
                wrong.append(i)
        return wrong

    def _run(self, case: Any) -> torch.Tensor:
        group = self._group
        return run_case(case, group.rank, group.all_reduce, group.all_gather, group.name)

    def reduce(self, rows: int, columns: int, dtype: torch.dtype, has_residual: bool = False) -> None:
        residual = torch.ones(rows, columns, dtype=dtype) if has_residual else None
        self._group.all_reduce(torch.ones(rows, columns), residual, dtype, self._group.name)

    def gather(self, rows: int, columns: list[int]) -> None:
        self._group.all_gather(torch.ones(rows, columns[self._group.rank]), columns, self._group.name)

    def deal(self, rows: int, columns: list[int]) -> None:
        self._group.all_to_all(torch.ones(rows, sum(columns)), columns, self._group.name)

    def reduce_and_measure(self) -> float:
        """Seconds of the CPU that the call took."""
        began = time.thread_time()
        self.reduce(1, 8, torch.float32)
        return time.thread_time() - began

    def reduce_and_abort(self, reason: str) -> None:
        threading.Timer(0.1, self._group.abort, (reason,)).start()
        self.reduce(1, 8, torch.float32)

    def compute_both(self, rows: list[int], columns: list[int], unbacked: bool) -> list[str]:
        """Hashes of `both_ops` of each number of rows: rank 0 compiles it, once, the others call it as it is."""
        group, function = self._group, both_ops
        if group.rank == 0:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            function = torch.compile(both_ops, fullgraph=True, dynamic=True)
        results = []
        for count in rows:
            x = torch.arange(count * 4, dtype=torch.float32).view(count, 4) + group.rank
            if unbacked:
                torch._dynamo.decorators.mark_unbacked(x, 0)
            y = function(x, columns[group.rank], columns, group.all_reduce, group.all_gather, group.name)
            results.append(hash_of(y))
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        if graphs != (group.rank == 0):
            raise RuntimeError(f"{graphs} graphs")
        return results

    def mappings(self) -> list[str]:
        return [line for line in Path("/proc/self/maps").read_text().splitlines() if "pageloom-group" in line]

    def serve(self) -> None:
        while True:
            try:
                name, arguments = self._pipe.recv()
            except EOFError:
                return
            try:
                self._pipe.send((True, getattr(self, name)(*arguments)))
            except RuntimeError as error:
                self._pipe.send((False, str(error)))


def both_ops(
    x: torch.Tensor, own: int, columns: list[int], all_reduce: Any, all_gather: Any, group: str
) -> torch.Tensor:
    """Nothing else, which would take a compiler's time."""
    summed = all_reduce(x, None, torch.bfloat16, group)
    return all_gather(all_reduce(x, summed, torch.bfloat16, group)[:, :own], columns, group)


if __name__ == "__main__":
    torch.set_num_threads(1)
    Worker(Connection(int(sys.argv[1]))).serve()
