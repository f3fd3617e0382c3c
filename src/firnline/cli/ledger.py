"""`firnline ledger`: repairs a ledger of which a file is missing or damaged."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from firnline.cli.common import Common, Flag, Spec, load_pipeline
from firnline.cli.output import Column, count_text, say

if TYPE_CHECKING:
    from firnline.history.edits.ledger_repair import RepairPlan

FILES_SHOWN = 20

EPILOGUE = """\
The ledger is the exact set of processed files. When one of its files is lost,
late files cannot be told from processed ones: they are not taken in, and
`firnline run --once` ends with exit code 1 after it has read everything else.

Examples:
  firnline ledger repair
  firnline ledger repair --from s3://backup/flights --yes
"""
REPAIR_EPILOGUE = """\
Files of the ledger that a savepoint or a folder named with --from still has are
put back, byte for byte, proven by their checksum. For what no copy has, the
sources are listed in full. A file at or below the high-water mark counts as
processed when an intact part of the ledger tells it, or a damaged entry whose
list of files is intact, or when its rows are in the table (lineage: true). What
nothing tells is up to you, by name or pattern (`*` crosses folders; the full
name counts):

  --assume-processed   its rows are in the table; if they are not, they are lost
  --assume-new         it is read; if its rows are in the table, they are doubled

Where both fit, --assume-new counts. While a file is undecided nothing is done.
The decision is an epoch of its own that reads nothing, in one commit; an active
run is fenced (exit code 5): stop it first. It is put on record in the audit
trail. A rollback to before that epoch undoes it. Without --yes only the plan is
shown. Starts no Spark.

Output (JSON fields):
  pipeline, done, epoch, new_epoch (null when copies suffice)
  holes  [{entry {epoch, name, checksum}, problem, copy, goes_on_at, how}]:
         copy: where an intact one lies; goes_on_at: the newest epoch below that
         is proven, 0 where the history begins, null when none is
  known  files that the intact part of the ledger tells
  files  [{source, path, size_bytes, create_time, taken_as (processed, new,
         unknown), how}]: all others at or below the high-water mark
  sinks_behind  [{sink, epoch, required, reason, hint}]: sinks that lack epochs
         which nothing tells any more; an optional one stays behind, and with a
         required one nothing is done

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline ledger repair --json | jq -r '.files[] | select(.taken_as == "unknown").path'
  firnline ledger repair --assume-new '*/2026-11-16/*' --assume-processed '*' --yes
"""
HOLE_COLUMNS = (Column("epoch", right=True), Column("problem"), Column("instead"))
FILE_COLUMNS = (Column("taken_as", "taken as"), Column("path"), Column("how"))

app = App(name="ledger", help_epilogue=EPILOGUE)


@app.command(name="repair", help_epilogue=REPAIR_EPILOGUE)
def repair(
    spec: Spec = None,
    /,
    *,
    from_: Annotated[
        list[str] | None,
        Parameter(
            name="--from",
            help="A folder or URI with copies: a savepoint, a table, or a ledger folder. May be repeated.",
            negative="",
        ),
    ] = None,
    assume_processed: Annotated[
        list[str] | None, Parameter(help="Files that count as processed, by name or pattern.", negative="")
    ] = None,
    assume_new: Annotated[
        list[str] | None, Parameter(help="Files that are to be read, by name or pattern.", negative="")
    ] = None,
    yes: Annotated[bool, Flag, Parameter(help="Really do it; without it only the plan is shown.")] = False,
    common: Common = Common(),
) -> int:
    """Put back what copies have of the ledger, and decide about the files that nothing tells."""
    pipeline = load_pipeline(spec)
    from firnline.history.edits.ledger_repair import LedgerRepair

    work = LedgerRepair(pipeline, copies=from_ or [], processed=assume_processed or [], new=assume_new or [])
    plan = work.plan()
    if not common.json:
        _show(common, plan)
    done = yes and bool(plan.holes)
    if done:
        plan, _ = work.perform(pipeline.ids.new(), say)
    if common.json:
        common.out.json({**asdict(plan), "done": done})
    else:
        common.out.line(_last_line(plan, done=done))
    return 0


def _show(common: Common, plan: RepairPlan) -> None:
    common.out.facts(
        {
            "pipeline": plan.pipeline,
            "epoch": plan.epoch,
            "known to the ledger": count_text(plan.known, "file"),
            **{f"taken as {word}": count_text(plan.count(word), "file") for word in ("processed", "new", "unknown")},
        }
    )
    if plan.holes:
        common.out.line()
        rows = [
            {"epoch": h.entry.epoch, "problem": h.problem, "instead": f"copy in {h.copy}" if h.copy else h.how}
            for h in plan.holes
        ]
        common.out.table(HOLE_COLUMNS, rows)
    if plan.files:
        common.out.line()
        undecided_first = sorted(plan.files, key=lambda file: file.taken_as != "unknown")
        common.out.table(FILE_COLUMNS, [asdict(file) for file in undecided_first[:FILES_SHOWN]])
        if len(plan.files) > FILES_SHOWN:
            common.out.line(f"and {len(plan.files) - FILES_SHOWN:,} more; --json shows them all")
    for behind in plan.sinks_behind:
        common.out.line()
        stays = "so nothing can be done yet" if behind.required else "and stays behind"
        common.out.line(f"{behind.reason}; it is {'required' if behind.required else 'optional'}, {stays}")
        common.out.line(behind.hint)
    common.out.line()


def _last_line(plan: RepairPlan, *, done: bool) -> str:
    if not plan.holes:
        return "the ledger is whole; nothing to do"
    if not done and any(behind.required for behind in plan.sinks_behind):
        return "nothing was changed; a required sink cannot be left behind"
    if not done and plan.count("unknown"):
        return "nothing was changed; decide with --assume-processed and --assume-new, then add --yes"
    if not done:
        return "nothing was changed; add --yes to do it"
    return f"done: epoch {plan.new_epoch} repairs the ledger" if plan.new_epoch else "done: the ledger is whole"
