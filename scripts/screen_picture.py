"""Draws the live screen of `firnline run` as an SVG: the screen's own code, fed with the events of an invented run."""

from __future__ import annotations

import io
import re

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI

from firnline.cli.run_report import LiveDisplay, RunReporter, RunTotals, spark_start
from firnline.run.observer import EpochFacts, Observers
from firnline.sinks.base import Head
from firnline.sources.base import Backlog

WIDTH = 92
FILES, ROWS, MEGABYTES = 500, 1_250_000, 404  # of each epoch


class Clock:
    """A clock that moves only when it is told to: the picture is the same on every machine."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def screen_picture() -> str:
    """The screen some seconds into a run, as an SVG that loads nothing from elsewhere."""
    clock = Clock()
    totals = RunTotals(clock)
    console = Console(
        width=WIDTH, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor",
        highlight=False, markup=False, legacy_windows=False,
    )  # fmt: skip
    console.print("$ firnline run", style="bold")

    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    run, spark = Observers(totals, RunReporter(say, attempts=5)), spark_start(totals, say)
    run.started("9f2c41d08a7be355", Head(exists=False, version=-1))
    run.claimed(1)
    run.running(1)
    spark("starting")
    clock.seconds = 6.1
    spark("started")
    for epoch in (1, 2, 3):
        run.running(epoch)
        clock.seconds += 1.9
        run.ran(epoch, 1.9)
        run.committed(facts(epoch))
        run.backlog(Backlog((8 - epoch) * FILES, (8 - epoch) * MEGABYTES * 100_000))
    run.running(4)
    clock.seconds += 0.4
    console.print(LiveDisplay(totals, io.StringIO()).draw())
    # Without the web font: a picture in a page must not ask another host for anything.
    own_fonts = re.sub(r"\s*@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    own_fonts = own_fonts.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace")
    picture = console.export_svg(title="firnline run", code_format=own_fonts, theme=MONOKAI, unique_id="screen")
    return "\n".join(line.rstrip() for line in picture.splitlines()) + "\n"


def facts(epoch: int) -> EpochFacts:
    """An epoch of the invented run; the second one meets bad records."""
    bad = {"not-json": 3} if epoch == 2 else {}
    return EpochFacts(
        epoch=epoch, attempt="", sink="out", version=epoch + 1, files=FILES, records=ROWS, rows=ROWS - sum(bad.values()),
        bad=bad, bytes_read=MEGABYTES * 100_000, raw_bytes=MEGABYTES * 1_000_000, staged_files=4, staged_bytes=0,
        late_files=0, checkpoint_bytes=467, state_files=0, set_aside=0,
        durations_ms={"plan": 20, "run": 1850, "stage": 20, "commit": 10},
    )  # fmt: skip


if __name__ == "__main__":
    print(screen_picture(), end="")
