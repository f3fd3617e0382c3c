"""Parts of captured tables: names that never meet, keys, columns that grow, and rows of many tables in one file."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firnline.errors import SchemaError
from firnline.options import SchemaOptions
from firnline.rescued import Rescued
from firnline.sinks.delta.options import ESCAPED, PARTS_ALLOWED
from firnline.sinks.delta.parts.captured import PartColumns, PartKey, name_part
from firnline.sinks.delta.parts.state import Held, Part, add_epoch, open_parts, own_of, rescued_of
from firnline.sinks.delta.parts.table import refuse_name
from firnline.sinks.outbox import KEY
from firnline.sinks.outbox_rows import OutboxStager, outbox_target, read_outbox, rebuild, rows_checksum
from firnline.sinks.table_rows import SourceTable, mark_table, same_columns, table_of
from firnline.storage import LocalStorage

ORDERS = SourceTable("public", "orders", True, ("id",))
ODD = st.text("ab.~-_/ é€𝄞\\%A", min_size=1, max_size=70)


# -- names ------------------------------------------------------------------------------------------------


TEMPLATES = st.sampled_from(["{table}", "t_{table}", "{schema}/{table}"])


@given(st.lists(ODD, min_size=2, max_size=20, unique=True), TEMPLATES)
def test_two_tables_of_a_schema_never_have_the_same_part(names: list[str], template: str) -> None:
    tables = [SourceTable("public", name, True, None) for name in names]
    found = [name_part(template, table, PARTS_ALLOWED) for table in tables]
    assert len(set(found)) == len(names)
    for name in found:
        assert not refuse_name(name)
        assert re.fullmatch(ESCAPED, name.rpartition("/")[2])


def test_a_table_outside_the_default_schema_has_its_schema_in_the_name() -> None:
    sales = SourceTable("Sales Data", "orders", False, None)
    assert name_part("{table}", ORDERS, PARTS_ALLOWED) == "orders"
    assert name_part("{table}", sales, PARTS_ALLOWED) == "Sales~20Data.orders"
    assert name_part("{database}/{table}", sales, PARTS_ALLOWED) == "Sales~20Data/orders"
    assert name_part("{schema}_{table}", ORDERS, PARTS_ALLOWED) == "public_orders"


def test_a_pattern_may_allow_more_but_nothing_that_leaves_the_folder() -> None:
    names = {name: name_part("{table}", SourceTable("p", name, True, None), "(?s).*") for name in ("é b", "../x", "~")}
    assert names == {"é b": "é b", "../x": "~2E.~2Fx", "~": "~7E"}


# -- keys -------------------------------------------------------------------------------------------------


def taken(
    key: tuple[str, ...] | None, *rows: tuple[str, ...] | str | None, upserted: bool = False, reads_anew: bool = False
) -> tuple[PartKey, list[bool]]:
    """The key of a part after rows with these keys, and which of them it takes; `anew` begins a snapshot."""
    part = PartKey(key, upserted)
    tables = [
        replace(ORDERS, key=None, anew=True) if row == "anew" else replace(ORDERS, key=row)  # type: ignore[arg-type]
        for row in rows
    ]
    return part, [part.takes(table, reads_anew=reads_anew) for table in tables]


def test_the_key_of_a_part() -> None:
    assert taken(None, ("id",))[0].key == ("id",)
    assert taken(("id",), None)[0].key == ("id",), "a table that is emptied may not say it"
    assert taken(("a", "b"), ("b", "a")) == (PartKey(("a", "b")), [True])
    assert taken((), ("id",)) == (PartKey(()), [True]), "it is appended to"
    for other in ((), ("id", "kind")):
        with pytest.raises(SchemaError, match=r"the key of table public\.orders was id and is"):
            taken(("id",), other)


def test_the_key_of_a_part_changes_with_a_snapshot() -> None:
    assert taken(("id",), ("code",), ("id",), reads_anew=True) == (PartKey(("id",)), [False, True])
    assert taken(("id",), "anew", ("code",)) == (PartKey(("code",), True, True), [True, True])
    assert taken(("id",), "anew") == (PartKey(None, True, True), [True]), "the next rows say it"
    assert taken(("id",), "anew", (), ("code",))[0] == PartKey((), True, True)
    assert taken((), "anew", ("code",)) == (PartKey(()), [True, True]), "it never had a key"
    assert taken((), "anew", ("code",), upserted=True)[0] == PartKey(("code",), True, True)
    part, found = taken(("id",), "anew", ("code",), ("id",), reads_anew=True)
    assert (part.key, found) == (("code",), [True, True, False]), "the next snapshot has them"


def test_a_part_knows_the_key_of_every_epoch() -> None:
    part = Part(3, table="public.orders").with_key(3, ("id",))
    assert part == Part(3, table="public.orders", key=("id",))
    assert part.with_key(5, ("id",)) == part
    changed = part.with_key(7, ("id", "kind")).with_key(9, None).with_key(11, ())
    assert [changed.key_before(epoch) for epoch in (3, 4, 7, 8, 10, 12)] == [
        None, ("id",), ("id",), ("id", "kind"), None, (),
    ]  # fmt: skip
    assert changed.key == ()
    assert changed.keys_before(11) == [("id",), ("id", "kind")]
    assert changed.with_key(7, ("id", "kind")) == changed, "an epoch that is delivered again"
    assert Part.from_json(changed.to_json()) == changed
    back = changed.with_key(12, changed.key_before(4 + 1))
    assert (back.key, back.key_before(13), back.key_before(12)) == (("id",), ("id",), ())


@pytest.mark.parametrize("key", [None, (), ("id",), ("a", "b")])
def test_the_head_keeps_the_key(key: tuple[str, ...] | None) -> None:
    part = Part(3, Held(4, 5), 6, "public.orders", key)
    assert Part.from_json(part.to_json()) == part
    opened = open_parts({}, ["x"], 7, {"x": "public.orders"}, {"x": key} if key is not None else {})
    assert opened["x"] == Part(7, open=7, table="public.orders", key=key)
    assert open_parts(opened, ["x"], 8, {"x": "other"})["x"] == Part(7, open=8, table="public.orders", key=key)


# -- columns ----------------------------------------------------------------------------------------------


def rows(**columns: Any) -> pa.RecordBatch:
    arrays = {name: values if isinstance(values, pa.Array) else pa.array(values) for name, values in columns.items()}
    size = len(next(iter(arrays.values())))
    return mark_table(pa.RecordBatch.from_pydict({**arrays, "_op": pa.array(["insert"] * size)}), ORDERS)


def int32(*values: int | None) -> pa.Array:
    return pa.array(values, pa.int32())


def fit(known: pa.Schema | None, *batches: pa.RecordBatch, **options: Any) -> tuple[pa.Schema, list[dict[str, Any]]]:
    """Fit batches as a sink does."""
    columns = PartColumns.begin(ORDERS, known, SchemaOptions(**options))
    for batch in batches:
        columns.add(batch.schema)
    found = [row for batch in batches for row in columns.fit(batch).to_pylist()]
    return columns.schema, found


KNOWN = pa.schema([("id", pa.int64()), ("n", pa.int32())])


def test_the_first_rows_of_a_table_agree_on_types() -> None:
    schema, found = fit(None, rows(id=[1], n=int32(1)), rows(id=[2], n=[1 << 40], new=["x"]))
    assert schema.field("n").type == pa.int64()
    assert found == [
        {"id": 1, "n": 1, "_op": "insert", "new": None},
        {"id": 2, "n": 1 << 40, "_op": "insert", "new": "x"},
    ]


def test_a_column_gets_wider_or_a_new_name() -> None:
    schema, found = fit(KNOWN, rows(id=[1], n=int32(7)), rows(id=[2], n=[1 << 40]))
    assert (schema.field("n").type, [row["n"] for row in found]) == (pa.int64(), [7, 1 << 40])
    schema, found = fit(KNOWN, rows(id=[1], n=int32(7)), rows(id=[2], n=["x"]))
    assert [(row["n"], row["n_v2"]) for row in found] == [(7, None), (None, "x")]
    schema, found = fit(schema.remove(schema.get_field_index("_op")), rows(id=[3], n=["y"]))
    assert [(row["n"], row["n_v2"]) for row in found] == [(None, "y")]
    wide = pa.schema([("id", pa.int64()), ("n", pa.int64())])
    schema, found = fit(wide, rows(id=[1], n=[0.5]))
    assert [(row["n"], row["n_v2"]) for row in found] == [(None, 0.5)], "no float holds every int64"


def test_a_name_that_changed_in_case_alone_keeps_its_column() -> None:
    """No table of Delta has both names; before, such values were rescued."""
    _, found = fit(KNOWN, rows(id=[1], N=int32(7), _missing=pa.array([["N"]])))
    assert found == [{"id": 1, "n": 7, "_op": "insert", "_missing": ["n"]}]
    _, found = fit(KNOWN, rows(id=[1], N=["x"]))
    assert [(row["n"], row["N_v2"]) for row in found] == [(None, "x")]
    both = pa.schema([*KNOWN, ("~4E", pa.int32())])  # a table that had n and N
    _, found = fit(both, rows(id=[1], N=int32(7)))
    assert [(row["n"], row["~4E"]) for row in found] == [(None, 7)]
    _, found = fit(both, rows(id=[1], n=int32(7)))
    assert [(row["n"], row["~4E"]) for row in found] == [(7, None)]


def test_a_name_that_changes_in_case_alone_in_the_first_epoch_keeps_its_column() -> None:
    for known in (None, pa.schema([("id", pa.int64())])):
        schema, found = fit(known, rows(id=[1], n=int32(1)), rows(id=[2], N=[1 << 40], _missing=pa.array([["N"]])))
        assert schema.field("n").type == pa.int64()
        assert [(row["id"], row["n"], row["_missing"]) for row in found] == [(1, 1, None), (2, 1 << 40, ["n"])]
        assert "N" not in schema.names
        assert "_rescued_data" not in schema.names
    schema, found = fit(None, rows(id=[1], N=[1]), rows(id=[2], n=[2]), rows(**{"id": [3], "n": [3], "~4E": [4]}))
    assert [(row["N"], row["~4E"]) for row in found] == [(1, None), (2, None), (3, 4)]  # a table that got both


def test_missing_columns_are_named_as_they_are_called_here() -> None:
    missing = pa.array([["n", "id"], None, ["n"]])
    _, found = fit(KNOWN, rows(id=[1, 2, 3], n=["x", "y", "z"], _missing=missing))
    assert [row["_missing"] for row in found] == [["n_v2", "id"], None, ["n_v2"]]


def test_rules_of_the_source_about_new_columns() -> None:
    new = rows(id=[1], n=int32(1), extra=["x"])
    _, found = fit(KNOWN, new, evolution="rescue")
    assert found == [{"id": 1, "n": 1, "_op": "insert", "_rescued_data": '{"extra":"x"}'}]
    with pytest.raises(SchemaError, match="extra"):
        fit(KNOWN, new, evolution="fail")
    with pytest.raises(SchemaError, match="column n is int64 now, and was int32"):
        fit(KNOWN, rows(id=[1], n=[1]), on_widen="fail")
    schema, found = fit(KNOWN, rows(id=[1, 2], n=[1, 1 << 40]), on_widen="rescue")
    assert schema.field("n").type == pa.int32()
    assert [(row["n"], row["_rescued_data"]) for row in found] == [(1, None), (None, '{"n":1099511627776}')]
    with pytest.raises(SchemaError, match="a column of the key"):
        fit(pa.schema([("id", pa.int32())]), rows(id=["x"]))


def test_values_that_the_source_rescued_stay_rescued() -> None:
    _, found = fit(KNOWN, rows(id=[1], n=["x"], _rescued_data=['{"day":"0000-00-00"}']), evolution="rescue")
    assert found[0]["_rescued_data"] == '{"day":"0000-00-00","n":"x"}'


def test_a_head_keeps_what_was_rescued_by_epoch_and_stays_small() -> None:
    kept: Any = []
    for epoch in range(1, 31):
        kept = rescued_of(own_of({}, add_epoch(kept, epoch, [Rescued("n", 1, table="shop.orders")])))
    assert [epoch for epoch, _ in kept] == [*range(11, 31)]
    assert sum(one.values for _, found in kept for one in found) == 30
    assert add_epoch(kept, 31, []) == kept
    again = add_epoch(kept, 20, [Rescued("n", 5)])  # the sink lost epochs, and gets them again
    assert [epoch for epoch, _ in again] == [*range(11, 21)]
    assert rescued_of(own_of({}, kept), 12) == kept[:2]


# -- rows of many tables in the outbox ----------------------------------------------------------------------


def of(name: str, **columns: Any) -> pa.RecordBatch:
    return mark_table(pa.RecordBatch.from_pydict(columns), SourceTable("public", name, True, ("id",)))


MIXED = [of("a", id=[1, 2]), of("b", id=["x"], n=[None]), of("a", id=[3]), of("c", id=[1, 2]), of("c", id=[4])]


def test_rows_of_many_tables_lie_in_one_file_and_are_made_again(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    outbox = {"root": str(tmp_path), "storage_options": {}, "folder": "out"}
    stager = OutboxStager(outbox_target("sink", outbox, "db.*"), "attempt")
    for batch in MIXED:
        stager.write(batch)
    (file,) = stager.close()
    assert file["rows"] == 7
    found = list(read_outbox(storage, [file]))
    assert [table_of(batch.schema).name for batch in found] == ["a", "b", "a", "c", "c"]  # type: ignore[union-attr]
    assert [batch.to_pydict() for batch in found] == [batch.to_pydict() for batch in MIXED]
    assert sum(batch.num_rows for batch in read_outbox(storage, [file], skip=3)) == 4
    (tmp_path / str(file[KEY])).unlink()
    assert not rebuild(storage, file, [*MIXED[:-1], of("c", id=[5])]), "other rows than those that were decided"
    assert not rebuild(storage, file, [*MIXED[:-1], of("d", id=[4])]), "another table"
    assert rebuild(storage, file, [MIXED[0].slice(0, 1), MIXED[0].slice(1), *MIXED[1:]])
    again = list(read_outbox(storage, [file]))
    assert rows_checksum(again) == rows_checksum(MIXED)
    assert [table_of(batch.schema) for batch in again][-1] == table_of(MIXED[-1].schema)


def test_batches_of_the_same_table_and_columns_go_together() -> None:
    assert [len(group) for group in same_columns(MIXED)] == [1, 1, 1, 2]
    assert table_of(pa.schema([("_firnline_table", pa.string())])) is None
    stream = io.BytesIO()
    with pa.ipc.new_stream(stream, MIXED[0].schema) as writer:
        writer.write_batch(MIXED[0])
    assert table_of(pa.ipc.open_stream(stream.getvalue()).schema) == SourceTable("public", "a", True, ("id",))
