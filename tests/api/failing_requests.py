"""Failures inside the front end that concern one request: the one with `min_tokens` 1."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest


class Panic(BaseException):
    """As what Rust libraries raise: no `Exception`."""


def raise_for_one(monkeypatch: pytest.MonkeyPatch, where: str, kind: type[BaseException]) -> None:
    """`where`: a method of `engine.frontend.sample.Sample`, with its module and class."""
    path, owner_name, method = where.rsplit(".", 2)
    owner = getattr(import_module(path), owner_name)
    original = getattr(owner, method)

    def maybe(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._params.min_tokens == 1:
            raise kind("injected")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, method, maybe)
