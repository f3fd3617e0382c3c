"""Requests of users to a pipeline that may be running: files in a folder, read by the next plan.

Each request is a file. It is deleted only after the commit of the epoch that answers it, and answering it twice changes
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.errors import DamagedError
from firnline.names import request_name, requests_folder
from firnline.storage import Storage
from firnline.types import Ids


@dataclass(frozen=True, slots=True)
class FileRequest:
    """A request to read a file that was set aside again, or to drop it; `changed` accepts that it was replaced."""

    path: str
    changed: bool = False
    key: str = ""
    drop: bool = False


class Requests:
    """The requests of one pipeline, below `<table>/_firnline/<pipeline>/requests/`."""

    def __init__(self, storage: Storage, pipeline: str) -> None:
        self._storage = storage
        self._folder = requests_folder(pipeline)

    def ask_retry(self, path: str, *, changed: bool, ids: Ids) -> None:
        """Request another read of a file that was set aside."""
        body = {"kind": "retry", "path": path, "changed": changed}
        self._storage.put(f"{self._folder}/{request_name(ids.new())}", canonical(seal(body)))

    def ask_drop(self, path: str, *, ids: Ids) -> None:
        """Request to drop a file that was set aside."""
        body = {"kind": "drop", "path": path, "changed": False}
        self._storage.put(f"{self._folder}/{request_name(ids.new())}", canonical(seal(body)))

    def load(self) -> list[FileRequest]:
        """Return the pending requests. Unreadable ones are left alone."""
        found = []
        for stat in self._storage.list(self._folder):
            name = stat.name.rsplit("/", 1)[-1]
            if name.startswith("."):
                continue
            key = f"{self._folder}/{name}"
            try:
                body = unseal(parse(self._storage.get(key), name), name)
            except (DamagedError, FileNotFoundError):
                continue
            found.append(FileRequest(str(body["path"]), bool(body["changed"]), key, body["kind"] == "drop"))
        return found

    def done(self, requests: list[FileRequest]) -> None:
        """Delete requests once the epoch that answers them is committed."""
        for request in requests:
            self._storage.delete(request.key)
