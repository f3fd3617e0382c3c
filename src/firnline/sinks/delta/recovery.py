"""Finds the checkpoint of a table's epoch in any intact copy, and the progress of another tool.

The snapshot has the epoch and 63 bits of its ledger entry's checksum; both never expire. Three copies in the table
describe the epoch: the ledger entry, the commit's own commitInfo, and, in part, the interchange payload. Tiers, where
there are any, hold more.
1. The newest copy in the local tier, then in the remote one, if it names that epoch and checksum.
2. The ledger entry with that checksum. No scan of the log is needed.
3. The commitInfo of the commit, found by a scan backwards.
4. The checkpoint of the epoch before, advanced by the inputs of this epoch's entry, whose part is intact.
5. An older version in a tier that names that epoch and checksum.
Without any intact copy: an error with advice, never a fresh start.

Another tool's progress is the newest `blizzard:` transaction in the log.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from firnline.checkpoint.codec import parse, short_number, unseal
from firnline.checkpoint.ledger import HISTORY_EDITS, Ledger, LedgerEntry
from firnline.checkpoint.model import Checkpoint
from firnline.errors import CheckpointError, CheckpointLostError, DamagedError
from firnline.names import BLIZZARD, entry_attempt, entry_name
from firnline.sinks.base import Replay
from firnline.sinks.delta.log import DeltaCheckpoint, DeltaLog, decode_blizzard
from firnline.storage import Storage
from firnline.stores.tiers import Tiers
from firnline.types import EntryRef, Json


@dataclass(frozen=True, slots=True)
class Found:
    """The checkpoint, the entry that the commit names, and the repairs on the way."""

    checkpoint: Checkpoint
    entry: EntryRef
    repairs: tuple[str, ...] = ()
    path: str = "sink"  # or the tier that it was read from


def find_checkpoint(
    log: DeltaLog, ledger: Ledger, pipeline: str, version: int, epoch: int, digest: int | None, replay: Replay,
    copies: Tiers | None = None, *, ask_copies: bool = True,
) -> Found:  # fmt: skip
    """Return the checkpoint of `epoch`, which the table at `version` holds.

    Without `ask_copies`, copies in tiers are the last resort: the caller knows that they have a later epoch.

    Raises:
        CheckpointLostError: no copy is intact.
    """
    copy = copies.find(epoch, digest) if copies is not None and ask_copies else None
    if copy is not None:
        return Found(copy[1].checkpoint, copy[1].entry, path=copy[0])
    candidates = ledger.candidates(epoch)
    for ref, data in candidates:
        if short_number(ref.checksum) == digest:
            entry = LedgerEntry.from_bytes(data, f"ledger entry {ref.name}")
            return Found(entry.checkpoint, ref)
    repairs = [f"ledger entry of epoch {epoch}: missing or damaged"]
    told, named = _from_commit_info(log, pipeline, version, epoch)
    if told is not None:
        return Found(told, _entry_ref(epoch, told.attempt, named, digest), tuple(repairs))
    repairs.append(f"commitInfo of epoch {epoch}: missing or damaged")
    rebuilt = _rebuild(log, ledger, pipeline, version, candidates, digest, replay)
    if rebuilt is not None:
        return replace(rebuilt, repairs=tuple(repairs))
    copy = copies.search(epoch, digest) if copies is not None else None
    if copy is not None:
        return Found(copy[1].checkpoint, copy[1].entry, tuple(repairs), path=copy[0])
    raise CheckpointLostError(
        f"the table holds epoch {epoch} of {pipeline!r}, but no intact copy of its checkpoint is left",
        epoch=epoch,
        tried=repairs,
    )


def _from_commit_info(log: DeltaLog, pipeline: str, version: int, epoch: int) -> tuple[Checkpoint | None, str]:
    """Return the copy in the log, and the entry's checksum according to the commit.

    The scan has no limit, since the transaction proves that the commit exists.
    """
    for commit in log.backwards(version):
        try:
            info = commit.info(pipeline)
        except DamagedError:
            continue
        if info is None or info.get("epoch") != epoch:
            continue
        if info.get("delta_version") != commit.version - 1:
            return None, ""  # a commit that claims to be made onto another version is not trusted
        try:
            checkpoint = Checkpoint.from_json(info["checkpoint"], f"commit {commit.version}")
        except (DamagedError, KeyError):
            return None, ""
        entry = info.get("entry")
        named = str(entry.get("checksum")) if isinstance(entry, dict) else ""
        return (checkpoint, named) if (checkpoint.pipeline, checkpoint.epoch) == (pipeline, epoch) else (None, "")
    return None, ""


def _entry_ref(epoch: int, attempt: str, named: str, digest: int | None) -> EntryRef:
    """Return the entry of an epoch. A commit's reference has no checksum of its own: it must match the snapshot.

    If it does not, only 63 bits of the true checksum are known: enough for the fence, a hole for the chain.
    """
    try:
        fits = digest is None or short_number(named) == digest
    except ValueError:
        fits = False
    return EntryRef(epoch, entry_name(epoch, attempt), named if fits else f"{(digest or 0) << 1:016x}")


def _rebuild(
    log: DeltaLog,
    ledger: Ledger,
    pipeline: str,
    version: int,
    candidates: list[tuple[EntryRef, bytes]],
    digest: int | None,
    replay: Replay,
) -> Found | None:
    """Rebuild checkpoint n from checkpoint n-1 and the rest of entry n; only if a single attempt was ever staged for
    it."""
    if len(candidates) != 1 or digest is None:
        return None
    ref, data = candidates[0]
    what = f"ledger entry {ref.name}"
    if _is_whole(data, what):
        return None  # intact, but not the one in the log: an attempt that was not committed
    try:
        body = parse(data, what)
        inputs = unseal(body["inputs"], what)["sources"]
        previous = EntryRef.from_json(body["previous"]) if body["previous"] else None
        if previous is not None and previous.epoch != ref.epoch - 1:
            return None  # this part of the entry is damaged too
        if body["kind"] in HISTORY_EDITS:
            return None  # the result of a history edit does not follow from input
        damaged = body["checkpoint"]
        before = _checkpoint_before(log, ledger, pipeline, version, previous)
        if before is None:
            return None
        after = replace(
            before,
            epoch=ref.epoch,
            attempt=entry_attempt(ref.name),
            generation=int(damaged["generation"]),
            positions=replay(before.positions, inputs),
        )
    except (DamagedError, KeyError, TypeError, ValueError):
        return None
    return Found(after, _entry_ref(ref.epoch, after.attempt, "", digest))


def _is_whole(data: bytes, what: str) -> bool:
    try:
        LedgerEntry.from_bytes(data, what)
    except DamagedError:
        return False
    return True


def _checkpoint_before(
    log: DeltaLog, ledger: Ledger, pipeline: str, version: int, previous: EntryRef | None
) -> Checkpoint | None:
    if previous is None:
        return None
    for ref, data in ledger.candidates(previous.epoch):
        if ref.checksum == previous.checksum:
            return LedgerEntry.from_bytes(data, f"ledger entry {ref.name}").checkpoint
    return _from_commit_info(log, pipeline, version, previous.epoch)[0]


def find_foreign(storage: Storage, version: int, scan_commits: int, *, accept_older: bool) -> Json | None:
    """Return the newest `source_state` in the log; None if the log proves that it has none.

    Commits are read backwards, at most `scan_commits` of them, down to Delta's own checkpoint, which keeps the
    transactions of all commits before it. Commits of Firnline pipelines carry the same ids for other tools to read;
    they name their pipeline, and are not another tool's progress.

    Raises:
        CheckpointError: the newest one is damaged, and an older one may be used only with `--accept-duplicates`.
        CheckpointLostError: a part of the log was not read or is gone, and may hold one. To continue without it also
            needs `--accept-duplicates`.
    """
    log = DeltaLog(storage)
    checkpoint = log.find_checkpoint()
    lowest = checkpoint.version if checkpoint is not None and checkpoint.version <= version else -1
    unread = version
    for commit in log.backwards(version, min(scan_commits, version - lowest)):
        unread = commit.version - 1
        app_id = commit.blizzard()
        if app_id is not None:
            value = _decode(app_id, commit.version, accept_older=accept_older)
            if value is not None:
                return value["source_state"]
    if unread > lowest and not accept_older:
        raise _unread_error(storage.root, version - lowest, unread)
    if checkpoint is None:
        return None
    kept = _kept_ids(log, checkpoint, accept_older=accept_older)
    found = [_decode(app_id, checkpoint.version, accept_older=accept_older) for app_id in kept]
    newest = max((value for value in found if value), key=lambda v: int(v["delta_version"]), default=None)
    return newest["source_state"] if newest else None


def _unread_error(root: str, commits: int, unread: int) -> CheckpointLostError:
    return CheckpointLostError(
        f"{root} has rows, and whether another tool left its progress in its log is not known: version {unread} and"
        " those before it were not read, or are gone",
        hint=f"Set checkpoint.recovery_scan_commits: {commits} to read them all, or have Delta write a checkpoint of"
        " the table. To start at the beginning of the input all the same: firnline run --accept-duplicates",
        version=unread,
    )


def _decode(app_id: str, version: int, *, accept_older: bool) -> dict[str, Json] | None:
    """Return the payload of a commit or checkpoint; None if it is a Firnline pipeline's, or damaged and accepted.

    A payload that names a later version than that of its commit was made for another table.
    """
    try:
        value = decode_blizzard(app_id)
        if int(value.setdefault("delta_version", -1)) > version:
            raise DamagedError(f"it names version {value['delta_version']}", version=version)
    except (DamagedError, TypeError, ValueError) as error:
        if accept_older:
            return None
        reason = error.message if isinstance(error, DamagedError) else str(error)
        raise CheckpointError(
            f"the newest checkpoint of the other tool (table version {version}) is damaged: {reason}",
            hint="Run with --accept-duplicates to go on from the one before: its last batch may be read twice.",
        ) from error
    return None if "pipeline" in value else value


def _kept_ids(log: DeltaLog, checkpoint: DeltaCheckpoint, *, accept_older: bool) -> list[str]:
    try:
        return [str(t["appId"]) for t in log.checkpoint_txns(checkpoint) if str(t["appId"]).startswith(BLIZZARD)]
    except (DamagedError, FileNotFoundError) as error:
        if accept_older:
            return []
        raise CheckpointError(
            f"Delta's checkpoint of version {checkpoint.version}, which may hold another tool's progress, is damaged",
            hint="Have the other tool write a new one; to start at the beginning of the input all the same:"
            " firnline run --accept-duplicates",
        ) from error
