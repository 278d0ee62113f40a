"""How a log's lines are written: as text of which no line can be forged, or as one JSON object a line.

Whatever a client sends may end up in a message: a name, a path, what a library says of it. In text, an entry begins at
the left edge, what follows its first line is indented, and characters that move a cursor, hide text or turn it around
are written as escapes. In JSON all that is not printable ASCII is an escape. Standard library only.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

_TRICKS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_INDENT = "\n    "
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
"""of a line that is text, in every process"""

logger = logging.getLogger(__name__)


def harmless(text: str) -> str:
    """On a terminal and in a file it is what it seems, and every line but the first is indented."""
    return _TRICKS.sub(_escape, text).replace("\n", _INDENT)


def _escape(found: re.Match[str]) -> str:
    code = ord(found.group())
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


class TextFormatter(logging.Formatter):
    """A record's ``fields`` (a dict, by ``extra``) follow its message."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's
        fields: Mapping[str, object] = getattr(record, "fields", {})
        text = super().formatMessage(record)
        return text + "".join(f" {name}={_json(value)}" for name, value in fields.items())


class JsonFormatter(logging.Formatter):
    """``time`` (RFC 3339), ``level``, ``logger``, ``process`` and ``message``; where there are any, ``request_id``,
    ``exception``, ``stack``, and a record's ``fields``, under their own names."""

    def __init__(
        self, process: str, request_id: Callable[[], str | None] = lambda: None, *, mark: str = "", child_mark: str = ""
    ) -> None:
        """`request_id`: of the HTTP request in whose task the record is made. `mark` precedes each line: by it the
        parent tells entries from whatever else is written to stderr. `child_mark`: of this process' children."""
        super().__init__()
        self._process, self._request_id, self._mark = process, request_id, mark
        self.child_mark = child_mark

    def format(self, record: logging.LogRecord) -> str:
        entry = _entry(record.created, record.levelname, record.name, self._process, _message(record))
        request_id = self._request_id()
        if request_id is not None:
            entry["request_id"] = request_id
        if record.exc_info and record.exc_info[0] is not None:
            entry["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            entry["stack"] = record.stack_info
        more = {name: value for name, value in getattr(record, "fields", {}).items() if name not in entry}
        return self._mark + _json({**entry, **more})


def as_entry(line: str, process: str, mark: str) -> str:
    """A line of stderr: a marked one is a child's entry; what was written past a log (by a native library, say) becomes
    one."""
    if line.startswith(mark):
        return line.removeprefix(mark)
    return _json(_entry(datetime.now(UTC).timestamp(), "WARNING", "stderr", process, line))


def last_words(line: str, mark: str) -> list[str]:
    """What a line of a child's stderr says to a reader."""
    if not mark or not line.startswith(mark):
        return [line]
    entry = json.loads(line.removeprefix(mark))
    return "\n".join(str(entry[name]) for name in ("message", "exception") if name in entry).split("\n")


def child_mark() -> str:
    """Of the entries of this process' children; "": they write text, as it does itself."""
    formatters = [handler.formatter for handler in logging.getLogger().handlers]
    return next((each.child_mark for each in formatters if isinstance(each, JsonFormatter)), "")


def log_uncaught() -> None:
    """Exceptions that nobody catches, and warnings, become entries, too."""

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        logger.critical("an exception that nobody catches", exc_info=(kind, error, trace))

    def in_thread(args: threading.ExceptHookArgs) -> None:
        error = args.exc_value or args.exc_type()
        logger.critical("an exception that nobody catches in a thread", exc_info=error)

    sys.excepthook = uncaught
    threading.excepthook = in_thread
    sys.unraisablehook = lambda args: logger.error("%s %r", args.err_msg, args.object, exc_info=args.exc_value)
    logging.captureWarnings(True)


def _entry(created: float, level: str, name: str, process: str, message: str) -> dict[str, object]:
    time = datetime.fromtimestamp(created, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return {"time": time, "level": level.lower(), "logger": name, "process": process, "message": message}


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # its arguments do not fit: what else would say so is no JSON
        return f"{record.msg!r} {record.args!r}"


def _json(value: object) -> str:
    return json.dumps(_clean(value), separators=(",", ":")).replace("\x7f", "\\u007f")


def _clean(value: Any) -> object:
    """What every reader of JSON takes: no halves of characters, no NaN, nothing that is no JSON."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {str(_clean(str(name))): _clean(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(each) for each in value]
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)
