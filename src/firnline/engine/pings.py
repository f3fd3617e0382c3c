"""Tells a worker that hangs from one that works: tasks ping while they live, the driver looks how long ago.

A worker that dies is noticed by Spark at once. One that is stopped or stuck is not: its pings stop, and the driver
gives the job up. Pings are files among the rows on their way, so they need a file system that all workers share.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping

from firnline.clock import monotonic
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
    seen: dict[int, tuple[int, float]] = {}  # by shard: its last ping, and when it was noticed by this clock

    def watch() -> None:
        while not done.wait(every_seconds):
            for shard, path in paths.items():
                silent = _silent_seconds(shard, path, seen)
                if silent > MISSED * every_seconds and not done.is_set():
                    lost(shard, silent)
                    return

    thread = threading.Thread(target=watch, name="firnline watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _silent_seconds(shard: int, path: str | None, seen: dict[int, tuple[int, float]]) -> float:
    """For how long no new ping was seen; 0 before the first ping and after the last. Clocks need not agree."""
    try:
        ping = os.stat(path).st_mtime_ns if path is not None else None
    except FileNotFoundError:
        ping = None
    if ping is None:
        seen.pop(shard, None)
        return 0.0
    now = monotonic()
    if shard not in seen or seen[shard][0] != ping:
        seen[shard] = (ping, now)
    return now - seen[shard][1]
