"""The journal: the Delta table without rows in which a pipeline decides when no table of its sinks can."""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa

from firnline.errors import ConfigError, RollbackRefusedError
from firnline.names import JOURNAL_COLUMN
from firnline.sinks.base import Decided, Effect, EpochCommit, Head, KeepRows, SinkReturn
from firnline.sinks.delta.sink import DeltaSink
from firnline.types import EntryRef, Json, Receipt

COLUMNS = pa.schema([(JOURNAL_COLUMN, pa.int64())])  # delta-rs creates no table without a column


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
