"""Routes of others' servers that have no counterpart here: who asks for one is told so, and what there is instead.

The answer is 404, which OpenAI's clients raise at once with the message in it; after a 501 they would ask again.
"""

from __future__ import annotations

_TEXT = "the model that is served reads and writes text (/v1/chat/completions, /v1/responses)"
_FILES = "this server keeps no files: send what the model shall read with the request"
_SERVED = "this server serves the weights that it was started with"
_ACCOUNTS = "this server has no accounts"
_AWAKE = "start it with --enable-sleep-mode"
_LOOKED_INTO = "start it with --profile-dir; engine-bench profile tells where the time goes, too"
_STATE = "conversations are sent with each request, or kept by /v1/responses"

_REASONS = {
    # OpenAI's
    "/v1/assistants": _STATE,
    "/v1/audio": _TEXT,
    "/v1/batches": "send the requests at once: the server batches what runs at a time",
    "/v1/containers": _FILES,
    "/v1/conversations": _STATE,
    "/v1/evals": "engine-bench measures this server",
    "/v1/files": _FILES,
    "/v1/fine_tuning": "models are served here, not trained",
    "/v1/images": _TEXT,
    "/v1/moderations": "ask the model itself, for one of several answers: structured_outputs with a choice",
    "/v1/realtime": "answers are streamed over HTTP",
    "/v1/threads": _STATE,
    "/v1/uploads": _FILES,
    "/v1/vector_stores": _FILES,
    "/v1/videos": _TEXT,
    # Ollama's
    "/api/blobs": _SERVED,
    "/api/copy": _SERVED,
    "/api/create": _SERVED,
    "/api/delete": _SERVED,
    "/api/me": _ACCOUNTS,
    "/api/pull": _SERVED,
    "/api/push": _SERVED,
    "/api/signout": _ACCOUNTS,
    # vLLM's
    "/collective_rpc": "this server runs no code that is sent to it",
    "/is_sleeping": _AWAKE,
    "/log_level": _LOOKED_INTO,
    "/sleep": _AWAKE,
    "/start_profile": _LOOKED_INTO,
    "/stop_profile": _LOOKED_INTO,
    "/update_weights_from_disk": _AWAKE,
    "/wake_up": _AWAKE,
}


def why_not_served(path: str) -> str | None:
    """None: nobody has such a route."""
    name = next((name for name in _REASONS if path == name or path.startswith(f"{name}/")), None)
    return None if name is None else f"{name} is not served here: {_REASONS[name]}"
