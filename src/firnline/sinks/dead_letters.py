"""Dead letters: rows that a follower can never hold, kept in the pipeline's home with the reason.

They are durable before the sink's head moves past them. A repeated delivery of the same epoch leaves the same rows out,
even if the sink would take one of them by then.

A letter is answered by an epoch that reads nothing: it delivers the row once more, or drops it. The list of letters
that the epoch answers is durable before the epoch is decided, and counts once the checkpoint names the epoch's attempt
(`KnownSink.answers`). Then `settle` marks the list as decided, under another name. The next answer is decided after
that, so the newest attempt is enough to remember. No file is ever changed, so a command that sleeps and wakes late does
no harm. A decided list stays while an epoch that it names may be delivered again.

A history edit may undo the epoch of an answer or of a letter for a sink (`KnownSink.undone`): an answer of such an
epoch does not count, and its own letters are void, as their rows come again. Answered letters therefore stay in their
files until their answer can no longer be undone.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pyarrow as pa

from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.errors import DamagedError
from firnline.faults import fault_point
from firnline.names import (
    answered_attempt,
    answered_name,
    answers_attempt,
    answers_name,
    dead_letter_attempt,
    dead_letter_name,
    dead_letters_folder,
)
from firnline.sinks.known import KnownSink
from firnline.sinks.outbox import list_outbox
from firnline.storage import Storage
from firnline.types import Json

Answer = Literal["retry", "drop"]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One row: its number in the epoch, the reason, and its values for people. The file has them with their types."""

    row: int
    reason: str
    values: dict[str, Json]

    def to_json(self) -> dict[str, Json]:
        return {"row": self.row, "reason": self.reason, "values": self.values}

    @classmethod
    def from_json(cls, value: Json) -> DeadLetter:
        return cls(int(value["row"]), str(value["reason"]), dict(value["values"]))


@dataclass(frozen=True, slots=True, eq=False)
class LetterFile:
    """One file of dead letters. `rows` has the rows of `letters`, in their order, as the sink should have got them."""

    pipeline: str
    sink: str
    epoch: int
    attempt: str  # of the ledger entry
    letters: Sequence[DeadLetter]
    rows: pa.Table

    def to_bytes(self) -> bytes:
        """Return the durable form."""
        return canonical(
            seal(
                {
                    "pipeline": self.pipeline,
                    "sink": self.sink,
                    "epoch": self.epoch,
                    "attempt": self.attempt,
                    "letters": [letter.to_json() for letter in self.letters],
                    "rows": base64.b64encode(_to_ipc(self.rows)).decode(),
                }
            )
        )

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> LetterFile:
        """Parse the durable form. Raises DamagedError if it is damaged."""
        body = unseal(parse(data, what), what)
        try:
            return cls(
                pipeline=str(body["pipeline"]),
                sink=str(body["sink"]),
                epoch=int(body["epoch"]),
                attempt=str(body["attempt"]),
                letters=[DeadLetter.from_json(letter) for letter in body["letters"]],
                rows=_from_ipc(base64.b64decode(body["rows"])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{what} lacks {error}", what=what) from error

    def without(self, rows: Collection[int]) -> LetterFile:
        """Return the file without these rows."""
        kept = [place for place, letter in enumerate(self.letters) if letter.row not in rows]
        letters = [self.letters[place] for place in kept]
        return replace(self, letters=letters, rows=self.rows.take(pa.array(kept, pa.int64())))


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """The dead letters of one epoch in one sink."""

    storage: Storage
    pipeline: str
    sink: str
    epoch: int
    attempt: str  # of the ledger entry

    def put(self, letters: Sequence[DeadLetter], rows: pa.Table) -> None:
        """Add letters with their rows; durable on return. A repeat with the same first row replaces the same file."""
        name = dead_letter_name(self.epoch, self.attempt, min(letter.row for letter in letters))
        file = LetterFile(self.pipeline, self.sink, self.epoch, self.attempt, letters, rows)
        fault_point("letter.put.before")
        self.storage.put(f"{dead_letters_folder(self.pipeline, self.sink)}/{name}", file.to_bytes())
        fault_point("letter.put.after")

    def load(self) -> list[DeadLetter]:
        """Read the letters of this epoch whose files are not swept yet, by row."""
        keys = list_dead_letters(self.storage, self.pipeline, self.sink)
        ours = [key for key in keys if dead_letter_attempt(key) == (self.epoch, self.attempt)]
        letters = [letter for key in ours for letter in read_letters(self.storage, key)]
        return sorted(letters, key=lambda letter: letter.row)

    def load_rows(self) -> frozenset[int]:
        """Read the row numbers of the letters of this epoch, answered ones included."""
        found = {letter.row for letter in self.load()}
        for key, rows in _load_decided(self.storage, self.pipeline, self.sink).items():
            if dead_letter_attempt(key) == (self.epoch, self.attempt):
                found |= rows
        return frozenset(found)


def list_dead_letters(storage: Storage, pipeline: str, sink: str = "") -> Iterator[str]:
    """Yield the keys of all files of dead letters, of one sink or of all, by sink and epoch."""
    yield from (key for key in _list_keys(storage, pipeline, sink) if dead_letter_attempt(key) is not None)


def read_letter_file(storage: Storage, key: str) -> LetterFile:
    """Read one file of dead letters. Raises DamagedError if it is damaged."""
    return LetterFile.from_bytes(storage.get(key), key)


def read_letters(storage: Storage, key: str) -> list[DeadLetter]:
    """Read the letters of one file. Raises DamagedError if it is damaged."""
    return list(read_letter_file(storage, key).letters)


# -- answers ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answers:
    """The letters of one sink that one epoch answers: row numbers by the key of their file."""

    pipeline: str
    sink: str
    epoch: int
    attempt: str
    action: Answer
    rows: Mapping[str, Sequence[int]]

    def put(self, storage: Storage) -> None:
        """Store the list; durable on return. It counts once the epoch is decided."""
        fault_point("letter.answers.before")
        storage.put(self._key(answers_name), self._to_bytes())
        fault_point("letter.answers.after")

    def mark_decided(self, storage: Storage) -> None:
        """Store the list as one whose epoch is decided; durable on return."""
        fault_point("letter.settle.before")
        storage.put(self._key(answered_name), self._to_bytes())
        fault_point("letter.settle.after")

    def _key(self, name: Callable[[int, str], str]) -> str:
        return f"{dead_letters_folder(self.pipeline, self.sink)}/{name(self.epoch, self.attempt)}"

    def _to_bytes(self) -> bytes:
        body = {"epoch": self.epoch, "attempt": self.attempt, "action": self.action, "rows": dict(self.rows)}
        return canonical(seal(body))


def _read_answers(storage: Storage, pipeline: str, sink: str, key: str) -> Answers:
    body = unseal(parse(storage.get(key), key), key)
    rows = {str(name): [int(row) for row in numbers] for name, numbers in body["rows"].items()}
    return Answers(pipeline, sink, int(body["epoch"]), str(body["attempt"]), body["action"], rows)


def _load_decided(
    storage: Storage, pipeline: str, sink: str, counts: Callable[[int], bool] = lambda _: True
) -> dict[str, set[int]]:
    """Read the rows of lists that are marked as decided and whose epoch counts, by the key of their file of letters."""
    found: dict[str, set[int]] = {}
    for key in _list_keys(storage, pipeline, sink):
        decided = answered_attempt(key)
        if decided is not None and counts(decided[0]):
            for name, rows in _read_answers(storage, pipeline, sink, key).rows.items():
                found.setdefault(name, set()).update(rows)
    return found


def load_answered(storage: Storage, pipeline: str, sink: str, known: KnownSink | None) -> Answers | None:
    """Read the list of letters that the newest answer of a sink names; None if there is none, or it is settled."""
    for key in _list_keys(storage, pipeline, sink):
        found = answers_attempt(key)
        if found is not None and known is not None and found[1] == known.answers:
            return _read_answers(storage, pipeline, sink, key)
    return None


def load_letter_files(storage: Storage, pipeline: str, sink: str, known: KnownSink | None) -> dict[str, LetterFile]:
    """Read the files of a sink's letters, without rows whose answer is decided, by key and so by epoch and row."""

    def counts(epoch: int) -> bool:
        return known is None or not known.is_undone(epoch)

    answers = load_answered(storage, pipeline, sink, known)  # first: it may be marked as decided meanwhile
    answered = _load_decided(storage, pipeline, sink, counts)
    for key, rows in answers.rows.items() if answers is not None and counts(answers.epoch) else ():
        answered.setdefault(key, set()).update(rows)
    keys = [(key, dead_letter_attempt(key)) for key in list_dead_letters(storage, pipeline, sink)]
    files = {key: read_letter_file(storage, key) for key, found in keys if found is not None and counts(found[0])}
    return {key: file.without(answered.get(key, ())) for key, file in files.items()}


def settle(storage: Storage, pipeline: str, sink: str, known: KnownSink, epoch: int, floor: int) -> None:
    """Mark the newest answer as decided, and delete what nothing needs any more. A repeat changes nothing.

    `known` is what the checkpoint of `epoch` knows of the sink, and `floor` is that checkpoint's. A list of that epoch
    or an older one, of another attempt than `known.answers`, is settled or never will be decided. A newer list may be
    another command's. An answer can no longer be undone if no rollback reaches below it and the sink holds its epoch.
    """
    answers = load_answered(storage, pipeline, sink, known)
    if answers is not None and not known.is_undone(answers.epoch):
        answers.mark_decided(storage)
    final = min(floor, known.held)
    waiting = list_outbox(storage, pipeline)
    decided = _load_decided(storage, pipeline, sink, lambda one: one <= final and not known.is_undone(one))

    def is_final(key: str) -> bool:
        """Whether the epoch of a file of letters can no longer be delivered."""
        found = dead_letter_attempt(key)
        return found is None or (found[0] <= known.held and found[1] not in waiting)

    for key in list(_list_keys(storage, pipeline, sink)):
        undecided = answers_attempt(key)
        made = answered_attempt(key) or dead_letter_attempt(key)
        if undecided is not None:
            is_done = undecided[0] <= epoch
        elif made is not None and known.is_undone(made[0]):
            is_done = True
        elif answered_attempt(key) is not None:
            named = _read_answers(storage, pipeline, sink, key).rows
            left = set(list_dead_letters(storage, pipeline, sink))
            is_done = all(is_final(name) and name not in left for name in named)
        else:
            is_done = key in decided and not read_letter_file(storage, key).without(decided[key]).letters
        if is_done:
            fault_point("letter.sweep.before")
            storage.delete(key)
            fault_point("letter.sweep.after")


def _list_keys(storage: Storage, pipeline: str, sink: str) -> Iterator[str]:
    for stat in storage.list(dead_letters_folder(pipeline, sink)):
        yield stat.name.removeprefix(f"{storage.root}/")


def _to_ipc(rows: pa.Table) -> bytes:
    written = pa.BufferOutputStream()
    with pa.ipc.new_stream(written, rows.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(rows)
    return bytes(written.getvalue().to_pybytes())


def _from_ipc(data: bytes) -> pa.Table:
    with pa.ipc.open_stream(pa.BufferReader(data)) as reader:
        return reader.read_all()
