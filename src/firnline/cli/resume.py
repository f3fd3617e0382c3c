"""`firnline resume`: has a paused run go on."""

from __future__ import annotations

from cyclopts import App

from firnline.cli.common import Common, Spec
from firnline.cli.run_control import RunningPipeline

EPILOGUE = """\
Resuming a run that is not paused changes nothing. Only runs of the same user
on this machine are reached.

Output (JSON fields):
  pipeline, run, pid
  status        resumed, or already_running
  epoch, generation
                where it goes on from

Examples:
  firnline resume
  firnline resume flights/firnline.yml --json
"""

app = App(name="resume", help_epilogue=EPILOGUE)


@app.default
def resume(spec: Spec = None, /, *, common: Common = Common()) -> int:
    """Have a paused run on this machine go on."""
    found = RunningPipeline(spec).ask("resume")
    status = "resumed" if found["changed"] else "already_running"
    if common.json:
        facts = {key: found[key] for key in ("pipeline", "run", "pid")}
        common.out.json({**facts, "status": status, "epoch": found["epoch"], "generation": found["generation"]})
    else:
        common.out.line(f"{status.replace('_', ' ')}, after epoch {found['epoch']}")
    return 0
