"""Brings the files of a savepoint into the tables that it is restored to: data under new names, the ledger as it is."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Sequence

from firnline.committer.validate import InvalidUnitError, footer_metadata, footer_schema, read_footer
from firnline.errors import DamagedError
from firnline.faults import fault_point
from firnline.history.edits.restore_plan import SinkRestore
from firnline.history.savepoints.files import Progress, copy_file, each
from firnline.history.savepoints.format import SavedFile, Savepoint, kept_bytes, read_saved
from firnline.history.savepoints.pins import delete_restore_pin, put_restore_pin
from firnline.history.savepoints.state import pinned_refs
from firnline.run.open_pipeline import Parts
from firnline.sinks.delta.stage import partition_folder
from firnline.sinks.delta.stats import file_stats
from firnline.storage import Storage
from firnline.types import Json


class Copies:
    """Copies of data files. Their names bear `attempt`, so that a sweep knows what a killed restore left behind."""

    def __init__(
        self,
        saved: Savepoint,
        storage: Storage,
        attempt: str,
        progress: Progress | None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._saved = saved
        self._storage = storage
        self._attempt = attempt
        self._progress = progress
        self._stopping = stopping

    @contextlib.contextmanager
    def pinned(self, plans: Sequence[SinkRestore]) -> Iterator[Copies]:
        """Keep sweeps from the copies, and from operators' state, until a commit or the ledger names them."""
        state = pinned_refs(self._saved)
        storages = [plan.sink.storage for n, plan in enumerate(plans) if plan.version is None or (n == 0 and state)]
        facts: dict[str, Json] = {"savepoint": self._saved.id, "pipeline": self._saved.pipeline}
        try:
            for storage in storages:
                put_restore_pin(storage, self._attempt, **facts, **({"state": state} if state else {}))
            yield self
        finally:  # after a failure, too: copies that a commit may name are named by a staged entry by then
            for storage in storages:
                with contextlib.suppress(OSError):  # one that is left is let go of a day after this process
                    delete_restore_pin(storage, self._attempt)

    def copy_data(self, plans: Sequence[SinkRestore]) -> dict[str, list[dict[str, Json]]]:
        """What each sink's commit adds; nothing where the table's own log still has the version."""
        return {plan.sink.name: self._copy(plan) for plan in plans}

    def _copy(self, plan: SinkRestore) -> list[dict[str, Json]]:
        if plan.version is not None:
            return []

        def copy(file: SavedFile) -> dict[str, Json]:
            return self._copy_one(plan, file)

        what, files = f"copying {plan.sink.name}", plan.saved.files
        return each(what, files, copy, lambda f: f.size_bytes, self._progress, self._stopping)

    def _copy_one(self, plan: SinkRestore, file: SavedFile) -> dict[str, Json]:
        """Copy a file and prove that it is what was saved: size, checksum if there is one, footer and rows."""
        assert plan.source is not None
        folders = [partition_folder(name, file.partition_values[name]) for name in plan.saved.partition_by]
        key = "/".join([*folders, f"{self._attempt}-{uuid.uuid4().hex}.parquet"])
        target = plan.sink.storage
        fault_point("restore.copy.before")
        size, sha256 = copy_file(plan.source, plan.key_of(file, copied=self._saved.copied), target, key)
        fault_point("restore.copy.after")
        try:
            if size != file.size_bytes or (file.sha256 and sha256 != file.sha256):
                raise DamagedError(f"{file.path} is not what was saved", hint="Bring the savepoint's file back.")
            footer, _ = read_footer(target, key, size)
            metadata = footer_metadata(footer, file.path)
            stats = file_stats(metadata, footer_schema(metadata, file.path))
            if file.rows is not None and metadata.num_rows != file.rows:
                raise DamagedError(f"{file.path} has {metadata.num_rows} rows; {file.rows} were saved")
        except InvalidUnitError as error:
            target.delete(key)
            raise DamagedError(f"{file.path} cannot be restored: {error}") from error
        except DamagedError:
            target.delete(key)
            raise
        return {
            "path": key,
            "size_bytes": size,
            "rows": metadata.num_rows,
            "partition_values": file.partition_values,
            "modification_time": int(time.time() * 1000),
            "stats": stats,
        }


def copy_ledger(parts: Parts, storage: Storage, saved: Savepoint) -> None:
    """Put what the table's own ledger and quarantine lack of a savepoint's; the same name must be the same bytes.

    Raises:
        DamagedError: it is not, or the savepoint's file is not what was saved.
    """
    target, home = parts.storage, f"_firnline/{parts.options.name}"  # whose folders have the same names
    present = {
        stat.name.removeprefix(f"{target.root}/{home}/")
        for folder in ("ledger", "quarantine")
        for stat in target.list(f"{home}/{folder}")
    }
    for key, one in kept_bytes(saved):
        data = read_saved(storage, key, one)
        if key not in present:
            target.put(f"{home}/{key}", data)
        elif target.get(f"{home}/{key}") != data:
            raise DamagedError(
                f"the table has another {key} than the savepoint; one of them is damaged",
                hint="Restore the savepoint into another table.",
            )
