"""Damage in the outbox: the rows are made again from the input, and count only if they are those that were decided."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from firnline.errors import FirnlineError
from firnline.history.edits.rollback import Rollback
from firnline.jobs.dataflow import dataflow_of
from firnline.jobs.epoch_job import EpochJobs
from firnline.jobs.heartbeat import WorkerLosses
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.run.progress import Progress
from firnline.run.rerun import Rerun
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.outbox_rows import OpenFile, OutboxStager
from firnline.sinks.row_checksum import ROWS_CHECKSUM
from firnline.sources.delta.options import DeltaSourceOptions
from firnline.sources.kafka.options import KafkaSourceOptions
from firnline.testing.local import LocalEngine
from firnline.types import Json
from tests.support.kafka import KafkaServer
from tests.support.keyed import TOTALS, KeyedInput, keyed_options, run_epochs
from tests.support.pipelines import MakeOptions, pipeline_options, run_once, run_to_end
from tests.support.samples import SampleInput, table_ids
from tests.support.sqlite_sink import DOWN, SqliteSinkOptions, register_sqlite, sqlite_ids, sqlite_rows


@pytest.fixture(autouse=True)
def kind(monkeypatch: pytest.MonkeyPatch) -> None:
    register_sqlite(monkeypatch)


@pytest.fixture
def options(make_options: MakeOptions, tmp_path: Path) -> PipelineOptions:
    """A table that decides, and an optional follower that delivers in ranges."""
    copy = SqliteSinkOptions("copy", str(tmp_path / "copy.db"), required=False, ranges=True)
    return make_options(max_files=2, sinks=(DeltaSinkOptions("table", str(tmp_path / "table")), copy))


def lag(options: PipelineOptions, sample: SampleInput, tmp_path: Path) -> None:
    """Run two epochs that the follower does not get."""
    down = tmp_path / f"copy.db{DOWN}"
    down.touch()
    for number in range(4):
        sample.add(f"lag{number}.json", 150)
    run_to_end(options)
    down.unlink()


def outbox_files(folder: Path) -> list[Path]:
    return sorted((folder / "_firnline" / "demo" / "outbox").rglob("*.arrow"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x20
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "empty": lambda path: path.write_bytes(b""),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
def test_a_damaged_file_is_made_again_from_the_input(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path, damage: str, which: int
) -> None:
    sample.add("a.json", 10)
    run_to_end(options)
    lag(options, sample, tmp_path)
    waiting = outbox_files(tmp_path / "table")[1:]
    assert len(waiting) > 1
    DAMAGES[damage](waiting[which])
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == table_ids(tmp_path / "table") == sample.ids
    assert not list((tmp_path / "table" / "_firnline" / "demo" / "rerun").rglob("*.arrow"))


def test_all_files_may_be_gone(options: PipelineOptions, sample: SampleInput, tmp_path: Path) -> None:
    lag(options, sample, tmp_path)
    before = sqlite_rows(tmp_path / "copy.db")
    for path in outbox_files(tmp_path / "table"):
        path.unlink()
    run_to_end(options)
    assert not before
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids


def test_a_rebuilt_file_that_rots_is_made_again(options: PipelineOptions, sample: SampleInput, tmp_path: Path) -> None:
    copy = options.sinks[1]
    other = replace(copy, name="other", path=str(tmp_path / "other.db"))  # type: ignore[call-arg]
    both = replace(options, sinks=(*options.sinks, other))
    (tmp_path / f"other.db{DOWN}").touch()
    lag(both, sample, tmp_path)
    for path in outbox_files(tmp_path / "table"):
        flip(path)
    run_to_end(both)
    rebuilt = sorted((tmp_path / "table").rglob("*.again"))
    assert rebuilt
    for path in rebuilt:
        flip(path)
    (tmp_path / f"other.db{DOWN}").unlink()
    run_to_end(both)
    assert sqlite_ids(tmp_path / "copy.db") == sqlite_ids(tmp_path / "other.db") == sample.ids


def test_rows_before_a_rollback_are_made_again_when_the_sink_is_joined(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    sample.add("a.json", 10)
    run_to_end(options)
    lag(options, sample, tmp_path)
    (tmp_path / f"copy.db{DOWN}").touch()
    Rollback(open_pipeline(options), 2, leave=["copy"]).perform("person")
    (tmp_path / f"copy.db{DOWN}").unlink()
    for path in outbox_files(tmp_path / "table"):
        flip(path)
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == table_ids(tmp_path / "table") == sample.ids


def test_rows_of_a_changed_input_do_not_count(options: PipelineOptions, sample: SampleInput, tmp_path: Path) -> None:
    lag(options, sample, tmp_path)
    for path in outbox_files(tmp_path / "table"):
        flip(path)
    for path in (tmp_path / "in").glob("*.json"):
        path.write_text(path.read_text().replace("1", "2"))
    run = run_once(options)
    assert sqlite_rows(tmp_path / "copy.db") == []
    assert run.exit_code == 0, "an optional sink stops nobody"
    required = replace(options, sinks=(options.sinks[0], replace(options.sinks[1], required=True)))
    result = run_once(required).result
    assert result.error is not None
    assert result.error.code == "outbox-lost"
    assert "can no longer be read" in result.error.message
    assert result.error.hint == "Copy the sink anew: firnline sinks resync copy --from table --yes"


def test_rows_of_an_older_version_are_not_made_again(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = OutboxStager._describe

    def without_checksum(self: OutboxStager, file: OpenFile) -> dict[str, Json]:
        return {key: value for key, value in describe(self, file).items() if key != ROWS_CHECKSUM}

    monkeypatch.setattr(OutboxStager, "_describe", without_checksum)
    lag(options, sample, tmp_path)
    flip(outbox_files(tmp_path / "table")[0])
    error = failure(options)
    assert error.code == "outbox-lost"
    assert "kept no checksum of its rows" in error.message


def failure(options: PipelineOptions) -> FirnlineError:
    """The error of a run in which every sink is required."""
    sinks = tuple(replace(sink, required=True) for sink in options.sinks)
    error = run_once(replace(options, sinks=sinks)).result.error
    assert error is not None
    return error


def test_rows_of_an_operator_with_state_are_not_made_again(keyed: KeyedInput, tmp_path: Path) -> None:
    copy = SqliteSinkOptions("copy", str(tmp_path / "copy.db"), required=False, input=TOTALS.name)
    options = keyed_options(tmp_path)
    options = replace(options, sinks=(*options.sinks, copy))
    (tmp_path / f"copy.db{DOWN}").touch()
    run_epochs(keyed, options, 2)
    (tmp_path / f"copy.db{DOWN}").unlink()
    flip(outbox_files(tmp_path / "out")[0])
    error = failure(options)
    assert f"come from operator '{TOTALS.name}', which keeps state" in error.message
    assert error.hint == "Copy the sink anew: firnline sinks resync copy --from delta --yes"


def test_without_a_table_the_way_out_is_a_gap(make_options: MakeOptions, sample: SampleInput, tmp_path: Path) -> None:
    copy = SqliteSinkOptions("copy", str(tmp_path / "copy.db"), required=False)
    options = make_options(max_files=2, home=str(tmp_path / "home"), sinks=(copy,))
    lag(options, sample, tmp_path)
    flip(outbox_files(tmp_path / "home")[0])
    for path in sample.folder.glob("*.json"):
        path.unlink()
    assert "firnline sinks resume copy --accept-gap --yes" in failure(options).hint


def test_columns_that_the_epoch_added_or_widened_are_made_again(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    copy = SqliteSinkOptions("copy", str(tmp_path / "copy.db"), required=False)
    table = DeltaSinkOptions("table", str(tmp_path / "table"), partition_by=("month", "nowhere"))
    options = make_options(max_files=2, max_bad_ratio=1.0, lineage=True, sinks=(table, copy))
    sample.add("a.json", 10, amount=1)
    run_to_end(options)
    down = tmp_path / f"copy.db{DOWN}"
    down.touch()
    sample.add("b.json", 120, bad=3, amount=2.5, added={"x": [1, 2]})
    sample.add("c.json", 20, amount="no number")
    run_to_end(options)
    down.unlink()
    before = {path: path.read_bytes() for path in outbox_files(tmp_path / "table")}
    for path in before:
        flip(path)
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids
    made_again = sqlite_rows(tmp_path / "copy.db")
    (tmp_path / "copy.db").unlink()
    for path, data in before.items():
        path.write_bytes(data)
    run_to_end(options)
    assert sqlite_rows(tmp_path / "copy.db") == made_again, "the same rows as from the first files"


def test_rows_of_a_delta_table_are_made_again(tmp_path: Path) -> None:
    sample = SampleInput(tmp_path / "in")
    bronze = pipeline_options(str(sample.folder), str(tmp_path / "bronze"), "bronze", max_files=1)
    for number in range(3):
        sample.add(f"{number}.json", 40)
    run_to_end(bronze)
    copy = SqliteSinkOptions("copy", str(tmp_path / "copy.db"), required=False)
    silver = pipeline_options(
        "", "", "demo", home=str(tmp_path / "home"), sinks=(copy,),
        sources=[DeltaSourceOptions("bronze", str(tmp_path / "bronze"))],
    )  # fmt: skip
    (tmp_path / f"copy.db{DOWN}").touch()
    run_to_end(silver)
    (tmp_path / f"copy.db{DOWN}").unlink()
    for path in outbox_files(tmp_path / "home"):
        flip(path)
    run_to_end(silver)
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids


@pytest.mark.kafka
def test_rows_of_a_topic_are_made_again_until_retention_takes_them(kafka: KafkaServer, tmp_path: Path) -> None:
    topic = kafka.new_topic(2)
    for partition in (0, 1):
        values = [json.dumps({"id": partition * 100 + number}) for number in range(100)]
        kafka.produce(topic, values, partition=partition)
    copy = SqliteSinkOptions("copy", str(tmp_path / "copy.db"), required=False)
    source = KafkaSourceOptions("events", brokers=kafka.bootstrap, topics=(topic,))
    options = pipeline_options("", "", "demo", home=str(tmp_path / "home"), sinks=(copy,), sources=[source])
    (tmp_path / f"copy.db{DOWN}").touch()
    run_to_end(options)
    kafka.produce(topic, [json.dumps({"id": 200})], partition=0)
    run_to_end(options)
    (tmp_path / f"copy.db{DOWN}").unlink()
    for path in outbox_files(tmp_path / "home")[:-1]:
        flip(path)
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == Counter(range(201))
    (tmp_path / f"copy.db{DOWN}").touch()
    kafka.produce(topic, [json.dumps({"id": 201}), json.dumps({"id": 202})], partition=1)
    run_to_end(options)
    (tmp_path / f"copy.db{DOWN}").unlink()
    for path in outbox_files(tmp_path / "home"):
        path.unlink()
    kafka.delete_records(topic, 1, 101)
    error = failure(options)
    assert error.code == "outbox-lost"
    assert "can no longer be read" in error.message
    assert "deleted; its log starts at 101" in error.message


@pytest.mark.parametrize("threads", [1, 3])
def test_another_process_repairs_at_the_same_time(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path, threads: int
) -> None:
    lag(options, sample, tmp_path)
    damaged = outbox_files(tmp_path / "table")
    for path in damaged:
        flip(path)
    pipeline = open_pipeline(options)
    head = pipeline.load()
    entries = list(pipeline.ledger.entries(head.entry))
    found: list[BaseException] = []

    def repair() -> None:
        progress, own = Progress(), open_pipeline(options)
        progress.head = head
        flow = dataflow_of(options)
        losses = WorkerLosses(own.clock, lambda _: None)
        jobs = EpochJobs(options, own.sources, own.sinks, LocalEngine(threads), flow, own.state_home, losses)
        try:
            for entry, _ in entries:
                Rerun(own, progress, jobs).repair(own.sink("copy"), entry, entry.staged["copy"])
        except BaseException as error:
            found.append(error)

    workers = [threading.Thread(target=repair) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == []
    assert len(list((tmp_path / "table").rglob("*.again"))) == len(damaged)
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids
