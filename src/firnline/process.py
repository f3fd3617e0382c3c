"""Processes: the identity of this one, whether another is alive, and calls that may hang."""

from __future__ import annotations

import getpass
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from firnline.types import Json


@dataclass(frozen=True, slots=True)
class Process:
    """A process: its user, its host and its number there."""

    user: str
    host: str
    pid: int

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
    return Process(user, socket.gethostname(), os.getpid())


def is_this_host(host: Json) -> bool:
    """Whether a host is the one this process runs on."""
    return bool(host == socket.gethostname())


def has_exited(host: str, pid: int) -> bool:
    """Whether a process has surely ended. Only its own host knows: for any other host the answer is False."""
    if not is_this_host(host):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


_T = TypeVar("_T")


class HungError(TimeoutError):
    """A call did not return in time. It is still running, and its outcome is unknown."""


class TimedCalls:
    """Calls to something that may hang, from one thread; signals are handled while it waits.

    A call that exceeds its time keeps running, and the next call starts only after it has returned: two calls never
    use the same objects at once, and threads do not pile up.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last: Future[Any] | None = None

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
        threading.Thread(target=run, name="firnline call", daemon=True).start()
        self._await(future, most)
        return future.result()

    def _await(self, future: Future[Any], seconds: float) -> None:
        if not wait([future], timeout=seconds).done:
            raise HungError(f"no answer for {seconds:g} s")
