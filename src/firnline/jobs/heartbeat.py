"""Heartbeats of tasks: a task that stops its heartbeat is lost with its worker, its job is cancelled, and the loss is
reported."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from firnline.clock import monotonic
from firnline.errors import EngineError, WorkerLostError
from firnline.jobs.engine import Engine, Ping
from firnline.storage import LocalStorage, open_storage
from firnline.types import Clock, Json

logger = logging.getLogger(__name__)

MISSED = 4  # missed heartbeats before a worker counts as lost
_PREFIX = "ping-"

React = Callable[[WorkerLostError], dict[str, Json]]


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
    seconds, ended = ping.seconds, threading.Event()

    def beat() -> None:
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
            while not ended.is_set():
                with open(path, "ab"):
                    os.utime(path)
                ended.wait(seconds)

    thread = threading.Thread(target=beat, name="firnline ping", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(OSError):
            os.unlink(path)


@contextlib.contextmanager
def watching(folder: str | None, every_seconds: float, lost: Callable[[str, float], None]) -> Iterator[None]:
    """Call `lost` with a task's name and its silent time, if its heartbeat stops while the block runs."""
    if folder is None:
        yield
        return
    ended = threading.Event()
    seen: dict[str, tuple[int, float]] = {}  # by task: its last heartbeat, and when this clock noticed it

    def watch() -> None:
        while not ended.wait(every_seconds):
            for name, seconds in _silent(folder, seen):
                if seconds > MISSED * every_seconds and not ended.is_set():
                    lost(name, seconds)
                    return

    thread = threading.Thread(target=watch, name="firnline watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
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


class WorkerLosses:
    """The lost workers of one run. `on_loss` gets the facts of every loss and, with `took_ms`, of every recovery."""

    def __init__(self, clock: Clock, on_loss: Callable[[dict[str, Json]], None] = lambda _: None) -> None:
        self._clock = clock
        self._on_loss = on_loss
        self._lost_at: float | None = None  # when the first worker was lost since an epoch completed

    @contextlib.contextmanager
    def watching(self, epoch: int, is_wanted: Callable[[], bool], react: React) -> Iterator[None]:
        """Report a lost worker, and the recovery from it, while the block runs the jobs of an epoch.

        `react` decides about the loss. A cancelled epoch is no lost worker.
        """
        began = self._clock.monotonic()
        try:
            yield
        except WorkerLostError as error:
            if is_wanted():
                self._report_loss(epoch, began, error, react(error))
            raise
        if self._lost_at is not None:
            took = round((self._clock.monotonic() - self._lost_at) * 1000)
            logger.info("the loss of a worker is overcome", extra={"epoch": epoch, "took_ms": took})
            self._on_loss({"epoch": epoch, "took_ms": took})
            self._lost_at = None

    def _report_loss(self, epoch: int, began: float, error: WorkerLostError, reaction: dict[str, Json]) -> None:
        now = self._clock.monotonic()
        self._lost_at = now if self._lost_at is None else self._lost_at
        facts: dict[str, Json] = {
            "epoch": epoch,
            **reaction,
            "noticed_after_ms": round((now - began) * 1000),
            "reason": error.message,
        }
        logger.warning("a worker was lost", extra=facts)
        self._on_loss(facts)
