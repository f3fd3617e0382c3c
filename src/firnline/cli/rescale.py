"""`firnline rescale`: changes the number of shards of operators' state, without rewriting it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number

from firnline.cli.common import Common, Spec, TakeOver, editing_history, load_pipeline
from firnline.cli.consent import Consent
from firnline.cli.output import count_text, say
from firnline.cli.table import Column

if TYPE_CHECKING:
    from firnline.history.edits.operator_state import RescalePlan

EPILOGUE = """\
Keys keep their key group; the command distributes the groups over the new
number of shards, each of which is one task. It rewrites no file of state: the
new shards read their groups from the old files. A rescale is a history edit: an
epoch that reads nothing, committed to the table like any other, so a rollback
can undo it. While a run is alive, the command is refused (exit code 6): stop
the run first, or end it with --take-over. The command shows the plan, then
asks. Starts no Spark.

If the spec sets state.shards, change it there: the next run then rescales by
itself. If the newest snapshots lack epochs (checkpoint.trigger), the next run
distributes the groups while it replays these epochs.

Output (JSON fields):
  pipeline, done, already, epoch, new_epoch, shards_now, shards, key_groups
  by_next_run  the newest snapshots lack epochs, so the next run rescales
  operators    {name: {files, size_bytes}}

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline rescale --shards 16
  firnline rescale flights.yml --shards 4 --yes
"""

COLUMNS = (Column("operator", cut="right"), Column("files", right=True), Column("size_bytes", "bytes", right=True))

app = App(name="rescale", help_epilogue=EPILOGUE)


@app.default
def rescale(
    spec: Spec = None,
    *,
    shards: Annotated[int, Parameter(help="The new number of shards.", validator=Number(gte=1))],
    take_over: TakeOver = False,
    consent: Consent = Consent(),
    common: Common = Common(),
) -> int:
    """Change the number of shards of operators' state, without rewriting it."""
    pipeline = load_pipeline(spec)
    from firnline.history.edits.operator_state import Rescale

    edit = Rescale(pipeline, shards)
    plan = edit.plan()
    if not common.json:
        _show(common, plan)
    elif plan.already or not consent.decided:
        common.out.json({**asdict(plan), "done": False})
    if plan.already:
        if not common.json:
            common.out.line(f"there are {count_text(plan.shards, 'shard')} already; nothing to do")
        return 0
    if not consent.is_given(f"Rescale to {count_text(plan.shards, 'shard')}", common.out):
        return 0
    with editing_history(pipeline, take_over=take_over) as run:
        plan, receipt = edit.perform(run, say)
    if common.json:
        common.out.json({**asdict(plan), "done": receipt is not None})
    else:
        common.out.line(f"done: epoch {plan.new_epoch} has {count_text(plan.shards, 'shard')}")
        if plan.by_next_run:
            common.out.line("the next run replays the epochs since the newest snapshots with them: firnline run")
    return 0


def _show(common: Common, plan: RescalePlan) -> None:
    common.out.facts(
        {
            "pipeline": plan.pipeline,
            "epoch": plan.epoch,
            "shards": f"{plan.shards_now} -> {plan.shards}",
            "key groups": plan.key_groups,
        }
    )
    common.out.line()
    common.out.table(COLUMNS, [{"operator": name, **facts} for name, facts in plan.operators.items()])
    common.out.line()
