"""Decoding blocks: what becomes a column, what is rescued, what is bad."""

from __future__ import annotations

import json
import pickle
import sys
import time
from typing import Any

import pyarrow as pa
import pytest

from firnline.ndjson import (
    Block,
    Decoded,
    DecodeOptions,
    Decoder,
    MismatchError,
    Oversized,
    UnexpectedFieldError,
    exact,
    kernel,
    warm_up,
)
from firnline.rescued import UNKNOWN_FIELDS, Rescued
from firnline.schema import schema_from_spec, type_to_text


def _block(*lines: str | bytes | dict[str, Any], first_record: int = 0, first_line: int = 1) -> Block:
    raw = [
        line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]
    data = b"\n".join(raw) + b"\n"
    return Block(data, first_record, first_line, len(raw), len(raw), len(data), len(data))


def _schema(**columns: str) -> pa.Schema:
    return schema_from_spec(
        [{"name": n, "type": t.rstrip("!"), "nullable": not t.endswith("!")} for n, t in columns.items()]
    )


def _frozen(options: DecodeOptions | None = None, **columns: str) -> Decoder:
    schema = _schema(**columns)
    return Decoder(schema, schema.names, options)


def _types(decoder: Decoder) -> dict[str, str]:
    return {field.name: type_to_text(field) for field in decoder.schema}


def _rescued(decoded: Decoded) -> list[Any]:
    return [None if text is None else json.loads(text) for text in decoded.batch.column("_rescued_data").to_pylist()]


# --- unknown fields --------------------------------------------------------------------------------------


def test_unknown_fields_become_columns_with_types_from_all_rows() -> None:
    decoder = Decoder(pa.schema([]), ())
    block = _block({"a": 1, "b": True}, {"a": 2.5, "c": {"x": "y"}}, {"c": {"z": [1]}, "d": [{"k": 1}, {"l": "m"}]})
    decoded = decoder.decode(block)
    assert _types(decoder) == {
        "a": "float64",
        "b": "boolean",
        "c": "struct<x:string,z:list<int64>>",
        "d": "list<struct<k:int64,l:string>>",
    }
    assert decoded.batch.to_pylist()[2] == {
        "a": None,
        "b": None,
        "c": {"x": None, "z": [1]},
        "d": [{"k": 1, "l": None}, {"k": None, "l": "m"}],
    }
    assert decoded.batch.schema.equals(decoder.schema, check_metadata=True)


def test_a_type_that_appears_in_the_last_of_many_rows_counts() -> None:
    decoder = Decoder(pa.schema([]), ())
    decoded = decoder.decode(_block(*[{"a": n} for n in range(5000)], {"a": 0.5, "late": 1}))
    assert _types(decoder) == {"a": "float64", "late": "int64"}
    assert decoded.batch.column("a").to_pylist() == [*map(float, range(5000)), 0.5]


def test_null_and_empty_values_of_unknown_type_make_no_column() -> None:
    decoder = Decoder(pa.schema([]), ())
    decoded = decoder.decode(_block({"n": None}, {"l": [], "o": {}, "deep": [[], [None]]}))
    assert _types(decoder) == {"_rescued_data": "string"}
    assert _rescued(decoded) == [None, {"l": [], "o": {}, "deep": [[], [None]]}]
    decoded = decoder.decode(_block({"n": 1, "l": [], "o": {}}, {"l": ["x"], "o": {"k": 1}}))
    assert _types(decoder) == {"_rescued_data": "string", "n": "int64", "l": "list<string>", "o": "struct<k:int64>"}
    assert decoded.batch.to_pylist()[0] == {"_rescued_data": None, "n": 1, "l": [], "o": {"k": None}}


def test_names_that_cannot_be_columns_are_rescued() -> None:
    decoder = Decoder(_schema(Ab="int64"), ["Ab"], DecodeOptions(reserved=frozenset({"day"})))
    record = {"a b": 1, "": 2, "AB": 3, "day": 4, "_rescued_data": 5, "_firnline_x": 6, "s": {"x y": 7, "X": 8, "x": 9}}
    decoded = decoder.decode(_block(record))
    assert _types(decoder) == {"Ab": "int64", "s": "struct<X:int64>", "_rescued_data": "string"}
    assert _rescued(decoded) == [{**record, "s": {"x y": 7, "x": 9}}]
    assert decoded.batch.column("s").to_pylist() == [{"X": 8}]


def test_a_reserved_column_of_the_schema_is_never_taken_from_records() -> None:
    decoder = Decoder(_schema(day="string!", a="int64"), ["day", "a"], DecodeOptions(reserved=frozenset({"day"})))
    decoded = decoder.decode(_block({"day": "x", "a": 1}, {"a": 2}))
    assert decoded.batch.column("day").to_pylist() == [None, None]
    assert _rescued(decoded) == [{"day": "x"}, None]


def test_rescue_keeps_the_schema() -> None:
    decoder = _frozen(DecodeOptions(evolution="rescue"), a="int64", s="struct<x:int64>")
    decoded = decoder.decode(_block({"a": 1, "b": [1, {"c": 2}]}, {"a": 2}, {"s": {"x": 1, "y": 2}, "z": None}))
    assert _types(decoder) == {"a": "int64", "s": "struct<x:int64>", "_rescued_data": "string"}
    assert _rescued(decoded) == [{"b": [1, {"c": 2}]}, None, {"s": {"y": 2}}]


def test_fail_names_the_first_unknown_field() -> None:
    decoder = _frozen(DecodeOptions(evolution="fail"), s="struct<x:int64>")
    decoder.decode(_block({"s": {"x": 1}, "n": None}))
    with pytest.raises(UnexpectedFieldError) as caught:
        decoder.decode(_block({}, {"s": {"y": [1]}}, {"t": 1}, first_record=10))
    assert (caught.value.field, caught.value.record, caught.value.kind) == ("s.y", 11, "array")
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) == "record 11: unknown field 's.y' (array)"


def test_a_frozen_struct_gains_fields_whose_type_may_still_change() -> None:
    decoder = _frozen(s="struct<x:int64>", l="list<struct<x:int64>>")
    decoder.decode(_block({"s": {"x": 1, "y": 2}, "l": [{"z": 1}]}))
    assert _types(decoder) == {"s": "struct<x:int64,y:int64>", "l": "list<struct<x:int64,z:int64>>"}
    decoded = decoder.decode(_block({"s": {"x": 1.5, "y": 2.5}}))
    assert _types(decoder)["s"] == "struct<x:int64,y:float64>"
    assert decoded.batch.column("s").to_pylist() == [{"x": None, "y": 2.5}]
    assert _rescued(decoded) == [{"s": {"x": 1.5}}]


def test_generated_keys_do_not_grow_the_schema_without_bound() -> None:
    decoder = Decoder(pa.schema([]), (), DecodeOptions(max_fields=50))
    decoded = decoder.decode(_block(*[{f"k{n}": n, "id": n} for n in range(500)]))
    assert len(decoder.schema) <= 51
    rows = decoded.batch.to_pylist()
    for n, row in enumerate(rows):
        assert row["id"] == n
        assert row.get(f"k{n}") == n or json.loads(row["_rescued_data"]) == {f"k{n}": n}


# --- values that do not fit ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected", "column"),
    [
        ([1, 0.5], "float64", [1.0, 0.5]),
        ([1, "x"], "json", ["1", '"x"']),
        ([True, 1], "json", ["true", "1"]),
        ([1, [2]], "json", ["1", "[2]"]),
        (["x", {"a": 1}], "json", ['"x"', '{"a":1}']),
        ([[1], {"a": 1}], "json", ["[1]", '{"a":1}']),
        ([[1], ["x"]], "list<json>", [["1"], ['"x"']]),
        ([[1], [[2]]], "list<json>", [["1"], ["[2]"]]),
        ([2**63, 1], "float64", [2.0**63, 1.0]),
        ([2**64 - 1, 1], "json", ["18446744073709551615", "1"]),
        ([2**53 + 1, 0.5], "json", ["9007199254740993", "0.5"]),
    ],
)
def test_a_column_that_is_not_frozen_widens(values: list[Any], expected: str, column: list[Any]) -> None:
    for order in (values, values[::-1]):
        decoder = Decoder(pa.schema([]), ())
        decoded = decoder.decode(_block(*[{"a": value} for value in order]))
        assert _types(decoder) == {"a": expected}
        assert decoded.batch.column("a").to_pylist() == (column if order is values else column[::-1])
        decoder = Decoder(pa.schema([]), ())
        for value in [*order, *order]:
            decoder.decode(_block({"a": value}))
        assert _types(decoder)["a"] == expected


def test_empty_arrays_and_objects_say_nothing_about_a_type() -> None:
    for order in ([5, [], {}], [{}, [], 5]):
        decoder = Decoder(pa.schema([]), ())
        decoded = decoder.decode(_block(*[{"a": value} for value in order]))
        assert _types(decoder) == {"a": "int64", "_rescued_data": "string"}
        assert [row and row["a"] for row in _rescued(decoded)] == [None if value == 5 else value for value in order]


def test_values_of_another_kind_than_the_chosen_one_are_rescued() -> None:
    chosen = {"a": "int64", "b": "float64", "c": "string", "d": "object", "e": "json"}
    decoder = Decoder(pa.schema([]), (), DecodeOptions(kinds=chosen))
    decoded = decoder.decode(
        _block(
            {"a": "x", "b": 1, "c": True, "d": 5, "e": 1}, {"a": 1, "b": 2**53 + 1, "c": 1.50, "d": {"z": 1}, "e": []}
        )
    )
    assert _types(decoder) == {
        "b": "float64", "c": "string", "e": "json", "a": "int64", "d": "struct<z:int64>", "_rescued_data": "string",
    }  # fmt: skip
    assert decoded.batch.select(["a", "b", "c", "d", "e"]).to_pylist() == [
        {"a": None, "b": 1.0, "c": "true", "d": None, "e": "1"},
        {"a": 1, "b": None, "c": "1.5", "d": {"z": 1}, "e": "[]"},
    ]
    assert _rescued(decoded) == [{"a": "x", "d": 5}, {"b": 2**53 + 1}]


def test_a_value_that_does_not_fit_a_frozen_column_is_rescued_as_written() -> None:
    decoder = _frozen(a="int64", s="struct<x:struct<y:int32>>")
    decoded = decoder.decode(
        _block('{"a": 1.10, "s": {"x": {"y": 123456789012345678901234567890}}}', {"a": 2}, {"s": 5, "a": "q"})
    )
    texts = decoded.batch.column("_rescued_data").to_pylist()
    assert texts == ['{"a":1.10,"s":{"x":{"y":123456789012345678901234567890}}}', None, '{"s":5,"a":"q"}']
    assert decoded.batch.column("s").to_pylist() == [{"x": {"y": None}}, None, None]
    assert _types(decoder) == {"a": "int64", "s": "struct<x:struct<y:int32>>", "_rescued_data": "string"}


def test_a_misfit_inside_a_list_rescues_the_whole_field() -> None:
    decoder = _frozen(DecodeOptions(evolution="rescue"), s="struct<l:list<struct<x:int64>>,k:int64>", m="map<int64>")
    decoded = decoder.decode(
        _block(
            {"s": {"l": [{"x": 1}, {"x": "no"}], "k": 1}, "m": {"a": 1, "b": "no"}}, {"s": {"l": [{"x": 1, "y": 2}]}}
        )
    )
    assert decoded.batch.column("s").to_pylist() == [{"l": None, "k": 1}, {"l": None, "k": None}]
    assert decoded.batch.column("m").to_pylist() == [None, None]
    assert _rescued(decoded) == [
        {"s": {"l": [{"x": 1}, {"x": "no"}]}, "m": {"a": 1, "b": "no"}},
        {"s": {"l": [{"x": 1, "y": 2}]}},
    ]


def test_fail_names_the_first_misfit() -> None:
    decoder = _frozen(DecodeOptions(on_mismatch="fail"), s="struct<x:int64>")
    with pytest.raises(MismatchError) as caught:
        decoder.decode(_block({"s": {"x": 1}}, {"s": {"x": "1"}}, first_record=5))
    assert (caught.value.field, caught.value.record, caught.value.kind) == ("s.x", 6, "string")
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), MismatchError)


def test_json_columns_keep_the_text_of_any_value() -> None:
    decoder = _frozen(j="json")
    lines = [
        '{"j": {"a" : [1.10, 1e400, "x\\n\\u00e9"], "a": null }}',
        '{"j": "s"}',
        '{"j":null}',
        '{"j": [ ]}',
        '{"j":12345678901234567890123}',
    ]
    expected = ['{"a":[1.10,1e400,"x\\né"],"a":null}', '"s"', None, "[]", "12345678901234567890123"]
    assert decoder.decode(_block(*lines)).batch.column("j").to_pylist() == expected


# --- bad records -----------------------------------------------------------------------------------------


def test_bad_records_are_reported_with_place_and_bytes() -> None:
    lines: list[Any] = [
        {"a": 1}, "{", b'{"a":"\xff"}', "[1]", "5", '{"a":1}x', '{"a":NaN}', b'{"a":"\x01"}', '{"a":"\\x"}',
        '{"a":"\\ud800"}', '{"\\udc00":1}', '{"a":1,}', "{'a':1}", "null", '{"a":1} {"a":2}', {"a": 2},
    ]  # fmt: skip
    decoder = _frozen(a="json")
    decoded = decoder.decode(_block(*lines, first_record=100, first_line=200))
    assert decoded.record_numbers.to_pylist() == [100, 115]
    expected = [
        "not-json",
        "invalid-utf8",
        "not-an-object",
        "not-an-object",
        *["not-json"] * 8,
        "not-an-object",
        "not-json",
    ]
    assert [bad.reason for bad in decoded.bad] == expected
    assert [(bad.record, bad.line) for bad in decoded.bad] == [(100 + n, 200 + n) for n in range(1, 15)]
    assert decoded.bad[1].raw == b'{"a":"\xff"}'


def test_a_surrogate_pair_is_fine() -> None:
    for kind in ("string", "json"):
        decoded = _frozen(a=kind).decode(_block('{"a":"\\ud83d\\ude00"}', '{"a":"\\\\ud800"}'))
        values = decoded.batch.column("a").to_pylist()
        assert values == (["😀", "\\ud800"] if kind == "string" else ['"😀"', '"\\\\ud800"'])


@pytest.mark.parametrize("kind", ["json", "int64"])
def test_depth_is_limited_and_never_overflows_the_stack(kind: str) -> None:
    def nested(depth: int) -> str:
        return '{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"

    decoder = _frozen(DecodeOptions(evolution="rescue"), a=kind)
    decoded = decoder.decode(_block(nested(512), nested(513), nested(1_000_000), '{"a":"' + "[{" * 600 + '"}'))
    assert [(bad.record, bad.reason) for bad in decoded.bad] == [(1, "not-json"), (2, "not-json")]
    assert decoded.record_numbers.to_pylist() == [0, 3]


def test_deep_records_decode_from_a_deep_stack() -> None:
    decoder = _frozen(a="json")
    text = '{"a":' + "[" * 500 + "]" * 500 + "}"

    def down(levels: int) -> list[Any]:
        found: list[Any] = down(levels - 1) if levels else decoder.decode(_block(text)).batch.column("a").to_pylist()
        return found

    assert down(sys.getrecursionlimit() - 400) == ["[" * 500 + "]" * 500]


def test_new_values_nested_very_deep_become_json() -> None:
    decoder = Decoder(pa.schema([]), ())
    value: Any = 1
    for _ in range(100):
        value = {"k": value}
    decoded = decoder.decode(_block({"a": value}))
    found = decoded.batch.to_pylist()[0]["a"]
    while isinstance(found, dict):
        found = found["k"]
    assert json.loads(found)["k"]["k"]


def test_missing_required_values_make_a_record_bad() -> None:
    decoder = _frozen(a="int64!", b="string")
    decoded = decoder.decode(_block({"a": 1}, {"b": "x"}, {"a": None}, {"a": "misfit"}, {"a": 2, "b": None}))
    assert [(bad.record, bad.reason) for bad in decoded.bad] == [(n, "missing-required") for n in (1, 2, 3)]
    assert decoded.batch.column("a").to_pylist() == [1, 2]


def test_required_fields_inside_structs_and_lists() -> None:
    inner = pa.field("x", pa.int64(), nullable=False)
    schema = pa.schema(
        [pa.field("s", pa.struct([inner])), pa.field("l", pa.list_(pa.field("item", pa.int64(), nullable=False)))]
    )
    decoder = Decoder(schema, schema.names)
    decoded = decoder.decode(_block({"s": {"x": 1}, "l": [1]}, {"s": {}}, {"s": None}, {"l": [None]}))
    assert [(bad.record, bad.reason) for bad in decoded.bad] == [(1, "missing-required")]
    assert _rescued(decoded) == [None, None, {"l": [None]}]


def test_oversized_records_are_bad_and_keep_the_numbers_right() -> None:
    block = _block({"a": 1}, "bad", {"a": 2}, first_record=10, first_line=20)
    block = Block(block.data, 10, 20, 4, 4, 0, 0, oversized=[Oversized(11, 21, b"head", 99)])
    decoded = _frozen(a="int64").decode(block)
    assert decoded.record_numbers.to_pylist() == [10, 13]
    assert [(bad.record, bad.line, bad.raw, bad.reason) for bad in decoded.bad] == [
        (11, 21, b"head", "too-long"),
        (12, 22, b"bad", "not-json"),
    ]


# --- the rest --------------------------------------------------------------------------------------------


def test_of_duplicate_keys_the_last_wins() -> None:
    decoder = _frozen(a="int64", s="struct<x:int64>", m="map<int64>", l="list<int64>")
    lines = [
        '{"a":1,"a":2}',
        '{"a":1,"a":null}',
        '{"a":null,"a":3}',
        '{"s":{"x":1,"x":2}}',
        '{"s":{"x":1},"s":{}}',
        '{"m":{"k":1,"j":2,"k":3}}',
        '{"l":[1],"l":[2,3]}',
        '{"q":1,"q":null}',
    ]
    decoded = decoder.decode(_block(*lines))
    rows = decoded.batch.to_pylist()
    assert [row["a"] for row in rows[:3]] == [2, None, 3]
    assert [row["s"] for row in rows[3:5]] == [{"x": 2}, {"x": None}]
    assert dict(rows[5]["m"]) == {"k": 3, "j": 2}
    assert rows[6]["l"] == [2, 3]
    assert "q" not in decoder.schema.names


def test_maps_with_many_keys() -> None:
    value = {f"key {n}": n for n in range(300)}
    decoded = _frozen(m="map<int64>").decode(_block({"m": {}}, {"m": value}, {"m": None}, {"m": {"x": None}}))
    assert decoded.batch.column("m").to_pylist() == [[], list(value.items()), None, [("x", None)]]


def test_keys_in_any_order_and_many_columns() -> None:
    names = [f"column_{n}" for n in range(300)]
    decoder = _frozen(None, **dict.fromkeys(names, "int64"))
    rows = [{name: i * n for n, name in enumerate(names) if n % (i + 1) == 0} for i in range(20)]
    decoded = decoder.decode(_block(*[dict(reversed(row.items())) for row in rows]))
    assert [{key: v for key, v in row.items() if v is not None} for row in decoded.batch.to_pylist()] == rows


def test_strings_of_every_length_and_alphabet() -> None:
    texts = [piece * n for piece in ("a", "é", "漢", "😀", '"', "\\", "\n", "\x7f", "a\u0000") for n in range(40)]
    for ascii_only in (True, False):
        lines = [json.dumps({"a": text, "b": [text]}, ensure_ascii=ascii_only) for text in texts]
        decoded = _frozen(a="string", b="list<string>").decode(_block(*lines))
        assert decoded.batch.column("a").to_pylist() == texts
        assert decoded.batch.column("b").to_pylist() == [[text] for text in texts]


def test_buffers_grow_as_needed() -> None:
    rows: list[dict[str, Any]] = [
        {"s": "x" * 5000, "l": list(range(1000)), "m": {str(n): [n] for n in range(30)}} for _ in range(30)
    ]
    decoder = _frozen(s="string", l="list<int64>", m="map<list<int64>>")
    for _ in range(2):
        decoded = decoder.decode(_block(*rows))
        decoded.batch.validate(full=True)
        assert [{**row, "m": dict(row["m"])} for row in decoded.batch.to_pylist()] == rows


@pytest.mark.parametrize("odd", [1, 10, 2000])
def test_rows_stay_in_record_order(odd: int) -> None:
    lines = [{"a": n} if n % (4000 // odd) else {"a": str(n)} for n in range(4000)]
    decoded = _frozen(a="int64", b="list<struct<c:string>>").decode(_block(*lines))
    found = [
        row["a"] if row["a"] is not None else int(json.loads(row["_rescued_data"])["a"])
        for row in decoded.batch.to_pylist()
    ]
    assert found == list(range(4000))
    assert decoded.record_numbers.to_pylist() == found


def test_a_new_schema_sends_few_records_through_the_exact_path(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    parse = exact.parse

    def counting(raw: bytes) -> Any:
        parsed.append(raw)
        return parse(raw)

    monkeypatch.setattr(exact, "parse", counting)
    rows = [{"id": n, "user": {"name": "x"}, "empty": None} for n in range(20_000)]
    rows[15_000]["late"] = 1
    decoder = Decoder(pa.schema([]), ())
    decoded = decoder.decode(_block(*rows))
    assert decoded.batch.num_rows == 20_000
    assert len(parsed) <= 201


def test_many_misfits_take_time_in_proportion() -> None:
    def seconds(count: int) -> float:
        block = _block(*[{"a": n if n % 2 else "x"} for n in range(count)])
        started = time.process_time()
        _frozen(a="int64").decode(block)
        return time.process_time() - started

    seconds(1000)
    few, many = (min(seconds(count) for _ in range(3)) for count in (8_000, 40_000))
    assert many < 12 * max(few, 0.05)


def test_a_schema_without_columns_keeps_its_rows() -> None:
    decoded = Decoder(pa.schema([]), ()).decode(_block({}, {"n": None}, "bad", {}))
    assert decoded.batch.num_rows == 3
    assert decoded.record_numbers.to_pylist() == [0, 1, 3]


def test_an_empty_block_decodes_to_no_rows() -> None:
    decoded = _frozen(a="int64").decode(Block(b"", 0, 1, 0, 0, 0, 0))
    assert (decoded.batch.num_rows, decoded.bad) == (0, [])


def test_unsupported_column_types_are_refused() -> None:
    with pytest.raises(ValueError, match="uint8"):
        Decoder(pa.schema([("a", pa.uint8())]), ())


def test_one_compiled_form_serves_all_schemas() -> None:
    for decoder in (_frozen(a="int64"), Decoder(pa.schema([]), ())):
        decoder.decode(Block(bytearray(b'{"a":1}\n'), 0, 1, 1, 1, 8, 8))  # type: ignore[arg-type]
        decoder.decode(Block(memoryview(b'{"a":1}\n'), 0, 1, 1, 1, 8, 8))
    assert len(kernel.scan.signatures) == len(kernel.finish.signatures) == 1


def test_warming_up_twice_is_cheap() -> None:
    warm_up()
    started = time.process_time()
    warm_up()
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize("value", ["[]", "{ }", "[ ]"])
def test_empty_values_are_rescued_without_the_exact_path(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    parse = exact.parse
    monkeypatch.setattr(exact, "parse", lambda raw: parsed.append(raw) or parse(raw))  # type: ignore[func-returns-value]
    decoder = _frozen(a="int64")
    decoded = decoder.decode(_block(*[f'{{"e": {value}, "a":{n}, "f" :[]}}' for n in range(2000)]))
    compact = value.replace(" ", "")
    assert decoded.batch.column("_rescued_data").to_pylist() == [f'{{"e":{compact},"f":[]}}'] * 2000
    assert decoded.batch.column("a").to_pylist() == list(range(2000))
    assert len(parsed) <= 200


def test_the_walk_rescues_as_the_exact_path_does() -> None:
    lines = [
        '{"u":1.10,"a":1,"v":{"x" : ["é", "\\n", null]}}', '{"a":2}', '{"u":1,"u":2,"a":3}', '{"u":1,"a":4,"u":null}',
        '{"u":null,"a":5,"w":null}', '{"ü":"ß","a":6}', '{"\\u0075":1,"a":7}', '{"u":"\\u00e9","a":8}',
        '{"u":1,"a":9}x',
        '{"u":1e999,"a":"misfit"}',
        '{"u":1,"s":{"u":null,"y":1},"a":10}', '{"u":' + "[" * 100 + "]" * 100 + "}",
        "{" + ",".join(f'"k{n}":{n}' for n in range(40)) + "}", '{"_rescued_data":"x","a":11}', '{"u":[1,],"a":12}',
    ]  # fmt: skip
    results = []
    for block in (lines, lines * 40):
        decoder = _frozen(DecodeOptions(evolution="rescue"), a="int64", s="struct<x:int64>")
        results.append(decoder.decode(_block(*block)))
    first = [json.loads(text) if text else None for text in results[0].batch.column("_rescued_data").to_pylist()]
    assert first[:5] == [{"u": 1.1, "v": {"x": ["é", "\n", None]}}, None, {"u": 2}, None, None]
    assert results[0].batch.column("_rescued_data")[0].as_py() == '{"u":1.10,"v":{"x":["é","\\n",null]}}'
    assert first[5:8] == [{"ü": "ß"}, {"u": 1}, {"u": "é"}]
    assert first[9] == {"u": 1, "s": {"y": 1}}
    assert first[11] == {f"k{n}": n for n in range(40)}
    assert first[12] == {"_rescued_data": "x"}
    assert [bad.reason for bad in results[0].bad] == ["not-json", "not-json"]
    assert results[1].batch.to_pylist() == results[0].batch.to_pylist() * 40


def test_a_column_for_rescued_values_that_stays_empty_is_taken_back() -> None:
    decoder = _frozen(a="int64")
    decoder.decode(_block({"l": []}, {"l": [1]}))
    assert _types(decoder) == {"a": "int64", "l": "list<int64>"}
    decoder = Decoder(pa.schema([]), ())
    decoder.decode(_block({"l": []}, {"l": {"x": 1}}, {"l": [1]}))
    assert _types(decoder) == {"l": "json"}


def test_the_rescued_column_must_be_text() -> None:
    with pytest.raises(ValueError, match="_rescued_data"):
        Decoder(pa.schema([("_rescued_data", pa.int64())]), ())


def test_of_duplicate_texts_the_last_wins_whole() -> None:
    decoder = _frozen(a="string", b="binary", j="json", l="list<string>", s="struct<x:string>")
    lines = ['{"a":"one","a":"two"}', '{"b":"aGk=","b":"aG8="}', '{"j":[1],"j":{"k":2}}', '{"l":["x"],"l":["y","z"]}']
    lines += ['{"s":{"x":"p","x":"q"}}', '{"s":{"x":"p"},"s":{"x":"q"}}', '{"a":"x","a":null}', '{"a":null,"a":"x"}']
    rows = decoder.decode(_block(*lines)).batch.to_pylist()
    found = [{key: value for key, value in row.items() if value is not None} for row in rows]
    assert found == [
        {"a": "two"},
        {"b": b"ho"},
        {"j": '{"k":2}'},
        {"l": ["y", "z"]},
        {"s": {"x": "q"}},
        {"s": {"x": "q"}},
        {},
        {"a": "x"},
    ]


@pytest.mark.parametrize("kind", ["string", "json"])
def test_utf8_is_checked_to_the_letter(kind: str) -> None:
    edges = [0x20, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xFF]
    short = [bytes([a, b]) for a in range(0x80, 0x100) for b in edges]
    three = [bytes([a, b, c]) for a in range(0xE0, 0x100) for b in edges for c in (0x7F, 0x80, 0xBF, 0xC0)]
    four = [text + bytes([d]) for text in three if text[0] >= 0xEF for d in (0x7F, 0x80, 0xBF, 0xC0)]
    texts = [*short, *three, *four]
    decoded = _frozen(a=kind).decode(_block(*[b'{"a":"' + text + b'"}' for text in texts]))
    good = []
    for number, text in enumerate(texts):
        try:
            good.append((number, text.decode()))
        except UnicodeDecodeError:
            continue
    assert decoded.record_numbers.to_pylist() == [number for number, _ in good]
    assert {bad.reason for bad in decoded.bad} == {"invalid-utf8"}
    values = decoded.batch.column("a").to_pylist()
    assert values == [text if kind == "string" else f'"{text}"' for _, text in good]


# --- counts of rescued values ----------------------------------------------------------------------------


def test_rescued_values_are_counted_by_column_with_the_first_one() -> None:
    decoder = _frozen(a="int64", s="struct<x:int64>")
    decoded = decoder.decode(_block({"a": 1}, {"a": 1.5}, {"a": "x", "s": {"x": 2.5}}, first_line=5))
    assert decoded.rescued == [
        Rescued("a", 2, "int64", "1.5", line=6, wider={"float64": 1}),
        Rescued("s.x", 1, "int64", "2.5", line=7, wider={"float64": 1}),
    ]
    assert decoder.decode(_block({"a": 1})).rescued == []


@pytest.mark.parametrize("rows", [1, 1000])
def test_unknown_fields_that_are_rescued_are_counted_together(rows: int) -> None:
    decoder = _frozen(DecodeOptions(evolution="rescue"), a="int64")
    (found,) = decoder.decode(_block(*[{"a": 1, "b": [1], "c": 2}] * rows)).rescued
    assert (found.column, found.values) == (UNKNOWN_FIELDS, 2 * rows)
    assert found.first.startswith('{"b":[1]')


def test_the_values_of_a_bad_record_are_not_counted_as_rescued() -> None:
    decoded = _frozen(a="int64", b="int64!").decode(_block({"a": 1.5}, {"a": 1.5, "b": 1}))
    assert [bad.reason for bad in decoded.bad] == ["missing-required"]
    assert decoded.rescued == [Rescued("a", 1, "int64", "1.5", line=2, wider={"float64": 1})]
