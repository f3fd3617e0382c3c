"""The server that a stream reads: what kind it is, its settings, and what its log holds."""

from __future__ import annotations

import re
import secrets
import struct
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from firnline.errors import ConfigError, SourceError, SourceGapError
from firnline.sources.cdc.log import GAP_HINT
from firnline.sources.mysql import events as ev
from firnline.sources.mysql.connect import Dsn, connect, errors_in_words, grant_hint
from firnline.sources.mysql.gtid import GtidSet

_NAMES = (
    "version", "log_bin", "binlog_format", "binlog_row_metadata", "binlog_row_image", "binlog_row_value_options",
    "binlog_checksum", "gtid_mode", "server_id", "server_uuid", "log_slave_updates", "log_replica_updates",
    "innodb_native_foreign_keys", "lower_case_table_names",
)  # fmt: skip
COM_BINLOG_DUMP, COM_BINLOG_DUMP_GTID = 0x12, 0x1E
NON_BLOCKING = 1
_LOOKS = range(0xF000_0000, 0xFFFF_FFF0)  # ids of readers that look at one file
_NO_FILE = "could not find first log file"
LOGS_CASCADES = (9, 6)  # the first version of MySQL whose log has the changes of cascading foreign keys
_CASCADE = re.compile(
    r"^ *CONSTRAINT `((?:[^`]|``)+)` FOREIGN KEY .* ON (?:DELETE|UPDATE) (?:CASCADE|SET NULL|SET DEFAULT)", re.MULTILINE
)
_NO_TABLE = 1146
_ROWS_ARE_OLD = "Tables that were read before lack changes: read them again with firnline snapshot --table TABLE."
CONNECT_AGAIN = "The other one stops when this one starts. Give every source of its own a server_id of its own."


@dataclass(frozen=True, slots=True)
class Server:
    """A server, as it was when the stream connected."""

    host: tuple[str, int]
    version: str
    is_mariadb: bool
    uuid: str  # MariaDB: empty
    id: int
    has_gtids: bool
    checksum: str
    settings: dict[str, str]

    @property
    def kind(self) -> str:
        """The kind of server, as positions name it."""
        return "mariadb" if self.is_mariadb else "mysql"

    @property
    def folds_names(self) -> bool:
        """Whether the server has the names of tables in small letters, however statements write them."""
        return self.settings.get("lower_case_table_names", "0") != "0"


def read_server(db: Any, host: tuple[str, int]) -> Server:
    """Return what a server says about itself.

    Raises:
        SourceError: it does not answer.
    """
    names = ", ".join(f"'{name}'" for name in _NAMES)
    rows = query(db, host, f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({names})")
    found = {str(name).lower(): str(value) for name, value in rows}
    is_mariadb = "mariadb" in found.get("version", "").lower()
    return Server(
        host, found.get("version", ""), is_mariadb, found.get("server_uuid", "") if not is_mariadb else "",
        int(found.get("server_id", "0")), is_mariadb or found.get("gtid_mode", "OFF").upper() == "ON",
        found.get("binlog_checksum", "NONE").upper(), found,
    )  # fmt: skip


def check_server(db: Any, server: Server, user: str, server_id: int) -> None:
    """Refuse a server whose settings do not allow change capture.

    Raises:
        ConfigError: a setting is wrong; the hint has the statement that mends it.
        SourceError: the server does not answer.
    """
    where = f"{server.host[0]}:{server.host[1]}"
    values = server.settings
    keep = "SET GLOBAL" if server.is_mariadb else "SET PERSIST"
    also = " and write the same below [mysqld] in the server's my.cnf" if server.is_mariadb else ""
    if values.get("log_bin", "OFF").upper() not in ("ON", "1"):
        raise ConfigError(
            f"server {where} writes no binary log",
            hint="Write below [mysqld] in the server's my.cnf: log_bin = binlog and server_id = 1 (remove "
            "skip_log_bin), then restart the server.",
        )
    wanted = {"binlog_format": "ROW", "binlog_row_metadata": "FULL"}
    for name, value in wanted.items():
        if values.get(name, "").upper() != value:
            raise ConfigError(
                f"server {where} has {name} = {values.get(name, 'no such setting')}; change capture needs {value}",
                hint=f"Run on the server: {keep} {name} = '{value}';{also}. Sessions that are open keep the old value.",
            )
    if "PARTIAL_JSON" in values.get("binlog_row_value_options", "").upper():
        raise ConfigError(
            f"server {where} has binlog_row_value_options = PARTIAL_JSON, which logs parts of JSON values",
            hint="Run on the server: SET PERSIST binlog_row_value_options = '';",
        )
    if server.id == server_id:
        raise ConfigError(
            f"server_id {server_id} of this source is the one of server {where} itself",
            hint="Give the source another server_id, one that no server and no replica has.",
        )
    grants = " ".join(str(row[0]).upper() for row in query(db, server.host, "SHOW GRANTS"))
    for right, names in (
        ("REPLICATION SLAVE", ("REPLICATION SLAVE", "REPLICATION REPLICA")),
        ("REPLICATION CLIENT", ("REPLICATION CLIENT", "BINLOG MONITOR")),
    ):
        if "ALL PRIVILEGES ON *.*" not in grants and not any(name in grants for name in names):
            raise ConfigError(f"user {user} has not the right {right} on server {where}", hint=grant_hint(user))


def server_gtids(db: Any, server: Server) -> str:
    """Return all transactions that a server has, as GTIDs; of MariaDB the last of each domain and server."""
    name = "gtid_binlog_state" if server.is_mariadb else "gtid_executed"
    return str(query(db, server.host, f"SELECT @@GLOBAL.{name}")[0][0] or "")


def replica_filters(db: Any, server: Server) -> list[str]:
    """Return the filters that keep rows out of a replica; none, too, if the user may not see them."""
    words = ("do_db", "ignore_db", "do_table", "ignore_table", "wild_do_table", "wild_ignore_table", "rewrite_db")
    names = ", ".join(f"'replicate_{word}'" for word in words)
    statement = f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({names}) AND Value <> ''"
    if not server.is_mariadb:
        statement = (
            "SELECT filter_name, filter_rule FROM performance_schema.replication_applier_filters UNION "
            "SELECT filter_name, filter_rule FROM performance_schema.replication_applier_global_filters"
        )
    try:
        return [f"{name} = {value}" for name, value in query(db, server.host, statement)]
    except (ConfigError, SourceError):
        return []


def check_replica(server: Server, gtids: str, primary: Server, primary_gtids: str) -> None:
    """Refuse a server that is no replica of another one, by their transactions; those of the other are read later.

    Raises:
        ConfigError: their histories differ, or nobody can tell.
    """
    here, there = (f"{one.host[0]}:{one.host[1]}" for one in (server, primary))
    hint = "Name a replica of the server of dsn in snapshot_dsn, or leave snapshot_dsn out."
    if server.kind != primary.kind or not (server.has_gtids and primary.has_gtids):
        raise ConfigError(f"tables can be read from {here} only if it and {there} have GTIDs of one kind", hint=hint)
    if server.host == primary.host or (server.uuid and server.uuid == primary.uuid):
        return
    logs = server.settings.get("log_slave_updates", server.settings.get("log_replica_updates", "OFF")).upper()
    if server.settings.get("log_bin", "OFF").upper() not in ("ON", "1") or logs not in ("ON", "1"):
        raise ConfigError(
            f"replica {here} does not log what it replicates, so nobody can tell what its tables hold",
            hint="Write below [mysqld] in its my.cnf: log_bin, and log_slave_updates = ON; then restart it.",
        )
    if server.is_mariadb:
        own = _lacking_states(gtids, primary_gtids)
    else:
        own = str(GtidSet.parse(gtids).minus(GtidSet.parse(primary_gtids)))
    if server.id == primary.id or own or (primary_gtids and not gtids):
        reason = f"it has the transactions {own}" if own else "they have nothing in common"
        reason = f"both have the server_id {server.id}" if server.id == primary.id else reason
        raise ConfigError(f"{here} (snapshot_dsn) is no replica of {there} (dsn): {reason}", hint=hint)


def _lacking_states(gtids: str, others: str) -> str:
    """Return of MariaDB's last transactions of each domain and server those that another server does not have."""
    known: dict[str, int] = {}
    for one in filter(None, (word.strip() for word in others.split(","))):
        origin, _, number = one.rpartition("-")
        known[origin] = int(number)
    words = [word.strip() for word in gtids.split(",") if word.strip()]
    return ",".join(one for one in words if known.get(one.rpartition("-")[0], 0) < int(one.rpartition("-")[2]))


def setting_remarks(server: Server) -> list[str]:
    """Return settings that are allowed and not the best, with the statements that change them."""
    told = []
    image = server.settings.get("binlog_row_image", "FULL").upper()
    if image != "FULL":
        keep = "SET GLOBAL" if server.is_mariadb else "SET PERSIST"
        told.append(
            f"binlog_row_image is {image}: values that an update leaves as they are, and defaults of inserts, are not "
            f"in the log ({keep} binlog_row_image = 'FULL')"
        )
    if not server.has_gtids:
        steps = "; ".join(f"SET PERSIST gtid_mode = {mode}" for mode in ("OFF_PERMISSIVE", "ON_PERMISSIVE", "ON"))
        told.append(
            "gtid_mode is not ON: positions hold on this server only, not after a failover (SET PERSIST "
            f"enforce_gtid_consistency = ON; {steps})"
        )
    return told


def find_tables(db: Any, server: Server) -> set[str]:
    """Return the tables that the user may see, as `database.table`."""
    rows = query(
        db,
        server.host,
        "SELECT TABLE_SCHEMA, TABLE_NAME FROM information_schema.TABLES "
        "WHERE TABLE_TYPE IN ('BASE TABLE', 'SYSTEM VERSIONED')",
    )
    return {f"{schema}.{name}" for schema, name in rows}


def find_versioned(db: Any, server: Server) -> list[str]:
    """Return MariaDB's system-versioned tables: the log has rows of their past, too."""
    rows = query(
        db,
        server.host,
        "SELECT TABLE_SCHEMA, TABLE_NAME FROM information_schema.TABLES WHERE TABLE_TYPE = 'SYSTEM VERSIONED'",
    )
    return sorted(f"{schema}.{name}" for schema, name in rows)


def find_dotted(db: Any, server: Server) -> list[str]:
    """Return the tables whose database has a dot in its name: as `database.table`, nobody knows where the one ends and
    the other begins."""
    rows = query(
        db,
        server.host,
        "SELECT TABLE_SCHEMA, TABLE_NAME FROM information_schema.TABLES WHERE TABLE_SCHEMA LIKE '%.%' ORDER BY 1, 2",
    )
    return [f"{schema}.{name}" for schema, name in rows]


def find_key(db: Any, server: Server, table: str) -> tuple[str, ...]:
    """Return the columns of a table's primary key, in its order; none if it has no such key."""
    rows = query(db, server.host, f"SHOW INDEX FROM {quoted_table(table)} WHERE Key_name = 'PRIMARY'")
    return tuple(str(row[4]) for row in sorted(rows, key=lambda row: int(row[3])))


def find_columns(db: Any, server: Server, table: str) -> list[str]:
    """Return the columns of a table, in their order."""
    return [str(row[0]) for row in query(db, server.host, f"SHOW COLUMNS FROM {quoted_table(table)}")]


def quoted(name: str) -> str:
    """Return a name of a table or column for a statement."""
    return "`" + name.replace("`", "``") + "`"


def quoted_table(table: str) -> str:
    """Return a table, given as database.table, for a statement."""
    database, _, name = table.partition(".")
    return f"{quoted(database)}.{quoted(name)}"


@dataclass(frozen=True, slots=True)
class Lack:
    """Changes of captured tables that a server does not write into its log."""

    what: str
    hint: str  # what mends it
    is_cascade: bool = False


def find_lacks(db: Any, server: Server, tables: Iterable[str], databases: Iterable[str]) -> list[Lack]:
    """Return why the log lacks changes of these tables, and of tables that these databases may get.

    Raises:
        SourceError: the server does not answer.
    """
    found = _find_filtered(db, server, databases)
    setting = "log_slave_updates" if server.is_mariadb else "log_replica_updates"
    logs_all = server.settings.get(setting, server.settings.get("log_slave_updates", "ON")).upper() in ("ON", "1")
    if not logs_all and _is_replica(db, server):
        found.append(
            Lack(
                f"server {server.host[0]}:{server.host[1]} is a replica with {setting} = OFF: its log does not have "
                "the changes that it replicates",
                f"Write below [mysqld] in the replica's my.cnf: {setting} = ON, then restart it. Or capture the "
                f"server that it replicates. {_ROWS_ARE_OLD}",
            )
        )
    return found + [cascade_lack(server, f"table {table}: its foreign key {key}") for table, key in
                    find_cascades(db, server, sorted(tables))]  # fmt: skip


def log_filters(db: Any, server: Server) -> dict[str, frozenset[str]]:
    """Return the filters of the log that are set, binlog_do_db and binlog_ignore_db: the databases that they name."""
    row = _log_status(db, server)
    named = {"binlog_do_db": row[2], "binlog_ignore_db": row[3]}
    return {name: frozenset(str(value).split(",")) for name, value in named.items() if value}


def _find_filtered(db: Any, server: Server, databases: Iterable[str]) -> list[Lack]:
    filters = log_filters(db, server)
    name = "binlog_do_db" if "binlog_do_db" in filters else "binlog_ignore_db"  # the first makes the other void
    named = filters.get(name, frozenset())
    is_out = name == "binlog_ignore_db"
    way = "Remove" if is_out else f"Remove all {name}, or add"
    return [
        Lack(
            f"{name} of server {server.host[0]}:{server.host[1]} keeps the database {one} out of its log",
            f"{way} {name} = {one} below [mysqld] in the server's my.cnf, then restart the server. {_ROWS_ARE_OLD}",
        )
        for one in sorted(databases)
        if named and (one in named) is is_out
    ]


def _is_replica(db: Any, server: Server) -> bool:
    words = "SHOW REPLICA STATUS" if version_of(server) >= (8, 1) else "SHOW SLAVE STATUS"
    try:
        return bool(query(db, server.host, "SHOW ALL SLAVES STATUS" if server.is_mariadb else words))
    except ConfigError:  # a right is missing
        if not server.is_mariadb:
            raise
    # It takes the right SLAVE MONITOR. This takes none, and does not know of a replica that is stopped.
    rows = query(db, server.host, "SHOW GLOBAL STATUS LIKE 'Slaves_running'")
    return any(int(value) for _, value in rows)


def logs_cascades(server: Server) -> bool:
    """Return whether the log has the rows that foreign keys change by themselves."""
    is_native = server.settings.get("innodb_native_foreign_keys", "OFF").upper() in ("ON", "1")
    return not server.is_mariadb and version_of(server) >= LOGS_CASCADES and not is_native


def cascade_lack(server: Server, subject: str) -> Lack:
    """Return that a foreign key changes rows outside the log; the subject names it."""
    way, ending = "", "MySQL 9.6 and later log them"
    if not server.is_mariadb and version_of(server) >= LOGS_CASCADES:
        way = "Write below [mysqld] in the server's my.cnf: innodb_native_foreign_keys = OFF, then restart it. Or: "
        ending = "innodb_native_foreign_keys is ON"
    return Lack(
        f"{subject} changes rows by itself (ON DELETE or ON UPDATE), and the binary log of this server does not have "
        f"these changes; {ending}",
        f"{way}Leave the tables out of `tables`, drop the cascades, or set accept_cascades: true: then these changes "
        "are missing until `firnline snapshot --table TABLE`.",
        is_cascade=True,
    )


def find_cascades(db: Any, server: Server, tables: Iterable[str]) -> list[tuple[str, str]]:
    """Return the foreign keys by which the server changes rows of these tables without writing that into its log: the
    table, and the key."""
    if logs_cascades(server):
        return []
    found = []
    for table in tables:
        # The catalogue's list of foreign keys needs more rights than reading the table.
        try:
            text = str(query(db, server.host, f"SHOW CREATE TABLE {quoted_table(table)}")[0][1])
        except SourceError as error:
            if getattr(error.__cause__, "args", (0,))[0] != _NO_TABLE:  # it is gone, with its keys
                raise
        else:
            found += [(table, key) for key in _CASCADE.findall(text)]
    return found


def query(db: Any, host: tuple[str, int], statement: str) -> list[tuple[Any, ...]]:
    """Run a statement and return its rows."""
    with errors_in_words("a query failed", host), db.cursor() as cursor:
        cursor.execute(statement)
        return list(cursor.fetchall() or ())


def log_place(db: Any, server: Server) -> tuple[str, int, str]:
    """Return file and position of the end of the log, and MySQL's `gtid_executed`.

    Raises:
        SourceError: the server does not answer.
    """
    row = _log_status(db, server)
    return str(row[0]), int(row[1]), "" if server.is_mariadb else str(row[4]).replace("\n", "")


def _log_status(db: Any, server: Server) -> tuple[Any, ...]:
    words = "SHOW MASTER STATUS" if server.is_mariadb or version_of(server) < (8, 2) else "SHOW BINARY LOG STATUS"
    return query(db, server.host, words)[0]


def gtids_at(db: Any, server: Server, file: str, pos: int) -> str:
    """Return the GTIDs of MariaDB at a place in its log. The server reads the file up to there."""
    return str(query(db, server.host, f"SELECT BINLOG_GTID_POS('{file}', {pos})")[0][0] or "")


def logged_gtids(db: Any, server: Server) -> str:
    """Return the GTIDs of MariaDB that its log has now."""
    return str(query(db, server.host, "SELECT @@GLOBAL.gtid_binlog_pos")[0][0] or "")


def end_place(db: Any, server: Server, *, is_exact: bool = True) -> dict[str, Any]:
    """Return the end of the log as a position, without the time at which its file was begun.

    `is_exact` is about MariaDB: otherwise its GTIDs may be ahead of file and position. That is quicker.

    Raises:
        SourceError: the server does not answer.
    """
    file, pos, gtids = log_place(db, server)
    if server.is_mariadb:
        gtids = gtids_at(db, server, file, pos) if is_exact else logged_gtids(db, server)
    return {
        "kind": server.kind, "file": file, "pos": pos, "created": 0,
        "gtid_set": gtids if server.has_gtids else None, "server_uuid": server.uuid, "previous": "", "last": None,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class LogState:
    """The server's log at a moment."""

    server: Server
    file: str
    pos: int
    sizes: dict[str, int]  # of the files of the log, in order
    now: int  # by the server's clock, microseconds since 1970

    def bytes_behind(self, place: dict[str, Any]) -> int | None:
        """Return how much of the log lies behind a place; None if the place is in the log of another server."""
        names = list(self.sizes)
        if place["server_uuid"] != self.server.uuid or place["file"] not in names:
            return None
        after = names[names.index(place["file"]) + 1 :]
        sizes = {**self.sizes, self.file: self.pos}
        return max(0, sizes[place["file"]] - int(place["pos"]) + sum(sizes[name] for name in after))


def read_log(db: Any, server: Server) -> LogState:
    """Return where the log ends now, and what files it has.

    Raises:
        SourceError: the server does not answer.
    """
    file, pos, _ = log_place(db, server)
    sizes = {str(row[0]): int(row[1]) for row in query(db, server.host, "SHOW BINARY LOGS")}
    now = query(db, server.host, "SELECT CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS UNSIGNED)")[0][0]
    return LogState(server, file, pos, sizes, int(now))


def purged_text(server: Server, file: str) -> str:
    """Return the words for a file of the log that is gone though it is needed."""
    return f"server {server.host[0]}:{server.host[1]} has purged the log file {file} of the position"


def version_of(server: Server) -> tuple[int, ...]:
    """Return the first two numbers of the server's version."""
    return tuple(int(word) for word in server.version.split("-")[0].split(".")[:2])


def file_created(dsn: Dsn, server: Server, file: str) -> int | None:
    """Return when a file of the log was begun, in seconds since 1970; None if the server has no such file.

    A file of the log is only ever appended to. So its name and this time tell whether it is the same file.

    Raises:
        SourceError: the server did not answer that.
    """
    db = connect(dsn, server.host)
    try:
        # A server ends the stream of a reader whose id comes again: every look has its own.
        reader = _LOOKS.start + secrets.randbelow(len(_LOOKS))
        prepare_dump(db, server, heartbeat_seconds=0, replica=str(uuid.uuid4()))
        send(db, struct.pack("<BIHI", COM_BINLOG_DUMP, 4, NON_BLOCKING, reader) + file.encode())
        with errors_in_words(f"cannot read the log file {file}", server.host):
            while True:
                packet = db._read_packet()
                data = memoryview(packet.get_all_data())
                if data[0] == 0xFE:
                    raise SourceError(f"server {server.host[0]}:{server.host[1]} ended the look at the log file {file}")
                header = ev.Header(*ev.HEADER.unpack_from(data, 1))
                if header.type == ev.FORMAT_DESCRIPTION:
                    return header.timestamp
    except SourceError as error:
        if "1236" in str(error) and _NO_FILE in str(error).lower():  # the number stands for other errors, too
            return None
        raise
    finally:
        db._force_close()


def prepare_dump(db: Any, server: Server, *, heartbeat_seconds: float, replica: str) -> None:
    """Tell the server how this reader wants the log."""
    period = int(heartbeat_seconds * 1_000_000_000)
    settings = [
        f"@master_binlog_checksum = '{server.checksum}'", f"@source_binlog_checksum = '{server.checksum}'",
        "net_write_timeout = 86400",  # a reader whose spool is full does not read
    ]  # fmt: skip
    if period:
        settings += [f"@master_heartbeat_period = {period}", f"@source_heartbeat_period = {period}"]
    if replica:  # a newer reader of the same id ends this one
        settings += [f"@slave_uuid = '{replica}'", f"@replica_uuid = '{replica}'"]
    if server.is_mariadb:
        settings += ["@mariadb_slave_capability = 4"]
    query(db, server.host, f"SET {', '.join(settings)}")


def send(db: Any, command: bytes) -> None:
    """Send a command whose answer is a stream of packets."""
    db._next_seq_id = 1
    db._write_bytes(struct.pack("<I", len(command))[:3] + b"\0" + command)


def as_log_error(code: int, words: str, server: Server) -> SourceError | ConfigError:
    """Return the error for an error packet in the stream."""
    message = f"server {server.host[0]}:{server.host[1]} ended the stream: {words} ({code})"
    lower = words.lower()
    if code == 1236 and ("same server_uuid" in lower or "same server_id" in lower):
        return SourceError(f"{message}: another reader has the same server_id", hint=CONNECT_AGAIN)
    if code == 1236:
        return SourceGapError(message, hint=GAP_HINT)
    if code in (1045, 1227):
        return ConfigError(message, hint=grant_hint("USER"))
    return SourceError(message)
