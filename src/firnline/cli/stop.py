"""`firnline stop`: has the run on this machine end cleanly."""

from __future__ import annotations

from cyclopts import App

from firnline.cli.common import Common, Spec
from firnline.cli.run_control import RunningPipeline, Timeout

EPILOGUE = """\
Like the first SIGTERM: the run commits the epochs in flight and ends with exit
code 0. The command waits until its process is gone, then reads the newest
epoch from the table. Only runs of the same user on this machine are reached.

Output (JSON fields):
  pipeline, run, pid
  status        stopped
  epoch, generation
                what the table holds now

Examples:
  firnline stop
  firnline stop flights/firnline.yml --timeout 60
"""

app = App(name="stop", help_epilogue=EPILOGUE)


@app.default
def stop(spec: Spec = None, /, *, timeout: Timeout = 300.0, common: Common = Common()) -> int:
    """Have the run on this machine end cleanly, and wait until it is gone."""
    running = RunningPipeline(spec)
    found = running.ask("status")
    running.wait_for_end(found["pid"], lambda: running.ask("stop"), timeout)
    from firnline.run.open_pipeline import open_pipeline

    held = open_pipeline(running.options).load()
    if common.json:
        facts = {key: found[key] for key in ("pipeline", "run", "pid")}
        common.out.json({**facts, "status": "stopped", "epoch": held.epoch, "generation": held.generation})
    else:
        common.out.line(f"stopped after epoch {held.epoch}")
    return 0
