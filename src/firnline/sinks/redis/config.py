"""The keys of a Redis sink in a spec."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from firnline.config.fields import Count, Endpoint, Flag, Seconds, Secret, fail
from firnline.config.secrets import has_reference
from firnline.errors import ConfigError
from firnline.sinks.config import FollowerConfig
from firnline.sinks.redis.options import RedisAddress, RedisSinkOptions, find_problem

_CREDENTIALS = re.compile(r"//[^@/]*@")


class RedisSinkConfig(FollowerConfig):
    """A stream of a Redis server, or one hash or string per key."""

    other_words: ClassVar[dict[str, str]] = {"uri": "url", "host": "url", "topic": "stream", "prefix": "keys"}
    options_class = RedisSinkOptions
    upserts_records = True

    type: Literal["redis"] = Field(description="Kind of sink.")
    url: Secret = Field(
        description="redis://HOST:PORT/DB, or rediss:// with TLS (?ssl_ca_certs=FILE); keep a password in ${env:NAME}."
    )
    mode: Literal["stream", "hash", "string"] = Field(
        default="stream",
        description="stream appends an entry per row; hash and string keep one key per row, and imply write: upsert.",
    )
    stream: str = Field(default="", description="Mode stream: the key of the stream.")
    maxlen: Count | None = Field(
        default=None, description="Mode stream: trim the stream to about this many entries; null keeps all."
    )
    keys: str = Field(
        default="",
        description="Modes hash and string: the name of a row's key, with the key columns in braces, e.g. user:{id}; "
        "by default the name of the sink and the values of the key columns.",
    )
    fields: Literal["text", "json"] = Field(
        default="text", description="One field for each column, or one field `json` with the whole row."
    )
    event_id: Flag = Field(default=False, description="Add the field _firnline_id: pipeline, epoch, input and row.")
    durability: Literal["require_aof", "none"] = Field(
        default="require_aof",
        description="require_aof refuses a server that may forget what it has acknowledged; none trusts it.",
    )
    timeout_secs: Seconds = Field(default=30.0, description="How long to wait for an answer.")

    @model_validator(mode="before")
    @classmethod
    def _keys_are_upserted(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("mode") in ("hash", "string") and data.get("write") is None:
            return {**data, "write": "upsert"}
        return data

    @model_validator(mode="after")
    def _mode_fits(self) -> RedisSinkConfig:
        if self.mode == "stream":
            if self.write != "append":
                raise fail("a stream is appended to", "write", hint="Write `mode: hash` to keep one key per row.")
            if self.keys:
                raise fail("only with mode: hash or string (here it is stream)", "keys")
        else:
            if self.write != "upsert":
                raise fail(f"mode: {self.mode} keeps one key per row", "write", hint="Write `write: upsert`.")
            for name in ("stream", "maxlen"):
                if getattr(self, name):
                    raise fail(f"only with mode: stream (here it is {self.mode})", name)
        problem = find_problem(self.mode, self.stream, self.keys, self.key)
        if problem is not None:
            raise fail(problem[1], problem[0])
        return self

    @model_validator(mode="after")
    def _url_is_valid(self) -> RedisSinkConfig:
        text = self.url.get_secret_value()
        if not has_reference(text):
            try:
                RedisAddress.parse(text)
            except ConfigError as error:
                raise fail(error.message, "url", hint=error.hint) from None
        return self

    @property
    def endpoint(self) -> Endpoint:
        url = _CREDENTIALS.sub("//", self.url.get_secret_value())
        return Endpoint("stream" if self.mode == "stream" else "keys", f"{url}#{self.stream or self.keys or self.name}")
