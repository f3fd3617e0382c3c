"""Dead letters: rows that a follower can never hold, kept in the pipeline's home with the reason.

They are durable before the sink's head moves past them. A repeated delivery of the same epoch leaves the same rows out,
even if the sink would take one of them by then.

A letter is answered by an epoch that reads nothing: it delivers the row once more, or drops it. The list of letters
that the epoch answers is durable before the epoch is decided, and counts once the checkpoint names the epoch's attempt
(`KnownSink.answers`). Then `settle` takes the rows out of their files. The next answer is decided after that, so the
newest attempt is enough to remember. The number of an answered row stays in its file while its epoch may be delivered
again.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.errors import DamagedError
from firnline.faults import fault_point
from firnline.names import (
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
    answered: Mapping[int, Mapping[str, Json]]  # by row number: `action`, and the `epoch` that answered it

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
                    "answered": [{"row": row, **self.answered[row]} for row in sorted(self.answered)],
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
                answered={
                    int(one["row"]): {"action": one["action"], "epoch": one["epoch"]} for one in body["answered"]
                },
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{what} lacks {error}", what=what) from error

    def without(self, rows: Collection[int], action: str, epoch: int) -> LetterFile:
        """Return the file without the values of these rows, which an epoch has answered."""
        kept = [place for place, letter in enumerate(self.letters) if letter.row not in rows]
        gone = {letter.row: {"action": action, "epoch": epoch} for letter in self.letters if letter.row in rows}
        return LetterFile(
            self.pipeline,
            self.sink,
            self.epoch,
            self.attempt,
            [self.letters[place] for place in kept],
            self.rows.take(pa.array(kept, pa.int64())),
            {**self.answered, **gone},
        )


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
        file = LetterFile(self.pipeline, self.sink, self.epoch, self.attempt, letters, rows, {})
        fault_point("letter.put.before")
        self.storage.put(f"{dead_letters_folder(self.pipeline, self.sink)}/{name}", file.to_bytes())
        fault_point("letter.put.after")

    def load_rows(self) -> frozenset[int]:
        """Read the row numbers of the letters of this epoch, answered ones included."""
        found: set[int] = set()
        for key in list_dead_letters(self.storage, self.pipeline, self.sink):
            if dead_letter_attempt(key) == (self.epoch, self.attempt):
                file = read_letter_file(self.storage, key)
                found |= {letter.row for letter in file.letters} | file.answered.keys()
        return frozenset(found)


def list_dead_letters(storage: Storage, pipeline: str, sink: str = "") -> Iterator[str]:
    """Yield the keys of all files of dead letters, of one sink or of all, by sink and epoch."""
    yield from (key for key in _list_keys(storage, pipeline, sink) if dead_letter_attempt(key) is not None)


def read_letter_file(storage: Storage, key: str) -> LetterFile:
    """Read one file of dead letters. Raises DamagedError if it is damaged."""
    return LetterFile.from_bytes(storage.get(key), key)


def read_letters(storage: Storage, key: str) -> list[DeadLetter]:
    """Read the letters of one file that are not answered. Raises DamagedError if it is damaged."""
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

    @property
    def key(self) -> str:
        """Where the list is stored."""
        return f"{dead_letters_folder(self.pipeline, self.sink)}/{answers_name(self.epoch, self.attempt)}"

    def put(self, storage: Storage) -> None:
        """Store the list; durable on return. It counts once the epoch is decided."""
        body = {"epoch": self.epoch, "attempt": self.attempt, "action": self.action, "rows": dict(self.rows)}
        fault_point("letter.answers.before")
        storage.put(self.key, canonical(seal(body)))
        fault_point("letter.answers.after")


def load_answered(storage: Storage, pipeline: str, sink: str, known: KnownSink | None) -> Answers | None:
    """Read the list of letters that the newest answer of a sink names; None if there is none, or it is settled."""
    for key in _list_keys(storage, pipeline, sink):
        found = answers_attempt(key)
        if found is not None and known is not None and found[1] == known.answers:
            body = unseal(parse(storage.get(key), key), key)
            rows = {str(name): [int(row) for row in numbers] for name, numbers in body["rows"].items()}
            return Answers(pipeline, sink, int(body["epoch"]), str(body["attempt"]), body["action"], rows)
    return None


def load_letter_files(storage: Storage, pipeline: str, sink: str, known: KnownSink | None) -> dict[str, LetterFile]:
    """Read the files of a sink's letters, without rows whose answer is decided, by key and so by epoch and row."""
    files = {key: read_letter_file(storage, key) for key in list_dead_letters(storage, pipeline, sink)}
    answers = load_answered(storage, pipeline, sink, known)
    if answers is not None:
        for key, rows in answers.rows.items():
            if key in files:
                files[key] = files[key].without(rows, answers.action, answers.epoch)
    return files


def settle(storage: Storage, pipeline: str, sink: str, known: KnownSink) -> None:
    """Take answered rows out of their files, and delete what nothing needs any more. A repeat changes nothing.

    The caller holds the newest generation and gives what the newest checkpoint knows: a list of another attempt than
    `known.answers` is settled, or was never decided and never will be.
    """
    answers = load_answered(storage, pipeline, sink, known)
    if answers is not None:
        for key, rows in answers.rows.items():
            try:
                file = read_letter_file(storage, key)
            except FileNotFoundError:
                continue  # settled and swept
            fault_point("letter.settle.before")
            storage.put(key, file.without(rows, answers.action, answers.epoch).to_bytes())
            fault_point("letter.settle.after")
    waiting = list_outbox(storage, pipeline)
    for key in list(_list_keys(storage, pipeline, sink)):
        if answers_attempt(key) is None:
            found = dead_letter_attempt(key)
            if found is None or found[0] > known.held or found[1] in waiting:
                continue  # its epoch may be delivered again, without the answered rows
            if read_letter_file(storage, key).letters:
                continue
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
