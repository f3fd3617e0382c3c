"""`firnline status`: shows epoch, backlog, runs, copies and lease of a pipeline."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from time import sleep as rest
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from firnline.cli.checkpoints import fact_text, state_facts
from firnline.cli.common import Common, Duration, Flag, Spec, load_pipeline, name_spec, silent_text
from firnline.cli.output import (
    MAX_REASON,
    NAMES_SHOWN,
    Output,
    brief,
    count_text,
    lag_text,
    letters_text,
    reading_text,
    screen_width,
    size_text,
    time_text,
)
from firnline.cli.table import Column
from firnline.cli.text import shorten
from firnline.clock import ago_text
from firnline.errors import ControlError, FirnlineError
from firnline.names import JOURNAL
from firnline.rescued import Rescued
from firnline.topology.records import Overdue

if TYPE_CHECKING:
    from firnline.history.status import PipelineStatus
    from firnline.options import PipelineOptions

RUNS_SHOWN = 5
INTERVAL, MIN_INTERVAL = Duration(2), 0.1  # between two refreshes
RUN_COLUMNS = (
    Column("status"),
    Column("started_at", "started", time=True),
    Column("ended_at", "ended", time=True),
    Column("epoch", right=True),
    Column("rows", right=True, drop=3),
    Column("generation", "gen", right=True, drop=1),
    Column("restarts", right=True, drop=2),
    Column("exit_code", "exit", right=True),
)

EPILOGUE = """\
Reads the table, its ledger and the run history; starts no Spark and writes
nothing. It disturbs no run. With --watch it shows the status every --interval:
in place on a terminal, with --json as one value a line ({pipeline, error} while
it cannot be read). Ctrl-C ends it with exit code 130.

Output (JSON fields):
  pipeline, table, table_version
  sinks         [{name, type, location, version, epoch (null if the sink cannot
                be read), last_known_epoch (of a sink that cannot be read: what
                the newest checkpoint knows), required, epochs_pending,
                epochs_behind, bytes_behind, error, next_try_at (while a run is
                alive), set_aside (the reason, or null), parts (the number
                of tables of a sink with a template; null for others),
                write (append, upsert), dead_letters (not answered; null: a
                file of them is damaged)}];
                pending: staged, and not yet committed by `firnline committer`;
                behind: decided, and waiting for the sink, with the last error;
                the first one decides, and is the journal if no table does
  sources       [{name, location, position, files_in_progress,
                files_set_aside, files_outstanding, bytes_outstanding, log,
                schemas, error}];
                position: of files {root, last_committed_file, ...}; error: why
                the source cannot be listed now;
                log: of a source that captures changes {server_position,
                position, lag_bytes, lag_seconds (at most), retained_bytes (of
                the server's log, by the slot; null without one), alarm,
                unknown (why the server does not say it; else null)}; null for
                others; schemas: those in force, [{table, version,
                fingerprint}]; silent_changes: of rows of the database that
                its log does not have, [{epoch, table, reason, position,
                again (read, empty or nothing: what mends it), asked (the next
                epoch begins it), command (reads the table again), way (what to
                do where no command helps)}]; snapshots: how far tables have
                been read, [{table, state (asked, running, done), rows,
                estimate, chunks}]; unread_tables: whose rows
                are still to be read; unreadable_tables: those of them that
                cannot be, [{table, reason, hint}]
  last_error    {at, code, message, hint, epoch, run, exit_code, ended_run}: why
                the newest run with an error failed (ended_run), or the last
                error that it overcame; code `killed`: it ended without a word,
                and `at` is its last sign of life; null without errors
  last_commit_at, last_commit_seconds_ago
                the commit of the newest epoch that readers see, in UTC
  rows, rows_in, rows_since
                rows written to the sink rows_in (the deciding one; the first
                sink if the journal decides) by the epochs from rows_since on;
                older epochs are folded; of an upsert, change rows
  overdue_snapshots
                of topologies, which hold the floor longer than max_hold allows:
                [{snapshot, topology, epoch (of the record), hold_until, command
                (drops it)}]
  set_aside     [{source, path, reason}]: the first 10 files set aside
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
  rescued       [{source, table (of a database), column, values, expected,
                first, file, line}]: values that did not fit their column and
                are in _rescued_data, since epoch rescued_since
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
                epochs, files, records, rows, error {at, code, message, hint},
                restarts, exit_code, waiting_for, paused, host, pid, user,
                resumed_after, recovery_path, state_recovery_path,
                replication_lag_seconds, replication_epochs_behind,
                copies_failing {path: reason}, sinks_failing {sink: reason},
                sinks_next_try {sink: time}, last_restarts}]
  outbox        {files, size_bytes}: rows for the sinks that do not decide; they
                stay for outbox.keep after delivery; null with one sink
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
  firnline status --watch --interval 10s
"""

app = App(name="status", help_epilogue=EPILOGUE)


@app.default
def status(
    spec: Spec = None,
    *,
    watch: Annotated[bool, Flag, Parameter(help="Show it again and again, until Ctrl-C.")] = False,
    interval: Annotated[Duration, Parameter(help="With --watch: the time between two refreshes.")] = INTERVAL,
    common: Common = Common(),
) -> int:
    """Show epoch, backlog, health and copies of a pipeline."""
    options = load_pipeline(spec).options
    if not watch:
        report = _load(options)
        if common.json:
            common.out.json(asdict(report))
        else:
            show_status(common.out, report, spec)
        return 0
    watching = _Watch(options, common, spec)
    while True:
        watching.refresh()
        rest(max(interval, MIN_INTERVAL))


def _load(options: PipelineOptions) -> PipelineStatus:
    """Read the status. A pipeline is opened for each reading, so that nothing is remembered from the one before."""
    from firnline.history.status import load_status
    from firnline.run.open_pipeline import open_pipeline

    return load_status(open_pipeline(options), _ask(options))


class _Watch:
    """Shows the status again and again: in place on a terminal, one JSON value a line with `--json`.

    The first reading fails like the command. Later failures are shown, and the next refresh reads again.
    """

    def __init__(self, options: PipelineOptions, common: Common, spec: str | None) -> None:
        self._options = options
        self._spec = spec
        self._json = common.json
        self._refreshes = 0

    def refresh(self) -> None:
        """Read the status, and show it."""
        self._refreshes += 1
        try:
            report: PipelineStatus | FirnlineError | OSError = _load(self._options)
        except (FirnlineError, OSError) as error:
            if self._refreshes == 1:
                raise
            report = error
        if self._json:
            sys.stdout.write(json.dumps(self._as_json(report), ensure_ascii=False, default=str) + "\n")
        else:
            self._draw(report)
        sys.stdout.flush()

    def _as_json(self, report: PipelineStatus | FirnlineError | OSError) -> dict[str, Any]:
        if isinstance(report, FirnlineError | OSError):
            code = report.code if isinstance(report, FirnlineError) else "sink"
            return {"pipeline": self._options.name, "error": {"code": code, "message": str(report)}}
        return asdict(report)

    def _draw(self, report: PipelineStatus | FirnlineError | OSError) -> None:
        """Draw one screen; in a pipe a blank line is between two of them."""
        text = io.StringIO()
        out = Output(stream=text)
        out.width = screen_width(sys.stdout)
        if isinstance(report, FirnlineError | OSError):
            out.sentence(f"the status cannot be read: {report}")
        else:
            show_status(out, report, self._spec)
        lines = text.getvalue().splitlines()
        if not sys.stdout.isatty():
            sys.stdout.write("\n" * (self._refreshes > 1) + "\n".join(lines) + "\n")
            return
        room = shutil.get_terminal_size().lines - 2
        if len(lines) > room:
            lines = [*lines[: room - 1], f"… {len(lines) - room + 1} more lines"]
        moment = datetime.now(UTC).strftime("%H:%M:%SZ")
        sys.stdout.write("\x1b[H\x1b[2J" + "\n".join([*lines, f"{moment}, Ctrl-C ends"]))


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


def _sink_text(report: PipelineStatus, sink: dict[str, Any]) -> str:
    """Say what a sink holds, and why it is behind: it gets an epoch once the deciding table's log holds it."""
    is_table = sink["type"] == "delta"
    where = f", in {sink['location']}" if is_table else f", at {sink['location']}"
    again = f"; next try {_when(sink['next_try_at'])}" if sink["next_try_at"] else ""
    error = f": {sink['error']}{again}" if sink["error"] else ""
    if sink["set_aside"]:
        return f"set aside: {sink['set_aside']}; copy it anew: firnline sinks resync {sink['name']}"
    optional = "" if sink["required"] else ", optional"
    if sink["dead_letters"] != 0:
        optional += f", {letters_text(sink['dead_letters'])} (`firnline dead-letters list`)"
    behind = count_text(sink["epochs_behind"] or 0, "epoch")
    if sink["bytes_behind"]:
        behind = f"{behind} ({size_text(sink['bytes_behind'])})"
    if sink["epoch"] is None:
        known = ""
        if sink["last_known_epoch"] is not None:
            known = f", held epoch {sink['last_known_epoch']} when last seen, up to {behind} behind"
        return f"cannot be read{known}{optional}{where}{error}"
    version = f", version {sink['version']}" if is_table and sink["version"] is not None else ""
    if sink["parts"] is not None:
        version = f", {count_text(sink['parts'], 'table')}"
    if not sink["epochs_behind"]:
        return f"in sync at epoch {sink['epoch']}{version}{optional}{where}"
    deciding = report.sinks[0]
    staged = sink["epoch"] >= deciding["epoch"] - deciding["epochs_pending"]
    why = f", waits for the committer of {deciding['name']} and then for a run" if staged else ""
    return f"{behind} behind, at epoch {sink['epoch']}{version}{optional}{why}{where}{error}"


def _when(moment: str) -> str:
    """Return how far a moment lies ahead."""
    seconds = (datetime.fromisoformat(moment) - datetime.now(UTC)).total_seconds()
    return f"in {time_text(seconds)}" if seconds > 0 else "now"


def _sink_label(sink: dict[str, Any]) -> str:
    return JOURNAL if sink["name"] == JOURNAL else f"sink {sink['name']}"


def _source_text(source: dict[str, Any]) -> str:
    """Say where a source stands, how much waits, and why it cannot be listed."""
    position = source["position"]
    if not position:
        texts = ["at the start"]
    elif "last_committed_file" in position:
        last = position["last_committed_file"]
        texts = [f"up to {last}" if last else "at the start"]
    else:
        texts = [fact_text(position)]
    if source["log"]:
        texts.append(lag_text(source["log"], source["unread_tables"]))
        reading = [one for one in source["snapshots"] if one["state"] == "running"]
        texts += [reading_text(one["table"], one["rows"], one["estimate"]) for one in reading[:NAMES_SHOWN]]
        if source["error"] and source["error"] != source["log"]["unknown"]:
            texts.append(f"cannot be read: {source['error']}")
    elif source["error"]:
        texts.append(f"cannot be listed: {source['error']}")
    else:
        waiting = f"{count_text(source['files_outstanding'], 'file')}, {size_text(source['bytes_outstanding'])}"
        texts.append(f"backlog {waiting}" if source["files_outstanding"] else "no backlog")
    if source["files_in_progress"]:
        texts.append(f"{count_text(source['files_in_progress'], 'file')} in progress")
    if source["files_set_aside"]:
        texts.append(f"{count_text(source['files_set_aside'], 'file')} set aside")
    if source["schemas"]:
        texts.append(f"schema {_schemas_text(source['schemas'])}")
    return "; ".join(texts)


def _silent_text(changes: list[dict[str, Any]], spec: str | None) -> str:
    """Say which rows of the database may differ from those here, and what to type; of many changes the newest."""
    shown = [silent_text(one, spec) for one in changes[-NAMES_SHOWN:]]
    more = len(changes) - len(shown)
    return ". ".join([*reversed(shown), *([f"And {more} more before"] if more else [])])


def _unreadable_text(tables: list[dict[str, Any]]) -> str:
    """Say which tables cannot be read, and what to type; of many the first ones."""
    shown = [f"{one['reason']}. {one['hint']}" for one in tables[:NAMES_SHOWN]]
    more = len(tables) - len(shown)
    return " ".join([*shown, *([f"And {count_text(more, 'more table')}"] if more else [])])


def _schemas_text(schemas: list[dict[str, Any]]) -> str:
    """Return the versions of tables' schemas; of many tables the first ones."""
    shown = [f"{one['table']} version {one['version']}" for one in schemas[:NAMES_SHOWN]]
    more = len(schemas) - len(shown)
    return ", ".join([*shown, *([f"and {more} more (`firnline schema-history`)"] if more else [])])


def _error_text(error: dict[str, Any]) -> str:
    """Say what the last error was and when; whether it ended the run."""
    if error["code"] == "killed":
        return f"run {error['run']} {error['message']}; its last sign of life was {ago_text(error['at'])}"
    ended = "ended" if error["ended_run"] else "did not end"
    epoch = f" in epoch {error['epoch']}" if error.get("epoch") is not None else ""
    text = f"{ago_text(error['at'])}{epoch}, {error['code']}: {brief(error['message'])} (it {ended} run {error['run']})"
    return f"{text}. Try: {error['hint']}" if error["hint"] and error["ended_run"] else text


def _set_aside_text(report: PipelineStatus) -> str:
    named = [f"{one['path']} ({shorten(brief(one['reason']), MAX_REASON)})" for one in report.set_aside[:NAMES_SHOWN]]
    if not named:
        return count_text(report.files_set_aside, "file")
    more = f", and {report.files_set_aside - len(named):,} more" if report.files_set_aside > len(named) else ""
    lists = "`firnline files --status set_aside` lists them all"
    return f"{count_text(report.files_set_aside, 'file')}: {', '.join(named)}{more}; {lists}"


def _rows_text(report: PipelineStatus) -> str:
    """Return the rows of the deciding sink, or of the first if the journal decides; it is named if there are others."""
    since = f" since epoch {report.rows_since:,}" if (report.rows_since or 0) > 1 else ""
    where = f" in {report.rows_in}" if sum(sink["name"] != JOURNAL for sink in report.sinks) > 1 else ""
    is_upsert = any(sink["name"] == report.rows_in and sink["write"] == "upsert" for sink in report.sinks)
    what = f"{count_text(report.rows, 'change')} applied" if is_upsert else f"{report.rows:,}"
    return f"{what}{where}{since}"


def show_status(out: Output, report: PipelineStatus, spec: str | None = None) -> None:
    """Show a status; hints name the spec."""
    facts: dict[str, Any] = {"pipeline": report.pipeline, "state": _state_text(report)}
    if report.last_error:
        facts["last error"] = _error_text(report.last_error)
    facts |= {
        "epoch": _epoch_text(report),
        "last commit": ago_text(report.last_commit_at) if report.last_commit_at else "none yet",
        "rows": _rows_text(report),
        **{f"source {source['name']}": _source_text(source) for source in report.sources},
        **{_sink_label(sink): _sink_text(report, sink) for sink in report.sinks},
        **({"outbox": _outbox_text(report.outbox)} if report.outbox else {}),
        "set aside": _set_aside_text(report),
        **_differences(report),
    }
    for source in report.sources:
        if source["unreadable_tables"]:
            facts[f"not read from {source['name']}"] = _unreadable_text(source["unreadable_tables"])
        if source["silent_changes"]:
            facts[f"not in the log of {source['name']}"] = _silent_text(source["silent_changes"], spec)
    if len(report.sources) > 1:
        facts["backlog"] = _backlog_text(report)
    facts |= _more_facts(report)
    out.facts({name: name_spec(fact, spec) if isinstance(fact, str) else fact for name, fact in facts.items()})
    if report.runs:
        out.line()
        out.table(RUN_COLUMNS, report.runs[:RUNS_SHOWN])


def _outbox_text(outbox: dict[str, Any]) -> str:
    return f"{count_text(outbox['files'], 'file')}, {size_text(outbox['size_bytes'])}" if outbox["files"] else "empty"


def _state_text(report: PipelineStatus) -> str:
    if report.control and report.control["state"] != "ended":
        flying = count_text(len(report.control["in_flight"]), "epoch")
        return f"{report.state}, {flying} in flight (pid {report.control['pid']} on this machine)"
    return f"{report.state}; running again is safe" if report.state == "died" else report.state


def _more_facts(report: PipelineStatus) -> dict[str, Any]:
    """Return the facts that only some pipelines have, and those for whoever looks closely."""
    facts: dict[str, Any] = {"checkpoint": size_text(report.checkpoint_bytes), "restarts": report.restarts}
    if report.rescued:
        texts = "; ".join(Rescued.from_json(one).text() for one in report.rescued)
        facts["rescued"] = f"{texts}, since epoch {report.rescued_since}"
    if report.lease:
        facts["lease"] = _lease_text(report.lease)
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
    return facts | _warnings(report)


def _warnings(report: PipelineStatus) -> dict[str, str]:
    facts = {}
    if report.ledger_hole:
        facts["ledger"] = f"{report.ledger_hole}: late files are not ingested; see `firnline ledger repair`"
    if report.unordered_names:
        facts["file names"] = (
            f"do not grow with time ({', '.join(report.unordered_names)}): every poll compares a full listing with the "
            "ledger; nothing is lost. Names that begin with the time make polls cheaper"
        )
    for one in report.overdue_snapshots:
        facts[f"snapshot {one['snapshot']}"] = f"alarm: {Overdue(**one)}"
    if report.repairs:
        facts["repairs"] = "; ".join(report.repairs)
    return facts


def _copy_text(copy: dict[str, Any]) -> str:
    if copy["problem"]:
        return f"{copy['place']}: {copy['problem']}"
    if not copy["epochs_behind"]:
        return f"in sync, in {copy['place']}"
    age = f", {time_text(copy['lag_seconds'])}" if copy["lag_seconds"] is not None else ""
    return f"{count_text(copy['epochs_behind'], 'epoch')} behind{age}, in {copy['place']}"
