"""Checks the location of a savepoint: separate from everything that a pipeline reads, writes or sweeps."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator

from firnline.errors import ConfigError
from firnline.history.savepoints.pins import SHORT_ID
from firnline.run.open_pipeline import OpenPipeline
from firnline.storage import Storage, is_remote, normalise


def default_place(pipeline: OpenPipeline, epoch: int, identity: str) -> str:
    """Return the default folder: beside a store in a folder, otherwise beside the deciding sink's table."""
    store = pipeline.options.checkpoint.store
    beside = store.path if store is not None and store.type == "file" and store.path else pipeline.storage.root
    above = posixpath.dirname(beside.rstrip("/"))
    if above.endswith((":", ":/")):  # the table is a whole bucket
        raise ConfigError("there is no folder beside the table", hint="Name one with --path.")
    return f"{above}/savepoints/{pipeline.options.name}-{epoch}-{identity[:SHORT_ID]}"


def check_apart(pipeline: OpenPipeline, place: str) -> None:
    """Refuse a location that a source could read as input, or that a sweep or store could treat as its own."""
    mine = _real(place)
    for what, root in _used_places(pipeline):
        used = _real(root)
        if mine == used or mine.startswith(f"{used.rstrip('/')}/") or used.startswith(f"{mine.rstrip('/')}/"):
            raise ConfigError(
                f"{place} cannot hold a savepoint: {what} is {root}",
                hint="Name a folder apart from it with --path.",
            )


def _used_places(pipeline: OpenPipeline) -> Iterator[tuple[str, str]]:
    checkpoint = pipeline.options.checkpoint
    for source in pipeline.sources:
        yield f"the source {source.name}", source.location
    for sink in pipeline.sinks:
        yield f"the table of {sink.name}", sink.uri
    if checkpoint.store is not None and (checkpoint.store.path or checkpoint.store.uri):
        yield "the checkpoint store", checkpoint.store.path or checkpoint.store.uri
    if checkpoint.local is not None:
        yield "the local tier", checkpoint.local.path
    if checkpoint.remote is not None:
        yield "the remote tier", checkpoint.remote.uri


def _real(place: str) -> str:
    name = normalise(place)
    return name if is_remote(name) else os.path.realpath(name)


def check_writable(storage: Storage, identity: str) -> None:
    """Refuse a folder that is not writable, before anything is pinned."""
    probe = f".{identity}.tmp"
    try:
        storage.put(probe, b"")
        storage.delete(probe)
    except OSError as error:
        raise ConfigError(
            f"{storage.root} cannot be written: {error}", hint="Name a folder that can be, with --path."
        ) from error


def is_temporary(name: str) -> bool:
    """Return whether a killed write leaves files of this name behind."""
    last = name.rsplit("/", 1)[-1]
    return last.startswith(".") and last.endswith(".tmp")
