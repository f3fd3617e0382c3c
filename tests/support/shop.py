"""A source with a port for each table: a file of changes, one JSON object per line, that only grows.

`{"table": "orders", "row": {...}}` is a row of the port `orders`. A line without a table belongs to the main port. A
line that is no JSON is a bad record. Each port has its own decoder, so that columns are inferred, widened and rescued
per port.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa

from firnline.errors import DamagedError, SourceMovedError
from firnline.ndjson import DecodeOptions, Decoder, KindCounter, open_blocks
from firnline.options import SourceOptions
from firnline.sources.base import (
    MAIN_PORT,
    Backlog,
    Budget,
    Limits,
    PositionView,
    ReadColumns,
    Rows,
    Source,
    SourcePlan,
    Split,
    SplitEnd,
    SplitReader,
)
from firnline.sources.columns import Columns
from firnline.types import Json

CHUNK = 50  # lines that the reader reads before it looks at its budget again


@dataclass(frozen=True, slots=True)
class ShopOptions(SourceOptions):
    type: ClassVar[str] = "shop"

    path: str
    closed: bool = False  # only the ports that are known by name: orders and users
    leaks: bool = False  # the reader hands on rows of ports that nobody reads
    per_slice: int = 1_000_000


class Bad(NamedTuple):
    line: int
    record: int
    reason: str
    raw: bytes


def describe(position: Json) -> PositionView:
    if not isinstance(position, dict) or set(position) != {"changes", "line"}:
        raise DamagedError(f"{position!r} is not the position of a shop")
    return PositionView(facts={"lines_read": position["line"]}, location=position["changes"])


def write_changes(path: Path, *changes: tuple[str, Mapping[str, Any]] | bytes) -> None:
    """Append changes: table and row, or a line as it is."""
    with path.open("ab") as file:
        for change in changes:
            if isinstance(change, bytes):
                file.write(change + b"\n")
            else:
                table, row = change
                file.write(json.dumps({"row": row, **({"table": table} if table else {})}).encode() + b"\n")


class ShopSource(Source):
    def __init__(self, options: ShopOptions, moved: tuple[str, str] | None) -> None:
        self.name, self.poll_interval_secs = options.name, options.poll_interval_secs
        self._options, self._moved = options, moved[0] if moved else None
        if options.closed:
            self.ports = ("orders", "users")

    @property
    def location(self) -> str:
        return self._options.path

    def has_port(self, port: str) -> bool:
        return port in self.ports if self._options.closed else port.replace("_", "").isalnum() or port == MAIN_PORT

    def describe(self, position: Json) -> PositionView:
        return describe(position)

    def start(self, position: Json | None) -> Json:
        if position is not None and describe(position).location not in (self.location, self._moved):
            raise SourceMovedError(f"the checkpoint was made on {position['changes']}, the spec says {self.location}")
        return self._at(position["line"] if position else 0)

    def _at(self, line: int) -> Json:
        return {"changes": self.location, "line": line}

    def _lines(self) -> int:
        return Path(self.location).read_bytes().count(b"\n")

    def plan(self, position: Json, limits: Limits) -> SourcePlan | None:
        first = position["line"]
        end = min(self._lines(), first + min(limits.max_events, self._options.per_slice))
        return self._slice(position, first, end) if end > first else None

    def _slice(self, base: Json, first: int, end: int) -> SourcePlan:
        split = Split([{"path": self.location, "from": first, "to": end}], 1 << 40, 1 << 40, 1000)
        return SourcePlan(self.name, base, [split], files=1, size_bytes=end - first)

    def advance(self, plan: SourcePlan, outcomes: Sequence[Json], epoch: int) -> tuple[Json, list[dict[str, Json]]]:
        first = plan.base["line"]
        end = outcomes[0]["to"] if outcomes else first
        record: dict[str, Json] = {"path": self.location, "from": first, "to": end, "status": "committed"}
        return self._at(end), [record] if end > first else []

    def replay(self, position: Json, records: Sequence[dict[str, Json]]) -> Json:
        return self._at(max([position["line"], *(int(record["to"]) for record in records)]))

    def replan(self, position: Json, records: Sequence[dict[str, Json]], parallelism: int) -> SourcePlan:
        return self._slice(position, int(records[0]["from"]), int(records[-1]["to"]))

    def backlog(self, position: Json) -> Backlog:
        waiting = self._lines() - position["line"]
        return Backlog(int(waiting > 0), waiting)

    def reader_settings(self) -> dict[str, Json]:
        return {"leaks": self._options.leaks}


class ShopReader(SplitReader):
    def __init__(self, settings: dict[str, Json], split: Split, columns: Mapping[str, Columns]) -> None:
        self._item, self._columns, self._leaks = split.inputs[0], columns, bool(settings["leaks"])

    def read(self, schemas: Mapping[str, pa.Schema], budget: Budget) -> Iterator[Sequence[Rows]]:
        self._decoders: dict[str, Decoder] = {}
        self._counters: dict[str, KindCounter] = {}
        for port, columns in self._columns.items():
            options = DecodeOptions(
                evolution=columns.evolution,
                on_mismatch="fail" if columns.evolution == "fail" else "rescue",
                reserved=columns.reserved,
                kinds=columns.kinds,
            )
            self._decoders[port] = Decoder(schemas[port], columns.frozen, options)
            self._counters[port] = KindCounter(schemas[port], columns.frozen, columns.reserved)
        lines = Path(self._item["path"]).read_bytes().splitlines()
        self._to = int(self._item["from"])
        while self._to < self._item["to"] and not budget.is_full:
            end = min(self._to + CHUNK, int(self._item["to"]))
            group = list(self._decode(list(enumerate(lines[self._to : end], start=self._to))))
            self._to = end
            budget.records += sum(rows.batch.num_rows + len(rows.bad) for rows in group)
            yield group

    def _decode(self, numbered: Sequence[tuple[int, bytes]]) -> Iterator[Rows]:
        ports: dict[str, list[tuple[int, bytes]]] = {}
        for number, line in numbered:
            try:
                change = json.loads(line)
            except ValueError:
                nothing, bad = pa.RecordBatch.from_pydict({}), Bad(number, number, "no JSON", line)
                yield Rows(self._item["path"], nothing, pa.array([], pa.int64()), [bad])
                continue
            port = change.get("table", MAIN_PORT)
            if port in self._columns or self._leaks:
                ports.setdefault(port, []).append((number, json.dumps(change["row"]).encode()))
        for port, found in ports.items():
            numbers = pa.array([number for number, _ in found], pa.int64())
            if port not in self._decoders:
                yield Rows(self._item["path"], pa.RecordBatch.from_pydict({"n": numbers}), numbers, port=port)
                continue
            text = io.BytesIO(b"\n".join(row for _, row in found) + b"\n")
            for block in open_blocks(text, path="changes", compression=None):
                decoded = self._decoders[port].decode(block)
                self._counters[port].add(decoded.batch)
                yield Rows(self._item["path"], decoded.batch, numbers.take(decoded.record_numbers), port=port)

    def end(self) -> SplitEnd:
        columns = {
            port: ReadColumns(decoder.schema, dict(self._counters[port].to_json()))
            for port, decoder in self._decoders.items()
        }
        return SplitEnd([{"path": self._item["path"], "to": self._to}], columns)


def open_source(options: ShopOptions, *, once: bool, moved: tuple[str, str] | None) -> Source:
    return ShopSource(options, moved)


def open_reader(settings: dict[str, Json], split: Split, columns: Mapping[str, Columns]) -> SplitReader:
    return ShopReader(settings, split, columns)
