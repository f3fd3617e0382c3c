"""Rows of a query by COPY: compiled code takes them from the client library, many at once."""

from __future__ import annotations

import select
from typing import Any

import numpy as np
import numpy.typing as npt
import psycopg
from psycopg import Connection, pq
from psycopg.pq import abc
from psycopg.sql import SQL, Composed

from firnline.sources.postgres.library import Library
from firnline.sources.postgres.stream_kernel import FULL, LOST, NOTHING, OTHER

WAIT_MILLISECONDS = 1000  # for more rows, before it is looked whether the connection is lost
_FIRST_BYTES = 1 << 20  # room for rows, at first


class CopyOut:
    """The rows of one query, in COPY's text, as they come on a connection of psycopg.

    Raises:
        psycopg.Error: what the server answers, or the connection is lost; here and in all methods.
    """

    def __init__(self, db: Connection[Any], query: Composed) -> None:
        self._db = db
        self._connection: abc.PGconn = db.pgconn
        self._library = Library(self._connection)
        self._data: npt.NDArray[np.uint8] = np.empty(_FIRST_BYTES, np.uint8)
        self.has_all = False  # the server has no more rows
        self._connection.send_query(SQL("COPY ({}) TO STDOUT").format(query).as_bytes(db))
        while self._connection.flush():
            self._wait(select.POLLIN | select.POLLOUT)
        answer = self._answer()
        if answer is None or answer.status != pq.ExecStatus.COPY_OUT:
            self._end(answer)
            raise psycopg.OperationalError("the server answers a COPY with something else")

    def take(self, most: int, enough: int) -> tuple[bytes, int]:
        """Return the next rows, and how many: up to `most`, or less once they have `enough` bytes or there are no
        more."""
        used = rows = 0
        while rows < most and used < enough and not self.has_all:
            ended, used, count, row = self._library.take_copied(self._data, used, most - rows, enough)
            rows += count
            if ended == OTHER:
                self._make_room(used, len(row))
                self._data[used : used + len(row)] = np.frombuffer(row, np.uint8)
                used += len(row)
            elif ended == NOTHING:
                self._wait(select.POLLIN)
            elif ended == LOST:
                raise self._lost()
            elif ended != FULL:  # the end of the rows, or an error
                self.has_all = True
                self._end(self._answer())
        return self._data[:used].tobytes(), rows

    def cancel(self) -> None:
        """End the query, and pass over what it has sent meanwhile. Its transaction can only be rolled back."""
        self._db.cancel_safe()
        try:
            while not self.has_all:
                self.take(1 << 30, len(self._data))
        except psycopg.errors.QueryCanceled:
            self.has_all = True

    def _make_room(self, used: int, more: int) -> None:
        data = np.empty(max(2 * len(self._data), used + more), np.uint8)
        data[:used] = self._data[:used]
        self._data = data

    def _wait(self, events: int) -> None:
        poll = select.poll()
        poll.register(self._connection.socket, events)
        poll.poll(WAIT_MILLISECONDS)

    def _answer(self) -> abc.PGresult | None:
        """Return the server's next answer; None if it has none."""
        while self._connection.is_busy():
            self._wait(select.POLLIN)
            self._connection.consume_input()
        return self._connection.get_result()

    def _end(self, answer: abc.PGresult | None) -> None:
        """Take the last answers; raises the error that one of them is."""
        failed: abc.PGresult | None = None
        is_done = False
        while answer is not None:
            is_done = is_done or answer.status == pq.ExecStatus.COMMAND_OK
            if answer.status == pq.ExecStatus.FATAL_ERROR:
                failed = answer
            answer = self._answer()
        if failed is not None:
            raise psycopg.errors.error_from_result(failed)
        if not is_done:
            raise self._lost()

    def _lost(self) -> psycopg.OperationalError:
        return psycopg.OperationalError(self._connection.get_error_message() or "the connection was lost")
