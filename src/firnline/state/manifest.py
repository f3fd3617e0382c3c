"""What a snapshot of sharded state consists of: references to its files, its metadata, and the reference in a sink."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.errors import ConfigError, DamagedError
from firnline.names import SNAPSHOT_FILE, SNAPSHOT_ID, snapshot_id
from firnline.options import OperatorOptions
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """One immutable Arrow file of state.

    `path` is relative to the home of the pipeline's state, so it reads the same in every tier. The file holds keys of
    the groups `first_group` to `last_group`; a shard that owns some of them reads only those.
    """

    path: str
    size_bytes: int
    crc32: int
    rows: int
    first_group: int
    last_group: int
    epoch: int

    def to_json(self) -> dict[str, Json]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_json(cls, value: Json) -> SegmentRef:
        """Parse the output of `to_json`. Raises DamagedError if it is invalid."""
        try:
            numbers = {name: int(value[name]) for name in cls.__dataclass_fields__ if name != "path"}
            return cls(path=str(value["path"]), **numbers)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"a reference to state lacks {error}") from error


@dataclass(frozen=True, slots=True)
class TimerRef:
    """A timer file, sorted by due time, and the event time up to which its timers have fired."""

    segment: SegmentRef
    fired_until: int | None = None

    def to_json(self) -> dict[str, Json]:
        return {"run": self.segment.to_json(), "fired_until": self.fired_until}

    @classmethod
    def from_json(cls, value: Json) -> TimerRef:
        """Parse the output of `to_json`."""
        fired = value["fired_until"]
        return cls(SegmentRef.from_json(value["run"]), None if fired is None else int(fired))


@dataclass(frozen=True, slots=True)
class ShardState:
    """The state of one operator in one shard: its files, oldest first (a newer one overrides older ones)."""

    segments: tuple[SegmentRef, ...] = ()
    timers: tuple[TimerRef, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(r.size_bytes for r in self.files)

    @property
    def files(self) -> tuple[SegmentRef, ...]:
        return (*self.segments, *(t.segment for t in self.timers))

    def to_json(self) -> dict[str, Json]:
        return {"runs": [r.to_json() for r in self.segments], "timers": [t.to_json() for t in self.timers]}

    @classmethod
    def from_json(cls, value: Json) -> ShardState:
        """Parse the output of `to_json`."""
        return cls(
            tuple(SegmentRef.from_json(r) for r in value["runs"]), tuple(TimerRef.from_json(t) for t in value["timers"])
        )


@dataclass(frozen=True, slots=True)
class OperatorState:
    """The state of one operator: per shard its key groups `[first, last)` and its files."""

    epoch: int  # the epoch of this state; 0: empty
    shards: tuple[tuple[int, int, ShardState], ...] = field(default=())

    def to_json(self) -> dict[str, Json]:
        return {"epoch": self.epoch, "shards": [[a, b, state.to_json()] for a, b, state in self.shards]}

    @classmethod
    def from_json(cls, value: Json) -> OperatorState:
        """Parse the output of `to_json`."""
        shards = tuple((int(a), int(b), ShardState.from_json(state)) for a, b, state in value["shards"])
        return cls(int(value["epoch"]), shards)


def rescale(state: OperatorState, ranges: Sequence[tuple[int, int]]) -> OperatorState:
    """Return the same state for shards that own these key groups.

    A shared file may hold stale rows for key groups that its old shard did not own. Each reference is therefore limited
    to the groups that shard owned.
    """
    if [(first, last) for first, last, _ in state.shards] == list(ranges):
        return state
    shards = []
    for first, last in ranges:
        segments: list[SegmentRef] = []
        timers: list[TimerRef] = []
        for old_first, old_last, old in state.shards:
            low, high = max(first, old_first), min(last, old_last) - 1
            segments += [cut for segment in old.segments if (cut := _cut(segment, low, high)) is not None]
            timers += [replace(t, segment=cut) for t in old.timers if (cut := _cut(t.segment, low, high)) is not None]
        shards.append((first, last, ShardState(tuple(segments), tuple(timers))))
    return OperatorState(state.epoch, tuple(shards))


def _cut(segment: SegmentRef, low: int, high: int) -> SegmentRef | None:
    """Return a file limited to the groups `low` to `high`; None if it has none of them."""
    low, high = max(segment.first_group, low), min(segment.last_group, high)
    return replace(segment, first_group=low, last_group=high) if low <= high else None


Ranges = tuple[tuple[int, int], ...]  # by shard: its key groups `[first, last)`


def checkpoint_id(epoch: int, attempt: str) -> str:
    """Return the id of the checkpoint that an attempt makes after an epoch.

    Raises:
        ConfigError: the attempt cannot be part of a path.
    """
    return check_id(snapshot_id(epoch, attempt))


def check_id(value: str) -> str:
    """Refuse an invalid id before it becomes part of a path."""
    if not SNAPSHOT_ID.fullmatch(value):
        raise ConfigError(f"{value!r} is no id of a checkpoint: <epoch>-<attempt>")
    return value


def find_epoch(value: str) -> int | None:
    """Return the epoch in a checkpoint's id; None if it is no id."""
    found = SNAPSHOT_ID.fullmatch(value)
    return int(found[1]) if found else None


def check_path(path: str) -> str:
    """Return the id of the checkpoint whose folder has a state file. Raises DamagedError if the path leads
    elsewhere."""
    found = SNAPSHOT_FILE.fullmatch(path)
    if not found:
        raise DamagedError(f"{path!r} is no file of a checkpoint", path=path)
    return found[1]


@dataclass(frozen=True, slots=True)
class OperatorInfo:
    """The properties that must be equal or compatible when an operator's state is opened again."""

    type: str
    key_schema: str  # fingerprints; empty before its first row
    state_schema: str
    shape: str = ""  # of the settings that are needed to read the state

    def to_json(self) -> dict[str, Json]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_json(cls, value: Json) -> OperatorInfo:
        shape = str(value.get("shape", ""))
        return cls(str(value["type"]), str(value["key_schema"]), str(value["state_schema"]), shape)


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that took part, as far as known; for people."""

    host: str
    pid: int

    def to_json(self) -> dict[str, Json]:
        return {"host": self.host, "pid": self.pid}


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """The global metadata.json: the plan of a checkpoint, written before any shard starts."""

    pipeline: str
    epoch: int
    attempt: str
    key_groups: int
    shards: Ranges
    operators: Mapping[str, OperatorInfo]
    positions: Mapping[str, Json] = field(default_factory=dict)
    watermarks: Mapping[str, Json] = field(default_factory=dict)
    workers: tuple[Worker, ...] = ()
    created_at: str = ""

    @property
    def checkpoint_id(self) -> str:
        return checkpoint_id(self.epoch, self.attempt)

    def problem(self) -> str:
        """Return what is wrong with the ranges, if anything: together they must be all key groups, in order."""
        bounds = [0, *(last for _, last in self.shards)]
        if [first for first, _ in self.shards] != bounds[:-1] or bounds[-1] != self.key_groups:
            return f"the ranges {self.shards} are not the key groups 0 to {self.key_groups}"
        return "" if all(first < last for first, last in self.shards) else f"a range of {self.shards} is empty"

    def to_bytes(self) -> bytes:
        return _text(
            {
                "kind": "state",
                "checkpoint": self.checkpoint_id,
                "pipeline": self.pipeline,
                "epoch": self.epoch,
                "attempt": self.attempt,
                "barrier": self.epoch,
                "key_groups": self.key_groups,
                "shards": [{"shard": n, "groups": [*groups]} for n, groups in enumerate(self.shards)],
                "workers": [worker.to_json() for worker in self.workers],
                "positions": dict(self.positions),
                "watermarks": dict(self.watermarks),
                "operators": {name: info.to_json() for name, info in self.operators.items()},
                "created_at": self.created_at,
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, what: str, checkpoint: str) -> CheckpointPlan:
        """Parse the metadata.json of a checkpoint.

        Raises:
            DamagedError: it is invalid, or that of another checkpoint.
            NewerFormatError: a newer Firnline wrote it.
        """
        body = read_sealed(data, what, "state", checkpoint)
        try:
            plan = cls(
                pipeline=str(body["pipeline"]),
                epoch=int(body["epoch"]),
                attempt=str(body["attempt"]),
                key_groups=int(body["key_groups"]),
                shards=tuple((int(s["groups"][0]), int(s["groups"][1])) for s in body["shards"]),
                operators={str(name): OperatorInfo.from_json(info) for name, info in body["operators"].items()},
                positions=dict(body["positions"]),
                watermarks=dict(body["watermarks"]),
                workers=tuple(Worker(str(w["host"]), int(w["pid"])) for w in body["workers"]),
                created_at=str(body["created_at"]),
            )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise DamagedError(f"{what} lacks {error}", what=what) from error
        if plan.checkpoint_id != checkpoint or plan.problem():
            raise DamagedError(f"{what}: {plan.problem() or 'its epoch and attempt are others'}", what=what)
        return plan


@dataclass(frozen=True, slots=True)
class ShardContent:
    """A shard's metadata.json: the state of every operator there, and its task's report."""

    checkpoint_id: str
    shard: int
    operators: Mapping[str, ShardState]
    report: Json = None

    def to_bytes(self) -> bytes:
        return _text(
            {
                "kind": "shard",
                "checkpoint": self.checkpoint_id,
                "shard": self.shard,
                "operators": {name: state.to_json() for name, state in self.operators.items()},
                "report": self.report,
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, what: str, checkpoint: str, shard: int) -> ShardContent:
        """Parse the metadata.json of a shard. Raises the errors of `CheckpointPlan.from_bytes`."""
        body = read_sealed(data, what, "shard", checkpoint)
        try:
            operators = {str(name): ShardState.from_json(state) for name, state in body["operators"].items()}
            content = cls(checkpoint, int(body["shard"]), operators, body["report"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedError(f"{what} lacks {error}", what=what) from error
        if content.shard != shard:
            raise DamagedError(f"{what} is that of shard {content.shard}", what=what)
        for state in operators.values():
            for file in state.files:
                check_path(file.path)
        return content


@dataclass(frozen=True, slots=True)
class CompleteCheckpoint:
    """A checkpoint with COMMITTED. `digest` is the SHA-256 of that file, and covers all the rest."""

    plan: CheckpointPlan
    digest: str
    contents: tuple[ShardContent, ...]  # by shard

    @property
    def checkpoint_id(self) -> str:
        return self.plan.checkpoint_id

    @property
    def epoch(self) -> int:
        return self.plan.epoch

    @property
    def operators(self) -> dict[str, OperatorState]:
        """Return the state of every operator, over all shards."""
        return {name: self._operator(name) for name in self.plan.operators}

    def _operator(self, name: str) -> OperatorState:
        parts = zip(self.plan.shards, self.contents, strict=True)
        return OperatorState(
            self.epoch, tuple((first, last, content.operators[name]) for (first, last), content in parts)
        )

    def files(self, operator: str | None = None) -> dict[str, SegmentRef]:
        """Return every file of it by path, or those of one operator.

        Raises:
            DamagedError: two shards describe one file differently.
        """
        found: dict[str, SegmentRef] = {}
        for ref in self._refs(operator):
            known = found.setdefault(ref.path, ref)
            if (known.size_bytes, known.crc32) != (ref.size_bytes, ref.crc32):
                raise DamagedError(f"two shards of {self.checkpoint_id} disagree about {ref.path}", path=ref.path)
        return found

    def _refs(self, operator: str | None) -> Iterator[SegmentRef]:
        for content in self.contents:
            for name, state in content.operators.items():
                if operator in (None, name):
                    yield from state.files


def assemble(plan: CheckpointPlan, digest: str, contents: Iterable[ShardContent]) -> CompleteCheckpoint:
    """Build a complete checkpoint from its parts.

    Raises:
        DamagedError: a shard is missing, or lacks the state of an operator.
    """
    by_shard = {content.shard: content for content in contents}
    what = plan.checkpoint_id
    if sorted(by_shard) != [*range(len(plan.shards))]:
        raise DamagedError(f"{what} has the shards {sorted(by_shard)}, not {len(plan.shards)} of them", what=what)
    for shard, content in by_shard.items():
        if content.checkpoint_id != what or content.operators.keys() != plan.operators.keys():
            raise DamagedError(f"shard {shard} of {what} does not tell the state of every operator", what=what)
    return CompleteCheckpoint(plan, digest, tuple(by_shard[n] for n in sorted(by_shard)))


@dataclass(frozen=True, slots=True)
class SnapshotRef:
    """A sink checkpoint's reference to an operator's state: its location, size and digest.

    `rows` counts the rows in its files: a key that changed after its file was written counts again. `born` is the first
    epoch that the operator folded: before it the operator had no state. None: an older Firnline wrote the reference,
    and it is unknown. `initial` is the SHA-256 of the exported state that it started with. `wanted` is the number of
    shards to return to, while fewer replace lost workers.
    """

    checkpoint: str
    epoch: int
    digest: str
    shards: int
    size_bytes: int
    rows: int
    born: int | None = None
    initial: str = ""
    wanted: int | None = None

    def to_json(self) -> dict[str, Json]:
        """Return the durable form; unknown values are omitted."""
        return {name: value for name in self.__dataclass_fields__ if (value := getattr(self, name)) not in (None, "")}

    @classmethod
    def from_json(cls, value: Json, what: str = "snapshot reference") -> SnapshotRef:
        """Parse the output of `to_json`. Raises DamagedError if it is invalid."""
        try:
            numbers = {name: int(value[name]) for name in ("epoch", "shards", "size_bytes", "rows")}
            ref = cls(
                checkpoint=str(value["checkpoint"]),
                digest=str(value["digest"]),
                **numbers,
                born=int(value["born"]) if value.get("born") is not None else None,
                initial=str(value.get("initial", "")),
                wanted=int(value["wanted"]) if value.get("wanted") is not None else None,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{what} lacks {error}", what=what) from error
        if find_epoch(ref.checkpoint) != ref.epoch:
            raise DamagedError(f"{what}: checkpoint {ref.checkpoint!r} is not of epoch {ref.epoch}", what=what)
        return ref


def stored_name(operator: OperatorOptions, names: Collection[str]) -> str:
    """Return the name under which a checkpoint has an operator's state: its own or its former one; empty if neither."""
    return next((name for name in (operator.name, operator.renamed_from) if name and name in names), "")


def stored_ref(operator: OperatorOptions, state: Mapping[str, Json]) -> SnapshotRef | None:
    """Return the snapshot that a checkpoint names for an operator; None if it names none."""
    name = stored_name(operator, state)
    return SnapshotRef.from_json(state[name]) if name else None


def snapshot_ref(complete: CompleteCheckpoint, operator: str, before: SnapshotRef | None = None) -> SnapshotRef:
    """Return a sink checkpoint's reference to an operator's state; `before` has its first epoch and initial state."""
    files = complete.files(operator).values()
    return SnapshotRef(
        checkpoint=complete.checkpoint_id,
        epoch=complete.epoch,
        digest=complete.digest,
        shards=len(complete.plan.shards),
        size_bytes=sum(file.size_bytes for file in files),
        rows=sum(file.rows for file in files),
        born=before.born if before else None,
        initial=before.initial if before else "",
    )


def _text(body: dict[str, Json]) -> bytes:
    return canonical(seal(body)) + b"\n"


def write_sealed(kind: str, checkpoint: str, **facts: Json) -> bytes:
    """Return the text of a small file of a checkpoint. The same facts always give the same bytes."""
    return _text({"kind": kind, "checkpoint": checkpoint, **facts})


def read_sealed(data: bytes, what: str, kind: str, checkpoint: str) -> dict[str, Json]:
    """Parse one of a checkpoint's files, and check its kind and checkpoint."""
    value = parse(data, what)
    try:
        body = unseal(value, what)
    except (ValueError, RecursionError) as error:  # JSON that is never written: infinity, half a surrogate pair
        raise DamagedError(f"{what} is not what was written: {error}", what=what) from error
    if (body.get("kind"), body.get("checkpoint")) != (kind, checkpoint):
        raise DamagedError(f"{what} is the {body.get('kind')} of {body.get('checkpoint')}", what=what)
    return body
