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

Path: TypeAlias = Literal["store", "local", "remote"]


@dataclass(frozen=True, slots=True)
class Look:
    """The content of a store or tier for a pipeline: a record, or why there is none."""

    path: Path
    place: str
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


class Place:
    """One store that keeps the records of one pipeline; opened on first use. Thread-safe.

    `make_store` returns the same store unopened, which is enough to read: opening one may test a write.
    """

    def __init__(
        self,
        path: Path,
        place: str,
        open_store: Callable[[], CheckpointStore],
        pipeline: str,
        keep: int,
        make_store: Callable[[], CheckpointStore] | None = None,
    ) -> None:
        self.path = path
        self.place = place
        self._open_store = open_store
        self._make_store = make_store or open_store
        self._pipeline = pipeline
        self._keep = keep
        self._store: CheckpointStore | None = None
        self._lock = threading.RLock()
        self._known: Look | None = None
        self._answer: Future[Look] | None = None

    @property
    def known(self) -> Look | None:
        """Its content when it was last read or written; None if unknown."""
        return self._known

    def look(self, *, prove: bool = False) -> Look:
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
            return Look(self.path, self.place, unreachable=str(error) or type(error).__name__)

    def look_within(self, seconds: float, *, prove: bool = False) -> Look:
        """Read the newest record within a time limit: a slow network must not delay a start."""
        answer = self._answer
        if answer is None or answer.done():  # otherwise an abandoned call is still running
            answer = self._answer = self._ask(prove=prove)
        try:
            return answer.result(timeout=seconds)
        except TimeoutError:
            return Look(self.path, self.place, unreachable=f"no answer within {seconds:g} s")

    def _ask(self, *, prove: bool) -> Future[Look]:
        answer: Future[Look] = Future()

        def look() -> None:
            try:
                answer.set_result(self.look(prove=prove))
            except Exception as error:
                answer.set_exception(error)

        threading.Thread(target=look, name=f"firnline look at {self.path}", daemon=True).start()
        return answer

    def _read(self, *, prove: bool = False) -> Look:
        with self._lock:
            if self._store is None and not prove and self._is_absent():  # opening it would create it
                return Look(self.path, self.place)
            try:
                store = self._opened() if prove else self._reader()
                version = store.latest_version(self._pipeline)
            except DamagedError as error:
                return Look(self.path, self.place, UNKNOWN_VERSION, damaged=error.message)
            try:
                record = store.get(self._pipeline, CheckpointRecord)
                damaged = self._foreign(record)
            except (DamagedError, NewerFormatError) as error:
                record, damaged = None, error.message
            self._known = Look(self.path, self.place, version, None if damaged else record, damaged)
            return self._known

    def _is_absent(self) -> bool:
        return os.path.isabs(self.place) and not os.path.exists(self.place)

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
        check: Callable[[Look], None] | None = None,
    ) -> CheckpointRecord | None:
        """Make `record` the newest. Returns None, or the newer record that is there instead.

        `replace` also replaces a newer record, whose epochs the sink has rolled back. `check` gets the current content
        before it is replaced, and raises to keep it.

        Raises:
            OSError: the outcome is unknown; the next call reads first.
            DamagedError: the store is too damaged to accept a record.
        """
        with self._lock:
            for _ in range(PUT_TRIES):
                store = self._opened()
                look = self._known or self._read()
                if check is not None:
                    check(look)
                if look.record is not None and not replace:
                    if look.record.entry == record.entry and look.record.checkpoint == record.checkpoint:
                        return None
                    if _order(look.record) >= _order(record):
                        return look.record
                expected = None if look.version == UNKNOWN_VERSION else look.version
                try:
                    version = store.put(self._pipeline, record, expected=expected, note=note)
                except VersionConflictError:
                    self._known = None
                    continue
                except Exception:
                    self._known = None
                    raise
                self._known = Look(self.path, self.place, version, record)
                return None
            raise OSError(f"cannot put into {self.place}: others put all the time")

    def search(self, epoch: int, digest: int | None) -> CheckpointRecord | None:
        """Return the record of an epoch and entry among the newest versions; None if none is intact."""
        before: int | None = None
        seen = 0
        with self._lock:
            self._read()
            while seen < SEARCHED_VERSIONS and (page := self._reader().list_versions(self._pipeline, before=before)):
                for info in page:
                    found = self._find_version(info.version)
                    if found is not None and found.epoch == epoch and same_entry(found.entry, digest):
                        return found
                seen, before = seen + len(page), page[-1].version
        return None

    def load_since(self, epoch: int) -> list[CheckpointRecord]:
        """Return the records of an epoch and of newer ones, newest first. Unreadable ones are left out.

        Raises:
            OSError: it cannot be read.
        """
        found: list[CheckpointRecord] = []
        before: int | None = None
        with self._lock:
            if self._store is None and self._is_absent():
                return found
            reader = self._reader()
            try:
                while page := reader.list_versions(self._pipeline, before=before):
                    for info in page:
                        with contextlib.suppress(DamagedError, NewerFormatError):
                            record = reader.get(self._pipeline, CheckpointRecord, version=info.version)
                            if record is not None and record.epoch < epoch:
                                return found
                            found += [record] if record is not None and not self._foreign(record) else []
                    before = page[-1].version
            finally:
                if reader is not self._store:
                    reader.close()
        return found

    def _find_version(self, version: int) -> CheckpointRecord | None:
        try:
            found = self._reader().get(self._pipeline, CheckpointRecord, version=version)
        except (DamagedError, NewerFormatError):
            return None
        return None if self._foreign(found) else found

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

    def __init__(self, local: Place | None = None, remote: Place | None = None) -> None:
        self.local = local
        self.remote = remote
        self._prove = False
        self._looks: dict[str, Look] = {}
        self._told: set[tuple[str, str]] = set()

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(p for p in (self.local, self.remote) if p is not None)

    def look_again(self, *, prove: bool = False) -> None:
        """Forget what was read, and read the local tier.

        With `prove`, every tier read from now on must show its guarantees, because a run writes to it.
        """
        self._prove = prove or self._prove
        self._looks.clear()
        if self.local is not None:
            self.look(self.local)

    def look(self, place: Place) -> Look:
        """Return the content of a tier, as first read."""
        if place.path not in self._looks:
            self._looks[place.path] = place.look_within(WAIT_SECONDS, prove=self._prove)
        return self._looks[place.path]

    def looks(self) -> Iterator[Look]:
        """Yield the contents of the tiers, local first. The remote tier is read only if the caller continues."""
        for place in self.places:
            yield self.look(place)

    def find(self, epoch: int, digest: int | None) -> tuple[Path, CheckpointRecord] | None:
        """Return a copy of exactly the epoch and entry of a sink's head, local first."""
        for look in self.looks():
            record = look.record
            if record is not None and record.epoch == epoch and same_entry(record.entry, digest):
                return look.path, record
            self._pass_over(look, epoch)
        return None

    def search(self, epoch: int, digest: int | None) -> tuple[Path, CheckpointRecord] | None:
        """Like `find`, also among older versions: the last resort if the sink's own copies are damaged."""
        for place in self.places:
            with contextlib.suppress(OSError, CheckpointError):
                found = place.search(epoch, digest)
                if found is not None:
                    return place.path, found
        return None

    def _pass_over(self, look: Look, epoch: int) -> None:
        """Log once why a copy does not count. A copy that is ahead is judged at the start of the run."""
        reason = look.unreachable or look.damaged
        if look.record is not None and look.epoch < epoch:
            reason = f"it is out of date: epoch {look.epoch}, the sink holds {epoch}"
        elif look.record is not None and look.epoch == epoch:
            reason = f"its epoch {epoch} is not the one that the sink holds"
        if reason and (look.path, reason) not in self._told:
            self._told.add((look.path, reason))
            logger.warning("copy passed over", extra={"tier": look.path, "place": look.place, "reason": reason})
