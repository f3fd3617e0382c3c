"""Shows a run on stderr: its totals, a line about each important event, log records; live on a terminal."""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import logging
import os
import signal
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Any, Protocol

from firnline.cli import logs
from firnline.cli.common import name_spec
from firnline.cli.output import NAMES_SHOWN, count_text, lag_text, log_text, reading_text, size_text, time_text
from firnline.cli.text import safe
from firnline.errors import FirnlineError, LedgerHoleError
from firnline.rescued import Rescued, add_rescued
from firnline.run.observer import Comparison, EpochFacts, Observer, SinkLag, took_ms
from firnline.sinks.base import Head
from firnline.sources.base import Backlog, LogLag, SnapshotProgress
from firnline.sources.group import EpochPlan
from firnline.stores.replicator import Replication
from firnline.types import Json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from firnline.jobs.spark import Start

RATE_SECONDS = 30.0  # the window over which speed is measured


@dataclass
class RunTotals(Observer):
    """The totals of a run so far."""

    monotonic: Callable[[], float]
    words: tuple[str, str] = ("file", "file")  # what one input is called, and what comes next
    run: str = ""
    epoch: int = 0
    generation: int = 0
    epochs: int = 0
    files: int = 0
    records: int = 0
    rows: int = 0  # in the deciding sink; of an upsert, change rows
    changes: Counter[str] = field(default_factory=Counter)  # of an upsert, if known: rows inserted, updated, deleted
    are_changes: bool = False  # whether `rows` are change rows
    rows_in: str = ""  # its name, if there are several sinks
    bytes_read: int = 0
    state_bytes: int | None = None  # of operators' state; None without operators
    late_files: int = 0
    set_aside: int = 0
    restarts: int = 0
    recovery_path: str = ""
    lag: Replication | None = None
    copies_failing: dict[str, str] = field(default_factory=dict)  # store, local or remote -> why
    quarantined: Counter[str] = field(default_factory=Counter)
    rescued: list[Rescued] = field(default_factory=list)  # by source and column
    lags: tuple[SinkLag, ...] = ()  # of further sinks
    deliveries: Counter[str] = field(default_factory=Counter)  # epochs by further sink
    refusals: dict[str, FirnlineError] = field(default_factory=dict)  # by optional sink: what no retry mends
    waiting: Backlog | None = None
    logs: Mapping[str, LogLag] = field(default_factory=dict)  # by source that reads the log of a server
    reading: dict[str, list[str]] = field(default_factory=dict)  # by source: how far tables are read, in words
    unreachable: list[str] = field(default_factory=list)  # why sources cannot be read at present
    doing: str = "reading the table"
    spark_since: float | None = None  # when Spark began to start; None once it has started
    _began: float = 0.0
    _recent: deque[tuple[float, int, int]] = field(default_factory=deque)  # when, bytes as stored, raw bytes

    def __post_init__(self) -> None:
        self._began = self.monotonic()
        self._recent.append((self._began, 0, 0))

    @property
    def _looks(self) -> str:
        return "lists files" if self.words[1] == "file" else f"looks for {self.words[1]}s"

    @property
    def seconds(self) -> float:
        return self.monotonic() - self._began

    @property
    def speed(self) -> tuple[float, float]:
        """Bytes per second over the last `RATE_SECONDS`: as stored, and raw."""
        begin = self._recent[0][0]
        span = max(self.monotonic() - begin, 0.001)
        return sum(r[1] for r in self._recent) / span, sum(r[2] for r in self._recent) / span

    @property
    def seconds_left(self) -> float | None:
        """How long the backlog lasts at this speed; None if unknown."""
        stored, _ = self.speed
        if self.waiting is None or stored <= 0:
            return None
        return self.waiting.bytes_outstanding / stored

    @property
    def step(self) -> str:
        """What the run does now. The start of Spark has its seconds, because it takes longest."""
        since = self.spark_since
        return self.doing if since is None else f"Spark starts, {time_text(self.monotonic() - since)}"

    def started(self, run: str, held: Head) -> None:
        self.run, self.epoch, self.generation = run, held.epoch, held.generation
        self.recovery_path = self.recovery_path or held.path
        self.doing = self._looks

    def claimed(self, generation: int) -> None:
        self.generation = generation

    def planned(self, epoch: int, plan: EpochPlan) -> None:
        if self.doing != f"epoch {epoch - 1} runs":
            self.doing = f"epoch {epoch} is planned"

    def running(self, epoch: int) -> None:
        self.begin_speed()
        self.doing = f"epoch {epoch} runs"

    def begin_speed(self) -> None:
        """Measure speed from now on, unless an epoch is committed: the start of Spark says nothing about it."""
        if not self.epochs:
            self._recent.clear()
            self._recent.append((self.monotonic(), 0, 0))

    def ran(self, epoch: int, seconds: float) -> None:
        self.doing = f"epoch {epoch} commits"

    def committed(self, facts: EpochFacts) -> None:
        self.epoch = facts.epoch
        self.epochs += 1
        self.files += max(0, facts.files - facts.files_again)
        self.records += facts.records
        self.rows += facts.rows
        self.changes.update(facts.changes)
        self.are_changes = facts.rows_in in facts.upserted
        self.rows_in = facts.rows_in if facts.sink_rows else ""
        self.bytes_read += facts.bytes_read
        self.late_files += facts.late_files
        self.set_aside = facts.set_aside
        if facts.operators:
            self.state_bytes = _state_bytes(facts)
        self.quarantined.update(facts.bad)
        self.rescued = add_rescued([*self.rescued, *facts.rescued])
        if self.doing == f"epoch {facts.epoch} commits":
            self.doing = f"epoch {facts.epoch} is {'staged' if facts.is_staged else 'committed'}"
        now = self.monotonic()
        self._recent.append((now, facts.bytes_read, facts.raw_bytes))
        while len(self._recent) > 2 and now - self._recent[0][0] > RATE_SECONDS:
            self._recent.popleft()

    def delivered(self, sink: str, epoch: int) -> None:
        self.deliveries[sink] += 1
        self.refusals.pop(sink, None)

    def values_rescued(self, sink: str, epoch: int, found: Sequence[Rescued]) -> None:
        self.rescued = add_rescued([*self.rescued, *found])

    def trouble(self, error: FirnlineError, failures: int, optional: str = "") -> None:
        if optional and not error.retryable:
            self.refusals[optional] = error
        else:
            self.refusals.pop(optional, None)

    def sinks(self, lags: Sequence[SinkLag]) -> None:
        self.lags = tuple(lags)

    @property
    def lagging(self) -> list[str]:
        """The sinks that are set aside or lack more than the epoch that is on its way, in words."""
        found = []
        for lag in self.lags:
            if lag.set_aside:
                found.append(f"{lag.sink} is set aside")
            elif lag.epochs_behind > 1:
                size = f" ({size_text(lag.bytes_behind)})" if lag.bytes_behind else ""
                found.append(f"{lag.sink} is {count_text(lag.epochs_behind, 'epoch')}{size} behind")
        return found

    def backlog(self, backlog: Backlog) -> None:
        self.waiting = backlog

    def log_lags(self, lags: Mapping[str, LogLag]) -> None:
        self.logs = lags

    def snapshots(self, progress: Mapping[str, Mapping[str, SnapshotProgress]]) -> None:
        self.reading = {name: _reading_texts(tables) for name, tables in progress.items()}

    def idle(self) -> None:
        self.doing = "waits: " + self.unreachable[0] if self.unreachable else f"waits for new {self.words[1]}s"

    def sources(self, unreachable: Mapping[str, str | None]) -> None:
        self.unreachable = [reason for reason in unreachable.values() if reason]

    def resting(self, seconds: float, failures: int, optional: str = "") -> None:
        if not optional:
            self.restarts += 1
            self.doing = f"retries in {time_text(seconds)}"

    def replication(self, lag: Replication) -> None:
        self.lag = lag

    def copies(self, lags: Sequence[Replication]) -> None:
        self.copies_failing = {lag.tier: lag.reason for lag in lags if lag.reason}

    def draining(self, lag: Replication) -> None:
        self.doing = f"waits for the {lag.tier} tier"

    def paused(self, paused: bool) -> None:
        self.doing = "paused" if paused else self._looks

    def stopped(self, exit_code: int) -> None:
        self.doing = "stopping Spark"

    def summary(self) -> dict[str, Any]:
        """The numbers, as `run --json` shows them."""
        return {
            "epoch": self.epoch,
            "generation": self.generation,
            "epochs": self.epochs,
            "files": self.files,
            "records": self.records,
            "rows": self.rows,
            "changes": dict(self.changes),
            "bytes_read": self.bytes_read,
            "quarantined": dict(self.quarantined),
            "rescued": [one.to_json() for one in self.rescued],
            "late_files": self.late_files,
            "set_aside": self.set_aside,
            "delivered": dict(self.deliveries),
            "sinks_behind": {lag.sink: lag.epochs_behind for lag in self.lags if lag.epochs_behind},
            "restarts": self.restarts,
            "recovery_path": self.recovery_path or None,
            "replication_epochs_behind": self.lag.epochs_behind if self.lag else None,
            "replication_lag_seconds": round(self.lag.lag_seconds(self.monotonic()), 3) if self.lag else None,
            "copies_failing": self.copies_failing,
            "seconds": round(self.seconds, 3),
        }


def spark_start(totals: RunTotals, say: Callable[[str], None]) -> Callable[[Start], None]:
    """Return what the engine calls while Spark starts: one line before, one with the seconds after it."""

    def report(start: Start) -> None:
        since, totals.spark_since = totals.spark_since, totals.monotonic() if start == "starting" else None
        if start == "starting":
            say("starting Spark")
        elif start == "started" and since is not None:
            totals.begin_speed()
            say(f"Spark started in {time_text(totals.monotonic() - since)}")

    return report


def _of_operators(facts: EpochFacts) -> list[str]:
    """Return what operators add to the line of an epoch: records of each of several sources, and the state's size."""
    if not facts.operators:
        return []
    read = ", ".join(f"{name} {records:,}" for name, records in facts.sources.items())
    return [*([read] if len(facts.sources) > 1 else []), f"state {size_text(_state_bytes(facts))}"]


def _state_bytes(facts: EpochFacts) -> int:
    return sum(int(did.get("state_bytes", 0)) for did in facts.operators.values())


def _rows_text(facts: EpochFacts) -> str:
    """Return the rows of an epoch; with several sinks those in each, and those for each that gets them later."""
    rows = {sink: count for sink, count in facts.sink_rows.items() if count}
    where = {sink: f"for {sink}" if sink in facts.followers else f"in {sink}" for sink in rows}
    if not rows or (set(rows) == {facts.rows_in} and facts.rows_in not in facts.filtered):
        text = rows_text(facts.rows, facts.changes, are_changes=facts.rows_in in facts.upserted)
        return f"{text} {where[facts.rows_in]}" if rows else text
    texts: list[str] = []
    for sink, count in rows.items():
        unit = "change" if sink in facts.upserted else "row"
        number = count_text(count, unit) if facts.upserted or not texts else f"{count:,}"
        texts.append(f"{'up to ' if sink in facts.filtered else ''}{number} {where[sink]}")
    return ", ".join(texts)


def rows_text(rows: int, changes: Mapping[str, int], *, are_changes: bool) -> str:
    """Return a number of rows or, of an upsert, what was done to rows, as far as it is known."""
    if not changes:
        return count_text(rows, "change" if are_changes else "row")
    done = [(name, count) for name, count in changes.items() if count]
    if not done:
        return "no row changed"
    (name, count), *rest = done
    return ", ".join([f"{count_text(count, 'row')} {name}", *(f"{count:,} {name}" for name, count in rest)])


class RunReporter(Observer):
    """Writes one line about each event that a person should know."""

    def __init__(self, say: Callable[[str], None], *, attempts: int, words: tuple[str, str] = ("file", "file")) -> None:
        self._say = say
        self._attempts = attempts
        self._words = words  # what one input is called, and what comes next
        self._starts = 0
        self._idle = False
        self._set_aside = 0
        self._reading: dict[str, str] = {}  # by source: how far its tables were read, as it was said last
        self._failing: set[str] = set()  # copies whose failure was reported
        self._optional: dict[str, tuple[str, int]] = {}  # by optional sink: its last error, and how often it came
        self._last_trouble = ""  # the last failure that a retry may mend, until an epoch is committed
        self._unreachable = False  # whether a source cannot be read, which the log says

    def held_up(self, full: tuple[int, int] | None) -> None:
        if full is None:
            self._say("the committer caught up; continuing")
        else:
            self._say(f"waiting for the committer: {full[0]:,} units, {full[1]:,} bytes are pending")

    def paused(self, paused: bool) -> None:
        self._idle = False
        self._say("paused: no further epoch is planned, epochs in flight complete" if paused else "resumed")

    def started(self, run: str, held: Head) -> None:
        self._starts += 1
        if self._starts == 1:
            came_from = f", from the {held.path} tier" if held.path in ("local", "remote") else ""
            self._say(f"resuming after epoch {held.epoch}{came_from}" if held.checkpoint else "starting fresh")
        for repair in held.repairs:
            self._say(f"repaired: {repair}")

    def claimed(self, generation: int) -> None:
        self._say(f"claimed generation {generation}")

    def running(self, epoch: int) -> None:
        self._idle = False

    def snapshots(self, progress: Mapping[str, Mapping[str, SnapshotProgress]]) -> None:
        for name, tables in progress.items():
            text = f"source {name} {', '.join(_reading_texts(tables))}"
            if _reading_texts(tables) and self._reading.get(name) != text:
                self._say(text)
            self._reading[name] = text

    def committed(self, facts: EpochFacts) -> None:
        self._last_trouble = ""
        texts = [
            f"epoch {facts.epoch} {'staged' if facts.is_staged else 'committed'}",
            _rows_text(facts),
            count_text(facts.files, self._words[0]),
            *([f"{count_text(facts.files_failed, self._words[0])} failed"] if facts.files_failed else []),
            *([] if facts.is_staged else [f"version {facts.version}"]),
            time_text(took_ms(facts.durations_ms) / 1000),
            *_of_operators(facts),
        ]
        if facts.bad:
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(facts.bad.items()))
            texts.append(f"{sum(facts.bad.values()):,} quarantined ({reasons})")
        if facts.late_files:
            texts.append(count_text(facts.late_files, "late file"))
        self._say("  ".join(texts))
        if facts.set_aside > self._set_aside:
            self._say(f"{count_text(facts.set_aside, 'file')} set aside; see `firnline files --status set_aside`")
        self._set_aside = facts.set_aside

    def log_committed(self, epoch: int) -> None:
        self._say(f"the committer has committed up to epoch {epoch}")

    def worker_lost(self, facts: dict[str, Json]) -> None:
        shards = count_text(int(facts["shards"]), "shard")
        self._say(f"a worker was lost: epoch {facts['epoch']} runs again, with {shards}")

    def reconciled(self, found: Comparison) -> None:
        if found.late:
            self._say(f"{count_text(found.late, 'late file')} found among {found.listed:,} listed")
        if found.changed:
            what = f"{count_text(len(found.changed), 'file')} replaced after reading, and not read again"
            self._say(f"{what}: {found.changed[0]}; see `firnline files --status changed`")
        if found.grown:
            what = f"{count_text(len(found.grown), 'file')} grew after reading"
            self._say(f"{what}: {found.grown[0]}; see `firnline files --status grown`")

    def too_young(self, files: int, seconds: float) -> None:
        what = f"{count_text(files, 'file')} changed a moment ago and may be half written (min_age_secs)"
        self._say(f"{what}; waiting {time_text(max(seconds, 0.1))}")

    def sources(self, unreachable: Mapping[str, str | None]) -> None:
        self._unreachable = any(unreachable.values())

    def ledger_hole(self, error: LedgerHoleError | None) -> None:
        if error is None:
            self._say("the ledger is whole again; late files are ingested")
        else:
            self._say(f"late files are not ingested: {error.message}. {error.hint}")

    def idle(self) -> None:
        if not self._idle and not self._unreachable:
            self._idle = True
            self._say(f"all read; waiting for new {self._words[1]}s")

    def copies(self, lags: Sequence[Replication]) -> None:
        for lag in lags:
            name = "checkpoint store" if lag.tier == "store" else f"{lag.tier} tier"
            if lag.reason and lag.tier not in self._failing:
                self._failing.add(lag.tier)
                self._say(f"the {name} {lag.location} cannot be written; going on, trying again: {lag.reason}")
            elif not lag.reason and lag.tier in self._failing:
                self._failing.remove(lag.tier)
                self._say(f"the {name} is in sync again, at epoch {lag.epoch}")

    def left_staged(self, epochs: int, table: str, behind: list[str]) -> None:
        it = "it" if epochs == 1 else "them"
        what = f"{count_text(epochs, 'epoch')} staged; `firnline committer {table}` commits {it}"
        self._say(f"{what}, then the next run delivers {it} to {', '.join(behind)}" if behind else what)

    def draining(self, lag: Replication) -> None:
        self._say(f"waiting for the {lag.tier} tier {lag.location}: {count_text(lag.epochs_behind, 'epoch')} behind")

    def trouble(self, error: FirnlineError, failures: int, optional: str = "") -> None:
        if optional:
            before, times = self._optional.get(optional, ("", 0))
            self._optional[optional] = (error.message, times + 1 if error.message == before else 1)
        if self._is_news(optional) and (error.retryable or optional):  # any other ends the run, which reports it
            if not optional:
                if error.message == self._last_trouble:
                    return
                self._last_trouble = error.message
            is_first = self._optional.get(optional, ("", 0))[1] == 1
            self._say(f"failed: {error.message}{f'. Try: {error.hint}' if is_first and not error.retryable else ''}")

    def resting(self, seconds: float, failures: int, optional: str = "") -> None:
        limit = f"sink {optional} is optional: the others go on" if optional else f"of at most {self._attempts}"
        if self._is_news(optional):
            self._say(f"retrying in {time_text(seconds)} (failure {failures}{'; ' if optional else ' '}{limit})")

    def _is_news(self, optional: str) -> bool:
        """Whether to report a failure: the same one of an optional sink is shown ever more rarely."""
        _, times = self._optional.get(optional, ("", 1))
        return times & (times - 1) == 0

    def delivered(self, sink: str, epoch: int) -> None:
        if self._optional.pop(sink, None):
            self._say(f"sink {sink} takes rows again: epoch {epoch} is delivered")


class FieldsReporter(RunReporter):
    """Logs the events of a run that programs look for with their numbers as fields; the others as texts."""

    def __init__(
        self,
        log: Callable[[str, str, Mapping[str, Any]], None],
        *,
        attempts: int,
        words: tuple[str, str] = ("file", "file"),
    ) -> None:
        super().__init__(lambda text: log("info", text, {}), attempts=attempts, words=words)
        self._log = log

    def started(self, run: str, held: Head) -> None:
        facts = {"run": run, "epoch": held.epoch, "generation": held.generation, "path": held.path or "fresh"}
        self._log("info", "resuming" if held.checkpoint else "starting fresh", facts)
        for repair in held.repairs:
            self._log("warning", "repaired", {"reason": repair})

    def claimed(self, generation: int) -> None:
        self._log("info", "claimed", {"generation": generation})

    def committed(self, facts: EpochFacts) -> None:
        fields = {
            "epoch": facts.epoch,
            "sink": facts.sink,
            "version": facts.version,
            "files": facts.files,
            **({"files_failed": facts.files_failed} if facts.files_failed else {}),
            "records": facts.records,
            "rows": facts.rows,
            "changes": dict(facts.changes),
            "bytes_read": facts.bytes_read,
            "quarantined": facts.bad,
            "late_files": facts.late_files,
            "set_aside": facts.set_aside,
            "duration_ms": took_ms(facts.durations_ms),
        }
        self._log("info", "epoch staged" if facts.is_staged else "epoch committed", fields)

    def trouble(self, error: FirnlineError, failures: int, optional: str = "") -> None:
        if error.retryable or optional:
            fields = {"code": error.code, "reason": error.message, "failures": failures}
            self._log("warning", "step failed", fields if error.retryable else {**fields, "hint": error.hint})

    def resting(self, seconds: float, failures: int, optional: str = "") -> None:
        self._log("info", "retrying", {"seconds": round(seconds, 3), "failures": failures, "attempts": self._attempts})


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
    """Open a live display if stderr is a terminal, dated lines otherwise; JSON if the log format is."""
    # A stream of its own: while Spark starts, file descriptor 2 is redirected to hide the JVM's greeting.
    with (
        os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1, encoding="utf-8", errors="replace") as stream,
        _stacks_on_request(stream),
    ):
        if logs.is_json():
            yield JsonLines(stream)
        elif stream.isatty() and os.environ.get("TERM") != "dumb":
            with LiveDisplay(totals, stream) as live:
                yield live
        else:
            yield Lines(stream)


@contextlib.contextmanager
def _stacks_on_request(stream: IO[str]) -> Iterator[None]:
    """Write what every thread does on SIGQUIT, and go on: so a run that seems to hang tells where."""
    faulthandler.register(signal.SIGQUIT, file=stream)
    try:
        yield
    finally:
        faulthandler.unregister(signal.SIGQUIT)


def open_reporter(display: Display, *, attempts: int, words: tuple[str, str]) -> RunReporter:
    """Return the observer that writes about the events of a run in the way of the display."""
    if isinstance(display, JsonLines):
        return FieldsReporter(display.log, attempts=attempts, words=words)
    return RunReporter(display.say, attempts=attempts, words=words)


def _reading_texts(tables: Mapping[str, SnapshotProgress]) -> list[str]:
    """Say how far tables are read that are being read; of many the first ones."""
    reading = [(name, one) for name, one in sorted(tables.items()) if not (one.done or one.is_due)]
    shown = [reading_text(name, one.rows, one.estimate) for name, one in reading[:NAMES_SHOWN]]
    more = len(reading) - len(shown)
    return [*shown, *([f"and {count_text(more, 'more table')}"] if more else [])]


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


class JsonLines:
    """One JSON object a line, for programs that collect logs."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def say(self, text: str) -> None:
        self.log("info", text, {})

    def log(self, level: str, message: str, fields: Mapping[str, Any]) -> None:
        """Write a line with fields."""
        self.write(logs.json_line(level, message, fields))

    def write(self, line: str) -> None:
        """Write a line that is JSON already."""
        self._stream.write(line + "\n")

    def stopping(self) -> None:
        self._write_now("stopping after the epochs in flight; a second signal stops at once")

    def restore(self) -> None:
        self._write_now("stopped at once; running again is safe")

    def _write_now(self, text: str) -> None:
        os.write(self._stream.fileno(), f"{logs.json_line('info', text)}\n".encode())


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
                f"backlog {count_text(waiting.files_outstanding, totals.words[0])}, "
                f"{size_text(waiting.bytes_outstanding)}",
                f"{time_text(left)} left" if left is not None and waiting.bytes_outstanding else "",
            ]
            grid.add_row(bar, *texts)
        doing = "stops after the epochs in flight; Ctrl-C again stops at once" if self._stopping else totals.step
        numbers = (
            f"{count_text(totals.files, totals.words[0])}   {count_text(totals.records, 'record')}   "
            f"{totals.speed[1] / 1e6:.1f} MB/s   epoch {totals.epoch}   {time_text(totals.seconds)}"
        )
        if totals.state_bytes is not None:
            numbers += f"   state {size_text(totals.state_bytes)}"
        style = "yellow" if self._stopping or totals.doing.startswith("retries") else "dim"
        lines = [
            Text(f"source {name}: {', '.join([lag_text(lag.to_json()), *totals.reading.get(name, [])])}")
            for name, lag in totals.logs.items()
        ]
        lines += [Text(f"sink {words}", style="yellow") for words in totals.lagging]
        return Group(Text(numbers), grid, *lines, Text(doing, style=style))


class _DisplayHandler(logging.Handler):
    """Log records as lines of the display: message first, then the facts."""

    def __init__(self, display: Display, spec: str | None) -> None:
        super().__init__()
        self._display = display
        self._spec = spec

    def emit(self, record: logging.LogRecord) -> None:
        try:
            record = self._with_spec(record)
            if isinstance(self._display, JsonLines):
                self._display.write(logs.record_line(record))
                return
            self._display.say(log_text(record))
            if record.exc_info and record.levelno >= logging.ERROR:
                self._display.say(logging.Formatter().formatException(record.exc_info))
        except Exception:  # a log line must never end a run
            self.handleError(record)

    def _with_spec(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return a record whose commands can be pasted: they name the spec."""
        text = record.getMessage()
        named = name_spec(text, self._spec)
        if named == text:
            return record
        changed = copy.copy(record)
        changed.msg, changed.args = named, ()
        return changed


@contextlib.contextmanager
def logging_to(display: Display, *, debug: bool, spec: str | None = None) -> Iterator[None]:
    """Send log records to the display: warnings of all libraries, and with `debug` all of ours. Commands in them name
    the spec, if the command line does."""
    handler = _DisplayHandler(display, spec)
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
