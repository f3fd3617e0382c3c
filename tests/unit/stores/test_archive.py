"""Archives: what goes in comes out, byte for byte; what is not right is refused by its reason, and nothing is put."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from firnline.checkpoint.codec import canonical, checksum, seal
from firnline.checkpoint.model import Checkpoint
from firnline.errors import (
    CheckpointError,
    ConfigError,
    DamagedError,
    FirnlineError,
    NewerFormatError,
    StoreAheadError,
    VersionConflictError,
)
from firnline.names import entry_name
from firnline.stores import archive as archive_module
from firnline.stores import archive as archive_reader
from firnline.stores.archive import Manifest, Stored, open_archive, write_archive
from firnline.stores.audit import append_audit, audit_key, load_audit, make_record
from firnline.stores.base import CheckpointStore, encode
from firnline.stores.file import FileStore
from firnline.stores.memory import MemoryStore
from firnline.stores.record import CheckpointRecord
from firnline.stores.sqlite import SqliteStore
from firnline.stores.transfer import ImportPlan, Truth, perform_import, plan_import, stored_versions
from firnline.types import EntryRef

AT = "2026-11-16T04:41:57+00:00"
KINDS = ("memory", "file", "sqlite")


def make_checkpoint_record(epoch: int, attempt: str = "", pipeline: str = "p", filler: str = "") -> CheckpointRecord:
    attempt = attempt or f"{epoch:016x}"
    positions = {"s": {"root": "/in", "files": {}, "last_committed_file": f"/in/{epoch}", "filler": filler}}
    checkpoint = Checkpoint(pipeline, epoch, 1, "run", attempt, AT, positions)
    entry = EntryRef(epoch, entry_name(epoch, attempt), checksum(f"{epoch}-{attempt}".encode()))
    return CheckpointRecord(checkpoint, entry, sinks={"delta": {"rows": 5, "version": epoch}})


def truth_of(record: CheckpointRecord) -> Truth:
    return Truth(record.epoch, record.entry, record.checkpoint.checksum)


def put_all(store: CheckpointStore, records: list[CheckpointRecord]) -> None:
    for record in records:
        store.put(record.checkpoint.pipeline, record, note=f"epoch {record.epoch}")


def export(store: CheckpointStore, path: Path, pipeline: str = "p") -> Manifest:
    left_out: list[str] = []
    versions = stored_versions(store, pipeline, left_out)
    return write_archive(
        str(path), versions, pipeline=pipeline, created_at=AT, origin=store.kind, left_out=left_out, replace=True
    )


def plan(store: CheckpointStore, path: Path, truth: Truth, pipeline: str = "p") -> ImportPlan:
    with open_archive(str(path)) as archive:
        return plan_import(store, archive, pipeline, truth)


def bring_in(store: CheckpointStore, path: Path, truth: Truth, pipeline: str = "p") -> ImportPlan:
    with open_archive(str(path)) as archive:
        found = plan_import(store, archive, pipeline, truth)
        perform_import(store, archive, found, make_record(pipeline, "import"))
    return found


def contents(store: CheckpointStore, key: str = "p") -> list[tuple[bytes, str]]:
    """Every version's bytes and note, oldest first."""
    found = []
    before = None
    while page := store.list_versions(key, before=before):
        found += [(store.get_version_raw(key, info.version) or b"", info.note) for info in page]
        before = page[-1].version
    return found[::-1]


def open_kind(kind: str, folder: Path) -> CheckpointStore:
    store: CheckpointStore
    if kind == "memory":
        store = MemoryStore()
    elif kind == "file":
        store = FileStore(str(folder / f"files-{random.getrandbits(64):x}"))
    else:
        store = SqliteStore(str(folder / f"{random.getrandbits(64):x}.db"))
    store.open()
    return store


@pytest.fixture
def records() -> list[CheckpointRecord]:
    return [make_checkpoint_record(n) for n in range(1, 6)]


@pytest.fixture
def truth(records: list[CheckpointRecord]) -> Truth:
    return truth_of(records[-1])


@pytest.fixture
def full(records: list[CheckpointRecord]) -> CheckpointStore:
    """A store with five epochs and two audit records."""
    store = MemoryStore()
    put_all(store, records)
    for number in range(2):
        append_audit(store, make_record("p", "rollback", to_epoch=number))
    return store


@pytest.fixture
def path(full: CheckpointStore, tmp_path: Path) -> Path:
    export(full, tmp_path / "p.tar")
    return tmp_path / "p.tar"


# -- writing --------------------------------------------------------------------------------------------


def test_an_archive_is_a_plain_sorted_tar_that_anybody_can_read(full: CheckpointStore, path: Path) -> None:
    with tarfile.open(path, "r:") as tar:
        names = tar.getnames()
        assert names[0] == "manifest.json"
        assert names[1:] == sorted(names[1:])
        assert len(names) == 8
        manifest = json.loads(read(tar, "manifest.json"))
        assert {m["name"]: m["sha256"] for m in manifest["members"]} == {n: checksum(read(tar, n)) for n in names[1:]}
        assert [read(tar, n) for n in names if n.startswith("checkpoints/")] == [data for data, _ in contents(full)]
        assert all((m.mtime, m.uid, m.gid, m.mode) == (0, 0, 0, 0o600) for m in tar.getmembers())
    assert (manifest["pipeline"], manifest["created_at"], manifest["origin"]) == ("p", AT, "memory")


def read(tar: tarfile.TarFile, name: str) -> bytes:
    stream = tar.extractfile(name)
    assert stream is not None
    return stream.read()


def test_the_same_versions_give_the_same_bytes(full: CheckpointStore, path: Path, tmp_path: Path) -> None:
    export(full, tmp_path / "again.tar")
    assert (tmp_path / "again.tar").read_bytes() == path.read_bytes()


def test_a_file_is_replaced_only_when_told(path: Path, tmp_path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="is there already"):
        write_archive(str(path), [], pipeline="p", created_at=AT, origin="memory")
    with pytest.raises(ConfigError, match="is a folder"):
        write_archive(str(tmp_path), [], pipeline="p", created_at=AT, origin="memory", replace=True)
    with pytest.raises(ConfigError, match="no folder"):
        write_archive(str(tmp_path / "no/p.tar"), [], pipeline="p", created_at=AT, origin="memory")
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


def test_a_file_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    def versions() -> Iterator[Stored]:
        (tmp_path / "p.tar").write_text("mine")
        yield Stored("checkpoints", 1, AT, "", b"one")

    with pytest.raises(ConfigError, match="is there already"):
        write_archive(str(tmp_path / "p.tar"), versions(), pipeline="p", created_at=AT, origin="memory")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"p.tar": "mine"}


class Pruning(MemoryStore):
    """Somebody prunes the oldest version between the listing and the reading."""

    def get_version_raw(self, key: str, version: int) -> bytes | None:
        return None if version == 1 else super().get_version_raw(key, version)


def test_versions_that_are_pruned_meanwhile_are_passed_over(
    records: list[CheckpointRecord], tmp_path: Path, path: Path, truth: Truth
) -> None:
    store = Pruning()
    put_all(store, records)
    assert [m.version for m in export(store, tmp_path / "q.tar").members] == [2, 3, 4, 5]
    assert plan(store, path, truth).already_there == 4


def test_an_export_that_breaks_leaves_nothing(tmp_path: Path) -> None:
    def versions() -> Iterator[Stored]:
        yield Stored("checkpoints", 1, AT, "", b"one")
        raise OSError("the store is gone")

    with pytest.raises(OSError, match="gone"):
        write_archive(str(tmp_path / "p.tar"), versions(), pipeline="p", created_at=AT, origin="memory")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("point", [f"archive.{c}.{s}" for c in ("write", "publish") for s in ("before", "after")])
def test_a_file_is_whole_or_not_there(point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from firnline import faults

    faults._seen.clear()
    monkeypatch.setenv(faults.VARIABLE, f"{point}:1:raise")
    with pytest.raises(faults.InjectedFaultError):
        write_archive(str(tmp_path / "p.tar"), [], pipeline="p", created_at=AT, origin="memory")
    assert os.listdir(tmp_path) == ([] if point.endswith("before") else ["p.tar"])
    for name in os.listdir(tmp_path):
        with open_archive(str(tmp_path / name)) as archive:
            assert list(archive.members()) == []


def test_damaged_versions_are_left_out_and_named(records: list[CheckpointRecord], tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"))
    store.open()
    put_all(store, records)
    append_audit(store, make_record("p", "delete"))
    append_audit(store, make_record("p", "delete"))
    for folder in ("checkpoint", "parts/audit"):
        damaged = tmp_path / "store/p" / folder / f"{2:020d}.json"
        damaged.write_bytes(damaged.read_bytes().replace(b"p", b"q", 1))
    manifest = export(store, tmp_path / "p.tar")
    assert len(manifest.left_out) == 2
    assert [m.version for m in manifest.members if m.part == "checkpoints"] == [1, 3, 4, 5]
    other = MemoryStore()
    assert len(bring_in(other, tmp_path / "p.tar", truth_of(records[-1])).put) == 4


# -- round trip -----------------------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> list[CheckpointRecord]:
    """Epochs that grow, with gaps; sizes on both sides of the threshold of packing."""
    epochs = draw(st.lists(st.integers(1, 10_000), min_size=1, max_size=8, unique=True))
    return [
        make_checkpoint_record(epoch, filler=draw(st.sampled_from(["", "é", "x" * 20_000]))) for epoch in sorted(epochs)
    ]


@settings(max_examples=40)
@given(
    history=histories(),
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
    start=st.integers(0, 8),
    audits=st.integers(0, 3),
    pruned=st.integers(0, 3),
)
def test_versions_survive_the_way_between_any_two_stores(
    history: list[CheckpointRecord], kinds: tuple[str, str], start: int, audits: int, pruned: int
) -> None:
    """Whatever the target had of it before: nothing, a part, or all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, target = open_kind(kinds[0], folder), open_kind(kinds[1], folder)
        put_all(source, history)
        put_all(target, history[:start])
        for _ in range(audits):
            append_audit(source, make_record("p", "rollback"))
        source.prune("p", max(1, len(history) - min(pruned, max(start - 1, 0))))
        export(source, folder / "p.tar")
        truth = truth_of(history[-1])
        assert len(bring_in(target, folder / "p.tar", truth).put) == max(len(history) - start, 0)
        assert contents(target) == [(encode(r.to_json(), "CheckpointRecord"), f"epoch {r.epoch}") for r in history]
        assert [d for d, _ in contents(source, audit_key("p"))] == [d for d, _ in contents(target, audit_key("p"))][
            1 : audits + 1
        ]
        assert not plan(target, folder / "p.tar", truth).is_needed
        source.close()
        target.close()


# -- what continues what --------------------------------------------------------------------------------


def test_an_empty_store_gets_all_of_it(full: CheckpointStore, path: Path, truth: Truth) -> None:
    store = MemoryStore()
    found = bring_in(store, path, truth)
    assert (len(found.put), found.already_there, found.store_epoch, found.archive_epoch) == (5, 0, None, 5)
    assert contents(store) == contents(full)
    outcomes = [e.record.outcome for e in load_audit(store, "p") if e.record and e.record.what == "import"]
    assert outcomes == ["done", "begun"]


def test_a_store_after_a_delete_is_an_empty_one(full: CheckpointStore, path: Path, truth: Truth) -> None:
    before = contents(full)
    full.delete("p")
    assert len(bring_in(full, path, truth).put) == 5
    assert contents(full) == before


def test_a_store_that_went_on_since_lacks_nothing(path: Path, records: list[CheckpointRecord]) -> None:
    store = MemoryStore()
    put_all(store, [*records, make_checkpoint_record(6)])
    found = plan(store, path, truth_of(make_checkpoint_record(6)))
    assert (found.put, found.already_there, found.older) == ((), 5, 0)


def test_what_lies_before_the_store_is_left_out(path: Path, records: list[CheckpointRecord], truth: Truth) -> None:
    store = MemoryStore()
    put_all(store, records[2:4])
    found = bring_in(store, path, truth)
    assert (len(found.put), found.already_there, found.older) == (1, 2, 2)
    assert [json.loads(data)["value"]["checkpoint"]["epoch"] for data, _ in contents(store)] == [3, 4, 5]


def test_the_next_epoch_continues(records: list[CheckpointRecord], tmp_path: Path, truth: Truth) -> None:
    first, second = MemoryStore(), MemoryStore()
    put_all(first, records[:3])
    put_all(second, records[3:])
    export(second, tmp_path / "p.tar")
    assert len(bring_in(first, tmp_path / "p.tar", truth).put) == 2


def test_a_gap_is_refused(records: list[CheckpointRecord], tmp_path: Path, truth: Truth) -> None:
    first, second = MemoryStore(), MemoryStore()
    put_all(first, records[:2])
    put_all(second, records[3:])
    export(second, tmp_path / "p.tar")
    with pytest.raises(ConfigError, match="does not continue the store, which ends with epoch 2"):
        plan(first, tmp_path / "p.tar", truth)


def test_another_history_is_refused(path: Path, records: list[CheckpointRecord], truth: Truth) -> None:
    store = MemoryStore()
    put_all(store, [records[0], make_checkpoint_record(2, "other")])
    with pytest.raises(CheckpointError, match="epoch 2 of the archive is not the one that the store has"):
        plan(store, path, truth)


def test_more_than_the_table_holds_is_refused(path: Path, records: list[CheckpointRecord]) -> None:
    with pytest.raises(StoreAheadError, match="knows epoch 5, the table holds 4"):
        plan(MemoryStore(), path, truth_of(records[3]))
    with pytest.raises(StoreAheadError, match="the table holds 0"):
        plan(MemoryStore(), path, Truth())


def test_another_newest_epoch_than_the_tables_is_refused(path: Path) -> None:
    with pytest.raises(CheckpointError, match="epoch 5 of the archive is not the one that the table holds"):
        plan(MemoryStore(), path, truth_of(make_checkpoint_record(5, "other")))


def test_another_older_epoch_than_the_ledgers_is_refused(path: Path, truth: Truth) -> None:
    told = Truth(truth.epoch, truth.entry, truth.checkpoint_checksum, {3: make_checkpoint_record(3, "other").entry})
    with pytest.raises(CheckpointError, match="epoch 3 of the archive is not the one that the table holds"):
        plan(MemoryStore(), path, told)


def test_units_that_were_taken_back_travel_with_the_rest(tmp_path: Path) -> None:
    """An earlier epoch that was put again takes back those after it; the ledger knows only the later ones."""
    again = [make_checkpoint_record(n, f"again{n}") for n in (3, 4)]
    history = [*(make_checkpoint_record(n) for n in (1, 2, 3, 4)), make_checkpoint_record(2), *again]
    store = MemoryStore()
    put_all(store, history)
    export(store, tmp_path / "p.tar")
    truth = Truth(4, again[1].entry, again[1].checkpoint.checksum, {3: again[0].entry})
    for start in range(len(history) + 1):  # a kill after any of them
        other = MemoryStore()
        put_all(other, history[:start])
        bring_in(other, tmp_path / "p.tar", truth)
        assert contents(other) == contents(store)


def test_a_damaged_newest_version_is_put_again(path: Path, records: list[CheckpointRecord], truth: Truth) -> None:
    store = MemoryStore()
    put_all(store, records[:4])
    store.put_raw("p", b"rot")
    assert [m.version for m in bring_in(store, path, truth).put] == [5]


def test_a_store_of_a_newer_firnline_is_left_alone(path: Path, truth: Truth) -> None:
    store = MemoryStore()
    body = {"type": "CheckpointRecord", "value": {}, "format": 99}
    store.put_raw("p", canonical({**body, "checksum": checksum(canonical(body))}))
    with pytest.raises(NewerFormatError):
        plan(store, path, truth)


def test_somebody_elses_put_in_between_stops_an_import(path: Path, truth: Truth) -> None:
    class Rival(MemoryStore):
        def put_raw_versioned(self, key: str, data: bytes, expected: int, note: str = "") -> int:
            if key == "p" and expected == 2:
                self.put_raw("p", b"mine")
            return super().put_raw_versioned(key, data, expected, note)

    store = Rival()
    with pytest.raises(VersionConflictError):
        bring_in(store, path, truth)
    newest = load_audit(store, "p")[0].record
    assert newest is not None
    assert (newest.outcome, newest.details["error"]) == ("failed", "version-conflict")


def test_what_another_import_put_since_the_plan_is_not_put_again(
    path: Path, full: CheckpointStore, truth: Truth
) -> None:
    store = MemoryStore()
    with open_archive(str(path)) as archive:
        found = plan_import(store, archive, "p", truth)
        bring_in(store, path, truth)
        perform_import(store, archive, found, make_record("p", "import"))
    assert contents(store) == contents(full)


def test_what_was_deleted_since_the_plan_stops_an_import(path: Path, full: CheckpointStore, truth: Truth) -> None:
    full.delete("p")
    full.put("p", make_checkpoint_record(1))
    with open_archive(str(path)) as archive:
        found = plan_import(full, archive, "p", truth)
        full.delete("p")
        with pytest.raises(VersionConflictError):
            perform_import(full, archive, found, make_record("p", "import"))
    assert contents(full) == []


# -- hostile archives -----------------------------------------------------------------------------------

Members = list[tuple[tarfile.TarInfo, bytes]]


def load_members(path: Path) -> Members:
    with tarfile.open(path, "r:") as tar:
        return [(info, read(tar, info.name)) for info in tar.getmembers()]


def save_members(path: Path, members: Members) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for info, data in members:
            if info.isreg():
                info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def member(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = "manifest.json" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
    return info, data


def with_manifest(members: Members, change: Callable[[dict[str, Any]], None]) -> Members:
    """A manifest that was changed and sealed again: its maker means it."""
    body = json.loads(members[0][1])
    del body["checksum"]
    change(body)
    text = canonical({**body, "checksum": checksum(canonical(body))})
    return [(members[0][0], text), *members[1:]]


def replaced(members: Members, at: int, data: bytes) -> Members:
    """Another payload, listed as it is."""

    def change(body: dict[str, Any]) -> None:
        listed = next(m for m in body["members"] if m["name"] == members[at][0].name)
        listed.update(sha256=checksum(data), size_bytes=len(data))

    changed = with_manifest(members, change)
    return [*changed[:at], (changed[at][0], data), *changed[at + 1 :]]


def listed(name: str, data: bytes = b"") -> Callable[[dict[str, Any]], None]:
    item = {"name": name, "size_bytes": len(data), "sha256": checksum(data)}
    return lambda body: body["members"].append({**item, "version": 1, "created_at": "", "note": ""})


def first_note(body: dict[str, Any], note: str) -> None:
    body["members"][-1]["note"] = note


OTHERS = encode(make_checkpoint_record(5, pipeline="q").to_json(), "CheckpointRecord")
ANOTHER_ENTRY = encode(
    CheckpointRecord(make_checkpoint_record(5).checkpoint, make_checkpoint_record(4).entry).to_json(),
    "CheckpointRecord",
)
NO_CHECKSUM = encode(
    CheckpointRecord(make_checkpoint_record(5).checkpoint, EntryRef(5, "x", "zz")).to_json(), "CheckpointRecord"
)
HALF = make_checkpoint_record(5).to_json()
HALF["checkpoint"] = seal({k: v for k, v in HALF["checkpoint"].items() if k not in ("positions", "checksum", "format")})

HOSTILE: dict[str, tuple[Callable[[Members], Members], str]] = {
    "a symbolic link": (lambda m: [*m, member("checkpoints/x", tarfile.SYMTYPE)], "'checkpoints/x' is a link"),
    "a hard link": (lambda m: [*m, member("checkpoints/x", tarfile.LNKTYPE)], "is a link"),
    "a link as the manifest": (lambda m: [member("manifest.json", tarfile.SYMTYPE), *m[1:]], "is a link"),
    "a character device": (lambda m: [*m, member("checkpoints/x", tarfile.CHRTYPE)], "is a device"),
    "a block device": (lambda m: [*m, member("checkpoints/x", tarfile.BLKTYPE)], "is a device"),
    "a pipe": (lambda m: [*m, member("checkpoints/x", tarfile.FIFOTYPE)], "is a pipe"),
    "a folder": (lambda m: [*m, member("checkpoints", tarfile.DIRTYPE)], "is a folder"),
    "a sparse file": (lambda m: [*m, member("checkpoints/x", tarfile.GNUTYPE_SPARSE)], "special member"),
    "an extended header": (lambda m: [member("x", tarfile.XHDTYPE, b"30 path=../evil\n"), *m], "special member"),
    "a global header": (lambda m: [member("x", tarfile.XGLTYPE), *m], "special member"),
    "a long name": (lambda m: [member("x", tarfile.GNUTYPE_LONGNAME), *m], "special member"),
    "a way out": (lambda m: [*m, member("checkpoints/../../evil")], "leads out of the archive"),
    "a way out that is listed": (lambda m: with_manifest([*m, member("../evil")], listed("../evil")), "no name of a"),
    "an absolute name": (lambda m: [*m, member("/etc/evil")], "is an absolute name"),
    "an unknown member": (lambda m: [*m, member("readme.txt")], "does not list 'readme.txt'"),
    "an unknown member that is listed": (
        lambda m: with_manifest([*m, member("readme.txt")], listed("readme.txt")), "no name of a version",
    ),
    "a member twice": (lambda m: [*m, m[-1]], "is in it twice"),
    "a manifest twice": (lambda m: [*m, m[0]], "manifest.json is in it twice"),
    "a listing twice": (lambda m: with_manifest(m, lambda b: b["members"].append(b["members"][0])), "lists a member"),
    "a missing member": (lambda m: m[:-1], "is missing"),
    "no manifest": (lambda m: m[1:], "does not begin with manifest.json"),
    "a manifest that is not first": (lambda m: [m[1], m[0], *m[2:]], "does not begin with manifest.json"),
    "nothing": (lambda m: [], "does not begin with manifest.json"),
    "a changed manifest": (lambda m: [(m[0][0], m[0][1].replace(b"epoch 5", b"epoch 6")), *m[1:]], "its checksum"),
    "a manifest that is no JSON": (lambda m: [(m[0][0], b"{"), *m[1:]], "is not JSON"),
    "a manifest without members": (lambda m: with_manifest(m, lambda b: b.pop("members")), "lacks 'members'"),
    "a manifest of another kind": (lambda m: with_manifest(m, lambda b: b.update(kind="x")), "is of kind 'x'"),
    "a newer format": (lambda m: with_manifest(m, lambda b: b.update(format=2)), "reads up to 1"),
    "another pipeline": (lambda m: with_manifest(m, lambda b: b.update(pipeline="q")), "is of pipeline 'q', not 'p'"),
    "a wrong checksum": (lambda m: [*m[:-1], (m[-1][0], m[-1][1].replace(b"run", b"ran"))], "match its checksum"),
    "a wrong size": (lambda m: [*m[:-1], (m[-1][0], m[-1][1] + b" ")], "bytes, its manifest says"),
    "a negative size": (
        lambda m: with_manifest(m, lambda b: b["members"][0].update(size_bytes=-1)), "is listed with -1 bytes",
    ),
    "a damaged payload": (lambda m: replaced(m, -1, m[-1][1].replace(b"run", b"ran")), "match its checksum"),
    "a payload of another type": (lambda m: replaced(m, -1, m[1][1]), "holds a AuditRecord"),
    "an audit record that is none": (lambda m: replaced(m, 1, m[-1][1]), "holds a CheckpointRecord"),
    "a payload of another pipeline": (lambda m: replaced(m, -1, OTHERS), "is of pipeline 'q'"),
    "half a checkpoint": (lambda m: replaced(m, -1, encode(HALF, "CheckpointRecord")), "has no positions"),
    "an entry of another epoch": (lambda m: replaced(m, -1, ANOTHER_ENTRY), "names the entry of another epoch"),
    "an entry without a checksum": (lambda m: replaced(m, -1, NO_CHECKSUM), "names an entry without a checksum"),
    "a broken zstd frame": (lambda m: replaced(m, -1, b"\x28\xb5\x2f\xfdjunk"), "cannot be unpacked"),
    "a note of two lines": (lambda m: with_manifest(m, lambda b: first_note(b, "a\nb")), "a note is one line"),
    "a note without end": (lambda m: with_manifest(m, lambda b: first_note(b, "x" * 9999)), "a note is one line"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_archive_is_refused_by_its_reason(what: str, path: Path, truth: Truth) -> None:
    change, reason = HOSTILE[what]
    save_members(path, change(load_members(path)))
    store = MemoryStore()
    with pytest.raises(FirnlineError, match=reason.replace("(", r"\(")):
        bring_in(store, path, truth)
    assert list(store.list()) == []


@pytest.mark.parametrize(
    ("module", "bound", "value", "reason"),
    [
        (archive_module, "MAX_MEMBERS", 6, "lists 7 members, more than 6"),
        (archive_module, "MAX_MEMBER_BYTES", 100, "bytes, more than 100"),
        (archive_module, "MAX_TOTAL_BYTES", 1000, "bytes, more than 1,000"),
        (archive_reader, "MAX_MANIFEST_BYTES", 100, "more than is allowed"),
    ],
)
def test_bounds(
    module: Any, bound: str, value: int, reason: str, path: Path, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, bound, value)
    with pytest.raises(DamagedError, match=reason):
        plan(MemoryStore(), path, truth)


def test_a_small_frame_does_not_fill_the_memory(path: Path, truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_reader, "MAX_UNPACKED_BYTES", 1_000_000)
    save_members(path, replaced(load_members(path), -1, zstandard.compress(b" " * 2_000_000)))
    with pytest.raises(DamagedError, match="unpacks to more than 1,000,000 bytes"):
        plan(MemoryStore(), path, truth)


def test_a_frame_that_lies_about_its_size_is_refused(path: Path, truth: Truth) -> None:
    packed = bytearray(zstandard.compress(b" " * 100_000))
    packed[5:9] = b"\xff\xff\xff\x7f"  # the frame header's content size
    save_members(path, replaced(load_members(path), -1, bytes(packed)))
    with pytest.raises(DamagedError, match="cannot be unpacked"):
        plan(MemoryStore(), path, truth)


def test_a_header_with_an_endless_size_is_refused_before_it_is_read(path: Path, truth: Truth) -> None:
    members = load_members(path)
    info = members[-1][0]
    info.size = 1 << 40
    header = info.tobuf(tarfile.GNU_FORMAT)
    data = path.read_bytes()
    at = data.rindex(info.name.encode())
    path.write_bytes(data[:at] + header + data[at + 512 :])
    with pytest.raises(DamagedError, match=r"has 1,099,511,627,776 bytes, its manifest says"):
        plan(MemoryStore(), path, truth)


def test_a_header_with_a_negative_size_is_refused(path: Path, truth: Truth) -> None:
    info = load_members(path)[-1][0]
    info.size = -512
    header = info.tobuf(tarfile.GNU_FORMAT)
    data = path.read_bytes()
    at = data.rindex(info.name.encode())
    path.write_bytes(data[:at] + header + data[at + 512 :])
    with pytest.raises(DamagedError, match="has a negative size"):
        plan(MemoryStore(), path, truth)


def test_what_follows_the_end_is_refused(path: Path, truth: Truth) -> None:
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(DamagedError, match="something follows its end"):
        plan(MemoryStore(), path, truth)


def test_a_packed_archive_is_no_archive(path: Path, truth: Truth) -> None:
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(DamagedError, match="no tar file"):
        plan(MemoryStore(), path, truth)


def test_only_regular_files_are_read(tmp_path: Path, truth: Truth) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (("pipe", "not a regular file"), (".", "not a regular file"), ("no.tar", "is not there")):
        with pytest.raises(ConfigError, match=reason):
            plan(MemoryStore(), tmp_path / name, truth)


def test_an_archive_cut_at_any_length_is_refused(path: Path, truth: Truth) -> None:
    data = path.read_bytes()
    end = len(data.rstrip(b"\0"))
    for length in [*range(0, end, 97), end]:
        path.write_bytes(data[:length])
        store = MemoryStore()
        with pytest.raises(DamagedError):
            bring_in(store, path, truth)
        assert list(store.list()) == []


def test_a_flipped_byte_is_refused_or_means_nothing(path: Path, full: CheckpointStore, truth: Truth) -> None:
    data = path.read_bytes()
    rng = random.Random(7)
    for at in rng.sample(range(len(data.rstrip(b"\0")) + 600), 800):
        flipped = bytearray(data)
        flipped[at] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        store = MemoryStore()
        try:
            bring_in(store, path, truth)
        except FirnlineError:
            assert list(store.list()) == [], at
        else:  # in the padding between members
            assert contents(store) == contents(full), at
