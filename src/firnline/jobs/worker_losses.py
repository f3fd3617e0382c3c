"""Reports lost workers, and how long it took until an epoch completed again."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from firnline.errors import WorkerLostError
from firnline.types import Clock, Json

logger = logging.getLogger(__name__)

React = Callable[[WorkerLostError], dict[str, Json]]


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
