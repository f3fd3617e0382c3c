"""`firnline pause`: has the run on this machine plan nothing more."""

from __future__ import annotations

from cyclopts import App

from firnline.cli.common import Common, Spec
from firnline.cli.run_control import RunningPipeline, Timeout

EPILOGUE = """\
The run plans nothing more; what is in flight is committed. The command waits
for that, and tells the epoch at which the pipeline stands. A paused run stays
paused, and healthy, until `firnline resume` or `firnline stop`. Pausing a
paused run changes nothing. Only runs of the same user on this machine are
reached.

Output (JSON fields):
  pipeline, run, pid
  status        paused, or already_paused
  epoch, generation
                where it stands

Examples:
  firnline pause
  firnline pause flights/firnline.yml --timeout 60 --json | jq .epoch
"""

app = App(name="pause", help_epilogue=EPILOGUE)


@app.default
def pause(spec: Spec = None, /, *, timeout: Timeout = 300.0, common: Common = Common()) -> int:
    """Have the run on this machine plan nothing more, and wait until nothing is in flight."""
    running = RunningPipeline(spec)
    changed = running.ask("pause")["changed"]
    found = running.ask_until(lambda answer: answer["state"] not in ("starting", "pausing"), "status", timeout)
    status = found["state"] if found["state"] != "paused" else "paused" if changed else "already_paused"
    if common.json:
        facts = {key: found[key] for key in ("pipeline", "run", "pid")}
        common.out.json({**facts, "status": status, "epoch": found["epoch"], "generation": found["generation"]})
    else:
        common.out.line(f"{status.replace('_', ' ')} at epoch {found['epoch']}")
    return 0
