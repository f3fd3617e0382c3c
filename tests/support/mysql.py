"""Real MySQL servers for tests: in folders of their own, on 127.0.0.1, stopped by their process id.

The server is the installed one, or the one that `scripts/fetch_mysql.sh` keeps in the cache folder, started with that
folder's own libraries. Tests that need one are skipped where there is neither.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import ssl
import subprocess
import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from firnline.clock import monotonic
from tests.support.processes import free_port, wait_until

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "firnline-tests" / "mysql"
PASSWORD = "s3cret-in-tests"  # of a server that lives as long as a test
START_SECONDS = 180.0
REDO_LOG = "--innodb-redo-log-capacity=8M"
OURS = ("mysql", "sys", "information_schema", "performance_schema")


@cache
def _connection_class() -> Any:
    """The library's connection, which takes the certificate of a server of ours as it is, without those of the system:
    to load them takes longer than the connection and its statement."""
    from pymysql.connections import Connection

    unchecked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unchecked.check_hostname = False
    unchecked.verify_mode = ssl.CERT_NONE

    class Quick(Connection):  # type: ignore[misc]
        def _create_ssl_ctx(self, options: Any) -> ssl.SSLContext:
            made: ssl.SSLContext = super()._create_ssl_ctx(options or unchecked)
            return made

    return Quick


class BinlogServer:
    """One server that writes a binary log. It keeps its data and its port over `stop`, `kill` and `start`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.data = folder / "data"
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def dsn(self) -> str:
        return f"mysql://firnline:{PASSWORD}@127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    def create(self) -> None:
        """Copy a fresh data folder, which is made once and kept: making one takes longer than all else."""
        self._folder.mkdir(parents=True, exist_ok=True)
        program = next(Path(word) for word in self._command() if word.endswith("d"))
        made = CACHE.parent / f"{program.name}-data-{program.stat().st_size}-{int(program.stat().st_mtime)}"
        if not made.exists():
            CACHE.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=CACHE.parent, prefix=f"{program.name}-data-new-") as folder:
                self._make(Path(folder))
                with contextlib.suppress(OSError):  # another process was faster
                    (Path(folder) / "data").rename(made)
        shutil.copytree(made, self.data)

    @abstractmethod
    def _make(self, folder: Path) -> None:
        """Make a fresh data folder, `data` in this folder."""

    @abstractmethod
    def _command(self) -> Sequence[str]:
        """Return the command that starts the server, without what all servers have."""

    def start(self, *options: str) -> None:
        """Start on the port that it had, or on a free one, with more options, and wait until it answers."""
        self.port = self.port or free_port()
        users = self._folder / "users.sql"
        users.write_text(
            f"CREATE USER IF NOT EXISTS 'firnline'@'%' IDENTIFIED BY '{PASSWORD}';\n"
            "GRANT ALL ON *.* TO 'firnline'@'%' WITH GRANT OPTION;\n"
        )
        command = [
            *self._command(), f"--datadir={self.data}", f"--port={self.port}", "--bind-address=127.0.0.1",
            f"--socket={self._folder}/socket", f"--pid-file={self._folder}/pid", f"--init-file={users}",
            f"--tmpdir={self._folder}",  # a server removes what it takes for its own leftovers there
            "--server-id=1", "--log-bin=binlog", "--binlog-format=ROW", "--binlog-row-metadata=FULL",
            "--innodb-buffer-pool-size=64M", "--innodb-flush-log-at-trx-commit=2", "--sync-binlog=0",
            "--max-allowed-packet=1G", "--skip-name-resolve", "--character-set-server=utf8mb4", *as_root(), *options,
        ]  # fmt: skip
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd="/", start_new_session=True)
        process, deadline = self._process, monotonic() + START_SECONDS
        wait_until(lambda: self._answers() or process.poll() is not None or monotonic() > deadline)
        if not self._answers():
            raise RuntimeError(f"the server did not start:\n{self.log[-2000:]}")

    def connect(self, **settings: Any) -> Any:
        """Return a connection that commits every statement, unless told otherwise."""
        settings = {"host": "127.0.0.1", "port": self.port, "user": "firnline", "password": PASSWORD,
                    "autocommit": True, "charset": "utf8mb4", "connect_timeout": 60, **settings}  # fmt: skip
        return _connection_class()(**settings)

    def run(self, *statements: str) -> list[tuple[Any, ...]]:
        """Run statements on a connection of their own; return the rows of the last one."""
        with contextlib.closing(self.connect()) as db, db.cursor() as cursor:
            rows: list[tuple[Any, ...]] = []
            for statement in statements:
                cursor.execute(statement)
                rows = list(cursor.fetchall() or ())
            return rows

    def clear(self) -> None:
        """Remove what tests have made; start the server if a test has left it stopped."""
        if self._process is None or self._process.poll() is not None:
            self.start()
        for (name,) in self.run("SHOW DATABASES"):
            if name not in OURS:
                self.run(f"DROP DATABASE `{name}`")

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as kill -9 does."""
        self._end(signal.SIGKILL)

    def _end(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
            self._process.wait(120)
        self._process = None

    def _answers(self) -> bool:
        import pymysql

        try:
            self.connect(connect_timeout=60).close()
        except pymysql.Error:
            return False
        return True


class MySqlServer(BinlogServer):
    """MySQL with GTIDs."""

    def _make(self, folder: Path) -> None:
        call([*self._command(), f"--datadir={folder}/data", "--initialize-insecure", REDO_LOG, *as_root()])
        (folder / "data" / "auto.cnf").unlink(missing_ok=True)  # every server makes a UUID of its own

    def start(self, *options: str) -> None:
        super().start("--gtid-mode=ON", "--enforce-gtid-consistency=ON", "--mysqlx=OFF", REDO_LOG, *options)

    def _command(self) -> Sequence[str]:
        command = find_mysqld()
        if command is None:
            raise RuntimeError("there is no MySQL server: bash scripts/fetch_mysql.sh")
        return command


def find_mysqld() -> list[str] | None:
    """Return how to start MySQL's server: the installed one, or the fetched one; None if there is neither."""
    program = shutil.which("mysqld")
    if program is not None:
        version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
        if "mariadb" not in version.lower():
            return [program, "--no-defaults", "--secure-file-priv="]
    if not (CACHE / "complete").exists():
        return None
    loader = next(CACHE.glob("usr/lib/*/ld-linux-*.so.*"))
    return [
        str(loader), "--library-path", str(loader.parent), str(CACHE / "usr/sbin/mysqld"), "--no-defaults",
        f"--basedir={CACHE}/usr", f"--lc-messages-dir={CACHE}/usr/share/mysql",
        f"--plugin-dir={CACHE}/usr/lib/mysql/plugin",
        f"--character-sets-dir={CACHE}/usr/share/mysql/charsets", "--secure-file-priv=",
    ]  # fmt: skip


def as_root() -> list[str]:
    """Return the option that a server asks for when root starts it."""
    return ["--user=root"] if os.geteuid() == 0 else []


def call(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {(done.stderr or done.stdout)[-2000:]}")


@contextlib.contextmanager
def running_mysql(*options: str) -> Iterator[MySqlServer]:
    """A server, from nothing to gone."""
    with tempfile.TemporaryDirectory(prefix="firnline-mysql-") as folder:
        server = MySqlServer(Path(folder))
        server.create()
        try:
            server.start(*options)
            yield server
        finally:
            server.kill()  # at once: nobody needs its data any more
