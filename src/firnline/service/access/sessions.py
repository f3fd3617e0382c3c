"""Sessions of browsers: a signed cookie that stands for a token, for twelve hours and while the token is valid."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import os
import secrets
import stat
import threading
from pathlib import Path
from typing import Any

from firnline.service.access.tokens import Identity, Tokens, is_ours
from firnline.service.problems import NotRecordedError
from firnline.storage import Storage
from firnline.types import Clock

logger = logging.getLogger(__name__)

COOKIE = "firnline_session"
SESSION_SECONDS = 12 * 3600
KEY_BYTES = 32
ENDED = "ended-sessions.json"


class Sessions:
    """Makes and checks session cookies. The key lies in a file of the service, so that a restart ends no session.

    A session is bound to the hash of its token: it ends when that token is replaced, removed or expires. A session that
    was ended is kept in `storage` until it would have expired, so that a restart does not bring it back.
    """

    def __init__(self, key: bytes, tokens: Tokens, clock: Clock, storage: Storage | None = None) -> None:
        self._key = key
        self._tokens = tokens
        self._clock = clock
        self._storage = storage
        self._lock = threading.Lock()
        self._ended: dict[str, float] = {}  # id -> when it expires anyway
        self._since = 0.0  # sessions that began before are not valid
        self._load()

    def begin(self, identity: Identity) -> str:
        """Return the value of the cookie for somebody who showed a token."""
        now = self._clock.now().timestamp()
        body = {
            "id": secrets.token_hex(16),
            "name": identity.name,
            "role": identity.role,
            "data": identity.data,
            "token": self._sign(identity.token),
            "begun": now,
            "until": now + SESSION_SECONDS,
        }
        text = base64.urlsafe_b64encode(json.dumps(body).encode()).decode()
        return f"{text}.{self._sign(text)}"

    def find(self, cookie: str) -> Identity | None:
        """Return whose session this is; None if it is not ours, has ended or expired, or its token is gone."""
        body = self._open(cookie)
        if body is None or body["until"] <= self._clock.now().timestamp() or body["begun"] < self._since:
            return None
        with self._lock:
            if body["id"] in self._ended:
                return None
        current = self._tokens.get(body["name"])
        if current is None or current != Identity(body["name"], body["role"], body["data"]):
            return None
        return current if hmac.compare_digest(self._sign(current.token), body["token"]) else None

    def end(self, cookie: str) -> None:
        """End a session; durable on return.

        Raises:
            NotRecordedError: the session has ended, but a restart of the service would bring it back.
        """
        body = self._open(cookie)
        now = self._clock.now().timestamp()
        with self._lock:
            self._ended = {one: until for one, until in self._ended.items() if until > now}
            if body is None or body["until"] <= now:
                return
            self._ended[body["id"]] = body["until"]
            try:
                self._save()
            except OSError as error:
                logger.error("the end of a session could not be recorded", extra={"reason": str(error)})
                raise NotRecordedError(
                    "the session has ended, but its end could not be recorded",
                    hint="Have the administrator free space in the folder of the service, then log in and out again.",
                ) from error

    def _load(self) -> None:
        if self._storage is None:
            return
        try:
            found = json.loads(self._storage.get(ENDED))
            self._ended = {str(one): float(until) for one, until in found["ended"].items()}
            self._since = float(found["since"])
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError, AttributeError):
            logger.warning("%s is damaged: which sessions were ended is not known, so that all have ended", ENDED)
            self._since = self._clock.now().timestamp()
            self._save()

    def _save(self) -> None:
        if self._storage is not None:
            self._storage.put(ENDED, json.dumps({"since": self._since, "ended": self._ended}).encode())

    def _open(self, cookie: str) -> dict[str, Any] | None:
        text, _, signature = cookie.rpartition(".")
        if not hmac.compare_digest(self._sign(text).encode(), signature.encode()):
            return None
        found: dict[str, Any] = json.loads(base64.urlsafe_b64decode(text))
        return found if "token" in found and "begun" in found else None

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()


def load_key(path: Path) -> bytes:
    """Read the key of the sessions, or make it, mode 0600.

    A key that is damaged, or that others own or could read, is made anew: sessions end, nothing else.
    """
    try:
        with path.open("rb") as file:
            found, key = os.fstat(file.fileno()), file.read(KEY_BYTES + 1)
        is_private = is_ours(found.st_uid) and not stat.S_IMODE(found.st_mode) & 0o077
        if len(key) == KEY_BYTES and is_private:
            return key
        reason = "is damaged" if len(key) != KEY_BYTES else "was open to others"
        logger.warning("%s %s: a new key is made, and every session has ended", path.name, reason)
        path.unlink()
    except FileNotFoundError:
        pass
    key = secrets.token_bytes(KEY_BYTES)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(key)
        file.flush()
        os.fsync(file.fileno())
    return key
