"""The supervisor: looks at every registered pipeline at intervals, and starts the runs that are wanted.

It holds no truth. What is wanted and how runs ended lies in the homes; a supervisor that is killed and started again
reads it there and decides the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from firnline.errors import ControlError, FirnlineError, NotRunningError
from firnline.options import PipelineOptions
from firnline.run.control import ask
from firnline.run.status import load_runs
from firnline.run.wanted import Wanted, Wish, Wishes
from firnline.service.glance import Glance, open_launches, take_glance
from firnline.service.rates import Sample, add_sample
from firnline.service.registry import Registered, Registry
from firnline.service.supervise.launches import Known, Launch, Launches, next_launch
from firnline.service.supervise.lives import Lives
from firnline.service.supervise.policy import (
    END_SECONDS,
    MUTE_SECONDS,
    Decision,
    Ended,
    NeedsPerson,
    Nothing,
    Now,
    Start,
    Wait,
    decide,
)
from firnline.storage import Storage, make_folders, open_storage
from firnline.types import Clock, Ids, Json

logger = logging.getLogger(__name__)

READERS = 2  # pipelines that are looked at together
LOOK_SECONDS = 2.0  # between two looks at a pipeline
STAGGER_SECONDS = 3.0  # between two starts: each is a JVM
FILES_SECONDS = 5.0  # between two looks at the pipeline files
NOTHING = Nothing()
LOOKED_AT = 20  # records of runs, for the one of a launch whose end nobody saw
HANGS_SECONDS = 30.0  # a look that takes longer is shown as such, and is not repeated until it returns
MOST_HUNG = 32  # looks that hang at once; beyond that, pipelines wait for one of them to return
STARTED_BY = "serve --start"  # who wants a pipeline to run that nobody decided about


@dataclass(frozen=True, slots=True)
class Settings:
    """How the service supervises.

    Attributes:
        state: The service's own folder, for what no home on this disk can hold.
        max_running: How many runs it starts at most; None means no limit.
        only_watches: Start and restart nothing.
        starts_new: Want pipelines to run that nobody has decided about yet.
        run_command: Starts a run; the path of the pipeline file is added.
        hangs_seconds: How long a look may take before the pipeline counts as unreadable.
    """

    state: str
    max_running: int | None = None
    only_watches: bool = False
    starts_new: bool = False
    run_command: tuple[str, ...] = (sys.executable, "-m", "firnline", "run", "--supervised", "--spec")
    look_seconds: float = LOOK_SECONDS
    stagger_seconds: float = STAGGER_SECONDS
    hangs_seconds: float = HANGS_SECONDS


@dataclass(frozen=True, slots=True)
class Seen:
    """The newest glance at a pipeline, and what the supervisor decided. `hangs`: its home does not answer."""

    registered: Registered
    glance: Glance | None = None
    decision: Decision = NOTHING
    hangs: bool = False
    problem: str | None = None  # why the last look failed; the glance is older
    samples: tuple[Sample, ...] = ()  # of the last minutes

    @property
    def needs_person(self) -> str | None:
        """Why a person must look at it; None if nobody must."""
        if self.registered.problem is not None:
            return self.registered.problem
        if self.problem is not None:
            return self.problem
        if isinstance(self.decision, NeedsPerson):
            return self.decision.reason
        if self.glance is not None and self.glance.state == "unreadable":
            return self.glance.problem
        return None

    @property
    def explained(self) -> str | None:
        """`needs_person`, with the reason that the run itself recorded.

        That may repeat values of records. Show it beside `last_error`, for which the disclosure withholds them.
        """
        launches = self.glance.launches if self.glance is not None else []
        record = (self.glance.run if self.glance is not None else None) or {}
        if not isinstance(self.decision, NeedsPerson) or not launches or launches[-1].is_alive:
            return self.needs_person
        if not _is_record_of(record, launches[-1]) or not record.get("error"):
            return self.needs_person
        return f"{self.needs_person}: {record['error']['message']}"


class HomeHangsError(ControlError):
    """The home of a pipeline does not answer."""

    code = "home-hangs"


class Supervisor:
    """Supervises the pipelines of a registry on threads of its own, from `with` to its end.

    The end of the supervisor ends no run.
    """

    def __init__(
        self,
        registry: Registry,
        settings: Settings,
        clock: Clock,
        ids: Ids,
        environ: Mapping[str, str],
        notify: Callable[[Seen], None] = lambda _: None,
    ) -> None:
        self._registry = registry
        self._settings = settings
        self._clock = clock
        self._ids = ids
        self._environ = environ
        self._notify = notify
        self._recover: Callable[[str], None] = lambda _: None
        self._lock = threading.Lock()
        self._seen: dict[str, Seen] = {}
        self._looking: dict[str, float] = {}  # looks that have not returned: since when
        self._hung: set[str] = set()  # those of them that hang
        self._due: dict[str, float] = {}
        self._known: dict[tuple[str, str], Known] = {}  # by home: records of launches, which never change
        self._lives: dict[tuple[str, str], Lives] = {}  # by home: what was seen of their lives
        # launchers until they are reaped, by pipeline and launch
        self._started: dict[tuple[str, str], subprocess.Popen[bytes]] = {}
        self._starting: set[tuple[str, str]] = set()  # launches that are being started
        self._start_after = 0.0
        self._files_after = 0.0
        self._wake = threading.Event()
        self._closing = False
        self._queue: queue.SimpleQueue[Registered | None] = queue.SimpleQueue()
        self._threads = 0
        self._thread = threading.Thread(target=self._supervise, name="firnline supervisor", daemon=True)

    def __enter__(self) -> Supervisor:
        self._registry.refresh()
        self._add_workers()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join()
        self._queue.put(None)  # each thread passes it on

    # -- what others ask ------------------------------------------------------------------------------

    def all(self) -> list[Seen]:
        """Return what was last seen of every pipeline, by name. Reads nothing."""
        with self._lock:
            return [self._seen.get(one.name, Seen(one)) for one in self._registry.all()]

    def get(self, name: str) -> Seen:
        """Return what was last seen of one pipeline; UnknownPipelineError if there is none."""
        registered = self._registry.get(name)
        with self._lock:
            return self._seen.get(name, Seen(registered))

    @property
    def is_ready(self) -> bool:
        """Whether every pipeline was looked at once; one whose home does not answer counts."""
        return all(seen.glance is not None for seen in self.all())

    def usable(self, name: str) -> PipelineOptions:
        """Return the options of a pipeline for a request that reads or writes its home.

        Raises:
            ConfigError: there is no such pipeline, or its file cannot be used.
            HomeHangsError: its home does not answer; another thread that waits for it would help nobody.
        """
        seen = self.get(name)
        if seen.hangs:
            assert seen.glance is not None
            raise HomeHangsError(f"pipeline {name!r}: {seen.glance.problem}", hint="Make its storage reachable.")
        return seen.registered.usable

    def _reachable(self, name: str) -> PipelineOptions:
        """Return the options like `usable`, also those of a live run whose file cannot be used any more."""
        last = self.get(name).registered.last
        return last if last is not None else self.usable(name)

    def wish(self, name: str, wanted: Wanted, by: str, after: int | None = None) -> Wish | None:
        """Make a pipeline run, pause or stop: records the wish, durable on return, and passes it on to a live run.

        A run that no service started obeys, too. Unless somebody decided about the pipeline before, or stops it now,
        nothing is recorded for it: it is not restarted.

        Args:
            after: The number of the newest wish; if there is a later one by now, nothing is done.
        """
        options = self._reachable(name)
        wishes = self._wishes(options)
        command = {"running": "resume", "paused": "pause", "stopped": "stop"}[wanted]
        try:
            answer = ask(options, {"command": "status"}, self._environ)
            is_found = not self._is_launched(options, int(answer["pid"]))
            if is_found and wanted != "stopped" and not wishes.has_any:
                ask(options, {"command": command}, self._environ)
                return None
        except NotRunningError:
            pass
        except ControlError as error:  # a supervised run reads the wish by itself
            logger.warning("the run did not answer", extra={"pipeline": name, "reason": error.message})
        wish = wishes.put(wanted, by, after)
        if after is not None and wish.number != after + 1:  # somebody came first
            return wish
        with contextlib.suppress(ControlError):
            ask(options, {"command": command, "wish": wish.number}, self._environ)
        self.look_soon(name)
        return wish

    def stop_unrecorded(self, name: str) -> None:
        """Ask a live run to stop, though nothing can be recorded; ControlError if none answers. The next look may start
        another."""
        ask(self._reachable(name), {"command": "stop"}, self._environ)
        self.look_soon(name)

    def topology_files(self) -> list[Path]:
        """Return the topology files beside the pipeline files."""
        return self._registry.topology_files()

    @property
    def environ(self) -> Mapping[str, str]:
        """The environment of the service and of the runs that it starts."""
        return self._environ

    def subscribe(self, notify: Callable[[Seen], None], recover: Callable[[str], None] = lambda _: None) -> None:
        """Call others from any thread.

        Args:
            notify: Called when something worth an event changed of a pipeline.
            recover: Called with the name of a pipeline whose home can be read, before anything is decided about it.
        """
        self._notify = notify
        self._recover = recover

    @property
    def only_watches(self) -> bool:
        """Whether it starts and restarts nothing."""
        return self._settings.only_watches

    @property
    def state(self) -> str:
        """The service's own folder."""
        return self._settings.state

    def load_wish(self, name: str) -> Wish | None:
        """Read what is wanted of a pipeline now."""
        return self._wishes(self._reachable(name)).load()

    def load_wishes(self, name: str) -> list[Wish]:
        """Read what was wanted of a pipeline, newest first, as far as it is kept."""
        return self._wishes(self._reachable(name)).load_later(0)[::-1]

    def is_launched(self, name: str) -> bool:
        """Whether a run that a service started may be alive."""
        return any(one.is_alive for one in self._judge(self._reachable(name)))

    def _is_launched(self, options: PipelineOptions, pid: int) -> bool:
        """Whether a live run of this machine was started by a service."""
        return any(one.is_alive and one.run and one.run.pid == pid for one in self._judge(options))

    def _judge(self, options: PipelineOptions) -> list[Launch]:
        return self._lives_of(_home(options)).judge(self._launches(options), None)[0]

    def _lives_of(self, home: tuple[str, str]) -> Lives:
        with self._lock:
            return self._lives.setdefault(home, Lives(self._clock))

    def look_soon(self, name: str) -> None:
        """Look at a pipeline without waiting for its turn."""
        with self._lock:
            self._due[name] = 0.0
        self._wake.set()

    def log_path(self, name: str, launch: str) -> str | None:
        """Return the path of the output of a launch; None if there is no such launch."""
        launches = self._launches(self._reachable(name))
        return launches.log_path(launch) if any(one.id == launch for one in launches.load()) else None

    # -- the loop -------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        while not self._closing:
            self._wake.wait(min(1.0, self._settings.look_seconds / 2))
            self._wake.clear()
            try:
                self._refresh()
                self._reap()
                self._find_hung()
                self._submit()
            except Exception:  # a bug of ours must not end the supervision
                logger.exception("supervision failed; it is tried again")

    def _refresh(self) -> None:
        now = self._clock.monotonic()
        if now < self._files_after:
            return
        self._files_after = now + FILES_SECONDS
        try:
            self._registry.refresh(self._is_kept)
        except (OSError, FirnlineError) as error:
            logger.warning("the pipeline files cannot be listed", extra={"reason": str(error)})
        names = {one.name for one in self._registry.all()}
        with self._lock:
            self._seen = {name: seen for name, seen in self._seen.items() if name in names}
            homes = {_home(one.reachable) for one in self._registry.all() if one.reachable is not None}
            for gone in self._known.keys() - homes:
                self._known.pop(gone, None)
            for gone in self._lives.keys() - homes:
                self._lives.pop(gone, None)

    def _is_kept(self, name: str) -> bool:
        """Whether a run may be alive, by the last look."""
        with self._lock:
            seen = self._seen.get(name)
        return seen is not None and seen.glance is not None and seen.glance.is_alive

    def _reap(self) -> None:
        with self._lock:
            ended = [key for key, process in self._started.items() if process.poll() is not None]
            for name, launch in ended:
                del self._started[name, launch]
                for (pipeline, _), lives in self._lives.items():
                    if pipeline == name:
                        lives.reaped(launch)

    def _add_workers(self) -> None:
        """Have as many threads that look as may look together, besides those that hang."""
        while self._threads < READERS + min(len(self._hung), MOST_HUNG):
            self._threads += 1
            threading.Thread(target=self._work, name="firnline look", daemon=True).start()

    def _find_hung(self) -> None:
        """Show looks that take too long as what they are, and let others look instead of them."""
        now = self._clock.monotonic()
        with self._lock:
            hung = [
                name
                for name, since in self._looking.items()
                if name not in self._hung and now - since > self._settings.hangs_seconds
            ]
            self._hung.update(hung)
            self._add_workers()
        for registered in self._registry.all():
            if registered.name in hung:
                problem = f"its home has not answered for {self._settings.hangs_seconds:.0f} s"
                glance = Glance(registered.name, self._clock.now().isoformat(), "unreadable", problem=problem)
                logger.warning("a look hangs", extra={"pipeline": registered.name})
                self._show(Seen(registered, glance, hangs=True))

    def _submit(self) -> None:
        now = self._clock.monotonic()
        for registered in self._registry.all():
            name = registered.name
            with self._lock:
                if name in self._looking or self._due.get(name, 0.0) > now:
                    continue
                if len(self._looking) >= self._threads:
                    return
                self._looking[name] = now
                self._due[name] = now + self._settings.look_seconds
            self._queue.put(registered)

    def _work(self) -> None:
        while True:
            registered = self._queue.get()
            if registered is None:
                self._queue.put(None)
                return
            self._look(registered)
            with self._lock:
                if self._threads > READERS + min(len(self._hung), MOST_HUNG):
                    self._threads -= 1
                    return

    def _look(self, registered: Registered) -> None:
        try:
            glance = self._glance(registered)
            with self._lock:
                is_late = registered.name in self._hung
                if is_late:
                    self._due[registered.name] = 0.0
            if is_late:  # what it read may be old: look again before anything is started
                return
            self._show(self._act(registered, glance))
        except Exception as error:
            logger.exception("a look failed; it is tried again", extra={"pipeline": registered.name})
            self._show_failure(registered, error)
        finally:
            with self._lock:
                self._looking.pop(registered.name, None)
                self._hung.discard(registered.name)
            self._wake.set()

    def _glance(self, registered: Registered) -> Glance:
        options = registered.reachable
        if options is None:
            return take_glance(registered, self._settings.state, self._clock, self._environ)
        home = _home(options)
        known = self._known.setdefault(home, {})  # a pipeline is looked at by one thread at a time
        return take_glance(registered, self._settings.state, self._clock, self._environ, known, self._lives_of(home))

    def _act(self, registered: Registered, glance: Glance) -> Seen:
        """Do what follows from a glance; returns what is shown."""
        if glance.state not in ("invalid", "unreadable"):
            self._try_recover(registered.name)
        if not self._settings.only_watches and self._settle(registered, glance):
            glance = self._glance(registered)
        if self._settings.starts_new:
            glance = self._want_new(registered, glance)
        seen = Seen(registered, glance, self._decide(registered, glance))
        if not isinstance(seen.decision, Start):
            return seen
        try:
            return replace(seen, decision=self._start(registered, glance))
        except (OSError, FirnlineError) as error:
            reason = error.message if isinstance(error, FirnlineError) else error.strerror or str(error)
            logger.warning("a run cannot be started", extra={"pipeline": registered.name, "reason": reason})
            return replace(seen, decision=NeedsPerson(f"a run cannot be started: {reason}"))

    def _settle(self, registered: Registered, glance: Glance) -> bool:
        """Record what nobody else can record: launches that are given up, and ends that nobody saw."""
        settled = False
        for launch in glance.launches:
            life, options = glance.lives.get(launch.id), registered.reachable
            if options is None or life not in ("lost", "gone"):
                continue
            settled, launches, now = True, self._launches(options), self._clock.now().isoformat()
            with contextlib.suppress(FileExistsError):  # somebody else was faster, and knows better
                if life == "lost" and not launch.is_damaged:
                    launches.put(launch.id, "process", {"given_up_at": now})
                else:
                    code = find_code(self._storage(options), options.name, launch)
                    launches.put(launch.id, "exit", {"at": now, "code": code, "wish": launch.wish})
            logger.warning("a launch is over", extra={"pipeline": registered.name, "launch": launch.id, "life": life})
        return settled

    def _show_failure(self, registered: Registered, error: Exception) -> None:
        """Show that a look failed, beside what the last one found."""
        reason = error.message if isinstance(error, FirnlineError) else f"{type(error).__name__}: {error}"
        with self._lock:
            before = self._seen.get(registered.name)
        glance = before.glance if before is not None else None
        if glance is None:
            glance = Glance(registered.name, self._clock.now().isoformat(), "unreadable", problem=reason)
        self._show(Seen(registered, glance, problem=f"looking at it failed: {reason}"))

    def _try_recover(self, name: str) -> None:
        try:
            self._recover(name)
        except (OSError, FirnlineError) as error:
            logger.warning("what a kill left cannot be ended yet", extra={"pipeline": name, "reason": str(error)})

    def _show(self, seen: Seen) -> None:
        with self._lock:
            before = self._seen.get(seen.registered.name)
            samples = before.samples if before else ()
            seen = replace(seen, samples=add_sample(samples, seen.glance) if seen.glance else samples)
            self._seen[seen.registered.name] = seen
        if before is None or _words(before) != _words(seen):
            self._notify(seen)

    def _want_new(self, registered: Registered, glance: Glance) -> Glance:
        """Want a pipeline to run that nobody has decided about, and that nobody runs."""
        if glance.wish is not None or glance.state in ("invalid", "unreadable") or glance.control is not None:
            return glance
        if self._settings.only_watches or registered.options is None:
            return glance
        return replace(glance, wish=self._wishes(registered.options).put("running", STARTED_BY, after=0))

    def _decide(self, registered: Registered, glance: Glance) -> Decision:
        if glance.state == "unreadable":
            return Nothing()
        ended = [launch for launch in glance.launches if not launch.is_alive]
        wish, now = glance.wish, self._clock.now().timestamp()
        since_end, jitter = 0.0, 0.0
        if ended and ended[-1].ended_at is not None:
            seen = (
                self._lives_of(_home(registered.reachable)).watch("_end", ended[-1].id) if registered.reachable else 0.0
            )
            since_end = max(now - datetime.fromisoformat(ended[-1].ended_at).timestamp(), seen)  # a clock may be set
            jitter = _jitter(f"{registered.name} {ended[-1].id}")
        decision = decide(
            wish.wanted if wish else None,
            wish.number if wish else 0,
            glance.is_alive,
            [_ended(launch) for launch in ended],
            Now(now, since_end, jitter),
            self._find_trouble(registered, glance),
        )
        may_start = not self._settings.only_watches and registered.options is not None
        return decision if may_start or (glance.is_alive and isinstance(decision, NeedsPerson)) else Nothing()

    def _find_trouble(self, registered: Registered, glance: Glance) -> str | None:
        """Say what is wrong with the run that is alive."""
        if glance.mute_seconds >= MUTE_SECONDS:
            return f"the run has not answered for {MUTE_SECONDS:.0f} s"
        ending = sorted(launch for launch, life in glance.lives.items() if life == "ending")
        if registered.reachable is None or not ending:
            return None
        if self._lives_of(_home(registered.reachable)).watch("_ending", ending) < END_SECONDS:
            return None
        return "the run has ended, and its launcher cannot record how: its log says why"

    # -- starts ---------------------------------------------------------------------------------------

    def _start(self, registered: Registered, glance: Glance) -> Decision:
        """Start a run, or wait for its turn."""
        now = self._clock.monotonic()
        with self._lock:
            most = self._settings.max_running
            is_ready = all(one.name in self._seen or one.name == registered.name for one in self._registry.all())
            if most is not None and not is_ready:  # a run that nobody has looked at yet may be alive
                return Wait(self._clock.now().timestamp() + self._settings.look_seconds, "runs are being counted")
            if most is not None and self._count_running() >= most:
                return Wait(self._clock.now().timestamp() + self._settings.look_seconds, f"{most} runs are running")
            if now < self._start_after:
                return Wait(self._clock.now().timestamp() + self._start_after - now, "another run is starting")
            self._start_after = now + self._settings.stagger_seconds
            assert glance.wish is not None
            launch = next_launch(glance.wish.number, glance.launches)
            key = (registered.name, launch)
            self._starting.add(key)
        assert registered.options is not None
        try:
            launches = self._launches(registered.options)
            launches.put(launch, "begun", {"at": self._clock.now().isoformat(), "by": glance.wish.by})
            launches.prune()
            process = self._launch(registered, launches, launch)
            with self._lock:
                self._started[key] = process
        except FileExistsError:  # the same try for the same wish
            until = self._clock.now().timestamp() + self._settings.look_seconds
            return Wait(until, "another service is starting it")
        finally:
            with self._lock:
                self._starting.discard(key)
        logger.info("run started", extra={"pipeline": registered.name, "launch": launch})
        return Nothing()

    def _count_running(self) -> int:
        """Count the launches that were alive when they were last looked at, and those that no glance has seen yet."""
        seen = {
            (name, launch.id): launch.is_alive
            for name, one in self._seen.items()
            if one.glance is not None
            for launch in one.glance.launches
        }
        unseen = (self._started.keys() | self._starting) - seen.keys()
        return sum(seen.values()) + len(unseen)

    def _launch(self, registered: Registered, launches: Launches, launch: str) -> subprocess.Popen[bytes]:
        """Start the launcher of a run, in a session of its own, with its output in a file."""
        assert registered.options is not None
        root = registered.options.home.root
        launcher = [sys.executable, "-m", "firnline.service.supervise.launcher", root, registered.name, launch]
        command = [*launcher, *self._settings.run_command, str(registered.path)]
        make_folders(launches.folder)
        output = os.open(launches.log_path(launch), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            return subprocess.Popen(
                command,
                cwd=registered.path.parent,
                env=dict(self._environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        finally:
            os.close(output)

    def _wishes(self, options: PipelineOptions) -> Wishes:
        return Wishes(self._storage(options), options.name, self._clock)

    def _storage(self, options: PipelineOptions) -> Storage:
        return open_storage(options.home.root, options.home.storage_options)

    def _launches(self, options: PipelineOptions) -> Launches:
        return open_launches(options, self._settings.state)


def find_code(storage: Storage, pipeline: str, launch: Launch) -> int | None:
    """Return the exit code of a run from its own record in the history; None if it left none."""
    for record in load_runs(storage, pipeline, LOOKED_AT):
        if _is_record_of(record, launch):
            code = record.get("exit_code")
            return int(code) if code is not None else None
    return None


def _is_record_of(record: Mapping[str, Json], launch: Launch) -> bool:
    """Whether a run's own record is that of the run of a launch."""
    return launch.run is not None and all(record.get(name) == value for name, value in asdict(launch.run).items())


def _ended(launch: Launch) -> Ended:
    at = datetime.fromisoformat(launch.ended_at).timestamp() if launch.ended_at else 0.0
    return Ended(at, launch.code, launch.charged)


def _home(options: PipelineOptions) -> tuple[str, str]:
    return options.name, options.home.root


def _jitter(launch: str) -> float:
    """Return a number from -1 to 1 that is the same for the same launch, whichever service computes it."""
    return int.from_bytes(hashlib.sha256(launch.encode()).digest()[:4], "big") / 2**31 - 1


def _words(seen: Seen) -> tuple[object, ...]:
    """What a change of which is worth an event."""
    glance = seen.glance
    if glance is None:
        return (seen.registered,)
    epoch = glance.control["epoch"] if glance.control else (glance.run or {}).get("epoch")
    return (glance.state, glance.wish, epoch, seen.needs_person, glance.last_error)
