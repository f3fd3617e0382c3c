"""`firnline dry-run`: checks everything that can be checked without writing; only SQL operators start Spark."""

from __future__ import annotations

from typing import Any

from cyclopts import App

from firnline.cli.common import Common, Spec, load_pipeline, name_spec
from firnline.cli.output import Output, count_text, say, size_text
from firnline.cli.table import Column
from firnline.options import names_tables

EPILOGUE = """\
Lists the sources, reads the tables, the checkpoint store, the tiers, the lease
and a sample of the waiting files (up to 50 of the first epoch and 50 later
ones, spread evenly, 32 MiB each) or of the records in topics (as many pieces of
1,000 offsets, spread over the partitions), and shows what a run would do. An
error that would end a run at its start ends the dry run, too. Writes nothing,
and starts no JVM unless there are SQL operators, whose columns only Spark
knows. The first use may take up to a minute to compile the decoder, once per
installation.

Output (JSON fields):
  pipeline, source {path, files_outstanding, bytes_outstanding, late_files,
  tables} (null when there are several), sources [{name, ..., inputs (what is
  counted: file, or partition of a topic), last_committed_file, tables (that
  the source captures, [{table, key, would_read (the rows that are there),
  estimate (of these rows, by the server; 0: it has none)}]; null for others)}],
  first_epoch {files, size_bytes}, epochs_about,
  journal {table, exists, version, writable} (null if a sink decides),
  sinks [{name, type, table (where it is, without credentials), decides, input,
  write, key, sequence_by, delete_when, exists, version, epoch, delivery
  (exactly-once, exactly-once-per-part, at-least-once), guarantee (the same in
  plain words), filled (what a sink that was added to a pipeline with history
  gets first; null: nothing), required, reachable (false: an optional sink that
  cannot be used now; its rows would wait), writable (null if unknown before the
  first commit)}],
  copies [{path (store, local, remote), place, epoch, writable (null if unknown
  before the first write), problem}], lease (as `firnline status` shows it),
  resume {path, epoch, generation, last_committed_file},
  schema [{name, type, origin, widened_from, odd_share}] of the deciding table
  (of the first sink if the journal decides; tables [{sink, columns}] has those
  of every table):
  origin is table, declared, or new; widened_from is the table's type if the run
  would widen it; odd_share is the share of sampled values that do not fit the
  type and would be rescued;
  schemas [{name (of a source, an operator or a port), columns [{name, type}]}],
  graph {nodes [{name, kind, type, shards, idle_after_secs}], edges [{from,
  port, to, to_kind}], drawing}, sample {files, records, size_bytes, of_files,
  of_bytes, complete (every waiting record was read), first_epoch_complete, bad,
  rescued}, java, warnings

Environment:
  FIRNLINE__A__B          overrides the key a.b of the spec
  FIRNLINE_OPERATOR_PATH  further folders with operators of your own

Examples:
  firnline dry-run
  firnline dry-run flights/firnline.yml --json | jq .schema
"""

SOURCE_COLUMNS = (
    Column("name", "source", cut="right"),
    Column("path", cut="left"),
    Column("waiting", "would read", cut="right"),
)
SINK_COLUMNS = (
    Column("name", "sink", cut="right"),
    Column("type", drop=3),
    Column("table", "where", cut="left"),
    Column("state"),
    Column("delivery", drop=1),
    Column("must", "required", drop=2),
)
COPY_COLUMNS = (
    Column("path", "copy"),
    Column("place", "location", cut="left"),
    Column("epoch", right=True, drop=2),
    Column("problem", cut="right", drop=1),
)
OPERATOR_COLUMNS = (Column("name", "operator", cut="right"), Column("type"), Column("columns", cut="right"))
SCHEMA_COLUMNS = (
    Column("name", "column", cut="right"),
    Column("type", cut="right"),
    Column("origin", drop=2),
    Column("odd", "odd values", drop=1),
)
TABLE_COLUMNS = (
    Column("table", "captured table"),
    Column("key"),
    Column("rows", "rows (about)", right=True),
    Column("would read", "rows are read"),
    Column("source"),
)
TABLES_SHOWN = 20

app = App(name="dry-run", help_epilogue=EPILOGUE)


@app.default
def dry_run(spec: Spec = None, *, common: Common = Common()) -> int:
    """Check spec, access and schema, and show what a run would read; writes nothing."""
    warnings: list[str] = []
    pipeline = load_pipeline(spec, warn=warnings.append)
    from firnline.cli.common import warm_decoder
    from firnline.cli.dry_run_preview import preview

    warm_decoder(pipeline.options.sources, say)
    facts = preview(pipeline, None if common.json else common.out.width)
    facts["warnings"] = [name_spec(text, spec) for text in (*warnings, *facts["warnings"])]
    if common.json:
        common.out.json(facts)
    else:
        show_preview(common.out, facts)
    return 0


def show_preview(out: Output, facts: dict[str, Any], starts: str = "firnline run") -> None:
    """Show what a run would read."""
    resume, first, sample = facts["resume"], facts["first_epoch"], facts["sample"]
    source, sources = facts["source"], facts["sources"]
    only_captures = all(one["tables"] is not None for one in sources)  # nobody knows the number of their spool files
    begin = "starting fresh" if resume["path"] == "fresh" else f"resuming after epoch {resume['epoch']}"
    out.facts(
        {
            "pipeline": facts["pipeline"],
            **({"source": source["path"], "would read": _waiting(source)} if source else {}),
            **(
                {}
                if only_captures
                else {
                    "in about": count_text(facts["epochs_about"], "epoch"),
                    "first epoch": f"{count_text(first['files'], _word(sources))}, {size_text(first['size_bytes'])}",
                }
            ),
            "would begin": begin,
            **_decides(facts),
            "java": facts["java"] or "not found",
        }
    )
    if source is None:
        out.line()
        out.table(SOURCE_COLUMNS, [{**s, "waiting": _waiting(s)} for s in sources])
    _show_captured(out, sources)
    if source is None or any(node["kind"] == "operator" for node in facts["graph"]["nodes"]):
        out.line()
        for line in facts["graph"]["drawing"]:
            out.line(line)
    out.line()
    shown = [{**s, "state": _state(s), "delivery": _short(s), "must": _must(s)} for s in facts["sinks"]]
    out.table(SINK_COLUMNS, shown)
    for words in dict.fromkeys(str(sink["guarantee"]) for sink in facts["sinks"]):
        names = [sink["name"] for sink in facts["sinks"] if sink["guarantee"] == words]
        out.sentence(f"{', '.join(names)}: {words}")
    for sink in facts["sinks"]:
        if sink["filled"]:
            out.sentence(f"{sink['name']}: {sink['filled']}")
    for words in filter(None, map(_upsert, facts["sinks"])):
        out.line(words)
    if facts["copies"]:
        out.line()
        out.table(COPY_COLUMNS, facts["copies"])
    groups = _alike(facts["tables"])
    for sinks, columns in groups:
        out.line()
        if len(groups) > 1:
            out.line(f"columns of {', '.join(sinks)}:")
        out.table(SCHEMA_COLUMNS, [{**c, "origin": _origin(c), "odd": _share(c["odd_share"])} for c in columns])
    if groups and not only_captures:
        for line in _sample_lines(sample, _word(sources)):
            out.sentence(line)
    operators = [node for node in facts["graph"]["nodes"] if node["kind"] == "operator"]
    if operators:
        schemas = {schema["name"]: schema["columns"] for schema in facts["schemas"]}
        out.line()
        idle = [Column("idle_after_secs", "idle after (s)")] if any(o["idle_after_secs"] for o in operators) else []
        steps = [{**o, "columns": _columns(schemas.get(o["name"]))} for o in operators]
        out.table((*OPERATOR_COLUMNS[:2], *idle, *OPERATOR_COLUMNS[2:]), steps)
    for warning in facts["warnings"]:
        out.sentence(f"warning: {warning}")
    out.line()
    out.line(f"nothing was written; `{starts}` starts it")


def _decides(facts: dict[str, Any]) -> dict[str, str]:
    """Say what makes an epoch true, if there are several sinks or the journal does."""
    journal, sinks = facts["journal"], facts["sinks"]
    if journal:
        return {"decides": f"the journal at {journal['table']}, {_state(journal)}"}
    return {"decides": f"sink {sinks[0]['name']}; the others follow it"} if sinks[1:] else {}


def _short(sink: dict[str, Any]) -> str:
    """Return the guarantee in a few words, without what it means."""
    return str(sink["guarantee"]).partition(":")[0]


def _must(sink: dict[str, Any]) -> str:
    return "required" if sink["required"] else "optional"


def _word(sources: list[dict[str, Any]]) -> str:
    """Return what the inputs of these sources are called."""
    words = {str(source["inputs"]) for source in sources}
    return words.pop() if len(words) == 1 else "input"


def _waiting(source: dict[str, Any]) -> str:
    if source["tables"] is not None:
        return _captures(source)
    waiting = f"{count_text(source['files_outstanding'], source['inputs'])}, {size_text(source['bytes_outstanding'])}"
    return waiting + (f", {count_text(source['late_files'], 'late file')}" if source["late_files"] else "")


def _captures(source: dict[str, Any]) -> str:
    """Say what a source that captures tables would read: rows that are there, and changes."""
    tables = source["tables"]
    read = [one for one in tables if one["would_read"]]
    rows = sum(one["estimate"] for one in read)
    texts = [f"the rows of {count_text(len(read), 'table')}, about {rows:,}"] if rows else []
    if read and not rows:
        texts = [f"the rows of {count_text(len(read), 'table')}"]
    log = f" ({size_text(source['bytes_outstanding'])} of the log)" if source["bytes_outstanding"] else ""
    return ", then ".join([*texts, f"the changes of {count_text(len(tables), 'table')}{log}"])


def _show_captured(out: Output, sources: list[dict[str, Any]]) -> None:
    """Show the tables that sources capture."""
    tables = [(source["name"], one) for source in sources for one in source["tables"] or ()]
    if not tables:
        return
    rows = [
        {
            "table": one["table"],
            "key": ", ".join(one["key"]) or "none: append only",
            "rows": f"{one['estimate']:,}" if one["estimate"] else "unknown",
            "would read": "yes" if one["would_read"] else "no",
            "source": name,
        }
        for name, one in tables[:TABLES_SHOWN]
    ]
    out.line()
    out.table(TABLE_COLUMNS if len(sources) > 1 else TABLE_COLUMNS[:-1], rows)
    if len(tables) > len(rows):
        out.line(f"and {count_text(len(tables) - len(rows), 'more table')} (--json lists all)")


def _alike(tables: list[dict[str, Any]]) -> list[tuple[list[str], list[dict[str, Any]]]]:
    """Return the columns of tables with the names of the sinks that have them; nothing of those with unknown ones."""
    groups: list[tuple[list[str], list[dict[str, Any]]]] = []
    for table in tables:
        same = next((sinks for sinks, columns in groups if columns == table["columns"]), None)
        if same is not None:
            same.append(table["sink"])
        elif table["columns"]:
            groups.append(([table["sink"]], table["columns"]))
    return groups


def _upsert(sink: dict[str, Any]) -> str:
    """Return what an upsert with a key in the spec does with the rows."""
    if sink["write"] == "upsert" and names_tables(sink["input"]):
        return (
            f"{sink['name']} has a Delta table for each captured table, with one row per key of that table; to those "
            "of tables without a key, change rows are appended"
        )
    if sink["write"] != "upsert" or not sink["key"]:
        return ""
    newest = f"the row with the greatest {sink['sequence_by']}" if sink["sequence_by"] else "the later row"
    deletes = " and ".join(f"{name} = {' or '.join(values)}" for name, values in sink["delete_when"].items())
    words = f"{sink['name']} keeps one row per {', '.join(sink['key'])}: {newest} counts"
    return words + (f"; {deletes} deletes it" if deletes else "")


def _origin(column: dict[str, Any]) -> str:
    return f"{column['origin']}, was {column['widened_from']}" if column["widened_from"] else str(column["origin"])


def _sample_lines(sample: dict[str, Any], word: str) -> list[str]:
    """Return what was sampled of how much, and what it found."""
    bad = f", {count_text(sample['bad'], 'bad one')}" if sample["bad"] else ""
    bad += f", {sample['rescued']:,} with rescued values" if sample["rescued"] else ""
    lines = [
        f"sampled {sample['files']:,} of {count_text(sample['of_files'], word)}, "
        f"{size_text(sample['size_bytes'])} of {size_text(sample['of_bytes'])}",
        f"found {count_text(sample['records'], 'record')}{bad}",
    ]
    if not sample["first_epoch_complete"]:
        lines.append("the run reads all of its first epoch, and may infer other types")
    return lines


def _share(share: float) -> str:
    return f"{100 * share:.2g} %" if share else ""


def _columns(columns: list[dict[str, str]] | None) -> str | None:
    return ", ".join(f"{column['name']} {column['type']}" for column in columns) if columns is not None else None


def _state(sink: dict[str, Any]) -> str:
    if not sink.get("reachable", True):
        return "cannot be used now"
    if not sink["exists"]:
        return "would be created" if sink.get("type", "delta") == "delta" else "nothing delivered yet"
    return f"version {sink['version']}" if sink.get("type", "delta") == "delta" else f"at epoch {sink['epoch']}"
