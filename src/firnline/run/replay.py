"""Plans an epoch from its ledger entry: the same files, from the same record to the same record."""

from __future__ import annotations

from firnline.checkpoint.ledger import LedgerEntry
from firnline.run.open_pipeline import OpenPipeline
from firnline.sources.base import SourcePlan, Split
from firnline.sources.files.position import FileState
from firnline.sources.group import EpochPlan
from firnline.types import Json

_NO_LIMIT = 1 << 62


def replay_plan(pipeline: OpenPipeline, entry: LedgerEntry, parallelism: int) -> EpochPlan:
    """The slice that an epoch read, to be read again for its operators' state."""
    plans: dict[str, SourcePlan] = {}
    for name, records in entry.inputs.items():
        if name not in pipeline.sources.names:
            continue
        position = entry.checkpoint.positions[name]
        state = FileState.from_json(position)
        inputs = [_input(state, record) for record in records if _was_read(record)]
        plans[name] = SourcePlan(
            source=name,
            base=position,
            splits=_deal(inputs, parallelism),
            files=len(inputs),
            size_bytes=sum(int(item["size_bytes"]) for item in inputs),
        )
    return EpochPlan(plans)


def _was_read(record: dict[str, Json]) -> bool:
    return record["status"] != "pending" and int(record["to"]) > int(record["from"])


def _input(state: FileState, record: dict[str, Json]) -> dict[str, Json]:
    """A file as a task reads it. The ledger keeps no byte offsets: a file that was begun before is skipped through."""
    return {**record, "path": state.current_name(str(record["path"])), "offset": 0, "line": 0}


def _deal(inputs: list[dict[str, Json]], parallelism: int) -> list[Split]:
    """Contiguous runs, as many as tasks work at once; the order of the rows is that of the files, however dealt."""
    size = max(1, -(-len(inputs) // max(1, parallelism)))
    runs = [inputs[at : at + size] for at in range(0, len(inputs), size)]
    return [Split(run, _NO_LIMIT, _NO_LIMIT, _NO_LIMIT) for run in runs]
