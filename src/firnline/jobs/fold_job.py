"""The messages between driver and worker for folding rows into state: a task per shard, and its report. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from firnline.jobs.engine import Output
from firnline.operators.loading import OwnCode
from firnline.options import OperatorOptions
from firnline.schema import schema_from_json, schema_to_json
from firnline.state.home import StateHome
from firnline.state.manifest import OperatorState, Ranges, ShardState
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class FoldTask:
    """One shard of one operator in one epoch: the new rows, and the state before them."""

    pipeline: str
    epoch: int
    attempt: str
    epoch_time: str
    operator: OperatorOptions  # name, type, inputs and settings; nothing else is sent
    code: OwnCode | None  # of a user's own operator
    files: Mapping[str, Sequence[dict[str, Json]]]  # exchanged rows, by input
    schemas: Mapping[str, pa.Schema] | None  # by input; None: no input ever had a row, so there is nothing to fold
    unordered: tuple[str, ...]  # inputs from queries, whose rows have no order
    exchange: dict[str, Json]  # the folder of exchanged rows
    home: StateHome
    folder: str  # of the epoch's attempt, below the home
    key_groups: int
    late_before: int | None
    watermark: int | None
    ports: Mapping[str, Output]  # the ports that have readers
    shard: int
    groups: tuple[int, int]  # the first and the last key group of the shard
    state: ShardState
    is_listed: bool = False  # whether the snapshot of this epoch includes this operator
    others: Mapping[str, ShardState] | None = None  # the rest of the snapshot; None: no snapshot is made here

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON for the workers."""
        return {
            "kind": "fold",
            "pipeline": self.pipeline,
            "epoch": self.epoch,
            "attempt": self.attempt,
            "epoch_time": self.epoch_time,
            "operator": {
                "name": self.operator.name,
                "type": self.operator.type,
                "inputs": list(self.operator.inputs),
                "settings": dict(self.operator.settings),
            },
            "code": self.code.to_json() if self.code is not None else None,
            "files": {port: list(files) for port, files in self.files.items()},
            "schemas": None
            if self.schemas is None
            else {port: schema_to_json(schema) for port, schema in self.schemas.items()},
            "unordered": list(self.unordered),
            "exchange": self.exchange,
            "home": self.home.to_json(),
            "folder": self.folder,
            "key_groups": self.key_groups,
            "late_before": self.late_before,
            "watermark": self.watermark,
            "ports": {port: output.to_json() for port, output in self.ports.items()},
            "shard": self.shard,
            "groups": list(self.groups),
            "state": self.state.to_json(),
            "is_listed": self.is_listed,
            "others": None if self.others is None else {name: state.to_json() for name, state in self.others.items()},
        }

    @classmethod
    def from_json(cls, value: Json) -> FoldTask:
        """Parse the output of `to_json`."""
        operator, schemas, others = value["operator"], value["schemas"], value["others"]
        return cls(
            pipeline=str(value["pipeline"]),
            epoch=int(value["epoch"]),
            attempt=str(value["attempt"]),
            epoch_time=str(value["epoch_time"]),
            operator=OperatorOptions(
                operator["name"], operator["type"], tuple(operator["inputs"]), operator["settings"]
            ),
            code=OwnCode(**value["code"]) if value["code"] is not None else None,
            files=value["files"],
            schemas=None if schemas is None else {port: schema_from_json(columns) for port, columns in schemas.items()},
            unordered=tuple(value["unordered"]),
            exchange=value["exchange"],
            home=StateHome.from_json(value["home"]),
            folder=str(value["folder"]),
            key_groups=int(value["key_groups"]),
            late_before=value["late_before"],
            watermark=value["watermark"],
            ports={port: Output.from_json(output) for port, output in value["ports"].items()},
            shard=int(value["shard"]),
            groups=(int(value["groups"][0]), int(value["groups"][1])),
            state=ShardState.from_json(value["state"]),
            is_listed=bool(value["is_listed"]),
            others=None if others is None else {name: ShardState.from_json(state) for name, state in others.items()},
        )


@dataclass(frozen=True, slots=True)
class FoldReport:
    """The report of one shard's task. A snapshot keeps it: a repeated task returns its first report."""

    shard: int
    state: ShardState
    staged: Mapping[str, list[dict[str, Json]]]  # files by sink
    exchanged: Mapping[str, Json]  # by edge
    rows: int
    late: int
    keys: int
    changed: int
    removed: int
    bytes_written: int
    out: Mapping[str, int]  # rows by port
    seconds: Mapping[str, float]  # by phase
    checksum: str = ""  # of the shard's listing, if a snapshot was made

    def to_json(self) -> dict[str, Json]:
        """Return the form that is sent and that a snapshot keeps, without its checksum."""
        return {
            "shard": self.shard,
            "state": self.state.to_json(),
            "staged": dict(self.staged),
            "exchanged": dict(self.exchanged),
            "rows": self.rows,
            "late": self.late,
            "keys": self.keys,
            "changed": self.changed,
            "removed": self.removed,
            "bytes_written": self.bytes_written,
            "out": dict(self.out),
            "seconds": dict(self.seconds),
            **({"checksum": self.checksum} if self.checksum else {}),
        }

    @classmethod
    def from_json(cls, value: Json) -> FoldReport:
        """Parse the output of `to_json`."""
        return cls(
            shard=int(value["shard"]),
            state=ShardState.from_json(value["state"]),
            staged=value["staged"],
            exchanged=value["exchanged"],
            rows=int(value["rows"]),
            late=int(value["late"]),
            keys=int(value["keys"]),
            changed=int(value["changed"]),
            removed=int(value["removed"]),
            bytes_written=int(value["bytes_written"]),
            out={str(port): int(rows) for port, rows in value["out"].items()},
            seconds={str(phase): float(took) for phase, took in value["seconds"].items()},
            checksum=str(value.get("checksum", "")),
        )


@dataclass(frozen=True, slots=True)
class Folded:
    """The work of one operator in an epoch."""

    state: OperatorState
    rows: int = 0  # input rows, once for every key that they belong to
    late: int = 0
    keys: int = 0  # keys with rows or due timers
    changed: int = 0
    removed: int = 0
    bytes_written: int = 0
    out: dict[str, int] = field(default_factory=dict)  # rows by port
    seconds: dict[str, float] = field(default_factory=dict)  # of the slowest shard, by phase
    checksums: dict[int, str] = field(default_factory=dict)  # of each shard's metadata, if a checkpoint was made

    def facts(self) -> dict[str, Json]:
        """Return the facts for observers and logs."""
        return {
            "rows": self.rows,
            "late": self.late,
            "keys": self.keys,
            "changed": self.changed,
            "removed": self.removed,
            "bytes_written": self.bytes_written,
            "state_bytes": sum(state.size_bytes for _, _, state in self.state.shards),
            "out": dict(self.out),
            "seconds": dict(self.seconds),
        }


def add_up(reports: Sequence[FoldReport], ranges: Ranges, epoch: int) -> Folded:
    """Add up the reports of all shards."""
    out: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for report in reports:
        for port, rows in report.out.items():
            out[port] = out.get(port, 0) + rows
        for phase, took in report.seconds.items():
            seconds[phase] = max(seconds.get(phase, 0.0), took)
    shards = tuple((first, last, report.state) for (first, last), report in zip(ranges, reports, strict=True))
    return Folded(
        state=OperatorState(epoch, shards),
        rows=sum(report.rows for report in reports),
        late=sum(report.late for report in reports),
        keys=sum(report.keys for report in reports),
        changed=sum(report.changed for report in reports),
        removed=sum(report.removed for report in reports),
        bytes_written=sum(report.bytes_written for report in reports),
        out=out,
        seconds=seconds,
        checksums={report.shard: report.checksum for report in reports if report.checksum},
    )
