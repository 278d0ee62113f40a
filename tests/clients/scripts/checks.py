"""What a client's script tells: a JSON object of its checks, each true or what went wrong, as the last line."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any


class Checks:
    """``python SCRIPT.py BASE_URL MODEL TOKENIZER``: `base` ends without ``/v1``; `tokenizer` is a directory."""

    def __init__(self) -> None:
        self.base, self.model, self.tokenizer = sys.argv[1:]
        self.found: dict[str, bool | str] = {}

    def run(self, *checks: Callable[[], Any]) -> None:
        """Each by itself; its name is what it shows."""
        for check in checks:
            try:
                done = check()
                if inspect.iscoroutine(done):
                    asyncio.run(done)
                self.found[check.__name__] = True
            except Exception:
                self.found[check.__name__] = traceback.format_exc()[-3000:]

    def tell(self, version: str) -> None:
        print(json.dumps({"version": version, "checks": self.found}))
