"""`firnline pause`, `resume`, `stop` and `checkpoint`: commands to the run of a pipeline on this machine."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from cyclopts.validators import Number

from firnline.cli.common import Common, Duration, Spec, load_options
from firnline.cli.output import count_text, say
from firnline.clock import monotonic
from firnline.errors import ControlError, NotRunningError

if TYPE_CHECKING:
    from firnline.options import PipelineOptions

POLL_SECONDS = 0.1
Timeout = Annotated[
    Duration,
    Parameter(name="--timeout", help="Give up waiting after this time, e.g. 90s or 10m.", validator=Number(gt=0)),
]
FIVE_MINUTES = Duration(300)

PAUSE_EPILOGUE = """\
The run plans no further epoch and commits the epochs in flight. The command
waits for these commits and prints the pipeline's epoch. A paused run stays
paused, and healthy, until `firnline resume` or `firnline stop`. Pausing a
paused run changes nothing. The command reaches only runs of the same user on
this machine.

Output (JSON fields):
  pipeline, run, pid
  status        paused, or already_paused
  epoch, generation
                the newest committed epoch, and the generation of its owner

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline pause
  firnline pause flights/firnline.yml --timeout 60 --json | jq .epoch
"""

RESUME_EPILOGUE = """\
Resuming a run that is not paused changes nothing. The command reaches only runs
of the same user on this machine.

Output (JSON fields):
  pipeline, run, pid
  status        resumed, or already_running
  epoch, generation
                the newest committed epoch, and the generation of its owner

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline resume
  firnline resume flights/firnline.yml --json
"""

STOP_EPILOGUE = """\
Works like the first SIGTERM: the run commits the epochs in flight and ends with
exit code 0. The command waits until the process has exited, then reads the
newest epoch from the table. The command reaches only runs of the same user on
this machine.

Output (JSON fields):
  pipeline, run, pid
  status        stopped
  epoch, generation
                the newest epoch in the table, and the generation of its owner

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline stop
  firnline stop flights/firnline.yml --timeout 60
"""

CHECKPOINT_EPILOGUE = """\
The run lists its input at once instead of waiting for its next poll. If there
is new input, the next epoch takes it, up to the limits of `batch`; the command
waits until that epoch is committed and recorded. If there is none, or the run
is paused, the command prints the pipeline's epoch. The command reaches only
runs of the same user on this machine.

Output (JSON fields):
  pipeline, run, pid
  status        committed, or nothing_new
  epoch, id, generation
                the checkpoint, as `firnline checkpoints` lists it
  committed     whether an epoch was committed since the command arrived

Environment:
  FIRNLINE__A__B      overrides the key a.b of the spec

Examples:
  firnline checkpoint
  firnline checkpoint flights/firnline.yml --json | jq -r .id
"""

pause_app = App(name="pause", help_epilogue=PAUSE_EPILOGUE)
resume_app = App(name="resume", help_epilogue=RESUME_EPILOGUE)
stop_app = App(name="stop", help_epilogue=STOP_EPILOGUE)
checkpoint_app = App(name="checkpoint", help_epilogue=CHECKPOINT_EPILOGUE)


@pause_app.default
def pause(spec: Spec = None, *, timeout: Timeout = FIVE_MINUTES, common: Common = Common()) -> int:
    """Pause planning and wait until in-flight epochs are committed."""
    running = RunningPipeline(spec)
    changed = running.ask("pause")["changed"]
    answer = running.ask_until(lambda answer: answer["state"] not in ("starting", "pausing"), "status", timeout)
    status = answer["state"] if answer["state"] != "paused" else "paused" if changed else "already_paused"
    if common.json:
        common.out.json({**_run_facts(answer), "status": status, **_epoch_facts(answer)})
    else:
        common.out.line(f"{status.replace('_', ' ')} at epoch {answer['epoch']}")
    return 0


@resume_app.default
def resume(spec: Spec = None, *, common: Common = Common()) -> int:
    """Let a paused run on this machine continue."""
    answer = RunningPipeline(spec).ask("resume")
    status = "resumed" if answer["changed"] else "already_running"
    if common.json:
        common.out.json({**_run_facts(answer), "status": status, **_epoch_facts(answer)})
    else:
        common.out.line(f"{status.replace('_', ' ')}, after epoch {answer['epoch']}")
    return 0


@stop_app.default
def stop(spec: Spec = None, *, timeout: Timeout = FIVE_MINUTES, common: Common = Common()) -> int:
    """Stop the run on this machine cleanly, and wait until its process has exited."""
    running = RunningPipeline(spec)
    answer = running.ask("status")
    running.wait_for_end(answer["pid"], lambda: running.ask("stop"), timeout)
    from firnline.run.open_pipeline import open_pipeline

    head = open_pipeline(running.options).load()
    if common.json:
        common.out.json({**_run_facts(answer), "status": "stopped", "epoch": head.epoch, "generation": head.generation})
    else:
        common.out.line(f"stopped after epoch {head.epoch}")
    return 0


@checkpoint_app.default
def checkpoint(spec: Spec = None, *, timeout: Timeout = FIVE_MINUTES, common: Common = Common()) -> int:
    """Make the run on this machine take a checkpoint now, and wait for it."""
    running = RunningPipeline(spec)
    ticket = running.ask("checkpoint")["ticket"]
    try:
        answer = running.ask_until(lambda answer: bool(answer["done"]), "checkpoint", timeout, ticket=ticket)
    except NotRunningError as error:
        raise ControlError(
            f"the run of {running.options.name!r} ended before it took the checkpoint",
            hint="firnline checkpoints lists what it committed.",
        ) from error
    show_checkpoint(common, answer)
    return 0


def show_checkpoint(common: Common, answer: dict[str, Any]) -> None:
    """Show the checkpoint that a run took."""
    status = "committed" if answer["committed"] else "nothing_new"
    if common.json:
        result = {key: answer[key] for key in ("epoch", "id", "generation", "committed")}
        common.out.json({**_run_facts(answer), "status": status, **result})
    elif answer["committed"]:
        common.out.line(f"committed epoch {answer['epoch']} (checkpoint {answer['id']})")
    else:
        common.out.line(f"nothing new; the pipeline is at epoch {answer['epoch']}")


def _run_facts(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: answer[key] for key in ("pipeline", "run", "pid")}


def _epoch_facts(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: answer[key] for key in ("epoch", "generation")}


class RunningPipeline:
    """The run of a pipeline on this machine, reached through its control socket."""

    def __init__(self, spec: str | None) -> None:
        self.options: PipelineOptions = load_options(spec)

    def ask(self, command: str, **facts: Any) -> dict[str, Any]:
        """Send one command; NotRunningError when there is no run."""
        from firnline.run.control import ask

        return ask(self.options, {"command": command, **facts}, os.environ)

    def ask_until(
        self, is_done: Callable[[dict[str, Any]], bool], command: str, timeout: float, **facts: Any
    ) -> dict[str, Any]:
        """Repeat a command until its answer is the awaited one; meanwhile report which epochs are in flight."""
        deadline = monotonic() + timeout
        reported: list[int] = []
        while not is_done(answer := self.ask(command, **facts)):
            if answer["in_flight"] and answer["in_flight"] != reported:
                reported = answer["in_flight"]
                say(f"{answer['state']}: {count_text(len(reported), 'epoch')} in flight, {reported[0]} is next")
            if monotonic() > deadline:
                raise ControlError(
                    f"the run of {self.options.name!r} is {answer['state']} after {timeout:g} s, at epoch "
                    f"{answer['epoch']} with {count_text(len(answer['in_flight']), 'epoch')} in flight",
                    hint="It still carries out the command; repeat the command, or watch it with `firnline status`.",
                )
            time.sleep(POLL_SECONDS)
        return answer

    def wait_for_end(self, pid: int, ask_to_stop: Callable[[], object], timeout: float) -> None:
        """Ask the process to stop, and wait until it has exited."""
        deadline = monotonic() + timeout
        with _process(pid) as process:
            ask_to_stop()
            while not self._has_ended(process):
                if monotonic() > deadline:
                    raise ControlError(
                        f"the run of {self.options.name!r} has not ended after {timeout:g} s",
                        hint=f"It ends after the epochs in flight; kill {pid} ends it at once, which is safe too.",
                    )

    def _has_ended(self, process: int | None) -> bool:
        """Whether the process has exited; waits for a moment if not."""
        if process is not None:
            return bool(select.select([process], [], [], 0.5)[0])
        try:
            self.ask("status")
        except NotRunningError:
            return True
        except ControlError:
            pass  # it still runs, busy with its end
        time.sleep(POLL_SECONDS)
        return False


@contextlib.contextmanager
def _process(pid: int) -> Iterator[int | None]:
    """Open a descriptor that becomes readable when the process ends; None where the system has none."""
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, or in another container
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)
