"""The outbox: what waits there for an optional sink is copied whole, kept as long as it is needed, and then let go."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from firnline.errors import CheckpointError, DamagedError, FencedError
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.run.outbox import Outbox
from firnline.run.progress import Progress
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.outbox import deliver, release
from firnline.storage import LocalStorage
from firnline.types import Json
from tests.support.pipelines import MakeOptions, run_once, run_to_end
from tests.support.samples import SampleInput, table_ids

DATA = b"rows" * 1000
FILE: dict[str, Json] = {
    "path": "month=1/f.parquet",
    "outbox": "_firnline/demo/outbox/a/month=1/f.parquet",
    "size_bytes": len(DATA),
    "crc32": zlib.crc32(DATA),
}


@pytest.fixture
def outbox(tmp_path: Path) -> LocalStorage:
    storage = LocalStorage(str(tmp_path / "main"))
    storage.put(str(FILE["outbox"]), DATA)
    return storage


@pytest.fixture
def table(tmp_path: Path) -> LocalStorage:
    return LocalStorage(str(tmp_path / "other"))


@pytest.mark.parametrize("before", [None, b"", DATA[:-1], b"x" * len(DATA), DATA])
def test_a_file_is_delivered_whole_whatever_lies_there(
    outbox: LocalStorage, table: LocalStorage, before: bytes | None
) -> None:
    if before is not None:
        table.put(str(FILE["path"]), before)
    deliver(outbox, table, [FILE])
    assert table.get(str(FILE["path"])) == DATA
    release(outbox, [FILE])
    assert list(outbox.list("")) == []
    deliver(outbox, table, [FILE])  # a repeat finds it there
    assert [stat.size_bytes for stat in table.list("")] == [len(DATA)]


def test_what_is_damaged_or_gone_is_not_delivered(outbox: LocalStorage, table: LocalStorage) -> None:
    outbox.put(str(FILE["outbox"]), b"y" * len(DATA))
    with pytest.raises(DamagedError, match="is not what was staged"):
        deliver(outbox, table, [FILE])
    release(outbox, [FILE])
    with pytest.raises(DamagedError, match=r"neither in .* nor in the outbox"):
        deliver(outbox, table, [FILE])
    assert list(table.list("")) == []


def test_files_that_were_staged_in_the_table_itself_are_left_alone(outbox: LocalStorage, table: LocalStorage) -> None:
    deliver(outbox, table, [{"path": "old.parquet", "size_bytes": 3, "crc32": 0}])
    assert list(table.list("")) == []


# -- in a pipeline ------------------------------------------------------------------------------------


@pytest.fixture
def options(make_options: MakeOptions, sample: SampleInput, tmp_path: Path, whole_upkeep: None) -> PipelineOptions:
    """Its optional sink was away for two epochs, and still is."""
    away = DeltaSinkOptions("away", str(tmp_path / "away"), required=False)
    options = make_options(
        max_files=1, commit_policy="required", sinks=(DeltaSinkOptions("main", str(tmp_path / "main")), away)
    )
    (tmp_path / "away").touch()
    for number in (1, 2):
        sample.add(f"a{number}.json", 3)
        run_to_end(options)
    return options


def waiting(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in (folder / "main/_firnline/demo/outbox").rglob("*.parquet"))


def test_what_a_lost_attempt_left_is_swept_and_what_a_sink_lacks_is_kept(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    needed = waiting(tmp_path)
    assert len(needed) == 2
    LocalStorage(str(tmp_path / "main")).put("_firnline/demo/outbox/00000000000000aa/x.parquet", b"of a kill")
    sample.add("a3.json", 3)
    run_to_end(options)
    left = waiting(tmp_path)
    assert len(left) == 3
    assert set(needed) < set(left)
    (tmp_path / "away").unlink()
    for _ in range(2):
        run_to_end(options)
    assert table_ids(tmp_path / "away") == sample.ids
    assert waiting(tmp_path) == []


def test_a_run_that_was_left_behind_sweeps_nothing(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    pipeline = open_pipeline(options)
    progress = Progress()
    progress.head = pipeline.load()
    progress.generation = progress.head.generation
    sample.add("a3.json", 3)
    run_to_end(options)
    before = waiting(tmp_path)
    with pytest.raises(FencedError):
        Outbox(pipeline, progress, heads=lambda: {"main": 0}, filling=tuple, may_deliver=bool).sweep()
    assert waiting(tmp_path) == before


def test_a_sink_whose_rows_are_gone_stops_nobody_and_says_so(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    for path in (tmp_path / "main/_firnline/demo/outbox").rglob("*.parquet"):
        path.unlink()
    (tmp_path / "away").unlink()
    sample.add("a3.json", 3)
    run = run_once(options)
    assert run.exit_code == 0
    assert any("neither in" in error.message for error in run.told.troubles if isinstance(error, CheckpointError))
    assert table_ids(tmp_path / "main") == sample.ids
