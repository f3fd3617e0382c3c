"""The output of commands: tables, lines and JSON on stdout, failures as two lines on stderr."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import textwrap
import traceback
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import IO, Any

from firnline.cli import logs
from firnline.cli.table import Column, lay_out
from firnline.cli.text import safe, shorten, shown, text_width
from firnline.errors import FirnlineError

STDERR = 2  # the file descriptor
MAX_FACT = 300  # characters of one fact of a log record
MAX_REASON = 200  # characters of the reason why a file is set aside
NAMES_SHOWN = 3  # files that are named; the command that lists all of them follows
# What storage libraries put after their message: the same error again, as nested structures over many lines.
_FRAME = re.compile(r"\s+at [\w$.<>/]+\(.*\)\s*$|\s+\.\.\. \d+ more\s*$|JVM stacktrace:")
_PYTHON_TRACE = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)+")
_DEBUG_SOURCE = re.compile(r"\s*\n\s*Debug source:\s*\n(?:\S[^\n]*[{(]\n(?:[ \t][^\n]*\n)*[)}]+,?|.*\Z)", re.DOTALL)
# A chain of causes that delta-rs draws as a tree, in colour.
_CAUSE = re.compile(r"\s*\n\s*(?:\x1b\[\d+m)?↳(?:\x1b\[0m)?\s*")


class Output:
    """The output of a command's result: tables for people, JSON for programs."""

    def __init__(self, *, as_json: bool = False, stream: IO[str] | None = None) -> None:
        self.as_json = as_json
        self._stream = stream or sys.stdout
        self.width = screen_width(self._stream)

    def json(self, value: Any) -> None:
        """Write one JSON value, plainly."""
        self._stream.write(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")

    def line(self, text: str = "") -> None:
        self._stream.write(safe(text) + "\n")

    def sentence(self, text: str) -> None:
        """Write a long line, broken between words where the screen ends."""
        for line in self._wrapped(safe(text), 0):
            self.line(line)

    def text(self, text: str) -> None:
        """Write a text of our own as it is: a file for another program."""
        self._stream.write(text)

    def facts(self, facts: Mapping[str, Any]) -> None:
        """Write names and values, one pair a line, aligned; a long value goes on below its beginning."""
        width = max((len(name) for name in facts), default=0)
        for name, value in facts.items():
            first, *more = self._wrapped(safe(shown(value)), width + 2)
            self.line(f"{name:<{width}}  {first}")
            for text in more:
                self.line(f"{'':<{width}}  {text}")

    def _wrapped(self, text: str, indent: int) -> list[str]:
        """Break a text into lines that leave room for an indent."""
        if self.width is None or indent + text_width(text) <= self.width:
            return [text]
        return textwrap.wrap(text, max(self.width - indent, 20), break_on_hyphens=False) or [""]

    def card(self, facts: Mapping[str, str]) -> None:
        """Write names and values as a framed table on a terminal, plainly otherwise."""
        if not self._stream.isatty():
            self.facts(facts)
            return
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(show_header=False)
        for name, value in facts.items():
            table.add_row(Text(name, style="bold"), Text(safe(value), overflow="fold"))
        Console(file=self._stream).print(table)

    def table(self, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows under headings, within the width of the terminal; in a pipe nothing is cut.

        Columns that do not fit are named below the table.
        """
        layout = lay_out(columns, rows, self.width)
        head, *body = layout.lines
        for line in [_bold(head, self._stream), *body]:
            self._stream.write(line + "\n")
        if layout.left_out:
            self.sentence(f"not shown, too wide: {', '.join(layout.left_out)}")


def safe_bytes(raw: bytes, limit: int) -> str:
    """Bytes as one short printable line; what is not UTF-8 shows as `\\xNN`."""
    cut = raw[: limit * 4]
    return shorten(safe(cut.decode("utf-8", "backslashreplace")), limit)


def size_text(size_bytes: float) -> str:
    """Format a size in the largest fitting unit."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(size_bytes) < 1000:
            return f"{size_bytes:,.0f} {unit}" if unit == "B" else f"{size_bytes:,.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:,.1f} TB"


def lag_text(lag: Mapping[str, Any], unread: Sequence[str] = ()) -> str:
    """Say how far a source is behind the log of its server, as in `LogLag`; tables are `unread` whose rows from before
    are still to be read."""
    if lag["unknown"]:
        return f"lag unknown: {lag['unknown']}"
    if lag["alarm"]:
        return str(lag["alarm"])
    if lag["lag_bytes"] == 0:
        texts = ["in sync with the server's log" if unread else "in sync with the server"]
    else:
        bytes_text = f"{size_text(lag['lag_bytes'])} behind" if lag["lag_bytes"] is not None else "behind"
        seconds = f", {time_text(lag['lag_seconds'])}" if lag["lag_seconds"] is not None else ""
        texts = [f"{bytes_text}{seconds}, the server is at {lag['server_position']}"]
    if lag["retained_bytes"] is not None:
        texts.append(f"its slot keeps {size_text(lag['retained_bytes'])}")
    if unread:
        more = f" and {len(unread) - NAMES_SHOWN} more" if len(unread) > NAMES_SHOWN else ""
        texts.append(f"rows from before are still to be read of {', '.join(unread[:NAMES_SHOWN])}{more}")
    return ", ".join(texts)


def reading_text(table: str, rows: int, estimate: int | None) -> str:
    """Say how far the rows of a captured table have been read that were there before its changes."""
    of_all = f" of about {max(estimate, rows):,}" if estimate else ""
    return f"reads {table}: {rows:,}{of_all} rows"


def time_text(seconds: float) -> str:
    """A duration: `0.3 s`, `1:05`, `2:01:09`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def count_text(number: int, one: str, many: str = "") -> str:
    """`1 file`, `2,000 files`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def set_aside_lines(files: Mapping[str, str]) -> Iterator[str]:
    """Lines about files that are set aside: how many, the first names with their reasons, and what to type."""
    if not files:
        return
    verb = "is" if len(files) == 1 else "are"
    yield f"{count_text(len(files), 'file')} {verb} set aside, because reading failed:"
    for path, reason in list(files.items())[:NAMES_SHOWN]:
        yield f"  {path}: {shorten(brief(reason), MAX_REASON)}"
    more = f"and {len(files) - NAMES_SHOWN:,} more; " if len(files) > NAMES_SHOWN else ""
    yield f"  {more}`firnline files --status set_aside` lists them all; --retry PATH reads one again"


def brief(text: str) -> str:
    """An error's text without the dump of its structures that storage libraries add, and its causes in one line."""
    return _CAUSE.sub(": ", _DEBUG_SOURCE.sub("", text))


def log_text(record: logging.LogRecord) -> str:
    """A log record as one line: level if it matters, message, then the facts."""
    facts = logs.facts_of(record).items()
    text = "  ".join([record.getMessage(), *(f"{k}={shorten(brief(str(v)), MAX_FACT)}" for k, v in facts)])
    return f"{record.levelname.lower()}: {text}" if record.levelno >= logging.WARNING else text


class FactsHandler(logging.Handler):
    """Log records as lines on stderr; with `dated`, each begins with its time."""

    def __init__(self, level: int = logging.NOTSET, *, dated: bool = False) -> None:
        super().__init__(level)
        self._dated = dated

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if logs.is_json():
                sys.stderr.write(logs.record_line(record) + "\n")
                sys.stderr.flush()
            else:
                at = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                say(f"{at} {log_text(record)}" if self._dated else log_text(record))
        except Exception:  # a log line must never end a command
            self.handleError(record)


def say(text: str) -> None:
    """Write a line about progress to stderr."""
    sys.stderr.write(_line(text))
    sys.stderr.flush()


def say_from_handler(text: str) -> None:
    """Write a line from a signal handler: past the stream, whose lock the interrupted code may hold."""
    os.write(STDERR, _line(text).encode())


def _line(text: str) -> str:
    return (logs.json_line("info", text) if logs.is_json() else safe(text)) + "\n"


def print_failure(error: BaseException, *, debug: bool, stream: IO[str] | None = None) -> None:
    """Print a failure in two lines, `Error: ...` and `Try: ...`; with `--debug` the traceback comes first.

    As JSON it is one line, with code, exit code, hint and, with `--debug`, the traceback among its fields.
    """
    stream = stream or sys.stderr
    trace = "".join(traceback.format_exception(error)) if debug else ""
    code, exit_code = "internal", 1
    if isinstance(error, FirnlineError):
        message, hint, code, exit_code = error.message, error.hint, error.code, error.exit_code
        if debug and "traceback" in error.fields:  # of a worker, in another process
            trace += str(error.fields["traceback"])
    else:
        message, hint = f"{type(error).__name__}: {error}", _blame(error)
    if logs.is_json():
        fields = {"code": code, "exit_code": exit_code, "hint": hint, **({"traceback": trace} if trace else {})}
        stream.write(logs.json_line("error", cut_trace(brief(message)), fields) + "\n")
        stream.flush()
        return
    stream.write(trace)
    first, *more = [safe(line) for line in cut_trace(brief(message)).splitlines()] or [""]
    others = "".join(f"\n       {line}" for line in more)  # a spec may have several problems
    stream.write(f"{_red('Error:', stream)} {first}{others}\n{_bold('Try:', stream)} {safe(hint)}\n")
    stream.flush()


def screen_width(stream: IO[str]) -> int | None:
    """The width that output should fit: of the terminal, or COLUMNS; None if the stream is neither."""
    if not stream.isatty() and not os.environ.get("COLUMNS", "").isdigit():
        return None
    return shutil.get_terminal_size().columns


def cut_trace(text: str) -> str:
    """A text without the stack traces of Java and Python that libraries put into their messages."""
    return "\n".join(line for line in _PYTHON_TRACE.sub("", text).splitlines() if not _FRAME.match(line))


def _blame(error: BaseException) -> str:
    """What to do about an exception that nobody expected: it is a library's if that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    library = type(error).__module__.split(".")[0].lstrip("_")
    if library in ("builtins", "firnline") and frames and not frames[-1].filename.startswith(ours):
        library = _package_of(frames[-1].filename)
    if library in ("builtins", "firnline", ""):
        return "This is a bug in Firnline. Run again with --debug and report the traceback; your data is safe."
    return f"The library {library} reports this; your data is safe. Run again; --debug shows where it happened."


def _package_of(path: str) -> str:
    """The name of the package that a file of a library belongs to; empty if it is unknown."""
    _, found, below = path.rpartition("/site-packages/")
    return below.split("/")[0].removesuffix(".py") if found else ""


def _colours(stream: IO[str]) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _red(text: str, stream: IO[str]) -> str:
    return f"\x1b[1;31m{text}\x1b[0m" if _colours(stream) else text


def _bold(text: str, stream: IO[str]) -> str:
    return f"\x1b[1m{text}\x1b[0m" if _colours(stream) else text


def letters_text(count: int | None) -> str:
    """Return a number of dead letters; None if it is unknown."""
    return "an unknown number of dead letters" if count is None else count_text(count, "dead letter")
