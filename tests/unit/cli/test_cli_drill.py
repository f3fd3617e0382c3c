"""The drill's refusals and the counters that demo and drill rely on."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from firnline.cli.chaos import LogWatch
from firnline.cli.counting import active_files, count_by_file, count_ids, count_lines
from firnline.cli.demo_data import write_flights
from firnline.cli.main import run_command
from firnline.storage import open_storage
from firnline.testing.samples import SampleInput, pack


@pytest.mark.parametrize("table", ["out", "out/below", ".", "in/below"])
def test_the_drill_refuses_what_the_spec_reads_and_writes(
    finished: Path, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(finished.parent.rglob("*"))
    assert run_command(["drill", "--table", table]) == 2
    assert "overlaps the spec's" in capsys.readouterr().err
    assert sorted(finished.parent.rglob("*")) == before


def test_the_drill_refuses_a_folder_that_holds_something(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (spec.parent / "other").mkdir()
    (spec.parent / "other" / "x").touch()
    assert run_command(["drill", "--table", "other"]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_the_demo_refuses_a_folder_that_is_not_its_own(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["demo", "--folder", "."]) == 2
    assert "was not made by a demo" in capsys.readouterr().err


def test_demo_records_are_json_with_ids_of_their_own(tmp_path: Path) -> None:
    write_flights(tmp_path / "in", 1000, 7)
    files = sorted((tmp_path / "in").iterdir())
    assert len(files) == 7
    storage = open_storage(str(tmp_path / "in"))
    assert sum(count_lines(storage, str(f)) for f in files) == 1000
    ids = [json.loads(line)["id"] for f in files for line in gzip.decompress(f.read_bytes()).splitlines()]
    assert ids == list(range(1000))


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_lines_that_are_not_blank_are_counted(tmp_path: Path, suffix: str) -> None:
    data = b"\xef\xbb\xbf{}\r\n\r\n  \t\n{bad\n" + b'{"a":1}' * 300_000 + b"\n{}"
    path = tmp_path / f"x.json{suffix}"
    path.write_bytes(pack(path.name, data) + (pack(path.name, b"\n{}\n") if suffix else b"\n{}\n"))
    assert count_lines(open_storage(str(tmp_path)), str(path)) == 5


def test_lost_and_doubled_ids_are_found(tmp_path: Path) -> None:
    import pyarrow as pa
    from deltalake import write_deltalake

    (tmp_path / "a.json").write_text("".join(f'{{"id": {n}}}\n' for n in range(10)))
    write_deltalake(str(tmp_path / "t"), pa.table({"id": [0, 1, 2, 3, 4, 5, 6, 7, 7, 7]}))
    found = count_ids(str(tmp_path / "t"), [str(tmp_path / "a.json")])
    assert found == {"records_in": 10, "records_out": 10, "distinct_ids": 8, "lost": 2, "doubled": 2}
    assert len(active_files(str(tmp_path / "t"))) == 1


def test_rows_are_counted_by_file(spec: Path, sample: SampleInput) -> None:
    from firnline.spec.build import load_options
    from firnline.testing.pipelines import run_once

    options = load_options(spec, environ={"FIRNLINE__SOURCES__flights__LINEAGE": "true"})
    assert run_once(options).exit_code == 0
    names = {Path(path).name: counts for path, counts in count_by_file(str(spec.parent / "out")).items()}
    assert names == {"a1.json.gz": (5, 5), "a2.json.gz": (5, 5), "b2.json": (5, 5)}


def test_epochs_are_read_from_the_delta_log_itself(finished: Path) -> None:
    watch = LogWatch(finished.parent / "out", "flights")
    assert (watch.look(), watch.uncommitted()) == (2, 0)
    (finished.parent / "out" / "orphan.parquet").touch()
    assert (watch.look(), watch.uncommitted()) == (2, 1)
    assert LogWatch(finished.parent / "out", "other").look() == 0
    assert LogWatch(finished.parent / "nowhere", "flights").look() == 0
