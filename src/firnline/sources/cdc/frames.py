"""Frames of one piece of a log, in memory that is used again and that compiled code may write to."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SLACK = 16  # bytes behind the frames that compiled code may write
MOST_KEPT = 4 << 20  # bytes of memory that is used again


class Frames:
    """Frames that are being collected. `data` and `view` are the same memory; they change when more room is needed."""

    def __init__(self) -> None:
        self._use(np.empty(0, np.uint8))
        self._used = 0

    def _use(self, data: npt.NDArray[np.uint8]) -> None:
        self.data, self.view = data, data.data

    def __len__(self) -> int:
        return self._used

    def reserve(self, size: int) -> None:
        """Make room for frames of so many bytes in all."""
        if size + SLACK > len(self.data):
            data = np.empty(max(size + SLACK, 2 * self._used), np.uint8)
            data[: self._used] = self.data[: self._used]
            self._use(data)

    def append(self, message: memoryview | bytes) -> None:
        """Append a message as a frame."""
        at, end = self._used + 4, self._used + 4 + len(message)
        self.reserve(end)
        self.view[self._used : at] = len(message).to_bytes(4, "little")
        self.view[at:end] = message
        self._used = end

    def end_at(self, size: int) -> None:
        """Set how many bytes of `data` are frames."""
        self._used = size

    def clear(self) -> None:
        self._used = 0

    def take(self) -> bytes:
        """Return the frames, and begin anew."""
        frames = bytes(self.view[: self._used])
        self._used = 0
        if len(self.data) > MOST_KEPT:  # after a very large message
            self._use(np.empty(0, np.uint8))
        return frames
