"""`firnline run`: runs the pipeline in this process, on Spark, until stopped or once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from firnline.cli.common import Common, Flag, Metrics, Spec, load_options, name_spec
from firnline.cli.consent import Consent
from firnline.cli.long_task import CopyProgress
from firnline.cli.output import NAMES_SHOWN, count_text, print_failure, say, set_aside_lines, time_text
from firnline.cli.run_plan import confirm
from firnline.clock import monotonic
from firnline.errors import ConfigError, FilesSetAsideError, FirnlineError
from firnline.run.standby import check_standby, holding_lease

if TYPE_CHECKING:
    from firnline.cli.run_report import Display, RunTotals
    from firnline.history.edits.begin_plan import BeginPlan
    from firnline.history.gaps import GapWishes
    from firnline.options import PipelineOptions
    from firnline.rescued import Rescued
    from firnline.run.observer import Observer
    from firnline.run.open_pipeline import OpenPipeline
    from firnline.run.runner import Runner, RunResult
    from firnline.run.wanted import WishFollower

EPILOGUE = """\
Progress goes to stderr: a live display on a terminal, dated lines otherwise;
with --log-format json one object a line {time, level, message, fields}.
The first SIGINT or SIGTERM stops the run cleanly after the epochs in flight, a
second one at once (exit code 130); both are safe, as is kill -9. The next run
resumes after the newest epoch in the table.

One run is active: it holds the pipeline's lease in the checkpoint store and
renews it. While that run is alive, a second one is refused with exit code 6;
--once with nothing to do takes no lease and disturbs nobody. The lease of a run
whose process is gone, or that has expired, is taken. With --take-over the new
run takes the lease from a live run, which ends with exit code 5. With --standby
the new run waits until the holder releases the lease, or has not renewed it for
checkpoint.lease_seconds. Only then does Spark start, so a takeover takes that
time plus the start of Spark. Spark starts in the background while the run reads
its tables and lists its input; --once with nothing to do starts none, unless
listing takes long. `firnline prepare` shortens the start. A standby that took
over and is fenced later ends, too. `firnline pause`, `resume`, `stop` and
`checkpoint` reach a run from the same machine.

Store and tiers are copies: an outage of a copy stops nothing. The run logs it,
continues, and brings the copy in sync when it answers again. A copy that is
ahead of the table ends the run. With --strict-store, a store that cannot be
written is a failure like any other.

--fresh-after and --from-savepoint change tables and progress before the run.
The command shows the plan (rows that go or come twice, input that is read
again), then asks; without a terminal it needs --yes, else exit code 2.
--from-savepoint restores tables and progress from the savepoint, in one epoch,
then runs; repeating the command does not restore again. Rows of other pipelines
in the tables are not lost unless --accept names them.

--resnapshot TABLE (or SOURCE:TABLE) and --resnapshot-all empty captured tables
and read them again. If the server's log does not continue (purged, slot gone,
restored server), the run passes over the gap only if every table that may have
lost changes is read again, or with --accept-gap, which loses the changes of the
others; else it does nothing, names them, and exits with 1. Tables without a key
cannot be read again: their changes are lost, which takes --accept-gap. Where
the log continues, nothing is accepted.

Output (stdout; JSON fields):
  pipeline, run, status (done, stopped, failed, fenced), exit_code, epoch,
  generation, epochs, files (of which something could be read), records,
  rows (of an upsert: change rows),
  changes (of an upsert: rows inserted, updated, deleted), bytes_read,
  quarantined (by reason), rescued [{source, table (of a database), column,
  values, expected, first, file, line}],
  late_files, set_aside, set_aside_files [{path, reason}], delivered ({sink:
  epochs} of further sinks), sinks_behind ({sink: epochs that it lacks}),
  restarts, recovery_path (fresh, local, remote,
  sink), replication_epochs_behind, replication_lag_seconds (of the
  remote tier), copies_failing (store, local or remote with the reason why it
  cannot be written), seconds, error

Exit codes:
  0 done or stopped, 1 failed, 2 usage or spec, 3 failed but safe to run
  again, 4 outcome unknown, 5 fenced by another run, 6 already running (the
  lease is alive), 7 finished, but files are set aside (only with
  --fail-on-set-aside), 130 stopped at once

Environment:
  FIRNLINE_METRICS_PORT, FIRNLINE_METRICS_HOST, FIRNLINE_METRICS_TOKEN_FILE
                      as --metrics-port, --metrics-host, --metrics-token-file
  FIRNLINE__A__B      overrides the key a.b of the spec
  NO_COLOR            no colours

Examples:
  firnline run --once
  firnline run flights/firnline.yml --metrics-port 9464
  firnline run --standby
  firnline run --from-savepoint /backup/flights-1 --yes
"""

STOOD_BY = "stopped while standing by; nothing was run"

app = App(name="run", help_epilogue=EPILOGUE)


@app.default
def run(
    spec: Spec = None,
    *,
    once: Annotated[bool, Flag, Parameter(help="Stop when the input is exhausted.")] = False,
    standby: Annotated[bool, Flag, Parameter(help="Wait until no other run holds the lease, then run.")] = False,
    take_over: Annotated[bool, Flag, Parameter(help="Take the lease from a live run, which then ends.")] = False,
    accept_duplicates: Annotated[
        bool,
        Flag,
        Parameter(help="Continue if another tool's progress is damaged or was not found; may duplicate rows."),
    ] = False,
    source_moved: Annotated[
        str | None, Parameter(help="OLD=NEW: the same files moved to another root. [default: none]")
    ] = None,
    accept_gap: Annotated[
        bool,
        Flag,
        Parameter(help="Lose changes of tables that are not read again, if a database's log does not continue."),
    ] = False,
    resnapshot: Annotated[
        tuple[str, ...],
        Flag,
        Parameter(help="Read this captured table again, emptied first; repeatable. [default: none]"),
    ] = (),
    resnapshot_all: Annotated[
        bool, Flag, Parameter(help="Read all captured tables that have a key again, emptied first.")
    ] = False,
    fresh_after: Annotated[
        int | None,
        Parameter(help="Fresh start; only while the table is at exactly this epoch. [default: off]"),
    ] = None,
    truncate: Annotated[bool, Flag, Parameter(help="With --fresh-after: also remove the table's rows.")] = False,
    from_savepoint: Annotated[str | None, Parameter(help="Restore this savepoint first, once. [default: none]")] = None,
    accept: Annotated[
        tuple[str, ...],
        Flag,
        Parameter(help="With --from-savepoint: whose rows in the tables may be lost; repeatable. [default: none]"),
    ] = (),
    consent: Consent = Consent(),
    strict_store: Annotated[
        bool, Flag, Parameter(help="Fail, after retries, when the checkpoint store cannot be written.")
    ] = False,
    fail_on_set_aside: Annotated[
        bool, Flag, Parameter(help="Exit with 7 if the run finishes and files are set aside.")
    ] = False,
    supervised: Annotated[
        bool, Flag, Parameter(help="Obey what operators want (running, paused, stopped), as recorded in the home.")
    ] = False,
    metrics: Metrics = Metrics(),
    common: Common = Common(),
) -> int:
    """Run the pipeline until stopped, or once."""
    beginning = Beginning(fresh_after, truncate, from_savepoint, accept)
    beginning.check()
    options = load_options(spec, warn=lambda text: say(f"warning: {text}"))
    moved = _moved(source_moved)
    if standby and take_over:
        raise ConfigError(
            "--standby and --take-over exclude each other",
            hint="--standby waits for the live run, --take-over ends it: ask for one of them.",
        )
    if standby:
        check_standby(options)
    if beginning.edits_history:
        plan = _plan_beginning(options, beginning, moved)
        if not confirm(plan, common, say, consent):
            return 0
    elif consent.yes or consent.dry_run:
        raise ConfigError(
            "--yes and --dry-run belong to --fresh-after and --from-savepoint",
            hint="`firnline dry-run` checks the spec and its input without writing.",
        )
    result, totals, asked = _run(
        options, once=once, standby=standby, take_over=take_over, accept_duplicates=accept_duplicates,
        moved=moved, beginning=beginning, metrics=metrics, debug=common.debug, strict_store=strict_store,
        gap=Gap(accept_gap, resnapshot, resnapshot_all), supervised=supervised, spec=spec,
    )  # fmt: skip
    if fail_on_set_aside and result.exit_code == 0 and result.set_aside:
        error = FilesSetAsideError(f"{count_text(len(result.set_aside), 'file')} set aside")
        result = replace(result, exit_code=error.exit_code, error=error)
    if result.error is not None:
        result.error.hint = name_spec(result.error.hint, spec)
    _show_result(common, options, result, totals, asked=asked)
    return result.exit_code


def _show_result(
    common: Common, options: PipelineOptions, result: RunResult, totals: RunTotals, *, asked: bool
) -> None:
    finished = result.exit_code in (0, FilesSetAsideError.exit_code)
    if common.json:
        common.out.json(_as_json(options, result, totals, asked=asked))
    elif finished:
        common.out.line(_last_line(options, totals, asked=asked))
        for line in set_aside_lines(result.set_aside):
            common.out.line(line)
    if result.exit_code:
        error = result.error or FirnlineError(f"the run ended with exit code {result.exit_code}")
        print_failure(error, debug=common.debug)


def _moved(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise ConfigError(f"--source-moved {text}: not OLD=NEW", hint="firnline run --source-moved /old/in=/new/in")
    return old, new


def _run(
    options: PipelineOptions, *, once: bool, standby: bool, take_over: bool, accept_duplicates: bool,
    moved: tuple[str, str] | None, beginning: Beginning, metrics: Metrics, debug: bool,
    strict_store: bool, gap: Gap, supervised: bool, spec: str | None,
) -> tuple[RunResult, RunTotals, bool]:  # fmt: skip
    from firnline.cli.common import warm_decoder
    from firnline.cli.long_task import stop_on_signals
    from firnline.cli.run_report import RunTotals, logging_to, open_display, open_reporter, spark_start
    from firnline.jobs.spark import SparkEngine
    from firnline.process import StopFlag
    from firnline.run.observer import Observers
    from firnline.run.open_pipeline import open_pipeline
    from firnline.run.runner import Runner, RunResult
    from firnline.run.trend import TrendLog
    from firnline.run.wanted import Wishes, WishFollower
    from firnline.telemetry.opening import open_telemetry

    totals = RunTotals(monotonic, options.input_words)
    with contextlib.ExitStack() as stack:
        display = stack.enter_context(open_display(totals))
        stack.enter_context(logging_to(display, debug=debug, spec=spec))
        watchers = stack.enter_context(_watchers(options, metrics, display.say))
        reporter = open_reporter(display, attempts=options.restart.attempts, words=options.input_words)
        engine = SparkEngine(
            options.name,
            options.spark,
            prepare=lambda: warm_decoder(options.sources, display.say),
            on_start=spark_start(totals, display.say),
        )
        stack.callback(engine.stop)
        pipeline = open_pipeline(options, once=once, moved=moved, strict_store=strict_store)
        gap.check(pipeline)
        runner = Runner(
            pipeline,
            engine,
            Observers(
                totals,
                reporter,
                TrendLog(pipeline.storage, options.name, pipeline.clock),
                *watchers,
                *open_telemetry(options, pipeline.clock, os.environ, display.say),
            ),
            once=once,
            accept_duplicates=accept_duplicates,
            supervised=supervised,
        )
        not_wanted = StopFlag()  # wakes a standby, which has no run to stop yet

        def stop() -> None:
            not_wanted.set()
            runner.stop()

        stack.enter_context(stop_on_signals(stop, display.stopping, display.restore))
        take_lease = stack.enter_context(
            holding_lease(
                options,
                runner,
                display.say,
                standby=standby,
                stop=not_wanted,
                take_over=take_over,
                at_claim=once and not standby and not beginning.edits_history and not gap.is_given,
            )
        )
        if take_lease is None:
            totals.doing = STOOD_BY
            return RunResult(runner.run_id, 0, 0, 0, 0), totals, True
        follower, controlled = None, _Controlled(runner, display)
        if supervised:
            wishes = Wishes(pipeline.storage, options.name, pipeline.clock)
            follower = stack.enter_context(WishFollower(wishes, controlled, display.say))
        stack.enter_context(_control(options, controlled, display, follower, once=once))
        begin(
            options, beginning, runner.run_id, display.say, moved=moved, stopping=lambda: runner.stop_requested
        )  # fmt: skip
        gap.pass_on(pipeline, once=once)
        return runner.run(take_lease), totals, runner.stop_requested


@contextlib.contextmanager
def _control(
    options: PipelineOptions, run: _Controlled, display: Display, follower: WishFollower | None, *, once: bool
) -> Iterator[None]:
    """Serve the control socket while the run lasts. What is asked of a supervised run is recorded as wanted."""
    from firnline.run.control import serving_control

    with serving_control(options, run, os.environ, display.say, once=once, follower=follower):
        yield


class _Controlled:
    """The run, whose display shows a requested stop."""

    def __init__(self, runner: Runner, display: Display) -> None:
        self.run_id = runner.run_id
        self.checkpoint, self.status = runner.checkpoint, runner.status
        self.pause, self.resume = runner.pause, runner.resume
        self._runner, self._display = runner, display

    def stop(self) -> None:
        self._runner.stop()
        self._display.stopping()


@contextlib.contextmanager
def _watchers(options: PipelineOptions, serve: Metrics, say: Callable[[str], None]) -> Iterator[list[Observer]]:
    """Serve metrics and health while the run lasts; no observers without a port."""
    if not serve.wanted:
        yield []
        return
    from firnline.service.health import Health
    from firnline.service.metrics import PipelineMetrics

    metrics = PipelineMetrics(options.name, monotonic)
    health = Health(options.name, monotonic, poll_seconds=min(s.poll_interval_secs for s in options.sources))
    with serve.serving(metrics.registry(), health, say):
        yield [metrics, health]


def _delivered_text(options: PipelineOptions, totals: RunTotals) -> str:
    """Say what a run did that planned nothing: it brought further sinks in sync."""
    from firnline.sinks.delta.options import delta_tables

    two_stage = {sink.name for sink in delta_tables(options.sinks) if sink.mode == "staged"}
    texts = [
        f"{count_text(epochs, 'epoch')} {'staged for' if sink in two_stage else 'delivered to'} {sink}"
        for sink, epochs in totals.deliveries.items()
    ]
    hint = "; `firnline committer` commits what is staged" if two_stage & totals.deliveries.keys() else ""
    return f"{', '.join(texts)}{hint}"


def _last_line(options: PipelineOptions, totals: RunTotals, *, asked: bool) -> str:
    """Say what a run did, and which sinks lack epochs at its end."""
    if totals.doing == STOOD_BY:
        return STOOD_BY
    if asked and not totals.run:
        return "stopped cleanly before anything was read or written"
    behind = [lag.sink for lag in totals.lags if lag.epochs_behind and not lag.set_aside]
    later = [name for name in behind if name not in totals.refusals]
    lack = "lacks epochs" if len(later) == 1 else "lack epochs"
    rest = f"; {' and '.join(later)} {lack}: see `firnline sinks list`; the next run delivers them" if later else ""
    for name in behind:
        if (error := totals.refusals.get(name)) is not None:
            rest += f"; {name} lacks epochs, and no run can deliver them: {error.message}. Try: {error.hint}"
    return f"{_did(options, totals, asked=asked, behind=bool(behind))}{rest}"


def _did(options: PipelineOptions, totals: RunTotals, *, asked: bool, behind: bool) -> str:
    if asked:
        return f"stopped cleanly after epoch {totals.epoch}"
    if not totals.epochs and totals.deliveries:
        return _delivered_text(options, totals)
    if not totals.epochs:
        return f"{'nothing read' if behind else 'nothing to do'}; the table is at epoch {totals.epoch}"
    from firnline.cli.run_report import rows_text

    where = f" in {totals.rows_in}" if totals.rows_in else ""
    files = count_text(totals.files, totals.words[0])
    rows = rows_text(totals.rows, totals.changes, are_changes=totals.are_changes)
    facts = [f"done after epoch {totals.epoch}: {rows}{where} from {files}"]
    if totals.quarantined:
        facts.append(f"{totals.quarantined.total():,} quarantined")
    if totals.rescued:
        facts.append(_rescued_text(totals.rescued))
    return ", ".join([*facts, time_text(totals.seconds)])


def _rescued_text(rescued: Sequence[Rescued]) -> str:
    """Return how many values were rescued, and of which columns of captured tables."""
    text = f"{count_text(sum(one.values for one in rescued), 'value')} rescued"
    tables = [one for one in rescued if one.table]
    if not tables:
        return text
    shown = [f"{one.name} {one.values:,}" for one in tables[:NAMES_SHOWN]]
    more = len(tables) - len(shown)
    rest = [f"and {count_text(more, 'more column')}"] if more else []
    return f"{text} ({', '.join([*shown, *rest])})"


def _as_json(options: PipelineOptions, result: RunResult, totals: RunTotals, *, asked: bool) -> dict[str, Any]:
    finished = "stopped" if asked else "done"
    status = {0: finished, FilesSetAsideError.exit_code: finished, 5: "fenced"}.get(result.exit_code, "failed")
    error = result.error
    return {
        "pipeline": options.name,
        "run": result.run,
        "status": status,
        "exit_code": result.exit_code,
        **totals.summary(),
        "set_aside": len(result.set_aside),
        "set_aside_files": [{"path": path, "reason": reason} for path, reason in result.set_aside.items()],
        "error": {"code": error.code, "message": error.message, "hint": error.hint} if error else None,
    }


@dataclass(frozen=True, slots=True)
class Gap:
    """The options of the command line about a log that does not continue."""

    accepted: bool = False
    resnapshot: tuple[str, ...] = ()  # tables
    resnapshot_all: bool = False

    @property
    def is_given(self) -> bool:
        """Whether one of the options is given."""
        return self.accepted or bool(self.resnapshot) or self.resnapshot_all

    def check(self, pipeline: OpenPipeline) -> None:
        """Check the names of the tables, before the run begins.

        Raises:
            ConfigError: one of the tables cannot be read again, or no source has a log.
            SourceError: the server does not answer.
        """
        if self.is_given:
            self._wishes().find_tables(pipeline)

    def pass_on(self, pipeline: OpenPipeline, *, once: bool = False) -> None:
        """Tell the sources. Called while this run holds the lease.

        Raises:
            SourceGapError: tables would lose changes that nobody has named; nothing is done.
            ConfigError: one of the tables cannot be read again, or no source has a log.
            SourceError: the server does not answer.
            SinkError: the audit trail cannot be written.
        """
        if self.is_given:
            self._wishes(once=once).perform(pipeline)

    def _wishes(self, *, once: bool = False) -> GapWishes:
        from firnline.history.gaps import GapWishes

        command = "firnline run --once" if once else "firnline run"
        return GapWishes(self.accepted, self.resnapshot, self.resnapshot_all, command)


@dataclass(frozen=True, slots=True)
class Beginning:
    """The options of the command line about the beginning; by default the run resumes."""

    fresh_after: int | None = None
    truncate: bool = False
    from_savepoint: str | None = None
    accept: tuple[str, ...] = ()

    @property
    def edits_history(self) -> bool:
        """Whether the run begins with a history edit."""
        return self.fresh_after is not None or self.from_savepoint is not None

    def check(self) -> None:
        """Refuse options that exclude each other."""
        if self.truncate and self.fresh_after is None:
            raise ConfigError("--truncate is a part of --fresh-after", hint="firnline run --fresh-after 41 --truncate")
        if self.from_savepoint is not None and self.fresh_after is not None:
            raise ConfigError("--from-savepoint and --fresh-after exclude each other", hint="Ask for one of them.")
        if self.accept and self.from_savepoint is None:
            raise ConfigError("--accept is a part of --from-savepoint", hint="firnline run --from-savepoint PATH")


def _plan_beginning(options: PipelineOptions, beginning: Beginning, moved: tuple[str, str] | None) -> BeginPlan:
    from firnline.history.edits.begin_plan import plan_fresh_start, plan_from_savepoint
    from firnline.run.open_pipeline import open_pipeline

    pipeline = open_pipeline(options, moved=moved)
    if beginning.from_savepoint is not None:
        storage_options = dict(options.home.storage_options)
        return plan_from_savepoint(pipeline, beginning.from_savepoint, storage_options, beginning.accept)
    assert beginning.fresh_after is not None
    return plan_fresh_start(pipeline, beginning.fresh_after, truncate=beginning.truncate)


def begin(
    options: PipelineOptions,
    beginning: Beginning,
    run: str,
    say: Callable[[str], None],
    *,
    moved: tuple[str, str] | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Restore a savepoint or make a fresh start before the run, unless an earlier attempt already did.

    Args:
        moved: The old and the new root of the source's files.
        stopping: Whether the run was asked to stop; copying files then ends with KeyboardInterrupt.
    """
    if beginning.from_savepoint is not None:
        _restore(options, beginning, run, say, moved, stopping)
    if beginning.fresh_after is None:
        return
    from firnline.history.edits.fresh_start import start_over
    from firnline.run.open_pipeline import open_pipeline

    started = start_over(open_pipeline(options), beginning.fresh_after, run, truncate=beginning.truncate)
    rows = "rows removed" if started.truncated else "rows stay"
    if started.already:
        say(f"started over after epoch {started.after_epoch} already, as epoch {started.epoch}; going on")
    else:
        say(f"started over after epoch {started.after_epoch} as epoch {started.epoch}; {rows}")


def _restore(
    options: PipelineOptions,
    beginning: Beginning,
    run: str,
    say: Callable[[str], None],
    moved: tuple[str, str] | None,
    stopping: Callable[[], bool],
) -> None:
    from firnline.cli.output import count_text, size_text
    from firnline.history.edits.restore import restore_savepoint
    from firnline.run.open_pipeline import open_pipeline

    assert beginning.from_savepoint is not None
    restored = restore_savepoint(
        open_pipeline(options, moved=moved),
        beginning.from_savepoint,
        run,
        dict(options.home.storage_options),
        accept=beginning.accept,
        report=say,
        progress=CopyProgress(say),
        stopping=stopping,
    )
    if not restored.already:
        contents = f"{count_text(restored.rows, 'row')} in {count_text(restored.files, 'file')}"
        copied = f", {size_text(restored.copied_bytes)} copied" if restored.copied_bytes else ""
        epochs = f"epoch {restored.to_epoch} as epoch {restored.epoch}"
        say(f"restored savepoint {restored.savepoint} of {epochs}: {contents}{copied}")
