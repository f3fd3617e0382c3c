"""A log that another tool wrote is resumed at its files and records, or refused; nothing is read twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, PostCommitHookProperties, write_deltalake

from firnline.history.status import load_files
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.delta.sink import DeltaSink
from firnline.types import Json
from tests.support.damage import write_app_id, write_blizzard
from tests.support.pipelines import MakeOptions, run_once
from tests.support.processes import Launcher
from tests.support.samples import SampleInput, table_ids

pytestmark = pytest.mark.crash

NAMINGS: dict[str, Callable[[Path, str], str]] = {
    "absolute": lambda folder, name: f"{folder}/{name}",
    "uri": lambda folder, name: f"file://{folder}/{name}",
    "relative": lambda folder, name: name,
}


class OtherTool:
    """Fills the table from the same input, as far as it is told, and notes where it stands."""

    def __init__(self, sample: SampleInput, table: Path) -> None:
        self.sample = sample
        self.table = table

    def read(self, name: str, records: int | None = None) -> None:
        lines = self.sample.path(name).read_bytes().splitlines()[:records]
        rows = [json.loads(line) for line in lines]
        write_deltalake(str(self.table), pa.Table.from_pylist(rows), mode="append", schema_mode="merge")


@pytest.fixture
def other(sample: SampleInput, tmp_path: Path) -> OtherTool:
    for name in ("a1.json", "a2.json", "b1.json", "b2.json", "c1.json"):
        sample.add(name, 5)
    tool = OtherTool(sample, tmp_path / "out")
    tool.read("a1.json")
    tool.read("a2.json")
    tool.read("b1.json", 2)
    tool.read("b2.json")
    return tool


def state(other: OtherTool, naming: str = "absolute") -> Json:
    name = NAMINGS[naming]
    folder = other.sample.folder
    return {
        "files": {name(folder, "b1.json"): {"RecordsRead": 2}, name(folder, "b2.json"): "Finished"},
        "last_committed_file": name(folder, "a2.json"),
    }


@pytest.mark.parametrize("naming", NAMINGS)
def test_resumed_at_files_and_records(other: OtherTool, make_options: MakeOptions, naming: str) -> None:
    write_blizzard(other.table, state(other, naming))
    options: PipelineOptions = make_options()
    run = run_once(options)
    assert run.exit_code == 0, run.result
    assert run.told.late == 0
    assert table_ids(other.table) == other.sample.ids
    again = run_once(options)
    assert (again.exit_code, again.result.epochs, again.told.late) == (0, 0, 0)


def test_what_lies_below_the_mark_is_a_baseline(other: OtherTool, make_options: MakeOptions) -> None:
    write_blizzard(other.table, state(other))
    options: PipelineOptions = make_options()
    assert run_once(options).exit_code == 0
    pipeline = open_pipeline(options)
    rows = {Path(r["path"]).name: r for r in load_files(pipeline)}
    assert {name for name, row in rows.items() if row["status"] == "committed"} == set(rows)
    assert {"a1.json", "a2.json"} <= set(rows)
    other.sample.add("a15.json", 4)  # after the take-over a file that comes late is late
    late = run_once(options)
    assert late.told.late == 1
    assert table_ids(other.table) == other.sample.ids


def test_killed_between_baseline_and_first_epoch(
    other: OtherTool, make_options: MakeOptions, launcher: Launcher
) -> None:
    write_blizzard(other.table, state(other))
    options: PipelineOptions = make_options()
    assert launcher.run(options, "delta.claim.after:1:kill").exit_code == -9
    launcher.run_until_done(options)
    assert table_ids(other.table) == other.sample.ids


def test_other_writers_in_between(other: OtherTool, make_options: MakeOptions) -> None:
    write_blizzard(other.table, state(other))
    for _ in range(5):
        write_deltalake(str(other.table), pa.table({"v": [1.5]}), mode="append", schema_mode="merge")
    assert run_once(make_options()).exit_code == 0
    assert table_ids(other.table) == other.sample.ids


def test_log_cleaned_up_after_a_delta_checkpoint(other: OtherTool, make_options: MakeOptions) -> None:
    """The payload is then in Delta's own checkpoint only."""
    write_blizzard(other.table, state(other))
    write_deltalake(str(other.table), pa.table({"v": [1.5]}), mode="append", schema_mode="merge")
    DeltaTable(str(other.table)).create_checkpoint()
    for path in sorted((other.table / "_delta_log").glob("*.json"))[:-1]:
        path.unlink()
    run = run_once(make_options())
    assert run.exit_code == 0, run.result
    assert table_ids(other.table) == other.sample.ids


def others_commit(table: Path, times: int) -> None:
    """Other writers' commits, without a Delta checkpoint."""
    hooks = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
    for _ in range(times):
        write_deltalake(
            str(table), pa.table({"v": [1.5]}), mode="append", schema_mode="merge", post_commithook_properties=hooks
        )


@pytest.mark.parametrize("older_in_checkpoint", [False, True])
def test_progress_beyond_the_scan_is_never_passed_over(
    other: OtherTool, make_options: MakeOptions, older_in_checkpoint: bool
) -> None:
    """Nor is an older one from Delta's checkpoint taken while a newer one may lie between."""
    if older_in_checkpoint:
        write_blizzard(other.table, {**state(other), "files": {}})
        DeltaTable(str(other.table)).create_checkpoint()
    write_blizzard(other.table, state(other))
    others_commit(other.table, 5)
    commits = 6 if older_in_checkpoint else DeltaTable(str(other.table)).version() + 1
    before = table_ids(other.table)
    run = run_once(make_options(recovery_scan_commits=4))
    assert (run.exit_code, run.error_code) == (1, "checkpoint-lost")
    assert run.result.error is not None
    assert f"recovery_scan_commits: {commits}" in run.result.error.hint
    assert table_ids(other.table) == before
    assert run_once(make_options(recovery_scan_commits=commits)).exit_code == 0
    assert table_ids(other.table) == other.sample.ids


def test_a_table_with_nobodys_progress_is_joined(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    table = tmp_path / "out"
    others_commit(table, 6)
    DeltaTable(str(table)).create_checkpoint()
    others_commit(table, 2)
    sample.add("a.json", 3)
    assert run_once(make_options(recovery_scan_commits=4)).exit_code == 0, "the checkpoint tells of all before it"
    assert table_ids(table) == sample.ids


def test_a_long_log_without_progress_is_joined_on_purpose(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    others_commit(tmp_path / "out", 6)
    sample.add("a.json", 3)
    assert run_once(make_options(recovery_scan_commits=4)).error_code == "checkpoint-lost"
    assert run_once(make_options(recovery_scan_commits=4), accept_duplicates=True).exit_code == 0
    assert table_ids(tmp_path / "out") == sample.ids


@pytest.mark.parametrize("pointer", [None, b"", b'{"version":', b'{"version": 99}'])
def test_progress_in_a_checkpoint_of_several_parts(
    other: OtherTool, make_options: MakeOptions, pointer: bytes | None
) -> None:
    """Whatever the pointer to it says: it is only a cache."""
    write_blizzard(other.table, state(other))
    others_commit(other.table, 1)
    DeltaTable(str(other.table)).create_checkpoint()
    log = other.table / "_delta_log"
    whole = next(log.glob("*.checkpoint.parquet"))
    rows = pq.read_table(whole)
    for number, part in enumerate((rows.slice(0, 2), rows.slice(2)), 1):
        pq.write_table(part, log / f"{whole.name.split('.')[0]}.checkpoint.{number:010d}.{2:010d}.parquet")
    whole.unlink()
    for commit in sorted(log.glob("*.json"))[:-1]:
        commit.unlink()
    if pointer is None:
        (log / "_last_checkpoint").unlink()
    else:
        (log / "_last_checkpoint").write_bytes(pointer)
    assert run_once(make_options()).exit_code == 0
    assert table_ids(other.table) == other.sample.ids


def test_progress_that_was_made_for_another_table_is_refused(other: OtherTool, make_options: MakeOptions) -> None:
    write_blizzard(other.table, state(other), delta_version=1000)
    before = table_ids(other.table)
    run = run_once(make_options())
    assert (run.exit_code, run.error_code) == (1, "checkpoint")
    assert run.result.error is not None
    assert "version 1000" in run.result.error.message
    assert table_ids(other.table) == before


@pytest.mark.parametrize("payload", ["!!!", "bm90IGpzb24=", "e30=", "eyJzY2hlbWFfdmVyc2lvbiI6MX0="])
def test_corrupt_newest_payload_is_refused(other: OtherTool, make_options: MakeOptions, payload: str) -> None:
    write_blizzard(other.table, state(other))
    write_app_id(other.table, "blizzard:" + payload)
    version = DeltaTable(str(other.table)).version()
    options: PipelineOptions = make_options()
    run = run_once(options)
    assert run.exit_code == 1
    assert run.error_code == "checkpoint"
    assert run.result.error is not None
    assert "--accept-duplicates" in run.result.error.hint
    assert DeltaTable(str(other.table)).version() == version
    accepted = run_once(options, accept_duplicates=True)
    assert accepted.exit_code == 0
    assert table_ids(other.table) == other.sample.ids


def test_newer_schema_version_is_refused_by_name(other: OtherTool, make_options: MakeOptions) -> None:
    write_blizzard(other.table, state(other), schema_version=2)
    run = run_once(make_options())
    assert run.exit_code == 1
    assert run.error_code == "newer-format"
    assert run.result.error is not None
    assert "schema_version 2" in run.result.error.message


def test_unknown_fields_are_ignored(other: OtherTool, make_options: MakeOptions) -> None:
    write_blizzard(other.table, state(other), something_new={"x": 1})
    assert run_once(make_options()).exit_code == 0
    assert table_ids(other.table) == other.sample.ids


def test_our_payload_reads_like_theirs(sample: SampleInput, make_options: MakeOptions) -> None:
    """Another tool finds its own shape in a log of ours."""
    import base64

    sample.add("a.json", 9)
    sample.add("b.json", 3)
    options: PipelineOptions = make_options(max_events=4, max_files=1)
    assert run_once(options).exit_code == 0
    found = []
    for path in sorted((Path(options.sinks[0].location) / "_delta_log").glob("*.json")):
        for line in path.read_text().splitlines():
            app_id = json.loads(line).get("txn", {}).get("appId", "")
            if app_id.startswith("blizzard:"):
                assert json.loads(line)["txn"]["lastUpdated"] > 0
                body = json.loads(base64.b64decode(app_id.removeprefix("blizzard:")))
                assert body["schema_version"] == 1
                assert body["delta_version"] == int(path.stem) - 1
                found.append(body["source_state"])
    a, b = str(sample.path("a.json")), str(sample.path("b.json"))
    assert found[0] == {"files": {a: {"RecordsRead": 4}}, "last_committed_file": None}
    assert found[-1] == {"files": {}, "last_committed_file": b}


def test_no_interchange_on_tables_of_others(sample: SampleInput, make_options: MakeOptions, tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "out"), pa.table({"id": pa.array([], pa.int64())}))
    sample.add("a.json", 3)
    options: PipelineOptions = make_options()
    assert run_once(options).exit_code == 0
    table = DeltaTable(str(tmp_path / "out"))
    assert "delta.setTransactionRetentionDuration" not in table.metadata().configuration
    text = "".join(p.read_text() for p in (tmp_path / "out" / "_delta_log").glob("*.json"))
    assert "blizzard:" not in text
    assert table_ids(tmp_path / "out") == sample.ids


def test_a_second_sink_begins_after_the_baseline(other: OtherTool, make_options: MakeOptions, tmp_path: Path) -> None:
    write_blizzard(other.table, state(other))
    second = tmp_path / "second"
    sinks = [DeltaSinkOptions(name="delta", table=str(other.table)), DeltaSinkOptions(name="second", table=str(second))]
    run = run_once(make_options(sinks=sinks))
    assert run.exit_code == 0, run.result
    assert table_ids(other.table) == other.sample.ids
    assert sum(table_ids(second).values()) == 8, "what was read from here on: 3 records of b1, 5 of c1"


def test_the_other_tool_commits_between_our_look_and_our_claim(
    other: OtherTool, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_blizzard(other.table, state(other))
    claim = DeltaSink.claim
    moved: list[int] = []

    def late_commit(self: DeltaSink, *arguments: Any, **named: Any) -> Any:
        if not moved:
            moved.append(1)
            other.read("c1.json")
            files = {**state(other)["files"], f"{other.sample.folder}/c1.json": "Finished"}
            write_blizzard(other.table, {**state(other), "files": files})
        return claim(self, *arguments, **named)

    monkeypatch.setattr(DeltaSink, "claim", late_commit)
    run = run_once(make_options())
    assert run.exit_code == 0, run.result
    assert table_ids(other.table) == other.sample.ids
