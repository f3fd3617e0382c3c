"""Decodes blocks of lines to Arrow batches: most records by the compiled kernel, odd ones by the exact path in Python.

Whatever the order of the records, every field of every record ends up in a column or in `_rescued_data`, or the record
is reported as bad. Of duplicate keys the last wins. An unknown field that is null counts as absent.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from firnline import jit
from firnline.ndjson import exact, plain
from firnline.ndjson import kernel as k
from firnline.ndjson.compiling import compile_beside, is_ready
from firnline.ndjson.exact import BadRecordError, MisfitError, Object, dump, fit
from firnline.ndjson.infer import KindCounter, Learner, is_empty, kind_of, wider_kind
from firnline.ndjson.layout import Array, Layout
from firnline.ndjson.reader import Block, open_blocks
from firnline.ndjson.text import FULL
from firnline.ndjson.tree import Kinds, Node, build_tree
from firnline.rescued import UNKNOWN_FIELDS, Rescued, add_rescued, shorten
from firnline.schema import RESCUED_COLUMN, type_to_text
from firnline.types import BadReason

# `wrong-field-count` and `stray-quote` are reasons of CSV records; those that name Avro or a schema, of Avro records.
_FIRST_ODD = 200  # odd records to collect before the schema is widened and the block is read again
_FEW_PIECES = 64  # up to this number of pieces rows are joined as slices, above it by index


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """How records that the schema does not expect are treated.

    Attributes:
        evolution: what an unknown field becomes: a column, a part of `_rescued_data`, or an error.
        on_mismatch: what happens to a value that does not fit a column of fixed type.
        reserved: top-level names that never become columns; such fields are rescued.
        kinds: the kinds chosen for new fields, by path; values of another kind are rescued.
        infer_timestamps: new columns of time stamps become timestamp columns; otherwise they are strings.
        max_fields: the most fields, nested ones included, that `add` may create; further ones are rescued, so that
            records with generated keys cannot exhaust the memory.
        strict: columns in which a value that does not fit makes the record bad, as does a value that is none of the
            words, if there are any.
    """

    evolution: Literal["add", "rescue", "fail"] = "add"
    on_mismatch: Literal["rescue", "fail"] = "rescue"
    reserved: frozenset[str] = frozenset()
    kinds: Kinds = field(default_factory=dict)
    infer_timestamps: bool = True
    max_fields: int = 1_000
    strict: Mapping[str, tuple[str, ...] | None] = field(default_factory=dict)


class _FieldError(Exception):
    def __init__(self, field: str, record: int, kind: str) -> None:
        super().__init__(field, record, kind)
        self.field = field
        self.record = record
        self.kind = kind


class UnexpectedFieldError(_FieldError):
    """A record has a field that the schema does not know, and `evolution` is `fail`."""

    def __str__(self) -> str:
        return f"record {self.record}: unknown field {self.field!r} ({self.kind})"


class MismatchError(_FieldError):
    """A value does not fit its column, and `on_mismatch` is `fail`."""

    def __str__(self) -> str:
        return f"record {self.record}: field {self.field!r} holds a value ({self.kind}) that does not fit its type"


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot become a row."""

    record: int
    line: int
    raw: bytes
    reason: BadReason


@dataclass(frozen=True, slots=True)
class Decoded:
    """The rows of one block in record order, their record numbers, the bad records, and counts of rescued values."""

    batch: pa.RecordBatch
    record_numbers: pa.Array
    bad: list[BadRecord]
    rescued: list[Rescued] = field(default_factory=list)


@dataclass(slots=True)
class _Odd:
    """A record that the kernel left to the exact path."""

    raw: bytes
    parsed: Object | BadRecordError
    rows_before: int
    record: int
    line: int


_Misfit = tuple[str, Node | None, Any]  # a rescued value: its column, the column's node, the value


class Decoder:
    """Turns the blocks of files into batches, and adds new fields to the schema as they appear.

    Columns in `frozen` keep their type (a struct among them may gain fields), and so do fields whose kind is chosen.
    Every other column widens when a value does not fit: int64 to float64, else to json, until the kinds of all values
    are counted and one is chosen (see `infer`). So earlier batches may have an older schema.

    Attributes:
        schema: the schema of the newest batch.
    """

    def __init__(self, schema: pa.Schema, frozen: Collection[str], options: DecodeOptions | None = None) -> None:
        self.schema = schema
        self.options = options or DecodeOptions()
        if RESCUED_COLUMN in schema.names and schema.field(RESCUED_COLUMN).type != pa.string():
            raise ValueError(f"column {RESCUED_COLUMN!r} must be a string, not {schema.field(RESCUED_COLUMN).type}")
        self._base = schema
        self._frozen = frozenset(frozen)
        self._kernel_rescued = 0  # unknown fields of the block that the kernel rescued
        self._build()

    def _build(self) -> None:
        self._root = build_tree(self.schema, self._base, self._frozen, self.options.reserved, self.options.kinds)
        self._layout = Layout(self._root)

    def decode(self, block: Block) -> Decoded:
        """Decode one block.

        Raises:
            UnexpectedFieldError: under `evolution="fail"`, for the first such field.
            MismatchError: under `on_mismatch="fail"`, for the first such value.
        """
        with exact.collector_paused():
            return self._decode(block)

    def _decode(self, block: Block) -> Decoded:
        numbering = _Numbering(block)
        had_rescued = RESCUED_COLUMN in self.schema.names
        odd = self._walk(_as_array(block.data), numbering)
        columns = self._layout.finish()
        count = int(self._layout.table[0, k.LENGTH])
        rescued = self._rescued_by_kernel(columns)
        rows, kept, bad = self._convert(odd, rescued)
        if RESCUED_COLUMN not in self.schema.names and any(RESCUED_COLUMN in row for row in rows):
            self._add_rescued_column()
            columns.append(pa.nulls(count, pa.string()))
        batch = pa.RecordBatch.from_arrays(columns, schema=self.schema) if columns else _empty_rows(count)
        if rows:
            batch = _interleave(batch, rows, [item.rows_before for item in kept], self.schema)
        if not had_rescued and RESCUED_COLUMN in self.schema.names:
            batch = self._drop_unused_rescued(batch)
        bad += [BadRecord(big.record, big.line, big.head, "too-long") for big in block.oversized]
        bad += [BadRecord(one.record, one.line, one.raw, cast("BadReason", one.reason)) for one in block.refused]
        bad.sort(key=lambda item: item.record)
        numbers = numbering.records
        if bad:
            numbers = numbers[~np.isin(numbers, [item.record for item in bad])]
        fits = find_fitting(batch, self.options.strict)
        if fits is not None:
            refused = set(numbers[~fits].tolist())
            bad = sorted([*bad, *_find_records(block.data, numbering, refused)], key=lambda item: item.record)
            batch, numbers = batch.filter(pa.array(fits)), numbers[fits]
        return Decoded(batch, pa.array(numbers), bad, add_rescued(rescued))

    def _rescued_by_kernel(self, columns: list[pa.Array]) -> list[Rescued]:
        """Return the count of the unknown fields that the kernel rescued."""
        if not self._kernel_rescued:
            return []
        texts = columns[self.schema.get_field_index(RESCUED_COLUMN)].drop_null()
        return [Rescued(UNKNOWN_FIELDS, self._kernel_rescued, first=shorten(texts[0].as_py()))]

    def _drop_unused_rescued(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Remove the rescued column again if this block added it but rescued nothing in the end."""
        index = self.schema.get_field_index(RESCUED_COLUMN)
        if batch.column(index).null_count < batch.num_rows:
            return batch
        self.schema = self.schema.remove(index)
        self._build()
        if not self.schema.names:
            return _empty_rows(batch.num_rows)
        return pa.RecordBatch.from_arrays(
            [column for number, column in enumerate(batch.columns) if number != index], schema=self.schema
        )

    # --- the compiled kernel ---------------------------------------------------------------------------

    def _walk(self, data: Array, numbering: _Numbering) -> list[_Odd]:
        """Read all records into the layout, again whenever odd records widen the schema; return the odd ones left."""
        seen: dict[int, _Odd] = {}  # by their offset in the data; each is parsed once
        room = _FIRST_ODD
        while True:
            table = np.zeros((room, 5), np.int64)
            control = np.zeros(k.CONTROL_SIZE, np.int64)
            if self.options.evolution != "fail":
                control[k.RESCUE_NODE] = self._layout.rescue_node
                control[k.RESCUE_ALL] = self.options.evolution == "rescue"
            self._layout.start(numbering.records.size)
            odd: list[_Odd] = []
            while True:
                status = self._scan(data, table, control)
                fresh = [
                    seen.get(int(row[k.ODD_START]))
                    or seen.setdefault(int(row[k.ODD_START]), _odd_record(data, row, numbering))
                    for row in table[len(odd) : control[k.ODD_COUNT]]
                ]
                for item, row in zip(fresh, table[len(odd) :], strict=False):
                    item.rows_before = int(row[k.ODD_ROW])
                if self._learn(fresh) or self._prepare_rescue(fresh):
                    break
                odd += fresh
                if status == 0:
                    self._kernel_rescued = int(control[k.RESCUED_COUNT])
                    return odd
                table = np.vstack([table, np.zeros_like(table)])
            # Twice the room each time, so that even many new fields take few passes over the block.
            room = max(2 * room, table.shape[0])

    def _scan(self, data: Array, odd: Array, control: Array) -> int:
        layout = self._layout
        if not is_ready():
            compile_beside()
            return plain.scan(data, odd, control)
        while True:
            status = int(
                k.scan(
                    data, layout.table, layout.keys, layout.slots, layout.valid, layout.words, layout.offsets,
                    layout.text, layout.stack, layout.rescued, odd, control,
                )
            )  # fmt: skip
            if status != FULL:
                return status
            layout.grow(int(control[k.FULL_NODE]), bool(control[k.FULL_TEXT]))

    def _learn(self, odd: list[_Odd]) -> bool:
        """Widen the schema by the fields and values of these records; return whether it changed."""
        options = self.options
        room = options.max_fields - len(self._layout.nodes)
        adds = options.evolution == "add"
        learner = Learner(self._root, adds, options.reserved, room, options.kinds, options.infer_timestamps)
        for item in odd:
            if isinstance(item.parsed, Object):
                learner.watch(item.parsed)
        schema = learner.schema(self.schema)
        if schema is self.schema:
            return False
        self.schema = schema
        self._build()
        return True

    def _prepare_rescue(self, odd: list[_Odd]) -> bool:
        """Add the rescued column if the kernel itself can rescue fields of these records; return whether it did."""
        evolution = self.options.evolution
        if evolution == "fail" or RESCUED_COLUMN in self.schema.names:
            return False
        for item in odd:
            fields = item.parsed.pairs if isinstance(item.parsed, Object) else []
            for name, value in fields:
                is_rescued = is_empty(value) or evolution == "rescue"
                if name not in self._root.by_name and value is not None and is_rescued:
                    self._add_rescued_column()
                    return True
        return False

    def _add_rescued_column(self) -> None:
        self.schema = self.schema.append(pa.field(RESCUED_COLUMN, pa.string()))
        self._build()

    # --- the exact path --------------------------------------------------------------------------------

    def _convert(
        self, odd: list[_Odd], counts: list[Rescued]
    ) -> tuple[list[dict[str, Any]], list[_Odd], list[BadRecord]]:
        """Return rows, their records and the bad records; append what was rescued to `counts`."""
        rows, kept, bad = [], [], []
        misfits: dict[str, int] = {}
        wider: dict[str, Counter[str]] = {}
        for item in odd:
            rescued: list[tuple[str, Any]] = []
            found: list[_Misfit] = []
            try:
                if isinstance(item.parsed, BadRecordError):
                    raise item.parsed
                row = self._struct(item.parsed, self._root, rescued, found, "", item.record)
                unfit = [path for path, _, _ in found]
                if self.options.evolution == "add":  # then an unknown field is one that could not become a column
                    unfit += [name for name, _ in rescued]
                if any(name in self.options.strict for name in unfit):
                    raise BadRecordError("does-not-fit")
            except BadRecordError as exc:
                reason: Any = str(exc)
                bad.append(BadRecord(item.record, item.line, item.raw, reason))
                continue
            if rescued:
                row[RESCUED_COLUMN] = dump(Object(rescued))
            for path, node, value in found:
                misfits[path] = misfits.get(path, 0) + 1
                kind = wider_kind(value, node) if node is not None else None
                if kind is not None:
                    wider.setdefault(path, Counter())[kind] += 1
                if misfits[path] == 1:
                    counts.append(_first_rescued(path, node, value, item.line))
            rows.append(row)
            kept.append(item)
        counts += [Rescued(path, count - 1) for path, count in misfits.items() if count > 1]
        counts += [Rescued(path, 0, wider=dict(kinds)) for path, kinds in wider.items()]
        return rows, kept, bad

    def _struct(
        self,
        value: Object,
        node: Node,
        rescued: list[tuple[str, Any]],
        found: list[_Misfit],
        path: str,
        record: int,
    ) -> dict[str, Any]:
        """Return the fields that fit; append the others to `rescued`, and one by one to `found`."""
        row: dict[str, Any] = {}
        for name, item in value.last().items():
            if item is None:
                continue
            child = node.by_name.get(name)
            if child is None:
                if self.options.evolution == "fail" and not (node is self._root and name in self.options.reserved):
                    raise UnexpectedFieldError(path + name, record, kind_of(item))
                rescued.append((name, item))
                found.append((UNKNOWN_FIELDS, None, Object([(path + name, item)])))
            elif child.kind == k.STRUCT and type(item) is Object:
                inner: list[tuple[str, Any]] = []
                row[name] = self._struct(item, child, inner, found, f"{path}{name}.", record)
                if inner:
                    rescued.append((name, Object(inner)))
            else:
                try:
                    row[name] = fit(item, child)
                except MisfitError:
                    if self.options.on_mismatch == "fail":
                        raise MismatchError(path + name, record, kind_of(item)) from None
                    rescued.append((name, item))
                    found.append((path + name, child, item))
        for child in node.children:
            if child.required and row.get(child.field.name) is None:
                raise BadRecordError("missing-required")
        return row


def find_fitting(
    batch: pa.RecordBatch, strict: Mapping[str, tuple[str, ...] | None]
) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
    """Return for each row whether its values are among the words of strict columns; None: all are."""
    fits = None
    for name, words in strict.items():
        index = batch.schema.get_field_index(name)
        if words is None or index < 0 or pa.types.is_nested(batch.schema.field(index).type):
            continue
        text = batch.column(index).cast(pa.string())
        known = pc.or_(pc.is_null(text), pc.is_in(text, pa.array(words, pa.string())))
        here = known.to_numpy(zero_copy_only=False)
        fits = here if fits is None else fits & here
    return None if fits is None or fits.all() else fits


def _find_records(data: bytes | memoryview, numbering: _Numbering, wanted: Collection[int]) -> list[BadRecord]:
    """Return records of a block by their numbers, as records that do not fit."""
    found: list[BadRecord] = []
    index = 0
    for number, line in enumerate(bytes(data).split(b"\n")):
        if not line.strip(b" \t\r"):
            continue
        record = int(numbering.records[index])
        index += 1
        if record in wanted:
            raw = numbering.origins.raw(number) if numbering.origins is not None else line.removesuffix(b"\r")
            found.append(BadRecord(record, numbering.line(number), raw, "does-not-fit"))
    return found


def _first_rescued(path: str, node: Node | None, value: Any, line: int) -> Rescued:
    """Return the count of the first value of a column that was rescued."""
    expected = type_to_text(node.field) if node is not None else ""
    return Rescued(path, 1, expected, shorten(dump(value)), line=line)


class _Numbering:
    """The numbers in the file of the records and lines in a block's data, without the oversized ones."""

    def __init__(self, block: Block) -> None:
        records = np.arange(block.first_record, block.end_record, dtype=np.int64)
        left_out = [one.record for one in block.oversized] + [one.record for one in block.refused]
        if left_out:
            records = records[~np.isin(records, left_out)]
        self.records = records
        self.origins = block.origins
        self._first_line = block.first_line
        self._long_lines = sorted(big.line for big in block.oversized)

    def line(self, index: int) -> int:
        """Return the number in the file of a line in the data."""
        if self.origins is not None:
            return int(self.origins.lines[index])
        line = self._first_line + index
        for long_line in self._long_lines:
            if line >= long_line:
                line += 1
        return line


def _as_array(data: bytes | memoryview) -> Array:
    """Return the data as a read-only array that ends with a line feed."""
    if not data or data[-1] != 10:
        data = bytes(data) + b"\n"
    array = np.frombuffer(data, np.uint8)
    array.flags.writeable = False
    return array


def _odd_record(data: Array, row: Array, numbering: _Numbering) -> _Odd:
    raw = data[row[k.ODD_START] : row[k.ODD_END]].tobytes()
    parsed: Object | BadRecordError
    try:
        parsed = exact.parse(raw)
    except BadRecordError as exc:
        parsed = exc
    if numbering.origins is not None:
        raw = numbering.origins.raw(int(row[k.ODD_LINE]))
    return _Odd(
        raw,
        parsed,
        int(row[k.ODD_ROW]),
        int(numbering.records[row[k.ODD_RECORD]]),
        numbering.line(int(row[k.ODD_LINE])),
    )


def _empty_rows(count: int) -> pa.RecordBatch:
    """Return a batch of rows without columns."""
    return pa.RecordBatch.from_struct_array(pa.array([{}] * count, pa.struct([])))


def _interleave(
    fast: pa.RecordBatch, rows: list[dict[str, Any]], before: list[int], schema: pa.Schema
) -> pa.RecordBatch:
    """Insert `rows` into `fast`: row i after `before[i]` rows of `fast`."""
    others = pa.RecordBatch.from_struct_array(pa.array(rows, pa.struct(list(schema))))
    if not schema.names:
        return _empty_rows(fast.num_rows + len(rows))
    # Arrow's builders forget the metadata of nested fields.
    others = pa.RecordBatch.from_arrays(others.columns, schema=schema)
    if len(set(before)) > _FEW_PIECES:
        order = np.insert(np.arange(fast.num_rows), before, fast.num_rows + np.arange(len(rows)))
        joined = pa.concat_batches([fast, others]).take(pa.array(order))
    else:
        pieces, start = [], 0
        for index, end in enumerate(before):
            pieces += [fast.slice(start, end - start), others.slice(index, 1)]
            start = end
        joined = pa.concat_batches([*pieces, fast.slice(start)])
    return pa.RecordBatch.from_arrays(joined.columns, schema=schema)


def warm_up() -> None:
    """Compile the kernel, or load it from numba's cache; later calls are cheap."""
    decoder, counter = Decoder(pa.schema([]), ()), KindCounter(pa.schema([]), (), ())
    with jit.compiling():
        for block in open_blocks(io.BytesIO(b'{"a":"b"}\n'), path="", compression=None):
            counter.add(decoder.decode(block).batch)


def cache_folder() -> str:
    """Return the folder with the compiled kernel."""
    return jit.cache_folder(k.scan)
