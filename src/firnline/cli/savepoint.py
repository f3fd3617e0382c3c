"""`firnline savepoint`: creates, lists and disposes of savepoints."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from firnline.cli.common import Common, Flag, Spec, load_pipeline
from firnline.cli.consent import Consent
from firnline.cli.control import RunningPipeline
from firnline.cli.output import count_text, say, size_text
from firnline.cli.table import Column
from firnline.errors import ControlError

if TYPE_CHECKING:
    from firnline.history.savepoints.catalog import Disposed
    from firnline.run.open_pipeline import OpenPipeline
    from firnline.types import Json

CHECKPOINTS_ASKED = 3  # of a busy run, which may be an epoch further each time
CHECKPOINT_SECONDS = 60.0

COLUMNS = (
    Column("id"),
    Column("epoch", right=True),
    Column("created_at", time=True),
    Column("state", drop=1),
    Column("copied", drop=3),
    Column("size", drop=2),
    Column("path", cut="left"),
)

EPILOGUE = """\
A savepoint is a folder of yours that holds one epoch: its checkpoint, its
ledger and, with --copy, the data files and the operators' state. Only `dispose`
deletes a savepoint. You can move or copy it, and restore it into the same
tables or others with `firnline run --from-savepoint PATH`.

Examples:
  firnline savepoint create --copy --path s3://backup/flights-before-upgrade
  firnline savepoint list
  firnline savepoint dispose 3f2a91c07be4d815 --yes
"""
CREATE_EPILOGUE = """\
Saves the newest epoch that every table holds, also while the pipeline runs.
Starts no Spark. Without --copy the savepoint is small and pins the files that
it needs: `firnline gc` and `firnline compact` keep them, but a VACUUM of
another tool deletes them, and so does the loss of the table. With --copy it
needs only its own folder.

The savepoint also pins or copies operators' state. If state checkpoints are
less frequent than epochs (checkpoint.trigger), the command first asks a run on
this machine for one. Without a run, the run that restores the savepoint replays
the epochs since the last state checkpoint: the command shows how many. The
source must then still have their input, with --copy too.

Output (JSON fields):
  id, pipeline, epoch, created_at, path, copied, files, rows, size_bytes,
  state_size_bytes, state_replayed [epoch] (epochs that a restore replays)

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline savepoint create
  firnline savepoint create flights.yml --copy --path /backup/flights-1
"""
LIST_EPILOGUE = """\
Reads the pins in the deciding table. A savepoint whose folder was moved is
`missing`; you can still restore it from its new path. `incomplete`: left by a
killed `create`; dispose of it. `damaged`: its manifest or its pin is damaged;
`firnline gc` stops at a damaged pin. Dispose of such a savepoint by its path.

Output (JSON: pipeline, savepoints [...] with these fields):
  id, epoch, created_at, path, copied, size_bytes (of the data files),
  state (complete, incomplete, missing, damaged), state_size_bytes (of the
  operators' state)

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline savepoint list
  firnline savepoint list --json | jq -r '.savepoints[-1].path'
"""
DISPOSE_EPILOGUE = """\
Deletes exactly the files that the savepoint's manifest names, and its pins; all
other files in the folder stay. Without --yes it only shows what would be
deleted.

Output (JSON fields):
  id, path, files, pins, pins_kept (the savepoint also lies where it was made,
  and needs them), dry_run

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline savepoint dispose 3f2a91c07be4d815
  firnline savepoint dispose /backup/flights-1 flights.yml --yes
"""

app = App(name="savepoint", help_epilogue=EPILOGUE, help="Create, list and dispose of savepoints.")


@app.command(help_epilogue=CREATE_EPILOGUE)
def create(
    spec: Spec = None,
    *,
    path: Annotated[
        str | None, Parameter(help="A new folder or URI. [default: savepoints/ beside the checkpoint store]")
    ] = None,
    copy: Annotated[bool, Flag, Parameter(help="Copy the data files and the operators' state, too.")] = False,
    common: Common = Common(),
) -> int:
    """Save the newest epoch."""
    pipeline = load_pipeline(spec)
    from firnline.cli.long_task import CopyProgress, long_task
    from firnline.history.savepoints.create import create_savepoint, describe_savepoint

    _ask_for_checkpoint(pipeline, spec)
    options = dict(pipeline.options.home.storage_options)
    progress = CopyProgress(say)
    with long_task() as task:
        try:
            savepoint, location = create_savepoint(
                pipeline,
                path,
                copy=copy,
                run=pipeline.ids.new(),
                storage_options=options,
                progress=progress,
                stopping=task.stopping,
            )
        except KeyboardInterrupt:
            say("stopped; `firnline savepoint list` shows what is left to dispose of")
            raise
    show_created(common, describe_savepoint(savepoint, location))
    return 0


def show_created(common: Common, facts: dict[str, Json]) -> None:
    """Show a savepoint that was made, as `describe_savepoint` describes it."""
    if common.json:
        common.out.json({name: value for name, value in facts.items() if name != "has_state"})
        return
    contents = f"{count_text(facts['files'], 'file')}, {size_text(facts['size_bytes'])}"
    if facts["has_state"]:
        contents += f" and {size_text(facts['state_size_bytes'])} of state"
    how = "copied" if facts["copied"] else "pinned"
    common.out.line(f"savepoint {facts['id']} of epoch {facts['epoch']}: {contents} {how}")
    if facts["state_replayed"]:
        since = count_text(len(facts["state_replayed"]), "epoch")
        common.out.line(f"a restore replays {since}: keep the input from epoch {facts['state_replayed'][0]} on")
    common.out.line(facts["path"])


def _ask_for_checkpoint(pipeline: OpenPipeline, spec: str | None) -> None:
    """Ask a run on this machine for a state checkpoint if the newest one is older than the newest epoch."""
    from firnline.history.savepoints.state import is_behind

    for _ in range(CHECKPOINTS_ASKED):
        if not is_behind(pipeline):
            return
        running = RunningPipeline(spec)
        try:
            ticket = running.ask("checkpoint")["ticket"]
            running.ask_until(lambda answer: bool(answer["done"]), "checkpoint", CHECKPOINT_SECONDS, ticket=ticket)
        except ControlError:
            return  # there is no run, or it does not answer: a restore replays the epochs since


@app.command(name="list", help_epilogue=LIST_EPILOGUE)
def list_(spec: Spec = None, *, common: Common = Common()) -> int:
    """List the savepoints of the pipeline."""
    pipeline = load_pipeline(spec)
    from firnline.history.savepoints.catalog import list_savepoints

    savepoints = list_savepoints(pipeline, dict(pipeline.options.home.storage_options))
    show_savepoints(pipeline.options.name, [asdict(one) for one in savepoints], common)
    return 0


def show_savepoints(pipeline: str, savepoints: list[dict[str, Json]], common: Common) -> None:
    """Show the savepoints of a pipeline."""
    if common.json:
        common.out.json({"pipeline": pipeline, "savepoints": savepoints})
    elif savepoints:
        rows = [
            {**one, "created_at": one["created_at"] or None, "size": size_text(one["size_bytes"])} for one in savepoints
        ]
        common.out.table(COLUMNS, rows)
    else:
        common.out.line("no savepoints; `firnline savepoint create` makes one")


@app.command(help_epilogue=DISPOSE_EPILOGUE)
def dispose(
    savepoint: Annotated[str, Parameter(help="Its id, as `list` shows it, or its path.")],
    /,
    spec: Spec = None,
    *,
    consent: Consent = Consent(),
    common: Common = Common(),
) -> int:
    """Delete a savepoint."""
    pipeline = load_pipeline(spec)
    from firnline.history.savepoints.catalog import dispose_savepoint

    options = dict(pipeline.options.home.storage_options)
    if not consent.decided:
        plan = dispose_savepoint(pipeline, savepoint, dry_run=True, run=pipeline.ids.new(), storage_options=options)
        show_disposed(common, plan)
        if not consent.is_given(f"Delete savepoint {plan.id}", common.out):
            return 0
    report = dispose_savepoint(pipeline, savepoint, dry_run=False, run=pipeline.ids.new(), storage_options=options)
    show_disposed(common, report)
    return 0


def show_disposed(common: Common, report: Disposed) -> None:
    """Show what of a savepoint was deleted, or would be."""
    if common.json:
        common.out.json(asdict(report))
        return
    verb = "would delete" if report.dry_run else "deleted"
    common.out.line(f"{verb} savepoint {report.id}: {count_text(report.files, 'file')} in {report.path}")
    if report.pins_kept:
        common.out.line("its pins stay: the savepoint also exists at its original path")
