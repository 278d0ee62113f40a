"""The reports of several ranks as one of all: what the memory ledger and the ready line say of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from engine.errors import EngineError
from engine.reports import LoadReport, WarmUpReport


def group_load_report(
    device: Literal["cpu", "cuda"],
    reports: Sequence[LoadReport],
    memory_before: tuple[int, int] | None = None,
    hosts: Sequence[str] = (),
) -> LoadReport:
    """`reports` by rank. CPU ranks of one host (`hosts`, by rank; all of them, where nothing is said) share its memory:
    what each takes is added up, and what is there is `memory_before`, (total, free) bytes of rank 0's host before any
    rank began to load (None: what rank 0 saw). GPU ranks have one each, as hosts have, and as many blocks: the largest
    of what they take has to fit into the smallest of what is there.

    Raises `EngineError` where ranks disagree about what all of them must have in common.
    """
    first = reports[0]
    for name in ("windows", "attention_backend", "exact_lengths"):
        found = {getattr(report, name) for report in reports}
        if len(found) > 1:
            each = ", ".join(f"rank {rank}: {getattr(report, name)}" for rank, report in enumerate(reports))
            raise EngineError(f"the ranks of a group disagree about {name}: {each}")
    if device == "cpu" and len(set(hosts)) > 1:
        return _of_several_hosts(reports, memory_before, hosts)
    if device == "cpu":
        of_all: Callable[[list[int]], int] = sum
        total, free = memory_before or (first.device_bytes_total, first.device_bytes_free)
    else:
        of_all = max
        total = min(report.device_bytes_total for report in reports)
        free = min(report.device_bytes_free for report in reports)
    return LoadReport(
        weight_bytes=of_all([report.weight_bytes for report in reports]),
        activation_bytes=of_all([report.activation_bytes for report in reports]),
        workspace_bytes=of_all([report.workspace_bytes for report in reports]),
        graph_bytes=of_all([report.graph_bytes for report in reports]),
        block_bytes=of_all([report.block_bytes for report in reports]),
        windows=first.windows,
        device_bytes_total=total,
        device_bytes_free=free,
        attention_backend=first.attention_backend,
        exact_lengths=first.exact_lengths,
    )


def _of_several_hosts(
    reports: Sequence[LoadReport], memory_before: tuple[int, int] | None, hosts: Sequence[str]
) -> LoadReport:
    """Each host as one device that has a memory."""
    of_hosts = []
    for host in dict.fromkeys(hosts):
        theirs = [report for report, where in zip(reports, hosts, strict=True) if where == host]
        of_hosts.append(group_load_report("cpu", theirs, memory_before if host == hosts[0] else None))
    return group_load_report("cuda", of_hosts)


def group_warm_up_report(reports: Sequence[WarmUpReport]) -> WarmUpReport:
    """`reports` by rank. A group is ready when its slowest rank is. Pieces are rank 0's, since ranks run the same ones;
    those compiled now are added up: 0 says that this start compiled nothing anywhere. Graphs lie on each rank's own
    device, so the largest counts."""
    return WarmUpReport(
        distinct_pieces=reports[0].distinct_pieces,
        compiled=sum(report.compiled for report in reports),
        reused=sum(report.reused for report in reports),
        seconds=max(report.seconds for report in reports),
        graph_bytes=max(report.graph_bytes for report in reports),
        graphs_captured=min(report.graphs_captured for report in reports),
        graphs_pending=max(report.graphs_pending for report in reports),
        swap_block_s=max(report.swap_block_s for report in reports),
        compile_failed=any(report.compile_failed for report in reports),
    )
