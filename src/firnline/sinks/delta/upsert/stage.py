"""Stages change rows as Parquet beside the table's data, where only a commit that applies them looks."""

from __future__ import annotations

from firnline.names import changes_folder
from firnline.sinks.delta.stage import ParquetStager
from firnline.storage import Storage
from firnline.types import Json

CHANGES = "changes"  # the kind of a staged file that holds change rows


class ChangeStager(ParquetStager):
    """Writes the change rows of one task for one sink; `target` as for rows that are appended.

    The files lie below `_firnline/`, which Delta's readers and its vacuum leave alone, and are not split by partition:
    a change may take a row from one partition to another.
    """

    def __init__(self, target: dict[str, Json], attempt: str, storage: Storage | None = None) -> None:
        super().__init__({**target, "partition_by": []}, attempt, storage)
        self._home = changes_folder(str(target["pipeline"]))

    def close(self) -> list[dict[str, Json]]:
        for file in super().close():
            file["kind"] = CHANGES
        return self._staged
