"""A durable call without a fault point before and after it fails here: what is not tried with a kill is not proven."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import firnline
from firnline.faults import POINTS

ROOT = Path(firnline.__file__).parent
# Commands and test helpers write files for people; nothing of a pipeline's truth depends on them.
OUTSIDE = ("cli", "testing", "service", "spec", "ndjson")

DURABLE = {
    "os.replace", "os.rename", "os.link", "os.unlink", "os.remove", "os.fsync", "os.mkdir", "os.makedirs",
    "shutil.rmtree", "shutil.move", "obstore.put", "obstore.delete", "obstore.open_writer", "obstore.rename",
    "obstore.copy", "DeltaTable.create", "write_deltalake", "os.pwrite", "os.write", "os.ftruncate",
}  # fmt: skip
DURABLE_METHODS = {
    "create_write_transaction", "add_columns", "create_checkpoint", "cleanup_metadata", "write_bytes", "write_text",
    "vacuum", "restore", "compact", "commit_transaction", "create_topics", "create_partitions",
}  # fmt: skip
# Functions that are only called between the points of another one.
BETWEEN_POINTS = {
    "storage.py:fsync_path": "a part of put, of a staged file's close and of a commit's sync",
    "storage.py:_link_new": "called by LocalStorage._put between storage.put.before and .after",
    "storage.py:_DurableFile.__init__": "opened by LocalStorage.create, between the points of a stager",
    "storage.py:_DurableFile.close": "closed by a stager, before stage.file.after or outbox.write.after",
    "storage.py:ObjectStorage.create": "called by stagers, between stage.file or outbox.write .before and .after",
    "stores/file.py:FileStore._write_temporary": "called by _link_new; a temporary file says nothing",
    "stores/file.py:FileStore._hint": "a hint, written after store.put.after: a kill there leaves it stale",
    "stores/file.py:FileStore._sweep": "temporary files of killed writers say nothing",
    "stores/file.py:_sign": "who holds the lock, for people: nothing is decided from it",
    "stores/file.py:FileStore._prove_lock": "a file that is made to try the lock says nothing",
    "state/home.py:_fetch": "a temporary file says nothing; _repair renames it between state.repair.before and .after",
    "state/home.py:_load_cached": "a cache holds copies that are verified on every opening",
    "state/home.py:_cache_path": "an empty folder says nothing",
    "state/home.py:_shrink_cache": "a cache holds copies only",
    "jobs/epoch_job.py:EpochJobs._sweep": "rows on their way, which nothing names any more",
    "jobs/class_archive.py:make_archive": "classes of Spark say nothing; the JVM checks what it loads",
    "exchange.py:open_volatile": "rows on their way: lost with the epoch's attempt, which runs again",
    "run/opening.py:Opening.claim": "OperatorStates.restore reads; what it repairs has points of its own",
    "jobs/heartbeat.py:pinging": "a ping says nothing about the data",
    "jobs/heartbeat.py:pinging.beat": "a ping says nothing about the data",
    "sinks/delta/table.py:Table.create.write": "called by Table._write between delta.create.before and .after",
    "sinks/delta/table.py:Table.add_columns.write": "called by Table._write between delta.evolve.before and .after",
    "sinks/delta/table.py:Table.transact.write": "called by Table._write between the points that its caller names",
    "sinks/delta/table.py:Table.restore.write": "called by Table._write between the points that its caller names",
    "sinks/delta/table.py:Table.replace_all.write": "called by Table._write between the points that its caller names",
    "sinks/delta/history_edit.py:apply_effect": "calls Table.restore, which is looked at itself",
}


def functions(tree: ast.AST, above: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{above}.{node.name}" if above else node.name
            if not isinstance(node, ast.ClassDef):
                yield name, node
            yield from functions(node, name)
        else:
            yield from functions(node, above)


def own_calls(function: ast.AST) -> Iterator[ast.Call]:
    """Calls of a function itself, not of functions defined in it."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(node, ast.Call):
            yield node
        yield from own_calls(node)


def name_of(call: ast.Call) -> str:
    parts = []
    node: ast.expr = call.func
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        parts.append(node.id)
    return ".".join(reversed(parts))


def is_durable(call: ast.Call) -> bool:
    name = name_of(call)
    if name == "open":
        mode = call.args[1].value if len(call.args) > 1 and isinstance(call.args[1], ast.Constant) else "r"
        return any(letter in str(mode) for letter in "wxa+")
    if name.startswith("self._table."):
        return False  # our own Table, whose methods are looked at themselves
    return name in DURABLE or name.rsplit(".", 1)[-1] in DURABLE_METHODS


def durable_functions() -> Iterator[tuple[str, list[str], list[str]]]:
    for path in sorted(ROOT.rglob("*.py")):
        module = path.relative_to(ROOT)
        if module.parts[0] in OUTSIDE:
            continue
        for name, function in functions(ast.parse(path.read_text())):
            calls = list(own_calls(function))
            durable = [name_of(call) for call in calls if is_durable(call)]
            points = [ast.unparse(call.args[0]) for call in calls if name_of(call) == "fault_point"]
            if durable:
                yield f"{module}:{name}", durable, points


def test_every_durable_call_stands_between_points() -> None:
    bare = {
        place: calls
        for place, calls, points in durable_functions()
        if place not in BETWEEN_POINTS
        and not (any(".before" in p for p in points) and any(".after" in p for p in points))
    }
    assert bare == {}


def test_the_exceptions_still_exist() -> None:
    assert {place for place, _, _ in durable_functions()} >= set(BETWEEN_POINTS)


def test_every_point_is_set_somewhere() -> None:
    """And no point is set that the list, which the crash tests go through, does not know."""
    found = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and name_of(node) == "fault_point":
                found |= {str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)}
    assert found <= set(POINTS)
    # Table._write and NumberedFiles.append set the points that they are given.
    calls = ("create", "claim", "evolve", "commit", "compact", "jump", "sweep")
    given = (*(f"delta.{call}" for call in calls), "http.progress", "parts.head")
    named_by_callers = {f"{call}.{side}" for call in given for side in ("before", "after")}
    assert set(POINTS) - named_by_callers <= found
