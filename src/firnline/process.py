"""Who does something: the user, the host and the process, as records tell it."""

from __future__ import annotations

import getpass
import os
import socket
from dataclasses import dataclass

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
