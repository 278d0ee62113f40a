"""Which route a request is for: what a guard looks at must be what the router does."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any


def route_path(scope: MutableMapping[str, Any]) -> str:
    """The path without `--root-path`, which a proxy may leave in front of it, as Starlette's router reads it."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if not root or not path.startswith(root):
        return path
    if path == root:
        return ""
    return path[len(root) :] if path[len(root)] == "/" else path
