"""Files as a source: lists, plans, finds late files, sets broken ones aside."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from firnline.clock import SystemClock, monotonic
from firnline.errors import (
    AccessError,
    ConfigError,
    GrownFileError,
    LateFileError,
    SourceError,
    SourceMovedError,
    no_such_folder,
)
from firnline.sources.base import (
    MAIN_PORT,
    NOT_READ,
    Backlog,
    InputStatus,
    InputTracker,
    Limits,
    PositionChange,
    PositionView,
    Reconciled,
    Sample,
    Source,
    SourcePlan,
    TooYoung,
    processed_record,
)
from firnline.sources.files import moves, planning
from firnline.sources.files.growth import (
    Change,
    FileEnd,
    GrownFiles,
    Growth,
    ReadFile,
    describe_tail,
    find_growth,
    read_tail,
)
from firnline.sources.files.listing import Scope, is_gone, list_files
from firnline.sources.files.messages import FileOutcome, FileReaderSettings
from firnline.sources.files.options import FileSourceOptions
from firnline.sources.files.position import FileState, Progress, SetAside
from firnline.sources.known import KnownFiles
from firnline.sources.replays import Replays, deal_again, refused_record
from firnline.storage import FileStat, Storage, is_remote, normalise, open_storage
from firnline.types import Clock, Json

if TYPE_CHECKING:
    from firnline.sources.columns import Columns

logger = logging.getLogger(__name__)

LOOKED_UP = 200  # more files than that are cheaper to list
MAX_LATE = 100_000  # late files that one comparison keeps; the next one finds the others


class FileSource(Source):
    """One folder, glob or bucket prefix.

    Knowledge beyond the position (late files, requested retries) is a proposal. It becomes true in the position of the
    epoch that uses it, and is found again after a crash.
    """

    def __init__(
        self, options: FileSourceOptions, *, once: bool = False, moved: tuple[str, str] | None = None,
        storage: Storage | None = None, clock: Clock | None = None,
    ) -> None:  # fmt: skip
        self.name = options.name
        self.poll_interval_secs = options.poll_interval_secs
        self.reconcile_interval_secs: float | Literal["auto"] | None = options.reconcile_interval_secs
        self.late_files = options.late_files
        self.on_growth = options.on_growth
        self._options = options
        self._once = once
        self._moved = moved
        self._scope = Scope.of(normalise(options.path))
        self._storage = storage or open_storage(self._scope.root, options.storage_options)
        self._start_name, self._start_time = _start_after(options.start_after, self._scope.root)
        if moved is not None and normalise(moved[1]) != self.location:
            raise ConfigError(f"--source-moved says {moved[1]}, the spec says {self.location}")
        self._only: frozenset[str] | None = None
        self._unsaved = False
        self._late: dict[str, FileStat] = {}
        self._grown: dict[str, ReadFile] = {}  # with `read_rest`: files that grew after they were read
        self._retries: dict[str, bool] = {}  # requested by one thread, planned by another, forgotten by a third
        self._drops: set[str] = set()  # the same
        self._rereads: dict[str, tuple[str, str]] = {}  # the same; request -> path, and why it is refused
        self._replays = Replays()
        self._retries_lock = threading.Lock()
        self._retry_at: dict[str, float] = {}
        self._revived: frozenset[str] = frozenset()  # set aside, and changed since
        self._clock = clock or SystemClock()
        self._young: dict[str, tuple[str, float]] = {}  # name -> etag, and since when it is known, by our clock
        self._is_gone = False  # whether the last plan found no folder

    @property
    def location(self) -> str:
        return self._scope.root

    def check(self) -> None:
        if is_remote(self.location):
            return
        self._check_folder()
        if not os.access(self.location, os.R_OK | os.X_OK):
            raise AccessError(path=self.location)

    def _check_folder(self) -> None:
        if is_gone(self.location):
            raise no_such_folder(self.location, "Correct `path` of the source, or create the folder.")

    def restrict(self, names: Iterable[str]) -> None:
        self._only = frozenset(names)

    def _list(self, after: str | None = None) -> Iterator[FileStat]:
        files = list_files(self._storage, self._scope, after)
        return files if self._only is None else (stat for stat in files if stat.name in self._only)

    # -- positions ------------------------------------------------------------------------------------

    def start(self, position: Json | None) -> Json:
        self._check_folder()
        if position is None:
            return FileState(self.location, mark=self._start_name, start_after=self._start_name).to_json()
        state = FileState.from_json(position)
        if self._moved is not None and state.root == normalise(self._moved[0]) != self.location:
            self._check_move(state)
            state = state.moved(state.root, self.location)
            self._unsaved = True  # worth a separate epoch: the next run then needs no option
        if state.root != self.location:
            raise SourceMovedError(
                f"the checkpoint was made on {state.root}, the spec says {self.location}",
                hint=f"If the same files moved, run once with --source-moved {state.root}={self.location}",
            )
        return state.to_json()

    def _check_move(self, state: FileState) -> None:
        """Refuse a folder inside a former one, or around it: new names there would be taken for former ones."""
        for old in (*state.former_roots, state.root):
            if old.startswith(f"{self.location}/") or self.location.startswith(f"{old}/"):
                raise ConfigError(
                    f"the files of {self.name} lay in {old}, and {self.location} is inside or around it: old and new "
                    "names could not be told apart",
                    hint=f"Move the files to a folder outside {old}, and name that one in --source-moved.",
                )

    def adopt(self, foreign: Json) -> tuple[Json, list[dict[str, Json]]]:
        state = FileState.from_interchange(foreign, self.location)
        # Finished ones above the mark too: the mark will pass them.
        baseline = [processed_record(stat) for stat in self.list_inputs() if state.knows(stat.name)]
        return state.to_json(), baseline

    def interchange(self, position: Json) -> Json:
        return FileState.from_json(position).interchange()

    def replay(self, position: Json, records: Sequence[dict[str, Json]]) -> Json:
        return planning.replay(FileState.from_json(position), records).to_json()

    def replan(self, position: Json, records: Sequence[dict[str, Json]], parallelism: int) -> SourcePlan:
        inputs = planning.recorded_inputs(FileState.from_json(position), records)
        splits = deal_again(inputs, parallelism)
        return SourcePlan(
            source=self.name,
            base=position,
            splits=splits,
            files=len(inputs),
            size_bytes=sum(int(item["size_bytes"]) for item in inputs),
            constants=planning.folder_columns(splits, self.location),
        )

    def describe(self, position: Json) -> PositionView:
        return FileState.from_json(position).describe()

    def reader_settings(self) -> dict[str, Json]:
        options = self._options
        return FileReaderSettings(
            self.location, dict(options.storage_options), options.max_record_bytes, options.on_bad_record
        ).to_json()

    def sample(self, plan: SourcePlan, columns: Mapping[str, Columns]) -> Sample:
        from firnline.sources.files.reader import FileReader  # loads the decoder
        from firnline.sources.sample import sample_inputs

        settings = self.reader_settings()
        return sample_inputs(lambda split: FileReader(settings, split, columns), plan, columns[MAIN_PORT])

    def current_name(self, position: Json, path: str) -> str:
        return FileState.from_json(position).current_name(path)

    def set_position(self, position: Json, words: str) -> PositionChange:
        return moves.choose(self.name, FileState.from_json(position), words, self._list_wanted())

    def skip(self, position: Json, words: str) -> PositionChange:
        return moves.skip(self.name, FileState.from_json(position), words, self._list_wanted())

    def _list_wanted(self) -> list[FileStat]:
        """Return every file but those that `start_after` excludes by their time."""
        start = self._start_time
        return [stat for stat in self.list_inputs() if start is None or stat.modified_at > start]

    # -- planning -------------------------------------------------------------------------------------

    def plan(self, position: Json, limits: Limits) -> SourcePlan | None:
        replayed = self._plan_replay(FileState.from_json(position), limits)
        if replayed is not None:
            return replayed
        self._is_gone = is_gone(self.location)
        if self._is_gone:
            if self._once:
                raise SourceError(f"{self.unreachable()}, though it was there when the run started", path=self.location)
            return None  # files in progress wait, too: they are no broken files
        state, dropped = self._apply_drops(FileState.from_json(position))
        state = self._apply_retries(state)
        state, rereads, refused = self._apply_rereads(state)
        ages = _Ages(self._options.min_age_secs if not limits.any_age else 0.0, self._clock, self._young)
        state = self._revive(state, ages)
        state, reopened = self._reopen(state, ages)
        late = self._late
        state, in_progress = self._in_progress(state, ages)
        chosen = planning.choose(state, in_progress, self._listed(state, limits), limits, ages.is_ripe)
        self._young = ages.young
        if not chosen.files and chosen.base == FileState.from_json(position) and not self._unsaved:
            return None
        moved, self._unsaved = self._unsaved, False
        taken = {f.name for f in chosen.files}
        self._late = {name: stat for name, stat in late.items() if name not in taken}
        # What was known of a file holds no longer once anything else reads it, such as a request to read it again.
        named = {*reopened, *taken, *chosen.base.files, *chosen.base.set_aside}
        self._grown = {name: read for name, read in self._grown.items() if name not in named}
        for path in chosen.changed:
            logger.warning("file set aside", extra={"file": path, "reason": "changed while it was half read"})
        now = datetime.now(UTC).isoformat(timespec="seconds")
        splits = planning.deal(chosen, limits, now, self._options.read_as, hold=self.on_growth == "read_rest")
        records = [*dropped, *(planning.waiting_record(file, now) for file in chosen.waiting)]
        records += planning.name_requests(splits, chosen.base, rereads, now)
        records += [refused_record(*one, now) for one in refused]
        return SourcePlan(
            source=self.name,
            base=chosen.base.to_json(),
            splits=splits,
            files=len(chosen.files),
            size_bytes=chosen.size_bytes,
            constants=planning.folder_columns(splits, self.location),
            notes={
                "late": sum(1 for f in chosen.files if f.name in late),
                "moved": moved,
                "records": records,
                "reopened": bool(reopened),
            },
        )

    def _plan_replay(self, state: FileState, limits: Limits) -> SourcePlan | None:
        """Return the slice of quarantined records that are to be read again; None if there are none.

        They are an epoch of their own, so that a rollback of it undoes nothing else.
        """
        chosen = self._replays.choose(state.answered, limits.max_bytes) if not limits.any_age else None
        if chosen is None:
            return None
        read = [planning.replayed_input(state, item, self._options.read_as) for item in chosen.inputs]
        splits = deal_again(read, limits.parallelism)
        return SourcePlan(
            source=self.name,
            base=self._answer(state, chosen.requests).to_json(),
            splits=splits,
            files=len(read),
            size_bytes=sum(int(item["size_bytes"]) for item in read),
            constants=planning.folder_columns(splits, self.location),
            notes={"replay": True, "records": chosen.records},
        )

    def _answer(self, state: FileState, requests: Iterable[str]) -> FileState:
        """Return the state that names these requests as answered, and forgets those that are deleted."""
        with self._retries_lock:
            rereads = set(self._rereads)
        kept = (one for one in state.answered if one in rereads or one in self._replays)
        return replace(state, answered=(*kept, *requests))

    def answered(self, position: Json) -> frozenset[str]:
        return frozenset(FileState.from_json(position).answered)

    def has_answered(self, plan: SourcePlan, request: str) -> bool:
        return request in FileState.from_json(plan.base).answered

    def _listed(self, state: FileState, limits: Limits) -> Iterator[FileStat]:
        """Yield new files after the mark, collected for at most `max_ms`."""
        deadline = monotonic() + limits.max_ms / 1000
        try:
            for stat in self._list(state.mark):
                if self._start_time is None or stat.modified_at > self._start_time:
                    yield stat
                    if monotonic() > deadline:
                        return
        except OSError as error:
            raise SourceError(f"cannot list {self.location}: {error}", path=self.location) from error

    def _in_progress(self, state: FileState, ages: _Ages) -> tuple[FileState, list[FileStat]]:
        """Return the current versions of files that are started, or late and waiting to start.

        A file that was too young and is gone is forgotten: nothing of it was read.
        """
        now = self._clock.monotonic()
        found, files = [], dict(state.files)
        for path, progress in state.files.items():
            if progress.finished or (not self._once and now < self._retry_at.get(path, 0)):
                continue
            try:
                stat = self._storage.stat(self._key(path))
            except FileNotFoundError:
                if progress.is_too_young:
                    del files[path]
                    continue
                # Planned unchanged: the task fails on it, and after enough attempts it is set aside by name.
                gone = datetime.fromtimestamp(0, UTC)
                found.append(FileStat(path, progress.size_bytes, progress.etag, gone))
            except OSError as error:
                raise SourceError(f"cannot look at {path}: {error}", path=path) from error
            else:
                grown = self._grown_progress(progress, stat)
                if (progress.records and grown is progress) or ages.is_ripe(stat):
                    files[path] = grown
                    found.append(stat)
        state = replace(state, files=files)
        return state, [*found, *self._ripe_late(state, ages)]

    def _ripe_late(self, state: FileState, ages: _Ages) -> Iterator[FileStat]:
        """Yield late files that are old enough. One that was young when it was listed is looked at again."""
        for name, stat in list(self._late.items()):
            # A file after the mark of this base is not late here: it follows in the order of names.
            if name in state.files or name in state.set_aside or state.is_after_mark(name):
                continue
            if ages.was_young(stat):
                try:
                    stat = self._storage.stat(self._key(name))
                except FileNotFoundError:
                    continue
                except OSError as error:
                    raise SourceError(f"cannot look at {name}: {error}", path=name) from error
            if ages.is_ripe(stat):
                yield stat

    def _revive(self, state: FileState, ages: _Ages) -> FileState:
        """Return the state with files that were set aside unread and have changed since, to be tried again."""
        files, aside = dict(state.files), dict(state.set_aside)
        for path in self._revived & state.set_aside.keys():
            item = aside[path]
            try:
                now = self._storage.stat(self._key(path))
            except OSError:
                continue
            if now.etag == item.etag or item.records or not ages.is_ripe(now):
                continue
            logger.info("file that was set aside has changed; it is tried again", extra={"file": path})
            files[path] = Progress(size_bytes=now.size_bytes, etag=now.etag, reread=item.reread)
            del aside[path]
        return replace(state, files=files, set_aside=aside)

    def _grown_progress(self, progress: Progress, stat: FileStat) -> Progress:
        """Return the progress in a file, which with `read_rest` may have grown since a part of it was read."""
        if self.on_growth != "read_rest" or not progress.records or progress.etag == stat.etag or not progress.tail:
            return progress
        if self._find_growth(stat, _read_so_far(progress)).change is not Change.GROWN:
            return progress
        return replace(progress, size_bytes=stat.size_bytes, etag=stat.etag)

    def _reopen(self, state: FileState, ages: _Ages) -> tuple[FileState, set[str]]:
        """Return the state with files that grew after they were read, to be read from there on, and their names.

        The proof is made on the version that is planned: a reader refuses any other one.
        """
        files, aside, reopened = dict(state.files), dict(state.set_aside), set()
        for path, read in self._grown.items():
            if path in files or path in aside or state.is_after_mark(path):
                continue
            try:
                stat = self._storage.stat(self._key(path))
            except FileNotFoundError:
                continue
            except OSError as error:
                raise SourceError(f"cannot look at {path}: {error}", path=path) from error
            if stat.etag == read.etag or not ages.is_ripe(stat):
                continue
            growth, line = self._find_growth(stat, read), read.end.line if read.end else 0
            if growth.change is Change.GROWN:
                logger.info("file grew; the rest is read", extra={"file": path, "from_bytes": growth.offset})
                files[path] = Progress(
                    read.records, offset=growth.offset, line=line, size_bytes=stat.size_bytes, etag=stat.etag,
                    tail=self._tail_before(path, growth.offset),
                )  # fmt: skip
                reopened.add(path)
            elif growth.change is Change.CONTINUED:
                reason = f"grew in the middle of line {line}, which had been read as a record"
                logger.warning("file set aside", extra={"file": path, "reason": reason})
                aside[path] = SetAside(reason, read.records, size_bytes=stat.size_bytes, etag=stat.etag)
                reopened.add(path)
        return replace(state, files=files, set_aside=aside), reopened

    def _find_growth(self, stat: FileStat, read: ReadFile) -> Growth:
        try:
            return find_growth(self._storage, self._key(stat.name), stat.size_bytes, read)
        except FileNotFoundError:
            return Growth(Change.REPLACED)
        except OSError as error:
            raise SourceError(f"cannot read {stat.name}: {error}", path=stat.name) from error

    def _tail_before(self, path: str, offset: int) -> str:
        """Return the proof of the bytes before an offset, so that the file may grow again before it is read."""
        try:
            return describe_tail(read_tail(self._storage, self._key(path), offset))
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise SourceError(f"cannot read {path}: {error}", path=path) from error

    def _key(self, path: str) -> str:
        return path.removeprefix(self.location).lstrip("/")

    def advance(self, plan: SourcePlan, outcomes: Sequence[Json], epoch: int) -> tuple[Json, list[dict[str, Json]]]:
        base = FileState.from_json(plan.base)
        state, records = planning.advance(base, plan.splits, outcomes, self._options.file_attempts, epoch)
        for record in records:
            if "reason" in record:
                path = str(record["path"])
                self._retry_at.pop(path, None)
                if path in state.files:
                    delay = planning.retry_delay(state.files[path].attempts, self._options.poll_interval_secs)
                    self._retry_at[path] = self._clock.monotonic() + delay
                logger.warning("file failed", extra={"file": record["path"], "reason": record["reason"]})
            elif (record.get("end") or {}).get("incomplete_line"):
                line = int(record["end"]["line"]) + 1
                logger.warning(
                    "last line is incomplete; it is read when the file has grown",
                    extra={"file": record["path"], "line": line},
                )
        quarantined = {item["path"] for split in plan.splits for item in split.inputs if "quarantine" in item}
        for outcome in map(FileOutcome.from_json, outcomes):
            if outcome.failed is not None and outcome.path in quarantined:
                facts = {"file": outcome.path, "reason": outcome.failed}
                logger.warning("records not read again: they stay in quarantine", extra=facts)
        return state.to_json(), [*plan.notes.get("records", []), *records]

    def too_young(self) -> TooYoung | None:
        young = self._young
        if not young:
            return None
        now = self._clock.monotonic()
        left = [max(0.0, since + self._options.min_age_secs - now) for _, since in young.values()]
        return TooYoung(len(young), min(left), max(left))

    def unreachable(self) -> str | None:
        return f"the folder {self.location} is gone" if self._is_gone else None

    def backlog(self, position: Json) -> Backlog:
        state = FileState.from_json(position)
        files = size = 0
        for stat in self._list(state.mark):
            late = self._start_time is not None and stat.modified_at <= self._start_time
            if not late and not state.knows(stat.name):
                progress = state.files.get(stat.name, Progress())
                files += 1
                size += stat.size_bytes - progress.offset
        for path, progress in state.files.items():
            if not progress.finished and not state.is_after_mark(path):
                files += 1
                size += progress.size_bytes
        for stat in self._late.values():
            if self._is_late(state, stat):
                files += 1
                size += stat.size_bytes
        for path, read in self._grown.items():
            if path not in state.files and path not in state.set_aside:
                files += 1
                size += read.rest_bytes
        return Backlog(files, size)

    # -- late files and retries -----------------------------------------------------------------------

    def reconcile(self, position: Json, known: KnownFiles) -> Reconciled:
        reconciled, grown = self._compare(position, known)
        late = reconciled.late
        if late and self._options.late_files == "fail":
            names = ", ".join(stat.name for stat in late[:3])
            raise LateFileError(f"{reconciled.late_count} late file(s): {names}", files=reconciled.late_count)
        if reconciled.grown and self.on_growth == "fail":
            names = ", ".join(reconciled.grown[:3])
            count = len(reconciled.grown)
            raise GrownFileError(f"{count} file(s) grew after they were read: {names}", files=count)
        self._revived = frozenset(reconciled.revived)
        self._grown = grown
        if self._options.late_files == "ingest":
            self._late = {stat.name: stat for stat in late}
        return reconciled

    def find_late(self, position: Json, known: KnownFiles) -> Reconciled:
        return self._compare(position, known)[0]

    def known_end(self, record: Mapping[str, Json]) -> str:
        return ReadFile.of_record(record).to_text()

    def _compare(self, position: Json, known: KnownFiles) -> tuple[Reconciled, dict[str, ReadFile]]:
        """Compare a full listing with every known file; both are walked once, in the order of names.

        Returns what differs, and the grown files whose rest is to be read.
        """
        state = FileState.from_json(position)
        if state.former_roots:
            known = known.renamed(state.current_name)
        late: list[FileStat] = []
        changed: list[str] = []
        revived: list[str] = []
        growths = GrownFiles(self._find_growth)
        listed = late_bytes = more = incomplete = 0
        for stat, etag, end in _side_by_side(self.list_inputs(), known.with_ends()):
            listed += 1
            aside = state.set_aside.get(stat.name)
            if aside is not None and not aside.records and aside.etag != stat.etag:
                revived.append(stat.name)
            if etag is not None:
                in_progress = stat.name in state.files or stat.name in state.set_aside
                if in_progress or not etag:
                    continue
                if etag == stat.etag:
                    incomplete += ReadFile.is_incomplete(end)
                elif not growths.add(stat, ReadFile.from_text(etag, end)):
                    changed.append(stat.name)
            elif self._is_late(state, stat):
                late_bytes += stat.size_bytes
                if len(late) < MAX_LATE:
                    late.append(stat)
                else:
                    more += 1
        rest = growths.rest if self.on_growth == "read_rest" else {}
        found = Reconciled(
            late, changed, listed, late_bytes, more, revived, growths.grown,
            rest=len(rest), rest_bytes=sum(read.rest_bytes for read in rest.values()), incomplete=incomplete,
        )  # fmt: skip
        return found, rest

    def find_unavailable(
        self, position: Json, records: Sequence[Mapping[str, Json]], back_to: Json | None = None
    ) -> list[str]:
        state = FileState.from_json(position)
        wanted: dict[str, str] = {}
        ends: dict[str, ReadFile] = {}
        then = FileState.from_json(back_to).files if back_to is not None else {}
        for path, progress in then.items():
            if progress.records and not progress.finished:
                wanted[state.current_name(path)] = progress.etag
                if progress.tail:
                    ends[state.current_name(path)] = _read_so_far(progress)
        for record in records:
            if record.get("status") == "replayed":  # read from the quarantine
                continue
            if record.get("status") == "committed" or int(record.get("to", 0)) > int(record.get("from", 0)):
                path = state.current_name(str(record["path"]))
                if path not in wanted:
                    ends[path] = ReadFile.of_record(record)
                wanted.setdefault(path, str(record.get("etag", "")))
        stats = self._stats(list(wanted))
        missing = [f"{path}: gone" for path in wanted if path not in stats]
        differ = [path for path, etag in wanted.items() if path in stats and stats[path].etag != etag]
        changed = (f"{path}: changed" for path in differ if not self._still_has(stats[path], ends.get(path)))
        return [*missing, *changed]

    def _still_has(self, stat: FileStat, read: ReadFile | None) -> bool:
        """Return whether a file has grown, and what was read is still there. Only with `read_rest` another reading of
        it gives what the first one gave, and then the rest."""
        return (
            self.on_growth == "read_rest"
            and read is not None
            and self._find_growth(stat, read).change in (Change.GROWN, Change.BLANK)
        )

    def _stats(self, paths: Sequence[str]) -> dict[str, FileStat]:
        """Return the current metadata of these names; a few are looked up, many are listed."""
        if len(paths) > LOOKED_UP:
            wanted = set(paths)
            return {stat.name: stat for stat in self.list_inputs() if stat.name in wanted}
        stats = {}
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                stats[path] = self._storage.stat(self._key(path))
        return stats

    def list_inputs(self) -> Iterator[FileStat]:
        """Yield every file of the source, in byte order of the names."""
        try:
            yield from self._list()
        except OSError as error:
            raise SourceError(f"cannot list {self.location}: {error}", path=self.location) from error

    def track(self, position: Json) -> InputTracker:
        return _Tracker(self, FileState.from_json(position))

    def _is_late(self, state: FileState, stat: FileStat) -> bool:
        if state.is_after_mark(stat.name) or stat.name in state.files or stat.name in state.set_aside:
            return False
        if self._start_time is not None and stat.modified_at <= self._start_time:
            return False
        return state.start_after is None or stat.name.encode() > state.start_after.encode()

    def give_back(self, plan: SourcePlan) -> bool:
        self._unsaved = self._unsaved or bool(plan.notes.get("moved"))
        has_late = bool(self._late) or bool(plan.notes.get("late")) or bool(plan.notes.get("reopened"))
        self._late, self._grown = {}, {}
        return has_late

    def retry(self, path: str, *, changed: bool) -> None:
        with self._retries_lock:
            self._retries[path] = changed

    def drop(self, path: str) -> None:
        with self._retries_lock:
            self._drops.add(path)

    def reread(self, request: str, path: str, *, refused: str = "") -> None:
        with self._retries_lock:
            self._rereads[request] = (path, refused)

    def replay_quarantined(self, request: str, files: Sequence[Mapping[str, Json]], *, discard: bool) -> None:
        self._replays.add(request, files, discard=discard)

    def _apply_rereads(self, state: FileState) -> tuple[FileState, dict[str, str], list[tuple[str, str, str]]]:
        """Return the state with finished files that are to be read again, their requests by path, and refused requests
        with path and reason.

        The state names refused requests as answered, too: otherwise a later plan, which finds the file finished, would
        read it again.
        """
        with self._retries_lock:
            wanted = {request: one for request, one in self._rereads.items() if request not in state.answered}
        files, taken, refused = dict(state.files), dict[str, str](), list[tuple[str, str, str]]()
        for request, (path, reason) in sorted(wanted.items()):
            if not reason and (path in files or path in state.set_aside or state.is_after_mark(path)):
                reason = "the file is not read to its end"
            try:
                now = self._storage.stat(self._key(path)) if not reason else None
            except FileNotFoundError:
                now, reason = None, "the file is gone"
            except OSError as error:
                raise SourceError(f"cannot look at {path}: {error}", path=path) from error
            if now is None:
                logger.warning("reread refused: %s", reason, extra={"file": path})
                refused.append((request, path, reason))
                continue
            files[path] = Progress(size_bytes=now.size_bytes, etag=now.etag, reread=True)
            taken[path] = request
        if not wanted:
            return state, {}, []
        return self._answer(replace(state, files=files), sorted(wanted)), taken, refused

    def _apply_drops(self, state: FileState) -> tuple[FileState, list[dict[str, Json]]]:
        """Return the state without the dropped files, and their ledger records."""
        with self._retries_lock:
            drops = sorted(self._drops & state.set_aside.keys())
        if not drops:
            return state, []
        now = datetime.now(UTC).isoformat(timespec="seconds")
        given_up = [(path, state.set_aside[path]) for path in drops]
        records: list[dict[str, Json]] = [
            {
                "path": path,
                "size_bytes": item.size_bytes,
                "etag": item.etag,
                "create_time": None,
                "discovery_time": now,
                "from": item.records,
                "to": item.records,
                "status": "dropped",
                "reason": item.reason,
            }
            for path, item in given_up
        ]
        return planning.replay(state, records), records

    def _apply_retries(self, state: FileState) -> FileState:
        files, aside = dict(state.files), dict(state.set_aside)
        with self._retries_lock:
            retries = dict(self._retries)
        for path, accept_changed in retries.items():
            item = aside.get(path)
            if item is None:
                continue
            try:
                now = self._storage.stat(self._key(path))
            except FileNotFoundError:
                logger.warning("retry refused: the file is gone", extra={"file": path})
                continue
            if now.etag != item.etag and item.records and not accept_changed:
                logger.warning("retry refused: the file changed; use --changed", extra={"file": path})
                continue
            same = now.etag == item.etag
            files[path] = Progress(
                records=item.records,
                offset=item.offset if same else 0,  # a replaced file is skipped by record count
                line=item.line if same else 0,
                size_bytes=now.size_bytes,
                etag=now.etag,
                read_as=dict(item.read_as if same else self._options.read_as),
                tail=item.tail if same else "",
                reread=item.reread,
            )
            del aside[path]
        return replace(state, files=files, set_aside=aside)

    def forget_requests(self, names: Iterable[str]) -> None:
        names = list(names)
        self._replays.forget(names)
        with self._retries_lock:
            for name in names:
                self._retries.pop(name, None)
                self._drops.discard(name)
                self._rereads.pop(name, None)


class _Ages:
    """Judges, for one plan, which files are old enough to be whole.

    A file counts as old by its own time or, since that may lie in the future, if we have known it unchanged for as
    long.
    """

    def __init__(self, min_age: float, clock: Clock, known: Mapping[str, tuple[str, float]]) -> None:
        self._min_age = min_age
        self._now, self._monotonic = clock.now(), clock.monotonic()
        self._known = known
        self.young: dict[str, tuple[str, float]] = {}  # for the next plan: those found too young

    def is_ripe(self, stat: FileStat) -> bool:
        if self._min_age <= 0:
            return True
        age = (self._now - stat.modified_at).total_seconds()
        if age >= self._min_age:
            return True
        etag, since = self._known.get(stat.name, ("", 0.0))
        if etag != stat.etag:
            since = self._monotonic - max(0.0, age)
        if self._monotonic - since >= self._min_age:
            return True
        self.young[stat.name] = (stat.etag, since)
        return False

    def was_young(self, stat: FileStat) -> bool:
        """Return whether the last plan found the file too young: it may have changed since it was listed."""
        return self._min_age > 0 and stat.name in self._known


def _read_so_far(progress: Progress) -> ReadFile:
    """Return what was read of a file in progress; it ends after a whole line."""
    end = FileEnd(progress.offset, progress.line, progress.tail) if progress.tail else None
    return ReadFile(progress.etag, progress.size_bytes, progress.records, end)


def _side_by_side(
    listed: Iterable[FileStat], known: Iterable[tuple[str, str, str]]
) -> Iterator[tuple[FileStat, str | None, str]]:
    """Yield every listed file with its known etag, None if it is unknown, and end; both in byte order."""
    before, rest = b"", iter(known)
    path, etag, end = next(rest, (None, "", ""))
    for stat in listed:
        name = stat.name.encode()
        if name < before:
            raise SourceError(f"{stat.name} is listed after a file of a later name", path=stat.name)
        before = name
        while path is not None and path.encode() < name:
            path, etag, end = next(rest, (None, "", ""))
        yield stat, etag if path == stat.name else None, end


class _Tracker(InputTracker):
    """The status of every file, from one position."""

    def __init__(self, source: FileSource, state: FileState) -> None:
        self._source = source
        self._state = state
        self._seen: set[str] = set()
        self._growths = GrownFiles(source._find_growth)

    @functools.cached_property
    def _listed(self) -> dict[str, FileStat]:
        return {stat.name: stat for stat in self._source.list_inputs()}

    def add(self, record: dict[str, Json]) -> InputStatus | None:
        path = self._state.current_name(str(record["path"]))
        if path in self._seen or record["status"] in NOT_READ:
            return None
        self._seen.add(path)
        status, reason = self._status_of(path), self._reason_of(path)
        if record["status"] == "dropped" and status == "committed":
            status, reason = "dropped", str(record["reason"])
        elif status == "committed":
            status, reason = self._change_of(path, ReadFile.of_record(record))
        return InputStatus({**record, "path": path}, status, reason)

    def _change_of(self, path: str, read: ReadFile) -> tuple[str, str | None]:
        """Return the status of a file that was read: committed, or that it has grown or was replaced since."""
        stat = self._listed.get(path)
        if stat is None or not read.etag or stat.etag == read.etag:
            if read.end is not None and read.end.incomplete_line:
                return "committed", f"its last line ({read.end.line + 1}) is incomplete"
            return "committed", None
        sizes = f"from {read.size_bytes} to {stat.size_bytes} bytes after it was read"
        if not self._growths.add(stat, read):
            return "changed", f"was replaced after it was read ({read.size_bytes}, now {stat.size_bytes} bytes)"
        if path not in self._growths.rest:
            return "grown", f"grew {sizes}; the rest of such a file cannot be read alone"
        waits = "; the next epoch reads the rest" if self._source.on_growth == "read_rest" else ""
        return "grown", f"grew {sizes}{waits}"

    def unread(self) -> Iterator[InputStatus]:
        for stat in self._listed.values():
            if stat.name in self._seen:
                continue
            row = {"path": stat.name, "size_bytes": stat.size_bytes, "create_time": stat.modified_at.isoformat()}
            status = "late" if self._source._is_late(self._state, stat) else self._status_of(stat.name)
            yield InputStatus(row, "ignored" if status == "committed" else status, self._reason_of(stat.name))

    def _status_of(self, path: str) -> str:
        state = self._state
        if path in state.set_aside:
            return "set_aside"
        if path in state.files and not state.files[path].is_too_young:
            return "committed" if state.files[path].finished else "in_progress"
        if path in state.files:
            return "pending"
        return "pending" if state.is_after_mark(path) else "committed"

    def _reason_of(self, path: str) -> str | None:
        state = self._state
        if path in state.set_aside:
            return state.set_aside[path].reason
        return state.files[path].reason or None if path in state.files else None


def _start_after(value: str | None, root: str) -> tuple[str | None, datetime | None]:
    """Parse `start_after`: a time if it is one, otherwise a file name."""
    if value is None:
        return None, None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        return value if "://" in value or value.startswith("/") else f"{root}/{value}", None
    return None, moment if moment.tzinfo else moment.replace(tzinfo=UTC)
