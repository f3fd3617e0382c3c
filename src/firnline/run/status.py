"""The current status of a run, and when a requested checkpoint is complete; derived from the decisions' state alone."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from firnline.epoch import messages as m
from firnline.epoch.state import EpochState, Phase
from firnline.sinks.base import Head
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The status of a run, as its control channel reports it."""

    state: str  # starting, running, pausing, paused, stopping, ended
    epoch: int
    generation: int
    in_flight: tuple[int, ...]

    def to_json(self) -> dict[str, Json]:
        """Return the status as the control channel sends it."""
        return {
            "state": self.state,
            "epoch": self.epoch,
            "generation": self.generation,
            "in_flight": list(self.in_flight),
        }


def status_of(state: EpochState, head: Head, *, paused: bool, waiting: bool) -> RunStatus:
    """Return the status for a state. `waiting`: the current plan has not asked its sources yet."""
    if state.phase is Phase.STOPPED:
        word = "ended"
    elif state.stopping:
        word = "stopping"
    elif paused:
        word = "paused" if is_still(state, waiting=waiting) else "pausing"
    else:
        word = "starting" if state.phase is Phase.READING else "running"
    return RunStatus(word, state.decided, head.generation, tuple(slot.epoch for slot in state.slots))


def is_still(state: EpochState, *, waiting: bool) -> bool:
    """Return whether nothing is in flight: every plan is committed and recorded, and no sink is being written."""
    if state.phase in (Phase.READING, Phase.CLAIMING) or state.recording or state.acknowledging:
        return False
    if state.planning is not None and not waiting:
        return False
    return _all_recorded(state) and not any(sink.busy for sink in state.sinks)


def _all_recorded(state: EpochState) -> bool:
    return not state.slots and state.settled == state.committed and state.recorded >= state.settled


@dataclass(slots=True)
class CheckpointWatch:
    """Tracks one request for a checkpoint, from the poll of the sources to the record of the epoch.

    Only a plan that starts after the request counts, because an earlier one may have listed before it. If the plan has
    input, the watch waits for its epoch; otherwise it waits for the epochs in flight. A dropped epoch restarts the
    watch. The fields belong to the main thread; others may read `answer` once `done` is set.
    """

    since: int = 0
    looking: bool = False  # a plan that started after the request is active
    attempt: str = ""  # the epoch of that plan
    epoch: int = 0
    empty: bool = False  # that plan had nothing to read
    done: threading.Event = field(default_factory=threading.Event)
    answer: dict[str, Json] = field(default_factory=dict)

    def begin(self, state: EpochState, *, waiting: bool) -> None:
        """Accept the request on the main thread. `waiting`: the current plan has not asked its sources yet."""
        self.since = state.decided
        self.looking = state.planning is not None and waiting

    @property
    def wants_look(self) -> bool:
        """Whether it still waits for a plan to start."""
        return not (self.attempt or self.empty or self.looking)

    def plan_begins(self) -> None:
        """Note that a plan starts after the request."""
        if not (self.attempt or self.empty):
            self.looking = True

    def follow(self, before: EpochState, event: m.Event, after: EpochState) -> None:
        """Process one event with the states before and after it; called before its actions are performed."""
        flying = {slot.attempt for slot in after.slots}
        dropped = {slot.attempt for slot in before.slots} - flying - {after.tip}
        if dropped and (self.empty or self.attempt in dropped):
            self._begin_anew()
        if not self.looking:
            return
        match event:
            case m.Planned(epoch, attempt):
                self.looking = False
                if attempt in flying:
                    self.attempt, self.epoch = attempt, epoch
            case m.NothingToPlan():
                self.looking = False
                self.empty = before.planning == before.planned_on
            case m.Failed(_, _, ""):
                self.looking = False

    def _begin_anew(self) -> None:
        self.attempt, self.epoch, self.empty = "", 0, False

    def is_complete(self, state: EpochState, *, still: bool) -> bool:
        """Return whether the request can be answered. `still`: the run is paused, and nothing is in flight."""
        if self.attempt:
            # Epochs that wait for a committer are durable, and are recorded once committed.
            return state.decided >= self.epoch and state.recorded >= min(self.epoch, state.committed)
        return still or (self.empty and _all_recorded(state))

    def finish(self, head: Head) -> None:
        """Answer with the epoch that the watch waited for, or with the deciding sink's head."""
        self.answer = {
            "epoch": self.epoch if self.attempt else head.epoch,  # a later epoch may be decided and not recorded yet
            "id": self.attempt or head.attempt,
            "generation": head.generation,
            "committed": bool(self.attempt) or head.epoch > self.since,
        }
        self.done.set()
