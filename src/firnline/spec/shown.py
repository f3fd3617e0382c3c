"""A spec as it may be shown. What is shown of a field follows from the models of the spec, field by field.

A field is stars if its type is a secret, if its key may name one (password, token, dsn), or if it is a mapping whose
keys a user makes up and whose values are texts: options, headers. All other settings are shown; of a text that is a
URI, only scheme, host and path are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import BaseModel, SecretStr

from firnline.spec.loading import LoadedSpec
from firnline.types import Json

MASK = "***"
_SECRET_KEY = re.compile(
    r"password|passwd|passphrase|secret|credential|token(?!_url$)|(^|_)dsn$|hmac|private|api_?key|access_?key|"
    r"account_?key|signature|^options$|_options$|^headers$|^properties$|^params$",
    re.IGNORECASE,
)
_URI = re.compile(r"(?:jdbc:)?[a-z][a-z0-9+.-]{1,20}://[^\s'\"<>`,;)}\]]+", re.IGNORECASE)
# user:password@host, in what is no valid URI: what lies before the @, which is then split at its first colon.
_BEFORE_HOST = re.compile(r"(?<![^\s/@])[^\s/@]+@(?=[\w\[])")
_BEFORE_USER = re.compile(r"(?:.*[^\w.%+-])?")


def show_spec(loaded: LoadedSpec) -> dict[str, Json]:
    """Return the whole spec with its defaults, without secrets."""
    body: dict[str, Json] = loaded.spec.model_dump(mode="json", by_alias=True)
    return _show_model(loaded.spec, body)


def _show_model(model: BaseModel, body: Mapping[str, Json]) -> dict[str, Json]:
    """Return the fields of a model; `body` is what it is dumped as."""
    fields = type(model).model_fields
    names = {field.serialization_alias or field.alias or name: name for name, field in fields.items()}
    found: dict[str, Json] = {}
    for key, dumped in body.items():
        name = names.get(key)
        if name is None:  # no field of the model: nothing is known of it
            found[key] = _mask(dumped)
            continue
        is_free = _is_free(fields[name].annotation)
        hides = _SECRET_KEY.search(key) is not None
        found[key] = _mask(dumped) if hides else _show(getattr(model, name), dumped, is_free=is_free)
    return found


def _show(value: Any, dumped: Json, *, is_free: bool) -> Json:
    if isinstance(value, SecretStr):
        return MASK
    if isinstance(value, BaseModel):
        return _show_model(value, dumped) if isinstance(dumped, Mapping) else _mask(dumped)
    if isinstance(value, Mapping) and isinstance(dumped, Mapping):
        if is_free and not any(isinstance(one, BaseModel) for one in value.values()):
            return _mask(dumped)
        return {key: _show(value.get(key), one, is_free=is_free) for key, one in dumped.items()}
    if isinstance(value, list | tuple) and isinstance(dumped, list):
        if len(value) != len(dumped):
            return _mask(dumped)
        return [_show(one, of, is_free=is_free) for one, of in zip(value, dumped, strict=True)]
    if isinstance(dumped, str):
        return location_text(dumped)
    return dumped if dumped is None or isinstance(dumped, bool | int | float) else _mask(dumped)


def _is_free(annotation: Any) -> bool:
    """Whether a type is, or holds, a mapping whose values are texts or anything: a user makes up its keys."""
    if annotation is Any:
        return True
    if get_origin(annotation) is Literal:
        return False
    arguments = get_args(annotation)
    if get_origin(annotation) in (dict, Mapping):
        return len(arguments) != 2 or _holds_text(arguments[1])
    return annotation is dict or any(_is_free(one) for one in arguments)


def _holds_text(annotation: Any) -> bool:
    if annotation in (str, SecretStr, Any, object):
        return True
    if get_origin(annotation) is Literal:
        return False
    return any(_holds_text(one) for one in get_args(annotation))


def _mask(value: Json) -> Json:
    """Return the shape of a value: the keys of a mapping, and stars for everything that is set."""
    if isinstance(value, Mapping):
        return dict.fromkeys(value, MASK)
    if isinstance(value, list):
        return [MASK for _ in value]
    return value if value is None or value == "" else MASK


def location_text(text: str) -> str:
    """Return a text with its URIs without user, password, query and fragment."""
    if "://" in text:
        text = _URI.sub(lambda found: _without_user(found.group()), text)
    return _BEFORE_HOST.sub(_mask_user, text) if "@" in text else text


def _mask_user(found: re.Match[str]) -> str:
    before, _, password = found.group()[:-1].partition(":")
    kept = _BEFORE_USER.match(before)
    return f"{kept.group()}{MASK}@" if password and kept else found.group()


def _without_user(text: str) -> str:
    jdbc = "jdbc:" if text.lower().startswith("jdbc:") else ""
    try:
        parts = urlsplit(text[len(jdbc) :])
    except ValueError:
        return f"{jdbc}{text[len(jdbc) :].partition('://')[0]}://{MASK}"
    return f"{jdbc}{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
