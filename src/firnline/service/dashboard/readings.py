"""Readings for pages: each part of a pipeline is read by one thread at a time, and the answer is kept for a while.

However many browsers look at a page, its pipeline is read once in that time. A reading that takes too long holds up
nobody: pages show the one before, with its age.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass
from typing import Any

from firnline.service.problems import ServiceError
from firnline.types import Clock

FRESH_SECONDS = 3.0
PATIENCE_SECONDS = 8.0  # a page waits this long for a reading
READERS = 6
KEPT_READINGS = 400


class StillReadingError(ServiceError):
    """A reading takes long, and there is none from before."""

    status = 504
    code = "still_reading"


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read, and when."""

    value: Any
    read_at: str


@dataclass(slots=True)
class _Kept:
    reading: Reading | None = None
    until: float = 0.0
    running: Future[Reading] | None = None


class Readings:
    """The readings of all pages."""

    def __init__(self, clock: Clock, readers: int = READERS, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._clock = clock
        self._patience = patience_seconds
        self._free = threading.Semaphore(readers)
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()

    def get(self, key: Hashable, load: Callable[[], Any], fresh_seconds: float = FRESH_SECONDS) -> Reading:
        """Return a reading that is fresh, or the newest one if a fresh one is not to be had in time.

        Raises:
            StillReadingError: there is none yet.
            Exception: what `load` raised.
        """
        with self._lock:
            kept = self._kept.setdefault(key, _Kept())
            self._kept.move_to_end(key)
            self._forget()
            if kept.reading is not None and self._clock.monotonic() < kept.until:
                return kept.reading
            running = kept.running
            if running is None and self._free.acquire(blocking=False):
                running = kept.running = Future()
                work = threading.Thread(
                    target=self._read, args=(kept, running, load, fresh_seconds), name="firnline page", daemon=True
                )
                work.start()
        if running is not None:
            try:
                return running.result(self._patience)
            except TimeoutError:
                if running.done():
                    raise
        if kept.reading is not None:
            return kept.reading
        raise StillReadingError("the pipeline is still being read", hint="Load the page again in a few seconds.")

    def _read(self, kept: _Kept, running: Future[Reading], load: Callable[[], Any], fresh_seconds: float) -> None:
        try:
            at = self._clock.now().isoformat()
            reading = Reading(load(), at)
        except BaseException as error:
            with self._lock:
                kept.running = None
            running.set_exception(error)
        else:
            with self._lock:
                kept.running, kept.reading = None, reading
                kept.until = self._clock.monotonic() + fresh_seconds
            running.set_result(reading)
        finally:
            self._free.release()

    def _forget(self) -> None:
        """Forget what was asked for longest ago, except readings that are under way."""
        if len(self._kept) <= KEPT_READINGS:
            return
        for key in [key for key, kept in self._kept.items() if kept.running is None][: len(self._kept) - KEPT_READINGS]:
            del self._kept[key]
