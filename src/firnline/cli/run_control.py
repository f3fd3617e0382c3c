"""What `pause`, `resume`, `stop` and `checkpoint` share: talking to the run of a pipeline on this machine."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from firnline.cli.common import load_options
from firnline.cli.output import count_text, say
from firnline.clock import monotonic
from firnline.errors import ControlError, NotRunningError

if TYPE_CHECKING:
    from firnline.options import PipelineOptions

ASK_EVERY_SECONDS = 0.1
Timeout = Annotated[
    float, Parameter(name="--timeout", help="Give up waiting after so many seconds.", validator=Number(gt=0))
]


class RunningPipeline:
    """The run of a pipeline on this machine, asked over its control channel."""

    def __init__(self, spec: str | None) -> None:
        self.options: PipelineOptions = load_options(spec)

    def ask(self, command: str, **facts: Any) -> dict[str, Any]:
        """Send one command; NotRunningError when there is no run."""
        from firnline.run.control import ask

        return ask(self.options, {"command": command, **facts}, os.environ)

    def ask_until(
        self, done: Callable[[dict[str, Any]], bool], command: str, timeout: float, **facts: Any
    ) -> dict[str, Any]:
        """Ask again and again until the answer says that it is done; tells what is in flight meanwhile."""
        deadline = monotonic() + timeout
        told: list[int] = []
        while not done(answer := self.ask(command, **facts)):
            if answer["in_flight"] and answer["in_flight"] != told:
                told = answer["in_flight"]
                say(f"{answer['state']}: {count_text(len(told), 'epoch')} in flight, {told[0]} is next")
            if monotonic() > deadline:
                raise ControlError(
                    f"the run of {self.options.name!r} is {answer['state']} after {timeout:g} s, at epoch "
                    f"{answer['epoch']} with {count_text(len(answer['in_flight']), 'epoch')} in flight",
                    hint="It goes on with what it was told; ask again, or look with `firnline status`.",
                )
            time.sleep(ASK_EVERY_SECONDS)
        return answer

    def wait_for_end(self, pid: int, ask_to_stop: Callable[[], object], timeout: float) -> None:
        """Have the process end, and wait until it is gone."""
        deadline = monotonic() + timeout
        with _process(pid) as process:
            ask_to_stop()
            while not self._is_gone(process):
                if monotonic() > deadline:
                    raise ControlError(
                        f"the run of {self.options.name!r} has not ended after {timeout:g} s",
                        hint=f"It ends after the epochs in flight; kill {pid} ends it at once, which is safe too.",
                    )

    def _is_gone(self, process: int | None) -> bool:
        """Whether it is gone; waits for a moment if not."""
        if process is not None:
            return bool(select.select([process], [], [], 0.5)[0])
        try:
            self.ask("status")
        except NotRunningError:
            return True
        except ControlError:
            pass  # it is there, and busy ending
        time.sleep(ASK_EVERY_SECONDS)
        return False


@contextlib.contextmanager
def _process(pid: int) -> Iterator[int | None]:
    """A descriptor that becomes readable when the process ends; None where the system has none."""
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, or in another container
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)
