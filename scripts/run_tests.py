"""`make test`: run the tests without Spark, then those with it even if the first half failed; end with one summary.

The last line is `N passed, M failed`. The exit code is 1 if a test failed or one half did not finish.
Arguments go to both halves: `python scripts/run_tests.py -k rollback`. `--record` writes what was covered into
`docs/how-it-is-tested.md`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
MEMORY_FOLDER = Path("/dev/shm")
MEMORY_BYTES = 6 << 30  # what must be free for test files to lie in memory
PAGE = ROOT / "docs" / "how-it-is-tested.md"
BEGIN, END = "<!-- last proof: written by `make proof` -->", "<!-- end of last proof -->"
RECORD = "--record"
NO_TESTS = 5  # pytest's exit code when no test was chosen


@dataclass
class Half:
    """How one half of the tests ended."""

    name: str
    passed: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)
    covered: dict[str, Counter[str]] = field(default_factory=dict)  # by test module
    seconds: float = 0.0

    @property
    def line(self) -> str:
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return f"{self.name}: {self.passed} passed, {len(self.failures)} failed{skipped} in {self.seconds:.0f} s"


def main(arguments: list[str]) -> int:
    is_recorded = RECORD in arguments
    arguments = [word for word in arguments if word != RECORD]
    subprocess.run(["bash", str(ROOT / "scripts" / "ensure_servers.sh")], check=True)
    workers = os.environ.get("FIRNLINE_TEST_WORKERS") or str(2 * max(2, os.cpu_count() or 2))
    halves = {
        "without Spark": ["-m", "not spark", "-n", workers, "--dist", "worksteal"],
        # A JVM that starts leaves cores idle: two modules at once. Tests of a module share its session. They begin in
        # the order in which they are collected, by name: the longest one, the benchmarks, nearly first, and not last.
        "with Spark": [
            "-m", "spark", "-n", os.environ.get("FIRNLINE_TEST_WORKERS") or "2", "--dist", "loadfile",
            "--no-loadscope-reorder",
        ],
    }  # fmt: skip
    # Once for all workers, of which each would compile what has changed since the installation.
    subprocess.run([sys.executable, "-m", "firnline", "prepare"], check=False, stdout=subprocess.DEVNULL)
    with work_folder() as folder:
        ends = [run_half(name, [*chosen, *arguments], folder) for name, chosen in halves.items()]
    if is_recorded:
        PAGE.write_text(with_record(PAGE.read_text(), record(ends)))
    return summarise(ends)


def run_half(name: str, arguments: list[str], folder: Path) -> Half:
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    chosen = [] if any(Path(word.split("::")[0]).exists() for word in arguments) else [str(ROOT / "tests")]
    options = ["-q", "--basetemp", str(folder / "pytest"), "--junitxml", str(report)]
    began = time.monotonic()
    environment = {**os.environ, "TMPDIR": str(folder)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process compiles all modules and all tests
    process = subprocess.Popen([sys.executable, "-m", "pytest", *chosen, *options, *arguments], env=environment)
    code = _wait(process)
    half = Half(name, seconds=time.monotonic() - began)
    if report.exists():
        _read(report, half)
    if code not in (0, 1, NO_TESTS) or (code == 1 and not half.failures):
        half.failures.append(f"the tests {name} ended with exit code {code}")
    if code == NO_TESTS and not arguments[2:]:
        half.failures.append(f"no tests {name} were found")
    return half


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for pytest; after Ctrl-C it ends by itself and reports what it has run so far."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        return 128 + signal.SIGINT


def _read(report: Path, half: Half) -> None:
    """Count the tests of pytest's report; a test that passed and whose teardown failed counts as failed."""
    outcomes: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        if outcomes.get(name) != "failed":
            outcomes[name] = outcome
        for fact in case.iter("property"):
            if fact.get("name") == "proof":
                half.covered.setdefault(name.split("::")[0], Counter()).update(json.loads(fact.get("value", "{}")))
    half.failures += sorted(name for name, outcome in outcomes.items() if outcome == "failed")
    half.passed = sum(outcome == "passed" for outcome in outcomes.values())
    half.skipped = sum(outcome == "skipped" for outcome in outcomes.values())


def summarise(halves: list[Half]) -> int:
    print("\n== all tests ==")
    for half in halves:
        print(half.line)
    covered = sum((counts for half in halves for counts in half.covered.values()), Counter())
    if covered:
        print("covered: " + ", ".join(f"{count:,} {what}" for what, count in sorted(covered.items())))
    failures = [name for half in halves for name in half.failures]
    for name in failures:
        print(f"FAILED {name}")
    print(f"{sum(half.passed for half in halves)} passed, {len(failures)} failed", flush=True)
    return 1 if failures else 0


def record(halves: list[Half]) -> str:
    """Return what a run has covered, as Markdown."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    passed, failed = sum(half.passed for half in halves), sum(len(half.failures) for half in halves)
    skipped, seconds = sum(half.skipped for half in halves), sum(half.seconds for half in halves)
    facts = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit.stdout.strip() or "unknown",
        "bounds": "long" if os.environ.get("FIRNLINE_PROOF") else "short",
        "seed": os.environ.get("FIRNLINE_SEED", "the default of every test"),
        "cores": os.cpu_count(),
        "minutes": round(seconds / 60),
        "tests": f"{passed} passed, {failed} failed, {skipped} skipped",
    }
    lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items()), ""]
    lines += ["| test module | covered |", "|---|---|"]
    modules = {module: counts for half in halves for module, counts in half.covered.items()}
    for module, counts in sorted(modules.items()):
        lines.append(f"| `{module}` | {', '.join(f'{n:,} {what}' for what, n in sorted(counts.items()))} |")
    failures = [name for half in halves for name in half.failures]
    return "\n".join([*lines, "", *(f"Failed: `{name}`" for name in failures)]).rstrip() + "\n"


def with_record(page: str, record: str) -> str:
    """Return the page with this record between its two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} lacks the marks {BEGIN!r} and {END!r}")
    return f"{before}{begin}\n{record}{end}{after}"


@contextmanager
def work_folder() -> Iterator[Path]:
    """Make a folder for test files: in memory if there is room, where fsync is free; else where TMPDIR points."""
    root = MEMORY_FOLDER if _has_memory() else None
    folder = Path(tempfile.mkdtemp(prefix="firnline-tests-", dir=root))
    folder.chmod(0o755)  # PostgreSQL runs as another user
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _has_memory() -> bool:
    try:
        facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(facts["MemAvailable"].split()[0]) * 1024
        return min(available, shutil.disk_usage(MEMORY_FOLDER).free) >= MEMORY_BYTES
    except (OSError, KeyError):
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
