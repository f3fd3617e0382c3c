"""Checks whether a sink can apply a rollback or a restore, and names the obstacles."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from firnline.checkpoint.ledger import LedgerEntry
from firnline.errors import RollbackRefusedError, SinkError
from firnline.run.edit_entries import find_effect
from firnline.sinks.base import GoesBack, Sink, SinkReturn

NAMED = 3  # examples in a message


def plan_sink(
    sink: Sink, to: int, *, left: bool, accept: Collection[str]
) -> tuple[SinkReturn, list[RollbackRefusedError]]:
    """Plan the rollback of one sink to an epoch, at the sink's current version. Writes nothing."""
    try:
        fence = sink.read_fence()
    except SinkError as error:
        problem = RollbackRefusedError(
            f"{sink.name} cannot be read: {error.message}",
            hint=f"Repair it, or leave its rows as they are: --leave {sink.name}",
        )
        return SinkReturn(sink.name, sink.uri, 0, None, left=left), [] if left else [problem]
    if left or fence.epoch <= to:
        version = fence.version if fence.exists else None
        return SinkReturn(sink.name, sink.uri, fence.epoch, version, left=left), []
    return sink.plan_return(to, accept)


def check_replaceable(sinks: Iterable[Sink]) -> None:
    """Refuse an edit that replaces rows, before anything is claimed, if a sink cannot remove rows.

    Raises:
        RollbackRefusedError: it names the sinks.
    """
    fixed = [sink.name for sink in sinks if sink.capabilities.goes_back is GoesBack.NOT_AT_ALL]
    if fixed:
        raise RollbackRefusedError(
            f"{', '.join(fixed)} cannot take rows back",
            hint="Keep the rows, or take that sink out of the spec.",
            sinks=fixed,
        )


def check_restored(sink: Sink, entry: LedgerEntry, deciding: str) -> int:
    """Check whether a further sink can apply a restore. Returns the sink version that was checked.

    The version is -1 without a table: if another writer creates the table meanwhile, it is checked first.

    Raises:
        RollbackRefusedError: others changed rows since the restore was planned, or files that it needs are gone.
    """
    jump = entry.jump
    to, again = int(jump["to_epoch"]), f"firnline run --from-savepoint {jump['path']}"
    leave = f"Or take {sink.name} out of the spec."
    if deciding in jump["versions"] and entry.checkpoint.floor <= to:
        leave = f"Or leave it as it is: firnline rollback --to {to} --leave {sink.name}"
    version = sink.read_fence().version  # before the checks: whoever commits meanwhile makes the commit onto it fail
    check_unchanged(sink, entry, jump.get("accepted", []), f"{again}{{flags}}. {leave}")
    missing = find_lacking(sink, entry)
    if missing:
        raise RollbackRefusedError(
            f"{sink.name} cannot follow the restore to epoch {to}: {len(missing)} file(s) that it needs are gone:"
            f" {', '.join(missing[:NAMED])}",
            hint=f"Restore once more, with copies of them: {again}. {leave}",
        )
    return version


def check_unchanged(sink: Sink, entry: LedgerEntry, accept: Collection[str], way_out: str) -> None:
    """Refuse if others changed rows of a sink since a restore was planned; `way_out` takes `{flags}`.

    An old entry without the time of its plan is not checked.
    """
    planned_at = entry.jump.get("planned_at", {}).get(sink.name)
    if planned_at is None:
        return
    try:
        strangers = [s for s in sink.find_strangers(int(planned_at)) if s.name not in accept]
    except RollbackRefusedError as error:
        raise RollbackRefusedError(f"{sink.name}: {error.message}", hint=way_out.replace("{flags}", "")) from error
    if strangers:
        names = ", ".join(f"{s.name} (version {', '.join(map(str, s.versions[:NAMED]))})" for s in strangers)
        flags = "".join(f" --accept {s.name}" for s in strangers)
        raise RollbackRefusedError(
            f"{sink.name}: others changed rows since the restore was planned, and they would be lost: {names}",
            hint="If they may be lost: " + way_out.replace("{flags}", flags),
        )


def find_lacking(sink: Sink, entry: LedgerEntry) -> list[str]:
    """Return the files that a restore needs in a sink and that are gone."""
    return sink.find_missing(find_effect(sink, entry, entry.epoch))
