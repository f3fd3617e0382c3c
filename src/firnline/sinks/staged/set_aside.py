"""Units that can never be committed: set aside with their reason, shown, retried or discarded on demand."""

from __future__ import annotations

import base64
from dataclasses import dataclass

from firnline.checkpoint.codec import canonical, parse
from firnline.errors import ConfigError, DamagedError
from firnline.faults import fault_point
from firnline.names import SET_ASIDE, pending_unit, set_aside_unit
from firnline.sinks.staged.unit import list_units
from firnline.storage import Storage
from firnline.types import Clock, Json


@dataclass(frozen=True, slots=True)
class RejectedUnit:
    """A unit that was set aside."""

    name: str
    reason: str
    rejected_at: str
    pipeline: str | None
    epoch: int | None


def reject(storage: Storage, name: str, reason: str, clock: Clock) -> None:
    """Set a unit aside: first write the copy with its reason, then delete the pending file."""
    try:
        data = storage.get(pending_unit(name))
    except FileNotFoundError:
        return
    about: dict[str, Json] = {"reason": reason, "at": clock.now().isoformat()}
    body = _readable(data, name)
    if body is None:
        body = {"raw": base64.b64encode(data).decode()}
    elif canonical(body) != data:
        about["raw"] = base64.b64encode(data).decode()  # a retry must put back the same bytes
    body["rejected"] = about
    fault_point("staging.reject.before")
    storage.put(set_aside_unit(name), canonical(body))
    storage.delete(pending_unit(name))
    fault_point("staging.reject.after")


def _readable(data: bytes, name: str) -> dict[str, Json] | None:
    """Return the unit as an object that can be serialized again; None if it is none."""
    try:
        body = parse(data, name)
        canonical(body)
    except (DamagedError, ValueError, RecursionError):  # e.g. NaN, or half a surrogate pair
        return None
    return body if isinstance(body, dict) and "rejected" not in body and set(body) != {"raw"} else None


def load_rejected(storage: Storage) -> list[RejectedUnit]:
    """Return everything that was set aside."""
    found = []
    for name, _ in list_units(storage, SET_ASIDE):
        try:
            body = _load(storage, name)
        except FileNotFoundError:
            continue  # retried or discarded since it was listed
        about = body["rejected"]
        epoch = body.get("epoch")
        found.append(
            RejectedUnit(
                name=name,
                reason=str(about["reason"]),
                rejected_at=str(about["at"]),
                pipeline=body.get("pipeline"),
                epoch=int(epoch) if isinstance(epoch, int) else None,
            )
        )
    return found


def retry(storage: Storage, name: str) -> None:
    """Put a unit back among the pending ones, unchanged."""
    try:
        if "/" in name:
            raise FileNotFoundError(name)
        body = _load(storage, name)
    except FileNotFoundError as error:
        raise ConfigError(f"no unit {name!r} was set aside", hint="See `firnline staging TABLE`.") from error
    raw = body.pop("rejected").get("raw") or (body["raw"] if set(body) == {"raw"} else None)
    data = canonical(body) if raw is None else base64.b64decode(raw)
    storage.put(pending_unit(name), data)
    storage.delete(set_aside_unit(name))


def _load(storage: Storage, name: str) -> dict[str, Json]:
    body = parse(storage.get(set_aside_unit(name)), name)
    if not isinstance(body, dict) or "rejected" not in body:
        raise DamagedError(f"{set_aside_unit(name)} is unreadable")
    return body
