"""The epoch's decisions: a pure state machine, `step(state, event) -> (state, actions)`.

Nothing here does I/O or reads a clock. The runner performs the actions and feeds back what happened: one event
for every action except Drop and Stop (a dropped epoch's job may stay silent). The search under `tests/`
explores every interleaving of the same function with crashes, zombies and lost answers.

The order that `step` keeps, per epoch:

    plan -> claim (once a run) -> run -> stage -> commit deciding sink -> commit others -> record -> acknowledge

1. Plan before claim: a run that finds nothing to do writes nothing to a sink, not even a claim. What was planned
   counts only if the claim stands on the very entry that it was planned on; else it is planned again. With
   `claims_first` it is the other way round: the run claims, then plans.
2. Epoch n+1 is planned when n's job has ended and runs while n commits; commits are in order.
3. After any error of a commit the sink is asked for a receipt before anything else. In the deciding
   sink only a receipt with our attempt id is ours; in the others one that names the decided entry.
4. When an epoch is lost, every later one that was planned on it is dropped and planned again, and a plan
   that was under way on it counts for nothing, not even for "nothing left".
5. The commit policy says when an epoch is settled; only then is it recorded and the next one committed.
6. Acknowledge last: epoch n-1 is acknowledged after epoch n is recorded, and only what every sink holds that is fed
   from staged files. A sink that is fed from the outbox holds back the outbox, never a source. What a source
   missed, or a run that died did not send, is sent again at the start and, with back-off, while the run is idle. That
   needs no claim: what is safe by the newest commit that a run has read stays safe.
7. A unit that was put into a two-stage deciding table can still be set aside, discarded or turn out to be a fork.
   Only what the table's log holds is given to further sinks, recorded and acknowledged. Putting units does not wait
   for the committer, and no run waits for it before it ends: the next one gives further sinks what they lack.
8. A quorum is one of all sinks: one that is set aside holds nothing, so giving it up makes no quorum easier to reach.
   If too few are left, the run stops.
9. A sink that is being filled gets epochs like any other, and counts in no commit policy until it is in sync once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from enum import Enum

from firnline.epoch import messages as m
from firnline.epoch.messages import Action, Event


class Policy(Enum):
    """Which sinks must hold an epoch before the checkpoint advances."""

    ALL = "all"  # every sink that is not optional
    REQUIRED = "required"  # the same, by another word
    QUORUM = "quorum"  # the deciding sink and as many others as make up the number, set aside or not


class Phase(Enum):
    """What a run does now."""

    READING = "reading"  # asks every sink what it holds
    OPEN = "open"  # plans, but has not claimed: there was nothing to do yet
    CLAIMING = "claiming"
    JOINING = "joining"  # registers in the sinks that the commit policy needs
    RUNNING = "running"
    STOPPED = "stopped"


class Stage(Enum):
    """How far one epoch in flight is."""

    PLANNED = "planned"
    RUNNING = "running"
    RAN = "ran"
    STAGED = "staged"
    COMMITTING = "committing"  # until the deciding sink has answered whether it holds the epoch


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
    asking: int = 0  # the epoch whose commit is unclear: the sink is asked for the receipt before anything else
    joined: bool = False  # our generation is registered there (the deciding sink: claimed)
    resting: bool = False  # a back-off timer of its own runs
    failures: int = 0  # in a row
    from_outbox: bool = False  # its rows wait in the outbox: sources may forget what it lacks
    away: bool = False  # set aside: it gets nothing, and counts nowhere
    filling: bool = False  # it gets what was before it was added: it counts nowhere until it is in sync


@dataclass(frozen=True, slots=True)
class Settings:
    """How a run decides; fixed for its life. The first sink is the deciding one."""

    policy: Policy = Policy.ALL
    quorum: int = 1
    max_inflight: int = 2
    restart_attempts: int = 5
    once: bool = False
    claims_first: bool = False  # only the run that owns the pipeline may open a source


@dataclass(frozen=True, slots=True)
class EpochState:
    """Everything the decisions depend on."""

    settings: Settings
    sinks: tuple[SinkState, ...]
    phase: Phase = Phase.READING
    decided: int = 0  # the newest epoch that the deciding sink holds
    committed: int = 0  # the newest that its log holds: behind `decided` only where a committer commits
    tip: str = ""  # its attempt id: what the next epoch is planned on
    settled: int = 0  # the newest epoch that satisfies the commit policy
    recorded: int = 0
    acknowledged: int = 0
    slots: tuple[Slot, ...] = ()
    watching: bool = False  # a look at the deciding table's log is under way
    planning: tuple[int, str] | None = None  # the epoch and attempt that the plan under way is based on
    recording: bool = False
    acknowledging: bool = False
    owed: bool = False  # a source may lack an acknowledgement that was or should have been sent
    missed: int = 0  # acknowledgements in a row that a source did not take
    owing_rests: bool = False  # a back-off timer runs before it is sent again
    polling: bool = False  # the poll timer runs: nothing is planned until it fires
    resting: bool = False  # a back-off timer of the whole run runs: nothing new begins
    exhausted: bool = False  # the sources had nothing more, and this run does not wait for more
    failures: int = 0  # in a row
    stopping: bool = False
    claimed: bool = False  # this run held the pipeline once: it claims again only while nobody else has since
    reclaiming: bool = False  # a new generation is claimed once what has begun is committed; no other job begins
    exit_code: int | None = None

    @property
    def deciding(self) -> SinkState:
        """The sink whose commit fixes an epoch."""
        return self.sinks[0]

    @property
    def planned_on(self) -> tuple[int, str]:
        """Epoch and attempt that the next plan is based on."""
        return (self.slots[-1].epoch, self.slots[-1].attempt) if self.slots else (self.decided, self.tip)


def initial(settings: Settings, sinks: list[tuple[str, bool]], from_outbox: Collection[str] = ()) -> EpochState:
    """The state of a run that has seen nothing. `sinks` are (name, required), the deciding one first."""
    states = (SinkState(name, required, from_outbox=name in from_outbox) for name, required in sinks)
    return EpochState(settings, tuple(states))


__all__ = ["EpochState", "Phase", "Policy", "Settings", "SinkState", "Slot", "Stage", "initial", "step"]


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


# -- what happened ------------------------------------------------------------------------------------


def _take(turn: _Turn, event: Event) -> None:
    """Note what happened."""
    state = turn.state
    match event:
        case m.Started():
            turn.do(m.ReadSinks())
        case m.SinksRead():
            if state.phase is Phase.READING:
                _take_reading(turn, event)
        case m.SetAside(sink):
            turn.sink(sink, away=True)
            _stop_without_quorum(turn)
        case m.Claimed(epoch, tip, committed, away, filling):
            if state.phase is Phase.CLAIMING:
                if (epoch, tip) != (state.decided, state.tip):
                    _drop_from(turn, 0)
                turn.set(decided=epoch, tip=tip, phase=Phase.JOINING, claimed=True)
                turn.set(committed=epoch if committed is None else min(epoch, committed))
                if committed is not None:  # nobody acknowledged what was committed while no run went on
                    turn.set(acknowledged=0)
                turn.set(
                    sinks=tuple(
                        replace(
                            s, away=s.name in away, filling=s.filling if state.claimed else s.name in filling, asking=0
                        )
                        for s in turn.state.sinks
                    )
                )
                turn.sink(state.deciding.name, joined=True, epoch=epoch)
                _stop_without_quorum(turn)
        case m.WentBack(sink):
            turn.sink(sink, joined=False, asking=0)
            _fail_sink(turn, sink, retry=True, exit_code=3)
        case m.LogRead(epoch):
            turn.set(watching=False, committed=max(state.committed, min(epoch, state.decided)))
        case m.Fenced():
            _stop(turn, 5)
        case m.Failed(retry, exit_code, sink) if sink:
            _fail_sink(turn, sink, retry=retry, exit_code=exit_code)
        case m.Failed(retry, exit_code):
            turn.set(planning=None, phase=Phase.OPEN if state.phase is Phase.CLAIMING else state.phase)
            _fail(turn, retry=retry, exit_code=exit_code)
        case m.RecordFailed(retry, exit_code):
            turn.set(recording=False, acknowledging=False)
            _fail(turn, retry=retry, exit_code=exit_code)
        case m.Recorded(epoch):
            turn.set(recording=False, recorded=max(state.recorded, epoch))
        case m.Acknowledged(epoch, missed):
            turn.set(acknowledging=False, acknowledged=max(state.acknowledged, epoch), owed=missed)
            _note_missed(turn, missed=missed)
        case m.TimerFired(m.ACKNOWLEDGEMENT):
            turn.set(owing_rests=False)
        case m.TimerFired(sink) if sink:
            turn.sink(sink, resting=False)
        case m.TimerFired():
            if state.phase is Phase.READING and state.resting:
                turn.do(m.ReadSinks())
            turn.set(polling=False, resting=False)
        case m.StopRequested():
            turn.set(stopping=True)
        case m.ShardsChanged():
            turn.set(reclaiming=state.phase in (Phase.JOINING, Phase.RUNNING))
        case m.Joined() | m.Committed() | m.CommitUnclear() | m.ReceiptAbsent():
            _take_answer(turn, event)
        case _:
            _take_work(turn, event)


def _take_reading(turn: _Turn, read: m.SinksRead) -> None:
    """Start from what the sinks hold, and from what is recorded and acknowledged where that is known."""
    held = dict(read.epochs)  # without a sink that could not be read: it counts as lagging
    sinks = (
        replace(s, epoch=held.get(s.name, 0), away=s.name in read.away, filling=s.name in read.filling)
        for s in turn.state.sinks
    )
    turn.set(sinks=tuple(sinks))
    decided = held[turn.state.deciding.name]
    committed = decided if read.committed is None else min(decided, read.committed)
    turn.set(decided=decided, committed=committed, tip=read.tip, phase=Phase.OPEN, owed=read.owed)
    _settle(turn)
    settled = turn.state.settled  # while another run goes on, more may be recorded than was read before
    turn.set(recorded=settled if read.recorded is None else min(settled, read.recorded))
    turn.set(acknowledged=_safe(turn.state) if read.acknowledged is None else read.acknowledged)
    _stop_without_quorum(turn)


def _note_missed(turn: _Turn, *, missed: bool) -> None:
    """A source that did not take an acknowledgement gets it again after a back-off; the run itself goes on."""
    most = turn.state.settings.restart_attempts + 1
    turn.set(missed=min(turn.state.missed + 1, most) if missed else 0)
    if missed and not turn.state.owing_rests:
        turn.set(owing_rests=True)
        turn.do(m.Wait(turn.state.missed, m.ACKNOWLEDGEMENT))


def _take_answer(turn: _Turn, event: m.Joined | m.Committed | m.CommitUnclear | m.ReceiptAbsent) -> None:
    """Note what a sink answered."""
    state = turn.state
    known = next(s for s in state.sinks if s.name == event.sink)
    ours = event.sink == state.deciding.name
    match event:
        case m.Joined(sink, epoch) if known.busy and not known.joined:
            turn.sink(sink, joined=True, busy=False, epoch=epoch, failures=0)
        case m.CommitUnclear(sink, epoch):
            if known.asking:
                _fail_sink(turn, sink, retry=True, exit_code=4)  # the question failed too
            else:
                turn.sink(sink, busy=False, asking=epoch)
        case m.ReceiptAbsent(sink, epoch) if known.asking == epoch:
            turn.sink(sink, asking=0)
            if ours:
                turn.slot(epoch, Stage.STAGED)
            _fail_sink(turn, sink, retry=True, exit_code=3)
        case m.Committed(sink, epoch, attempt, committed) if epoch == known.epoch + 1:
            turn.sink(sink, busy=False, asking=0, failures=0, epoch=epoch)
            if ours and _stage_of(state, epoch, attempt) is None:
                _stop(turn, 5)  # somebody else authored our epoch
            elif ours:
                turn.set(slots=state.slots[1:], decided=epoch, tip=attempt, failures=0)
                turn.set(committed=max(state.committed, epoch if committed is None else min(epoch, committed)))


def _take_work(turn: _Turn, event: Event) -> None:
    """Note what became of a plan, a job or a ledger entry; what was dropped meanwhile counts no more."""
    state = turn.state
    match event:
        case m.Planned(epoch, attempt, base):
            turn.set(planning=None)
            if (epoch - 1, base) == state.planned_on and not state.stopping:
                turn.set(slots=(*state.slots, Slot(epoch, attempt, base)))
            else:
                turn.do(m.Drop(epoch, attempt))
        case m.NothingToPlan():
            turn.set(planning=None)
            if state.planning != state.planned_on:
                return
            if not state.slots:
                turn.set(failures=0)
            if state.settings.once:
                turn.set(exhausted=True)
            elif not (state.polling or state.resting):
                turn.set(polling=True)
                turn.do(m.Wait())
        case m.Ran(epoch, attempt) if _stage_of(state, epoch, attempt) is Stage.RUNNING:
            turn.slot(epoch, Stage.RAN)
            turn.do(m.StageEntry(epoch, attempt))
        case m.Staged(epoch, attempt) if _stage_of(state, epoch, attempt) is Stage.RAN:
            turn.slot(epoch, Stage.STAGED)
        case m.EpochLost(epoch, attempt, is_failure) if (stage := _stage_of(state, epoch, attempt)) is not None:
            if stage is Stage.COMMITTING:
                turn.sink(state.deciding.name, busy=False, asking=0)
            _drop_from(turn, epoch)
            if is_failure:
                _fail(turn, retry=True, exit_code=3)


def _stage_of(state: EpochState, epoch: int, attempt: str) -> Stage | None:
    return next((s.stage for s in state.slots if (s.epoch, s.attempt) == (epoch, attempt)), None)


def _drop_from(turn: _Turn, epoch: int) -> None:
    """An epoch is lost: drop it and every later one in flight, since they were planned on it."""
    for slot in turn.state.slots:
        if slot.epoch >= epoch:
            turn.do(m.Drop(slot.epoch, slot.attempt))
    turn.set(slots=tuple(s for s in turn.state.slots if s.epoch < epoch), exhausted=False, polling=False)


def _fail(turn: _Turn, *, retry: bool, exit_code: int) -> None:
    failures = turn.state.failures + 1
    turn.set(failures=failures)
    if not retry or failures > turn.state.settings.restart_attempts:
        _stop(turn, exit_code)
    elif not turn.state.resting:
        turn.set(resting=True)
        turn.do(m.Wait(failures))


def _fail_sink(turn: _Turn, name: str, *, retry: bool, exit_code: int) -> None:
    """A sink failed: it rests alone, unless the commit policy cannot do without it any more."""
    most = turn.state.settings.restart_attempts + 1
    failures = next(min(s.failures + 1, most) if retry else most for s in turn.state.sinks if s.name == name)
    turn.sink(name, busy=False, resting=True, failures=failures)
    if _reached(turn.state, lambda s: int(s.failures < most)):
        turn.do(m.Wait(failures, name))
    else:
        _stop(turn, exit_code)


def _reached(state: EpochState, measure: Callable[[SinkState], int]) -> int:
    """What all those sinks have reached that the commit policy waits for."""
    deciding, *others = state.sinks
    if state.settings.policy is Policy.QUORUM:
        reached = sorted((0 if s.away else measure(s) for s in others), reverse=True)[: state.settings.quorum - 1]
    else:
        reached = [measure(s) for s in others if s.required and not (s.away or s.filling)]
    return min([measure(deciding), *reached])


def _held(sink: SinkState) -> int:
    """The epoch that a sink counts with."""
    return 0 if sink.filling else sink.epoch


def _stop_without_quorum(turn: _Turn) -> None:
    """Stop if more sinks are set aside than the quorum can do without: no epoch could be settled any more."""
    settings, others = turn.state.settings, turn.state.sinks[1:]
    if settings.policy is Policy.QUORUM and sum(not s.away for s in others) < settings.quorum - 1:
        _stop(turn, 1)


def _stop(turn: _Turn, exit_code: int) -> None:
    turn.set(phase=Phase.STOPPED, exit_code=exit_code)
    turn.do(m.Stop(exit_code))


# -- what begins now ----------------------------------------------------------------------------------


def _advance(turn: _Turn) -> None:
    """Begin whatever may begin now."""
    for sink in turn.state.sinks:
        if sink.filling and sink.joined and sink.epoch >= turn.state.committed:
            turn.sink(sink.name, filling=False)
    _settle(turn)
    phase = turn.state.phase
    if turn.state.stopping and phase in (Phase.READING, Phase.OPEN):
        _stop(turn, 0)
    elif turn.state.resting or phase in (Phase.READING, Phase.CLAIMING):
        return
    elif phase is Phase.OPEN and _has_work(turn.state):
        turn.set(phase=Phase.CLAIMING)
        turn.do(m.Claim(again=turn.state.claimed))
    elif turn.state.reclaiming:
        _reclaim(turn)
    else:
        if phase is Phase.OPEN:
            _make_up(turn)
        else:
            _run(turn)
            _serve_sinks(turn)
            _record(turn)
            _watch(turn)
        _plan(turn)
        _finish(turn)


def _reclaim(turn: _Turn) -> None:
    """Commit what has begun, then claim another generation. What is only planned stays planned."""
    _serve_sinks(turn)
    _record(turn)
    is_busy = any(sink.busy or (sink.asking and not sink.away) for sink in turn.state.sinks)
    is_busy = is_busy or turn.state.acknowledging  # a sweep asks whether our generation is the newest
    if _is_under_way(turn.state) or turn.state.planning is not None or is_busy:
        return
    sinks = tuple(replace(sink, joined=False) for sink in turn.state.sinks)
    turn.set(reclaiming=False, phase=Phase.CLAIMING, sinks=sinks)
    turn.do(m.Claim(again=True))


def _is_under_way(state: EpochState) -> bool:
    return any(slot.stage is not Stage.PLANNED for slot in state.slots)


def _settle(turn: _Turn) -> None:
    """Work out the newest epoch that satisfies the commit policy."""
    committed = turn.state.committed
    turn.set(settled=max(turn.state.settled, _reached(turn.state, lambda s: min(_held(s), committed))))


def _safe(state: EpochState) -> int:
    """What sources may forget: not the newest epoch, which a recovery may need, and nothing that a sink lacks which is
    fed from staged files."""
    return max(0, min(state.recorded - 1, *(s.epoch for s in state.sinks if not s.from_outbox)))


def _has_work(state: EpochState) -> bool:
    lags = any(s.epoch < state.committed for s in state.sinks if not s.away)
    owes = state.recorded < state.settled or state.acknowledged < _safe(state)
    return bool(state.slots) or lags or owes or (state.settings.claims_first and not state.exhausted)


def _run(turn: _Turn) -> None:
    """Start the first planned epoch when the sinks are joined and no other job runs."""
    if turn.state.phase is Phase.JOINING and _reached(turn.state, lambda s: int(s.joined)):
        turn.set(phase=Phase.RUNNING)
    slot = next((s for s in turn.state.slots if s.stage in (Stage.PLANNED, Stage.RUNNING)), None)
    if turn.state.phase is Phase.RUNNING and slot is not None and slot.stage is Stage.PLANNED:
        turn.slot(slot.epoch, Stage.RUNNING)
        turn.do(m.Run(slot.epoch, slot.attempt))


def _serve_sinks(turn: _Turn) -> None:
    """Give each idle sink the one thing that is due there; a slow one holds up no other."""
    for sink in turn.state.sinks:
        action = None if sink.busy or sink.resting or sink.away else _due(turn.state, sink)
        if action is not None:
            turn.sink(sink.name, busy=True)
            turn.do(action)
            if sink.name == turn.state.deciding.name and isinstance(action, m.Commit):
                turn.slot(action.epoch, Stage.COMMITTING)


def _due(state: EpochState, sink: SinkState) -> Action | None:
    if sink.asking:
        return m.FindReceipt(sink.name, sink.asking)
    if state.reclaiming and not _is_under_way(state):
        return None  # else a sink that catches up would keep the claim away
    if not sink.joined:  # before anything is written there
        return m.Join(sink.name)
    all_settled = state.settled == state.committed
    if sink.epoch < state.committed:  # a stop does not wait for one that the commit policy can do without
        return None if state.stopping and all_settled else m.Commit(sink.name, sink.epoch + 1)
    if sink.name == state.deciding.name and all_settled and state.slots and state.slots[0].stage is Stage.STAGED:
        return m.Commit(sink.name, state.slots[0].epoch)
    return None


def _record(turn: _Turn) -> None:
    """Record what is settled, acknowledge what is safe; each of them once at a time, and both repeatable."""
    state = turn.state
    if state.recorded < state.settled and not state.recording:
        turn.set(recording=True)
        turn.do(m.Record(state.settled))
    if state.acknowledged < _safe(state) and not state.acknowledging:
        turn.set(acknowledging=True)
        turn.do(m.Acknowledge(_safe(state), state.acknowledged))
    _make_up(turn)


def _make_up(turn: _Turn) -> None:
    """Send again what a source may have missed: to the same epoch, so nothing else is due."""
    state = turn.state
    safe = min(_safe(state), state.acknowledged)
    if state.owed and safe and not state.acknowledging and not state.owing_rests:
        turn.set(acknowledging=True)
        turn.do(m.Acknowledge(safe, safe, again=True))


def _watch(turn: _Turn) -> None:
    """Look how far the committer is while it has not committed everything."""
    if turn.state.committed < turn.state.decided and not turn.state.watching:
        turn.set(watching=True)
        turn.do(m.WatchLog())


def _plan(turn: _Turn) -> None:
    """Plan the next epoch once the job of the one before has ended."""
    state = turn.state
    if state.stopping or state.exhausted or state.polling or state.planning is not None:
        return
    jobs = any(s.stage in (Stage.PLANNED, Stage.RUNNING) for s in state.slots)
    if not jobs and len(state.slots) < state.settings.max_inflight:
        epoch, base = state.planned_on
        turn.set(planning=(epoch, base))
        turn.do(m.Plan(epoch + 1, base))


def _finish(turn: _Turn) -> None:
    """Stop on request or when the input is exhausted, once nothing is in flight.

    No sink may lag, except one that rests after a failure.
    What waits for a committer holds up no end: further sinks are given it by the next run.
    """
    state = turn.state
    if not (state.stopping or state.exhausted) or state.slots or state.planning is not None:
        return
    reached = state.settled if state.stopping else _reached(state, _held)  # a sink may have gone back
    if state.recorded < state.settled or reached < state.committed or state.acknowledging:
        return
    if not any(s.busy for s in state.sinks):
        _stop(turn, 0)
