"""The progress of an HTTP sink, in the pipeline's home: the head, and the range that is being sent.

A receiver keeps no head, so it lies beside the outbox, as one small file per change, named by a number that only grows.
The file with the highest number counts. A change creates the next file, if it does not exist yet, and then looks
whether it is the highest: so of two runs that build on the same file only one succeeds, and one that slept while others
went on never does. Older files are deleted afterwards.

A range is written down before it is sent. So a run that follows a killed one sends the very same rows with the same
key, whatever the settings of batches are by then.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.errors import CommitConflictError, DamagedError, FencedError
from firnline.faults import fault_point
from firnline.names import progress_folder, progress_name, progress_number
from firnline.sinks.follower import FollowerHead
from firnline.storage import Storage
from firnline.types import EntryRef, Json

KEPT = 2  # files that stay, the highest included


@dataclass(frozen=True, slots=True)
class SendRange:
    """Rows that are being sent: of an epoch, from the number `first` to the number `last`."""

    entry: EntryRef
    attempt: str
    first: int
    last: int

    def to_json(self) -> dict[str, Json]:
        return {"entry": self.entry.to_json(), "attempt": self.attempt, "first": self.first, "last": self.last}

    @classmethod
    def from_json(cls, value: Json) -> SendRange:
        return cls(EntryRef.from_json(value["entry"]), str(value["attempt"]), int(value["first"]), int(value["last"]))


@dataclass(frozen=True, slots=True)
class Progress:
    """What one file says."""

    number: int
    head: FollowerHead
    sending: SendRange | None = None
    refused: int = 0  # batches in a row that the receiver has refused

    def to_json(self) -> dict[str, Json]:
        return seal(
            {
                "number": self.number,
                "head": self.head.to_json(),
                "sending": self.sending.to_json() if self.sending else None,
                "refused": self.refused,
            }
        )

    @classmethod
    def from_json(cls, value: Json, what: str) -> Progress:
        """Parse the sealed form. Raises DamagedError if it is invalid."""
        body = unseal(value, what)
        try:
            sending = SendRange.from_json(body["sending"]) if body["sending"] else None
            head = FollowerHead.from_json(body["head"], what)
            return cls(int(body["number"]), head, sending, int(body["refused"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{what} lacks {error}", what=what) from error


class ProgressLog:
    """The files of one sink."""

    def __init__(self, storage: Storage, pipeline: str, sink: str) -> None:
        self._storage = storage
        self._folder = progress_folder(pipeline, sink)
        self._sink = sink

    def load(self) -> Progress | None:
        """Read the file that counts; None if there is none.

        Raises:
            DamagedError: it is damaged.
        """
        while True:
            numbers = self._numbers()
            if not numbers:
                return None
            key = self._key(numbers[-1])
            try:
                data = self._storage.get(key)
            except FileNotFoundError:  # a newer one has replaced it meanwhile
                continue
            return Progress.from_json(parse(data, key), key)

    def append(self, expected: Progress | None, new: Progress) -> Progress:
        """Make a change; it is durable on return. `new` gets the next number.

        Raises:
            FencedError: a newer generation has the sink.
            CommitConflictError: another change came first; this one does not count.
        """
        new = replace(new, number=expected.number + 1 if expected else 1)
        key = self._key(new.number)
        try:
            fault_point("http.progress.before")
            self._storage.put_new(key, canonical(new.to_json()))
            fault_point("http.progress.after")
        except FileExistsError:
            self._refuse(new)
        numbers = self._numbers()
        if not numbers or numbers[-1] != new.number:
            self._storage.delete(key)  # created behind the back of those that went on
            self._refuse(new)
        for number in numbers[:-KEPT]:
            with contextlib.suppress(OSError):  # a file that stays says nothing
                self._storage.delete(self._key(number))
        return new

    def _refuse(self, new: Progress) -> None:
        held = self.load()
        if held is not None and held.head.generation > new.head.generation:
            generation = held.head.generation
            raise FencedError(f"generation {generation} took sink {self._sink!r} over", generation=generation)
        if held is not None and replace(held, number=0) == replace(new, number=0):
            return  # written by this run, and the answer was lost
        raise CommitConflictError(f"sink {self._sink!r} holds another head than expected; nothing was written")

    def _numbers(self) -> list[int]:
        found = (progress_number(stat.name) for stat in self._storage.list(self._folder))
        return sorted(number for number in found if number is not None)

    def _key(self, number: int) -> str:
        return f"{self._folder}/{progress_name(number)}"
