"""A real PostgreSQL server for tests: in a folder of its own, on 127.0.0.1, stopped by its process id."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from firnline.clock import SystemClock
from tests.support.processes import free_port

PASSWORD = "s3cret-in-tests"  # of a server that lives as long as a test
START_SECONDS = 180.0
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "firnline-tests"
PACKED_17 = _CACHE / "postgres-17.6.0" / "postgres.txz"


def find_program(name: str) -> str | None:
    """A program of PostgreSQL: from the path, or where Debian keeps it."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: int(p.parent.name), reverse=True)
    found = [str(folder / name) for folder in folders if (folder / name).exists()]
    return found[0] if found else shutil.which(name)


class PostgresServer:
    """One server with one database. It keeps its data over `kill` and `start`."""

    def __init__(self, folder: Path, programs: Path | None = None) -> None:
        self._folder = folder
        self._programs = programs  # the folder of other programs than those that are installed
        self._data = folder / "data"
        self._clock = SystemClock()
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def dsn(self) -> str:
        return f"postgresql://firnline:{PASSWORD}@127.0.0.1:{self.port}/postgres"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def create(self) -> None:
        """Make the cluster. PostgreSQL refuses to run as root: then it runs as the user `postgres`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        secret = self._folder / "password"
        secret.write_text(PASSWORD)
        user = _user()
        if user:
            shutil.chown(self._folder, user)
            shutil.chown(secret, user)
        self._call(
            "initdb", "-D", str(self._data), "-U", "firnline", "-A", "scram-sha-256", "--pwfile", str(secret),
            "-E", "UTF8", "--locale", "C",
        )  # fmt: skip

    def start(self, *options: str) -> None:
        """Start on the port that it had, or on a free one, with more options, and wait until it answers."""
        self.port = self.port or free_port()
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [self._program("postgres"), "-D", str(self._data), "-p", str(self.port),
                 "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=", "-c", "fsync=on",
                 "-c", "max_connections=200", "-c", "wal_level=logical", *options],
                stdout=log, stderr=log, cwd="/", **_as_user(),
            )  # fmt: skip
        deadline = self._clock.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or self._clock.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL did not start:\n{(self._folder / 'log').read_text()[-2000:]}")
            self._clock.sleep(0.05)

    def copy(self, folder: Path) -> PostgresServer:
        """Return a server with a copy of the data, slots included, that is not started. This one must be stopped."""
        other = PostgresServer(folder, self._programs)
        shutil.copytree(self._data, other._data)
        user = _user()
        if user:
            for path in (folder, *folder.rglob("*")):
                shutil.chown(path, user)
        return other

    def follow(self, primary: PostgresServer) -> None:
        """Become a standby of another server, which has the same data, at the next start."""
        (self._data / "standby.signal").touch()
        with open(self._data / "postgresql.auto.conf", "a") as settings:
            settings.write(f"primary_conninfo = '{primary.dsn}'\n")

    def clear(self) -> None:
        """Remove what tests have made; start the server if a test has left it stopped."""
        import psycopg

        if self._process is None or self._process.poll() is not None:
            self.start()
        with psycopg.connect(self.dsn, autocommit=True) as db:
            own = "SELECT quote_ident(nspname) FROM pg_namespace WHERE nspname !~ '^pg_|^information_schema$'"
            for (schema,) in db.execute(own).fetchall():
                db.execute(f"DROP SCHEMA {schema} CASCADE")
            db.execute("CREATE SCHEMA public")
            for (name,) in db.execute("SELECT pubname FROM pg_publication").fetchall():
                db.execute(f'DROP PUBLICATION "{name}"')
            db.execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active")
            for (name,) in db.execute("SELECT slot_name FROM pg_replication_slots").fetchall():
                self._drop_slot(db, name)
            made = "SELECT quote_ident(datname) FROM pg_database WHERE datname !~ '^(postgres|template[01])$'"
            for (name,) in db.execute(made).fetchall():
                db.execute(f"DROP DATABASE {name} WITH (FORCE)")
            made = "SELECT quote_ident(rolname) FROM pg_roles WHERE rolname !~ '^pg_' AND rolname <> current_user"
            for (name,) in db.execute(made).fetchall():
                db.execute(f"DROP OWNED BY {name} CASCADE")
                db.execute(f"DROP ROLE {name}")

    def _drop_slot(self, db: Any, name: str) -> None:
        """Drop a slot whose reader may not have left it yet."""
        import psycopg

        deadline = self._clock.monotonic() + START_SECONDS
        while True:
            try:
                db.execute("SELECT pg_drop_replication_slot(%s)", (name,))
            except psycopg.errors.ObjectInUse:
                if self._clock.monotonic() > deadline:
                    raise
                self._clock.sleep(0.05)
            else:
                return

    def kill(self) -> None:
        """End it as a power cut would: it recovers from its log at the next start."""
        self._end(signal.SIGQUIT)

    def stop(self) -> None:
        self._end(signal.SIGINT)

    def _end(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
            self._process.wait(120)
        self._process = None

    def _answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self.dsn, connect_timeout=60).close()
        except psycopg.Error:
            return False
        return True

    def _program(self, name: str) -> str:
        return str(self._programs / name) if self._programs is not None else _program(name)

    def _call(self, name: str, *arguments: str) -> None:
        done = subprocess.run([self._program(name), *arguments], capture_output=True, text=True, cwd="/", **_as_user())
        if done.returncode:
            raise RuntimeError(f"{name} failed: {done.stderr or done.stdout}")


@contextlib.contextmanager
def running_postgres_17() -> Iterator[PostgresServer]:
    """As `running_postgres`, of version 17, which `scripts/fetch_postgres.sh` fetches; its folder is open to all."""
    with tempfile.TemporaryDirectory(prefix="firnline-postgres-") as folder:
        Path(folder).chmod(0o755)
        programs = Path(folder) / "programs"
        programs.mkdir()
        subprocess.run(["tar", "-xJf", str(PACKED_17), "-C", str(programs), "--no-same-owner"], check=True)
        server = PostgresServer(Path(folder) / "server", programs / "bin")
        server.create()
        try:
            server.start()
            yield server
        finally:
            server.stop()


@contextlib.contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """A server, from nothing to gone. Its folder is not pytest's, which only the user who runs the tests may enter."""
    with tempfile.TemporaryDirectory(prefix="firnline-postgres-") as folder:
        server = PostgresServer(Path(folder))
        server.create()
        try:
            server.start()
            yield server
        finally:
            server.stop()


def _program(name: str) -> str:
    found = find_program(name)
    if found is None:
        raise RuntimeError(f"{name} is not installed: bash scripts/ensure_servers.sh")
    return found


def _user() -> str | None:
    """Whom the server runs as, when we are root."""
    if os.geteuid() != 0:
        return None
    return pwd.getpwnam("postgres").pw_name


def _as_user() -> dict[str, Any]:
    user = _user()
    if user is None:
        return {}
    entry = pwd.getpwnam(user)
    environment = {**os.environ, "HOME": entry.pw_dir, "USER": user}
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": [], "env": environment}
