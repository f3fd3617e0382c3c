"""The unit: the staged output of one epoch of one writer, in `_staging/pending/` until it is committed.

A Firnline unit is sealed JSON and has the writer's checkpoint. A foreign unit is plain JSON that any other program may
put there to bring one Parquet file into the table; it has no epoch. A unit that can never be committed is set aside
with the reason; a user lists, retries or discards it.
"""

from __future__ import annotations

import base64
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from firnline.checkpoint.codec import canonical, parse, seal, short_number, unseal
from firnline.checkpoint.model import Checkpoint
from firnline.errors import ConfigError, DamagedError
from firnline.faults import fault_point
from firnline.names import PENDING, SET_ASIDE, pending_unit, set_aside_unit, unit_of
from firnline.storage import FileStat, Storage
from firnline.types import Clock, EntryRef, Json

logger = logging.getLogger(__name__)

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


@dataclass(frozen=True, slots=True)
class Unit:
    """One epoch of one pipeline, staged. `previous` is the ledger entry of the epoch before, None for the first."""

    name: str
    checkpoint: Checkpoint
    entry: EntryRef
    previous: EntryRef | None
    previous_checkpoint: str  # checksum of the checkpoint before; empty for the first
    files: list[dict[str, Json]]
    schema: list[dict[str, Json]]
    source_state: Json = None
    claimed: int | None = None  # generation of the run that put it, where that is not the one that made the epoch

    @property
    def pipeline(self) -> str:
        return self.checkpoint.pipeline

    @property
    def epoch(self) -> int:
        return self.checkpoint.epoch

    @property
    def generation(self) -> int:
        """The generation of the run that put it: a lagging sink gets epochs of earlier runs from a later one."""
        return self.checkpoint.generation if self.claimed is None else self.claimed

    @property
    def digest(self) -> int:
        """The digest of this unit's entry in the log once it is committed."""
        return short_number(self.entry.checksum)

    @property
    def previous_digest(self) -> int | None:
        return short_number(self.previous.checksum) if self.previous else None

    def to_bytes(self) -> bytes:
        previous = {"entry": self.previous.to_json()} if self.previous else {"entry": None}
        return canonical(
            seal(
                {
                    "pipeline": self.pipeline,
                    "epoch": self.epoch,
                    "generation": self.generation,
                    "attempt": self.checkpoint.attempt,
                    "run": self.checkpoint.run,
                    "schema": self.schema,
                    "checkpoint": self.checkpoint.to_json(),
                    "entry": self.entry.to_json(),
                    "previous": {
                        **previous,
                        "epoch": self.previous.epoch if self.previous else 0,
                        "checkpoint_checksum": self.previous_checkpoint,
                    },
                    "files": self.files,
                    "source_state": self.source_state,
                }
            )
        )


@dataclass(frozen=True, slots=True)
class ForeignUnit:
    """One Parquet file of another program; it has no predecessor."""

    name: str
    path: str
    size_bytes: int
    record_count: int
    partition_values: dict[str, str | None] = field(default_factory=dict)
    source_file: str | None = None


def list_units(storage: Storage, folder: str) -> Iterator[tuple[str, FileStat]]:
    """Yield the units of a folder, by name, without files that are still being written."""
    for stat in storage.list(folder):
        name = unit_of(stat.name)
        if name is not None:
            yield name, stat


def parse_unit(name: str, data: bytes) -> Unit | ForeignUnit:
    """Parse a pending unit, ours or another program's.

    Raises:
        DamagedError: it is neither.
        NewerFormatError: a newer Firnline wrote it.
    """
    what = f"unit {name}"
    value = parse(data, what)
    if not isinstance(value, dict):
        raise DamagedError(f"{what} is not an object", what=what)
    return _own(name, value, what) if "checkpoint" in value or "epoch" in value else _foreign(name, value, what)


def _own(name: str, value: dict[str, Json], what: str) -> Unit:
    body = unseal(value, what)
    try:
        previous = body["previous"]
        return Unit(
            name=name,
            checkpoint=Checkpoint.from_json(body["checkpoint"], what),
            entry=EntryRef.from_json(body["entry"]),
            previous=EntryRef.from_json(previous["entry"]) if previous["entry"] else None,
            previous_checkpoint=str(previous["checkpoint_checksum"]),
            files=[_checked_file(f, what) for f in body["files"]],
            schema=body["schema"],
            source_state=body["source_state"],
            claimed=int(body["generation"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{what} lacks {error}", what=what) from error


def _foreign(name: str, value: dict[str, Json], what: str) -> ForeignUnit:
    try:
        unit = ForeignUnit(
            name=name,
            path=str(value["path"]),
            size_bytes=int(value["size"]),
            record_count=int(value["record_count"]),
            partition_values={
                str(k): None if v is None else str(v) for k, v in value.get("partition_values", {}).items()
            },
            source_file=value.get("source_file"),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"{what} lacks {error}", what=what) from error
    _check_path(unit.path, what)
    return unit


def _checked_file(file: dict[str, Json], what: str) -> dict[str, Json]:
    """Return a file in the form of a commit. Raises KeyError, TypeError or ValueError if something is missing."""
    _check_path(str(file["path"]), what)
    numbers = {key: int(file[key]) for key in ("size_bytes", "rows", "modification_time")}
    values = {str(k): None if v is None else str(v) for k, v in dict(file["partition_values"]).items()}
    return {**file, **numbers, "partition_values": values, "stats": str(file["stats"])}


def _check_path(path: str, what: str) -> None:
    """Refuse paths outside the table, and in the folders of its log, ledger and staging."""
    parts = path.split("/")
    if (
        any(part in ("", ".", "..") for part in parts)
        or _SCHEME.match(path)
        or any(sign in path for sign in "\\\0")
        or (len(parts) > 1 and parts[0].startswith("_") and "=" not in parts[0])
    ):
        raise DamagedError(f"{what} names {path!r}, which is not a data file of this table", what=what)


def load_pending(storage: Storage) -> list[Unit | ForeignUnit]:
    """Return every readable pending unit; the committer sets damaged ones aside."""
    found: list[Unit | ForeignUnit] = []
    for name, _ in list_units(storage, PENDING):
        try:
            found.append(parse_unit(name, storage.get(pending_unit(name))))
        except FileNotFoundError:
            continue  # committed and deleted since it was listed
        except DamagedError as error:
            logger.warning("unreadable unit", extra={"unit": name, "reason": error.message})
    return found


def drop_pending(storage: Storage, pipeline: str, up_to: int) -> None:
    """Delete the pending units of a pipeline up to an epoch, once a commit of that epoch has made them forks."""
    for unit in load_pending(storage):
        if isinstance(unit, Unit) and unit.pipeline == pipeline and unit.epoch <= up_to:
            storage.delete(pending_unit(unit.name))


@dataclass(frozen=True, slots=True)
class RejectedUnit:
    """A unit that was set aside."""

    name: str
    reason: str
    rejected_at: str
    pipeline: str | None
    epoch: int | None


def reject(storage: Storage, name: str, reason: str, clock: Clock) -> None:
    """Set a unit aside: first write the copy with its reason, then delete the pending file."""
    try:
        data = storage.get(pending_unit(name))
    except FileNotFoundError:
        return
    about: dict[str, Json] = {"reason": reason, "at": clock.now().isoformat()}
    body = _readable(data, name)
    if body is None:
        body = {"raw": base64.b64encode(data).decode()}
    elif canonical(body) != data:
        about["raw"] = base64.b64encode(data).decode()  # a retry must put back the same bytes
    body["rejected"] = about
    fault_point("staging.reject.before")
    storage.put(set_aside_unit(name), canonical(body))
    storage.delete(pending_unit(name))
    fault_point("staging.reject.after")


def _readable(data: bytes, name: str) -> dict[str, Json] | None:
    """Return the unit as an object that can be serialized again; None if it is none."""
    try:
        body = parse(data, name)
        canonical(body)
    except (DamagedError, ValueError, RecursionError):  # e.g. NaN, or half a surrogate pair
        return None
    return body if isinstance(body, dict) and "rejected" not in body and set(body) != {"raw"} else None


def load_rejected(storage: Storage) -> list[RejectedUnit]:
    """Return everything that was set aside."""
    found = []
    for name, _ in list_units(storage, SET_ASIDE):
        try:
            body = _load(storage, name)
        except FileNotFoundError:
            continue  # retried or discarded since it was listed
        about = body["rejected"]
        epoch = body.get("epoch")
        found.append(
            RejectedUnit(
                name=name,
                reason=str(about["reason"]),
                rejected_at=str(about["at"]),
                pipeline=body.get("pipeline"),
                epoch=int(epoch) if isinstance(epoch, int) else None,
            )
        )
    return found


def retry(storage: Storage, name: str) -> None:
    """Put a unit back among the pending ones, unchanged."""
    try:
        if "/" in name:
            raise FileNotFoundError(name)
        body = _load(storage, name)
    except FileNotFoundError as error:
        raise ConfigError(f"no unit {name!r} was set aside", hint="See `firnline staging TABLE`.") from error
    raw = body.pop("rejected").get("raw") or (body["raw"] if set(body) == {"raw"} else None)
    data = canonical(body) if raw is None else base64.b64decode(raw)
    storage.put(pending_unit(name), data)
    storage.delete(set_aside_unit(name))


def _load(storage: Storage, name: str) -> dict[str, Json]:
    body = parse(storage.get(set_aside_unit(name)), name)
    if not isinstance(body, dict) or "rejected" not in body:
        raise DamagedError(f"{set_aside_unit(name)} is unreadable")
    return body
