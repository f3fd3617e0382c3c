"""Reads the log of a database in a thread of its own, and writes it into spool files; reconnects when it is lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from firnline.clock import jitter, monotonic
from firnline.errors import ConfigError, FirnlineError, SinkError, SourceError, SourceGapError
from firnline.sources.cdc.log import Cut, LogStream, Piece, at_first
from firnline.sources.cdc.spool import Content, Mark, SpoolFile, write_file
from firnline.storage import Storage
from firnline.types import Json

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
WAIT_SECONDS = 0.2  # for the server's next message, before requests are looked at
AWAITED_SECONDS = 0.02  # the same while somebody waits for a place
IDLE_SECONDS, IDLE_BYTES = 30.0, 64 << 20  # a place that moved without rows becomes a file after one of these
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0  # between two tries to connect


@dataclass(frozen=True, slots=True)
class SpoolSettings:
    """How much is spooled."""

    file_bytes: int = 16 << 20  # a file is closed when it has so many
    file_rows: int = 50_000
    max_ahead_bytes: int = 256 << 20  # of files that no plan has taken


@dataclass(slots=True)
class _Open:
    """What was read and is in no file yet."""

    context: bytes
    begin: Mark
    frames: bytearray = field(default_factory=bytearray)
    cuts: list[Cut] = field(default_factory=list)
    rows: int = 0
    open_rows: int = 0

    def add(self, piece: Piece) -> None:
        base = len(self.frames)
        self.frames += piece.frames
        for cut in piece.cuts:
            self.cuts.append(Cut(base + cut.offset, cut.position, cut.transaction, cut.committed_at, cut.rows))
        self.rows += sum(cut.rows for cut in piece.cuts)
        self.open_rows = piece.open_rows


@dataclass(slots=True)
class GapConsent:
    """A person accepts one gap of the log, of those that are there when the run begins. The threads of a run that
    starts again share it."""

    reads: tuple[str, ...] = ()  # tables that are emptied and read again behind the gap
    is_open: bool = True
    end: Json = None  # where the log ended when the run opened it; None: it has not opened it

    def close(self) -> None:
        """Accept nothing more."""
        self.is_open = False


class Awaited:
    """A place of the log that somebody waits for. `file`: the spool file with which everything before it is in files;
    None until then."""

    def __init__(self, place: Json) -> None:
        self.place = place
        self.file: int | None = None


class Spooler:
    """Keeps a stream open and spools it. Files are handed to plans in the order of the log."""

    def __init__(
        self,
        stream: LogStream,
        storage: Storage,
        folder: str,
        *,
        files: Sequence[SpoolFile],
        number: int,
        begin: Mark,
        check_holder: Callable[[], None],
        settings: SpoolSettings,
        name: str,
        tables: Sequence[str] = (),
        consent: GapConsent | None = None,
    ) -> None:
        self._stream = stream
        self._storage = storage
        self._folder = folder
        self._check_holder = check_holder
        self._settings = settings
        self._name = name
        self._tables = tables
        self._consent = consent or GapConsent(is_open=False)
        self._files = list(files)  # written, in order; those that are decided are dropped
        self._number, self._end = (files[-1].number, files[-1].end) if files else (number, begin)
        self._taken = number  # the last file that a plan took
        self._news = threading.Condition()
        self._stopping = threading.Event()
        self._wants_file = threading.Event()
        self._until: Json = None  # where the server's log ended when a run with `once` began
        self._reached = False
        self._failure: FirnlineError | None = None
        self._lost: SourceError | SinkError | None = None  # why there is no connection
        self._connected = False
        self._has_answered = False  # the server, at least once
        self._awaited: list[Awaited] = []
        self._released: Json = None  # up to where the server may forget its log
        self._acknowledged: Json = None  # what it was told of that on this connection
        self._is_told = False  # a plan knows of the failure
        self._gaps = 0  # that this thread has passed over
        self._thread = self._make_thread()

    def _make_thread(self) -> threading.Thread:
        return threading.Thread(target=self._run, name=f"firnline log {self._name}", daemon=True)

    # -- for plans ------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def revive(self) -> None:
        """Start the thread again if it ended by a failure that a plan knows of, and that another try may mend."""
        with self._news:
            if not self._is_told or self._failure is None or not self._failure.retryable or self._thread.is_alive():
                return
            self._failure, self._is_told = None, False
        self._drop_open_parts()
        self._thread = self._make_thread()
        self._thread.start()

    def stop(self) -> None:
        """End the thread; it closes the stream."""
        self._stopping.set()
        self._thread.join(LONGEST_PAUSE_SECONDS)

    @property
    def lost(self) -> SourceError | SinkError | None:
        """Why there is no connection; None if there is one."""
        return self._lost

    @property
    def end_place(self) -> Json:
        """The server's place behind the last transaction that is whole in files."""
        with self._news:
            return self._end.place

    @property
    def gaps(self) -> int:
        """How often reading began anew behind a gap. What was read of tables before misses changes."""
        return self._gaps

    def files_after(self, number: int, wait_seconds: float) -> list[SpoolFile]:
        """Return the files behind file `number` that end at cuts or lead to one; waits for the first.

        Raises:
            FirnlineError: why reading ended.
        """
        deadline = monotonic() + wait_seconds
        with self._news:
            self._taken = max(self._taken, number)
            while True:
                found = [file for file in self._files if file.number > number]
                while found and not found[-1].end.is_cut:
                    found.pop()
                if found:
                    return found
                if self._failure is not None:
                    self._is_told = True
                    raise self._failure
                left = deadline - monotonic()
                if left <= 0:
                    return []
                self._wants_file.set()
                self._news.wait(min(left, WAIT_SECONDS))

    def has_all_until(self, end: Json) -> bool:
        """Return whether everything before `end` is in files, or carries nothing for us."""
        with self._news:
            self._until = end
            return self._reached

    def wait_for(self, place: Json) -> Awaited:
        """Wait, in the thread, until everything before `place` is in files, or carries nothing for us."""
        awaited = Awaited(place)
        with self._news:
            self._awaited.append(awaited)
        return awaited

    def forget(self, number: int) -> None:
        """Forget the files up to `number`: they are decided."""
        with self._news:
            self._files = [file for file in self._files if file.number > number]
            self._taken = max(self._taken, number)
            self._news.notify_all()

    def release(self, place: Json) -> None:
        """Tell the server that it may forget its log up to here."""
        self._released = place

    # -- the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        failures = 0
        try:
            while not self._stopping.is_set():
                try:
                    self._read()
                except SourceGapError as error:
                    if not self._consent.is_open:
                        raise
                    self._begin_anew(error)
                except (SourceError, SinkError, OSError) as failure:
                    lost = self._translate(failure)
                    failures = 1 if self._connected else failures + 1
                    self._connected = False
                    if not lost.retryable:
                        raise
                    if not self._has_answered and isinstance(fatal := at_first(lost), ConfigError):
                        raise fatal from failure
                    if self._lost is None:  # the run warns of it
                        logger.info("log lost, connecting again", extra={"source": self._name, "reason": str(lost)})
                    self._lost = lost
                    self._drop_open_parts()
                    pause = min(FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 16), LONGEST_PAUSE_SECONDS)
                    self._stopping.wait(pause * jitter(0.8, 1.2))
        except FirnlineError as error:
            self._fail(error)
        except BaseException as error:  # whatever a client library raises, the plan must hear of it, and starts again
            self._fail(SourceError(f"reading the log of source {self._name!r} failed: {error}"))
            raise
        finally:
            self._stream.close()

    def _begin_anew(self, error: SourceGapError) -> None:
        """Read on where the log begins now: somebody accepts that what lies between is lost.

        One file says so, and names the tables that are read again: a kill leaves both or none.
        """
        logger.warning(
            "log has a gap, reading goes on where it begins now", extra={"source": self._name, "reason": str(error)}
        )
        self._drop_open_parts()
        end = Mark(self._stream.begin_anew())
        self._gaps += 1
        self._write(_Open(b"", self._end), end, b"", rows=0, gap=error.message, reads=self._consent.reads)
        self._consent.close()

    def _translate(self, failure: SourceError | SinkError | OSError) -> SourceError | SinkError:
        """Return a failure of the storage, such as a disk without room, as one that is tried again."""
        if not isinstance(failure, OSError):
            return failure
        return SourceError(
            f"the spool of source {self._name!r} cannot be written: {failure}",
            hint="Make room in the pipeline's home, or let the run write into it; the run goes on by itself.",
        )

    def _fail(self, error: FirnlineError) -> None:
        with self._news:
            self._failure = error
            self._news.notify_all()

    def _drop_open_parts(self) -> None:
        """Forget files of a transaction that has not ended: the server sends it again from its begin."""
        with self._news:
            while self._files and not self._files[-1].end.is_cut:
                self._files.pop()
            if self._end.part:
                self._number -= self._end.part
                self._end = Mark(self._end.place)

    def _read(self) -> None:
        self._check_holder()
        if self._end.place is None:  # the first epoch records where reading begins
            begin = _Open(b"", self._end)
            self._write(begin, Mark(self._stream.begin()), b"", rows=0)
        self._open_stream()
        self._connected = self._has_answered = True
        if self._lost is not None:
            logger.info("log connected again", extra={"source": self._name})
        self._lost = None
        opened = _Open(self._stream.context(at_cut=True), self._end)
        idle_since = monotonic()
        self._acknowledged = None
        while not self._stopping.is_set():
            self._acknowledge()
            if self._is_full():
                self._stream.keep_alive()
                self._stopping.wait(WAIT_SECONDS)
                continue
            try:
                wait = min(WAIT_SECONDS, AWAITED_SECONDS) if self._awaited else WAIT_SECONDS
                wait = 0.0 if self._wants_file.is_set() and opened.cuts else wait
                piece = self._stream.read(PIECE_BYTES, wait)
            except SourceGapError:
                if opened.cuts and self._consent.is_open:
                    self._write_to_cut(opened)
                raise
            opened.add(piece)
            if piece.frames:
                idle_since = monotonic()
            opened = self._write_if_due(opened, got_nothing=not piece.frames)
            if not opened.frames:
                idle_since = self._write_if_idle(opened, idle_since)
            self._note_reached(opened)
            self._end_consent(opened)
            opened = self._note_awaited(opened)
        self._acknowledge()
        self._stream.keep_alive()

    def _open_stream(self) -> None:
        """Open the stream. If it was open before, a gap is one that nobody has accepted."""
        consent = self._consent
        try:
            self._stream.open(self._end.place)
        except SourceGapError:
            if consent.end is not None:
                consent.close()
            raise
        if consent.is_open and consent.end is None:
            consent.end = self._stream.end_position()

    def _end_consent(self, opened: _Open) -> None:
        """Accept no gap any more once all is read that the log had when the run began."""
        consent = self._consent
        if consent.is_open and not opened.frames and self._stream.has_reached(consent.end):
            consent.close()

    def _acknowledge(self) -> None:
        released = self._released
        if released is not None and released is not self._acknowledged:
            self._acknowledged = released
            self._stream.acknowledge(released)

    def _is_full(self) -> bool:
        """Return whether there is no room until a plan takes files; a transaction that has not ended needs room."""
        with self._news:
            ahead = [file for file in self._files if file.number > self._taken]
        is_over = sum(file.size_bytes for file in ahead) > self._settings.max_ahead_bytes
        return is_over and any(file.end.is_cut for file in ahead)

    def _write_if_due(self, opened: _Open, *, got_nothing: bool) -> _Open:
        """Close a file if it is full, or a plan waits and nothing more comes at once."""
        limits = self._settings
        is_full = len(opened.frames) >= limits.file_bytes or opened.rows + opened.open_rows >= limits.file_rows
        is_wanted = self._wants_file.is_set() and (got_nothing or opened.cuts)
        if opened.cuts and (is_full or is_wanted):
            return self._write_to_cut(opened)
        if is_full and len(opened.frames) >= limits.file_bytes:
            return self._write_part(opened)
        return opened

    def _write_to_cut(self, opened: _Open) -> _Open:
        """Write the transactions that have ended; what is behind them begins the next file."""
        last = opened.cuts[-1]
        end = Mark(last.position)
        frames, rest = memoryview(opened.frames)[: last.offset], opened.frames[last.offset :]
        self._write(opened, end, frames, rows=opened.rows)
        return _Open(self._stream.context(at_cut=True), end, rest, open_rows=opened.open_rows)

    def _write_part(self, opened: _Open) -> _Open:
        """Write a part of a transaction that goes on."""
        frames = memoryview(opened.frames)
        end = opened.begin.behind(frames)
        self._write(opened, end, frames, rows=opened.open_rows)
        return _Open(self._stream.context(at_cut=False), end)

    def _write_if_idle(self, opened: _Open, since: float) -> float:
        """Write a file without frames when the place has moved for long; returns since when it is idle."""
        is_due = monotonic() - since >= IDLE_SECONDS or self._stream.idle_bytes() >= IDLE_BYTES
        if not opened.begin.is_cut or not is_due:
            return since
        place = self._stream.idle_position()
        if place is not None and place != opened.begin.place:
            self._write(opened, Mark(place), b"", rows=0)
            opened.begin = Mark(place)
        return monotonic()

    def _write(
        self,
        opened: _Open,
        end: Mark,
        frames: bytes | memoryview,
        *,
        rows: int,
        gap: str = "",
        reads: Sequence[str] = (),
    ) -> None:
        file = write_file(
            self._storage,
            self._folder,
            self._number + 1,
            opened.begin,
            end,
            Content(opened.context, frames),
            rows=rows,
            transactions=len(opened.cuts),
            committed_at=opened.cuts[-1].committed_at if opened.cuts else 0,
            tables=self._tables,
            gap=gap,
            reads=reads,
        )
        with self._news:
            self._files.append(file)
            self._number, self._end = file.number, end
            if end.is_cut:
                self._wants_file.clear()
            self._news.notify_all()

    def _note_reached(self, opened: _Open) -> None:
        if self._until is not None and not self._reached and not opened.frames:
            reached = self._stream.has_reached(self._until)
            with self._news:
                self._reached = reached
                self._news.notify_all()

    def _note_awaited(self, opened: _Open) -> _Open:
        """Tell those who wait for a place that the log was read to."""
        with self._news:
            awaited = list(self._awaited)
        reached = [one for one in awaited if self._stream.has_reached(one.place)]
        if not reached:
            return opened
        if opened.cuts:
            opened = self._write_to_cut(opened)
        with self._news:
            for one in reached:
                one.file = self._number
            self._awaited = [one for one in self._awaited if one.file is None]
            self._news.notify_all()
        return opened
