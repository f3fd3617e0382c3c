"""`firnline state`: shows or exports an operator's state, now or after an earlier epoch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from cyclopts.validators import Number

from firnline.cli.common import DEFAULT_SPEC, Common, is_spec, load_pipeline
from firnline.cli.output import Output, count_text, say, size_text
from firnline.cli.table import Column
from firnline.cli.text import exact
from firnline.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

    from firnline.history.state import StateView
    from firnline.run.open_pipeline import OpenPipeline

EPILOGUE = """\
Reads the files that the checkpoint in the table names; starts no Spark, writes
nothing and disturbs no run. With --at it reads the state after an earlier
epoch, if that state still exists. It finds keys by their hash, not by a scan.
If a file is missing in the local tier, it reads the remote tier.

--key takes the value of a key of one column, or column=value, once for each
column; with only the columns that decide the shard, it shows every key that
begins with them (all windows of a key). --sql runs one SELECT in DuckDB over a
view `state` with the columns of key and state and `_timer`, the time at which a
key is due (microseconds since 1970); the query cannot read other files.
--export writes all rows, or those of --key, to a new Parquet file, which
`initial_state` and Pipeline.import_state_for_keys read.

Output (JSON fields):
  pipeline, operator, epoch, snapshot_epoch, checkpoint, note, shards,
  key_groups, files, size_bytes, watermark
  key_columns, state_columns  [{name, type}]
  keys, timers       number of keys, and of keys with a timer; only without
                     --key, --sql and --export
  columns, rows      names, and values by name
  more               whether --limit cut the rows off
  exported, path     with --export: number of rows, and the file

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline state totals --key customer-17
  firnline state totals flights.yml --at 41 --sql "select max(n) from state"
  firnline state totals --export totals.parquet
"""

WORDS_HELP = f"The operator, and the pipeline file or its folder. {DEFAULT_SPEC}"

app = App(name="state", help_epilogue=EPILOGUE, usage="Usage: firnline state [OPTIONS] OPERATOR [SPEC]")


@app.default
def state(
    *words: Annotated[str, Parameter(name="OPERATOR SPEC", help=WORDS_HELP, show_default=False)],
    spec: Annotated[
        str | None, Parameter(name=("--spec", "-f"), help="The spec, as an option. [default: as above]")
    ] = None,
    key: Annotated[
        tuple[str, ...],
        Parameter(help="A key's value, or column=value; repeatable. [default: none]", negative="", show_default=False),
    ] = (),
    at: Annotated[
        int | None, Parameter(help="After this epoch. [default: the newest]", validator=Number(gte=0))
    ] = None,
    sql: Annotated[str | None, Parameter(help="A SELECT over the view `state`. [default: none]")] = None,
    export: Annotated[str | None, Parameter(help="Write the rows to this new Parquet file. [default: none]")] = None,
    limit: Annotated[int, Parameter(help="Maximum number of rows to show.", validator=Number(gte=0))] = 20,
    common: Common = Common(),
) -> int:
    """Show or export an operator's state, now or after an earlier epoch."""
    if sql is not None and (key or export is not None):
        raise ConfigError("--sql excludes --key and --export", hint="Put the condition into the query.")
    spec, operator = _words(words, spec)
    pipeline = load_pipeline(spec)
    if operator is None:
        raise _no_operator(pipeline)
    from firnline.history.state import load_state_view

    view = load_state_view(pipeline, operator, at)
    if view.note and not common.json:
        say(view.note)
    if sql is not None:
        _query(common, view, sql, limit)
    elif export is not None:
        _export(common, view, key, export)
    elif key:
        _find(common, view, key, limit)
    else:
        _summary(common, view, limit)
    return 0


def _words(words: Sequence[str], option: str | None) -> tuple[str | None, str | None]:
    """Return the spec and the operator that the arguments name; the older order, SPEC OPERATOR, works, too."""
    specs = [word for word in words if os.sep in word or word.endswith((".yml", ".yaml"))]
    if len(words) == 2 and not specs:
        specs = [word for word in words if is_spec(word)]  # the folder of a spec
    if len(words) == 2 and not specs:
        specs = [words[0]]  # its error says that there is no such spec
    operators = [word for word in words if word not in specs]
    specs += [option] if option is not None else []
    if len(specs) > 1 or len(operators) > 1:
        raise ConfigError(
            "too many arguments: one operator, and at most one spec", hint="firnline state totals -f SPEC"
        )
    return (specs[0] if specs else None), (operators[0] if operators else None)


def _no_operator(pipeline: OpenPipeline) -> ConfigError:
    from firnline.graph import stateful

    names = [operator.name for operator in stateful(pipeline.options)]
    hint = f"Stateful operators: {', '.join(names)}" if names else "This pipeline has no stateful operator."
    return ConfigError("name the operator whose state to show", hint=hint)


# -- what is shown --------------------------------------------------------------------------------------------


def _summary(common: Common, view: StateView, limit: int) -> None:
    counted = view.reader.count()
    table = view.reader.first(limit)
    rows, more = _rows(table), counted.keys > table.num_rows
    if common.json:
        shown = {"columns": table.column_names, "rows": rows, "more": more}
        common.out.json({**view.facts(), "keys": counted.keys, "timers": counted.timers, **shown})
        return
    facts = view.facts()
    common.out.facts(
        {
            "operator": view.operator,
            "epoch": f"{view.ref.epoch:,}",
            "keys": counted.keys,
            "timers": counted.timers,
            "watermark": _moment(view.watermark),
            "size": f"{size_text(facts['size_bytes'])} in {count_text(facts['files'], 'file')}",
            "shards": f"{view.ref.shards} of {view.key_groups} key groups",
            "key": ", ".join(f"{c['name']} {c['type']}" for c in facts["key_columns"]) or "none",
        }
    )
    if rows:
        common.out.line()
        _table(common.out, table.column_names, rows, more=more)


def _find(common: Common, view: StateView, key: Sequence[str], limit: int) -> None:
    matches = view.reader.find(_keys(view, key))
    table, more = matches.slice(0, limit), matches.num_rows > limit
    rows = _rows(table)
    if common.json:
        common.out.json({**view.facts(), "columns": table.column_names, "rows": rows, "more": more})
    elif not rows:
        common.out.line("no such key")
    else:
        _table(common.out, table.column_names, rows, more=more)


def _query(common: Common, view: StateView, sql: str, limit: int) -> None:
    from firnline.state.export import query_state

    answer = query_state(view.reader, sql, limit)
    rows = [{name: _plain(v) for name, v in zip(answer.columns, row, strict=True)} for row in answer.rows]
    if common.json:
        common.out.json({**view.facts(), "columns": answer.columns, "rows": rows, "more": answer.more})
        return
    common.out.table(_columns(answer.columns, rows), _exact(rows))
    _say_more(more=answer.more)


def _export(common: Common, view: StateView, key: Sequence[str], path: str) -> None:
    from firnline.state.export import write_export

    reader = view.reader
    tables = [reader.find(_keys(view, key))] if key else reader.scan()
    about = {"pipeline": view.pipeline, "operator": view.operator, "epoch": view.ref.epoch}
    rows = write_export(path, reader.schema, tables, {**about, "keys": len(reader.layout.key)})
    if common.json:
        common.out.json({**view.facts(), "exported": rows, "path": path})
    else:
        common.out.line(f"{count_text(rows, 'key')} of epoch {view.ref.epoch} written to {path}")


def _keys(view: StateView, key: Sequence[str]) -> pa.Table:
    """The keys that the words name: values of the only column that decides a key's shard, or one key by its columns."""
    import pyarrow as pa

    fields = list(view.reader.layout.key)
    by_name = {field.name: field for field in fields}
    pairs = [text.partition("=") for text in key]
    only = len(fields) == 1 or view.reader.deciding == 1
    if only and any(not equals or name not in by_name for name, equals, _ in pairs):
        return pa.table({fields[0].name: pa.concat_arrays([_value(text, fields[0]) for text in key])})
    names = [name for name, _, _ in pairs]
    for name, equals, _ in pairs:
        if fields and (not equals or name not in by_name or names.count(name) > 1):
            raise ConfigError(
                f"--key {name}{equals}: not one value for a column of the key",
                hint="Give each column once: " + " ".join(f"--key {field.name}=..." for field in fields),
            )
    return pa.table({name: _value(text, by_name[name]) for name, _, text in pairs if name in by_name})


def _value(text: str, field: pa.Field) -> pa.Array:
    import pyarrow as pa

    kind = field.type
    try:
        if pa.types.is_timestamp(kind):
            moment = datetime.fromisoformat(text)
            if kind.tz is not None and moment.tzinfo is None:
                moment = moment.replace(tzinfo=UTC)
            return pa.array([moment], kind)
        return pa.array([text], pa.string()).cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
        raise ConfigError(
            f"--key: {text!r} is no value of {field.name}, which is {kind}", hint="Or find it by a query: --sql"
        ) from error


# -- values ---------------------------------------------------------------------------------------------------


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    return [{name: _plain(value) for name, value in row.items()} for row in table.to_pylist()]


def _plain(value: Any) -> Any:
    """Convert a value to one that JSON can hold."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)  # JSON has no infinity, nor what is no number
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return exact(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value)


def _table(out: Output, names: Sequence[str], rows: list[dict[str, Any]], *, more: bool) -> None:
    shown = [name for name in names if name != "_timer" or any(row[name] is not None for row in rows)]
    out.table(_columns(shown, rows), _exact([{**row, "_timer": _moment(row["_timer"])} for row in rows]))
    _say_more(more=more)


def _columns(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> list[Column]:
    """The columns of a table whose names the data decides: the first stays, the last goes first."""
    return [
        Column(name, right=True, drop=place) if _is_number(rows, name) else Column(name, drop=place, cut="right")
        for place, name in enumerate(names)
    ]


def _exact(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with their numbers as they are: no rounding, no exponents, no separators."""
    return [{name: exact(value) for name, value in row.items()} for row in rows]


def _say_more(*, more: bool) -> None:
    if more:
        say("there is more; --limit shows more rows")


def _is_number(rows: Sequence[dict[str, Any]], name: str) -> bool:
    return any(isinstance(row[name], int | float) and not isinstance(row[name], bool) for row in rows)


def _moment(micros: int | None) -> str | None:
    """Format microseconds as a time; as a number if no calendar has that time."""
    if micros is None:
        return None
    try:
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)).isoformat()
    except OverflowError:
        return str(micros)
