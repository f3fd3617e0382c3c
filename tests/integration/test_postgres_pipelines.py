"""Pipelines into PostgreSQL: files, a Delta table or a journal that decides, and tables read by SQL."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from firnline.errors import RollbackRefusedError
from firnline.history.dead_letters import load_dead_letters
from firnline.history.edits.dead_letters import LetterEdit
from firnline.history.edits.rollback import Rollback
from firnline.history.edits.sinks import SinkEdit
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.postgres.options import PostgresSinkOptions
from tests.support.pipelines import MakeOptions, pipeline_options, run_once, run_to_end
from tests.support.postgres import PostgresServer
from tests.support.postgres_sink import TABLE, execute, postgres_ids, table_rows
from tests.support.samples import SampleInput, table_ids


def test_a_journal_decides_and_every_row_arrives_once(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, postgres: str
) -> None:
    options = make_options(max_files=1, home=tmp_path / "home", sinks=(PostgresSinkOptions("copy", postgres, TABLE),))
    for number in (1, 2, 3):
        sample.add(f"f{number}.json", 350)
        run_to_end(options)
    assert postgres_ids(postgres, TABLE) == sample.ids


def test_an_optional_table_catches_up_after_an_outage(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, postgres_server: PostgresServer
) -> None:
    copy = PostgresSinkOptions("copy", postgres_server.dsn, TABLE, required=False)
    options = make_options(max_files=1, sinks=(DeltaSinkOptions("table", str(tmp_path / "table")), copy))
    sample.add("f0.json", 10)
    run_to_end(options)
    postgres_server.stop()
    for number in (1, 2):
        sample.add(f"f{number}.json", 10)
        run_to_end(options)
    assert table_ids(tmp_path / "table") == sample.ids
    postgres_server.start()
    run_to_end(options)
    assert postgres_ids(postgres_server.dsn, TABLE) == sample.ids


def test_records_are_upserted_as_in_the_delta_table(tmp_path: Path, postgres: str) -> None:
    """Both sinks apply the same records; `columns` leaves some out, and deletes still count."""
    (tmp_path / "in").mkdir()
    settings = {"write": "upsert", "key": ("id",), "sequence_by": "at", "delete_when": {"op": ("D",)}}
    options = pipeline_options(
        str(tmp_path / "in" / "*.json"),
        str(tmp_path / "table"),
        max_files=1,
        sinks=(
            DeltaSinkOptions("table", str(tmp_path / "table"), **settings),  # type: ignore[arg-type]
            PostgresSinkOptions("copy", postgres, TABLE, columns=("id", "at", "op", "v"), **settings),  # type: ignore[arg-type]
        ),
    )
    epochs = [
        [(1, 1, "I", "a"), (2, 1, "I", "b"), (3, 1, "I", "c"), (1, 3, "U", "d"), (1, 2, "U", "late")],
        [(2, 2, "D", ""), (3, 0, "D", ""), (4, 1, "I", "e"), (4, 2, "D", "")],
        [(1, 2, "U", "older"), (2, 1, "I", "again"), (3, 5, "U", "f")],
    ]
    for number, records in enumerate(epochs):
        lines = [json.dumps(dict(zip(("id", "at", "op", "v"), one, strict=True)) | {"w": 1}) for one in records]
        (tmp_path / "in" / f"{number}.json").write_text("\n".join(lines) + "\n")
        run_to_end(options)
    expected = {1: "d", 2: "again", 3: "f"}
    assert {row["id"]: row["v"] for row in table_rows(postgres, TABLE)} == expected
    assert "w" not in table_rows(postgres, TABLE)[0]
    assert table_ids(tmp_path / "table") == Counter(expected.keys())


def test_a_rollback_takes_both_tables_back_or_none(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, postgres: str
) -> None:
    delta, copy = DeltaSinkOptions("table", str(tmp_path / "table")), PostgresSinkOptions("copy", postgres, TABLE)
    options = make_options(max_files=1, sinks=(delta, copy))
    for number in (1, 2, 3):
        sample.add(f"f{number}.json", 3)
        run_to_end(options)
    Rollback(open_pipeline(options), 1).perform("person")
    assert postgres_ids(postgres, TABLE) == table_ids(tmp_path / "table") == Counter([1, 2, 3])
    run_to_end(options)
    assert postgres_ids(postgres, TABLE) == table_ids(tmp_path / "table") == sample.ids
    execute(postgres, "ALTER TABLE lake.events DROP COLUMN _firnline_epoch")
    with pytest.raises(RollbackRefusedError, match="do not say which epoch"):
        Rollback(open_pipeline(options), 1).perform("person")
    assert table_ids(tmp_path / "table") == sample.ids
    Rollback(open_pipeline(options), 1, leave=["copy"]).perform("person")
    assert run_once(options).exit_code == 0


@pytest.mark.parametrize("is_left", [False, True])
def test_a_rollback_that_takes_a_retry_back_opens_its_letters(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, postgres: str, is_left: bool
) -> None:
    delta = DeltaSinkOptions("table", str(tmp_path / "table"))
    copy = PostgresSinkOptions("copy", postgres, TABLE, on_bad_row="dead_letter")
    other = PostgresSinkOptions("other", postgres, "lake.other")
    options = make_options(max_files=1, sinks=(delta, copy, other))
    execute(postgres, "CREATE SCHEMA lake")
    execute(
        postgres, f"CREATE TABLE {TABLE} (id bigint CONSTRAINT odd CHECK (id NOT IN (3, 12)), _firnline_epoch bigint)"
    )

    def opened() -> list[tuple[int, int]]:
        return [(one["epoch"], one["values"]["id"]) for one in load_dead_letters(open_pipeline(options))]

    sample.add("f1.json", 10)
    run_to_end(options)
    sample.add("f2.json", 10)
    run_to_end(options)
    assert opened() == [(1, 3), (2, 12)]
    execute(postgres, f"ALTER TABLE {TABLE} DROP CONSTRAINT odd")
    LetterEdit(open_pipeline(options), "retry").perform("person")
    run_to_end(options)
    assert opened() == []
    assert postgres_ids(postgres, TABLE) == sample.ids
    Rollback(open_pipeline(options), 1, leave=["other"] if is_left else []).perform("person")
    assert opened() == [(1, 3)], "the input of epoch 2 is read again"
    run_to_end(options)
    assert postgres_ids(postgres, TABLE) == sample.ids - Counter([3])
    LetterEdit(open_pipeline(options), "retry").perform("person")
    run_to_end(options)
    assert opened() == []
    assert postgres_ids(postgres, TABLE) == sample.ids


def test_a_wrong_password_is_an_error_without_the_password(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, postgres_server: PostgresServer
) -> None:
    dsn = f"postgresql://firnline:not-the-pass@127.0.0.1:{postgres_server.port}/postgres"
    delta = DeltaSinkOptions("table", str(tmp_path / "table"))
    sample.add("f1.json", 3)
    result = run_once(make_options(max_files=1, sinks=(delta, PostgresSinkOptions("copy", dsn, TABLE))))
    assert result.exit_code == 3
    assert "sink 'copy' at postgresql://127.0.0.1" in str(result.result.error)
    assert "not-the-pass" not in str(result.result.error)


def test_a_copy_takes_the_place_of_the_rows_that_the_sink_wrote(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, postgres: str
) -> None:
    table = DeltaSinkOptions("table", str(tmp_path / "table"))
    options = make_options(max_files=1, sinks=(table, PostgresSinkOptions("copy", postgres, TABLE)))
    for number in (1, 2):
        sample.add(f"f{number}.json", 30)
        run_to_end(options)
    execute(postgres, f"INSERT INTO {TABLE} (id) VALUES (-1)")  # of somebody else
    plan, _ = SinkEdit(open_pipeline(options), "resync", "copy").perform("person")
    assert plan.removes_rows
    assert postgres_ids(postgres, TABLE) == sample.ids + Counter([-1]), "nothing happens before the next run"
    sample.add("f3.json", 30)
    run_to_end(options)
    assert postgres_ids(postgres, TABLE) == sample.ids + Counter([-1])
    with pytest.raises(RollbackRefusedError, match="a rollback or a copy removed the rows of epochs 1 to 2"):
        Rollback(open_pipeline(options), 1).perform("person")
    Rollback(open_pipeline(options), 3).perform("person")
    run_to_end(options)
    assert postgres_ids(postgres, TABLE) == sample.ids + Counter([-1])


def test_a_copy_into_a_table_whose_rows_cannot_be_told_is_refused(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, postgres: str
) -> None:
    execute(postgres, "CREATE SCHEMA lake")
    execute(postgres, f"CREATE TABLE {TABLE} (id bigint, month text, v double precision)")
    table = DeltaSinkOptions("table", str(tmp_path / "table"))
    copy = PostgresSinkOptions("copy", postgres, TABLE, evolution="fail")
    options = make_options(max_files=1, sinks=(table, copy))
    sample.add("f1.json", 30)
    run_to_end(options)
    SinkEdit(open_pipeline(options), "resync", "copy").perform("person")
    result = run_once(options).result
    assert result.error is not None
    assert "cannot be told and removed" in result.error.message
    assert postgres_ids(postgres, TABLE) == sample.ids
    execute(postgres, f"TRUNCATE {TABLE}")
    run_to_end(options)
    assert postgres_ids(postgres, TABLE) == sample.ids


@pytest.mark.parametrize("settings", [{"start": "beginning"}, {"copy_from": "table"}], ids=["beginning", "copy"])
def test_a_new_table_is_filled(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, postgres: str, settings: dict[str, str]
) -> None:
    table = DeltaSinkOptions("table", str(tmp_path / "table"))
    alone = make_options(max_files=1, sinks=(table,))
    for number in (1, 2, 3):
        sample.add(f"f{number}.json", 30)
    run_to_end(alone)
    copy = PostgresSinkOptions("copy", postgres, TABLE, **settings)  # type: ignore[arg-type]
    options = replace(alone, sinks=(table, copy))
    sample.add("f4.json", 30)
    run_to_end(options)
    assert postgres_ids(postgres, TABLE) == sample.ids


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("required", [True, False])
def test_a_lost_checkpoint_does_not_double_the_rows_that_are_there(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, postgres: str, epochs: int, required: bool
) -> None:
    copy = PostgresSinkOptions("copy", postgres, TABLE, required=required)
    options = make_options(max_files=1, sinks=(DeltaSinkOptions("table", str(tmp_path / "table")), copy))
    for number in range(epochs):
        sample.add(f"f{number}.json", 5)
        run_to_end(options)
    before = Counter(sample.ids)
    execute(postgres, "DELETE FROM firnline.checkpoints")
    sample.add("f9.json", 5)
    result = run_once(options).result
    assert postgres_ids(postgres, TABLE) == before
    assert result.exit_code == (1 if required else 0)
    execute(postgres, "DELETE FROM lake.events")  # as the hint says
    run_to_end(options)
    run_to_end(options)
    assert postgres_ids(postgres, TABLE) == table_ids(tmp_path / "table") == sample.ids
