"""Requests of users to a pipeline that may be running: files in a folder, read by the next plan.

Each request is a file. It is deleted only after the commit of the epoch that answers it, and answering it twice changes
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.errors import DamagedError
from firnline.names import request_name, requests_folder
from firnline.storage import Storage
from firnline.types import Ids, Json


@dataclass(frozen=True, slots=True)
class FileRequest:
    """A request about input, answered by the next plan of its source.

    `retry` reads a file that was set aside again (`changed` accepts that it was replaced), `drop` gives it up. `reread`
    reads a finished file from its beginning. `replay` reads quarantined records (`files`: name, rows and folders)
    again; with `discard` they only count as dealt with. `snapshot` reads the rows of a table again: `path` is the
    table; `where` is a condition for its rows; `empties` takes away what sinks have of it.
    """

    path: str
    changed: bool = False
    key: str = ""
    kind: str = "retry"
    source: str = ""  # of a reread and a replay
    files: tuple[dict[str, Json], ...] = ()
    reading: str = ""  # of a reread: the newest reading of the file when it was requested; empty: not known
    discard: bool = False
    where: str = ""
    empties: bool = False

    @property
    def id(self) -> str:
        """The name of the request, used once: the position of the epoch that answers it names it."""
        return self.key.rsplit("/", 1)[-1]


class Requests:
    """The requests of one pipeline, below `<table>/_firnline/<pipeline>/requests/`."""

    def __init__(self, storage: Storage, pipeline: str) -> None:
        self._storage = storage
        self._folder = requests_folder(pipeline)

    def ask_retry(self, path: str, *, changed: bool, ids: Ids) -> None:
        """Request another read of a file that was set aside."""
        self._put({"kind": "retry", "path": path, "changed": changed}, ids)

    def ask_drop(self, path: str, *, ids: Ids) -> None:
        """Request to drop a file that was set aside."""
        self._put({"kind": "drop", "path": path, "changed": False}, ids)

    def ask_reread(self, path: str, source: str, *, reading: str = "", ids: Ids) -> None:
        """Request another read of a finished file. It applies while `reading` is the newest one of the file."""
        body = {"kind": "reread", "path": path, "changed": False, "source": source}
        self._put({**body, **({"reading": reading} if reading else {})}, ids)

    def ask_replay(self, source: str, files: Sequence[dict[str, Json]], *, discard: bool, ids: Ids) -> None:
        """Request another read of quarantined records, or that they count as dealt with."""
        body = {"kind": "replay", "path": "", "changed": False, "source": source, "discard": discard}
        self._put({**body, "files": list(files)}, ids)

    def ask_snapshot(self, table: str, source: str, *, where: str, empties: bool, ids: Ids, name: str = "") -> None:
        """Request another read of the rows of a table, while its changes go on. One with a `name` is asked for once."""
        body = {"kind": "snapshot", "path": table, "changed": False, "source": source}
        self._put({**body, "where": where, "empties": empties}, ids, name)

    def _put(self, body: dict[str, Json], ids: Ids, name: str = "") -> None:
        self._storage.put(f"{self._folder}/{request_name(name or ids.new())}", canonical(seal(body)))

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
            found.append(
                FileRequest(
                    path=str(body["path"]),
                    changed=bool(body["changed"]),
                    key=key,
                    kind=str(body["kind"]),
                    source=str(body.get("source", "")),
                    files=tuple(body.get("files", ())),
                    reading=str(body.get("reading", "")),
                    discard=bool(body.get("discard", False)),
                    where=str(body.get("where", "")),
                    empties=bool(body.get("empties", False)),
                )
            )
        return found

    def done(self, requests: list[FileRequest]) -> None:
        """Delete requests once the epoch that answers them is committed."""
        for request in requests:
            self._storage.delete(request.key)
