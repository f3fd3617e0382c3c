"""Dead letters are listed, delivered once more exactly once, and dropped; values keep their types."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest

from firnline.cli import dead_letters as dead_letters_command
from firnline.cli import gc as gc_command
from firnline.cli import trace as trace_command
from firnline.cli.main import run_command
from firnline.errors import ConfigError, SinkError
from firnline.history.dead_letters import LetterFilter, load_dead_letters
from firnline.history.edits.dead_letters import LetterEdit
from firnline.history.edits.restore import restore_savepoint
from firnline.history.edits.rollback import LetterChange, Rollback
from firnline.history.edits.sinks import SinkEdit
from firnline.history.savepoints.create import create_savepoint
from firnline.names import dead_letters_folder
from firnline.options import CheckpointOptions, OutboxOptions, PipelineOptions, StoreOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.dead_letters import DeadLetter, LetterFile
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.follower import FollowerHead
from firnline.stores import open_store
from firnline.stores.audit import load_audit
from firnline.types import Json
from tests.support.pipelines import MakeOptions, run_once, run_to_end
from tests.support.samples import SampleInput
from tests.support.sqlite_sink import DOWN, SqliteSink, SqliteSinkOptions, register_sqlite, sqlite_ids, sqlite_rows


@pytest.fixture(autouse=True)
def kind(monkeypatch: pytest.MonkeyPatch) -> None:
    register_sqlite(monkeypatch)


@pytest.fixture
def options(make_options: MakeOptions, tmp_path: Path) -> PipelineOptions:
    copy = SqliteSinkOptions("copy", str(tmp_path / "copy.db"), refused=3, on_bad_row="dead_letter")
    return make_options(max_files=1, sinks=(DeltaSinkOptions("table", str(tmp_path / "table")), copy))


def corrected(options: PipelineOptions, **settings: object) -> PipelineOptions:
    """The same pipeline with a sink that takes every row."""
    table, copy = options.sinks
    return replace(options, sinks=(table, replace(copy, **{"refused": None, **settings})))  # type: ignore[arg-type]


def letters(options: PipelineOptions) -> list[dict[str, Json]]:
    return load_dead_letters(open_pipeline(options))


def retry(options: PipelineOptions) -> int:
    return LetterEdit(open_pipeline(options), "retry").perform("person")[0].letters


def test_a_letter_is_delivered_once_more_and_once_only(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    sample.add("f1.json", 10)
    run_to_end(options)
    (letter,) = letters(options)
    assert (letter["sink"], letter["epoch"], letter["reason"], letter["values"]["id"]) == ("copy", 1, "refused", 3)
    assert retry(corrected(options)) == 1
    assert letters(options) == []
    with pytest.raises(ConfigError, match="no dead letter is left"):
        retry(corrected(options))
    sample.add("f2.json", 10)
    run_to_end(corrected(options))
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids


def test_a_letter_that_is_refused_again_is_a_letter_of_the_new_epoch(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    sample.add("f1.json", 10)
    run_to_end(options)
    retry(options)
    run_to_end(options)
    (letter,) = letters(options)
    assert (letter["epoch"], letter["row"], letter["values"]["id"]) == (2, 0, 3)
    retry(corrected(options))
    run_to_end(corrected(options))
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids


def letter_files(tmp_path: Path) -> list[str]:
    return sorted(file.name for file in (tmp_path / "table" / dead_letters_folder("demo", "copy")).iterdir())


def test_a_dropped_letter_is_gone_with_its_values(
    options: PipelineOptions,
    sample: SampleInput,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = replace(options, checkpoint=CheckpointOptions(rollback_window=1))
    sample.add("f1.json", 10)
    run_to_end(options)
    plan, _ = LetterEdit(open_pipeline(options), "drop", LetterFilter(reason="REFUS")).perform("person")
    assert plan.plan == [{"sink": "copy", "epoch": 1, "reason": "refused", "letters": 1}]
    run_to_end(corrected(options))
    assert letters(options) == []
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids - Counter([3])
    assert len(letter_files(tmp_path)) == 2, "a rollback may still undo the drop"
    for number in (2, 3):
        sample.add(f"f{number}.json", 5)
        run_to_end(corrected(options))
    monkeypatch.setattr(gc_command, "find_pipeline", lambda _: options)
    monkeypatch.setattr(gc_command, "find_targets", lambda _: [])
    assert run_command(["gc", "--yes"]) == 0, capsys.readouterr()
    (file,) = letter_files(tmp_path)
    assert file.endswith(".answered.json"), "row numbers alone"


def test_a_letter_of_masked_rows_is_masked_once(options: PipelineOptions, sample: SampleInput, tmp_path: Path) -> None:
    sample.add("f1.json", 5, text="secret")
    masked = corrected(options, refused=3, mask={"text": "hash"}, where="id < 4")
    run_to_end(masked)
    (before,) = letters(masked)
    retry(corrected(masked))
    run_to_end(corrected(masked))
    (row,) = [row for row in sqlite_rows(tmp_path / "copy.db") if row["id"] == 3]
    assert row["text"] == before["values"]["text"]
    assert sqlite_ids(tmp_path / "copy.db") == Counter([1, 2, 3])


def test_a_sink_that_went_back_after_a_retry_gets_the_row_once(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    sample.add("f1.json", 10)
    run_to_end(options)
    retry(corrected(options))
    run_to_end(corrected(options))
    (tmp_path / "copy.db").unlink()  # epoch 1 is delivered again, without the letter, and so is the retry
    run_to_end(corrected(options))
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids


def test_answered_letters_go_when_their_epoch_can_no_longer_be_delivered(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    small = replace(options, outbox=OutboxOptions(keep=timedelta(0)))
    for number in (1, 2, 3):
        sample.add(f"f{number}.json", 5)
        run_to_end(small)
    retry(corrected(small))
    for number in (4, 5):
        sample.add(f"f{number}.json", 5)
        run_to_end(corrected(small))
    assert letter_files(tmp_path), "a rollback may still undo the retry"
    narrow = replace(corrected(small), checkpoint=CheckpointOptions(rollback_window=1))
    for number in (6, 7):
        sample.add(f"f{number}.json", 5)
        run_to_end(narrow)
    SinkEdit(open_pipeline(narrow), "resume", "copy").perform("person")
    assert letter_files(tmp_path) == []


def test_a_sink_that_is_unknown_or_left_the_spec_is_named(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    sample.add("f1.json", 10)
    run_to_end(options)
    with pytest.raises(ConfigError, match="no sink 'cpoy'"):
        LetterEdit(open_pipeline(options), "retry", LetterFilter("cpoy")).plan()
    alone = replace(options, sinks=options.sinks[:1])
    SinkEdit(open_pipeline(alone), "forget", "copy").perform("person")
    with pytest.raises(ConfigError, match="does not deliver to sink 'copy'"):
        LetterEdit(open_pipeline(alone), "retry").plan()
    LetterEdit(open_pipeline(alone), "drop").perform("person")
    assert letters(alone) == []
    assert list((tmp_path / "table" / dead_letters_folder("demo", "copy")).glob("*.answers.json")) == []


def test_values_keep_their_types() -> None:
    rows = pa.table(
        {
            "amount": pa.array([Decimal("1.10"), None], pa.decimal128(38, 2)),
            "at": pa.array([datetime(2026, 1, 2, tzinfo=UTC)] * 2, pa.timestamp("us", "UTC")),
            "raw": pa.array([b"\x00\xff", b""], pa.binary()),
            "deep": pa.array([{"n": [2**62]}, None], pa.struct({"n": pa.list_(pa.int64())})),
        }
    )
    file = LetterFile("p", "s", 4, "a" * 16, [DeadLetter(7, "r", {}), DeadLetter(9, "r", {})], rows)
    again = LetterFile.from_bytes(file.to_bytes(), "file")
    assert again.rows.equals(rows)
    rest = LetterFile.from_bytes(again.without([7]).to_bytes(), "file")
    assert rest.rows.equals(rows.slice(1))
    assert [letter.row for letter in rest.letters] == [9]


def test_the_commands_show_a_plan_and_say_what_they_did(
    options: PipelineOptions,
    sample: SampleInput,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sample.add("f1.json", 10)
    run_to_end(options)
    for module in (dead_letters_command, trace_command):
        monkeypatch.setattr(module, "load_pipeline", lambda _: open_pipeline(corrected(options)))

    def answer(*words: str) -> Json:
        assert run_command([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    (letter,) = answer("dead-letters", "list", "--sink", "copy", "--epoch", "1")["dead_letters"]
    assert (letter["id"], letter["reason"]) == ("demo/1/files/2", "refused")
    assert answer("dead-letters", "list", "--reason", "other")["dead_letters"] == []
    assert answer("trace", letter["id"])["origins"][0]["line"] == 3
    assert run_command(["dead-letters", "retry", "--dry-run"]) == 0
    assert "nothing was changed" in capsys.readouterr().out
    done = answer("dead-letters", "retry", "--yes")
    assert (done["done"], done["letters"], done["new_epoch"]) == (True, 1, 2)
    assert answer("dead-letters", "drop", "--yes")["done"] is False, "nothing is left"
    run_to_end(corrected(options))
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids
    for words in (["dead-letters", "list"], ["trace", "demo/2/files/0"]):
        assert run_command(words) == 0
    assert "dead letter demo/1/files/2" in capsys.readouterr().out


def test_a_pipeline_that_decides_in_its_journal_answers_letters(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    copy = SqliteSinkOptions("copy", str(tmp_path / "copy.db"), refused=3, on_bad_row="dead_letter")
    options = make_options(max_files=1, sinks=(copy,), home=tmp_path / "home")
    sample.add("f1.json", 10)
    run_to_end(options)
    assert [letter["values"]["id"] for letter in letters(options)] == [3]
    taking = replace(options, sinks=(replace(copy, refused=None),))
    assert retry(taking) == 1
    run_to_end(taking)
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids
    assert letters(taking) == []


@pytest.mark.parametrize("ranges", [False, True])
def test_a_row_on_which_the_condition_fails_is_a_bad_row_and_its_value_stays_hidden(
    make_options: MakeOptions, tmp_path: Path, caplog: pytest.LogCaptureFixture, ranges: bool
) -> None:
    caplog.set_level("DEBUG")
    (tmp_path / "in").mkdir()
    lines = [json.dumps({"id": number, "code": "topsecret" if number in (150, 203) else "7"}) for number in range(250)]
    (tmp_path / "in" / "f1.json").write_text("\n".join(lines) + "\n")
    copy = SqliteSinkOptions(
        "copy", str(tmp_path / "copy.db"), where="CAST(code AS INT) > 5", mask={"code": "redact"}, ranges=ranges
    )
    options = make_options(max_files=1, sinks=(DeltaSinkOptions("table", str(tmp_path / "table")), copy))
    result = run_once(options).result
    assert result.error is not None
    assert result.error.code == "bad-row"
    assert "demo/1/files/150" in result.error.message
    run_to_end(corrected(options, on_bad_row="dead_letter"))
    found = letters(options)
    assert [(one["row"], one["values"]) for one in found] == [(n, {"id": n, "code": "***"}) for n in (150, 203)]
    wanted = set(range(250))
    assert sqlite_ids(tmp_path / "copy.db") == Counter(wanted - {150, 203})
    assert retry(corrected(options, on_bad_row="dead_letter")) == 2
    run_to_end(corrected(options, on_bad_row="dead_letter"))
    assert sqlite_ids(tmp_path / "copy.db") == Counter(wanted)
    assert "topsecret" not in caplog.text + str(result.error) + json.dumps(found)


@pytest.mark.parametrize("runs_first", [True, False])
def test_letters_go_with_a_sink_that_is_renamed(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path, runs_first: bool
) -> None:
    """Under every name that it has had: one that is written under the second name is answered under the third."""
    sample.add("f1.json", 10)
    run_to_end(options)
    second = corrected(options, name="second", renamed_from="copy", refused=13)
    sample.add("f2.json", 10)
    run_to_end(second)
    third = corrected(options, name="third", renamed_from="copy")
    if runs_first:
        run_to_end(third)
    assert [(one["sink"], one["values"]["id"]) for one in letters(third)] == [("third", 3), ("third", 13)]
    assert retry(third) == 2
    assert letters(options) == letters(second) == letters(third) == []
    run_to_end(third)
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids


def test_answers_and_edits_of_sinks_are_on_record(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    store = StoreOptions("sqlite", path=str(tmp_path / "store.db"))
    options = replace(options, checkpoint=CheckpointOptions(store=store))
    sample.add("f1.json", 10)
    run_to_end(options)
    retry(options)
    run_to_end(options)
    LetterEdit(open_pipeline(options), "drop").perform("person")
    SinkEdit(open_pipeline(options), "resume", "copy").perform("person")
    SinkEdit(open_pipeline(options), "resync", "copy").perform("person")
    SinkEdit(open_pipeline(replace(options, sinks=options.sinks[:1])), "forget", "copy").perform("person")
    trail = [entry.record for entry in load_audit(open_store(store, held_by="test"), "demo")]
    done = [record.what for record in reversed(trail) if record is not None and record.outcome == "done"]
    assert done == ["dead-letters-retry", "dead-letters-drop", "sinks-resume", "sinks-resync", "sinks-forget"]


def test_two_sinks_with_one_target_are_refused(options: PipelineOptions) -> None:
    table, copy = options.sinks
    twice = replace(options, sinks=(table, copy, replace(copy, name="other")))
    with pytest.raises(ConfigError, match=r"sink 'other' writes to .*copy\.db, and so does sink 'copy'"):
        open_pipeline(twice)


# -- rollbacks ----------------------------------------------------------------------------------------


def roll_back(options: PipelineOptions, to: int, *leave: str) -> None:
    Rollback(open_pipeline(options), to, leave=leave).perform("person")


@pytest.mark.parametrize("is_left", [False, True])
def test_a_retry_that_a_rollback_undoes_before_it_is_delivered_can_be_repeated(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path, is_left: bool
) -> None:
    sample.add("f1.json", 10)
    run_to_end(options)
    before = letters(options)
    retry(corrected(options))
    edit = Rollback(open_pipeline(corrected(options)), 1, leave=["copy"] if is_left else [])
    assert edit.plan().dead_letters == [LetterChange("copy", 0, 1)]
    edit.perform("person")
    assert letters(options) == before
    run_to_end(corrected(options))
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids - Counter([3])
    assert retry(corrected(options)) == 1
    sample.add("f2.json", 10)
    run_to_end(corrected(options))
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids
    assert letters(options) == []


@pytest.mark.parametrize("is_down", [False, True])
def test_a_retry_whose_rows_a_sink_keeps_stays_answered_after_a_rollback(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path, is_down: bool
) -> None:
    sample.add("f1.json", 10)
    run_to_end(options)
    retry(corrected(options))
    run_to_end(corrected(options))
    if is_down:  # the checkpoint of a later epoch says what the sink was seen to hold
        for name in ("f2.json", "f3.json"):
            sample.add(name, 5)
            run_to_end(corrected(options))
        (tmp_path / f"copy.db{DOWN}").touch()
    roll_back(corrected(options), 1, "copy")
    (tmp_path / f"copy.db{DOWN}").unlink(missing_ok=True)
    assert letters(options) == []
    run_to_end(corrected(options))
    assert sqlite_ids(tmp_path / "copy.db")[3] == 1
    assert sqlite_ids(tmp_path / "copy.db").keys() == sample.ids.keys()


def test_a_letter_that_was_refused_again_is_the_old_letter_after_a_rollback(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The letter of the retry is durable, and the head of the sink does not hold its epoch."""

    def fail(*_: object) -> FollowerHead:
        raise SinkError("down")

    options = corrected(options, refused=3, required=False)
    sample.add("f1.json", 10)
    run_to_end(options)
    retry(options)
    with monkeypatch.context() as patched:
        patched.setattr(SqliteSink, "_write", fail)
        run_to_end(options)
    assert {letter["epoch"] for letter in letters(options)} == {2}
    roll_back(options, 1)
    assert [letter["epoch"] for letter in letters(options)] == [1]
    assert retry(corrected(options)) == 1
    run_to_end(corrected(options))
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids


def test_a_drop_that_a_rollback_undoes_can_be_repeated(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    sample.add("f1.json", 10)
    run_to_end(options)
    before = letters(options)
    LetterEdit(open_pipeline(options), "drop").perform("person")
    assert letters(options) == []
    roll_back(options, 1)
    assert letters(options) == before
    LetterEdit(open_pipeline(options), "drop").perform("person")
    assert letters(options) == []
    run_to_end(corrected(options))
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids - Counter([3])


def test_a_restore_opens_letters_whose_retry_never_arrived(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    sample.add("f1.json", 10)
    run_to_end(options)
    create_savepoint(open_pipeline(options), str(tmp_path / "saved"), copy=True)
    retry(corrected(options))
    restore_savepoint(open_pipeline(corrected(options)), str(tmp_path / "saved"), "person")
    assert [letter["epoch"] for letter in letters(options)] == [1]
    assert retry(corrected(options)) == 1
    run_to_end(corrected(options))
    assert sqlite_ids(tmp_path / "copy.db") == sample.ids


def test_a_forgotten_sink_keeps_open_what_a_rollback_opened(options: PipelineOptions, sample: SampleInput) -> None:
    sample.add("f1.json", 10)
    run_to_end(options)
    before = letters(options)
    retry(corrected(options))
    roll_back(corrected(options), 1)
    alone = replace(options, sinks=options.sinks[:1])
    SinkEdit(open_pipeline(alone), "forget", "copy").perform("person")
    assert [letter["values"] for letter in letters(alone)] == [letter["values"] for letter in before]
