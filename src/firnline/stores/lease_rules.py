"""Decides when a lease is dead, due or lost, from what was read and from monotonic time, without I/O.

Clocks of different machines are never compared. A watcher considers the lease dead if it saw the same version for the
holder's full lease time, on its own monotonic clock. The holder counts from the moment before its last write, so it
knows that its lease may have ended before any other run takes it. That alone ends no run: only another run's version
does.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import Enum

from firnline.errors import DamagedError
from firnline.types import Json

RENEWALS = 3  # attempts within one lease: two may fail before it ends


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """The holder of the lease. The times are for people: no decision depends on them."""

    holder: str  # the run's id
    host: str
    pid: int
    user: str
    token: int
    taken_at: str
    renewed_at: str
    lease_seconds: float
    writes: int = 1  # attempts of the holder: no two records have the same bytes, so a repeat is recognized
    released: bool = False

    def to_json(self) -> dict[str, Json]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Json, what: str = "lease") -> LeaseRecord:
        """Parse the output of `to_json`.

        Raises:
            DamagedError: it is invalid.
        """
        try:
            return cls(
                holder=str(value["holder"]),
                host=str(value["host"]),
                pid=int(value["pid"]),
                user=str(value["user"]),
                token=int(value["token"]),
                taken_at=str(value["taken_at"]),
                renewed_at=str(value["renewed_at"]),
                lease_seconds=float(value["lease_seconds"]),
                writes=int(value["writes"]),
                released=value["released"] is True,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{what} is no lease: {error}", what=what) from error

    @property
    def told(self) -> str:
        """The holder, for messages."""
        return f"run {self.holder} on {self.host}:{self.pid}"


# -- the decisions ------------------------------------------------------------------------------------


class Verdict(Enum):
    """What to do with the lease now."""

    WAIT = "wait"
    TAKE = "take"
    RENEW = "renew"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Sight:
    """One read of the lease, with the monotonic times before and after it."""

    version: int  # the version that the next put expects
    record: LeaseRecord | None  # None: missing or unreadable
    began: float
    ended: float
    readable: bool = True


@dataclass(frozen=True, slots=True)
class Watch:
    """A standby's view: since when the newest version is unchanged. `patience` is for a record without a lease time."""

    run: str
    patience: float
    version: int = -1
    since: float = 0.0

    def look(self, sight: Sight | None) -> tuple[Watch, Verdict]:
        """Judge one read. Returns None if the store did not answer, which proves nothing about the holder."""
        if sight is None:
            return self, Verdict.WAIT
        record = sight.record
        if sight.readable and (record is None or record.released or record.holder == self.run):
            return self, Verdict.TAKE  # our own: an earlier attempt whose answer was lost
        if sight.version != self.version:
            return replace(self, version=sight.version, since=sight.ended), Verdict.WAIT
        seconds = record.lease_seconds if record else self.patience
        return self, Verdict.TAKE if sight.began - self.since >= seconds else Verdict.WAIT


@dataclass(frozen=True, slots=True)
class Tenure:
    """A holder's view: its last write, and whether the store failed to answer since.

    If the holder slept or the store did not answer until the end of the lease, the lease has lapsed: any run may take
    it, but perhaps none did. Compare and set decides, so the holder keeps trying. The lease is lost once another run's
    version is read.
    """

    version: int
    token: int
    seconds: float
    since: float  # before the last successful write
    failing: bool = False
    taken_over: bool = False

    def judge(self, now: float) -> Verdict:
        """Return what is due at `now`."""
        if self.taken_over:
            return Verdict.LOST
        due = self.failing or now - self.since >= self.seconds / RENEWALS
        return Verdict.RENEW if due else Verdict.WAIT

    def has_lapsed(self, now: float) -> bool:
        """Return whether every attempt failed until the end of the lease."""
        return self.failing and now - self.since >= self.seconds

    def wait(self, now: float) -> float:
        """Return the seconds until something is due; after a failure, attempts are more frequent."""
        step = self.seconds / RENEWALS
        return step / 4 if self.failing else max(0.0, self.since + step - now)

    def renewed(self, version: int, began: float) -> Tenure:
        return replace(self, version=version, since=began, failing=False)

    def found_own(self, version: int) -> Tenure:
        """Continue from a write of ours whose answer was lost, and from no later time than known."""
        return replace(self, version=version)

    def unanswered(self) -> Tenure:
        return replace(self, failing=True)

    def overtaken(self) -> Tenure:
        return replace(self, taken_over=True)
