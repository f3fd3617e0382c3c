"""The sinks of a pipeline with their heads, for `firnline sinks` and `status`. Read-only."""

from __future__ import annotations

from firnline.errors import FirnlineError, LedgerHoleError
from firnline.history.dead_letters import count_letters
from firnline.names import outbox_folder
from firnline.run.commits import staged_for
from firnline.run.open_pipeline import OpenPipeline
from firnline.run.status import has_died, load_runs
from firnline.sinks.base import Head, Sink
from firnline.sinks.known import BEGINNING, find_away, find_filling, find_known, known_sinks
from firnline.types import Json


def load_sinks(pipeline: OpenPipeline) -> tuple[int, list[dict[str, Json]]]:
    """Return the epoch of the deciding sink, and a row for every sink, the deciding one first."""
    head = pipeline.load()
    runs = load_runs(pipeline.storage, pipeline.options.name)
    failing = runs[0].get("sinks_failing") or {} if runs else {}
    tries, is_alive = find_next_tries(runs), is_run_alive(runs)
    letters = count_letters(pipeline, known_sinks(head.checkpoint))
    away = find_away(head.checkpoint, pipeline.options.followers)
    filled = {
        name: "the beginning" if one.filled_from == BEGINNING else one.filled_from
        for name, one in find_filling(head.checkpoint, pipeline.options.followers).items()
    }
    kinds = {options.name: options.type for options in pipeline.options.ordered_sinks}
    rows = [
        {
            "name": sink.name,
            "type": kinds[sink.name],
            "location": sink.uri,
            "required": sink.required,
            "decides": sink is pipeline.deciding,
            "delivery": sink.capabilities.delivery.value,
            "set_aside": away.get(sink.name),
            "filled_from": filled.get(sink.name),
            **(found := _head_of(pipeline, sink, head, failing.get(sink.name))),
            "next_try_at": tries.get(sink.name) if found["error"] else None,
            "dead_letters": letters.get(sink.name, 0),
        }
        for sink in pipeline.sinks
    ]
    rows += [
        {
            "name": name,
            "type": None,
            "location": one.target,
            "required": False,
            "decides": False,
            "delivery": None,
            "set_aside": one.set_aside or None,
            "filled_from": None,
            "epoch": one.held,
            "parts": None,
            "last_known_epoch": one.held,
            "epochs_behind": head.epoch - one.held,
            "bytes_behind": None,
            "error": "the spec no longer has it",
            "next_try_at": None,
            "dead_letters": letters.get(name, 0),
        }
        for name, one in known_sinks(head.checkpoint).items()
        if name not in kinds and name not in {sink.former_name for sink in pipeline.sinks}
    ]
    return head.epoch, [{**row, "state": _state(row, is_alive=is_alive)} for row in rows]


def _state(row: dict[str, Json], *, is_alive: bool) -> str:
    """Return the state of a sink in a few words."""
    if row["set_aside"]:
        return "set aside"
    if row["error"]:
        return "cannot be read" if row["epoch"] is None else "fails"
    if row["decides"]:
        return "decides"
    if row["filled_from"] and row["epochs_behind"]:
        return f"is filled from {row['filled_from']}"
    if row["epochs_behind"]:
        return "catching up" if is_alive else "waits for a run"
    return "in sync"


def _head_of(pipeline: OpenPipeline, sink: Sink, decided: Head, failing: Json) -> dict[str, Json]:
    try:
        epoch, parts = sink.load().epoch, sink.find_parts()
    except (FirnlineError, OSError) as error:
        return {"epoch": None, "parts": None, **behind_unread(pipeline, sink, decided), "error": str(error)}
    known = find_known(known_sinks(decided.checkpoint), sink.name, sink.former_name)
    goes_on = max(epoch, known.born if known is not None else 0)  # a resumed sink never gets what was before
    behind = max(0, decided.epoch - goes_on)
    return {
        "epoch": epoch,
        "parts": parts,
        "last_known_epoch": epoch,
        "epochs_behind": behind,
        "bytes_behind": bytes_behind(pipeline, sink, goes_on, decided) if behind else 0,
        "error": failing if behind else None,
    }


def find_next_tries(runs: list[dict[str, Json]]) -> dict[str, str]:
    """Return when a live run tries each sink that failed again; nothing if no run is alive."""
    return dict(runs[0].get("sinks_next_try") or {}) if is_run_alive(runs) else {}


def is_run_alive(runs: list[dict[str, Json]]) -> bool:
    """Return whether the newest run on record is alive."""
    return bool(runs) and runs[0]["status"] == "running" and not has_died(runs[0])


def behind_unread(pipeline: OpenPipeline, sink: Sink, decided: Head) -> dict[str, Json]:
    """Return how far a sink that cannot be read was behind when a checkpoint last knew; None if none did."""
    known = known_sinks(decided.checkpoint).get(sink.name)
    if known is None:
        return {"last_known_epoch": None, "epochs_behind": None, "bytes_behind": None}
    return {
        "last_known_epoch": known.held,
        "epochs_behind": decided.epoch - known.held,
        "bytes_behind": bytes_behind(pipeline, sink, known.held, decided),
    }


def bytes_behind(pipeline: OpenPipeline, sink: Sink, epoch: int, decided: Head) -> int | None:
    """Return the bytes that are staged for a sink and that it lacks; None if the ledger no longer says."""
    found = 0
    try:
        for entry, _ in pipeline.ledger.entries(decided.entry):
            if entry.epoch <= epoch:
                return found
            found += sum(int(file["size_bytes"]) for file in staged_for(entry, sink))
    except LedgerHoleError:
        return None
    return found


def load_outbox(pipeline: OpenPipeline) -> dict[str, Json] | None:
    """Return how many files lie in the outbox, and their size; None if the pipeline has one sink alone."""
    if not pipeline.sinks[1:]:
        return None
    sizes = [file.size_bytes for file in pipeline.storage.list(outbox_folder(pipeline.options.name))]
    return {"files": len(sizes), "size_bytes": sum(sizes)}
