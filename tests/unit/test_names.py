"""The names on disk and in a log: a change of one is a change of a durable format."""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest

from firnline import names
from firnline.types import EntryRef

SOURCE = Path(names.__file__).parent
P, A, U = "orders", "0123456789abcdef", "f" * 32
EPOCH = "00000000000000000007"
LONG_KAFKA = "firnline." + "--" * 100 + "." + "-u" * 100
LAST = EntryRef(7, f"{EPOCH}-{A}.json", "ab" * 32)

CONSTANTS = {
    "HOME": "_firnline",
    "PLANS_FOLDER": "plans",
    "PINS": "_firnline/pins",
    "JOURNAL": "journal",
    "JOURNAL_COLUMN": "_firnline_journal",
    "LEDGER": "ledger",
    "QUARANTINE": "quarantine",
    "HEADERS_KEY": "firnline.headers",
    "REDIS_PREFIX": "firnline:",
    "GENERATION_LEAP": 1_000_000,
    "STATE": "state",
    "STAGING": "_staging",
    "PENDING": "_staging/pending",
    "SET_ASIDE": "_staging/rejected",
    "COMMITTER": "_staging/committer.json",
    "DELTA_LOG": "_delta_log",
    "INFO_KEY": "firnline",
    "COUNTS_KEY": "firnlineActions",
    "WIDENED": "widened",
    "TOPOLOGIES": "_topology",
    "TOPOLOGY_BEGUN": "begun.json",
    "TOPOLOGY_PIN": "topology-",
    "TOPOLOGY_SAVEPOINT": "topology.json",
    "BLIZZARD": "blizzard:",
    "COMMITTER_TXN": "firnline-committer",
    "COMMITTED": "COMMITTED",
    "ABORTED": "ABORTED",
    "METADATA": "metadata.json",
    "SAVEPOINT": "savepoint.json",
    "SAVED_DATA": "data",
    "SAVED_FOLDERS": ("ledger/", "quarantine/", "data/", "state/"),
}

CALLS: dict[str, list[tuple[tuple[Any, ...], Any]]] = {
    "pipeline_folder": [((P,), "_firnline/orders")],
    "ledger_folder": [((P,), "_firnline/orders/ledger")],
    "quarantine_folder": [((P,), "_firnline/orders/quarantine")],
    "state_folder": [((P,), "_firnline/orders/state")],
    "tier_state_folder": [((P,), "state/orders")],
    "changes_folder": [((P,), "_firnline/orders/changes")],
    "outbox_folder": [((P,), "_firnline/orders/outbox")],
    "rebuilt_key": [(("x/a.arrow",), "x/a.arrow.again")],
    "rerun_folder": [((P,), "_firnline/orders/rerun")],
    "fill_folder": [((P,), "_firnline/orders/rerun/fills"), ((P, "copy"), "_firnline/orders/rerun/fills/copy")],
    "fill_name": [((7,), f"{EPOCH}.json")],
    "fill_epoch": [((f"x/{EPOCH}.json",), 7), (("x/7.json",), None)],
    "spool_folder": [((P, "shop"), "_firnline/orders/spool/shop")],
    "spool_name": [((7, "a" * 16, "b" * 16, "c" * 16), f"{7:016d}-{'a' * 16}-{'b' * 16}-{'c' * 16}.spool")],
    "spool_parts": [
        ((f"{7:016d}-{'a' * 16}-{'b' * 16}-{'c' * 16}.spool",), (7, "a" * 16, "b" * 16, "c" * 16)),
        ((".0.tmp",), None),
    ],
    "chunk_name": [(("00000002-0a0b0c0d", 7, "c" * 16), f"00000002-0a0b0c0d-{7:08d}-{'c' * 16}.chunk")],
    "chunk_parts": [
        ((f"00000002-0a0b0c0d-{7:08d}-{'c' * 16}.chunk",), ("00000002-0a0b0c0d", 7, "c" * 16)),
        ((".0.tmp",), None),
    ],
    "dead_letters_folder": [
        ((P,), "_firnline/orders/dead-letters"),
        ((P, "copy"), "_firnline/orders/dead-letters/copy"),
    ],
    "dead_letter_name": [((7, A, 42), f"{EPOCH}-{A}-000000000042.json")],
    "dead_letter_attempt": [((f"x/{EPOCH}-{A}-000000000042.json",), (7, A)), ((f"x/{EPOCH}-{A}.json",), None)],
    "progress_folder": [((P, "copy"), "_firnline/orders/progress/copy")],
    "progress_name": [((42,), "00000000000000000042.json")],
    "progress_number": [(("x/00000000000000000042.json",), 42), (("x/.0.tmp",), None)],
    "answered_name": [((7, A), f"{EPOCH}-{A}.answered.json")],
    "answered_attempt": [((f"x/{EPOCH}-{A}.answered.json",), (7, A)), ((f"x/{EPOCH}-{A}.answers.json",), None)],
    "answers_name": [((7, A), f"{EPOCH}-{A}.answers.json")],
    "answers_attempt": [((f"x/{EPOCH}-{A}.answers.json",), (7, A)), ((f"x/{EPOCH}-{A}-000000000042.json",), None)],
    "outbox_name": [((A, U), f"{A}-{U}.arrow")],
    "exchange_folder": [((P,), "_firnline/orders/exchange")],
    "epoch_exchange_folder": [((P, A), f"_firnline/orders/exchange/{A}")],
    "commit_exchange_folder": [((P, A), f"_firnline/orders/exchange/{A}-commit")],
    "runs_folder": [((P,), "_firnline/orders/runs")],
    "requests_folder": [((P,), "_firnline/orders/requests")],
    "wanted_folder": [((P,), "_firnline/orders/wanted")],
    "wish_name": [((42,), "00000000000000000042.json")],
    "wish_number": [(("x/00000000000000000042.json",), 42), (("x/.0.tmp",), None)],
    "trend_folder": [((P,), "_firnline/orders/trend")],
    "trend_name": [((date(2026, 1, 2),), "2026-01-02.json")],
    "trend_day": [(("x/2026-01-02.json",), date(2026, 1, 2)), (("x/2026-13-02.json",), None), (("x/.0.tmp",), None)],
    "launches_folder": [((P,), "_firnline/orders/launches")],
    "launch_id": [((7, 2), "000000000007-000002")],
    "launch_numbers": [(("000000000007-000002",), (7, 2))],
    "launch_name": [(("000000000007-000002", "exit"), "000000000007-000002.exit.json")],
    "launch_parts": [
        (("x/000000000007-000002.begun.json",), ("000000000007-000002", "begun")),
        (("x/000000000007-000002.log",), None),
    ],
    "plan_name": [((A, "plan"), f"{A}.plan.json")],
    "plan_of": [
        ((f"/state/plans/{A}.receipt.json",), A),
        ((f"{A}.plan.json",), A),
        (("tokens.json",), None),
    ],
    "launch_log": [(("000000000007-000002",), "000000000007-000002.log")],
    "sweeps_folder": [((), "_firnline/sweeps"), ((P,), "_firnline/orders/sweeps")],
    "ledger_owner": [
        ((f"_firnline/orders/ledger/{EPOCH}-{A}.json",), P),
        (("_firnline/orders/runs/x.json",), None),
        (("_firnline/pins/ledger/x/y.json",), None),
        (("other/orders/ledger/x.json",), None),
    ],
    "entry_name": [((7, A), f"{EPOCH}-{A}.json")],
    "entry_attempt": [((f"{EPOCH}-{A}.json",), A)],
    "fold_name": [((LAST,), f"fold-{EPOCH}-abababababababab.json.zst")],
    "is_fold": [((names.fold_name(LAST),), True), ((LAST.name,), False)],
    "ledger_order": [((names.fold_name(LAST),), f"{EPOCH}-abababababababab.json.zst"), ((LAST.name,), LAST.name)],
    "ledger_epoch": [((names.fold_name(LAST),), 7), ((LAST.name,), 7), (("README",), None)],
    "entry_epoch": [((names.fold_name(LAST),), None), ((LAST.name,), 7), (("README",), None)],
    "data_name": [((A, U), f"{A}-{U}.parquet")],
    "quarantine_name": [((7, A, U), f"{EPOCH}-{A}-{U}.parquet")],
    "quarantine_epoch": [((f"{EPOCH}-{A}-{U}.parquet",), 7)],
    "parked_name": [((A, U), f"parked-{A}-{U}.arrow")],
    "exchange_name": [((U,), f"{U}.arrow")],
    "run_name": [((datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), A), f"20260102T030405-{A}.json")],
    "request_name": [((A,), f"{A}.json")],
    "join_request": [((7, "shop", "public.orders"), "join-7-3a2b3428f8b3d6a4")],
    "resync_request": [(("lake", 41, "shop", "public.orders"), "resync-41-bc0975ed28786907")],
    "probe_key": [((P, A), f"_firnline/orders/probe-{A}")],
    "clock_key": [((U,), f"_firnline/.{U}.tmp")],
    "temporary_name": [((U,), f".{U}.tmp")],
    "temporary_beside": [(("a/b.arrow", U), f"a/b.arrow.{U}.tmp")],
    "savepoint_pin": [((A,), f"_firnline/pins/savepoint-{A}.json")],
    "pinned_savepoint": [((f"_firnline/pins/savepoint-{A}.json",), A), ((names.restore_pin(A),), None)],
    "restore_pin": [((A,), f"_firnline/pins/restore-{A}.json")],
    "topology_pin": [((A,), f"_firnline/pins/topology-{A}.json")],
    "asked_snapshots": [((P,), "_firnline/orders/snapshots")],
    "asked_snapshot": [((P, A), f"_firnline/orders/snapshots/{A}.json")],
    "topic_channels": [((P,), "_firnline/orders/channels")],
    "topic_channels_key": [((P, "lake", "/home"), "_firnline/orders/channels/e27ab77ef4192c4d.json")],
    "holds_folder": [((P,), "_firnline/orders/holds")],
    "hold_key": [((P, A), f"_firnline/orders/holds/{A}.json")],
    "topology_snapshots": [(("lake",), "_topology/lake/snapshots")],
    "snapshot_order": [(("lake", A), f"_topology/lake/snapshots/{A}/order.json")],
    "snapshot_outcome": [(("lake", A), f"_topology/lake/snapshots/{A}/outcome.json")],
    "snapshot_dropped": [(("lake", A), f"_topology/lake/snapshots/{A}/dropped.json")],
    "snapshot_of": [
        (("lake", f"_topology/lake/snapshots/{A}/order.json"), A),
        (("lake", f"_topology/lake/snapshots/{A}/outcome.json"), None),
    ],
    "topology_copies": [(("lake",), "_topology/lake/copies")],
    "topology_copy": [(("lake", "4f2a"), "_topology/lake/copies/4f2a")],
    "topology_restores": [(("lake",), "_topology/lake/restores")],
    "restore_file": [(("lake", A, "decision"), f"_topology/lake/restores/{A}/decision.json")],
    "restore_of": [
        (("lake", f"_topology/lake/restores/{A}/order.json"), A),
        (("lake", f"_topology/lake/restores/{A}/decision.json"), None),
    ],
    "compaction_pin": [((A,), f"_firnline/pins/compaction-{A}.json")],
    "state_pins": [((P,), "_firnline/pins/stands-on-orders-")],
    "state_pin": [((P, 7), f"_firnline/pins/stands-on-orders-{EPOCH}.json")],
    "sweep_name": [((7, 255), f"{EPOCH}-00000000000000ff")],
    "intent_name": [((f"{EPOCH}-{A}",), f"{EPOCH}-{A}.json")],
    "signature_name": [((f"{EPOCH}-{A}", A), f"{EPOCH}-{A}.by-{A}.json")],
    "is_intent": [((f"{EPOCH}-{A}.json",), True), ((f"{EPOCH}-{A}.by-{A}.json",), False)],
    "log_cleanup": [((A,), f"_firnline/sweeps/log-{A}.json")],
    "is_log_cleanup": [((f"log-{A}.json",), True), ((f"{EPOCH}-{A}.json",), False)],
    "is_signature": [((f"{EPOCH}-{A}.json",), False), ((f"{EPOCH}-{A}.by-{A}.json",), True)],
    "pending_unit": [(("u1",), "_staging/pending/u1.meta.json")],
    "set_aside_unit": [(("u1",), "_staging/rejected/u1.meta.json")],
    "unit_of": [
        (("_staging/pending/u1.meta.json",), "u1"),
        (("u1.json",), None),
        (("_staging/pending/.u1.meta.json",), None),
    ],
    "committer_probe_key": [((A,), f"_staging/probe-{A}")],
    "commit_name": [((7,), f"{EPOCH}.json")],
    "commit_key": [((7,), f"_delta_log/{EPOCH}.json")],
    "kafka_checkpoint_topic": [
        ((P, "topic"), "firnline.orders.topic"),
        (("a-b", "c_d.e"), "firnline.a--b.c-ud-de"),
        (("-" * 100, "_" * 100), f"firnline.{hashlib.sha256(LONG_KAFKA.encode()).hexdigest()}"),
    ],
    "kafka_transactional_id": [((P, "topic", 2), "firnline.orders.topic.2")],
    "epoch_txn": [((P,), "firnline:orders")],
    "generation_txn": [((P,), "firnline-gen:orders")],
    "generation_owner": [(("firnline-gen:orders",), P), (("firnline:orders",), None)],
    "entry_txn": [((P,), "firnline-entry:orders")],
    "tip_txn": [((P,), "firnline-tip:orders")],
    "tip_epoch_txn": [((P,), "firnline-tip-epoch:orders")],
    "unit_txn": [(("u1",), "firnline-unit:u1")],
    "committed_unit": [(("firnline-unit:u1",), "u1"), (("firnline:orders",), None)],
    "sweep_txn": [((), "firnline-sweep"), ((P,), "firnline-sweep:orders")],
    "sweep_token_txn": [((), "firnline-sweep-token"), ((P,), "firnline-sweep-token:orders")],
    "txn_owner": [
        (("firnline:a:b",), "a:b"),
        *(((make(P),), P) for make in (names.generation_txn, names.entry_txn, names.tip_txn, names.tip_epoch_txn)),
        *(((make(P),), P) for make in (names.sweep_txn, names.sweep_token_txn)),
        (("firnline-unit:u1",), None),
        (("firnline-sweep",), None),
    ],
    "is_service_txn": [
        (("firnline-committer",), True),
        (("firnline-unit:u1",), True),
        (("firnline-sweep",), True),
        (("firnline-sweep-token",), True),
        (("firnline-sweep:orders",), False),
        (("firnline:orders",), False),
    ],
    "snapshot_id": [((7, A), f"{EPOCH}-{A}")],
    "committed_key": [((f"{EPOCH}-{A}",), f"{EPOCH}-{A}/COMMITTED")],
    "aborted_key": [((f"{EPOCH}-{A}",), f"{EPOCH}-{A}/ABORTED")],
    "metadata_key": [((f"{EPOCH}-{A}",), f"{EPOCH}-{A}/metadata.json")],
    "shard_folder": [((f"{EPOCH}-{A}", 3), f"{EPOCH}-{A}/shard_3")],
    "segment_key": [(("x/shard_0/a", U), f"x/shard_0/a.{U}.arrow")],
    "timers_key": [(("x/shard_0/a", U), f"x/shard_0/a.{U}.timers.arrow")],
    "saved_ledger_key": [((LAST.name,), f"ledger/{EPOCH}-{A}.json")],
    "saved_quarantine_key": [(("q.parquet",), "quarantine/q.parquet")],
    "saved_data_key": [(("main", "d=1/a.parquet"), "data/main/d=1/a.parquet")],
    "saved_range_name": [((3, 41), "00003-00000000000000000041.parquet")],
    "saved_state_key": [((f"{EPOCH}-{A}/COMMITTED",), f"state/{EPOCH}-{A}/COMMITTED")],
    "socket_name": [((P, "/tables/orders"), "16b0a088af0d784c.sock")],
    "user_folder": [((1000,), "firnline-1000")],
    "cache_folder": [((1000,), "firnline-state-1000")],
}

SPELLED = ("_firnline/", "_staging/", "_delta_log", "firnline:", "firnline-gen", "firnline-entry", "firnline-unit")

PATTERNS = {
    "OWN_FILE": ([f"{A}-{U}.parquet"], [f"{A}.parquet", f"x/{A}-{U}.parquet"]),
    "CHANGE_FILE": ([f"_firnline/orders/changes/{A}-{U}.parquet"], ["_firnline/orders/changes/a/b.parquet"]),
    "QUARANTINE_FILE": ([f"_firnline/orders/quarantine/{EPOCH}-{A}-{U}.parquet"], ["_firnline/orders/quarantine/a"]),
    "EXCHANGE_FILE": ([f"_firnline/orders/exchange/{A}/{U}.arrow"], [f"_firnline/orders/changes/{U}"]),
    "TEMPORARY_FILE": ([f".{U}.tmp", "a.parquet#1"], ["a.parquet", ".x.tmp"]),
    "SNAPSHOT_ID": ([f"{EPOCH}-{A}"], ["7-a", f"{EPOCH}-"]),
    "SNAPSHOT_FILE": ([f"{EPOCH}-{A}/shard_0/a.{U}.arrow"], [f"{EPOCH}-{A}/shard_00/a", f"{EPOCH}-{A}/COMMITTED"]),
}


def public() -> dict[str, Any]:
    return {name: value for name, value in vars(names).items() if not name.startswith("_") and _is_own(name, value)}


def _is_own(name: str, value: Any) -> bool:
    return name.isupper() or (inspect.isfunction(value) and value.__module__ == names.__name__)


def test_every_name_is_pinned() -> None:
    assert sorted(public()) == sorted([*CONSTANTS, *CALLS, *PATTERNS])


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants(name: str) -> None:
    assert getattr(names, name) == CONSTANTS[name]


@pytest.mark.parametrize("name", CALLS)
def test_functions(name: str) -> None:
    for arguments, expected in CALLS[name]:
        assert getattr(names, name)(*arguments) == expected


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name: str) -> None:
    pattern, (fits, others) = getattr(names, name), PATTERNS[name]
    assert all(pattern.fullmatch(text) for text in fits)
    assert not any(pattern.fullmatch(text) for text in others)


def test_no_two_sinks_share_a_checkpoint_topic() -> None:
    """Nor do two that a Kafka cluster takes for one, because they differ in `.` and `_` alone."""
    parts = ["a", "b", "a-b", "a_b", "a.b", "a--b", "a-ub", "-a", "a-", "a.", "d", "u"]
    topics = {names.kafka_checkpoint_topic(pipeline, sink).replace("_", ".") for pipeline in parts for sink in parts}
    assert len(topics) == len(parts) ** 2


def test_functions_have_docstrings() -> None:
    assert all(getattr(names, name).__doc__ for name in CALLS)


def test_no_other_module_spells_a_name() -> None:
    """Folders of a table and transaction ids are literals in `names.py` alone; prose may mention them."""
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {text!r}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path != SOURCE / "names.py"
        for line, text in _literals(ast.parse(path.read_text()))
        if text.strip() and len(text.split()) == 1 and any(name in text for name in SPELLED)
    ]
    assert found == []


def _literals(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
