"""A process that torchrun has started is one rank of several: only that of rank 0 becomes an engine."""

from __future__ import annotations

from engine.config import EngineArgs
from engine.machine import launcher_variables
from engine.parallel_config import JOIN_TIMEOUT_S, launch_of
from engine.setting_checks import check_launch


def leave_unless_first(args: EngineArgs) -> None:
    """With `external_launcher`, in all processes but that of rank 0: be a rank until rank 0 leaves, then raise
    SystemExit. Returns at once otherwise. Raises `ConfigError`, `EngineError`."""
    if args.distributed_executor_backend != "external_launcher":
        return
    from engine.executor.torchrun import serve_as_rank

    check_launch(args)
    ranks, timeout_s = args.tensor_parallel_size * args.pipeline_parallel_size, args.distributed_timeout_seconds
    status = serve_as_rank(launch_of(launcher_variables()), ranks, timeout_s or JOIN_TIMEOUT_S)
    if status is not None:
        raise SystemExit(status)
