"""`firnline state` and `firnline rescale`: what they show, what they write, and what they refuse in two lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from firnline.cli.main import run_command
from firnline.spec.build import load_options
from tests.support.keyed import KeyedInput
from tests.support.pipelines import run_to_end

RunJson = Callable[..., Any]

SPEC = """\
name: orders
sources:
  orders:
    path: in
    schema: {fields: [{name: k, type: string}, {name: v, type: int64}, {name: at, type: timestamp}]}
operators:
  - name: totals
    type: aggregate
    inputs: [orders]
    keys: [k]
    aggregates: [{name: n, function: count}, {name: total, function: sum, column: v}]
  - name: minutes
    type: aggregate
    inputs: [orders]
    keys: [k]
    time: at
    window: {size: 1m}
    aggregates: [{name: n, function: count}]
sinks:
  - {table: out, input: totals, write: upsert}
  - {table: per_minute, input: minutes, write: upsert}
batch: {max_files: 1}
checkpoint: {store: {type: file}}
"""


@pytest.fixture
def stateful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pipeline with two operators that keep state, after three epochs."""
    keyed = KeyedInput(tmp_path / "in")
    for _ in range(3):
        keyed.add()
    path = tmp_path / "firnline.yml"
    path.write_text(SPEC)
    monkeypatch.chdir(tmp_path)
    run_to_end(load_options(path, environ={}))
    return path


def table(folder: Path) -> dict[str, tuple[int, int]]:
    rows = DeltaTable(str(folder / "out")).to_pyarrow_table().to_pylist()
    return {row["k"]: (row["n"], row["total"]) for row in rows}


def test_a_summary_and_the_first_rows(stateful: Path, run_json: RunJson, capsys: pytest.CaptureFixture[str]) -> None:
    expected = table(stateful.parent)
    found = run_json("state", "totals")
    assert (found["operator"], found["epoch"], found["snapshot_epoch"], found["note"]) == ("totals", 3, 3, "")
    assert (found["keys"], found["timers"], found["more"]) == (len(expected), 0, False)
    assert found["files"] > 0 < found["size_bytes"]
    assert {row["k"]: (row["n"], row["total"]) for row in found["rows"]} == expected
    assert found["key_columns"] == [{"name": "k", "type": "string"}]
    assert run_command(["state", str(stateful), "totals", "--limit", "2"]) == 0
    streams = capsys.readouterr()
    assert f"keys       {len(expected)}\n" in streams.out
    assert streams.err == "there is more; --limit shows more rows\n"
    shown = run_json("state", "totals", "--limit", "2")
    assert (len(shown["rows"]), shown["more"]) == (2, True)


def test_one_key(stateful: Path, run_json: RunJson, capsys: pytest.CaptureFixture[str]) -> None:
    key, (n, total) = next(iter(table(stateful.parent).items()))
    row = {"k": key, "_timer": None, "n": n, "total": total}
    assert run_json("state", "totals", "--key", key)["rows"] == [row]
    assert run_json("state", "totals", "--key", f"k={key}")["rows"] == [row]
    assert len(run_json("state", "totals", "--key", key, "--key", "nobody", "--key", "x=y")["rows"]) == 1
    assert run_command(["state", "totals", "--key", "nobody"]) == 0
    assert capsys.readouterr().out == "no such key\n"


def test_keys_of_several_columns(stateful: Path, run_json: RunJson, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run_json("state", "minutes")["rows"]
    row = rows[0]
    assert row["_timer"] is not None
    whole = run_json("state", "minutes", "--key", f"k={row['k']}", "--key", f"window_start={row['window_start']}")
    assert whole["rows"] == [row]
    same = [r for r in rows if r["k"] == row["k"]]
    assert run_json("state", "minutes", "--key", f"k={row['k']}")["rows"] == same
    assert run_json("state", "minutes", "--key", row["k"])["rows"] == same  # the one column that decides the shard
    for words, told in (
        (["--key", "k=a", "--key", "k=b"], "not one value for a column of the key"),
        (["--key", "k=a", "--key", "window_start=noon"], "'noon' is no value of window_start"),
        (["--key", f"window_start={row['window_start']}"], "the key has the columns k, window_start"),
    ):
        assert run_command(["state", "minutes", *words]) == 2
        assert told in capsys.readouterr().err


def test_an_earlier_epoch(stateful: Path, run_json: RunJson, capsys: pytest.CaptureFixture[str]) -> None:
    counts = [sum(row["n"] for row in run_json("state", "totals", "--at", str(n))["rows"]) for n in (1, 2, 3)]
    assert counts == [6, 12, 18]
    assert run_command(["state", "totals", "--at", "9"]) == 2
    assert "epoch 9 is not known; the nearest known is 3" in capsys.readouterr().err


def test_a_query(stateful: Path, run_json: RunJson, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json("state", "totals", "--sql", "select sum(n)::bigint as n, max(k) as k from state")
    assert (found["columns"], found["rows"]) == (["n", "k"], [{"n": 18, "k": max(table(stateful.parent))}])
    assert run_command(["state", "totals", "--sql", "select n, n from state order by n desc", "--limit", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["n", "n_1"]
    for sql, told in (
        ("select * from read_csv('in/f00001.json')", "the query cannot be run"),
        ("copy state to 'stolen.csv'", "--sql takes one SELECT"),
        ("select nothing from state", "the query cannot be run"),
    ):
        assert run_command(["state", "totals", "--sql", sql]) == 2
        assert told in capsys.readouterr().err
    assert not (stateful.parent / "stolen.csv").exists()
    assert run_command(["state", "totals", "--sql", "select 1", "--key", "a"]) == 2


def test_an_export(stateful: Path, run_json: RunJson, capsys: pytest.CaptureFixture[str]) -> None:
    expected = table(stateful.parent)
    found = run_json("state", "totals", "--export", "totals.parquet")
    assert (found["exported"], found["path"]) == (len(expected), "totals.parquet")
    rows = pq.read_table("totals.parquet").to_pylist()
    assert {row["k"]: (row["n"], row["total"]) for row in rows} == expected
    key = next(iter(expected))
    assert run_json("state", "totals", "--key", key, "--export", "one.parquet")["exported"] == 1
    assert run_command(["state", "totals", "--export", "totals.parquet"]) == 2
    assert "is there already" in capsys.readouterr().err


def test_wrong_words(stateful: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, told, hint in (
        (["total"], "has no operator 'total' that keeps state", "Did you mean 'totals'?"),
        ([], "name the operator", "Stateful operators: totals, minutes"),
        ([str(stateful)], "name the operator", "Stateful operators: totals, minutes"),
        (["a", "b", "c"], "one operator, and at most one spec", "firnline state totals -f SPEC"),
    ):
        assert run_command(["state", *words]) == 2
        error, hinted = capsys.readouterr().err.splitlines()
        assert told in error
        assert hint in hinted


def test_the_spec_stands_after_the_operator_or_before_it_or_is_an_option(stateful: Path, run_json: RunJson) -> None:
    forms = (["totals"], ["totals", "firnline.yml"], ["firnline.yml", "totals"], ["totals", "-f", "."], ["totals", "."])
    answers = [run_json("state", *words) for words in (*forms, ["--spec", str(stateful), "totals"])]
    assert all(answer == answers[0] for answer in answers)


def test_looking_changes_nothing(stateful: Path, run_json: RunJson) -> None:
    before = sorted(stateful.parent.rglob("*"))
    run_json("state", "totals")
    run_json("state", "minutes", "--sql", "select count(*) from state")
    assert sorted(stateful.parent.rglob("*")) == before


# -- rescale ----------------------------------------------------------------------------------------------


def test_a_rescale_is_shown_then_done_then_found_done(
    stateful: Path, run_json: RunJson, capsys: pytest.CaptureFixture[str]
) -> None:
    version = DeltaTable(str(stateful.parent / "out")).version()
    now = run_json("rescale", "--shards", "5", "--dry-run")
    assert (now["done"], now["already"], now["shards"]) == (False, False, 5)
    assert set(now["operators"]) == {"totals", "minutes"}
    assert run_json("rescale", "--shards", "5", "--yes", "--dry-run")["done"] is False
    assert run_command(["rescale", "--shards", "5", "--dry-run"]) == 0
    assert capsys.readouterr().out.endswith("nothing was changed; add --yes to do it\n")
    assert DeltaTable(str(stateful.parent / "out")).version() == version
    done = run_json("rescale", "--shards", "5", "--yes")
    assert (done["done"], done["epoch"], done["new_epoch"]) == (True, 3, 4)
    assert run_json("state", "totals")["shards"] == 5
    assert run_command(["rescale", "--shards", "5", "--yes"]) == 0
    assert capsys.readouterr().out.endswith("there are 5 shards already; nothing to do\n")
    kinds = [row["kind"] for row in run_json("checkpoints")["checkpoints"]]
    assert kinds == ["rescale", "epoch", "epoch", "epoch"]
    assert '"what": "rescale"' in json.dumps(run_json("checkpoints", "--audit"))
    assert run_command(["checkpoints", "diff", "3", "4"]) == 0
    assert "epoch 4 was a rescale" in capsys.readouterr().out


def test_a_rescale_against_the_spec_is_refused(stateful: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stateful.write_text(SPEC + "state: {shards: 2}\n")
    assert run_command(["rescale", "--shards", "4", "--yes"]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert "the spec sets state.shards to 2" in error
    assert hint == "Try: Set state.shards: 4 in the spec: the next run does it by itself."


def test_a_rescale_without_state_is_refused(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["rescale", "--shards", "4"]) == 2
    assert "has no stateful operator" in capsys.readouterr().err
    assert run_command(["rescale", "--shards", "0"]) == 2


def test_every_kind_of_value_can_be_shown(stateful: Path, run_json: RunJson, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    sql = (
        "select window_start, window_start::date as day, 1.5::decimal(4,2) as price, '\\xAA'::blob as raw, "
        "'nan'::double as none, [1, 2] as list, {'a': 1} as struct, interval 1 hour as span, true as yes, "
        "null as nothing, time '01:02:03' as clock from state order by 1 limit 1"
    )
    row = run_json("state", "minutes", "--sql", sql)["rows"][0]
    assert row.pop("window_start").startswith("2026-01-01T00:0")
    assert row == {
        "day": "2026-01-01",
        "price": "1.50",
        "raw": "aa",
        "none": "nan",
        "list": [1, 2],
        "struct": {"a": 1},
        "span": 3600.0,
        "yes": True,
        "nothing": None,
        "clock": "01:02:03",
    }
    assert run_command(["state", "minutes", "--sql", sql]) == 0
