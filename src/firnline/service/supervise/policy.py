"""Decides what lives, and whether to start a run, from signs, wishes and how the last runs ended. Pure: no I/O."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from firnline.run.wanted import Wanted
from firnline.service.supervise.launches import Launch

RESTARTED = frozenset((3, 4, 130))  # exit codes after which running again is safe and may help; signals, too
MOST_FAILURES = 5
WITHIN_SECONDS = 600.0
FIRST_SECONDS, MOST_SECONDS = 1.0, 60.0
JITTER = 0.2  # of the back-off, in both directions: pipelines that failed together do not start together
BEGIN_SECONDS = 60.0  # a launcher that has not let its run go within this time is not waited for
END_SECONDS = 5.0  # a run that has ended, and whose launcher has not recorded it, is reported
BOOT_SECONDS = 10.0  # a process of a former boot that shows no sign of life for this time is dead
BEAT_SECONDS = 20.0  # between two beats of a launcher
SILENT_SECONDS = 90.0  # a launcher that cannot be seen, and has not shown a beat for this time, is dead
MUTE_SECONDS = 30.0  # a run that does not answer for this time is reported


# -- what lives ---------------------------------------------------------------------------------------

Life = Literal["beginning", "alive", "ending", "lost", "gone"]
ALIVE = frozenset(("beginning", "alive", "ending"))


@dataclass(frozen=True, slots=True)
class Signs:
    """The signs of life of a launch that is not recorded as over.

    Attributes:
        is_let_go: Its launcher has recorded its processes.
        run: Whether the process of the run is there; None: this machine cannot tell.
        launcher: The same of its launcher.
        is_former_boot: They belong to an earlier boot of this host.
        answers: A run of the pipeline answers on this machine.
        watched: For how many seconds the signs have been the same.
        reaped: The launcher was a child of this process, and has ended.
    """

    is_let_go: bool
    run: bool | None = None
    launcher: bool | None = None
    is_former_boot: bool = False
    answers: bool = False
    watched: float = 0.0
    reaped: bool = False


def judge(signs: Signs) -> Life:
    """Judge a launch: `lost` may be given up, of `gone` the end may be recorded. Doubt counts as life, for a time."""
    if not signs.is_let_go:
        return "lost" if signs.reaped or signs.watched >= BEGIN_SECONDS else "beginning"
    if signs.run is True:
        return "alive"
    if signs.run is False:
        return "ending" if signs.launcher is True else "gone"
    if signs.answers:
        return "alive"
    return "gone" if signs.watched >= (BOOT_SECONDS if signs.is_former_boot else SILENT_SECONDS) else "alive"


def may_run(mine: str, launches: Sequence[Launch], wanted: Wanted | None) -> str | None:
    """Return why a launcher that has recorded its processes must not let its run go; None if it may.

    Each launcher writes first and reads then, so that of two that overlap at least one sees the other.
    """
    found = {launch.id: launch for launch in launches}
    if mine not in found or found[mine].run is None:
        return "its record is gone"
    if found[mine].is_over:
        return "a service gave it up"
    if wanted in (None, "stopped"):
        return "the pipeline is wanted stopped" if wanted else "nobody wants the pipeline to run"
    for launch in launches:
        if not launch.is_over and (launch.id > mine or (launch.id < mine and launch.run is not None)):
            return f"launch {launch.id} is there"
    return None


# -- what is done -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a run that a service started."""

    at: float  # seconds since 1970
    code: int | None  # negative: the signal that ended it; None: nobody saw the end
    wish: int  # the number of the wish that it belongs to


@dataclass(frozen=True, slots=True)
class Start:
    """Start a run now."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Start a run later."""

    until: float
    reason: str


@dataclass(frozen=True, slots=True)
class NeedsPerson:
    """Start nothing until somebody asks for it again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Nothing:
    """Nothing is to be done."""


Decision = Start | Wait | NeedsPerson | Nothing


@dataclass(frozen=True, slots=True)
class Now:
    """The time of a decision: seconds since 1970, those since the last end, and a number from -1 to 1 that is the same
    for the same end."""

    at: float
    since_end: float = 0.0
    jitter: float = 0.0


def decide(
    wanted: Wanted | None, number: int, is_alive: bool, ended: Sequence[Ended], now: Now, trouble: str | None = None
) -> Decision:
    """Decide for one pipeline.

    Args:
        wanted: What the newest wish says; None if there was never one.
        number: Its number. Ends that belong to earlier wishes do not count: a person has asked again.
        is_alive: Whether any run of the pipeline is alive, whoever started it.
        ended: The ends of the runs that services started, oldest first.
        trouble: What is wrong with the run that is alive.
    """
    if is_alive:
        return Nothing() if trouble is None else NeedsPerson(trouble)
    if wanted in (None, "stopped"):
        return Nothing()
    since = [end for end in ended if end.wish >= number]
    if not since:
        return Start()
    last = since[-1]
    if last.code == 0:
        return Nothing()
    if not is_restarted(last.code):
        return NeedsPerson(f"the run ended with {code_text(last.code)}")
    failures = [end.at for end in since if end.code != 0]
    if any(
        _span(failures[first : first + MOST_FAILURES]) <= WITHIN_SECONDS
        for first in range(len(failures) - MOST_FAILURES + 1)
    ):
        return NeedsPerson(
            f"{MOST_FAILURES} failures within {WITHIN_SECONDS / 60:.0f} minutes, the last with {code_text(last.code)}"
        )
    recent = sum(1 for first in range(len(failures)) if _span(failures[first:]) <= WITHIN_SECONDS)
    left = back_off(recent, now.jitter) - now.since_end
    return Start() if left <= 0 else Wait(now.at + left, f"the run ended with {code_text(last.code)}")


def _span(times: Sequence[float]) -> float:
    """Return the seconds from the first of these ends to the last, by clocks that may be set: each step counts by its
    size, whichever way it goes. An end that is dated a day ahead is thus far from those before and after it."""
    return sum(abs(later - earlier) for earlier, later in itertools.pairwise(times))


def is_restarted(code: int | None) -> bool:
    """Whether a run that ended like this is started again without a person."""
    return code is None or code < 0 or code in RESTARTED


def back_off(failures: int, jitter: float) -> float:
    """Return the seconds to wait after this many failures in a row."""
    return min(MOST_SECONDS, FIRST_SECONDS * 2.0 ** (failures - 1)) * (1 + JITTER * jitter)


def code_text(code: int | None) -> str:
    """Return how a run ended, in words."""
    if code is None:
        return "an unknown exit code"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
