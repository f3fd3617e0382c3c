"""The drill's refusals and the counters that demo and drill rely on."""

from __future__ import annotations

import gzip
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from firnline.cli.demo import write_flights
from firnline.cli.kill_and_count import LogWatch, active_files, compare_rows, count_by_file, count_ids, count_lines
from firnline.cli.main import run_command
from firnline.spec.build import load_options
from firnline.storage import open_storage
from tests.support.commands import run_plainly
from tests.support.pipelines import run_once
from tests.support.processes import Launcher
from tests.support.samples import SampleInput, pack

COPIES = """\
checkpoint:
  store: {type: file, path: own/store}
  local: {path: own/local, interval_ms: 1}
  remote: {uri: own/remote, interval_ms: 1}
batch: {max_files: 40}
"""
TWO_SOURCES = """\
name: flights
sources:
  one: {type: files, path: in/a*}
  two: {type: files, path: in/b*}
sinks:
  - {type: delta, table: out, input: one, mode: staged}
  - {type: delta, table: more, input: two, mode: staged}
"""
JOURNAL = TWO_SOURCES.replace("mode: staged", "required: false")
OPERATORS = """\
name: flights
sources:
  flights: {type: files, path: in}
operators:
  - name: months
    type: aggregate
    inputs: [flights]
    keys: [month]
    aggregates: [{name: n, function: count}, {name: total, function: sum, column: v}]
sinks:
  - {type: delta, table: out, input: months, write: upsert}
  - {type: delta, table: more, input: flights}
"""


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
    options = load_options(spec, environ={"FIRNLINE__SOURCES__flights__LINEAGE": "true"})
    assert run_once(options).exit_code == 0
    names = {Path(path).name: counts for path, counts in count_by_file(str(spec.parent / "out")).items()}
    assert names == {"a1.json.gz": (5, 5), "a2.json.gz": (5, 5), "b2.json": (5, 5)}


def test_epochs_are_read_from_the_delta_log_itself(finished: Path) -> None:
    watch = LogWatch(finished.parent / "out", "flights")
    assert (watch.read_epoch(), watch.uncommitted()) == (2, 0)
    (finished.parent / "out" / "orphan.parquet").touch()
    assert (watch.read_epoch(), watch.uncommitted()) == (2, 1)
    assert LogWatch(finished.parent / "out", "other").read_epoch() == 0
    assert LogWatch(finished.parent / "nowhere", "flights").read_epoch() == 0


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drill's processes work without Spark, and the first one hangs until it is killed."""

    def command(*arguments: object) -> list[str]:
        code = "from tests.support.commands import drill_child; drill_child()"
        return [sys.executable, "-c", code, *map(str, arguments)]

    monkeypatch.setattr("firnline.cli.drill.child_command", command)


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder below a folder, byte by byte."""
    return {str(p): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@pytest.mark.usefixtures("no_spark")
@pytest.mark.parametrize(
    "text",
    [TWO_SOURCES, JOURNAL, OPERATORS],
    ids=["two sources, staged sinks", "two sources, a journal decides", "operators"],
)
def test_a_drill_changes_nothing_of_the_pipeline(
    text: str, tmp_path: Path, sample: SampleInput, run_json: Callable[..., Any]
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    spec = project / "firnline.yml"
    spec.write_text(text.replace("path: in", f"path: {sample.folder}") + COPIES)
    for number in range(8):
        sample.add(f"a{number}.json", 20, bad=1)
        sample.add(f"b{number}.json", 20)
    assert run_once(load_options(spec, environ={})).exit_code == 0
    before = contents(tmp_path)
    scratch = tmp_path / "scratch"
    found = run_json("drill", str(spec), "--table", str(scratch), "--kills", "1", "--seed", "3")
    assert (found["kills"], found["lost"], found["doubled"]) == (1, 0, 0)
    assert {p: data for p, data in contents(tmp_path).items() if not p.startswith(str(scratch))} == before
    if text != OPERATORS:
        rows = sorted((Path(f["path"]).name, f["rows"], f["quarantined"]) for f in found["files"])
        assert rows == [(f"{k}{n}.json", 20, k == "a") for k in "ab" for n in range(8)]
    else:
        assert [(s["name"], s["rows"], s["expected"]) for s in found["sinks"]] == [
            ("delta-1", 3, 3),
            ("delta-2", 320, 320),
        ]
    sample.add("c.json", 5)
    assert run_once(load_options(spec, environ={})).exit_code == 0


@pytest.mark.usefixtures("no_spark")
def test_a_drill_beside_a_live_run_takes_nothing_from_it(
    spec: Path, sample: SampleInput, run_json: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        sample.add(f"c{number}.json", 5)
    live = Launcher(tmp_path / "children", run_plainly).start(load_options(spec, environ={}), once=False)
    live.wait_for("epoch 6 committed")
    monkeypatch.setenv("FIRNLINE_METRICS_PORT", "1")  # the live run's own
    found = run_json("drill", "--table", "scratch", "--kills", "1")
    assert (found["kills"], found["lost"], found["doubled"]) == (1, 0, 0)
    assert live.is_alive
    live.signal(signal.SIGTERM)
    assert live.wait().exit_code == 0
    assert LogWatch(tmp_path / "out", "flights").read_epoch() == 6


def test_rows_of_two_tables_are_compared(tmp_path: Path) -> None:
    import pyarrow as pa
    from deltalake import write_deltalake

    write_deltalake(str(tmp_path / "a"), pa.table({"p": ["x", "y"], "v": [0.1 + 0.2, 1.0]}), partition_by=["p"])
    write_deltalake(str(tmp_path / "b"), pa.table({"p": ["x", "z"], "v": [0.3, 1.0]}))
    found = compare_rows(str(tmp_path / "a"), str(tmp_path / "b"))
    assert found == {"rows": 2, "expected": 2, "lost": 1, "doubled": 1}
    found = compare_rows(str(tmp_path / "nowhere"), str(tmp_path / "b"))
    assert found == {"rows": 0, "expected": 2, "lost": 2, "doubled": 0}
