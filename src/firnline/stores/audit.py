"""The audit trail: who rolled back, restored, imported or deleted a pipeline's checkpoints, and when.

Every record is one version of the key `<pipeline>/audit`, appended with compare-and-set. Records are never pruned and
outlive the checkpoints that they describe. A damaged record is shown as damaged and hides no other.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from firnline.clock import SystemClock, jitter
from firnline.errors import DamagedError, FirnlineError, NewerFormatError, VersionConflictError
from firnline.process import this_process
from firnline.stores.base import CheckpointStore, decode, encode
from firnline.types import Clock, Json, RandomIds

logger = logging.getLogger(__name__)

WHATS = (
    "rollback", "savepoint-create", "savepoint-dispose", "restore", "import", "delete", "fresh-start", "rescale",
    "import-state", "ledger-repair", "gc", "compact", "discard", "state-sweep", "files-drop",
    "files-retry", "files-reread", "snapshot", "accept-gap", "quarantine-replay", "quarantine-drop", "sinks-forget",
    "sinks-resume", "sinks-resync", "dead-letters-retry", "dead-letters-drop", "position-set", "position-skip",
    "recover",
)  # fmt: skip
TRIES = 1000  # each is another record that was appended first
_FAILURES = 3  # storage errors in a row; repeating the same put is safe
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+@")  # user and password in a URI


def audit_key(pipeline: str) -> str:
    """Return the key of a pipeline's trail."""
    return f"{pipeline}/audit"


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One action, or its start.

    `outcome` is `begun`, `done` or `failed`; records of one action have the same `run`. `details` hold no secrets.
    """

    id: str  # makes records with equal content distinct
    at: str  # RFC 3339, UTC
    user: str
    host: str
    pid: int
    run: str
    what: str
    pipeline: str
    from_epoch: int | None = None
    to_epoch: int | None = None
    details: dict[str, Json] = field(default_factory=dict)
    outcome: str = "done"
    start: str = ""  # of the process, see `firnline.process.Process`

    def to_json(self) -> dict[str, Json]:
        return {
            "id": self.id,
            "at": self.at,
            "user": self.user,
            "host": self.host,
            "pid": self.pid,
            "run": self.run,
            "what": self.what,
            "pipeline": self.pipeline,
            "from_epoch": self.from_epoch,
            "to_epoch": self.to_epoch,
            "details": self.details,
            "outcome": self.outcome,
            **({"start": self.start} if self.start else {}),
        }

    @classmethod
    def from_json(cls, value: Json, what: str = "audit record") -> AuditRecord:
        """Parse the output of `to_json`. Raises DamagedError if it is invalid."""
        try:
            return cls(
                id=str(value["id"]),
                at=str(value["at"]),
                user=str(value["user"]),
                host=str(value["host"]),
                pid=int(value["pid"]),
                run=str(value["run"]),
                what=str(value["what"]),
                pipeline=str(value["pipeline"]),
                from_epoch=_number(value["from_epoch"]),
                to_epoch=_number(value["to_epoch"]),
                details=dict(value["details"]),
                outcome=str(value["outcome"]),
                start=str(value.get("start", "")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{what} lacks {error}", what=what) from error


@dataclass(frozen=True, slots=True)
class Actor:
    """Who acts through this process: the name of a token, and the interface that it used."""

    name: str
    via: str


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One position in the trail: the record, or why it cannot be read."""

    version: int
    record: AuditRecord | None
    problem: str = ""


def make_record(
    pipeline: str,
    what: str,
    *,
    run: str = "",
    from_epoch: int | None = None,
    to_epoch: int | None = None,
    details: dict[str, Json] | None = None,
    outcome: str = "done",
    clock: Clock | None = None,
    actor: Actor | None = None,
) -> AuditRecord:
    """Return a record of what this process does now. Without `run`, it gets a new id; without `actor`, its user."""
    if what not in WHATS:
        raise ValueError(f"{what!r} is nothing that is audited")
    me = this_process()
    ids = RandomIds()
    return AuditRecord(
        id=ids.new(),
        at=(clock or SystemClock()).now().isoformat(),
        user=actor.name if actor else me.user,
        host=me.host,
        pid=me.pid,
        run=run or ids.new(),
        what=what,
        pipeline=pipeline,
        from_epoch=from_epoch,
        to_epoch=to_epoch,
        details={**(details or {}), **({"via": actor.via} if actor else {})},
        outcome=outcome,
        start=me.start,
    )


def append_audit(store: CheckpointStore, record: AuditRecord, clock: Clock | None = None) -> int:
    """Append a record to the trail, durable on return. Returns its version.

    Raises:
        OSError: the store failed several times in a row; the record may or may not be there.
        VersionConflictError: gave up after conflicts with other writers.
    """
    masked = replace(record, details=_masked(record.details))
    data = encode(masked.to_json(), AuditRecord.__name__, store.compress_above_bytes)
    return append_raw(store, record.pipeline, data, f"{record.what} {record.outcome}", clock)


def append_raw(store: CheckpointStore, pipeline: str, data: bytes, note: str = "", clock: Clock | None = None) -> int:
    """Append the bytes of a record from another store, like `append_audit`."""
    clock = clock or SystemClock()
    key = audit_key(pipeline)
    expected = store.latest_version(key)
    failures = 0
    for _ in range(TRIES):
        try:
            return store.put_raw_versioned(key, data, expected, note)
        except VersionConflictError:
            clock.sleep(jitter(0.0005, 0.01))
            expected = store.latest_version(key)
        except OSError:
            # The put may have succeeded. Repeating it onto the same version tells: success, or a conflict if it did
            # not.
            failures += 1
            if failures >= _FAILURES:
                raise
    raise VersionConflictError(f"cannot append to the audit trail of {pipeline!r}: others do all the time")


@contextlib.contextmanager
def audited(store: CheckpointStore, begun: AuditRecord, clock: Clock | None = None) -> Iterator[dict[str, Json]]:
    """Append `begun`, run the body, and append the outcome. A kill in between leaves only `begun`.

    Yields a mapping for details of the action; the final record has them in addition to those of `begun`. A failure to
    append the outcome is logged and changes nothing: the action is done, or its own error is the one to report.
    """
    clock = clock or SystemClock()
    append_audit(store, replace(begun, outcome="begun"), clock)
    ids = RandomIds()
    found: dict[str, Json] = {}

    def end(outcome: str, **details: Json) -> None:
        record = replace(begun, id=ids.new(), at=clock.now().isoformat(), outcome=outcome)
        try:
            append_audit(store, replace(record, details={**begun.details, **found, **details}), clock)
        except (OSError, FirnlineError):
            logger.warning("audit record not written", extra={"what": begun.what, "outcome": outcome}, exc_info=True)

    try:
        yield found
    except BaseException as error:
        end("failed", error=getattr(error, "code", type(error).__name__))
        raise
    end("done")


def load_audit(
    store: CheckpointStore, pipeline: str, limit: int | None = None, before: int | None = None
) -> list[AuditEntry]:
    """Return the trail, newest first: versions below `before`, at most `limit`."""
    found: list[AuditEntry] = []
    for entry in walk_audit(store, pipeline, before):
        if limit is not None and len(found) >= limit:
            break
        found.append(entry)
    return found


def walk_audit(store: CheckpointStore, pipeline: str, before: int | None = None) -> Iterator[AuditEntry]:
    """Yield the trail, newest first, read page by page."""
    key = audit_key(pipeline)
    while page := store.list_versions(key, before=before):
        for info in page:
            yield _read(store, key, info.version)
        before = page[-1].version


def _read(store: CheckpointStore, key: str, version: int) -> AuditEntry:
    try:
        data = store.get_version_raw(key, version)
        if data is None:
            return AuditEntry(version, None, "missing")
        return AuditEntry(version, parse_audit(data, f"audit record {version}"))
    except (DamagedError, NewerFormatError) as error:
        return AuditEntry(version, None, error.message)


def parse_audit(data: bytes, what: str) -> AuditRecord:
    """Parse the stored bytes of a record. Raises DamagedError or NewerFormatError if they are not usable."""
    return AuditRecord.from_json(decode(data, AuditRecord.__name__, what), what)


def _number(value: Json) -> int | None:
    return None if value is None else int(value)


def _masked(value: Json) -> Json:
    """Return the value without user and password in URIs."""
    if isinstance(value, str):
        return _CREDENTIALS.sub("***@", value)
    if isinstance(value, dict):
        return {key: _masked(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(item) for item in value]
    return value
