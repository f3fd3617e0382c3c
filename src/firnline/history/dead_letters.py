"""The dead letters of a pipeline, for `firnline dead-letters` and `status`. Read-only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from firnline.errors import DamagedError
from firnline.graph import sink_input
from firnline.run.open_pipeline import OpenPipeline
from firnline.sinks.dead_letters import LetterFile, list_dead_letters, load_letter_files
from firnline.sinks.known import KnownSink, known_sinks
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """Which dead letters a command is about: those of a sink, of an epoch, with a text in their reason."""

    sink: str | None = None
    epoch: int | None = None
    reason: str | None = None

    @property
    def facts(self) -> dict[str, Json]:
        """What was given, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def select(self, file: LetterFile) -> list[int]:
        """Return the places in a file of the letters that are meant."""
        if self.epoch not in (None, file.epoch):
            return []
        text = (self.reason or "").casefold()
        return [place for place, letter in enumerate(file.letters) if text in letter.reason.casefold()]


EVERYTHING = LetterFilter()


def letter_sinks(pipeline: OpenPipeline) -> dict[str, str]:
    """Return the sinks that have files of dead letters: by the names that their targets know, those of the spec.

    Files lie under the name that the target knows, which a rename does not change.
    """
    keys = list_dead_letters(pipeline.storage, pipeline.options.name)
    names = {one.head_name: one.name for one in pipeline.options.followers}
    return {head: names.get(head, head) for head in sorted({key.split("/")[-2] for key in keys})}


def known_by_spec(pipeline: OpenPipeline, known: Mapping[str, KnownSink]) -> dict[str, KnownSink]:
    """Return what is known of followers by the names that they have in the spec now."""
    names = {one.head_name: one.name for one in pipeline.options.followers}
    return {names.get(one.head_name, name): one for name, one in known.items()}


def find_letters(
    pipeline: OpenPipeline, known: Mapping[str, KnownSink], wanted: LetterFilter
) -> dict[str, dict[str, tuple[LetterFile, list[int]]]]:
    """Return the letters that are meant and not answered: by sink and by key, the file and the places in it."""
    found: dict[str, dict[str, tuple[LetterFile, list[int]]]] = {}
    known = known_by_spec(pipeline, known)
    for head, sink in letter_sinks(pipeline).items():
        if wanted.sink is not None and sink != wanted.sink:
            continue
        files = load_letter_files(pipeline.storage, pipeline.options.name, head, known.get(sink))
        chosen = {key: (file, places) for key, file in files.items() if (places := wanted.select(file))}
        if chosen:
            found[sink] = chosen
    return found


def load_dead_letters(pipeline: OpenPipeline, wanted: LetterFilter = EVERYTHING) -> list[dict[str, Json]]:
    """Return the dead letters that are not answered, by sink, epoch and row."""
    known = known_sinks(pipeline.load().checkpoint)
    ports = {one.name: sink_input(pipeline.options, one) for one in pipeline.options.followers}
    rows = [
        {
            "sink": sink,
            "epoch": file.epoch,
            "row": file.letters[place].row,
            "id": f"{file.pipeline}/{file.epoch}/{ports[sink]}/{file.letters[place].row}" if sink in ports else None,
            "reason": file.letters[place].reason,
            "values": file.letters[place].values,
        }
        for sink, files in find_letters(pipeline, known, wanted).items()
        for file, places in files.values()
        for place in places
    ]
    return sorted(rows, key=lambda row: (row["sink"], row["epoch"], row["row"]))


def count_letters(pipeline: OpenPipeline, known: Mapping[str, KnownSink]) -> dict[str, int | None]:
    """Return how many dead letters each sink has that are not answered; None if a file of them is damaged."""
    counts: dict[str, int | None] = {}
    known = known_by_spec(pipeline, known)
    for head, sink in letter_sinks(pipeline).items():
        try:
            files = load_letter_files(pipeline.storage, pipeline.options.name, head, known.get(sink))
            counts[sink] = sum(len(file.letters) for file in files.values())
        except DamagedError:
            counts[sink] = None
    return counts
