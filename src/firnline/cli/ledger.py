"""`firnline ledger`: repairs a ledger that has a missing or damaged file."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from firnline.cli.common import Common, Spec, TakeOver, editing_history, load_pipeline
from firnline.cli.consent import Consent
from firnline.cli.output import count_text, say
from firnline.cli.table import Column

if TYPE_CHECKING:
    from firnline.history.edits.ledger_repair import RepairPlan

FILES_SHOWN = 20

EPILOGUE = """\
The ledger is the exact set of processed files. If one of its files is lost,
Firnline cannot tell late files from processed ones: it ingests no late files,
and `firnline run --once` ends with exit code 1 after it has read all others.

Examples:
  firnline ledger repair
  firnline ledger repair --from s3://backup/flights --yes
"""
REPAIR_EPILOGUE = """\
The command restores ledger files from savepoints and from folders named with
--from, byte for byte, verified by checksum. If no copy has a file, the command
lists the sources in full. A file at or below the high-water mark counts as
processed if an intact part of the ledger names it, or a damaged entry whose
file list is intact, or if its rows are in the table (lineage: true). For all
other files the decision is yours, by name or pattern (`*` crosses folders; the
full name counts):

  --assume-processed   its rows are in the table; if they are not, they are lost
  --assume-new         read it; if its rows are in the table, they are doubled

If both match, --assume-new wins. While a file is undecided, nothing is done.
The decision is a history edit: an epoch that reads nothing, in one commit.
While a run is alive, the command is refused (exit code 6): stop the run first,
or end it with --take-over. The audit trail records the repair. A rollback to
before that epoch undoes it. The command shows the plan, then asks. Starts no
Spark.

Output (JSON fields):
  pipeline, done, epoch, new_epoch (null when copies suffice)
  holes  [{entry {epoch, name, checksum}, problem, copy, goes_on_at, how}]:
         copy: location of an intact copy; goes_on_at: the newest proven epoch
         below, 0 at the start of the history, null if there is none
  known  files that the intact part of the ledger names
  files  [{source, path, size_bytes, create_time, taken_as (processed, new,
         unknown), how}]: all others at or below the high-water mark
  sinks_behind  [{sink, epoch, required, reason, hint}]: sinks that lack epochs
         of which no copy is left; an optional sink stays behind, a required
         sink prevents the repair

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline ledger repair --json | jq -r '.files[] | select(.taken_as == "unknown").path'
  firnline ledger repair --assume-new '*/2026-11-16/*' --assume-processed '*' --yes
"""
HOLE_COLUMNS = (Column("epoch", right=True), Column("problem", cut="right"), Column("instead", cut="right"))
FILE_COLUMNS = (Column("taken_as", "taken as"), Column("path", cut="left"), Column("how", cut="right"))

app = App(name="ledger", help_epilogue=EPILOGUE)


@app.command(name="repair", help_epilogue=REPAIR_EPILOGUE)
def repair(
    spec: Spec = None,
    *,
    from_: Annotated[
        list[str] | None,
        Parameter(
            name="--from",
            help="A folder or URI with copies: a savepoint, a table, or a ledger folder; repeatable.",
            negative="",
        ),
    ] = None,
    assume_processed: Annotated[
        list[str] | None, Parameter(help="Files that count as processed, by name or pattern; repeatable.", negative="")
    ] = None,
    assume_new: Annotated[
        list[str] | None, Parameter(help="Files to read, by name or pattern; repeatable.", negative="")
    ] = None,
    take_over: TakeOver = False,
    consent: Consent = Consent(),
    common: Common = Common(),
) -> int:
    """Restore lost ledger files from copies, and decide about files that no copy names."""
    pipeline = load_pipeline(spec)
    from firnline.history.edits.ledger_repair import LedgerRepair

    edit = LedgerRepair(pipeline, copies=from_ or [], processed=assume_processed or [], new=assume_new or [])
    plan = edit.plan()
    if not common.json:
        _show(common, plan)
    is_possible = bool(plan.holes) and not (plan.count("unknown") or any(b.required for b in plan.sinks_behind))
    is_repaired = bool(plan.holes) and consent.decided  # with --yes an impossible repair says why
    if common.json and not is_repaired:
        common.out.json({**asdict(plan), "done": False})
    if is_possible and not is_repaired:
        is_repaired = consent.is_given("Repair the ledger", common.out)
        if not is_repaired:
            return 0
    if is_repaired:
        with editing_history(pipeline, take_over=take_over) as run:
            plan, _ = edit.perform(run, say)
    if not common.json:
        common.out.line(_last_line(plan, is_repaired=is_repaired))
    elif is_repaired:
        common.out.json({**asdict(plan), "done": True})
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


def _last_line(plan: RepairPlan, *, is_repaired: bool) -> str:
    if not plan.holes:
        return "the ledger is whole; nothing to do"
    if not is_repaired and any(behind.required for behind in plan.sinks_behind):
        return "nothing was changed; a required sink cannot be left behind"
    if not is_repaired and plan.count("unknown"):
        return "nothing was changed; decide with --assume-processed and --assume-new, then add --yes"
    return f"done: epoch {plan.new_epoch} repairs the ledger" if plan.new_epoch else "done: the ledger is whole"
