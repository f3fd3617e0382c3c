"""Moves a pipeline's checkpoints and audit trail between a store and an archive.

An import only continues the history of the store and never rewrites it. Everything is checked before the first put, and
puts are repeatable, so a killed import is simply run again.

Epochs rise in a store, except after staged units were taken back: then an earlier epoch is put again, and the versions
between the two no longer count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from firnline.checkpoint.codec import short_number
from firnline.errors import CheckpointError, ConfigError, DamagedError, NewerFormatError, StoreAheadError
from firnline.stores.archive import Archive, Member, Part, Stored, refused
from firnline.stores.audit import AuditRecord, append_raw, audit_key, audited, parse_audit, walk_audit
from firnline.stores.base import CheckpointStore, check_put, decode
from firnline.stores.record import CheckpointRecord
from firnline.types import EntryRef

_SHA256 = re.compile(r"[0-9a-f]{64}")


def parse_record(data: bytes, what: str) -> CheckpointRecord:
    """Parse the stored bytes of a checkpoint. Raises DamagedError or NewerFormatError if they are not usable."""
    return CheckpointRecord.from_json(decode(data, CheckpointRecord.__name__, what), what)


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a pipeline's checkpoint: its record, or why it cannot be read."""

    version: int
    created_at: str
    size_bytes: int
    note: str
    record: CheckpointRecord | None
    error: CheckpointError | None = None

    @property
    def problem(self) -> str:
        return self.error.message if self.error else ""


def walk_versions(store: CheckpointStore, pipeline: str, before: int | None = None) -> Iterator[Version]:
    """Yield the versions of a pipeline's checkpoint, newest first, one at a time; damaged ones are marked."""
    while page := store.list_versions(pipeline, before=before):
        for info in page:
            data = store.get_version_raw(pipeline, info.version)
            if data is None:
                continue  # pruned since it was listed
            record: CheckpointRecord | None = None
            problem: CheckpointError | None = None
            try:
                record = parse_record(data, f"version {info.version}")
            except (DamagedError, NewerFormatError) as error:
                problem = error
            yield Version(info.version, info.created_at, len(data), info.note, record, problem)
        before = page[-1].version


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of a pipeline's checkpoint a store has."""

    versions: int = 0
    size_bytes: int = 0
    epoch: int | None = None  # of the newest readable version


def count_versions(store: CheckpointStore, pipeline: str) -> Extent:
    """Count the versions of a store. Reads only as many payloads as needed to find the newest intact one."""
    count = size = 0
    before = None
    while page := store.list_versions(pipeline, before=before):
        count += len(page)
        size += sum(info.size_bytes for info in page)
        before = page[-1].version
    records = (version.record for version in walk_versions(store, pipeline))
    return Extent(count, size, next((record.epoch for record in records if record is not None), None))


def stored_versions(store: CheckpointStore, pipeline: str, left_out: list[str]) -> Iterator[Stored]:
    """Yield everything of a pipeline that goes into an archive; damaged versions are named in `left_out` instead."""
    parts: tuple[tuple[Part, str], ...] = (("checkpoints", pipeline), ("audit", audit_key(pipeline)))
    for part, key in parts:
        before = None
        while page := store.list_versions(key, before=before):
            for info in page:
                data = store.get_version_raw(key, info.version)
                if data is None:
                    continue
                try:
                    (parse_record if part == "checkpoints" else parse_audit)(data, f"{part} {info.version}")
                except (DamagedError, NewerFormatError) as error:
                    left_out.append(error.message)
                    continue
                yield Stored(part, info.version, info.created_at, info.note, data)
            before = page[-1].version


@dataclass(frozen=True, slots=True)
class Truth:
    """The head of the deciding sink, and the ledger entries that lead to it."""

    epoch: int = 0
    entry: EntryRef | None = None
    checkpoint_checksum: str = ""
    entries: Mapping[int, EntryRef] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """What an import would do, or did."""

    pipeline: str
    versions: int  # in the archive
    put: tuple[Member, ...]
    already_there: int
    older: int  # before everything in the store: history is only ever continued
    audit: tuple[Member, ...]
    store_epoch: int | None  # newest in the store before
    archive_epoch: int | None  # newest in the archive
    expected: int  # the store's version number at the time of the plan

    @property
    def is_needed(self) -> bool:
        return bool(self.put or self.audit)


@dataclass(frozen=True, slots=True)
class _Identity:
    """What makes two records the same epoch, whoever wrote them."""

    epoch: int
    entry: str
    checkpoint: str


def _identity(record: CheckpointRecord) -> _Identity:
    return _Identity(record.epoch, record.entry.checksum, record.checkpoint.checksum)


def plan_import(store: CheckpointStore, archive: Archive, pipeline: str, truth: Truth) -> ImportPlan:
    """Check an entire archive against its manifest, the store and the sink. Puts nothing.

    Raises:
        ConfigError: it is another pipeline's, or does not continue the store's history.
        DamagedError: it is incomplete.
        StoreAheadError: it is ahead of the deciding sink.
        CheckpointError: its history differs from that of the store or the sink.
    """
    if archive.manifest.pipeline != pipeline:
        raise ConfigError(
            f"the archive is of pipeline {archive.manifest.pipeline!r}, not {pipeline!r}",
            hint="Name the spec of that pipeline.",
        )
    found, audit = _read_all(archive, pipeline)
    archived = [identity for _, identity in found]
    _check_truth(archived, truth)
    expected = store.latest_version(pipeline)  # before the check: a put meanwhile is a conflict
    there = _held_by(store, pipeline)
    start = _continues_at(archived, there)
    known = {e.record.id for e in walk_audit(store, pipeline) if e.record is not None}
    already = len(set(archived[:start]) & set(there))
    return ImportPlan(
        pipeline=pipeline,
        versions=len(found),
        put=tuple(member for member, _ in found[start:]),
        already_there=already,
        older=len(set(archived[:start])) - already,
        audit=tuple(member for member, record_id in audit if record_id not in known),
        store_epoch=there[-1].epoch if there else None,
        archive_epoch=archived[-1].epoch if archived else None,
        expected=expected,
    )


def _continues_at(archived: list[_Identity], there: list[_Identity]) -> int:
    """Return the position in the archive from which the store lacks it.

    Raises:
        CheckpointError: the two have the same epoch with different content.
        ConfigError: epochs between the two are missing.
    """
    if not there or not archived:
        return 0
    matches = [n for n, identity in enumerate(archived) if identity == there[-1]]
    start = max(matches, key=lambda n: (_common_end(archived, n, there), n)) + 1 if matches else 0
    if start == 0 and archived[-1] in there:
        start, there = len(archived), there[: there.index(archived[-1]) + 1]  # the store continued since
    ours, theirs = _counting(there), _counting(archived[:start] if start else archived)
    for epoch in sorted(set(ours) & set(theirs)):
        if ours[epoch] != theirs[epoch]:
            raise CheckpointError(
                f"epoch {epoch} of the archive is not the one that the store has",
                hint="`firnline checkpoints delete` drops the store's copy; the table keeps its own.",
            )
    if start == 0 and archived[0].epoch != there[-1].epoch + 1:
        raise ConfigError(
            f"the archive does not continue the store, which ends with epoch {there[-1].epoch}:"
            f" it has epochs {archived[0].epoch} to {archived[-1].epoch}",
            hint="Import an archive that holds the epochs between first.",
        )
    return start


def _common_end(archived: list[_Identity], at: int, there: list[_Identity]) -> int:
    """Return how many items up to and including `at` are the last ones of `there`."""
    count = 0
    while count <= at and count < len(there) and archived[at - count] == there[-1 - count]:
        count += 1
    return count


def _counting(archived: list[_Identity]) -> dict[int, _Identity]:
    """Return the epochs that still count: an epoch that was put again supersedes those after it."""
    kept: list[_Identity] = []
    for identity in archived:
        while kept and kept[-1].epoch >= identity.epoch:
            kept.pop()
        kept.append(identity)
    return {identity.epoch: identity for identity in kept}


def _held_by(store: CheckpointStore, pipeline: str) -> list[_Identity]:
    """Return the store's records, oldest first. Damaged versions are left out, and an import may put them again."""
    found: list[_Identity] = []
    for version in walk_versions(store, pipeline):
        if isinstance(version.error, NewerFormatError):
            raise version.error
        if version.record is not None:
            found.append(_identity(version.record))
    return found[::-1]


def _read_all(archive: Archive, pipeline: str) -> tuple[list[tuple[Member, _Identity]], list[tuple[Member, str]]]:
    """Read every member once: versions in order with their identity, audit records with their ids."""
    found: list[tuple[Member, _Identity]] = []
    audit: list[tuple[Member, str]] = []
    for member, data in archive.members():
        try:
            check_put(pipeline, data, member.note)
            if member.part == "audit":
                record = parse_audit(data, member.name)
                owner = record.pipeline
                audit.append((member, record.id))
            else:
                kept = parse_record(data, member.name)
                owner = kept.checkpoint.pipeline
                if not _SHA256.fullmatch(kept.entry.checksum):
                    raise DamagedError(f"{member.name} names an entry without a checksum")
                if kept.entry.epoch != kept.epoch:
                    raise DamagedError(f"{member.name} names the entry of another epoch")
                found.append((member, _identity(kept)))
        except (DamagedError, ConfigError) as error:
            raise refused(error.message) from error
        if owner != pipeline:
            raise refused(f"{member.name} is of pipeline {owner!r}")
    return found, audit


def _check_truth(found: list[_Identity], truth: Truth) -> None:
    if found and found[-1].epoch > truth.epoch:
        raise StoreAheadError(
            f"the archive knows epoch {found[-1].epoch}, the table holds {truth.epoch}",
            hint="Bring back the table that these checkpoints belong to.",
        )
    for identity in _counting(found).values():
        entry = truth.entry if identity.epoch == truth.epoch else truth.entries.get(identity.epoch)
        # The table keeps only 63 bits of the checksum of a lost entry.
        same = entry is None or short_number(entry.checksum) == short_number(identity.entry)
        if identity.epoch == truth.epoch and truth.checkpoint_checksum:
            same = same and truth.checkpoint_checksum == identity.checkpoint
        if not same:
            raise CheckpointError(
                f"epoch {identity.epoch} of the archive is not the one that the table holds",
                hint="The archive is of another table; `firnline checkpoints show` tells what this one holds.",
            )


def perform_import(store: CheckpointStore, archive: Archive, plan: ImportPlan, begun: AuditRecord) -> None:
    """Put what the plan says, oldest first; audited.

    Raises:
        VersionConflictError: another writer put a version meanwhile; the versions already put stay and are harmless.
    """
    wanted = {member.name for member in plan.put}
    trail = {member.name for member in plan.audit}
    with audited(store, begun):
        expected = plan.expected
        for member, data in archive.members():
            if member.name in wanted:
                expected = store.put_raw_versioned(plan.pipeline, data, expected, member.note)
            elif member.name in trail:
                append_raw(store, plan.pipeline, data, member.note)
