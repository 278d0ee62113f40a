"""Adapters from their files, one after the other: what is alike of them is checked once, memory is used again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from engine.adapters.peft import AdapterFiles, Factors, KnownFiles
from engine.adapters.request import LoRARequest
from engine.adapters.targets import Own, Part, Targets
from engine.adapters.tensor_file import TensorFile
from engine.errors import ConfigError


class ReadAdapter(NamedTuple):
    factors: list[Factors]
    digest: str
    """of its files, if others read them for other parts of the model"""
    memory: torch.Tensor | None
    """that factors lie in"""


class AdapterReader:
    """For a model, or a part of one, whose matrices are `own_parts`."""

    def __init__(self, targets: Targets, own_parts: Mapping[Part, Own], dtype: torch.dtype, is_part: bool) -> None:
        self._targets, self._own_parts, self._dtype, self._is_part = targets, own_parts, dtype, is_part
        self._known, self._file = KnownFiles(), TensorFile()

    def read(self, adapter: LoRARequest) -> ReadAdapter:
        """Raises `ConfigError` and `WeightsError`."""
        files = AdapterFiles(adapter, self._targets, self._file.read, self._known)
        version = files.version() if adapter.version or self._is_part else ""
        if adapter.version and adapter.version != version:
            raise ConfigError(
                f"{adapter.lora_path}: its files are others than when the adapter was loaded: load it again "
                "(load_inplace), or under another name"
            )
        copied = self._is_part or files.dtype is None  # or all of the file were kept for a part of it
        factors = files.factors(self._dtype, self._own_parts, copied)
        shared, memory = not copied and files.dtype == self._dtype, None
        if shared:
            memory, self._file.memory = self._file.memory, None
        return ReadAdapter(factors, version if self._is_part else "", memory)

    def release(self, read: ReadAdapter) -> None:
        """Nobody uses it any more."""
        if read.memory is not None:
            self._file.memory = read.memory
