"""Records in numbered files, for sinks whose head needs a place of its own: each change creates the next file.

The file with the highest number counts. A change creates its file only if it does not exist yet, and then looks whether
it is the highest: so of two writers that build on the same file only one succeeds, and one that slept while others went
on never does. Older files are deleted afterwards.
"""

from __future__ import annotations

import contextlib

from firnline.checkpoint.codec import canonical, parse
from firnline.faults import fault_point
from firnline.names import progress_name, progress_number
from firnline.storage import Storage
from firnline.types import Json

KEPT = 2  # files that stay, the highest included


class NumberedFiles:
    """The files of one folder. `point` names the fault points around a change."""

    def __init__(self, storage: Storage, folder: str, point: str) -> None:
        self._storage = storage
        self.folder = folder
        self._point = point

    def load(self) -> tuple[str, Json] | None:
        """Return key and content of the file that counts; None if there is none.

        Raises:
            DamagedError: it is no JSON.
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
            return key, parse(data, key)

    def append(self, number: int, value: Json) -> bool:
        """Create the file with this number, durably. Returns False if another one came first: this one says nothing."""
        key = self._key(number)
        try:
            fault_point(f"{self._point}.before")
            self._storage.put_new(key, canonical(value))
            fault_point(f"{self._point}.after")
        except FileExistsError:
            return False
        numbers = self._numbers()
        if not numbers or numbers[-1] != number:
            self._storage.delete(key)  # created behind the back of those that went on
            return False
        for older in numbers[:-KEPT]:
            with contextlib.suppress(OSError):  # a file that stays says nothing
                self._storage.delete(self._key(older))
        return True

    def _numbers(self) -> list[int]:
        found = (progress_number(stat.name) for stat in self._storage.list(self.folder))
        return sorted(number for number in found if number is not None)

    def _key(self, number: int) -> str:
        return f"{self.folder}/{progress_name(number)}"
