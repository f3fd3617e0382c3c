"""The lease of a run: takes it unless a live run holds it, or stands by for it, and renews it while the run lasts."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from firnline.errors import CheckpointError, ConfigError, FencedError
from firnline.process import HungError, TimedCalls

if TYPE_CHECKING:
    from firnline.options import PipelineOptions, StoreOptions
    from firnline.stores.base import CheckpointStore
    from firnline.stores.lease import Lease, Sight

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
Say = Callable[[str], None]
Take = Callable[[], None]


class Stop(Protocol):
    """Asks a standby to stop waiting."""

    def wait(self, seconds: float) -> bool:
        """Wait for at most `seconds`, and return whether to stop."""
        ...


class Holder(Protocol):
    """Who takes the lease: a run, or a command that edits the history."""

    @property
    def run_id(self) -> str: ...

    def fence(self, error: FencedError) -> None:
        """Called once, from another thread, if another run took the lease."""
        ...


@dataclass(frozen=True, slots=True)
class Editor:
    """A command that edits the history. If another run takes the lease meanwhile, the sink's fence decides."""

    run_id: str

    def fence(self, error: FencedError) -> None:
        logger.warning("the lease was taken over", extra={"reason": error.message})


class _Never:
    """Nothing asks a command to stop: it waits a few seconds at most."""

    def wait(self, seconds: float) -> bool:
        time.sleep(seconds)
        return False


@contextlib.contextmanager
def editing_history(options: PipelineOptions, run: str, say: Say, *, take_over: bool) -> Iterator[None]:
    """Hold the lease while a command edits the history.

    Raises:
        AlreadyRunningError: a run holds the lease and is alive; with `take_over` that run is fenced instead.
    """
    with holding_lease(options, Editor(run), say, standby=False, stop=_Never(), take_over=take_over):
        yield


def check_standby(options: PipelineOptions) -> None:
    """Refuse to stand by if other processes cannot see the lease."""
    if _lease_store(options) is None:
        raise ConfigError(
            "--standby needs a checkpoint store that other processes see",
            hint="Give checkpoint.store a type of file, sqlite, postgres or object in the spec.",
        )


def _lease_store(options: PipelineOptions) -> StoreOptions | None:
    store = options.checkpoint.store
    return None if store is None or store.type == "memory" else store


@contextlib.contextmanager
def holding_lease(
    options: PipelineOptions, holder: Holder, say: Say, *, standby: bool, stop: Stop, take_over: bool = False,
    at_claim: bool = False,
) -> Iterator[Take | None]:  # fmt: skip
    """Hold the lease while the run is active. Losing the lease fences the run.

    Yields what the run calls before it claims, or None if a standby was stopped while it waited. A run that cannot
    reach the store runs without a lease: the lease only avoids wasted work, and the sink's fence prevents two writers.

    Args:
        take_over: Take the lease even from a live holder, which then ends as fenced.
        at_claim: Take the lease only when the run claims, so that a run with nothing to do takes none.

    Raises:
        AlreadyRunningError: another run holds the lease and is alive. With `at_claim`, the yielded call raises it.
    """
    store_options = _lease_store(options)
    if store_options is None:
        say(f"no lease: {_NO_LEASE}")
        yield _nothing
        return
    with contextlib.ExitStack() as stack:

        def take() -> bool:
            return _take(options, store_options, holder, say, stop, stack, standby=standby, take_over=take_over)

        if at_claim:
            once = _Once(take)
            try:
                yield once.call
            finally:
                once.close()  # before the stack ends
        else:
            yield _nothing if take() else None


_NO_LEASE = "other runs of this pipeline are not seen; the table still lets only one of them commit"


def _nothing() -> None:
    """Nothing is left to do before the claim."""


class _Once:
    """Takes the lease at the first call, unless the run has ended."""

    def __init__(self, take: Callable[[], bool]) -> None:
        self._take = take
        self._lock = threading.Lock()
        self._over = False

    def call(self) -> None:
        with self._lock:
            if not self._over:
                self._over = True
                self._take()

    def close(self) -> None:
        with self._lock:
            self._over = True


def _take(
    options: PipelineOptions, store_options: StoreOptions, holder: Holder, say: Say, stop: Stop,
    stack: contextlib.ExitStack, *, standby: bool, take_over: bool,
) -> bool:  # fmt: skip
    """Take the lease and renew it until the stack ends. Returns False if a standby was stopped while it waited."""
    store = _open(options, store_options, stop, say, standby=standby)
    if store is None:
        return not standby
    from firnline.clock import SystemClock
    from firnline.stores.lease import Lease, LeaseKeeper, take_now, take_unless_held, wait_for_lease

    clock = SystemClock()
    lease = Lease(store, options.name, holder.run_id, options.checkpoint.lease_seconds, clock)
    stack.callback(_close, store, lease)
    if standby:
        if not wait_for_lease(lease, stop.wait, lambda sight: _tell(sight, say)):
            return False
        say(f"took the lease (token {lease.tenure.token if lease.tenure else 0})")
    else:
        try:
            former = take_now(lease) if take_over else take_unless_held(lease, stop.wait)
        except (OSError, CheckpointError) as error:
            logger.warning(f"running without a lease: {_NO_LEASE}", extra={"reason": str(error)})
            return True
        if former is not None and not former.process_has_exited:
            say(f"took the lease over from run {former.holder} on {former.host}:{former.pid} (token {former.token})")
    stack.enter_context(LeaseKeeper(lease, clock, holder.fence))
    return True


def _open(
    options: PipelineOptions, store: StoreOptions, stop: Stop, say: Say, *, standby: bool
) -> CheckpointStore | None:
    """Open the store. A standby retries until the store answers; any other run continues without it."""
    from firnline.stores import open_store
    from firnline.stores.lease import patience

    calls = TimedCalls(patience(options.checkpoint.lease_seconds))
    told = False
    while True:
        try:
            return calls.call(lambda: open_store(store, held_by=options.deciding.name))
        except (OSError, CheckpointError) as error:
            if not standby:
                logger.warning(f"running without a lease: {_NO_LEASE}", extra={"reason": str(error)})
                return None
            if not told:
                say(f"standing by: the checkpoint store does not answer: {error}")
                told = True
            if stop.wait(RETRY_SECONDS):
                return None


def _close(store: CheckpointStore, lease: Lease) -> None:
    """Close the store, unless a call to it hangs; then the end of the process closes it."""
    from firnline.stores.lease import EXIT_SECONDS

    if not lease.timed_calls.busy:
        with contextlib.suppress(HungError):
            lease.timed_calls.call(store.close, EXIT_SECONDS)


def _tell(sight: Sight | None, say: Say) -> None:
    if sight is None:
        say("standing by: the checkpoint store does not answer")
    elif sight.record is None:
        say("standing by: the lease cannot be read; taken for dead when it does not change")
    else:
        say(f"standing by: {sight.record.description} holds the lease (token {sight.record.token})")
