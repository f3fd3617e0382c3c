"""What somebody agreed to: compares the plan that was shown with what would be done now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from firnline.errors import PlanChangedError
from firnline.types import Json

NAMED = 5  # changes in a message


def check_agreed(agreed: Mapping[str, Json] | None, now: Mapping[str, Json]) -> None:
    """Compare the facts that somebody agreed to with those of now; None means that nobody was asked.

    Raises:
        PlanChangedError: they differ; its field `changes` lists what.
    """
    if agreed is None:
        return
    changes = list(_find_changes(agreed, now, ""))
    if changes:
        more = f"; and {len(changes) - NAMED} more" if len(changes) > NAMED else ""
        raise PlanChangedError(
            f"it is no longer as it was planned: {'; '.join(changes[:NAMED])}{more}", changes=changes
        )


def _find_changes(agreed: Json, now: Json, name: str) -> Iterator[str]:
    """Yield what differs. A value that was not known when it was planned, None, is no change."""
    if isinstance(agreed, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys((*agreed, *now)):
            yield from _find_changes(agreed.get(key, "nothing"), now.get(key, "nothing"), f"{name} {key}".strip())
    elif agreed is not None and agreed != now:
        yield f"{name.replace('_', ' ')} was {_text(agreed)}, and is {_text(now)}"


def _text(value: Json) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(str(one) for one in value) or "none"
    return "none" if value in (None, "") else str(value)
