"""`firnline dead-letters`: lists rows that a sink refused, delivers them once more, drops them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number

from firnline.cli.common import Common, Spec, TakeOver, editing_history, load_pipeline
from firnline.cli.consent import Consent
from firnline.cli.output import count_text, say
from firnline.cli.table import Column
from firnline.types import Json

if TYPE_CHECKING:
    from firnline.sinks.dead_letters import Answer

EPILOGUE = """\
A row that a sink can never hold becomes a dead letter if the sink has
`on_bad_row: dead_letter`: the row waits in the pipeline's home with the reason,
and the sink goes on without it. `list` starts no Spark and writes nothing.

Output of `list` (JSON: pipeline, more, dead_letters [...] with these fields):
  sink, epoch, row (its number in the epoch), id (of the event; null if the
  spec no longer has the sink), reason, values

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline dead-letters list --sink events
  firnline dead-letters retry --sink events --yes
  firnline dead-letters drop --epoch 12 --reason 'too large' --yes
"""
LIST_EPILOGUE = (
    EPILOGUE.partition("Examples:")[0]
    + """\
Examples:
  firnline dead-letters list --sink events
  firnline dead-letters list --reason 'too large' --limit 0 --json
"""
)
EDIT_EPILOGUE = """\
The command is an epoch that reads nothing: a checkpoint remembers it, so that
each letter is answered once, whatever is killed and however often the command
runs. While a run is alive, the command is refused (exit code 6): stop the run
first, or end it with --take-over. The audit trail records it. The command shows
the plan, then asks. Starts no Spark.

Output (JSON fields):
  pipeline, action, epoch, letters, plan [{sink, epoch, reason, letters}],
  new_epoch, done

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline dead-letters {verb} --sink events --dry-run
  firnline dead-letters {verb} pipeline.yml --epoch 12 --yes
"""
COLUMNS = (
    Column("sink"),
    Column("epoch", right=True),
    Column("row", right=True),
    Column("reason", cut="right"),
    Column("values", cut="right", drop=1),
)
PLAN_COLUMNS = (
    Column("sink"),
    Column("epoch", right=True),
    Column("letters", right=True),
    Column("reason", cut="right"),
)

app = App(
    name="dead-letters",
    help_epilogue=EPILOGUE,
    help="List rows that a sink refused; deliver them once more or drop them.",
)

SinkName = Annotated[str | None, Parameter(help="Only letters of this sink. [default: all]")]
Epoch = Annotated[int | None, Parameter(help="Only letters of this epoch. [default: all]")]
Reason = Annotated[str | None, Parameter(help="Only letters with this text in their reason. [default: all]")]


@app.command(name="list", help_epilogue=LIST_EPILOGUE)
def list_letters(
    spec: Spec = None,
    *,
    sink: SinkName = None,
    epoch: Epoch = None,
    reason: Reason = None,
    limit: Annotated[int, Parameter(help="Maximum number to show; 0 shows all.", validator=Number(gte=0))] = 20,
    common: Common = Common(),
) -> int:
    """List the dead letters that are not answered, by sink, epoch and row."""
    pipeline = load_pipeline(spec)
    from firnline.history.dead_letters import LetterFilter, load_dead_letters

    rows = load_dead_letters(pipeline, LetterFilter(sink, epoch, reason))
    show_letters(pipeline.options.name, rows, limit, common)
    return 0


def show_letters(pipeline: str, rows: list[dict[str, Json]], limit: int, common: Common) -> None:
    """Show dead letters, at most `limit` of them; 0 shows all."""
    shown = rows[:limit] if limit else rows
    if common.json:
        more = len(shown) < len(rows)
        common.out.json({"pipeline": pipeline, "more": more, "dead_letters": shown})
        return
    if not rows:
        common.out.line("no dead letters")
        return
    common.out.table(COLUMNS, [{**row, "values": _text(row["values"])} for row in shown])
    if len(shown) < len(rows):
        common.out.line(f"{len(rows) - len(shown)} more: add --limit 0")


@app.command(help_epilogue=EDIT_EPILOGUE.replace("{verb}", "retry"))
def retry(
    spec: Spec = None,
    *,
    sink: SinkName = None,
    epoch: Epoch = None,
    reason: Reason = None,
    take_over: TakeOver = False,
    consent: Consent = Consent(),
    common: Common = Common(),
) -> int:
    """Deliver dead letters once more, in their order, exactly once; the next run delivers them.

    Correct the target or the sink's settings first: a row that is refused again becomes a new dead letter. A sink that
    upserts gets the old values after newer ones of the same key.
    """
    return _answer("retry", spec, (sink, epoch, reason), take_over, consent, common)


@app.command(help_epilogue=EDIT_EPILOGUE.replace("{verb}", "drop"))
def drop(
    spec: Spec = None,
    *,
    sink: SinkName = None,
    epoch: Epoch = None,
    reason: Reason = None,
    take_over: TakeOver = False,
    consent: Consent = Consent(),
    common: Common = Common(),
) -> int:
    """Drop dead letters: the sink never gets them, and their values are deleted."""
    return _answer("drop", spec, (sink, epoch, reason), take_over, consent, common)


def _answer(
    action: Answer,
    spec: str | None,
    wanted: tuple[str | None, int | None, str | None],
    take_over: bool,
    consent: Consent,
    common: Common,
) -> int:
    pipeline = load_pipeline(spec)
    from firnline.history.dead_letters import LetterFilter
    from firnline.history.edits.dead_letters import LetterEdit

    edit = LetterEdit(pipeline, action, LetterFilter(*wanted))
    plan = edit.plan()
    if not plan.letters:
        common.out.json({**asdict(plan), "done": False}) if common.json else common.out.line("no dead letters")
        return 0
    if not common.json:
        common.out.table(PLAN_COLUMNS, plan.plan)
        common.out.line()
    elif not consent.decided:
        common.out.json({**asdict(plan), "done": False})
    if not consent.is_given(f"{action.capitalize()} {count_text(plan.letters, 'dead letter')}", common.out):
        return 0
    with editing_history(pipeline, take_over=take_over) as run:
        plan, _ = edit.perform(run, say)
    if common.json:
        common.out.json({**asdict(plan), "done": True})
    elif action == "retry":
        common.out.line(
            f"done: {count_text(plan.letters, 'row')} wait in epoch {plan.new_epoch}; the next run delivers them"
        )
    else:
        common.out.line(f"done: {count_text(plan.letters, 'dead letter')} dropped by epoch {plan.new_epoch}")
    return 0


def _text(values: Mapping[str, Json] | None) -> str:
    if values is None:  # of a server, to a token that may not see them
        return "***"
    return ", ".join(f"{name}={value}" for name, value in values.items())
