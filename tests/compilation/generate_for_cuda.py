"""Run by test_generated_cuda_code.py in a process of its own, where a CUDA build of torch is made to believe in a GPU
as far as generating and compiling code goes: compiles a piece for it twice, bounded and not, and prints what came out.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.runtime import static_triton_launcher, triton_helpers
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from toy_llama import OP, ToyLlama, batch
from triton.backends.compiler import GPUTarget

from compilation.inductor import compile_piece, inductor_directories, inductor_options
from compilation.split import Piece, split
from compilation.trace import trace, value_of

PROPERTIES = SimpleNamespace(
    name="pretended", major=9, minor=0, multi_processor_count=132, total_memory=1 << 37, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, L2_cache_size=1 << 25, gcnArchName="",
)  # fmt: skip


def believe_in_a_gpu() -> None:
    answers: dict[str, Any] = {
        "get_device_properties": PROPERTIES, "get_compute_capability": 90, "is_available": True, "device_count": 1,
        "current_device": 0, "is_triton_capable": True, "raise_if_triton_unavailable": None, "exchange_device": 0,
        "maybe_exchange_device": 0, "set_device": None, "synchronize": None, "is_bf16_supported": True,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(CudaInterface, name, staticmethod(lambda *_, answer=answer, **__: answer))
    worker: Any = CudaInterface.Worker
    worker.get_device_properties = staticmethod(lambda *_: PROPERTIES)
    worker.current_device = staticmethod(lambda: 0)
    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda *_: PROPERTIES
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.current_device = lambda: 0
    cuda.device = lambda *_: contextlib.nullcontext()
    cuda._lazy_init = cuda.synchronize = lambda *_: None
    fake_tensor.init_gpu_context = lambda device: None
    triton_helpers.set_driver_to_gpu = lambda: None
    launcher: Any = static_triton_launcher.StaticallyLaunchedCudaKernel
    launcher.load_kernel = lambda self, device: vars(self).update(function=1, n_regs=32, n_spills=0)
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
        get_current_stream=lambda device: 0, get_active_torch_device=lambda: torch.device("cuda", 0),
        utils=SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 232448}),
    )  # fmt: skip
    triton.runtime.driver.set_active(driver)


def move(piece: Piece) -> None:
    """The piece's example values, as if it had been traced on the GPU."""
    moved: dict[int, torch.Tensor] = {}

    def to_gpu(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(to_gpu, value))
        if isinstance(value, FakeTensor) and id(value) not in moved:
            with value.fake_mode:
                moved[id(value)] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda:0")
        return moved[id(value)] if isinstance(value, FakeTensor) else value

    for node in piece.module.graph.nodes:
        node.meta["example_value"] = to_gpu(value_of(node))


def main(directory: Path) -> None:
    believe_in_a_gpu()
    model = ToyLlama(layers=2, hidden=256, heads=32).to(torch.bfloat16)
    steps = split(trace(model, batch(8)), frozenset({OP}))
    piece = [step for step in steps if isinstance(step, Piece)][1]
    move(piece)
    found = {}
    for name, largest in (("bounded", 8192), ("any", None)):
        with inductor_directories(directory / name, directory / "headers"):
            compile_piece(piece, inductor_options(False, "cuda"), directory / f"{name}.bin", largest)
        sources = [path.read_text() for path in (directory / name).rglob("*.py")]
        (text,) = [source for source in sources if "def call(self, args):" in source]
        body = text[text.index("def call(self, args):") :]
        found[name] = {
            "triton": len(re.findall(r"\.run\(", body)),
            "streams": len(re.findall(r"get_raw_stream\(0\)", body)),
            "matmul": len(re.findall(r"extern_kernels\.(?:mm|addmm)\(", body)),
            "addmm": len(re.findall(r"extern_kernels\.addmm\(", body)),
            "wide": "'i64'" in text,
            "autotuned": "generate_example_value" in text,
            "binaries": len(list((directory / name).rglob("*.cubin"))),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
