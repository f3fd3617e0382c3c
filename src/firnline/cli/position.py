"""`firnline position`: shows where each source stands; sets a source to another position, or skips input."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from firnline.cli.common import Common, Spec, TakeOver, editing_history, load_pipeline
from firnline.cli.consent import Consent
from firnline.cli.output import count_text, say

if TYPE_CHECKING:
    from firnline.history.edits.position import Action, PositionPlan
    from firnline.run.open_pipeline import OpenPipeline

WORDS = """\
A position is written in JSON, as `position show --json` prints it, or in the
words of the kind of source:
  kafka   TOPIC:PARTITION=WHERE, several with commas between, or WHERE alone
          for all partitions; WHERE is an offset (the next to read),
          beginning, end, or a time (2026-01-31T12:00:00Z)
  delta   a version, which counts as read with all before it; beginning (all
          rows that the table has now); end
  files   a file, which counts as read with all names before it, while every
          later one is read; beginning; end
  postgres, mysql (no snapshot may be under way)
          a place in the server's log, up to which everything counts as read:
          an LSN (16/B374D848); of MySQL all GTIDs that count as read; of
          MariaDB, and without GTIDs, FILE:POSITION; or end
What to skip:
  kafka   TOPIC:PARTITION=OFFSET (all before it), TOPIC:PARTITION+COUNT (so
          many offsets)
  delta   a version: it and what is unread before it
  files   one file, or the rest of one that was begun
  mysql   a transaction of MySQL, by its GTID
"""
EPILOGUE = f"""\
The position of a source is part of every checkpoint. These commands are for
the day when it must be changed by hand: a poisoned record, a wrong start.

{WORDS}
Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline position show
  firnline position set events orders:0=1200 --dry-run
"""
SHOW_EPILOGUE = """\
Output (JSON fields):
  pipeline, epoch, sources {name: {position, facts}}: the position as the
  checkpoint holds it (null before the first epoch), and the same for people

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline position show
  firnline position show pipeline.yml --json
"""
EDIT_EPILOGUE = f"""\
{WORDS}
The change is a history edit: an epoch that reads nothing. The plan says which
input is read again, and so doubled in sinks that append, and which is never
read. A command that was killed is repeated: it does the rest, or finds the
change done. While a run is alive, the command is refused (exit code 6): stop
the run first, or end it with --take-over. The audit trail records the change.
Starts no Spark.

Output (JSON fields):
  pipeline, action, source, words, epoch, before, after (positions), again,
  never (input, by name), again_count, never_count, unit (what is counted),
  doubled_in (sinks), operators (with state), already, new_epoch, done

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline position {{example}} --dry-run
  firnline position {{example}} --yes
"""
NAMED = 10  # inputs in a plan for people

app = App(name="position", help_epilogue=EPILOGUE, help="Show or change where the sources of a pipeline stand.")

SourceName = Annotated[str, Parameter(help="The name of the source.")]


@app.command(help_epilogue=SHOW_EPILOGUE)
def show(spec: Spec = None, *, common: Common = Common()) -> int:
    """Show where each source stands after the newest epoch."""
    pipeline = load_pipeline(spec)
    from firnline.history.edits.position import load_positions

    epoch, positions = load_positions(pipeline)
    views = pipeline.sources.describe({name: one for name, one in positions.items() if one is not None})
    if common.json:
        sources = {
            name: {"position": one, "facts": views[name].facts if name in views else None}
            for name, one in positions.items()
        }
        common.out.json({"pipeline": pipeline.options.name, "epoch": epoch, "sources": sources})
        return 0
    facts: dict[str, object] = {"pipeline": pipeline.options.name, "epoch": epoch}
    common.out.facts(facts | {f"source {name}": _text(pipeline, name, one) for name, one in positions.items()})
    return 0


@app.command(name="set", help_epilogue=EDIT_EPILOGUE.replace("{example}", "set events orders:0=1200"))
def set_position(
    source: SourceName,
    position: Annotated[str, Parameter(help="Where it should stand, in JSON or in the words of its kind.")],
    spec: Spec = None,
    *,
    take_over: TakeOver = False,
    consent: Consent = Consent(),
    common: Common = Common(),
) -> int:
    """Set a source to another position: what comes after it is read, what comes before it counts as read."""
    return _edit("set", source, position, spec, take_over, consent, common)


@app.command(help_epilogue=EDIT_EPILOGUE.replace("{example}", "skip events orders:0+1"))
def skip(
    source: SourceName,
    what: Annotated[str, Parameter(help="The input that is never to be read, in the words of the kind of source.")],
    spec: Spec = None,
    *,
    take_over: TakeOver = False,
    consent: Consent = Consent(),
    common: Common = Common(),
) -> int:
    """Pass over input that was not read yet: it never will be."""
    return _edit("skip", source, what, spec, take_over, consent, common)


def _edit(
    action: Action, source: str, words: str, spec: str | None, take_over: bool, consent: Consent, common: Common
) -> int:
    pipeline = load_pipeline(spec)
    from firnline.history.edits.position import PositionEdit

    edit = PositionEdit(pipeline, action, source, words)
    plan = edit.plan()
    if not common.json:
        _show(common, pipeline, plan)
    elif not consent.decided:
        common.out.json({**asdict(plan), "done": False})
    if plan.already:
        if common.json and consent.decided:
            common.out.json({**asdict(plan), "done": True})
        elif not common.json:
            common.out.line("done already: there is nothing to change")
        return 0
    if not consent.is_given(f"Change the position of source {source}", common.out):
        return 0
    with editing_history(pipeline, take_over=take_over) as run:
        plan, _ = edit.perform(run, say)
    if common.json:
        common.out.json({**asdict(plan), "done": True})
    else:
        common.out.line(f"done: epoch {plan.new_epoch} has the new position of source {source}")
    return 0


def _show(common: Common, pipeline: OpenPipeline, plan: PositionPlan) -> None:
    facts: dict[str, object] = {
        "pipeline": plan.pipeline,
        "epoch": plan.epoch,
        "source": plan.source,
        "stands at": _text(pipeline, plan.source, plan.before),
    }
    if not plan.already:
        facts["would stand at"] = _text(pipeline, plan.source, plan.after)
        facts["read again"] = count_text(plan.again_count, plan.unit) if plan.again else "nothing"
        facts["never read"] = count_text(plan.never_count, plan.unit) if plan.never else "nothing"
    common.out.facts(facts)
    common.out.line()
    for label, inputs in (("read again", plan.again), ("never read", plan.never)):
        for name in inputs[:NAMED]:
            common.out.line(f"{label}: {name}")
        if len(inputs) > NAMED:
            common.out.line(f"{label}: {len(inputs) - NAMED:,} more")
    if plan.doubled_in:
        common.out.sentence(f"rows that are read again are doubled in: {', '.join(plan.doubled_in)}")
    if plan.operators:
        names = ", ".join(plan.operators)
        common.out.sentence(f"these operators hold state, and take in what is read again a second time: {names}")
    if plan.never:
        common.out.sentence("what is never read is in no sink, now or later")
    if plan.again or plan.never:
        common.out.line()


def _text(pipeline: OpenPipeline, source: str, position: object) -> str:
    from firnline.history.edits.rollback import position_text

    return position_text(pipeline.sources.describe({source: position})[source] if position is not None else None)
