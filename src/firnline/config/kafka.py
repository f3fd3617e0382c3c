"""The keys that Kafka sources and sinks share in a spec: brokers, TLS, SASL, options of the client, the registry."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from firnline.config.fields import TEXT_IN_YAML, Config, Flag, Location, Seconds, Secret, fail
from firnline.config.secrets import has_reference
from firnline.errors import ConfigError
from firnline.http_address import HttpAddress

_BROKER = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):[0-9]{1,5}")
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")


def _join_brokers(value: Any) -> Any:
    return ",".join(value) if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value) else value


def _check_brokers(value: str) -> str:
    brokers = [one.strip() for one in value.split(",")]
    for one in brokers:
        if not _BROKER.fullmatch(one):
            raise fail(f'"{one}" is no broker (write host:port, several with commas or as a list)')
    return ",".join(brokers)


def check_topic(value: str) -> str:
    """Check a topic's name."""
    if not _TOPIC.fullmatch(value) or value in (".", ".."):
        raise fail(f'"{value}" cannot be a topic name (letters, digits, ".", "_" and "-", at most 249)')
    return value


Brokers: TypeAlias = Annotated[
    str,
    BeforeValidator(_join_brokers),
    AfterValidator(_check_brokers),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
Topic: TypeAlias = Annotated[str, AfterValidator(check_topic)]
ClientOption: TypeAlias = Annotated[
    str, BeforeValidator(lambda v: str(v).lower() if isinstance(v, bool) else str(v)), TEXT_IN_YAML
]


class TlsConfig(Config):
    """How connections to brokers are encrypted. Files must be there for every worker; `${file:path}` sends the text."""

    other_words: ClassVar[dict[str, str]] = {"cert": "certificate", "cafile": "ca", "ca_file": "ca"}

    ca: Secret | None = Field(
        default=None,
        description="Certificates that sign the brokers': an absolute path, or PEM text by ${file:path}. Default: "
        "those of the system.",
    )
    certificate: Secret | None = Field(default=None, description="The client's certificate, in the same way.")
    key: Secret | None = Field(default=None, description="The client's private key, in the same way.")
    key_password: Secret | None = Field(default=None, description="Password of the key: ${env:NAME} or ${file:path}.")
    verify_hostname: Flag = Field(default=True, description="Whether a broker's certificate must bear its host name.")


class SaslConfig(Config):
    """How the client logs in."""

    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] = Field(
        default="SCRAM-SHA-512", description="SASL mechanism. OAUTHBEARER asks `token_url` for a token (OIDC)."
    )
    username: str = Field(description="The user; with OAUTHBEARER, the client id.")
    password: Secret = Field(description="${env:NAME} or ${file:path}; with OAUTHBEARER, the client secret.")
    token_url: str = Field(default="", description="OAUTHBEARER: where tokens come from.")
    scope: str = Field(default="", description="OAUTHBEARER: scope of the token.")

    @model_validator(mode="after")
    def _token_url_fits(self) -> SaslConfig:
        if (self.mechanism == "OAUTHBEARER") != bool(self.token_url):
            raise fail("token_url and mechanism: OAUTHBEARER go together", "token_url")
        return self


def check_client_options(options: dict[str, str], allowed: Collection[str]) -> dict[str, str]:
    """Check that a spec sets only client options that it may."""
    for name in options:
        if name not in allowed:
            raise fail(f'"{name}" may not be set (allowed: {", ".join(sorted(allowed))})', name)
    return options


class RegistryConfig(Config):
    """A schema registry with Confluent's HTTP interface."""

    other_words: ClassVar[dict[str, str]] = {"ca": "ca_file", "user": "username", "timeout": "timeout_secs"}

    url: Secret = Field(description="https://HOST; http:// only to this machine, or with allow_http.")
    username: str = Field(default="", description="The user, for a login by name and password.")
    password: Secret | None = Field(default=None, description="${env:NAME} or ${file:path}.")
    token: Secret | None = Field(default=None, description="Instead: a bearer token, ${env:NAME} or ${file:path}.")
    ca_file: Location | None = Field(
        default=None, description="File with the certificates to trust; by default those of the system."
    )
    allow_http: Flag = Field(default=False, description="Allow http:// to other machines, without encryption.")
    timeout_secs: Seconds = Field(default=10.0, description="How long to wait for an answer.")

    @model_validator(mode="after")
    def _requests_can_be_sent(self) -> RegistryConfig:
        url = self.url.get_secret_value()
        if not has_reference(url):
            try:
                HttpAddress.parse(url, allow_http=self.allow_http, of="a registry", secrets="password")
            except ConfigError as error:
                raise fail(error.message, "url", hint=error.hint) from None
        if self.token is not None and (self.username or self.password is not None):
            raise fail("give either a token, or username and password", "token")
        if bool(self.username) != (self.password is not None):
            raise fail("username and password go together", "username")
        return self


def check_registry(value: str, registry: RegistryConfig | None, *, alone: bool = False) -> None:
    """Check that Avro values and a registry go together; `alone`: a registry may stay for older epochs."""
    if value == "avro" and registry is None:
        raise fail("value: avro needs a schema registry", "value", hint="Add `registry: {url: https://HOST:8081}`.")
    if value != "avro" and registry is not None and not alone:
        raise fail("a registry is used with value: avro only", "registry")
