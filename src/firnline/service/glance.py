"""A glance at one pipeline: what the overview shows, from a few small files of the home and the run's own answer.

It opens no table and lists no input, so that a thousand pipelines can be watched by one reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from firnline.errors import ControlError, FirnlineError, NotRunningError
from firnline.options import PipelineOptions
from firnline.run.control import ask
from firnline.run.status import find_last_error, find_state, load_runs_marked
from firnline.run.wanted import Wish, Wishes
from firnline.service.registry import Registered
from firnline.service.supervise.launches import Known, Launch, Launches
from firnline.service.supervise.lives import Lives
from firnline.service.supervise.policy import Life
from firnline.storage import is_remote, normalise, open_storage
from firnline.types import Clock, Json


@dataclass(frozen=True, slots=True)
class Glance:
    """One look at a pipeline, at the time `read_at`."""

    pipeline: str
    read_at: str
    state: str  # as in `firnline status`; or invalid (the file cannot be used), unreadable (the home cannot be read)
    problem: str | None = None
    wish: Wish | None = None
    run: dict[str, Json] | None = None  # the newest record of the run history
    control: dict[str, Json] | None = None  # the answer of a run on this machine
    launches: list[Launch] = field(default_factory=list)
    lives: dict[str, Life] = field(default_factory=dict)  # of the launches that are not over
    mute_seconds: float = 0.0  # for how long a run has not answered that has a control socket
    last_error: dict[str, Json] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether a run may be alive, whoever started it."""
        return self.control is not None or self.mute_seconds > 0 or any(one.is_alive for one in self.launches)


def open_launches(options: PipelineOptions, state: str, known: Known | None = None) -> Launches:
    """Open the records of launches in the home; the output lies in `state` if the home is not on this disk."""
    logs = f"{state}/homes" if is_remote(normalise(options.home.root)) else None
    storage = open_storage(options.home.root, options.home.storage_options)
    return Launches(storage, options.name, known, logs)


def take_glance(
    registered: Registered,
    state: str,
    clock: Clock,
    environ: Mapping[str, str],
    known: Known | None = None,
    lives: Lives | None = None,
) -> Glance:
    """Look at one pipeline. Never raises because of the pipeline: what cannot be read is part of the answer.

    Args:
        known: What former looks have read of launches, and this one adds to.
        lives: What former looks have seen of their lives.
    """
    now = clock.now()
    options = registered.reachable
    if options is None:
        return Glance(registered.name, now.isoformat(), "invalid", problem=registered.problem)
    try:
        glance = _read(options, state, clock, environ, known, lives or Lives(clock))
        if registered.options is None and not glance.is_alive:
            return replace(glance, state="invalid", problem=registered.problem)
        return glance
    except (OSError, FirnlineError) as error:
        problem = error.message if isinstance(error, FirnlineError) else str(error)
        return Glance(registered.name, now.isoformat(), "unreadable", problem=problem)


def _read(
    options: PipelineOptions,
    state: str,
    clock: Clock,
    environ: Mapping[str, str],
    known: Known | None,
    lives: Lives,
) -> Glance:
    storage = open_storage(options.home.root, options.home.storage_options)
    control, problem = None, None
    try:
        control = ask(options, {"command": "status"}, environ)
    except NotRunningError:
        pass
    except ControlError as error:
        problem = error.message
    mute = lives.watch("_control", problem is not None)
    runs = load_runs_marked(storage, options.name, limit=1)
    launches, found = lives.judge(open_launches(options, state, known), control)
    return Glance(
        pipeline=options.name,
        read_at=clock.now().isoformat(),
        state=_find_state(runs, control, launches, found),
        problem=problem,
        wish=Wishes(storage, options.name, clock).load(),
        run=runs[0] if runs else None,
        control=control,
        launches=launches,
        lives=found,
        mute_seconds=max(mute, 0.001) if problem is not None else 0.0,
        last_error=find_last_error(runs),
    )


def _find_state(
    runs: list[dict[str, Json]], control: dict[str, Json] | None, launches: list[Launch], lives: Mapping[str, Life]
) -> str:
    """Return the state word. A launch that is alive, and whose run does not answer, is starting or stopping."""
    alive = [launch for launch in launches if launch.is_alive]
    if not alive or (control is not None and control["state"] != "ended"):
        return find_state(runs, control)
    last, newest = alive[-1], runs[0] if runs else {}
    is_its_own = last.run is not None and (newest.get("pid"), newest.get("start")) == (last.run.pid, last.run.start)
    if control is not None or lives.get(last.id) == "ending" or (is_its_own and newest.get("ended_at")):
        return "stopping"
    return find_state(runs, control) if newest.get("status") == "running" else "starting"
