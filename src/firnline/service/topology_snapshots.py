"""Snapshots of topologies that the service takes: on request, and at the interval that a topology file sets (`every`).

Each is the command `firnline topology snapshot` in a process of its own, so that it does all that the file says.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from firnline.errors import FirnlineError
from firnline.service.jobs import Job, Jobs, run_command
from firnline.service.problems import ConflictError
from firnline.service.supervise.supervisor import Supervisor
from firnline.service.topologies import KnownTopology, load_known
from firnline.types import Clock, Json

logger = logging.getLogger(__name__)

KIND = "topology-snapshot"
EVERY = "every"  # who takes the snapshots of an interval
LOOK_SECONDS = 5.0  # between two looks at what is due
LONGEST_SECONDS = 25 * 3600.0  # of a command; its own time limit is shorter


def job_key(topology: str) -> str:
    """Return the name under which jobs of a topology are kept; no pipeline has it."""
    return f"topology {topology}"


def begin_snapshot(
    jobs: Jobs, supervisor: Supervisor, clock: Clock, known: KnownTopology, by: str, flags: Sequence[str] = ()
) -> Job:
    """Begin a snapshot. The result is that of `firnline topology snapshot --json`.

    Raises:
        ConflictError: the topology cannot be used or has no file, or one of its snapshots is being taken here.
    """
    known.open(clock)
    path = known.path
    assert path is not None
    command = (sys.executable, "-m", "firnline", "topology", "snapshot", str(path), "--once", "--json", *flags)

    def work(job: Job) -> dict[str, Json]:
        return run_command(job, command, path.parent, supervisor.environ, clock, seconds=LONGEST_SECONDS)

    key = job_key(known.name)
    return jobs.start(KIND, key, by, work, turn=key)  # one that waits for its members holds up no other topology


class PeriodicSnapshots:
    """Takes the snapshots that topology files want at an interval, on a thread of its own, until `close`.

    One is due when the newest order in the topology's home is older than the interval, whoever gave it: a command
    that takes snapshots at the same time, or a second service, makes no more of them.
    """

    def __init__(self, jobs: Jobs, supervisor: Supervisor, clock: Clock) -> None:
        self._jobs = jobs
        self._supervisor = supervisor
        self._clock = clock
        self._closed = threading.Event()
        self._begun: dict[str, float] = {}
        self._problems: dict[str, str] = {}
        self._without: dict[Path, int] = {}  # files that set no interval, with the time of their last change

    def start(self) -> None:
        """Begin to look at what is due."""
        threading.Thread(target=self._run, name="firnline snapshots", daemon=True).start()

    def close(self) -> None:
        """Begin no more snapshots."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            self.begin_due()

    def begin_due(self) -> list[Job]:
        """Begin the snapshots that are due now."""
        begun = []
        for known in self._find_periodic():
            try:
                if self._is_due(known):
                    begun.append(begin_snapshot(self._jobs, self._supervisor, self._clock, known, EVERY))
                    self._begun[known.name] = self._clock.monotonic()
                self._problems.pop(known.name, None)
            except ConflictError:
                continue  # one is being taken
            except (FirnlineError, OSError) as error:
                if self._problems.get(known.name) != str(error):
                    logger.warning("no snapshot of topology %s: %s", known.name, error)
                self._problems[known.name] = str(error)
        return begun

    def _find_periodic(self) -> Iterator[KnownTopology]:
        """Yield the topologies whose files set an interval; a file that sets none is loaded again when it changes."""
        for path in self._supervisor.topology_files():
            try:
                changed = path.stat().st_mtime_ns
            except OSError:
                continue
            if self._without.get(path) == changed:
                continue
            known = load_known(path, self._supervisor.environ)
            if known.every is not None:
                yield known
            elif known.problem is None:
                self._without[path] = changed

    def _is_due(self, known: KnownTopology) -> bool:
        assert known.every is not None
        begun = self._begun.get(known.name)  # one that failed before its order is not repeated at once
        if begun is not None and self._clock.monotonic() - begun < known.every.total_seconds():
            return False
        listed = known.open(self._clock).home.list_snapshots()
        newest: datetime | None = listed[-1].ordered_at if listed else None
        return newest is None or abs(self._clock.now() - newest) >= known.every  # a clock may have gone back since
