"""`firnline checkpoints diff`: shows what changed between two epochs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number

from firnline.cli.common import Common, Spec, load_pipeline, read_with_store
from firnline.cli.output import count_text, size_text

if TYPE_CHECKING:
    from firnline.types import Json

SHOWN = 10  # names of a kind in the text; JSON has them all

EPILOGUE = """\
Shows what the epochs after the older one changed, up to the newer one. Reads
the ledger, the table's log and the checkpoint store; starts no Spark and writes
nothing.

Output (JSON fields):
  pipeline, from_epoch, to_epoch, epochs, epochs_unknown (folded away, their
  rows not in the store), rows, size_bytes, quarantined, notes
  jumps       [{epoch, kind, ...}], history edits between: rollbacks, restores,
              fresh starts
  sources     {source: {root, last_committed_file, in_progress {now, begun,
              ended}, set_aside {path: reason}, taken_up, files_read [{path,
              epoch, from, to, status}], or, not of files: changed}}
  schema      from, to {fingerprint, version}, columns {name: {from, to}}
  watermarks  {operator: {from, to}}, event time, those that changed
  state       {operator: {from, to}}, those that changed, each {epoch,
              checkpoint, shards, size_bytes, rows} of the snapshot, or null
  floor, generation   {from, to}

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline checkpoints diff 40 42
  firnline checkpoints diff 1 42 --json | jq '.sources.flights.files_read'
"""

app = App(name="diff", help_epilogue=EPILOGUE)


@app.default
def diff(
    one: Annotated[int, Parameter(name="A", help="An epoch.", validator=Number(gte=0))],
    other: Annotated[int, Parameter(name="B", help="Another one.", validator=Number(gte=0))],
    spec: Spec = None,
    /,
    *,
    common: Common = Common(),
) -> int:
    """Show what changed between two epochs."""
    pipeline = load_pipeline(spec)
    from firnline.history.diff import diff_epochs

    found = read_with_store(pipeline, lambda store: diff_epochs(pipeline, store, one, other))
    if common.json:
        common.out.json(found)
    else:
        for line in _lines(found):
            common.out.line(line)
    return 0


def _lines(found: dict[str, Json]) -> Iterator[str]:
    from firnline.history.superseded import edit_name

    unknown = found["epochs_unknown"]
    yield f"from epoch {found['from_epoch']} to {found['to_epoch']}: {count_text(found['epochs'], 'epoch')}"
    at_least = "at least " if unknown else ""
    yield f"  {at_least}{count_text(found['rows'], 'row')}, {size_text(found['size_bytes'])} written"
    if unknown:
        yield f"  the rows of {count_text(unknown, 'epoch')} are not known: folded away, and not in the store"
    if found["quarantined"]:
        yield f"  {count_text(found['quarantined'], 'record')} quarantined"
    for edit in found["jumps"]:
        yield f"  epoch {edit['epoch']} was a {edit_name(edit['kind'])}"
    for name, source in found["sources"].items():
        yield f"source {name}"
        yield from (f"  {line}" for line in _source_lines(source))
    yield from _schema_lines(found["schema"])
    for name, moved in found["watermarks"].items():
        yield f"watermark of {name}: {moved['from'] or 'none'} -> {moved['to'] or 'none'}"
    for name, moved in found["state"].items():
        yield f"state of {name}: {_state_text(moved['from'])} -> {_state_text(moved['to'])}"
    for what in ("generation", "floor"):
        if found[what]["from"] != found[what]["to"]:
            yield f"{what}: {found[what]['from']} -> {found[what]['to']}"
    yield from (f"note: {note}" for note in found["notes"])


def _state_text(snapshot: dict[str, Json] | None) -> str:
    if snapshot is None:
        return "none"
    held = f"{count_text(snapshot['rows'], 'row')}, {size_text(snapshot['size_bytes'])}"
    return f"{held} in {count_text(snapshot['shards'], 'shard')} (epoch {snapshot['epoch']})"


def _source_lines(source: dict[str, Json]) -> Iterator[str]:
    read = [file for file in source["files_read"] if file["status"] != "set_aside"]
    yield f"{count_text(len({file['path'] for file in read}), 'file')} read"
    yield from _names([f"{file['path']} ({file['status']}, epoch {file['epoch']})" for file in read])
    for name, moved in source.get("changed", {}).items():
        yield f"{name}: {moved['from']} -> {moved['to']}"
    if "changed" in source:
        return
    mark = source["last_committed_file"]
    if mark["from"] != mark["to"]:
        yield f"read up to: {mark['from'] or 'the start'} -> {mark['to'] or 'the start'}"
    if source["root"]["from"] != source["root"]["to"]:
        yield f"root: {source['root']['from']} -> {source['root']['to']}"
    now = source["in_progress"]["now"]
    if now:
        yield f"{count_text(len(now), 'file')} in progress"
        yield from _names([f"{path}, {count_text(records, 'record')} read" for path, records in now.items()])
    if source["set_aside"]:
        yield f"{count_text(len(source['set_aside']), 'file')} set aside"
        yield from _names([f"{path}: {reason}" for path, reason in source["set_aside"].items()])
    if source["taken_up"]:
        yield f"{count_text(len(source['taken_up']), 'file')} no longer set aside"
        yield from _names(source["taken_up"])


def _schema_lines(schema: dict[str, Json]) -> Iterator[str]:
    if schema["from"] == schema["to"]:
        yield "schema: the same"
        return
    yield f"schema: version {schema['from']['version']} -> {schema['to']['version']}"
    for name, moved in (schema["columns"] or {}).items():
        if moved["from"] is None:
            yield f"  {name} added: {moved['to']}"
        elif moved["to"] is None:
            yield f"  {name} gone"
        else:
            yield f"  {name}: {moved['from']} -> {moved['to']}"


def _names(names: list[str]) -> Iterator[str]:
    yield from (f"  {name}" for name in names[:SHOWN])
    if len(names) > SHOWN:
        yield f"  and {len(names) - SHOWN:,} more; --json has them all"
