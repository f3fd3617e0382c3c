"""The ledger: one entry per epoch, staged before the commit and true only once a commit names it.

Entries form a chain: each names the previous one by name and checksum. The true history is the chain back from the
entry that the newest commit names; it never reaches an entry of an attempt that was not committed. Old entries are
folded into larger files, which keep the list of input files and drop the rest.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import zstandard

from firnline.checkpoint.codec import FORMAT, canonical, check_format, checksum, parse, seal, unseal
from firnline.checkpoint.model import Checkpoint
from firnline.errors import DamagedError, LedgerHoleError, NewerFormatError
from firnline.names import entry_epoch, entry_name, fold_name, is_fold, ledger_epoch, ledger_folder, ledger_order
from firnline.storage import Storage
from firnline.types import EntryRef, Json

FOLD_ENTRIES = 128  # entries per fold: a fold stays a few MB, and a year of minutes a few thousand files
HISTORY_EDITS = ("rollback", "fresh", "restore", "rescale", "import", "repair", "position", "recover")
_EDIT_NAMES = {
    "fresh": "fresh start",
    "import": "state import",
    "repair": "ledger repair",
    "position": "position change",
    "recover": "recovery",
}
FOLD_FILES = 20_000  # then a fold is complete, so that a reader needs some tens of MB
IDLE = "idle"  # of an input record: nothing was read, only the position moved
_READERS = 8
_AHEAD = 16


def edit_name(kind: str) -> str:
    """Return the name of a history edit for people: rollback, restore, fresh start, rescale and so on."""
    return _EDIT_NAMES.get(kind, kind)


def read_paths(records: Iterable[Mapping[str, Json]]) -> set[str]:
    """Return the names of inputs that an epoch read or tried to read, from its input records."""
    return {str(record["path"]) for record in records if record.get("status") not in ("pending", "dropped", "refused")}


def is_idle_input(inputs: Mapping[str, Sequence[Mapping[str, Json]]]) -> bool:
    """Return whether input records, by source, say that an epoch only moved positions."""
    return bool(inputs) and all(record.get(IDLE) for records in inputs.values() for record in records)


def is_failed(record: Mapping[str, Json]) -> bool:
    """Return whether an epoch tried to read an input and got nothing of it, from its input record."""
    tried = record.get("status") in ("in_progress", "set_aside")
    return tried and bool(record.get("reason")) and record.get("to") == record.get("from")


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One epoch: what was read, what was staged, and the resulting checkpoint.

    `inputs` lists, per source, every file with its record range, size and etag. `staged` lists, per sink, the files
    that a commit adds; a lagging sink gets exactly those. `kind` is `epoch`; `baseline` for input that another tool
    read before Firnline took over; or one of `HISTORY_EDITS`. A history edit reads nothing. It moves the pipeline to
    another epoch, changes operator state, or repairs a damaged ledger. Then `previous` is the entry that the history
    continues from, `onto` the head of the deciding sink, and `edit` describes the edit. The inputs of a
    repair are files that earlier epochs have read.
    """

    checkpoint: Checkpoint
    previous: EntryRef | None
    inputs: dict[str, list[dict[str, Json]]]
    staged: dict[str, list[dict[str, Json]]] = field(default_factory=dict)
    quarantine: list[dict[str, Json]] = field(default_factory=list)
    schema: list[dict[str, Json]] = field(default_factory=list)  # of staged files, except those in `schemas`
    schemas: dict[str, list[dict[str, Json]]] = field(default_factory=dict)  # of sinks whose rows have other columns
    epoch_time: str = ""  # the time given to operators, also on a replay
    durations_ms: dict[str, int] = field(default_factory=dict)
    previous_checkpoint: str = ""  # checksum of the previous checkpoint
    kind: str = "epoch"
    onto: EntryRef | None = None
    edit: dict[str, Json] = field(default_factory=dict)
    rescued: list[dict[str, Json]] = field(default_factory=list)  # values in `_rescued_data`, by source and column
    shapes: dict[str, dict[str, Json]] = field(default_factory=dict)  # per sink: settings that shape its delivery

    @property
    def epoch(self) -> int:
        """The number of the epoch."""
        return self.checkpoint.epoch

    @property
    def is_idle(self) -> bool:
        """Whether the epoch only moved positions: then it does not count in the rollback window."""
        return self.kind == "epoch" and is_idle_input(self.inputs)

    @property
    def is_history_edit(self) -> bool:
        """Whether the entry is a history edit."""
        return self.kind in HISTORY_EDITS

    def count_read(self) -> dict[str, int]:
        """Return, per source, how many inputs the epoch read or tried to read; those that it did not reach do not
        count."""
        return {source: len(read_paths(records)) for source, records in self.inputs.items()}

    def supersedes(self, epoch: int) -> bool:
        """Whether this is a history edit that superseded an epoch."""
        return self.is_history_edit and (self.previous.epoch if self.previous else -1) < epoch < self.epoch

    def schema_of(self, sink: str) -> list[dict[str, Json]]:
        """Return the columns of the rows staged for a sink."""
        return self.schemas.get(sink, self.schema)

    def to_bytes(self) -> bytes:
        """Return the durable form. The inputs have their own checksum, so that they survive a damaged checkpoint."""
        elsewhere = (
            {"onto": self.onto.to_json() if self.onto else None, "jump": self.edit} if self.is_history_edit else {}
        )
        return canonical(
            {
                "format": FORMAT,
                "kind": self.kind,
                "checkpoint": self.checkpoint.to_json(),
                "inputs": seal({"sources": self.inputs}),
                "previous": self.previous.to_json() if self.previous else None,
                "staged": self.staged,
                "quarantine": self.quarantine,
                "schema": self.schema,
                "durations_ms": self.durations_ms,
                "previous_checkpoint": self.previous_checkpoint,
                **({"schemas": self.schemas} if self.schemas else {}),
                **({"epoch_time": self.epoch_time} if self.epoch_time else {}),
                **({"rescued": self.rescued} if self.rescued else {}),
                **({"shapes": self.shapes} if self.shapes else {}),
                **elsewhere,
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> LedgerEntry:
        """Parse the durable form.

        Raises:
            DamagedError: it is invalid.
            NewerFormatError: a newer Firnline wrote it.
        """
        body = parse(data, what)
        if not isinstance(body, dict):
            raise DamagedError(f"{what} is not an object", what=what)
        check_format(body, what)
        try:
            return cls(
                checkpoint=Checkpoint.from_json(body["checkpoint"], what),
                previous=EntryRef.from_json(body["previous"]) if body["previous"] else None,
                inputs=unseal(body["inputs"], what)["sources"],
                staged=body["staged"],
                quarantine=body["quarantine"],
                schema=body["schema"],
                durations_ms=body["durations_ms"],
                previous_checkpoint=str(body["previous_checkpoint"]),
                kind=str(body["kind"]),
                onto=EntryRef.from_json(body["onto"]) if body.get("onto") else None,
                edit=dict(body.get("jump") or {}),
                schemas=dict(body.get("schemas", {})),
                epoch_time=str(body.get("epoch_time", "")),
                rescued=list(body.get("rescued", [])),
                shapes=dict(body.get("shapes", {})),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{what} lacks {error}", what=what) from error


@dataclass(frozen=True, slots=True)
class Fold:
    """Many old entries as one: their input files, quarantine and history edits. `last` is the newest of them."""

    first_epoch: int
    last: EntryRef
    previous: EntryRef | None
    inputs: dict[str, list[dict[str, Json]]]
    quarantine: list[dict[str, Json]] = field(default_factory=list)
    edits: list[dict[str, Json]] = field(default_factory=list)  # epoch, kind and description, newest first
    is_part: bool = False  # without its newest entries, which the reader saw before they were folded
    is_bridge: bool = False  # no fold: `last` is missing or damaged, and a repair replaces it

    def supersedes(self, epoch: int) -> bool:
        """Whether one of the history edits superseded an epoch."""
        return any(int(edit["jump"].get("to_epoch", -1)) < epoch < int(edit["epoch"]) for edit in self.edits)

    def down_from(self, last: EntryRef) -> Fold:
        """Return the fold without the entries after `last`, which is one of them."""

        def upto(found: list[dict[str, Json]]) -> list[dict[str, Json]]:
            return [one for one in found if int(one["epoch"]) <= last.epoch]

        return replace(
            self,
            last=last,
            inputs={source: upto(files) for source, files in self.inputs.items()},
            quarantine=[file for file in self.quarantine if int(str(file["name"])[:20]) <= last.epoch],
            edits=upto(self.edits),
            is_part=True,
        )


Bridges: TypeAlias = Mapping[EntryRef, EntryRef | None]  # a damaged link, and the link where the history continues


def bridges_of(link: LedgerEntry | Fold) -> dict[EntryRef, EntryRef | None]:
    """Return the damaged links that a repair in this entry bridges."""
    edits = (
        [(edit["kind"], edit["jump"]) for edit in link.edits] if isinstance(link, Fold) else [(link.kind, link.edit)]
    )
    return {
        EntryRef.from_json(bridge["over"]): EntryRef.from_json(bridge["to"]) if bridge["to"] else None
        for kind, edit in edits
        if kind == "repair"
        for bridge in edit["bridges"]
    }


def _fold_ranges(entries: list[LedgerEntry]) -> list[tuple[int, int]]:
    """Return the ranges of these entries, newest first, that make one fold each; the oldest range first."""
    found, end, files = [], len(entries), 0
    for number in range(len(entries) - 1, -1, -1):
        files += sum(len(records) for records in entries[number].inputs.values())
        if number == 0 or files >= FOLD_FILES:
            found.append((number, end))
            end, files = number, 0
    return found


def _is_below(name: str, floor: int) -> bool:
    """Return whether a file is an entry of an epoch below the floor."""
    epoch = entry_epoch(name)
    return epoch is not None and epoch < floor


def _decode(ref: EntryRef, data: bytes) -> LedgerEntry:
    """Return the entry that `ref` names. Raises LedgerHoleError if it is another one, or damaged."""
    if checksum(data) != ref.checksum:
        raise LedgerHoleError(f"ledger entry {ref.name} is damaged", epoch=ref.epoch)
    return LedgerEntry.from_bytes(data, f"ledger entry {ref.name}")


@dataclass(frozen=True, slots=True)
class LedgerCopy:
    """A copy of a ledger file from elsewhere, proven by its checksum."""

    name: str
    place: str
    data: bytes
    link: LedgerEntry | Fold


def find_copy(ref: EntryRef, storage: Storage, folders: Collection[str]) -> LedgerCopy | None:
    """Return a copy of the entry that `ref` names, or of the fold that ends at it, from one of these folders."""
    for folder in folders:
        for name in (fold_name(ref), ref.name):
            key = f"{folder}/{name}" if folder else name
            try:
                data = storage.get(key)
            except (FileNotFoundError, NotADirectoryError):
                continue
            whole = name != ref.name or checksum(data) == ref.checksum
            link = _read_fold(name, data) if name != ref.name else _read_entry(data)
            if whole and link is not None and (isinstance(link, LedgerEntry) or link.last == ref):
                return LedgerCopy(name, f"{storage.root}/{key}", data, link)
    return None


def _read_entry(data: bytes) -> LedgerEntry | None:
    try:
        return LedgerEntry.from_bytes(data, "ledger entry")
    except DamagedError:
        return None


def _read_fold(name: str, data: bytes) -> Fold | None:
    """Return a fold; None if it is damaged."""
    what = f"ledger fold {name}"
    try:
        body = unseal(parse(zstandard.decompress(data, max_output_size=1 << 31), what), what)
        return Fold(
            int(body["first_epoch"]),
            EntryRef.from_json(body["last"]),
            EntryRef.from_json(body["previous"]) if body["previous"] else None,
            body["inputs"],
            body["quarantine"],
            list(body.get("jumps", [])),
        )
    except NewerFormatError:
        raise
    except (DamagedError, zstandard.ZstdError, KeyError, TypeError, ValueError):
        return None


def _hole(ref: EntryRef, error: FileNotFoundError | LedgerHoleError) -> LedgerHoleError:
    if isinstance(error, LedgerHoleError):
        return error
    return LedgerHoleError(f"ledger entry {ref.name} is missing", epoch=ref.epoch)


class _ReadAhead:
    """Reads entries: the first one alone, then more and more earlier ones ahead of time as the walk goes on."""

    def __init__(self, storage: Storage, folder: str, names: Collection[str]) -> None:
        self._storage = storage
        self._folder = folder
        self._names = sorted(name for name in names if not is_fold(name))
        self._wanted: dict[str, Future[bytes]] = {}
        self._ahead = 0
        self._readers: ThreadPoolExecutor | None = None

    def get(self, name: str) -> bytes:
        """Return the bytes of an entry. Raises FileNotFoundError if it is missing."""
        for passed in [other for other in self._wanted if other > name]:  # failed attempts, rolled-back epochs
            del self._wanted[passed]
        end = bisect_right(self._names, name)
        for other in reversed(self._names[max(0, end - self._ahead) : end]):
            if other not in self._wanted:
                self._readers = self._readers or ThreadPoolExecutor(_READERS)
                self._wanted[other] = self._readers.submit(self._storage.get, f"{self._folder}/{other}")
        self._ahead = min(2 * self._ahead or 1, _AHEAD)
        read = self._wanted.pop(name, None)
        return read.result() if read is not None else self._storage.get(f"{self._folder}/{name}")

    def close(self) -> None:
        if self._readers is not None:
            self._readers.shutdown(cancel_futures=True)


class Ledger:
    """The ledger of one pipeline, below `<table>/_firnline/<pipeline>/`."""

    def __init__(self, storage: Storage, pipeline: str) -> None:
        self._storage = storage
        self.folder = ledger_folder(pipeline)

    @property
    def storage(self) -> Storage:
        """The storage of the pipeline's home."""
        return self._storage

    def stage(self, entry: LedgerEntry) -> EntryRef:
        """Write an entry, durable on return. It has no effect until a commit names it."""
        data = entry.to_bytes()
        name = entry_name(entry.epoch, entry.checkpoint.attempt)
        self._storage.put(f"{self.folder}/{name}", data)
        return EntryRef(entry.epoch, name, checksum(data))

    def newest_epoch(self) -> int:
        """Return the newest epoch that was ever staged, true or not; 0 if there is none."""
        return max((ledger_epoch(name) or 0 for name in self._names()), default=0)

    def staged_after(self, epoch: int) -> Iterator[LedgerEntry]:
        """Yield staged entries of later epochs, true or not. Unreadable ones are left out."""
        for name in sorted(self._names()):
            number = entry_epoch(name)
            if number is None or number <= epoch:
                continue
            with contextlib.suppress(DamagedError, FileNotFoundError):
                yield LedgerEntry.from_bytes(self._storage.get(f"{self.folder}/{name}"), f"ledger entry {name}")

    def load(self, ref: EntryRef) -> LedgerEntry:
        """Read the entry that a commit or a later entry names.

        Raises:
            LedgerHoleError: it is missing, or differs from what was named.
        """
        try:
            return _decode(ref, self._storage.get(f"{self.folder}/{ref.name}"))
        except (FileNotFoundError, LedgerHoleError) as error:
            raise _hole(ref, error) from error

    def find(self, ref: EntryRef) -> LedgerEntry | Fold | None:
        """Return the entry that `ref` names, or the fold that ends at it; None if neither exists intact."""
        try:
            return self._find_fold({fold_name(ref)}, ref) or self.load(ref)
        except LedgerHoleError:
            return None

    def put_back(self, copy: LedgerCopy) -> None:
        """Write a ledger file again from a copy; durable on return."""
        self._storage.put(f"{self.folder}/{copy.name}", copy.data)

    def read_raw(self, name: str) -> bytes | None:
        """Return the stored bytes of a ledger file, damaged or not; None if it is missing."""
        try:
            return self._storage.get(f"{self.folder}/{name}")
        except FileNotFoundError:
            return None

    def readable_before(self, epoch: int) -> Iterator[tuple[str, LedgerEntry | Fold]]:
        """Yield every intact file of epochs before `epoch`, newest first, true or not."""
        for name in sorted(self._names(), key=ledger_order, reverse=True):
            number = ledger_epoch(name)
            data = self.read_raw(name) if number is not None and number < epoch else None
            link = None if data is None else _read_fold(name, data) if is_fold(name) else _read_entry(data)
            if link is not None:
                yield name, link

    def candidates(self, epoch: int) -> list[tuple[EntryRef, bytes]]:
        """Return all entries that were ever staged for an epoch, true or not, with their bytes."""
        found = []
        for name in self._names():
            if entry_epoch(name) == epoch:
                data = self._storage.get(f"{self.folder}/{name}")
                found.append((EntryRef(epoch, name, checksum(data)), data))
        return found

    def chain(self, tip: EntryRef | None, bridges: Bridges | None = None) -> Iterator[LedgerEntry | Fold]:
        """Yield the true history, newest first. Raises LedgerHoleError at the first broken link.

        Entries may be folded during the walk: a missing one is looked up in the current folds. A link that a repair has
        bridged appears as a fold without files, which are in the repair's own entry. `bridges`: those above `tip`.
        """
        if tip is None:
            return
        names = set(self._names())
        with contextlib.closing(_ReadAhead(self._storage, self.folder, names)) as reader:
            passed: list[EntryRef] = []
            bridges = dict(bridges or {})
            ref: EntryRef | None = tip
            while ref is not None:
                link: LedgerEntry | Fold | None = self._find_fold(names, ref)
                if link is None:
                    try:
                        link = _decode(ref, reader.get(ref.name))
                    except (FileNotFoundError, LedgerHoleError) as error:
                        names = set(self._names())
                        link = self._find_cover(names, [*passed, ref], ref)
                        if link is None and ref not in bridges:
                            raise _hole(ref, error) from error
                        link = link or Fold(ref.epoch, ref, bridges[ref], {}, is_bridge=True)
                passed.append(ref)
                bridges |= bridges_of(link)
                yield link
                ref = link.previous

    def _find_cover(self, names: Collection[str], passed: list[EntryRef], ref: EntryRef) -> Fold | None:
        """Return the fold that covers `ref` and its predecessors: one that ends there, or at an entry already
        passed."""
        for newest in reversed(passed):
            fold = self._find_fold(names, newest)
            if fold is not None and fold.first_epoch <= ref.epoch:
                return fold if newest == ref else fold.down_from(ref)
        return None

    def entries(self, tip: EntryRef | None) -> Iterator[tuple[LedgerEntry, EntryRef]]:
        """Yield the entries that are not folded yet, with their references, newest first. Raises like `chain`."""
        ref = tip
        for link in self.chain(tip):
            if isinstance(link, Fold) or ref is None:
                return
            yield link, ref
            ref = link.previous

    def chain_names(self, tip: EntryRef) -> list[str]:
        """Return the names of the files of the true history, newest first. Raises like `chain`."""
        found: list[str] = []
        ref: EntryRef | None = tip
        for link in self.chain(tip):
            assert ref is not None
            if isinstance(link, Fold) and link.is_part:  # some of these names are folded by now
                return self.chain_names(tip)
            if not (isinstance(link, Fold) and link.is_bridge):
                found.append(fold_name(link.last) if isinstance(link, Fold) else ref.name)
            ref = link.previous
        return found

    def fold(self, tip: EntryRef, floor: int) -> int:
        """Fold entries below the floor once there are enough. Returns how many.

        The fold is written before the entries are deleted, and readers prefer it, so a kill in between loses nothing.
        """
        names = self._names()
        old = sum(1 for n in names if _is_below(n, floor))
        if old < FOLD_ENTRIES:
            return 0
        entries: list[LedgerEntry] = []
        refs: list[EntryRef] = []
        ref: EntryRef | None = tip
        for link in self.chain(tip):
            if isinstance(link, Fold) and link.is_part:
                return 0  # another process is folding them
            if isinstance(link, Fold) or ref is None:
                break
            if link.epoch < floor:
                entries.append(link)
                refs.append(ref)
            ref = link.previous
        if len(entries) < FOLD_ENTRIES:
            return 0
        for first, end in _fold_ranges(entries):  # oldest first: the predecessor that a fold names exists
            self._put_fold(entries[first:end], refs[first])
            for done in refs[first:end]:
                self._storage.delete(f"{self.folder}/{done.name}")
        return len(refs)

    def _put_fold(self, entries: list[LedgerEntry], last: EntryRef) -> None:
        """Write entries, newest first, as one fold; `last` names the newest."""
        inputs: dict[str, list[dict[str, Json]]] = {}
        for entry in reversed(entries):
            for source, files in entry.inputs.items():
                inputs.setdefault(source, []).extend({**file, "epoch": entry.epoch} for file in files)
        previous = entries[-1].previous
        body = {
            "kind": "fold",
            "first_epoch": entries[-1].epoch,
            "last": last.to_json(),
            "previous": previous.to_json() if previous else None,
            "inputs": inputs,
            "quarantine": [file for entry in entries for file in entry.quarantine],
            "jumps": [{"epoch": e.epoch, "kind": e.kind, "jump": e.edit} for e in entries if e.is_history_edit],
        }
        self._storage.put(f"{self.folder}/{fold_name(last)}", zstandard.compress(canonical(seal(body))))

    def sweep(self, floor: int, tip: EntryRef) -> int:
        """Delete entries below the floor that the true chain does not reach: attempts that were not committed."""
        true_names = {tip.name}
        for link in self.chain(tip):
            if link.previous is not None:
                true_names.add(link.previous.name)
        stale = [n for n in self._names() if _is_below(n, floor) and n not in true_names]
        for name in stale:
            self._storage.delete(f"{self.folder}/{name}")
        return len(stale)

    def _names(self) -> list[str]:
        found = (stat.name.rsplit("/", 1)[-1] for stat in self._storage.list(self.folder))
        return [name for name in found if not name.startswith(".")]

    def _find_fold(self, names: Collection[str], last: EntryRef) -> Fold | None:
        """Return the fold whose newest entry is `last`. A damaged one counts as missing."""
        name = fold_name(last)
        if name not in names:
            return None
        data = self.read_raw(name)
        fold = _read_fold(name, data) if data is not None else None
        return fold if fold is not None and fold.last == last else None
