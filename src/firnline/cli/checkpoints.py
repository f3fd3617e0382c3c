"""`firnline checkpoints`: lists the newest checkpoints, with the fields that Flink uses, and the audit trail."""

from __future__ import annotations

from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number

from firnline.cli.common import Common, Flag, Spec, load_pipeline, read_with_store
from firnline.cli.output import Column, say, short_time
from firnline.errors import SinkError

if TYPE_CHECKING:
    from firnline.run.open_pipeline import OpenPipeline
    from firnline.types import Json

COLUMNS = (
    Column("epoch", right=True),
    Column("status"),
    Column("reason"),
    Column("kind"),
    Column("trigger_timestamp"),
    Column("end_to_end_duration_ms", "ms", right=True),
    Column("checkpointed_size_bytes", "bytes", right=True),
    Column("state_size_bytes", "state", right=True),
    Column("table_version", "version", right=True),
    Column("files", right=True),
    Column("rows", right=True),
    Column("quarantined", "bad", right=True),
    Column("read_from", "from"),
)
AUDIT_COLUMNS = (
    Column("version", "no", right=True),
    Column("at"),
    Column("what"),
    Column("outcome"),
    Column("user"),
    Column("host"),
    Column("pid"),
    Column("from_epoch", "from", right=True),
    Column("to_epoch", "to", right=True),
    Column("details"),
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
  quarantined, last_committed_file, read_from (ledger, store; runs: an attempt
  from the run history), undone, reason (of IN_PROGRESS, FAILED)
With --audit (JSON: pipeline, more, audit [...] with these fields):
  version, at, user, host, pid, run, what (rollback, savepoint-create,
  savepoint-dispose, restore, import, delete, fresh-start, rescale,
  import-state, ledger-repair, gc, compact, discard, files-drop, and
  state-sweep, a run's own), from_epoch, to_epoch, details, outcome (begun,
  done, failed), id, problem

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline checkpoints --limit 5
  firnline checkpoints --json | jq -r '.checkpoints[0].epoch'
  firnline checkpoints show 42
  firnline checkpoints diff 40 42
"""

app = App(name="checkpoints", help_epilogue=EPILOGUE)
for _order, (_verb, _target, _help) in enumerate(
    (
        ("show", "checkpoints_show:app", "Show one checkpoint, and which of its copies are intact."),
        ("diff", "checkpoints_diff:app", "Show what changed between two epochs."),
        ("export", "checkpoints_transfer:export_app", "Write the checkpoints and the audit trail into one file."),
        (
            "import",
            "checkpoints_transfer:import_app",
            "Import an exported file into the checkpoint store.",
        ),
        ("delete", "checkpoints_delete:app", "Delete the checkpoint store's copies; the table keeps its own."),
    )
):
    app.command(f"firnline.cli.{_target}", name=_verb, help=_help, sort_key=_order)


@app.default
def checkpoints(
    spec: Spec = None,
    /,
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

    found = read_with_store(
        pipeline, lambda store: load_checkpoints(pipeline, None if every else limit, store, before=before, undone=every)
    )
    if found.lost is not None:
        say(f"{found.lost}; the list comes from the store")
    if common.json:
        rows = found.checkpoints
        common.out.json(
            {"pipeline": pipeline.options.name, "checkpoints": rows, "more": found.more, "damaged": found.damaged}
        )
        return 0
    if found.checkpoints:
        stateful = any(row["state_size_bytes"] for row in found.checkpoints)
        left_out = set() if stateful else {"state_size_bytes"}
        if all(row["status"] == "COMPLETED" for row in found.checkpoints):
            left_out.add("reason")
        columns = [column for column in COLUMNS if column.field not in left_out]
        common.out.table(columns, [_shown(row) for row in found.checkpoints])
        if found.more:
            oldest = found.checkpoints[-1]["epoch"]
            common.out.line(f"there are more: --before {oldest} lists the next, --all lists them all")
    elif before is not None:
        common.out.line(f"no checkpoint before epoch {before}")
    else:
        common.out.line("no checkpoint yet; `firnline run` makes the first")
    for damage in found.damaged:
        common.out.line(f"damaged: {damage['problem']}")
    return 0


def _shown(row: dict[str, Json]) -> dict[str, Json]:
    kind = f"{row['kind']}, undone" if row["undone"] else row["kind"]
    return {**row, "kind": kind, "trigger_timestamp": short_time(row["trigger_timestamp"])}


def _audit(pipeline: OpenPipeline, limit: int | None, before: int | None, common: Common) -> int:
    from firnline.history.store import check_store, find_store
    from firnline.stores.audit import load_audit

    check_store(pipeline)
    name = pipeline.options.name
    try:
        store = find_store(pipeline)
        with closing(store) if store is not None else nullcontext():
            found = load_audit(store, name, None if limit is None else limit + 1, before) if store is not None else []
    except OSError as error:
        options = pipeline.options.checkpoint.store
        place = (options.path or options.uri or options.type) if options is not None else ""
        raise SinkError(
            f"the checkpoint store ({place}) cannot be read: {error}",
            hint="Make it reachable, then try again: only the store holds the audit trail.",
        ) from error
    more = limit is not None and len(found) > limit
    rows: list[dict[str, Json]] = [
        {"version": entry.version, **(entry.record.to_json() if entry.record else {}), "problem": entry.problem or None}
        for entry in found[:limit]
    ]
    if common.json:
        common.out.json({"pipeline": name, "audit": rows, "more": more})
    elif rows:
        common.out.table(AUDIT_COLUMNS, [_shown_audit(row) for row in rows])
        if more:
            common.out.line(f"there are more: --before {rows[-1]['version']} lists the next, --all lists them all")
    elif store is None:
        common.out.line(
            "there is no checkpoint store yet, so there is no audit trail; `firnline run` creates the store"
        )
    else:
        common.out.line("nobody rolled back, restored, imported or deleted anything")
    return 0


def _shown_audit(row: dict[str, Json]) -> dict[str, Json]:
    if row["problem"]:
        return {"version": row["version"], "what": "damaged", "details": row["problem"]}
    details = ", ".join(f"{name} {value}" for name, value in row["details"].items())
    return {**row, "pid": str(row["pid"]), "at": short_time(row["at"]), "details": details}
