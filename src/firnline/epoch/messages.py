"""Events, which the decisions of an epoch get, and actions, which they ask for; values without behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

ACKNOWLEDGEMENT = "\0acknowledge"  # the back-off timer of acknowledgements; no sink has this name

# -- events: what happened ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The run begins."""


@dataclass(frozen=True, slots=True)
class SinksRead:
    """What every sink holds: `(name, epoch)` of the decided chain, and the tip's attempt.

    A further sink that could not be read is left out. `recorded` and `acknowledged` are the epochs up to
    which that was done, where that is known; None counts as done. `committed` is what the deciding table's log
    holds, where a committer commits; None: all that the deciding sink holds. `owed` says that a source may lack an
    acknowledgement, because an earlier run may have died before it.
    """

    tip: str
    epochs: tuple[tuple[str, int], ...]
    recorded: int | None = None
    acknowledged: int | None = None
    committed: int | None = None
    owed: bool = False
    away: tuple[str, ...] = ()  # sinks that are set aside
    filling: tuple[str, ...] = ()  # sinks that get what was before they were added


@dataclass(frozen=True, slots=True)
class SetAside:
    """A decided epoch gives a sink up that fell too far behind: it gets nothing more, and counts nowhere."""

    sink: str


@dataclass(frozen=True, slots=True)
class Planned:
    """A slice for `epoch` was planned on the epoch whose attempt is `base`."""

    epoch: int
    attempt: str
    base: str


@dataclass(frozen=True, slots=True)
class NothingToPlan:
    """The sources have nothing (more) to read now."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """Our claim stands; under it the deciding sink holds `epoch` with the attempt `tip`.

    `committed` is what its log holds, where a committer commits. `away` are the sinks that this epoch has set aside,
    `filling` those that still get what was before they were added.
    """

    epoch: int
    tip: str
    committed: int | None = None
    away: tuple[str, ...] = ()
    filling: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Joined:
    """Our generation is registered in a further sink, which holds `epoch`."""

    sink: str
    epoch: int


@dataclass(frozen=True, slots=True)
class WentBack:
    """A further sink lost our claim or an epoch that it held, and no newer generation holds it: it is joined again."""

    sink: str


@dataclass(frozen=True, slots=True)
class Ran:
    """The Spark job of an epoch ended; its outputs are complete and invisible."""

    epoch: int
    attempt: str


@dataclass(frozen=True, slots=True)
class Staged:
    """The ledger entry of an epoch is durable."""

    epoch: int
    attempt: str


@dataclass(frozen=True, slots=True)
class Committed:
    """A sink holds an epoch: it answered a commit, or was asked and found the receipt.

    `committed` is what the log of a deciding sink holds, where a committer commits.
    """

    sink: str
    epoch: int
    attempt: str
    committed: int | None = None


@dataclass(frozen=True, slots=True)
class LogRead:
    """The deciding table's log, under our claim, holds our chain up to `epoch`."""

    epoch: int


@dataclass(frozen=True, slots=True)
class CommitUnclear:
    """A commit failed or its answer was lost, or the question for the receipt failed; the sink knows which."""

    sink: str
    epoch: int


@dataclass(frozen=True, slots=True)
class ReceiptAbsent:
    """The sink was asked and does not hold the epoch."""

    sink: str
    epoch: int


@dataclass(frozen=True, slots=True)
class EpochLost:
    """An epoch cannot be committed as it was made (a job failed, the table changed under it).

    Said of a commit only when the sink was read after the refusal and does not hold this attempt. Without
    `is_failure` the next attempt leaves out what failed: it begins at once, and counts as no failure of the run.
    """

    epoch: int
    attempt: str
    is_failure: bool = True


@dataclass(frozen=True, slots=True)
class Fenced:
    """Another run claimed a newer generation, or authored our epoch."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A step that belongs to no epoch failed: reading, claiming, planning, or joining `sink`."""

    retry: bool
    exit_code: int = 3
    sink: str = ""


@dataclass(frozen=True, slots=True)
class Recorded:
    """Everything up to `epoch` is recorded."""

    epoch: int


@dataclass(frozen=True, slots=True)
class RecordFailed:
    """Recording or acknowledging failed; both are repeatable."""

    retry: bool = True
    exit_code: int = 3


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Sources may have forgotten what lies up to `epoch`.

    `missed`: a source did not take it, or the remote tier lags, so it is to be sent again later.
    """

    epoch: int
    missed: bool = False


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A poll interval or a back-off has passed: the whole run's, that of one sink, or ACKNOWLEDGEMENT."""

    sink: str = ""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Finish what is in flight, plan no more."""


@dataclass(frozen=True, slots=True)
class ShardsChanged:
    """The state of operators is to be dealt out to another number of shards, under a new generation."""


Event: TypeAlias = (
    Started | SinksRead | Planned | NothingToPlan | Claimed | Joined | Ran | Staged | Committed | CommitUnclear
    | LogRead | ReceiptAbsent | EpochLost | Fenced | Failed | Recorded | RecordFailed | Acknowledged | TimerFired
    | StopRequested | ShardsChanged | SetAside | WentBack
)  # fmt: skip


# -- actions: what the runner does --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadSinks:
    """Ask every sink what it holds."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan `epoch` on the epoch before it, whose attempt is `base`."""

    epoch: int
    base: str


@dataclass(frozen=True, slots=True)
class Claim:
    """Claim a new generation in the deciding sink; `again`: only if no other run has claimed since we did."""

    again: bool = False


@dataclass(frozen=True, slots=True)
class Join:
    """Register our generation in a further sink, then read what it holds."""

    sink: str


@dataclass(frozen=True, slots=True)
class Run:
    """Start the Spark job of a planned epoch."""

    epoch: int
    attempt: str


@dataclass(frozen=True, slots=True)
class StageEntry:
    """Write the ledger entry of an epoch whose job has ended."""

    epoch: int
    attempt: str


@dataclass(frozen=True, slots=True)
class Commit:
    """Commit an epoch to one sink; for a decided epoch the slice and attempt of its ledger entry."""

    sink: str
    epoch: int


@dataclass(frozen=True, slots=True)
class WatchLog:
    """Read, after a while, how far the committer has come in the deciding table."""


@dataclass(frozen=True, slots=True)
class FindReceipt:
    """Ask a sink whether it holds the epoch."""

    sink: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget an epoch in flight; cancel its job. Its files are never deleted on doubt."""

    epoch: int
    attempt: str


@dataclass(frozen=True, slots=True)
class Record:
    """Record everything up to `epoch` (run history, stores)."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Let sources forget what lies up to `epoch`; prune. `since` is what was acknowledged before.

    `again`: only repeat to the sources what one of them may have missed; nothing else is due.
    """

    epoch: int
    since: int = 0
    again: bool = False

    def passes(self, interval: int) -> bool:
        """Whether a multiple of an interval lies in between: upkeep that is due now and then is due now."""
        return self.epoch // interval > self.since // interval


@dataclass(frozen=True, slots=True)
class Wait:
    """Fire TimerFired later: after the poll interval, or a back-off that grows with `failures`."""

    failures: int = 0
    sink: str = ""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the run."""

    exit_code: int


Action: TypeAlias = (
    ReadSinks
    | Plan
    | Claim
    | Join
    | Run
    | StageEntry
    | Commit
    | WatchLog
    | FindReceipt
    | Drop
    | Record
    | Acknowledge
    | Wait
    | Stop
)
