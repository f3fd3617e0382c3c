"""`firnline dry-run`: what it samples, and what it warns of."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from firnline.cli.main import run_command
from firnline.sources.sample import SAMPLE_FILES, spread

SPEC = """
name: demo
sources:
  shop: {type: files, path: in, min_age_secs: 0%s}
sinks:
  - {name: lake, type: delta, table: out%s}
batch: {max_files: 2}
"""


class Shop:
    """A folder with a spec, and input files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "in").mkdir()
        self.write_spec()

    def write_spec(self, source: str = "", sink: str = "") -> None:
        (self.folder / "firnline.yml").write_text(SPEC % (source, sink))

    def add(self, *files: list[dict[str, Any]]) -> None:
        for number, records in enumerate(files):
            text = "".join(json.dumps(record) + "\n" for record in records)
            (self.folder / "in" / f"{number:04}.json").write_text(text)


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    monkeypatch.chdir(tmp_path)
    return Shop(tmp_path)


def test_a_sample_has_the_first_the_last_and_files_between() -> None:
    assert spread(3, 50) == [0, 1, 2]
    chosen = spread(1000, 50)
    assert (chosen[0], chosen[-1], len(chosen)) == (0, 999, 50)
    assert max(b - a for a, b in itertools.pairwise(chosen)) <= 21


def test_files_after_the_first_epoch_are_sampled_too(shop: Shop, run_json: Any) -> None:
    shop.add(*([{"price": 1}] for _ in range(2)), *([{"price": 1.5, "extra": "x"}] for _ in range(100)))
    found = run_json("dry-run")
    assert found["sample"]["files"] == 2 + SAMPLE_FILES
    assert (found["sample"]["of_files"], found["sample"]["complete"]) == (102, False)
    assert found["sample"]["first_epoch_complete"]
    assert [(c["name"], c["type"]) for c in found["schema"]] == [("price", "int64")]
    assert "later files add the column extra (string)" in found["warnings"]


def test_a_column_that_the_run_would_widen_is_shown(
    shop: Shop, run_json: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    write_deltalake(str(shop.folder / "out"), pa.table({"price": pa.array([1, 2], pa.int64())}))
    shop.add([{"price": 1.5}])
    (column,) = run_json("dry-run")["schema"]
    assert (column["type"], column["origin"], column["widened_from"]) == ("float64", "table", "int64")
    assert run_command(["dry-run"]) == 0
    assert "table, was int64" in capsys.readouterr().out


def test_a_partition_column_that_no_record_has_is_warned_of(shop: Shop, run_json: Any) -> None:
    shop.write_spec(sink=", partition_by: [region]")
    shop.add([{"price": 1}])
    assert any("no sampled record has region" in warning for warning in run_json("dry-run")["warnings"])
    shop.add([{"price": 1, "region": "north"}])
    assert not any("region" in warning for warning in run_json("dry-run")["warnings"])


def test_a_table_folder_with_other_things_is_warned_of(shop: Shop, run_json: Any) -> None:
    shop.add([{"price": 1}])
    (shop.folder / "out").mkdir()
    assert run_json("dry-run")["warnings"] == []
    (shop.folder / "out" / "notes.txt").write_text("mine")
    (warning,) = run_json("dry-run")["warnings"]
    assert "is no Delta table, and not empty" in warning
    assert "beside notes.txt" in warning


def test_a_declared_type_that_the_table_refuses_ends_the_dry_run(
    shop: Shop, capsys: pytest.CaptureFixture[str]
) -> None:
    write_deltalake(str(shop.folder / "out"), pa.table({"price": ["one"]}))
    shop.write_spec(source=", schema: {fields: [{name: price, type: int64}]}")
    shop.add([{"price": 1}])
    assert run_command(["dry-run"]) == 1
    assert "column price is string in the table, but int64 in the data" in capsys.readouterr().err


@pytest.mark.parametrize("columns", ["80", "60"])
def test_the_screen_fits(
    shop: Shop, columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    shop.add([{"at": "2024-05-01T12:30:00Z"}] * 30 + [{"at": "soon"}], *([{"x": 1}] for _ in range(9)))
    assert run_command(["dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "sampled 10 of 10 files" in shown
    assert max(map(len, shown.splitlines())) <= int(columns)


def test_tables_with_other_columns_are_shown_each(
    shop: Shop, run_json: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (shop.folder / "users").mkdir()
    (shop.folder / "users" / "1.json").write_text('{"email": "a@example.com"}\n')
    (shop.folder / "firnline.yml").write_text(
        "name: demo\nsources:\n  shop: {path: in, min_age_secs: 0}\n  users: {path: users, min_age_secs: 0}\n"
        "sinks:\n  - {name: lake, table: out, input: shop}\n  - {name: copy, table: copy, input: shop}\n"
        "  - {name: people, table: people, input: users}\n"
    )
    shop.add([{"price": 1}])
    found = run_json("dry-run")
    names = {table["sink"]: [column["name"] for column in table["columns"]] for table in found["tables"]}
    assert names == {"lake": ["price"], "copy": ["price"], "people": ["email"]}
    assert [column["name"] for column in found["schema"]] == ["price"]
    assert run_command(["dry-run"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("columns of lake, copy:") < shown.index("price ") < shown.index("columns of people:")
    assert "email " in shown[shown.index("columns of people:") :]


def test_tables_with_the_same_columns_are_shown_once(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    shop.write_spec(sink="}\n  - {name: copy, type: delta, table: copy")
    shop.add([{"price": 1}])
    assert run_command(["dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "columns of" not in shown
    assert shown.count("int64") == 1
