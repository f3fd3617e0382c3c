"""The building blocks of a spec's models: names, numbers, durations, locations, secrets, and errors with a key path."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from firnline.config.secrets import MaskedDict, MaskedText, SecretError, check_references
from firnline.config.units import DURATION_PATTERN, SIZE_PATTERN, parse_millis, parse_seconds, parse_size

# A text with references and its path below the model -> the text with the secrets themselves.
ReadSecret: TypeAlias = Callable[[str, tuple[str | int, ...]], str]

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$"
RESERVED_PREFIX = "_firnline"
RESCUED_COLUMN = "_rescued_data"
SECONDS_PER_YEAR = 366 * 24 * 3600
_UNITS = {
    "ms": timedelta(milliseconds=1),
    "s": timedelta(seconds=1),
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
}
_BAD_COLUMN_CHARACTERS = re.compile(r"[ ,;{}()\n\t=]")
SCHEMES = ("s3", "gs", "az", "abfs", "abfss", "file")
_OTHER_WORDS = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "azure": "az", "wasb": "az", "wasbs": "az", "adl": "abfs"}
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")
_GLOB = re.compile(r"[*?\[]")
_SERVERS = ("http", "https", "kafka", "postgresql", "redis", "rediss")


def absolute_location(text: str, folder: str) -> str:
    """Return a local path made absolute against `folder`; a URI is only checked.

    Raises:
        ValueError: an unknown scheme, credentials in the URI, or nothing named.
    """
    if not text.strip():
        raise ValueError("must not be empty")
    if "\0" in text or "\n" in text:
        raise ValueError("must not hold line ends or NUL characters")
    match = _SCHEME.match(text)
    if match is None:
        return os.path.abspath(os.path.join(folder, os.path.expanduser(text)))
    _check_uri(text, match.group(1))
    return text


def _check_uri(text: str, scheme: str) -> None:
    if scheme not in SCHEMES:
        word = _OTHER_WORDS.get(scheme.lower(), scheme.lower())
        known = ", ".join(f"{s}://" for s in SCHEMES)
        raise ValueError(
            f'unknown scheme "{scheme}://" ' + (f'(write "{word}://")' if word in SCHEMES else f"(known: {known})")
        )
    authority = text[len(scheme) + 3 :].split("/", 1)[0]
    if scheme == "file":
        if authority not in ("", "localhost"):
            raise ValueError('a "file://" URI needs an absolute path: file:///folder')
    elif not authority:
        raise ValueError(f'"{scheme}://" is not followed by a bucket or container')
    elif ":" in authority.rpartition("@")[0]:
        raise ValueError("credentials do not belong in a URI; put them under storage_options")


def _spelt(location: str) -> str:
    """Return the location in one spelling: no `file://`, no trailing or doubled slash, up to the first glob."""
    scheme = _SCHEME.match(location)
    match = _GLOB.search(location)
    if match is not None and not (scheme is not None and scheme.group(1) in _SERVERS):  # an IPv6 address is no glob
        location = location[: match.start()].rpartition("/")[0] or "/"
    if scheme is not None and scheme.group(1) != "file":
        return re.sub(r"(?<!:)/+", "/", location).rstrip("/")
    path = urlsplit(location).path if scheme is not None else location
    return os.path.normpath(path)


def same_place(a: str, b: str) -> bool:
    """Whether two absolute locations are spellings of the same location."""
    return _spelt(a) == _spelt(b)


def is_inside(inner: str, outer: str) -> bool:
    """Whether an absolute location equals or lies below another one. Only a glob with `**` reaches below."""
    if _GLOB.search(outer) and "**" not in outer:
        return False
    below, above = _spelt(inner), _spelt(outer)
    return below == above or below.startswith(above.rstrip("/") + "/")


def fail(message: str, *at: str | int, hint: str | None = None) -> PydanticCustomError:
    """Return an error with a message of our own; `at` is the path from the validated value to the wrong one."""
    context: dict[str, Any] = {"message": message, "at": at, "hint": hint}
    return PydanticCustomError("spec", "{message}", context)


def below(error: PydanticCustomError, *at: str | int) -> PydanticCustomError:
    """Return an error of `fail` with a longer path: `at` leads to the value that its own path starts at."""
    context = error.context or {}
    return fail(context["message"], *at, *context["at"], hint=context["hint"])


def differ(values: tuple[str, ...], what: str) -> tuple[str, ...]:
    """Return the values if none is there twice, in upper or lower case; `what` names one of them."""
    for index, value in enumerate(values):
        if value.lower() in (other.lower() for other in values[:index]):
            raise fail(f'{what} "{value}" is there twice', index)
    return values


class Endpoint(NamedTuple):
    """Where a source reads or a sink writes, and the key that says so."""

    key: str
    location: str  # an absolute path or a URI; without credentials


class Config(BaseModel):
    """Base of all models of the spec: frozen, refuses unknown keys, never shows inputs in errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, validate_by_name=True)
    other_words: ClassVar[dict[str, str]] = {}  # common other names of a key -> the key

    @model_validator(mode="before")
    @classmethod
    def _empty_means_default(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {key: value for key, value in data.items() if value is not None or key not in known}

    def plain(self, read_secret: ReadSecret) -> dict[str, Any]:
        """Return the fields as plain values for an options class: secrets are read, and no `repr` shows them."""
        fields = type(self).model_fields.items()
        return {name: plain(getattr(self, name), read_secret, (field.alias or name,)) for name, field in fields}


def plain(value: Any, read_secret: ReadSecret, at: tuple[str | int, ...] = ()) -> Any:
    """Return a value of a model as a plain value, see `Config.plain`."""
    if isinstance(value, SecretStr):
        return MaskedText(read_secret(value.get_secret_value(), at))
    if isinstance(value, Config):
        return value.plain(lambda text, path: read_secret(text, (*at, *path)))
    if isinstance(value, tuple):
        return tuple(plain(item, read_secret, (*at, index)) for index, item in enumerate(value))
    if isinstance(value, dict):
        items = {key: plain(item, read_secret, (*at, key)) for key, item in value.items()}
        if not all(isinstance(item, str) for item in items.values()):
            return items
        return MaskedDict(items, shown=[key for key, item in value.items() if isinstance(item, str)])
    return value


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise fail(f"must be a number, not {str(value).lower()}")
    return value


def _no_number(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise fail(f"must be true or false, not {value}")
    return value


def location(value: str, info: ValidationInfo) -> str:
    """Return a local path made absolute against the spec's folder; a URI is only checked."""
    folder = (info.context or {}).get("folder") or os.getcwd()
    try:
        return absolute_location(value, str(folder))
    except ValueError as exc:
        raise fail(str(exc)) from None


def _window(value: Any) -> Any:
    """Epochs as a number, or time as text: 90s, 30m, 12h, 7d."""
    _no_boolean(value)
    if isinstance(value, int | timedelta):
        if isinstance(value, int) and value < 1:
            raise fail(f"must be at least 1, not {value}")
        return value
    try:
        if not isinstance(value, str) or value.strip().isdigit():
            raise ValueError
        return _bounded(timedelta(seconds=parse_seconds(value)), value)
    except (ValueError, OverflowError):
        raise fail(f"must be a number of epochs, or a time like 30m, 12h or 7d, not {_shown(value)}") from None


def _duration(value: Any) -> Any:
    """Time as text (250ms, 30s, 10m, 1h30m, 7d) or as a number of seconds."""
    if isinstance(value, timedelta):
        return _bounded(value, duration_text(value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    try:
        if not isinstance(value, str):
            raise ValueError(f"must be a time like 250ms, 30s, 10m, 1h30m, 7d or 90 (seconds), not {_shown(value)}")
        parse_seconds(value)  # raises with the words for a number of seconds
        return _bounded(timedelta(milliseconds=parse_millis(f"{value}s" if is_number(value) else value)), value)
    except ValueError as error:
        raise fail(str(error)) from None
    except OverflowError:
        raise fail(f'"{value}" must be more than 0 and at most a year') from None


def _from_text(parse: Callable[[str], float]) -> Callable[[Any], Any]:
    """Return a validator for numbers that may also be written as text with a unit."""

    def read(value: Any) -> Any:
        _no_boolean(value)
        if not isinstance(value, str) or is_number(value):
            return value
        try:
            return parse(value)
        except ValueError as error:
            raise fail(str(error)) from None

    return read


def is_number(text: str) -> bool:
    """Whether a text is a plain number, without a unit."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool | float) else "a list or a mapping"


def _bounded(span: timedelta, text: str) -> timedelta:
    if not 0 < span.total_seconds() <= SECONDS_PER_YEAR:
        raise fail(f'"{text}" must be more than 0 and at most a year')
    return span


def duration_text(span: timedelta) -> str:
    """Return a duration as written in a spec, in the largest unit that keeps it whole."""
    unit = next(u for u in reversed(_UNITS) if not span % _UNITS[u] or u == "ms")
    return f"{span // _UNITS[unit]}{unit}"


def micros(span: timedelta) -> int:
    """Return a duration in microseconds."""
    return span // timedelta(microseconds=1)


def _reference(value: SecretStr) -> SecretStr:
    try:
        check_references(value.get_secret_value())
    except SecretError as exc:
        raise fail(str(exc)) from None
    return value


def _column_name(value: str) -> str:
    if value.startswith(RESERVED_PREFIX):
        raise fail(f'names that start with "{RESERVED_PREFIX}" are reserved')
    if value == RESCUED_COLUMN:
        raise fail(f'the name "{RESCUED_COLUMN}" is reserved')
    if not value or _BAD_COLUMN_CHARACTERS.search(value):
        raise fail(f'"{value}" cannot be a column name (no spaces, and none of , ; {{ }} ( ) =)')
    return value


def _number_or_text(kind: str, pattern: str, **bounds: float) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": kind, **bounds}, {"type": "string", "pattern": pattern}]})


Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Count = Annotated[int, Field(ge=1), BeforeValidator(_no_boolean)]
Retries = Annotated[int, Field(ge=0), BeforeValidator(_no_boolean)]
# Sizes and durations: a number in the unit of the key (bytes, milliseconds, seconds), or text with a unit.
Size = Annotated[
    int,
    Field(ge=1),
    BeforeValidator(_from_text(parse_size)),
    _number_or_text("integer", SIZE_PATTERN, minimum=1),
]
Millis = Annotated[
    int,
    Field(ge=1),
    BeforeValidator(_from_text(parse_millis)),
    _number_or_text("integer", DURATION_PATTERN, minimum=1),
]
Seconds = Annotated[
    float,
    Field(gt=0, le=SECONDS_PER_YEAR, allow_inf_nan=False),
    BeforeValidator(_from_text(parse_seconds)),
    _number_or_text("number", DURATION_PATTERN, exclusiveMinimum=0, maximum=SECONDS_PER_YEAR),
]
SecondsOrZero = Annotated[
    float,
    Field(ge=0, le=SECONDS_PER_YEAR, allow_inf_nan=False),
    BeforeValidator(_from_text(parse_seconds)),
    _number_or_text("number", DURATION_PATTERN, minimum=0, maximum=SECONDS_PER_YEAR),
]
Ratio = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), BeforeValidator(_no_boolean)]
Flag = Annotated[bool, BeforeValidator(_no_number)]
Location = Annotated[str, AfterValidator(location)]
Window = Annotated[
    int | timedelta,
    BeforeValidator(_window),
    _number_or_text("integer", DURATION_PATTERN, minimum=1),
]
ColumnName = Annotated[str, AfterValidator(_column_name)]
Duration = Annotated[
    timedelta,
    BeforeValidator(_duration),
    PlainSerializer(duration_text, return_type=str, when_used="json"),
    _number_or_text("number", DURATION_PATTERN, exclusiveMinimum=0, maximum=SECONDS_PER_YEAR),
]
TEXT_IN_YAML = WithJsonSchema({"type": ["string", "number", "boolean"]})  # numbers are kept as they are written
Secret = Annotated[SecretStr, AfterValidator(_reference), TEXT_IN_YAML]
