"""The Kafka source, in the driver: looks for new records, plans offset ranges, keeps positions."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from firnline.clock import SystemClock
from firnline.errors import ConfigError, SourceError, SourceGapError, SourceMovedError
from firnline.faults import fault_point
from firnline.kafka_client import as_source_error, find_unreachable, load_library
from firnline.schema_registry import open_registry
from firnline.sources.base import (
    MAIN_PORT,
    Backlog,
    Limits,
    PositionChange,
    PositionView,
    Sample,
    Source,
    SourcePlan,
    Split,
)
from firnline.sources.columns import Columns
from firnline.sources.kafka import moves
from firnline.sources.kafka.channels import read_channel
from firnline.sources.kafka.clients import (
    CALL_SECONDS,
    CONSUMER_ONLY,
    EARLIEST,
    LATEST,
    Topic,
    describe_topics,
    list_offsets,
    open_admin,
    registry_errors,
)
from firnline.sources.kafka.messages import GAP_HINT, KafkaReaderSettings, RangeInput, RangeOutcome
from firnline.sources.kafka.options import KafkaSourceOptions
from firnline.sources.kafka.planning import Bounds, Slice, find_gaps, share_tasks, skip_gaps, spread_pieces, take
from firnline.sources.kafka.position import PartitionId, PartitionState, Position, Range
from firnline.sources.replays import Replays, deal_again, replayed_record
from firnline.topology import decide
from firnline.topology.records import Marker
from firnline.types import Json

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0  # between two looks for new topics and partitions while nothing new comes
MORE_SECONDS = 0.02  # between two looks whether more records have come
NO_LIMIT = 1 << 62
SAMPLE_RECORDS = 1_000  # of one piece of a partition


@dataclass(frozen=True, slots=True)
class _View:
    """What the brokers have: the topics that the source covers, and the bounds of their partitions."""

    topics: Mapping[str, Topic]
    bounds: Mapping[PartitionId, Bounds]

    @property
    def ids(self) -> dict[str, str]:
        return {name: topic.id for name, topic in self.topics.items()}


class KafkaSource(Source):
    """Topics of a Kafka cluster."""

    inputs_are = "partition"

    def __init__(self, options: KafkaSourceOptions, *, once: bool, moved: tuple[str, str] | None) -> None:
        load_library()
        self.name = options.name
        self.poll_interval_secs = options.poll_interval_secs
        self._options = options
        self._once = once
        self._moved = moved
        self._clock = SystemClock()
        self._client = {"bootstrap.servers": options.brokers, **options.security, **options.client}
        self._starts: dict[PartitionId, int] = {}  # of partitions that no committed position names yet
        self._ends: dict[PartitionId, int] | None = None  # once: where the partitions ended when the run began
        self._looked_at = float("-inf")
        self._committer: Any = None
        self._replays = Replays()
        self._mean_bytes = 0.0

    @property
    def location(self) -> str:
        return self._options.location

    # -- positions ------------------------------------------------------------------------------------

    def start(self, position: Json | None) -> Json:
        if position is None:
            return Position(self.location).to_json()
        known = Position.from_json(position)
        if self._moved is not None and known.location == self._moved[0]:
            if len(known.topics) != len(self._options.topics):
                raise ConfigError(
                    f"source {self.name!r} was moved from {len(known.topics)} topics to {len(self._options.topics)}",
                    hint="Name as many topics as before; they correspond in the order of their names.",
                )
            return known.moved(self.location, self._options.topics).to_json()
        if known.topics and not any(self._options.covers(name) for name in known.topics):
            raise SourceMovedError(
                f"source {self.name!r} read {known.location}, and now names {self.location}",
                hint="If the same records with the same offsets are now in other topics, run once with --source-moved "
                f"{known.location}={self.location}. For other topics, give the source another name.",
            )
        return replace(known, location=self.location).to_json()

    def describe(self, position: Json) -> PositionView:
        return Position.from_json(position).describe()

    def check(self) -> None:
        settings = {key: value for key, value in self._client.items() if key not in CONSUMER_ONLY}
        unreachable = find_unreachable(settings)
        if unreachable is not None:
            raise as_source_error(f"source {self.name!r}: no broker answers", self._options.brokers, unreachable)
        self._look()
        if self._options.registry is not None:
            with registry_errors(self.name):
                open_registry(self._options.registry).check()

    def set_position(self, position: Json, words: str) -> PositionChange:
        view = self._look()

        def at(millis: int) -> Mapping[PartitionId, int]:
            return list_offsets(self._admin, view.bounds, millis, self._options.brokers)

        return moves.choose(self.name, Position.from_json(position), words, view.ids, view.bounds, at)

    def skip(self, position: Json, words: str) -> PositionChange:
        view = self._look()
        return moves.skip(self.name, Position.from_json(position), words, view.ids, view.bounds)

    # -- looking --------------------------------------------------------------------------------------

    def _look(self) -> _View:
        """Ask the brokers for the topics, their partitions and the bounds of these."""
        topics = describe_topics(self._admin, self._names(), self._options.brokers)
        missing = [name for name in self._options.topics if name not in topics]
        if missing:
            raise SourceError(
                f"topic {missing[0]!r} does not exist (brokers {self._options.brokers})",
                hint="Create the topic, or correct the name in `topics`; the run retries.",
            )
        partitions = [PartitionId(name, number) for name, topic in topics.items() for number in topic.partitions]
        ends = list_offsets(self._admin, partitions, LATEST, self._options.brokers)
        starts = list_offsets(self._admin, partitions, EARLIEST, self._options.brokers)
        unknown = [one for one in partitions if one not in starts or one not in ends]
        if unknown:
            raise SourceError(
                f"{unknown[0]} exists, and its broker does not know it (brokers {self._options.brokers})",
                hint="A topic that was just created, or is being deleted, looks like this; the run retries.",
            )
        self._looked_at = self._clock.monotonic()
        return _View(topics, {one: Bounds(starts[one], ends[one]) for one in partitions})

    def _names(self) -> list[str]:
        if not self._options.pattern:
            return list(self._options.topics)
        try:
            found = self._admin.list_topics(timeout=CALL_SECONDS).topics
        except load_library().KafkaException as error:
            raise as_source_error("cannot list topics", self._options.brokers, error) from error
        return sorted(name for name in found if not name.startswith("__") and self._options.covers(name))

    @property
    def _admin(self) -> Any:
        return open_admin(self._client)

    def _latest(self, partitions: Iterable[PartitionId]) -> dict[PartitionId, int]:
        return list_offsets(self._admin, partitions, LATEST, self._options.brokers)

    def _has_news(self, position: Position) -> bool:
        """Return whether a closer look is worth its time: records have come, or it is due."""
        if self._once or self._clock.monotonic() - self._looked_at > LOOK_SECONDS or not position.topics:
            return True
        known = [one for one, _ in position.partitions() if self._options.covers(one.topic)]
        ends = self._latest(known)
        return any(one not in ends or (position.of(one) or PartitionState(0)).unread(ends[one]) for one in known)

    # -- planning -------------------------------------------------------------------------------------

    def plan(self, position: Json, limits: Limits) -> SourcePlan | None:
        base = Position.from_json(position)
        replayed = self._plan_replay(base, limits)
        if replayed is not None:
            return replayed
        if not self._has_news(self._with_starts(base)):
            return None
        view = self._look()
        known, notes = self._follow(base, view)
        slices = take(known, self._bounds(view), limits.max_events)
        if slices and not self._once:
            view = self._wait_for_more(known, view, limits)
            slices = take(known, self._bounds(view), limits.max_events)
        markers: tuple[Marker, ...] = ()
        if slices:
            known, notes, slices, markers = self._keep_to_channels(known, notes, view, limits)
        if not slices and not markers:
            self._ends = None
            if not self._must_pin(base, known):
                return None
        parts = share_tasks(slices, min(limits.parallelism, max(1, limits.max_output_files // limits.files_per_task)))
        splits = [
            Split(
                inputs=[RangeInput(str(s.partition), s.topic_id, *one).to_json() for s, one in part],
                max_records=sum(one.end - one.start for _, one in part),
                max_bytes=max(1, limits.max_bytes // len(parts)),
                max_output_files=max(1, limits.max_output_files // len(parts)),
            )
            for part in parts
            if part
        ]
        records = sum(one.records for one in slices)
        return SourcePlan(
            source=self.name,
            base=position,
            splits=splits,
            files=sum(len(split.inputs) for split in splits),
            size_bytes=int(records * self._mean_bytes),
            notes={"position": known.to_json(), **notes},
            markers=markers,
        )

    def _keep_to_channels(
        self, known: Position, notes: dict[str, Any], view: _View, limits: Limits
    ) -> tuple[Position, dict[str, Any], list[Slice], tuple[Marker, ...]]:
        """Skip void offsets, and end the slices at the first cut of a snapshot that is not recorded.

        The ends of `view` are older than what the checkpoint topics say now: a cut that they do not name yet lies at
        or beyond these ends.

        Returns the position and the notes, with void offsets covered, the slices, and the markers that they reach.
        """
        bounds = dict(self._bounds(view))
        cuts: list[tuple[Marker, set[PartitionId], Mapping[PartitionId, int]]] = []
        void: dict[str, list[list[int]]] = {}
        for channel in limits.channels(self.name):
            state = read_channel(self._client, channel, self._options.brokers)
            inside = {one for one in bounds if channel.covers(one.topic)}
            void_now = state.void_in(view.ids)
            for one in inside:
                stable = view.bounds[one].end  # the end of the restore's own transaction may not be there yet
                ranges = [Range(start, min(end, stable)) for start, end in void_now.get(one, ()) if start < stable]
                here = known.of(one)
                if here is not None and (covered := here.cover(ranges)) != here:
                    known = known.set(one, view.ids[one.topic], covered)
                    void[str(one)] = [[start, end] for start, end, _ in ranges]
            barriers = [
                (cut.marker, inside, {PartitionId(*one): end for one, end in cut.ends_in(view.ids).items()})
                for cut in state.cuts.values()
                if limits.stops_at(cut.marker)
            ]
            ends = decide.limit_ends({one: bounds[one].end for one in inside}, [of for _, _, of in barriers])
            bounds |= {one: replace(bounds[one], end=end) for one, end in ends.items()}
            cuts += barriers
        slices = take(known, bounds, limits.max_events)
        planned = {one.partition: one.ranges for one in slices}
        reached = {one: (known.of(one) or PartitionState(0)).cover(planned.get(one, ())).next for one in bounds}
        markers = tuple(
            marker for marker, inside, cut in cuts if decide.is_reached({one: reached[one] for one in inside}, cut)
        )
        return known, {**notes, **({"void": void} if void else {})}, slices, markers

    def _plan_replay(self, base: Position, limits: Limits) -> SourcePlan | None:
        """Return the slice of quarantined records that are to be read again; None if there are none."""
        chosen = self._replays.choose(base.answered, limits.max_bytes) if not limits.any_age else None
        if chosen is None:
            return None
        kept = (one for one in base.answered if one in self._replays)
        answered = replace(base, answered=(*kept, *chosen.requests)).to_json()
        return SourcePlan(
            source=self.name,
            base=answered,
            splits=deal_again(chosen.inputs, limits.parallelism),
            files=len(chosen.inputs),
            size_bytes=sum(int(item["size_bytes"]) for item in chosen.inputs),
            notes={"position": answered, "restarts": {}, "gaps": {}, "records": chosen.records},
        )

    def replay_quarantined(self, request: str, files: Sequence[Mapping[str, Json]], *, discard: bool) -> None:
        self._replays.add(request, files, discard=discard)

    def forget_requests(self, names: Iterable[str]) -> None:
        self._replays.forget(names)

    def answered(self, position: Json) -> frozenset[str]:
        return frozenset(Position.from_json(position).answered)

    def has_answered(self, plan: SourcePlan, request: str) -> bool:
        return request in Position.from_json(plan.base).answered

    def _must_pin(self, base: Position, known: Position) -> bool:
        """Return whether an epoch without rows must record where topics begin: a later run has another `latest`."""
        return self._options.start != "earliest" and known.topics.keys() > base.topics.keys()

    def _bounds(self, view: _View) -> Mapping[PartitionId, Bounds]:
        """Return the bounds to plan with: a `once` run ends where the partitions ended when it began."""
        if not self._once:
            return view.bounds
        if self._ends is None:
            self._ends = {one: bounds.end for one, bounds in view.bounds.items()}
        return {
            one: Bounds(bounds.start, min(bounds.end, self._ends[one]))
            for one, bounds in view.bounds.items()
            if one in self._ends
        }

    def _with_starts(self, position: Position) -> Position:
        """Return the position with the starts of partitions that this process has chosen, and no epoch committed."""
        for one, start in self._starts.items():
            topic = position.topics.get(one.topic)
            if position.of(one) is None:
                position = position.set(one, topic.id if topic is not None else "", PartitionState(start))
        return position

    def _follow(self, base: Position, view: _View) -> tuple[Position, dict[str, Any]]:
        """Return the position with new partitions in it and beyond gaps, and what the ledger must say of both.

        Raises:
            SourceGapError: records are missing, and the settings make this an error.
        """
        known = base
        for one in view.bounds:  # partitions that were added begin with their first record, which may be lost, too
            if base.of(one) is None and one.topic in base.topics and base.topics[one.topic].id == view.ids[one.topic]:
                known = known.set(one, view.ids[one.topic], PartitionState(0))
        gaps = find_gaps(known, view.ids, view.bounds)
        if gaps and self._options.on_gap == "fail":
            more = f" (and {len(gaps) - 1} more partitions)" if len(gaps) > 1 else ""
            raise SourceGapError(f"source {self.name!r}, {gaps[0]}{more}", hint=GAP_HINT, source=self.name)
        position = skip_gaps(known, view.ids, gaps)
        for gap in gaps:
            logger.warning("records are missing: %s; reading goes on", gap, extra={"source": self.name})
        added = [one for one, _ in known.partitions() if base.of(one) is None]
        restarts = {str(one): 0 for one in added} | {str(gap.partition): gap.resume for gap in gaps}
        self._starts |= {one: restarts[str(one)] for one in added}
        new = [one for one in view.bounds if position.of(one) is None]
        self._choose_starts(new, base, view)
        for one in new:
            position = position.set(one, view.ids[one.topic], PartitionState(self._starts[one]))
            restarts[str(one)] = self._starts[one]
        for name, topic in position.topics.items():
            if not topic.id and name in view.topics:  # of a position that was moved
                for number, state in topic.partitions.items():
                    position = position.set(PartitionId(name, number), view.ids[name], state)
        return position, {"restarts": restarts, "gaps": {str(gap.partition): gap.reason for gap in gaps}}

    def _choose_starts(self, partitions: Sequence[PartitionId], base: Position, view: _View) -> None:
        """Choose where new partitions begin: at `start` if their topic is new to a pipeline that names it, else at
        their beginning. Chosen once, since `latest` moves."""
        unknown = [one for one in partitions if one not in self._starts]
        by_start = [
            one for one in unknown if one.topic not in base.topics and not (self._options.pattern and base.topics)
        ]
        for one in unknown:
            self._starts[one] = view.bounds[one].start
        if self._options.start == "earliest" or not by_start:
            return
        if self._options.start == "latest":
            self._starts |= {one: view.bounds[one].end for one in by_start}
            return
        millis = int(datetime.fromisoformat(self._options.start).timestamp() * 1000)
        at = list_offsets(self._admin, by_start, millis, self._options.brokers)
        self._starts |= {one: at[one] if at.get(one, -1) >= 0 else view.bounds[one].end for one in by_start}

    def _wait_for_more(self, position: Position, view: _View, limits: Limits) -> _View:
        """Wait for more records while they keep coming, for at most `max_ms` and until the slice is full."""
        deadline = self._clock.monotonic() + limits.max_ms / 1000
        while True:
            waiting = sum(one.records for one in take(position, view.bounds, limits.max_events))
            left = deadline - self._clock.monotonic()
            if waiting >= limits.max_events or left <= 0:
                return view
            self._clock.sleep(min(left, MORE_SECONDS))
            ends = self._latest(view.bounds)
            grown = {one: replace(b, end=max(b.end, ends.get(one, b.end))) for one, b in view.bounds.items()}
            if grown == view.bounds:
                return view
            view = replace(view, bounds=grown)

    def advance(self, plan: SourcePlan, outcomes: Sequence[Json], epoch: int) -> tuple[Json, list[dict[str, Json]]]:
        before = Position.from_json(plan.notes["position"])
        ids = {name: topic.id for name, topic in before.topics.items()}
        read: dict[PartitionId, list[RangeOutcome]] = {}
        failed = {str(item["quarantine"]): item["failed"] for item in outcomes if "quarantine" in item}
        for outcome in (RangeOutcome.from_json(item) for item in outcomes if "quarantine" not in item):
            read.setdefault(PartitionId.parse(outcome.path), []).append(outcome)
        position, records = before, list[dict[str, Json]]()
        restarts, gaps, void = plan.notes["restarts"], plan.notes["gaps"], plan.notes.get("void", {})
        for partition, state in before.partitions():
            done = read.get(partition, [])
            if not done and str(partition) not in restarts and str(partition) not in void:
                continue
            covered = state.cover(Range(one.start, one.end, one.epoch) for one in done)
            position = position.set(partition, ids[partition.topic], covered)
            start, end = (done[0].start, done[-1].end) if done else (state.next, state.next)
            records.append(
                {
                    "path": str(partition),
                    "topic_id": ids[partition.topic],
                    "from": start,
                    "to": end,
                    "status": "committed" if done else "pending",
                    "records": sum(one.records for one in done),
                    "size_bytes": sum(one.size_bytes for one in done),
                    "processed_time": datetime.now(UTC).isoformat(timespec="seconds"),
                    "ranges": [[one.start, one.end, one.epoch, one.records, one.checksum] for one in done],
                    **({"restart": restarts[str(partition)]} if str(partition) in restarts else {}),
                    **({"gap": gaps[str(partition)]} if str(partition) in gaps else {}),
                    **({"void": void[str(partition)]} if str(partition) in void else {}),
                }
            )
        count = sum(int(one["records"]) for one in records)
        if count:
            self._mean_bytes = sum(int(one["size_bytes"]) for one in records) / count
        for item in (item for split in plan.splits for item in split.inputs if "quarantine" in item):
            reason = failed.get(str(item["quarantine"]), "not reached")
            if reason is None:
                records.append(replayed_record(item))
            else:
                facts = {"file": item["quarantine"], "reason": reason}
                logger.warning("records not read again: they stay in quarantine", extra=facts)
        return position.to_json(), [*plan.notes.get("records", ()), *records]

    def replay(self, position: Json, records: Sequence[dict[str, Json]]) -> Json:
        known = Position.from_json(position)
        named = [str(record["request"]) for record in records if "request" in record]
        known = replace(known, answered=tuple(dict.fromkeys([*known.answered, *named])))
        for record in (record for record in records if "ranges" in record):
            partition, topic_id = PartitionId.parse(str(record["path"])), str(record["topic_id"])
            topic = known.topics.get(partition.topic)
            state = known.of(partition) if topic is not None and topic.id in ("", topic_id) else None
            if "restart" in record or state is None:
                start = int(record["restart"] if "restart" in record else record["from"])
                ahead = [one for one in state.ahead if one.end > start] if state is not None else []
                state = PartitionState(start).cover(ahead)
            ranges = [Range(int(start), int(end), int(epoch)) for start, end, epoch, *_ in record["ranges"]]
            ranges += [Range(int(start), int(end)) for start, end in record.get("void", ())]
            known = known.set(partition, topic_id, state.cover(ranges))
        return known.to_json()

    def replan(self, position: Json, records: Sequence[dict[str, Json]], parallelism: int) -> SourcePlan:
        inputs = [
            RangeInput(
                str(record["path"]), str(record["topic_id"]), int(start), int(end), -1, int(count), str(checksum)
            ).to_json()
            for record in records
            for start, end, _, count, checksum in record.get("ranges", ())
        ]
        inputs += [one for one in records if one.get("status") == "replayed" and not one.get("discarded")]
        splits = deal_again(inputs, parallelism)
        known = Position.from_json(position).to_json()
        notes = {"position": known, "restarts": {}, "gaps": {}}
        size_bytes = sum(int(record.get("size_bytes", 0)) for record in records)
        return SourcePlan(self.name, position, splits, len(inputs), size_bytes, notes=notes)

    def backlog(self, position: Json) -> Backlog:
        known = self._with_starts(Position.from_json(position))
        partitions = [one for one, _ in known.partitions() if self._options.covers(one.topic)]
        if not partitions:
            view = self._look()
            waiting = [bounds.end - bounds.start for bounds in view.bounds.values() if bounds.end > bounds.start]
        else:
            ends = self._latest(partitions)
            unread = [(known.of(one) or PartitionState(0)).unread(ends[one]) for one in partitions if one in ends]
            waiting = [sum(e - s for s, e, _ in ranges) for ranges in unread if ranges]
        return Backlog(len(waiting), int(sum(waiting) * self._mean_bytes))

    # -- after the commit -----------------------------------------------------------------------------

    def acknowledge(self, position: Json) -> None:
        """Commit offsets for a consumer group, so that tools which watch lag see it. They are never read."""
        library = load_library()
        offsets = [
            library.TopicPartition(one.topic, one.number, state.next)
            for one, state in Position.from_json(position).partitions()
        ]
        if not self._options.group or not offsets:
            return
        if self._committer is None:
            client = {**self._client, "group.id": self._options.group, "enable.auto.commit": False, "log_level": 0}
            self._committer = library.Consumer(client)
        fault_point("kafka.acknowledge.before")
        try:
            self._committer.commit(offsets=offsets, asynchronous=False)
        except library.KafkaException as error:
            what = f"cannot commit offsets of group {self._options.group}"
            raise as_source_error(what, self._options.brokers, error) from error
        fault_point("kafka.acknowledge.after")

    def find_unavailable(
        self, position: Json, records: Sequence[Mapping[str, Json]], back_to: Json | None = None
    ) -> list[str]:
        wanted = [record for record in records if record.get("ranges")]  # others were read from the quarantine
        if not wanted:
            return []
        partitions = sorted({PartitionId.parse(str(record["path"])) for record in wanted})
        topics = describe_topics(self._admin, sorted({one.topic for one in partitions}), self._options.brokers)
        starts = list_offsets(
            self._admin,
            [one for one in partitions if one.topic in topics],
            EARLIEST,
            self._options.brokers,
        )
        unavailable = []
        for record in wanted:
            partition, start = PartitionId.parse(str(record["path"])), int(record["from"])
            topic = topics.get(partition.topic)
            if topic is None or partition not in starts:
                unavailable.append(f"{partition} offset {start}: the topic no longer exists")
            elif topic.id != record["topic_id"]:
                unavailable.append(f"{partition} offset {start}: the topic was deleted and created again")
            elif start < starts[partition]:
                unavailable.append(f"{partition} offset {start}: deleted; its log starts at {starts[partition]}")
        return unavailable

    # -- reading --------------------------------------------------------------------------------------

    def reader_settings(self) -> dict[str, Json]:
        options = self._options
        return KafkaReaderSettings(
            source=self.name,
            client=dict(self._client),
            value=options.value,
            include=list(options.include),
            key=options.key,
            tombstones=options.tombstones,
            on_bad_record=options.on_bad_record,
            on_gap=options.on_gap,
            registry=dict(options.registry) if options.registry is not None else None,
        ).to_json()

    def sample(self, plan: SourcePlan, columns: Mapping[str, Columns]) -> Sample:
        from firnline.sources.kafka.reader import KafkaReader  # loads the decoder
        from firnline.sources.sample import SAMPLE_FILES, sample_inputs

        settings, inputs = self.reader_settings(), [item for split in plan.splits for item in split.inputs]
        ranges = [Range(int(item["from"]), int(item["to"]), int(item["epoch"])) for item in inputs]
        pieces = spread_pieces(ranges, SAMPLE_FILES, SAMPLE_RECORDS)
        chosen = [{**inputs[at], "from": one.start, "to": one.end, "epoch": one.epoch} for at, one in pieces]
        part = replace(plan, splits=[Split(chosen, NO_LIMIT, NO_LIMIT, NO_LIMIT)])
        found = sample_inputs(lambda split: KafkaReader(settings, split, columns), part, columns[MAIN_PORT])
        if found.records:
            self._mean_bytes = found.size_bytes / found.records
        is_whole = sum(one.end - one.start for _, one in pieces) == sum(one.end - one.start for one in ranges)
        return replace(found, complete=found.complete and is_whole)

    def inputs_after(self, first: SourcePlan, everything: SourcePlan) -> list[dict[str, Json]]:
        taken: dict[str, int] = {}
        for item in (item for split in first.splits for item in split.inputs):
            taken[str(item["path"])] = max(taken.get(str(item["path"]), 0), int(item["to"]))
        items = (item for split in everything.splits for item in split.inputs)
        rest = ({**item, "from": max(int(item["from"]), taken.get(str(item["path"]), 0))} for item in items)
        return [item for item in rest if item["from"] < item["to"]]
