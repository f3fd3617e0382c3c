"""Shows a run on stderr: a live display on a terminal, dated lines otherwise; log records included."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Protocol

from firnline.cli.output import count_text, log_text, safe, size_text, time_text
from firnline.cli.run_report import RunTotals

if TYPE_CHECKING:
    from rich.console import RenderableType


class Display(Protocol):
    """A display for lines about a run."""

    def say(self, text: str) -> None:
        """Show one line."""

    def stopping(self) -> None:
        """Show that a signal asked for a stop. Called from the handler: must not lock, wait or use a stream."""

    def restore(self) -> None:
        """Restore the terminal before the process ends at once. Called from the handler, with the same rules."""


@contextlib.contextmanager
def open_display(totals: RunTotals) -> Iterator[Display]:
    """Open a live display if stderr is a terminal, dated lines otherwise."""
    # A stream of its own: while Spark starts, file descriptor 2 is redirected to hide the JVM's greeting.
    with os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1, encoding="utf-8", errors="replace") as stream:
        if stream.isatty() and os.environ.get("TERM") != "dumb":
            with LiveDisplay(totals, stream) as live:
                yield live
        else:
            yield Lines(stream)


class Lines:
    """Dated lines, for logs."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def say(self, text: str) -> None:
        self._stream.write(f"{_now()} {safe(text)}\n")

    def stopping(self) -> None:
        text = f"{_now()} stopping after the epochs in flight; a second signal stops at once\n"
        os.write(self._stream.fileno(), text.encode())

    def restore(self) -> None:
        os.write(self._stream.fileno(), f"{_now()} stopped at once; running again is safe\n".encode())


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class LiveDisplay:
    """Permanent lines above a block that is redrawn several times a second."""

    def __init__(self, totals: RunTotals, stream: IO[str]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._totals = totals
        self._stream = stream
        self._stopping = False
        self._console = Console(file=stream, highlight=False, markup=False)
        self._live = Live(
            get_renderable=self.draw, console=self._console, refresh_per_second=5, transient=True,
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self._console.print(safe(text), soft_wrap=True)

    def stopping(self) -> None:
        self._stopping = True  # drawn with the next refresh

    def restore(self) -> None:
        os.write(self._stream.fileno(), b"\x1b[?25h\r\n")

    def draw(self) -> RenderableType:
        """Draw the block."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        totals = self._totals
        grid = Table.grid(padding=(0, 2))
        waiting = totals.waiting
        if waiting is not None and (totals.bytes_read or waiting.bytes_outstanding):
            total = totals.bytes_read + waiting.bytes_outstanding
            bar = ProgressBar(total=total, completed=totals.bytes_read, width=24)
            left = totals.seconds_left
            texts = [
                f"{100 * totals.bytes_read / total:.0f} %",
                f"backlog {count_text(waiting.files_outstanding, 'file')}, {size_text(waiting.bytes_outstanding)}",
                f"{time_text(left)} left" if left is not None and waiting.bytes_outstanding else "",
            ]
            grid.add_row(bar, *texts)
        doing = "stops after the epochs in flight; Ctrl-C again stops at once" if self._stopping else totals.doing
        numbers = (
            f"{count_text(totals.files, 'file')}   {count_text(totals.records, 'record')}   "
            f"{totals.speed[1] / 1e6:.1f} MB/s   epoch {totals.epoch}   {time_text(totals.seconds)}"
        )
        if totals.state_bytes is not None:
            numbers += f"   state {size_text(totals.state_bytes)}"
        style = "yellow" if self._stopping or totals.doing.startswith("retries") else "dim"
        return Group(Text(numbers), grid, Text(doing, style=style))


class _DisplayHandler(logging.Handler):
    """Log records as lines of the display: message first, then the facts."""

    def __init__(self, display: Display) -> None:
        super().__init__()
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._display.say(log_text(record))
            if record.exc_info and record.levelno >= logging.ERROR:
                self._display.say(logging.Formatter().formatException(record.exc_info))
        except Exception:  # a log line must never end a run
            self.handleError(record)


@contextlib.contextmanager
def logging_to(display: Display, *, debug: bool) -> Iterator[None]:
    """Send log records to the display: warnings of all libraries, and with `debug` all of ours."""
    handler = _DisplayHandler(display)
    root, ours, gateway = logging.getLogger(), logging.getLogger("firnline"), logging.getLogger("py4j")
    before = [(logger, logger.level) for logger in (root, ours, gateway)]
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    ours.setLevel(logging.DEBUG if debug else logging.WARNING)
    # The gateway logs a traceback per call when the JVM dies; our own log has one line about it.
    gateway.setLevel(logging.WARNING if debug else logging.CRITICAL)
    try:
        yield
    finally:
        root.removeHandler(handler)
        for logger, level in before:
            logger.setLevel(level)
