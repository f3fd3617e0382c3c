"""`firnline schema-history`: lists the schemas that captured tables had, and what changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from firnline.cli.common import Common, Spec, load_pipeline
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
  columns [{name, native (type in the database), type, key, number (PostgreSQL:
  a column that was dropped and added again has another one)}]

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline schema-history
  firnline schema-history --table orders --diff
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

app = App(name="schema-history", help_epilogue=EPILOGUE)


@app.default
def schema_history(
    spec: Spec = None,
    *,
    table: Annotated[str, Parameter(help="Only this table. [default: all]")] = "",
    source: Annotated[str, Parameter(help="Only this source. [default: all]")] = "",
    at: Annotated[int | None, Parameter(help="The schemas in force after this epoch. [default: all versions]")] = None,
    at_position: Annotated[str, Parameter(help="The schemas in force there in the log. [default: all versions]")] = "",
    diff: Annotated[bool, Parameter(help="Show every changed column.", negative="")] = False,
    common: Common = Common(),
) -> int:
    """List the schemas that captured tables had, with the epoch and the place in the log from which each holds."""
    if at is not None and at_position:
        raise ConfigError("--at and --at-position ask for two moments", hint="Give one of them.")
    pipeline = load_pipeline(spec)
    from firnline.history.schemas import load_schema_history

    show_schemas(pipeline.options.name, load_schema_history(pipeline, table, source), at, at_position, diff, common)
    return 0


def show_schemas(
    pipeline: str, history: list[RecordedSchema], at: int | None, at_position: str, diff: bool, common: Common
) -> None:
    """Show schemas, oldest first: all of them, or those in force at a moment."""
    from firnline.history.schemas import epoch_at, in_force

    shown = history
    if at is not None or at_position:
        shown = in_force(history, at if at is not None else epoch_at(history, at_position))
    if common.json:
        common.out.json({"pipeline": pipeline, "versions": [one.to_json() for one in shown]})
        return
    if not shown:
        common.out.sentence("No schema of a captured table is recorded.")
        return
    changed = _describe(history)
    rows = [{**one.to_json(), "changed": ", ".join(changed[id(one)])} for one in shown]
    common.out.table(COLUMNS, rows)
    if diff:
        for one in shown:
            common.out.sentence(f"{one.version.table} version {one.number}:")
            for line in changed[id(one)] if one.number > 1 else [_columns(one)]:
                common.out.sentence(f"  {line}")
    elif at is not None or at_position:
        for one in shown:
            common.out.sentence(f"{one.version.table}: {_columns(one)}")


def _columns(schema: RecordedSchema) -> str:
    """Return the columns of a schema in one line."""
    return ", ".join(f"{one.name} {one.native}{' (key)' if one.is_key else ''}" for one in schema.version.columns)


def _describe(history: list[RecordedSchema]) -> dict[int, list[str]]:
    """Return what each version changed, by the identity of its record."""
    from firnline.history.schemas import describe_change

    last: dict[tuple[str, str], RecordedSchema] = {}
    found: dict[int, list[str]] = {}
    for one in history:
        key = (one.source, one.version.table)
        found[id(one)] = describe_change(last[key].version if key in last else None, one.version)
        last[key] = one
    return found
