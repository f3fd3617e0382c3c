"""The columns of a further table survive an outage at the start of a run: they are never inferred anew."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from firnline.options import PipelineOptions
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.delta.sink import DeltaSink
from firnline.sources.files.options import FileSourceOptions
from tests.support.pipelines import pipeline_options, run_once

OUTAGES = [1, 2, 100]  # calls that fail


def two_ways(folder: Path, *, required: bool) -> PipelineOptions:
    """Source a goes to the deciding table, source b to a further one."""
    for name in "ab":
        (folder / name).mkdir()
    return pipeline_options(
        "",
        str(folder / "table"),
        sources=tuple(FileSourceOptions(name=n, path=str(folder / n), poll_interval_secs=0.05) for n in "ab"),
        sinks=(
            DeltaSinkOptions("table", str(folder / "table"), input="a"),
            DeltaSinkOptions("far", str(folder / "far"), input="b", required=required),
        ),
    )


def rows(table: Path) -> list[tuple[int, float]]:
    files = str(table / "*.parquet")
    return duckdb.sql(f"select id, v from read_parquet('{files}', union_by_name=true) order by id").fetchall()


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("fails", OUTAGES)
def test_an_outage_at_the_start_changes_no_type(
    fails: int, required: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = two_ways(tmp_path, required=required)
    (tmp_path / "a" / "1.json").write_text('{"id": 1}\n')
    (tmp_path / "b" / "1.json").write_text('{"id": 1, "v": 1.5}\n')
    assert run_once(options).exit_code == 0
    real, left = DeltaSink.find_schema, [fails]

    def find_schema(sink: DeltaSink) -> object:
        if sink.name == "far" and left[0]:
            left[0] -= 1
            raise OSError("connection reset")
        return real(sink)

    monkeypatch.setattr(DeltaSink, "find_schema", find_schema)
    (tmp_path / "a" / "2.json").write_text('{"id": 2}\n')
    (tmp_path / "b" / "2.json").write_text('{"id": 2, "v": 2}\n{"id": 3, "v": 3}\n')
    ended = run_once(options)
    assert ended.exit_code == (3 if required and fails > 10 else 0), ended.result
    left[0] = 0
    assert run_once(options).exit_code == 0
    assert rows(tmp_path / "far") == [(1, 1.5), (2, 2.0), (3, 3.0)]


def test_columns_are_known_before_an_optional_table_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows wait in the outbox, with the type that the first ones had."""
    options = two_ways(tmp_path, required=False)
    real = DeltaSink.claim

    def claim(sink: DeltaSink, *given: object, **named: object) -> object:
        if sink.name == "far":
            raise OSError("no route to host")
        return real(sink, *given, **named)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(DeltaSink, "claim", claim)
        for number, value in enumerate(("1.5", "2")):
            (tmp_path / "a" / f"{number}.json").write_text(f'{{"id": {number}}}\n')
            (tmp_path / "b" / f"{number}.json").write_text(f'{{"id": {number}, "v": {value}}}\n')
            assert run_once(options).exit_code == 0
    assert run_once(options).exit_code == 0
    assert rows(tmp_path / "far") == [(0, 1.5), (1, 2.0)]
