"""A journal that is lost, with its ledger or alone, is rebuilt from what the sinks hold: no row is lost or doubled."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from firnline.cli.main import run_command
from firnline.errors import CheckpointError, ConfigError, FirnlineError, SinkDivergedError, SinkError, StateLostError
from firnline.history.edits.recover import Recovery, RecoveryPlan
from firnline.history.edits.rollback import Rollback
from firnline.history.edits.sinks import SinkEdit
from firnline.options import LocalTierOptions, PipelineOptions, StoreOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.base import Sink
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.guard import GuardedSink
from firnline.sinks.known import find_away
from firnline.stores import open_store
from firnline.stores.audit import load_audit
from tests.support.keyed import WINDOWS, KeyedInput, keyed_options
from tests.support.pipelines import MakeOptions, make_epochs, run_once, run_to_end
from tests.support.samples import SampleInput, table_ids
from tests.support.sqlite_sink import DOWN, SqliteSink, SqliteSinkOptions, register_sqlite, sqlite_ids, sqlite_rows

ALL: dict[str, Any] = {"processed": ["*"]}


@pytest.fixture(autouse=True)
def kind(monkeypatch: pytest.MonkeyPatch) -> None:
    register_sqlite(monkeypatch)


@pytest.fixture
def options(make_options: MakeOptions, tmp_path: Path) -> PipelineOptions:
    """Two followers behind a journal; the second is optional."""
    sinks = (
        SqliteSinkOptions("one", str(tmp_path / "one.db")),
        SqliteSinkOptions("two", str(tmp_path / "two.db"), required=False),
    )
    return make_options(max_files=1, home=str(tmp_path / "home"), sinks=sinks)


def lose_journal(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "home" / "_delta_log")


def lose_home(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "home")


def recover(options: PipelineOptions, sink: str = "one", **settings: Any) -> RecoveryPlan:
    plan, _ = Recovery(open_pipeline(options), sink, **settings).perform("person")
    return plan


def as_follower(sink: Sink) -> SqliteSink:
    assert isinstance(sink, GuardedSink)
    assert isinstance(sink.inner, SqliteSink)
    return sink.inner


def fates(plan: RecoveryPlan) -> dict[str, str]:
    return {one.name: one.becomes for one in plan.sinks}


def run_until_in_sync(options: PipelineOptions) -> None:
    """Run, and once more: a run ends without waiting for an optional sink."""
    for _ in range(3):
        run_to_end(options)
        if len({sink.load().epoch for sink in open_pipeline(options).sinks}) == 1:
            return


def held(tmp_path: Path, *names: str) -> list[Counter[int]]:
    return [sqlite_ids(tmp_path / f"{name}.db") for name in names or ("one", "two")]


def down(tmp_path: Path, name: str) -> Path:
    return tmp_path / f"{name}.db{DOWN}"


def lag(options: PipelineOptions, sample: SampleInput, tmp_path: Path, name: str = "two", first: int = 50) -> None:
    """Make two epochs that the optional follower does not get."""
    down(tmp_path, name).touch()
    make_epochs(sample, options, 2, first=first)
    down(tmp_path, name).unlink()


@pytest.mark.parametrize("lose", [lose_journal, lose_home])
def test_every_row_lands_once_after_a_recovery(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path, lose: Any
) -> None:
    make_epochs(sample, options, 3)
    run_until_in_sync(options)
    journal = open_pipeline(options).deciding
    journal.load()
    old_id = journal.identity["table"]
    lose(tmp_path)
    ended = run_once(options).result
    assert ended.error is not None
    assert "firnline recover --from SINK" in ended.error.hint
    sample.add("g1.json", 3)
    plan = recover(options, **ALL)
    assert (plan.epoch, plan.new_epoch, plan.lost_journal) == (3, 4, old_id)
    assert plan.ledger == ("kept" if lose is lose_journal else "lost")
    assert fates(plan) == {"one": "in sync", "two": "in sync"}
    assert recover(options, **ALL).already
    make_epochs(sample, options, 1, first=80)
    run_until_in_sync(options)
    assert held(tmp_path) == [sample.ids, sample.ids]
    new = DeltaTable(str(tmp_path / "home"))
    assert str(new.metadata().id) != old_id
    assert new.to_pyarrow_table().num_rows == 0
    for sink in open_pipeline(options).sinks[1:]:
        checkpoint = sink.load().checkpoint
        assert checkpoint is not None
        assert checkpoint.deciding["table"] == str(new.metadata().id)
    with pytest.raises(ConfigError, match="is not lost: it holds epoch 6"):
        recover(options, **ALL)


def test_a_sink_that_lags_catches_up_from_the_outbox_if_the_ledger_is_there(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    make_epochs(sample, options, 2)
    run_until_in_sync(options)
    lag(options, sample, tmp_path)
    lose_journal(tmp_path)
    for name in ("one", "two"):  # whichever is named: the ledger knows more than one head
        plan = Recovery(open_pipeline(options), name).plan()
        assert (plan.epoch, fates(plan)) == (4, {"one": "in sync", "two": "catches up"})
    recover(options, "two")
    run_until_in_sync(options)
    assert held(tmp_path) == [sample.ids, sample.ids]


def test_epochs_that_no_sink_holds_come_from_the_outbox(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    options = replace(options, sinks=tuple(replace(sink, required=False) for sink in options.sinks))
    make_epochs(sample, options, 2)
    run_until_in_sync(options)
    for name in ("one", "two"):
        down(tmp_path, name).touch()
    make_epochs(sample, options, 2, first=50)
    for name in ("one", "two"):
        down(tmp_path, name).unlink()
    assert held(tmp_path) != [sample.ids, sample.ids]
    for number in (50, 51):
        sample.path(f"f{number:03d}.json").unlink()  # the source has forgotten them
    lose_journal(tmp_path)
    plan = recover(options)
    assert (plan.epoch, fates(plan)) == (4, {"one": "catches up", "two": "catches up"})
    run_until_in_sync(options)
    assert held(tmp_path) == [sample.ids, sample.ids]


def test_without_the_ledger_a_sink_that_lags_is_set_aside_and_comes_back_by_resume(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    make_epochs(sample, options, 2)
    run_until_in_sync(options)
    before = held(tmp_path, "two")[0]
    lag(options, sample, tmp_path)
    lose_home(tmp_path)
    plan = recover(options, **ALL)
    assert fates(plan) == {"one": "in sync", "two": "set aside"}
    away = find_away(open_pipeline(options).load().checkpoint, options.followers)
    assert "epochs 3 to 4 are lost" in away["two"]
    after = SampleInput(sample.folder)
    after._next = sample._next
    after.add("z1.json", 4)
    run_to_end(options)
    assert held(tmp_path) == [sample.ids + after.ids, before]
    SinkEdit(open_pipeline(options), "resume", "two").perform("person")
    later = SampleInput(sample.folder)
    later._next = sample._next
    later.add("z2.json", 4)
    run_until_in_sync(options)
    assert held(tmp_path) == [sample.ids + after.ids + later.ids, before + later.ids]


def test_without_the_ledger_a_sink_that_is_ahead_is_refused_unless_it_is_left(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    make_epochs(sample, options, 2)
    run_until_in_sync(options)
    lag(options, sample, tmp_path)
    lose_home(tmp_path)
    plan = Recovery(open_pipeline(options), "two", **ALL).plan()
    assert fates(plan) == {"one": "refused", "two": "in sync"}
    with pytest.raises(SinkDivergedError, match="'one' holds epoch 4") as caught:
        recover(options, "two", **ALL)
    assert "--from one" in caught.value.hint
    assert "--leave one" in caught.value.hint
    plan = recover(options, "two", leave=["one"], **ALL)
    assert (plan.epoch, plan.new_epoch, fates(plan)) == (2, 5, {"one": "set aside", "two": "in sync"})
    run_until_in_sync(options)
    assert held(tmp_path) == [sample.ids, sample.ids], "what only the other one held was read again"


def test_a_sink_that_cannot_be_read_must_be_left(options: PipelineOptions, sample: SampleInput, tmp_path: Path) -> None:
    make_epochs(sample, options, 2)
    run_until_in_sync(options)
    lose_home(tmp_path)
    down(tmp_path, "two").touch()
    with pytest.raises(SinkError, match="'two' cannot be read"):
        recover(options, **ALL)
    with pytest.raises(SinkError):
        recover(options, "two", **ALL)
    assert fates(recover(options, leave=["two"], **ALL))["two"] == "set aside"
    down(tmp_path, "two").unlink()
    make_epochs(sample, options, 1, first=60)
    SinkEdit(open_pipeline(options), "resume", "two").perform("person")
    make_epochs(sample, options, 1, first=70)
    run_until_in_sync(options)
    missing = Counter(json.loads(line)["id"] for line in sample.path("f060.json").read_text().splitlines())
    assert held(tmp_path) == [sample.ids, sample.ids - missing]


@pytest.mark.parametrize("lose", [lose_journal, lose_home])
def test_a_sink_that_lost_its_head_gets_everything_again_or_is_set_aside(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path, lose: Any
) -> None:
    make_epochs(sample, options, 2)
    run_until_in_sync(options)
    lose(tmp_path)
    (tmp_path / "two.db").unlink()
    kept = lose is lose_journal  # and with it the outbox
    assert fates(recover(options, **ALL)) == {"one": "in sync", "two": "catches up" if kept else "set aside"}
    make_epochs(sample, options, 1, first=30)
    run_until_in_sync(options)
    assert held(tmp_path) == [sample.ids, sample.ids if kept else Counter()]


def test_a_part_of_an_epoch_is_finished_or_refused(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = options.sinks
    options = replace(options, sinks=(replace(one, ranges=True), two))  # type: ignore[call-arg]
    make_epochs(sample, options, 1)
    run_until_in_sync(options)
    sample.add("g.json", 250)
    write = SqliteSink._write
    writes = iter(range(100))

    def fail_after_one(self: SqliteSink, *arguments: Any) -> Any:
        if self.name == "one" and next(writes) >= 1:
            raise SinkError("away")
        return write(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(SqliteSink, "_write", fail_after_one)
        assert run_once(options).exit_code != 0
    assert 3 < sum(held(tmp_path, "one")[0].values()) < 253
    shutil.copytree(tmp_path / "home", tmp_path / "kept")
    lose_home(tmp_path)
    with pytest.raises(FirnlineError, match="some rows of epoch 2") as caught:
        recover(options, leave=["two"], **ALL)
    assert "--accept-duplicates" in caught.value.hint
    shutil.copytree(tmp_path / "kept", tmp_path / "home")
    lose_journal(tmp_path)
    recover(options)
    run_until_in_sync(options)
    assert held(tmp_path) == [sample.ids, sample.ids]


def test_rows_of_a_part_may_come_again(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(options, sinks=(replace(options.sinks[0], ranges=True),))  # type: ignore[call-arg]
    make_epochs(sample, options, 1)
    sample.add("g.json", 150)
    write = SqliteSink._write
    writes = iter(range(100))

    def fail_after_one(self: SqliteSink, *arguments: Any) -> Any:
        if next(writes) >= 1:
            raise SinkError("away")
        return write(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(SqliteSink, "_write", fail_after_one)
        assert run_once(options).exit_code != 0
    lose_home(tmp_path)
    recover(options, accept_duplicates=True, **ALL)
    run_to_end(options)
    rows = held(tmp_path, "one")[0]
    assert rows.keys() == sample.ids.keys()
    assert Counter(rows.values()) == {1: 53, 2: 100}


def test_late_files_are_decided_by_name(options: PipelineOptions, sample: SampleInput, tmp_path: Path) -> None:
    make_epochs(sample, options, 3)
    run_until_in_sync(options)
    lose_home(tmp_path)
    sample.add("a-late.json", 4)
    with pytest.raises(ConfigError, match="nothing tells whether these files") as caught:
        recover(options)
    assert "--assume-processed" in caught.value.hint
    plan = recover(options, processed=["*"], new=["*a-late*"])
    assert Counter(file.taken_as for file in plan.files) == {"processed": 3, "new": 1}
    for _ in range(2):
        run_until_in_sync(options)
    assert held(tmp_path) == [sample.ids, sample.ids]


def test_a_table_beside_the_journal_serves_too(make_options: MakeOptions, sample: SampleInput, tmp_path: Path) -> None:
    lake = DeltaSinkOptions("lake", str(tmp_path / "lake"), required=False)
    sinks = (SqliteSinkOptions("one", str(tmp_path / "one.db")), lake)
    options = make_options(max_files=1, home=str(tmp_path / "home"), sinks=sinks, lineage=True)
    make_epochs(sample, options, 3)
    run_until_in_sync(options)
    lose_home(tmp_path)
    plan = recover(options, "lake")
    assert {file.how for file in plan.files} == {"its rows are in a table"}
    make_epochs(sample, options, 2, first=10)
    run_until_in_sync(options)
    assert table_ids(tmp_path / "lake") == sample.ids
    assert held(tmp_path, "one") == [sample.ids]


def test_a_recovered_journal_can_be_lost_again(options: PipelineOptions, sample: SampleInput, tmp_path: Path) -> None:
    for number, lose in enumerate((lose_home, lose_journal, lose_home)):
        make_epochs(sample, options, 2, first=10 * number)
        run_until_in_sync(options)
        lose(tmp_path)
        recover(options, **ALL)
        assert DeltaTable(str(tmp_path / "home")).version() >= (number + 1) * 1_000_000_000
    make_epochs(sample, options, 1, first=90)
    run_until_in_sync(options)
    assert held(tmp_path) == [sample.ids, sample.ids]


def test_a_rollback_after_a_recovery(options: PipelineOptions, sample: SampleInput, tmp_path: Path) -> None:
    make_epochs(sample, options, 3)
    run_until_in_sync(options)
    lose_journal(tmp_path)
    recover(options)
    make_epochs(sample, options, 1, first=20)
    run_until_in_sync(options)
    Rollback(open_pipeline(options), 2, leave=["one", "two"]).perform("person")
    run_until_in_sync(options)
    again = Counter(
        json.loads(line)["id"]
        for name in ("f003.json", "f020.json")
        for line in sample.path(name).read_text().splitlines()
    )
    assert held(tmp_path) == [sample.ids + again, sample.ids + again]


def test_a_store_that_knows_more_stops_nothing_and_has_the_audit_trail(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    store = StoreOptions(path=str(tmp_path / "store"))
    checkpoint = replace(options.checkpoint, store=store, local=LocalTierOptions(str(tmp_path / "tier")))
    options = replace(
        options, checkpoint=checkpoint, sinks=tuple(replace(sink, required=False) for sink in options.sinks)
    )
    make_epochs(sample, options, 2)
    run_until_in_sync(options)
    for name in ("one", "two"):
        down(tmp_path, name).touch()
    make_epochs(sample, options, 2, first=50)
    for name in ("one", "two"):
        down(tmp_path, name).unlink()
    lose_home(tmp_path)
    plan = recover(options, processed=["*"])
    assert (plan.epoch, plan.new_epoch) == (2, 5), "the store knows epoch 4, whose number is not used again"
    run_until_in_sync(options)
    assert held(tmp_path) == [sample.ids, sample.ids]
    records = [one.record for one in load_audit(open_store(store, held_by="test"), options.name)]
    assert ("recover", "done") in {(one.what, one.outcome) for one in records if one is not None}


def test_state_that_is_gone_is_refused(tmp_path: Path) -> None:
    keyed = KeyedInput(tmp_path / "in")
    sink = SqliteSinkOptions("one", str(tmp_path / "one.db"), input="windows")
    options = keyed_options(tmp_path, (WINDOWS,), sinks=(sink,), home=str(tmp_path / "home"))
    keyed.add()
    run_to_end(options)
    lose_home(tmp_path)
    with pytest.raises(StateLostError, match="the state of operator 'windows'"):
        recover(options, **ALL)


def test_state_in_a_tier_serves(tmp_path: Path) -> None:
    keyed = KeyedInput(tmp_path / "in")
    sink = SqliteSinkOptions("one", str(tmp_path / "one.db"), input="windows")
    settings: dict[str, Any] = {"local": LocalTierOptions(str(tmp_path / "tier"))}
    options = keyed_options(tmp_path, (WINDOWS,), sinks=(sink,), home=str(tmp_path / "home"), **settings)
    other = KeyedInput(tmp_path / "other" / "in")
    unharmed = keyed_options(
        tmp_path / "other",
        (WINDOWS,),
        sinks=(replace(sink, path=str(tmp_path / "other" / "one.db")),),
        home=str(tmp_path / "other" / "home"),
    )
    keyed.add()
    run_to_end(options)
    lose_home(tmp_path)
    recover(options, **ALL)
    keyed.add()
    run_to_end(options)
    for _ in range(2):
        other.add()
        run_to_end(unharmed)

    def rows(folder: Path) -> Counter[str]:
        return Counter(
            json.dumps({name: value for name, value in row.items() if name != "_sequence"})  # it has the epoch's number
            for row in sqlite_rows(folder / "one.db")
        )

    assert rows(tmp_path) == rows(tmp_path / "other")


def test_what_cannot_serve_is_refused(
    options: PipelineOptions, make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    make_epochs(sample, options, 1)
    with pytest.raises(ConfigError, match="is not lost"):
        recover(options)
    with pytest.raises(ConfigError, match="no sink 'onn'"):
        recover(options, "onn")
    lose_home(tmp_path)
    new = SqliteSinkOptions("new", str(tmp_path / "new.db"))
    with pytest.raises(ConfigError, match="holds no epoch"):
        recover(replace(options, sinks=(*options.sinks, new)), "new")
    sink = as_follower(open_pipeline(options).sink("one"))
    head = sink.read_head()
    assert head is not None
    assert head.checkpoint is not None
    sink.swap_head(head, replace(head, checkpoint=replace(head.checkpoint, deciding={})))
    with pytest.raises(ConfigError, match="names no journal"):
        recover(options, **ALL)
    tables = make_options(sinks=(DeltaSinkOptions("table", str(tmp_path / "table")),))
    with pytest.raises(ConfigError, match="has no journal"):
        recover(tables, "table")


def test_a_sink_of_another_journal_is_refused_by_name(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    elsewhere = replace(options, sinks=options.sinks[1:], journal=replace(options.journal, table=str(tmp_path / "h2")))  # type: ignore[type-var]
    make_epochs(sample, replace(options, sinks=options.sinks[:1]), 1)
    run_to_end(elsewhere)
    lose_home(tmp_path)
    with pytest.raises(FirnlineError, match="names the journal"):
        recover(options, **ALL)


def test_a_plan_that_is_out_of_date_decides_nothing(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    make_epochs(sample, options, 2)
    run_until_in_sync(options)
    lose_home(tmp_path)
    edit = Recovery(open_pipeline(options), "one", processed=["*f00*"])
    read = edit._read
    calls = iter(range(10))

    def overtaken() -> Any:
        if next(calls) == 1:
            sample.add("a.json", 3)
        return read()

    edit._read = overtaken  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="moved since the plan"):
        edit.perform("person")
    ended = run_once(options).result
    assert ended.error is not None
    assert "was begun and has not ended" in ended.error.message
    recover(options, processed=["*f00*"], new=["*/a.json"])
    run_until_in_sync(options)
    assert held(tmp_path) == [sample.ids, sample.ids]


def test_the_command(
    sample: SampleInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "firnline.yml").write_text(
        "name: flights\nhome: home\nsources:\n  flights: {type: files, path: in, min_age_secs: 0}\nsinks:\n"
        "  - {name: lake, type: delta, table: out, required: false}\nbatch: {commit_policy: quorum, quorum: 1}\n"
    )
    monkeypatch.chdir(tmp_path)
    from firnline.spec.build import load_options

    options = load_options(tmp_path / "firnline.yml", environ={})
    make_epochs(sample, options, 2)
    assert run_command(["recover", "--from", "lake", "--yes"]) == 2
    assert "is not lost" in capsys.readouterr().err
    lose_home(tmp_path)
    assert run_command(["recover", "--from", "lake", "--dry-run"]) == 2
    told = capsys.readouterr()
    assert "are undecided" in told.out
    assert "--assume-processed" in told.err
    command = ["recover", "--from", "lake", "--assume-processed", "*"]
    assert run_command([*command, "--dry-run"]) == 0
    assert "is lost, too" in capsys.readouterr().out
    assert run_command([*command, "--yes", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["done"] is True
    assert [one["becomes"] for one in body["sinks"]] == ["in sync"]
    assert run_command([*command, "--yes"]) == 0
    assert "done already" in capsys.readouterr().out
    make_epochs(sample, options, 1, first=9)
    assert table_ids(tmp_path / "out") == sample.ids
    capsys.readouterr()
    looks = (["status"], ["checkpoints"], ["files"], ["sinks", "list"], ["position", "show"], ["gc", "--dry-run"])
    for looking in looks:
        assert run_command([*looking, "--json"]) == 0, looking
        assert json.loads(capsys.readouterr().out), looking
    assert run_command(["checkpoints"]) == 0
    assert "recover" in capsys.readouterr().out
