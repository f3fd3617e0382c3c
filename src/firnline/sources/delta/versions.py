"""What a commit of a table's log means for a reader: appended rows, changed rows, a way back, or nothing. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from firnline.errors import SchemaError
from firnline.names import COUNTS_KEY, INFO_KEY, WIDENED
from firnline.topology.records import Marker, markers_before, markers_in
from firnline.types import Json

# The columns of change rows, named as by every reader of Delta's change feed.
CHANGE_TYPE = "_change_type"
COMMIT_VERSION = "_commit_version"
COMMIT_TIMESTAMP = "_commit_timestamp"
CHANGE_COLUMNS = (CHANGE_TYPE, COMMIT_VERSION, COMMIT_TIMESTAMP)
OLD_ROWS = ("delete", "update_preimage")
NEW_ROWS = ("insert", "update_postimage")

Actions = Sequence[Mapping[str, Json]]


class Kind(Enum):
    """What a version means for a reader of rows."""

    EMPTY = "empty"  # no row appears or disappears: a claim, a compaction, other columns
    APPEND = "append"
    CHANGE = "change"
    UNDO = "undo"  # goes back to the version that is its parent
    REPLACE = "replace"  # takes back all rows; those of this commit are all there are


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a table, without its files."""

    number: int
    kind: Kind
    parent: int
    operation: str
    stamp_ms: int | None  # when it was committed
    files: int = 0  # that a reader of appended rows reads
    size_bytes: int = 0
    changed: int = 0  # files with rows that appear or disappear
    pipeline: str | None = None  # the Firnline pipeline that wrote it
    epoch: int | None = None  # of that pipeline
    table_id: str | None = None  # if the commit names it
    schema: str | None = None  # the columns from this version on, if the commit names them
    partition_by: tuple[str, ...] = ()  # likewise
    markers: tuple[Marker, ...] = ()  # of a topology's snapshots that the epoch records
    passed: tuple[Marker, ...] = ()  # of snapshots that an earlier epoch records, which may have no commit in this part

    @property
    def has_rows(self) -> bool:
        """Whether a reader of appended rows reads rows of this version."""
        return self.kind in (Kind.APPEND, Kind.REPLACE) and self.files > 0


def read_version(number: int, actions: Actions) -> Version:
    """Return what a commit means."""
    info = commit_info(actions)
    own = _own_info(info)
    added = [action["add"] for action in actions if "add" in action and action["add"].get("dataChange", True)]
    removed = sum(1 for action in actions if "remove" in action and action["remove"].get("dataChange", True))
    changed = len(added) + removed
    operation = str(info.get("operation", "unknown"))
    target = _restored(info)
    kind, parent = Kind.EMPTY, number - 1
    if target is not None:
        kind, parent, added = Kind.UNDO, target, []
    elif own.get("kind") in ("fresh", "restore") and removed:
        kind, parent = Kind.REPLACE, -1
    elif removed and WIDENED not in own:
        kind = Kind.CHANGE
    elif added:
        kind = Kind.APPEND
    metadata: Mapping[str, Json] = next((action["metaData"] for action in actions if "metaData" in action), {})
    stamp = info.get("inCommitTimestamp", info.get("timestamp"))
    return Version(
        number=number,
        kind=kind,
        parent=parent,
        operation=str(own["kind"]) if own.get("kind") not in (None, "epoch") else operation,
        stamp_ms=None if stamp is None else int(stamp),
        files=len(added),
        size_bytes=sum(int(add["size"]) for add in added),
        changed=changed,
        pipeline=own.get("pipeline"),
        epoch=None if own.get("epoch") is None else int(own["epoch"]),
        table_id=metadata.get("id"),
        schema=metadata.get("schemaString"),
        partition_by=tuple(metadata.get("partitionColumns") or ()),
        markers=markers_in(_remembered(own), int(own.get("epoch") or 0)),
        passed=markers_before(_remembered(own), int(own.get("epoch") or 0)) if "part" in own else (),
    )


def _remembered(own: Mapping[str, Json]) -> Mapping[str, Json]:
    """Return what the checkpoint in the commit of an epoch remembers of snapshots."""
    checkpoint = own.get("checkpoint")
    if own.get("kind") != "epoch" or not isinstance(checkpoint, Mapping):
        return {}
    return checkpoint.get("topology") or {}


def commit_info(actions: Actions) -> Mapping[str, Json]:
    """Return the facts that a commit tells about itself; empty if it has none."""
    found: Mapping[str, Json] = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
    return found


def counted_files(actions: Actions) -> int:
    """Return how many files a commit of ours says that it adds or removes at least."""
    counts = commit_info(actions).get(COUNTS_KEY)
    return int(counts.get("files", 0)) if isinstance(counts, dict) else 0


def _own_info(info: Mapping[str, Json]) -> dict[str, Json]:
    """Return the record that a Firnline pipeline left in a commit; empty if there is none."""
    raw = info.get(INFO_KEY)
    try:
        value = json.loads(raw) if isinstance(raw, str) else raw
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _restored(info: Mapping[str, Json]) -> int | None:
    """Return the version that a RESTORE goes back to; None for any other commit.

    A RESTORE to a time names no version: it counts as a commit that changes rows.
    """
    if info.get("operation") != "RESTORE":
        return None
    version = (info.get("operationParameters") or {}).get("version")
    return int(version) if version is not None and str(version).isdigit() else None


def appended_files(table: str, version: Version, actions: Actions) -> list[dict[str, Json]]:
    """Return the files of a commit that a reader of appended rows reads, as inputs.

    Raises:
        SchemaError: a file has a deletion vector, or lies outside the table.
    """
    added = [action["add"] for action in actions if "add" in action and action["add"].get("dataChange", True)]
    return [_item(table, version, number, add, add.get("stats")) for number, add in enumerate(added)]


def changed_files(table: str, version: Version, actions: Actions) -> list[dict[str, Json]]:
    """Return the files of a commit that a reader of changes reads, as inputs: old rows first, then new ones.

    A commit without change files says by the files that it adds and removes which rows appear and disappear.

    Raises:
        SchemaError: a file has a deletion vector, or lies outside the table.
    """
    files: list[dict[str, Json]] = []
    fed = [action["cdc"] for action in actions if "cdc" in action]
    for rows in ("old", "new"):
        for one in fed:
            item = _item(table, version, len(files), one, None)
            files.append({**item, "change": rows, "stamp_ms": version.stamp_ms})
    if fed:
        return files
    for action, change in (("remove", "delete"), ("add", "insert")):
        for one in (a[action] for a in actions if action in a and a[action].get("dataChange", True)):
            item = _item(table, version, len(files), one, one.get("stats"))
            files.append({**item, "change": change, "stamp_ms": version.stamp_ms})
    return files


def _item(table: str, version: Version, number: int, action: Mapping[str, Json], stats: Json) -> dict[str, Json]:
    path = str(action["path"])
    if action.get("deletionVector"):
        raise SchemaError(
            f"{path} in version {version.number} of {table} has a deletion vector, which Firnline does not read",
            hint="Set delta.enableDeletionVectors to false on the table, and rewrite its files once: "
            "REORG TABLE ... APPLY (PURGE).",
            file=path,
        )
    check_inside(table, path)
    return make_item(
        version,
        number,
        path,
        size_bytes=action.get("size"),
        rows=_rows(stats),
        values=dict(action.get("partitionValues") or {}),
    )


def check_inside(table: str, path: str) -> None:
    """Refuse a file that lies outside the table. Raises SchemaError."""
    if "://" in path or path.startswith("/") or ".." in path.split("/"):
        raise SchemaError(
            f"the log of {table} names {path}, which lies outside the table (a shallow clone?)",
            hint="Read the table that the file belongs to, or make a deep clone.",
            file=path,
        )


def make_item(
    version: Version,
    number: int,
    path: str,
    *,
    size_bytes: int | None,
    rows: int | None,
    values: Mapping[str, str | None],
) -> dict[str, Json]:
    """Return the input for one file of a version: `file` is its number there."""
    return {
        "path": path,
        "version": version.number,
        "file": number,
        "size_bytes": int(size_bytes or 0),
        "from": 0,
        **({"rows": rows, "to": rows} if rows is not None else {}),
        **({"values": dict(values)} if values else {}),
        **(
            {"upstream_pipeline": version.pipeline, "upstream_epoch": version.epoch}
            if version.pipeline is not None
            else {}
        ),
    }


def _rows(stats: Json) -> int | None:
    """Return the number of rows of a file, from its statistics; None if they do not say."""
    try:
        found = (json.loads(stats) if isinstance(stats, str) else stats or {}).get("numRecords")
    except ValueError:
        return None
    return None if found is None else int(found)
