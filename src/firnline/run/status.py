"""What a run does now, and when a requested checkpoint is taken; follows from the decisions' state alone."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from firnline.epoch import messages as m
from firnline.epoch.state import EpochState, Phase
from firnline.sinks.base import Head
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class RunStatus:
    """What a run does now, as its control channel answers."""

    state: str  # starting, running, pausing, paused, stopping, ended
    epoch: int
    generation: int
    in_flight: tuple[int, ...]

    def to_json(self) -> dict[str, Json]:
        """The answer of the control channel."""
        return {
            "state": self.state,
            "epoch": self.epoch,
            "generation": self.generation,
            "in_flight": list(self.in_flight),
        }


def status_of(state: EpochState, head: Head, *, paused: bool, waiting: bool) -> RunStatus:
    """Put the state in words. `waiting`: the plan under way has not asked its sources yet."""
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
    """Whether nothing is in flight: all that was planned is committed and recorded, and no sink is being written."""
    if state.phase in (Phase.READING, Phase.CLAIMING) or state.recording or state.acknowledging:
        return False
    if state.planning is not None and not waiting:
        return False
    return _all_recorded(state) and not any(sink.busy for sink in state.sinks)


def _all_recorded(state: EpochState) -> bool:
    return not state.slots and state.settled == state.committed and state.recorded >= state.settled


@dataclass(slots=True)
class CheckpointWatch:
    """One request to take a checkpoint now, followed from a look at the source to the record of its epoch.

    Only a plan that begins after the request counts: one that was under way may have listed before. When it finds
    something, its epoch is waited for; when it finds nothing, what is in flight. What is dropped begins anew.
    Fields are the main thread's; `answer` may be read by others once `done` is set.
    """

    since: int = 0
    looking: bool = False  # a plan that began after the request is under way
    attempt: str = ""  # what it planned
    epoch: int = 0
    empty: bool = False  # it found nothing
    done: threading.Event = field(default_factory=threading.Event)
    answer: dict[str, Json] = field(default_factory=dict)

    def begin(self, state: EpochState, *, waiting: bool) -> None:
        """The main thread takes the request up. `waiting`: the plan under way has not asked its sources yet."""
        self.since = state.decided
        self.looking = state.planning is not None and waiting

    @property
    def wants_look(self) -> bool:
        """Whether it still waits for a plan to begin."""
        return not (self.attempt or self.empty or self.looking)

    def plan_begins(self) -> None:
        """A plan begins after the request."""
        if not (self.attempt or self.empty):
            self.looking = True

    def follow(self, before: EpochState, event: m.Event, after: EpochState) -> None:
        """Take in one event, with the states before and after it; called before its actions are performed."""
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
        """Whether it can be answered. `still`: the run is paused, and nothing is in flight."""
        if self.attempt:
            # What waits for a committer is durable, and recorded once it is committed.
            return state.decided >= self.epoch and state.recorded >= min(self.epoch, state.committed)
        return still or (self.empty and _all_recorded(state))

    def finish(self, head: Head) -> None:
        """Answer with the epoch that was waited for, or with what the deciding sink holds."""
        self.answer = {
            "epoch": self.epoch if self.attempt else head.epoch,  # a later one may be decided and not recorded yet
            "id": self.attempt or head.attempt,
            "generation": head.generation,
            "committed": bool(self.attempt) or head.epoch > self.since,
        }
        self.done.set()
