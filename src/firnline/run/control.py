"""The local control channel of a run: a Unix socket that accepts a few commands from the same user."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import selectors
import socket
import stat
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from firnline.clock import monotonic
from firnline.errors import ControlError, NotRunningError
from firnline.names import socket_name, user_folder
from firnline.options import PipelineOptions
from firnline.process import this_process
from firnline.run.status import CheckpointWatch, RunStatus
from firnline.run.wanted import Orders, Wanted, WishFollower
from firnline.types import Json

logger = logging.getLogger(__name__)

MAX_LINE = 4096
MAX_CLIENTS = 16
MAX_TICKETS = 64
MAX_PATH = 100  # some systems limit a socket path to 104 bytes
CLIENT_SECONDS = 5.0  # for a whole request
ANSWER_SECONDS = 5.0
REST_SECONDS = 0.2  # wait after the machine ran out of descriptors or memory for another client


class Controlled(Protocol):
    """The operations that the channel calls on a run. All calls come from the channel's thread and return at once."""

    run_id: str

    def pause(self) -> bool:
        """Pause planning. Returns False if the run is already paused."""
        ...

    def resume(self) -> bool:
        """Resume planning. Returns False if the run is not paused."""
        ...

    def stop(self) -> None:
        """Finish the epochs in flight, then end."""
        ...

    def checkpoint(self) -> CheckpointWatch:
        """Take a checkpoint now. The returned watch is done once the checkpoint is committed and recorded."""
        ...

    def status(self) -> RunStatus:
        """Return the current status of the run."""
        ...


# -- where the socket lies ----------------------------------------------------------------------------


def folders(environ: Mapping[str, str]) -> list[Path]:
    """Return the folders that may contain sockets, the one for new sockets first.

    A service and a login shell often have different environment variables.
    """
    user = os.getuid()
    named = environ.get("XDG_RUNTIME_DIR")
    found = [Path(named) / "firnline"] if named and os.path.isabs(named) else []
    found += [Path(tempfile.gettempdir()) / user_folder(user), Path(f"/run/user/{user}/firnline")]
    return list(dict.fromkeys(found))


def check_folder(folder: Path) -> None:
    """Refuse a folder in which another user could create a socket.

    Raises:
        ControlError: the folder is a link, belongs to another user, or is open to others.
        OSError: the folder does not exist.
    """
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise ControlError(f"{folder} is no folder of its own", hint="Remove it, or set XDG_RUNTIME_DIR.")
    if found.st_uid != os.geteuid():
        raise ControlError(f"{folder} belongs to another user", hint="Set XDG_RUNTIME_DIR to a folder of yours.")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ControlError(f"{folder} is open to others", hint=f"chmod 700 {folder}")


def check_peer(connection: socket.socket) -> None:
    """Refuse a client of another user, if the system reports the user. The folder's mode keeps others out anyway."""
    if sys.platform != "linux":
        return
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if user not in (os.geteuid(), 0):
        raise ControlError(f"user {user} may not control this run")


# -- the server ---------------------------------------------------------------------------------------


class _Client:
    """One connection: the bytes received so far, and the deadline of the request."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.data = b""
        self.deadline = monotonic() + CLIENT_SECONDS


class ControlServer:
    """Serves the control channel of one run on its own thread, from `with` to its end.

    Raises:
        ControlError: the folder is not safe, or another run of this pipeline on this machine owns the channel.
        OSError: the socket cannot be created.
    """

    def __init__(
        self,
        options: PipelineOptions,
        run: Controlled,
        environ: Mapping[str, str],
        follower: WishFollower | None = None,
    ) -> None:
        self._pipeline = options.name
        self._run = run
        self._follower = follower
        self._orders = follower.orders if follower is not None else Orders(run)
        self._tickets: dict[int, CheckpointWatch] = {}
        self._count = 0
        self.path = _place(folders(environ)[:2], socket_name(options.name, options.home.root))
        self._thread = threading.Thread(target=self._serve, name="firnline control", daemon=True)

    def __enter__(self) -> ControlServer:
        self._lock = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # The lock shows whether the owner is alive, the file does not: the socket file of a dead process is
            # replaced.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._closing, self._wake = socket.socketpair()
            try:
                self._listener = self._listen()
            except BaseException:
                self._closing.close()
                self._wake.close()
                raise
        except BlockingIOError as error:
            os.close(self._lock)
            raise ControlError(f"another run of {self._pipeline!r} on this machine has the control channel") from error
        except OSError:
            os.close(self._lock)
            raise
        self._thread.start()
        return self

    def _listen(self) -> socket.socket:
        self.path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(self.path))
            self.path.chmod(0o600)
            listener.listen(MAX_CLIENTS)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        return listener

    def __exit__(self, *_: object) -> None:
        self._wake.shutdown(socket.SHUT_RDWR)  # seen at once, also if a process that is being started has a copy
        self._wake.close()
        self._thread.join()
        self._listener.close()
        self._closing.close()
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
        os.close(self._lock)  # last: until now no other process can create a socket of this name

    def _serve(self) -> None:
        clients: dict[socket.socket, _Client] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._closing, selectors.EVENT_READ)
            while True:
                first = min((c.deadline for c in clients.values()), default=None)
                ready = {key.fileobj for key, _ in selector.select(first and max(0.0, first - monotonic()))}
                if self._closing in ready:
                    break
                if self._listener in ready and (made := self._accept(len(clients))) is not None:
                    clients[made.connection] = made
                    selector.register(made.connection, selectors.EVENT_READ)
                for client in list(clients.values()):
                    talks = client.connection in ready and not self._hear(client)
                    if talks or client.deadline <= monotonic():
                        selector.unregister(client.connection)
                        client.connection.close()
                        del clients[client.connection]
        for client in clients.values():
            client.connection.close()

    def _accept(self, clients: int) -> _Client | None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # the client left before it was accepted
            return None
        except OSError as error:  # no descriptors or memory: the client stays queued, and accept would loop
            logger.debug("control client not heard", exc_info=error)
            time.sleep(REST_SECONDS)
            return None
        try:
            connection.setblocking(False)
            if clients >= MAX_CLIENTS:
                raise ControlError("too many clients")
            check_peer(connection)
        except (ControlError, OSError) as error:
            logger.warning("control client refused", extra={"reason": str(error)})
            connection.close()
            return None
        return _Client(connection)

    def _hear(self, client: _Client) -> bool:
        """Read what a client sends and answer complete requests. Returns False if the client is to be dropped."""
        try:
            data = client.connection.recv(MAX_LINE)
            if not data:
                return False
            client.data += data
            while b"\n" in client.data:
                line, client.data = client.data.split(b"\n", 1)
                self._send(client, self.answer(line))
                client.deadline = monotonic() + CLIENT_SECONDS
            if len(client.data) > MAX_LINE:
                self._send(client, _refusal(f"a request has at most {MAX_LINE} bytes"))
                return False
        except OSError:  # the client left, or does not read its answers
            return False
        return True

    def _send(self, client: _Client, answer: dict[str, Json]) -> None:
        data = json.dumps(answer).encode() + b"\n"
        if client.connection.send(data) != len(data):
            raise BlockingIOError

    # -- the commands ---------------------------------------------------------------------------------

    def answer(self, line: bytes) -> dict[str, Json]:
        """Return the answer to one request. Never raises, whatever the line contains."""
        try:
            if len(line) > MAX_LINE:
                return _refusal(f"a request has at most {MAX_LINE} bytes")
            request = json.loads(line)
            if not isinstance(request, dict):
                return _refusal("a request is a JSON object")
            return self._command(request)
        except (ValueError, RecursionError):
            return _refusal("a request is one line of JSON")
        except Exception as error:  # a bug of ours must not close the channel
            logger.exception("control request failed")
            return _refusal(f"{type(error).__name__}: {error}")

    def _command(self, request: dict[str, Json]) -> dict[str, Json]:
        match request.get("command"):
            case "status":
                return self._facts()
            case "pause":
                return {"changed": self._obey("paused", request), **self._facts()}
            case "resume":
                return {"changed": self._obey("running", request), **self._facts()}
            case "stop":
                self._obey("stopped", request)
                return self._facts()
            case "checkpoint":
                return self._checkpoint(request.get("ticket"))
            case _:
                return _refusal("commands are status, pause, resume, stop and checkpoint")

    def _obey(self, wanted: Wanted, request: dict[str, Json]) -> bool:
        """Do what is asked. With the number of a wish, it is recorded already, and late words do not count."""
        number = request.get("wish")
        if type(number) is not int:
            number = None
            if self._follower is not None:
                number = self._follower.wish(wanted, this_process().user)  # the socket serves this user alone
        return self._orders.do(wanted) if number is None else self._orders.obey(number, wanted)

    def _facts(self) -> dict[str, Json]:
        facts = {"pipeline": self._pipeline, "run": self._run.run_id, "pid": os.getpid()}
        return {"ok": True, **facts, **self._run.status().to_json()}

    def _checkpoint(self, ticket: Any) -> dict[str, Json]:
        if ticket is None:
            self._tickets = {n: w for n, w in self._tickets.items() if n > self._count - MAX_TICKETS}
            self._count += 1
            ticket = self._count
            self._tickets[ticket] = self._run.checkpoint()
        watch = self._tickets.get(ticket) if isinstance(ticket, int) else None
        if watch is None:
            return _refusal("there is no such ticket")
        done = watch.done.is_set()
        return {**self._facts(), "ticket": ticket, "done": done, **(watch.answer if done else {})}


def _refusal(reason: str) -> dict[str, Json]:
    return {"ok": False, "error": reason}


def _place(places: list[Path], name: str) -> Path:
    """Return the path of a new socket, in the first folder with a short enough path. Creates the folder."""
    for folder in places:
        if len(os.fsencode(folder / name)) <= MAX_PATH:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_folder(folder)
            return folder / name
    raise ControlError(f"{places[0]}: too long a path for a socket", hint="Set XDG_RUNTIME_DIR to a short path.")


# -- the client ---------------------------------------------------------------------------------------


def ask(options: PipelineOptions, request: dict[str, Json], environ: Mapping[str, str]) -> dict[str, Json]:
    """Send one request to the run of a pipeline on this machine.

    Raises:
        NotRunningError: no run is active on this machine.
        ControlError: the run does not answer, or refuses.
    """
    with contextlib.closing(_connect(options, environ)) as connection:
        try:
            connection.sendall(json.dumps(request).encode() + b"\n")
            line = b"".join(_until_newline(connection))
            answer = json.loads(line)
        except (OSError, ValueError) as error:
            raise ControlError(f"the run of {options.name!r} did not answer") from error
    if not isinstance(answer, dict) or answer.get("ok") is not True:
        reason = answer.get("error") if isinstance(answer, dict) else "no answer"
        raise ControlError(f"the run of {options.name!r} refused: {reason}")
    return answer


def _connect(options: PipelineOptions, environ: Mapping[str, str]) -> socket.socket:
    for folder in folders(environ):
        try:
            check_folder(folder)
        except (OSError, ControlError):
            continue
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(ANSWER_SECONDS)
        try:
            connection.connect(str(folder / socket_name(options.name, options.home.root)))
        except (TimeoutError, BlockingIOError) as error:  # the run hangs, or has too many clients
            connection.close()
            raise ControlError(f"the run of {options.name!r} does not answer") from error
        except OSError:  # no socket, the socket of a dead process, or a path that is too long
            connection.close()
            continue
        return connection
    raise NotRunningError(f"no run of pipeline {options.name!r} on this machine")


def _until_newline(connection: socket.socket) -> Iterator[bytes]:
    size = 0
    while data := connection.recv(MAX_LINE):
        yield data
        size += len(data)
        if data.endswith(b"\n"):
            return
        if size > 16 * MAX_LINE:
            raise ValueError("too long an answer")
    raise OSError("the connection ended")


RETRY_SECONDS = 2.0


@contextlib.contextmanager
def serving_control(
    options: PipelineOptions, run: Controlled, environ: Mapping[str, str], say: Callable[[str], None], *, once: bool,
    follower: WishFollower | None = None,
) -> Iterator[None]:  # fmt: skip
    """Serve the control channel, from `with` to its end. If the channel cannot be opened, the run continues without it.

    With a `follower`, what is asked of the run is recorded as wanted.

    If another run on this machine owns the channel, it is opened once that run exits. A run that ends by itself
    (`once`) says nothing of it: beside a live run it has nothing to do, or it is refused.
    """
    with contextlib.ExitStack() as stack:
        server = None
        try:
            server = ControlServer(options, run, environ, follower)
            stack.enter_context(server)
        except (ControlError, OSError) as error:
            is_owned = server is not None and isinstance(error, ControlError)
            tell = (lambda _: None) if once and is_owned else say
            tell(f"running without a control channel: {error}")
            if server is not None:
                stack.enter_context(LateControl(server, lambda: tell("the control channel is there now")))
        yield


class LateControl:
    """Retries to open the channel on its own thread, from `with` to its end, and calls `had` once it is served."""

    def __init__(self, server: ControlServer, had: Callable[[], None]) -> None:
        self._server = server
        self._had = had
        self._served = contextlib.ExitStack()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._try, name="firnline control, later", daemon=True)

    def __enter__(self) -> LateControl:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._served.close()

    def _try(self) -> None:
        while not self._stop.wait(RETRY_SECONDS):
            with contextlib.suppress(ControlError, OSError):
                self._served.enter_context(self._server)
                self._had()
                return
