"""The journal: the Delta table without rows in which a pipeline decides when no table of its sinks can."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Collection

import pyarrow as pa

from firnline.errors import ConfigError, RollbackRefusedError, SinkError
from firnline.names import DELTA_LOG, JOURNAL_COLUMN, commit_key, probe_key
from firnline.sinks.base import Decided, Effect, EpochCommit, Head, KeepRows, SinkReturn
from firnline.sinks.delta.log import DeltaLog
from firnline.sinks.delta.sink import DeltaSink
from firnline.sinks.delta.table import Table, check_put_if_absent
from firnline.storage import open_storage
from firnline.types import EntryRef, Json, Receipt

COLUMNS = pa.schema([(JOURNAL_COLUMN, pa.int64())])  # delta-rs creates no table without a column
VERSIONS_PER_GENERATION = 1000  # of a recovered journal: its versions begin 10^9 or more above those of the lost one


class JournalSink(DeltaSink):
    """A journal. Its commits carry the checkpoint and no files, so a history edit changes no rows in it.

    The first claim creates the table, so that every checkpoint names its id.
    """

    def claim(
        self,
        run: str,
        generation: int | None = None,
        baseline: EntryRef | None = None,
        onto: int | None = None,
        *,
        again: bool = False,
        decided: Decided | None = None,
    ) -> Head:
        if not again and not self._table.refresh():
            self._run, self._generation = run, 0
            self._create_table(COLUMNS, {})
        return super().claim(run, generation, baseline, onto, again=again, decided=decided)

    def begin_anew(self, run: str, generation: int) -> None:
        """Create the journal in place of a lost one, unless it exists. Repeatable; two at once create the same.

        Its versions begin far above those that the lost one can have had. A run that holds a version of the lost one
        finds none of its files here: it reads the new claim and ends as fenced, or cannot write at all.
        """
        log = DeltaLog(self.storage)
        try:
            found = log.find_checkpoint()
            if found is None and log.newest_version() < 0:
                version = generation * VERSIONS_PER_GENERATION
                check_put_if_absent(self.storage, probe_key(self._pipeline, run))
                with contextlib.suppress(FileExistsError):
                    self.storage.put_new(f"{DELTA_LOG}/{version:020d}.checkpoint.parquet", _make_checkpoint())
                found = log.find_checkpoint()
            if found is not None and log.newest_version() < found.version:
                # The checkpoint has the table; writers ask for the commit file of the version that they build on.
                info = {"operation": "CREATE TABLE", "timestamp": int(self._clock.now().timestamp() * 1000)}
                with contextlib.suppress(FileExistsError):
                    self.storage.put_new(commit_key(found.version), json.dumps({"commitInfo": info}).encode() + b"\n")
        except OSError as error:
            raise SinkError(f"cannot create the journal {self.uri}: {error}", table=self.uri) from error

    def find_committed_schema(self) -> pa.Schema | None:
        """Return None: a journal has no rows. The checkpoint has the columns of sources."""
        return None

    def find_values(self, column: str) -> set[str]:
        return set()

    def find_foreign(self, version: int, scan_commits: int, *, accept_older: bool) -> Json | None:
        return None

    def plan_return(self, to_epoch: int, accept: Collection[str]) -> tuple[SinkReturn, list[RollbackRefusedError]]:
        fence = self.read_fence()
        return SinkReturn(self.name, self.uri, fence.epoch, fence.version), []

    def edit(self, commit: EpochCommit, effect: Effect, onto: EntryRef | None, version: int | None = None) -> Receipt:
        return super().edit(commit, KeepRows(), onto, version)

    def _placeholder(self) -> pa.Schema:
        return COLUMNS

    def _check_joinable(self) -> None:
        if self._table.schema() != COLUMNS:
            raise ConfigError(
                f"{self.uri} is a table with rows of its own, so it cannot be the journal of {self._pipeline!r}",
                hint="Set `home` in the spec to a folder of its own.",
            )


def _make_checkpoint() -> bytes:
    """Return Delta's checkpoint of a new journal, with an id of its own."""
    with tempfile.TemporaryDirectory() as folder:
        table = Table(folder, {})
        table.create(COLUMNS, [], "{}", {})
        table.checkpoint()
        return DeltaLog(open_storage(folder)).read_checkpoint()
