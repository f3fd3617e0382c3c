"""Which launches are alive, by signs: their processes, their beat, and the control socket. Every doubt has an end.

How long a sign is missing is measured by this process alone: the clocks of other machines, and a clock that is set, do
not count.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace

from firnline.process import is_former_boot, is_running
from firnline.service.supervise.launches import Launch, Launches
from firnline.service.supervise.policy import ALIVE, Life, Signs, judge
from firnline.types import Clock, Json


class Lives:
    """What one reader has seen of the launches of one home."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._since: dict[str, tuple[object, float]] = {}
        self._reaped: set[str] = set()

    def watch(self, what: str, sign: object) -> float:
        """Return for how many seconds this sign of something has been the same."""
        now = self._clock.monotonic()
        with self._lock:
            if what not in self._since or self._since[what][0] != sign:
                self._since[what] = (sign, now)
            return now - self._since[what][1]

    def reaped(self, launch: str) -> None:
        """Note that the launcher of a launch, a child of this process, has ended."""
        self._reaped.add(launch)

    def judge(self, launches: Launches, control: Mapping[str, Json] | None) -> tuple[list[Launch], dict[str, Life]]:
        """Read the launches; returns them, oldest first, and the life of those that are not over."""
        found, lives = launches.load(), dict[str, Life]()
        for at, launch in enumerate(found):
            if not launch.is_over:
                life = judge(self._signs(launches, launch, control))
                lives[launch.id] = life
                found[at] = replace(launch, is_alive=life in ALIVE)
        with self._lock:
            known = {launch.id for launch in found}
            self._since = {what: seen for what, seen in self._since.items() if what in known or what.startswith("_")}
            self._reaped &= known
        return found, lives

    def _signs(self, launches: Launches, launch: Launch, control: Mapping[str, Json] | None) -> Signs:
        if launch.run is None or launch.launcher is None:
            beat = launches.find_beat(launch.id) if launch.is_damaged else None
            return Signs(False, watched=self.watch(launch.id, ("begun", beat)), reaped=launch.id in self._reaped)
        run, launcher = is_running(launch.run), is_running(launch.launcher)
        sign: object = (run, launcher)
        if run is None:
            sign = (launches.find_beat(launch.id), control is not None)
        return Signs(
            True, run, launcher, is_former_boot(launch.run), control is not None, watched=self.watch(launch.id, sign)
        )
