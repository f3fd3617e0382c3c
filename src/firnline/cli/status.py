"""`firnline status`: shows epoch, backlog, runs, copies and lease of a pipeline."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cyclopts import App

from firnline.cli.checkpoints import state_facts
from firnline.cli.common import Common, Spec, load_pipeline
from firnline.cli.output import Output, count_text, size_text, time_text
from firnline.cli.table import Column
from firnline.errors import ControlError
from firnline.rescued import Rescued

if TYPE_CHECKING:
    from firnline.history.status import PipelineStatus
    from firnline.options import PipelineOptions

RUNS_SHOWN = 5
RUN_COLUMNS = (
    Column("status"),
    Column("started_at", "started", time=True),
    Column("ended_at", "ended", time=True),
    Column("epoch", right=True),
    Column("generation", "gen", right=True, drop=1),
    Column("restarts", right=True, drop=2),
    Column("exit_code", "exit", right=True),
)

EPILOGUE = """\
Reads the table, its ledger and the run history; starts no Spark and writes
nothing.

Output (JSON fields):
  pipeline, table, table_version
  sinks         [{name, epoch (null if the sink cannot be read), required,
                epochs_pending, epochs_behind, error}]; pending: staged, and
                not yet committed by `firnline committer`; behind: decided, and
                waiting for the sink, with the last error
  state         new, done, failed, fenced, or died (killed; running again is
                safe); of a live run starting, running, pausing, paused or
                stopping
  epoch, generation
                the newest epoch of the deciding table, staged epochs included,
                and the generation of its owner
  committed_epoch
                the newest epoch that readers of that table see
  files_outstanding, bytes_outstanding
                the backlog: files that are listed and not read yet, late files
                included; null if the source cannot be listed
  files_in_progress, files_set_aside, last_committed_file
                the position of the source
  files_grown, files_changed
                files that grew, or were replaced, after they were read
  files_incomplete
                with on_growth: read_rest, files whose last line is left until
                it is complete
  rescued       [{source, column, values, expected, first, file, line}]: values
                that did not fit their column and are in _rescued_data, since
                epoch rescued_since
  ledger_hole   why late files are not ingested; null while the ledger is whole
  unordered_names
                sources whose file names do not grow with time: every poll
                compares a full listing with the ledger, and nothing is lost
  checkpoint_bytes, repairs
                size of the checkpoint, and damaged copies that were replaced
                by another copy
  recovery_path where the newest run read its checkpoint: local, remote, sink,
                or fresh
  state_recovery_path
                where it read its operators' state: local, remote, sink (beside
                the table's ledger) or fresh; null without operators
  restored_position
                {epoch, positions {source: ...}} after which it resumed; null
                after a fresh start
  align_ms      how long sources waited for each other in the newest epoch
  worker_losses, last_worker_loss {at, epoch, choice, shards, shards_before,
                noticed_after_ms, reason, took_ms (null while not overcome)}
                of the newest run
  operators     [{operator, epoch, checkpoint, shards, size_bytes, rows,
                watermark, idle_inputs}]: the state that the newest checkpoint
                names; epoch: of the snapshot; rows: in its files, where a key
                counts once per change; watermark: event time; idle_inputs:
                without rows for longer than idle_after
  shards        number of shards of that state; null without state
  copies        [{path (store, local, remote), place, epoch, epochs_behind,
                lag_seconds, problem}]: the copies in store and tiers
  restarts      after failures, over all recorded runs
  runs          [{run, status, started_at, ended_at, epoch, generation,
                restarts, exit_code, waiting_for, paused, host, pid, user,
                resumed_after, recovery_path, state_recovery_path,
                replication_lag_seconds, replication_epochs_behind,
                copies_failing {path: reason},
                sinks_failing {sink: reason}, last_restarts}]
  lease         {holder, host, pid, user, token, taken_at, renewed_at,
                renewed_seconds_ago, lease_seconds, writes, released,
                start}; or {unreadable}. Ages compare the clocks of two
                machines: only an indication
  control       the answer of a run on this machine: {state, epoch, generation,
                in_flight, run, pid}; null if none is reachable

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline status
  firnline status flights/firnline.yml --json | jq .files_outstanding
"""

app = App(name="status", help_epilogue=EPILOGUE)


@app.default
def status(spec: Spec = None, *, common: Common = Common()) -> int:
    """Show epoch, backlog, health and copies of a pipeline."""
    pipeline = load_pipeline(spec)
    from firnline.history.status import load_status

    report = load_status(pipeline, _ask(pipeline.options))
    if common.json:
        common.out.json(asdict(report))
    else:
        _show(common.out, report)
    return 0


def _ask(options: PipelineOptions) -> dict[str, Any] | None:
    """Ask the run on this machine for its status, if there is one."""
    from firnline.run.control import ask

    try:
        answer = ask(options, {"command": "status"}, os.environ)
    except ControlError:
        return None
    return {key: answer.get(key) for key in ("state", "epoch", "generation", "in_flight", "run", "pid")}


def _lease_text(lease: dict[str, Any]) -> str:
    if "unreadable" in lease:
        return str(lease["unreadable"])
    holder = f"run {lease['holder']} on {lease['host']}:{lease['pid']} (token {lease['token']})"
    if lease["released"]:
        return f"released by {holder}"
    ago = lease["renewed_seconds_ago"]
    renewed = "at an unknown time" if ago is None else f"{ago:,.0f} s ago"
    return f"{holder}, renewed {renewed}, every {lease['lease_seconds'] / 3:,.0f} s"


def _backlog_text(report: PipelineStatus) -> str | None:
    if report.files_outstanding is None or report.bytes_outstanding is None:
        return None
    return f"{count_text(report.files_outstanding, 'file')}, {size_text(report.bytes_outstanding)}"


def _differences(report: PipelineStatus) -> dict[str, str]:
    """Return what is to be said of files that changed after they were read."""
    counts = {
        "grown": (report.files_grown, "after reading; see `firnline files --status grown`"),
        "changed": (report.files_changed, "replaced after reading; see `firnline files --status changed`"),
        "incomplete": (report.files_incomplete, "with an incomplete last line, read when it is complete"),
    }
    return {name: f"{count_text(count, 'file')} {text}" for name, (count, text) in counts.items() if count}


def _epoch_text(report: PipelineStatus) -> str:
    if report.committed_epoch == report.epoch:
        return f"{report.epoch:,} (generation {report.generation})"
    return f"{report.committed_epoch:,} committed, {report.epoch:,} staged (generation {report.generation})"


def _loss_text(report: PipelineStatus) -> str:
    last = report.last_worker_loss or {}
    took = last.get("took_ms")
    ended = "not overcome yet" if took is None else f"overcome after {time_text(took / 1000)}"
    return f"{report.worker_losses}; the last in epoch {last.get('epoch')}, {ended}: {last.get('reason')}"


def _behind_text(report: PipelineStatus, sink: dict[str, Any]) -> str:
    """Say why a sink is behind: it gets an epoch once the deciding table's log holds it, perhaps by a committer."""
    error = f" ({sink['error']})" if sink["error"] else ""
    if sink["epoch"] is None:
        return f"{sink['name']} cannot be read{error}"
    deciding = report.sinks[0]
    staged = sink["epoch"] >= deciding["epoch"] - deciding["epochs_pending"]
    why = f", waits for the committer of {deciding['name']} and then for a run" if staged else ""
    return f"{sink['name']} at epoch {sink['epoch']}{why}{error}"


def _show(out: Output, report: PipelineStatus) -> None:
    behind = ", ".join(_behind_text(report, sink) for sink in report.sinks if sink["epochs_behind"] != 0)
    facts = {
        "pipeline": report.pipeline,
        "state": report.state,
        "epoch": _epoch_text(report),
        "table": report.table,
        "table version": report.table_version,
        "backlog": _backlog_text(report),
        "in progress": count_text(report.files_in_progress, "file"),
        "set aside": count_text(report.files_set_aside, "file"),
        **_differences(report),
        "last committed file": report.last_committed_file,
        "checkpoint": size_text(report.checkpoint_bytes),
        "restarts": report.restarts,
    }
    if report.rescued:
        texts = "; ".join(Rescued.from_json(one).text() for one in report.rescued)
        facts["rescued"] = f"{texts}, since epoch {report.rescued_since}"
    if report.lease:
        facts["lease"] = _lease_text(report.lease)
    if report.control:
        flying = count_text(len(report.control["in_flight"]), "epoch")
        facts["control"] = f"reachable, {report.control['state']}, {flying} in flight"
    if behind:
        facts["sinks behind"] = behind
    facts |= state_facts(report.operators)
    if report.recovery_path:
        state = f", state from {report.state_recovery_path}" if report.state_recovery_path else ""
        facts["recovered from"] = f"{report.recovery_path}{state}"
    if report.align_ms is not None:
        facts["alignment"] = f"sources waited {time_text(report.align_ms / 1000)} for each other in the newest epoch"
    if report.worker_losses:
        facts["workers lost"] = _loss_text(report)
    if report.restored_position:
        facts["resumed after"] = f"epoch {report.restored_position['epoch']:,}"
    for copy in report.copies:
        facts[f"{copy['path']} {'copy' if copy['path'] == 'store' else 'tier'}"] = _copy_text(copy)
    if pending := sum(s["epochs_pending"] for s in report.sinks):
        facts["pending"] = f"{count_text(pending, 'epoch')} staged; `firnline committer` commits them"
    if report.runs and report.runs[0].get("waiting_for") and report.state == "running":
        facts["waiting for"] = report.runs[0]["waiting_for"]
    if report.ledger_hole:
        facts["ledger"] = f"{report.ledger_hole}: late files are not ingested; see `firnline ledger repair`"
    if report.unordered_names:
        facts["file names"] = (
            f"do not grow with time ({', '.join(report.unordered_names)}): every poll compares a full listing with the "
            "ledger; nothing is lost. Names that begin with the time make polls cheaper"
        )
    if report.repairs:
        facts["repairs"] = "; ".join(report.repairs)
    out.facts(facts)
    if report.runs:
        out.line()
        out.table(RUN_COLUMNS, report.runs[:RUNS_SHOWN])
        _show_last_restart(out, report)


def _copy_text(copy: dict[str, Any]) -> str:
    if copy["problem"]:
        return f"{copy['place']}: {copy['problem']}"
    if not copy["epochs_behind"]:
        return f"in sync, in {copy['place']}"
    age = f", {time_text(copy['lag_seconds'])}" if copy["lag_seconds"] is not None else ""
    return f"{count_text(copy['epochs_behind'], 'epoch')} behind{age}, in {copy['place']}"


def _show_last_restart(out: Output, report: PipelineStatus) -> None:
    last = next((r["last_restarts"][-1] for r in report.runs if r["last_restarts"]), None)
    if last is not None:
        out.line()
        out.line(f"last restart {last['at']}: {last['reason']}")
