"""The lease of a pipeline: decides which of several runs is active, and when another may take over.

The lease only avoids wasted work. The generation that the sink checks with every commit prevents two writers. The lease
is the key `<pipeline>/lease` of a checkpoint store. Runs take, renew and release it by compare and set, so only one of
two candidates succeeds. The version that took it is its fencing token, which only grows. `lease_rules` decides when a
lease is dead, due or lost.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from firnline.errors import CheckpointError, DamagedError, FencedError, NewerFormatError, VersionConflictError
from firnline.faults import fault_point
from firnline.process import HungError, TimedCalls, this_process
from firnline.stores.base import CheckpointStore
from firnline.stores.lease_rules import LeaseRecord, Sight, Tenure, Verdict, Watch
from firnline.types import Clock

logger = logging.getLogger(__name__)

KEPT_VERSIONS = 4
PRUNE_EVERY = 16  # versions, whichever run wrote them: many short runs prune too
TAKE_TRIES = 20  # conflicts with others that take it at the same time
UNANSWERED_TRIES = 3
LOOKS = 8  # polls of a standby within one lease
LONGEST_LOOK_SECONDS = 1.0
LEAST_PATIENCE_SECONDS, MOST_PATIENCE_SECONDS = 5.0, 30.0  # for a call to the store that the main thread waits for
EXIT_SECONDS = 4.0  # for the release at the end


class Lease:
    """One run's side of the lease. Not thread-safe: only the keeper uses it, once it runs.

    The main thread makes its calls through `calls`, so that a store that hangs does not block a signal.
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
        self.calls = TimedCalls(patience(seconds))
        self.tenure: Tenure | None = None
        self.rival: LeaseRecord | None = None  # the last known holder

    @property
    def seconds(self) -> float:
        return self._seconds

    @property
    def run(self) -> str:
        return self._run

    def look(self) -> Sight:
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
        )
        began = self._clock.monotonic()
        self._tried_at = began if self._tried_at is None else self._tried_at
        fault_point("lease.take.before")
        try:
            version = self._store.put(self._key, record, expected=sight.version, note=f"taken by {record.told}")
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
            sight = self.look()
        except (OSError, CheckpointError) as error:
            self._go_unanswered("lease not read", error)
            return
        record = sight.record
        deleted = record is None and sight.readable  # deleted by hand: no other run holds it
        if deleted or (record is not None and (record.holder, record.token) == (self._run, self.tenure.token)):
            self.tenure = self.tenure.found_own(sight.version)
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
    return lease.calls.call(lambda: _take_now(lease))


def _take_now(lease: Lease) -> LeaseRecord | None:
    unanswered, former = 0, None
    for _ in range(TAKE_TRIES):
        try:
            sight = lease.look()
            if sight.record is not None and sight.record.holder != lease.run:
                former = None if sight.record.released else sight.record
            if lease.take(sight):
                return former
        except (OSError, CheckpointError):  # the next read shows whether it was taken
            unanswered += 1
            if unanswered == UNANSWERED_TRIES:
                raise
    raise CheckpointError("several runs take the lease at the same time", hint="Start one run; others with --standby.")


def wait_for_lease(lease: Lease, rest: Callable[[float], bool], told: Callable[[Sight | None], None]) -> bool:
    """Stand by until the lease is free or its holder dead, and take it. Returns False if asked to stop.

    `rest` waits for the given seconds and returns whether to stop. `told` is called once for every holder that the
    standby waits for, and with None if the store does not answer.
    """
    watch = Watch(lease.run, lease.seconds)
    pause = min(lease.seconds / LOOKS, LONGEST_LOOK_SECONDS)
    last: object = ()
    while True:
        try:
            sight: Sight | None = lease.calls.call(lease.look)
        except (OSError, CheckpointError) as error:
            logger.debug("the lease store does not answer", exc_info=error)
            sight = None
        watch, verdict = watch.look(sight)
        if verdict is Verdict.TAKE and sight is not None:
            try:
                if lease.calls.call(partial(lease.take, sight)):
                    return True
            except (OSError, CheckpointError) as error:  # the next read shows whether it was taken
                logger.warning("the answer to taking the lease was lost", extra={"reason": str(error)})
        seen = (sight.record.holder, sight.record.token) if sight and sight.record else sight is None
        if seen != last and verdict is Verdict.WAIT:
            last = seen
            told(sight)
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
            self._lease.calls.call(self._let_go, EXIT_SECONDS)
        except HungError as error:
            logger.warning("lease not released", extra={"reason": str(error)})

    def _let_go(self) -> None:
        self._thread.join()
        self._lease.release()

    def _keep(self) -> None:
        lease = self._lease
        while lease.tenure is not None and not self._stop.wait(lease.tenure.wait(self._clock.monotonic())):
            try:
                if lease.tenure.judge(self._clock.monotonic()) is Verdict.RENEW:
                    lease.renew()
                if lease.tenure.judge(self._clock.monotonic()) is Verdict.LOST:
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
        return FencedError(f"{rival.told} took the lease over, and has ended")
    return FencedError(f"{rival.told} took the lease over (token {rival.token})", holder=rival.holder)
