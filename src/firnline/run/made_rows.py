"""Rows that were made again from the input or copied, for sinks that are being filled: a list for each epoch.

A list is written once, before the first row is delivered, and names files with their checksums. Whoever delivers the
epoch, and however often, delivers these rows in this order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.errors import DamagedError
from firnline.faults import fault_point
from firnline.names import fill_epoch, fill_folder, fill_name, rerun_folder
from firnline.schema import schema_from_json, schema_to_json
from firnline.sinks.outbox import KEY
from firnline.storage import Storage
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class FilledEpoch:
    """The rows of one epoch for one sink that is being filled."""

    attempt: str  # of the epoch
    files: list[dict[str, Json]]
    schema: pa.Schema
    shape: dict[str, Json]  # the settings of delivery when the list was made


class FilledEpochs:
    """The lists of one pipeline. May be used from any thread."""

    def __init__(self, storage: Storage, pipeline: str) -> None:
        self._storage = storage
        self._pipeline = pipeline

    def find(self, sink: str, epoch: int, attempt: str) -> FilledEpoch | None:
        """Return the list of an epoch; None if there is none.

        Raises:
            DamagedError: it is damaged, so nothing says which rows were delivered.
        """
        key = self._key(sink, epoch)
        try:
            body = unseal(parse(self._storage.get(key), key), key)
        except FileNotFoundError:
            return None
        except DamagedError as error:
            hint = f"Copy the sink anew: firnline sinks resync {sink} --yes"
            raise DamagedError(error.message, hint=hint, **error.fields) from error
        if body["attempt"] != attempt:  # of an epoch that was undone
            self._storage.delete(key)
            return None
        return FilledEpoch(attempt, list(body["files"]), schema_from_json(body["schema"]), dict(body["shape"]))

    def put(self, sink: str, epoch: int, filled: FilledEpoch) -> FilledEpoch:
        """Write the list of an epoch, durable on return. Returns the one that counts: another process may be first."""
        body = {
            "attempt": filled.attempt,
            "files": filled.files,
            "schema": schema_to_json(filled.schema),
            "shape": filled.shape,
        }
        fault_point("fill.list.before")
        with contextlib.suppress(FileExistsError):
            self._storage.put_new(self._key(sink, epoch), canonical(seal(body)))
        fault_point("fill.list.after")
        return self.find(sink, epoch, filled.attempt) or filled

    def release(self, sink: str, epoch: int) -> None:
        """Delete the list of an epoch that its sink holds, and its files."""
        key = self._key(sink, epoch)
        try:
            files = unseal(parse(self._storage.get(key), key), key)["files"]
        except (FileNotFoundError, DamagedError):
            files = []
        fault_point("fill.release.before")
        self._storage.delete(key)
        for file in files:
            self._storage.delete(str(file[KEY]))
        fault_point("fill.release.after")

    def list_files(self) -> list[str]:
        """Return the keys of all lists, and of all files of rows that were made again."""
        found = self._storage.list(rerun_folder(self._pipeline))
        return [stat.name.removeprefix(f"{self._storage.root}/") for stat in found]

    def sweep(self, keys: Sequence[str], reruns: set[str], heads: Mapping[str, int]) -> int:
        """Delete those of the listed files that nobody needs. Returns how many.

        `reruns` are attempts that make rows now, read after the files were listed. `heads` has the sinks that are being
        filled: their lists of later epochs stay, and the files that these name.
        """
        lists, needed = f"{fill_folder(self._pipeline)}/", set[str]()
        found = [stat.name.removeprefix(f"{self._storage.root}/") for stat in self._storage.list(lists.rstrip("/"))]
        for key in found:  # read after `reruns`: what an attempt has made is in one of the two
            sink, epoch = key.removeprefix(lists).rpartition("/")[0], fill_epoch(key)
            if sink in heads and epoch is not None and epoch > heads[sink]:
                needed.add(key)
                with contextlib.suppress(DamagedError, FileNotFoundError, KeyError):
                    needed |= {str(file[KEY]) for file in unseal(parse(self._storage.get(key), key), key)["files"]}
        rows = f"{rerun_folder(self._pipeline)}/"
        gone = [
            key
            for key in keys
            if key not in needed
            and key.removesuffix(".again") not in needed
            and key.removeprefix(rows).partition("/")[0] not in reruns
        ]
        for key in gone:
            fault_point("outbox.release.before")
            self._storage.delete(key)
            fault_point("outbox.release.after")
        return len(gone)

    def _key(self, sink: str, epoch: int) -> str:
        return f"{fill_folder(self._pipeline, sink)}/{fill_name(epoch)}"
