"""Decides which files the next epoch reads, and how they are distributed to tasks. Pure."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from firnline.schema import is_column_name_ok
from firnline.sources.base import Limits, Split
from firnline.sources.files.growth import FileEnd
from firnline.sources.files.messages import FileOutcome
from firnline.sources.files.position import TOO_YOUNG, FileState, Progress, SetAside
from firnline.sources.replays import replayed_record
from firnline.storage import FileStat
from firnline.types import Json

DONE = Progress(finished=True)
NO_OPTIONS: Mapping[str, Json] = {}
TASK_BYTES = 32 * 1024 * 1024  # beyond one task per core, another task must be worth its start
NO_LIMIT = 1 << 62
MAX_WAITING = 1000  # files that are too young; each one that a slice passes is named in the position
MAX_RETRY_SECONDS = 300.0  # between two tries of a broken file
EVEN_TASKS = 10  # evens out files of different size; more would only make smaller files


@dataclass(frozen=True, slots=True)
class Slice:
    """Files to read now, in byte order of their names, and the state that they build on."""

    base: FileState
    files: list[FileStat] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)  # half read and then changed: set aside
    waiting: list[FileStat] = field(default_factory=list)  # too young, and before one of `files`: named in `base`

    @property
    def size_bytes(self) -> int:
        return sum(f.size_bytes for f in self.files)


def choose(
    state: FileState,
    in_progress: Sequence[FileStat],
    listed: Iterable[FileStat],
    limits: Limits,
    is_ripe: Callable[[FileStat], bool] = lambda _: True,
) -> Slice:
    """Take files in progress first, then a contiguous range of the listing after the mark.

    Args:
        state: The position of the source.
        in_progress: The current versions of the files that `state` has started, including late ones to start.
        listed: Files in byte order; those that the state has are skipped.
        limits: The first one reached ends the slice; one file is always taken.
        is_ripe: Whether a listed file is old enough. Another one is left; if the slice passes it, the base names it.
    """
    base, begun, changed = _set_changed_aside(state, in_progress)
    chosen: list[FileStat] = []
    waiting: list[FileStat] = []
    size_bytes = 0
    seen = set()

    def full(file: FileStat) -> bool:
        return bool(chosen) and (len(chosen) >= limits.max_files or size_bytes + _rest(base, file) > limits.max_bytes)

    for file in sorted(begun, key=lambda f: f.name.encode()):
        if full(file):
            break
        chosen.append(file)
        seen.add(file.name)
        size_bytes += _rest(base, file)
    else:
        for file in listed:
            if file.name in base.files or base.knows(file.name) or file.name in seen:
                continue
            if full(file) or (chosen and len(waiting) >= MAX_WAITING):
                break
            if not is_ripe(file):
                waiting.append(file)
                continue
            chosen.append(file)
            size_bytes += _rest(base, file)
    chosen.sort(key=lambda f: f.name.encode())
    last = chosen[-1].name.encode() if chosen else b""
    passed = [file for file in waiting if file.name.encode() < last]
    named = {file.name: Progress(size_bytes=file.size_bytes, etag=file.etag, reason=TOO_YOUNG) for file in passed}
    return Slice(replace(base, files={**base.files, **named}), chosen, changed, passed)


def _rest(state: FileState, file: FileStat) -> int:
    progress = state.files.get(file.name)
    return file.size_bytes - (progress.offset if progress else 0)


def _set_changed_aside(
    state: FileState, in_progress: Sequence[FileStat]
) -> tuple[FileState, list[FileStat], list[str]]:
    """Set aside a partly read file that changed: its record numbers are no longer valid."""
    files, aside = dict(state.files), dict(state.set_aside)
    begun, changed = [], []
    for file in in_progress:
        progress = files.get(file.name)
        if progress is None or not progress.etag or progress.etag == file.etag:
            begun.append(file)
            continue
        if progress.records == 0:  # nothing but blank lines was read: the new version begins at its first byte
            files[file.name] = replace(progress, offset=0, line=0, tail="")
            begun.append(file)
            continue
        del files[file.name]
        aside[file.name] = _aside(progress, "changed while it was half read")
        changed.append(file.name)
    return replace(state, files=files, set_aside=aside), begun, changed


def _aside(progress: Progress, reason: str) -> SetAside:
    return SetAside(
        reason,
        progress.records,
        progress.offset,
        progress.line,
        progress.size_bytes,
        progress.etag,
        read_as=progress.read_as,
        tail=progress.tail,
        reread=progress.reread,
    )


def deal(
    chosen: Slice, limits: Limits, discovered: str, read_as: Mapping[str, Json] = NO_OPTIONS, *, hold: bool = False
) -> list[Split]:
    """Distribute the slice as contiguous ranges of about equal size, one per split.

    `read_as` is the format of the source, empty for NDJSON. A file that was begun in another format is continued in
    that one: its record numbers are those of that format. With `hold`, readers leave a last line that is incomplete: it
    is read when the file has grown.
    """
    if not chosen.files:
        return []
    total = chosen.size_bytes
    most = limits.max_output_files // limits.files_per_task
    wanted = max(limits.parallelism, min(EVEN_TASKS, total // TASK_BYTES))
    count = max(1, min(len(chosen.files), wanted, most))
    ranges: list[list[FileStat]] = [[] for _ in range(count)]
    bytes_before = 0
    for index, file in enumerate(chosen.files):
        # By the middle of the file's bytes; with nothing but empty files, by number.
        share = (bytes_before + file.size_bytes / 2) / total if total else index / len(chosen.files)
        ranges[min(int(share * count), count - 1)].append(file)
        bytes_before += file.size_bytes
    used = [files for files in ranges if files]
    splits = len(used)
    holding = {"hold": True} if hold else {}
    return [
        Split(
            inputs=[{**_input(chosen.base, file, discovered, read_as), **holding} for file in files],
            max_records=max(1, limits.max_events // splits),
            max_bytes=max(1, limits.max_bytes // splits),
            max_output_files=max(1, limits.max_output_files // splits),
        )
        for files in used
    ]


def _input(state: FileState, file: FileStat, discovered: str, read_as: Mapping[str, Json]) -> dict[str, Json]:
    progress = state.files.get(file.name, Progress())
    read_as = progress.read_as if progress.records else read_as
    return {
        "path": file.name,
        "size_bytes": file.size_bytes,
        "etag": file.etag,
        "create_time": file.modified_at.isoformat(),
        "discovery_time": discovered,
        "from": progress.records,
        "offset": progress.offset,
        "line": progress.line,
        **({"read_as": dict(read_as)} if read_as else {}),
        **({"reread": True} if progress.reread else {}),
    }


def advance(
    base: FileState, splits: Sequence[Split], outcomes: Sequence[Json], file_attempts: int, epoch: int
) -> tuple[FileState, list[dict[str, Json]]]:
    """Return the state after the tasks ended as reported, and the ledger's records of every file they touched.

    A planned file without an outcome was not reached: it stays in the state, so that the mark cannot pass it.
    """
    ended = {outcome.path: outcome for outcome in map(FileOutcome.from_json, outcomes)}
    files, aside = dict(base.files), dict(base.set_aside)
    records: list[dict[str, Json]] = []
    for item in (item for split in splits for item in split.inputs):
        path = str(item["path"])
        before = files.get(path, Progress())
        outcome = ended.get(path)
        if "quarantine" in item:
            if outcome is not None and outcome.failed is None:  # else the records stay in quarantine
                records.append(replayed_record(item))
            continue
        if outcome is None:
            reason = "" if before.is_too_young else before.reason
            files[path] = replace(before, size_bytes=item["size_bytes"], etag=item["etag"], reason=reason)
            records.append({**_record(item, before.records), "status": "pending"})
            continue
        if outcome.failed is not None:
            _fail(files, aside, path, before, item, outcome.failed, file_attempts, epoch)
            status = "set_aside" if path in aside else "in_progress"
            records.append({**_record(item, before.records), "status": status, "reason": outcome.failed})
            continue
        files[path] = DONE if outcome.finished else Progress(
            records=outcome.to,
            offset=outcome.offset,
            line=outcome.line,
            size_bytes=int(item["size_bytes"]),
            etag=str(item["etag"]),
            read_as=dict(item.get("read_as", {})),
            tail=_tail(outcome.end),
            reread=before.reread,
        )  # fmt: skip
        status = "committed" if outcome.finished else "in_progress"
        late = {"late": True} if not base.is_after_mark(path) and before.records == 0 and not before.reread else {}
        end = {"end": outcome.end} if outcome.end is not None else {}
        records.append({**_record(item, outcome.to), "status": status, **late, **end})
    return replace(base, files=files, set_aside=aside).prune_finished(), records


def replay(base: FileState, records: Sequence[dict[str, Json]]) -> FileState:
    """Return the state after an epoch, from the ledger's records of it, to rebuild a lost checkpoint."""
    files, aside, answered = dict(base.files), dict(base.set_aside), list(base.answered)
    for record in records:
        path, status = str(record["path"]), record["status"]
        if "request" in record:
            answered.append(str(record["request"]))
        if status in ("replayed", "refused"):
            continue
        end = FileEnd.from_json(record.get("end") or {})
        progress = DONE if status in ("committed", "dropped") else Progress(
            read_as=dict(record.get("read_as", {})) if int(record["to"]) else {},
            records=int(record["to"]), offset=end.offset, line=end.line,
            size_bytes=int(record["size_bytes"]), etag=str(record["etag"]),
            reason=str(record.get("reason", "")) if status == "pending" else "", tail=end.tail,
        )  # fmt: skip
        if status == "set_aside":
            files.pop(path, None)
            aside[path] = _aside(replace(progress, reread=bool(record.get("reread"))), str(record["reason"]))
        else:
            aside.pop(path, None)
            files[path] = replace(progress, reread=bool(record.get("reread")) and not progress.finished)
    answered = list(dict.fromkeys(answered))
    return replace(base, files=files, set_aside=aside, answered=tuple(answered)).prune_finished()


def recorded_inputs(state: FileState, records: Sequence[dict[str, Json]]) -> list[dict[str, Json]]:
    """Return the input of an epoch for another read: the same record ranges of the same files.

    The ledger keeps no byte offset of the beginning: a file that was started before is skipped through.
    """
    return [
        {**record, "path": state.current_name(str(record["path"])), "offset": 0, "line": 0, **_former(state, record)}
        for record in records
        if record["status"] != "pending" and int(record["to"]) > int(record["from"]) and not record.get("discarded")
    ]


def _former(state: FileState, quarantined: Mapping[str, Json]) -> dict[str, Json]:
    """Return what an input of quarantined records says of the folders that the files lay in, by their current names."""
    if "folders" not in quarantined:
        return {}
    folders = [state.current_name(f"{folder}/").removesuffix("/") for folder in quarantined["folders"]]
    return {"folders": folders, **({"former_roots": list(state.former_roots)} if state.former_roots else {})}


def replayed_input(state: FileState, item: Mapping[str, Json], read_as: Mapping[str, Json]) -> dict[str, Json]:
    """Return the input of a task for quarantined records that are read again, in the format of the source today."""
    return {**item, **_former(state, item), "offset": 0, "line": 0, **({"read_as": dict(read_as)} if read_as else {})}


def name_requests(
    splits: Sequence[Split], base: FileState, requests: Mapping[str, str], now: str
) -> list[dict[str, Json]]:
    """Name the requests (by path) in the inputs that answer them; returns records of files that wait for their turn."""
    planned = {str(item["path"]): item for split in splits for item in split.inputs}
    waiting: list[dict[str, Json]] = []
    for path, request in requests.items():
        if path in planned:
            planned[path]["request"] = request
        else:
            progress = base.files[path]
            stat = FileStat(path, progress.size_bytes, progress.etag, datetime.fromtimestamp(0, UTC))
            record = {**waiting_record(stat, now), "create_time": None, "reread": True, "request": request}
            waiting.append({key: value for key, value in record.items() if key != "reason"})
    return waiting


def waiting_record(file: FileStat, discovered: str) -> dict[str, Json]:
    """Return the ledger's record of a file that a slice passed because it is too young."""
    return {
        "path": file.name,
        "size_bytes": file.size_bytes,
        "etag": file.etag,
        "create_time": file.modified_at.isoformat(),
        "discovery_time": discovered,
        "from": 0,
        "to": 0,
        "status": "pending",
        "reason": TOO_YOUNG,
    }


def retry_delay(attempts: int, poll_seconds: float) -> float:
    """Return the seconds until a file that failed so many times in a row is tried again."""
    return float(min(poll_seconds * 2.0 ** min(attempts - 1, 32), max(MAX_RETRY_SECONDS, poll_seconds)))


def _tail(end: dict[str, Json] | None) -> str:
    return FileEnd.from_json(end).tail if end is not None else ""


def _record(item: dict[str, Json], to: int) -> dict[str, Json]:
    kept = ("path", "size_bytes", "etag", "create_time", "discovery_time", "from")
    more: dict[str, Json] = {key: item[key] for key in ("read_as", "reread", "request") if key in item}
    return {**{key: item[key] for key in kept}, "to": to, **more}


def _fail(
    files: dict[str, Progress],
    aside: dict[str, SetAside],
    path: str,
    before: Progress,
    item: dict[str, Json],
    reason: str,
    file_attempts: int,
    epoch: int,
) -> None:
    # A file that changed since the last try begins anew: it may have been half written.
    attempts = before.attempts + 1 if not before.etag or before.etag == item["etag"] else 1
    if attempts < file_attempts:
        files[path] = replace(
            before, attempts=attempts, reason=reason, size_bytes=item["size_bytes"], etag=item["etag"]
        )
        return
    files.pop(path, None)
    known = replace(before, size_bytes=item["size_bytes"], etag=item["etag"])
    aside[path] = replace(_aside(known, reason), epoch=epoch)


def folder_columns(splits: Sequence[Split], root: str) -> tuple[str, ...]:
    """Return the columns in the folder names of planned files."""
    inputs = [item for split in splits for item in split.inputs]
    paths = [str(item["path"]) for item in inputs if "quarantine" not in item]
    paths += [f"{folder}/" for item in inputs for folder in item.get("folders", ())]
    return tuple(sorted({name for path in paths for name in folder_values(path, root)}))


def folder_values(path: str, root: str) -> dict[str, str | None]:
    """Return the `name=value` folders between the root and the file."""
    values: dict[str, str | None] = {}
    for part in path.removeprefix(root).split("/")[:-1]:
        name, equals, value = part.partition("=")
        if equals and is_column_name_ok(name):
            values[name] = None if value == "__HIVE_DEFAULT_PARTITION__" else urllib.parse.unquote(value)
    return values
