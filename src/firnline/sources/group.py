"""The sources of a pipeline as one: plans a slice of each, and keeps their positions by name.

A boundary does not wait for all sources. Once one source has a slice, the others get a moment to answer. A source that
is still listing is left out, and the next plan uses its answer.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from firnline.clock import monotonic
from firnline.errors import DamagedError, FirnlineError, SourceError
from firnline.process import TimedCalls
from firnline.sources import registry
from firnline.sources.base import Backlog, Limits, LogLag, PositionView, Reconciled, Source, SourcePlan, Split, TooYoung
from firnline.sources.guard import takes_acknowledgements
from firnline.sources.known import KnownFiles
from firnline.topology.records import Marker
from firnline.types import Json

logger = logging.getLogger(__name__)

ACKNOWLEDGE_SECONDS = 2.0  # an epoch waits so long for a source to acknowledge

ALIGN_SECONDS = 0.5  # the others' time to answer, once one source has a slice

Positions = dict[str, Json]
Records = dict[str, list[dict[str, Json]]]


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """The input of an epoch: a slice of every source that has input."""

    plans: dict[str, SourcePlan]
    align_ms: int = 0  # from the first slice to the boundary
    left_out: tuple[str, ...] = ()  # sources that had not answered by then
    asked_before: frozenset[str] = frozenset()  # sources that answer an earlier plan

    @property
    def files(self) -> int:
        return sum(plan.files for plan in self.plans.values())

    @property
    def size_bytes(self) -> int:
        return sum(plan.size_bytes for plan in self.plans.values())

    @property
    def late_files(self) -> int:
        return sum(int(plan.notes.get("late", 0)) for plan in self.plans.values())

    @property
    def splits(self) -> list[tuple[str, Split]]:
        """Every split with its source, in the order of the sources."""
        return [(name, split) for name, plan in self.plans.items() for split in plan.splits]

    @property
    def markers(self) -> tuple[Marker, ...]:
        """The markers at which slices end."""
        return tuple(marker for plan in self.plans.values() for marker in plan.markers)

    @property
    def inputs(self) -> Iterator[dict[str, Json]]:
        return (item for _, split in self.splits for item in split.inputs)


@dataclass(slots=True)
class _Asked:
    """A source that is planning in its own thread."""

    position: Json
    answer: concurrent.futures.Future[SourcePlan | None]
    answered: threading.Event = field(default_factory=threading.Event)


class Sources:
    """The named sources, in the order of the spec. Plans come from one thread."""

    align_seconds = ALIGN_SECONDS

    def __init__(self, sources: Sequence[Source], *, once: bool = False) -> None:
        self._once = once  # then every source must answer before "nothing to read"
        self._sources = {source.name: source for source in sources}
        self._asked: dict[str, _Asked] = {}
        self._forgotten: set[str] = set()
        self._acknowledging: dict[str, TimedCalls] = {}

    def __iter__(self) -> Iterator[Source]:
        return iter(self._sources.values())

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, name: str) -> Source:
        return self._sources[name]

    @property
    def names(self) -> list[str]:
        return list(self._sources)

    @property
    def only(self) -> Source | None:
        """The source of a pipeline with only one, which the formats of other tools can describe."""
        return next(iter(self)) if len(self) == 1 else None

    # -- positions ------------------------------------------------------------------------------------

    def start(self, positions: Mapping[str, Json]) -> Positions:
        """Check restored positions against the settings. A source without a position starts from the beginning."""
        return {source.name: source.start(positions.get(source.name)) for source in self}

    def describe(self, positions: Mapping[str, Json]) -> dict[str, PositionView]:
        """Return positions for people, including those of sources removed from the spec."""
        return {name: self._describe(name, position) for name, position in positions.items()}

    def _describe(self, name: str, position: Json) -> PositionView:
        source = self._sources.get(name)
        try:
            return source.describe(position) if source is not None else registry.describe(position)
        except (DamagedError, SourceError):
            return registry.describe(position)

    # -- the run that owns the pipeline ---------------------------------------------------------------

    @property
    def claim_first(self) -> bool:
        """Whether a source may be opened only by the run that owns the pipeline."""
        return any(source.claims_first for source in self)

    def claimed(self, check_holder: Callable[[], None]) -> None:
        """Tell every source that this run owns the pipeline."""
        for source in self:
            source.claimed(check_holder)

    def decided(self, positions: Mapping[str, Json]) -> None:
        """Tell every source the position before the newest epoch that is decided and recorded."""
        for source in self:
            if source.name in positions:
                source.decided(positions[source.name])

    def close(self) -> None:
        """End what the sources keep open."""
        for source in self:
            try:
                source.close()
            except FirnlineError as error:
                logger.warning("source not closed", extra={"source": source.name, "reason": error.message})

    @property
    def want_acknowledgement(self) -> bool:
        """Whether a source uses acknowledgements."""
        return any(takes_acknowledgements(source) for source in self)

    def acknowledge(self, positions: Mapping[str, Json]) -> bool:
        """Send every source the position below which nothing is needed any more; failures are logged.

        Returns whether every source took it.
        """
        taken = True
        for source in self:
            if source.name not in positions:
                continue
            call = self._acknowledging.setdefault(source.name, TimedCalls(ACKNOWLEDGE_SECONDS))
            if call.busy:
                taken = False  # the call that hangs was logged
                continue
            try:
                call.call(partial(source.acknowledge, positions[source.name]))
            except BaseException as error:  # whatever an own kind of source raises, the epoch is committed
                reason = str(error) or type(error).__name__
                logger.warning("source not acknowledged", extra={"source": source.name, "reason": reason})
                taken = False
        return taken

    def replan(self, positions: Mapping[str, Json], inputs: Records, parallelism: int) -> EpochPlan:
        """Return the plan of an epoch, from the ledger's records of it, to read it again."""
        return EpochPlan(
            {
                name: self._sources[name].replan(positions[name], records, parallelism)
                for name, records in inputs.items()
                if name in self._sources
            }
        )

    def replay(self, positions: Positions, inputs: Mapping[str, Sequence[dict[str, Json]]]) -> Positions:
        """Return the positions after an epoch, from the ledger's records of it."""
        known = {n: self._sources[n].replay(p, inputs.get(n, [])) for n, p in positions.items() if n in self._sources}
        return {**positions, **known}

    def advance(
        self, plan: EpochPlan, positions: Positions, outcomes: Mapping[str, Sequence[Json]], epoch: int
    ) -> tuple[Positions, Records]:
        """Return the positions after the tasks of `plan` ended as reported, and the ledger's input records by
        source."""
        after, records = dict(positions), {}
        for name, part in plan.plans.items():
            after[name], records[name] = self._sources[name].advance(part, outcomes.get(name, []), epoch)
        return after, records

    # -- planning -------------------------------------------------------------------------------------

    def plan(self, positions: Positions, limits: Limits) -> EpochPlan | None:
        """Return the slices of all sources, or None if no source has anything to read now."""
        if len(self) == 1:
            source = next(iter(self))
            alone = source.plan(positions[source.name], limits)
            return EpochPlan({source.name: alone}) if alone is not None else None
        share = replace(
            limits,
            max_files=max(1, limits.max_files // len(self)),
            max_bytes=max(1, limits.max_bytes // len(self)),
            max_events=max(1, limits.max_events // len(self)),
        )
        before = dict(self._asked)
        for source in self:
            self._ask(source, positions[source.name], share)
        old = frozenset(name for name, asked in self._asked.items() if before.get(name) is asked)
        first_at = self._wait_for_first()
        deadline = first_at + self.align_seconds
        plans: dict[str, SourcePlan] = {}
        left_out: list[str] = []
        failures: list[BaseException] = []
        for name, asked in list(self._asked.items()):
            if not asked.answered.wait(max(0.0, deadline - monotonic())):
                left_out.append(name)
                continue
            del self._asked[name]
            failure = asked.answer.exception()
            if failure is not None:
                failures.append(failure)
            elif (answer := asked.answer.result()) is not None:
                plans[name] = answer
        if failures:
            self.discard(EpochPlan(plans))  # what the others took up is not read now
            raise failures[0]
        if not plans:
            return None
        if left_out:
            logger.info("sources left out of an epoch: they are still listing", extra={"sources": left_out})
        ordered = {name: plans[name] for name in self._sources if name in plans}
        return EpochPlan(ordered, round((monotonic() - first_at) * 1000), tuple(left_out), old)

    def _ask(self, source: Source, position: Json, limits: Limits) -> None:
        """Let a source plan in its own thread, unless it already does for the same position."""
        known = self._asked.get(source.name)
        if known is not None:
            if known.position == position:
                return
            known.answered.wait()  # planned on a lost base: its answer does not count
            answer = None if known.answer.exception() else known.answer.result()
            if answer is not None and self._give_back(source, answer):
                self._forgotten.add(source.name)
        asked = _Asked(position, concurrent.futures.Future())

        def plan() -> None:
            try:
                asked.answer.set_result(source.plan(position, limits))
            except BaseException as error:
                asked.answer.set_exception(error)
            finally:
                asked.answered.set()

        self._asked[source.name] = asked
        threading.Thread(target=plan, name=f"firnline plan {source.name}", daemon=True).start()

    def _wait_for_first(self) -> float:
        """Wait until one source has a slice or a failure, or all have answered. Returns that time.

        If one has nothing and the others do not answer, the wait ends: it may have input soon.
        """
        waiting = [asked.answer for asked in self._asked.values()]
        patience: float | None = None
        while waiting:
            answered, rest = concurrent.futures.wait(waiting, patience, return_when=concurrent.futures.FIRST_COMPLETED)
            if not answered or any(one.exception() is not None or one.result() is not None for one in answered):
                break
            waiting = list(rest)
            patience = None if self._once else ALIGN_SECONDS
        return monotonic()

    def backlog(self, positions: Mapping[str, Json]) -> Backlog:
        """Count the input after the positions, over all sources."""
        counted = [source.backlog(positions[source.name]) for source in self]
        return Backlog(sum(b.files_outstanding for b in counted), sum(b.bytes_outstanding for b in counted))

    def log_lags(self, positions: Mapping[str, Json]) -> dict[str, LogLag]:
        """Return how far each source with a log is behind its server."""
        return {
            source.name: source.log_lag(positions.get(source.name) or source.start(None))
            for source in self
            if source.has_log
        }

    # -- late files and retries -----------------------------------------------------------------------

    def find_late(
        self, positions: Mapping[str, Json], known: Mapping[str, KnownFiles]
    ) -> Iterator[tuple[Source, Reconciled]]:
        """Compare all existing input with the ledger, source by source. Changes nothing."""
        for source in self:
            if source.reconcile_interval_secs is not None:
                yield source, source.find_late(positions[source.name], known[source.name])

    def too_young(self) -> TooYoung | None:
        """Return the input of all sources that the last plans left because it may be half written."""
        found = [young for source in self if (young := source.too_young()) is not None]
        if not found:
            return None
        return TooYoung(sum(y.files for y in found), min(y.seconds for y in found), max(y.all_seconds for y in found))

    def unreachable(self) -> dict[str, str | None]:
        """Return for every source why its last plan could not see any input; None: it could."""
        return {source.name: source.unreachable() for source in self}

    def is_reading(self) -> bool:
        """Return whether a source has input that its last plan could not have yet."""
        return any(source.is_reading() for source in self)

    def is_asked(self, name: str) -> bool:
        """Return whether a source is planning a slice that no plan has used yet; it may have answered.

        Until then a full listing cannot identify late files: those in the answer are in no epoch.
        """
        return name in self._asked

    def discard(self, plan: EpochPlan) -> None:
        """Give back a plan that no epoch will use."""
        self._forgotten |= set(self.give_back(plan))

    def take_forgotten(self) -> set[str]:
        """Return the sources whose late files must be found again, because the plan that used them was dropped."""
        forgotten, self._forgotten = self._forgotten, set()
        return forgotten

    def give_back(self, plan: EpochPlan) -> list[str]:
        """Give back a lost epoch. Returns the sources whose late files must be found again."""
        return [name for name, part in plan.plans.items() if self._give_back(self._sources[name], part)]

    def _give_back(self, source: Source, plan: SourcePlan) -> bool:
        """Give back a lost slice. If the source fails, its late files are searched again: that is always safe."""
        try:
            return source.give_back(plan)
        except SourceError as error:
            logger.warning("slice not given back", extra={"source": source.name, "reason": error.message})
            return True

    def retry(self, path: str, *, changed: bool) -> None:
        """Request another read of a file that was set aside, with the next plan of its source."""
        for source in self:
            source.retry(path, changed=changed)

    def drop(self, path: str) -> None:
        """Request to drop a file that was set aside, with the next plan of its source."""
        for source in self:
            source.drop(path)

    def forget_requests(self, names: Iterable[str]) -> None:
        """Forget these requests: the epoch that answers them is committed."""
        taken = list(names)
        for source in self:
            source.forget_requests(taken)

    def find_unavailable(
        self, now: Mapping[str, Json], inputs: Iterable[Mapping[str, Any]], then: Mapping[str, Json] | None = None
    ) -> list[str]:
        """Return the files in the ledger's `inputs` (newest epoch first) that could not be read again, with reasons."""
        entries = list(inputs)
        unavailable: list[str] = []
        for source in self:
            if source.name not in now:
                continue
            records = [record for entry in entries for record in entry.get(source.name, [])]
            unavailable += source.find_unavailable(now[source.name], records, then.get(source.name) if then else None)
        return unavailable
