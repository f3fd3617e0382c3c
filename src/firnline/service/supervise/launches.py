"""Launches: the records of runs that services started. They lie in the home, and outlive the service.

A launch is named by the wish that it obeys and by which try it is, so that of two services one alone begins it. Its
files, each written once by whoever comes first, are steps that cannot be taken back:

1. `begun`: a service is about to start it.
2. `process`: its launcher has the run ready and lets it go; or a service gave it up, and the launcher lets it be.
3. `exit`: the run has ended, and how; or a service found that nobody is left who could say.

`beat` is replaced at intervals while the launcher lives: who cannot see its process can see that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TypeAlias

from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.errors import DamagedError, NewerFormatError
from firnline.names import launch_id, launch_log, launch_name, launch_numbers, launch_parts, launches_folder
from firnline.process import Process
from firnline.storage import Storage
from firnline.types import Json

Known: TypeAlias = dict[str, dict[str, Json]]
KEPT_LAUNCHES = 20
_STEPS = ("begun", "process", "exit")
_DAMAGED = "damaged_at"  # of a part that is there, and cannot be read: when it was written


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: when and by whom it was begun, its processes, and how it ended."""

    id: str
    begun_at: str
    by: str
    launcher: Process | None = None  # ends after the run
    run: Process | None = None
    given_up: bool = False  # a service did not wait for its launcher any longer: it starts no run
    is_damaged: bool = False  # what its launcher recorded cannot be read: its processes are not known
    ended_at: str | None = None
    code: int | None = None  # negative: a signal; None: nobody saw the end
    charged: int = 0  # the number of the wish that the end belongs to
    is_alive: bool = False  # by the signs of life that the reader has found

    @property
    def wish(self) -> int:
        """The number of the wish that it obeys."""
        return launch_numbers(self.id)[0]

    @property
    def is_over(self) -> bool:
        """Whether it is recorded that no run of it is alive."""
        return self.ended_at is not None or self.given_up

    def to_json(self) -> dict[str, Json]:
        return {
            "launch": self.id,
            "begun_at": self.begun_at,
            "by": self.by,
            "pid": self.run.pid if self.run else None,
            "ended_at": self.ended_at,
            "exit_code": self.code,
        }


class Launches:
    """The launches of one pipeline, below `_firnline/<pipeline>/launches/` of its home.

    Args:
        known: The parts that were read before, by file name: each is written once, and is not read again. Whoever
            looks often hands the same mapping each time.
        logs: The folder of this machine below which the output lies; by default the home.
    """

    def __init__(self, storage: Storage, pipeline: str, known: Known | None = None, logs: str | None = None) -> None:
        self._storage = storage
        self._folder = launches_folder(pipeline)
        self._known: Known = {} if known is None else known
        self._logs = logs or storage.root

    @property
    def folder(self) -> str:
        """The folder of the output of launches."""
        return f"{self._logs}/{self._folder}"

    def log_path(self, launch: str) -> str:
        """Return the path of the output of a launch."""
        return f"{self.folder}/{launch_log(launch)}"

    def put(self, launch: str, part: str, body: dict[str, Json]) -> None:
        """Write one part of a record, durable on return; FileExistsError if it exists."""
        self._storage.put_new(f"{self._folder}/{launch_name(launch, part)}", canonical(seal(body)))

    def put_process(self, launch: str, launcher: Process, run: Process) -> None:
        """Record the processes of a launch; FileExistsError if it was given up."""
        self.put(launch, "process", {"launcher": asdict(launcher), "run": asdict(run)})

    def beat(self, launch: str, count: int) -> None:
        """Show that the launcher lives."""
        self._storage.put(f"{self._folder}/{launch_name(launch, 'beat')}", canonical(seal({"count": count})))

    def find_beat(self, launch: str) -> int | None:
        """Return the newest sign of life of a launcher; None if there is none."""
        body = self._read(launch_name(launch, "beat"))
        return int(body["count"]) if body is not None else None

    def load(self) -> list[Launch]:
        """Return the launches, oldest first. An `exit` that cannot be read says that the run has ended, at its time."""
        parts: dict[str, dict[str, dict[str, Json]]] = {}
        names = set()
        for stat in self._storage.list(self._folder):
            named = launch_parts(stat.name)
            if named is None or named[1] not in _STEPS:
                continue
            launch, part = named
            name = launch_name(launch, part)
            names.add(name)
            of_launch = parts.setdefault(launch, {})
            body = self._known.get(name) or self._read(name)
            if body is not None:
                of_launch[part] = self._known[name] = body
            else:
                of_launch[part] = {_DAMAGED: stat.modified_at.isoformat()}
        for gone in self._known.keys() - names:
            self._known.pop(gone, None)
        return [_launch(launch, parts[launch]) for launch in sorted(parts)]

    def _read(self, name: str) -> dict[str, Json] | None:
        try:
            return unseal(parse(self._storage.get(f"{self._folder}/{name}"), name), name)
        except (DamagedError, NewerFormatError, FileNotFoundError):
            return None

    def prune(self) -> None:
        """Delete the records and the output of all but the newest launches; one that is not over stays."""
        for launch in self.load()[:-KEPT_LAUNCHES]:
            if launch.is_over:
                for name in self._names(launch.id):
                    self._storage.delete(f"{self._folder}/{name}")

    def _names(self, launch: str) -> Iterator[str]:
        yield launch_log(launch)
        for part in ("beat", "process", "exit", "begun"):
            yield launch_name(launch, part)


def next_launch(wish: int, launches: list[Launch]) -> str:
    """Return the id of the next try for a wish, after the launches that are known."""
    tries = [launch_numbers(launch.id)[1] for launch in launches if launch.wish == wish]
    return launch_id(wish, max(tries, default=0) + 1)


def _launch(launch: str, parts: dict[str, dict[str, Json]]) -> Launch:
    begun, process, ended = (parts.get(part, {}) for part in _STEPS)
    return Launch(
        id=launch,
        begun_at=str(begun.get("at", "")),
        by=str(begun.get("by", "")),
        launcher=_process(process["launcher"]) if "launcher" in process else None,
        run=_process(process["run"]) if "run" in process else None,
        given_up="given_up_at" in process,
        is_damaged=_DAMAGED in process,
        ended_at=next(
            (str(at) for at in (ended.get("at"), ended.get(_DAMAGED), process.get("given_up_at")) if at), None
        ),
        code=ended.get("code") if ended else None,
        charged=int(ended.get("wish", launch_numbers(launch)[0])) if ended else launch_numbers(launch)[0],
    )


def _process(value: Json) -> Process:
    return Process(str(value["user"]), str(value["host"]), int(value["pid"]), str(value["start"]))
