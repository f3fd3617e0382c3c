"""Compiles the decoder and the writer in a process beside, once per installation; slower code works until then."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from firnline import jit
from firnline.ndjson import kernel as k

LOCK = "decoder.lock"
NICENESS = 10  # reading goes first


def is_ready() -> bool:
    """Return whether the decoder is compiled."""
    return all(jit.is_compiled(function) for function in (k.scan, k.finish, k.count_timestamps))


@cache
def compile_beside() -> None:
    """Start to compile the decoder and the writer unless a process of this machine does; at most once in a process.

    That process outlives this one, so that short commands do not compile in vain. It ends by itself.
    """
    with _lock() as free:
        if not free:
            return
    subprocess.Popen(
        [sys.executable, "-m", __name__],
        env=dict(os.environ),  # a copy: a thread that sets a variable now would spoil the original under the child
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def is_under_way() -> bool:
    """Return whether this process has begun to compile the decoder, or found another one at it, and it is not ready."""
    return compile_beside.cache_info().currsize > 0 and not is_ready()


@contextmanager
def _lock() -> Iterator[bool]:
    """Hold the lock of the process that compiles; yields False if another process holds it."""
    try:
        descriptor = os.open(Path(jit.cache_folder(k.scan)) / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:  # somebody compiled a part of it for all users; two processes that compile at once do no harm
        yield True
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)


def _main() -> None:
    from firnline.ndjson import decode, write

    os.nice(NICENESS)
    with _lock() as free:
        if free:
            decode.warm_up()
            write.warm_up()


if __name__ == "__main__":
    _main()
