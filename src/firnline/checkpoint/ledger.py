"""The ledger: one entry per epoch, staged before the commit and true only when a commit names it.

Entries form a chain, each naming the one before by name and checksum, so the true history is what can be
walked back from the entry that the newest commit names; an entry of an attempt that never committed is
reached by nobody. Old entries are folded into larger ones, which keep the files and drop the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

import zstandard

from firnline.checkpoint.codec import FORMAT, canonical, check_format, checksum, parse, seal, unseal
from firnline.checkpoint.model import Checkpoint
from firnline.errors import DamagedError, LedgerHoleError, NewerFormatError
from firnline.storage import Storage
from firnline.types import EntryRef, Json

FOLD_ENTRIES = 128  # entries per fold: a fold stays a few MB, and a year of minutes a few thousand files
JUMPS = ("rollback", "fresh", "restore", "rescale", "import")
_READERS = 8
_AHEAD = 16


def fold_name(last: EntryRef) -> str:
    """What the fold is called whose newest entry this is."""
    return f"fold-{last.epoch:020d}-{last.checksum[:16]}.json.zst"


def entry_name(epoch: int, attempt: str) -> str:
    """What the entry of an attempt is called."""
    return f"{epoch:020d}-{attempt}.json"


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """Everything about one epoch: what was read, what was staged, and the checkpoint that results.

    `inputs` lists, per source, every file with its record range, size and etag. `staged` lists, per sink,
    what a commit adds; a sink that lags is given exactly that. `kind` is `epoch`; `baseline` for what another
    tool's log had read before Firnline took over; or one of `JUMPS`, an epoch that reads nothing and takes the
    pipeline elsewhere, or changes its operators' state: then `previous` is the entry that the history goes on from,
    `onto` the one that the deciding sink held, and `jump` says what was done.
    """

    checkpoint: Checkpoint
    previous: EntryRef | None
    inputs: dict[str, list[dict[str, Json]]]
    staged: dict[str, list[dict[str, Json]]] = field(default_factory=dict)
    quarantine: list[dict[str, Json]] = field(default_factory=list)
    schema: list[dict[str, Json]] = field(default_factory=list)  # of the staged files of every sink, but for `schemas`
    schemas: dict[str, list[dict[str, Json]]] = field(default_factory=dict)  # of sinks whose rows have other columns
    epoch_time: str = ""  # what operators were told of the time, and are told again
    durations_ms: dict[str, int] = field(default_factory=dict)
    previous_checkpoint: str = ""  # checksum of the checkpoint before
    kind: str = "epoch"
    onto: EntryRef | None = None
    jump: dict[str, Json] = field(default_factory=dict)

    @property
    def epoch(self) -> int:
        return self.checkpoint.epoch

    @property
    def is_jump(self) -> bool:
        return self.kind in JUMPS

    def schema_of(self, sink: str) -> list[dict[str, Json]]:
        """The columns of what is staged for a sink."""
        return self.schemas.get(sink, self.schema)

    def to_bytes(self) -> bytes:
        """The durable text. The inputs have a checksum of their own, so that they outlive a damaged checkpoint."""
        elsewhere = {"onto": self.onto.to_json() if self.onto else None, "jump": self.jump} if self.is_jump else {}
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
                **elsewhere,
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> LedgerEntry:
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
                jump=dict(body.get("jump") or {}),
                schemas=dict(body.get("schemas", {})),
                epoch_time=str(body.get("epoch_time", "")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{what} lacks {error}", what=what) from error


@dataclass(frozen=True, slots=True)
class Fold:
    """Many old entries as one: the files they read, their quarantine and jumps. `last` is the newest of them."""

    first_epoch: int
    last: EntryRef
    previous: EntryRef | None
    inputs: dict[str, list[dict[str, Json]]]
    quarantine: list[dict[str, Json]] = field(default_factory=list)
    jumps: list[dict[str, Json]] = field(default_factory=list)  # epoch, kind and what was done, newest first


class Ledger:
    """The ledger of one pipeline, below `<table>/_firnline/<pipeline>/`."""

    def __init__(self, storage: Storage, pipeline: str) -> None:
        self._storage = storage
        self.folder = f"_firnline/{pipeline}/ledger"

    def stage(self, entry: LedgerEntry) -> EntryRef:
        """Write an entry, durable on return. It means nothing until a commit names it."""
        data = entry.to_bytes()
        name = entry_name(entry.epoch, entry.checkpoint.attempt)
        self._storage.put(f"{self.folder}/{name}", data)
        return EntryRef(entry.epoch, name, checksum(data))

    def newest_epoch(self) -> int:
        """The newest epoch that was ever staged, true or not; 0 when there is none."""
        numbers = (name.removeprefix("fold-")[:20] for name in self._names())
        return max((int(number) for number in numbers if number.isdigit()), default=0)

    def load(self, ref: EntryRef) -> LedgerEntry:
        """Read the entry that a commit or a later entry names.

        Raises:
            LedgerHoleError: it is missing, or is not what was named.
        """
        try:
            data = self._storage.get(f"{self.folder}/{ref.name}")
        except FileNotFoundError as error:
            raise LedgerHoleError(f"ledger entry {ref.name} is missing", epoch=ref.epoch) from error
        if checksum(data) != ref.checksum:
            raise LedgerHoleError(f"ledger entry {ref.name} is damaged", epoch=ref.epoch)
        return LedgerEntry.from_bytes(data, f"ledger entry {ref.name}")

    def candidates(self, epoch: int) -> list[tuple[EntryRef, bytes]]:
        """All entries that were ever staged for an epoch, true or not, with their bytes."""
        found = []
        for name in self._names():
            if name.startswith(f"{epoch:020d}-"):
                data = self._storage.get(f"{self.folder}/{name}")
                found.append((EntryRef(epoch, name, checksum(data)), data))
        return found

    def chain(self, tip: EntryRef | None) -> Iterator[LedgerEntry | Fold]:
        """The true history, newest first. LedgerHoleError at the first link that does not hold."""
        if tip is None:
            return
        names = self._names()
        folds = sorted((n for n in names if n.startswith("fold-")), reverse=True)
        with ThreadPoolExecutor(_READERS) as readers:
            ahead = iter(sorted((n for n in names if not n.startswith("fold-")), reverse=True))
            wanted: dict[str, Future[bytes]] = {}
            ref: EntryRef | None = tip
            while ref is not None:
                fold = self._find_fold(folds, ref)
                if fold is not None:
                    yield fold
                    ref = fold.previous
                    continue
                self._read_ahead(readers, ahead, wanted, ref.name)
                if ref.name not in wanted:
                    raise LedgerHoleError(f"ledger entry {ref.name} is missing", epoch=ref.epoch)
                try:
                    data = wanted.pop(ref.name).result()
                except FileNotFoundError:  # folded since it was listed: the fold is there by now
                    folds = sorted((n for n in self._names() if n.startswith("fold-")), reverse=True)
                    continue
                if checksum(data) != ref.checksum:
                    raise LedgerHoleError(f"ledger entry {ref.name} is damaged", epoch=ref.epoch)
                entry = LedgerEntry.from_bytes(data, f"ledger entry {ref.name}")
                yield entry
                ref = entry.previous

    def _read_ahead(
        self, readers: ThreadPoolExecutor, ahead: Iterator[str], wanted: dict[str, Future[bytes]], name: str
    ) -> None:
        """Have some entries read, `name` and those that come after it: who stops early has not read them all."""
        while True:
            for passed in [other for other in wanted if other > name]:  # attempts in vain, epochs that were undone
                del wanted[passed]
            more = list(islice(ahead, _AHEAD - len(wanted)))
            wanted |= {other: readers.submit(self._storage.get, f"{self.folder}/{other}") for other in more}
            if name in wanted or not more:
                return

    def entries(self, tip: EntryRef | None) -> Iterator[tuple[LedgerEntry, EntryRef]]:
        """The entries that are not folded yet, with what names them, newest first. LedgerHoleError as in `chain`."""
        ref = tip
        for link in self.chain(tip):
            if isinstance(link, Fold) or ref is None:
                return
            yield link, ref
            ref = link.previous

    def chain_names(self, tip: EntryRef) -> list[str]:
        """The names of the files that the true history consists of, newest first. LedgerHoleError as in `chain`."""
        found: list[str] = []
        ref: EntryRef | None = tip
        for link in self.chain(tip):
            assert ref is not None
            found.append(fold_name(link.last) if isinstance(link, Fold) else ref.name)
            ref = link.previous
        return found

    def fold(self, tip: EntryRef, floor: int) -> int:
        """Fold entries below the floor once there are enough of them; returns how many.

        The fold is written before the entries go, and a reader prefers it, so a kill in between costs nothing.
        """
        names = self._names()
        old = sum(1 for n in names if not n.startswith("fold-") and int(n[:20]) < floor)
        if old < FOLD_ENTRIES:
            return 0
        entries: list[LedgerEntry] = []
        refs: list[EntryRef] = []
        for entry, ref in self.entries(tip):
            if entry.epoch < floor:
                entries.append(entry)
                refs.append(ref)
        if len(entries) < FOLD_ENTRIES:
            return 0
        inputs: dict[str, list[dict[str, Json]]] = {}
        for entry in reversed(entries):
            for source, files in entry.inputs.items():
                inputs.setdefault(source, []).extend({**file, "epoch": entry.epoch} for file in files)
        previous = entries[-1].previous
        body = {
            "kind": "fold",
            "first_epoch": entries[-1].epoch,
            "last": refs[0].to_json(),
            "previous": previous.to_json() if previous else None,
            "inputs": inputs,
            "quarantine": [file for entry in entries for file in entry.quarantine],
            "jumps": [{"epoch": e.epoch, "kind": e.kind, "jump": e.jump} for e in entries if e.is_jump],
        }
        data = zstandard.compress(canonical(seal(body)))
        self._storage.put(f"{self.folder}/{fold_name(refs[0])}", data)
        for done in refs:
            self._storage.delete(f"{self.folder}/{done.name}")
        return len(refs)

    def sweep(self, floor: int, tip: EntryRef) -> int:
        """Delete entries below the floor that the true chain does not reach: attempts that never committed."""
        true_names = {tip.name}
        for link in self.chain(tip):
            if link.previous is not None:
                true_names.add(link.previous.name)
        stale = [n for n in self._names() if not n.startswith("fold-") and int(n[:20]) < floor and n not in true_names]
        for name in stale:
            self._storage.delete(f"{self.folder}/{name}")
        return len(stale)

    def _names(self) -> list[str]:
        found = (stat.name.rsplit("/", 1)[-1] for stat in self._storage.list(self.folder))
        return [name for name in found if not name.startswith(".")]

    def _find_fold(self, folds: list[str], last: EntryRef) -> Fold | None:
        """The fold whose newest entry is `last`; a damaged one counts as missing."""
        for name in folds:
            if not name.startswith(f"fold-{last.epoch:020d}-{last.checksum[:16]}"):
                continue
            what = f"ledger fold {name}"
            try:
                raw = zstandard.decompress(self._storage.get(f"{self.folder}/{name}"), max_output_size=1 << 31)
                body = unseal(parse(raw, what), what)
                fold = Fold(
                    int(body["first_epoch"]),
                    EntryRef.from_json(body["last"]),
                    EntryRef.from_json(body["previous"]) if body["previous"] else None,
                    body["inputs"],
                    body["quarantine"],
                    list(body.get("jumps", [])),
                )
            except NewerFormatError:
                raise
            except (DamagedError, zstandard.ZstdError, KeyError, TypeError, FileNotFoundError):
                continue
            if fold.last == last:
                return fold
        return None
