"""Run by test_compile_counter.py in a process of its own: a driver without a device takes the place of CUDA's, so that
Triton loads compiled kernels as it does on a GPU. Prints what a counter saw."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from compilation.counter import CompileCounter
from engine.runner.kernels import KERNELS, device

TARGET = GPUTarget("cuda", 90, 32)


def pretend_to_have_a_gpu() -> None:
    utils = SimpleNamespace(
        load_binary=lambda *binary: (1, 2, 32, 0, 1024),
        get_device_properties=lambda index: {"max_shared_mem": 1 << 17},
    )
    triton.runtime.driver.set_active(
        SimpleNamespace(
            utils=utils,
            launcher_cls=lambda source, metadata: lambda *launch: None,
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: TARGET,
        )
    )


def load() -> object:
    """A fresh handle each time, as for a variant that was not there before."""
    kernel = next(k for k in KERNELS if k.name == "post_update_kernel")
    types = {**kernel.signature, **dict.fromkeys(kernel.constexprs, "constexpr")}
    source = ASTSource(device.post_update_kernel, types, dict(kernel.constexprs))
    return triton.compile(source, target=TARGET).run


def main() -> None:
    pretend_to_have_a_gpu()
    counter = CompileCounter()
    seen = [counter.since_mark()]
    load()
    seen.append(counter.since_mark())
    load()
    seen.append(counter.since_mark())
    counter.mark()
    seen.append(counter.since_mark())
    hooks = triton.knobs.runtime.kernel_load_end_hook.calls
    left = len(hooks)
    del counter
    gc.collect()
    print(*seen, left - len(hooks))


if __name__ == "__main__":
    main()
