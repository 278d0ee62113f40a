"""Compile every CUDA kernel of the tree for every target without a GPU, and read what ptxas says of each: a kernel that
spills more registers than its stated budget fails the build.

Run: python tools/compile_cuda.py [--exhaustive] [--jobs N]. For sm_80 and for sm_90a every head size is compiled, and
all types, with --exhaustive every combination of them, for sm_89 too. Prints a table of registers, shared memory, stack
and spills. Exits 1 when a unit does not compile, a kernel spills beyond its budget, or no kernel was found. Without
nvcc it says SKIPPED loudly and exits 0: the binding, which needs only a C++ compiler, is compiled all the same.

What ptxas said is kept in the cache directory under the hash of all that decides it: `Toolchain`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from attention_backends.cuda_build import (
    COMPILE_TIMEOUT_S,
    SOURCES,
    CudaKernels,
    binding_command,
    find_nvcc,
    nvcc_command,
    translation_units,
)
from attention_backends.toolchain import BuildError, default_cache_dir, find_compiler, hash_of, run, version_hash
from compilation.directory import trusted_directory
from compilation.store import write_atomically

CAPABILITIES = ((8, 0), (8, 9), (9, 0))
HEAD_DIMS = (64, 96, 128, 256)
TYPES = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.float16, torch.float8_e4m3fn),
)


@dataclass(frozen=True)
class Budget:
    """Spills that are accepted of kernels whose name contains `name`, at `head_dim`."""

    name: str
    head_dim: int
    spill_bytes: int
    reason: str


BUDGETS: tuple[Budget, ...] = (
    Budget("prefill_kernel", 128, 44, "an 8-bit cache on sm_80, which converts by arithmetic"),
    Budget("prefill_kernel", 96, 28, "the same"),
)
"""Whatever is not named here may not spill at all."""


@dataclass(frozen=True)
class KernelReport:
    """What ptxas says of one kernel for one architecture; sizes in bytes."""

    name: str
    architecture: str
    registers: int = 0
    shared: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0

    @property
    def spills(self) -> int:
        return max(self.spill_stores, self.spill_loads)


_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '(\w+)'")
_PROPERTIES = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(.*)")
_SHARED = re.compile(r"(\d+) bytes smem")


def parse_ptxas(text: str) -> list[KernelReport]:
    """Kernels in the output of `ptxas -v`, in order. Stack and spills of functions that a kernel calls (printed after
    it) are added to its own. Raises ValueError for a kernel whose registers or spills ptxas does not tell: its format
    has changed, and silence must not pass for success."""
    reports: list[KernelReport] = []
    told: list[tuple[bool, bool]] = []
    for line in text.splitlines():
        if entry := _ENTRY.search(line):
            reports.append(KernelReport(entry[1], entry[2]))
            told.append((False, False))
        elif not reports:
            continue
        elif properties := _PROPERTIES.search(line):
            stack, stores, loads = map(int, properties.groups())
            last = reports[-1]
            reports[-1] = replace(
                last,
                stack=last.stack + stack,
                spill_stores=last.spill_stores + stores,
                spill_loads=last.spill_loads + loads,
            )
            told[-1] = (True, told[-1][1])
        elif used := _USED.search(line):
            shared = _SHARED.search(used[2])
            reports[-1] = replace(reports[-1], registers=int(used[1]), shared=int(shared[1]) if shared else 0)
            told[-1] = (told[-1][0], True)
    for report, both in zip(reports, told, strict=True):
        if both != (True, True):
            raise ValueError(f"ptxas tells neither registers nor spills of {report.name} for {report.architecture}")
    return reports


def budget_of(name: str, head_dim: int, budgets: tuple[Budget, ...] = BUDGETS) -> int:
    """Bytes that the kernel may spill."""
    return max((b.spill_bytes for b in budgets if b.name in name and b.head_dim == head_dim), default=0)


def demangle(text: str) -> str:
    """Kernel names made readable, where the machine has c++filt."""
    if (filt := shutil.which("c++filt")) is None:
        return text
    done = subprocess.run([filt], input=text, capture_output=True, text=True, timeout=60, check=True)
    return re.sub(r"\(anonymous namespace\)::|pageloom::cuda::", "", done.stdout)


class Toolchain:
    """nvcc, and what it said of units before. An entry's name hashes the command, the environment that nvcc reads, the
    compilers' and the assembler's versions, every file of the sources, and every header outside that a unit includes.
    """

    def __init__(self, nvcc: str, scratch: Path, cache: Path) -> None:
        self._nvcc = nvcc
        self._scratch = scratch
        self._entries = trusted_directory(trusted_directory(cache) / "compile-checks")
        files = {path for path in SOURCES.rglob("*") if path.is_file()}
        for source in translation_units():
            files |= self._included(source)
        tools = [nvcc, *filter(None, [find_compiler(), shutil.which("ptxas", path=self._folder())])]
        flags = {name: value for name, value in os.environ.items() if name.startswith("NVCC_")}
        self._hash = hash_of((flags, [version_hash(tool) for tool in tools]), sorted(files))

    def _folder(self) -> str | None:
        """Where the real nvcc is; a file on PATH may be a script that calls it."""
        done = subprocess.run([self._nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True, timeout=60)
        return found[1] if (found := re.search(r"_HERE_=(\S+)", done.stderr)) else None

    def _included(self, source: Path) -> set[Path]:
        """Raises BuildError when it does not preprocess."""
        rule = self._scratch / f"{source.stem}.d"
        kernels = next(kinds(exhaustive=True))
        run([*nvcc_command(self._nvcc, source, rule, kernels.macros, [kernels.architecture]), "-M"], COMPILE_TIMEOUT_S)
        return {Path(name) for name in rule.read_text().split(":", 1)[1].replace("\\\n", " ").split()}

    def ptxas(self, unit: Unit) -> str:
        """What ptxas says of the unit. Raises BuildError."""
        output = self._scratch / f"{unit.source.stem}_{unit.kernels.tag}.o"
        command = nvcc_command(self._nvcc, unit.source, output, unit.kernels.macros, [unit.kernels.architecture])
        command.append("-Xptxas=-v")
        settings = [word for word in command if word.startswith("-") and not word.startswith("-I")]
        entry = self._entries / hash_of((self._hash, unit.source.name, settings), [])
        if entry.exists():
            return entry.read_text()
        said = run(command, COMPILE_TIMEOUT_S)
        write_atomically(entry, said)
        return said


@dataclass(frozen=True)
class Unit:
    """One source for one kind of attention on one architecture: shared memory differs, and tiles with it."""

    source: Path
    kernels: CudaKernels

    @property
    def title(self) -> str:
        return self.kernels.tag.split("_", 1)[1]

    def compile(self, toolchain: Toolchain) -> tuple[list[KernelReport], float]:
        """What ptxas says, and seconds taken. Raises BuildError."""
        started = time.perf_counter()
        reports = parse_ptxas(demangle(toolchain.ptxas(self)))
        return reports, time.perf_counter() - started


def kinds(exhaustive: bool) -> Iterator[CudaKernels]:
    """The first and the last target with every head size and with all types, and what most models have, and what may
    spill; or all of them on all targets."""
    for i, head_dim in enumerate(HEAD_DIMS):
        if exhaustive:
            yield from (CudaKernels(head_dim, *types, each) for types in TYPES for each in CAPABILITIES)
        else:
            yield CudaKernels(head_dim, *TYPES[i % len(TYPES)], CAPABILITIES[0])
            yield CudaKernels(head_dim, *TYPES[(i - 1) % len(TYPES)], CAPABILITIES[-1])
    if not exhaustive:
        yield CudaKernels(128, *TYPES[0], CAPABILITIES[-1])
        yield CudaKernels(96, torch.bfloat16, torch.float8_e4m3fn, CAPABILITIES[0])


def compile_bindings(compiler: str, scratch: Path) -> str:
    """Compile the binding for every combination of types (a head size is only a number to it); raises BuildError."""
    started = time.perf_counter()
    some = [CudaKernels(HEAD_DIMS[0], *types, CAPABILITIES[-1]) for types in TYPES]
    for kernels in some:
        run(binding_command(compiler, scratch / "binding.o", kernels, "pageloom_cuda_check"), COMPILE_TIMEOUT_S)
    return f"binding.cpp: {len(some)} kinds in {time.perf_counter() - started:.1f} s"


def compile_kernels(toolchain: Toolchain, units: Sequence[Unit], jobs: int) -> list[str]:
    """Compile everything, print what there is to know; returns what is wrong."""
    failures: list[str] = []
    rows: dict[tuple[str, KernelReport], list[str]] = {}
    seconds: dict[str, float] = {}

    def compiled(unit: Unit) -> tuple[list[KernelReport], float] | str:
        try:
            return unit.compile(toolchain)
        except (BuildError, ValueError) as error:
            return str(error)

    with ThreadPoolExecutor(jobs) as pool:
        for unit, outcome in zip(units, pool.map(compiled, units), strict=True):
            if isinstance(outcome, str):
                failures.append(f"{unit.source.name} {unit.title}: {outcome}")
                continue
            reports, took_s = outcome
            seconds[unit.source.name] = seconds.get(unit.source.name, 0.0) + took_s
            if not reports:
                failures.append(f"{unit.source.name} {unit.title}: ptxas reported no kernel")
            for report in reports:
                rows.setdefault((unit.source.name, report), []).append(unit.title)
                if report.spills > (allowed := budget_of(report.name, unit.kernels.head_dim)):
                    failures.append(
                        f"{unit.source.name} {unit.title} {report.architecture}: {report.name} spills "
                        f"{report.spills} bytes, its budget is {allowed}"
                    )
    print_table(rows, Counter(f"sm_{unit.kernels.architecture}" for unit in units if unit.source == units[0].source))
    print("".join(f"{name}: {took_s:.1f} s of nvcc in all\n" for name, took_s in seconds.items()), end="")
    if not rows:
        failures.append("no CUDA kernel was found")
    return failures


def print_table(rows: dict[tuple[str, KernelReport], list[str]], kinds_of: Counter[str]) -> None:
    """One line per unit, kernel and target; kinds for which all figures are equal share one."""
    print(f"{'unit':14} {'target':7} {'regs':>4} {'shared':>6} {'stack':>5} {'spilled':>7}  kernel [kinds]")
    for (unit, report), titles in sorted(rows.items(), key=lambda row: (row[0][0], row[0][1].name)):
        among = "all" if len(titles) == kinds_of[report.architecture] else " ".join(titles)
        print(
            f"{unit:14} {report.architecture:7} {report.registers:4} {report.shared:6} {report.stack:5} "
            f"{report.spills:7}  {report.name} [{among}]"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="nvcc processes at a time")
    parser.add_argument("--exhaustive", action="store_true", help="all combinations")
    arguments = parser.parse_args()
    nvcc, compiler = find_nvcc(), find_compiler()
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        if compiler is None:
            print("SKIPPED: no C++ compiler here; the binding was NOT compiled")
        else:
            try:
                print(compile_bindings(compiler, scratch))
            except BuildError as error:
                failures.append(str(error))
        if nvcc is None:
            print("SKIPPED: no nvcc here; the CUDA kernels were NOT compiled, and nothing is known of their spills")
        else:
            units = [Unit(source, each) for each in kinds(arguments.exhaustive) for source in translation_units()]
            toolchain = Toolchain(nvcc, scratch, default_cache_dir())
            failures += compile_kernels(toolchain, units, arguments.jobs)
    print("\n".join(f"FAILED {failure}" for failure in failures) or "no failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
