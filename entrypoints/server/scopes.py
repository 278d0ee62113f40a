"""What a key must be good for, by route."""

from __future__ import annotations

from entrypoints.server.keys import Scope

_METRICS = frozenset({"/metrics", "/load", "/server_info", "/v1/board"})
_ADMIN = frozenset(
    {
        "/reset_prefix_cache",
        "/scale_elastic_ep",
        "/is_scaling_elastic_ep",
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/start_profile",
        "/stop_profile",
        "/log_level",
        "/update_weights_from_disk",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/v1/prefixes",
    }
)
_ANY = frozenset({"/version", "/docs", "/openapi.json"})


def scope_of(path: str) -> Scope | None:
    """None: any key will do."""
    if path in _METRICS:
        return "metrics"
    if path in _ADMIN or path.startswith("/v1/prefixes/"):
        return "admin"
    return None if path in _ANY else "infer"
