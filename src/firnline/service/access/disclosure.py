"""What an answer shows to whom. Every answer of the service passes here: REST, pages, events and errors.

Two rules, each in one place:

- Without the right `data`, fields that can hold values of records, or text of others that may repeat them (a receiver's
  answer, a server's error, a line of a file), are withheld. Codes, counts and sentences of our own stay.
- For roles below admin, texts lose the credentials and queries of URIs, and the folders of this machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, get_args

from firnline.service.access.tokens import Identity
from firnline.spec.shown import location_text
from firnline.types import BadReason, Json

WITHHELD = "withheld: needs the right `data`"
ELSEWHERE = "..."  # stands for the folders before a name

# Errors whose messages are sentences of our own about settings, files and versions, never about values of records.
OWN_WORDS = frozenset((
    "config", "spec", "missing-extra", "access", "source-moved", "late-file", "files-set-aside", "grown-file",
    "source-gap", "slot-lag", "source-replaced", "source-undone", "input-changed", "outbox-full", "not-durable",
    "store-unsafe", "table-lost", "torn-commit", "fenced", "already-running", "worker-lost", "control", "not-running",
    "checkpoint", "damaged", "outbox-damaged", "outbox-lost", "checkpoint-lost", "ledger-hole", "state-damaged",
    "newer-format", "version-conflict", "store-read-only", "store-ahead", "sink-diverged", "sink-went-back",
    "deciding-sink", "state-incomplete", "state-lost", "state-conflict", "rollback-refused", "plan-changed",
    "died", "home-hangs", "unknown_pipeline",
    # of the service itself
    "bad_request", "unauthorized", "forbidden", "not_found", "conflict", "too_many_requests", "too_large", "internal",
    "invalid_request", "invalid_next", "method_not_allowed", "http_error", "tokens_unusable", "not_recorded",
    "still_reading", "busy", "storage",
))  # fmt: skip

# Reasons that say nothing of a value: what is kept of them.
_REASON_CODES: tuple[str, ...] = get_args(BadReason)
_OWN_REASONS = tuple(
    re.compile(pattern)
    for pattern in (
        r"staged, not committed yet",
        r"its run ended before the commit",
        r"the key is null",
        r"column '[^']{1,200}' is null",
        r"the log of the database does not have its value of [\w, ]{1,200}",
        r"its key holds a \w+, not a \w+",
        r"the spec no longer has it",
        r"the run was killed or its machine failed",
    )
)
_STATUS = re.compile(r"(?:rows [\d,]+ to [\d,]+ are refused with|[^:]{0,200}: \S{1,500} answers) (\d{3})\b")

# Fields that hold values of records or foreign text, wherever they stand in an answer.
_TEXTS = frozenset(("error", "set_aside", "unreadable"))  # texts; as a list or an object, they are looked through
_VALUES = frozenset(("values", "raw", "first", "first_bad"))  # counts of that name stay
_KEYS = frozenset(("after", "order"))  # keys of rows, in the position of a table that is read in chunks
_OF_TEXTS = frozenset(("sinks_failing",))  # name -> text
_LINES = frozenset(("progress", "warnings"))  # warnings of a dry-run quote what does not fit; those of a spec do not
_MESSAGES = frozenset(("message", "detail", "reason"))
_LEAST_REPEATED = 8  # characters of a text that is withheld wherever else it stands in the same answer


def reason_text(reason: str) -> str:
    """Return the part of a reason that says nothing of values: its code, or a sentence of our own."""
    for code in _REASON_CODES:
        if reason == code or reason.startswith(f"{code}:"):
            return code
    if any(pattern.fullmatch(reason) for pattern in _OWN_REASONS):
        return reason
    status = _STATUS.match(reason)
    return f"refused with {status.group(1)}" if status else WITHHELD


def message_text(code: str, message: str, identity: Identity | None) -> str:
    """Return the message of an error with a code, as somebody may see it."""
    return message if code in OWN_WORDS or (identity is not None and identity.data) else WITHHELD


def without_values(body: Json) -> Json:
    """Return an answer without values of records and without foreign text that may repeat them."""
    withheld: set[str] = set()
    shown = _without_values(body, withheld)
    repeated = sorted((text for text in withheld if len(text) >= _LEAST_REPEATED), key=len, reverse=True)
    return _replace(shown, repeated) if repeated else shown


def _without_values(value: Any, withheld: set[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _field(str(key), one, value, withheld) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_values(one, withheld) for one in value]
    return value


def _field(key: str, value: Any, around: Mapping[str, Any], withheld: set[str]) -> Any:
    if isinstance(value, str):
        if key in _VALUES:
            shown: str | None = WITHHELD if value else value
        elif key in _MESSAGES and isinstance(around.get("code"), str):
            shown = message_text(str(around["code"]), value, None)
        elif key == "detail":
            shown = value  # of no error
        elif key in _MESSAGES or key in _TEXTS:
            shown = reason_text(value) if value else value
        else:
            return value
        if shown != value:
            withheld.add(value)
        return shown
    if key in _VALUES and isinstance(value, Mapping | list | tuple):
        return None
    if key in _KEYS and "chunks" in around:
        return None
    if key in _OF_TEXTS and isinstance(value, Mapping):
        return {name: _field("error", one, value, withheld) for name, one in value.items()}
    if key == "set_aside" and isinstance(value, Mapping):  # path -> reason
        return {name: _field("reason", one, {}, withheld) for name, one in value.items()}
    if key in _LINES and isinstance(value, list) and "valid" not in around:
        return [f"{len(value)} lines, {WITHHELD}"] if value else value
    if key == "reasons" and isinstance(value, Mapping):
        counts: dict[str, Any] = {}
        for reason, count in value.items():
            code = reason_text(str(reason))
            counts[code] = counts.get(code, 0) + count
        return counts
    return _without_values(value, withheld)


def _replace(value: Any, texts: Sequence[str]) -> Any:
    if isinstance(value, str):
        for text in texts:
            value = value.replace(text, WITHHELD)
        return value
    if isinstance(value, dict):
        return {key: _replace(one, texts) for key, one in value.items()}
    if isinstance(value, list):
        return [_replace(one, texts) for one in value]
    return value


# -- credentials and folders ----------------------------------------------------------------------------------

_NAMED = re.compile(
    r"(password|passwd|pwd|secret|token|credential|signature|apikey|access_?key|account_?key)"
    r"(\s*[=:]\s*)(?!\*\*\*)('[^']*'|\"[^\"]*\"|[^\s,;&'\"]+)",
    re.IGNORECASE,
)
_IN_NAME = r"[^\s/'\"<>`:,;()\[\]{}]"
_PATH = re.compile(rf"(?<![\w.:/~*-])/{_IN_NAME}+(?:/{_IN_NAME}*)*")


@lru_cache(maxsize=1)
def _roots() -> frozenset[str]:
    """Return the folders at the root of this machine: what a path of it begins with."""
    try:
        return frozenset(os.listdir("/"))
    except OSError:
        return frozenset(("home", "tmp", "var", "etc", "usr", "opt", "srv", "mnt", "data", "root"))


def without_credentials(text: str) -> str:
    """Return a text without the credentials and queries of URIs, and without values that a name calls secret."""
    return _NAMED.sub(r"\1\2***", location_text(text))


Folders = Mapping[str, str]  # a folder of this machine -> what stands for it


class Disclosure:
    """What one person may see.

    Args:
        folders: Asked for the folders of pipelines and sources, when a text has a path of this machine.
    """

    def __init__(self, identity: Identity | None, folders: Callable[[], Folders] = dict) -> None:
        self._sees_values = identity is not None and identity.data
        self._sees_folders = identity is not None and identity.may("admin")
        self._folders = folders
        self._found: Folders | None = None

    @property
    def sees_all(self) -> bool:
        return self._sees_values and self._sees_folders

    def show(self, body: Any) -> Any:
        """Return an answer as this person may see it."""
        if not self._sees_values:
            body = without_values(body)
        return body if self._sees_folders else self._walk(body)

    def text(self, text: str) -> str:
        """Return a text as this person may see it; it holds no values of records."""
        return text if self._sees_folders else self._plain(text)

    def _walk(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._plain(value)
        if isinstance(value, Mapping):
            return {self._plain(key) if isinstance(key, str) else key: self._walk(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._walk(one) for one in value]
        return value

    def _plain(self, text: str) -> str:
        if ":" in text or "=" in text:
            text = without_credentials(text)
        if "/" in text:
            text = _FILE_URI.sub("/", text)
            for folder, label in self._spaced(text):
                text = text.replace(f"{folder}/", f"{label}/" if label else "").replace(folder, label or ".")
            text = _PATH.sub(lambda found: self._short(found.group()), text)
        return text

    def _spaced(self, text: str) -> list[tuple[str, str]]:
        """Return the folders in a text whose names have spaces: where these end, the text itself does not say."""
        if " " not in text or not _PATH.search(text):
            return []
        return [(folder, label) for folder, label in self._known().items() if " " in folder and folder in text]

    def _known(self) -> Folders:
        if self._found is None:
            self._found = self._folders()
        return self._found

    def _short(self, found: str) -> str:
        path = found.rstrip(".")
        parts = path.split("/")
        if len(parts) < 3 or parts[1] not in _roots():
            return found
        end_of_sentence = found[len(path) :]
        deepest = max((folder.count("/") for folder in self._known()), default=0)
        for end in range(min(len(parts), deepest + 1), 1, -1):
            label = self._known().get("/".join(parts[:end]))
            if label is not None:
                return ("/".join((*([label] if label else []), *parts[end:])) or ".") + end_of_sentence
        return f"{ELSEWHERE}/{path.rstrip('/').rpartition('/')[2]}{end_of_sentence}"


_FILE_URI = re.compile(r"\bfile:///")


def label_folders(places: Mapping[str, Sequence[str]]) -> Folders:
    """Return what stands for folders: nothing for the folder of a pipeline, `.../name` for a source outside of it.

    Args:
        places: The folder of each pipeline's file, with the folders of its sources.
    """
    labels = dict.fromkeys(places, "")
    for folder, sources in places.items():
        for source in sources:
            if source.startswith("/") and not f"{source}/".startswith(f"{folder}/"):
                labels.setdefault(source, f"{ELSEWHERE}/{source.rpartition('/')[2]}")
    return labels


def full_name(name: str, folder: str, sources: Sequence[str]) -> str:
    """Return the full name of an input that somebody saw without the folders before it; others as they are."""
    if name.startswith("/") or "://" in name:
        return name
    head, _, rest = name.partition("/")
    if head == ELSEWHERE:
        root, _, rest = rest.partition("/")
        found = [source for source in sources if source.rpartition("/")[2] == root]
        return f"{found[0]}/{rest}" if len(found) == 1 else name
    whole = os.path.normpath(f"{folder}/{name}")
    return whole if any(f"{whole}/".startswith(f"{source}/") for source in sources) else name
