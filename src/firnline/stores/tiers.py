"""Copies of the newest checkpoint outside the sinks, in a store and two tiers: reads them and decides which to trust.

The sink's own commit is the truth. A copy counts only if it is intact, belongs to this pipeline, and names exactly the
epoch and ledger entry of the sink's snapshot. Every other copy is skipped, and the reason is logged.

Puts are ordered: a store or tier accepts a record only if it is newer, by generation and then by epoch, than its head,
and only onto the version that was read. A superseded run therefore never overwrites its successor's record.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, TypeAlias

from firnline.checkpoint.codec import short_number
from firnline.errors import CheckpointError, DamagedError, NewerFormatError, VersionConflictError
from firnline.stores.base import CheckpointStore
from firnline.stores.record import CheckpointRecord
from firnline.types import EntryRef

logger = logging.getLogger(__name__)

PUT_TRIES = 20
WAIT_SECONDS = 15.0  # a store or a remote tier that takes longer counts as unreachable
UNKNOWN_VERSION = -1
SEARCHED_VERSIONS = 128
CLOSE_SECONDS = 1.0

Tier: TypeAlias = Literal["store", "local", "remote"]


@dataclass(frozen=True, slots=True)
class NewestCopy:
    """The newest copy in a store or tier: a record, or why there is none."""

    tier: Tier
    location: str
    version: int = 0  # the version that the next put expects; UNKNOWN_VERSION if damage hides it
    record: CheckpointRecord | None = None
    damaged: str = ""  # there is content, but it is not usable
    unreachable: str = ""

    @property
    def epoch(self) -> int:
        return self.record.epoch if self.record else 0


def same_entry(one: EntryRef, digest: int | None) -> bool:
    """Return whether a reference names the entry whose checksum starts with these 63 bits."""
    try:
        return digest is not None and short_number(one.checksum) == digest
    except ValueError:
        return False


def entry_digest(ref: EntryRef) -> int:
    """Return the first 63 bits of an entry's checksum, which a snapshot keeps."""
    return short_number(ref.checksum)


class CopyStore:
    """A store or tier that keeps copies of one pipeline's checkpoints; opened on first use. Thread-safe.

    `make_store` returns the same store unopened, which is enough to read: opening one may test a write.
    """

    def __init__(
        self,
        tier: Tier,
        location: str,
        open_store: Callable[[], CheckpointStore],
        pipeline: str,
        keep: int,
        make_store: Callable[[], CheckpointStore] | None = None,
    ) -> None:
        self.tier = tier
        self.location = location
        self._open_store = open_store
        self._make_store = make_store or open_store
        self._pipeline = pipeline
        self._keep = keep
        self._store: CheckpointStore | None = None
        self._lock = threading.RLock()
        self._known: NewestCopy | None = None
        self._answer: Future[NewestCopy] | None = None

    @property
    def known(self) -> NewestCopy | None:
        """The newest copy when it was last read or written; None if unknown."""
        return self._known

    def read(self, *, prove: bool = False) -> NewestCopy:
        """Read the newest record. Problems with it or with the store are part of the answer.

        With `prove` the store is also opened for writing, which checks its guarantees.

        Raises:
            StoreUnsafeError: it lacks the guarantees that it needs.
        """
        try:
            return self._read(prove=prove)
        except OSError as error:
            if prove:
                with contextlib.suppress(OSError):  # a store that is not writable may still be readable
                    return self._read()
            return NewestCopy(self.tier, self.location, unreachable=str(error) or type(error).__name__)

    def read_within(self, seconds: float, *, prove: bool = False) -> NewestCopy:
        """Read the newest record within a time limit: a slow network must not delay a start."""
        answer = self._answer
        if answer is None or answer.done():  # otherwise an abandoned call is still running
            answer = self._answer = self._ask(prove=prove)
        try:
            return answer.result(timeout=seconds)
        except TimeoutError:
            return NewestCopy(self.tier, self.location, unreachable=f"no answer within {seconds:g} s")

    def _ask(self, *, prove: bool) -> Future[NewestCopy]:
        answer: Future[NewestCopy] = Future()

        def read() -> None:
            try:
                answer.set_result(self.read(prove=prove))
            except Exception as error:
                answer.set_exception(error)

        threading.Thread(target=read, name=f"firnline read of {self.tier}", daemon=True).start()
        return answer

    def _read(self, *, prove: bool = False) -> NewestCopy:
        with self._lock:
            if self._store is None and not prove and self._is_absent():  # opening it would create it
                return NewestCopy(self.tier, self.location)
            try:
                store = self._opened() if prove else self._reader()
                version = store.latest_version(self._pipeline)
            except DamagedError as error:
                return NewestCopy(self.tier, self.location, UNKNOWN_VERSION, damaged=error.message)
            try:
                record = store.get(self._pipeline, CheckpointRecord)
                damaged = self._foreign(record)
            except (DamagedError, NewerFormatError) as error:
                record, damaged = None, error.message
            self._known = NewestCopy(self.tier, self.location, version, None if damaged else record, damaged)
            return self._known

    def _is_absent(self) -> bool:
        return os.path.isabs(self.location) and not os.path.exists(self.location)

    def _opened(self) -> CheckpointStore:
        if self._store is None:
            self._store = self._open_store()
        return self._store

    def _reader(self) -> CheckpointStore:
        return self._store or self._make_store()

    def _foreign(self, record: CheckpointRecord | None) -> str:
        if record is None or record.checkpoint.pipeline == self._pipeline:
            return ""
        return f"it holds a checkpoint of another pipeline, {record.checkpoint.pipeline!r}"

    def put(
        self,
        record: CheckpointRecord,
        note: str = "",
        *,
        replace: bool = False,
        check: Callable[[NewestCopy], None] | None = None,
    ) -> CheckpointRecord | None:
        """Make `record` the newest. Returns None, or the newer record that is there instead.

        `replace` also replaces a newer record, whose epochs the sink has rolled back. `check` gets the newest copy
        before it is replaced, and raises to keep it.

        Raises:
            OSError: the outcome is unknown; the next call reads first.
            DamagedError: the store is too damaged to accept a record.
        """
        with self._lock:
            for _ in range(PUT_TRIES):
                store = self._opened()
                copy = self._known or self._read()
                if check is not None:
                    check(copy)
                if copy.record is not None and not replace:
                    if copy.record.entry == record.entry and copy.record.checkpoint == record.checkpoint:
                        return None
                    if _order(copy.record) >= _order(record):
                        return copy.record
                expected = None if copy.version == UNKNOWN_VERSION else copy.version
                try:
                    version = store.put(self._pipeline, record, expected=expected, note=note)
                except VersionConflictError:
                    self._known = None
                    continue
                except Exception:
                    self._known = None
                    raise
                self._known = NewestCopy(self.tier, self.location, version, record)
                return None
            raise OSError(f"gave up on {self.location} after {PUT_TRIES} conflicts with other writers")

    def search(self, epoch: int, digest: int | None) -> CheckpointRecord | None:
        """Return the record of an epoch and entry among the newest versions; None if none is intact."""
        before: int | None = None
        seen = 0
        with self._lock:
            self._read()
            while seen < SEARCHED_VERSIONS and (page := self._reader().list_versions(self._pipeline, before=before)):
                for info in page:
                    record = self._find_version(info.version)
                    if record is not None and record.epoch == epoch and same_entry(record.entry, digest):
                        return record
                seen, before = seen + len(page), page[-1].version
        return None

    def load_since(self, epoch: int) -> list[CheckpointRecord]:
        """Return the records of an epoch and of newer ones, newest first. Unreadable ones are left out.

        Raises:
            OSError: it cannot be read.
        """
        records: list[CheckpointRecord] = []
        before: int | None = None
        with self._lock:
            if self._store is None and self._is_absent():
                return records
            reader = self._reader()
            try:
                while page := reader.list_versions(self._pipeline, before=before):
                    for info in page:
                        with contextlib.suppress(DamagedError, NewerFormatError):
                            record = reader.get(self._pipeline, CheckpointRecord, version=info.version)
                            if record is not None and record.epoch < epoch:
                                return records
                            records += [record] if record is not None and not self._foreign(record) else []
                    before = page[-1].version
            finally:
                if reader is not self._store:
                    reader.close()
        return records

    def _find_version(self, version: int) -> CheckpointRecord | None:
        try:
            record = self._reader().get(self._pipeline, CheckpointRecord, version=version)
        except (DamagedError, NewerFormatError):
            return None
        return None if self._foreign(record) else record

    def prune(self) -> int:
        """Delete old versions. Returns how many were deleted."""
        with self._lock:
            return self._opened().prune(self._pipeline, self._keep)

    def close(self) -> None:
        """Close the store. A store that hangs in a call is left to the end of the process."""
        if self._store is not None and self._lock.acquire(timeout=CLOSE_SECONDS):
            try:
                self._store.close()
                self._store, self._known = None, None
            finally:
                self._lock.release()


def _order(record: CheckpointRecord) -> tuple[int, int]:
    return record.checkpoint.generation, record.epoch


class Tiers:
    """The local and the remote tier of one pipeline, read in this order when a run starts.

    Each tier is read once: an outdated copy matches nothing, so caching is safe.
    """

    def __init__(self, local: CopyStore | None = None, remote: CopyStore | None = None) -> None:
        self.local = local
        self.remote = remote
        self._prove = False
        self._copies: dict[str, NewestCopy] = {}
        self._logged: set[tuple[str, str]] = set()

    @property
    def stores(self) -> tuple[CopyStore, ...]:
        return tuple(store for store in (self.local, self.remote) if store is not None)

    def read_again(self, *, prove: bool = False) -> None:
        """Forget what was read, and read the local tier.

        With `prove`, every tier read from now on must show its guarantees, because a run writes to it.
        """
        self._prove = prove or self._prove
        self._copies.clear()
        if self.local is not None:
            self.read(self.local)

    def read(self, store: CopyStore) -> NewestCopy:
        """Return the newest copy in a tier, as first read."""
        if store.tier not in self._copies:
            self._copies[store.tier] = store.read_within(WAIT_SECONDS, prove=self._prove)
        return self._copies[store.tier]

    def read_all(self) -> Iterator[NewestCopy]:
        """Yield the newest copy of each tier, local first. The remote tier is read only if the caller continues."""
        for store in self.stores:
            yield self.read(store)

    def find(self, epoch: int, digest: int | None) -> tuple[Tier, CheckpointRecord] | None:
        """Return a copy of exactly the epoch and entry of a sink's head, local first."""
        for copy in self.read_all():
            record = copy.record
            if record is not None and record.epoch == epoch and same_entry(record.entry, digest):
                return copy.tier, record
            self._pass_over(copy, epoch)
        return None

    def search(self, epoch: int, digest: int | None) -> tuple[Tier, CheckpointRecord] | None:
        """Like `find`, also among older versions: the last resort if the sink's own copies are damaged."""
        for store in self.stores:
            with contextlib.suppress(OSError, CheckpointError):
                record = store.search(epoch, digest)
                if record is not None:
                    return store.tier, record
        return None

    def _pass_over(self, copy: NewestCopy, epoch: int) -> None:
        """Log once why a copy does not count. A copy that is ahead is checked at the start of the run."""
        reason = copy.unreachable or copy.damaged
        if copy.record is not None and copy.epoch < epoch:
            reason = f"it is out of date: epoch {copy.epoch}, the sink holds {epoch}"
        elif copy.record is not None and copy.epoch == epoch:
            reason = f"its epoch {epoch} is not the one that the sink holds"
        if reason and (copy.tier, reason) not in self._logged:
            self._logged.add((copy.tier, reason))
            logger.warning("copy passed over", extra={"tier": copy.tier, "place": copy.location, "reason": reason})
