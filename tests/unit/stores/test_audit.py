"""The audit trail: nothing is lost, nothing damaged hides the rest, no secret gets in."""

from __future__ import annotations

import ast
import multiprocessing
import os
from pathlib import Path
from typing import get_args

import pytest

import firnline
from firnline.errors import ConfigError, DamagedError, VersionConflictError
from firnline.history.edits.position import Action as PositionAction
from firnline.history.edits.sinks import Action as SinkAction
from firnline.process import this_process
from firnline.sinks.dead_letters import Answer
from firnline.stores.audit import (
    AuditRecord,
    append_audit,
    audit_key,
    audited,
    load_audit,
    make_record,
)
from firnline.stores.base import CheckpointStore
from firnline.stores.file import FileStore
from firnline.stores.memory import MemoryStore
from firnline.stores.sqlite import SqliteStore

KINDS = ("memory", "file", "sqlite")


def make_store(kind: str, folder: Path) -> CheckpointStore:
    made: dict[str, CheckpointStore] = {
        "memory": MemoryStore(),
        "file": FileStore(str(folder / "files")),
        "sqlite": SqliteStore(str(folder / "store.db")),
    }
    store = made[kind]
    store.open()
    return store


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    return make_store(request.param, tmp_path)


def test_a_record_survives_its_json() -> None:
    record = make_record("p", "rollback", run="r", from_epoch=7, to_epoch=4, details={"sinks": ["a"]}, outcome="begun")
    assert AuditRecord.from_json(record.to_json()) == record
    assert (record.user, record.host, record.pid) == (this_process().user, this_process().host, this_process().pid)


@pytest.mark.parametrize("value", [{}, None, [], {"id": "x"}, {**make_record("p", "import").to_json(), "pid": "x"}])
def test_another_shape_is_damaged(value: object) -> None:
    with pytest.raises(DamagedError):
        AuditRecord.from_json(value)


def test_only_known_deeds_are_audited() -> None:
    with pytest.raises(ValueError, match="nothing that is audited"):
        make_record("p", "mischief")


def test_everything_that_asks_for_a_record_gets_one() -> None:
    """Every call of these functions in the sources names an action that is audited."""
    calls = {"on_record": 1, "deletion_on_record": 1, "make_record": 1}
    asked = {f"sinks-{action}" for action in get_args(SinkAction)}
    asked |= {f"dead-letters-{action}" for action in get_args(Answer)}
    asked |= {f"position-{action}" for action in get_args(PositionAction)}
    built = 0
    for path in sorted(Path(firnline.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in calls:
                action = node.args[calls[node.func.id]]
                if isinstance(action, ast.Constant):
                    asked.add(str(action.value))
                built += isinstance(action, ast.JoinedStr)
    assert built == 3, "an action with a computed name belongs into this test"
    assert {"rollback", "gc", "sinks-resync", "dead-letters-drop", "position-set"} <= asked
    assert {make_record("p", action).what for action in asked} == asked


def test_the_trail_is_newest_first_and_paged(store: CheckpointStore) -> None:
    records = [make_record("p", "rollback", to_epoch=n) for n in range(250)]
    for record in records:
        append_audit(store, record)
    append_audit(store, make_record("other", "delete"))
    assert [e.record for e in load_audit(store, "p")] == records[::-1]
    page = load_audit(store, "p", limit=10)
    assert [e.version for e in page] == list(range(250, 240, -1))
    following = load_audit(store, "p", limit=10, before=page[-1].version)
    assert [e.version for e in following] == list(range(240, 230, -1))
    assert load_audit(store, "nobody") == []


def test_records_that_say_the_same_are_still_two(store: CheckpointStore) -> None:
    for _ in range(2):
        append_audit(store, make_record("p", "delete", run="r"))
    assert len(load_audit(store, "p")) == 2


def test_a_damaged_record_hides_no_other(tmp_path: Path) -> None:
    store = make_store("file", tmp_path)
    for number in range(3):
        append_audit(store, make_record("p", "delete", to_epoch=number))
    path = next(tmp_path.rglob(f"{2:020d}.json"))
    path.write_bytes(path.read_bytes().replace(b'"delete"', b'"import"'))
    found = load_audit(store, "p")
    assert [e.record.to_epoch if e.record else None for e in found] == [2, None, 0]
    assert "does not match its checksum" in found[1].problem


def test_a_record_that_is_gone_is_told(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    append_audit(store, make_record("p", "delete"))
    monkeypatch.setattr(type(store), "get_version_raw", lambda *_: None)
    assert [(e.record, e.problem) for e in load_audit(store, "p")] == [(None, "missing")]


def test_a_user_without_a_name_is_told_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr("getpass.getuser", nameless)
    assert this_process().user == str(os.getuid())


def test_credentials_in_details_are_left_out(store: CheckpointStore) -> None:
    details = {"place": "postgresql://me:secret@db/x", "more": [{"uri": "see s3://key:word@bucket/a b@c"}]}
    append_audit(store, make_record("p", "import", details=details))
    record = load_audit(store, "p")[0].record
    assert record is not None
    assert record.details == {"place": "postgresql://***@db/x", "more": [{"uri": "see s3://***@bucket/a b@c"}]}


def test_the_trail_outlives_a_delete(store: CheckpointStore) -> None:
    store.put_raw("p", b"checkpoint")
    append_audit(store, make_record("p", "delete"))
    assert store.delete("p")
    assert len(load_audit(store, "p")) == 1


def test_what_is_audited_tells_how_it_ended(store: CheckpointStore) -> None:
    with audited(store, make_record("p", "import", run="good")):
        assert [e.record.outcome for e in load_audit(store, "p") if e.record] == ["begun"]
    with pytest.raises(ConfigError), audited(store, make_record("p", "import", run="bad")):
        raise ConfigError("no")
    found = [e.record for e in load_audit(store, "p") if e.record]
    assert [(r.run, r.outcome) for r in found] == [
        ("bad", "failed"), ("bad", "begun"), ("good", "done"), ("good", "begun"),
    ]  # fmt: skip
    assert found[0].details["error"] == "config"


class LostAnswers(MemoryStore):
    """Loses the answer to the first few puts; `performed` says whether they were done."""

    def __init__(self, failures: int, *, performed: bool) -> None:
        super().__init__()
        self.failures = failures
        self.performed = performed

    def put_raw_versioned(self, key: str, data: bytes, expected: int, note: str = "") -> int:
        if self.failures:
            self.failures -= 1
            if self.performed:
                super().put_raw_versioned(key, data, expected, note)
            raise OSError("the answer was lost")
        return super().put_raw_versioned(key, data, expected, note)


@pytest.mark.parametrize("performed", [True, False])
def test_a_lost_answer_doubles_and_loses_nothing(performed: bool) -> None:
    store = LostAnswers(2, performed=performed)
    append_audit(store, make_record("p", "delete"))
    assert len(load_audit(store, "p")) == 1


def test_a_store_that_fails_all_the_time_is_told() -> None:
    with pytest.raises(OSError, match="lost"):
        append_audit(LostAnswers(100, performed=False), make_record("p", "delete"))


def test_a_failure_to_write_how_it_ended_does_not_hide_why() -> None:
    store = LostAnswers(0, performed=False)

    def fail() -> None:
        with audited(store, make_record("p", "import")):
            store.failures = 100
            raise ConfigError("the reason")

    with pytest.raises(ConfigError, match="the reason"):
        fail()


def test_a_failure_to_write_that_it_is_done_undoes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    store = LostAnswers(0, performed=False)
    with audited(store, make_record("p", "import")):
        store.failures = 100
    assert [e.record.outcome for e in load_audit(store, "p") if e.record] == ["begun"]
    assert "audit record not written" in caplog.text


def test_rivals_without_end_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rivals(MemoryStore):
        def put_raw_versioned(self, key: str, data: bytes, expected: int, note: str = "") -> int:
            raise VersionConflictError("somebody else")

    monkeypatch.setattr("firnline.stores.audit.TRIES", 5)
    with pytest.raises(VersionConflictError, match="all the time"):
        append_audit(Rivals(), make_record("p", "delete"))


def append_many(kind: str, folder: str, worker: int, count: int) -> None:
    store = make_store(kind, Path(folder))
    for number in range(count):
        append_audit(store, make_record("p", "rollback", run=str(worker), to_epoch=number))
    store.close()


@pytest.mark.parametrize("kind", ["file", "sqlite"])
def test_processes_that_append_at_the_same_time_lose_nothing(kind: str, tmp_path: Path) -> None:
    workers, count = 4, 25
    make_store(kind, tmp_path).close()
    context = multiprocessing.get_context("forkserver")
    started = [context.Process(target=append_many, args=(kind, str(tmp_path), n, count)) for n in range(workers)]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
    assert [process.exitcode for process in started] == [0] * workers
    found = load_audit(make_store(kind, tmp_path), "p")
    assert [e.version for e in found] == list(range(workers * count, 0, -1))
    for worker in range(workers):
        mine = [e.record.to_epoch for e in found if e.record and e.record.run == str(worker)]
        assert mine == list(range(count - 1, -1, -1))


def test_the_key_is_one_of_the_pipeline() -> None:
    assert audit_key("flights") == "flights/audit"
