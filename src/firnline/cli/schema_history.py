"""`firnline schema-history`: lists the schemas that captured tables had, and what changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from firnline.cli.common import CapturedTable, Common, Spec, load_pipeline, table_and_spec
from firnline.cli.table import Column
from firnline.errors import ConfigError

if TYPE_CHECKING:
    from firnline.history.schemas import RecordedSchema

EPILOGUE = """\
A source that captures changes decodes every row with the schema that was in
force at its place in the log. Each schema is a version, recorded in the commit
of the first epoch that used it: it goes back with a rollback. Starts no Spark,
writes nothing.

Output (JSON: pipeline, versions [...] with these fields):
  source, table, version (of its table, from 1), fingerprint, epoch (the first
  that used it), position (in the log), committed_at (of its first transaction),
  changed ("+ name type", "- name type", "~ ...", since the version before),
  columns [{name, native (type in the database), type, key, number (PostgreSQL:
  a column that was dropped and added again has another one)}]

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline schema-history
  firnline schema-history orders --diff
  firnline schema-history --at 120
  firnline schema-history --at-position 0/16B3748 --json
"""
COLUMNS = (
    Column("table"),
    Column("version", right=True),
    Column("epoch", right=True),
    Column("position"),
    Column("committed_at", "committed", drop=1, time=True),
    Column("changed", cut="right"),
)

app = App(
    name="schema-history", help_epilogue=EPILOGUE, usage="Usage: firnline schema-history [OPTIONS] [TABLE] [SPEC]"
)


@app.default
def schema_history(
    word: CapturedTable = "",
    /,
    spec: Spec = None,
    *,
    table: Annotated[str, Parameter(help="The table, as an option. [default: as above]", show_default=False)] = "",
    source: Annotated[str, Parameter(help="Only this source. [default: all]")] = "",
    at: Annotated[int | None, Parameter(help="The schemas in force after this epoch. [default: all versions]")] = None,
    at_position: Annotated[str, Parameter(help="The schemas in force there in the log. [default: all versions]")] = "",
    diff: Annotated[bool, Parameter(help="Show every changed column.", negative="")] = False,
    common: Common = Common(),
) -> int:
    """List the schemas that captured tables had, with the epoch and the place in the log from which each holds."""
    if at is not None and at_position:
        raise ConfigError("--at and --at-position ask for two moments", hint="Give one of them.")
    table, spec = table_and_spec(word, spec, table)
    pipeline = load_pipeline(spec)
    from firnline.history.schemas import load_schema_history

    show_schemas(pipeline.options.name, load_schema_history(pipeline, table, source), at, at_position, diff, common)
    return 0


def show_schemas(
    pipeline: str, history: list[RecordedSchema], at: int | None, at_position: str, diff: bool, common: Common
) -> None:
    """Show schemas, oldest first: all of them, or those in force at a moment."""
    from firnline.history.schemas import in_force, in_force_at

    shown = history
    if at is not None:
        shown = in_force(history, at)
    elif at_position:
        shown = in_force_at(history, at_position)
    if common.json:
        common.out.json({"pipeline": pipeline, "versions": [one.to_json() for one in shown]})
        return
    if not shown:
        common.out.sentence("No schema of a captured table is recorded.")
        return
    rows = [{**one.to_json(), "changed": ", ".join(one.changed)} for one in shown]
    common.out.table(COLUMNS, rows)
    if diff:
        for one in shown:
            common.out.sentence(f"{one.version.table} version {one.number}:")
            for line in one.changed if one.number > 1 else [_columns(one)]:
                common.out.sentence(f"  {line}")
    elif at is not None or at_position:
        for one in shown:
            common.out.sentence(f"{one.version.table}: {_columns(one)}")


def _columns(schema: RecordedSchema) -> str:
    """Return the columns of a schema in one line."""
    return ", ".join(f"{one.name} {one.native}{' (key)' if one.is_key else ''}" for one in schema.version.columns)
