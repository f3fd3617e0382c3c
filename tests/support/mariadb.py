"""Real MariaDB servers for tests, from the installed programs; see `tests.support.mysql`."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.mysql import BinlogServer, as_root, call


class MariaDbServer(BinlogServer):
    """MariaDB, which has GTIDs of its own kind."""

    def _make(self, folder: Path) -> None:
        call([_program("mariadb-install-db"), "--no-defaults", f"--datadir={folder}/data", "--skip-test-db",
              f"--tmpdir={folder}",
              "--auth-root-authentication-method=normal", *as_root()])  # fmt: skip

    def _command(self) -> Sequence[str]:
        return [_program("mariadbd"), "--no-defaults"]


def find_program(name: str) -> str | None:
    """Return a program of MariaDB: from the path, or where Debian keeps it; None if it is not installed."""
    return shutil.which(name) or next((str(p) for p in Path("/usr/sbin").glob(name)), None)


def _program(name: str) -> str:
    found = find_program(name)
    if found is None:
        raise RuntimeError(f"{name} is not installed: bash scripts/ensure_servers.sh")
    return found


@contextlib.contextmanager
def running_mariadb(*options: str) -> Iterator[MariaDbServer]:
    """A server, from nothing to gone."""
    with tempfile.TemporaryDirectory(prefix="firnline-mariadb-") as folder:
        server = MariaDbServer(Path(folder))
        server.create()
        try:
            server.start(*options)
            yield server
        finally:
            server.kill()  # at once: nobody needs its data any more
