"""The durable history of runs, for people and `status`: where and when each ran, its errors, how it ended."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from typing import Any

from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.errors import DamagedError, FirnlineError
from firnline.names import run_name, runs_folder
from firnline.process import has_exited, this_process
from firnline.storage import Storage
from firnline.types import Clock, Json

logger = logging.getLogger(__name__)

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
            "sinks_failing": {},  # sink -> why it could not be joined or written
            "copies_failing": {},  # store, local or remote -> why it cannot be written
            "align_ms": None,  # of the newest epoch: from the first source's slice to the boundary
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

    def restarted(self, reason: str, code: str, epoch: int | None) -> None:
        """Count a restart and write it at once; `epoch` is the one that failed, if any."""
        entry = {"at": self._clock.now().isoformat(), "code": code, "reason": reason, "epoch": epoch}
        kept = [*self._body["last_restarts"], entry][-KEPT_RESTARTS:]
        self.note(now=True, restarts=self._body["restarts"] + 1, last_restarts=kept)

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

    def restarted(self, error: FirnlineError, epoch: int | None) -> None:
        """Count a restart after an error; `epoch` is the one that failed, if any."""
        if self._record is not None:
            with _only_logged():
                self._record.restarted(error.message, error.code, epoch)

    def lost_worker(self, facts: dict[str, Json]) -> None:
        """Count a lost worker or, with `took_ms`, record how long the recovery took."""
        if self._record is not None:
            with _only_logged():
                self._record.lost_worker(facts)

    def close(self, exit_code: int) -> None:
        """Write how the run ended."""
        status = {0: "done", 5: "fenced"}.get(exit_code, "failed")
        self.note(now=True, status=status, exit_code=exit_code, ended_at=self._clock.now().isoformat())


@contextlib.contextmanager
def _only_logged() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.warning("run history not written", extra={"reason": str(error)})


def load_runs(storage: Storage, pipeline: str) -> list[dict[str, Json]]:
    """Return the runs of the history, newest first. Unreadable records are skipped."""
    found = []
    for stat in storage.list(runs_folder(pipeline)):
        name = stat.name.rsplit("/", 1)[-1]
        if name.startswith("."):
            continue
        try:
            data = storage.get(f"{runs_folder(pipeline)}/{name}")
            found.append(unseal(parse(data, name), name))
        except (DamagedError, FileNotFoundError):
            continue
    return sorted(found, key=lambda r: str(r["started_at"]), reverse=True)


def has_died(run: dict[str, Json]) -> bool:
    """Return whether a run without a recorded end is dead. Only its own host can tell."""
    return bool(run["status"] == "running") and has_exited(str(run["host"]), int(run["pid"]))
