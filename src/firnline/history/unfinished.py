"""Actions that were begun and never ended: the audit trail has their beginning and no end. Each with what ends it.

An action is never half done: a history edit is decided by one commit or not at all, and a request is carried out by the
next epoch or was never made. What remains is to repeat it, or to take away what a copy left behind. What the next epoch
carries out without anybody, or has carried out, is not listed: to repeat it might do it twice.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from firnline.errors import ConfigError, FirnlineError, LedgerHoleError
from firnline.history.dead_letters import LetterFilter, find_letters, known_by_spec
from firnline.history.file_requests import load_set_aside
from firnline.history.quarantine_requests import RecordFilter, choose_records
from firnline.history.reread import plan_reread
from firnline.history.savepoints.pins import load_pins
from firnline.history.store import load_audit_rows
from firnline.process import Process, is_running
from firnline.run.open_pipeline import OpenPipeline
from firnline.run.status import load_runs
from firnline.sinks.known import known_sinks
from firnline.types import Json

LOOKED_AT = 1000  # records of the audit trail
# Details that tell actions of a kind apart.
_SAME = ("path", "sink", "savepoint", "patterns", "table", "operator", "reason", "file", "epoch", "until_epoch")
_TARGETED = ("rollback", "restore")  # their `to_epoch` is the target, and not merely the next epoch


@dataclass(frozen=True, slots=True)
class Unfinished:
    """One action without an end. `epoch`: the edit was decided by it; only the record of its end is missing."""

    run: str
    what: str
    at: str
    user: str
    host: str
    epoch: int | None
    summary: str
    command: str

    def to_json(self) -> dict[str, Json]:
        return {name: getattr(self, name) for name in self.__slots__}


def load_unfinished(pipeline: OpenPipeline, running: Collection[str] = ()) -> list[Unfinished]:
    """Return the actions that nobody carries out any more, newest first.

    Args:
        running: Run ids of actions that this process carries out now.
    """
    try:
        rows = load_audit_rows(pipeline, LOOKED_AT, None).rows
    except ConfigError:  # the spec names no store that outlives a process
        return []
    known = [row for row in rows if not row["problem"]]
    ended = {row["run"] for row in known if row["outcome"] != "begun"}
    found, done = [], []
    for row in known:
        if row["outcome"] == "done":
            done.append(row)
        if row["outcome"] != "begun" or row["run"] in ended or row["run"] in running:
            continue
        if _is_alive(row) or any(_is_same(row, later) for later in done):
            continue
        ended.add(row["run"])  # it may have been begun several times
        epoch = _find_epoch(pipeline, str(row["run"]))
        if _is_left(pipeline, row, epoch):
            found.append(_describe(row, epoch))
    return found


def _is_alive(row: Mapping[str, Json]) -> bool:
    """Whether its process is alive; `running` speaks for this process. A later process with its number is not it."""
    process = Process(str(row["user"]), str(row["host"]), int(row["pid"]), str(row.get("start", "")))
    return process.pid != os.getpid() and bool(is_running(process))


def _is_same(row: Mapping[str, Json], later: Mapping[str, Json]) -> bool:
    """Whether a later action did the same."""
    if row["what"] != later["what"] or (row["what"] in _TARGETED and row["to_epoch"] != later["to_epoch"]):
        return False
    return all(row["details"].get(name) == later["details"].get(name) for name in _SAME)


def _is_left(pipeline: OpenPipeline, row: Mapping[str, Json], epoch: int | None) -> bool:
    """Whether something is left to do. What cannot be judged is listed."""
    try:
        return _is_open(pipeline, row) if epoch is None else _waits_for_run(pipeline, row, epoch)
    except (OSError, FirnlineError):
        return True


def _waits_for_run(pipeline: OpenPipeline, row: Mapping[str, Json], epoch: int) -> bool:
    """Whether no run has begun since an edit was decided: the next one brings it to sinks that lag."""
    runs = load_runs(pipeline.storage, pipeline.options.name, 1)
    return pipeline.load().epoch == epoch and not (runs and str(runs[0]["started_at"]) > str(row["at"]))


def _is_open(pipeline: OpenPipeline, row: Mapping[str, Json]) -> bool:
    """Whether something is left to do: by what the pipeline has, and not by what was recorded."""
    what, details = str(row["what"]), row["details"]
    requests = pipeline.requests.load() if what.startswith("files-") else []
    match what:
        case "files-retry":
            path = str(details.get("path", ""))
            return path in load_set_aside(pipeline) and not any(r.kind == "retry" and r.path == path for r in requests)
        case "files-drop":
            asked = {request.path for request in requests if request.kind == "drop"}
            return bool(set(details.get("paths", ())) & load_set_aside(pipeline).keys() - asked)
        case "files-reread":
            path = str(details.get("path", ""))
            if any(request.kind == "reread" and request.path == path for request in requests):
                return False
            try:
                return details.get("reading") in (None, plan_reread(pipeline, path).reading)
            except ConfigError:  # the file is gone, or is being read again
                return False
        case "quarantine-replay" | "quarantine-drop":
            discard = what == "quarantine-drop"
            return bool(choose_records(pipeline, _record_filter(details), discard=discard).records)
        case "dead-letters-retry" | "dead-letters-drop":
            known = known_by_spec(pipeline, known_sinks(pipeline.load().checkpoint))
            return bool(find_letters(pipeline, known, _letter_filter(details)))
        case "savepoint-create" | "savepoint-dispose":
            pins = {pin.id: pin for pin in load_pins(pipeline.storage, pipeline.options.name)}
            pin = pins.get(str(details.get("savepoint", "")))
            return pin is not None and not (what == "savepoint-create" and pin.completed)
        case _:
            return True


def _record_filter(details: Mapping[str, Json]) -> RecordFilter:
    return RecordFilter(*(details.get(name) for name in ("reason", "file", "epoch", "until_epoch")))


def _letter_filter(details: Mapping[str, Json]) -> LetterFilter:
    return LetterFilter(*(details.get(name) for name in ("sink", "epoch", "reason")))


def _describe(row: Mapping[str, Json], epoch: int | None) -> Unfinished:
    if epoch is not None:
        summary = f"decided as epoch {epoch}; sinks that lag get it from the next run"
        command = "firnline run"
    else:
        summary, command = "nothing was decided", _command(str(row["what"]), row)
        if row["what"] == "savepoint-create":
            summary = "the savepoint is incomplete"
        elif row["what"].startswith(("files-", "quarantine-")):
            summary = "the request was not made, or only a part of it"
    run, what, at, user, host = (str(row[name]) for name in ("run", "what", "at", "user", "host"))
    return Unfinished(run, what, at, user, host, epoch, summary, command)


def _find_epoch(pipeline: OpenPipeline, run: str) -> int | None:
    try:
        entries = pipeline.entries(pipeline.load().entry)
        return next((entry.epoch for entry in entries if entry.checkpoint.run == run), None)
    except LedgerHoleError:
        return None


def _command(what: str, row: Mapping[str, Json]) -> str:
    details = row["details"]
    words: list[str]
    match what:
        case "rollback":
            names = [("--accept", name) for name in details.get("accepted", ())]
            names += [("--leave", name) for name in details.get("left", ())]
            words = ["rollback", "--to", str(row["to_epoch"]), *(word for pair in names for word in pair)]
        case "savepoint-create" | "savepoint-dispose":
            words = ["savepoint", "dispose", str(details.get("savepoint", ""))]
        case "files-drop":
            words = ["files", *(word for path in details.get("patterns", ()) for word in ("--drop", str(path)))]
        case "files-retry" | "files-reread":
            changed = ["--changed"] if details.get("changed") else []
            words = ["files", f"--{what.removeprefix('files-')}", str(details.get("path", "")), *changed]
        case "quarantine-replay" | "quarantine-drop":
            words = ["quarantine", f"--{what.removeprefix('quarantine-')}", *_record_filter(details).words]
        case "dead-letters-retry" | "dead-letters-drop":
            chosen = _letter_filter(details).facts.items()
            words = ["dead-letters", what.removeprefix("dead-letters-")]
            words += [word for name, value in chosen for word in (f"--{name}", str(value))]
        case "sinks-resync" | "sinks-resume" | "sinks-forget":
            action = what.removeprefix("sinks-")
            words = ["sinks", action, str(details.get("sink", "")), *(["--accept-gap"] if action == "resume" else [])]
            words += ["--from", str(details["copy_from"])] if details.get("copy_from") else []
        case "gc" | "compact" | "rescale" | "recover":
            words = [what]
        case _:
            words = ["checkpoints", "--audit"]
    return shlex.join(["firnline", *words])
