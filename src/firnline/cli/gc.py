"""`firnline gc`: deletes unreferenced files of a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from firnline.cli.common import Common, Duration, TableOrSpec, Target, find_other_sinks, find_pipeline, find_targets
from firnline.cli.consent import Consent
from firnline.cli.output import Output, count_text, size_text
from firnline.config.units import seconds_text
from firnline.errors import CheckpointError, SinkError

if TYPE_CHECKING:
    from firnline.maintenance.gc import GcReport
    from firnline.maintenance.state import StateSwept
    from firnline.options import PipelineOptions

ONE_DAY = Duration(86_400)

EPILOGUE = """\
Finds Parquet files older than the grace period (by the storage's own clock)
that no version within retention, no unit that is pending or set aside, no epoch
that may still be committed and no pin names. Also finds temporary files,
quarantine files that no commit names, and units set aside over 30 days ago.
Folds old ledger entries. Never touches files outside the table. Safe beside
running writers and committers, and safe to kill; an epoch must not run for
longer than the grace period. Staged files of a pipeline's further sinks are
deleted only if the argument is the spec, because the ledger that names them is
in its first table. Exchange files are deleted an hour after their run has died.
With a spec, the audit trail records it: firnline checkpoints --audit.

With a spec that has operators, gc also deletes state that no sink, no epoch
within the rollback window (checkpoint.rollback_window), no copy in the store or
the tiers and no savepoint needs. The newest checkpoint.keep_checkpoints stay.
While a run is active, gc leaves the remote tier to the run.

Dead letters go once their retry or drop can no longer be undone by a rollback
(checkpoint.rollback_window), if a spec is named.

The outbox is left to runs, which delete what every sink holds after
outbox.keep; gc shows its size.

Output (JSON fields):
  table, dry_run, version, files, size_bytes, kinds {kind: {files, size_bytes}},
  kept {reason: files}, entries_folded, entries_swept, listed,
  clock_skew_seconds, stopped, notes; of a spec with several tables
  tables [{...}], one of these per table
  state  of a spec with operators: [{home, tier (home, remote), dry_run,
         checkpoints, files, size_bytes, kept (complete checkpoints), notes}]
  outbox of a spec with several sinks: {files, size_bytes}

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline gc /lake/flights --dry-run          shows what would be deleted
  firnline gc /lake/flights --grace 48h --yes  deletes it
  firnline gc flights.yml --yes                in every table of the pipeline
"""

app = App(name="gc", help_epilogue=EPILOGUE)


@app.default
def gc(
    table: TableOrSpec = None,
    *,
    grace: Annotated[Duration, Parameter(help="Keep files younger than this, e.g. 30m or 7d.")] = ONE_DAY,
    consent: Consent = Consent(),
    common: Common = Common(),
) -> int:
    """Delete unreferenced files of a table."""
    targets, options = find_targets(table), find_pipeline(table)
    if not consent.decided:
        planned = _collect(targets, options, grace, common, dry_run=True)
        if not planned.files or not consent.is_given("Delete them", common.out):
            return 0
    collected = _collect(targets, options, grace, common, dry_run=False)
    if options is None and collected.files and not common.json:
        common.out.line("no audit trail records this: name a spec instead of a table to record it")
    return 0


@dataclass(slots=True)
class _Collected:
    reports: list[GcReport] = field(default_factory=list)
    state: list[StateSwept] | None = None  # None: the pipeline has no state, or is not known

    @property
    def files(self) -> int:
        """The number of files that are or would be deleted."""
        return sum(one.files for one in (*self.reports, *(self.state or ())))


def _collect(
    targets: list[Target], options: PipelineOptions | None, grace: float, common: Common, *, dry_run: bool
) -> _Collected:
    """Sweep every table, then the state, and show what was or would be deleted."""
    from firnline.cli.long_task import long_task
    from firnline.history.store import deletion_on_record
    from firnline.maintenance.gc import gc as sweep

    collected, tables = _Collected(), [target.uri for target in targets]
    recorded = None if dry_run else options
    with (
        long_task() as task,
        deletion_on_record(recorded, "gc", tables=tables, grace=seconds_text(grace)) as record,
    ):
        for target in targets:
            if task.stopping():
                break
            report = sweep(
                target.uri,
                target.storage_options,
                grace_seconds=grace,
                dry_run=dry_run,
                ledgers=target.ledgers,
                progress=task.progress,
                stop=task.stopping,
            )
            collected.reports.append(report)
            if not common.json:
                task.clear()
                if len(targets) > 1:
                    common.out.line(report.table)
                _show(common.out, report)
        if options is not None and any(not operator.is_sql for operator in options.operators) and not task.stopping():
            collected.state = _sweep_state(options, grace, dry_run=dry_run)
            task.clear()
        if recorded is not None and not task.stopping():
            _sweep_letters(recorded)
        record["files"] = sum(report.files for report in collected.reports)
        record["size_bytes"] = sum(report.size_bytes for report in collected.reports)
        record["state_checkpoints"] = sum(one.checkpoints for one in collected.state or [])
        record["state_files"] = sum(one.files for one in collected.state or [])
    if common.json:
        bodies = [asdict(report) for report in collected.reports]
        body: dict[str, Any] = bodies[0] if len(targets) == 1 and bodies else {"tables": bodies}
        state = {} if collected.state is None else {"state": [asdict(one) for one in collected.state]}
        outbox = _load_outbox(options)
        common.out.json({**body, **state, **({} if outbox is None else {"outbox": outbox})})
        return collected
    for sink in find_other_sinks(options):
        common.out.line(f"{sink}: nothing to collect in a sink of this kind")
    _show_state(common.out, collected.state or [])
    if (outbox := _load_outbox(options)) is not None:
        common.out.line(
            f"outbox: {count_text(outbox['files'], 'file')}, {size_text(outbox['size_bytes'])}, left to runs"
        )
    return collected


def _sweep_letters(options: PipelineOptions) -> None:
    """Delete answered dead letters whose answer can no longer be undone. They are few, and shown by `dead-letters`."""
    from firnline.history.edits.dead_letters import settle_letters
    from firnline.run.open_pipeline import open_pipeline

    pipeline = open_pipeline(options)
    settle_letters(pipeline, pipeline.load())


def _load_outbox(options: PipelineOptions | None) -> dict[str, Any] | None:
    """Return the size of the outbox; None without a spec, with one sink, or if it cannot be listed."""
    from firnline.history.sinks import load_outbox
    from firnline.run.open_pipeline import open_pipeline

    if options is None or (not options.sinks[1:] and options.journal is None):
        return None
    try:
        return load_outbox(open_pipeline(options))
    except (CheckpointError, SinkError, OSError):
        return None


def _sweep_state(options: PipelineOptions, seconds: float, *, dry_run: bool) -> list[StateSwept]:
    """Sweep the operators' state; on an error, report it and delete nothing."""
    from firnline.maintenance.state import StateSwept, sweep_state
    from firnline.run.open_pipeline import open_pipeline

    pipeline = open_pipeline(options)
    try:
        return sweep_state(pipeline, grace_seconds=seconds, dry_run=dry_run)
    except (CheckpointError, SinkError) as error:
        note = f"the state was left alone: {error.message}"
        return [StateSwept(pipeline.state_home.storage.root, "home", dry_run, notes=(note,))]


def _show_state(out: Output, swept: list[StateSwept]) -> None:
    for one in swept:
        verb = "would delete" if one.dry_run else "deleted"
        contents = (
            f"{count_text(one.checkpoints, 'checkpoint')}, {count_text(one.files, 'file')}, {size_text(one.size_bytes)}"
        )
        out.line(f"state in {one.home}")
        out.line(f"  {verb} {contents}; kept {count_text(one.kept, 'checkpoint')}")
        for note in one.notes:
            out.line(f"  {note}")


def _show(out: Output, report: GcReport) -> None:
    verb = "would delete" if report.dry_run else "deleted"
    out.line(f"{verb} {count_text(report.files, 'file')}, {size_text(report.size_bytes)}")
    for kind, swept in report.kinds.items():
        if swept.files:
            out.line(f"  {kind}: {count_text(swept.files, 'file')}, {size_text(swept.size_bytes)}")
    for reason, files in report.kept.items():
        out.line(f"  kept, {reason}: {count_text(files, 'file')}")
    if report.entries_folded:
        out.line(f"folded {report.entries_folded:,} ledger entries")
    for note in report.notes:
        out.line(note)
    if report.stopped:
        out.line("stopped before the end; run again to continue")
