"""Kafka clients: the library, the settings that a spec may give it, and its errors in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from firnline.clock import monotonic
from firnline.errors import ConfigError, MissingExtraError, SourceError

if TYPE_CHECKING:
    from types import ModuleType

    from confluent_kafka import KafkaError

# Options of the client library that a spec may set. None of them loads code, names a file or changes what is promised.
CLIENT_OPTIONS = frozenset(
    {
        "broker.address.family", "broker.address.ttl", "client.dns.lookup", "client.id", "client.rack",
        "connections.max.idle.ms", "metadata.max.age.ms", "receive.message.max.bytes", "reconnect.backoff.max.ms",
        "reconnect.backoff.ms", "socket.connection.setup.timeout.ms", "socket.keepalive.enable", "socket.nagle.disable",
        "socket.receive.buffer.bytes", "socket.send.buffer.bytes", "socket.timeout.ms",
    }
)  # fmt: skip
CONSUMER_OPTIONS = CLIENT_OPTIONS | {
    "check.crcs", "fetch.error.backoff.ms", "fetch.max.bytes", "fetch.message.max.bytes", "fetch.min.bytes",
    "fetch.wait.max.ms", "max.partition.fetch.bytes", "queued.max.messages.kbytes", "queued.min.messages",
}  # fmt: skip
PRODUCER_OPTIONS = CLIENT_OPTIONS | {
    "batch.num.messages", "batch.size", "compression.level", "compression.type", "linger.ms",
    "queue.buffering.max.kbytes", "queue.buffering.max.messages",
}  # fmt: skip
QUIET = {"log_level": 0}  # failures come as errors; the library would also write them to stderr
_FINAL = frozenset(
    {
        "_AUTHENTICATION", "_SSL", "SASL_AUTHENTICATION_FAILED", "UNSUPPORTED_SASL_MECHANISM",
        "TOPIC_AUTHORIZATION_FAILED", "GROUP_AUTHORIZATION_FAILED", "CLUSTER_AUTHORIZATION_FAILED",
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
    }
)  # fmt: skip


def load_library() -> ModuleType:
    """Return the client library.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import confluent_kafka
    except ImportError as error:
        raise MissingExtraError(extra="kafka") from error
    return confluent_kafka


def security_settings(tls: Mapping[str, Any] | bool | None, sasl: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the client's settings for the keys `tls` and `sasl` of a spec."""
    settings: dict[str, str] = {}
    if tls:
        keys = tls if isinstance(tls, Mapping) else {}
        for name in ("ca", "certificate", "key"):
            if text := keys.get(name):
                settings[f"ssl.{name}.{'pem' if str(text).lstrip().startswith('-----BEGIN') else 'location'}"] = text
        if keys.get("key_password"):
            settings["ssl.key.password"] = keys["key_password"]
        if keys.get("verify_hostname") is False:
            settings["ssl.endpoint.identification.algorithm"] = "none"
    if sasl:
        settings["sasl.mechanism"] = sasl["mechanism"]
        if sasl["mechanism"] == "OAUTHBEARER":
            settings["sasl.oauthbearer.method"] = "oidc"
            settings["sasl.oauthbearer.token.endpoint.url"] = sasl["token_url"]
            settings["sasl.oauthbearer.client.id"] = sasl["username"]
            settings["sasl.oauthbearer.client.secret"] = sasl["password"]
            if sasl.get("scope"):
                settings["sasl.oauthbearer.scope"] = sasl["scope"]
        else:
            settings["sasl.username"], settings["sasl.password"] = sasl["username"], sasl["password"]
    if tls or sasl:
        settings["security.protocol"] = ("SASL_" if sasl else "") + ("SSL" if tls else "PLAINTEXT")
    return settings


ANSWER_SECONDS = 8.0  # for the first answer of brokers that somebody waits for at a screen
DOWN_SECONDS = 2.0  # the same, once no broker takes a connection


def find_unreachable(settings: Mapping[str, Any]) -> KafkaError | None:
    """Ask the brokers for any answer. Returns why there is none; None if there is one."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    causes: list[KafkaError] = []
    watched: dict[str, Any] = {**settings, **QUIET, "error_cb": causes.append}
    admin = AdminClient(watched)
    began = monotonic()
    answer = admin.describe_cluster(request_timeout=ANSWER_SECONDS)
    while not answer.done():
        admin.poll(0.05)
        all_down = any(cause.name() == "_ALL_BROKERS_DOWN" for cause in causes)
        found = [cause for cause in causes if cause.name() != "_ALL_BROKERS_DOWN"]
        if found and (is_final(found[-1]) or (all_down and monotonic() - began > DOWN_SECONDS)):
            return found[-1]
    try:
        answer.result()
    except KafkaException as error:
        final = [cause for cause in causes if cause.name() != "_ALL_BROKERS_DOWN"]
        return final[-1] if final else error.args[0]
    return None


def is_final(error: KafkaError) -> bool:
    """Return whether a retry would not help: wrong credentials, missing rights."""
    return error.name() in _FINAL


def as_source_error(what: str, brokers: str, error: Any) -> SourceError | ConfigError:
    """Return the error for a failed call of the library: `what` says what was tried. Holds no secret."""
    inner = error.args[0] if getattr(error, "args", None) else error
    name = inner.name() if hasattr(inner, "name") else type(error).__name__
    words = inner.str() if hasattr(inner, "str") else str(error)
    message = f"{what}: {words} ({name}; brokers {brokers})"
    if hasattr(inner, "name") and is_final(inner):
        return ConfigError(message, hint="Check sasl, tls and the rights of this user on the brokers.")
    return SourceError(message, hint="Check that the brokers can be reached, then run again; nothing was lost.")
