"""Guards every call to a source: a failure of any kind becomes an error that names the source, its kind and the method.

A run calls sources only through the class of this module. What the contract allows, the errors of `firnline.errors`,
passes unchanged. Any other exception (an OSError, the exception of a client library, a bug) becomes a SourceError with
the exception as its cause, and the run retries as the contract says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from firnline.errors import FirnlineError, SourceError
from firnline.process import PASSING, describe_failure, forward
from firnline.sources.base import RestartError, Source

if TYPE_CHECKING:
    from firnline.storage import FileStat

T = TypeVar("T")


@contextlib.contextmanager
def guarding(source: str, kind: str, method: str) -> Iterator[None]:
    """Turn a foreign exception of a source or its reader into a SourceError."""
    try:
        yield
    except (FirnlineError, RestartError, *PASSING):
        raise
    except BaseException as error:  # a native library may raise what is no Exception
        message = describe_failure(f"source {source!r} ({kind})", method, error)
        raise SourceError(message, source=source, kind=kind, method=method) from error


class GuardedSource(Source):
    """A source whose every call is guarded."""

    def __init__(self, inner: Source, kind: str) -> None:
        self.inner = inner
        self.name, self.ports = inner.name, inner.ports
        self.poll_interval_secs = inner.poll_interval_secs
        self.reconcile_interval_secs = inner.reconcile_interval_secs
        self.late_files, self.on_growth = inner.late_files, inner.on_growth
        self.inputs_are = inner.inputs_are
        self.claims_first, self.has_log, self.has_keys = inner.claims_first, inner.has_log, inner.has_keys
        self._kind = kind

    def guard(self, method: str, call: Callable[[], T]) -> T:
        """Perform a call to the source.

        Raises:
            SourceError: the call raised an exception that no contract names.
        """
        with guarding(self.name, self._kind, method):
            return call()

    start = forward(Source.start)
    plan = forward(Source.plan)
    advance = forward(Source.advance)
    replay = forward(Source.replay)
    replan = forward(Source.replan)
    backlog = forward(Source.backlog)
    has_port = forward(Source.has_port)
    describe = forward(Source.describe)
    current_name = forward(Source.current_name)
    interchange = forward(Source.interchange)
    adopt = forward(Source.adopt)
    set_position = forward(Source.set_position)
    skip = forward(Source.skip)
    check = forward(Source.check)
    remarks = forward(Source.remarks)
    find_captured = forward(Source.find_captured)
    find_unread = forward(Source.find_unread)
    table_states = forward(Source.table_states)
    find_key = forward(Source.find_key)
    watch_keys = forward(Source.watch_keys)
    log_lag = forward(Source.log_lag)
    claimed = forward(Source.claimed)
    decided = forward(Source.decided)
    close = forward(Source.close)
    acknowledge = forward(Source.acknowledge)
    find_unavailable = forward(Source.find_unavailable)
    find_late = forward(Source.find_late)
    reconcile = forward(Source.reconcile)
    known_end = forward(Source.known_end)
    too_young = forward(Source.too_young)
    unreachable = forward(Source.unreachable)
    is_reading = forward(Source.is_reading)
    known_ports = forward(Source.known_ports)
    give_back = forward(Source.give_back)
    retry = forward(Source.retry)
    drop = forward(Source.drop)
    reread = forward(Source.reread)
    replay_quarantined = forward(Source.replay_quarantined)
    snapshot = forward(Source.snapshot)
    find_gap = forward(Source.find_gap)
    find_losing = forward(Source.find_losing)
    accept_gap = forward(Source.accept_gap)
    table_name = forward(Source.table_name)
    check_snapshot = forward(Source.check_snapshot)
    snapshots = forward(Source.snapshots)
    answered = forward(Source.answered)
    has_answered = forward(Source.has_answered)
    refused = forward(Source.refused)
    forget_requests = forward(Source.forget_requests)
    track = forward(Source.track)
    restrict = forward(Source.restrict)
    reader_settings = forward(Source.reader_settings)
    sample = forward(Source.sample)
    inputs_after = forward(Source.inputs_after)

    @property
    def location(self) -> str:
        """The location of the input, for messages."""
        return self.guard("location", lambda: self.inner.location)

    def list_inputs(self) -> Iterator[FileStat]:
        """Yield all input that the source covers now, read or not."""
        with guarding(self.name, self._kind, "list_inputs"):
            yield from self.inner.list_inputs()


def takes_acknowledgements(source: Source) -> bool:
    """Return whether a source does anything when input is acknowledged."""
    inner = source.inner if isinstance(source, GuardedSource) else source
    return type(inner).acknowledge is not Source.acknowledge
