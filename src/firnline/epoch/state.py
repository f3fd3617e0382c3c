"""What the epoch's decisions remember: settings, sinks, epochs in flight; values without behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Policy(Enum):
    """Which sinks must hold an epoch before the checkpoint advances."""

    ALL = "all"  # every sink that is not optional
    REQUIRED = "required"  # the same, by another word
    QUORUM = "quorum"  # the deciding sink and as many others as make up the number


class Phase(Enum):
    """What a run does now."""

    READING = "reading"  # asks every sink what it holds
    OPEN = "open"  # plans, but has not claimed: there was nothing to do yet
    CLAIMING = "claiming"
    LEVELLING = "levelling"  # registers in the sinks that the commit policy needs
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


def initial(settings: Settings, sinks: list[tuple[str, bool]]) -> EpochState:
    """The state of a run that has seen nothing. `sinks` are (name, required), the deciding one first."""
    return EpochState(settings, tuple(SinkState(name, required) for name, required in sinks))
