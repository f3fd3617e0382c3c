"""The plan to read a finished file again: what of it is in the tables already, and what happens to those rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from firnline.errors import ConfigError
from firnline.graph import find_source, sink_input, upstream
from firnline.history.status import load_files_by_source
from firnline.run.open_pipeline import OpenPipeline, is_read
from firnline.run.read_again import reading_id
from firnline.storage import is_remote, normalise
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class RereadPlan:
    """What another reading of a file does."""

    path: str
    source: str
    changed: bool  # since it was read
    size_bytes: int | None
    epochs: tuple[tuple[int, int], ...]  # epoch, and the records of the file that it read
    effect: str  # doubled or overwritten
    operators: tuple[str, ...]  # those that take the records again
    reading: str  # the newest one of the file

    @property
    def records(self) -> int:
        """The records of the file that were read before."""
        return sum(count for _, count in self.epochs)

    def to_json(self) -> dict[str, Json]:
        """Return the fields that `firnline files --reread --json` shows."""
        return {
            "path": self.path,
            "source": self.source,
            "changed": self.changed,
            "size_bytes": self.size_bytes,
            "records": self.records,
            "epochs": [{"epoch": epoch, "records": count} for epoch, count in self.epochs],
            "effect": self.effect,
            "operators": list(self.operators),
        }


def plan_reread(pipeline: OpenPipeline, path: str) -> RereadPlan:
    """Return the plan for a file; its path may be relative to the source or to this folder.

    Raises:
        ConfigError: no source has read the file to its end.
    """
    names = {path, *(f"{source.location}/{path}" for source in pipeline.sources)}
    if not is_remote(path):
        names.add(normalise(path))
    found = next(((source, row) for source, row in load_files_by_source(pipeline) if row["path"] in names), None)
    if found is None:
        raise ConfigError(f"{path} is no file of the pipeline", hint="firnline files", unknown="file")
    source, row = found
    hints = {"set_aside": "firnline files --retry PATH", "dropped": "Put it into the folder under another name."}
    if row["status"] not in ("committed", "changed", "grown"):
        hint = hints.get(str(row["status"]), "The next run reads it.")
        raise ConfigError(f"{row['path']} is not read to its end: it is {row['status']}", hint=hint)
    if not any(stat.name == row["path"] for stat in pipeline.sources[source].list_inputs()):
        raise ConfigError(f"{row['path']} is gone", hint="Put the file back under the same name.")
    options = pipeline.options
    mine = [sink for sink in options.sinks if _reads(pipeline, sink_input(options, sink), source)]
    overwritten = mine and all(sink.write == "upsert" for sink in mine)
    epochs, reading = _find_readings(pipeline, source, str(row["path"]))
    return RereadPlan(
        path=str(row["path"]),
        source=source,
        changed=row["status"] != "committed",
        size_bytes=row["size_bytes"],
        epochs=epochs,
        reading=reading,
        effect="overwritten" if overwritten else "doubled",
        operators=tuple(o.name for o in options.operators if _reads(pipeline, o.name, source)),
    )


def _reads(pipeline: OpenPipeline, name: str, source: str) -> bool:
    """Return whether an input or an operator takes the rows of a source, directly or not."""
    direct = find_source(pipeline.options, name)
    if direct is not None:
        return direct[0].name == source
    return any(node.name == source for node in upstream(pipeline.options, name))


def _find_readings(pipeline: OpenPipeline, source: str, path: str) -> tuple[tuple[tuple[int, int], ...], str]:
    """Return the epochs that read a file with their records, and the name of the newest reading."""
    head, newest = pipeline.load(), ""
    position = head.checkpoint.positions[source] if head.checkpoint else None
    counts: Counter[int] = Counter()
    for name, record in pipeline.ledger_files(head.entry):
        if name != source or not is_read(record):
            continue
        if pipeline.sources[source].current_name(position, str(record["path"])) == path:
            newest = newest or reading_id(record)
            counts[int(record["epoch"])] += int(record["to"]) - int(record["from"])
    return tuple(sorted((epoch, count) for epoch, count in counts.items() if count)), newest
