"""Templates of names: `lake/{region}` names one table for each value of the column `region`: its parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from firnline.errors import SchemaError, SinkError
from firnline.options import DELETE, split_template, template_columns
from firnline.sinks.changes import find_truncates, find_words

SHOWN = 100  # characters of a value in a message
_NEVER = re.compile(r"[/\\\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # whatever a spec allows


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of a batch that go to one part."""

    name: str
    batch: pa.RecordBatch
    numbers: pa.Array


class NameTemplate:
    """Says which part each row goes to.

    Args:
        text: The template; its columns in braces.
        allowed: A regular expression that the value of each column must match as a whole.
        refuse: Returns why a rendered name cannot be used; empty if it can.
    """

    def __init__(self, text: str, allowed: str, refuse: Callable[[str], str]) -> None:
        self.text = text
        self.columns = template_columns(text)
        self._allowed = re.compile(allowed)
        self._refuse = refuse
        self._reasons: dict[str, str] = {}  # of names that were rendered before

    def check(self, schema: pa.Schema) -> None:
        """Refuse rows without a column of the template, or with one whose values are no names.

        Raises:
            SchemaError: it names the column.
        """
        for name in self.columns:
            if name not in schema.names:
                raise SchemaError(
                    f"the rows have no column {name!r}, which {self.text} names",
                    hint=f"The rows have {', '.join(schema.names)}.",
                    column=name,
                )
            if not _is_nameable(schema.field(name).type):
                raise SchemaError(
                    f"{self.text} names the column {name!r}, which is {schema.field(name).type}",
                    hint="Name a column of texts, whole numbers, truth values or dates.",
                    column=name,
                )

    def split(self, batch: pa.RecordBatch, numbers: pa.Array, most: int) -> tuple[list[Share], dict[int, str]]:
        """Return the rows of each part, in order, and the numbers of rows that belong to none, each with the reason.

        Raises:
            SinkError: the rows name more than `most` parts.
            SchemaError: the rows lack a column of the template.
        """
        self.check(batch.schema)
        bad: dict[int, str] = {}
        keep = np.ones(batch.num_rows, bool)
        texts = {name: _text(batch.column(batch.schema.get_field_index(name))) for name in self.columns}
        for name, text in texts.items():
            for value, mask in _wrong(text, most, self._wrong_value):
                reason = f"column {name!r} is null" if value is None else f"column {name!r}: {self._wrong_value(value)}"
                bad |= dict.fromkeys(numbers.filter(pa.array(mask & keep)).to_pylist(), reason)
                keep &= ~mask
        names = self._join(texts).dictionary_encode()
        for rendered, mask in _wrong(names, most, self._reason):
            if rendered is not None:  # else a column is null
                bad |= dict.fromkeys(numbers.filter(pa.array(mask & keep)).to_pylist(), self._reason(rendered))
                keep &= ~mask
        if not keep.all():
            batch, numbers, names = batch.filter(keep), numbers.filter(keep), names.filter(pa.array(keep))
        return list(_shares(batch, numbers, names)), bad

    def cut(
        self, batch: pa.RecordBatch, numbers: pa.Array, *, upserts: bool
    ) -> Iterator[tuple[pa.RecordBatch, pa.Array, bool]]:
        """Yield rows in order, cut where rows concern all parts; those come with True.

        A change row that empties its table, and in an upsert one that deletes a key, concerns all parts if it does not
        say which one: the log of a database has no more than the key of a deleted row.
        """
        concerns = find_truncates(batch)
        if upserts and (deletes := find_words(batch, DELETE)) is not None:
            concerns = deletes if concerns is None else pc.or_(concerns, deletes)
        if concerns is None:
            yield batch, numbers, False
            return
        self.check(batch.schema)
        names_none = np.zeros(batch.num_rows, bool)
        for name in self.columns:
            names_none |= pc.is_null(batch.column(batch.schema.get_field_index(name))).to_numpy(zero_copy_only=False)
        is_for_all = concerns.to_numpy(zero_copy_only=False) & names_none
        edges = [0, *(np.flatnonzero(np.diff(is_for_all)) + 1).tolist(), batch.num_rows]
        for start, end in pairwise(edges):
            yield batch.slice(start, end - start), numbers.slice(start, end - start), bool(is_for_all[start])

    def _wrong_value(self, value: str) -> str:
        if not value or value in (".", "..") or _NEVER.search(value):
            return f"{value[:SHOWN]!r} cannot be part of a name"
        if not self._allowed.fullmatch(value):
            return f"{value[:SHOWN]!r} does not match {self._allowed.pattern!r}"
        return ""

    def _reason(self, name: str) -> str:
        if name not in self._reasons:
            self._reasons[name] = self._refuse(name)
        return self._reasons[name]

    def _join(self, texts: dict[str, pa.Array]) -> pa.Array:
        pieces: list[pa.Array | pa.Scalar] = []
        for literal, column in split_template(self.text):
            pieces += [pa.scalar(literal), *([texts[column]] if column else [])]
        return pc.binary_join_element_wise(*pieces, "", null_handling="emit_null")


def _wrong(
    column: pa.Array, most: int, wrong: Callable[[str], str]
) -> Iterator[tuple[str | None, np.ndarray[tuple[int], np.dtype[np.bool_]]]]:
    """Yield each wrong value, null included, with the rows that have it."""
    encoded = column if isinstance(column, pa.DictionaryArray) else column.dictionary_encode()
    values = encoded.dictionary
    if len(values) > most:
        raise too_many_parts(len(values), most)
    codes = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)
    if encoded.null_count:
        yield None, codes == -1
    for code, value in enumerate(values.to_pylist()):
        if wrong(value):
            yield value, codes == code


def _shares(batch: pa.RecordBatch, numbers: pa.Array, names: pa.DictionaryArray) -> Iterator[Share]:
    """Yield the rows of each name; the order of rows stays."""
    if not batch.num_rows:
        return
    codes = names.indices.to_numpy(zero_copy_only=False)
    order = np.argsort(codes, kind="stable")
    ends = np.flatnonzero(np.diff(codes[order])) + 1
    groups = np.split(order, ends)
    if len(groups) == 1:
        yield Share(names[0].as_py(), batch, numbers)
        return
    for group in groups:
        chosen = pa.array(group)
        yield Share(names[int(group[0])].as_py(), batch.take(chosen), numbers.take(chosen))


def too_many_parts(parts: int, most: int) -> SinkError:
    """Return the error for a template that names more tables than a sink may have."""
    return SinkError(
        f"the template names at least {parts:,} tables, and max_parts is {most:,}",
        hint="Name a column with fewer values, narrow parts_allowed, or raise max_parts on the sink.",
    )


def _is_nameable(kind: pa.DataType) -> bool:
    t = pa.types
    kind = kind.value_type if t.is_dictionary(kind) else kind
    texts = t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind)
    return bool(texts or t.is_integer(kind) or t.is_boolean(kind) or t.is_date32(kind) or t.is_null(kind))


def _text(column: pa.Array) -> pa.Array:
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.dictionary_decode()
    return column if pa.types.is_string(column.type) else column.cast(pa.string())
