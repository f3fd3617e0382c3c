"""When a lease is dead, due or lost: decided from what was seen and from monotonic time, without I/O.

No clock of another machine is compared with ours. A watcher takes the lease for dead when it saw the same version
for as long as the holder promised to renew in, by its own monotonic clock; the holder counts from the moment before
its own last write. So a holder that runs knows that its lease may be over before anybody takes it. That alone ends
no run: only another's version does.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import Enum

from firnline.errors import DamagedError
from firnline.types import Json

RENEWALS = 3  # tries within one lease: two may fail before it is over


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """Who holds the lease. The times are for people: nothing is decided from them."""

    holder: str  # the run's id
    host: str
    pid: int
    user: str
    token: int
    taken_at: str
    renewed_at: str
    lease_seconds: float
    writes: int = 1  # tries of the holder: no two have the same bytes, so a repeat is not taken for the first one
    released: bool = False

    def to_json(self) -> dict[str, Json]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Json, what: str = "lease") -> LeaseRecord:
        """Read what `to_json` wrote.

        Raises:
            DamagedError: it is something else.
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
    """What to do about the lease now."""

    WAIT = "wait"
    TAKE = "take"
    RENEW = "renew"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Sight:
    """One look at the lease, with the monotonic times before and after it."""

    version: int  # what the next put must expect
    record: LeaseRecord | None  # None: there is none, or it cannot be read
    began: float
    ended: float
    readable: bool = True


@dataclass(frozen=True, slots=True)
class Watch:
    """A standby: since when the newest version has been the same. `patience` is for a record that tells none."""

    run: str
    patience: float
    version: int = -1
    since: float = 0.0

    def look(self, sight: Sight | None) -> tuple[Watch, Verdict]:
        """Judge a look; None when the store did not answer, which says nothing about the holder."""
        if sight is None:
            return self, Verdict.WAIT
        record = sight.record
        if sight.readable and (record is None or record.released or record.holder == self.run):
            return self, Verdict.TAKE  # our own: an earlier try whose answer was lost
        if sight.version != self.version:
            return replace(self, version=sight.version, since=sight.ended), Verdict.WAIT
        seconds = record.lease_seconds if record else self.patience
        return self, Verdict.TAKE if sight.began - self.since >= seconds else Verdict.WAIT


@dataclass(frozen=True, slots=True)
class Tenure:
    """A holder: when it last wrote, and whether the store failed to answer since.

    Past its end, because the holder slept or the store did not answer, a lease has lapsed: anybody may take it, but
    perhaps nobody did. Compare and set tells, so the holder tries on. It is lost when another's version is found.
    """

    version: int
    token: int
    seconds: float
    since: float  # before the last write that succeeded
    failing: bool = False
    taken_over: bool = False

    def judge(self, now: float) -> Verdict:
        """What is due at `now`."""
        if self.taken_over:
            return Verdict.LOST
        due = self.failing or now - self.since >= self.seconds / RENEWALS
        return Verdict.RENEW if due else Verdict.WAIT

    def has_lapsed(self, now: float) -> bool:
        """Whether it was tried in vain until the end of the lease."""
        return self.failing and now - self.since >= self.seconds

    def wait(self, now: float) -> float:
        """Seconds until something is due; after a failure it is tried more often."""
        step = self.seconds / RENEWALS
        return step / 4 if self.failing else max(0.0, self.since + step - now)

    def renewed(self, version: int, began: float) -> Tenure:
        return replace(self, version=version, since=began, failing=False)

    def found_own(self, version: int) -> Tenure:
        """A write of ours stands whose answer was lost: go on from it, and from no later time than known."""
        return replace(self, version=version)

    def unanswered(self) -> Tenure:
        return replace(self, failing=True)

    def overtaken(self) -> Tenure:
        return replace(self, taken_over=True)
