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
class Who:
    """The user, the host and the process."""

    user: str
    host: str
    pid: int


def who() -> Who:
    """The user, host and process that this is."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as containers have them
        user = str(os.getuid())
    return Who(user, socket.gethostname(), os.getpid())


def this_process() -> dict[str, Json]:
    """The host and process that this is, for a record that counts while the process lives."""
    return {"host": socket.gethostname(), "pid": os.getpid()}


def is_gone(host: str, pid: int) -> bool:
    """Whether a process has surely ended; only its own host can tell."""
    if host != socket.gethostname():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


_T = TypeVar("_T")


class HungError(TimeoutError):
    """A call did not come back in time. It is still under way: what it does is not known."""


class Calls:
    """The calls of one thread to something that may hang; signals are heard while it waits.

    A call that was given up goes on by itself, and the next one begins only after it: two never touch the same
    objects at the same time, and threads do not pile up.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last: Future[Any] | None = None

    @property
    def busy(self) -> bool:
        """Whether a call that was given up is still under way."""
        return self._last is not None and not self._last.done()

    def call(self, work: Callable[[], _T], seconds: float | None = None) -> _T:
        """What `work` returns or raises.

        Raises:
            HungError: it, or the call before it, is still under way after so many seconds.
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
