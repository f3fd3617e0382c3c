"""`firnline recover`: rebuilds a lost journal from the head of a sink."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from firnline.cli.common import Common, Flag, Spec, TakeOver, editing_history, load_pipeline
from firnline.cli.consent import Consent
from firnline.cli.output import count_text, say
from firnline.cli.table import Column

if TYPE_CHECKING:
    from firnline.history.edits.recover import RecoveryPlan
    from firnline.run.open_pipeline import OpenPipeline

EPILOGUE = """\
For a pipeline that decides in its journal, after the journal is lost: its
`_delta_log`, or the whole home. Each follower's head holds the checkpoint of
its newest epoch, so one of them is enough.

The command makes a new journal with another id, claims every sink for it, and
decides an epoch that reads nothing; `firnline run` then goes on. If the ledger
is still in the home, nothing is lost: sinks that lag catch up. If it is lost,
the pipeline goes on after the epoch that the named sink holds. Then a sink
that lags is set aside (firnline sinks resync or resume brings it back), and one
that is ahead is refused unless you --leave it. Input that no sink holds is
read again.

Without a ledger nothing tells which files at or below the mark of a file
source were late and not read yet. You decide: --assume-processed for those
that were read, --assume-new for those to be read; '*' means all that are left.

Refused: if the journal is not lost, if operators hold state that is gone, and
if the sink holds some rows of an epoch that is lost. A command that was killed
is repeated: it does the rest, or finds the recovery done. Runs of the lost
journal that wake up later can write nothing any more. The audit trail records
the recovery. Starts no Spark.

Output (JSON fields):
  pipeline, sink, home, lost_journal (its id), epoch (that the pipeline goes on
  after), new_epoch, ledger (kept | lost), positions {source: ...}, sinks [...]:
  name, target, required, epoch, partial, journal, becomes (in sync, catches up,
  set aside, begins anew, refused), reason, left; files [...], refusals,
  already, done

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline recover --from events --dry-run
  firnline recover pipeline.yml --from events --assume-processed '*' --yes
"""
COLUMNS = (
    Column("name", "sink", cut="right"),
    Column("epoch", right=True),
    Column("becomes"),
    Column("reason", cut="right"),
    Column("target", cut="left", drop=1),
)

app = App(name="recover", help_epilogue=EPILOGUE)


@app.default
def recover(
    spec: Spec = None,
    *,
    from_: Annotated[str, Parameter(name="--from", help="The sink whose head is trusted.")],
    leave: Annotated[
        tuple[str, ...],
        Flag,
        Parameter(help="A sink that is set aside and not touched, whatever it holds; repeatable. [default: none]"),
    ] = (),
    assume_processed: Annotated[
        tuple[str, ...],
        Flag,
        Parameter(help="Files (a name or pattern) that were read; repeatable. [default: none]"),
    ] = (),
    assume_new: Annotated[
        tuple[str, ...],
        Flag,
        Parameter(help="Late files (a name or pattern) that are to be read; repeatable. [default: none]"),
    ] = (),
    accept_duplicates: Annotated[
        bool, Flag, Parameter(help="Rows that the sink holds of an epoch that is lost may come again.")
    ] = False,
    take_over: TakeOver = False,
    consent: Consent = Consent(),
    common: Common = Common(),
) -> int:
    """Rebuild a lost journal from the head of a sink."""
    pipeline = load_pipeline(spec)
    from firnline.history.edits.recover import Recovery

    edit = Recovery(
        pipeline,
        from_,
        leave=leave,
        processed=assume_processed,
        new=assume_new,
        accept_duplicates=accept_duplicates,
    )
    plan = edit.plan()
    if plan.already:
        if common.json:
            common.out.json({**_as_json(plan), "done": True})
        else:
            common.out.line(f"done already: epoch {plan.new_epoch} is the recovery; `firnline run` goes on")
        return 0
    if not common.json:
        _show(common, pipeline, plan)
    elif not consent.decided:
        common.out.json({**_as_json(plan), "done": False})
    plan.check()  # a refusal must not end a run
    if not consent.is_given(f"Recover the journal from sink {from_}", common.out):
        return 0
    with editing_history(pipeline, take_over=take_over) as run:
        plan, _ = edit.perform(run, say)
    if common.json:
        common.out.json({**_as_json(plan), "done": True})
    else:
        common.out.line(f"done: epoch {plan.new_epoch} continues after epoch {plan.epoch}; `firnline run` goes on")
    return 0


def _as_json(plan: RecoveryPlan) -> dict[str, Any]:
    return {**asdict(plan), "refusals": [error.message for error in plan.refusals]}


def _show(common: Common, pipeline: OpenPipeline, plan: RecoveryPlan) -> None:
    from firnline.history.edits.rollback import position_text

    views = pipeline.sources.describe(plan.positions)
    kept = plan.ledger == "kept"
    common.out.facts(
        {
            "pipeline": plan.pipeline,
            "home": plan.home,
            "lost journal": plan.lost_journal,
            "ledger": "is still there" if kept else "is lost, too",
            "goes on after": f"epoch {plan.epoch}, as epoch {plan.new_epoch}",
            **{f"source {name}": f"reads on after {position_text(view)}" for name, view in views.items()},
        }
    )
    common.out.line()
    common.out.table(COLUMNS, [asdict(sink) for sink in plan.sinks])
    common.out.line()
    for taken_as, meaning in (("processed", "count as read"), ("new", "are read"), ("unknown", "are undecided")):
        files = [file.path for file in plan.files if file.taken_as == taken_as]
        if files:
            common.out.sentence(f"{count_text(len(files), 'file')} at or below the mark {meaning}: {files[0]} ...")
    if not kept:
        common.out.sentence(
            "lost with the home: epochs that were decided and that no sink holds (read again from the sources, if they "
            "still have that input), dead letters, quarantined records, and the history of earlier epochs"
        )
    for error in plan.refusals:
        common.out.sentence(f"refused: {error.message}")
