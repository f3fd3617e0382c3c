"""`firnline rescale`: gives the state of operators another number of shards, without rewriting it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number

from firnline.cli.common import Common, Flag, Spec, load_pipeline
from firnline.cli.output import Column, count_text, say

if TYPE_CHECKING:
    from firnline.history.edits.rescale import RescalePlan

EPILOGUE = """\
Keys keep their key group; the groups are dealt out to so many shards, each of
which is one task. No file of state is rewritten: the new shards read their part
of the old files. It is an epoch of its own that reads nothing, committed to the
table like any other, so it can be rolled back. An active run is fenced (exit
code 5): stop it first. Without --yes only the plan is shown. Starts no Spark.

Where the spec sets state.shards, change it there: the next run does the same by
itself. Where the newest snapshots lack epochs (checkpoint.trigger), the next
run deals the groups out while it folds these epochs again.

Output (JSON fields):
  pipeline, done, already, epoch, new_epoch, shards_now, shards, key_groups
  by_next_run  the newest snapshots lack epochs, so the next run deals them out
  operators    {name: {files, size_bytes}}

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline rescale --shards 16
  firnline rescale flights.yml --shards 4 --yes
"""

COLUMNS = (Column("operator"), Column("files", right=True), Column("size_bytes", "bytes", right=True))

app = App(name="rescale", help_epilogue=EPILOGUE)


@app.default
def rescale(
    spec: Spec = None,
    /,
    *,
    shards: Annotated[int, Parameter(help="How many shards there shall be.", validator=Number(gte=1))],
    dry_run: Annotated[bool, Flag, Parameter(help="Only show the plan, even with --yes.")] = False,
    yes: Annotated[bool, Flag, Parameter(help="Really do it; without it only the plan is shown.")] = False,
    common: Common = Common(),
) -> int:
    """Give the state of operators another number of shards."""
    pipeline = load_pipeline(spec)
    from firnline.history.edits.rescale import Rescale

    work = Rescale(pipeline, shards)
    plan = work.plan()
    if not common.json:
        _show(common, plan)
    done = yes and not dry_run and not plan.already
    if done:
        plan, receipt = work.perform(pipeline.ids.new(), say)
        done = receipt is not None
    if common.json:
        common.out.json({**asdict(plan), "done": done})
    elif done:
        common.out.line(f"done: epoch {plan.new_epoch} has {count_text(plan.shards, 'shard')}")
        if plan.by_next_run:
            common.out.line("the next run folds the epochs since the newest snapshots with them: firnline run")
    elif plan.already:
        common.out.line(f"there are {count_text(plan.shards, 'shard')} already; nothing to do")
    else:
        common.out.line("nothing was changed; add --yes to do it")
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
