"""Names of models, as Ollama compares them."""

from __future__ import annotations

from collections.abc import Iterable


def tagged(name: str) -> str:
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def is_one_of(asked: str, names: Iterable[str]) -> bool:
    """Without regard to case, and whether `latest` is said or not."""
    plain = tagged(asked.lower())
    return any(plain == tagged(name.lower()) for name in names)
