"""Pages of long lists: `limit` rows, and an opaque `next` that asks for those after them."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from itertools import islice
from typing import Annotated

from fastapi import Query

from firnline.service.problems import ServiceError
from firnline.types import Json

DEFAULT_LIMIT, MAX_LIMIT = 50, 500

Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="How many rows at most.")]
After = Annotated[str | None, Query(alias="next", max_length=64, description="`next` of the page before.")]


_NUMBER = re.compile(r"[0-9]{1,18}")  # fits what any list and store can count


class _NextError(ServiceError):
    status = 422
    code = "invalid_next"


def read_next(after: str | None) -> int | None:
    """Return the number in a `next`; None for the first page."""
    if after is None:
        return None
    try:
        text = base64.b64decode(after.encode("ascii"), altchars=b"-_", validate=True).decode("ascii")
    except (ValueError, UnicodeError, binascii.Error):
        text = ""
    if not _NUMBER.fullmatch(text):
        raise _NextError("not a `next` of this list", hint="Use the one that the page before returned.")
    return int(text)


def write_next(number: int | None) -> str | None:
    """Return the `next` that asks for what follows a number; None if there is nothing more."""
    return None if number is None else base64.urlsafe_b64encode(str(number).encode()).decode()


def page(rows: Iterable[dict[str, Json]], limit: int, after: str | None) -> tuple[list[dict[str, Json]], str | None]:
    """Return one page of a list that is made anew for each request, and its `next`."""
    start = read_next(after) or 0
    found = list(islice(rows, start, start + limit + 1))
    return found[:limit], write_next(start + limit if len(found) > limit else None)
