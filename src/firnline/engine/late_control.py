"""The control channel for a run that found it taken: had as soon as the run that has it is gone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from firnline.engine.control import ControlServer
from firnline.errors import ControlError

RETRY_SECONDS = 2.0


class LateControl:
    """Tries on a thread of its own, from `with` to its end, and calls `had` when the channel is served."""

    def __init__(self, server: ControlServer, had: Callable[[], None]) -> None:
        self._server = server
        self._had = had
        self._served = contextlib.ExitStack()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._try, name="firnline control, later", daemon=True)

    def __enter__(self) -> LateControl:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._served.close()

    def _try(self) -> None:
        while not self._stop.wait(RETRY_SECONDS):
            with contextlib.suppress(ControlError, OSError):
                self._served.enter_context(self._server)
                self._had()
                return
