"""The keys that Kafka sources and sinks share in a spec: brokers, TLS, SASL and options of the client."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from firnline.config.fields import TEXT_IN_YAML, Config, Flag, Secret, fail

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
