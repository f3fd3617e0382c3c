"""Rows of state go out and come back the same, whatever the columns, the shards and the files they lie in."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firnline.errors import ConfigError, NewerFormatError, StateDamagedError
from firnline.faults import InjectedFaultError
from firnline.state.columns import Layout
from firnline.state.export import StateReader, flat_schema, query_state, write_export
from firnline.state.home import StateHome
from firnline.state.keys import shard_ranges
from firnline.state.load import add_state, import_rows, load_initial_state, read_export
from firnline.state.manifest import OperatorState, rescale
from firnline.state.segments import OPEN

GROUPS = 16
CHECKPOINT = f"{1:020d}-a1"
LAYOUT = Layout(
    pa.schema([("k", pa.string()), ("window", pa.timestamp("us", "UTC"))]),
    pa.schema([("n", pa.int64()), ("k", pa.string())]),
    timers=True,
)


def moment(second: int) -> datetime:
    return datetime.fromtimestamp(second, UTC)


def row(key: str | None, second: int, n: int | None = 1, timer: int | None = None, own: str = "") -> dict[str, Any]:
    return {"k": key, "window": moment(second), "_timer": timer, "n": n, "state.k": own}


def table_of(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=flat_schema(LAYOUT))


def put(
    home: StateHome, rows: list[dict[str, Any]], *, shards: int = 3, epoch: int = 1, table: pa.Table | None = None
) -> OperatorState:
    ranges = tuple(shard_ranges(GROUPS, shards))
    given = table_of(rows) if table is None else table
    return import_rows(home, f"{epoch:020d}-a1", given, LAYOUT, ranges, GROUPS, 1, "totals", epoch)


def reader_of(home: StateHome, state: OperatorState) -> StateReader:
    return StateReader([home], state, GROUPS, 1)


def all_rows(reader: StateReader) -> list[dict[str, Any]]:
    found = [one for part in reader.scan() for one in part.to_pylist()]
    return sorted(found, key=str)


@pytest.fixture
def home(tmp_path: Path) -> StateHome:
    return StateHome(str(tmp_path / "state"))


ROWS = st.dictionaries(
    st.tuples(st.one_of(st.none(), st.text(max_size=5)), st.integers(0, 50)),
    st.tuples(st.one_of(st.none(), st.integers(-9, 9)), st.one_of(st.none(), st.integers(-5, 10**15))),
    max_size=20,
)


@settings(max_examples=40)
@given(first=ROWS, second=ROWS, before=st.integers(1, GROUPS), after=st.integers(1, GROUPS))
def test_what_is_imported_is_found_again(
    tmp_path_factory: pytest.TempPathFactory, first: Any, second: Any, before: int, after: int
) -> None:
    """Two imports, the second on top, dealt out anew: scanned, looked up and counted."""
    home = StateHome(str(tmp_path_factory.mktemp("state")))
    old, new = ([row(k, s, n, t) for (k, s), (n, t) in rows.items()] for rows in (first, second))
    state = add_state(put(home, old, shards=before), put(home, new, shards=before, epoch=2))
    reader = reader_of(home, rescale(state, shard_ranges(GROUPS, after)))
    expected = {key: row(*key, *found) for key, found in {**first, **second}.items()}
    assert all_rows(reader) == sorted(expected.values(), key=str)
    assert reader.count() == (len(expected), sum(one["_timer"] is not None for one in expected.values()))
    if expected:
        asked = [{"k": key, "window": moment(second)} for key, second in expected]
        keys = pa.Table.from_pylist(asked, schema=LAYOUT.key)
        assert reader.find(keys).to_pylist() == list(expected.values()), "in the order in which they were asked for"
        beginnings = pa.table({"k": pa.array([next(iter(expected))[0]], pa.string())})
        found = reader.find(beginnings).to_pylist()
        wanted = [one for (key, _), one in expected.items() if key == next(iter(expected))[0]]
        assert sorted(found, key=str) == sorted(wanted, key=str)


def test_rows_survive_a_file(home: StateHome, tmp_path: Path) -> None:
    rows = [row("a", 1, 5, 77, "mine"), row(None, 2, None), row("b", 3)]
    reader = reader_of(home, put(home, rows))
    path = tmp_path / "totals.parquet"
    assert write_export(str(path), reader.schema, reader.scan(), {"operator": "totals", "epoch": 1}) == 3
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["totals.parquet"]
    back = read_export(str(path))
    assert back.schema.metadata[b"firnline.format"] == b"1"
    again = reader_of(home, put(home, [], shards=5, epoch=2, table=back))
    assert all_rows(again) == sorted(rows, key=str)


def test_a_file_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "there.parquet"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is there already"):
        write_export(str(path), flat_schema(LAYOUT), [], {})
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match="there is no folder"):
        write_export(str(tmp_path / "nowhere" / "x.parquet"), flat_schema(LAYOUT), [], {})


@pytest.mark.parametrize("point", ["before", "publish.before", "publish.after", "after"])
def test_an_export_that_breaks_leaves_a_whole_file_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    from firnline import faults

    monkeypatch.setattr(faults, "_seen", type(faults._seen)())
    monkeypatch.setenv(faults.VARIABLE, f"state.export.{point}:1:raise")
    path = tmp_path / "totals.parquet"
    with pytest.raises(InjectedFaultError):
        write_export(str(path), flat_schema(LAYOUT), [table_of([row("a", 1)])], {})
    assert os.listdir(tmp_path) == ([] if point.endswith("before") else ["totals.parquet"])
    if point.endswith("after"):
        assert pq.read_table(path).num_rows == 1


def test_a_failure_while_rows_are_read_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Any:
        yield table_of([row("a", 1)])
        raise StateDamagedError("gone")

    with pytest.raises(StateDamagedError):
        write_export(str(tmp_path / "totals.parquet"), flat_schema(LAYOUT), broken(), {})
    assert os.listdir(tmp_path) == []


# -- what is refused --------------------------------------------------------------------------------------


def test_other_columns_are_refused_by_name(home: StateHome) -> None:
    whole = table_of([row("a", 1)])
    with pytest.raises(ConfigError, match="they lack n") as lacks:
        put(home, [], table=whole.drop_columns(["n"]))
    assert "k, window, _timer, n, state.k" in lacks.value.hint
    with pytest.raises(ConfigError, match="they have extra"):
        put(home, [], table=whole.append_column("extra", pa.array([1])))
    with pytest.raises(ConfigError, match="a column twice"):
        put(home, [], table=whole.append_column("n", pa.array([1])))
    assert not os.path.exists(home.root), "nothing was written"


def test_timers_may_be_missing(home: StateHome) -> None:
    state = put(home, [], table=table_of([row("a", 1, timer=5)]).drop_columns(["_timer"]))
    assert all_rows(reader_of(home, state)) == [row("a", 1)]
    assert not any(shard.timers for _, _, shard in state.shards)


@pytest.mark.parametrize(
    ("column", "ok"),
    [
        (pa.array([3], pa.int32()), True),
        (pa.array([3], pa.int64()).dictionary_encode(), True),
        (pa.array([None], pa.null()), True),
        (pa.array([3.5], pa.float64()), False),
        (pa.array(["3"], pa.string()), False),
        (pa.array([True], pa.bool_()), False),
    ],
)
def test_types_must_be_the_same_or_fit(home: StateHome, column: pa.Array, ok: bool) -> None:
    table = table_of([row("a", 1)]).set_column(3, "n", column)
    if ok:
        assert all_rows(reader_of(home, put(home, [], table=table)))[0]["n"] == column[0].as_py()
        return
    with pytest.raises(ConfigError, match="column 'n' of the rows for 'totals'"):
        put(home, [], table=table)


def test_a_key_twice_is_refused(home: StateHome) -> None:
    with pytest.raises(ConfigError, match=r"'k': 'a'.* more than once"):
        put(home, [row("a", 1), row("b", 1), row("a", 1, 2)])


def test_keys_by_other_columns_are_refused(home: StateHome) -> None:
    reader = reader_of(home, put(home, [row("a", 1)]))
    with pytest.raises(ConfigError, match="the key has the columns k, window, not window") as refused:
        reader.find(pa.table({"window": pa.array([moment(1)])}))
    assert refused.value.hint == "Give a value for each of them, or for k alone."
    with pytest.raises(ConfigError, match="column 'k' of the keys is int64, not string"):
        reader.find(pa.table({"k": [1]}))
    unknown = StateReader([home], reader.state, GROUPS, None)
    with pytest.raises(ConfigError, match="no longer has this operator"):
        unknown.find(pa.table({"k": ["a"]}))


def test_files_that_are_no_export_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no exported state"):
        read_export(str(tmp_path / "none.parquet"))
    (tmp_path / "text.parquet").write_text("no")
    with pytest.raises(ConfigError, match="cannot be read as an exported state"):
        read_export(str(tmp_path / "text.parquet"))
    newer = table_of([]).replace_schema_metadata({"firnline.format": "2"})
    pq.write_table(newer, tmp_path / "newer.parquet")
    with pytest.raises(NewerFormatError):
        read_export(str(tmp_path / "newer.parquet"))


# -- an operator that begins with it ----------------------------------------------------------------------


class Sums:
    """As much of an operator as an import asks for."""

    name = "totals"
    keys = ("k",)
    state_key = LAYOUT.key
    state_schema = LAYOUT.state


def test_an_operator_begins_with_a_file(home: StateHome, tmp_path: Path) -> None:
    rows = [row("a", 1, 5, 77), row("b", 2)]
    path = str(tmp_path / "first.parquet")
    write_export(path, flat_schema(LAYOUT), [table_of(rows)], {})
    ranges = tuple(shard_ranges(GROUPS, 4))
    state = load_initial_state(Sums(), path, home, CHECKPOINT, ranges, GROUPS, 9)
    assert state.epoch == 9
    assert [(first, last) for first, last, _ in state.shards] == list(ranges)
    assert all(ref.path.startswith(f"{CHECKPOINT}/shard_") for _, _, s in state.shards for ref in s.files)
    assert all_rows(reader_of(home, state)) == sorted(rows, key=str)
    assert load_initial_state(Sums(), "empty", home, CHECKPOINT, ranges, GROUPS, 9) == OperatorState(0)


# -- reading from other homes -----------------------------------------------------------------------------


def test_a_file_that_one_home_lacks_is_read_from_the_next_and_nothing_is_written(tmp_path: Path) -> None:
    here, there = StateHome(str(tmp_path / "here")), StateHome(str(tmp_path / "there"))
    state = put(there, [row("a", 1), row("b", 2), row("c", 3)])
    (tmp_path / "here").mkdir()
    assert len(all_rows(StateReader([here, there], state, GROUPS, 1))) == 3
    assert os.listdir(tmp_path / "here") == []
    OPEN.clear()
    with pytest.raises(StateDamagedError):
        all_rows(StateReader([here], state, GROUPS, 1))


def test_a_lookup_opens_only_the_shard_of_its_keys(home: StateHome) -> None:
    state = put(home, [row(f"k{n}", n) for n in range(40)])
    keys = pa.table({"k": ["k1"], "window": pa.array([moment(1)], pa.timestamp("us", "UTC"))})
    reader = reader_of(home, state)
    assert reader.find(keys).num_rows == 1
    assert len(reader._segments) == 1


def test_empty_state_has_no_rows(home: StateHome) -> None:
    reader = reader_of(home, OperatorState(0))
    assert (reader.first(5).num_rows, reader.count(), list(reader.scan())) == (0, (0, 0), [])
    assert reader.find(pa.table({"k": ["a"]})).num_rows == 0
    assert query_state(reader, "select count(*) from state", 5).rows == [(0,)]


# -- queries ----------------------------------------------------------------------------------------------


@pytest.fixture
def reader(home: StateHome) -> StateReader:
    return reader_of(home, put(home, [row(f"k{n % 5}", n, n) for n in range(50)]))


def test_a_query_sees_the_state(reader: StateReader) -> None:
    answer = query_state(reader, "select k, sum(n)::bigint as total from state group by k order by k;", 3)
    assert (answer.columns, answer.more) == (["k", "total"], True)
    assert answer.rows == [(f"k{key}", sum(range(key, 50, 5))) for key in range(3)]


def test_a_query_may_read_it_twice(reader: StateReader) -> None:
    joined = 'select count(*) from state a join state b using (k, "window") where a.n = b.n'
    assert query_state(reader, joined, 5).rows == [(50,)]


@pytest.mark.parametrize(
    "sql",
    [
        "select * from read_csv('{path}')",
        "select * from '{path}'",
        "select content from read_text('{path}')",
        "copy state to '{path}.out'",
        "attach '{path}.db'",
        "create table more as select 1",
        "set enable_external_access = true",
        "select 1; select 2",
        "select * from reader",
        "selec 1",
        "",
    ],
)
def test_a_query_reaches_nothing_else(reader: StateReader, tmp_path: Path, sql: str) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    with pytest.raises(ConfigError, match=r"the query cannot be run|takes one SELECT"):
        query_state(reader, sql.format(path=secret), 5)
    assert [path.name for path in tmp_path.glob("secret*")] == ["secret.csv"]


def test_damage_is_told_as_damage(home: StateHome, reader: StateReader) -> None:
    for path in Path(home.root).rglob("*.arrow"):
        path.unlink()
    with pytest.raises(StateDamagedError, match="is missing"):
        query_state(reader, "select sum(n) from state", 5)


def test_memory_is_bounded_by_the_scan(home: StateHome, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query over many rows is given them piece by piece."""
    count = 200_000
    keys = pa.array(np.arange(count).astype(str))
    rows = pa.table(
        {
            "k": keys,
            "window": pa.array(np.zeros(count, np.int64)).cast(pa.timestamp("us", "UTC")),
            "n": np.arange(count),
            "state.k": keys,
        }
    )
    big = reader_of(home, put(home, [], table=rows))
    pieces = [part.num_rows for part in big.scan(rows=10_000)]
    assert (sum(pieces), max(pieces) <= 20_000) == (count, True)
    assert query_state(big, "select sum(n)::bigint from state", 1).rows == [(count * (count - 1) // 2,)]
