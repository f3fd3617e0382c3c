"""Health and readiness of a run or a committer, derived from the events that it reports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from firnline.errors import FirnlineError, LedgerHoleError
from firnline.run.observer import EpochFacts, Observer
from firnline.sinks.base import Head
from firnline.sources.base import Backlog
from firnline.sources.group import EpochPlan
from firnline.stores.replicator import Replication

STUCK_SECONDS = 900.0  # an epoch takes seconds; an epoch that takes this long is stuck
FAILURES_IN_A_ROW = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """An answer to `/healthz` or `/readyz`, with the reasons if it is negative."""

    ok: bool
    reasons: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


class HealthCheck(Protocol):
    """Answers questions about health, from any thread."""

    def healthy(self) -> Verdict:
        """Whether the process can continue by itself."""
        ...

    def ready(self) -> Verdict:
        """Whether the process does its work now."""
        ...


class Health(Observer):
    """Observes a run, and answers questions about its health from other threads.

    Args:
        pipeline: Its name, part of every answer.
        monotonic: Seconds that never go back.
        poll_seconds: Interval at which an idle run reports an event.
        stuck_seconds: How long a run with work may report no progress.
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
        self._unreachable: dict[str, str] = {}

    # -- the answers ----------------------------------------------------------------------------------

    def healthy(self) -> Verdict:
        """Negative if the run has failed, fails repeatedly, or is stuck."""
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
        """Positive while the run has read its sinks and makes progress or waits for input."""
        with self._lock:
            reasons = []
            if self._exit_code is not None:
                reasons.append(f"the run has ended with exit code {self._exit_code}")
            else:
                if not self._read:
                    reasons.append("the sinks have not been read yet")
                if self._failures:
                    reasons.append(f"retrying after {self._failures} failure(s): {self._error}")
                reasons += self._stuck()
            return self._verdict(reasons)

    def _stuck(self) -> list[str]:
        now = self._monotonic()
        late = [(epoch, now - at) for epoch, at in self._since.items() if now - at > self._stuck_seconds]
        reasons = [f"epoch {epoch} was planned {age:.0f} s ago and is not committed" for epoch, age in late]
        silent = now - self._sign_at
        if not reasons and silent > self._silent_seconds and not self._paused:
            reasons.append(f"no event for {silent:.0f} s")
        return reasons

    def _verdict(self, reasons: list[str]) -> Verdict:
        facts = {
            "pipeline": self._pipeline,
            "epoch": self._epoch,
            "epochs_in_flight": sorted(self._since),
            "failures_in_a_row": self._failures,
            "paused": self._paused,
            "ledger_hole": self._ledger_hole,
            "copies_failing": dict(self._copies),
            "sources_unreachable": dict(self._unreachable),
        }
        return Verdict(not reasons, reasons, facts)

    # -- events of the run ----------------------------------------------------------------------------

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
        """Reset the failures: only a commit or an empty plan proves that the run has recovered."""
        self._failures, self._error = 0, ""
        self._sign()

    def paused(self, paused: bool) -> None:
        """Note the pause: a paused run is healthy although it reports nothing."""
        with self._lock:
            self._paused = paused
            self._sign()

    def ledger_hole(self, error: LedgerHoleError | None) -> None:
        """Report the hole without failing: the run still reads files that are not late."""
        with self._lock:
            self._ledger_hole = error.message if error else None

    def sources(self, unreachable: Mapping[str, str | None]) -> None:
        """Report sources that cannot be reached; the run stays healthy, because a restart would not help."""
        with self._lock:
            self._unreachable = {name: reason for name, reason in unreachable.items() if reason}

    def copies(self, lags: Sequence[Replication]) -> None:
        """Report copies that cannot be written; the run stays healthy, because the table has everything."""
        with self._lock:
            self._copies = {lag.tier: lag.reason for lag in lags if lag.reason}

    def backlog(self, backlog: Backlog) -> None:
        """Ignore it: counting the backlog proves no progress, it continues while an epoch hangs."""

    def trouble(self, error: FirnlineError, failures: int, optional: str = "") -> None:
        with self._lock:
            self._failures = max(self._failures + 1, failures)
            self._error = error.message
            self._since.clear()  # failed epochs are planned again
            self._sign()

    def stopped(self, exit_code: int) -> None:
        with self._lock:
            self._exit_code = exit_code
            self._since.clear()


class CommitterHealth:
    """Observes a committer of one or several tables, which is healthy while every table is.

    The health of a table depends only on its own rounds, so that tables that succeed do not hide one that fails.
    """

    def __init__(self, monotonic: Callable[[], float], *, poll_seconds: float = 10.0) -> None:
        self._monotonic = monotonic
        self._poll_seconds = poll_seconds
        self._lock = threading.Lock()
        self._tables: dict[str, Health] = {}

    def of(self, table: str) -> Health:
        """Return the health of one table; a table without any round is not ready."""
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
            return Verdict(ask is Health.healthy, ["no commit round has finished yet"])
        tables = {
            table: {"ok": verdict.ok, "failures_in_a_row": verdict.facts["failures_in_a_row"]}
            for table, verdict in verdicts.items()
        }
        return Verdict(not reasons, reasons, {"pipeline": "committer", "tables": tables})
