"""`firnline status`: where the pipeline stands, read from its table."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from cyclopts import App

from firnline.cli.common import Common, Spec, load_parts
from firnline.cli.output import Column, Output, count_text, short_time, size_text

if TYPE_CHECKING:
    from firnline.engine.status import PipelineStatus

RUNS_SHOWN = 5
RUN_COLUMNS = (
    Column("status"),
    Column("started_at"),
    Column("ended_at"),
    Column("epoch", right=True),
    Column("generation", "gen", right=True),
    Column("restarts", right=True),
    Column("exit_code", "exit", right=True),
)

EPILOGUE = """\
Reads the table, its ledger and the history of runs; starts no Spark and
writes nothing.

Output (JSON fields):
  pipeline, table, table_version
  sinks         [{name, epoch, required, epochs_pending}]; pending: staged, and
                not yet made true by `firnline commit`
  state         new, running, done, failed, fenced, or died (killed without a
                word; running again is safe)
  epoch, generation
                the newest committed epoch, and the number of its owner
  files_outstanding, bytes_outstanding
                the backlog: what is listed and not read yet
  files_in_progress, files_set_aside, last_committed_file
                where the source stands
  checkpoint_bytes, repairs
                its size, and damaged copies that another copy stood in for
  restarts      after failures, over all runs on record
  runs          [{run, status, started_at, ended_at, epoch, generation,
                restarts, exit_code, waiting_for, host, pid, user,
                last_restarts}]

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline status
  firnline status flights/firnline.yml --json | jq .files_outstanding
"""

app = App(name="status", help_epilogue=EPILOGUE)


@app.default
def status(spec: Spec = None, /, *, common: Common = Common()) -> int:
    """Show where the pipeline stands."""
    parts = load_parts(spec)
    from firnline.engine.status import load_status

    found = load_status(parts)
    if common.json:
        common.out.json(asdict(found))
    else:
        _show(common.out, found)
    return 0


def _show(out: Output, found: PipelineStatus) -> None:
    behind = ", ".join(f"{s['name']} at epoch {s['epoch']}" for s in found.sinks if s["epoch"] < found.epoch)
    facts = {
        "pipeline": found.pipeline,
        "state": found.state,
        "epoch": f"{found.epoch:,} (generation {found.generation})",
        "table": found.table,
        "table version": found.table_version,
        "backlog": f"{count_text(found.files_outstanding, 'file')}, {size_text(found.bytes_outstanding)}",
        "in progress": count_text(found.files_in_progress, "file"),
        "set aside": count_text(found.files_set_aside, "file"),
        "last committed file": found.last_committed_file,
        "checkpoint": size_text(found.checkpoint_bytes),
        "restarts": found.restarts,
    }
    if behind:
        facts["sinks behind"] = behind
    if pending := sum(s["epochs_pending"] for s in found.sinks):
        facts["pending"] = f"{count_text(pending, 'epoch')} staged; `firnline commit` makes them true"
    if found.runs and found.runs[0].get("waiting_for") and found.state == "running":
        facts["waiting for"] = found.runs[0]["waiting_for"]
    if found.repairs:
        facts["repairs"] = "; ".join(found.repairs)
    out.facts(facts)
    if found.runs:
        out.line()
        shown = [{**r, **{k: short_time(r[k]) for k in ("started_at", "ended_at")}} for r in found.runs[:RUNS_SHOWN]]
        out.table(RUN_COLUMNS, shown)
        _show_last_restart(out, found)


def _show_last_restart(out: Output, found: PipelineStatus) -> None:
    last = next((r["last_restarts"][-1] for r in found.runs if r["last_restarts"]), None)
    if last is not None:
        out.line()
        out.line(f"last restart {last['at']}: {last['reason']}")
