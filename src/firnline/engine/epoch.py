"""The epoch's decisions: a pure state machine, `step(state, event) -> (state, actions)`.

Nothing here does I/O or reads a clock. The runner performs the actions and feeds back what happened;
the search under `tests/` explores every interleaving of the same function with crashes, zombies and
lost answers.

The order that `step` keeps, per epoch:

    plan -> claim (once a run) -> run -> stage -> commit deciding sink -> commit others -> record -> acknowledge

1. Plan before claim: a run that finds nothing to do writes nothing, not even a claim. What was planned
   counts only if the claim stands on the very entry that it was planned on; else it is planned again.
2. Epoch n+1 is planned when n's job has ended and runs while n commits; commits are in order.
3. After any error of a commit the sink is asked for a receipt before anything else. In the deciding
   sink only a receipt with our attempt id is ours; in the others one that names the decided entry.
4. When an epoch is lost, every later one that was planned on it is dropped and planned again.
5. The commit policy says when an epoch is settled; only then is it recorded and the next one committed.
6. Acknowledge last: epoch n-1 is acknowledged after epoch n is recorded, and only what every sink holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from firnline.engine.messages import (
    Acknowledge,
    Acknowledged,
    Action,
    Claim,
    Claimed,
    Commit,
    Committed,
    CommitUnclear,
    Drop,
    EpochLost,
    Event,
    Failed,
    Fenced,
    FindReceipt,
    Join,
    Joined,
    NothingToPlan,
    Plan,
    Planned,
    Ran,
    ReadSinks,
    ReceiptAbsent,
    Record,
    Recorded,
    Run,
    SinksRead,
    Staged,
    StageEntry,
    Started,
    Stop,
    StopRequested,
    TimerFired,
    Wait,
)


class Policy(Enum):
    """Which sinks must hold an epoch before the checkpoint advances."""

    ALL = "all"
    REQUIRED = "required"
    QUORUM = "quorum"


class Phase(Enum):
    """Where a run stands."""

    READING = "reading"  # asks every sink what it holds
    OPEN = "open"  # plans, but has not claimed: there was nothing to do yet
    CLAIMING = "claiming"
    LEVELLING = "levelling"  # brings sinks that lag level with the decided epoch
    RUNNING = "running"
    STOPPED = "stopped"


class Stage(Enum):
    """Where one epoch in flight stands."""

    PLANNED = "planned"
    RUNNING = "running"
    RAN = "ran"
    STAGED = "staged"
    COMMITTING = "committing"
    ASKING = "asking"  # a commit failed or its answer was lost: the sink is asked for the receipt


@dataclass(frozen=True, slots=True)
class Slot:
    """One epoch in flight. `base` is the attempt of the epoch that it was planned on."""

    epoch: int
    attempt: str
    base: str
    stage: Stage = Stage.PLANNED


@dataclass(frozen=True, slots=True)
class SinkState:
    """What is known of one sink: the newest epoch of the decided chain that it holds."""

    name: str
    required: bool = True
    epoch: int = 0
    busy: bool = False  # a commit, a question or a registration is under way there
    joined: bool = False  # our generation is registered there (the deciding sink: claimed)
    resting: bool = False  # a back-off timer of its own runs
    failures: int = 0  # in a row


@dataclass(frozen=True, slots=True)
class Settings:
    """How a run decides; fixed for its life. The first sink is the deciding one."""

    policy: Policy = Policy.ALL
    quorum: int = 1
    max_inflight: int = 2
    restart_attempts: int = 5
    once: bool = False


@dataclass(frozen=True, slots=True)
class EpochState:
    """Everything the decisions depend on."""

    settings: Settings
    sinks: tuple[SinkState, ...]
    phase: Phase = Phase.READING
    decided: int = 0  # the newest epoch that the deciding sink holds
    tip: str = ""  # its attempt id: what the next epoch is planned on
    settled: int = 0  # the newest epoch that satisfies the commit policy
    recorded: int = 0
    acknowledged: int = 0
    slots: tuple[Slot, ...] = ()
    planning: bool = False
    polling: bool = False  # the poll timer runs: nothing is planned until it fires
    resting: bool = False  # a back-off timer of the whole run runs: nothing new begins
    exhausted: bool = False  # the sources had nothing more, and this run does not wait for more
    failures: int = 0  # in a row
    stopping: bool = False
    exit_code: int | None = None

    @property
    def deciding(self) -> SinkState:
        return self.sinks[0]

    @property
    def planned_on(self) -> tuple[int, str]:
        """Epoch and attempt that the next plan stands on."""
        last = self.slots[-1] if self.slots else None
        return (last.epoch, last.attempt) if last else (self.decided, self.tip)


def initial(settings: Settings, sinks: list[tuple[str, bool]]) -> EpochState:
    """The state of a run that has seen nothing. `sinks` are (name, required), the deciding one first."""
    return EpochState(settings, tuple(SinkState(name, required) for name, required in sinks))


@dataclass(slots=True)
class _Turn:
    """One call of `step`: the state as it changes, and the actions it gives rise to."""

    state: EpochState
    actions: list[Action] = field(default_factory=list)

    def set(self, **changes: object) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]  # names are checked by replace

    def sink(self, name: str, **changes: object) -> None:
        self.set(
            sinks=tuple(
                replace(s, **changes) if s.name == name else s  # type: ignore[arg-type]  # as above
                for s in self.state.sinks
            )
        )

    def slot(self, epoch: int, stage: Stage) -> None:
        self.set(slots=tuple(replace(s, stage=stage) if s.epoch == epoch else s for s in self.state.slots))

    def do(self, action: Action) -> None:
        self.actions.append(action)


def step(state: EpochState, event: Event) -> tuple[EpochState, list[Action]]:
    """Decide. The same state and event always give the same result; stale events change nothing."""
    turn = _Turn(state)
    if state.phase is not Phase.STOPPED:
        _take(turn, event)
        if turn.state.phase is not Phase.STOPPED:
            _advance(turn)
    return turn.state, turn.actions


def _take(turn: _Turn, event: Event) -> None:
    """Note what happened."""
    state = turn.state
    match event:
        case Started():
            turn.do(ReadSinks())
        case SinksRead(tip, epochs):
            held = dict(epochs)
            sinks = tuple(replace(s, epoch=held[s.name], busy=False) for s in state.sinks)
            decided = held[state.deciding.name]
            turn.set(sinks=sinks, decided=decided, tip=tip, phase=Phase.OPEN, planning=False)
            _resettle(turn)
        case Planned(epoch, attempt, base):
            turn.set(planning=False)
            if (epoch - 1, base) == turn.state.planned_on:
                turn.set(slots=(*turn.state.slots, Slot(epoch, attempt, base)))
        case NothingToPlan():
            turn.set(planning=False)
            if state.settings.once:
                turn.set(exhausted=True)
            elif not (state.polling or state.resting):
                turn.set(polling=True)
                turn.do(Wait())
        case Claimed(epoch, tip):
            _take_claim(turn, epoch, tip)
        case Joined(sink, epoch):
            turn.sink(sink, joined=True, busy=False, epoch=epoch, failures=0)
            _resettle(turn)
        case Ran(epoch, attempt):
            if _is(state, epoch, attempt, Stage.RUNNING):
                turn.slot(epoch, Stage.RAN)
                turn.do(StageEntry(epoch, attempt))
        case Staged(epoch, attempt):
            if _is(state, epoch, attempt, Stage.RAN):
                turn.slot(epoch, Stage.STAGED)
        case Committed(sink, epoch, attempt):
            _take_commit(turn, sink, epoch, attempt)
        case CommitUnclear(sink, epoch):
            if sink == state.deciding.name:
                turn.slot(epoch, Stage.ASKING)
            turn.do(FindReceipt(sink, epoch))
        case ReceiptAbsent(sink, epoch):
            _take_absence(turn, sink, epoch)
        case EpochLost(epoch, attempt):
            lost = next((s for s in state.slots if (s.epoch, s.attempt) == (epoch, attempt)), None)
            if lost is not None:
                if lost.stage in (Stage.COMMITTING, Stage.ASKING):
                    turn.sink(state.deciding.name, busy=False)
                _drop_from(turn, epoch)
                _fail(turn, retry=True, exit_code=3)
        case Fenced():
            _stop(turn, 5)
        case Failed(retry, exit_code, sink):
            if sink:
                _fail_sink(turn, sink, retry=retry, exit_code=exit_code)
            else:
                turn.set(planning=False)
                if state.phase is Phase.CLAIMING:
                    turn.set(phase=Phase.OPEN)
                _fail(turn, retry=retry, exit_code=exit_code)
        case Recorded(epoch):
            turn.set(recorded=max(state.recorded, epoch))
            # Epoch n-1 only: the newest one may still be needed by whoever recovers from it.
            safe = min(epoch - 1, *(s.epoch for s in state.sinks))
            if safe > state.acknowledged:
                turn.do(Acknowledge(safe))
        case Acknowledged(epoch):
            turn.set(acknowledged=max(state.acknowledged, epoch))
        case TimerFired(""):
            turn.set(polling=False, resting=False)
            if turn.state.phase is Phase.READING:
                turn.do(ReadSinks())
        case TimerFired(sink):
            turn.sink(sink, resting=False)
        case StopRequested():
            turn.set(stopping=True)


def _take_claim(turn: _Turn, epoch: int, tip: str) -> None:
    """Adopt what stands under the claim; what was planned on anything else is planned again."""
    state = turn.state
    if (epoch, tip) != (state.decided, state.tip):
        _drop_from(turn, 0)
    turn.set(decided=epoch, tip=tip, phase=Phase.LEVELLING)
    turn.sink(state.deciding.name, joined=True, busy=False, epoch=epoch)
    _resettle(turn)
    if turn.state.recorded < turn.state.settled == state.settled:
        turn.do(Record(turn.state.settled))  # the run before may have died between commit and record


def _take_commit(turn: _Turn, sink: str, epoch: int, attempt: str) -> None:
    state = turn.state
    turn.sink(sink, busy=False)
    if sink != state.deciding.name:
        held = next(s.epoch for s in state.sinks if s.name == sink)
        turn.sink(sink, epoch=max(held, epoch), failures=0)
        _resettle(turn)
        return
    first = state.slots[0] if state.slots else None
    if first is None or first.epoch != epoch or epoch <= state.decided:
        return
    if first.attempt != attempt:
        _stop(turn, 5)  # somebody else authored our epoch
        return
    turn.set(slots=state.slots[1:], decided=epoch, tip=attempt, failures=0)
    turn.sink(sink, epoch=epoch)
    _resettle(turn)


def _take_absence(turn: _Turn, sink: str, epoch: int) -> None:
    """The commit did not happen: try the same staged epoch again after a back-off."""
    if sink != turn.state.deciding.name:
        _fail_sink(turn, sink, retry=True, exit_code=3)
        return
    turn.sink(sink, busy=False)
    turn.slot(epoch, Stage.STAGED)
    _fail(turn, retry=True, exit_code=3)


def _resettle(turn: _Turn) -> None:
    """Work out the newest epoch that satisfies the commit policy."""
    state = turn.state
    settings = state.settings
    if settings.policy is Policy.QUORUM:
        epochs = sorted((s.epoch for s in state.sinks), reverse=True)
        settled = min(epochs[settings.quorum - 1], state.decided)
    else:
        settled = min([state.decided, *(s.epoch for s in state.sinks if _counts(state, s))])
    if settled > state.settled:
        turn.set(settled=settled)
        if state.phase in (Phase.LEVELLING, Phase.RUNNING):
            turn.do(Record(settled))


def _drop_from(turn: _Turn, epoch: int) -> None:
    """An epoch is lost: drop it and every later one in flight, since they were planned on it."""
    for slot in turn.state.slots:
        if slot.epoch >= epoch:
            turn.do(Drop(slot.epoch, slot.attempt))
    kept = tuple(s for s in turn.state.slots if s.epoch < epoch)
    turn.set(slots=kept, planning=False, exhausted=False)


def _fail(turn: _Turn, *, retry: bool, exit_code: int) -> None:
    failures = turn.state.failures + 1
    turn.set(failures=failures)
    if not retry or failures > turn.state.settings.restart_attempts:
        _stop(turn, exit_code)
    elif not turn.state.resting:
        turn.set(resting=True)
        turn.do(Wait(failures))


def _fail_sink(turn: _Turn, name: str, *, retry: bool, exit_code: int) -> None:
    """A further sink failed: it rests alone, unless the commit policy cannot do without it."""
    sink = next(s for s in turn.state.sinks if s.name == name)
    failures = sink.failures + 1
    if _counts(turn.state, sink) and (not retry or failures > turn.state.settings.restart_attempts):
        _stop(turn, exit_code)
        return
    turn.sink(name, busy=False, resting=True, failures=failures)
    turn.do(Wait(failures, name))


def _counts(state: EpochState, sink: SinkState) -> bool:
    """Whether the commit policy waits for this sink."""
    return sink.required or state.settings.policy is Policy.ALL or sink is state.deciding


def _stop(turn: _Turn, exit_code: int) -> None:
    turn.set(phase=Phase.STOPPED, exit_code=exit_code)
    turn.do(Stop(exit_code))


def _is(state: EpochState, epoch: int, attempt: str, stage: Stage) -> bool:
    return any(s.epoch == epoch and s.attempt == attempt and s.stage is stage for s in state.slots)


def _advance(turn: _Turn) -> None:
    """Begin whatever may begin now."""
    if turn.state.resting or turn.state.phase in (Phase.READING, Phase.CLAIMING):
        return
    if turn.state.phase is Phase.OPEN and _has_work(turn.state):
        turn.set(phase=Phase.CLAIMING)
        turn.do(Claim())
        return
    if turn.state.phase in (Phase.LEVELLING, Phase.RUNNING):
        _join(turn)
        _commit_others(turn)
    if turn.state.phase is Phase.RUNNING:
        _run(turn)
        _commit_deciding(turn)
    _plan(turn)
    _finish(turn)


def _has_work(state: EpochState) -> bool:
    return bool(state.slots) or any(s.epoch < state.decided for s in state.sinks)


def _join(turn: _Turn) -> None:
    """Register in every other sink before anything is written there; then run."""
    for sink in turn.state.sinks:
        if not (sink.joined or sink.busy or sink.resting):
            turn.sink(sink.name, busy=True)
            turn.do(Join(sink.name))
    if all(s.joined or not _counts(turn.state, s) for s in turn.state.sinks):
        turn.set(phase=Phase.RUNNING)


def _run(turn: _Turn) -> None:
    """Start the first planned epoch when no other job runs."""
    if any(s.stage is Stage.RUNNING for s in turn.state.slots):
        return
    for slot in turn.state.slots:
        if slot.stage is Stage.PLANNED:
            turn.slot(slot.epoch, Stage.RUNNING)
            turn.do(Run(slot.epoch, slot.attempt))
            return


def _commit_deciding(turn: _Turn) -> None:
    """Commit the first slot once it is staged and everything before it is settled."""
    state = turn.state
    first = state.slots[0] if state.slots else None
    if first is None or first.stage is not Stage.STAGED or state.deciding.busy:
        return
    if first.base != state.tip or state.settled < state.decided:
        return
    turn.sink(state.deciding.name, busy=True)
    turn.slot(first.epoch, Stage.COMMITTING)
    turn.do(Commit(state.deciding.name, first.epoch))


def _commit_others(turn: _Turn) -> None:
    """Give each further sink the next decided epoch that it lacks; a slow one holds up no other."""
    for sink in turn.state.sinks[1:]:
        if sink.joined and not (sink.busy or sink.resting) and sink.epoch < turn.state.decided:
            turn.sink(sink.name, busy=True)
            turn.do(Commit(sink.name, sink.epoch + 1))


def _plan(turn: _Turn) -> None:
    """Plan the next epoch once the job of the one before has ended."""
    state = turn.state
    if state.stopping or state.exhausted or state.polling or state.planning:
        return
    if len(state.slots) >= state.settings.max_inflight:
        return
    if any(s.stage in (Stage.PLANNED, Stage.RUNNING) for s in state.slots):
        return
    epoch, base = state.planned_on
    turn.set(planning=True)
    turn.do(Plan(epoch + 1, base))


def _finish(turn: _Turn) -> None:
    """Stop once told to, when nothing is in flight and no sink lags but one that rests after a failure."""
    state = turn.state
    if not (state.stopping or state.exhausted) or state.slots or state.planning:
        return
    if state.phase in (Phase.LEVELLING, Phase.RUNNING):
        lagging = [s for s in state.sinks if s.busy or not s.joined or s.epoch < state.decided]
        if any(_counts(state, s) or not s.resting for s in lagging) or state.recorded < state.settled:
            return
    _stop(turn, 0)
