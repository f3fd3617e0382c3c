"""A retry of dead letters that dies anywhere, is repeated, or has a rival: each row arrives once."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from firnline.errors import ConfigError, FencedError
from firnline.history.dead_letters import load_dead_letters
from firnline.history.edits.dead_letters import LetterEdit
from firnline.history.edits.rollback import Rollback
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks import registry
from firnline.sinks.dead_letters import Answers
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.known import KnownSink
from tests.support.kills import kill_at_every_point
from tests.support.pipelines import MakeOptions, run_once, run_to_end
from tests.support.samples import SampleInput
from tests.support.sqlite_sink import SqliteSinkOptions, register_sqlite, sqlite_ids

pytestmark = pytest.mark.crash

REFUSED = 3
SIDES = ("before", "after")


def pipeline_in(folder: Path, make_options: MakeOptions, refused: int | None) -> PipelineOptions:
    copy = SqliteSinkOptions("copy", str(folder / "copy.db"), refused=refused, on_bad_row="dead_letter")
    return make_options(max_files=1, sinks=(DeltaSinkOptions("table", str(folder / "table")), copy))


def retry(options: PipelineOptions) -> None:
    registry.KINDS["sqlite"] = "tests.support.sqlite_sink"
    LetterEdit(open_pipeline(options), "retry").perform("person")


def test_a_retry_that_dies_anywhere_delivers_once(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_sqlite(monkeypatch)
    sample.add("1.json", 6)
    worlds = iter(range(1000))

    def prepare() -> PipelineOptions:
        folder = tmp_path / str(next(worlds))
        run_to_end(pipeline_in(folder, make_options, REFUSED))
        return pipeline_in(folder, make_options, None)

    def check(options: PipelineOptions, where: str) -> None:
        if load_dead_letters(open_pipeline(options)):
            retry(options)
        for _ in range(2):
            with pytest.raises(ConfigError, match="no dead letter is left"):
                retry(options)
            assert run_once(options).exit_code == 0, where
        assert sqlite_ids(Path(options.sinks[1].location)) == sample.ids, where
        assert load_dead_letters(open_pipeline(options)) == [], where

    points = [
        f"{name}.{side}"
        for name in ("letter.answers", "letter.settle", "letter.sweep", "outbox.write", "delta.commit")
        for side in ("before", "after")
    ]
    reached = kill_at_every_point(prepare, partial(retry), check, points=points)
    assert set(points) <= reached.keys()


def roll_back(options: PipelineOptions) -> None:
    registry.KINDS["sqlite"] = "tests.support.sqlite_sink"
    Rollback(open_pipeline(options), 1).perform("person")


def test_a_rollback_over_a_retry_that_dies_anywhere_loses_no_row(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_sqlite(monkeypatch)
    sample.add("1.json", 6)
    worlds = iter(range(1000))

    def prepare() -> PipelineOptions:
        folder = tmp_path / str(next(worlds))
        run_to_end(pipeline_in(folder, make_options, REFUSED))
        retry(pipeline_in(folder, make_options, None))
        return pipeline_in(folder, make_options, None)

    def check(options: PipelineOptions, where: str) -> None:
        """Nobody repeats the rollback: either the retry is delivered, or its letter is open."""
        assert run_once(options).exit_code == 0, where
        rows = sqlite_ids(Path(options.sinks[1].location))
        opened = [letter["values"]["id"] for letter in load_dead_letters(open_pipeline(options))]
        assert rows + Counter(opened) == sample.ids, where
        if opened:
            retry(options)
            assert run_once(options).exit_code == 0, where
        assert sqlite_ids(Path(options.sinks[1].location)) == sample.ids, where
        assert load_dead_letters(open_pipeline(options)) == [], where

    points = [f"{name}.{side}" for name in ("delta.claim", "delta.jump", "follower.claim") for side in SIDES]
    reached = kill_at_every_point(prepare, partial(roll_back), check, points=points, most=1)
    assert set(points) <= reached.keys()


def test_of_two_retries_at_once_one_delivers(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_sqlite(monkeypatch)
    sample.add("1.json", 6)
    run_to_end(pipeline_in(tmp_path, make_options, REFUSED))
    options = pipeline_in(tmp_path, make_options, None)
    put = Answers.put
    rivals = iter([lambda: retry(options)])

    def put_and_lose(self: Answers, storage: object) -> None:
        put(self, storage)  # type: ignore[arg-type]
        next(rivals, lambda: None)()  # the rival decides between our list and our decision

    monkeypatch.setattr(Answers, "put", put_and_lose)
    with pytest.raises(FencedError):
        retry(options)
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids
    assert load_dead_letters(open_pipeline(options)) == []


def test_a_command_that_wakes_late_undoes_no_answer_of_another(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_sqlite(monkeypatch)
    sample.add("1.json", 6)
    refusing, options = (pipeline_in(tmp_path, make_options, refused) for refused in (REFUSED, None))
    run_to_end(refusing)
    late: list[tuple[dict[str, KnownSink], int, int]] = []
    real, put = LetterEdit._settle, Answers.put

    def sleep(self: LetterEdit, known: dict[str, KnownSink], epoch: int, floor: int) -> None:
        late.append((known, epoch, floor))  # the first command sleeps here, once its epoch is decided

    monkeypatch.setattr(LetterEdit, "_settle", sleep)
    retry(refusing)
    monkeypatch.setattr(LetterEdit, "_settle", real)
    run_to_end(refusing)  # refused again: a letter of epoch 2

    def put_and_wake(self: Answers, storage: object) -> None:
        put(self, storage)  # type: ignore[arg-type]
        real(LetterEdit(open_pipeline(options), "retry"), *late[-1])

    monkeypatch.setattr(Answers, "put", put_and_wake)
    retry(options)
    for _ in range(2):
        assert load_dead_letters(open_pipeline(options)) == []
        real(LetterEdit(open_pipeline(options), "retry"), *late[-1])
    run_to_end(options)
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids
