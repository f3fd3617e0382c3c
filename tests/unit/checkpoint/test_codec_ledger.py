"""Durable JSON and the ledger: what is written is read back, what is not what was written is refused."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firnline.checkpoint import ledger as ledger_module
from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.checkpoint.ledger import Fold, Ledger, LedgerEntry
from firnline.checkpoint.model import Checkpoint
from firnline.errors import CheckpointError, DamagedError, LedgerHoleError, NewerFormatError
from firnline.storage import LocalStorage
from firnline.types import EntryRef

TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)
CHECKPOINTS = st.builds(
    Checkpoint,
    pipeline=TEXT,
    epoch=st.integers(0, 2**62),
    generation=st.integers(0, 2**62),
    run=TEXT,
    attempt=TEXT,
    created_at=TEXT,
    positions=st.dictionaries(TEXT, JSON, max_size=2),
    floor=st.integers(0, 2**62),
)
FILES = st.lists(st.fixed_dictionaries({"path": TEXT, "to": st.integers(0, 9)}), max_size=3)
ENTRIES = st.builds(
    LedgerEntry,
    checkpoint=CHECKPOINTS,
    previous=st.none() | st.builds(EntryRef, st.integers(0, 9), TEXT, TEXT),
    inputs=st.dictionaries(TEXT, FILES, max_size=2),
    staged=st.dictionaries(TEXT, FILES, max_size=2),
    quarantine=FILES,
)


@given(st.dictionaries(TEXT.filter(lambda k: k not in ("format", "checksum")), JSON, max_size=4))
def test_sealed_values_round_trip(value: dict[str, object]) -> None:
    body = unseal(parse(canonical(seal(value)), "x"), "x")
    assert {k: v for k, v in body.items() if k != "format"} == value


@given(CHECKPOINTS)
def test_checkpoint_round_trips(checkpoint: Checkpoint) -> None:
    assert Checkpoint.from_json(parse(canonical(checkpoint.to_json()), "x")) == checkpoint


@given(ENTRIES)
def test_entry_round_trips(entry: LedgerEntry) -> None:
    assert LedgerEntry.from_bytes(entry.to_bytes(), "x") == entry


@given(ENTRIES, st.data())
@settings(max_examples=300)
def test_damaged_entry_gives_only_our_errors(entry: LedgerEntry, draw: st.DataObject) -> None:
    data = bytearray(entry.to_bytes())
    at = draw.draw(st.integers(0, len(data) - 1))
    data[at] ^= draw.draw(st.integers(1, 255))
    with contextlib.suppress(CheckpointError):
        LedgerEntry.from_bytes(bytes(data), "x")


@pytest.mark.parametrize("half", ["positions", "state"])
def test_half_a_checkpoint_is_refused(half: str) -> None:
    body = unseal(Checkpoint("p", 1, 1, "r", "a", "now", {"s": 1}).to_json(), "x")
    del body[half], body["format"]
    with pytest.raises(DamagedError, match=half):
        Checkpoint.from_json(seal(body))


def test_newer_format_is_refused_by_number() -> None:
    body = {**seal({"a": 1}), "format": 7}
    del body["checksum"]
    from firnline.checkpoint.codec import checksum

    with pytest.raises(NewerFormatError, match="format 7"):
        unseal({**body, "checksum": checksum(canonical(body))}, "x")


def fill(ledger: Ledger, epochs: int, first: int = 1, previous: EntryRef | None = None) -> EntryRef:
    ref = previous
    for epoch in range(first, first + epochs):
        checkpoint = Checkpoint("p", epoch, 1, "r", f"a{epoch}", "now", {})
        inputs = {"s": [{"path": f"f{epoch}", "to": 1, "status": "committed"}]}
        ref = ledger.stage(LedgerEntry(checkpoint, ref, inputs))
        stray = Checkpoint("p", epoch, 1, "r", f"lost{epoch}", "now", {})
        ledger.stage(LedgerEntry(stray, None, {"s": [{"path": "never", "to": 1, "status": "committed"}]}))
    assert ref is not None
    return ref


def paths(ledger: Ledger, tip: EntryRef) -> list[str]:
    return sorted(str(f["path"]) for link in ledger.chain(tip) for f in link.inputs["s"])


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    monkeypatch.setattr(ledger_module, "FOLD_ENTRIES", 5)
    return Ledger(LocalStorage(str(tmp_path)), "p")


def test_chain_reaches_only_what_commits_named(ledger: Ledger) -> None:
    tip = fill(ledger, 8)
    assert paths(ledger, tip) == sorted(f"f{n}" for n in range(1, 9))


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_folds_keep_every_file(ledger: Ledger, rounds: int) -> None:
    tip = None
    for number in range(rounds):
        tip = fill(ledger, 12, 1 + 12 * number, tip)
        assert ledger.fold(tip, tip.epoch - 2) >= 5
        ledger.sweep(tip.epoch - 2, tip)
    assert tip is not None
    assert paths(ledger, tip) == sorted(f"f{n}" for n in range(1, 1 + 12 * rounds))
    links = list(ledger.chain(tip))
    assert sum(isinstance(link, Fold) for link in links) == rounds
    epochs = [f["epoch"] for link in links if isinstance(link, Fold) for f in link.inputs["s"]]
    assert sorted(epochs) == list(range(1, tip.epoch - 2))


def test_a_fold_tells_of_every_file_what_its_entry_told(ledger: Ledger) -> None:
    """Read, begun, not reached, set aside with its reason: word for word, with the epoch, oldest first."""
    files = [
        {"path": "a", "from": 0, "to": 3, "status": "committed", "etag": "1", "late": True},
        {"path": "b", "from": 0, "to": 2, "status": "in_progress", "etag": "2"},
        {"path": "c", "from": 0, "to": 0, "status": "pending", "etag": "3"},
        {"path": "d", "from": 1, "to": 1, "status": "set_aside", "etag": "4", "reason": "broken"},
    ]
    ref = None
    for epoch in range(1, 9):
        checkpoint = Checkpoint("p", epoch, 1, "r", f"a{epoch}", "now", {})
        quarantine = [{"name": f"{epoch:020d}-a-q.parquet", "rows": epoch}]
        ref = ledger.stage(LedgerEntry(checkpoint, ref, {"s": files, "t": files[epoch % 4 :]}, quarantine=quarantine))
    assert ref is not None
    assert ledger.fold(ref, 8) == 7
    fold = list(ledger.chain(ref))[-1]
    assert isinstance(fold, Fold)
    assert fold.inputs["s"] == [{**file, "epoch": epoch} for epoch in range(1, 8) for file in files]
    assert fold.inputs["t"] == [{**file, "epoch": epoch} for epoch in range(1, 8) for file in files[epoch % 4 :]]
    assert [file["rows"] for file in fold.quarantine] == list(range(7, 0, -1))


def test_a_fold_has_a_bounded_number_of_files(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "FOLD_FILES", 3)
    tip = fill(ledger, 12)
    assert ledger.fold(tip, 11) == 10
    assert paths(ledger, tip) == sorted(f"f{n}" for n in range(1, 13))
    folds = [link for link in ledger.chain(tip) if isinstance(link, Fold)]
    assert [len(fold.inputs["s"]) for fold in folds] == [1, 3, 3, 3]
    ledger.sweep(11, tip)
    assert paths(ledger, tip) == sorted(f"f{n}" for n in range(1, 13))


@pytest.mark.parametrize("lost", [1, 4, 8])
def test_hole_in_the_chain_is_told(ledger: Ledger, tmp_path: Path, lost: int) -> None:
    tip = fill(ledger, 8)
    next(tmp_path.rglob(f"*-a{lost}.json")).unlink()
    with pytest.raises(LedgerHoleError):
        paths(ledger, tip)


def test_lost_fold_is_a_hole(ledger: Ledger, tmp_path: Path) -> None:
    tip = fill(ledger, 12)
    ledger.fold(tip, 10)
    next(tmp_path.rglob("fold-*")).unlink()
    with pytest.raises(LedgerHoleError):
        paths(ledger, tip)


def test_sweep_takes_only_what_nothing_names(ledger: Ledger, tmp_path: Path) -> None:
    tip = fill(ledger, 8)
    assert ledger.sweep(6, tip) == 5  # the strays of epochs 1 to 5
    assert paths(ledger, tip) == sorted(f"f{n}" for n in range(1, 9))
    assert len(list(tmp_path.rglob("*-lost*.json"))) == 3


class Counting(LocalStorage):
    """Notes what is read."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.read: list[str] = []

    def get(self, key: str) -> bytes:
        self.read.append(key)
        return super().get(key)


def test_who_asks_for_the_newest_entry_reads_one(tmp_path: Path) -> None:
    ledger = Ledger(storage := Counting(str(tmp_path)), "p")
    tip = fill(ledger, 40)
    assert next(iter(ledger.chain(tip))).previous is not None
    assert [key.rsplit("/", 1)[-1] for key in storage.read] == [tip.name]


@pytest.mark.parametrize("seen", range(1, 12))
def test_a_fold_beside_a_reader_makes_no_hole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: int) -> None:
    """Whatever the reader has seen when the entries are folded: each file is told once."""
    monkeypatch.setattr(ledger_module, "FOLD_ENTRIES", 5)
    monkeypatch.setattr(ledger_module, "_AHEAD", 0)  # so that nothing is read before the fold that is asked for later
    ledger = Ledger(LocalStorage(str(tmp_path)), "p")
    tip = fill(ledger, 12)
    told: list[str] = []
    for link in ledger.chain(tip):
        told += [str(file["path"]) for file in link.inputs["s"]]
        if len(told) == seen:
            assert ledger.fold(tip, 10) == 9
    assert sorted(told) == sorted(f"f{n}" for n in range(1, 13))
    assert ledger.chain_names(tip)[-1].startswith("fold-")


def test_a_fold_beside_a_fold_forgets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is overtaken while it reads what it would fold leaves the other's fold as it is."""
    monkeypatch.setattr(ledger_module, "FOLD_ENTRIES", 2)
    monkeypatch.setattr(ledger_module, "_AHEAD", 0)
    slow = Ledger(storage := Counting(str(tmp_path)), "p")
    tip = fill(slow, 12)
    get = storage.get

    def overtaken(key: str) -> bytes:
        data = get(key)
        if key.endswith("-a6.json"):
            monkeypatch.setattr(storage, "get", get)
            assert Ledger(LocalStorage(str(tmp_path)), "p").fold(tip, 10) == 9
        return data

    monkeypatch.setattr(storage, "get", overtaken)
    assert slow.fold(tip, 10) == 0
    assert paths(slow, tip) == sorted(f"f{n}" for n in range(1, 13))
