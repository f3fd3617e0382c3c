"""`firnline committer`: the committer of two-stage tables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from cyclopts.validators import Number

from firnline.cli import logs
from firnline.cli.common import Common, Duration, Flag, Metrics, MoreTables, Tables, named_tables
from firnline.cli.output import count_text, say, say_from_handler
from firnline.clock import monotonic

if TYPE_CHECKING:
    from firnline.committer.committer import CycleReport
    from firnline.committer.service import CommitterObserver
    from firnline.errors import FirnlineError

EPILOGUE = """\
Polls <table>/_staging/pending/, validates each unit right before its commit,
and commits it onto exactly its predecessor; several units per commit when it
is behind. Needs no Spark and no JVM. One committer per table is active; a
second one waits and takes over when the first dies.

Output:
  one line per round; with --once --json: {tables: [{table, commits, units,
  files, rows, rejected [[unit, reason]], waiting {pipeline: [first, last]},
  pending, pending_bytes, oldest_pending_seconds, alarms}]}

Environment:
  FIRNLINE_METRICS_PORT, FIRNLINE_METRICS_HOST, FIRNLINE_METRICS_TOKEN_FILE
                      as --metrics-port, --metrics-host, --metrics-token-file
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline committer /lake/flights --once
  firnline committer flights/firnline.yml --metrics-port 9464
"""

app = App(name="committer", help_epilogue=EPILOGUE)


@app.default
def committer(
    *tables: Tables,
    spec: MoreTables = (),
    once: Annotated[bool, Flag, Parameter(help="Commit what is pending now, then end.")] = False,
    poll_interval: Annotated[
        Duration | None,
        Parameter(
            name=("--poll-interval", "--poll-interval-secs"),
            help="Time between two polls. [default: 10s, or the spec's]",
            show_default=False,
            validator=Number(gt=0),
        ),
    ] = None,
    whole_files: Annotated[bool, Flag, Parameter(help="Read whole files and verify them, not only footers.")] = False,
    metrics: Metrics = Metrics(),
    common: Common = Common(),
) -> int:
    """Run the committer of two-stage tables."""
    named = named_tables([*tables, *spec])
    from firnline.cli.long_task import stop_on_signals
    from firnline.clock import SystemClock
    from firnline.committer.service import CommitterService, TableRef
    from firnline.types import RandomIds

    with _observer(metrics) as observer:
        service = CommitterService(
            [TableRef(uri, options) for uri, options in named.tables.items()],
            RandomIds().new(),
            SystemClock(),
            observer,
            poll_interval_secs=poll_interval or named.poll_interval_secs or 10.0,
            whole_file_checksums=whole_files,
        )
        if once:
            reports = dict(zip(named.tables, service.run_once(), strict=True))
            if common.json:
                common.out.json({"tables": [_as_json(uri, report) for uri, report in reports.items()]})
            else:
                for uri, report in reports.items():
                    common.out.line(f"{uri}: {_summary(report)}")
            return 0
        with stop_on_signals(service.stop, lambda: say_from_handler(_dated("stopping after this round")), lambda: None):
            service.run()
    common.out.line("stopped cleanly")
    return 0


def _as_json(uri: str, report: CycleReport) -> dict[str, Any]:
    return {"table": uri, **{k: v for k, v in asdict(report).items() if k != "commit_seconds"}}


def _summary(report: CycleReport) -> str:
    facts = [f"{count_text(report.units, 'unit')} in {count_text(report.commits, 'commit')}, {report.rows:,} rows"]
    if report.rejected:
        facts.append(f"{count_text(len(report.rejected), 'unit')} set aside")
    for pipeline, (first, last) in report.waiting.items():
        epochs = f"epoch {first}" if first == last else f"epochs {first} to {last}"
        facts.append(f"{pipeline} waits for {epochs}")
    if report.pending:
        facts.append(f"{report.pending:,} still pending")
    return ", ".join(facts)


@contextlib.contextmanager
def _observer(serve: Metrics) -> Iterator[CommitterObserver]:
    """Write lines to stderr and, with a port, serve metrics."""
    from firnline.committer.service import CommitterObserver

    class Lines(CommitterObserver):
        def __init__(self) -> None:
            self._standby: set[str] = set()  # tables that another committer holds

        def cycled(self, table: str, report: CycleReport) -> None:
            if table in self._standby:
                self._standby.discard(table)
                _say(f"{table}: took over")
            if report.units or report.rejected:
                _say(f"{table}: {_summary(report)}")
            for name, reason in report.rejected:
                _say(f"{table}: set aside {name}: {reason}")
            for alarm in report.alarms:
                _say(f"{table}: ALARM: {alarm}")

        def standing_by(self, table: str, holder: str) -> None:
            if table not in self._standby:
                self._standby.add(table)
                _say(f"{table}: another committer is active ({holder}); standing by")

        def trouble(self, table: str, error: FirnlineError) -> None:
            _say(f"{table}: {error.message}; trying again")

    if not serve.wanted:
        yield Lines()
        return
    from firnline.service.health import CommitterHealth
    from firnline.service.metrics import StagingMetrics

    health = CommitterHealth(monotonic, poll_seconds=10)
    metrics = StagingMetrics(Lines(), health)
    with serve.serving(metrics.registry(), health, _say):
        yield metrics


def _say(text: str) -> None:
    say(_dated(text))


def _dated(text: str) -> str:
    """Put the time before a line, except in JSON, which has a field for it."""
    return text if logs.is_json() else f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {text}"
