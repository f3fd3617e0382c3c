"""A log that does not continue: the gap is accepted only if no table loses changes that nobody has named."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from firnline.cli.common import load_options
from firnline.cli.main import run_command
from firnline.cli.run import Gap
from firnline.errors import ConfigError, FirnlineError, SourceGapError
from firnline.options import BatchOptions, CheckpointOptions, PipelineOptions, StoreOptions
from firnline.run.observer import Observer
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.cdc import snapshots, spooling
from firnline.sources.mysql.options import MySqlSourceOptions
from firnline.sources.postgres.options import PostgresSourceOptions
from firnline.testing.local import LocalEngine
from tests.support.binlog import end_of, purge
from tests.support.captured import Capturing, delta_rows, execute, position, query, wait_until
from tests.support.kills import kill
from tests.support.pipelines import run_once, run_to_end

TABLES = ("orders", "items")
COLUMNS = "(id int PRIMARY KEY, note varchar(100))"


class Shop:
    """Two tables of either kind of server, each with its history and its current state."""

    def __init__(self, server: Any, folder: Path) -> None:
        self.server, self.folder, self.is_binlog = server, folder, not isinstance(server, str)
        if self.is_binlog:
            self.run("CREATE DATABASE shop")
        for table in TABLES:
            self.run(f"CREATE TABLE {self.name(table)} {COLUMNS}", self.insert(table, 1, 2, 3))

    @property
    def options(self) -> PipelineOptions:
        return make_options(self.server, self.folder)

    def name(self, table: str) -> str:
        return f"{'shop' if self.is_binlog else 'public'}.{table}"

    def insert(self, table: str, *ids: int) -> str:
        return f"INSERT INTO {self.name(table)} VALUES " + ", ".join(f"({one}, 'n{one}')" for one in ids)

    def run(self, *statements: str) -> None:
        if self.is_binlog:
            self.server.run(*statements)
        else:
            execute(self.server, *statements)

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        statement = f"SELECT id, note FROM {self.name(table)}"  # a name of tests
        found = self.server.run(statement) if self.is_binlog else query(self.server, statement)
        return sorted((tuple(row) for row in found), key=repr)

    def change(self) -> None:
        """Insert, update and delete in both tables."""
        for table in TABLES:
            name = self.name(table)
            self.run(
                self.insert(table, 10, 11),
                f"UPDATE {name} SET note = 'other' WHERE id = 1",
                f"DELETE FROM {name} WHERE id = 2",
            )

    def lose(self) -> None:
        """Lose the log, and change both tables in what is lost."""
        self.change()
        if self.is_binlog:
            self.run("FLUSH BINARY LOGS")
            purge(self.server, end_of(self.server)["file"])
        else:
            self.run("SELECT pg_drop_replication_slot('firnline_shop_db')")
        for table in TABLES:
            self.run(self.insert(table, 12))

    def held(self, table: str) -> list[tuple[Any, ...]]:
        return delta_rows(self.folder / table, "id", "note")

    def check(self, *tables: str) -> None:
        """The current state of tables is what the database holds."""
        for table in tables or TABLES:
            assert self.held(table) == self.rows(table)

    def run_with(self, gap: Gap, options: PipelineOptions | None = None) -> FirnlineError | None:
        """Run once, as `firnline run --once` with options about gaps."""
        return run_with(options or self.options, gap)


def make_options(server: Any, folder: Path, **source: Any) -> PipelineOptions:
    settings = {"tables": TABLES, **source}
    if isinstance(server, str):
        captured: Any = PostgresSourceOptions("db", server, **settings)
    else:
        captured = MySqlSourceOptions("db", f"{server.dsn}/shop", **settings)
    sinks = [DeltaSinkOptions("history", str(folder / "history"), input="db.orders")]
    sinks += [
        DeltaSinkOptions(table, str(folder / table), input=f"db.{table}", write="upsert", key=("id",))
        for table in TABLES
    ]
    return PipelineOptions(
        name="shop",
        sources=(captured,),
        sinks=tuple(sinks),
        batch=BatchOptions(max_events=1000),
        checkpoint=CheckpointOptions(store=StoreOptions("file", path=str(folder / "store"))),
    )


def run_with(options: PipelineOptions, gap: Gap) -> FirnlineError | None:
    pipeline = open_pipeline(options, once=True)
    gap.pass_on(pipeline, once=True)
    return Runner(pipeline, LocalEngine(1), Observer(), once=True).run().error


@pytest.fixture
def shop(captured_server: Any, tmp_path: Path) -> Shop:
    found = Shop(captured_server, tmp_path)
    run_to_end(found.options)
    return found


def state(shop: Shop) -> tuple[Any, ...]:
    pipeline = open_pipeline(shop.options)
    return pipeline.load().epoch, pipeline.requests.load(), shop.held("orders"), shop.held("items")


def test_one_table_of_two_is_refused_and_the_command_it_prints_works(shop: Shop) -> None:
    """The changes of the other one were lost without a word."""
    shop.lose()
    before = state(shop)
    with pytest.raises(SourceGapError) as caught:
        shop.run_with(Gap(resnapshot=("orders",)))
    assert shop.name("items") in caught.value.message
    assert shop.name("orders") not in caught.value.message
    assert state(shop) == before
    command = f"firnline run --once --resnapshot {shop.name('orders')} --resnapshot {shop.name('items')}"
    assert f"`{command}`" in caught.value.hint
    words = [word for word in shlex.split(command) if "." in word]
    assert shop.run_with(Gap(resnapshot=tuple(words))) is None
    shop.check()
    shop.run(shop.insert("items", 20))
    run_to_end(shop.options)
    shop.check()


def test_all_tables_are_read_again(shop: Shop) -> None:
    shop.lose()
    lost = run_once(shop.options).result.error
    assert isinstance(lost, SourceGapError)
    assert "`firnline run --resnapshot-all`" in lost.hint
    assert shop.run_with(Gap(resnapshot_all=True)) is None
    shop.check()
    [accepted] = [one for one in audit(shop) if one["outcome"] == "begun"]
    tables = sorted(shop.name(table) for table in TABLES)
    assert accepted["what"] == "accept-gap"
    assert (sorted(accepted["details"]["reads"]), accepted["details"]["loses"]) == (tables, [])
    assert position(shop.options).due == {}


def audit(shop: Shop) -> list[dict[str, Any]]:
    from firnline.history.store import load_audit_rows

    return load_audit_rows(open_pipeline(shop.options), None, None).rows


def test_the_rest_is_lost_by_name(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """One table is read again; a person says that the changes of the other one may be lost."""
    shop.lose()
    before = shop.held("items")
    assert shop.run_with(Gap(accepted=True, resnapshot=("orders",))) is None
    shop.check("orders")
    assert shop.held("items") == before
    assert "are lost" in caplog.text
    [accepted] = [one for one in audit(shop) if one["what"] == "accept-gap" and one["outcome"] == "done"]
    assert accepted["details"]["loses"] == [shop.name("items")]
    assert accepted["details"]["reason"]


def test_where_the_log_continues_a_table_is_read_again_and_nothing_is_accepted(shop: Shop) -> None:
    shop.change()
    assert shop.run_with(Gap(resnapshot=("orders",))) is None
    shop.check()
    ops = [op for _, op in delta_rows(shop.folder / "history", "id", "_op")]
    assert ops.count("truncate") == 1


@pytest.mark.parametrize("gap", [Gap(resnapshot_all=True), Gap(accepted=True), Gap(resnapshot=("orders",))], ids=str)
def test_a_gap_that_comes_later_in_the_run_is_refused(shop: Shop, gap: Gap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that a connection meets which is opened again."""
    run = Capturing(shop.options, fails="source-gap")
    gap.pass_on(run.pipeline)
    with run:
        shop.run(shop.insert("items", 30))
        wait_until(lambda: (30, "n30") in shop.held("items"))
        wait_until(lambda: not position(shop.options).running and not position(shop.options).due)
        if shop.is_binlog:
            shop.run("RESET BINARY LOGS AND GTIDS" if "MySql" in type(shop.server).__name__ else "RESET MASTER")
            for (process,) in shop.server.run(
                "SELECT id FROM information_schema.processlist WHERE command LIKE 'Binlog Dump%'"
            ):
                shop.run(f"KILL {process}")
        else:
            end_slot(str(shop.server))
        wait_until(lambda: run.has_ended)


def end_slot(dsn: str) -> None:
    """Drop the slot, though a reader holds it and comes back."""

    def is_gone() -> bool:
        execute(dsn, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active")
        try:
            execute(dsn, "SELECT pg_drop_replication_slot('firnline_shop_db')")
        except Exception:
            return False
        return True

    wait_until(is_gone)


def test_tables_without_a_key_are_named_and_take_consent(postgres: str, tmp_path: Path) -> None:
    shop = Shop(postgres, tmp_path)
    shop.run('CREATE TABLE "odd; it\'s" (n int)', 'CREATE TABLE "two words" (id int PRIMARY KEY)')
    options = make_options(postgres, tmp_path, tables=("*",))
    run_to_end(options)
    shop.lose()
    lost = run_once(options).result.error
    assert isinstance(lost, SourceGapError)
    pipeline = open_pipeline(options)
    found = pipeline.sources["db"].find_gap(pipeline.load().checkpoint.positions["db"])  # type: ignore[union-attr]
    assert found is not None
    for gap in (lost, found):  # the first command that they name is the one that is accepted below
        assert gap.hint.partition("`")[2].partition("`")[0] == "firnline run --resnapshot-all --accept-gap"
        assert "public.odd; it's has no key" in gap.hint
    with pytest.raises(SourceGapError) as caught:
        shop.run_with(Gap(resnapshot=("orders",)), options)
    assert "public.odd; it's" in caught.value.message
    assert "public.odd; it's has no key" in caught.value.hint
    command = caught.value.hint.partition("`")[2].partition("`")[0]
    words = shlex.split(command)
    assert words[:3] == ["firnline", "run", "--once"]
    named = {words[place + 1] for place, word in enumerate(words) if word == "--resnapshot"}
    assert named == {"public.orders", "public.items", "public.two words"}
    assert words[-1] == "--accept-gap"
    with pytest.raises(SourceGapError, match="odd"):
        shop.run_with(Gap(resnapshot_all=True), options)
    assert shop.run_with(Gap(accepted=True, resnapshot_all=True), options) is None
    shop.check()


def test_a_table_that_is_new_behind_the_gap_need_not_be_named(postgres: str, tmp_path: Path) -> None:
    shop = Shop(postgres, tmp_path)
    options = make_options(postgres, tmp_path, tables=("*",))
    run_to_end(options)
    shop.lose()
    shop.run("CREATE TABLE later (id int PRIMARY KEY)", "INSERT INTO later VALUES (1)")
    assert shop.run_with(Gap(resnapshot=TABLES), options) is None
    shop.check()
    assert position(options).snapshots["public.later"].rows == 1


def test_a_table_that_is_called_all(postgres: str, tmp_path: Path) -> None:
    """It is a table like others: all tables have an option of their own."""
    shop = Shop(postgres, tmp_path)
    shop.run('CREATE TABLE "all" (id int PRIMARY KEY)')
    options = make_options(postgres, tmp_path, tables=(*TABLES, "all"))
    run_to_end(options)
    shop.lose()
    with pytest.raises(SourceGapError, match=r"public\.items, public\.orders"):
        shop.run_with(Gap(resnapshot=("all",)), options)


def in_other(sink: Any) -> Any:
    """Return a sink of the second source."""
    return replace(sink, name=f"b_{sink.name}", input=sink.input.replace("db.", "other."))


@pytest.mark.mariadb
def test_two_sources_each_with_its_own_gap(postgres: str, mariadb: Any, tmp_path: Path) -> None:
    """The tables of one do not speak for those of the other one."""
    first, second = Shop(postgres, tmp_path / "a"), Shop(mariadb, tmp_path / "b")
    others = second.options
    options = replace(
        first.options,
        sources=(*first.options.sources, replace(others.sources[0], name="other")),
        sinks=(*first.options.sinks, *(in_other(one) for one in others.sinks)),
    )
    run_to_end(options)
    second.lose()
    first.run(first.insert("items", 70))
    with pytest.raises(SourceGapError) as caught:
        run_with(options, Gap(resnapshot=("db:orders", "db:items")))
    assert "'other'" in caught.value.message
    assert "'db'" not in caught.value.message
    assert "--resnapshot public.items --resnapshot shop." in caught.value.hint
    first.lose()
    with pytest.raises(SourceGapError, match=r"public\.items.*shop\.items"):
        run_with(options, Gap(resnapshot=("public.orders", "shop.orders")))
    assert run_with(options, Gap(resnapshot_all=True)) is None
    first.check()
    second.check()


def test_a_table_of_two_sources_is_named_with_its_source(postgres: str, tmp_path: Path) -> None:
    shop = Shop(postgres, tmp_path)
    options = shop.options
    copy = replace(options.sources[0], name="copy")
    pipeline = open_pipeline(replace(options, sources=(*options.sources, copy)))
    with pytest.raises(ConfigError) as caught:
        Gap(resnapshot=("orders",)).check(pipeline)
    assert "--resnapshot db:orders" in caught.value.hint
    Gap(resnapshot=("copy:orders", "db:orders")).check(pipeline)


@pytest.mark.mariadb
def test_a_gap_in_the_middle_of_the_log(mariadb: Any, tmp_path: Path) -> None:
    """The log continues, and has a statement that cannot be passed over: what lies before it is read, too."""
    shop = Shop(mariadb, tmp_path)
    run_to_end(shop.options)
    shop.change()
    shop.run(
        shop.insert("orders", 40),
        "SET SESSION binlog_format = 'STATEMENT'",
        f"UPDATE {shop.name('items')} SET note = 'silent' WHERE id = 3",
        f"DELETE FROM {shop.name('orders')} WHERE id = 40",
        "SET SESSION binlog_format = 'ROW'",
        f"DELETE FROM {shop.name('orders')} WHERE id = 10",
    )
    error = shop.run_with(Gap(resnapshot=("items",)))
    assert isinstance(error, SourceGapError)
    assert shop.run_with(Gap(resnapshot_all=True)) is None
    shop.check()


# -- killed --------------------------------------------------------------------------------------------


def work(server: Any, folder: Path) -> None:
    snapshots.CHUNK_ROWS, spooling.WAIT_SECONDS = 2, 0.02
    assert run_with(make_options(server, folder), Gap(resnapshot_all=True)) is None


POINTS = (
    "spool.file.before:1", "spool.file.after:1", "delta.commit.before:1", "delta.commit.after:1",
    "delta.commit.after:3", "spool.chunk.before:1", "spool.chunk.after:2",
)  # fmt: skip


@pytest.mark.crash
@pytest.mark.parametrize("point", POINTS)
def test_killed_after_the_gap_was_accepted(postgres: str, tmp_path: Path, point: str) -> None:
    """A plain run goes on, and reads all tables again. Before the acceptance is durable, nothing is accepted."""
    shop = Shop(postgres, tmp_path)
    run_to_end(shop.options)
    shop.lose()
    kill(point, partial(work, postgres, tmp_path))
    error = run_once(shop.options).result.error
    if point == "spool.file.before:1":
        assert isinstance(error, SourceGapError)
        assert shop.run_with(Gap(resnapshot_all=True)) is None
    else:
        assert error is None
    shop.check()
    shop.run(shop.insert("items", 50), f"DELETE FROM {shop.name('orders')} WHERE id = 11")
    run_to_end(shop.options)
    shop.check()


@pytest.mark.crash
def test_changes_from_before_the_gap_that_no_epoch_has(postgres: str, tmp_path: Path) -> None:
    """They are spooled, and their rows vanish in the gap: tables are emptied behind them."""
    shop = Shop(postgres, tmp_path)
    run_to_end(shop.options)
    shop.run(shop.insert("orders", 60), shop.insert("items", 60))
    kill("epoch.plan.after:1", partial(plain, postgres, tmp_path))
    shop.run("DELETE FROM orders WHERE id = 60", "DELETE FROM items WHERE id = 60")
    shop.lose()
    assert shop.run_with(Gap(resnapshot_all=True)) is None
    shop.check()


def plain(server: Any, folder: Path) -> None:
    assert run_once(make_options(server, folder)).exit_code == 0


# -- the command ---------------------------------------------------------------------------------------


def test_the_command_refuses_with_one_to_paste_that_names_the_spec(
    postgres: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    no_spark: None,
) -> None:
    shop = Shop(postgres, tmp_path)
    monkeypatch.setenv("SHOP_DSN", postgres)
    spec = tmp_path / "my spec.yml"
    spec.write_text(
        f"""
name: shop
sources: {{db: {{type: postgres, dsn: "${{env:SHOP_DSN}}", tables: [orders, items]}}}}
sinks:
  - {{name: history, type: delta, table: {tmp_path}/history, input: db.orders}}
  - {{name: orders, type: delta, table: {tmp_path}/orders, input: db.orders, write: upsert, key: [id]}}
  - {{name: items, type: delta, table: {tmp_path}/items, input: db.items, write: upsert, key: [id]}}
"""
    )
    options = load_options(str(spec))
    run_to_end(options)
    shop.lose()
    before = state(shop)
    capfd.readouterr()
    assert run_command(["run", str(spec), "--resnapshot", "orders"]) == 1
    told = " ".join(capfd.readouterr().err.split())
    assert f"firnline run -f '{spec}' --resnapshot public.orders --resnapshot public.items" in told
    assert state(shop) == before
    assert run_command(["run", str(spec), "--resnapshot", "nothing"]) == 2
    assert run_with(options, Gap(resnapshot=("public.orders", "public.items"))) is None
    shop.check()
