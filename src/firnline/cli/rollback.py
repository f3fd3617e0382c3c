"""`firnline rollback`: plans a rollback to an earlier epoch, and performs it with `--yes`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from cyclopts.validators import Number

from firnline.cli.common import Accept, Common, Leave, Spec, TakeOver, editing_history, load_pipeline
from firnline.cli.consent import Consent
from firnline.cli.output import Output, count_text, say, size_text
from firnline.cli.table import Column
from firnline.config.units import parse_moment
from firnline.errors import ConfigError
from firnline.names import JOURNAL

if TYPE_CHECKING:
    from firnline.history.edits.rollback import RollbackPlan

EPILOGUE = """\
Table, columns, operators' state and checkpoint go back together, in one Delta
commit that is an epoch of its own. The next run reads the input after the
target epoch again, so that the result equals a run that never went wrong. While
a run is alive, the command is refused (exit code 6): stop the run first, or end
it with --take-over. The command shows the plan, then asks. It starts no Spark
and reads no data file.

The command refuses, with the reason, if files are vacuumed, if the state of the
epoch is incomplete, if the source no longer has the input, if other writers
changed rows since, if the epoch was committed together with later ones, and
below the floor (checkpoint.rollback_window).

Output (JSON fields):
  pipeline, done, from_epoch, to_epoch, new_epoch, version, floor, input_files,
  input_records, input_bytes, quarantined, pending_units, positions_now,
  positions_then, not_undone [...], history_edits [epoch] (undone with the
  epochs), refusals [...]
  state_now, state_then  [{operator, epoch, checkpoint, shards, size_bytes,
         rows, watermark, idle_inputs}]: the operators' snapshots, each with
         its epoch
  schemas [{source, table, version_now, version_then}]: of captured tables
         whose schema was another version then (0: none)
  dead_letters [{sink, now, then}]: how many are open, where that changes
  state_replayed [epoch]: epochs after those snapshots, which the next run
         replays into the state
  sinks  [{name, table, epoch, version_now, version_then, files_removed,
         rows_removed, files_restored, rows_restored, columns_removed,
         properties_changed, others, foreign_commits, left}]

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline rollback --to 41
  firnline rollback flights.yml --to-time 2h --yes
  firnline rollback --to-time 2026-11-16T08:00:00Z --accept DELETE --yes
"""

SINK_COLUMNS = (
    Column("name", "sink", cut="right"),
    Column("version_now", "version", right=True),
    Column("version_then", "back to", right=True),
    Column("files_removed", "files out", right=True, drop=1),
    Column("rows_removed", "rows out", right=True),
    Column("files_restored", "files in", right=True, drop=1),
    Column("rows_restored", "rows in", right=True),
)

app = App(name="rollback", help_epilogue=EPILOGUE)


@app.default
def rollback(
    spec: Spec = None,
    *,
    to: Annotated[
        int | None, Parameter(help="The epoch to roll back to. [default: none]", validator=Number(gte=0))
    ] = None,
    to_time: Annotated[
        str | None, Parameter(help="Roll back to the epoch at a time, or 30m, 1h30m, 1d ago. [default: none]")
    ] = None,
    accept: Accept = (),
    leave: Leave = (),
    take_over: TakeOver = False,
    consent: Consent = Consent(),
    common: Common = Common(),
) -> int:
    """Roll tables and checkpoint back to an earlier epoch, together."""
    if to is not None and to_time is not None:
        raise ConfigError("--to and --to-time exclude each other", hint=f"firnline rollback --to {to}")
    if to is None and to_time is None:
        raise ConfigError("name the target of the rollback, an epoch or a time", hint="firnline rollback --to 41")
    moment = _moment(to_time) if to_time is not None else None
    pipeline = load_pipeline(spec)
    from firnline.history.edits.rollback import Rollback, find_epoch_at, find_position_texts

    epoch = to if to is not None else find_epoch_at(pipeline, moment or datetime.now(UTC))
    edit = Rollback(pipeline, epoch, accept=accept, leave=leave)
    plan = edit.plan()
    if not common.json:
        show_plan(common.out, plan, find_position_texts(pipeline, plan))
        common.out.line()
    elif not consent.decided:
        common.out.json({**plan.to_json(), "done": False})
    plan.check()  # a refusal must not end a run
    if not consent.is_given(f"Roll back to epoch {plan.to_epoch}", common.out):
        return 0
    with editing_history(pipeline, take_over=take_over) as run:
        plan, _ = edit.perform(run, say)
    if common.json:
        common.out.json({**plan.to_json(), "done": True})
    else:
        common.out.line(f"done: epoch {plan.new_epoch} equals epoch {plan.to_epoch}; `firnline run` continues there")
    return 0


def _moment(text: str) -> datetime:
    moment = parse_moment(text)
    if moment is None:
        raise ConfigError(
            f"--to-time {text}: not a time with a zone, nor a time ago", hint="--to-time 2026-11-16T08:00:00Z, or 2h"
        )
    return moment


def show_plan(out: Output, plan: RollbackPlan, positions: Mapping[str, Sequence[str]]) -> None:
    """Show what a rollback does; `positions` has the position of each source now and then, in words."""
    again = f"{count_text(plan.input_files, 'file')}, {count_text(plan.input_records, 'record')}"
    facts: dict[str, Any] = {
        "pipeline": plan.pipeline,
        "epoch": f"{plan.from_epoch} now; epoch {plan.new_epoch} will equal epoch {plan.to_epoch}",
        **{f"source {name}": f"from {now} back to {then}" for name, (now, then) in positions.items()},
        "read again": f"{again}, {size_text(plan.input_bytes)}",
    }
    facts |= _state_facts(plan)
    if plan.quarantined:
        facts["quarantine"] = f"{count_text(plan.quarantined, 'record')} of the epochs undone come again"
    for letters in plan.dead_letters:
        facts[f"dead letters of {letters.sink}"] = f"{letters.now:,} open now; {letters.then:,} then"
    for schema in plan.schemas:
        then_text = f"version {schema.version_then}" if schema.version_then else "none: it is recorded again"
        facts[f"schema of {schema.table}"] = f"version {schema.version_now} now; {then_text} then"
    if plan.pending_units:
        facts["pending"] = f"{count_text(plan.pending_units, 'unit')} dropped"
    out.facts(facts)
    out.line()
    out.table(SINK_COLUMNS, [asdict(sink) for sink in plan.sinks if sink.name != JOURNAL])
    for sink in plan.sinks:
        for label, names in (
            ("columns removed", sink.columns_removed),
            ("properties changed", sink.properties_changed),
            ("other writers that changed rows since", sink.others),
        ):
            if names:
                out.sentence(f"{sink.name}: {label}: {', '.join(names)}")
    for line in plan.not_undone:
        out.sentence(f"not undone: {line}")


def _state_facts(plan: RollbackPlan) -> dict[str, str]:
    """Return one line about the rollback of each operator's state."""
    facts = {}
    before = {one.operator: one for one in plan.state_now}
    for then in plan.state_then:
        now = before.get(then.operator)
        text = f"from epoch {now.epoch} back to epoch {then.epoch}" if now else f"back to epoch {then.epoch}"
        contents = f"{count_text(then.rows, 'row')}, {size_text(then.size_bytes)}"
        mark = f", watermark {then.watermark}" if then.watermark else ""
        facts[f"state of {then.operator}"] = f"{text}: {contents}{mark}"
    if plan.state_replayed:
        facts["replayed"] = f"{count_text(len(plan.state_replayed), 'epoch')} since those snapshots"
    return facts
