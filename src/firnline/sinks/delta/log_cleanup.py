"""A clean-up of a table's log declares itself, so that a snapshot's pin and a clean-up cannot miss each other.

A clean-up writes its declaration, then looks for pins, then deletes. A process that pins versions looks for
declarations afterwards. Either the clean-up sees the pin, or the process sees the declaration, and waits until it is
gone before it checks that the versions are there. The declaration of a process that has exited counts no longer: it can
delete nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict

from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.errors import DamagedError
from firnline.names import PINS, TOPOLOGY_PIN, is_log_cleanup, log_cleanup, sweeps_folder
from firnline.process import has_exited, this_process
from firnline.storage import Storage
from firnline.types import Json, RandomIds


@contextlib.contextmanager
def declare_clean_up(storage: Storage, below: int) -> Iterator[bool]:
    """Declare that log files of versions below one may be deleted. Yields whether they may: no snapshot needs any."""
    for key, body in _load(storage):
        if body is not None and _has_exited(body):
            storage.delete(key)
    key = log_cleanup(RandomIds().new())
    storage.put(key, canonical(seal({"below": below, "process": asdict(this_process())})))
    try:
        yield not any(stat.name.rsplit("/", 1)[-1].startswith(TOPOLOGY_PIN) for stat in storage.list(PINS))
    finally:
        storage.delete(key)


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
