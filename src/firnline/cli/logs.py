"""Log lines on stderr as JSON: one object a line, with `time`, `level`, `message` and `fields`.

For programs that collect logs: chosen by `--log-format json` or FIRNLINE_LOG_FORMAT; text otherwise.
"""

from __future__ import annotations

import contextlib
import json
import logging
import traceback
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]
VARIABLE = "FIRNLINE_LOG_FORMAT"
OPTION = "--log-format"
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class _Chosen:
    """The format of this process, which runs one command."""

    is_json = False


def find_format(tokens: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the format that a command line asks for; read before it is parsed, for usage errors have it, too."""
    for place, token in enumerate(tokens):
        if token == OPTION:
            return "".join(tokens[place + 1 : place + 2])
        if token.startswith(f"{OPTION}="):
            return token.partition("=")[2]
    return environ.get(VARIABLE, "text")


@contextlib.contextmanager
def using_format(chosen: str) -> Iterator[None]:
    """Write log lines in this format meanwhile."""
    before, _Chosen.is_json = _Chosen.is_json, chosen == "json"
    try:
        yield
    finally:
        _Chosen.is_json = before


def is_json() -> bool:
    """Whether log lines are JSON."""
    return _Chosen.is_json


def json_line(level: str, message: str, fields: Mapping[str, Any] | None = None, at: datetime | None = None) -> str:
    """One log line. Plain ASCII, so that it is valid in any encoding of the stream."""
    moment = (at or datetime.now(UTC)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps({"time": moment, "level": level, "message": message, "fields": dict(fields or {})}, default=str)


def facts_of(record: logging.LogRecord) -> dict[str, Any]:
    """The facts that a log record has beside its message."""
    return {name: value for name, value in record.__dict__.items() if name not in _STANDARD}


def record_line(record: logging.LogRecord) -> str:
    """A log record as one line; `logger` names the module, `traceback` is that of its exception."""
    fields = {**facts_of(record), "logger": record.name}
    if record.exc_info and record.exc_info[1] is not None:
        fields["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
    at = datetime.fromtimestamp(record.created, UTC)
    return json_line(record.levelname.lower(), record.getMessage(), fields, at)
