"""Every name that Firnline writes: folders and files below a table, transaction ids in a Delta log, sockets.

Keys are relative to the root of their table, state home or savepoint. All of these names are durable: a change of one
is a change of the format. The files inside a checkpoint store are named by that store alone (`firnline.stores`).
"""

from __future__ import annotations

import hashlib
import re
from datetime import date, datetime

from firnline.types import EntryRef


def _numbered(number: int) -> str:
    return f"{number:020d}.json"


def _number_of(key: str) -> int | None:
    """The number of such a file, by its key; None for any other file."""
    found = re.fullmatch(r"([0-9]{20})\.json", key.rpartition("/")[2])
    return int(found.group(1)) if found else None


# -- folders of a table -------------------------------------------------------------------------------

HOME = "_firnline"  # Delta's readers and its vacuum ignore folders that start with an underscore
PINS = f"{HOME}/pins"  # files that sweeps must keep, whichever pipeline asked for it
JOURNAL = "journal"  # the name under which a pipeline's journal is one of its sinks; no sink of a spec has it
GENERATION_LEAP = 1_000_000  # a recovered journal begins with a multiple: no run of the lost one has such a generation
JOURNAL_COLUMN = "_firnline_journal"  # its only column, which never has a value: no table is without a column
LEDGER, QUARANTINE, STATE = "ledger", "quarantine", "state"  # folders of a pipeline; a savepoint has them too
HEADERS_KEY = "firnline.headers"  # in the metadata of a file of the quarantine: the first records of CSV files
REDIS_PREFIX = "firnline:"  # of keys in Redis that hold heads and owners; no row is written there


def pipeline_folder(pipeline: str) -> str:
    """The folder of everything that a table keeps for one pipeline."""
    return f"{HOME}/{pipeline}"


def ledger_folder(pipeline: str) -> str:
    """The folder of the ledger, in the deciding table."""
    return f"{HOME}/{pipeline}/{LEDGER}"


def quarantine_folder(pipeline: str) -> str:
    """The folder of records that could not be read."""
    return f"{HOME}/{pipeline}/{QUARANTINE}"


def state_folder(pipeline: str) -> str:
    """The folder of operator state, where the pipeline has no local tier."""
    return f"{HOME}/{pipeline}/{STATE}"


def tier_state_folder(pipeline: str) -> str:
    """The folder of operator state in a local or remote tier."""
    return f"state/{pipeline}"


def changes_folder(pipeline: str) -> str:
    """The folder of change rows that wait for the commit of an upsert."""
    return f"{HOME}/{pipeline}/changes"


def outbox_folder(pipeline: str) -> str:
    """The folder of files that wait for an optional sink; one folder for each attempt."""
    return f"{HOME}/{pipeline}/outbox"


def rebuilt_key(key: str) -> str:
    """The key of the file that stands for a damaged file of the outbox: the same rows, made again."""
    return f"{key}.again"


def rerun_folder(pipeline: str) -> str:
    """The folder of rows that are made again from the input; one folder for each attempt."""
    return f"{HOME}/{pipeline}/rerun"


def fill_folder(pipeline: str, sink: str = "") -> str:
    """The folder of lists of rows for a sink that is being filled; of all sinks, if none is given."""
    folder = f"{rerun_folder(pipeline)}/fills"
    return f"{folder}/{sink}" if sink else folder


def fill_name(epoch: int) -> str:
    """The file name of the list of rows of one epoch for a sink that is being filled."""
    return _numbered(epoch)


def fill_epoch(key: str) -> int | None:
    """The epoch of such a list, by its key; None for any other file."""
    return _number_of(key)


def spool_folder(pipeline: str, source: str) -> str:
    """The folder of what a database sent to a source."""
    return f"{HOME}/{pipeline}/spool/{source}"


def spool_name(number: int, begin: str, end: str, checksum: str) -> str:
    """The file name of a spool file: its place in the chain, digests of the marks where it begins and ends."""
    return f"{number:016d}-{begin}-{end}-{checksum}.spool"


def spool_parts(name: str) -> tuple[int, str, str, str] | None:
    """Number, digests of both marks, and checksum of a spool file; None for any other file."""
    found = re.fullmatch(r"([0-9]{16})-([0-9a-f]{16})-([0-9a-f]{16})-([0-9a-f]{16})\.spool", name)
    return (int(found.group(1)), found.group(2), found.group(3), found.group(4)) if found else None


def chunk_name(snapshot: str, number: int, checksum: str) -> str:
    """The file name of a chunk of a table: the id of its snapshot, and its number there."""
    return f"{snapshot}-{number:08d}-{checksum}.chunk"


def chunk_parts(name: str) -> tuple[str, int, str] | None:
    """Snapshot, number and checksum of a chunk; None for any other file."""
    found = re.fullmatch(r"([0-9]{8}-[0-9a-f]{8})-([0-9]{8})-([0-9a-f]{16})\.chunk", name)
    return (found.group(1), int(found.group(2)), found.group(3)) if found else None


def dead_letters_folder(pipeline: str, sink: str = "") -> str:
    """The folder of rows that a sink could not hold; of all sinks, if none is given."""
    folder = f"{HOME}/{pipeline}/dead-letters"
    return f"{folder}/{sink}" if sink else folder


def progress_folder(pipeline: str, sink: str) -> str:
    """The folder in which a sink keeps its head that has no place for one in its target."""
    return f"{HOME}/{pipeline}/progress/{sink}"


def progress_name(number: int) -> str:
    """The file name of a sink's progress; the highest number counts."""
    return _numbered(number)


def progress_number(key: str) -> int | None:
    """The number of a file of a sink's progress; None for any other file."""
    return _number_of(key)


def exchange_folder(pipeline: str) -> str:
    """The folder of rows that one job of an epoch hands to the next."""
    return f"{HOME}/{pipeline}/exchange"


def epoch_exchange_folder(pipeline: str, attempt: str) -> str:
    """The part of the exchange folder that one attempt of an epoch uses."""
    return f"{exchange_folder(pipeline)}/{attempt}"


def commit_exchange_folder(pipeline: str, attempt: str) -> str:
    """The part of the exchange folder that the tasks of a commit use."""
    return f"{exchange_folder(pipeline)}/{attempt}-commit"


def runs_folder(pipeline: str) -> str:
    """The folder of the records of runs."""
    return f"{HOME}/{pipeline}/runs"


def wanted_folder(pipeline: str) -> str:
    """The folder of what operators want of a pipeline."""
    return f"{HOME}/{pipeline}/wanted"


def wish_name(number: int) -> str:
    """The file name of what an operator wants; the highest number counts."""
    return _numbered(number)


def wish_number(key: str) -> int | None:
    """The number of such a file; None for any other file."""
    return _number_of(key)


def trend_folder(pipeline: str) -> str:
    """The folder of durations, rows and lag of the last days."""
    return f"{HOME}/{pipeline}/trend"


def trend_name(day: date) -> str:
    """The file name of the trend of a day, in UTC."""
    return f"{day.isoformat()}.json"


def trend_day(key: str) -> date | None:
    """The day of a file of the trend; None for any other file."""
    found = re.fullmatch(r"([0-9]{4}-[0-9]{2}-[0-9]{2})\.json", key.rpartition("/")[2])
    try:
        return date.fromisoformat(found.group(1)) if found else None
    except ValueError:
        return None


def launches_folder(pipeline: str) -> str:
    """The folder of runs that the service started: who started them, their output, and how they ended."""
    return f"{HOME}/{pipeline}/launches"


_LAUNCH = re.compile(r"([0-9]{12}-[0-9]{6})\.(begun|process|exit|beat)\.json")


def launch_id(wish: int, attempt: int) -> str:
    """The id of a launch: the wish that it obeys, and which try it is. Ids sort by wish and try, whatever the clock."""
    return f"{wish:012d}-{attempt:06d}"


def launch_numbers(launch: str) -> tuple[int, int]:
    """The wish and the try of a launch, from its id."""
    wish, _, attempt = launch.partition("-")
    return int(wish), int(attempt)


def launch_name(launch: str, part: str) -> str:
    """The file name of one part of the record of a launch: begun, process, exit or beat."""
    return f"{launch}.{part}.json"


def launch_parts(key: str) -> tuple[str, str] | None:
    """The launch and the part of its record that a file holds; None for any other file."""
    found = _LAUNCH.fullmatch(key.rpartition("/")[2])
    return (found.group(1), found.group(2)) if found else None


def launch_log(launch: str) -> str:
    """The file name of the output of a launch."""
    return f"{launch}.log"


PLANS_FOLDER = "plans"  # in the folder of the service
_PLAN = re.compile(r"([0-9a-f]{16})\.(plan|confirmed|receipt)\.json")


def plan_name(plan: str, part: str) -> str:
    """The file name of a plan, of its confirmation, or of its receipt once it was performed."""
    return f"{plan}.{part}.json"


def plan_of(key: str) -> str | None:
    """The id of the plan that a file belongs to; None for any other file."""
    found = _PLAN.fullmatch(key.rpartition("/")[2])
    return found.group(1) if found else None


def requests_folder(pipeline: str) -> str:
    """The folder of requests that wait for the next plan."""
    return f"{HOME}/{pipeline}/requests"


def sweeps_folder(pipeline: str = "") -> str:
    """The folder of sweep intents: of a table, or of the state of one pipeline."""
    return f"{HOME}/{pipeline}/sweeps" if pipeline else f"{HOME}/sweeps"


def ledger_owner(key: str) -> str | None:
    """The pipeline whose ledger contains this file; None for any other file."""
    parts = key.split("/")
    return parts[1] if len(parts) == 4 and parts[0] == HOME and parts[2] == LEDGER else None


# -- files of a table ---------------------------------------------------------------------------------

_FOLD = "fold-"
_SAVEPOINT_PIN = re.compile(rf"{PINS}/savepoint-([0-9a-f]{{16}})\.json")
OWN_FILE = re.compile(r"[0-9a-f]{16}-[^/]*\.parquet")  # a data file, by its last part; starts with the attempt
CHANGE_FILE = re.compile(rf"{HOME}/(?P<pipeline>[^/]+)/changes/[^/]+\.parquet")
QUARANTINE_FILE = re.compile(rf"{HOME}/(?P<pipeline>[^/]+)/{QUARANTINE}/(?P<epoch>[0-9]{{20}})-[^/]+\.parquet")
EXCHANGE_FILE = re.compile(rf"{HOME}/(?P<pipeline>[^/]+)/exchange/.+")
TEMPORARY_FILE = re.compile(r"\.[0-9a-f]{32}\.tmp|.+\.parquet#[0-9]+")  # ours, and unfinished uploads of delta-rs


def entry_name(epoch: int, attempt: str) -> str:
    """The file name of a ledger entry."""
    return f"{epoch:020d}-{attempt}.json"


def entry_attempt(name: str) -> str:
    """The attempt that wrote a ledger entry, by its file name."""
    return name.removesuffix(".json").partition("-")[2]


def fold_name(last: EntryRef) -> str:
    """The file name of the fold whose newest entry is `last`."""
    return f"{_FOLD}{last.epoch:020d}-{last.checksum[:16]}.json.zst"


def is_fold(name: str) -> bool:
    """Whether a file of the ledger is a fold."""
    return name.startswith(_FOLD)


def ledger_order(name: str) -> str:
    """The key that sorts entries and folds of a ledger by epoch."""
    return name.removeprefix(_FOLD)


def ledger_epoch(name: str) -> int | None:
    """The epoch of an entry, or the newest epoch of a fold; None for any other file."""
    number = ledger_order(name)[:20]
    return int(number) if number.isdigit() else None


def entry_epoch(name: str) -> int | None:
    """The epoch of an entry; None for a fold and any other file."""
    return None if is_fold(name) else ledger_epoch(name)


def data_name(attempt: str, unique: str) -> str:
    """The file name of a data file that an attempt stages."""
    return f"{attempt}-{unique}.parquet"


def quarantine_name(epoch: int, attempt: str, unique: str) -> str:
    """The file name of quarantined records of an epoch."""
    return f"{epoch:020d}-{attempt}-{unique}.parquet"


def quarantine_epoch(name: str) -> int:
    """The epoch of a file of quarantined records."""
    return int(name.partition("-")[0])


def outbox_name(attempt: str, unique: str) -> str:
    """The file name of rows that wait in the outbox for delivery."""
    return f"{attempt}-{unique}.arrow"


def parked_name(attempt: str, unique: str) -> str:
    """The file name of rows that wait in the outbox for the stager of their sink."""
    return f"parked-{attempt}-{unique}.arrow"


_ANSWERED = re.compile(r"([0-9]{20})-([0-9a-f]{16})\.answered\.json")
_ANSWERS = re.compile(r"([0-9]{20})-([0-9a-f]{16})\.answers\.json")
_DEAD_LETTER = re.compile(r"([0-9]{20})-([0-9a-f]{16})-[0-9]{12}\.json")


def dead_letter_name(epoch: int, attempt: str, first_row: int) -> str:
    """The file name of dead letters of an epoch."""
    return f"{epoch:020d}-{attempt}-{first_row:012d}.json"


def dead_letter_attempt(key: str) -> tuple[int, str] | None:
    """The epoch and attempt of a file of dead letters; None for any other file."""
    match = _DEAD_LETTER.fullmatch(key.rsplit("/", 1)[-1])
    return (int(match[1]), match[2]) if match else None


def answers_name(epoch: int, attempt: str) -> str:
    """The file name of the list of dead letters that an epoch answers."""
    return f"{epoch:020d}-{attempt}.answers.json"


def answers_attempt(key: str) -> tuple[int, str] | None:
    """The epoch and attempt of a list of answered dead letters; None for any other file."""
    match = _ANSWERS.fullmatch(key.rsplit("/", 1)[-1])
    return (int(match[1]), match[2]) if match else None


def answered_name(epoch: int, attempt: str) -> str:
    """The file name of the list of dead letters that a decided epoch has answered."""
    return f"{epoch:020d}-{attempt}.answered.json"


def answered_attempt(key: str) -> tuple[int, str] | None:
    """The epoch and attempt of such a list of a decided epoch; None for any other file."""
    match = _ANSWERED.fullmatch(key.rsplit("/", 1)[-1])
    return (int(match[1]), match[2]) if match else None


def exchange_name(unique: str) -> str:
    """The file name of rows on their way to another job."""
    return f"{unique}.arrow"


def run_name(started_at: datetime, run: str) -> str:
    """The file name of the record of a run; the names sort by start time."""
    return f"{started_at.strftime('%Y%m%dT%H%M%S')}-{run}.json"


def request_name(unique: str) -> str:
    """The file name of a request."""
    return f"{unique}.json"


def resync_request(sink: str, epoch: int, source: str, table: str) -> str:
    """The name of the request to read a table again for a sink that goes on after an epoch."""
    digest = hashlib.sha256("\0".join([sink, source, table]).encode()).hexdigest()[:16]
    return f"resync-{epoch}-{digest}"


def join_request(epoch: int, source: str, table: str) -> str:
    """The name of the request to read a table for sinks that begin after an epoch: the same for all of them."""
    table_hash = hashlib.sha256(f"{source}\0{table}".encode()).hexdigest()[:16]
    return f"join-{epoch}-{table_hash}"


def probe_key(pipeline: str, run: str) -> str:
    """The key that a run writes to find out whether the storage refuses to overwrite."""
    return f"{HOME}/{pipeline}/probe-{run}"


def clock_key(unique: str) -> str:
    """The key that a sweep writes to read the storage's clock; it is a temporary file, so a sweep deletes it."""
    return f"{HOME}/{temporary_name(unique)}"


def temporary_name(unique: str) -> str:
    """The file name of a file that is still being written."""
    return f".{unique}.tmp"


def temporary_beside(path: str, unique: str) -> str:
    """The path of a file that is still being written and will be renamed to `path`."""
    return f"{path}.{unique}.tmp"


def savepoint_pin(savepoint: str) -> str:
    """The key of the pin of a savepoint."""
    return f"{PINS}/savepoint-{savepoint}.json"


def pinned_savepoint(key: str) -> str | None:
    """The savepoint that a pin belongs to, by its key; None for any other file."""
    match = _SAVEPOINT_PIN.fullmatch(key)
    return match[1] if match else None


def restore_pin(attempt: str) -> str:
    """The key of the pin of a restore or a rollback in progress."""
    return f"{PINS}/restore-{attempt}.json"


def compaction_pin(attempt: str) -> str:
    """The key of the pin of a compaction in progress."""
    return f"{PINS}/compaction-{attempt}.json"


TOPOLOGY_PIN = "topology-"  # what the names of all pins of topologies' snapshots start with


def topology_pin(snapshot: str) -> str:
    """The key of the pin of a topology's snapshot."""
    return f"{PINS}/{TOPOLOGY_PIN}{snapshot}.json"


def state_pins(pipeline: str) -> str:
    """What the keys of all pins start with that name the state a run of this pipeline was restored from."""
    return f"{PINS}/stands-on-{pipeline}-"


def state_pin(pipeline: str, generation: int) -> str:
    """The key of the pin that names the state a run of this generation was restored from."""
    return f"{state_pins(pipeline)}{generation:020d}.json"


_INTENT = re.compile(r"[0-9]{20}-[0-9a-f]{16}\.json")
_SIGNATURE = re.compile(r"[0-9]{20}-[0-9a-f]{16}\.by-[0-9a-f]{16}\.json")


def sweep_name(number: int, token: int) -> str:
    """The name of a sweep, in its records and in the log."""
    return f"{number:020d}-{token:016x}"


def intent_name(sweep: str) -> str:
    """The file name of the intent of a sweep."""
    return f"{sweep}.json"


def signature_name(sweep: str, signature: str) -> str:
    """The file name by which a process signs that it may delete the files of a sweep."""
    return f"{sweep}.by-{signature}.json"


def is_intent(name: str) -> bool:
    """Whether a file of the sweeps folder is an intent."""
    return _INTENT.fullmatch(name) is not None


def is_signature(name: str) -> bool:
    """Whether a file of the sweeps folder is a signature."""
    return _SIGNATURE.fullmatch(name) is not None


_LOG_CLEANUP = re.compile(r"log-[0-9a-f]{16}\.json")


def log_cleanup(token: str) -> str:
    """The key by which a process declares that it cleans up the table's log."""
    return f"{sweeps_folder()}/log-{token}.json"


def is_log_cleanup(name: str) -> bool:
    """Whether a file of the sweeps folder declares a clean-up of the log."""
    return _LOG_CLEANUP.fullmatch(name) is not None


# -- staging of two-stage tables ----------------------------------------------------------------------

STAGING = "_staging"
PENDING = f"{STAGING}/pending"  # units that wait for the committer
SET_ASIDE = f"{STAGING}/rejected"  # units that the committer set aside, with the reason
COMMITTER = f"{STAGING}/committer.json"  # heartbeat of the active committer
_UNIT = ".meta.json"


def pending_unit(unit: str) -> str:
    """The key of a pending unit."""
    return f"{PENDING}/{unit}{_UNIT}"


def set_aside_unit(unit: str) -> str:
    """The key of a unit that was set aside."""
    return f"{SET_ASIDE}/{unit}{_UNIT}"


def unit_of(key: str) -> str | None:
    """The name of the unit in this file; None for other files and for units that are still being written."""
    name = key.rsplit("/", 1)[-1]
    return name.removesuffix(_UNIT) if name.endswith(_UNIT) and not name.startswith(".") else None


def committer_probe_key(run: str) -> str:
    """The key that a committer writes to find out whether the storage refuses to overwrite."""
    return f"{STAGING}/probe-{run}"


# -- the Delta log ------------------------------------------------------------------------------------

DELTA_LOG = "_delta_log"
INFO_KEY = "firnline"  # of commitInfo: the checkpoint that the commit makes true
WIDENED = "widened"  # of that value: columns that got a wider type; files with dataChange false hold the old rows
COUNTS_KEY = "firnlineActions"  # of commitInfo: the number of actions, which shows a torn commit
BLIZZARD = "blizzard:"  # the start of a transaction id that carries the interchange format

COMMITTER_TXN = "firnline-committer"
_GENERATION, _UNIT_TXN = "firnline-gen:", "firnline-unit:"
_OF_PIPELINE = re.compile(r"firnline(?:-gen|-entry|-tip|-tip-epoch|-sweep|-sweep-token)?:(.+)", re.DOTALL)
_OF_NOBODY = re.compile(rf"{COMMITTER_TXN}|{_UNIT_TXN}.*|firnline-sweep(?:-token)?", re.DOTALL)


def commit_name(version: int) -> str:
    """The file name of a commit of the log."""
    return f"{version:020d}.json"


def commit_key(version: int) -> str:
    """The key of a commit of the log."""
    return f"{DELTA_LOG}/{commit_name(version)}"


def epoch_txn(pipeline: str) -> str:
    """The transaction id whose version is the newest epoch of a pipeline."""
    return f"firnline:{pipeline}"


def generation_txn(pipeline: str) -> str:
    """The transaction id whose version is the newest generation of a pipeline."""
    return f"{_GENERATION}{pipeline}"


def generation_owner(app_id: str) -> str | None:
    """The pipeline whose generation this transaction id carries; None for any other id."""
    return app_id.removeprefix(_GENERATION) if app_id.startswith(_GENERATION) else None


def entry_txn(pipeline: str) -> str:
    """The transaction id whose version is the first 63 bits of the ledger entry's checksum."""
    return f"firnline-entry:{pipeline}"


def tip_txn(pipeline: str) -> str:
    """The transaction id whose version names the unit that the next one must follow, after a discard."""
    return f"firnline-tip:{pipeline}"


def tip_epoch_txn(pipeline: str) -> str:
    """The transaction id whose version is the epoch of that unit."""
    return f"firnline-tip-epoch:{pipeline}"


def unit_txn(unit: str) -> str:
    """The transaction id that says that a unit is committed."""
    return f"{_UNIT_TXN}{unit}"


def committed_unit(app_id: str) -> str | None:
    """The unit that a transaction id says is committed; None for any other id."""
    return app_id.removeprefix(_UNIT_TXN) if app_id.startswith(_UNIT_TXN) else None


def sweep_txn(pipeline: str = "") -> str:
    """The transaction id whose version is the number of the newest sweep: of a table, or of a pipeline's state."""
    return f"firnline-sweep:{pipeline}" if pipeline else "firnline-sweep"


def sweep_token_txn(pipeline: str = "") -> str:
    """The transaction id whose version is the token of the newest sweep."""
    return f"firnline-sweep-token:{pipeline}" if pipeline else "firnline-sweep-token"


def txn_owner(app_id: str) -> str | None:
    """The pipeline that a transaction id of ours belongs to; None for any other id."""
    match = _OF_PIPELINE.fullmatch(app_id)
    return match[1] if match else None


def is_service_txn(app_id: str) -> bool:
    """Whether a committer or a sweep of the table wrote this transaction id: they own no rows."""
    return _OF_NOBODY.fullmatch(app_id) is not None


# -- snapshots of state -------------------------------------------------------------------------------

COMMITTED = "COMMITTED"
ABORTED = "ABORTED"
METADATA = "metadata.json"
SNAPSHOT_ID = re.compile(r"([0-9]{20})-([a-z0-9][a-z0-9-]{0,63})")
SNAPSHOT_FILE = re.compile(r"([0-9]{20}-[a-z0-9][a-z0-9-]{0,63})/shard_(0|[1-9][0-9]{0,5})/[A-Za-z0-9][A-Za-z0-9_.-]*")


def snapshot_id(epoch: int, attempt: str) -> str:
    """The id of the snapshot that an attempt makes after an epoch; its folder has the same name."""
    return f"{epoch:020d}-{attempt}"


def committed_key(snapshot: str) -> str:
    """The key of the file that makes a snapshot complete."""
    return f"{snapshot}/{COMMITTED}"


def aborted_key(snapshot: str) -> str:
    """The key of the file that says that a snapshot was given up."""
    return f"{snapshot}/{ABORTED}"


def metadata_key(snapshot: str) -> str:
    """The key of the metadata of a snapshot."""
    return f"{snapshot}/{METADATA}"


def shard_folder(snapshot: str, shard: int) -> str:
    """The folder of the files of one shard of a snapshot."""
    return f"{snapshot}/shard_{shard}"


def segment_key(prefix: str, unique: str) -> str:
    """The key of a segment of state."""
    return f"{prefix}.{unique}.arrow"


def timers_key(prefix: str, unique: str) -> str:
    """The key of a file of timers."""
    return f"{prefix}.{unique}.timers.arrow"


# -- savepoints ---------------------------------------------------------------------------------------

SAVEPOINT = "savepoint.json"  # written last: it makes the savepoint complete
SAVED_DATA = "data"
SAVED_FOLDERS = (f"{LEDGER}/", f"{QUARANTINE}/", f"{SAVED_DATA}/", f"{STATE}/")


def saved_ledger_key(name: str) -> str:
    """The key of a file of the ledger in a savepoint."""
    return f"{LEDGER}/{name}"


def saved_quarantine_key(name: str) -> str:
    """The key of a file of quarantined records in a savepoint."""
    return f"{QUARANTINE}/{name}"


def saved_data_key(sink: str, path: str) -> str:
    """The key of the copy of a data file in a savepoint."""
    return f"{SAVED_DATA}/{sink}/{path}"


def saved_range_name(partition: int, offset: int) -> str:
    """The name of a file with records of a topic, from an offset on: in the folder of a sink in a savepoint."""
    return f"{partition:05d}-{offset:020d}.parquet"


def saved_state_key(name: str) -> str:
    """The key of the copy of a file of state in a savepoint."""
    return f"{STATE}/{name}"


# -- on the machine -----------------------------------------------------------------------------------


def socket_name(pipeline: str, table: str) -> str:
    """The file name of the control socket of a pipeline on this machine."""
    return hashlib.sha256(f"{pipeline}\0{table}".encode()).hexdigest()[:16] + ".sock"


def user_folder(user: int) -> str:
    """The folder of a user's control sockets, below the folder for temporary files."""
    return f"firnline-{user}"


def cache_folder(user: int) -> str:
    """The folder of a user's cached files of state, below the folder for temporary files."""
    return f"firnline-state-{user}"


# -- names in a Kafka cluster -------------------------------------------------------------------------

_KAFKA_ESCAPES = {"-": "--", "_": "-u", ".": "-d"}
_KAFKA_LONGEST = 249 - 8  # leaves room for the number of a lane


def kafka_checkpoint_topic(pipeline: str, sink: str) -> str:
    """The topic of a Kafka sink's checkpoints. Names are escaped, so that no other pipeline and sink has it.

    It has no underscore, because a cluster takes `a.b` and `a_b` for the same name.
    """
    escaped = ["".join(_KAFKA_ESCAPES.get(letter, letter) for letter in name) for name in (pipeline, sink)]
    name = f"firnline.{escaped[0]}.{escaped[1]}"
    if len(name) > _KAFKA_LONGEST:  # one dot: no name above is like it
        return f"firnline.{hashlib.sha256(name.encode()).hexdigest()}"
    return name


def kafka_transactional_id(pipeline: str, sink: str, lane: int) -> str:
    """The transactional id of one lane of a Kafka sink."""
    return f"{kafka_checkpoint_topic(pipeline, sink)}.{lane}"


# -- a topology's home ----------------------------------------------------------------------------------

TOPOLOGIES = "_topology"  # in the home of a topology


TOPOLOGY_SAVEPOINT = "topology.json"  # in the folder of a topology's savepoint: written last, it makes it complete
TOPOLOGY_BEGUN = "begun.json"  # there, too: written first; what lies below the folders of members is the savepoint's


def topology_snapshots(topology: str) -> str:
    """The folder of a topology's snapshots."""
    return f"{TOPOLOGIES}/{topology}/snapshots"


def snapshot_order(topology: str, snapshot: str) -> str:
    """The key of the order of a snapshot."""
    return f"{topology_snapshots(topology)}/{snapshot}/order.json"


def snapshot_outcome(topology: str, snapshot: str) -> str:
    """The key of the outcome of a snapshot, which is created once."""
    return f"{topology_snapshots(topology)}/{snapshot}/outcome.json"


def snapshot_dropped(topology: str, snapshot: str) -> str:
    """The key of the record that a snapshot is no longer kept."""
    return f"{topology_snapshots(topology)}/{snapshot}/dropped.json"


def topology_copies(topology: str) -> str:
    """The folder of the copies of a topology's snapshots, in its home."""
    return f"{TOPOLOGIES}/{topology}/copies"


def topology_copy(topology: str, snapshot: str) -> str:
    """The folder of the copy of a snapshot: a savepoint of the topology."""
    return f"{topology_copies(topology)}/{snapshot}"


def topology_restores(topology: str) -> str:
    """The folder of a topology's restores."""
    return f"{TOPOLOGIES}/{topology}/restores"


def restore_file(topology: str, restore: str, part: str) -> str:
    """The key of a part of a restore: its order, its decision or its outcome. The last two are created once."""
    return f"{topology_restores(topology)}/{restore}/{part}.json"


def restore_of(topology: str, key: str) -> str | None:
    """The restore whose order has this key; None for any other file."""
    found = re.fullmatch(rf"{re.escape(topology_restores(topology))}/([^/]+)/order\.json", key)
    return found[1] if found else None


def holds_folder(pipeline: str) -> str:
    """The folder of holds of topologies' restores, in the home of a member."""
    return f"{pipeline_folder(pipeline)}/holds"


def hold_key(pipeline: str, restore: str) -> str:
    """The key of the hold of one restore."""
    return f"{holds_folder(pipeline)}/{restore}.json"


def snapshot_of(topology: str, key: str) -> str | None:
    """The snapshot whose order has this key; None for any other file."""
    found = re.fullmatch(rf"{re.escape(topology_snapshots(topology))}/([^/]+)/order\.json", key)
    return found[1] if found else None


def topic_channels(pipeline: str) -> str:
    """The folder of the Kafka channels that a member reads, one file per topology, in the home of the member."""
    return f"{pipeline_folder(pipeline)}/channels"


def topic_channels_key(pipeline: str, topology: str, home: str) -> str:
    """The key of the Kafka channels of one topology."""
    digest = hashlib.sha256(f"{topology}\n{home}".encode()).hexdigest()
    return f"{topic_channels(pipeline)}/{digest[:16]}.json"


def asked_snapshots(pipeline: str) -> str:
    """The folder of requests to record a topology's snapshot, in the home of a member."""
    return f"{pipeline_folder(pipeline)}/snapshots"


def asked_snapshot(pipeline: str, snapshot: str) -> str:
    """The key of a request to record a topology's snapshot."""
    return f"{asked_snapshots(pipeline)}/{snapshot}.json"
