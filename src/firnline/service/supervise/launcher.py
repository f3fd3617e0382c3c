"""The launcher of one run: records it, lets it go, waits for it, and records its end.

The service starts this module as a process in a session of its own. It outlives the service, so that the end of a run
is recorded whoever is alive to see it. Signals that ask it to end go to the run.

1. Fork the process of the run, which waits.
2. Record both processes, unless a service gave the launch up.
3. Read the launches and the wish. If the launch still counts, let the run go; if this process dies first, it ends.
4. Wait for the run, and show a beat meanwhile.
5. Record how it ended, for as long as that takes: a disk may be full.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from types import FrameType

from firnline.clock import SystemClock, monotonic
from firnline.errors import ConfigError, FirnlineError
from firnline.process import find_process, this_process
from firnline.run.wanted import Wishes, find_charged
from firnline.service.supervise.launches import Launches
from firnline.service.supervise.policy import BEAT_SECONDS, may_run
from firnline.storage import Storage, is_remote, normalise, open_storage
from firnline.types import Clock, Json

NOT_STARTED = 3  # the exit code of a launcher that let no run go
RETRY_SECONDS = 1.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class _Child:
    """The process of the run: it waits until it is let go, and ends if this process dies before."""

    def __init__(self, command: list[str]) -> None:
        self._wake, woken = socket.socketpair()
        for one in (self._wake, woken):
            one.setblocking(False)
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        self._woken = woken  # held, as the interpreter writes to it
        reader, self._gate = os.pipe()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        self.pid = os.fork()
        if self.pid == 0:
            _be_run(command, reader, self._gate, blocked)
        os.close(reader)
        self.code: int | None = None
        for number in _FORWARDED:
            signal.signal(number, self._forward)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def let_go(self) -> None:
        """Let the run begin."""
        os.write(self._gate, b"1")
        os.close(self._gate)

    def drop(self) -> None:
        """End the process, which has not begun."""
        os.close(self._gate)
        self.wait(None)

    def stop(self) -> None:
        """Ask the run to end."""
        self._forward(signal.SIGTERM, None)

    def wait(self, seconds: float | None) -> int | None:
        """Wait for the end, at most so long; returns the exit code, negative for a signal, or None."""
        deadline = None if seconds is None else monotonic() + seconds
        while self.code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.code = os.waitstatus_to_exitcode(status)
                break
            left = 1.0 if deadline is None else deadline - monotonic()
            if left <= 0:
                break
            select.select([self._wake], [], [], left)
            with contextlib.suppress(BlockingIOError):
                self._wake.recv(64)
        return self.code


def _be_run(command: list[str], reader: int, gate: int, blocked: set[signal.Signals | int]) -> None:
    """Wait to be let go, and become the run. Never returns."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (*_FORWARDED, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.close(gate)
        if os.read(reader, 1) != b"1":
            os._exit(NOT_STARTED)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.execvp(command[0], command)  # noqa: S606  # no shell: the words are ours
    except BaseException as error:
        sys.stderr.write(f"the run cannot be started: {error}\n")
        sys.stderr.flush()
        os._exit(1)


def main(arguments: list[str]) -> int:
    """Run `ROOT PIPELINE LAUNCH COMMAND...`: the home, whose it is, and the run."""
    root, pipeline, launch, *command = arguments
    clock = SystemClock()
    child = _Child(command)
    try:
        storage = _open_home(root, command[-1])
        launches, wishes = Launches(storage, pipeline), Wishes(storage, pipeline, clock)
        launches.put_process(launch, this_process(), find_process(child.pid))
        newest = wishes.load()
        refusal = may_run(launch, launches.load(), newest.wanted if newest else None)
    except FileExistsError:
        _say("the run is not started: a service gave this launch up")
        child.drop()
        return NOT_STARTED
    except (OSError, FirnlineError) as error:  # nobody would see the run
        _say(f"the run is not started: {error}")
        child.drop()
        return NOT_STARTED
    if refusal is not None:
        _say(f"the run is not started: {refusal}")
        child.drop()
        _record(launches, launch, {"at": clock.now().isoformat(), "code": None, "wish": 0})
        return NOT_STARTED
    child.let_go()
    code, beats = child.wait(BEAT_SECONDS), 0
    while code is None:
        beats += 1
        _beat(launches, launch, beats, child)
        code = child.wait(BEAT_SECONDS)
    _record(launches, launch, {"at": clock.now().isoformat(), "code": code, "wish": _charge(wishes, launch, clock)})
    return code if code >= 0 else 128 - code


def _open_home(root: str, spec: str) -> Storage:
    """Open the home; what another place than this disk needs to be opened stands in the spec."""
    if not is_remote(normalise(root)):
        return open_storage(root)
    from firnline.spec.build import build_options
    from firnline.spec.loading import load_spec

    options = build_options(load_spec(spec, environ=os.environ), environ=os.environ)
    if options.home.root != root:
        raise ConfigError(f"{spec} has another home by now", hint="Start the pipeline again.")
    return open_storage(root, options.home.storage_options)


def _beat(launches: Launches, launch: str, count: int, child: _Child) -> None:
    """Show a sign of life. If a service took this launch for dead meanwhile, end the run: another may be there."""
    try:
        launches.beat(launch, count)
        if any(one.id == launch and one.is_over for one in launches.load()):
            _say("the run is asked to end: a service took this launch for dead")
            child.stop()
    except (OSError, FirnlineError) as error:
        _say(f"the launcher cannot show that it lives: {error}")


def _charge(wishes: Wishes, launch: str, clock: Clock) -> int:
    """Return the number of the wish that the end belongs to."""
    number = int(launch.partition("-")[0])
    while True:
        try:
            return find_charged(number, wishes.load_later(number))
        except FileNotFoundError:  # pruned between list and read
            continue
        except FirnlineError:
            return number
        except OSError as error:
            _say(f"the launcher cannot read the wishes: {error}")
            clock.sleep(RETRY_SECONDS)


def _record(launches: Launches, launch: str, body: dict[str, Json]) -> None:
    """Record the end, however long that takes, unless a service did."""
    said = ""
    while True:
        try:
            launches.put(launch, "exit", body)
            return
        except FileExistsError:
            return
        except OSError as error:
            if str(error) != said:
                said = str(error)
                _say(f"the launcher cannot record exit code {body['code']}, and tries again: {error}")
            time.sleep(RETRY_SECONDS)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
