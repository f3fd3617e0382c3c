"""Sources are told the position below which nobody needs anything any more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from firnline.errors import SourceError
from firnline.history.edits.rollback import Rollback
from firnline.run.open_pipeline import open_pipeline
from firnline.run.recorder import Recorder
from firnline.sources.files.source import FileSource
from firnline.types import Json
from tests.support.pipelines import MakeOptions, make_epochs, run_once
from tests.support.samples import SampleInput, table_ids

WINDOW = 2


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Json]:
    """The positions that the source was told, in order."""
    found: list[Json] = []
    monkeypatch.setattr(FileSource, "acknowledge", lambda _, position: found.append(position))
    return found


def positions(options: Any) -> dict[int, Json]:
    """The position of every epoch that the ledger has."""
    pipeline = open_pipeline(options)
    return {entry.epoch: entry.checkpoint.positions["files"] for entry in pipeline.entries(pipeline.load().entry)}


def test_the_position_of_the_floor_is_acknowledged(
    sample: SampleInput, make_options: MakeOptions, told: list[Json]
) -> None:
    options = make_options(max_files=1, rollback_window=WINDOW)
    for number in range(6):
        sample.add(f"{number}.json", 2)
    assert run_once(options).exit_code == 0
    known = positions(options)
    floors = {e.epoch: e.checkpoint.floor for e in open_pipeline(options).entries(open_pipeline(options).load().entry)}
    epochs = [epoch for position in told for epoch, found in known.items() if found == position]
    assert len(epochs) == len(told), "only positions of committed checkpoints"
    assert epochs == sorted(epochs)
    assert epochs
    assert max(epochs) <= max(floors.values())


def test_a_new_run_goes_on_where_the_last_one_ended(
    sample: SampleInput, make_options: MakeOptions, told: list[Json]
) -> None:
    options = make_options(rollback_window=WINDOW)
    make_epochs(sample, options, 5)
    known = positions(options)
    assert told[-1] in (known[2], known[3])  # epoch 5 or 4 made the floor


def test_what_the_remote_tier_lacks_is_not_acknowledged(
    sample: SampleInput, make_options: MakeOptions, told: list[Json], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "remote_epoch", property(lambda _: 1))
    options = make_options(rollback_window=WINDOW)
    make_epochs(sample, options, 5)
    assert told
    assert all(position == positions(options)[1] for position in told)


def test_what_a_rollback_superseded_is_not_acknowledged(
    sample: SampleInput, make_options: MakeOptions, told: list[Json]
) -> None:
    options = make_options(rollback_window=WINDOW)
    make_epochs(sample, options, 4)
    Rollback(open_pipeline(options), 2).perform("run")
    told.clear()
    make_epochs(sample, options, 4, first=5)
    on_chain = list(positions(options).values())
    assert told
    assert all(position in on_chain for position in told)


def test_a_source_that_fails_holds_up_nobody(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: FileSource, __: Json) -> None:
        raise SourceError("the broker does not answer")

    monkeypatch.setattr(FileSource, "acknowledge", fail)
    options = make_options(max_files=1, rollback_window=WINDOW)
    for number in range(6):
        sample.add(f"{number}.json", 2)
    assert run_once(options).exit_code == 0
    assert "source not acknowledged" in caplog.text
    assert table_ids(Path(options.sinks[0].location)) == sample.ids
