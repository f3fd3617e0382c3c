"""The lease of a pipeline: decides which of several runs is active, and when another may take over.

The lease only avoids wasted work. The generation that the sink checks with every commit prevents two writers. The lease
is the key `<pipeline>/lease` of a checkpoint store. Runs take, renew and release it by compare and set, so only one of
two candidates succeeds. The version that took it is its fencing token, which only grows.

Clocks of different machines are never compared. A watcher considers the lease dead if it saw the same version for the
holder's full lease time, on its own monotonic clock. The holder counts from the moment before its last write, so it
knows that its lease may have ended before any other run takes it. That alone ends no run: only another run's version
does.

A run that does not stand by takes the lease unless its holder is alive. A holder is dead if its process has ended,
which only its own host can prove. Otherwise the renewal time in the record gives the first answer: a recent one means
alive. An old one may also be another machine's clock, so the lease is watched for a moment before it is taken. Whatever
the answer, the lease is taken by compare and set on the version that was judged: a renewal in between wins.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from enum import Enum
from functools import partial

from firnline.errors import (
    AlreadyRunningError,
    CheckpointError,
    DamagedError,
    FencedError,
    NewerFormatError,
    VersionConflictError,
)
from firnline.faults import fault_point
from firnline.process import HungError, TimedCalls, has_exited, this_process
from firnline.stores.base import CheckpointStore
from firnline.types import Clock, Json

logger = logging.getLogger(__name__)

RENEWALS = 3  # attempts within one lease: two may fail before it ends


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """The holder of the lease. A standby decides nothing by the times; a plain start only that the holder is alive."""

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
    start: str = ""  # of the holder's process, see `firnline.process.Process`

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
                start=str(value.get("start", "")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{what} is no lease: {error}", what=what) from error

    @property
    def description(self) -> str:
        """The holder, for messages."""
        return f"run {self.holder} on {self.host}:{self.pid}"

    @property
    def process_has_exited(self) -> bool:
        """Whether the holder's process has surely ended."""
        return has_exited(self.host, self.pid, self.start)


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

    def observe(self, sight: Sight | None) -> tuple[Watch, Verdict]:
        """Evaluate one read; None if the store did not answer, which proves nothing about the holder."""
        if sight is None:
            return self, Verdict.WAIT
        record = sight.record
        if sight.readable and (record is None or record.released or record.holder == self.run):
            return self, Verdict.TAKE  # our own: an earlier attempt whose answer was lost
        if sight.version != self.version:
            return replace(self, version=sight.version, since=sight.ended), Verdict.WAIT
        seconds = record.lease_seconds if record else self.patience
        return self, Verdict.TAKE if sight.began - self.since >= seconds else Verdict.WAIT


class Standing(Enum):
    """What one read of the lease says to a run that does not stand by."""

    FREE = "free"
    ALIVE = "alive"
    UNCERTAIN = "uncertain"


def judge(sight: Sight, run: str, now: datetime, *, exited: bool) -> Standing:
    """Judge one read of the lease. `exited`: the holder's process has surely ended. `now` is this machine's time."""
    record = sight.record
    if record is None:
        return Standing.FREE if sight.readable else Standing.UNCERTAIN
    if record.released or record.holder == run or exited:
        return Standing.FREE
    try:
        age = (now - datetime.fromisoformat(record.renewed_at)).total_seconds()
    except (ValueError, TypeError):
        return Standing.UNCERTAIN
    return Standing.ALIVE if abs(age) < record.lease_seconds else Standing.UNCERTAIN


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

    def verdict(self, now: float) -> Verdict:
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

    def confirmed(self, version: int) -> Tenure:
        """Continue from a write of ours whose answer was lost, and from no later time than known."""
        return replace(self, version=version)

    def unanswered(self) -> Tenure:
        return replace(self, failing=True)

    def overtaken(self) -> Tenure:
        return replace(self, taken_over=True)


KEPT_VERSIONS = 4
PRUNE_EVERY = 16  # versions, whichever run wrote them: many short runs prune too
TAKE_TRIES = 20  # conflicts with others that take it at the same time
UNANSWERED_TRIES = 3
POLLS = 8  # polls of a standby within one lease
LONGEST_POLL_SECONDS = 1.0
LEAST_PATIENCE_SECONDS, MOST_PATIENCE_SECONDS = 5.0, 30.0  # for a call to the store that the main thread waits for
EXIT_SECONDS = 4.0  # for the release at the end
MOST_DOUBT_SECONDS = 10.0  # a lease that looks expired is watched for half its time, but no longer


class Lease:
    """One run's side of the lease. Not thread-safe: only the keeper uses it, once it runs.

    The main thread makes its calls through `timed_calls`, so that a store that hangs does not block a signal.
    """

    def __init__(self, store: CheckpointStore, pipeline: str, run: str, seconds: float, clock: Clock) -> None:
        self._store = store
        self._key = f"{pipeline}/lease"
        self._seconds = seconds
        self._clock = clock
        self._run = run
        self._record: LeaseRecord | None = None
        self._writes = 0
        self._tried_at: float | None = None
        self.timed_calls = TimedCalls(patience(seconds))
        self.tenure: Tenure | None = None
        self.rival: LeaseRecord | None = None  # the last known holder

    @property
    def seconds(self) -> float:
        return self._seconds

    @property
    def run(self) -> str:
        return self._run

    @property
    def pipeline(self) -> str:
        return self._key.removesuffix("/lease")

    def judge(self, sight: Sight) -> Standing:
        """Judge one read of the lease by this machine's clock and processes."""
        exited = sight.record is not None and sight.record.process_has_exited
        return judge(sight, self._run, self._clock.now(), exited=exited)

    def running_error(self, record: LeaseRecord | None) -> AlreadyRunningError:
        """Return the error that names the live holder."""
        if record is None:
            return AlreadyRunningError(
                f"another run holds the lease of pipeline {self.pipeline!r}: it cannot be read here, but it is renewed"
            )
        return AlreadyRunningError(
            f"pipeline {self.pipeline!r} is already running: run {record.holder} on {record.host} (pid {record.pid}) "
            f"since {_short(record.taken_at)}, lease of {record.lease_seconds:g} s renewed at "
            f"{_short(record.renewed_at)}",
            run=record.holder, host=record.host, pid=record.pid, since=record.taken_at,
        )  # fmt: skip

    def read(self) -> Sight:
        """Read the holder of the lease. Raises OSError or CheckpointError if the store cannot be read."""
        began = self._clock.monotonic()
        record, readable = None, True
        while True:
            version = self._store.latest_version(self._key)
            try:
                record = self._store.get(self._key, LeaseRecord, version=version) if version else None
            except (DamagedError, NewerFormatError) as error:
                logger.warning("the lease cannot be read", extra={"reason": error.message})
                readable = False
            # Missing between the two reads means replaced; missing and still the newest means deleted.
            if record is not None or not readable or self._store.latest_version(self._key) == version:
                return Sight(version, record, began, self._clock.monotonic(), readable)

    def take(self, sight: Sight) -> bool:
        """Take the lease as last read. Returns False if another run was faster. After any error the outcome is unknown:
        read again."""
        if sight.record is not None and sight.record.holder == self._run and not sight.record.released:
            return self._confirm(sight, sight.record)  # an earlier attempt whose answer was lost
        now = self._clock.now().isoformat()
        token = sight.version + 1
        me = this_process()
        record = LeaseRecord(
            holder=self._run,
            host=me.host,
            pid=me.pid,
            user=me.user,
            token=token,
            taken_at=now,
            renewed_at=now,
            lease_seconds=self._seconds,
            writes=self._next_write(),
            start=me.start,
        )
        began = self._clock.monotonic()
        self._tried_at = began if self._tried_at is None else self._tried_at
        fault_point("lease.take.before")
        try:
            version = self._store.put(self._key, record, expected=sight.version, note=f"taken by {record.description}")
        except VersionConflictError:
            return False
        fault_point("lease.take.after")
        self._record = record
        self.tenure = Tenure(version, token, self._seconds, began)
        self._prune(version)
        return True

    def _confirm(self, sight: Sight, record: LeaseRecord) -> bool:
        self._record = record
        since = sight.began if self._tried_at is None else self._tried_at
        self.tenure = Tenure(sight.version, record.token, self._seconds, since)
        self.renew()
        return not self.tenure.taken_over

    def renew(self) -> None:
        """Renew the lease; `tenure` has the result. An error of the store counts as unanswered."""
        assert self.tenure is not None
        assert self._record is not None
        record = replace(self._record, renewed_at=self._clock.now().isoformat(), writes=self._next_write())
        began = self._clock.monotonic()
        try:
            fault_point("lease.renew.before")
            version = self._store.put(self._key, record, expected=self.tenure.version)
            fault_point("lease.renew.after")
        except VersionConflictError:
            self._find_out()
        except (OSError, CheckpointError) as error:
            self._go_unanswered("lease not renewed", error)
        else:
            self._record = record
            self.tenure = self.tenure.renewed(version, began)
            self._prune(version)

    def _find_out(self) -> None:
        """Handle a version that is not our last one: another run's, or our own write whose answer was lost."""
        assert self.tenure is not None
        try:
            sight = self.read()
        except (OSError, CheckpointError) as error:
            self._go_unanswered("lease not read", error)
            return
        record = sight.record
        deleted = record is None and sight.readable  # deleted by hand: no other run holds it
        if deleted or (record is not None and (record.holder, record.token) == (self._run, self.tenure.token)):
            self.tenure = self.tenure.confirmed(sight.version)
        else:
            self.rival = record
            self.tenure = self.tenure.overtaken()

    def _go_unanswered(self, what: str, error: Exception) -> None:
        assert self.tenure is not None
        log = logger.debug if self.tenure.failing else logger.warning  # an outage is logged once, not every time
        log(what, extra={"reason": str(error)})
        self.tenure = self.tenure.unanswered()

    def _next_write(self) -> int:
        self._writes += 1
        return self._writes

    def _prune(self, version: int) -> None:
        if version % PRUNE_EVERY:
            return
        try:
            self._store.prune(self._key, KEPT_VERSIONS)
        except (OSError, CheckpointError) as error:
            logger.warning("old versions of the lease not deleted", extra={"reason": str(error)})

    def release(self) -> None:
        """Release the lease, so that a standby takes over at once. If that fails, the standby waits for the end of the
        lease."""
        if self.tenure is None or self._record is None or self.tenure.taken_over:
            return
        record = replace(self._record, released=True, renewed_at=self._clock.now().isoformat())
        try:
            for _ in range(2):
                record = replace(record, writes=self._next_write())
                fault_point("lease.release.before")
                try:
                    note = f"released by {self._run}"
                    version = self._store.put(self._key, record, expected=self.tenure.version, note=note)
                except VersionConflictError:
                    self._find_out()
                    if self.tenure.taken_over:
                        return
                else:
                    fault_point("lease.release.after")
                    self._prune(version)
                    return
        except (OSError, CheckpointError) as error:
            logger.warning("lease not released", extra={"reason": str(error)})


def patience(seconds: float) -> float:
    """Return how long the main thread waits for one answer, for a lease of `seconds`."""
    return min(max(LEAST_PATIENCE_SECONDS, seconds), MOST_PATIENCE_SECONDS)


def take_now(lease: Lease) -> LeaseRecord | None:
    """Take the lease, even from a live holder. Returns the previous holder, unless it had released the lease.

    Raises:
        OSError: the store does not answer, or hangs.
        CheckpointError: its content is damaged, or others keep taking the lease.
    """
    return lease.timed_calls.call(lambda: _take_now(lease))


def _take_now(lease: Lease) -> LeaseRecord | None:
    unanswered, former = 0, None
    for _ in range(TAKE_TRIES):
        try:
            sight = lease.read()
            if sight.record is not None and sight.record.holder != lease.run:
                former = None if sight.record.released else sight.record
            if lease.take(sight):
                return former
        except (OSError, CheckpointError):  # the next read shows whether it was taken
            unanswered += 1
            if unanswered == UNANSWERED_TRIES:
                raise
    raise CheckpointError("several runs take the lease at the same time", hint="Start one run; others with --standby.")


def take_unless_held(lease: Lease, rest: Callable[[float], bool]) -> LeaseRecord | None:
    """Take the lease unless its holder is alive. Returns the previous holder, unless it had released the lease.

    `rest` waits for the given seconds and returns whether to stop.

    Raises:
        AlreadyRunningError: the holder is alive, or it is not certain yet and `rest` asked to stop.
        OSError: the store does not answer, or hangs.
        CheckpointError: its content is damaged.
    """
    unanswered, former = 0, None
    watched: Sight | None = None  # the first read of a lease that looks expired
    while True:
        try:
            sight = lease.timed_calls.call(lease.read)
            standing = lease.judge(sight)
            seconds = sight.record.lease_seconds if sight.record else lease.seconds
            if standing is Standing.UNCERTAIN:
                watched = watched or sight
                if watched.version != sight.version:
                    standing = Standing.ALIVE
                elif sight.began - watched.ended >= min(seconds / 2, MOST_DOUBT_SECONDS):
                    standing = Standing.FREE
            if standing is Standing.FREE:
                if sight.record is not None and sight.record.holder != lease.run:
                    former = None if sight.record.released else sight.record
                if lease.timed_calls.call(partial(lease.take, sight)):
                    return former
                continue  # another run was faster: the next read shows it
        except (OSError, CheckpointError):  # the next read shows whether it was taken
            unanswered += 1
            if unanswered == UNANSWERED_TRIES:
                raise
            continue
        if standing is Standing.ALIVE or rest(min(seconds / POLLS, LONGEST_POLL_SECONDS)):
            raise lease.running_error(sight.record)


def _short(moment: str) -> str:
    """A moment to the second; as it stands if it is no time."""
    try:
        return datetime.fromisoformat(moment).strftime("%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        return moment


def wait_for_lease(lease: Lease, rest: Callable[[float], bool], on_holder: Callable[[Sight | None], None]) -> bool:
    """Stand by until the lease is free or its holder dead, and take it. Returns False if asked to stop.

    `rest` waits for the given seconds and returns whether to stop. `on_holder` is called once for every holder that the
    standby waits for, and with None if the store does not answer.
    """
    watch = Watch(lease.run, lease.seconds)
    pause = min(lease.seconds / POLLS, LONGEST_POLL_SECONDS)
    last: object = ()
    while True:
        try:
            sight: Sight | None = lease.timed_calls.call(lease.read)
        except (OSError, CheckpointError) as error:
            logger.debug("the lease store does not answer", exc_info=error)
            sight = None
        watch, verdict = watch.observe(sight)
        if verdict is Verdict.TAKE and sight is not None:
            try:
                if lease.timed_calls.call(partial(lease.take, sight)):
                    return True
            except (OSError, CheckpointError) as error:  # the next read shows whether it was taken
                logger.warning("the answer to taking the lease was lost", extra={"reason": str(error)})
        seen = (sight.record.holder, sight.record.token) if sight and sight.record else sight is None
        if seen != last and verdict is Verdict.WAIT:
            last = seen
            on_holder(sight)
        if rest(pause):
            return False


class LeaseKeeper:
    """Renews a held lease on its own thread, and calls `lost` once if another run took it.

    A store that does not answer never ends a run: the table decides whose commits count, and the keeper retries.
    """

    def __init__(self, lease: Lease, clock: Clock, lost: Callable[[FencedError], None]) -> None:
        self._lease = lease
        self._clock = clock
        self._lost = lost
        self._lapsed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="firnline lease", daemon=True)

    def __enter__(self) -> LeaseKeeper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop renewing, and release the lease if it is still ours. A store that hangs is abandoned."""
        self._stop.set()
        try:
            self._lease.timed_calls.call(self._let_go, EXIT_SECONDS)
        except HungError as error:
            logger.warning("lease not released", extra={"reason": str(error)})

    def _let_go(self) -> None:
        self._thread.join()
        self._lease.release()

    def _keep(self) -> None:
        lease = self._lease
        while lease.tenure is not None and not self._stop.wait(lease.tenure.wait(self._clock.monotonic())):
            try:
                if lease.tenure.verdict(self._clock.monotonic()) is Verdict.RENEW:
                    lease.renew()
                if lease.tenure.verdict(self._clock.monotonic()) is Verdict.LOST:
                    self._lost(lost_error(lease))
                    return
            except Exception:  # a bug of ours must not stop renewal silently
                log = logger.debug if lease.tenure.failing else logger.error  # once, not with every attempt
                log("renewing the lease failed; trying again", exc_info=True)
                lease.tenure = lease.tenure.unanswered()
            self._tell(lease.tenure)

    def _tell(self, tenure: Tenure) -> None:
        if not self._lapsed and tenure.has_lapsed(self._clock.monotonic()):
            self._lapsed = True
            logger.warning("the lease lapsed: the store cannot be reached; going on, the table decides")
        elif self._lapsed and not tenure.failing:
            self._lapsed = False
            logger.warning("the lease is renewed again: the store answers, and nobody took it")


def lost_error(lease: Lease) -> FencedError:
    """Return the error that ends the run."""
    rival = lease.rival
    if rival is None:
        return FencedError("the lease was overwritten")
    if rival.released:
        return FencedError(f"{rival.description} took the lease over, and has ended")
    return FencedError(f"{rival.description} took the lease over (token {rival.token})", holder=rival.holder)
