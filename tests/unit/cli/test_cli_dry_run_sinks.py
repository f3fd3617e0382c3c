"""`dry-run` of a pipeline with several sinks: who decides, what each guarantees, and whether it can be used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from firnline.cli.dry_run_preview import preview
from firnline.cli.main import run_command
from firnline.errors import ConfigError, SchemaError, SinkError
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from tests.support.pipelines import MakeOptions, run_once, run_to_end
from tests.support.samples import SampleInput
from tests.support.sqlite_sink import DOWN, SqliteSink, SqliteSinkOptions, register_sqlite

SECRET = "hunter2-hunter2"
NOBODY = "127.0.0.1:1"  # nothing listens there
FOLLOWERS = f"""\
  - {{name: db, type: postgres, dsn: "postgresql://app:{SECRET}@{NOBODY}/shop", table: orders, required: false}}
  - {{name: words, type: postgres, dsn: "host=127.0.0.1 port=1 user=app password={SECRET}", table: o, required: false}}
  - {{name: cache, type: redis, url: "redis://app:{SECRET}@{NOBODY}/0", stream: orders, required: false}}
  - name: topic
    type: kafka
    brokers: ["{NOBODY}"]
    topic: orders
    key: [id]
    lanes: 2
    sasl: {{mechanism: PLAIN, username: app, password: "{SECRET}"}}
    required: false
"""
SPEC = """\
name: orders
sources:
  orders: {path: in, min_age_secs: 0}
restart: {attempts: 0}
sinks:
"""
TABLE = "  - {name: table, table: lake}\n"


@pytest.fixture
def spec(tmp_path: Path, sample: SampleInput, monkeypatch: pytest.MonkeyPatch) -> Path:
    sample.add("a1.json.gz", 5)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("firnline.sinks.kafka.cluster.CALL_SECONDS", 0.5)
    return tmp_path / "firnline.yml"


@pytest.mark.usefixtures("no_spark")
def test_each_sink_says_what_it_guarantees_and_a_sink_that_is_away_is_named(
    spec: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spec.write_text(SPEC + TABLE + FOLLOWERS)
    assert run_command(["dry-run", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    sinks = {sink["name"]: sink for sink in found["sinks"]}
    assert [name for name, sink in sinks.items() if sink["decides"]] == ["table"]
    assert {name: sink["guarantee"].partition(":")[0] for name, sink in sinks.items()} == {
        "table": "exactly once",
        "db": "exactly once",
        "words": "exactly once",
        "cache": "exactly once per script",
        "topic": "exactly once per lane",
    }
    assert [name for name, sink in sinks.items() if sink["reachable"]] == ["table"]
    warned = [words for words in found["warnings"] if "its rows would wait" in words]
    assert [words.split()[3] for words in warned] == ["db", "words", "cache", "topic"]
    assert run_command(["dry-run"]) == 0
    shown = capfd.readouterr().out
    assert "decides      sink table; the others follow it" in shown
    assert "exactly once per lane: each lane has its rows" in shown


def test_without_a_table_the_journal_decides(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_sqlite(monkeypatch)
    sample.add("f1.json", 10)
    options = make_options(sinks=(SqliteSinkOptions("copy", str(tmp_path / "copy.db")),), home=tmp_path / "home")
    found = preview(open_pipeline(options))
    assert found["journal"]["table"] == str(tmp_path / "home")
    assert [(s["decides"], s["epoch"], s["reachable"]) for s in found["sinks"]] == [(False, 0, True)]
    run_to_end(options)
    assert [s["epoch"] for s in preview(open_pipeline(options))["sinks"]] == [1]
    (tmp_path / f"copy.db{DOWN}").touch()
    with pytest.raises(SinkError, match="sink 'copy'"):
        preview(open_pipeline(options))


@pytest.mark.usefixtures("no_spark")
def test_secrets_of_followers_appear_nowhere(spec: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spec.write_text(SPEC + TABLE + FOLLOWERS)
    shown = ""
    for command in (
        ["dry-run"], ["dry-run", "--json"], ["run", "--once", "--log-format", "json"], ["status"], ["status", "--json"],
        ["sinks", "list"], ["sinks", "list", "--json"], ["checkpoints", "show", "1", "--json"],
        ["sinks", "resume", "db", "--accept-gap", "--dry-run"], ["rollback", "--to", "1", "--dry-run"],
    ):  # fmt: skip
        run_command([*command, "--debug"])
        answer = capfd.readouterr()
        shown += answer.out + answer.err
    assert run_command(["gc", "--dry-run", "--json"]) == 0
    answer = capfd.readouterr()
    assert json.loads(answer.out)["outbox"]["files"] > 0, "rows wait for the four"
    shown += answer.out + answer.err
    for name in ("db", "words", "cache", "topic"):  # a required sink that is away ends the command with an error
        lines = [line.replace("required: false", "required: true") for line in FOLLOWERS.splitlines(keepends=True)]
        start = next(number for number, line in enumerate(lines) if f"name: {name}" in line)
        kept = lines[start:] if name == "topic" else lines[start : start + 1]
        spec.write_text(SPEC.replace("name: orders", f"name: of-{name}") + TABLE.replace("lake", name) + "".join(kept))
        assert run_command(["dry-run", "--debug"]) == 3
        answer = capfd.readouterr()
        assert name in answer.err
        shown += answer.out + answer.err
    assert "cannot be used" in shown
    assert "cannot be read" in shown, "in the list of sinks"
    assert SECRET not in shown
    written = [path for path in spec.parent.rglob("*") if path.is_file() and path != spec]
    assert any("ledger" in str(path) for path in written)
    assert any("outbox" in str(path) for path in written)
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []


def test_a_new_sink_says_what_it_gets_first(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_sqlite(monkeypatch)
    sample.add("a.json", 5)
    alone = make_options()
    run_to_end(alone)
    for settings, words in (
        ({"start": "beginning"}, "every epoch since the first, made again from the input"),
        (
            {"copy_from": "delta"},
            "a copy of the rows of delta, then every later epoch; the order of rows per key is lost",
        ),
        ({}, None),
    ):
        copy = SqliteSinkOptions("copy", str(tmp_path / "copy.db"), **settings)  # type: ignore[arg-type]
        found = preview(open_pipeline(replace(alone, sinks=(*alone.sinks, copy))))["sinks"]
        filled = next(sink["filled"] for sink in found if sink["name"] == "copy")
        assert filled is None if words is None else words in filled
    (sample.folder / "a.json").unlink()
    copy = SqliteSinkOptions("copy", str(tmp_path / "copy.db"), start="beginning")
    with pytest.raises(ConfigError, match="can no longer be read"):
        preview(open_pipeline(replace(alone, sinks=(*alone.sinks, copy))))


def test_a_follower_is_shown_with_the_columns_that_it_gets_and_its_names_are_checked(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_sqlite(monkeypatch)
    sample.add("f1.json", 10)
    table = DeltaSinkOptions("table", str(tmp_path / "table"))

    def look(**settings: object) -> dict[str, Any]:
        copy = SqliteSinkOptions("copy", str(tmp_path / "copy.db"), **settings)  # type: ignore[arg-type]
        return preview(open_pipeline(make_options(sinks=(table, copy))))

    found = look(columns=("id", "mnoth"), mask={"id": "hash"})
    assert [column["name"] for column in found["tables"][1]["columns"]] == ["id"]
    assert found["warnings"] == [
        "columns of sink copy names 'mnoth', and its rows have no such column: nothing is delivered for it"
        " (did you mean 'month'?)"
    ]
    with pytest.raises(SchemaError, match="sink 'copy': where: the condition 'idd > 1' does not fit the rows"):
        look(where="idd > 1")
    with pytest.raises(SchemaError, match="sink 'copy': key names the column 'idd'"):
        look(key=("idd",))


def test_the_columns_of_a_follower_s_target_do_not_change_those_of_the_rows(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_sqlite(monkeypatch)
    sample.add("f1.json", 10)
    copy = SqliteSinkOptions("copy", str(tmp_path / "copy.db"))
    options = make_options(sinks=(DeltaSinkOptions("table", str(tmp_path / "table")), copy))
    monkeypatch.setattr(SqliteSink, "find_schema", lambda _: pa.schema([("id", pa.int8()), ("v", pa.int8())]))
    found = preview(open_pipeline(options))
    assert {column["name"]: column["type"] for column in found["schema"]} == {
        "id": "int64",
        "month": "string",
        "v": "float64",
    }
    assert found["warnings"] == []


def test_data_files_of_a_run_that_failed_before_its_first_commit_are_no_other_things(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_sqlite(monkeypatch)
    sample.add("f1.json", 10)
    copy = SqliteSinkOptions("copy", str(tmp_path / "copy.db"), where="idd > 1")
    options = make_options(sinks=(DeltaSinkOptions("table", str(tmp_path / "table")), copy))
    assert run_once(options).exit_code == 1
    assert list((tmp_path / "table").glob("*.parquet"))
    corrected = replace(options, sinks=(options.sinks[0], replace(copy, where="")))
    assert preview(open_pipeline(corrected))["warnings"] == []
    (tmp_path / "table" / "mine.csv").touch()
    (warning,) = preview(open_pipeline(corrected))["warnings"]
    assert "beside mine.csv" in warning
