"""The status of a pipeline, read from its sinks, ledger and run history. Read-only; starts no JVM."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from html import escape

from firnline.checkpoint.codec import canonical
from firnline.checkpoint.ledger import Fold
from firnline.clock import seconds_since
from firnline.errors import CheckpointError, FirnlineError, LedgerHoleError, SinkError
from firnline.history.dead_letters import count_letters
from firnline.history.inputs import load_inputs
from firnline.history.sinks import behind_unread, bytes_behind, find_next_tries, load_outbox
from firnline.history.state import OperatorSnapshot, snapshots_of
from firnline.history.store import find_store
from firnline.names import JOURNAL
from firnline.process import has_exited
from firnline.rescued import Rescued, add_rescued
from firnline.run.open_pipeline import OpenPipeline
from firnline.run.status import find_last_error, find_state, load_runs_marked
from firnline.sinks.base import Head, Sink
from firnline.sinks.known import find_away, known_sinks
from firnline.sources.base import InputStatus
from firnline.stores.lease import LeaseRecord
from firnline.stores.tiers import NewestCopy
from firnline.topology.records import Outcomes
from firnline.types import Json

logger = logging.getLogger(__name__)

COMMITS_SEARCHED = 20  # for the time of the newest epoch
SET_ASIDE_SHOWN = 10  # files; `firnline files --status set_aside` lists all
COMMITS_READ = 1000  # for older commits only the epoch is shown, without table version and commit time


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    """What `firnline status` shows; the field names are the same in JSON."""

    pipeline: str
    state: str  # new, starting, running, pausing, paused, stopping, done, failed, fenced, died (without a record)
    epoch: int  # the deciding sink's newest; in a two-stage table it may be staged
    generation: int
    table: str
    table_version: int | None
    sinks: list[dict[str, Json]]
    last_committed_file: str | None
    files_in_progress: int
    files_set_aside: int
    files_outstanding: int | None  # None: the source cannot be listed
    bytes_outstanding: int | None
    files_grown: int | None  # since they were read; None: the source cannot be listed
    files_changed: int | None  # replaced since they were read
    files_incomplete: int | None  # with a last line that is left until it is complete
    checkpoint_bytes: int
    repairs: list[str]
    restarts: int
    committed_epoch: int = 0  # the newest epoch visible to readers of the deciding table
    align_ms: int | None = None  # of the newest run's newest epoch: how long sources waited for each other
    worker_losses: int = 0  # of the newest run
    last_worker_loss: dict[str, Json] | None = None
    ledger_hole: str | None = None  # why late files cannot be found
    unordered_names: list[str] = field(default_factory=list)  # sources whose file names do not grow with time
    rescued: list[dict[str, Json]] = field(default_factory=list)  # by source and column, of the epochs in the ledger
    rescued_since: int | None = None  # the oldest of these epochs; older ones are folded
    rows: int = 0  # written to the sink `rows_in` by the epochs in the ledger; of an upsert, change rows
    rows_in: str = ""  # the deciding sink, or the first one if the journal decides
    rows_since: int | None = None  # the oldest of these epochs
    last_commit_at: str | None = None  # of the newest epoch that readers see
    last_commit_seconds_ago: float | None = None
    last_error: dict[str, Json] | None = None  # why a run failed or was killed, or what the last one overcame
    sources: list[dict[str, Json]] = field(default_factory=list)
    set_aside: list[dict[str, Json]] = field(default_factory=list)  # the first files, with their reasons
    runs: list[dict[str, Json]] = field(default_factory=list)
    recovery_path: str | None = None  # where the newest run read its checkpoint: local, remote, sink, fresh
    state_recovery_path: str | None = None  # where it read operator state; None without operators
    restored_position: dict[str, Json] | None = None  # the epoch that it resumed after, and its positions
    operators: list[OperatorSnapshot] = field(default_factory=list)  # the state that the newest checkpoint names
    shards: int | None = None  # the number of shards of that state; None without state
    copies: list[dict[str, Json]] = field(default_factory=list)  # the heads of the store and the tiers
    outbox: dict[str, Json] | None = None  # files, size_bytes: rows for further sinks; None with one sink
    lease: dict[str, Json] | None = None
    overdue_snapshots: list[dict[str, Json]] = field(default_factory=list)  # of topologies; held beyond max_hold
    control: dict[str, Json] | None = None

    def _repr_html_(self) -> str:
        """Show the main facts as a table in a notebook."""
        facts: dict[str, Json] = {
            "pipeline": self.pipeline,
            "state": self.state,
            "epoch": self.epoch,
            "rows": f"{self.rows:,} in {self.rows_in}" if self.rows_in else f"{self.rows:,}",
            "last commit": self.last_commit_at or "none",
            "files outstanding": "unknown" if self.files_outstanding is None else f"{self.files_outstanding:,}",
            "files set aside": self.files_set_aside,
            "last error": self.last_error["message"] if self.last_error else "none",
        }
        facts |= {f"sink {sink['name']}": _sink_text(sink) for sink in self.sinks if sink["name"] != JOURNAL}
        rows = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in facts.items()
        )
        return f"<table>{rows}</table>"


def _sink_text(sink: Mapping[str, Json]) -> str:
    if sink["error"]:
        return str(sink["error"])
    behind = f", {sink['epochs_behind']} behind" if sink["epochs_behind"] else ""
    return f"epoch {sink['epoch']}{behind}"


def load_status(pipeline: OpenPipeline, control: dict[str, Json] | None = None) -> PipelineStatus:
    """Read everything that `status` shows. `control` is the answer of a run on this machine."""
    pipeline.recorder.tiers.read_again()
    head = pipeline.load()
    positions = head.checkpoint.positions if head.checkpoint else {}
    described = list(pipeline.sources.describe(positions).values())
    inputs = load_inputs(pipeline, head)
    runs = load_runs_marked(pipeline.storage, pipeline.options.name)
    failing = runs[0].get("sinks_failing") or {} if runs else {}
    letters = count_letters(pipeline, known_sinks(head.checkpoint))
    kinds, tries = {sink.name: sink for sink in pipeline.options.ordered_sinks}, find_next_tries(runs)
    sinks = [
        {
            **(row := _sink_row(pipeline, sink, head, failing.get(sink.name))),
            "type": kinds[sink.name].type,
            "write": kinds[sink.name].write if sink.name != JOURNAL else None,
            "next_try_at": tries.get(sink.name) if row["error"] else None,
            "dead_letters": letters.get(sink.name, 0),
        }
        for sink in pipeline.sinks
    ]
    snapshots = snapshots_of(head.checkpoint)
    written = _load_written(pipeline, head)
    last_commit = _last_commit(pipeline, head)
    return PipelineStatus(
        pipeline=pipeline.options.name,
        state=find_state(runs, control),
        epoch=head.epoch,
        generation=head.generation,
        table=pipeline.deciding.uri,
        table_version=head.version if head.exists else None,
        sinks=sinks,
        last_committed_file=described[0].last if len(described) == 1 else None,
        files_in_progress=sum(len(position.in_progress) for position in described),
        files_set_aside=sum(len(position.set_aside) for position in described),
        files_outstanding=inputs.total("files"),
        bytes_outstanding=inputs.total("size_bytes"),
        files_grown=inputs.total("grown"),
        files_changed=inputs.total("changed"),
        files_incomplete=inputs.total("incomplete"),
        checkpoint_bytes=len(canonical(head.checkpoint.to_json())) if head.checkpoint else 0,
        repairs=list(head.repairs),
        restarts=sum(int(r["restarts"]) for r in runs),
        committed_epoch=head.epoch if head.committed is None else head.committed,
        align_ms=runs[0].get("align_ms") if runs else None,
        worker_losses=int(runs[0].get("worker_losses") or 0) if runs else 0,
        last_worker_loss=runs[0].get("last_worker_loss") if runs else None,
        ledger_hole=_find_hole(pipeline, head, runs),
        unordered_names=list(runs[0].get("unordered_names") or []) if runs else [],
        rescued=written.rescued,
        rescued_since=written.since,
        rows=written.rows,
        rows_in=pipeline.counted,
        rows_since=written.since,
        last_commit_at=last_commit,
        last_commit_seconds_ago=seconds_since(last_commit, pipeline.clock.now()) if last_commit else None,
        last_error=find_last_error(runs),
        sources=[source.to_json() for source in inputs.sources],
        set_aside=inputs.set_aside(SET_ASIDE_SHOWN),
        runs=runs,
        recovery_path=str(runs[0]["recovery_path"]) if runs and runs[0].get("recovery_path") else None,
        state_recovery_path=runs[0].get("state_recovery_path") if runs else None,
        restored_position=_restored(pipeline, head, runs),
        operators=snapshots,
        shards=(head.checkpoint.shards if head.checkpoint else 0) or max((s.shards for s in snapshots), default=None),
        copies=load_copies(pipeline, head, runs[0].get("copies_failing") if runs else None),
        outbox=load_outbox(pipeline),
        lease=load_lease(pipeline),
        overdue_snapshots=_load_overdue(pipeline, head),
        control=control,
    )


def _load_overdue(pipeline: OpenPipeline, head: Head) -> list[dict[str, Json]]:
    """Return the snapshots of topologies that hold the floor longer than they may."""
    recorded = head.checkpoint.topology if head.checkpoint else {}
    outcomes = Outcomes(pipeline.options.home.storage_options)
    return [asdict(one) for one in outcomes.find_overdue(recorded, pipeline.clock.now())]


def _find_hole(pipeline: OpenPipeline, head: Head, runs: list[dict[str, Json]]) -> str | None:
    """Return what is wrong with the ledger. Reads it down to the first fold; the newest run has checked the rest."""
    try:
        for link in pipeline.ledger.chain(head.entry):
            if isinstance(link, Fold):
                break
            if link.kind == "repair" and (not runs or link.checkpoint.created_at > str(runs[0].get("updated_at"))):
                return None  # repaired since that run
    except LedgerHoleError as error:
        return error.message
    hole = runs[0].get("ledger_hole") if runs else None
    return str(hole) if hole else None


@dataclass(slots=True)
class _Written:
    """What the epochs in the ledger wrote; those before `since` are folded."""

    rows: int = 0
    rescued: list[dict[str, Json]] = field(default_factory=list)
    since: int | None = None


def _load_written(pipeline: OpenPipeline, head: Head) -> _Written:
    """Add up the rows and the rescued values of the entries that are not folded."""
    found = _Written()
    rescued: list[Rescued] = []
    by_sink: list[tuple[int, Rescued]] = []
    for sink in pipeline.sinks:
        with contextlib.suppress(SinkError, OSError):  # reported elsewhere
            by_sink += sink.find_rescued()
    try:
        for entry, _ in pipeline.ledger.entries(head.entry):
            rescued[:0] = [Rescued.from_json(one) for one in entry.rescued]
            found.rows += sum(int(file["rows"]) for file in entry.staged.get(pipeline.counted, []))
            found.since = entry.epoch
    except LedgerHoleError:
        pass  # reported elsewhere
    rescued += [one for epoch, one in by_sink if found.since is not None and epoch >= found.since]
    found.rescued = [one.to_json() for one in add_rescued(rescued)]
    return found


def _last_commit(pipeline: OpenPipeline, head: Head) -> str | None:
    """Return when the newest epoch that readers see was committed, in UTC; None if there is none.

    If the newest commits of the table are others', the time at which its checkpoint was made.
    """
    if head.checkpoint is None:
        return None
    committed = head.epoch if head.committed is None else head.committed
    commit = pipeline.deciding.commit_times(head.version, COMMITS_SEARCHED).get(committed)
    moment = commit[1] if commit else head.checkpoint.created_at if committed == head.epoch else None
    return datetime.fromisoformat(moment).astimezone(UTC).isoformat() if moment else None


def _restored(pipeline: OpenPipeline, head: Head, runs: list[dict[str, Json]]) -> dict[str, Json] | None:
    """Return where the newest run resumed; positions are None if the ledger no longer has them."""
    epoch = runs[0].get("resumed_after") if runs else None
    if not epoch:
        return None
    found: dict[str, Json] = {"epoch": int(epoch), "positions": None}
    try:
        for entry in pipeline.entries(head.entry):
            if entry.epoch <= int(epoch):
                found["positions"] = entry.checkpoint.positions if entry.epoch == int(epoch) else None
                break
    except LedgerHoleError:
        pass  # reported elsewhere, and the epoch is known
    return found


def load_lease(pipeline: OpenPipeline) -> dict[str, Json] | None:
    """Return the holder of the lease; None if there was never one. A store that does not answer is logged, never
    raised."""
    try:
        store = find_store(pipeline)
        if store is None:
            return None
        try:
            record = store.get(f"{pipeline.options.name}/lease", LeaseRecord)
        finally:
            store.close()
    except (OSError, CheckpointError, SinkError) as error:
        return {"unreadable": str(error)}
    if record is None:
        return None
    return {**record.to_json(), "renewed_seconds_ago": seconds_since(record.renewed_at, pipeline.clock.now())}


def is_leased(pipeline: OpenPipeline) -> bool:
    """Return whether a run that may be alive holds the lease; False if that cannot be read."""
    lease = load_lease(pipeline)
    if lease is None or "unreadable" in lease or lease["released"]:
        return False
    return not has_exited(str(lease["host"]), int(lease["pid"]), str(lease["start"]))


def _ahead(copy: NewestCopy, head: Head) -> str:
    """Return the problem of a copy that is ahead of the sink, which a run would refuse; empty if it is not."""
    if copy.record is None or copy.epoch <= head.epoch:
        return ""
    return f"holds epoch {copy.epoch}, but the table holds {f'epoch {head.epoch}' if head.epoch else 'none'}"


def load_copies(pipeline: OpenPipeline, head: Head, failing: Mapping[str, Json] | None = None) -> list[dict[str, Json]]:
    """Return the heads of the store and the tiers, and how far each is behind the sink.

    `failing` has the reasons why the newest run could not write some of them.
    """
    found = []
    for store in pipeline.recorder.stores:
        try:
            copy = pipeline.recorder.tiers.read(store) if store.tier != "store" else store.read()
        except FirnlineError as error:
            copy = NewestCopy(store.tier, store.location, unreachable=error.message)
        behind = 0 if copy.unreachable else max(0, head.epoch - copy.epoch)
        found.append(
            {
                "path": copy.tier,
                "place": copy.location,
                "epoch": None if copy.unreachable or copy.record is None else copy.epoch,
                "epochs_behind": None if copy.unreachable else behind,
                "lag_seconds": _lag_seconds(pipeline, head, copy.epoch)
                if behind
                else (None if copy.unreachable else 0.0),
                "problem": copy.unreachable or copy.damaged or _ahead(copy, head) or _unwritten(copy, behind, failing),
            }
        )
    return found


def _unwritten(copy: NewestCopy, behind: int, failing: Mapping[str, Json] | None) -> str | None:
    """Return why a readable copy is behind: the reason of the last failed write."""
    reason = (failing or {}).get(copy.tier) if behind else None
    return f"{behind} behind; cannot be written: {reason}" if reason else None


def _lag_seconds(pipeline: OpenPipeline, head: Head, epoch: int) -> float | None:
    """Return the seconds since the oldest epoch after `epoch` was made; None if the ledger no longer has it."""
    made = None
    try:
        for entry in pipeline.entries(head.entry):
            if entry.epoch <= epoch:
                break
            made = entry.checkpoint.created_at
    except LedgerHoleError:
        return None
    if made is None:
        return None
    return round(max(0.0, (pipeline.clock.now() - datetime.fromisoformat(made)).total_seconds()), 3)


def _sink_row(pipeline: OpenPipeline, sink: Sink, decided: Head, failing: Json) -> dict[str, Json]:
    """Return the head of a sink; `failing` is the reason why the newest run could not write there."""
    row: dict[str, Json] = {
        "name": sink.name,
        "location": sink.uri,
        "version": None,
        "epoch": None,
        "required": sink.required,
        "parts": None,
        "epochs_pending": 0,
        "bytes_behind": None,
        "set_aside": find_away(decided.checkpoint, pipeline.options.followers).get(sink.name),
    }
    try:
        head, settled, parts = sink.load(), sink.settled_epoch(), sink.find_parts()
    except (SinkError, OSError) as error:
        return {**row, **behind_unread(pipeline, sink, decided), "error": str(error)}
    epoch = head.epoch
    row |= {"epoch": epoch, "last_known_epoch": epoch, "epochs_pending": 0 if settled is None else epoch - settled}
    row |= {"version": head.version if head.exists else None, "parts": None if parts is None else len(parts)}
    behind = max(0, decided.epoch - epoch)
    row |= {"bytes_behind": bytes_behind(pipeline, sink, epoch, decided) if behind else 0}
    return {**row, "epochs_behind": behind, "error": failing if behind else None}


def load_files(pipeline: OpenPipeline) -> Iterator[dict[str, Json]]:
    """Return every file of the pipeline: finished, in progress, set aside, late or waiting."""
    return (row for _, row in load_files_by_source(pipeline))


def load_files_by_source(pipeline: OpenPipeline) -> Iterator[tuple[str, dict[str, Json]]]:
    """Yield every file with the name of its source: two sources may read the same file."""
    head = pipeline.load()
    positions = head.checkpoint.positions if head.checkpoint else {}
    trackers = {s.name: s.track(positions.get(s.name) or s.start(None)) for s in pipeline.sources}
    commits = pipeline.deciding.commit_times(head.version, COMMITS_READ) if head.exists else {}
    rereads = _waiting_rereads(pipeline, positions)
    for name, record in pipeline.ledger_files(head.entry):
        found = trackers[name].add(record)
        if found is not None:
            asked = (name, str(found.record["path"])) in rereads
            yield name, _file_row(found, commits.get(record.get("epoch", -1)), asked=asked)
    for name, tracker in trackers.items():
        yield from ((name, _file_row(found, None, asked=False)) for found in tracker.unread())


def _waiting_rereads(pipeline: OpenPipeline, positions: Mapping[str, Json]) -> set[tuple[str, str]]:
    """Return source and path of the files that wait to be read again."""
    requests = [request for request in pipeline.requests.load() if request.kind == "reread"]
    sources = pipeline.sources
    answered = {name: sources[name].answered(p) for name, p in positions.items() if name in sources.names}
    return {(r.source, r.path) for r in requests if r.id not in answered.get(r.source, ())}


def _file_row(found: InputStatus, commit: tuple[int, str] | None, *, asked: bool) -> dict[str, Json]:
    record = found.record
    return {
        "path": record["path"],
        "size_bytes": record.get("size_bytes"),
        "create_time": record.get("create_time"),
        "discovery_time": record.get("discovery_time"),
        "processed_time": record.get("processed_time"),
        "commit_time": commit[1] if commit else None,
        "status": found.status,
        "epoch": record.get("epoch"),
        "table_version": commit[0] if commit else None,
        "records": record.get("to"),
        "reason": found.reason,
        "reread": "asked" if asked else "done" if record.get("reread") else None,
    }
