"""The lease of a run: acquires it at once or stands by for it, and renews it while the run is active."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from firnline.errors import CheckpointError, ConfigError
from firnline.process import HungError, TimedCalls, has_exited

if TYPE_CHECKING:
    from firnline.options import PipelineOptions, StoreOptions
    from firnline.run.runner import Runner
    from firnline.stores.base import CheckpointStore
    from firnline.stores.lease import Lease
    from firnline.stores.lease_rules import Sight

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
Say = Callable[[str], None]


class Stop(Protocol):
    """Asks a standby to stop waiting."""

    def wait(self, seconds: float) -> bool:
        """Wait for at most `seconds`, and return whether to stop."""
        ...


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
def holding_lease(options: PipelineOptions, runner: Runner, say: Say, *, standby: bool, stop: Stop) -> Iterator[bool]:
    """Hold the lease while the run is active. Losing the lease fences the run.

    Yields whether to run: False if a standby was stopped while it waited. A run that does not stand by also runs
    without a lease: the lease only avoids wasted work, and the sink's fence prevents two writers.
    """
    with contextlib.ExitStack() as stack:
        found = _open(options, stop, say, standby=standby)
        if found is None:
            yield not standby
            return
        from firnline.clock import SystemClock
        from firnline.stores.lease import Lease, LeaseKeeper, wait_for_lease

        clock = SystemClock()
        lease = Lease(found, options.name, runner.run_id, options.checkpoint.lease_seconds, clock)
        stack.callback(_close, found, lease)
        if standby:
            if not wait_for_lease(lease, stop.wait, lambda sight: _tell(sight, say)):
                yield False
                return
            say(f"took the lease (token {lease.tenure.token if lease.tenure else 0})")
        elif not _take(lease, say):
            yield True
            return
        stack.enter_context(LeaseKeeper(lease, clock, runner.fence))
        yield True


def _open(options: PipelineOptions, stop: Stop, say: Say, *, standby: bool) -> CheckpointStore | None:
    """Open the store. A standby retries until the store answers; any other run continues without it."""
    store = _lease_store(options)
    if store is None:
        return None
    from firnline.stores import open_store
    from firnline.stores.lease import patience

    calls = TimedCalls(patience(options.checkpoint.lease_seconds))
    told = False
    while True:
        try:
            return calls.call(lambda: open_store(store, held_by=options.deciding.name))
        except (OSError, CheckpointError) as error:
            if not standby:
                logger.warning("running without a lease", extra={"reason": str(error)})
                return None
            if not told:
                say(f"standing by: the checkpoint store does not answer: {error}")
                told = True
            if stop.wait(RETRY_SECONDS):
                return None


def _close(store: CheckpointStore, lease: Lease) -> None:
    """Close the store, unless a call to it hangs; then the end of the process closes it."""
    from firnline.stores.lease import EXIT_SECONDS

    if not lease.calls.busy:
        with contextlib.suppress(HungError):
            lease.calls.call(store.close, EXIT_SECONDS)


def _take(lease: Lease, say: Say) -> bool:
    from firnline.stores.lease import take_now

    try:
        former = take_now(lease)
    except (OSError, CheckpointError) as error:
        logger.warning("running without a lease", extra={"reason": str(error)})
        return False
    if former is not None and not has_exited(former.host, former.pid):
        say(f"took the lease over from run {former.holder} on {former.host}:{former.pid} (token {former.token})")
    return True


def _tell(sight: Sight | None, say: Say) -> None:
    if sight is None:
        say("standing by: the checkpoint store does not answer")
    elif sight.record is None:
        say("standing by: the lease cannot be read; taken for dead when it does not change")
    else:
        say(f"standing by: {sight.record.told} holds the lease (token {sight.record.token})")
