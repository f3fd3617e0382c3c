"""Guards every call to a sink: a failure of any kind becomes an error that names the sink, its kind and the method.

A run calls sinks and stagers only through the classes of this module. What the contract allows, the errors of
`firnline.errors`, passes unchanged. Any other exception (an OSError, the exception of a driver, a bug) becomes a
SinkError with the exception as its cause. A call to an optional sink also has a time limit: a sink that hangs counts as
one that fails, and the others go on.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TypeVar

import pyarrow as pa

from firnline.clock import monotonic
from firnline.errors import FirnlineError, SinkError, StagingError
from firnline.process import PASSING, HungError, TimedCalls, describe_failure, forward
from firnline.sinks.base import LoggedCommit, Sink, Stager
from firnline.types import Json

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 15.0  # for an optional sink to answer a question that others wait for
STAGE_SECONDS = 60.0  # for a call to the stager of an optional sink
WORK_SECONDS = 600.0  # for any other call to an optional sink, which only its own lane waits for
STOP_SECONDS = 10.0  # for calls to optional sinks once the run stops

MEANWHILE = (
    "is_full",
    "settled_epoch",
    "stage_target",
    "shape",
    "columns_of",
    "refuse_widening",
)  # called while another call runs

T = TypeVar("T")


def hurry_optional(sinks: Iterable[Sink]) -> None:
    """Make a stop wait only briefly for optional sinks: a call that takes longer counts as failed."""
    until = monotonic() + STOP_SECONDS
    for sink in sinks:
        if isinstance(sink, GuardedSink):
            sink.hurry(until)


def _thread_name() -> str:
    """Name a call's thread after the lane that waits for it. A command leaves such threads alone when it exits."""
    name = threading.current_thread().name
    return name if name.startswith("firnline ") else "firnline call"


class GuardedSink(Sink):
    """A sink whose every call is guarded. `seconds` limits a call if the sink is optional.

    A call that exceeds its limit goes on, and until it returns every other call fails at once: calls to a sink come one
    at a time. Repeating a call is safe, because the contract of a sink says so.
    """

    def __init__(self, inner: Sink, kind: str, seconds: float) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities  # type: ignore[misc]  # of the kind of the sink inside
        self.name, self.required, self.uri, self.storage = inner.name, inner.required, inner.uri, inner.storage
        self.former_name, self.can_empty = inner.former_name, inner.can_empty
        self._kind = kind
        self._seconds = seconds
        self._until = math.inf
        self._calls: dict[tuple[str, int], TimedCalls] = {}
        self._lock = threading.Lock()

    def guard(self, method: str, call: Callable[[], T]) -> T:
        """Perform a call to the sink.

        Raises:
            SinkError: the call raised an exception that no contract names, or did not return in time.
        """
        try:
            return call() if self.required else self._timed(method, call)
        except (FirnlineError, *PASSING):
            raise
        except BaseException as error:  # a native library may raise what is no Exception
            raise self._error(method, error) from error

    def _error(self, method: str, error: BaseException) -> SinkError:
        message = describe_failure(f"sink {self.name!r} ({self._kind})", method, error)
        return SinkError(message, sink=self.name, kind=self._kind, method=method)

    def _timed(self, method: str, call: Callable[[], T]) -> T:
        meanwhile = method in MEANWHILE
        key = (method, threading.get_ident()) if meanwhile else ("", 0)
        with self._lock:
            calls = self._calls.get(key)
            if calls is None:
                seconds = ANSWER_SECONDS if meanwhile else self._seconds
                calls = self._calls[key] = TimedCalls(seconds, thread=_thread_name())
                calls.hurry(self._until)
        if calls.busy:
            raise HungError("an earlier call has not returned yet")
        return calls.call(call)

    def hurry(self, until: float) -> None:
        """Wait for no call beyond this time, if the sink is optional. May be called from a signal handler."""
        self._until = until
        for calls in list(self._calls.values()):
            calls.hurry(until)

    load = forward(Sink.load)
    load_committed = forward(Sink.load_committed)
    read_fence = forward(Sink.read_fence)
    make_durable = forward(Sink.make_durable)
    end_unfinished = forward(Sink.end_unfinished)
    check_lost = forward(Sink.check_lost)
    check_whole = forward(Sink.check_whole)
    check = forward(Sink.check)
    find_caveats = forward(Sink.find_caveats)
    find_foreign = forward(Sink.find_foreign)
    claim = forward(Sink.claim)
    check_holder = forward(Sink.check_holder)
    shape = forward(Sink.shape)
    columns_of = forward(Sink.columns_of)
    refuse_widening = forward(Sink.refuse_widening)
    fetch_staged = forward(Sink.fetch_staged)
    find_missing_staged = forward(Sink.find_missing_staged)
    commit = forward(Sink.commit)
    find_receipt = forward(Sink.find_receipt)
    edit = forward(Sink.edit)
    is_full = forward(Sink.is_full)
    settled_epoch = forward(Sink.settled_epoch)
    read_settled = forward(Sink.read_settled)
    maintain = forward(Sink.maintain)
    find_schema = forward(Sink.find_schema)
    find_committed_schema = forward(Sink.find_committed_schema)
    check_columns = forward(Sink.check_columns)
    find_parts = forward(Sink.find_parts)
    find_rescued = forward(Sink.find_rescued)
    find_values = forward(Sink.find_values)
    commit_times = forward(Sink.commit_times)
    version_of = forward(Sink.version_of)
    plan_return = forward(Sink.plan_return)
    find_strangers = forward(Sink.find_strangers)
    find_missing = forward(Sink.find_missing)

    def stage_target(self) -> dict[str, Json]:
        """Describe to tasks where and how to stage; `optional` says that a failure must not stop the others."""
        added = {} if self.required else {"optional": True}
        return self.guard("stage_target", lambda: {**self.inner.stage_target(), **added})

    @property
    def identity(self) -> dict[str, Json]:
        """The sink's identity in a checkpoint, as the deciding one."""
        return self.guard("identity", lambda: self.inner.identity)

    @property
    def has_log(self) -> bool:
        """Whether the sink has a log of its own."""
        return self.inner.has_log

    def read_rows(self, epoch: int | None = None) -> Iterator[pa.RecordBatch]:
        """Yield all rows that readers see now, or saw after an epoch."""
        try:
            yield from self.inner.read_rows(epoch)
        except (FirnlineError, *PASSING):
            raise
        except BaseException as error:
            raise self._error("read_rows", error) from error

    def read_log(self, version: int | None = None, limit: int | None = None) -> Iterator[LoggedCommit]:
        """Yield the commits of this pipeline in the sink's own log, newest first."""
        try:
            yield from self.inner.read_log(version, limit)
        except (FirnlineError, *PASSING):
            raise
        except BaseException as error:
            raise self._error("read_log", error) from error


class GuardedStager(Stager):
    """A stager whose every call is guarded, in a task.

    For an optional sink, every failure and every call that takes too long becomes a StagingError: the run repeats the
    epoch without this stager.
    """

    def __init__(self, target: Mapping[str, Json], open_inner: Callable[[], Stager]) -> None:
        self._sink, self._kind = str(target["sink"]), str(target["type"])
        self._optional = bool(target.get("optional", False))
        self._calls = TimedCalls(STAGE_SECONDS, thread=_thread_name())
        self._inner = self._guard("open_stager", open_inner)

    @property
    def files_done(self) -> int:
        """The number of complete files."""
        return self._guard("files_done", lambda: self._inner.files_done, timed=False)

    @property
    def files(self) -> int:
        """The number of files if no more rows arrive."""
        return self._guard("files", lambda: self._inner.files, timed=False)

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows."""
        self._guard("write", partial(self._inner.write, batch))

    def close(self) -> list[dict[str, Json]]:
        """Make everything durable, and describe each file."""
        return self._guard("close", self._inner.close)

    def discard(self) -> None:
        """Delete the files of this stager after a failure. Failures are logged: a sweep deletes what stays."""
        try:
            if not self._calls.busy:
                self._guard("discard", self._inner.discard)
        except SinkError as error:
            logger.warning("staged files not deleted", extra={"sink": self._sink, "reason": error.message})

    def _guard(self, method: str, call: Callable[[], T], *, timed: bool = True) -> T:
        try:
            return self._calls.call(call) if self._optional and timed else call()
        except PASSING:
            raise
        except BaseException as error:
            if isinstance(error, FirnlineError) and not self._optional:
                raise
            message = describe_failure(f"sink {self._sink!r} ({self._kind})", f"its stager's {method}", error)
            raise StagingError(
                message, sink=self._sink, kind=self._kind, method=method, optional=self._optional
            ) from error
