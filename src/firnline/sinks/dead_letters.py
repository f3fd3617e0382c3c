"""Dead letters: rows that a follower can never hold, kept in the pipeline's home with the reason.

They are durable before the sink's head moves past them. A repeated delivery of the same epoch leaves the same rows out,
even if the sink would take one of them by then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.faults import fault_point
from firnline.names import dead_letter_attempt, dead_letter_name, dead_letters_folder
from firnline.storage import Storage
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One row: its number in the epoch, the reason, and its values."""

    row: int
    reason: str
    values: dict[str, Json]

    def to_json(self) -> dict[str, Json]:
        return {"row": self.row, "reason": self.reason, "values": self.values}

    @classmethod
    def from_json(cls, value: Json) -> DeadLetter:
        return cls(int(value["row"]), str(value["reason"]), dict(value["values"]))


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """The dead letters of one epoch in one sink."""

    storage: Storage
    pipeline: str
    sink: str
    epoch: int
    attempt: str  # of the ledger entry

    def put(self, letters: Sequence[DeadLetter]) -> None:
        """Add letters; durable on return. A repeat with the same first row replaces the same file."""
        name = dead_letter_name(self.epoch, self.attempt, min(letter.row for letter in letters))
        body = {
            "pipeline": self.pipeline,
            "sink": self.sink,
            "epoch": self.epoch,
            "attempt": self.attempt,
            "letters": [letter.to_json() for letter in letters],
        }
        fault_point("letter.put.before")
        self.storage.put(f"{dead_letters_folder(self.pipeline, self.sink)}/{name}", canonical(seal(body)))
        fault_point("letter.put.after")

    def load(self) -> list[DeadLetter]:
        """Read the letters of this epoch, by row."""
        found: dict[int, DeadLetter] = {}
        for key in list_dead_letters(self.storage, self.pipeline, self.sink):
            if dead_letter_attempt(key) == (self.epoch, self.attempt):
                found |= {letter.row: letter for letter in read_letters(self.storage, key)}
        return [found[row] for row in sorted(found)]

    def load_rows(self) -> frozenset[int]:
        """Read the row numbers of the letters of this epoch."""
        return frozenset(letter.row for letter in self.load())


def list_dead_letters(storage: Storage, pipeline: str, sink: str = "") -> Iterator[str]:
    """Yield the keys of all files of dead letters, of one sink or of all."""
    for stat in storage.list(dead_letters_folder(pipeline, sink)):
        key = stat.name.removeprefix(f"{storage.root}/")
        if dead_letter_attempt(key) is not None:
            yield key


def read_letters(storage: Storage, key: str) -> list[DeadLetter]:
    """Read one file of dead letters. Raises DamagedError if it is damaged."""
    body = unseal(parse(storage.get(key), key), key)
    return [DeadLetter.from_json(letter) for letter in body["letters"]]
