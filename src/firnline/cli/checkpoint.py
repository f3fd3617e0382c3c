"""`firnline checkpoint`: has the run on this machine look for input and commit it now."""

from __future__ import annotations

from cyclopts import App

from firnline.cli.common import Common, Spec
from firnline.cli.run_control import RunningPipeline, Timeout
from firnline.errors import ControlError, NotRunningError

EPILOGUE = """\
The run looks for input at once instead of waiting for its next poll. When it
finds some, the next epoch takes it, up to the limits of `batch`; the command
waits until that is committed and recorded. When it finds none, or is paused,
the command tells the epoch at which the pipeline stands. Only runs of the same
user on this machine are reached.

Output (JSON fields):
  pipeline, run, pid
  status        committed, or nothing_new
  epoch, id, generation
                the checkpoint, as `firnline checkpoints` lists it
  committed     whether an epoch was committed since the command came

Examples:
  firnline checkpoint
  firnline checkpoint flights/firnline.yml --json | jq -r .id
"""

app = App(name="checkpoint", help_epilogue=EPILOGUE)


@app.default
def checkpoint(spec: Spec = None, /, *, timeout: Timeout = 300.0, common: Common = Common()) -> int:
    """Have the run on this machine take a checkpoint now, and wait for it."""
    running = RunningPipeline(spec)
    ticket = running.ask("checkpoint")["ticket"]
    try:
        found = running.ask_until(lambda answer: bool(answer["done"]), "checkpoint", timeout, ticket=ticket)
    except NotRunningError as error:
        raise ControlError(
            f"the run of {running.options.name!r} ended before it took the checkpoint",
            hint="firnline checkpoints lists what it committed.",
        ) from error
    status = "committed" if found["committed"] else "nothing_new"
    if common.json:
        facts = {key: found[key] for key in ("pipeline", "run", "pid")}
        result = {key: found[key] for key in ("epoch", "id", "generation", "committed")}
        common.out.json({**facts, "status": status, **result})
    elif found["committed"]:
        common.out.line(f"committed epoch {found['epoch']} (checkpoint {found['id']})")
    else:
        common.out.line(f"nothing new; the pipeline stands at epoch {found['epoch']}")
    return 0
