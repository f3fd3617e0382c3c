"""Serves the control channel of a run. Where another run has it, tries to open it until that run exits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

from firnline.errors import ControlError
from firnline.options import PipelineOptions
from firnline.run.control import Controlled, ControlServer

RETRY_SECONDS = 2.0


@contextlib.contextmanager
def serving_control(
    options: PipelineOptions, run: Controlled, environ: Mapping[str, str], say: Callable[[str], None]
) -> Iterator[None]:
    """The control channel, from `with` to its end; a run that cannot have one goes on without it.

    One that another run on this machine has is opened when that run exits.
    """
    with contextlib.ExitStack() as stack:
        server = None
        try:
            server = ControlServer(options, run, environ)
            stack.enter_context(server)
        except (ControlError, OSError) as error:
            say(f"running without a control channel: {error}")
            if server is not None:
                stack.enter_context(LateControl(server, lambda: say("the control channel is there now")))
        yield


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
