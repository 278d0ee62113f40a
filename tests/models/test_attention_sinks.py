"""Attention sinks of a GPT-OSS: which backend can serve them, and that each layer's reach it. (What they do to tokens:
`test_family_parity.py`.)"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from shared_natives import cache_with_natives
from tiny_models import make_model, save

from attention_backends.cpu import CpuBackend
from engine.config import EngineArgs, EngineConfig
from engine.errors import ConfigError
from engine.models.decoder import Decoder
from engine.models.description import describe
from engine.resolve import resolve_here
from engine.runner.loading import load_parts
from engine.runner.model_runner import ModelRunner
from engine.runner.paged_attention import attention_layers


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save(make_model("gpt_oss"), tmp_path_factory.mktemp("gpt_oss")))


def configured(model_path: Path, backend: str) -> EngineConfig:
    args = EngineArgs(
        model=str(model_path), device="cpu", dtype="float32", compile="none", max_model_len=64,
        attention_backend=backend, cache_dir=str(cache_with_natives(model_path / "cache")),
    )  # fmt: skip
    return resolve_here(args)[1]


def test_a_backend_without_sinks_is_rejected_by_name(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    able = replace(CpuBackend.capabilities(), sinks=False)
    monkeypatch.setattr(CpuBackend, "capabilities", lambda: able)
    with pytest.raises(ConfigError, match="cpu: has no attention sinks"):
        load_parts(configured(model_path, "cpu"))


def test_a_runner_gives_the_backend_each_layers_sinks(model_path: Path) -> None:
    runner = ModelRunner.load(configured(model_path, "reference"))
    model = runner._model
    assert isinstance(model, Decoder)
    for layer, given in zip(model.layers, runner._attention._layers, strict=True):
        assert given.sinks is layer.sinks is not None


def test_sinks_cannot_be_forgotten(model_path: Path) -> None:
    with pytest.raises(ValueError, match="sinks"):
        attention_layers(describe(str(model_path)).facts)
