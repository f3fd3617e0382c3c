"""How a run begins if it does not resume: with a fresh start, or from a savepoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from firnline.clock import monotonic
from firnline.errors import ConfigError

if TYPE_CHECKING:
    from firnline.options import PipelineOptions

REPORT_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Beginning:
    """The options of the command line about the beginning; by default the run resumes."""

    fresh_after: int | None = None
    truncate: bool = False
    from_savepoint: str | None = None
    accept: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuse options that exclude each other."""
        if self.truncate and self.fresh_after is None:
            raise ConfigError("--truncate is a part of --fresh-after", hint="firnline run --fresh-after 41 --truncate")
        if self.from_savepoint is not None and self.fresh_after is not None:
            raise ConfigError("--from-savepoint and --fresh-after exclude each other", hint="Ask for one of them.")
        if self.accept and self.from_savepoint is None:
            raise ConfigError("--accept is a part of --from-savepoint", hint="firnline run --from-savepoint PATH")


def begin(
    options: PipelineOptions,
    beginning: Beginning,
    run: str,
    say: Callable[[str], None],
    *,
    moved: tuple[str, str] | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Restore a savepoint or make a fresh start before the run, unless an earlier attempt already did.

    Args:
        moved: The old and the new root of the source's files.
        stopping: Whether the run was asked to stop; copying files then ends with KeyboardInterrupt.
    """
    if beginning.from_savepoint is not None:
        _restore(options, beginning, run, say, moved, stopping)
    if beginning.fresh_after is None:
        return
    from firnline.history.edits.fresh_start import start_over
    from firnline.run.open_pipeline import open_pipeline

    done = start_over(open_pipeline(options), beginning.fresh_after, run, truncate=beginning.truncate)
    rows = "rows removed" if done.truncated else "rows stay"
    if done.already:
        say(f"started over after epoch {done.after_epoch} already, as epoch {done.epoch}; going on")
    else:
        say(f"started over after epoch {done.after_epoch} as epoch {done.epoch}; {rows}")


def _restore(
    options: PipelineOptions,
    beginning: Beginning,
    run: str,
    say: Callable[[str], None],
    moved: tuple[str, str] | None,
    stopping: Callable[[], bool],
) -> None:
    from firnline.cli.output import count_text, size_text
    from firnline.history.edits.restore import restore_savepoint
    from firnline.run.open_pipeline import open_pipeline

    assert beginning.from_savepoint is not None
    done = restore_savepoint(
        open_pipeline(options, moved=moved),
        beginning.from_savepoint,
        run,
        dict(options.deciding.storage_options),
        accept=beginning.accept,
        tell=say,
        progress=CopyProgress(say),
        stopping=stopping,
    )
    if not done.already:
        contents = f"{count_text(done.rows, 'row')} in {count_text(done.files, 'file')}"
        copied = f", {size_text(done.copied_bytes)} copied" if done.copied_bytes else ""
        say(f"restored savepoint {done.savepoint} of epoch {done.to_epoch} as epoch {done.epoch}: {contents}{copied}")


class CopyProgress:
    """Reports every few seconds how much is copied; a copy that was reported once is reported at its end."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = monotonic) -> None:
        self._say = say
        self._clock = clock
        self._reported_at = clock()
        self._reported: set[str] = set()

    def __call__(self, what: str, done: int, total: int) -> None:
        from firnline.cli.output import size_text

        is_due = self._clock() - self._reported_at >= REPORT_SECONDS
        if is_due or (done >= total and what in self._reported):
            self._reported_at = self._clock()
            self._reported.add(what)
            self._say(f"{what}: {size_text(done)} of {size_text(total)}")
