"""Sweeps declare in the table's log what they delete, so that no commit names a file that is about to be deleted.

A sweep and a rollback that each check and then act can miss each other, whatever they check. So the log decides. A
sweep has these steps:
1. It signs, writes the files to delete into an intent, and checks once more whether anything needs one of them.
2. It binds the intent: a commit without data, onto exactly the version of that check. From then on the files will be
   deleted, by this sweep or by another one.
3. It deletes the files, ends the intent by deleting its record, and deletes its signature.

A rollback, restore, compaction or committer that names files again commits onto a version at which
1. the newest intent in the log is ended, or does not cover these files, and
2. the files exist, checked after that.
A sweep that binds its intent after that version sees the files in the log. The log has only the newest intent.
Therefore a sweep first finishes every open intent that it finds, even if its owner is dead or stalled.

A pin is not a commit. A process that pins files reads all intents afterwards, bound or not. Either it sees the intent,
or the sweep sees the pin, because it reads the pins after it wrote the intent.

Files of state and of the ledger return under their old names. They are created again only when no signature covers
them: a sweep that another one finished may still wake up and delete. All interleavings are searched in
`tests/unit/maintenance/test_sweep_search.py`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.clock import jitter
from firnline.errors import CheckpointError, CommitConflictError, CommitUnknownError, DamagedError, SinkError
from firnline.faults import fault_point
from firnline.names import (
    intent_name,
    is_intent,
    is_signature,
    signature_name,
    sweep_name,
    sweep_token_txn,
    sweep_txn,
    sweeps_folder,
)
from firnline.process import has_exited, this_process
from firnline.sinks.delta.table import Table
from firnline.storage import Storage
from firnline.types import Ids, RandomIds

logger = logging.getLogger(__name__)

TRIES = 100  # each is another writer's commit that landed first


@dataclass(frozen=True, slots=True)
class Intent:
    """The files that a sweep deletes. `token` distinguishes it from another sweep with the same number."""

    number: int
    token: int
    what: str
    files: frozenset[str]
    user: str
    host: str
    pid: int
    at: str

    @property
    def name(self) -> str:
        return sweep_name(self.number, self.token)

    def __str__(self) -> str:
        return f"{self.what} (process {self.pid} on {self.host}, {self.at})"

    def to_bytes(self) -> bytes:
        return canonical(seal({**asdict(self), "files": sorted(self.files)}))

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> Intent:
        body = unseal(parse(data, what), what)
        try:
            return cls(
                number=int(body["number"]),
                token=int(body["token"]),
                what=str(body["what"]),
                files=frozenset(map(str, body["files"])),
                user=str(body["user"]),
                host=str(body["host"]),
                pid=int(body["pid"]),
                at=str(body["at"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{what} lacks {error}", what=what) from error


class SweepLog:
    """The sweeps of one table, or of the state of one pipeline, from the log and their records.

    All answers about the log apply to the version of the table handle.
    """

    def __init__(self, storage: Storage, table: Table, pipeline: str = "") -> None:
        self.storage = storage
        self.table = table
        self.folder = sweeps_folder(pipeline)
        self._pipeline = pipeline
        self._ended: tuple[int, int] | None = None

    def newest(self) -> tuple[int, int]:
        """Return number and token of the newest intent in the log; zeros without one."""
        number, token = (self.table.txn(make(self._pipeline)) or 0 for make in (sweep_txn, sweep_token_txn))
        return number, token

    def txns(self, intent: Intent) -> dict[str, int]:
        """Return the transaction ids that bind an intent."""
        return {sweep_txn(self._pipeline): intent.number, sweep_token_txn(self._pipeline): intent.token}

    def find_open(self) -> Intent | None:
        """Return the newest intent in the log, unless it is ended.

        Raises:
            CheckpointError: its record cannot be read, and might name any file.
        """
        number, token = self.newest()
        if number == 0 or self._ended == (number, token):
            return None
        found = self._load(intent_name(sweep_name(number, token)))
        if found is None:
            self._ended = (number, token)
        return found

    def find_covering(self, files: Iterable[str]) -> tuple[Intent, list[str]] | None:
        """Return the open intent and the covered files, if it covers some of these."""
        intent = self.find_open()
        covered = [file for file in files if file in intent.files] if intent is not None else []
        return (intent, covered) if intent is not None and covered else None

    def find_after_pin(self, files: Collection[str]) -> Intent | None:
        """Return an intent, bound or not, that covers pinned files and may have been written before the pin was
        visible."""
        found = list(self.intents())
        self.table.refresh()
        newest = self.newest()
        for intent in found:
            may_count = intent.number > newest[0] or (intent.number, intent.token) == newest
            if may_count and not intent.files.isdisjoint(files):
                return intent
        return None

    def find_signed(self, files: Collection[str]) -> Intent | None:
        """Return a sweep that announced to delete some of these files, and may still do so."""
        for name in self._names():
            if is_signature(name):
                signed = self._load(name)
                if signed is not None and not signed.files.isdisjoint(files):
                    return signed
        return None

    def intents(self) -> Iterator[Intent]:
        """Yield every recorded intent, bound or not."""
        for name in self._names():
            if is_intent(name):
                found = self._load(name)
                if found is not None:
                    yield found

    def _names(self) -> list[str]:
        prefix = f"{self.storage.root}/{self.folder}/"
        return sorted(stat.name.removeprefix(prefix) for stat in self.storage.list(self.folder))

    def _load(self, name: str) -> Intent | None:
        key = f"{self.folder}/{name}"
        try:
            return Intent.from_bytes(self.storage.get(key), key)
        except FileNotFoundError:
            return None
        except DamagedError as error:
            raise CheckpointError(
                f"the record of a sweep, {key}, cannot be read, and might name any file: {error.message}",
                hint="Restore it; or delete it, if no sweep of this table is running any more.",
            ) from error

    def drop_void(self) -> None:
        """Delete records of intents that can never be bound any more, and signatures of dead processes."""
        newest = self.newest()
        for name in self._names():
            is_signed = is_signature(name)
            if not is_signed and not is_intent(name):
                continue
            found = self._load(name)
            if found is None or (not is_signed and (found.number, found.token) == newest):
                continue
            passed = not is_signed and found.number <= newest[0]
            if passed or has_exited(found.host, found.pid):
                self.storage.delete(f"{self.folder}/{name}")


class Sweeper:
    """Deletes files of a table, or of a home of state, after declaring them.

    Args:
        what: The name of this sweep, for messages.
        exists: Returns whether a file exists.
        delete: Deletes files by name; missing files are no error.
    """

    def __init__(
        self,
        log: SweepLog,
        what: str,
        exists: Callable[[str], bool],
        delete: Callable[[Sequence[str]], None],
        ids: Ids | None = None,
    ) -> None:
        self._log = log
        self._what = what
        self._exists = exists
        self._delete = delete
        self._ids = ids or RandomIds()
        self._signature = self._ids.new()

    def finish_open(self) -> list[Intent]:
        """Finish declared sweeps of others. Returns their intents. Moves the table handle."""
        log = self._log
        done = []
        log.table.refresh()
        while (intent := log.find_open()) is not None:
            self._sign(intent)
            if log.find_open() is not None:  # signed while it was open: nothing comes back under these names
                self._delete([file for file in sorted(intent.files) if self._exists(file)])
                self._end(intent)
                done.append(intent)
            self._unsign(intent)
            log.table.refresh()
        log.drop_void()
        for intent in done:
            facts = {"table": log.table.uri, "files": len(intent.files), "host": intent.host, "pid": intent.pid}
            logger.warning("a sweep that did not end was finished", extra=facts)
        return done

    def sweep(self, files: Sequence[str], is_unneeded: Callable[[], bool]) -> bool:
        """Declare and delete files. Returns False, with nothing deleted, if something needs one of the files by now.

        Args:
            is_unneeded: Moves the table handle to the newest version, reads everything that may name files, and returns
                whether still nothing names any of these.

        Raises:
            CommitUnknownError: it is unknown whether the intent is bound; the next sweep finds out.
            SinkError: others committed first every time.
        """
        intent = self._declare(files)
        if not self._bind(intent, is_unneeded):
            self._end(intent)
            self._unsign(intent)
            return False
        self._delete(sorted(intent.files))
        self._end(intent)
        self._unsign(intent)
        return True

    def _declare(self, files: Sequence[str]) -> Intent:
        me = this_process()
        intent = Intent(
            number=self._log.newest()[0] + 1,
            token=int(self._ids.new(), 16) >> 1,
            what=self._what,
            files=frozenset(files),
            user=me.user,
            host=me.host,
            pid=me.pid,
            at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        self._sign(intent)
        fault_point("sweep.declare.before")
        self._log.storage.put(f"{self._log.folder}/{intent_name(intent.name)}", intent.to_bytes())
        fault_point("sweep.declare.after")
        return intent

    def _bind(self, intent: Intent, is_unneeded: Callable[[], bool]) -> bool:
        log = self._log
        info = {"kind": "sweep", "pipeline": "", "what": self._what, "sweep": intent.name, "files": len(intent.files)}
        for tries in range(TRIES):
            if not is_unneeded() or log.newest()[0] >= intent.number:
                return False
            try:
                log.table.append("delta.sweep", [], json.dumps(info), log.txns(intent), {}, onto=log.table.version)
                return True
            except CommitConflictError:
                time.sleep(jitter(0.005, 0.02) * min(2**tries, 16))
            except CommitUnknownError:
                log.table.refresh()
                if log.newest() != (intent.number, intent.token):
                    raise  # it may still land: the record stays, and the next sweep finds out
                return True
        self._end(intent)
        self._unsign(intent)
        raise SinkError(
            f"gave up sweeping {log.table.uri} after {TRIES} conflicts with other writers", hint="Try again."
        )

    def _end(self, intent: Intent) -> None:
        fault_point("sweep.end.before")
        self._log.storage.delete(f"{self._log.folder}/{intent_name(intent.name)}")
        fault_point("sweep.end.after")

    def _sign(self, intent: Intent) -> None:
        """Record that this process may delete these files at any moment."""
        me = this_process()
        signed = Intent(intent.number, intent.token, self._what, intent.files, me.user, me.host, me.pid, intent.at)
        self._log.storage.put(self._signature_of(intent), signed.to_bytes())

    def _unsign(self, intent: Intent) -> None:
        self._log.storage.delete(self._signature_of(intent))

    def _signature_of(self, intent: Intent) -> str:
        return f"{self._log.folder}/{signature_name(intent.name, self._signature)}"
