"""A clean-up of a table's log declares itself, so that a snapshot's pin and a clean-up cannot miss each other.

A clean-up writes its declaration, then looks for pins, then deletes what lies below the oldest pinned version. A
process that pins versions looks for declarations afterwards. Either the clean-up sees the pin, or the process sees the
declaration, and waits until it is gone before it checks that the versions are there. The declaration of a process that
has exited counts no longer: it can delete nothing.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime

from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.errors import DamagedError
from firnline.names import DELTA_LOG, PINS, TOPOLOGY_PIN, is_log_cleanup, log_cleanup, sweeps_folder
from firnline.process import has_exited, this_process
from firnline.sinks.delta.log import complete_checkpoints
from firnline.storage import Storage
from firnline.types import Json, RandomIds

_OF_VERSION = re.compile(r"([0-9]{20})\..+")  # commits, checkpoints and checksums


@contextlib.contextmanager
def declare_clean_up(storage: Storage, below: int) -> Iterator[int | None]:
    """Declare that log files of versions below one may be deleted.

    Yields the oldest version that the snapshots of topologies need; None if there is no snapshot.
    """
    for key, body in _load(storage):
        if body is not None and _has_exited(body):
            storage.delete(key)
    key = log_cleanup(RandomIds().new())
    storage.put(key, canonical(seal({"below": below, "process": asdict(this_process())})))
    try:
        yield min(_find_pinned(storage), default=None)
    finally:
        storage.delete(key)


def _find_pinned(storage: Storage) -> Iterator[int]:
    """Yield the version from which on each snapshot of a topology needs the log; 0 for a pin that does not say it."""
    for stat in list(storage.list(PINS)):
        name = stat.name.rsplit("/", 1)[-1]
        if not name.startswith(TOPOLOGY_PIN):
            continue
        try:
            pin = unseal(parse(storage.get(f"{PINS}/{name}"), name), name)
            yield max(0, int(pin["since"] if "since" in pin else pin.get("log_from", 0)))
        except FileNotFoundError:
            continue
        except (DamagedError, TypeError, ValueError):
            yield 0


def delete_expired(storage: Storage, needed: int, expired_before: datetime) -> None:
    """Delete the log files that no version from `needed` on is read from, oldest first, up to the first younger one."""
    files = {stat.name.rsplit("/", 1)[-1]: stat for stat in storage.list(DELTA_LOG)}
    begin = max((one.version for one in complete_checkpoints(list(files)) if one.version <= needed), default=0)
    for name in sorted(files):
        match = _OF_VERSION.fullmatch(name)
        if match is None or int(match[1]) >= begin:
            continue
        if files[name].modified_at >= expired_before:
            return
        storage.delete(f"{DELTA_LOG}/{name}")


def find_clean_up(storage: Storage, since: int) -> str | None:
    """Return the key of a declared clean-up that may delete log files which a pin from `since` on needs."""
    for key, body in _load(storage):
        if body is None or (int(body["below"]) > since and not _has_exited(body)):
            return key
    return None


def _load(storage: Storage) -> Iterator[tuple[str, dict[str, Json] | None]]:
    """Yield the declarations; None stands for one that cannot be read, and might be about any version."""
    for stat in list(storage.list(sweeps_folder())):
        name = stat.name.rsplit("/", 1)[-1]
        if is_log_cleanup(name):
            key = f"{sweeps_folder()}/{name}"
            with contextlib.suppress(FileNotFoundError):
                try:
                    yield key, unseal(parse(storage.get(key), key), key)
                except DamagedError:
                    yield key, None


def _has_exited(body: dict[str, Json]) -> bool:
    process = body["process"]
    return has_exited(str(process["host"]), int(process["pid"]), str(process["start"]))
