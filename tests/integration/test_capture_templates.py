"""The templates of `firnline init` that capture changes: what their comments tell to type is enough, and no less is."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from firnline.cli.main import run_command
from firnline.spec.build import load_options
from tests.support.captured import delta_rows, execute, query
from tests.support.mysql import BinlogServer
from tests.support.pipelines import run_once
from tests.support.processes import wait_until

ORDERS = "CREATE TABLE {}orders (id bigint PRIMARY KEY, amount numeric(10,2))"
SECRET = "a-secret-of-tests"


def statements(spec: Path) -> list[str]:
    """The SQL of the comments, with a password."""
    return [text.replace("'...'", f"'{SECRET}'") for text in re.findall(r"^#   (.+;)$", spec.read_text(), re.MULTILINE)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def shop(postgres: str) -> Iterator[str]:
    """The DSN of the owner of a database that holds the table `orders`."""
    at = conninfo_to_dict(postgres)
    execute(postgres, f"CREATE ROLE shop_owner LOGIN PASSWORD '{SECRET}'", "CREATE DATABASE shop OWNER shop_owner")
    owner = f"postgresql://shop_owner:{SECRET}@{at['host']}:{at['port']}/shop"
    execute(owner, ORDERS.format(""))
    yield owner
    inside = make_conninfo(postgres, dbname="shop")  # a slot is dropped in its own database
    wait_until(lambda: not query(inside, "SELECT 1 FROM pg_replication_slots WHERE active"))
    execute(inside, "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
    execute(postgres, "DROP DATABASE shop WITH (FORCE)", "DROP OWNED BY firnline_reader, shop_owner")
    execute(postgres, "DROP ROLE firnline_reader", "DROP ROLE shop_owner")


def test_postgres_to_delta(
    postgres: str, shop: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each statement that is missing is named by dry-run; with all of them, changes arrive."""
    assert run_command(["init", ".", "--name", "shop", "--template", "postgres-to-delta"]) == 0
    spec = folder / "firnline.yml"
    wal_level, role, grant, publication = [s.replace(" firnline ", " firnline_reader ") for s in statements(spec)]
    grant = grant.replace("TO firnline;", "TO firnline_reader;")
    publication = publication.replace(" firnline_reader ", " firnline ")
    reader = shop.replace("shop_owner", "firnline_reader")
    monkeypatch.setenv("DATABASE_URL", reader)
    with psycopg.connect(postgres, autocommit=True) as db:
        db.execute(wal_level)
        db.execute(role.replace("REPLICATION", "NOREPLICATION"))
    capsys.readouterr()
    assert refusal(capsys) == 'ALTER ROLE "firnline_reader" REPLICATION;'
    execute(postgres, "ALTER ROLE firnline_reader REPLICATION")
    assert refusal(capsys).startswith("As the owner of the tables: CREATE PUBLICATION firnline FOR TABLE public.orders")
    execute(shop, publication)
    assert refusal(capsys).startswith('GRANT SELECT ON public.orders TO "firnline_reader"; or')
    execute(shop, grant)
    assert run_command(["dry-run"]) == 0
    options = load_options(environ=os.environ, cwd=folder)
    run_once(options)
    execute(shop, "INSERT INTO orders VALUES (1, 2.5), (2, 3)", "DELETE FROM orders WHERE id = 1")
    run_once(options)
    assert delta_rows(folder / "lake" / "orders", "id") == [(2,)]
    assert delta_rows(folder / "lake" / "orders_history", "id", "_op") == [(1, "delete"), (1, "insert"), (2, "insert")]


def test_a_publication_of_ones_own_needs_its_rights(
    postgres: str, shop: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without `publication`: dry-run names the missing right, and passes when the role owns the tables."""
    assert run_command(["init", ".", "--name", "shop", "--template", "postgres-to-delta"]) == 0
    spec = folder / "firnline.yml"
    spec.write_text(spec.read_text().replace("    publication: firnline ", "    # publication: firnline "))
    execute(postgres, f"CREATE ROLE firnline_reader LOGIN REPLICATION PASSWORD '{SECRET}'")
    monkeypatch.setenv("DATABASE_URL", shop.replace("shop_owner", "firnline_reader"))
    capsys.readouterr()
    grant, _, rest = refusal(capsys).partition("; or ")
    assert rest
    execute(postgres, grant)
    assert refusal(capsys).startswith("As the owner: CREATE PUBLICATION firnline FOR TABLE public.orders")
    execute(postgres, "GRANT shop_owner TO firnline_reader")  # which may read the tables, too
    assert run_command(["dry-run"]) == 0
    spec.write_text(spec.read_text().replace("# publication: firnline", "publication: firnline"))
    execute(shop, "CREATE TABLE more (id int PRIMARY KEY)", "CREATE PUBLICATION firnline FOR TABLE more")
    capsys.readouterr()
    assert run_command(["dry-run"]) == 0
    assert "publication firnline has not the table public.orders" in capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    """What dry-run tells to type."""
    assert run_command(["dry-run"]) == 2
    return capsys.readouterr().err.partition("Try: ")[2].strip()


@pytest.mark.mysql
@pytest.mark.mariadb
def test_mysql_to_delta(
    binlog_server: BinlogServer, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user of the comments may capture; tables that are missing, and cascades that the log lacks, are named."""
    assert run_command(["init", ".", "--name", "shop", "--template", "mysql-to-delta"]) == 0
    spec = folder / "firnline.yml"
    create, grant = [s.replace(" firnline", " firnline_reader") for s in statements(spec)]
    server = binlog_server
    server.run("CREATE DATABASE shop", "DROP USER IF EXISTS firnline_reader", create)
    monkeypatch.setenv("DATABASE_URL", f"mysql://firnline_reader:{SECRET}@127.0.0.1:{server.port}/shop")
    capsys.readouterr()
    assert "GRANT SELECT, REPLICATION SLAVE, REPLICATION CLIENT ON *.*" in refusal(capsys)
    server.run(
        grant,
        ORDERS.format("shop."),
        "CREATE TABLE shop.items (id int PRIMARY KEY, o bigint, CONSTRAINT belongs FOREIGN KEY (o) "
        "REFERENCES shop.orders (id) ON DELETE CASCADE)",
    )
    spec.write_text(spec.read_text().replace("tables: [orders]", "tables: [orders, items, ordrs]"))
    logs_cascades = server.run("SELECT VERSION()")[0][0].startswith(("9.6", "9.7"))
    if not logs_cascades:
        assert "set accept_cascades: true" in refusal(capsys)
        refused = run_once(load_options(environ=os.environ, cwd=folder))
        assert (refused.exit_code, refused.error_code) == (2, "config")
        accepted = "tables: [orders, items, ordrs]\n    accept_cascades: true"
        spec.write_text(spec.read_text().replace("tables: [orders, items, ordrs]", accepted))
    assert run_command(["dry-run"]) == 0
    told = capsys.readouterr().out
    assert "table shop.ordrs does not exist yet" in told
    assert told.count("does not exist") == 1
    assert ("its foreign key belongs changes rows by itself" in told) is not logs_cascades
    options = load_options(environ=os.environ, cwd=folder)
    run_once(options)
    server.run("INSERT INTO shop.orders VALUES (1, 2.5), (2, 3)", "DELETE FROM shop.orders WHERE id = 1")
    run_once(options)
    assert delta_rows(folder / "lake" / "orders", "id") == [(2,)]
    assert delta_rows(folder / "lake" / "orders_history", "id", "_op") == [(1, "delete"), (1, "insert"), (2, "insert")]
