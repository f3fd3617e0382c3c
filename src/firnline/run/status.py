"""The status of a run: now, derived from the decisions' state alone, and in the durable history of runs.

The history is for people and for `firnline status`: where and when each run ran, its errors, how it ended. No decision
depends on it.

"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.epoch import messages as m
from firnline.epoch.decide import EpochState, Phase
from firnline.errors import DamagedError, FirnlineError
from firnline.names import run_name, runs_folder
from firnline.process import has_exited, this_process
from firnline.sinks.base import Head
from firnline.storage import Storage
from firnline.types import Clock, Json

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The status of a run, as its control channel reports it."""

    state: str  # starting, running, pausing, paused, stopping, ended
    epoch: int
    generation: int
    in_flight: tuple[int, ...]

    def to_json(self) -> dict[str, Json]:
        """Return the status as the control channel sends it."""
        return {
            "state": self.state,
            "epoch": self.epoch,
            "generation": self.generation,
            "in_flight": list(self.in_flight),
        }


def status_of(state: EpochState, head: Head, *, paused: bool, waiting: bool) -> RunStatus:
    """Return the status for a state. `waiting`: the current plan has not asked its sources yet."""
    if state.phase is Phase.STOPPED:
        word = "ended"
    elif state.stopping:
        word = "stopping"
    elif paused:
        word = "paused" if is_still(state, waiting=waiting) else "pausing"
    else:
        word = "starting" if state.phase is Phase.READING else "running"
    return RunStatus(word, state.decided, head.generation, tuple(slot.epoch for slot in state.slots))


def is_still(state: EpochState, *, waiting: bool) -> bool:
    """Return whether nothing is in flight: every plan is committed and recorded, and no sink is being written."""
    if state.phase in (Phase.READING, Phase.CLAIMING) or state.recording or state.acknowledging:
        return False
    if state.planning is not None and not waiting:
        return False
    return _all_recorded(state) and not any(sink.busy for sink in state.sinks)


def _all_recorded(state: EpochState) -> bool:
    return not state.slots and state.settled == state.committed and state.recorded >= state.settled


@dataclass(slots=True)
class CheckpointWatch:
    """Tracks one request for a checkpoint, from the poll of the sources to the record of the epoch.

    Only a plan that starts after the request counts, because an earlier one may have listed before it. If the plan has
    input, the watch waits for its epoch; otherwise it waits for the epochs in flight. A dropped epoch restarts the
    watch. The fields belong to the main thread; others may read `answer` once `done` is set.
    """

    since: int = 0
    looking: bool = False  # a plan that started after the request is active
    attempt: str = ""  # the epoch of that plan
    epoch: int = 0
    empty: bool = False  # that plan had nothing to read
    done: threading.Event = field(default_factory=threading.Event)
    answer: dict[str, Json] = field(default_factory=dict)

    def begin(self, state: EpochState, *, waiting: bool) -> None:
        """Accept the request on the main thread. `waiting`: the current plan has not asked its sources yet."""
        self.since = state.decided
        self.looking = state.planning is not None and waiting

    @property
    def wants_look(self) -> bool:
        """Whether it still waits for a plan to start."""
        return not (self.attempt or self.empty or self.looking)

    def plan_begins(self) -> None:
        """Note that a plan starts after the request."""
        if not (self.attempt or self.empty):
            self.looking = True

    def follow(self, before: EpochState, event: m.Event, after: EpochState) -> None:
        """Process one event with the states before and after it; called before its actions are performed."""
        flying = {slot.attempt for slot in after.slots}
        dropped = {slot.attempt for slot in before.slots} - flying - {after.tip}
        if dropped and (self.empty or self.attempt in dropped):
            self._begin_anew()
        if not self.looking:
            return
        match event:
            case m.Planned(epoch, attempt):
                self.looking = False
                if attempt in flying:
                    self.attempt, self.epoch = attempt, epoch
            case m.NothingToPlan():
                self.looking = False
                self.empty = before.planning == before.planned_on
            case m.Failed(_, _, ""):
                self.looking = False

    def _begin_anew(self) -> None:
        self.attempt, self.epoch, self.empty = "", 0, False

    def is_complete(self, state: EpochState, *, still: bool) -> bool:
        """Return whether the request can be answered. `still`: the run is paused, and nothing is in flight."""
        if self.attempt:
            # Epochs that wait for a committer are durable, and are recorded once committed.
            return state.decided >= self.epoch and state.recorded >= min(self.epoch, state.committed)
        return still or (self.empty and _all_recorded(state))

    def finish(self, head: Head) -> None:
        """Answer with the epoch that the watch waited for, or with the deciding sink's head."""
        self.answer = {
            "epoch": self.epoch if self.attempt else head.epoch,  # a later epoch may be decided and not recorded yet
            "id": self.attempt or head.attempt,
            "generation": head.generation,
            "committed": bool(self.attempt) or head.epoch > self.since,
        }
        self.done.set()


KEPT_RUNS = 50
KEPT_RESTARTS = 20


class RunHistory:
    """The record of one run, below `<table>/_firnline/<pipeline>/runs/`. No decision depends on it."""

    def __init__(self, storage: Storage, pipeline: str, run: str, clock: Clock, started: datetime) -> None:
        self._storage = storage
        self._folder = runs_folder(pipeline)
        self._clock = clock
        self._written_at = -1e9
        self._name = run_name(started, run)
        self._body: dict[str, Json] = {
            "run": run,
            "pipeline": pipeline,
            **asdict(this_process()),
            "started_at": started.isoformat(),
            "ended_at": None,
            "status": "running",
            "generation": None,
            "epoch": None,
            "exit_code": None,
            "waiting_for": None,
            "resumed_after": None,  # the epoch, and where its checkpoint was read: local, remote, sink or fresh
            "recovery_path": None,
            "state_recovery_path": None,  # where operator state was read; sink: beside the deciding table's ledger
            "replication_lag_seconds": None,  # of the remote tier
            "replication_epochs_behind": None,
            "ledger_hole": None,  # why late files cannot be found
            "unordered_names": [],  # sources whose file names do not grow with time
            "sinks_failing": {},  # sink -> why it could not be joined or written
            "sinks_next_try": {},  # sink -> when it is tried again, of those that failed
            "copies_failing": {},  # store, local or remote -> why it cannot be written
            "align_ms": None,  # of the newest epoch: from the first source's slice to the boundary
            "epochs": 0,  # that the run has committed, with what they read and wrote
            "files": 0,
            "records": 0,
            "rows": 0,
            "last_commit_at": None,
            "lag_seconds": None,  # of the newest epoch: from the arrival of its oldest input to the commit
            "error": None,  # why the run failed: at, code, message, hint
            "worker_losses": 0,
            "last_worker_loss": None,  # epoch, reason, shards; took_ms: until an epoch completed again
            "paused": False,
            "restarts": 0,
            "last_restarts": [],
        }

    def note(self, *, now: bool = False, **facts: Any) -> None:
        """Change facts. Written at once with `now`, otherwise every few seconds."""
        self._body.update(facts)
        if now or self._clock.monotonic() - self._written_at > 5:
            self._written_at = self._clock.monotonic()
            self._body["updated_at"] = self._clock.now().isoformat()
            self._storage.put(f"{self._folder}/{self._name}", canonical(seal(self._body)))

    def restarted(self, reason: str, code: str, epoch: int | None, *, counts: bool) -> None:
        """Write an error that the run overcame, at once, and count the restart if it was one; `epoch` is the one that
        failed, if any."""
        entry = {"at": self._clock.now().isoformat(), "code": code, "reason": reason, "epoch": epoch}
        kept = [*self._body["last_restarts"], entry][-KEPT_RESTARTS:]
        self.note(now=True, restarts=self._body["restarts"] + counts, last_restarts=kept)

    def lost_worker(self, facts: dict[str, Json]) -> None:
        """Count a lost worker, or record how long the recovery took."""
        if "took_ms" in facts:
            last = self._body["last_worker_loss"] or {}
            self.note(now=True, last_worker_loss={**last, "took_ms": facts["took_ms"]})
        else:
            loss = {"at": self._clock.now().isoformat(), **facts}
            self.note(now=True, worker_losses=self._body["worker_losses"] + 1, last_worker_loss=loss)

    def prune(self) -> None:
        """Delete all but the newest runs."""
        names = sorted(s.name.rsplit("/", 1)[-1] for s in self._storage.list(self._folder))
        for name in names[:-KEPT_RUNS]:
            self._storage.delete(f"{self._folder}/{name}")


class RunLog:
    """Writes the history of a run once it owns the pipeline. Write errors are logged, never raised."""

    def __init__(self, storage: Storage, pipeline: str, run: str, clock: Clock) -> None:
        self._storage = storage
        self._pipeline = pipeline
        self._run = run
        self._clock = clock
        self._started_at = clock.now()
        self._record: RunHistory | None = None

    @property
    def is_open(self) -> bool:
        """Whether the run has been added to the history."""
        return self._record is not None

    def begin(self) -> None:
        """Set the start time of the run."""
        self._started_at = self._clock.now()

    def open(self, **facts: Any) -> None:
        """Add the run to the history."""
        if self._record is None:
            self._record = RunHistory(self._storage, self._pipeline, self._run, self._clock, self._started_at)
            with _only_logged():
                self._record.prune()
        self.note(now=True, **facts)

    def note(self, *, now: bool = False, **facts: Any) -> None:
        """Change facts, if the run is in the history."""
        if self._record is not None:
            with _only_logged():
                self._record.note(now=now, **facts)

    def restarted(self, error: FirnlineError, epoch: int | None, *, counts: bool) -> None:
        """Keep an error that the run overcomes; `counts`: it is a restart, not only another try of an optional sink."""
        if self._record is not None:
            with _only_logged():
                self._record.restarted(error.message, error.code, epoch, counts=counts)

    def lost_worker(self, facts: dict[str, Json]) -> None:
        """Count a lost worker or, with `took_ms`, record how long the recovery took."""
        if self._record is not None:
            with _only_logged():
                self._record.lost_worker(facts)

    def close(self, exit_code: int, error: FirnlineError | None = None, *, add: bool = False) -> None:
        """Write how the run ended, and why it failed. `add`: a failed run that claimed nothing is added, too."""
        now = self._clock.now().isoformat()
        facts: dict[str, Json] = {
            "status": {0: "done", 5: "fenced"}.get(exit_code, "failed"),
            "exit_code": exit_code,
            "ended_at": now,
        }
        if exit_code and error is not None:
            facts["error"] = {"at": now, "code": error.code, "message": error.message, "hint": error.hint}
        if self._record is None and add:
            self.open(**facts)
        else:
            self.note(now=True, **facts)


@contextlib.contextmanager
def _only_logged() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.warning("run history not written", extra={"reason": str(error)})


def load_runs(storage: Storage, pipeline: str, limit: int | None = None) -> list[dict[str, Json]]:
    """Return the runs of the history, at most `limit`, newest first. Unreadable records are skipped."""
    folder = runs_folder(pipeline)
    names = sorted((stat.name.rsplit("/", 1)[-1] for stat in storage.list(folder)), reverse=True)
    found: list[dict[str, Json]] = []
    for name in names:
        if name.startswith("."):
            continue
        if limit is not None and len(found) >= limit:
            break
        with contextlib.suppress(DamagedError, FileNotFoundError):
            found.append(unseal(parse(storage.get(f"{folder}/{name}"), name), name))
    return sorted(found, key=lambda r: str(r["started_at"]), reverse=True)


def has_died(run: dict[str, Json]) -> bool:
    """Return whether a run without a recorded end is dead. Only its own host can tell."""
    return bool(run["status"] == "running") and has_exited(str(run["host"]), int(run["pid"]))


def find_state(runs: Sequence[Mapping[str, Json]], control: Mapping[str, Json] | None) -> str:
    """Return the state word of a pipeline, from its history of runs, newest first, and the answer of a live run."""
    # A run that answers is newer than any record: it may not have written its own yet.
    if control and control["state"] != "ended":
        return str(control["state"])
    if not runs:
        return "new"
    running = runs[0]["status"] == "running"
    return "paused" if running and runs[0].get("paused") else str(runs[0]["status"])


def load_runs_marked(storage: Storage, pipeline: str, limit: int | None = None) -> list[dict[str, Json]]:
    """Return the runs like `load_runs`, with the status `died` for those that ended without a record."""
    runs = load_runs(storage, pipeline, limit)
    return [{**run, "status": "died"} if has_died(run) else run for run in runs]


DIED: dict[str, Json] = {
    "code": "killed",
    "message": "ended without a word, probably killed (kill -9, out of memory, power cut)",
    "hint": "Running again is safe: `firnline run` resumes after the newest epoch.",
    "epoch": None,
}


def find_last_error(runs: Sequence[Mapping[str, Json]]) -> dict[str, Json] | None:
    """Return the newest error in the history of runs: why a run ended, or the last one that a run overcame.

    `runs` are newest first, with the status `died` for those that ended without a record.
    """
    for run in runs:
        facts: dict[str, Json] = {"run": run["run"], "exit_code": run.get("exit_code"), "ended_run": True}
        restarts = run.get("last_restarts") or []
        if run["status"] == "died":
            return {**facts, **DIED, "at": run.get("updated_at") or run["started_at"]}
        if run.get("error"):
            return {**facts, **run["error"]}
        if restarts:
            last = restarts[-1]
            overcome = {"code": last["code"], "message": last["reason"], "hint": None, "epoch": last.get("epoch")}
            return {**facts, **overcome, "at": last["at"], "ended_run": False}
    return None
