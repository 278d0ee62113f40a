"""The certificate of HTTPS, read again when its files change: connections that begin then are shown the new one."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

logger = logging.getLogger("pageloom.server")


class Certificate:
    def __init__(self, context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
        """`context`: what the server uses, which holds them already."""
        self._context, self._files = context, (certificate, key)
        self._seen = self._state()
        self._looked_at = 0.0

    def look_again(self, now: float, anyway: bool = False) -> None:
        """Looks each second at most. A renewal writes two files: until they fit, the ones before stay."""
        if now < self._looked_at + 1 and not anyway:
            return
        self._looked_at = now
        state = self._state()
        if state == self._seen and not anyway:
            return
        certificate, key = self._files
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
            self._context.load_cert_chain(certificate, key, password="")
        except OSError as error:
            logger.error("--ssl-certfile: %s and its key cannot be read; the ones before stay: %s", certificate, error)
            self._seen = state
            return
        self._seen = state
        logger.info("the certificate was read again from %s", certificate)

    def _state(self) -> list[object]:
        found: list[object] = []
        for file in self._files:
            try:
                status = None if file is None else file.stat()
            except OSError:
                status = None
            found.append(None if status is None else (status.st_mtime_ns, status.st_size, status.st_ino))
        return found
