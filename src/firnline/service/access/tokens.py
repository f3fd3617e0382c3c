"""Tokens: a file of names, roles, hashes and expiry times, read again when it changes. It holds no token itself.

The file is JSON, mode 0600, and belongs to this user or root: `{"tokens": [{"name", "role", "data", "hash",
"expires"}]}`. A hash is the SHA-256 of a token of 256 random bits, which needs no salt.

A file that is no longer valid lets nobody in, and an entry that is not valid lets nobody in by it: whoever removed a
token with a slip in the file has removed it. `problem` says what is wrong; the log says it once.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import stat
import threading
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

from firnline.errors import ConfigError
from firnline.types import Clock

logger = logging.getLogger(__name__)

Role = Literal["read", "operate", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
MAX_FILE_BYTES = 1024 * 1024
SETTLED_SECONDS = 0.1  # a file that changed less long ago may change again without another time of change
_HINT = 'Each token is {"name", "role": "read" | "operate" | "admin", "data": true | false, "hash", "expires"}.'
PREFIX = "fln_"  # lets scanners of leaked secrets recognise a token
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who asks, and what that token may do.

    Attributes:
        name: The name of the token, as the audit trail has it.
        role: read, operate (also pause, resume, stop, start, checkpoint, retry) or admin (also rollback, discard).
        data: Whether values of records may be shown: quarantine, dead letters, state, logs, samples.
        token: The hash of the token, which sessions are bound to.
    """

    name: str
    role: Role
    data: bool = False
    token: str = field(default="", compare=False, repr=False)

    def may(self, role: Role) -> bool:
        """Whether this role, or a lower one, is granted."""
        return ROLES.index(self.role) >= ROLES.index(role)


@dataclass(frozen=True, slots=True)
class _Token:
    identity: Identity
    hash: str
    expires: datetime | None


@dataclass(frozen=True, slots=True)
class _Stamp:
    """Which content of the file was read. A change of its mode or owner, or in place, changes `changed_ns`."""

    changed_ns: int
    modified_ns: int
    size: int
    inode: int
    mode: int
    owner: int

    @classmethod
    def of(cls, found: os.stat_result) -> _Stamp:
        return cls(found.st_ctime_ns, found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode, found.st_uid)


class Tokens:
    """The tokens of a file.

    Raises:
        ConfigError: the file is open to others or belongs to one of them, or holds no valid tokens.
    """

    def __init__(self, path: str | os.PathLike[str], clock: Clock) -> None:
        self._path = Path(path)
        self._clock = clock
        self._lock = threading.Lock()
        self._stamp: _Stamp | None = None
        self._tokens: list[_Token] = []
        self._problem: str | None = None
        stamp, content = self._read()
        _check_ours(self._path, stamp)
        if stat.S_IMODE(stamp.mode) & 0o077:
            raise ConfigError(f"{self._path} is open to others", hint=f"chmod 600 {self._path}")
        self._tokens, problems = _parse(content, self._path)
        if problems:
            raise ConfigError(problems[0], hint=_HINT)
        self._remember(stamp)

    @property
    def problem(self) -> str | None:
        """What is wrong with the file now; None if it is valid and nobody else can read or change it."""
        self._read_again()
        return self._problem

    def find(self, token: str) -> Identity | None:
        """Return whose token this is; None if nobody's, or if it has expired. Takes the same time for every token."""
        self._read_again()
        shown = hash_token(token)
        with self._lock:
            tokens = self._tokens
        match: _Token | None = None
        for one in tokens:
            if hmac.compare_digest(one.hash, shown):
                match = one
        if match is None or (match.expires is not None and match.expires <= self._clock.now()):
            return None
        return match.identity

    def get(self, name: str) -> Identity | None:
        """Return what the token with this name may do; None if there is none in the file, or it has expired."""
        self._read_again()
        now = self._clock.now()
        with self._lock:
            valid = (one.identity for one in self._tokens if one.expires is None or one.expires > now)
            return next((identity for identity in valid if identity.name == name), None)

    def _read_again(self) -> None:
        """Read the file if it changed. What cannot be trusted lets nobody in, until the file is valid again."""
        try:
            if self._stamp is not None and _Stamp.of(self._path.stat()) == self._stamp:
                return
            stamp, content = self._read()
            tokens, problems = _parse(content, self._path)
            _check_ours(self._path, stamp)
            if stamp.mode & 0o077:
                problems.append(f"{self._path} is open to others")
        except (ConfigError, OSError) as error:
            stamp, tokens = None, []
            problems = [error.message if isinstance(error, ConfigError) else f"{self._path}: {error.strerror or error}"]
        with self._lock:
            self._tokens = tokens
        self._remember(stamp)
        self._say("; ".join(problems) or None)

    def _read(self) -> tuple[_Stamp, bytes]:
        with self._path.open("rb") as file:
            return _Stamp.of(os.fstat(file.fileno())), file.read(MAX_FILE_BYTES + 1)

    def _remember(self, stamp: _Stamp | None) -> None:
        """Do not read this content again, unless the file may have changed once more at the same moment."""
        age = self._clock.now().timestamp() - stamp.changed_ns / 1e9 if stamp else 0.0
        self._stamp = stamp if abs(age) > SETTLED_SECONDS else None

    def _say(self, problem: str | None) -> None:
        with self._lock:
            before, self._problem = self._problem, problem
        if problem is not None and problem != before:
            logger.error("the file of tokens cannot be trusted: %s", problem)
        elif problem is None and before is not None:
            logger.info("the file of tokens is valid again")


def hash_token(token: str) -> str:
    """Return the hash of a token, as the file has it."""
    return hashlib.sha256(token.encode()).hexdigest()


def make_token() -> str:
    """Return a new token of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def ensure_tokens(path: Path, token_path: Path) -> bool:
    """Make the file of tokens with one for an administrator, whose token goes to `token_path`. False if it exists."""
    if path.exists():
        return False
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    token = make_token()
    body = {"tokens": [{"name": "admin", "role": "admin", "data": True, "hash": hash_token(token), "expires": None}]}
    _replace(token_path, f"{token}\n")  # first: a file of tokens whose token nobody has would lock everybody out
    _replace(path, json.dumps(body, indent=2) + "\n")
    return True


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def is_ours(owner: int) -> bool:
    """Whether the owner of a file may say who is let in: this user or root."""
    return owner in (0, os.geteuid())


def _check_ours(path: Path, stamp: _Stamp) -> None:
    """Refuse a file that others can change: each of its entries may be theirs."""
    if not is_ours(stamp.owner):
        raise ConfigError(
            f"{path} belongs to user {stamp.owner}, who can change it: nobody is let in",
            hint=f"chown {os.geteuid()} {path}",
        )
    if stat.S_IMODE(stamp.mode) & 0o022:
        raise ConfigError(f"{path} is open to others, who can change it: nobody is let in", hint=f"chmod 600 {path}")


def _parse(content: bytes, path: Path) -> tuple[list[_Token], list[str]]:
    """Return the valid entries, and what is wrong with the others; ConfigError if there is no list of entries."""
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES:,} bytes", hint=_HINT)
    try:
        entries = json.loads(content)["tokens"]
        if not isinstance(entries, list):
            raise TypeError("no list")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} holds no valid list of tokens: {type(error).__name__}", hint=_HINT) from error
    tokens, problems = [], []
    for number, entry in enumerate(entries, 1):
        try:
            tokens.append(_parse_token(entry))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(f"{path}: entry {number} is not valid: {_entry_problem(error)}")
    names = Counter(one.identity.name for one in tokens)
    problems += [f"{path} has {count} tokens with the name {name}" for name, count in names.items() if count > 1]
    return [one for one in tokens if names[one.identity.name] == 1], problems


def _entry_problem(error: Exception) -> str:
    """Say what is wrong with an entry, without its values."""
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)


def _parse_token(entry: Any) -> _Token:
    if not isinstance(entry, dict):
        raise ValueError("it is no object")
    name, role, digest, expires = entry["name"], entry["role"], entry["hash"], entry.get("expires")
    data = entry.get("data", False)
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise ValueError("name")
    if role not in ROLES or not isinstance(data, bool):
        raise ValueError("role or data")
    if not isinstance(digest, str) or not _HASH.fullmatch(digest):
        raise ValueError("hash")
    try:
        until = datetime.fromisoformat(expires) if expires is not None else None
    except (ValueError, TypeError):
        raise ValueError("expires") from None
    if until is not None and until.tzinfo is None:
        raise ValueError("expires has no zone")
    return _Token(Identity(name, role, data, digest), digest, until)
