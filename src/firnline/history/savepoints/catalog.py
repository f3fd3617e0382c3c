"""Lists and disposes of savepoints.

Disposing reverses the order of creation: the manifest first, the pins last. After a kill, the rest is still listed and
can be disposed of again.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass

from firnline.errors import ConfigError, DamagedError, NewerFormatError
from firnline.faults import fault_point
from firnline.history.savepoints.format import MAX_MANIFEST_BYTES, Savepoint, is_relative
from firnline.history.savepoints.pins import SHORT_ID, Pin, find_unreadable_pins, load_pins
from firnline.history.store import on_record
from firnline.maintenance.survey import is_inside
from firnline.names import SAVED_FOLDERS, SAVEPOINT, TEMPORARY_FILE, savepoint_pin
from firnline.run.open_pipeline import OpenPipeline
from firnline.storage import Storage, is_remote, normalise, open_storage
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class SavepointInfo:
    """One savepoint in a list. `state`: complete, incomplete, missing or damaged.

    For an unreadable pin only the id is known: `epoch` is 0, `created_at` and `path` are empty.
    """

    id: str
    epoch: int
    created_at: str
    path: str
    copied: bool
    size_bytes: int
    state: str
    state_size_bytes: int = 0  # of operator state


@dataclass(frozen=True, slots=True)
class Disposed:
    """What was deleted, or would be."""

    id: str
    path: str
    files: int
    pins: int
    pins_kept: bool  # the savepoint itself is elsewhere and needs them
    dry_run: bool


def load_savepoint(storage: Storage) -> Savepoint:
    """Read and check a manifest.

    Raises:
        ConfigError: there is no savepoint.
        DamagedError: it is damaged, too large, or a link.
        NewerFormatError: a newer Firnline wrote it.
    """
    what = f"{SAVEPOINT} in {storage.root}"
    try:
        if not is_inside(storage, SAVEPOINT):
            raise DamagedError(f"{what} is a link", what=what)
        if storage.stat(SAVEPOINT).size_bytes > MAX_MANIFEST_BYTES:
            raise DamagedError(f"{what} is larger than any manifest", what=what)
        return Savepoint.from_bytes(storage.get(SAVEPOINT), what)
    except FileNotFoundError as error:
        raise ConfigError(f"{storage.root} is no savepoint", hint="See `firnline savepoint list`.") from error


def list_savepoints(pipeline: OpenPipeline, storage_options: dict[str, str] | None = None) -> list[SavepointInfo]:
    """Return the savepoints of a pipeline, from the pins of the deciding table, oldest first.

    Unreadable pins of any owner come last, as `damaged`: sweeps stop at them.
    """
    pins = load_pins(pipeline.storage, pipeline.options.name)
    found = [
        SavepointInfo(
            p.id, p.epoch, p.created_at, p.path, p.copied, p.size_bytes, _state(p, storage_options), p.state_size_bytes
        )
        for p in pins
    ]
    unreadable = find_unreadable_pins(pipeline.storage)
    return found + [SavepointInfo(identity, 0, "", "", False, 0, "damaged") for identity in unreadable]


def _state(pin: Pin, storage_options: dict[str, str] | None) -> str:
    try:
        found = load_savepoint(open_storage(pin.path, storage_options))
    except ConfigError:
        return "missing" if pin.completed else "incomplete"
    except (DamagedError, NewerFormatError):
        return "damaged"
    except OSError:
        return "missing"
    return "complete" if found.id == pin.id else "missing"


def dispose_savepoint(
    pipeline: OpenPipeline,
    target: str,
    *,
    dry_run: bool = False,
    run: str = "",
    storage_options: dict[str, str] | None = None,
) -> Disposed:
    """Delete a savepoint by its id or path: the files that its manifest names, files of killed writes beside them, and
    its pins; nothing else.

    Raises:
        ConfigError: it is no savepoint of this pipeline.
        DamagedError: a name in it leads outside its folder.
    """
    pin = _find_pin(pipeline, target)
    place = pin.path if pin is not None and target in (pin.id, pin.id[:SHORT_ID]) else normalise(target)
    storage = open_storage(place, storage_options)
    identity, names = _contents(pipeline, storage, pin)
    doomed = [*(name for name in names if _is_there(storage, name)), *_find_unfinished(storage, names)]
    home = pin or _find_pin(pipeline, identity)
    kept = home is not None and normalise(home.path) != normalise(place) and _state(home, storage_options) == "complete"
    storages = [] if kept else [sink.storage for sink in reversed(pipeline.sinks) if sink.storage is not None]
    pinned = [found for found in storages if _is_there(found, savepoint_pin(identity))]
    result = Disposed(identity, place, len(doomed), len(pinned), kept, dry_run)
    if dry_run:
        return result
    facts: dict[str, Json] = {"savepoint": identity, "path": place, "files": len(doomed)}
    with on_record(pipeline, "savepoint-dispose", run, from_epoch=None, to_epoch=None, **facts):
        for name in doomed:
            _delete(storage, name)
        _drop_folders(storage, names)  # also for a file whose killed copy only created the folder
        for found in pinned:
            _delete(found, savepoint_pin(identity))
    return result


def _find_pin(pipeline: OpenPipeline, target: str) -> Pin | None:
    """Return the pin for an id, a unique short id, or a path."""
    pins = load_pins(pipeline.storage, pipeline.options.name)
    found = [p for p in pins if target in (p.id, p.id[:SHORT_ID])]
    if not found and (is_remote(target) or os.sep in target or os.path.exists(target)):
        found = [p for p in pins if normalise(p.path) == normalise(target)]
    return found[0] if len(found) == 1 else None


def _contents(pipeline: OpenPipeline, storage: Storage, pin: Pin | None) -> tuple[str, list[str]]:
    """Return the id, and every name to delete, the manifest's first."""
    try:
        manifest = load_savepoint(storage)
    except (ConfigError, DamagedError, FileNotFoundError):
        if pin is None:
            raise
        names = pin.writes  # never completed, partly disposed of, or damaged: the names in its plan
        identity = pin.id
    else:
        if manifest.pipeline != pipeline.options.name or (pin is not None and manifest.id != pin.id):
            raise ConfigError(
                f"{storage.root} holds savepoint {manifest.id} of {manifest.pipeline!r}, which is not meant here",
                hint="See `firnline savepoint list`.",
            )
        identity, names = manifest.id, list(manifest.names())
    for name in names:
        if not is_relative(name) or not name.startswith(SAVED_FOLDERS) or not is_inside(storage, name):
            raise DamagedError(f"{name!r} of {storage.root} leads elsewhere; nothing was deleted")
    return identity, [SAVEPOINT, *names]


def _is_there(storage: Storage, name: str) -> bool:
    try:
        storage.stat(name)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _find_unfinished(storage: Storage, names: list[str]) -> list[str]:
    """Return files that killed writes left in the folders of these names. Object stores have none."""
    if is_remote(storage.root):
        return []
    found = []
    for folder in sorted({above for name in names for above in _above(name)} | {""}):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            beside = [posixpath.join(folder, name) for name in os.listdir(os.path.join(storage.root, folder))]
            found += [name for name in sorted(beside) if _is_unfinished(storage, name)]
    return found


def _is_unfinished(storage: Storage, name: str) -> bool:
    return bool(TEMPORARY_FILE.fullmatch(posixpath.basename(name))) and is_inside(storage, name)


def _delete(storage: Storage, name: str) -> None:
    fault_point("savepoint.delete.before")
    storage.delete(name)
    fault_point("savepoint.delete.after")


def _drop_folders(storage: Storage, names: list[str]) -> None:
    """Delete folders that are empty now."""
    if is_remote(storage.root):
        return
    for folder in sorted({above for name in names for above in _above(name)}, reverse=True):
        with contextlib.suppress(OSError):
            os.rmdir(os.path.join(storage.root, folder))
    with contextlib.suppress(OSError):
        os.rmdir(storage.root)


def _above(name: str) -> Iterator[str]:
    while name := posixpath.dirname(name):
        yield name
