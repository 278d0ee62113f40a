"""The server's log: text or JSON, on stderr. Light: it is set up before anything is imported that takes long."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from engine.observability.logs import TEXT, JsonFormatter, TextFormatter, as_entry, log_uncaught
from entrypoints.server.caller import caller_id

_PIPE_BYTES = 1 << 20
"""what may be written past the log while nobody can read it, because the writer holds the interpreter"""
_LINE_CHARS = 1 << 20
_LAST_WORDS_S = 0.5


@contextmanager
def logging_to_stderr(level: str, log_format: str) -> Iterator[None]:
    """`log_format`: "text" or "json". In JSON, what native libraries and child processes write to stderr becomes
    entries, too."""
    if log_format == "text":
        handler = logging.StreamHandler()
        handler.setFormatter(TextFormatter(TEXT))
        logging.basicConfig(level=level, handlers=[handler])
        yield
        return
    # What others write goes through a pipe; the log itself does not, so that it is whole when the process is killed.
    handler = logging.StreamHandler(os.fdopen(os.dup(2), "w", encoding="ascii", buffering=1))
    mark = secrets.token_hex(8)
    handler.setFormatter(JsonFormatter("server", caller_id, child_mark=mark))
    logging.basicConfig(level=level, handlers=[handler])
    log_uncaught()
    with _others_as_entries(handler, mark):
        yield


@contextmanager
def _others_as_entries(handler: logging.StreamHandler[TextIO], mark: str) -> Iterator[None]:
    """All that is written to descriptor 2 comes to the handler's stream, line by line."""
    reader, writer = os.pipe()
    with suppress(OSError):  # more than a user may have
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    os.dup2(writer, 2)
    os.close(writer)

    def pump() -> None:
        with open(reader, encoding="utf-8", errors="backslashreplace", newline="\n") as lines:
            while line := lines.readline(_LINE_CHARS):
                entry = as_entry(line.rstrip("\r\n"), "server", mark)
                handler.acquire()
                with suppress(OSError, ValueError):  # nobody reads the log any more
                    handler.stream.write(entry + "\n")
                handler.release()

    thread = threading.Thread(target=pump, name="stderr", daemon=True)
    thread.start()
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os.dup2(handler.stream.fileno(), 2)
        thread.join(_LAST_WORDS_S)  # a child may hold it open
