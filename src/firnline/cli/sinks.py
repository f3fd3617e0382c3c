"""`firnline sinks`: lists the sinks that a pipeline delivers to; copies one anew, lets one go on, forgets one."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from firnline.cli.common import Common, Spec, TakeOver, editing_history, load_pipeline
from firnline.cli.consent import Consent
from firnline.cli.output import count_text, letters_text, say, size_text
from firnline.cli.table import Column
from firnline.types import Json

if TYPE_CHECKING:
    from firnline.history.edits.sinks import Action, SinkPlan

EPILOGUE = """\
A Delta table or the journal decides; all other sinks are followers: they get
every decided epoch from the outbox, and keep their own head. The pipeline
remembers each by name and target. A follower that lags beyond
outbox.max_bytes is set aside: it gets nothing until `resync` or `resume`.

Output of `list` (JSON: pipeline, epoch, sinks [...] with these fields):
  name, type, location, required, decides, epoch (the newest that it holds),
  last_known_epoch (of a sink that cannot be read: what the newest checkpoint
  knows, and the lag with it), epochs_behind, bytes_behind (null: not known),
  parts (the tables of a sink with a template; null for others),
  set_aside (the reason, or null), filled_from (while it gets what was before
  it was added: the beginning, or the table that is copied), error (why it
  cannot be read or written), next_try_at (while a run is alive), delivery,
  dead_letters (how many are not answered; null: a file of them is damaged),
  state (decides, in sync, catching up, waits for a run, is filled from ...,
  fails, cannot be read, set aside)

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline sinks list
  firnline sinks resync events --from orders --yes
"""
LIST_EPILOGUE = (
    EPILOGUE.partition("Examples:")[0]
    + """\
Examples:
  firnline sinks list
  firnline sinks list pipeline.yml --json
"""
)
EDIT_EPILOGUE = """\
The command is an epoch that reads nothing: a checkpoint remembers it. While a
run is alive, the command is refused (exit code 6): stop the run first, or end
it with --take-over. The audit trail records it. The command shows the plan,
then asks. Starts no Spark.

Output (JSON fields):
  pipeline, action, sink, target, epoch, held, set_aside, copy_from,
  removes_rows (the copy takes the place of the rows that the sink wrote),
  reads (captured tables that the next run reads again), loses (those without a
  key), empties, again (other sinks that get their rows), rows_dropped (of a
  resume),
  new_epoch, rows (copied into the outbox), done

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline sinks {verb} events --dry-run
  firnline sinks {verb} events pipeline.yml --yes
"""
COLUMNS = (
    Column("name"),
    Column("type", drop=2),
    Column("holds", "epoch", right=True),
    Column("lacks", "behind", right=True),
    Column("waiting", right=True, drop=1),
    Column("tables", right=True, drop=2),
    Column("state", cut="right"),
    Column("location", cut="left", drop=3),
)

app = App(name="sinks", help_epilogue=EPILOGUE, help="List the sinks of a pipeline; copy, resume or forget one.")

SinkName = Annotated[str, Parameter(help="The name of the sink.")]


@app.command(name="list", help_epilogue=LIST_EPILOGUE)
def list_sinks(spec: Spec = None, *, common: Common = Common()) -> int:
    """List the sinks with their heads."""
    pipeline = load_pipeline(spec)
    from firnline.history.sinks import load_sinks

    epoch, rows = load_sinks(pipeline)
    show_sinks(pipeline.options.name, epoch, rows, common)
    return 0


def show_sinks(pipeline: str, epoch: int, rows: list[dict[str, Json]], common: Common) -> None:
    """Show the sinks with their heads."""
    if common.json:
        common.out.json({"pipeline": pipeline, "epoch": epoch, "sinks": rows})
        return
    for row in rows:
        is_read = row["epoch"] is not None  # otherwise the newest checkpoint says what it held, or more by now
        row["holds"] = row["epoch"] if is_read else _bound("≥", row["last_known_epoch"])
        row["lacks"] = row["epochs_behind"] if is_read else _bound("≤", row["epochs_behind"])
        row["waiting"] = size_text(row["bytes_behind"]) if row["bytes_behind"] else ""
        row["tables"] = None if row["parts"] is None else len(row["parts"])
    common.out.table(COLUMNS, rows)
    for row in rows:
        if reason := row["set_aside"] or row["error"]:
            common.out.sentence(f"{row['name']}: {reason}")
        if row["dead_letters"] != 0:
            common.out.sentence(f"{row['name']}: {letters_text(row['dead_letters'])}: firnline dead-letters list")


def _bound(sign: str, number: object) -> str | None:
    return None if number is None else f"{sign} {number}"


@app.command(help_epilogue=EDIT_EPILOGUE.replace("{verb}", "resync"))
def resync(
    sink: SinkName,
    spec: Spec = None,
    *,
    from_: Annotated[
        str, Parameter(name="--from", help="The Delta table to copy; by default the one with the same input.")
    ] = "",
    take_over: TakeOver = False,
    consent: Consent = Consent(),
    common: Common = Common(),
) -> int:
    """Copy all rows of a Delta table of the pipeline into a sink, which then gets every later epoch.

    If no table has the sink's input and it reads captured tables, such as a template `lake/{table}`, the next run reads
    these again, emptied first where all sinks can be.

    An appended PostgreSQL table loses the rows that this sink wrote before, in the transaction of the copy. In any
    other sink the rows stay: one that appends gets them again. Empty its target first if they should not be there
    twice.
    """
    return _edit("resync", sink, spec, take_over, consent, common, from_)


@app.command(help_epilogue=EDIT_EPILOGUE.replace("{verb}", "resume"))
def resume(
    sink: SinkName,
    spec: Spec = None,
    *,
    accept_gap: Annotated[bool, Parameter(help="The sink never gets what it lacks.", negative="")] = False,
    take_over: TakeOver = False,
    consent: Consent = Consent(),
    common: Common = Common(),
) -> int:
    """Let a sink go on with the next epoch, without what it lacks."""
    from firnline.errors import ConfigError

    if not accept_gap:
        raise ConfigError(
            f"sink {sink!r} would never get the epochs that it lacks",
            hint=f"If it may: firnline sinks resume {sink} --accept-gap. To copy it: firnline sinks resync {sink}",
        )
    return _edit("resume", sink, spec, take_over, consent, common)


@app.command(help_epilogue=EDIT_EPILOGUE.replace("{verb}", "forget"))
def forget(
    sink: SinkName,
    spec: Spec = None,
    *,
    take_over: TakeOver = False,
    consent: Consent = Consent(),
    common: Common = Common(),
) -> int:
    """Forget a sink that the pipeline no longer delivers to; its target stays as it is."""
    return _edit("forget", sink, spec, take_over, consent, common)


def _edit(
    action: Action, sink: str, spec: str | None, take_over: bool, consent: Consent, common: Common, copy_from: str = ""
) -> int:
    pipeline = load_pipeline(spec)
    from firnline.history.edits.sinks import SinkEdit

    edit = SinkEdit(pipeline, action, sink, copy_from)
    plan = edit.plan()
    if not common.json:
        show_plan(common, plan)
    elif not consent.decided:
        common.out.json({**asdict(plan), "done": False})
    if not consent.is_given(f"{action.capitalize()} sink {sink}", common.out):
        return 0
    with editing_history(pipeline, take_over=take_over) as run:
        plan, _ = edit.perform(run, say)
    if common.json:
        common.out.json({**asdict(plan), "done": True})
    else:
        common.out.line(last_line(plan))
    return 0


def show_plan(common: Common, plan: SinkPlan) -> None:
    """Show what an edit does to a sink."""
    facts: dict[str, object] = {
        "pipeline": plan.pipeline,
        "sink": plan.sink,
        "target": plan.target,
        "epoch": plan.epoch,
        "sink holds epoch": plan.held or "none",
    }
    if plan.set_aside:
        facts["set aside"] = plan.set_aside
    if plan.copy_from:
        facts["copied from"] = plan.copy_from
        facts["rows that it holds"] = "removed: the copy takes their place" if plan.removes_rows else "stay"
    if plan.reads:
        facts["read again"] = ", ".join(plan.reads) + (", emptied first" if plan.empties else "")
    if plan.loses:
        facts["not read again, without a key"] = f"{', '.join(plan.loses)}: what it lacks of them is lost"
    if plan.reads and not plan.empties:
        facts["rows deleted meanwhile"] = "stay: a sink cannot empty its target"
    if plan.again:
        facts["get these rows again, too"] = ", ".join(plan.again)
    if plan.action == "resume":
        facts["dropped for good"] = _dropped(plan)
        facts["to have it instead"] = f"firnline sinks resync {plan.sink}"
    common.out.facts(facts)
    common.out.line()


def _dropped(plan: SinkPlan) -> str:
    """Return what a sink never gets: epochs and rows."""
    if not plan.epochs_skipped:
        return "nothing: it holds every epoch"
    first, last = plan.held + 1, plan.epoch
    epochs = f"epoch {first}" if first == last else f"epochs {first} to {last}"
    rows = "rows not known" if plan.rows_dropped is None else count_text(plan.rows_dropped, "row")
    return f"{epochs} ({rows})"


def last_line(plan: SinkPlan) -> str:
    """Say what was done."""
    if plan.action == "forget":
        return f"done: since epoch {plan.new_epoch} the pipeline no longer knows sink {plan.sink}"
    if plan.action == "resume":
        lost = f"; dropped for good: {_dropped(plan)}" if plan.epochs_skipped else ""
        way = f". To have it after all: firnline sinks resync {plan.sink}" if plan.epochs_skipped else ""
        return f"done: sink {plan.sink} goes on after epoch {plan.new_epoch}{lost}{way}"
    if plan.reads or plan.loses:
        return f"done: sink {plan.sink} goes on; the next run reads {', '.join(plan.reads) or 'no table'} again for it"
    return f"done: {count_text(plan.rows or 0, 'row')} wait for sink {plan.sink}; the next run delivers them"
