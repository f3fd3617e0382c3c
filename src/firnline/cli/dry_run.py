"""`firnline dry-run`: checks everything that can be checked without writing and without starting Spark."""

from __future__ import annotations

from typing import Any

from cyclopts import App

from firnline.cli.common import Common, Spec, load_parts
from firnline.cli.output import Column, Output, count_text, say, size_text

EPILOGUE = """\
Lists the source, reads the table and a sample of the first files, and tells
what a run would do. Writes nothing and starts no JVM. The first use may take
up to a minute to prepare the decoder, once per installation.

Output (JSON fields):
  pipeline, source {path, files_outstanding, bytes_outstanding, late_files},
  first_epoch {files, size_bytes}, epochs_about,
  sinks [{name, table, exists, version, delivery, required, writable (null
  when only the first commit can tell)}],
  resume {path, epoch, generation, last_committed_file},
  schema [{name, type, origin}] where origin is table, declared, or new,
  sample {files, records, bad}, java, warnings

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline dry-run
  firnline dry-run flights/firnline.yml --json | jq .schema
"""

SINK_COLUMNS = (
    Column("name", "sink"),
    Column("table"),
    Column("state"),
    Column("delivery"),
    Column("required"),
    Column("writable"),
)
SCHEMA_COLUMNS = (Column("name", "column"), Column("type"), Column("origin"))

app = App(name="dry-run", help_epilogue=EPILOGUE)


@app.default
def dry_run(spec: Spec = None, /, *, common: Common = Common()) -> int:
    """Check spec, access and schema, and tell what would be read; writes nothing."""
    parts = load_parts(spec)
    from firnline.cli.preview import preview
    from firnline.cli.warming import warm_decoder

    warm_decoder(say)
    found = preview(parts)
    if common.json:
        common.out.json(found)
    else:
        _show(common.out, found)
    return 0


def _show(out: Output, found: dict[str, Any]) -> None:
    source, resume, first, sample = found["source"], found["resume"], found["first_epoch"], found["sample"]
    waiting = f"{count_text(source['files_outstanding'], 'file')}, {size_text(source['bytes_outstanding'])}"
    late = f", {count_text(source['late_files'], 'late file')}" if source["late_files"] else ""
    begin = "starting fresh" if resume["path"] == "fresh" else f"resuming after epoch {resume['epoch']}"
    out.facts(
        {
            "pipeline": found["pipeline"],
            "source": source["path"],
            "would read": f"{waiting}{late}",
            "in about": count_text(found["epochs_about"], "epoch"),
            "first epoch": f"{count_text(first['files'], 'file')}, {size_text(first['size_bytes'])}",
            "would begin": begin,
            "java": found["java"] or "not found",
        }
    )
    out.line()
    out.table(SINK_COLUMNS, [{**s, "state": _state(s)} for s in found["sinks"]])
    if found["schema"]:
        out.line()
        out.table(SCHEMA_COLUMNS, found["schema"])
        bad = f", {count_text(sample['bad'], 'bad one')}" if sample["bad"] else ""
        out.line(f"(from {count_text(sample['records'], 'record')} of {count_text(sample['files'], 'file')}{bad})")
    for warning in found["warnings"]:
        out.line(f"warning: {warning}")
    out.line()
    out.line("nothing was written; `firnline run` starts it")


def _state(sink: dict[str, Any]) -> str:
    return f"version {sink['version']}" if sink["exists"] else "would be created"
