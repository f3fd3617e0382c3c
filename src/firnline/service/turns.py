"""Turns: how many requests about one pipeline, and about all of them, are worked on at once.

Each holds a thread of the server, for as long as the storage behind it does not answer. The others wait here, where
they hold none; those about other pipelines, the lists of all, and actions beside reads go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator

from firnline.service.problems import ServiceError

THREADS = 64  # of the server; the turns of reads and actions leave some for requests about no pipeline
WAIT_SECONDS = 10.0


class BusyError(ServiceError):
    """Too many requests about a pipeline are being answered."""

    status = 503
    code = "busy"


class Turns:
    """Turns of one kind of request. May be used by several loops, as tests do.

    Args:
        each: How many requests about one pipeline have a turn at once.
        total: How many requests have.
    """

    def __init__(self, each: int, total: int, wait_seconds: float = WAIT_SECONDS) -> None:
        self._each = each
        self._total = total
        self._wait_seconds = wait_seconds
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []  # in the order in which they came

    @contextlib.asynccontextmanager
    async def turn(self, pipeline: str) -> AsyncIterator[None]:
        """Wait for a turn, and have it until the end; BusyError if there is none for too long."""
        with self._lock:
            mine: asyncio.Future[None] | None = None
            if self._is_free(pipeline):
                self._taken[pipeline] += 1
            else:
                mine = asyncio.get_running_loop().create_future()
                self._waiting.append((pipeline, mine))
        if mine is not None:
            await self._wait(pipeline, mine)
        try:
            yield
        finally:
            self._give_back(pipeline)

    async def _wait(self, pipeline: str, mine: asyncio.Future[None]) -> None:
        try:
            await asyncio.wait_for(asyncio.shield(mine), self._wait_seconds)
        except BaseException as error:
            with self._lock:
                is_waiting = (pipeline, mine) in self._waiting
                if is_waiting:
                    self._waiting.remove((pipeline, mine))
            if not is_waiting:  # the turn came at the same moment
                self._give_back(pipeline)
            if isinstance(error, TimeoutError):
                raise BusyError(
                    "other requests about this pipeline are still being answered",
                    hint="Its storage may be slow, or not answer at all. Try again later.",
                    headers={"Retry-After": str(round(self._wait_seconds))},
                ) from None
            raise

    def _give_back(self, pipeline: str) -> None:
        with self._lock:
            self._taken[pipeline] -= 1
            if not self._taken[pipeline]:
                del self._taken[pipeline]
            for one in list(self._waiting):
                name, future = one
                if self._is_free(name):
                    self._waiting.remove(one)
                    self._taken[name] += 1
                    future.get_loop().call_soon_threadsafe(_wake, future)

    def _is_free(self, pipeline: str) -> bool:
        return self._taken[pipeline] < self._each and self._taken.total() < self._total


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
