"""Turns the values of one column into an Arrow array: of the log, as `kernel.walk` found them, or of SELECT."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from firnline.sources.mysql import binary_json, charsets, kernel, select_kernel, tables
from firnline.sources.mysql.events import damaged

Bytes = npt.NDArray[np.uint8]
_TIMES = {
    tables.DATE: kernel.DATE, tables.NEWDATE: kernel.NEW_DATE, tables.DATETIME: kernel.OLD_DATETIME,
    tables.DATETIME2: kernel.DATETIME2, tables.TIMESTAMP: kernel.TIMESTAMP, tables.TIMESTAMP2: kernel.TIMESTAMP2,
}  # fmt: skip
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_NO_DATES = ": zero and invalid dates, and those before year 1, are read as null"
_PLAIN = frozenset({tables.VARCHAR, tables.BLOB, tables.STRING, tables.GEOMETRY, tables.VECTOR})


class ColumnValues:
    """Where the values of one column lie."""

    def __init__(
        self, data: Bytes, offsets: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], states: Bytes
    ) -> None:
        self.data = data
        self.offsets = offsets
        self.lengths = lengths
        self.states = states  # a conversion that finds no value marks it as null here

    def __len__(self) -> int:
        return len(self.states)

    @property
    def validity(self) -> pa.Buffer | None:
        """Arrow's bits of the rows that have a value."""
        if not self.states.any():
            return None
        return pa.py_buffer(np.packbits(self.states == kernel.VALUE, bitorder="little"))

    def words(self, size: int, *, big_endian: bool = False) -> npt.NDArray[np.uint64]:
        """Return the values as numbers without sign."""
        out = np.empty(len(self), np.uint64)
        kernel.words(self.data, self.offsets, self.states, size, big_endian, out)
        return out

    def fixed(self, kind: pa.DataType, values: npt.NDArray[np.generic]) -> pa.Array:
        """Return an array of a type whose values have all the same width."""
        return pa.Array.from_buffers(kind, len(self), [self.validity, pa.py_buffer(np.ascontiguousarray(values))])

    def raw(self, pad: int = 0) -> pa.Array:
        """Return the values as bytes, filled up with zeros to `pad` bytes.

        Raises:
            DamagedError: a value is longer than that.
        """
        lengths = np.where(self.states == kernel.VALUE, self.lengths, 0)
        if pad:
            if lengths.max(initial=0) > pad:
                raise damaged(f"a value of BINARY({pad}) has {lengths.max()} bytes")
            lengths = np.where(self.states == kernel.VALUE, pad, 0)
        ends = np.zeros(len(self) + 1, np.int32)
        np.cumsum(lengths, out=ends[1:])
        total = int(ends[-1])
        # Zeros only where they are part of values: else every byte is written.
        out = (np.zeros if pad else np.empty)(total + kernel.SLACK, np.uint8)
        kernel.copy_values(self.data, self.offsets, self.lengths, self.states, pad, ends, out)
        return pa.Array.from_buffers(
            pa.binary(), len(self), [self.validity, pa.py_buffer(ends), pa.py_buffer(out[:total])]
        )


def convert(
    one: tables.TypeOf, values: ColumnValues, name: str, warn: Callable[[str], object], odd: dict[int, str]
) -> pa.Array:
    """Return the values of a column as an array of the type that `tables.arrow_type` says.

    Args:
        one: The type of the column.
        values: Where its values lie.
        name: The column's, with its table, for messages.
        warn: Is told of values that the type in Arrow cannot hold.
        odd: Gets the text of such values, which are null in the array, by row.

    Raises:
        DamagedError: a value is not what its type can be.
    """
    kind = tables.arrow_type(one)
    if one.code in _TIMES:
        out = np.empty(len(values), np.int64)
        had_value = values.states == kernel.VALUE
        if kernel.times(values.data, values.offsets, values.states, _TIMES[one.code], one.meta, out):
            warn(f"{name}{_NO_DATES}")
            for row in np.flatnonzero(had_value & (values.states != kernel.VALUE)).tolist():
                place = int(values.offsets[row])
                odd[row] = _date_text(one, values.data[place : place + one.size].tobytes())
        return values.fixed(kind, out.astype(np.int32) if pa.types.is_date32(kind) else out)
    if one.code in (tables.TIME, tables.TIME2):
        return _clocks(one, values, name)
    if one.code in (tables.FLOAT, tables.DOUBLE):
        words = values.words(one.size)
        return values.fixed(kind, words if one.size == 8 else words.astype(np.uint32))
    if one.code == tables.YEAR:
        words = values.words(1)
        return values.fixed(kind, np.where(words == 0, 0, words + 1900).astype(np.int16))
    if one.code == tables.NEWDECIMAL:
        return _decimals(one, values, kind, name)
    if one.code == tables.BIT:
        return _bits(one, values, kind, name)
    if one.code in (tables.ENUM, tables.SET):
        return _names(one, values, name)
    if one.code == tables.JSON:
        return _distinct(values.raw(), lambda value: binary_json.to_text(memoryview(value)), name)
    if one.code in (tables.BLOB_COMPRESSED, tables.VARCHAR_COMPRESSED):
        plain = _distinct(values.raw(), _unpack, name, pa.binary())
        return _text(plain, one.charset, name, warn) if one.charset else plain
    if one.code in _PLAIN:
        if one.charset:
            return _text(values.raw(), one.charset, name, warn)
        return values.raw(one.meta if one.code == tables.STRING else 0)
    return _integers(one, values, kind)


def convert_selected(
    one: tables.TypeOf, values: ColumnValues, name: str, warn: Callable[[str], object], odd: dict[int, str]
) -> pa.Array:
    """Return the values of a column as `convert` does, of rows of the binary protocol as `select_kernel` found them.

    Text has its column's character set, and ENUM and SET are numbers of eight bytes: so asks `TableReader`.

    Raises:
        DamagedError: a value is not what its type can be.
    """
    kind = tables.arrow_type(one)
    if one.code in _TIMES:
        return _selected_dates(one, values, kind, name, warn, odd)
    if one.code in (tables.TIME, tables.TIME2):
        ends, out = np.zeros(len(values) + 1, np.int32), np.empty(18 * len(values), np.uint8)
        end = select_kernel.clocks(values.data, values.offsets, values.lengths, values.states, one.meta, ends, out)
        return _clock_texts(values, ends, out, end, name)
    if one.code == tables.YEAR:
        return values.fixed(kind, values.words(2).astype(np.int16))
    if one.code == tables.NEWDECIMAL:
        numbers = _room_for_decimals(one, len(values))
        bad = select_kernel.decimals(
            values.data, values.offsets, values.lengths, values.states, one.precision, one.scale, numbers
        )
        return _decimal_array(one, values, kind, numbers, bad, name)
    if one.code == tables.BIT and (values.lengths[values.states == kernel.VALUE] != one.size).any():
        raise damaged(f"{name}: a value of BIT({one.meta}) has another length than {one.size} bytes")
    if one.code in (tables.ENUM, tables.SET):
        return _names(replace(one, size=8), values, name)
    if one.code == tables.JSON:
        return _text(values.raw(), "utf8mb4", name, warn)
    if one.code in (tables.BLOB_COMPRESSED, tables.VARCHAR_COMPRESSED):
        return _text(values.raw(), one.charset, name, warn) if one.charset else values.raw()
    return convert(one, values, name, warn, odd)


def _selected_dates(
    one: tables.TypeOf,
    values: ColumnValues,
    kind: pa.DataType,
    name: str,
    warn: Callable[[str], object],
    odd: dict[int, str],
) -> pa.Array:
    is_date = pa.types.is_date32(kind)
    out = np.empty(len(values), np.int64)
    had_value = values.states == kernel.VALUE
    count = select_kernel.dates(values.data, values.offsets, values.lengths, values.states, is_date, out)
    if count < 0:
        raise damaged(f"{name}: a value is no date")
    if count:
        warn(f"{name}{_NO_DATES}")
        for row in np.flatnonzero(had_value & (values.states != kernel.VALUE)).tolist():
            place = int(values.offsets[row])
            text = _moment_text(one, select_date(values.data[place : place + int(values.lengths[row])].tobytes()))
            odd[row] = text[:10] if is_date else text
    return values.fixed(kind, out.astype(np.int32) if is_date else out)


def select_date(value: bytes) -> tuple[int, ...]:
    """Return year, month, day, hour, minute, second and microseconds of a date in the binary protocol."""
    full = value.ljust(11, b"\0")
    return (int.from_bytes(full[:2], "little"), *full[2:7], int.from_bytes(full[7:11], "little"))


def _integers(one: tables.TypeOf, values: ColumnValues, kind: pa.DataType) -> pa.Array:
    words = values.words(one.size)
    if pa.types.is_decimal(kind):
        return values.fixed(kind, np.stack([words, np.zeros_like(words)], axis=1))
    if one.is_unsigned:
        return values.fixed(kind, words.astype(kind.to_pandas_dtype()))
    if one.size == 3:
        return values.fixed(kind, (words.astype(np.int32) << 8) >> 8)
    return values.fixed(kind, words.astype(np.dtype(f"u{one.size}")).view(_SIGNED[one.size]))


def _date_text(one: tables.TypeOf, value: bytes) -> str:
    """Return a date that is none as the server prints it."""
    hour = minute = second = micros = 0
    if one.code in (tables.DATE, tables.NEWDATE):
        packed = int.from_bytes(value, "little")
        return f"{packed >> 9:04}-{packed >> 5 & 15:02}-{packed & 31:02}"
    if one.code in (tables.TIMESTAMP, tables.TIMESTAMP2):
        year = month = day = 0
    elif one.code == tables.DATETIME:
        date, clock = divmod(int.from_bytes(value, "little"), 1_000_000)
        year, month, day = date // 10_000, date // 100 % 100, date % 100
        hour, minute, second = clock // 10_000, clock // 100 % 100, clock % 100
    else:
        packed = int.from_bytes(value[:5], "big") - 0x8000000000
        date, clock = packed >> 17, packed & 0x1FFFF
        year, month, day = (date >> 5) // 13, (date >> 5) % 13, date & 31
        hour, minute, second = clock >> 12, clock >> 6 & 63, clock & 63
        micros = int.from_bytes(value[5:], "big") * 100 ** (3 - (one.meta + 1) // 2)
    return _moment_text(one, (year, month, day, hour, minute, second, micros))


def _moment_text(one: tables.TypeOf, parts: tuple[int, ...]) -> str:
    year, month, day, hour, minute, second, micros = parts
    text = f"{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}"
    return f"{text}.{micros:06}"[: 20 + one.meta] if one.meta else text


def _clocks(one: tables.TypeOf, values: ColumnValues, name: str) -> pa.Array:
    ends, out = np.zeros(len(values) + 1, np.int32), np.empty(18 * len(values), np.uint8)
    end = kernel.clocks(values.data, values.offsets, values.states, one.code == tables.TIME2, one.meta, ends, out)
    return _clock_texts(values, ends, out, end, name)


def _clock_texts(values: ColumnValues, ends: npt.NDArray[np.int32], out: Bytes, end: int, name: str) -> pa.Array:
    if end < 0:
        raise damaged(f"{name}: a value is no TIME")
    buffers = [values.validity, pa.py_buffer(ends), pa.py_buffer(out[:end])]
    return pa.Array.from_buffers(pa.string(), len(values), buffers)


def _decimals(one: tables.TypeOf, values: ColumnValues, kind: pa.DataType, name: str) -> pa.Array:
    numbers = _room_for_decimals(one, len(values))
    bad = kernel.decimals(values.data, values.offsets, values.states, one.precision, one.scale, numbers)
    return _decimal_array(one, values, kind, numbers, bad, name)


def _room_for_decimals(one: tables.TypeOf, count: int) -> npt.NDArray[np.uint64]:
    return np.empty((count, 4 if one.precision > tables.MAX_DIGITS else 2), np.uint64)


def _decimal_array(
    one: tables.TypeOf,
    values: ColumnValues,
    kind: pa.DataType,
    numbers: npt.NDArray[np.uint64],
    bad: int,
    name: str,
) -> pa.Array:
    if bad >= 0:
        raise damaged(f"{name}: a value is no DECIMAL")
    if one.precision <= tables.MAX_DIGITS:
        return values.fixed(kind, numbers)
    wide = values.fixed(pa.decimal256(one.precision, one.scale), numbers)
    return pa.array([None if value is None else f"{value:f}" for value in wide.to_pylist()], pa.string())


def _bits(one: tables.TypeOf, values: ColumnValues, kind: pa.DataType, name: str) -> pa.Array:
    words = values.words(one.size, big_endian=True)
    if one.meta < 64 and len(words) and int(words.max()) >> one.meta:
        raise damaged(f"{name}: a value of BIT({one.meta}) has more bits")
    if one.meta == 1:
        packed = np.packbits(words.astype(np.uint8), bitorder="little")
        return pa.Array.from_buffers(kind, len(values), [values.validity, pa.py_buffer(packed)])
    if one.meta == 64:
        return values.fixed(kind, np.stack([words, np.zeros_like(words)], axis=1))
    return values.fixed(kind, words)


def _names(one: tables.TypeOf, values: ColumnValues, name: str) -> pa.Array:
    """Return the names of ENUM and SET values."""
    words = values.words(one.size)
    if one.code == tables.ENUM:
        known = pa.array(["", *one.names], pa.string())  # 0 is what a value that does not exist became
        if len(words) and int(words.max()) > len(one.names):
            raise damaged(f"{name}: ENUM has no value {int(words.max())}")
        indices = words.astype(np.int64)
    else:
        distinct, indices = np.unique(words, return_inverse=True)
        if len(distinct) and int(distinct[-1]) >> len(one.names):
            raise damaged(f"{name}: SET has no value {int(distinct[-1])}")
        texts = [",".join(n for bit, n in enumerate(one.names) if int(word) >> bit & 1) for word in distinct]
        known = pa.array(texts, pa.string())
    return known.take(pa.array(indices.reshape(-1), mask=values.states != kernel.VALUE))


def _text(raw: pa.Array, charset: str, name: str, warn: Callable[[str], object]) -> pa.Array:
    """Return bytes of a character set as text."""
    data = raw.buffers()[2]
    is_ascii = data is None or not data.size or int(np.frombuffer(data, np.uint8).max()) < 128
    wide = ("ucs2", "utf16", "utf16le", "utf32", "swe7")
    if charset in charsets.UTF8 or (is_ascii and charset not in wide):
        text = raw.view(pa.string())
        if not is_ascii:
            try:
                text.validate(full=True)
            except pa.ArrowInvalid:
                warn(f"{name}: bytes that are not {charset} are read as U+FFFD")
                return _distinct(raw, lambda value: charsets.decode(value, charset), name)
        return text
    return _distinct(raw, lambda value: charsets.decode(value, charset), name)


def _distinct(
    raw: pa.Array, convert_one: Callable[[bytes], object], name: str, kind: pa.DataType | None = None
) -> pa.Array:
    """Convert every distinct value once."""
    encoded = pc.dictionary_encode(raw)
    try:
        values = [convert_one(value) for value in encoded.dictionary.to_pylist()]
    except (ValueError, zlib.error) as error:
        raise damaged(f"{name}: {error}") from error
    return pa.array(values, kind or pa.string()).take(encoded.indices)


def _unpack(value: bytes) -> bytes:
    """Return a value of a COMPRESSED column of MariaDB."""
    if not value or value[0] == 0:
        return value[1:]
    width = value[0] & 7
    method = value[0] >> 4
    if method != 8:
        raise ValueError(f"compressed by the unknown method {method}")
    size = int.from_bytes(value[1 : 1 + width], "big")
    data = zlib.decompress(value[1 + width :], -15 if value[0] & 8 else 15)
    if len(data) != size:
        raise ValueError(f"{len(data)} bytes instead of {size}")
    return data
