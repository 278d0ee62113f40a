"""msgspec structs as HTTP bodies."""

from __future__ import annotations

import msgspec
from fastapi.responses import Response


def json_response(body: object, status: int = 200) -> Response:
    """`body`: bytes are JSON already."""
    written = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return Response(written, status, media_type="application/json")
