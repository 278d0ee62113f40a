"""Lines of a batch in OpenAI's format: what is asked, what is answered, and a file of answers to go on with.

A line of the input that cannot be asked is answered by an error under its number (`batch_req_7` for the seventh), all
others under their custom_id. Both are what tells, when a run is taken up again, that they have been answered; what
failed for a reason of the server's (a status of 500 or more) is asked again then, and its line left out.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from engine.errors import ConfigError, InvalidRequestError
from engine.limits import Limits

_FRAME_BYTES = 64 * 1024
"""of a line of the input, around its body"""
_ID = "batch_req_"
STREAMING = frozenset({"/api/chat", "/api/generate"})
"""routes that stream where a body does not say"""


class Asked(msgspec.Struct):
    """One line of the input; fields that nobody knows are ignored."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: Literal["POST"] = "POST"


class _Switches(msgspec.Struct):
    stream: bool | None = None
    background: bool | None = None


class LineError(msgspec.Struct):
    code: str
    message: str


class Answered(msgspec.Struct):
    status_code: int
    request_id: str
    body: Any


class Result(msgspec.Struct):
    """One line of the output: `response`, or the `error` that kept the line from being asked."""

    id: str
    custom_id: str | None
    response: Answered | None = None
    error: LineError | None = None

    @property
    def failed(self) -> bool:
        return self.response is None or self.response.status_code != 200

    @property
    def may_pass(self) -> bool:
        """The line was at no fault. An `error` is always the line's own."""
        return self.response is not None and self.response.status_code >= 500


_asked = msgspec.json.Decoder(Asked)
_switches = msgspec.json.Decoder(_Switches)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_result = msgspec.json.Decoder(Result)
_encoder = msgspec.json.Encoder()


def result_id(number: int) -> str:
    """`number`: of the line in the input, from 1."""
    return f"{_ID}{number}"


def numbered_lines(file: BinaryIO, limits: Limits) -> Iterator[tuple[int, bytes | None]]:
    """With their numbers, from 1; blank ones are left out. None: a line that is longer than any body may be."""
    longest, number = limits.body_bytes + _FRAME_BYTES, 0
    while line := file.readline(longest + 1):
        number += 1
        too_long = len(line) > longest
        while too_long and line and not line.endswith(b"\n"):
            line = file.readline(longest)
        if too_long:
            yield number, None
        elif line.strip():
            yield number, line


def read_line(line: bytes | None, limits: Limits) -> Asked:
    """Raises `InvalidRequestError` for what cannot be asked."""
    if line is None:
        limits.refuse("body_bytes", field="body")
    try:
        asked = _asked.decode(line)
        switches = _switches.decode(asked.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the line is no request of a batch: {error}") from None
    limits.check("name_chars", len(asked.custom_id), "custom_id")
    if not asked.url.startswith("/") or not asked.url.isascii() or "//" in asked.url or not asked.url.isprintable():
        raise InvalidRequestError(
            f"url must be a path of the server's, as /v1/chat/completions, got {asked.url[:80]!a}"
        )
    for name in ("stream", "background"):
        if getattr(switches, name):
            raise InvalidRequestError(f"body.{name} must not be true: the answer is one line")
    if switches.stream is None and asked.url.partition("?")[0] in STREAMING:
        fields = _fields.decode(asked.body)
        fields["stream"] = msgspec.Raw(b"false")
        asked.body = msgspec.Raw(_encoder.encode(fields))
    return asked


def custom_id_of(line: bytes | None) -> str | None:
    """Of a line that may not be one."""
    try:
        custom_id = msgspec.json.decode(line or b"").get("custom_id")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, AttributeError):
        return None
    return custom_id[:256] if isinstance(custom_id, str) else None


class ResultFile:
    """Answers, each written whole before the next. A file that exists is gone on with: `answered` and `refused` tell
    what it holds, and a last line that was not written whole is cut off. Raises `ConfigError`."""

    def __init__(self, path: Path, *, overwrite: bool) -> None:
        self.answered: set[str] = set()
        """custom_ids"""
        self.refused: set[str] = set()
        """ids of lines that could not be asked"""
        self.num_failed = 0
        """answers that are errors"""
        self._replaced: BinaryIO | None = None
        """what stood in the file's place; locked, for whoever has opened it just before"""
        try:
            self._file: BinaryIO = open(path, "ab+")  # noqa: SIM115 - `close`
        except OSError as error:
            raise ConfigError(f"--output {path}: {error.strerror or error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if overwrite:
                self._file.truncate(0)
            else:
                self._read(path)
        except BlockingIOError:
            self._file.close()
            raise ConfigError(f"--output {path}: another process writes it") from None
        except BaseException:
            self._file.close()
            raise

    def _read(self, path: Path) -> None:
        self._file.seek(0)
        end, passing = 0, False
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                result = _result.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise ConfigError(
                    f"--output {path}: line {number} is no answer of a batch ({error}): give another file, or "
                    "--overwrite"
                ) from None
            end += len(line)
            if result.may_pass:
                passing = True
                continue
            self.num_failed += result.failed
            if result.error is not None:
                self.refused.add(result.id)
            elif result.custom_id is not None:
                self.answered.add(result.custom_id)
        self._file.truncate(end)
        if passing:
            self._leave_out_what_may_pass(os.path.realpath(path))

    def _leave_out_what_may_pass(self, path: str) -> None:
        """In a copy that takes the file's place at once: whatever ends this, no answer is lost."""
        folder, name = os.path.split(path)
        try:
            copy, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
            try:
                with open(copy, "wb") as kept:
                    os.fchmod(copy, os.fstat(self._file.fileno()).st_mode & 0o7777)
                    self._file.seek(0)
                    kept.writelines(line for line in self._file if not _result.decode(line).may_pass)
                    kept.flush()
                    os.fsync(copy)
                file = open(temporary, "ab+")  # noqa: SIM115 - `close`
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError as error:
            raise ConfigError(f"--output {path}: {error.strerror or error}") from error
        self._replaced, self._file = self._file, file

    def write(self, result: Result) -> None:
        """Raises OSError; what was written of it is cut off when the file is gone on with."""
        line = _encoder.encode(result) + b"\n"
        self._file.seek(0, os.SEEK_END)
        self._file.write(line)
        self._file.flush()
        self.num_failed += result.failed

    def close(self) -> None:
        self._file.close()
        if self._replaced is not None:
            self._replaced.close()
