"""`firnline savepoint`: makes, lists and disposes of savepoints."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from firnline.cli.common import Common, Flag, Spec, load_pipeline
from firnline.cli.control import RunningPipeline
from firnline.cli.output import Column, count_text, safe, short_time, size_text
from firnline.errors import ControlError

if TYPE_CHECKING:
    from firnline.run.open_pipeline import OpenPipeline

CHECKPOINTS_ASKED = 3  # of a busy run, which may be an epoch further each time
CHECKPOINT_SECONDS = 60.0

COLUMNS = (
    Column("id"),
    Column("epoch", right=True),
    Column("created_at"),
    Column("state"),
    Column("copied"),
    Column("size"),
    Column("path"),
)

EPILOGUE = """\
A savepoint is a folder of yours that holds one epoch: its checkpoint, its
ledger and, with --copy, the data files and the operators' state. Firnline never
deletes one but by `dispose`. It may be moved or copied elsewhere, and is
restored, into the same tables or others, by `firnline run --from-savepoint
PATH`.

Examples:
  firnline savepoint create --copy --path s3://backup/flights-before-upgrade
  firnline savepoint list
  firnline savepoint dispose 3f2a91c07be4d815 --yes
"""
CREATE_EPILOGUE = """\
Saves the newest epoch that every table holds; beside a running pipeline, too.
Starts no Spark. Without --copy the savepoint is small and pins the files that
it needs: `firnline gc` and `firnline compact` leave them alone, but a VACUUM of
another tool, or the loss of the table, does not. With --copy it needs nothing
but its own folder.

Operators' state is pinned or copied with it. Where checkpoints of state are
made less often than epochs (checkpoint.trigger), a run on this machine is asked
for one first. Without a run, the epochs since the last one are folded again by
the run that restores the savepoint: the command tells how many. The source must
still have their input then, with --copy too.

Output (JSON fields):
  id, pipeline, epoch, created_at, path, copied, files, rows, size_bytes,
  state_size_bytes, state_replayed [epoch] (epochs to be folded again)

Examples:
  firnline savepoint create
  firnline savepoint create flights.yml --copy --path /backup/flights-1
"""
LIST_EPILOGUE = """\
Reads the pins in the deciding table. A folder that was moved is `missing` where
it was made; it can still be restored from where it lies now. `incomplete` is
what a killed `create` left: dispose of it. `damaged`: its manifest, or its pin,
of which only the id is known; `firnline gc` stops at such a pin. Dispose of the
savepoint by its path.

Output (JSON: pipeline, savepoints [...] with these fields):
  id, epoch, created_at, path, copied, size_bytes (of the data files),
  state (complete, incomplete, missing, damaged), state_size_bytes (of the
  operators' state)

Examples:
  firnline savepoint list
  firnline savepoint list --json | jq -r '.savepoints[-1].path'
"""
DISPOSE_EPILOGUE = """\
Deletes exactly what the savepoint's manifest names, and its pins; anything else
in that folder stays. Without --yes it only shows what would go.

Output (JSON fields):
  id, path, files, pins, pins_kept (the savepoint also lies where it was made,
  and needs them), dry_run

Examples:
  firnline savepoint dispose 3f2a91c07be4d815
  firnline savepoint dispose /backup/flights-1 flights.yml --yes
"""

app = App(name="savepoint", help_epilogue=EPILOGUE, help="Make, list and dispose of savepoints.")


@app.command(help_epilogue=CREATE_EPILOGUE)
def create(
    spec: Spec = None,
    /,
    *,
    path: Annotated[
        str | None, Parameter(help="A new folder or URI. [default: savepoints/ beside the checkpoint store]")
    ] = None,
    copy: Annotated[bool, Flag, Parameter(help="Copy the data files and the operators' state, too.")] = False,
    common: Common = Common(),
) -> int:
    """Save the newest epoch."""
    pipeline = load_pipeline(spec)
    from firnline.cli.long_task import working
    from firnline.cli.start_over import CopyProgress
    from firnline.history.savepoints.create import create_savepoint

    _ask_for_checkpoint(pipeline, spec)
    options = dict(pipeline.options.deciding.storage_options)
    progress = CopyProgress(lambda text: print(safe(text), file=sys.stderr))
    with working() as work:
        try:
            made, place = create_savepoint(
                pipeline,
                path,
                copy=copy,
                run=pipeline.ids.new(),
                storage_options=options,
                progress=progress,
                stopping=work.stopping,
            )
        except KeyboardInterrupt:
            print("stopped; `firnline savepoint list` shows what is left to dispose of", file=sys.stderr)
            raise
    files = [file for sink in made.sinks.values() for file in sink.files]
    facts = {
        "id": made.id,
        "pipeline": made.pipeline,
        "epoch": made.epoch,
        "created_at": made.created_at,
        "path": place,
        "copied": made.copied,
        "files": len(files),
        "rows": sum(file.rows or 0 for file in files),
        "size_bytes": made.size_bytes,
        "state_size_bytes": made.state_size_bytes,
        "state_replayed": made.state_replayed,
    }
    if common.json:
        common.out.json(facts)
    else:
        held = f"{count_text(len(files), 'file')}, {size_text(made.size_bytes)}"
        if made.state:
            held += f" and {size_text(made.state_size_bytes)} of state"
        common.out.line(f"savepoint {made.id} of epoch {made.epoch}: {held} {'copied' if copy else 'pinned'}")
        if made.state_replayed:
            since = count_text(len(made.state_replayed), "epoch")
            common.out.line(f"restoring it folds {since} again: keep the input from epoch {made.state_replayed[0]} on")
        common.out.line(place)
    return 0


def _ask_for_checkpoint(pipeline: OpenPipeline, spec: str | None) -> None:
    """Have a run on this machine make a checkpoint of state, if the newest one is older than the newest epoch."""
    from firnline.history.savepoints.state import is_behind

    for _ in range(CHECKPOINTS_ASKED):
        if not is_behind(pipeline):
            return
        running = RunningPipeline(spec)
        try:
            ticket = running.ask("checkpoint")["ticket"]
            running.ask_until(lambda answer: bool(answer["done"]), "checkpoint", CHECKPOINT_SECONDS, ticket=ticket)
        except ControlError:
            return  # there is no run, or it does not answer: the epochs since are folded again


@app.command(name="list", help_epilogue=LIST_EPILOGUE)
def list_(spec: Spec = None, /, *, common: Common = Common()) -> int:
    """List the savepoints of the pipeline."""
    pipeline = load_pipeline(spec)
    from firnline.history.savepoints.catalog import list_savepoints

    found = list_savepoints(pipeline, dict(pipeline.options.deciding.storage_options))
    if common.json:
        common.out.json({"pipeline": pipeline.options.name, "savepoints": [asdict(one) for one in found]})
    elif found:
        rows = [
            {**asdict(one), "created_at": short_time(one.created_at or None), "size": size_text(one.size_bytes)}
            for one in found
        ]
        common.out.table(COLUMNS, rows)
    else:
        common.out.line("no savepoints; `firnline savepoint create` makes one")
    return 0


@app.command(help_epilogue=DISPOSE_EPILOGUE)
def dispose(
    savepoint: Annotated[str, Parameter(help="Its id, as `list` shows it, or its path.")],
    spec: Spec = None,
    /,
    *,
    dry_run: Annotated[bool, Flag, Parameter(help="Only show what would go, even with --yes.")] = False,
    yes: Annotated[bool, Flag, Parameter(help="Really delete; without it nothing is deleted.")] = False,
    common: Common = Common(),
) -> int:
    """Delete a savepoint."""
    pipeline = load_pipeline(spec)
    from firnline.history.savepoints.catalog import dispose_savepoint

    options = dict(pipeline.options.deciding.storage_options)
    only_look = dry_run or not yes
    done = dispose_savepoint(pipeline, savepoint, dry_run=only_look, run=pipeline.ids.new(), storage_options=options)
    if common.json:
        common.out.json(asdict(done))
        return 0
    verb = "would delete" if only_look else "deleted"
    common.out.line(f"{verb} savepoint {done.id}: {count_text(done.files, 'file')} in {done.path}")
    if done.pins_kept:
        common.out.line("its pins stay: the savepoint also lies where it was made")
    if only_look and not dry_run:
        common.out.line("add --yes to delete it")
    return 0
