"""The token that a reader of metrics shows: read from a file, or made there at the first start."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from firnline.errors import ConfigError
from firnline.http_address import TOKEN

MAX_TOKEN_BYTES = 4096
MIN_TOKEN_CHARACTERS = 16


def load_token(path: str | os.PathLike[str]) -> tuple[str, bool]:
    """Read the token in a file; a missing file is made, mode 0600, with a random token. Returns also whether it was.

    Raises:
        ConfigError: the file cannot be read or made, or holds no usable token. The message never holds the token.
    """
    file = Path(path).expanduser()
    try:
        try:
            content = _read(file)
        except FileNotFoundError:
            if _make(file):
                return _check(file, _read(file)), True
            content = _read(file)  # another process made it at the same moment
    except OSError as error:
        raise ConfigError(
            f"the metrics token {file} cannot be read or made: {error.strerror or error}",
            hint="Name a readable file, or a new one in a folder that you may write to, with --metrics-token-file.",
        ) from error
    return _check(file, content), False


def _read(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(MAX_TOKEN_BYTES + 1)


def _make(file: Path) -> bool:
    """Create the file whole, and only if nobody else does: a killed process must not leave an empty token."""
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as stream:
            stream.write(secrets.token_urlsafe(32).encode() + b"\n")
        os.link(temporary, file)
    except FileExistsError:
        return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    return True


def _check(file: Path, content: bytes) -> str:
    token = content.decode("ascii", "replace").strip()
    if len(content) > MAX_TOKEN_BYTES or len(token) < MIN_TOKEN_CHARACTERS or not TOKEN.fullmatch(token):
        raise ConfigError(
            f"{file} holds no token: one line of at least {MIN_TOKEN_CHARACTERS} letters, digits or . _ ~ + / = -",
            hint="Delete the file, and Firnline makes one; or write one with `openssl rand -hex 32`.",
        )
    return token
