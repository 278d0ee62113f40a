"""msgspec structs as HTTP bodies."""

from __future__ import annotations

import msgspec
from fastapi.responses import Response


def json_response(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
