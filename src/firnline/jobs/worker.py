"""Performs a task in a worker, by its kind. A heartbeat distinguishes a working task from one that hangs."""

from __future__ import annotations

import contextlib
import os
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from firnline.clock import monotonic
from firnline.errors import EngineError, WorkerLostError
from firnline.jobs.engine import Engine, Ping
from firnline.jobs.fold_task import run_fold
from firnline.jobs.read_task import run_task
from firnline.sinks import registry
from firnline.storage import LocalStorage, open_storage
from firnline.types import Json

KINDS: dict[str, Callable[[dict[str, Json]], dict[str, Json]]] = {
    "read": run_task,
    "fold": run_fold,
    "commit": registry.run_task,
}


def perform(task: dict[str, Json]) -> dict[str, Json]:
    """Perform a task and return its report; plain JSON both ways. The content depends on the task's kind."""
    try:
        run = KINDS[task["kind"]]
    except KeyError as error:
        raise EngineError(f"a worker got a task it does not know: {error}") from error
    with pinging(Ping.from_json(task["ping"]) if "ping" in task else None):
        return run(task)


MISSED = 4  # missed heartbeats before a worker counts as lost
_PREFIX = "ping-"


@dataclass(frozen=True, slots=True)
class Watch:
    """How the jobs of one attempt at an epoch are watched."""

    tag: str  # the engine's name for the jobs
    folder: Mapping[str, Json]  # of the attempt: root, storage options and folder
    ping_seconds: float
    timeout_seconds: float  # limit of one job

    def ping(self, name: str) -> Ping:
        """Return the heartbeat settings for a task with this name."""
        return Ping(dict(self.folder), name, self.ping_seconds)

    @contextlib.contextmanager
    def job(self, cancel: Callable[[str], None]) -> Iterator[None]:
        """Cancel the job in the block if one of its tasks stops its heartbeat.

        Raises:
            WorkerLostError: a task stopped its heartbeat.
        """
        silent: list[str] = []

        def lost(name: str, seconds: float) -> None:
            silent.append(f"{name} was silent for {seconds:.1f} s")
            cancel(self.tag)

        with watching(_ping_folder(self.folder), self.ping_seconds, lost):
            try:
                yield
            except EngineError as error:
                if silent:
                    raise WorkerLostError(silent[0]) from error
                raise


def run_watched(
    engine: Engine, watch: Watch, tasks: list[dict[str, Json]], name: Callable[[int], str]
) -> list[dict[str, Json]]:
    """Run tasks, each with a heartbeat under its name. If a task hangs, its whole job is cancelled.

    Raises:
        WorkerLostError: a task stopped its heartbeat, or the job took too long.
        EngineError: the engine failed; repeating is safe.
        FirnlineError: an error that a task raised.
    """
    pinged = [{**task, "ping": watch.ping(name(number)).to_json()} for number, task in enumerate(tasks)]
    with watch.job(engine.cancel):
        return engine.run(watch.tag, pinged, watch.timeout_seconds)


def _ping_folder(folder: Mapping[str, Json]) -> str | None:
    """Return the folder for heartbeats; None if workers share no file system."""
    storage = open_storage(str(folder["root"]), folder["storage_options"])
    return storage.path_of(str(folder["folder"])) if isinstance(storage, LocalStorage) else None


@contextlib.contextmanager
def pinging(ping: Ping | None) -> Iterator[None]:
    """Send heartbeats while the block runs, in a task."""
    folder = _ping_folder(ping.folder) if ping else None
    if ping is None or folder is None:
        yield
        return
    path = os.path.join(folder, _PREFIX + urllib.parse.quote(ping.name, safe=" "))
    seconds, done = ping.seconds, threading.Event()

    def beat() -> None:
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
            while not done.is_set():
                with open(path, "ab"):
                    os.utime(path)
                done.wait(seconds)

    thread = threading.Thread(target=beat, name="firnline ping", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with contextlib.suppress(OSError):
            os.unlink(path)


@contextlib.contextmanager
def watching(folder: str | None, every_seconds: float, lost: Callable[[str, float], None]) -> Iterator[None]:
    """Call `lost` with a task's name and its silent time, if its heartbeat stops while the block runs."""
    if folder is None:
        yield
        return
    done = threading.Event()
    seen: dict[str, tuple[int, float]] = {}  # by task: its last heartbeat, and when this clock noticed it

    def watch() -> None:
        while not done.wait(every_seconds):
            for name, seconds in _silent(folder, seen):
                if seconds > MISSED * every_seconds and not done.is_set():
                    lost(name, seconds)
                    return

    thread = threading.Thread(target=watch, name="firnline watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _silent(folder: str, seen: dict[str, tuple[int, float]]) -> list[tuple[str, float]]:
    """Return the silent time of each task between its first and last heartbeat. Clocks need not agree."""
    pings: dict[str, int] = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX):
                with contextlib.suppress(FileNotFoundError):
                    name = urllib.parse.unquote(entry.name.removeprefix(_PREFIX))
                    pings[name] = os.stat(entry.path).st_mtime_ns
    now = monotonic()
    for name in [known for known in seen if known not in pings]:
        del seen[name]
    for name, ping in pings.items():
        if name not in seen or seen[name][0] != ping:
            seen[name] = (ping, now)
    return [(name, now - at) for name, (_, at) in seen.items()]
