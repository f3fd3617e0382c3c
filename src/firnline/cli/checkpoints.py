"""`firnline checkpoints`: lists checkpoints and the audit trail; shows, compares and deletes checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number

from firnline.cli.common import Common, Flag, Spec, load_pipeline, read_with_store
from firnline.cli.consent import Consent
from firnline.cli.output import Output, count_text, say, size_text
from firnline.cli.table import Column
from firnline.cli.text import shown
from firnline.rescued import Rescued

if TYPE_CHECKING:
    from firnline.history.checkpoints import CheckpointList
    from firnline.history.state import OperatorSnapshot
    from firnline.history.store import AuditRows
    from firnline.run.open_pipeline import OpenPipeline
    from firnline.sources.base import PositionView
    from firnline.stores.transfer import Extent
    from firnline.types import Json

COLUMNS = (
    Column("epoch", right=True),
    Column("status"),
    Column("reason", cut="right"),
    Column("kind", drop=1),
    Column("trigger_timestamp", "triggered", time=True),
    Column("end_to_end_duration_ms", "ms", right=True, drop=5),
    Column("checkpointed_size_bytes", "bytes", right=True, drop=7),
    Column("state_size_bytes", "state", right=True, drop=6),
    Column("table_version", "version", right=True, drop=4),
    Column("files", right=True, drop=3),
    Column("rows", right=True),
    Column("quarantined", "bad", right=True, drop=2),
    Column("read_from", "from", drop=8),
)
AUDIT_COLUMNS = (
    Column("version", "no", right=True, drop=2),
    Column("at", time=True),
    Column("what"),
    Column("outcome", drop=1),
    Column("user"),
    Column("host", drop=3),
    Column("pid", drop=4),
    Column("from_epoch", "from", right=True),
    Column("to_epoch", "to", right=True),
    Column("details", cut="right"),
)

EPILOGUE = """\
A checkpoint is part of a commit: the positions of the sources after that epoch.
The command reads the table and its ledger; it starts no Spark and writes
nothing. The ledger folds checkpoints older than the rollback window together;
with a checkpoint store (checkpoint.store in the spec) the command lists them
from there, as far back as its versions go. --all also lists epochs that a
rollback, fresh start or restore has undone, if the store has them.

Output (JSON: pipeline, more, damaged [{version, problem}] in store or ledger,
and checkpoints [...] with these fields):
  id, epoch, status (COMPLETED; IN_PROGRESS: staged, and not committed yet;
  FAILED: the attempt failed, and was or will be repeated), is_savepoint,
  trigger_timestamp, latest_ack_timestamp, end_to_end_duration_ms,
  checkpointed_size_bytes, state_size_bytes (of the operators' state that it
  names), acknowledged (sinks that hold it / sinks), path (sink, local, remote
  or fresh, for restores), table_version, kind (epoch, baseline, rollback,
  fresh, restore, rescale, import, repair), generation, run, files, rows,
  quarantined, rescued, last_committed_file, read_from (ledger, store; runs: an
  attempt from the run history), undone, reason (of IN_PROGRESS, FAILED)
With --audit (JSON: pipeline, more, audit [...] with these fields):
  version, at, user, host, pid, run, what (rollback, savepoint-create,
  savepoint-dispose, restore, import, delete, fresh-start, rescale,
  import-state, ledger-repair, gc, compact, discard, files-drop, files-reread,
  snapshot, accept-gap, quarantine-replay, quarantine-drop, and state-sweep, a
  run's own),
  from_epoch, to_epoch, details, outcome (begun, done, failed), id, problem

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline checkpoints --limit 5
  firnline checkpoints --json | jq -r '.checkpoints[0].epoch'
  firnline checkpoints show 42
  firnline checkpoints diff 40 42
"""

app = App(name="checkpoints", help_epilogue=EPILOGUE)


@app.default
def checkpoints(
    spec: Spec = None,
    *,
    limit: Annotated[int, Parameter(help="Maximum number to list.", validator=Number(gte=1))] = 20,
    before: Annotated[
        int | None, Parameter(help="Only those before this epoch (--audit: this number). [default: newest]")
    ] = None,
    every: Annotated[bool, Flag, Parameter(name="--all", help="List all, also epochs that were undone.")] = False,
    audit: Annotated[bool, Flag, Parameter(help="Show who rolled back, restored, imported or deleted.")] = False,
    common: Common = Common(),
) -> int:
    """List the newest checkpoints, or the audit trail."""
    pipeline = load_pipeline(spec)
    if audit:
        return _audit(pipeline, None if every else limit, before, common)
    from firnline.history.checkpoints import load_checkpoints

    listing = read_with_store(
        pipeline, lambda store: load_checkpoints(pipeline, None if every else limit, store, before=before, undone=every)
    )
    show_checkpoints(pipeline.options.name, listing, before, common)
    return 0


def show_checkpoints(pipeline: str, listing: CheckpointList, before: int | None, common: Common) -> None:
    """Show a page of checkpoints."""
    if listing.lost is not None:
        say(f"{listing.lost}; the list comes from the store")
    if common.json:
        rows = listing.checkpoints
        common.out.json({"pipeline": pipeline, "checkpoints": rows, "more": listing.more, "damaged": listing.damaged})
        return
    if listing.checkpoints:
        stateful = any(row["state_size_bytes"] for row in listing.checkpoints)
        left_out = set() if stateful else {"state_size_bytes"}
        if all(row["status"] == "COMPLETED" for row in listing.checkpoints):
            left_out.add("reason")
        columns = [column for column in COLUMNS if column.field not in left_out]
        common.out.table(columns, [_shown(row) for row in listing.checkpoints])
        if listing.more:
            oldest = listing.checkpoints[-1]["epoch"]
            common.out.line(f"there are more: --before {oldest} lists the next, --all lists them all")
    elif before is not None:
        common.out.line(f"no checkpoint before epoch {before}")
    else:
        common.out.line("no checkpoint yet; `firnline run` makes the first")
    for damage in listing.damaged:
        common.out.line(f"damaged: {damage['problem']}")


def _shown(row: dict[str, Json]) -> dict[str, Json]:
    kind = f"{row['kind']}, undone" if row["undone"] else row["kind"]
    return {**row, "kind": kind}


def _audit(pipeline: OpenPipeline, limit: int | None, before: int | None, common: Common) -> int:
    from firnline.history.store import load_audit_rows

    show_audit(pipeline.options.name, load_audit_rows(pipeline, limit, before), common)
    return 0


def show_audit(name: str, page: AuditRows, common: Common) -> None:
    """Show a page of the audit trail."""
    rows, more = page.rows, page.more
    if common.json:
        common.out.json({"pipeline": name, "audit": rows, "more": more})
    elif rows:
        common.out.table(AUDIT_COLUMNS, [_shown_audit(row) for row in rows])
        if more:
            common.out.line(f"there are more: --before {rows[-1]['version']} lists the next, --all lists them all")
    elif not page.has_store:
        common.out.line(
            "there is no checkpoint store yet, so there is no audit trail; `firnline run` creates the store"
        )
    else:
        common.out.line("nobody rolled back, restored, imported or deleted anything")


def _shown_audit(row: dict[str, Json]) -> dict[str, Json]:
    if row["problem"]:
        return {"version": row["version"], "what": "damaged", "details": row["problem"]}
    details = fact_text(row["details"]) if row["details"] else ""
    return {**row, "pid": str(row["pid"]), "details": details}


EPOCH_HELP = "The epoch, as `firnline checkpoints` lists it."

SINK_COLUMNS = (
    Column("name", "sink", cut="right"),
    Column("holds"),
    Column("version", right=True),
    Column("rows", right=True),
    Column("size_bytes", "bytes", right=True, drop=1),
    Column("committed_at", time=True),
)
COPY_COLUMNS = (
    Column("where", "copy"),
    Column("status"),
    Column("place", "entry or version", cut="left"),
    Column("detail", cut="right", drop=1),
)

SHOW_EPILOGUE = """\
Reads the ledger, the table's log and the checkpoint store; starts no Spark and
writes nothing.

Output (JSON fields):
  pipeline, epoch, kind, status, is_savepoint, undone (by a rollback, restore or
  fresh start)
  checkpoint    as it is stored, sealed: pipeline, epoch, generation, run,
                attempt, created_at, positions, state, watermarks, schema
                {fingerprint, version}, floor, format, checksum
  positions     {source: summary}; of files: last_committed_file,
                files_in_progress, files_set_aside, root
  operators     [{operator, epoch, checkpoint, shards, size_bytes, rows,
                watermark, idle_inputs}]: the snapshots of the state that the
                checkpoint names
  entry         the ledger's: epoch, name, checksum; null when unknown
  inputs        {source: files}; null when the entry is folded away
  rescued       [{source, table (of a database), column, values, expected,
                first, file, line}]: values in _rescued_data; null when the
                entry is folded away
  sinks         [{name, holds, version, committed_at, rows, size_bytes}]
  sizes         checkpoint_bytes, entry_bytes, state_bytes
  durations_ms  {step: milliseconds}
  copies        [{where (ledger, commitInfo, store), status (intact, damaged,
                differs, folded, missing), place, detail}]

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline checkpoints show 42
  firnline checkpoints show 42 --json | jq .checkpoint.positions
"""


@app.command(help_epilogue=SHOW_EPILOGUE, sort_key=0)
def show(
    epoch: Annotated[int, Parameter(help=EPOCH_HELP, validator=Number(gte=0))],
    /,
    spec: Spec = None,
    *,
    common: Common = Common(),
) -> int:
    """Show one checkpoint, and which of its copies are intact."""
    pipeline = load_pipeline(spec)
    from firnline.history.checkpoints import describe_epoch
    from firnline.history.epoch import load_epoch

    view = read_with_store(pipeline, lambda store: load_epoch(pipeline, store, epoch))
    known = describe_epoch(pipeline, view)
    if common.json:
        common.out.json(known)
    else:
        show_epoch(common.out, known, find_texts(pipeline, view.checkpoint.positions))
    return 0


def state_facts(snapshots: Sequence[OperatorSnapshot]) -> dict[str, str]:
    """Return one line about the state of every operator."""
    facts = {}
    for one in snapshots:
        text = f"{count_text(one.rows, 'row')}, {size_text(one.size_bytes)} in {count_text(one.shards, 'shard')}"
        mark = f", watermark {one.watermark}" if one.watermark else ""
        idle = f", idle: {', '.join(one.idle_inputs)}" if one.idle_inputs else ""
        facts[f"state of {one.operator}"] = f"{text}, snapshot of epoch {one.epoch}{mark}{idle}"
    return facts


def show_epoch(out: Output, known: dict[str, Json], positions: Mapping[str, str]) -> None:
    """Show an epoch as `describe_epoch` describes it; `positions` are those of its sources, in words."""
    from firnline.checkpoint.model import Checkpoint
    from firnline.history.state import OperatorSnapshot

    checkpoint = Checkpoint.from_json(known["checkpoint"])
    facts: dict[str, Json] = {
        "epoch": ", ".join(
            [
                str(known["epoch"]),
                known["kind"],
                *(["undone by a later one"] if known["undone"] else []),
                *(["held by a savepoint"] if known["is_savepoint"] else []),
            ]
        ),
        "pipeline": checkpoint.pipeline,
        "made at": checkpoint.created_at,
        "generation": checkpoint.generation,
        "run": checkpoint.run,
        "attempt": checkpoint.attempt,
        "floor": f"epoch {checkpoint.floor}",
        "schema": f"version {checkpoint.schema_version}, fingerprint {checkpoint.schema_fingerprint or '-'}",
    }
    for name, text in positions.items():
        facts[f"source {name}"] = text
    facts |= state_facts([OperatorSnapshot(**one) for one in known["operators"]]) or {"state": "none"}
    facts["checksum"] = checkpoint.checksum
    if known["entry"] is not None:
        facts["ledger entry"] = known["entry"]["name"]
        facts["its checksum"] = known["entry"]["checksum"]
    if known["inputs"] is not None:
        facts["read"] = count_text(sum(known["inputs"].values()), "file")
    if known["rescued"]:
        facts["rescued"] = "; ".join(Rescued.from_json(one).text() for one in known["rescued"])
    facts["checkpoint size"] = size_text(known["sizes"]["checkpoint_bytes"])
    if known["durations_ms"]:
        facts["took"] = ", ".join(f"{step} {ms:,} ms" for step, ms in known["durations_ms"].items())
    out.facts(facts)
    out.line()
    out.table(SINK_COLUMNS, known["sinks"])
    out.line()
    out.table(COPY_COLUMNS, known["copies"])


def find_texts(pipeline: OpenPipeline, positions: Mapping[str, Json]) -> dict[str, str]:
    """Return where each source stands, in words."""
    return {name: position_text(one) for name, one in pipeline.sources.describe(positions).items()}


def position_text(position: PositionView) -> str:
    """Return where a source stands, in words."""
    if not position.by_input:
        return fact_text(position.facts)
    text = f"up to {position.last}" if position.last else "at the start"
    if position.in_progress:
        text += f", {count_text(len(position.in_progress), 'file')} in progress"
    if position.set_aside:
        text += f", {count_text(len(position.set_aside), 'file')} set aside"
    return text


NAMES_SHOWN = 10  # names of a kind in the text; JSON has them all

DIFF_EPILOGUE = """\
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


@app.command(help_epilogue=DIFF_EPILOGUE, sort_key=1)
def diff(
    one: Annotated[int, Parameter(name="A", help="An epoch.", validator=Number(gte=0))],
    other: Annotated[int, Parameter(name="B", help="Another one.", validator=Number(gte=0))],
    /,
    spec: Spec = None,
    *,
    common: Common = Common(),
) -> int:
    """Show what changed between two epochs."""
    pipeline = load_pipeline(spec)
    from firnline.history.diff import diff_epochs

    changes = read_with_store(pipeline, lambda store: diff_epochs(pipeline, store, one, other))
    if common.json:
        common.out.json(changes)
    else:
        show_diff(common.out, changes)
    return 0


def show_diff(out: Output, changes: dict[str, Json]) -> None:
    """Show what changed between two epochs."""
    for line in _diff_lines(changes):
        out.line(line)


def _diff_lines(changes: dict[str, Json]) -> Iterator[str]:
    from firnline.checkpoint.ledger import edit_name

    unknown = changes["epochs_unknown"]
    yield f"from epoch {changes['from_epoch']} to {changes['to_epoch']}: {count_text(changes['epochs'], 'epoch')}"
    at_least = "at least " if unknown else ""
    yield f"  {at_least}{count_text(changes['rows'], 'row')}, {size_text(changes['size_bytes'])} written"
    if unknown:
        yield f"  the rows of {count_text(unknown, 'epoch')} are not known: folded away, and not in the store"
    if changes["quarantined"]:
        yield f"  {count_text(changes['quarantined'], 'record')} quarantined"
    for edit in changes["jumps"]:
        yield f"  epoch {edit['epoch']} was a {edit_name(edit['kind'])}"
    for name, source in changes["sources"].items():
        yield f"source {name}"
        yield from (f"  {line}" for line in _source_lines(source))
    yield from _schema_lines(changes["schema"])
    for name, moved in changes["watermarks"].items():
        yield f"watermark of {name}: {moved['from'] or 'none'} -> {moved['to'] or 'none'}"
    for name, moved in changes["state"].items():
        yield f"state of {name}: {_state_text(moved['from'])} -> {_state_text(moved['to'])}"
    for what in ("generation", "floor"):
        if changes[what]["from"] != changes[what]["to"]:
            yield f"{what}: {changes[what]['from']} -> {changes[what]['to']}"
    yield from (f"note: {note}" for note in changes["notes"])


def _state_text(snapshot: dict[str, Json] | None) -> str:
    if snapshot is None:
        return "none"
    contents = f"{count_text(snapshot['rows'], 'row')}, {size_text(snapshot['size_bytes'])}"
    return f"{contents} in {count_text(snapshot['shards'], 'shard')} (epoch {snapshot['epoch']})"


def _source_lines(source: dict[str, Json]) -> Iterator[str]:
    read = [file for file in source["files_read"] if file["status"] != "set_aside"]
    yield f"{count_text(len({file['path'] for file in read}), 'file')} read"
    yield from _names([f"{file['path']} ({file['status']}, epoch {file['epoch']})" for file in read])
    for name, moved in source.get("changed", {}).items():
        yield from _change_lines(name, moved["from"], moved["to"])
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


def _change_lines(name: str, before: Json, after: Json) -> Iterator[str]:
    """Yield a changed fact of a position; of facts with names of their own only those that differ, one a line."""
    if not (isinstance(before, dict | None) and isinstance(after, dict | None)) or before == after:
        yield f"{name}: {fact_text(before)} -> {fact_text(after)}"
        return
    for key in sorted({*(before or {}), *(after or {})}):
        old, new = (before or {}).get(key), (after or {}).get(key)
        if old != new:
            yield from _change_lines(f"{name} {key}", old, new)


def fact_text(value: Json) -> str:
    """A fact of a position in words, without brackets and quotes."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {fact_text(of)}" for key, of in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(fact_text, value)) or "none"
    return "none" if value is None else shown(value) if isinstance(value, bool) else str(value)


def _schema_lines(schema: dict[str, Json]) -> Iterator[str]:
    if schema["from"] == schema["to"]:
        yield "schema: the same"
        return
    yield f"schema: version {schema['from']['version']} -> {schema['to']['version']}"
    for name, moved in (schema["columns"] or {}).items():
        if moved["from"] is None:
            yield f"  {name} added: {_type_text(moved['to'])}"
        elif moved["to"] is None:
            yield f"  {name} gone"
        else:
            yield f"  {name}: {_type_text(moved['from'])} -> {_type_text(moved['to'])}"


def _type_text(stored: Json) -> str:
    """The type of a column as `dry-run` names it; the ledger has nested types as JSON."""
    if isinstance(stored, str):
        return stored
    from firnline.schema import schema_from_json, type_to_text

    return type_to_text(schema_from_json([{"name": "", "nullable": True, "type": stored}]).field(0))


def _names(names: list[str]) -> Iterator[str]:
    yield from (f"  {name}" for name in names[:NAMES_SHOWN])
    if len(names) > NAMES_SHOWN:
        yield f"  and {len(names) - NAMES_SHOWN:,} more; --json has them all"


app.command(
    "firnline.cli.checkpoints_transfer:export_app",
    name="export",
    help="Write the checkpoints and the audit trail into one file.",
    sort_key=2,
)
app.command(
    "firnline.cli.checkpoints_transfer:import_app",
    name="import",
    help="Import an exported file into the checkpoint store.",
    sort_key=3,
)

DELETE_EPILOGUE = """\
Deletes every version of this pipeline's checkpoint from the checkpoint store.
Table, ledger and audit trail stay, so the pipeline continues from its newest
epoch. Checkpoints that the ledger has folded can then no longer be shown.

Output (JSON fields):
  pipeline, status (deleted, would_delete, nothing_there), versions, size_bytes,
  epoch (the newest among them), place

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline checkpoints delete --dry-run
  firnline checkpoints delete flights.yml --yes
"""


@app.command(help_epilogue=DELETE_EPILOGUE, sort_key=4)
def delete(
    spec: Spec = None,
    *,
    consent: Consent = Consent(),
    common: Common = Common(),
) -> int:
    """Delete the checkpoint store's copies; the table keeps its own."""
    pipeline = load_pipeline(spec)
    from firnline.history.store import open_for_writing
    from firnline.stores.audit import audited, make_record
    from firnline.stores.transfer import count_versions

    name = pipeline.options.name
    with closing(open_for_writing(pipeline)) as store:
        stored, location = count_versions(store, name), store.place
        if not stored.versions or not consent.decided:
            _show_stored(common, name, stored, location, verb="would_delete")
        if not stored.versions or not consent.is_given("Delete them", common.out):
            return 0
        details = {"versions": stored.versions, "place": location}
        with audited(store, make_record(name, "delete", from_epoch=stored.epoch, details=details)):
            store.delete(name)
    _show_stored(common, name, stored, location, verb="deleted")
    return 0


def _show_stored(common: Common, name: str, stored: Extent, location: str, *, verb: str) -> None:
    status = verb if stored.versions else "nothing_there"
    facts: dict[str, Json] = {
        "pipeline": name,
        "status": status,
        "versions": stored.versions,
        "size_bytes": stored.size_bytes,
        "epoch": stored.epoch,
        "place": location,
    }
    if common.json:
        common.out.json(facts)
    elif not stored.versions:
        common.out.line(f"{location} has no checkpoint of {name}")
    else:
        contents = f"{count_text(stored.versions, 'version')}, {size_text(stored.size_bytes)}"
        common.out.line(f"{verb.replace('_', ' ')} {contents}, of {name} in {location}")
