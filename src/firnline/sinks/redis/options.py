"""The options of a Redis sink, and the names of the keys that it writes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from firnline.errors import ConfigError
from firnline.names import REDIS_PREFIX
from firnline.options import OP, OPERATIONS, FollowerOptions, StrictColumn
from firnline.types import Json

Mode = Literal["stream", "hash", "string"]

SCHEMES = {"redis": False, "rediss": True}  # whether with TLS
TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
DEFAULT_PORT = 6379
_COLUMN = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True, slots=True)
class RedisSinkOptions(FollowerOptions):
    """A stream, or one hash or string per key."""

    type: ClassVar[str] = "redis"

    url: str = field(repr=False)  # redis:// or rediss://; holds a secret
    mode: Mode = field(default="stream", kw_only=True)
    stream: str = field(default="", kw_only=True)  # mode stream: its key
    maxlen: int | None = field(default=None, kw_only=True)  # mode stream: trim to about this many entries
    keys: str = field(default="", kw_only=True)  # hash, string: the name of a row's key, e.g. user:{id}
    fields: Literal["text", "json"] = field(default="text", kw_only=True)
    event_id: bool = field(default=False, kw_only=True)  # add `_firnline_id` to each row
    durability: Literal["require_aof", "none"] = field(default="require_aof", kw_only=True)
    timeout_secs: float = field(default=30.0, kw_only=True)

    @property
    def location(self) -> str:
        return f"{RedisAddress.parse(self.url).shown}/{self.stream or self.key_template}"

    @property
    def key_template(self) -> str:
        """The names of rows' keys; by default the sink's name and the values of the key columns."""
        return self.keys or ":".join([self.name, *(f"{{{column}}}" for column in self.key)])

    @property
    def strict_columns(self) -> Mapping[str, StrictColumn]:
        return {OP: StrictColumn("string", OPERATIONS)} if self.write == "upsert" else {}

    def own_shape(self) -> dict[str, Json]:
        return RedisShape.of(self).to_json()


@dataclass(frozen=True, slots=True)
class RedisShape:
    """The settings that shape what is written. Every epoch keeps those that it was made with."""

    mode: Mode
    target: str  # the stream, or the template of keys
    columns: tuple[str, ...]  # of the key
    fields: Literal["text", "json"]
    event_id: bool
    maxlen: int | None

    @classmethod
    def of(cls, options: RedisSinkOptions) -> RedisShape:
        """Return the shape that options ask for."""
        target = options.stream if options.mode == "stream" else options.key_template
        return cls(options.mode, target, options.key, options.fields, options.event_id, options.maxlen)

    def to_json(self) -> dict[str, Json]:
        return {
            "mode": self.mode,
            "target": self.target,
            "columns": list(self.columns),
            "fields": self.fields,
            "event_id": self.event_id,
            "maxlen": self.maxlen,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> RedisShape:
        return cls(
            value["mode"], value["target"], tuple(value["columns"]), value["fields"], value["event_id"], value["maxlen"]
        )

    @property
    def keeps_old(self) -> bool:
        """Whether a field keeps its value if a change row has none; a whole row in one value does not."""
        return self.mode == "hash" and self.fields == "text"

    @property
    def literals(self) -> list[str]:
        """The text before, between and after the columns of the template."""
        return _COLUMN.split(self.target)[::2]

    @property
    def template_columns(self) -> list[str]:
        """The columns of the template, in its order."""
        return _COLUMN.findall(self.target)


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where a server is, parsed from a URL; `shown` has no credentials."""

    host: str
    port: int
    db: int
    tls: bool
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls_files: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """Parse `redis[s]://[user:password@]host[:port][/db][?ssl_ca_certs=FILE]`. Never repeats the URL in an error.

        Raises:
            ConfigError: it is invalid.
        """
        hint = "Write redis://HOST:6379/0, or rediss://HOST:6379/0 with TLS; keep the password in ${env:NAME}."
        try:
            parts = urlsplit(url.strip())
            port, query = parts.port or DEFAULT_PORT, parse_qsl(parts.query, keep_blank_values=True)
            db = int(parts.path.strip("/") or 0)
        except ValueError:
            raise ConfigError("the url of a Redis sink is invalid", hint=hint) from None
        if parts.scheme not in SCHEMES:
            raise ConfigError("the url of a Redis sink must begin with redis:// or rediss://", hint=hint)
        if not parts.hostname:
            raise ConfigError("the url of a Redis sink names no host", hint=hint)
        unknown = [name for name, _ in query if name not in TLS_FILES]
        if unknown or (query and not SCHEMES[parts.scheme]):
            raise ConfigError(
                f"the url of a Redis sink has the setting {(unknown or [query[0][0]])[0]!r}",
                hint=f"Known settings, with rediss:// only: {', '.join(TLS_FILES)}.",
            )
        return cls(
            host=parts.hostname,
            port=port,
            db=db,
            tls=SCHEMES[parts.scheme],
            username=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
            tls_files=dict(query),
        )

    @property
    def shown(self) -> str:
        """The address for messages."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"redis{'s' if self.tls else ''}://{host}:{self.port}/{self.db}"


def find_problem(mode: str, stream: str, keys: str, columns: tuple[str, ...]) -> tuple[str, str] | None:
    """Return what is wrong with the names of keys, as (setting, words); None if nothing is.

    `columns` are the key columns; none if an operator names them.
    """
    if mode == "stream":
        if not stream:
            return "stream", "missing: mode: stream needs the name of the stream"
        return ("stream", f"must not begin with {REDIS_PREFIX}") if stream.startswith(REDIS_PREFIX) else None
    if not keys:
        return None
    literals, named = _COLUMN.split(keys)[::2], _COLUMN.findall(keys)
    if any("{" in literal or "}" in literal for literal in literals) or not all(named):
        return "keys", "has braces that enclose no column"
    if keys.startswith(REDIS_PREFIX):
        return "keys", f"must not begin with {REDIS_PREFIX}"
    if not named or (columns and sorted(named) != sorted(columns)):
        return "keys", f"must name every key column once: {', '.join(columns) or 'it names none'}"
    if any(":" not in between for between in literals[1:-1]):
        return "keys", "must have a colon between two columns, so that two keys never have the same name"
    return None


def head_key(pipeline: str, sink: str, stream: str) -> str:
    """The key of a sink's head. It has the hash tag of the stream, so that both are in one slot of a cluster."""
    return f"{REDIS_PREFIX}{_escaped(pipeline)}:{_escaped(sink)}:head{_tag_of(stream)}"


def owner_key(target: str) -> str:
    """The key that says which sink writes to a stream, or to the keys of a template."""
    return f"{REDIS_PREFIX}owner:{target}"


def hash_tag(key: str) -> str:
    """The hash tag of a key: what decides its slot in a cluster; empty if it has none."""
    found = re.search(r"\{([^}]*)\}", key)
    return found.group(1) if found else ""


def _tag_of(stream: str) -> str:
    tag = hash_tag(stream)
    return f":{{{tag}}}" if tag else ""


def _escaped(name: str) -> str:
    return quote(name, safe="")
