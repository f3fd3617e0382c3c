"""Tells a worker that hangs from one that works: tasks ping while they live, the driver looks how long ago.

A worker that dies is noticed by Spark at once. One that is stopped or stuck is not: its pings stop, and the driver
gives the job up. Pings are files among the rows on their way, so they need a file system that all workers share.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from firnline.storage import LocalStorage, open_storage
from firnline.types import Json

MISSED = 4  # pings in a row, before a worker counts as lost


def ping_path(place: Mapping[str, Json], operator: str, shard: int) -> str | None:
    """Where a task pings; None where workers share no file system."""
    storage = open_storage(str(place["root"]), place["storage_options"])
    if not isinstance(storage, LocalStorage):
        return None
    return storage.path_of(f"{place['folder']}/ping-{operator}-{shard}")


@contextlib.contextmanager
def pinging(path: str | None, every_seconds: float) -> Iterator[None]:
    """Ping while the block runs."""
    if path is None:
        yield
        return
    done = threading.Event()

    def ping() -> None:
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            while not done.is_set():
                with open(path, "ab"):
                    os.utime(path)
                done.wait(every_seconds)

    thread = threading.Thread(target=ping, name="firnline ping", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with contextlib.suppress(OSError):
            os.unlink(path)


@contextlib.contextmanager
def watching(
    paths: Mapping[int, str | None], every_seconds: float, lost: Callable[[int, float], None]
) -> Iterator[None]:
    """While the block runs, call `lost` with a shard, and for how long it was silent, when its pings have stopped."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(every_seconds):
            for shard, path in paths.items():
                silent = _silent_seconds(path)
                if silent is not None and silent > MISSED * every_seconds and not done.is_set():
                    lost(shard, silent)
                    return

    thread = threading.Thread(target=watch, name="firnline watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _silent_seconds(path: str | None) -> float | None:
    """How long ago a task pinged; None before its first ping and after its last."""
    try:
        return None if path is None else time.time() - os.stat(path).st_mtime
    except FileNotFoundError:
        return None
