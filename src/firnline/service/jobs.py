"""Jobs: work that takes longer than a request. It runs in the background, and clients ask how far it is.

Jobs live in memory: they end with the service. What they do to a pipeline is in its audit trail.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from firnline.errors import FirnlineError
from firnline.service.problems import ConflictError, NotFoundError
from firnline.types import Clock, Ids, Json

Status = Literal["waiting", "running", "done", "failed", "cancelled"]
KEPT = 200
WAITING = 20  # jobs that have not begun
LINES = 50  # of progress
LINE_CHARACTERS = 500
POLL_SECONDS = 0.2
CHILD_SECONDS = 3600.0
LEASH_SECONDS = 30.0  # for a command that is killed
LEASH = (sys.executable, "-m", "firnline.service.leash")


@dataclass(slots=True)
class Job:
    """One job. `cancel` asks it to end."""

    id: str
    pipeline: str
    kind: str
    by: str
    created_at: str
    status: Status = "waiting"
    ended_at: str | None = None
    result: dict[str, Json] | None = None
    error: dict[str, Json] | None = None
    progress: deque[str] = field(default_factory=lambda: deque(maxlen=LINES))
    cancelled: threading.Event = field(default_factory=threading.Event)

    def say(self, text: str) -> None:
        """Report progress."""
        self.progress.append(text[:LINE_CHARACTERS])

    def to_json(self) -> dict[str, Json]:
        """Return what a request for the job answers."""
        return {
            "job": self.id,
            "pipeline": self.pipeline,
            "kind": self.kind,
            "by": self.by,
            "created_at": self.created_at,
            "status": self.status,
            "ended_at": self.ended_at,
            "progress": list(self.progress),
            "result": self.result,
            "error": self.error,
        }


Work = Callable[[Job], dict[str, Json]]


class CancelledError(Exception):
    """The job was asked to end, and has."""


class Jobs:
    """The jobs of a service. Those of one kind run one after the other, unless they say otherwise."""

    def __init__(self, clock: Clock, ids: Ids, ended: Callable[[Job], None] = lambda _: None) -> None:
        self._clock = clock
        self._ids = ids
        self._ended = ended  # called before anybody sees that a job has ended
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._turns: dict[str, threading.Lock] = {}

    def start(self, kind: str, pipeline: str, by: str, work: Work, *, turn: str = "") -> Job:
        """Begin a job, or have it wait for those of its kind; with `turn`, for those with the same one.

        Raises:
            ConflictError: the pipeline has such a job under way, or too many jobs wait.
        """
        with self._lock:
            waiting = [job for job in self._jobs.values() if job.status in ("waiting", "running")]
            if any(job.kind == kind and job.pipeline == pipeline for job in waiting):
                raise ConflictError(f"a {kind} of this pipeline is under way", hint="GET .../jobs lists it.")
            if len(waiting) >= WAITING:
                raise ConflictError("too many jobs wait", hint="Try again later.")
            ended = [job.id for job in self._jobs.values() if job not in waiting]
            for old in ended[: max(0, len(ended) - KEPT)]:
                del self._jobs[old]
            job = Job(self._ids.new(), pipeline, kind, by, self._clock.now().isoformat())
            self._jobs[job.id] = job
            lock = self._turns.setdefault(turn or kind, threading.Lock())
        threading.Thread(target=self._run, args=(job, work, lock), name="firnline job", daemon=True).start()
        return job

    def get(self, pipeline: str, job: str) -> Job:
        """Return a job; NotFoundError if the pipeline has no such job."""
        with self._lock:
            found = self._jobs.get(job)
        if found is None or found.pipeline != pipeline:
            raise NotFoundError("the pipeline has no such job", hint="Jobs end with the service; begin it again.")
        return found

    def all(self, pipeline: str) -> list[Job]:
        """Return the jobs of a pipeline, newest first."""
        with self._lock:
            return [job for job in reversed(self._jobs.values()) if job.pipeline == pipeline]

    def close(self) -> None:
        """Ask every job to end."""
        with self._lock:
            for job in self._jobs.values():
                job.cancelled.set()

    def _run(self, job: Job, work: Work, turn: threading.Lock) -> None:
        with turn:
            try:
                if job.cancelled.is_set():
                    raise CancelledError
                job.status = "running"
                job.result = work(job)
                status: Status = "done"
            except (CancelledError, KeyboardInterrupt):
                status = "cancelled"
            except FirnlineError as error:
                job.error = {"code": error.code, "detail": error.message, "hint": error.hint}
                status = "failed"
            except Exception as error:  # a bug, or storage that fails
                job.error = {"code": "internal", "detail": f"it failed with {type(error).__name__}", "hint": None}
                status = "failed"
            self._ended(job)
            job.status = status
            job.ended_at = self._clock.now().isoformat()


class ChildFailedError(FirnlineError):
    """A command that a job ran has failed."""

    code = "command-failed"


@contextlib.contextmanager
def holding(path: Path, job: Job) -> Iterator[int]:
    """Hold the lock of a file, which a process that is handed the yielded descriptor holds, too, until it ends.

    A process that a killed service left behind still holds it: it is waited for.

    Raises:
        CancelledError: the job was asked to end meanwhile.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        is_first = True
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if is_first:
                    job.say("waits for the end of a process that a service which was killed had begun")
                is_first = False
                if job.cancelled.wait(POLL_SECONDS):
                    raise CancelledError from None
        yield descriptor
    finally:
        os.close(descriptor)


def run_command(
    job: Job,
    command: Sequence[str],
    cwd: Path,
    environ: Mapping[str, str],
    clock: Clock,
    lock: int | None = None,
    *,
    seconds: float = CHILD_SECONDS,
) -> dict[str, Json]:
    """Run a command that prints one JSON value, in a process of its own; its other lines are the progress.

    Args:
        lock: A descriptor that the process keeps open until it ends; see `holding`.
        seconds: How long it may take.

    Raises:
        ChildFailedError: it failed; the message is its own.
        CancelledError: the job was asked to end; the process was ended.
    """
    deadline = clock.monotonic() + seconds
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as report:
        child = subprocess.Popen(
            LEASH,
            cwd=cwd,
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=report,
            start_new_session=True,
            pass_fds=() if lock is None else (lock,),
        )
        read = 0
        try:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # its own message says why it has ended
                child.stdin.write(json.dumps({"command": list(command), "lock": lock}).encode() + b"\n")
                child.stdin.flush()  # and stays open for as long as this process lives
            while child.poll() is None:
                read = _take_lines(report.fileno(), read, job)
                if job.cancelled.wait(POLL_SECONDS):
                    raise CancelledError
                if clock.monotonic() > deadline:
                    raise ChildFailedError(f"it has not ended after {seconds:.0f} s, and was ended")
        finally:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()  # the leash ends the command, and then itself
            try:
                child.wait(LEASH_SECONDS)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        _take_lines(report.fileno(), read, job)
        output.seek(0)
        text = output.read()
        if child.returncode != 0:
            errors = [line for line in job.progress if line.startswith("Error: ")]
            hints = [line for line in job.progress if line.startswith("Try: ")]
            message = errors[-1].removeprefix("Error: ") if errors else f"it ended with exit code {child.returncode}"
            raise ChildFailedError(message, hint=hints[-1].removeprefix("Try: ") if hints else None)
    found: dict[str, Json] = json.loads(text)
    return found


def _take_lines(descriptor: int, read: int, job: Job) -> int:
    """Report the whole lines of a file after the bytes that were read; returns how many were."""
    text = os.pread(descriptor, 1 << 20, read)
    whole = text[: text.rfind(b"\n") + 1]
    for line in whole.decode("utf-8", "replace").splitlines():
        if line.strip():
            job.say(line.rstrip())
    return read + len(whole)
