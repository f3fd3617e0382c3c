"""The keys of an HTTP sink in a spec."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, SecretStr, model_validator

from firnline.config.fields import Count, Endpoint, Flag, Location, ReadSecret, Seconds, Secret, Size, fail
from firnline.config.secrets import has_reference
from firnline.config.units import size_text
from firnline.errors import ConfigError
from firnline.http_address import HttpAddress
from firnline.options import SinkOptions
from firnline.sinks.config import FollowerConfig
from firnline.sinks.http.options import DEFAULT_BATCH_BYTES, HttpSinkOptions, find_bad_header


class HttpSinkConfig(FollowerConfig):
    """A URL that takes batches of rows."""

    other_words: ClassVar[dict[str, str]] = {
        "uri": "url",
        "endpoint": "url",
        "secret": "hmac",
    }
    options_class = HttpSinkOptions

    type: Literal["http"] = Field(default="http", description="Kind of sink.")
    url: Secret = Field(description="https://HOST/PATH; http:// only to this machine, or with allow_http.")
    method: Literal["POST", "PUT"] = Field(default="POST", description="The method of requests.")
    format: Literal["ndjson", "json"] = Field(
        default="ndjson", description="One JSON object per line, or a JSON array of objects."
    )
    max_rows: Count = Field(default=500, description="The most rows of one request.")
    max_bytes: Size = Field(
        default=DEFAULT_BATCH_BYTES,
        json_schema_extra={"default": size_text(DEFAULT_BATCH_BYTES)},
        description="The most bytes of one request; a larger row goes alone.",
    )
    headers: dict[str, Secret] = Field(
        default={}, description="Headers of every request; values may be ${env:NAME} or ${file:path}."
    )
    hmac: Secret | None = Field(default=None, description="Secret that signs every request (HMAC-SHA256).")
    event_id: Flag = Field(default=False, description="Add _firnline_id to each row: pipeline, epoch, input and row.")
    allow_http: Flag = Field(default=False, description="Allow http:// to other machines, without encryption.")
    ca_file: Location | None = Field(
        default=None, description="File with the certificates to trust; by default those of the system."
    )
    timeout_secs: Seconds = Field(default=30.0, description="How long to wait for an answer.")

    @model_validator(mode="after")
    def _requests_can_be_sent(self) -> HttpSinkConfig:
        if self.write != "append":
            raise fail("an HTTP sink takes rows, it keeps none by key", "write", hint="Write `write: append`.")
        url = self.url.get_secret_value()
        if not has_reference(url):
            try:
                HttpAddress.parse(url, allow_http=self.allow_http)
            except ConfigError as error:
                raise fail(error.message, "url", hint=error.hint) from None
        bad = find_bad_header({name: _shown(value) for name, value in self.headers.items()})
        if bad is not None:
            raise fail(f'"{bad[0]}" {bad[1]}', "headers")
        return self

    @property
    def endpoint(self) -> Endpoint:
        url = self.url.get_secret_value()
        return Endpoint("url", url if has_reference(url) else HttpAddress.parse(url, allow_http=True).shown)

    def build(self, input_name: str, read_secret: ReadSecret) -> SinkOptions:
        """Return the options of the sink; keys without a value are empty text there."""
        values: dict[str, Any] = {key: value for key, value in self.plain(read_secret).items() if key != "type"}
        empty = {key: values[key] or "" for key in ("copy_from", "renamed_from", "hmac", "ca_file")}
        return self.options_class(**{**values, **empty, "input": input_name})


def _shown(value: SecretStr) -> str:
    """Return a value as far as it is known: a reference is replaced later."""
    text = value.get_secret_value()
    return "" if has_reference(text) else text
