from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from attention_backends import registry
from attention_backends.cpu import CpuBackend
from attention_backends.interface import Capabilities
from attention_backends.reference import ReferenceBackend
from attention_backends.registry import NoBackendError, registered, select


def test_the_fastest_backend_that_can_serve_is_chosen_and_prepared(kernel_cache: Path) -> None:
    chosen = select("cpu", torch.bfloat16, [64], 16, True, True, cache_dir=kernel_cache)
    assert isinstance(chosen.backend, CpuBackend)
    assert "portable" in chosen.backend.supported_isas
    assert "reference" not in chosen.rejected


def test_each_rejected_backend_has_its_reason() -> None:
    chosen = select("cpu", torch.float64, [60], 5, False, False)
    assert isinstance(chosen.backend, ReferenceBackend)
    assert all(part in chosen.rejected["cpu"] for part in ("float64", "head_dim 60", "block_size 5"))


def test_a_named_backend_that_cannot_serve_is_an_error_with_the_reasons() -> None:
    with pytest.raises(NoBackendError, match=r"'cpu' cannot serve (.|\n)*cpu: has no head_dim 60"):
        select("cpu", torch.float32, [60], 16, False, False, name="cpu")
    with pytest.raises(NoBackendError, match="not on cuda"):
        select("cuda", torch.float32, [64], 16, False, False, name="cpu")
    with pytest.raises(NoBackendError, match=r"unknown; registered: .*cpu"):
        select("cpu", torch.float32, [64], 16, False, False, name="nothing")
    with pytest.raises(NoBackendError, match=r"no attention backend can serve(.|\n)*cpu:(.|\n)*reference:"):
        select("meta", torch.float32, [64], 16, False, False)


class FailingBackend(ReferenceBackend):
    speed_rank = 1

    @classmethod
    def capabilities(cls) -> Capabilities:
        return Capabilities(devices=frozenset({"cpu"}), dtypes=frozenset({torch.float32}))

    def prepare(self, cache_dir: Path | None = None) -> None:
        raise RuntimeError("its kernels do not load here")


def test_backends_from_outside_are_found_and_their_failures_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("failing", f"{__name__}:FailingBackend", registry.GROUP),
        EntryPoint("absent", "no_such_package.attention:Backend", registry.GROUP),
        EntryPoint("wrong", "math:sqrt", registry.GROUP),
    ]

    def only_outside(*, group: str) -> Sequence[EntryPoint]:
        assert group == "pageloom.attention_backends"
        return points

    monkeypatch.setattr(registry, "entry_points", only_outside)
    assert set(registered()) == {"cpu", "cuda", "flashinfer", "reference", "failing", "absent", "wrong"}
    chosen = select("cpu", torch.float32, [60], 16, False, False)
    assert chosen.backend.name == "reference"
    assert chosen.rejected["failing"] == "its kernels do not load here"
    assert "no_such_package" in chosen.rejected["absent"]
    assert "not an AttentionBackend" in chosen.rejected["wrong"]
    needs = select("cpu", torch.float32, [60], 16, True, True)
    assert needs.rejected["failing"] == "has no sliding window; has no soft cap"


class GpuBackend(ReferenceBackend):
    """Would serve a GPU, if its compiler did not fail."""

    speed_rank = 1
    only_by_name = frozenset()

    def prepare(self, cache_dir: Path | None = None) -> None:
        raise OSError("nvcc failed: no such header")


class SlowerGpuBackend(GpuBackend):
    speed_rank = 2

    def prepare(self, cache_dir: Path | None = None) -> None:
        """Serves."""


def only(monkeypatch: pytest.MonkeyPatch, **classes: type) -> None:
    monkeypatch.setattr(registry, "_IN_TREE", {name: f"{__name__}:{each.__name__}" for name, each in classes.items()})
    monkeypatch.setattr(registry, "entry_points", lambda *, group: [])


def test_on_a_gpu_the_oracle_serves_only_by_name_and_the_error_lists_every_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only(monkeypatch, mine=GpuBackend, reference=ReferenceBackend, cpu=CpuBackend)
    with pytest.raises(NoBackendError, match="no attention backend can serve") as refused:
        select("cuda", torch.bfloat16, [64], 16, False, False)
    for reason in (
        "mine: OSError: nvcc failed",
        "reference: serves cuda only by name",
        "cpu: runs on cpu, not on cuda",
    ):
        assert reason in str(refused.value)
    assert select("cuda", torch.bfloat16, [64], 16, False, False, name="reference").backend.name == "reference"
    assert select("cpu", torch.float64, [64], 16, False, False).backend.name == "reference"


def test_a_backend_that_fails_on_its_own_device_is_a_warning_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    only(monkeypatch, mine=GpuBackend, slower=SlowerGpuBackend, reference=ReferenceBackend, cpu=CpuBackend)
    with caplog.at_level(logging.DEBUG, registry.__name__):
        assert isinstance(select("cuda", torch.bfloat16, [64], 16, False, False).backend, SlowerGpuBackend)
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warned == ["attention backend mine cannot serve, slower does: OSError: nvcc failed: no such header"]
    assert {r.args[0] for r in caplog.records if r.args} == {"mine", "reference", "cpu"}


def test_a_slower_backend_that_cannot_serve_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """The oracle cannot with --batch-invariant, and on a CPU that is as it should be."""
    with caplog.at_level(logging.DEBUG, registry.__name__):
        chosen = select("cpu", torch.bfloat16, [64], 16, False, False, needs_invariant=True)
    assert chosen.backend.name == "cpu" and "reference" in chosen.rejected
    assert all(record.levelno == logging.DEBUG for record in caplog.records) and "reference" in caplog.text


def test_importing_the_registry_loads_no_backend() -> None:
    code = (
        "import sys; from attention_backends import registry; registry.registered(); "
        "print([name for name in ('cpu', 'cuda', 'flashinfer') if 'attention_backends.' + name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_chunks_are_served_where_they_are_known() -> None:
    with pytest.raises(NoBackendError, match=r"flashinfer: .*has no chunked attention"):
        select("cuda", torch.bfloat16, [64], 16, False, False, name="flashinfer", needs_chunk=True)
    chosen = select("cpu", torch.float64, [60], 16, False, False, needs_chunk=True)
    assert chosen.backend.name == "reference"
