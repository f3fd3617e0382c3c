"""Actions of operators on a pipeline: what will happen, the button that names the pipeline, and the command line."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from firnline.service.access.tokens import Identity, Role
from firnline.service.api import pipelines
from firnline.service.api.common import Service
from firnline.service.supervise.supervisor import Seen
from firnline.types import Json

ALIVE = frozenset(("starting", "running", "pausing", "paused", "stopping"))


@dataclass(frozen=True, slots=True)
class Action:
    """One action.

    Attributes:
        verb: The word on the button, before the pipeline's name.
        offered: Whether a pipeline in this state, which is wanted so, can be acted on like this.
        effects: What will happen, sentence by sentence.
        command: The command line that does the same, before the path of the pipeline file.
        act: The function of the REST route.
        is_dangerous: Whether readers of the sinks notice it.
    """

    verb: str
    role: Role
    offered: Callable[[str, Json], bool]
    effects: Callable[[Seen], list[str]]
    command: tuple[str, ...]
    act: Callable[[Service, str, Identity], object]
    is_dangerous: bool = False

    def command_line(self, seen: Seen) -> str:
        """Return the command line for a pipeline, quoted for a shell."""
        return shlex.join((*self.command, str(seen.registered.path)))


def _in_flight(seen: Seen) -> str:
    control = seen.glance.control if seen.glance else None
    flying = control.get("in_flight") if control else None
    if not flying:
        return "No epoch is in flight now."
    return f"Epochs in flight are committed first: {', '.join(str(epoch) for epoch in flying)}."


def _whose(seen: Seen) -> str:
    """Say whether the service would start the pipeline again."""
    glance = seen.glance
    if glance is not None and glance.control is not None and not glance.launches:
        return "The service did not start this run: it passes the request on, and records nothing."
    return "The service records what you want and your token's name in the pipeline's home."


def _start(seen: Seen) -> list[str]:
    said = ["The service starts a run, and starts it again after failures that may pass."]
    if seen.needs_person:
        said.append(f"Failures so far no longer count. The last one: {seen.needs_person}.")
    said.append("It goes on after the newest committed epoch: nothing is read twice, nothing is left out.")
    return [*said, _whose(seen)]


def _pause(seen: Seen) -> list[str]:
    return [
        _in_flight(seen),
        "Then the run plans nothing more. Its process stays, and input waits.",
        "It stays paused, also if its process is started again, until somebody resumes it.",
        _whose(seen),
    ]


def _resume(seen: Seen) -> list[str]:
    return ["The run plans epochs again, and reads the input that has been waiting.", _whose(seen)]


def _stop(seen: Seen) -> list[str]:
    return [
        _in_flight(seen),
        "Then the run ends with exit code 0, and is not started again until somebody starts it.",
        _whose(seen),
    ]


def _checkpoint(_: Seen) -> list[str]:
    return [
        "The run lists its sources now, and commits what is there as one epoch, state included.",
        "Nothing is interrupted.",
    ]


ACTIONS: Mapping[str, Action] = {
    "start": Action(
        "Start",
        "operate",
        lambda state, _: state not in ALIVE and state != "invalid",
        _start,
        ("firnline", "run", "--supervised", "--spec"),
        pipelines.start,
    ),
    "resume": Action(
        "Resume",
        "operate",
        lambda state, _: state in ("paused", "pausing"),
        _resume,
        ("firnline", "resume"),
        pipelines.resume,
    ),
    "pause": Action(
        "Pause",
        "operate",
        lambda state, _: state in ("running", "starting"),
        _pause,
        ("firnline", "pause"),
        pipelines.pause,
    ),
    "checkpoint": Action(
        "Checkpoint",
        "operate",
        lambda state, _: state == "running",
        _checkpoint,
        ("firnline", "checkpoint"),
        pipelines.checkpoint,
    ),
    "stop": Action(
        "Stop",
        "operate",
        lambda state, wanted: state in ALIVE or (wanted in ("running", "paused") and state != "done"),
        _stop,
        ("firnline", "stop"),
        pipelines.stop,
        is_dangerous=True,
    ),
}


def find_offered(state: str, wanted: Json, identity: Identity) -> dict[str, Action]:
    """Return the actions that make sense now, and that this token may take."""
    return {
        name: action for name, action in ACTIONS.items() if identity.may(action.role) and action.offered(state, wanted)
    }
