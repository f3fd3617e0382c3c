"""Whether a run is healthy and ready, judged from what it tells about itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from firnline.errors import FirnlineError, LedgerHoleError
from firnline.run.observer import EpochFacts, Observer
from firnline.sinks.base import Head
from firnline.sources.base import Backlog
from firnline.sources.group import EpochPlan
from firnline.stores.replicator import Replication

STUCK_SECONDS = 900.0  # an epoch takes seconds; one that takes this long needs a look
FAILURES_IN_A_ROW = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """An answer to `/healthz` or `/readyz`, with the reasons when it is no."""

    ok: bool
    reasons: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


class Judged(Protocol):
    """Something whose health can be asked for, from any thread."""

    def healthy(self) -> Verdict:
        """Whether it can go on by itself."""
        ...

    def ready(self) -> Verdict:
        """Whether it does its work now."""
        ...


class Health(Observer):
    """Listens to a run; may be asked from other threads.

    Args:
        pipeline: Named in every answer.
        monotonic: Seconds that never go back.
        poll_seconds: How often an idle run gives a sign of life.
        stuck_seconds: How long a run with work may show no progress.
    """

    def __init__(
        self,
        pipeline: str,
        monotonic: Callable[[], float],
        *,
        poll_seconds: float = 10.0,
        stuck_seconds: float = STUCK_SECONDS,
    ) -> None:
        self._pipeline = pipeline
        self._monotonic = monotonic
        self._stuck_seconds = stuck_seconds
        self._silent_seconds = stuck_seconds + 3 * poll_seconds
        self._lock = threading.Lock()
        self._read = False
        self._epoch = 0
        self._since: dict[int, float] = {}  # epochs in flight: when they were planned
        self._sign_at = monotonic()
        self._failures = 0
        self._error = ""
        self._exit_code: int | None = None
        self._paused = False
        self._ledger_hole: str | None = None
        self._copies: dict[str, str] = {}

    # -- the answers ----------------------------------------------------------------------------------

    def healthy(self) -> Verdict:
        """No when the run has failed, fails again and again, or is stuck."""
        with self._lock:
            reasons = []
            if self._exit_code:
                reasons.append(f"the run failed with exit code {self._exit_code}: {self._error or 'no reason given'}")
            if self._exit_code is None:
                reasons += self._stuck()
                if self._failures >= FAILURES_IN_A_ROW:
                    reasons.append(f"{self._failures} failures in a row; the last: {self._error}")
            return self._verdict(reasons)

    def ready(self) -> Verdict:
        """Yes while the run has read its sinks and makes progress or waits for input."""
        with self._lock:
            reasons = []
            if self._exit_code is not None:
                reasons.append(f"the run is over, with exit code {self._exit_code}")
            else:
                if not self._read:
                    reasons.append("the sinks have not been read yet")
                if self._failures:
                    reasons.append(f"trying again after {self._failures} failure(s): {self._error}")
                reasons += self._stuck()
            return self._verdict(reasons)

    def _stuck(self) -> list[str]:
        now = self._monotonic()
        late = [(epoch, now - at) for epoch, at in self._since.items() if now - at > self._stuck_seconds]
        found = [f"epoch {epoch} was planned {age:.0f} s ago and is not committed" for epoch, age in late]
        silent = now - self._sign_at
        if not found and silent > self._silent_seconds and not self._paused:
            found.append(f"no sign of life for {silent:.0f} s")
        return found

    def _verdict(self, reasons: list[str]) -> Verdict:
        facts = {
            "pipeline": self._pipeline,
            "epoch": self._epoch,
            "epochs_in_flight": sorted(self._since),
            "failures_in_a_row": self._failures,
            "paused": self._paused,
            "ledger_hole": self._ledger_hole,
            "copies_failing": dict(self._copies),
        }
        return Verdict(not reasons, reasons, facts)

    # -- what the run tells ---------------------------------------------------------------------------

    def _sign(self) -> None:
        self._sign_at = self._monotonic()

    def started(self, run: str, held: Head) -> None:
        with self._lock:
            self._read = True
            self._epoch = held.epoch
            self._sign()

    def claimed(self, generation: int) -> None:
        with self._lock:
            self._sign()

    def planned(self, epoch: int, plan: EpochPlan) -> None:
        with self._lock:
            self._since[epoch] = self._monotonic()
            self._sign()

    def running(self, epoch: int) -> None:
        with self._lock:
            self._sign()

    def ran(self, epoch: int, seconds: float) -> None:
        with self._lock:
            self._sign()

    def committed(self, facts: EpochFacts) -> None:
        with self._lock:
            self._epoch = facts.epoch
            self._since = {e: at for e, at in self._since.items() if e > facts.epoch}
            self._recovered()

    def idle(self) -> None:
        with self._lock:
            self._since.clear()
            self._recovered()

    def _recovered(self) -> None:
        """Only a commit, or an empty plan, proves that the trouble is over."""
        self._failures, self._error = 0, ""
        self._sign()

    def paused(self, paused: bool) -> None:
        """A paused run is healthy: its silence is wanted."""
        with self._lock:
            self._paused = paused
            self._sign()

    def ledger_hole(self, error: LedgerHoleError | None) -> None:
        """Told, and no failure: what is not late is read."""
        with self._lock:
            self._ledger_hole = error.message if error else None

    def copies(self, lags: Sequence[Replication]) -> None:
        """A copy that cannot be written is told, but the run is healthy: the table has everything."""
        with self._lock:
            self._copies = {lag.path: lag.reason for lag in lags if lag.reason}

    def backlog(self, backlog: Backlog) -> None:
        """No sign of progress: a count goes on while an epoch hangs."""

    def trouble(self, error: FirnlineError, failures: int) -> None:
        with self._lock:
            self._failures = max(self._failures + 1, failures)
            self._error = error.message
            self._since.clear()  # what failed is planned again
            self._sign()

    def stopped(self, exit_code: int) -> None:
        with self._lock:
            self._exit_code = exit_code
            self._since.clear()


class CommitterHealth:
    """Listens to a committer of one or several tables: it is healthy while every table is.

    A table's health depends on its own rounds alone, so that one that fails is not hidden by others that succeed.
    """

    def __init__(self, monotonic: Callable[[], float], *, poll_seconds: float = 10.0) -> None:
        self._monotonic = monotonic
        self._poll_seconds = poll_seconds
        self._lock = threading.Lock()
        self._tables: dict[str, Health] = {}

    def of(self, table: str) -> Health:
        """The health of one table; a table that was never heard of is not ready."""
        with self._lock:
            if table not in self._tables:
                self._tables[table] = Health("committer", self._monotonic, poll_seconds=self._poll_seconds)
            return self._tables[table]

    def healthy(self) -> Verdict:
        return self._all(Health.healthy)

    def ready(self) -> Verdict:
        return self._all(Health.ready)

    def _all(self, ask: Callable[[Health], Verdict]) -> Verdict:
        with self._lock:
            verdicts = {table: ask(health) for table, health in self._tables.items()}
        reasons = [f"{table}: {reason}" for table, verdict in verdicts.items() for reason in verdict.reasons]
        if not verdicts:
            return Verdict(ask is Health.healthy, ["no table has been looked at yet"])
        tables = {
            table: {"ok": verdict.ok, "failures_in_a_row": verdict.facts["failures_in_a_row"]}
            for table, verdict in verdicts.items()
        }
        return Verdict(not reasons, reasons, {"pipeline": "committer", "tables": tables})
