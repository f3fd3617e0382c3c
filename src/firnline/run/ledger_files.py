"""Every file that the ledger names, kept from one comparison with a listing to the next."""

from __future__ import annotations

from collections.abc import Mapping

from firnline.checkpoint.ledger import LedgerEntry
from firnline.errors import LedgerHoleError
from firnline.run.open_pipeline import OpenPipeline, is_read
from firnline.sources.known import KnownFiles
from firnline.types import EntryRef

MAX_STEPS = 64  # more new entries than that: the chain is read anew, with its folds


class LedgerFiles:
    """The files of the ledger's chain down from one entry, per source. Used by one thread.

    When the chain has grown, only its new entries are added. After anything else (a history edit, another history, a
    broken link) the whole chain is read again. The memory is bounded: `KnownFiles` sorts on disk.
    """

    def __init__(self, pipeline: OpenPipeline) -> None:
        self._pipeline = pipeline
        self._tip: EntryRef | None = None
        self._known: dict[str, KnownFiles] | None = None

    def load(
        self, tip: EntryRef | None, recent: Mapping[int, tuple[LedgerEntry, EntryRef]] | None = None
    ) -> dict[str, KnownFiles]:
        """Return the files of the chain down from `tip`. `recent` are entries that need not be read, by epoch.

        Raises:
            LedgerHoleError: the chain is broken.
        """
        if self._known is not None and tip == self._tip:
            return self._known
        added = self._added_since(tip, recent or {})
        if self._known is None or added is None:
            return self._build(tip)
        for entry in reversed(added):  # the oldest first: the most recent read of a file counts
            for name in self._pipeline.sources.names:
                source = self._pipeline.sources[name]
                for record in filter(is_read, reversed(entry.inputs.get(name, []))):
                    end = source.known_end(record)
                    self._known[name].add_newer(str(record["path"]), str(record.get("etag", "")), end)
        self._tip = tip
        return self._known

    def _added_since(
        self, tip: EntryRef | None, recent: Mapping[int, tuple[LedgerEntry, EntryRef]]
    ) -> list[LedgerEntry] | None:
        """Return the entries from `tip` back to the last one loaded, newest first; None if the history is another."""
        if self._tip is None:
            return None
        found: list[LedgerEntry] = []
        ref = tip
        while ref != self._tip:
            if ref is None or ref.epoch <= self._tip.epoch or len(found) == MAX_STEPS:
                return None
            kept = recent.get(ref.epoch)
            try:
                entry = kept[0] if kept is not None and kept[1] == ref else self._pipeline.ledger.load(ref)
            except LedgerHoleError:  # folded, or lost: reading the chain shows which
                return None
            if entry.kind != "epoch":
                return None
            found.append(entry)
            ref = entry.previous
        return found

    def _build(self, tip: EntryRef | None) -> dict[str, KnownFiles]:
        self.close()
        known = {name: KnownFiles() for name in self._pipeline.sources.names}
        try:
            self._pipeline.add_known(known, tip)
        except BaseException:
            for files in known.values():
                files.close()
            raise
        self._known, self._tip = known, tip
        return known

    def close(self) -> None:
        """Forget everything, and delete the temporary files."""
        for files in (self._known or {}).values():
            files.close()
        self._known, self._tip = None, None
