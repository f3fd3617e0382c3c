"""Run files: sorted, named once, readable by others, verified on opening, mapped once."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from isal import isal_zlib

from firnline.errors import DamagedError, NewerFormatError, SchemaError, StateDamagedError
from firnline.faults import VARIABLE, InjectedFaultError
from firnline.state import segments as runs
from firnline.state.columns import Layout
from firnline.state.home import StateHome
from firnline.state.keys import locate
from firnline.state.lookup import scan
from firnline.state.manifest import SegmentRef
from firnline.state.segments import OPEN, OpenFiles, SegmentWriter, open_segment, write_segment
from tests.support.damage import cuts, flips

GROUPS = 16
LAYOUT = Layout(pa.schema([("id", pa.int64())]), pa.schema([("n", pa.int64()), ("note", pa.string())]), timers=True)


@pytest.fixture
def home(tmp_path: Path) -> StateHome:
    OPEN.clear()
    return StateHome(str(tmp_path / "home"))


def rows(ids: Any, layout: Layout = LAYOUT) -> pa.Table:
    ids = np.asarray(ids, np.int64)
    keys = pa.table({"id": ids})
    state = pa.table({"n": ids * 2, "note": [f"note {i}" for i in ids]})
    return layout.table(locate(keys, 1, GROUPS).slots, keys, state, timers=pa.array(ids))


def write(home: StateHome, ids: Any, epoch: int = 1) -> SegmentRef:
    return write_segment(home.storage, "cp/shard_0/totals.a1", rows(ids), LAYOUT, operator="totals", epoch=epoch)


def test_a_reference_says_what_the_file_is(home: StateHome) -> None:
    ref = write(home, range(1000), epoch=7)
    data = (Path(home.root) / ref.path).read_bytes()
    assert (ref.size_bytes, ref.crc32, ref.rows, ref.epoch) == (len(data), isal_zlib.crc32(data), 1000, 7)
    slots = rows(range(1000))["_slot"].to_numpy()
    assert (ref.first_group, ref.last_group) == (int(slots.min()) >> 48, int(slots.max()) >> 48)
    assert ref.path.startswith("cp/shard_0/totals.a1.")


def test_others_can_read_it(home: StateHome) -> None:
    ref = write(home, range(1000), epoch=7)
    with pa.OSFile(str(Path(home.root) / ref.path)) as source:
        table = pa.ipc.open_file(source).read_all()
    assert table.schema.names == ["_slot", "_removed", "id", "_timer", "n", "note"]
    about = {k.decode(): v.decode() for k, v in table.schema.metadata.items()}
    assert about == {
        "firnline.format": "1", "firnline.operator": "totals", "firnline.epoch": "7",
        "firnline.keys": "1", "firnline.timers": "1",
    }  # fmt: skip
    with duckdb.connect() as connection:
        connection.register("run", table)
        counted = connection.execute("select count(*), sum(n), bool_or(_removed) from run").fetchone()
    assert counted == (1000, 999 * 1000, False)
    slots = table["_slot"].to_numpy()
    assert bool((slots[1:] > slots[:-1]).all())


def test_every_write_has_a_name_of_its_own(home: StateHome) -> None:
    assert write(home, [1]).path != write(home, [1]).path


def test_batches_are_small_and_full(home: StateHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "BATCH_ROWS", 100)
    writer = SegmentWriter(home.storage, "cp/x", LAYOUT, operator="op", epoch=1)
    table = rows(range(1050))
    table = table.take(np.argsort(table["_slot"].to_numpy()))
    for start in range(0, 1050, 70):
        writer.write(table.slice(start, 70))
    ref = writer.close()
    assert ref is not None
    opened = open_segment(home, ref)
    assert [batch.num_rows for batch in opened.batches] == [100] * 10 + [50]
    assert pa.Table.from_batches(opened.batches).equals(table)
    for start, stop in ((0, 1050), (99, 101), (100, 200), (250, 951), (7, 7), (1049, 1050)):
        assert opened.slice(start, stop).equals(table.slice(start, stop - start))
    for row in (0, 99, 100, 1049):
        slot = int(table["_slot"][row].as_py())
        assert opened.slot_at(row) == slot
        assert (opened.find_row(slot), opened.find_row(slot, "right")) == (row, row + 1)
    assert (opened.find_row(0), opened.find_row(2**64 - 1, "right")) == (0, 1050)


def test_a_writer_without_rows_makes_no_file(home: StateHome) -> None:
    writer = SegmentWriter(home.storage, "cp/x", LAYOUT, operator="op", epoch=1)
    writer.write(rows([]))
    assert writer.close() is None
    assert not os.path.exists(home.root)
    with pytest.raises(ValueError, match="at least one row"):
        write(home, [])


def test_rows_out_of_order_are_refused(home: StateHome) -> None:
    writer = SegmentWriter(home.storage, "cp/x", LAYOUT, operator="op", epoch=1)
    table = rows(range(10))
    table = table.take(np.argsort(table["_slot"].to_numpy()))
    writer.write(table.slice(5))
    with pytest.raises(ValueError, match="order"):
        writer.write(table.slice(0, 5))
    with pytest.raises(ValueError, match="order"):
        writer.write(table.take(list(range(9, -1, -1))))


def test_a_key_that_comes_twice_is_refused(home: StateHome) -> None:
    with pytest.raises(ValueError, match="once"):
        write(home, [1, 2, 1])


def test_columns_of_another_type_are_refused() -> None:
    keys = pa.table({"id": [1]})
    slots = locate(keys, 1, GROUPS).slots
    with pytest.raises(SchemaError, match="'n'"):
        LAYOUT.table(slots, keys, pa.table({"n": ["text"], "note": ["x"]}))


def test_dictionaries_are_written_as_plain_values(home: StateHome) -> None:
    layout = Layout(
        pa.schema([("id", pa.dictionary(pa.int32(), pa.string()))]),
        pa.schema([("note", pa.dictionary(pa.int32(), pa.string()))]),
    )
    keys = pa.table({"id": pa.array(["a", "b"]).dictionary_encode()})
    state = pa.table({"note": pa.array(["x", "x"]).dictionary_encode()})
    table = layout.table(locate(keys, 1, GROUPS).slots, keys, state)
    ref = write_segment(home.storage, "cp/x", table, layout, operator="op", epoch=1)
    (found,) = scan([open_segment(home, ref)], (0, GROUPS), layout)
    assert found.sort_by("id").to_pylist() == [{"id": "a", "note": "x"}, {"id": "b", "note": "x"}]


@pytest.mark.parametrize("call", ["state.run.before", "state.run.after"])
def test_a_fault_is_raised_and_leaves_no_half_file(home: StateHome, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    from firnline import faults

    faults._seen.clear()
    monkeypatch.setenv(VARIABLE, f"{call}:1:raise")
    with pytest.raises(InjectedFaultError):
        write(home, range(10))
    assert not [p for p in Path(home.root).rglob("*") if p.is_file()]
    assert open_segment(home, write(home, range(10))).rows == 10


def test_a_disk_that_is_full_leaves_no_half_file(home: StateHome, monkeypatch: pytest.MonkeyPatch) -> None:
    storage: Any = home.storage
    create = storage.create

    class Full:
        def __init__(self, key: str) -> None:
            self._stream = create(key)

        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            self._stream.close()

    monkeypatch.setattr(storage, "create", Full)
    with pytest.raises(OSError, match="No space"):
        write(home, range(10))
    assert not [p for p in Path(home.root).rglob("*") if p.is_file()]


# -- rot ---------------------------------------------------------------------------------------------------


def test_every_flipped_byte_is_found(home: StateHome) -> None:
    ref = write(home, range(3))
    path = Path(home.root) / ref.path
    for at, data in flips(path.read_bytes()):
        path.write_bytes(data)
        os.utime(path, ns=(at, at))  # file times may be too coarse to tell two writes apart
        with pytest.raises(StateDamagedError, match=ref.path):
            open_segment(home, ref)


def test_every_cut_and_a_longer_file_are_found(home: StateHome) -> None:
    ref = write(home, range(3))
    path = Path(home.root) / ref.path
    whole = path.read_bytes()
    for _, data in cuts(whole, step=7):
        path.write_bytes(data)
        with pytest.raises(StateDamagedError, match="bytes"):
            open_segment(home, ref)
    path.write_bytes(whole + b"\0")
    with pytest.raises(StateDamagedError):
        open_segment(home, ref)
    path.unlink()
    with pytest.raises(StateDamagedError, match="missing"):
        open_segment(home, ref)


def test_a_file_that_rots_while_it_is_open_is_found_at_the_next_opening(home: StateHome) -> None:
    ref = write(home, range(3))
    path = Path(home.root) / ref.path
    open_segment(home, ref)
    _, data = next(flips(path.read_bytes()))
    path.unlink()
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    with pytest.raises(StateDamagedError):
        open_segment(home, ref)


def test_another_intact_file_is_not_taken_for_the_one_that_is_named(home: StateHome) -> None:
    one, other = write(home, [1, 2, 3]), write(home, [4, 5, 6])
    assert one.size_bytes == other.size_bytes
    path = Path(home.root) / one.path
    path.write_bytes((Path(home.root) / other.path).read_bytes())
    with pytest.raises(StateDamagedError):
        open_segment(home, one)


@pytest.mark.parametrize("name", ["../x.arrow", "/etc/passwd", "a/../../x", "a//b", "", "a/./b"])
def test_a_name_never_leads_out_of_the_home(home: StateHome, name: str) -> None:
    with pytest.raises(DamagedError, match="name"):
        open_segment(home, SegmentRef(name, 1, 1, 1, 0, 1, 1))


def test_a_newer_format_is_refused_by_name(home: StateHome, monkeypatch: pytest.MonkeyPatch) -> None:
    from firnline.state import columns

    monkeypatch.setattr(columns, "FORMAT", 2)
    ref = write(home, [1])
    monkeypatch.setattr(columns, "FORMAT", 1)
    with pytest.raises(NewerFormatError, match="format 2"):
        open_segment(home, ref)


def test_a_file_that_is_no_run_is_refused(home: StateHome, tmp_path: Path) -> None:
    path = Path(home.root) / "x.arrow"
    path.parent.mkdir(parents=True)
    table = pa.table({"a": [1]})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    data = path.read_bytes()
    ref = SegmentRef("x.arrow", len(data), isal_zlib.crc32(data), 1, 0, 1, 1)
    with pytest.raises(DamagedError, match="not a segment of state"):
        open_segment(home, ref)


# -- open files --------------------------------------------------------------------------------------------


def test_a_run_is_opened_once_and_read_once(home: StateHome, monkeypatch: pytest.MonkeyPatch) -> None:
    from firnline.state import home as module

    ref = write(home, range(100))
    read: list[int] = []
    original = module._checksum

    def counting(descriptor: int, size: int) -> int:
        read.append(size)
        return original(descriptor, size)

    monkeypatch.setattr(module, "_checksum", counting)
    assert open_segment(home, ref) is open_segment(home, ref)
    OPEN.clear()
    open_segment(home, ref)
    assert len(read) == 1


def test_the_least_recently_used_file_is_let_go(home: StateHome, monkeypatch: pytest.MonkeyPatch) -> None:
    few = OpenFiles(most=3)
    monkeypatch.setattr(runs, "OPEN", few)
    refs = [write(home, [i]) for i in range(4)]
    first = open_segment(home, refs[0])
    for ref in (refs[1], refs[2], refs[0], refs[3]):
        open_segment(home, ref)
    assert len(few) == 3
    assert open_segment(home, refs[0]) is first


def test_files_that_are_gone_are_let_go(home: StateHome, monkeypatch: pytest.MonkeyPatch) -> None:
    few = OpenFiles()
    monkeypatch.setattr(runs, "OPEN", few)
    refs = [write(home, [i]) for i in range(3)]
    for ref in refs[:2]:
        open_segment(home, ref)
    for ref in refs[:2]:
        (Path(home.root) / ref.path).unlink()
    open_segment(home, refs[2])
    assert len(few) == 1


def test_many_threads_open_and_read_the_same_runs(home: StateHome) -> None:
    refs = [write(home, range(i, i + 50)) for i in range(8)]
    wrong: list[object] = []

    def read() -> None:
        for _ in range(20):
            for i, ref in enumerate(refs):
                (table,) = scan([open_segment(home, ref)], (0, GROUPS), LAYOUT)
                if sorted(table["id"].to_pylist()) != list(range(i, i + 50)):
                    wrong.append(ref)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
