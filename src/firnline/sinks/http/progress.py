"""The progress of an HTTP sink, in the pipeline's home: the head, and the range that is being sent.

A receiver keeps no head, so it lies beside the outbox, as one small file per change (`sinks.numbered`).

A range is written down before it is sent. So a run that follows a killed one sends the very same rows with the same
key, whatever the settings of batches are by then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from firnline.checkpoint.codec import seal
from firnline.errors import CommitConflictError, DamagedError, FencedError
from firnline.names import progress_folder
from firnline.sinks.follower import FollowerHead, unseal_head
from firnline.sinks.numbered import NumberedFiles
from firnline.storage import Storage
from firnline.types import EntryRef, Json


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
        body = unseal_head(value, what)
        try:
            sending = SendRange.from_json(body["sending"]) if body["sending"] else None
            head = FollowerHead.from_json(body["head"], what)
            return cls(int(body["number"]), head, sending, int(body["refused"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{what} lacks {error}", what=what) from error


class ProgressLog:
    """The files of one sink."""

    def __init__(self, storage: Storage, pipeline: str, sink: str) -> None:
        self._files = NumberedFiles(storage, progress_folder(pipeline, sink), "http.progress")
        self._sink = sink

    def load(self) -> Progress | None:
        """Read the file that counts; None if there is none.

        Raises:
            DamagedError: it is damaged.
        """
        found = self._files.load()
        return Progress.from_json(found[1], found[0]) if found is not None else None

    def append(self, expected: Progress | None, new: Progress) -> Progress:
        """Make a change; it is durable on return. `new` gets the next number.

        Raises:
            FencedError: a newer generation has the sink.
            CommitConflictError: another change came first; this one does not count.
        """
        new = replace(new, number=expected.number + 1 if expected else 1)
        if not self._files.append(new.number, new.to_json()):
            self._refuse(new)
        return new

    def _refuse(self, new: Progress) -> None:
        held = self.load()
        if held is not None and held.head.generation > new.head.generation:
            generation = held.head.generation
            raise FencedError(f"generation {generation} took sink {self._sink!r} over", generation=generation)
        if held is not None and replace(held, number=0) == replace(new, number=0):
            return  # written by this run, and the answer was lost
        raise CommitConflictError(f"sink {self._sink!r} holds another head than expected; nothing was written")
