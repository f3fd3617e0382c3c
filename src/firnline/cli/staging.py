"""`firnline staging`: shows staged units that are not committed; retries or discards units set aside."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number

from firnline.cli.common import Common, Table, find_pipeline, named_tables
from firnline.cli.consent import Consent
from firnline.cli.output import Output, count_text, size_text, time_text
from firnline.cli.table import Column
from firnline.errors import ConfigError

if TYPE_CHECKING:
    from firnline.committer.overview import StagingOverview
    from firnline.options import PipelineOptions
    from firnline.sinks.delta.table import Table as Handle
    from firnline.sinks.staged.discard import Discard, Further
    from firnline.storage import Storage

PIPELINE_COLUMNS = (
    Column("pipeline", cut="right"),
    Column("units", right=True),
    Column("bytes", right=True, drop=2),
    Column("first_epoch", "from", right=True),
    Column("last_epoch", "to", right=True),
    Column("ready", right=True),
    Column("waiting", right=True),
    Column("forks", right=True, drop=1),
)
REJECTED_COLUMNS = (
    Column("unit", cut="left"),
    Column("pipeline", drop=2),
    Column("epoch", right=True),
    Column("reason", cut="right"),
    Column("rejected_at", "set aside at", time=True, drop=1),
)

EPILOGUE = """\
Reads <table>/_staging/ and the log; starts no Spark.

Output (JSON fields):
  table, units_pending, bytes_pending, oldest_pending_seconds, unreadable
  pipelines  [{pipeline, units, bytes, first_epoch, last_epoch, ready, waiting,
             forks, waits_for_epochs}]; null pipeline: files of other programs
  rejected   [{unit, pipeline, epoch, reason, rejected_at}]
  committer  {run, host, pid, beat}, or null when none is active

--retry makes a unit that was set aside pending again. --discard-from drops the
units of a pipeline from an epoch on; its writer then begins a new generation
before that epoch and reads the input again. With a spec instead of a table, the
command first checks the other sinks: none may hold that epoch.

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline staging /lake/flights
  firnline staging /lake/flights --pipeline flights --discard-from 42 --yes
"""

app = App(name="staging", help_epilogue=EPILOGUE)


@app.default
def staging(
    table: Table = None,
    *,
    retry: Annotated[str | None, Parameter(help="Make this unit pending again. [default: none]")] = None,
    pipeline: Annotated[str | None, Parameter(help="With --discard-from: whose units. [default: the only one]")] = None,
    discard_from: Annotated[
        int | None, Parameter(help="Drop units from this epoch on. [default: none]", validator=Number(gte=1))
    ] = None,
    consent: Consent = Consent(),
    common: Common = Common(),
) -> int:
    """Show units that are staged and not committed; retry or discard units set aside."""
    uri, options = next(iter(named_tables([table or ""]).tables.items()))
    from firnline.clock import SystemClock
    from firnline.committer.overview import load_overview
    from firnline.sinks.delta.table import Table as Handle
    from firnline.sinks.staged.unit import retry as retry_unit
    from firnline.storage import open_storage

    storage = open_storage(uri, options)
    handle = Handle(storage.root, options)
    if retry is not None:
        if consent.dry_run:
            common.out.line(f"{retry} would be pending again; nothing was changed")
            return 0
        retry_unit(storage, retry)
        common.out.line(f"{retry} is pending again; the committer validates it in its next round")
        return 0
    overview = load_overview(handle, storage, SystemClock().now())
    if discard_from is not None:
        named = find_pipeline(table)
        whose = pipeline or _only_pipeline(overview)
        return _discard(common, handle, storage, whose, discard_from, named, consent=consent)
    if common.json:
        common.out.json(asdict(overview))
    else:
        _show(common.out, overview)
    return 0


def _only_pipeline(overview: StagingOverview) -> str:
    names = {str(row["pipeline"]) for row in [*overview.pipelines, *overview.rejected] if row["pipeline"] is not None}
    if not names:
        raise ConfigError("no pipeline has units here", hint="Name the pipeline with --pipeline.")
    if len(names) > 1:
        raise ConfigError(
            f"several pipelines have units here: {', '.join(sorted(names))}", hint="Name one with --pipeline."
        )
    return names.pop()


def _further_tables(options: PipelineOptions | None, uri: str) -> Further | None:
    """Open the tables of the other sinks, if the argument is a spec and the table is its deciding one."""
    from firnline.sinks.delta.options import delta_tables
    from firnline.sinks.delta.table import Table as Handle
    from firnline.storage import normalise, open_storage

    if options is None or normalise(options.home.root) != uri:
        return None
    tables = delta_tables(options.ordered_sinks[1:])
    opened = {sink.name: (sink, open_storage(sink.table, sink.storage_options)) for sink in tables}
    return {name: (Handle(at.root, sink.storage_options), at) for name, (sink, at) in opened.items()}


def _discard(
    common: Common,
    handle: Handle,
    storage: Storage,
    pipeline: str,
    epoch: int,
    spec: PipelineOptions | None,
    *,
    consent: Consent,
) -> int:
    from firnline.history.store import deletion_on_record
    from firnline.sinks.staged.discard import discard, plan_discard
    from firnline.types import RandomIds

    further = _further_tables(spec, handle.uri)
    if not consent.decided:
        _show_discarded(common, plan_discard(handle, storage, pipeline, epoch, further), pipeline, done=False)
        if not consent.is_given("Discard them", common.out):
            return 0
    with deletion_on_record(spec, "discard", table=handle.uri, from_epoch_on=epoch) as record:
        discarded = discard(handle, storage, pipeline, epoch, RandomIds().new(), further)
        record["pending"], record["rejected"] = len(discarded.pending), len(discarded.rejected)
    _show_discarded(common, discarded, pipeline, done=True)
    return 0


def _show_discarded(common: Common, discarded: Discard, pipeline: str, *, done: bool) -> None:
    if common.json:
        common.out.json({**asdict(discarded), "done": done})
        return
    verb = "discarded" if done else "would discard"
    units = f"{count_text(len(discarded.pending), 'pending unit')} and {len(discarded.rejected):,} set aside"
    common.out.line(f"{verb} {units}, of {pipeline}")
    common.out.line(f"its writer resumes after epoch {discarded.resumes_after_epoch}")


def _show(out: Output, overview: StagingOverview) -> None:
    holder = overview.committer
    out.facts(
        {
            "table": overview.table,
            "pending": f"{overview.units_pending:,} units, {size_text(overview.bytes_pending)}",
            "oldest": time_text(overview.oldest_pending_seconds) if overview.units_pending else "-",
            "committer": f"host {holder['host']}, process {holder['pid']}" if holder else "none",
        }
    )
    if overview.pipelines:
        out.line()
        out.table(PIPELINE_COLUMNS, overview.pipelines)
    if overview.rejected:
        out.line()
        out.table(REJECTED_COLUMNS, overview.rejected)
    for problem in overview.unreadable:
        out.line(f"unreadable: {problem}")
