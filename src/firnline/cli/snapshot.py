"""`firnline snapshot`: reads the rows of a captured table again, and shows how far tables have been read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from firnline.cli.common import CapturedTable, Common, Spec, load_pipeline, table_and_spec
from firnline.cli.consent import Consent, Flag
from firnline.cli.table import Column
from firnline.errors import ConfigError

if TYPE_CHECKING:
    from firnline.run.open_pipeline import OpenPipeline
    from firnline.types import Json

EPILOGUE = """\
A source that captures changes reads the rows of a table once, in chunks, while
its changes go on. With a table, the command has them read again: the run that
is alive, or the next one, begins in its next epoch. Rows come as changes with
_op read; a sink that upserts overwrites what it has. A row that the database no
longer has stays in such a sink, unless --empty takes all rows of the table away
first, in the same epoch. Without a table the command lists tables, and changes
nothing.

Output (JSON: pipeline, tables [...] with these fields):
  source, table, state (asked, running, done), rows (read so far), estimate (of
  all rows, by the server; null when done), chunks
  With a table: pipeline, done, source, table, where, empty

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline snapshot
  firnline snapshot orders --yes
  firnline snapshot orders --where "created_at > '2026-01-01'" --yes
  firnline snapshot sales.orders shop.yml --empty --dry-run
"""
COLUMNS = (
    Column("table"),
    Column("state"),
    Column("rows", right=True),
    Column("of about", "estimate", right=True, drop=1),
    Column("chunks", right=True, drop=2),
    Column("source", drop=3),
)

app = App(name="snapshot", help_epilogue=EPILOGUE, usage="Usage: firnline snapshot [OPTIONS] [TABLE] [SPEC]")


@app.default
def snapshot(
    word: CapturedTable = "",
    /,
    spec: Spec = None,
    *,
    table: Annotated[str, Parameter(help="The table, as an option. [default: as above]", show_default=False)] = "",
    source: Annotated[str, Parameter(help="The source that captures it. [default: the one that does]")] = "",
    where: Annotated[str, Parameter(help="Only rows for which this condition in SQL holds. [default: all]")] = "",
    empty: Annotated[bool, Flag, Parameter(help="Take the rows that sinks have of the table away first.")] = False,
    consent: Consent = Consent(),
    common: Common = Common(),
) -> int:
    """Read the rows of a captured table again while its changes go on, or list how far tables have been read."""
    table, spec = table_and_spec(word, spec, table)
    if not table and (where or empty or source or consent.yes or consent.dry_run):
        raise ConfigError(
            "--where, --empty, --source, --yes and --dry-run belong to a table", hint="firnline snapshot TABLE"
        )
    if where and empty:
        raise ConfigError("--empty takes all rows away, and --where reads some of them", hint="Leave one of them out.")
    pipeline = load_pipeline(spec)
    if table:
        return _ask(pipeline, table, source, where, empty=empty, consent=consent, common=common)
    from firnline.history.snapshots import load_progress

    show_progress(pipeline.options.name, [one.to_json() for one in load_progress(pipeline)], common)
    return 0


def show_progress(pipeline: str, rows: list[dict[str, Json]], common: Common) -> None:
    """Show how far tables have been read."""
    if common.json:
        common.out.json({"pipeline": pipeline, "tables": rows})
    elif rows:
        common.out.table(COLUMNS, rows)
    else:
        common.out.sentence("No table has been read.")


def _ask(
    pipeline: OpenPipeline, words: str, source: str, where: str, *, empty: bool, consent: Consent, common: Common
) -> int:
    from firnline.history.snapshots import ask_snapshot, find_readable

    owner, table = find_readable(pipeline, words, source)
    facts = {"pipeline": pipeline.options.name, "source": owner, "table": table, "where": where, "empty": empty}
    if not common.json:
        rows = f"the rows of {table} for which {where} holds" if where else f"all rows of {table}"
        common.out.sentence(f"Source {owner} reads {rows} again, while changes go on.")
        common.out.sentence(
            "Sinks that hold the state of the table lose its rows first."
            if empty
            else "Sinks that upsert overwrite their rows; sinks that append get each row once more."
        )
    elif not consent.decided:
        common.out.json({**facts, "done": False})
    if not consent.is_given(f"Read {table} again", common.out):
        return 0
    ask_snapshot(pipeline, owner, table, where=where, empties=empty)
    if common.json:
        common.out.json({**facts, "done": True})
    else:
        common.out.line("the next epoch begins it: firnline snapshot")
    return 0
