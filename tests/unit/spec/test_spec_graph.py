"""Whether the parts of a spec fit together, told with file, line, key path and suggestion."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firnline.errors import SpecError
from firnline.graph import topological
from firnline.sources.files.config import FilesSourceConfig
from firnline.spec.build import build_options, load_options
from firnline.spec.loading import load_spec, parse_spec

SPEC = """\
name: shop
sources:
  orders: {path: in/orders}
  clicks: {path: in/clicks}
operators:
  - name: clean
    type: sql
    inputs: [orders]
    query: |
      SELECT id, amount, at
      FROM orders
      WHERE amount > 0
  - name: totals
    type: aggregate
    inputs: [clean]
    keys: [id]
    aggregates: [{name: total, function: sum, column: amount}]
    time: at
    window: {size: 10m}
  - name: visits
    type: deduplicate
    inputs: [clicks]
    keys: [visit]
sinks:
  - {table: out/totals, input: totals, write: upsert}
  - {table: out/late, input: totals.late}
  - {table: out/visits, input: visits}
"""
DEDUPLICATE = {"type": "deduplicate", "keys": ["id"]}
AGGREGATE = {"type": "aggregate", "keys": ["id"], "aggregates": [{"name": "n", "function": "count"}]}


def errors_of(folder: Path, text: str) -> SpecError:
    (folder / "firnline.yml").write_text(text)
    with pytest.raises(SpecError) as caught:
        load_spec(environ={}, cwd=folder)
    return caught.value


def spec(
    operators: list[dict[str, Any]], sinks: list[dict[str, Any]] | None = None, sources: tuple[str, ...] = ("s",)
) -> dict[str, Any]:
    return {
        "name": "p",
        "sources": {name: {"path": name} for name in sources},
        "operators": operators,
        "sinks": [{"table": f"out/{index}", **sink} for index, sink in enumerate(sinks or [{}])],
    }


def message_of(data: dict[str, Any]) -> str:
    with pytest.raises(SpecError) as caught:
        parse_spec(data, folder="/data")
    return caught.value.message.replace("spec: ", "")


# --- a pipeline with a middle ----------------------------------------------------------------------------


def test_a_graph_loads(tmp_path: Path) -> None:
    (tmp_path / "firnline.yml").write_text(SPEC)
    found = load_options(environ={}, cwd=tmp_path)
    assert [s.name for s in found.sources] == ["orders", "clicks"]
    assert [o.name for o in topological(found)] == ["clean", "totals", "visits"]
    assert [(s.input, s.write, s.key) for s in found.sinks] == [
        ("totals", "upsert", ()),
        ("totals.late", "append", ()),
        ("visits", "append", ()),
    ]


@pytest.mark.parametrize(
    ("operators", "sources", "found"),
    [
        ([], ("s",), "s"),
        ([{"name": "a", "inputs": ["s"], **DEDUPLICATE}], ("s",), "a"),
        ([{"name": "b", "inputs": ["a"], **DEDUPLICATE}, {"name": "a", "inputs": ["s", "t"], **DEDUPLICATE}],
         ("s", "t"), "b"),
    ],
)  # fmt: skip
def test_a_sink_reads_the_only_one_that_can_be_meant(
    operators: list[dict[str, Any]], sources: tuple[str, ...], found: str
) -> None:
    built = build_options(parse_spec(spec(operators, sources=sources)), environ={})
    assert [sink.input for sink in built.sinks] == [found]


# --- what does not fit -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message", "hint"),
    [
        ("inputs: [orders]", "inputs: [ordrs]",
         'firnline.yml:8: operators[0].inputs[0]: "ordrs" is no source and no operator (did you mean "orders"?)\n'
         'firnline.yml:11: operators[0].query: "orders" is not among the inputs (did you mean "ordrs"?)\n'
         'firnline.yml:9: operators[0].query: the query does not read its input "ordrs"',
         "Write `orders` instead of `ordrs`."),
        ("input: visits", "input: zebra",
         'firnline.yml:27: sinks[2].input: "zebra" is no source and no operator '
         "(known: orders, clicks, clean, totals, visits)", None),
        ("input: totals.late", "input: totals.lat",
         'firnline.yml:26: sinks[1].input: operator "totals" has no port "lat" (it has: late)',
         "Write `totals.late` instead of `totals.lat`."),
        ("input: totals.late", "input: totals.bad",
         'firnline.yml:26: sinks[1].input: operator "totals" has no port "bad" (it has: late)', "Write `totals`."),
        ("input: totals.late", "input: visits.late",
         'firnline.yml:26: sinks[1].input: operator "visits" has no port "late" (deduplicate has none)',
         "Write `visits`."),
        ("input: totals.late", "input: orders.late",
         'firnline.yml:26: sinks[1].input: source "orders" has no port "late" (files has none)',
         "Write `orders`."),
        (", input: visits}", "}",
         "firnline.yml:27: sinks[2].input: missing, and there are several candidates: totals, visits",
         "Add `input: totals`."),
        ("  - {table: out/visits, input: visits}\n", "",
         'firnline.yml:20: operators[2].name: nothing reads operator "visits"',
         "Name it in `inputs` of an operator or `input` of a sink, or remove it."),
        ("inputs: [clicks]", "inputs: [orders]",
         "firnline.yml:4: sources.clicks: nothing reads it",
         "Name it in `inputs` of an operator or `input` of a sink, or remove it."),
        ("name: visits", "name: Orders",
         'firnline.yml:20: operators[2].name: the name "Orders" is taken by source "orders"\n'
         'firnline.yml:27: sinks[2].input: "visits" is no source and no operator '
         "(known: orders, clicks, clean, totals, Orders)", "Give it another name."),
        ("name: visits", "name: delta-1",
         'firnline.yml:20: operators[2].name: the name "delta-1" is taken by sink "delta-1"\n'
         'firnline.yml:27: sinks[2].input: "visits" is no source and no operator '
         "(known: orders, clicks, clean, totals, delta-1)", "Give it another name."),
        ("name: visits", "name: clean",
         'firnline.yml:20: operators[2].name: the name "clean" is taken by operator "clean"\n'
         'firnline.yml:27: sinks[2].input: "visits" is no source and no operator '
         "(known: orders, clicks, clean, totals)", "Give it another name."),
        ("  clicks:", "  Orders: {path: a}\n  clicks:",
         'firnline.yml:4: sources.Orders: differs from source "orders" in upper and lower case alone\n'
         "firnline.yml:4: sources.Orders: nothing reads it", None),
        ("  clicks:", "  visits.x: {path: a}\n  clicks:",
         "firnline.yml:4: sources[\"visits.x\"]: nothing reads it\n"
         'firnline.yml:21: operators[2].name: source "visits.x" would look like a port of operator "visits"',
         "Name it in `inputs` of an operator or `input` of a sink, or remove it."),
        ("amount > 0", "amount > rand()",
         "firnline.yml:12: operators[0].query: rand() differs on each call, and an epoch must be repeatable",
         "Derive the value from the row, e.g. xxhash64(id) or sha2(id, 256)."),
        ("amount > 0", "amount > )", 'firnline.yml:12: operators[0].query: not valid SQL near ")"', None),
        ("input: totals, write", "input: clean, write",
         "firnline.yml:25: sinks[0].key: missing: a query does not define what identifies a row", "Add `key: [...]`."),
        ("keys: [visit]", "keys: [visit]\n    interval_ms: 5",
         "firnline.yml:24: operators[2].interval_ms: only with checkpoint.mode: per_operator (here it is aligned)",
         None),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_with_its_line(
    tmp_path: Path, old: str, new: str, message: str, hint: str | None
) -> None:
    assert SPEC.count(old) == 1
    error = errors_of(tmp_path, SPEC.replace(old, new))
    assert sorted(error.message.splitlines()) == sorted(message.splitlines())
    assert error.hint == (hint or "Correct it and run again; `firnline dry-run` checks a spec without writing.")


@pytest.mark.parametrize(
    ("ports", "message"),
    [
        (("late",), ""),
        (None, ""),  # open-ended: the source itself answers when the pipeline is opened
        (("lost",), 'source "s" has no port "late" (it has: lost)'),
        ((), 'source "s" has no port "late" (files has none)'),
    ],
)
def test_a_port_of_a_source_can_be_read_where_its_kind_has_it(
    monkeypatch: pytest.MonkeyPatch, ports: tuple[str, ...] | None, message: str
) -> None:
    monkeypatch.setattr(FilesSourceConfig, "ports", ports)
    data = spec([{"name": "a", "inputs": ["s.late"], **DEDUPLICATE}], [{"input": "a"}, {"input": "s.late"}])
    if not message:
        options = build_options(parse_spec(data), environ={})
        assert [options.operators[0].inputs, options.sinks[1].input] == [("s.late",), "s.late"]
        return
    with pytest.raises(SpecError) as caught:
        parse_spec(data)
    assert caught.value.message.count(message) == 2


def test_a_source_may_not_look_like_a_port_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    data = spec([], [{"input": "s"}, {"input": "s.late"}], sources=("s", "s.late"))
    parse_spec(data)  # files have no ports
    monkeypatch.setattr(FilesSourceConfig, "ports", None)
    with pytest.raises(SpecError, match=r'source "s\.late" would look like a port of source "s"'):
        parse_spec(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (spec([{"name": "a", "inputs": ["s", "b"], **DEDUPLICATE}, {"name": "b", "inputs": ["a"], **DEDUPLICATE}],
              [{"input": "b"}]),
         "operators[0].inputs: operators read each other in a circle: a -> b -> a"),
        (spec([{"name": "a", "inputs": ["a"], **DEDUPLICATE}], [{"input": "s"}]),
         "operators[0].inputs: operators read each other in a circle: a -> a"),
        (spec([{"name": "a", "inputs": ["s"], **DEDUPLICATE}, {"name": "b", "inputs": ["a", "d.late"], **DEDUPLICATE},
               {"name": "c", "inputs": ["b"], **DEDUPLICATE}, {"name": "d", "inputs": ["c"], **AGGREGATE}],
              [{"input": "d"}]),
         "operators[1].inputs: operators read each other in a circle: b -> c -> d -> b"),
        (spec([], [{"write": "upsert"}]),
         "sinks[0].key: missing: a source does not say what identifies a row"),
        (spec([{"name": "a", "inputs": ["s"], **AGGREGATE}], [{"write": "upsert", "sequence_by": "t"}]),
         'sinks[0].sequence_by: only for the records of a source, and "a" is an operator, whose changes have an order'),
        (spec([{"name": "a", "inputs": ["s"], **DEDUPLICATE}], [{"write": "upsert"}]),
         'sinks[0].write: upsert needs a changelog, and "a" passes rows through unchanged'),
        (spec([{"name": "a", "inputs": ["s"], **AGGREGATE}], [{"write": "upsert", "input": "a.late"}]),
         'sinks[0].write: upsert needs a changelog, and "a.late" passes rows through unchanged'),
        (spec([{"name": "a", "inputs": ["s"], **AGGREGATE, "keys": []}], [{"write": "upsert"}]),
         "sinks[0].key: missing: an aggregate without keys has no column that identifies its row"),
        (spec([{"name": "a", "inputs": ["s"], "type": "m:Own"}], [{"write": "upsert"}]),
         "sinks[0].key: missing: only the class itself knows what identifies a row"),
        (spec([{"name": "a", "inputs": ["s"], "renamed_from": "b", **DEDUPLICATE},
               {"name": "b", "inputs": ["a"], **DEDUPLICATE}]),
         'operators[0].renamed_from: operator "b" is still there'),
        (spec([{"name": "a", "inputs": ["s"], "renamed_from": "x", **DEDUPLICATE},
               {"name": "b", "inputs": ["a"], "renamed_from": "x", **DEDUPLICATE}]),
         'operators[1].renamed_from: operator "a" takes over the state of "x" already'),
        ({**spec([{"name": "a", "inputs": ["s"], "renamed_from": "x", **DEDUPLICATE}]), "state": {"dropped": ["x"]}},
         'operators[0].renamed_from: the state of "x" is dropped by state.dropped'),
        (spec([], sources=("s", "t")), "sinks[0].input: missing, and there are several candidates: s, t"),
        (spec([], [{"input": "s"}], sources=("s", "t")), "sources.t: nothing reads it"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said(data: dict[str, Any], message: str) -> None:
    assert message_of(data) == message


@pytest.mark.parametrize(
    ("operator", "key"),
    [
        (AGGREGATE, []),
        (AGGREGATE, ["id"]),
        ({**AGGREGATE, "keys": [], "time": "t", "window": {"size": "5m"}}, []),
        ({"type": "m:Own"}, ["id"]),
        ({"type": "sql", "query": "SELECT * FROM s"}, ["id"]),
    ],
)
def test_rows_that_say_what_changed_may_be_upserted(operator: dict[str, Any], key: list[str]) -> None:
    data = spec([{"name": "a", "inputs": ["s"], **operator}], [{"write": "upsert", "key": key}])
    assert parse_spec(data).spec.sinks[0].write == "upsert"


def test_only_an_own_class_knows_its_ports() -> None:
    data = spec([{"name": "a", "inputs": ["s"], "type": "m:Own"}], [{"input": "a"}, {"input": "a.odd"}])
    assert parse_spec(data).spec.sinks[1].input == "a.odd"


# --- lines of queries ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "line"),
    [
        ("query: SELECT rand() AS r FROM s", 5),
        ("query: |\n      SELECT a,\n        rand() AS r\n      FROM s", 7),
        ("query: |2-\n\n      SELECT rand() AS r FROM s", 7),
        ("query: >\n      SELECT\n      rand() AS r FROM s", 5),
        ('query: "SELECT a,\n      rand() AS r FROM s"', 5),
    ],
)
def test_the_line_of_a_query_is_that_of_the_file_where_it_can_be(tmp_path: Path, written: str, line: int) -> None:
    text = f"""\
name: p
sources: {{s: {{path: in}}}}
sinks: [{{table: out}}]
operators:
  - {written}
    name: o
    type: sql
    inputs: [s]
"""
    assert errors_of(tmp_path, text).message.startswith(f"firnline.yml:{line}: operators[0].query: rand() differs")


def test_a_query_from_the_environment_is_told_by_its_variable(tmp_path: Path) -> None:
    (tmp_path / "firnline.yml").write_text(SPEC)
    with pytest.raises(SpecError) as caught:
        load_spec(environ={"FIRNLINE__OPERATORS__0__QUERY": "SELECT now() AS n FROM orders"}, cwd=tmp_path)
    assert caught.value.message.startswith("FIRNLINE__OPERATORS__0__QUERY: operators[0].query: now() reads the clock")


# --- everything at once ----------------------------------------------------------------------------------

NAMES = ["s", "t", "a", "b", "c", "a.late", "x"]


@settings(deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "name": st.sampled_from(NAMES),
                "inputs": st.lists(st.sampled_from(NAMES), max_size=3),
                "type": st.sampled_from(["aggregate", "deduplicate", "m:Own"]),
            }
        ),
        max_size=4,
    ),
    st.lists(st.sampled_from(["", *NAMES]), min_size=1, max_size=2),
)
def test_any_graph_is_refused_or_can_be_sorted(operators: list[dict[str, Any]], inputs: list[str]) -> None:
    more: dict[str, dict[str, Any]] = {"aggregate": AGGREGATE, "deduplicate": DEDUPLICATE, "m:Own": {}}
    made = [{**more[o["type"]], **o} for o in operators]
    try:
        loaded = parse_spec(spec(made, [{"input": text} for text in inputs], ("s", "t")))
        built = build_options(loaded, environ={"FIRNLINE_OPERATOR_PATH": "/"})
    except SpecError:
        return
    seen = {s.name for s in built.sources}
    for operator in topological(built):
        assert {text.split(".")[0] for text in operator.inputs} <= seen
        seen.add(operator.name)
    assert {s.input.split(".")[0] for s in built.sinks} <= seen


def test_a_graph_without_sql_loads_no_parser_and_no_arrow(tmp_path: Path) -> None:
    text = SPEC.replace("type: sql", "type: deduplicate").split("    query: |")
    (tmp_path / "firnline.yml").write_text(text[0] + "    keys: [id]\n" + text[1].split("amount > 0\n")[1])
    program = """
import sys
from firnline.spec.build import load_options
assert len(load_options(environ={}).operators) == 3
print(sorted({"pyspark", "pyarrow", "deltalake", "numpy", "sqlglot"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
