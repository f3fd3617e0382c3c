"""Secrets: `${env:X}` and `${file:path}` references, and mappings that do not show their values."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = [
    "MASK",
    "MaskedDict",
    "MaskedText",
    "SecretError",
    "check_references",
    "is_inline_secret",
    "is_sensitive",
    "resolve_secret",
]

MASK = "**********"
KNOWN_KINDS = ("env", "file")
MAX_SECRET_BYTES = 1024 * 1024  # a reference to a device or a log must not fill the memory

_REFERENCE = re.compile(r"\$\{([A-Za-z]+):(?!-)([^}]*)\}")
_URI_PASSWORD = re.compile(r"://[^/?#@\s:]*:([^@\s]+)@")  # user:password@host
_PASSWORD_SETTING = re.compile(r"\bpassword\s*=\s*('[^']+'|[^\s&;]+)", re.I)  # of a connection string
_SENSITIVE = re.compile(r"secret|password|passwd|token|credential|(access|account|api|sas|encryption)[._-]?key", re.I)


class SecretError(ValueError):
    """A reference is malformed, or what it names cannot be read. The message never holds a secret."""


class MaskedText(str):
    """A secret that its `repr` does not show."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'**********'" if self else "''"


class MaskedDict(dict[str, str]):
    """A plain mapping of strings whose `repr` hides some or all of its values.

    Args:
        values: The real values; reading them is like reading any mapping.
        shown: Keys whose values are no secrets.
    """

    def __init__(self, values: Mapping[str, str] | Iterable[tuple[str, str]] = (), shown: Iterable[str] = ()) -> None:
        super().__init__(values)
        self._shown = frozenset(shown)

    def __repr__(self) -> str:
        return repr({key: value if key in self._shown else MASK for key, value in self.items()})

    def __reduce__(self) -> tuple[object, ...]:
        return (MaskedDict, (dict(self), tuple(sorted(self._shown))))


def is_sensitive(key: str) -> bool:
    """Whether a setting of this name is likely to hold a secret."""
    return _SENSITIVE.search(key) is not None


def is_inline_secret(key: str, text: str, *, takes_secret: bool) -> bool:
    """Whether a text, as it is written in a spec, holds a secret itself and not a reference or a variable.

    Args:
        key: The name of the key.
        takes_secret: Whether the key may hold a reference to a secret.
    """
    if takes_secret and is_sensitive(key) and not key.lower().endswith("_id"):
        return bool(text) and "${" not in text
    found = [*_URI_PASSWORD.findall(text), *(_PASSWORD_SETTING.findall(text) if takes_secret else ())]
    return any("${" not in password for password in found)


def check_references(text: str) -> None:
    """Raise SecretError when a reference in the text has an unknown kind or names nothing."""
    for kind, target in _REFERENCE.findall(text):
        if kind not in KNOWN_KINDS:
            raise SecretError(f'unknown reference "${{{kind}:...}}" (known: ${{env:NAME}}, ${{file:path}})')
        if not target.strip():
            raise SecretError(f'reference "${{{kind}:}}" names nothing')


def has_reference(text: str) -> bool:
    """Whether the text holds a reference to a secret."""
    return _REFERENCE.search(text) is not None


def resolve_secret(text: str, *, environ: Mapping[str, str], folder: Path) -> str:
    """Return the text with every reference replaced by the secret it names.

    A file's content loses its last line end; a relative path starts at `folder`.

    Raises:
        SecretError: a variable is not set, or a file cannot be read.
    """
    check_references(text)

    def replace(match: re.Match[str]) -> str:
        kind, target = match.group(1), match.group(2).strip()
        return _from_env(target, environ) if kind == "env" else _from_file(target, folder)

    return _REFERENCE.sub(replace, text)


def _from_env(name: str, environ: Mapping[str, str]) -> str:
    try:
        return environ[name]
    except KeyError:
        raise SecretError(f"environment variable {name} is not set") from None


def _from_file(target: str, folder: Path) -> str:
    path = folder / os.path.expanduser(target)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_SECRET_BYTES + 1)
    except OSError as exc:
        raise SecretError(f"secret file {path} cannot be read: {exc.strerror or exc}") from None
    if len(content) > MAX_SECRET_BYTES:
        raise SecretError(f"secret file {path} is larger than {MAX_SECRET_BYTES} bytes")
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise SecretError(f"secret file {path} is not UTF-8 text") from None
    return text.removesuffix("\n").removesuffix("\r")
