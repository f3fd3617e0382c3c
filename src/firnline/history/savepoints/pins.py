"""The pin of a savepoint in each of its tables: protects its files from sweeps, names its folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.errors import DamagedError, NewerFormatError
from firnline.faults import fault_point
from firnline.names import PINS, pinned_savepoint, restore_pin, savepoint_pin
from firnline.process import this_process
from firnline.run.open_pipeline import OpenPipeline
from firnline.storage import Storage
from firnline.types import Json

SHORT_ID = 8  # digits shown to people


@dataclass(frozen=True, slots=True)
class Pin:
    """One table's record of a savepoint. `writes`, only in the deciding table: every name that the savepoint writes."""

    id: str
    pipeline: str
    epoch: int
    created_at: str
    path: str
    copied: bool
    version: int
    size_bytes: int  # of the data files of all tables
    files: list[str]
    writes: list[str] = field(default_factory=list)
    completed: bool = False
    state_size_bytes: int = 0  # according to the checkpoint
    state: dict[str, Json] = field(
        default_factory=dict
    )  # only in the deciding table: protected checkpoints of state, by id

    def to_bytes(self) -> bytes:
        return canonical(seal({"kind": "savepoint", **asdict(self)}))

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> Pin:
        body = unseal(parse(data, what), what)
        try:
            return cls(
                id=str(body["id"]),
                pipeline=str(body["pipeline"]),
                epoch=int(body["epoch"]),
                created_at=str(body["created_at"]),
                path=str(body["path"]),
                copied=bool(body["copied"]),
                version=int(body["version"]),
                size_bytes=int(body["size_bytes"]),
                files=[str(name) for name in body["files"]],
                writes=[str(name) for name in body["writes"]],
                completed=bool(body["completed"]),
                state_size_bytes=int(body.get("state_size_bytes", 0)),
                state=dict(body.get("state", {})),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{what} lacks {error}", what=what) from error


def put_pin(storage: Storage, pin: Pin) -> None:
    """Write or replace a pin."""
    fault_point("savepoint.pin.before")
    storage.put(savepoint_pin(pin.id), pin.to_bytes())
    fault_point("savepoint.pin.after")


def load_pins(storage: Storage, pipeline: str) -> list[Pin]:
    """Return the savepoints of a pipeline that a table pins, oldest first. Unreadable pins are left out."""
    found = []
    for key in _keys(storage):
        try:
            pin = Pin.from_bytes(storage.get(key), key)
        except (DamagedError, NewerFormatError, FileNotFoundError):
            continue
        if pin.pipeline == pipeline:
            found.append(pin)
    return sorted(found, key=lambda pin: (pin.created_at, pin.id))


def find_unreadable_pins(storage: Storage) -> list[str]:
    """Return the ids of savepoints with a damaged pin or one of a newer Firnline: their owner is unknown."""
    found = []
    for key in _keys(storage):
        try:
            Pin.from_bytes(storage.get(key), key)
        except (DamagedError, NewerFormatError):
            found.append(str(pinned_savepoint(key)))
        except FileNotFoundError:
            continue
    return sorted(found)


def _keys(storage: Storage) -> Iterator[str]:
    for stat in storage.list(PINS):
        key = f"{PINS}/{stat.name.rsplit('/', 1)[-1]}"
        if pinned_savepoint(key) is not None:
            yield key


def put_restore_pin(storage: Storage, attempt: str, **facts: Json) -> None:
    """Protect the files that a restore is writing from sweeps. A pin left behind expires after a day."""
    fault_point("restore.pin.before")
    pin = {"kind": "restore", "attempts": [attempt], **this_process().address, **facts}
    storage.put(restore_pin(attempt), canonical(seal(pin)))
    fault_point("restore.pin.after")


def delete_restore_pin(storage: Storage, attempt: str) -> None:
    """Delete the pin: a commit or ledger entry names the files now, or they are gone."""
    storage.delete(restore_pin(attempt))


class RestorePins:
    """The pins of a rollback: protect returning files from sweeps until a commit names them again."""

    def __init__(self, pipeline: OpenPipeline) -> None:
        self._storages = {sink.uri: sink.storage for sink in pipeline.sinks if sink.storage is not None}
        self._attempt = pipeline.ids.new()
        self._kept: dict[str, set[str]] = {}

    def keep(self, files: Mapping[str, Sequence[str]]) -> bool:
        """Pin files, per table. Returns whether some were not pinned yet. A table without returning files needs no
        pin."""
        more = False
        for table, paths in files.items():
            kept = self._kept.get(table, set())
            if not kept.issuperset(paths):
                more = True
                self._kept[table] = kept | set(paths)
                put_restore_pin(self._storages[table], self._attempt, files=sorted(self._kept[table]))
        return more

    def __enter__(self) -> RestorePins:
        return self

    def __exit__(self, *_: object) -> None:
        for table in self._kept:
            with contextlib.suppress(OSError):  # a pin left behind expires a day after this process
                delete_restore_pin(self._storages[table], self._attempt)
