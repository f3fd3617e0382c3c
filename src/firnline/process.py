"""Processes: who this one is, whether another is alive, a flag for signal handlers, and calls that may hang or fail."""

from __future__ import annotations

import contextlib
import getpass
import math
import os
import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

from firnline.clock import monotonic
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class Process:
    """A process: its user, its host and its number there."""

    user: str
    host: str
    pid: int
    start: str = ""  # tells it from a later process with the same number; empty where the system does not say

    @property
    def address(self) -> dict[str, Json]:
        """Host and number, for a record that counts while the process lives."""
        return {"host": self.host, "pid": self.pid}


def this_process() -> Process:
    """The process that calls this."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in containers
        user = str(os.getuid())
    return Process(user, socket.gethostname(), os.getpid(), _start_of(os.getpid()))


def find_process(pid: int) -> Process:
    """A process of this machine that the caller started."""
    return replace(this_process(), pid=pid, start=_start_of(pid))


def is_this_host(host: Json) -> bool:
    """Whether a host is the one this process runs on."""
    return bool(host == socket.gethostname())


def has_exited(host: str, pid: int, start: str = "") -> bool:
    """Whether a process has surely ended. Only its own host knows: for any other host the answer is False.

    With `start`, as `this_process` returns it, a later process with the same number does not count; nor does the
    number alone prove anything about a process of another boot or container with the same host name.
    """
    if not is_this_host(host):
        return False
    if start:
        system, _, ticks = start.rpartition(" ")
        if system != _this_system():
            return False
        if (found := _start_ticks(pid)) is not None:
            return found != ticks
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


def is_running(process: Process) -> bool | None:
    """Whether a process runs. Yes and no are certain; None: it is of another host, boot or container, and only its own
    system can tell."""
    if not is_this_host(process.host):
        return None
    system, _, ticks = process.start.rpartition(" ")
    if process.start and system != _this_system():
        return None
    found = _start_ticks(process.pid) if process.start else None
    return found == ticks if found is not None else not has_exited(process.host, process.pid)


def is_former_boot(process: Process) -> bool:
    """Whether a process belongs to an earlier boot of this host, or to another machine with its name."""
    boot = process.start.partition(" ")[0]
    return bool(is_this_host(process.host) and boot and boot != _this_system().partition(" ")[0])


def _start_of(pid: int) -> str:
    system, ticks = _this_system(), _start_ticks(pid)
    return f"{system} {ticks}" if system and ticks else ""


def _this_system() -> str:
    """Boot and process namespace (Linux): process numbers are comparable only within one of them."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_ticks(pid: int) -> str | None:
    """When a process started, in ticks since boot (Linux); empty if it has ended, None if that cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before it may contain anything
    except OSError:
        return None
    return "" if len(fields) < 20 or fields[0] in (b"Z", b"X") else fields[19].decode()


class StopFlag:
    """A flag that a signal handler sets and one thread waits for.

    An Event would not do: a handler that interrupts the waiting thread could wait for a lock which that thread holds.
    """

    def __init__(self) -> None:
        self._set = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def is_set(self) -> bool:
        """Whether the flag is set."""
        return self._set

    def set(self) -> None:
        """Set the flag and wake the thread that waits. May be called from a signal handler, and more than once."""
        self._set = True
        self._wake.put(None)

    def wait(self, seconds: float) -> bool:
        """Wait for the given time, or until the flag is set; returns whether it is set."""
        if not self._set:
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=seconds)
        return self._set


_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])

HURRY_SECONDS = 0.5  # at most, until a call that waits sees that it should hurry

PASSING = (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError)  # of the process, whoever raises them


def describe_failure(what: str, method: str, error: BaseException) -> str:
    """Return the message for a foreign exception: what failed, in which method, and why."""
    return f"{what} failed in {method}: {type(error).__name__}{f': {error}' if str(error) else ''}"


def forward(method: _F) -> _F:
    """Return a method that calls the same one of `self.inner` through `self.guard(name, call)`."""
    name = method.__name__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.guard(name, partial(getattr(self.inner, name), *args, **kwargs))

    call.__name__, call.__doc__ = name, method.__doc__
    return cast("_F", call)


class HungError(TimeoutError):
    """A call did not return in time. It is still running, and its outcome is unknown."""


class TimedCalls:
    """Calls to something that may hang, from one thread; signals are handled while it waits.

    A call that exceeds its time keeps running, and the next call starts only after it has returned: two calls never
    use the same objects at once, and threads do not pile up.
    """

    def __init__(self, seconds: float, thread: str = "firnline call") -> None:
        self._seconds = seconds
        self._thread = thread  # the name of the threads that make the calls
        self._last: Future[Any] | None = None
        self._until = math.inf

    def hurry(self, until: float) -> None:
        """Wait for no call beyond this time of the monotonic clock. May be called from any thread."""
        self._until = until

    @property
    def busy(self) -> bool:
        """Whether a call that exceeded its time is still running."""
        return self._last is not None and not self._last.done()

    def call(self, work: Callable[[], _T], seconds: float | None = None) -> _T:
        """Returns or raises what `work` does.

        Raises:
            HungError: this call, or the one before it, is still running after `seconds`.
        """
        most = self._seconds if seconds is None else seconds
        if self._last is not None:
            self._await(self._last, most)
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self._last = future
        threading.Thread(target=run, name=self._thread, daemon=True).start()
        self._await(future, most)
        return future.result()

    def _await(self, future: Future[Any], seconds: float) -> None:
        began = monotonic()
        while True:
            left = min(began + seconds, self._until) - monotonic()
            if wait([future], timeout=max(0.0, min(left, HURRY_SECONDS))).done:
                return
            if left <= 0:
                waited = seconds if began + seconds <= self._until else max(0.0, self._until - began)
                raise HungError(f"no answer for {waited:.3g} s")
