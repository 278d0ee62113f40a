"""The engines that can take part, how each is started, and which workloads it takes."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from entrypoints.bench.workloads import WORKLOADS
from peers.process import Running, Worker
from peers.server import Server

Mode = Literal["offline", "http"]
START = "START"
"""a pseudo-workload: the process is started anew, and the time to its first token taken"""
TAKEN = (*(name for name in WORKLOADS if name != "WARM"), START)
TOOLS = Path(__file__).resolve().parents[1]
OURS = re.compile(r"([A-Za-z][\w.-]*)(?::([\w,]+))?=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Engine:
    name: str
    kind: str
    """what of its weights a target compares: bf16, int8 or int4"""
    ours: bool
    workloads: tuple[str, ...]
    needs_bytes: int
    """memory to have free before it is started"""
    floor: bool
    """a bound of the machine: its start and memory mean nothing"""
    start: Callable[[Mode, float], Running]
    """(mode, timeout in seconds); raises `EngineFailedError`"""


@dataclass(frozen=True)
class Peer:
    folder: str
    """of its Python, in --peers-dir"""
    adapter: str
    model: str
    """in --peers-dir"""
    kind: str
    workloads: tuple[str, ...]
    """by default: those for which it is the yardstick"""
    needs_gib: float
    serves: bool = False
    floor: bool = False
    """not an engine but this machine's bound, run by our own Python"""
    dtype: str = "bfloat16"
    """vLLM's alone: what it computes in"""


PEERS = {
    "llamacpp": Peer("llama", "llamacpp", "models/smollm2-135m-bf16.gguf", "bf16", ("W1",), 2),
    "llamacpp-q4_1": Peer("llama", "llamacpp", "models/SmolLM2-135M-Instruct.Q4_1.gguf", "int4", ("W1",), 1.5),
    "openvino": Peer("openvino", "openvino", "models/smollm2-135m-ov-fp16", "bf16", ("W2", "W3", "W5"), 5.5),
    "vllm": Peer("vllm", "vllm", "models/smollm2-135m-bf16", "bf16", ("W2", "W4", "W6", "W7"), 7, serves=True),
    "vllm-float32": Peer(
        "vllm", "vllm", "models/smollm2-135m-bf16", "float32", ("W7",), 8, serves=True, dtype="float32"
    ),
    "transformers": Peer("ref", "transformers", "models/smollm2-135m-bf16", "bf16", ("W1", "W2", "W4", "W5"), 3),
    "linear": Peer("", "linear", "", "bf16", ("W1",), 2, floor=True),
    "linear-int8": Peer("", "linear", "", "int8", ("W1",), 2, floor=True),
    "linear-int4": Peer("", "linear", "", "int4", ("W1",), 2, floor=True),
}
KV_GIB = 4
"""of each peer that wants to be told"""


def workload_list(text: str) -> tuple[str, ...]:
    """'W1,W2' → names. Raises ValueError naming those that exist."""
    names = tuple(name.strip().upper() for name in text.split(",") if name.strip())
    if unknown := [name for name in names if name not in TAKEN]:
        raise ValueError(f"unknown workload {unknown[0]!r}; known: {', '.join(TAKEN)}")
    return names


def parse_peers(words: Sequence[str]) -> dict[str, tuple[str, ...] | None]:
    """['a,b', 'c:W1,W2'] → {a: None, b: None, c: (W1, W2)}. Raises ValueError naming the peers that exist."""
    chosen: dict[str, tuple[str, ...] | None] = {}
    for word in words:
        names, _, workloads = word.partition(":")
        for name in names.split(","):
            if name and name not in PEERS:
                raise ValueError(f"unknown peer {name!r}; known: {', '.join(PEERS)}")
            if name:
                chosen[name] = workload_list(workloads) if workloads else None
    return chosen


def peer_engine(name: str, folder: Path | None, threads: int, workloads: tuple[str, ...] | None) -> Engine:
    """Raises ValueError where its Python or model is not in `folder`, or it cannot run a workload."""
    peer = PEERS[name]
    if peer.floor:
        return _floor_engine(name, peer, threads, workloads)
    if folder is None:
        raise ValueError(f"{name} needs --peers-dir")
    python, model = folder / peer.folder / "bin" / "python", folder / peer.model
    for path in (python, model):
        if not path.exists():
            raise ValueError(f"{name}: {path} is missing; tools/peers/setup.sh prepares it")
    taken = workloads if workloads is not None else peer.workloads
    if "W6" in taken and not peer.serves:
        raise ValueError(f"{name}: W6 goes over HTTP, and only vllm is run as a server here")
    if "W7" in taken and peer.adapter != "vllm":
        raise ValueError(f"{name}: W7 is a beam search, and only vllm's is run here")
    settings = {"model": str(model), "threads": threads, "kv_gib": KV_GIB, "weights": peer.kind, "dtype": peer.dtype}
    environment = _environment(peer, folder, threads)

    def start(mode: Mode, timeout_s: float) -> Running:
        if mode == "http":
            return Server(_vllm_server(str(python), str(model), peer.dtype), environment, timeout_s)
        return Worker(_worker(str(python), peer.adapter, settings), environment, timeout_s)

    return Engine(name, peer.kind, False, taken, int(peer.needs_gib * 2**30), False, start)


def _floor_engine(name: str, peer: Peer, threads: int, workloads: tuple[str, ...] | None) -> Engine:
    if workloads is not None and "W1" not in workloads:
        raise ValueError(f"{name}: it bounds W1 only")
    command = _worker(sys.executable, peer.adapter, {"threads": threads, "weights": peer.kind})

    def start(mode: Mode, timeout_s: float) -> Running:
        return Worker(command, {}, timeout_s)

    return Engine(name, peer.kind, False, peer.workloads, int(peer.needs_gib * 2**30), True, start)


def our_engine(text: str, model: str | None, threads: int | None, default: Callable[[str], tuple[str, ...]]) -> Engine:
    """From `[LABEL[:W1,W2]=]OPTIONS`. `default(kind)`: the workloads where the text names none.

    Raises ValueError for a workload that does not exist; options that the engine does not have end the program.
    """
    from peers.adapter_ours import build_parser, parse

    match = OURS.fullmatch(text)
    label, workloads, options = match.groups() if match else (None, None, text)
    given = shlex.split(options)
    arguments = list(given)
    if threads is not None and "--threads" not in given:
        arguments += ["--threads", str(threads)]
    if model is not None and build_parser().parse_args(given).model is None:
        arguments.append(model)
    args = parse(arguments)
    kind = weights_kind(args.quantization, args.model)

    def start(mode: Mode, timeout_s: float) -> Running:
        if mode == "http":
            return Server([sys.executable, "-m", "entrypoints.serve", *arguments], {}, timeout_s)
        return Worker(_worker(sys.executable, "ours", {"arguments": arguments}), {}, timeout_s)

    name = label or " ".join(["pageloom", *given])
    return Engine(name, kind, True, workload_list(workloads) if workloads else default(kind), 3 << 30, False, start)


def weights_kind(quantization: str, model: str) -> str:
    """Which targets hold: bf16, int8 or int4 (which a GGUF of packed four-bit blocks counts as)."""
    if quantization in ("int8", "int4"):
        return quantization
    packed = quantization == "auto" and model.endswith(".gguf")
    if not packed:
        return "bf16"
    return "int8" if "Q8_0" in Path(model).name.upper() else "int4"


def _worker(python: str, adapter: str, settings: dict[str, Any]) -> list[str]:
    return [python, "-P", str(TOOLS / "peers" / "worker.py"), adapter, json.dumps(settings)]


def _vllm_server(python: str, model: str, dtype: str) -> list[str]:
    options = ["--dtype", dtype, "--max-model-len", "4096", "--max-num-seqs", "128"]
    return [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *options]


def _environment(peer: Peer, folder: Path, threads: int) -> dict[str, str]:
    if peer.adapter != "vllm":
        return {"OMP_NUM_THREADS": str(threads)}
    libraries = [*Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"), *folder.glob("vllm/lib/libiomp5.so")]
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",  # without it, one core computes
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(str(library) for library in libraries),
    }
