"""Orders for the tasks that fold rows into state, one per shard, and what their reports add up to. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from firnline.exchange import Exchanged
from firnline.operators.loading import OwnCode
from firnline.options import OperatorOptions
from firnline.schema import schema_to_json
from firnline.state.manifest import Ranges
from firnline.state.refs import OperatorState, ShardState
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class FoldJob:
    """What the orders of one operator's job have in common."""

    pipeline: str
    epoch: int
    attempt: str
    epoch_time: str
    options: OperatorOptions
    code: OwnCode | None  # of a user's own operator
    inputs: Mapping[str, Exchanged]
    unordered: tuple[str, ...]  # inputs that come out of queries, whose rows have no order of their own
    schemas: Mapping[str, pa.Schema] | None  # None: no input ever gave a row, so there is nothing to fold
    exchange: dict[str, Json]
    home: dict[str, Json]
    folder: str  # of the epoch's attempt, below the home
    ranges: Ranges
    key_groups: int
    late_before: int | None
    watermark: int | None
    ports: Mapping[str, dict[str, Json]]  # targets and edges of each port that is read
    state: OperatorState
    others: Mapping[str, OperatorState] | None = None  # the last job of a checkpoint lists what these hold
    listed: bool = False  # and what its own operator holds

    def orders(self) -> list[dict[str, Json]]:
        """One order per shard. Plain JSON, since it travels to workers."""
        shards = {(first, last): state for first, last, state in self.state.shards}
        common = {
            "kind": "fold",
            "pipeline": self.pipeline,
            "epoch": self.epoch,
            "attempt": self.attempt,
            "epoch_time": self.epoch_time,
            "operator": {
                "name": self.options.name,
                "type": self.options.type,
                "inputs": list(self.options.inputs),
                "settings": dict(self.options.settings),
            },
            "code": self.code.to_json() if self.code is not None else None,
            "files": {port: found.files for port, found in self.inputs.items()},
            "schemas": None
            if self.schemas is None
            else {port: schema_to_json(schema) for port, schema in self.schemas.items()},
            "unordered": list(self.unordered),
            "exchange": self.exchange,
            "home": self.home,
            "folder": self.folder,
            "key_groups": self.key_groups,
            "late_before": self.late_before,
            "watermark": self.watermark,
            "ports": dict(self.ports),
            "listed": self.listed,
        }
        return [
            {
                **common,
                "shard": number,
                "groups": [first, last],
                "state": shards.get((first, last), ShardState()).to_json(),
                "others": None if self.others is None else self._others_in(number),
            }
            for number, (first, last) in enumerate(self.ranges)
        ]

    def _others_in(self, shard: int) -> dict[str, Json]:
        """What the other operators hold in a shard: all have the same ranges, but one that is still empty."""
        assert self.others is not None
        return {
            name: (state.shards[shard][2] if state.shards else ShardState()).to_json()
            for name, state in self.others.items()
        }


@dataclass(frozen=True, slots=True)
class Folded:
    """What one operator did in an epoch."""

    state: OperatorState
    rows: int = 0  # that came in, once for every key they belong to
    late: int = 0
    keys: int = 0  # that occurred or were due
    changed: int = 0
    removed: int = 0
    bytes_written: int = 0
    out: dict[str, int] = field(default_factory=dict)  # rows by port
    seconds: dict[str, float] = field(default_factory=dict)  # of the slowest shard, by phase
    checksums: dict[int, str] = field(default_factory=dict)  # of each shard's metadata, where a checkpoint was made

    def facts(self) -> dict[str, Json]:
        """For observers and logs."""
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


def take_folded(reports: Sequence[dict[str, Json]], ranges: Ranges, epoch: int) -> Folded:
    """Add the reports of all shards up."""
    out: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for report in reports:
        for port, rows in report["out"].items():
            out[port] = out.get(port, 0) + int(rows)
        for phase, took in report["seconds"].items():
            seconds[phase] = max(seconds.get(phase, 0.0), float(took))
    shards = tuple(
        (first, last, ShardState.from_json(report["state"]))
        for (first, last), report in zip(ranges, reports, strict=True)
    )
    return Folded(
        state=OperatorState(epoch, shards),
        rows=_sum(reports, "rows"),
        late=_sum(reports, "late"),
        keys=_sum(reports, "keys"),
        changed=_sum(reports, "changed"),
        removed=_sum(reports, "removed"),
        bytes_written=_sum(reports, "bytes_written"),
        out=out,
        seconds=seconds,
        checksums={int(r["shard"]): str(r["checksum"]) for r in reports if r.get("checksum")},
    )


def _sum(reports: Sequence[dict[str, Json]], name: str) -> int:
    return sum(int(report[name]) for report in reports)
