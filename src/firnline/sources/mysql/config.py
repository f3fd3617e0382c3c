"""The keys of a source in a spec that captures changes from MySQL or MariaDB."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, SecretStr

from firnline.config.fields import Secret
from firnline.sources.cdc.config import LogSourceConfig
from firnline.sources.mysql.options import MySqlSourceOptions


class MySqlSourceConfig(LogSourceConfig):
    """A MySQL or MariaDB source: captures the changes of tables from the server's binary log."""

    other_words: ClassVar[dict[str, str]] = {"table": "tables", "url": "dsn"}
    options_class = MySqlSourceOptions

    type: Literal["mysql"] = Field(default="mysql", description="Kind of source.")
    dsn: Secret = Field(
        description="Connection: mysql://user:password@host:3306/database (several hosts with commas), best as "
        "${env:NAME} or ${file:path}."
    )
    snapshot_dsn: Secret = Field(
        default=SecretStr(""),
        json_schema_extra={"default": ""},
        description="A replica from which tables are read, to spare the server of `dsn`, which the log is read from: "
        "mysql://user:password@host:3306/database. Both have GTIDs.",
    )
    server_id: int | None = Field(
        default=None,
        ge=1,
        le=4_294_967_295,
        description="The id as which the reader is known to the server; no replica may have it. Default: made from the "
        "names of pipeline and source.",
    )

    accept_cascades: bool = Field(
        default=False,
        description="Capture tables whose rows a foreign key changes by itself (ON DELETE or ON UPDATE), although the "
        "binary log of MySQL before 9.6 and of MariaDB does not have these changes.",
    )
    partial_inserts: bool = Field(
        default=False,
        description="Take inserts whose columns the log leaves out, as row images MINIMAL and NOBLOB do with columns "
        "that got their default; they count as missing. Otherwise such an insert stops the run.",
    )
